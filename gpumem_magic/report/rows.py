"""The rows of a report as a reader wants them: entries, of which each can be opened into those in it.

Turns of a loop that moved memory alike are one entry, and so are statements in a run that moved none. Every face shows entries;
one that cannot be opened by hand asks `opened` for those that matter most.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from gpumem_magic.report.folding import LoopRow, same_moves, unseen_of
from gpumem_magic.report.model import ALLOCATED_CATEGORIES, CATEGORIES, ReportData, Row

ROW = "row"  # a row of the report; its parts are inside
STILL = "still"  # statements in a run, none of which moved memory that a bar could show
SEVERAL = "several"  # entries in a run, put together where there is no room for each
TURN = "turn"  # one turn of a loop; its rows are inside
ALIKE = "alike"  # turns of a loop, each of which moved memory as the first did; inside are the first one's rows, and the rest
REST = "rest"  # turns like another one that is shown, or turns without rows

MOST = 30
# ``layers.2``, ``forward of Block (2)``.
_NUMBERED = re.compile(r"(.*\D)(\d+)\)?", re.DOTALL)
# One part in so many of the highest allocated bytes is less than a letter or a hairline of a bar.
_STILL = 400
_HARDLY = 8  # moves that differ by less than one part in so many
_PHASES = ("forward", "backward", "optimizer")  # the first word of a phase's label


@dataclass(frozen=True)
class Entry:
    """row: its figures, which are those after the last of its rows, with the highest peaks in any of them.

    before: the row that a change is measured from. rows: what it stands for. first, last: of a loop's turns, by number, in the
    turns `outer` of the loops around it; 0 for what is no turn. like: the turn that they repeat, None where there is none.
    in_call: the loop is not the cell's own, but runs inside a statement.
    """

    kind: str
    row: Row
    before: Row | None
    rows: tuple[Row, ...]
    inner: tuple[Entry, ...] = ()
    first: int = 0
    last: int = 0
    outer: tuple[int, ...] = ()
    like: int | None = None
    in_call: bool = False

    @property
    def change(self) -> int | None:
        """Allocated bytes more than before; None where there is nothing to measure from."""
        return None if self.before is None else self.row.allocated - self.before.allocated

    @property
    def moved(self) -> int:
        """The bytes of the largest move in it: what tensors took, gave back, kept as something else, or held for a moment."""
        return self._largest(ALLOCATED_CATEGORIES)

    @property
    def moved_at_all(self) -> int:
        """The same, with what the allocator took from the device and gave back to it."""
        return self._largest(CATEGORIES)

    def _largest(self, categories: Sequence[str]) -> int:
        steps = zip(self.rows, (self.before, *self.rows), strict=False)
        return max((_move(row, before, categories) for row, before in steps), default=0)

    @property
    def turns(self) -> int:
        """How many turns of a loop it stands for; 0 for what is no turn."""
        return self.last - self.first + 1 if self.first else 0

    @property
    def failed(self) -> bool:
        return any(row.kind == "error" for row in self.rows)


def entries(report: ReportData) -> tuple[Entry, ...]:
    """The report's rows, from before to after, everything folded."""
    return tuple(_Tree(report).of(report.checkpoints, 0, None))


def opened(report: ReportData, most: int = MOST) -> list[tuple[Entry, int]]:
    """About so many entries at most, each with its depth: what failed and what holds the peak are open, then what moved most.

    An entry that is opened gives its place to those in it; a row with parts stays above them.
    """
    shown = _Shown(entries(report), max((row.peak_allocated for row in report.checkpoints), default=0))
    shown.open_more(most)
    shown.close_least(most)
    return [(place.entry, place.depth) for place in shown.places]


def telling_parts(row: Row) -> tuple[Row, ...]:
    """The parts that say more than their row: a lone forward inside ``output = model(input)`` does not.

    Marks and ranges are shown in any case: the user asked for them by name.
    """
    if len(row.parts) == 1 and row.kind != "error":
        only = row.parts[0]
        if only.label.partition(" ")[0] in _PHASES and not telling_parts(only):
            return ()
    return row.parts


def function_of(row: Row) -> str:
    """The function of the program's that a statement is in, with what stands behind it in the label: ``train: ``, or ""."""
    return row.label.removesuffix(_head(row)) if row.label.endswith(_head(row)) else ""


def shows_statement(row: Row) -> bool:
    """Whether it is called by its statement; a phase or a mark has a name of its own."""
    return bool(_head(row)) and row.label.endswith(_head(row))


def _head(row: Row) -> str:
    return row.statement.strip().partition("\n")[0]


def _move(row: Row, before: Row | None, categories: Sequence[str]) -> int:
    if before is None:
        return row.peak_allocated
    sizes = [abs((row.categories.get(name) or 0) - (before.categories.get(name) or 0)) for name in categories]
    return max([*sizes, row.peak_allocated - max(row.allocated, before.allocated)])


# ---- the tree


class _Tree:
    def __init__(self, report: ReportData) -> None:
        peaks = [row.peak_allocated for row in report.checkpoints]
        self._unseen = unseen_of(peaks)
        self._still = max(peaks, default=0) // _STILL

    def of(self, rows: Sequence[Row], depth: int, before: Row | None) -> list[Entry]:
        """depth: how many loops are around them."""
        found: list[Entry] = []
        for run in _runs(rows, depth):
            if len(run[0].iteration) > depth:
                found += self._loop(run, depth, before)
            else:
                found += self._body(run, before)
            before = run[-1]
        return found

    def _loop(self, run: Sequence[Row], depth: int, before: Row | None) -> list[Entry]:
        turns: list[Entry] = []
        for _, group in groupby(run, lambda row: row.iteration[depth]):
            rows = tuple(group)
            first, outer, gap = rows[0].iteration[depth], rows[0].iteration[:depth], rows[0].skipped
            if gap is not None and len(rows[0].iteration) == depth + 1:
                turn = Entry(REST, rows[0], before, rows, (), gap.first, gap.last, outer, gap.like)
            else:
                inner = tuple(self.of(rows, depth + 1, before))
                turn = Entry(TURN, _together(rows), before, rows, inner, first, first, outer)
            turns.append(turn)
            before = rows[-1]
        return self._alike(turns)

    def _body(self, run: Sequence[Row], before: Row | None) -> list[Entry]:
        found: list[Entry] = []
        for row in run:
            found.append(self._row(row, before))
            before = row
        return _grouped_still(found, self._still)

    def _row(self, row: Row, before: Row | None) -> Entry:
        return Entry(ROW, row, before, (row,), tuple(self._parts(telling_parts(row), before)))

    def _parts(self, parts: Sequence[Row], before: Row | None) -> list[Entry]:
        """Those that are numbered one after the other are turns of a loop inside the statement."""
        found: list[Entry] = []
        stems: list[str] = []
        for part in parts:
            if part.skipped is not None:
                gap, stem = part.skipped, stems[-1] if stems else ""
                found.append(Entry(REST, part, before, (part,), (), gap.first, gap.last, (), gap.like, True))
            else:
                stem, number = _stem_and_number(part.label)
                inner = tuple(self._parts(telling_parts(part), before))
                found.append(Entry(ROW, part, before, (part,), inner, number, number, in_call=True))
            stems.append(stem)
            before = part
        runs = groupby(range(len(found)), lambda place: stems[place])
        return [entry for _, run in runs for entry in self._alike([found[place] for place in run])]

    def _alike(self, turns: Sequence[Entry]) -> list[Entry]:
        found: list[Entry] = []
        place = 0
        while place < len(turns):
            end = place + 1
            while end < len(turns) and self._repeats(turns[place], turns[end], turns[end - 1]):
                end += 1
            found.append(_as_one(turns[place:end]) if end > place + 1 else turns[place])
            place = end
        return found

    def _repeats(self, first: Entry, other: Entry, before: Entry) -> bool:
        if not first.first or first.kind == REST or other.first != before.last + 1 or first.failed or other.failed:
            return False
        if other.kind == REST:
            return other.like is not None and first.first <= other.like <= before.last
        return same_moves(_loop_rows(first), _loop_rows(other), self._unseen)


def _stem_and_number(label: str) -> tuple[str, int]:
    """``("forward ", 3)`` of ``forward 3``; 0 where it has no number."""
    named = _NUMBERED.fullmatch(label)
    return (named[1], int(named[2][-9:])) if named else (label, 0)


def _runs(rows: Sequence[Row], depth: int) -> Iterator[list[Row]]:
    """Consecutive rows of one execution of the same loop at this depth, or of none."""
    run: list[Row] = []
    for row in rows:
        if run and not _continues(run[-1], row, depth):
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def _continues(last: Row, row: Row, depth: int) -> bool:
    if len(last.iteration) <= depth or len(row.iteration) <= depth:
        return len(last.iteration) <= depth and len(row.iteration) <= depth
    return last.loops[: depth + 1] == row.loops[: depth + 1] and last.iteration[depth] <= row.iteration[depth]


def _loop_rows(turn: Entry) -> list[LoopRow]:
    start = turn.before.allocated if turn.before is not None else 0
    rows = list(turn.rows if turn.kind == TURN else _with_parts(turn.row))
    befores = [start, *(row.allocated for row in rows)]
    return [
        LoopRow(0, row.loops, row.iteration, row.peak_allocated, before, row.allocated, row.line)
        for row, before in zip(rows, befores, strict=False)
    ]


def _with_parts(row: Row) -> Iterator[Row]:
    yield row
    for part in row.parts:
        yield from _with_parts(part)


def _together(rows: Sequence[Row]) -> Row:
    """The state after the last of them, with the highest peaks."""
    return replace(
        rows[-1],
        peak_allocated=max(row.peak_allocated for row in rows),
        peak_reserved=max(row.peak_reserved for row in rows),
        parts=(),
    )


def _as_one(turns: Sequence[Entry]) -> Entry:
    leader, others = turns[0], turns[1:]
    number, last, outer = leader.first, turns[-1].last, leader.outer
    rest = tuple(row for turn in others for row in turn.rows)
    repeated = Entry(
        REST, _together(rest), others[0].before, rest, tuple(others), number + 1, last, outer, number, leader.in_call
    )
    inner = (leader, repeated) if leader.kind == ROW else (*leader.inner, repeated)
    rows = (*leader.rows, *rest)
    return Entry(ALIKE, _together(rows), leader.before, rows, inner, number, last, outer, in_call=leader.in_call)


def _grouped_still(found: Sequence[Entry], still: int) -> list[Entry]:
    def at_rest(entry: Entry) -> tuple[bool, str]:
        still_one = entry.row.kind == "statement" and not entry.inner and entry.moved_at_all <= still
        return still_one, function_of(entry.row)

    result: list[Entry] = []
    for (is_still, _), group in groupby(found, at_rest):
        run = tuple(group)
        result += [_run_of(STILL, run)] if is_still and len(run) > 1 else run
    return result


def _run_of(kind: str, run: Sequence[Entry]) -> Entry:
    rows = tuple(row for entry in run for row in entry.rows)
    first, last = run[0].first, run[-1].last
    return Entry(
        kind, _together(rows), run[0].before, rows, tuple(run), first, last, run[0].outer, in_call=run[0].in_call
    )


# ---- what is shown where nothing can be opened


@dataclass(eq=False)
class _Place:
    """An entry that is shown. body: what it was opened from. fixed: it leads to what a reader must see."""

    entry: Entry
    depth: int
    body: Entry | None
    fixed: bool
    is_open: bool = False

    @property
    def can_open(self) -> bool:
        return bool(self.entry.inner) and not self.is_open and self.entry.kind not in (STILL, REST)


class _Shown:
    def __init__(self, found: Sequence[Entry], peak: int) -> None:
        self._fixed = _way(found, lambda entry: entry.failed) | _way(
            found, lambda entry: entry.row.peak_allocated >= peak
        )
        self.places = [self._place(entry, 0, None) for entry in found]
        while (place := next((one for one in self.places if one.fixed and one.can_open), None)) is not None:
            self._open(place)

    def _place(self, entry: Entry, depth: int, body: Entry | None) -> _Place:
        return _Place(entry, depth, body, id(entry) in self._fixed or entry.row.kind in ("before", "after"))

    def open_more(self, most: int) -> None:
        """Opens what moved most, as long as there is room."""
        left = [one for one in self.places if one.can_open and one.entry.moved]
        while left:
            largest = max(left, key=lambda one: one.entry.moved)
            left.remove(largest)
            if len(self.places) + len(largest.entry.inner) - (largest.entry.kind != ROW) <= most:
                left += [one for one in self._open(largest) if one.can_open and one.entry.moved]

    def _open(self, place: _Place) -> list[_Place]:
        stays = place.entry.kind == ROW
        # In a report without rows for statements it is the last row that has what happened, and all of it came before.
        is_end = place.entry.row.kind == "after"
        inner = [self._place(entry, place.depth + (stays and not is_end), place.entry) for entry in place.entry.inner]
        number = self.places.index(place)
        self.places[number : number + 1] = [*inner, place] if is_end else [place, *inner] if stays else inner
        place.is_open = True
        return inner

    def close_least(self, most: int) -> None:
        """Puts together what stands side by side and moved least, until there is room for the rest."""
        weak = sorted((one for one in self.places if _can_join(one)), key=lambda one: one.entry.moved)
        if len(self.places) <= most or not weak:
            return
        count = bisect_left(range(1, len(weak)), True, key=lambda count: len(self._joined(weak[:count])) <= most) + 1
        self.places = self._joined([*weak[:count], *_as_weak(weak, count)])

    def _joined(self, weak: Sequence[_Place]) -> list[_Place]:
        chosen = {id(one) for one in weak}
        found: list[_Place] = []
        for (_, _, key), group in groupby(self.places, lambda one: (id(one.body), one.depth, _joint(one, chosen))):
            run = list(group)
            if key is None or len(run) == 1:
                found += run
            else:
                found += [_together_at(piece) for piece in _rising(run)]
        return found


def _as_weak(weak: Sequence[_Place], count: int) -> Iterator[_Place]:
    """Of the rest, the parts of the same name in the same place that moved hardly more than the first `count`: the last of two
    hundred forwards that are put together tell nothing of their own."""
    most = weak[count - 1].entry.moved
    most += most // _HARDLY

    def name(one: _Place) -> tuple[int, int, str]:
        return id(one.body), one.depth, _stem_and_number(one.entry.row.label)[0]

    names = {name(one) for one in weak[:count] if one.entry.row.kind == "part"}
    for one in weak[count:]:
        if one.entry.moved > most:
            return
        if name(one) in names:
            yield one


def _rising(run: Sequence[_Place]) -> Iterator[list[_Place]]:
    """The run in pieces whose turns have rising numbers: calls of two kinds, or of two statements, are both counted from one."""
    piece: list[_Place] = []
    for one in run:
        if piece and one.entry.turns and one.entry.first <= piece[-1].entry.last:
            yield piece
            piece = []
        piece.append(one)
    yield piece


def _together_at(run: Sequence[_Place]) -> _Place:
    first = run[0]
    return (
        first if len(run) == 1 else _Place(_run_of(SEVERAL, [one.entry for one in run]), first.depth, first.body, False)
    )


def _way(found: Sequence[Entry], leads: Callable[[Entry], bool]) -> set[int]:
    """The first entry that leads somewhere, the first such entry in it, and so on."""
    entry = next((one for one in found if leads(one)), None)
    return set() if entry is None else {id(entry), *_way(entry.inner, leads)}


def _can_join(place: _Place) -> bool:
    return not place.fixed and not place.is_open


def _joint(place: _Place, chosen: Container[int]) -> tuple[bool, tuple[int, ...], str] | None:
    """Equal for those that may join: statements of one body, and turns of one loop."""
    if id(place) not in chosen:
        return None
    first = place.entry.rows[0]
    # Phases and marks of different names stand side by side.
    function = function_of(first) if shows_statement(first) and not place.entry.turns else ""
    return place.entry.turns > 0, first.loops, function
