"""Which iterations of a long loop stay in a report: the first and last three, the highest peak and the largest growth.

Of those that do not, a row says together what they took, and whether each moved memory as the iteration before them did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpumem_magic.report.model import Folded, Skipped

AT_EACH_END = 3
NOTICED = 200
"""One part in so many of the highest peak: a smaller difference is none to a reader."""


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
    """A row as folding sees it. key: any; loops and iteration: the lines and counters of the loops around it, outermost first.

    before, after and peak: allocated bytes, the peak's inside the row. whole: nothing before it was left out of the recording.
    """

    key: int
    loops: tuple[int, ...]
    iteration: tuple[int, ...]
    peak: int
    before: int
    after: int
    line: int = 0
    whole: bool = True


def same_moves(one: Sequence[LoopRow], other: Sequence[LoopRow], unseen: int) -> bool:
    """Whether two iterations ran the same lines, and allocated the same since their beginnings; or allocated nothing, whatever
    they ran. unseen: bytes that may differ."""
    if _moved_nothing(one) and _moved_nothing(other):
        return True
    if len(one) != len(other) or not one:
        return False
    start, begin = one[0].before, other[0].before
    return all(
        left.line == right.line
        and len(left.iteration) == len(right.iteration)
        and abs((left.after - start) - (right.after - begin)) <= unseen
        and abs((left.peak - start) - (right.peak - begin)) <= unseen
        for left, right in zip(one, other, strict=True)
    )


def _moved_nothing(rows: Sequence[LoopRow]) -> bool:
    return bool(rows) and all(row.before == row.after == row.peak for row in rows)


def unseen_of(peaks: Iterable[int]) -> int:
    """The bytes that no reader would notice beside these peaks."""
    return max(peaks, default=0) // NOTICED


@dataclass(frozen=True)
class Gap:
    """Rows that were left out: after the row with this index, in a loop at `depth`."""

    after: int
    depth: int
    skipped: Skipped


def gaps_between(rows: Sequence[LoopRow], kept: Sequence[int]) -> list[Gap]:
    """What is missing between the kept of these rows, of which each row's key is its index."""
    unseen = unseen_of(row.peak for row in rows)
    return [
        _gap(rows, first, second, unseen)
        for first, second in pairwise(kept)
        if second - first > 1 or not rows[second].whole
    ]


def _gap(rows: Sequence[LoopRow], first: int, second: int, unseen: int) -> Gap:
    last, following = rows[first], rows[second]
    depth = 0
    while (
        depth + 1 < min(len(last.iteration), len(following.iteration))
        and last.loops[: depth + 1] == following.loops[: depth + 1]
        and last.iteration[: depth + 1] == following.iteration[: depth + 1]
    ):
        depth += 1
    missing = rows[first + 1 : second]
    if not all(row.whole for row in (*missing, following)) or not missing:
        start = last.iteration[depth] if depth < len(last.iteration) else 0
        end = following.iteration[depth] if depth < len(following.iteration) else start + 2
        return Gap(first, depth, Skipped(min(start + 1, end), max(start, end - 1), None))
    begin = first
    while begin > 0 and _same_iteration(rows[begin - 1], last, depth):
        begin -= 1
    like = rows[begin : first + 1]
    turns = _grouped(missing, lambda before, row: _same_iteration(before, row, depth))
    alike = all(same_moves(like, turn, unseen) for turn in turns)
    numbers = missing[0].iteration[depth], missing[-1].iteration[depth]
    return Gap(first, depth, Skipped(*numbers, last.iteration[depth] if alike else None))


def _same_iteration(one: LoopRow, other: LoopRow, depth: int) -> bool:
    return (one.loops[: depth + 1], one.iteration[: depth + 1]) == (
        other.loops[: depth + 1],
        other.iteration[: depth + 1],
    )


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
