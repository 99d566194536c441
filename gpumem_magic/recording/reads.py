"""Which lines of the program read values that nobody computed, and what they decided thereby."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

from gpumem_magic.devices.reads import Reads
from gpumem_magic.looks.code import OWN, whose
from gpumem_magic.looks.decisions import (
    checks_for_none,
    chooses_a_way,
    chooses_an_object,
    chooses_what_is_printed,
    divides,
    ends_a_loop,
    forget,
    goes_by_an_if,
    is_printed,
    is_raised_there,
    keeps_gradients,
    leads_to,
    looks_up,
    makes_a_size,
    may_be_of_a_value,
    may_be_of_a_way,
    selects,
)
from gpumem_magic.looks.objects import kinds_of, message_of, traceback_of
from gpumem_magic.recording.model import StandIn
from gpumem_magic.tracebacks import entries

_Line = tuple[str, int]


class ReadsWithin:
    """Of a machine's reads, those from when this is made; the machine counts since it was turned on."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._before = reads.counts.copy()
        self._supplied_before = reads.supplied.copy()
        self._returned_before = reads.returned.copy()
        reads.note_caught()
        self._marks_before = reads.marks.copy()

    def stand_ins(
        self,
        place_of: Callable[[str, int], str],
        error: BaseException | None = None,
        left: BaseException | None = None,
    ) -> tuple[StandIn, ...]:
        """Those since then. place_of: a file and a line as the report writes them. error: what ended the program; left: what
        ended it without an error (`sys.exit`)."""
        forget()
        failure = _failure(error)
        leaving = _Wrong(frozenset(), _lines_of(left), "raise") if left is not None else None
        read = self._reads.counts - self._before
        self._reads.note_caught(error)
        marks = self._reads.marks - self._marks_before
        places: Counter[str] = Counter()
        by_user: Counter[str] = Counter()
        returned: Counter[str] = Counter()
        decides: dict[str, str] = {}
        callers: dict[str, str] = {}
        failing: set[str] = set()
        widest: Counter[str] = Counter()
        for (file, line), count in sorted(read.items()):
            place = place_of(file, line)
            places[place] += count
            if (caller := _own_caller((file, line), self._reads)) is not None:
                callers.setdefault(place, place_of(*caller))
            by_user[place] += self._reads.supplied[file, line] - self._supplied_before[file, line]
            widest[place] = max(widest[place], self._reads.widest.get((file, line), 0))
            stack = self._reads.stacks.get((file, line), ())
            if failure is not None and _leads_to_one((file, line), stack, failure):
                failing.add(place)
            if leaving is not None and _leads_to_one((file, line), stack, leaving):
                decides.setdefault(place, "end")
            back = min(count, self._reads.returned[file, line] - self._returned_before[file, line])
            if back and not is_printed(file, line):
                returned[place] += back
            decides[place] = decides.get(place) or _made_of((file, line), count, marks, self._reads)
        last = self._reads.latest
        latest = place_of(*last) if last is not None and last in read else None
        return tuple(
            StandIn(
                place,
                count,
                by_user[place],
                decides[place],
                place == latest,
                callers.get(place, ""),
                place in failing,
                0 if decides[place] else returned[place],
                widest[place],
            )
            for place, count in places.items()
        )


class _Wrong(NamedTuple):
    """kinds: the names of the error's class and of those that it inherits from. lines: those through which it went, outermost
    first. of_a_way: it does not come of a value itself, but may of the way that values led to: to a "name" that has no value yet,
    to what found "nothing", or to a "raise" of the program's own."""

    kinds: frozenset[str]
    lines: tuple[_Line, ...]
    of_a_way: str = ""


def _failure(error: BaseException | None) -> _Wrong | None:
    """An error that may come of a value, or of where values led to."""
    lines = () if error is None else _lines_of(error)
    if error is None or not lines:
        return None
    kinds = kinds_of(error)
    message = message_of(error)
    if may_be_of_a_value(kinds, message):
        return _Wrong(kinds, lines)
    way = "raise" if is_raised_there(*lines[-1]) else may_be_of_a_way(kinds, message)
    return _Wrong(kinds, lines, way) if way else None


def _lines_of(error: BaseException) -> tuple[_Line, ...]:
    return tuple((one.tb_frame.f_code.co_filename, one.tb_lineno or 0) for one in entries(traceback_of(error)))


def _leads_to_one(read: _Line, stack: Sequence[_Line], failure: _Wrong) -> bool:
    """Whether what was read flows into a statement in which the error was raised: in the function where the ways to the two
    part, or in one that both went through. stack: from where it was read, innermost first."""
    raised = failure.lines
    files = {file for file, _ in stack} | {read[0]}
    to_error = [place for place in raised if place[0] in files or whose(place[0]) == OWN]
    to_read = list(reversed(stack)) or [read]
    if to_error and to_error[0] in to_read:
        # (A traceback begins where the error was caught: in a notebook, at the cell.)
        to_read = to_read[to_read.index(to_error[0]) :]
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(to_read, to_error, strict=False)))
    reading, failing = to_read[shared:], to_error[shared:]
    if "ZeroDivisionError" in failure.kinds and whose(raised[-1][0]) == OWN:
        # What is divided may be any number.
        end, other = raised[-1]
        return any(divides(*one, other, end) for one in reading or to_read[-1:])
    if failure.of_a_way and failing:
        reading = reading or to_read[-1:]
    elif shared and not (reading and failing):
        # One statement read and failed. (It may do both, and no more, where a name is wrong.)
        return failure.of_a_way in ("", "nothing")
    around = failure.of_a_way == "raise"
    return any(leads_to(*one, end, other, made_of_it=True, around=around) for one in reading for other, end in failing)


def _own_caller(read: _Line, reads: Reads) -> _Line | None:
    """Where a library read: the innermost line of the program's own from which it was called."""
    if whose(read[0]) == OWN:
        return None
    return next((place for place in reads.stacks.get(read, ()) if whose(place[0]) == OWN), None)


def _made_of(read: _Line, count: int, marks: Counter[tuple[str, int, str]], reads: Reads) -> str:
    """What a line's reads decide (see `StandIn`), as far as the source and the reads' `marks` tell."""
    caught, tried, whole, flagged, sized, listed, compared, scripted, stepping, moved, seeding, logged, working = (
        marks[read[0], read[1], mark]
        for mark in (
            "caught",
            "tried",
            "whole",
            "flag",
            "sized",
            "list",
            "compared",
            "scripted",
            "stepping",
            "moved",
            "seeding",
            "logged",
            "working",
        )
    )
    if caught:
        return "except"
    if tried:
        return "try"
    if count in (compared, seeding, logged):
        # Nothing but whether an error comes, what workers draw, or what is written down.
        return ""
    if read in reads.solved:
        return "loop"
    stack = reads.stacks.get(read, ())
    own = stack.index(read) if read in stack else 0
    callers = stack[own:]
    within = reads.places(read)
    # An optimizer that read in the program's stead decides by itself.
    asked = [(*read, callers, within), *((*place, (), ()) for place in stack[:own])]
    if any(ends_a_loop(*one[:3], sized=bool(sized), places=one[3]) for one in asked):
        return "loop"
    if makes_a_size(*read, callers, whole=bool(whole), places=within):
        return "size"
    # What TorchScript reads in the midst of its function is for a test.
    if scripted or any(chooses_a_way(*one) for one in asked):
        return "branch"
    if keeps_gradients(*read, callers, within):
        return "gradients"
    # (A module that moved, and is called later, is the same one.)
    if moved < count and chooses_an_object(*read, callers, within):
        return "branch" if goes_by_an_if(*read, callers, within) else "choice"
    if working:
        return "operator"
    if sized or selects(*read, callers, within):
        return "selection"
    if checks_for_none(*read, callers, within):
        return "check"
    if stepping:
        return "step"
    if any(chooses_what_is_printed(*one) for one in asked):
        return "text"
    # Tokens become a text, which looks like one, and so does a name of a list; a single number is seen to be zero.
    # (Which is larger, by which one of two is taken, is read as a flag.)
    told = listed or ((whole or flagged) and looks_up(*read, within))
    return "text" if told and any(is_printed(*place) for place in (read, *stack[own:])) else ""
