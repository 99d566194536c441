"""What ranks write into one folder: each its own file, replaced as a whole when it ends. Read later, or by the last to end."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpumem_magic.files.loaded import load
from gpumem_magic.files.report_file import MAX_FILE_BYTES
from gpumem_magic.report.model import ReportData
from gpumem_magic.report.ranks import GONE, RUNNING, STATES
from gpumem_magic.report.schema import report_from_dict, report_to_dict
from gpumem_magic.report.side_by_side import OfRank, state_of
from gpumem_magic.snapshot.whole_file import printable, replace_file

FORM = 1
_NAME = re.compile(r"rank-(\d{1,9})\.json")
_FORM_KEY = "gpumem_rank"


@dataclass(frozen=True)
class RankFile:
    """One rank's file. groups: of ranks, that it made, with what its program calls them. after: ranks that had come to a bad end
    when this one failed or was ended."""

    rank: int
    world: int
    state: str
    host: str = ""
    process: int = 0
    where: str = ""
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    report: ReportData | None = None
    after: tuple[int, ...] = ()

    @property
    def known(self) -> OfRank:
        """For a report: one that began and is no more is gone."""
        state = self.state
        if state == RUNNING and self.host == socket.gethostname() and not is_alive(self.process):
            state = GONE
        return OfRank(self.rank, state, self.report, self.where, self.after)


def is_alive(process: int) -> bool:
    """Whether a process of this computer runs (a dead one that nobody has asked after does not)."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        # One that has ended and that its parent has not asked after still has a number.
        state = Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:1]
    except OSError:
        return True
    return state not in (["Z"], ["X"])


def write(folder: Path, number: int, file: RankFile) -> None:
    """number: of the file, the rank's where it is known."""
    data: dict[str, Any] = {
        _FORM_KEY: FORM,
        "rank": file.rank,
        "world": file.world,
        "state": file.state,
        "host": file.host,
        "process": file.process,
        "where": file.where,
        "groups": [[name, list(ranks)] for name, ranks in file.groups],
        "after": list(file.after),
        "report": None if file.report is None else report_to_dict(file.report),
    }
    content = json.dumps(data, allow_nan=False).encode()
    replace_file(folder / f"rank-{number}.json", lambda into: into.write(content))


def read(folder: Path) -> list[RankFile]:
    """All ranks' files in a folder, by rank. Raises OSError or ValueError, in one line."""
    paths = sorted(path for path in Path(folder).iterdir() if _NAME.fullmatch(path.name))
    return sorted(map(_read_one, paths), key=lambda one: one.rank)


def _read_one(path: Path) -> RankFile:
    with open(path, "rb") as opened:
        content = opened.read(MAX_FILE_BYTES + 1)
    name = printable(path)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{name} is larger than any rank's report")
    try:
        data = json.loads(content.decode())
        if isinstance(data, dict) and "schema" in data and _FORM_KEY not in data:
            return _saved(path, report_from_dict(data))
        if not isinstance(data, dict) or data.get(_FORM_KEY) != FORM:
            raise ValueError(f"no rank's report of form {FORM}")
        if data["state"] not in STATES:
            raise ValueError(f"the key 'state' is {data['state']!r:.40}")
        report = None if data["report"] is None else report_from_dict(data["report"])
        return RankFile(
            _number(data, "rank"),
            _number(data, "world"),
            data["state"],
            str(data["host"])[:200],
            _number(data, "process"),
            str(data["where"])[:500],
            tuple((str(words), _numbers(ranks)) for words, ranks in data["groups"]),
            report,
            _numbers(data.get("after", [])),
        )
    except KeyError as error:
        raise ValueError(f"{name}: no rank's report: the key {error} is missing") from None
    except RecursionError:
        raise ValueError(f"{name}: no rank's report: it is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def _saved(path: Path, report: ReportData) -> RankFile:
    """A report that a worker saved under a rank's name: of a task that Dask or Ray ran, say."""
    found = _NAME.fullmatch(path.name)
    rank = int(found[1]) if found is not None else 0
    return RankFile(rank, rank + 1, state_of(report), report=report)


def _number(data: dict[str, Any], key: str) -> int:
    value = data[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
        raise ValueError(f"no rank's report: the key '{key}' is {value!r:.40}")
    return value


def _numbers(values: Sequence[Any]) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError("no rank's report: ranks that are no numbers")
    return tuple(values)


def read_snapshots(folder: Path) -> list[RankFile]:
    """PyTorch's snapshots in a folder, one for each rank: by the last number in their names, else in the order of these."""
    paths = sorted(path for path in Path(folder).iterdir() if path.name.endswith((".pickle", ".pickle.gz", ".pkl")))
    numbers = [re.findall(r"\d+", path.name.partition(".")[0]) for path in paths]
    ranks = [int(found[-1][:9]) if found else -1 for found in numbers]
    if len(set(ranks)) < len(ranks) or min(ranks, default=0) < 0:
        ranks = list(range(len(paths)))
    world = max(ranks, default=-1) + 1
    found = []
    for rank, path in sorted(zip(ranks, paths, strict=True)):
        report = load(path)
        found.append(RankFile(rank, world, state_of(report), report=report))
    return found
