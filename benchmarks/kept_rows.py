"""Results that the repository keeps and the documentation shows: a CSV file of one row for each program.

What ran again takes the place of its former row; all other rows stay as they were, with the day on which they ran.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file; none where there is no such file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def update(path: Path, rows: Iterable[Mapping[str, str]], key: Sequence[str]) -> None:
    """Puts the rows into the file, by their columns `key`: in the place of those that it has, or else at its end.

    Raises ValueError for a row of other columns than the file's.
    """
    known = {tuple(row[name] for name in key): row for row in read(path)}
    columns = list(next(iter(known.values()), {}))
    for row in rows:
        columns = columns or list(row)
        if list(row) != columns:
            raise ValueError(f"{path.name} has the columns {', '.join(columns)}; a row has {', '.join(row)}")
        known[tuple(row[name] for name in key)] = dict(row)
    written = path.with_name(f"{path.name}.new")
    with written.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(known.values())
    os.replace(written, path)
