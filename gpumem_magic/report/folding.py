"""Which iterations of a long loop stay in a report: the first and last three, the highest peak and the largest growth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpumem_magic.report.model import Folded

AT_EACH_END = 3


@dataclass(frozen=True)
class LoopIteration:
    """One iteration of a loop. peak: the highest allocated bytes in it; growth: allocated at its end less at its start."""

    peak: int
    growth: int


def shown_iterations(iterations: Sequence[LoopIteration]) -> list[int]:
    """The indices to keep, in order. All of them where leaving out would save fewer than two."""
    count = len(iterations)
    shown = {*range(min(AT_EACH_END, count)), *range(max(0, count - AT_EACH_END), count)}
    if count:
        shown.add(max(range(count), key=lambda number: iterations[number].peak))
        shown.add(max(range(count), key=lambda number: iterations[number].growth))
    return sorted(shown) if count - len(shown) >= 2 else list(range(count))


@dataclass(frozen=True)
class LoopRow:
    """A row as folding sees it. key: any; loops and iteration: the lines and counters of the loops around it, outermost first."""

    key: int
    loops: tuple[int, ...]
    iteration: tuple[int, ...]
    peak: int
    before: int
    after: int


def fold_rows(rows: Sequence[LoopRow]) -> tuple[list[int], list[Folded]]:
    """The keys of the rows that stay, in order, and what was left out, one entry per loop (all its runs together).

    Whole iterations stay or go, so that a loop's statements can be read together; loops inside a kept iteration are folded
    in their turn.
    """
    totals: dict[int, list[int]] = {}
    shown = _fold(rows, 0, totals)
    return shown, folds_of(totals)


def folds_of(totals: Mapping[int, Sequence[int]]) -> list[Folded]:
    """totals: line -> iterations in all, and those that stay."""
    return [Folded(line, total, left) for line, (total, left) in totals.items() if left < total]


def _fold(rows: Sequence[LoopRow], depth: int, totals: dict[int, list[int]]) -> list[int]:
    shown: list[int] = []
    for run in _grouped(rows, lambda last, row: _continues(last, row, depth)):
        if len(run[0].loops) <= depth:
            shown += [row.key for row in run]
            continue
        iterations = _grouped(run, lambda last, row: last.iteration[depth] == row.iteration[depth])
        chosen = shown_iterations(
            [LoopIteration(max(row.peak for row in inner), inner[-1].after - inner[0].before) for inner in iterations]
        )
        total = totals.setdefault(run[0].loops[depth], [0, 0])
        total[0] += len(iterations)
        total[1] += len(chosen)
        for number in chosen:
            shown += _fold(iterations[number], depth + 1, totals)
    return shown


def _grouped(rows: Iterable[LoopRow], belongs: Callable[[LoopRow, LoopRow], bool]) -> list[list[LoopRow]]:
    """Consecutive rows of which each belongs to the one before."""
    groups: list[list[LoopRow]] = []
    for row in rows:
        if groups and belongs(groups[-1][-1], row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _continues(last: LoopRow, row: LoopRow, depth: int) -> bool:
    """Whether both are of one execution of the same loop at this depth, or of none."""
    if len(last.loops) <= depth or len(row.loops) <= depth:
        return len(last.loops) <= depth and len(row.loops) <= depth
    return last.loops[: depth + 1] == row.loops[: depth + 1] and last.iteration[depth] <= row.iteration[depth]
