"""What the reports of several ranks say together: numbers and strings only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DONE, FAILED, OUT_OF_MEMORY, ENDED, GONE, RUNNING = "done", "failed", "out_of_memory", "ended", "gone", "running"
# In the order in which a reader wants to know of them.
STATES = (OUT_OF_MEMORY, FAILED, GONE, ENDED, RUNNING, DONE)


@dataclass(frozen=True)
class RankRow:
    """One rank's peak, in bytes. state: done, failed, out_of_memory, ended (by a signal or a time limit), gone (without a word)
    or running. like: the lowest rank that it is alike, None for that one itself; measured: whether it ran, and is not just taken
    to be alike. categories: of its peak, those that have bytes. where: the statement of the peak, or of what ended it. said: the
    rank's answer; differs: what it has more and less than the first rank listed, and why, "" where that is nothing."""

    rank: int
    state: str = field(metadata={"one_of": STATES})
    like: int | None
    measured: bool
    peak_allocated: int | None
    peak_reserved: int | None
    device_used: int | None
    categories: Mapping[str, int]
    where: str
    said: str
    differs: str


@dataclass(frozen=True)
class Ranks:
    """All ranks of a program, the worst first. virtual: each ran alone. imbalance: by how much the highest peak is above the mean
    of all, as a fraction; lowest, mean and highest: of the peaks, in bytes, None where no rank told its own."""

    world: int
    virtual: bool
    answer: str
    rows: tuple[RankRow, ...]
    lowest: int | None
    mean: int | None
    highest: int | None
    imbalance: float | None
