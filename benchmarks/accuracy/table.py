"""The published table: one row is one figure of one run. It is read where it lies and never copied."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

DEFAULT = Path(__file__).parents[2].parent / "shared" / "data" / "published_measurements.csv"

# Every metric of the table belongs to one of these; what is not named here is skipped with a reason.
GROUPS = {
    "memory_allocated": "allocated",
    "max_memory_allocated": "allocated",
    "memory_allocated(small pool)": "allocated",
    "peak_allocated(approx)": "allocated, approximate",
    "memory_reserved": "reserved",
    "max_memory_reserved": "reserved",
    "segment_total(large pool)": "reserved",
    "peak_reserved_per_gpu": "reserved",
    "nvml_used": "nvidia-smi",
}


@dataclass(frozen=True)
class Row:
    """One line of the table as written; `number` counts from 2, as an editor shows the line."""

    number: int
    source: str
    gpu: str
    torch_version: str
    model: str
    how_to_build: str
    dtype: str
    batch: str
    seq_or_image: str
    optimizer: str
    extras: str
    metric: str
    value_mib: float
    resolution_mib: float
    """The step of the printed figure: 0.01 for 12.25."""

    @property
    def group(self) -> str | None:
        return GROUPS.get(self.metric)


def read(path: Path) -> list[Row]:
    """The rows of the table. Raises OSError where it can't be read, ValueError where it isn't the table."""
    texts = [field.name for field in fields(Row) if field.name not in ("number", "value_mib", "resolution_mib")]
    rows = []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = {*texts, "value_mib"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"{path}: not the table of published runs, it has no column {', '.join(sorted(missing))}")
        for number, line in enumerate(reader, 2):
            value = line["value_mib"].strip()
            decimals = len(value.partition(".")[2].rstrip("0"))
            rows.append(Row(number, *(line[name] for name in texts), float(value), 10.0**-decimals))  # type: ignore[arg-type]
    return rows


def select(rows: Sequence[Row], wanted: str) -> list[Row]:
    """The rows in whose source, model, metric or GPU the text occurs, in any case."""
    text = wanted.casefold()
    return [
        row for row in rows if any(text in part.casefold() for part in (row.source, row.model, row.metric, row.gpu))
    ]
