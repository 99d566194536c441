"""What a detector looks at: a `Scene`, numbers and strings only. What it answers is a `Cause` of `report.model`."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gpumem_magic.attribution.tensors import Tensors
from gpumem_magic.causes.program import ProgramText
from gpumem_magic.causes.written import Written
from gpumem_magic.devices.base import Birth, FilledPart, Label
from gpumem_magic.failures import swallows
from gpumem_magic.owners.model import Held, Holdings
from gpumem_magic.recording.model import FORWARD, OPTIMIZER, Checkpoint, Recording, Span
from gpumem_magic.report.model import Cause, ReportData
from gpumem_magic.snapshot.timeline import Allocation, Timeline
from gpumem_magic.units import MIB

if TYPE_CHECKING:
    from gpumem_magic.owners.running import RunningFunction
    from gpumem_magic.owners.saved import Saved

# So many equal steps are no accident.
EQUAL_ITERATIONS = 3
# Below this nothing is worth a sentence.
LEAST = MIB
# What a sound training has at its peak is worth a word from here on.
WORTH = 256 * MIB
# Less than one part in so many of the peak is not what somebody looks for.
_LARGE = 20

_Thing = TypeVar("_Thing")
_Trait = TypeVar("_Trait")


@dataclass(frozen=True)
class Iteration:
    """One iteration: the positions at its start and end in the device's log."""

    start: int
    end: int


class Untied(NamedTuple):
    """Two weights that were one. to, given: the places, of what was given the other's, and of that; words: what says
    so; places: (device, address) of both now."""

    to: str
    given: str
    words: str
    places: tuple[tuple[int, int], ...]


@dataclass
class LeftFunctions:
    """graphs: of each function, outermost first, the variables that had graphs, lists first. modules: those that were variables
    there, for a look, not to be kept. functions: their names. way: the lines of theirs, outermost first. called_back: whether a
    library's code lies between them, and may go on in its own way. retry: where it failed while another error was handled."""

    graphs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)
    way: list[Written] = field(default_factory=list)
    called_back: bool = False
    retry: Written | None = None

    @property
    def place(self) -> Written | None:
        """The innermost line."""
        return self.way[-1] if self.way else None

    @property
    def told(self) -> str:
        """```outputs` and `losses` of evaluate()``: the outermost's that has any; \"\" where there is none."""
        function, names = next(iter(self.graphs.items()), ("", ()))
        return f"{' and '.join(f'`{name}`' for name in names[:2])} of {function}()" if names else ""


@dataclass(frozen=True)
class Scene:
    """One device's recording with everything that was found out about it.

    holdings: who held what at the end, empty where nobody could look. evaluating: the names of the notebook's modules that were
    in evaluation mode at the end. typed: the text of this cell and of those before it. modules: a variable's name -> the
    addresses of the parameters that it had before the cell's first statement. saved: what the first backward's graph kept, when
    the device's log stood at `saved_at`. never_clears: whether the cell's text runs backward and steps, and nothing clears
    gradients. mentioned: the names that the cell uses, itself or in the functions that it calls; empty where that is not known.
    unread: those of them that it gives a value before anything reads them.
    program: its text. tensors: what is known of each allocation. idle_checkpointing: the names of modules in which activation
    checkpointing is on, in evaluation mode. searches_convolutions: whether cuDNN tries for the fastest way.
    reads_last_position: whether the cell, itself or in the functions that it names, takes ``[:, -1]`` of something.
    evaluated: the addresses of the parameters of the modules in evaluation mode. left: the functions that an error left.
    deleted: a variable of an earlier cell that this one deletes -> the addresses of all memory that it led to before the first
    statement. filled: by device and address, the parts that the program assigned to, of what it assigned to in parts.
    rewritten: by device and address, how often it wrote to what it had made as a copy. untied: weights that were one.
    weights: where an error ended it, a module's name -> a type -> the bytes of its parameters, wherever they are.
    steps_first: whether sequences come with their steps in front, and their number behind.
    numbers_for_padding: what models take for it in ids. running: the program's functions around the first backward, the innermost
    first.
    """

    recording: Recording
    device: int
    timeline: Timeline
    labels: Sequence[Label]
    report: ReportData
    holdings: Holdings = field(default_factory=Holdings)
    evaluating: frozenset[str] = frozenset()
    typed: str = ""
    modules: Mapping[str, frozenset[int]] = field(default_factory=dict)
    saved: Sequence[Saved] = ()
    saved_at: int = 0
    never_clears: bool = False
    mentioned: frozenset[str] = frozenset()
    program: ProgramText = field(default_factory=ProgramText)
    tensors: Tensors | None = None
    idle_checkpointing: frozenset[str] = frozenset()
    searches_convolutions: bool = False
    steps_first: bool = False
    weights: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    reads_last_position: bool = False
    evaluated: frozenset[int] = frozenset()
    left: LeftFunctions = field(default_factory=LeftFunctions)
    deleted: Mapping[str, frozenset[int]] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    filled: Mapping[tuple[int, int], Sequence[FilledPart]] = field(default_factory=dict)
    rewritten: Mapping[tuple[int, int], int] = field(default_factory=dict)
    untied: Sequence[Untied] = ()
    numbers_for_padding: frozenset[int] = frozenset()
    running: Sequence[RunningFunction] = ()
    _found: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def moment(self) -> int:
        """The position that the report is about: of the request that failed, else of the peak."""
        failed = next((position for point, _, position in reversed(self.points) if point.kind == "error"), None)
        error = self.report.error
        return self.peak if failed is None or error is None or error.requested is None else failed

    @property
    def failed(self) -> Birth | None:
        """How what the request that failed was for was to come to be; None where that is not known, or none failed."""
        error = self.report.error
        if error is None or not error.wanted:
            return None
        return self.recording.logs[self.device].births.get(self.moment - 1)

    @property
    def end(self) -> int:
        return len(self.timeline)

    @cached_property
    def peak(self) -> int:
        """The position of the peak."""
        return self.timeline.peak(0, self.end)[1]

    def allocates_between(self, begin: int, end: int) -> bool:
        events = self.recording.logs[self.device].events
        return any(events[number].action == "alloc" for number in range(begin, end))

    @cached_property
    def births(self) -> list[tuple[int, Birth]]:
        """How allocations came to be, by the events, in order."""
        return sorted(self.recording.logs[self.device].births.items())

    @property
    def sources(self) -> Mapping[int, int]:
        """Index of an allocation -> that of what it was made as a copy of."""
        return {} if self.tensors is None else self.tensors.sources

    @cached_property
    def alive(self) -> dict[int, Allocation]:
        """Address -> allocation, of what is live at the end."""
        return {one.address: one for one in self.timeline.live_at(self.end)}

    @cached_property
    def held(self) -> list[Held]:
        """What has an owner at the end, on this device."""
        return self._here(self.holdings.held)

    def freed(self, roots: Iterable[int]) -> list[Held]:
        """What would be freed on this device if these roots let go."""
        return self._here(self.holdings.freed(roots))

    def _here(self, held: Iterable[Held]) -> list[Held]:
        return [one for one in held if one.device == self.device]

    def part_of_peak(self, share: int) -> int:
        """One part in so many of the peak, at least what is worth a sentence, in bytes."""
        return max(LEAST, self.report.peak.allocated // share)

    def is_large(self, size: int) -> bool:
        """Whether it is worth a cause: a part of the peak that somebody would want back, or enough for a request that failed."""
        least = self.part_of_peak(_LARGE)
        wanted = self.report.error.wanted if self.report.error is not None else None
        return size >= (least if wanted is None else min(least, max(LEAST, wanted)))

    def spans(self, *kinds: str) -> list[Span]:
        return [
            span
            for span in self.recording.spans
            if span.kind in kinds and self.device in span.start.positions and self.device in span.end.positions
        ]

    def start_of(self, span: Span) -> int:
        return span.start.positions[self.device]

    def end_of(self, span: Span) -> int:
        return span.end.positions[self.device]

    @cached_property
    def points(self) -> list[tuple[Checkpoint, int, int]]:
        """The rows with the positions at their start and end."""
        found = []
        before = 0
        for point in self.recording.checkpoints:
            if self.device in point.moment.positions:
                now = point.moment.positions[self.device]
                found.append((point, before, now))
                before = now
        return found

    def start_of_row(self, position: int) -> int:
        """The position at the start of the row in which a position lies, the end of the row before."""
        row = bisect_right(self.points, position, key=lambda each: each[2])
        return self.points[min(row, len(self.points) - 1)][1] if self.points else 0

    @property
    def statements(self) -> list[tuple[Checkpoint, int, int]]:
        return [row for row in self.points if row[0].kind == "statement"]

    @cached_property
    def iterations(self) -> list[Iteration]:
        """The iterations: from one step of the first optimizer to its next, else those of the loop that turned most often."""
        steps = [span for span in self.spans(OPTIMIZER) if not span.failed]
        ends = [self.end_of(step) for step in steps if step.label == steps[0].label]
        if len(ends) < 2:
            ends = self._loop_ends()
        return [Iteration(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def how_many(self, iterations: Sequence[Any]) -> str:
        """`` (47 iterations)``; "" where a long run's middle was not kept, and there were more."""
        spans = self.recording.spans
        left_out = self.recording.left_out or any(span.skipped or span.steps_left_out for span in spans)
        return "" if left_out else f" ({len(iterations)} iterations)"

    @cached_property
    def forwards_of_a_statement(self) -> list[Iteration]:
        """The forwards of the statement that ran most of them, such as a call with a loop inside, as iterations; it may be the
        one that failed."""
        rows = [row for row in self.points if row[0].kind in ("statement", "error")]
        ends: dict[tuple[int, str], list[int]] = {}
        for span in self.spans(FORWARD):
            begin, end = self.start_of(span), self.end_of(span)
            row = next((stop for _, start, stop in rows if start <= begin and end <= stop), None)
            if row is not None and not span.failed:
                ends.setdefault((row, span.label), []).append(end)
        most = max(map(len, ends.values()), default=0)
        found = next((sorted(its) for its in ends.values() if len(its) == most), [])
        return [Iteration(start, end) for start, end in zip([0, *found], found, strict=False)]

    def _loop_ends(self) -> list[int]:
        # None where there is no loop, or one whose very first statement failed.
        return max(self._ends_of_loops, key=len, default=[])

    @cached_property
    def _ends_of_loops(self) -> list[list[int]]:
        """Of each loop, the inner ones after those around them, the positions at which its iterations ended."""
        loops: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
        for point, _, position in self.statements:
            for depth in range(1, len(point.loops) + 1):
                loops.setdefault(point.loops[:depth], {})[point.iteration[:depth]] = position
        return [sorted(ends.values()) for ends in loops.values()]

    def finished(self, iterations: list[Iteration]) -> list[Iteration]:
        """Without the last where an error ended it, or a request that failed: what it leaves is less, or more."""
        if not iterations:
            return iterations
        events = self.recording.logs[self.device].events[iterations[-1].start : iterations[-1].end]
        ended = iterations[-1].end in self._cut_off or any(event.action == "oom" for event in events)
        return iterations[:-1] if ended else iterations

    @cached_property
    def _cut_off(self) -> frozenset[int]:
        """Where the last statements ended of the iterations that the error left."""
        found = set()
        for error in (point for point, _, _ in self.points if point.kind == "error"):
            for depth in range(1, len(error.loops) + 1):
                theirs = (
                    stop
                    for point, _, stop in self.statements
                    if point.loops[:depth] == error.loops[:depth] and point.iteration[:depth] == error.iteration[:depth]
                )
                found.add(max(theirs, default=-1))
        return frozenset(found)

    @cached_property
    def loops(self) -> list[list[Iteration]]:
        """The iterations of each loop of the cell; all turns of an inner loop are one after the other."""
        return [
            [Iteration(start, end) for start, end in zip([0, *ends], ends, strict=False)]
            for ends in self._ends_of_loops
        ]

    def left_by(self, iterations: Iterable[Iteration]) -> list[int]:
        """How many bytes more are allocated after each iteration than before it."""
        return [self.timeline.allocated_at(one.end) - self.timeline.allocated_at(one.start) for one in iterations]

    def left_evenly(self, iterations: Iterable[Iteration]) -> list[int]:
        """The same of the last ones, where these left about as much; [] where they did not, or are too few to tell."""
        steps = self.left_by(iterations)
        last = steps[-EQUAL_ITERATIONS:]
        even = len(steps) > EQUAL_ITERATIONS and min(last) >= LEAST and max(last) <= 1.5 * min(last)
        return last if even else []

    def turn_of(self, position: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The loops around the statement that ran at a position, and which iteration of each it was; None outside of loops."""
        point = self.tensors.statement_at(position) if self.tensors is not None else None
        return (point.loops, point.iteration) if point is not None and point.loops else None

    def outermost_turn(self, position: int) -> tuple[int, int] | None:
        """The line of the outermost loop around a position, and which of its turns that is in; None outside of loops."""
        turn = self.turn_of(position)
        return None if turn is None else (turn[0][0], turn[1][0])

    def highest_without(self, parts: Iterable[Allocation], share: int = 1, until: int | None = None) -> tuple[int, int]:
        """The highest that would be allocated, up to a position, if one part in `share` of these blocks went, in bytes, and at
        which position."""
        changes: Counter[int] = Counter()
        for one in parts:
            changes[one.born + 1] -= one.size // share
            if one.freed is not None:
                changes[one.freed + 1] += one.size // share
        less = highest = at = 0
        for position in range((self.end if until is None else until) + 1):
            less += changes[position]
            if (size := self.timeline.allocated_at(position) + less) > highest:
                highest, at = size, position
        return highest, at

    def living_in(self, position: int, *categories: str) -> list[Allocation]:
        """The allocations of these categories that are live at a position."""
        return [one for one in self.timeline.live_at(position) if self.labels[one.index].category in categories]


Detector = Callable[[Scene], Iterable[Cause]]


def found_once(find: Callable[[Scene], _Thing]) -> Callable[[Scene], _Thing]:
    """What several detectors ask for is looked for once in a scene."""

    @wraps(find)
    def finding(scene: Scene) -> _Thing:
        if find not in scene._found:
            scene._found[find] = find(scene)
        found: _Thing = scene._found[find]
        return found

    return finding


def answers_of(detectors: Iterable[Detector], scene: Scene) -> tuple[list[Cause], list[str]]:
    """What detectors found; and, for each that failed, a line about it. A detector's failure is not the others'."""
    found: list[Cause] = []
    failures: list[str] = []
    for detector in detectors:
        try:
            found += list(detector(scene))
        except Exception as error:
            if not swallows(error):
                raise
            name = getattr(detector, "__name__", "")
            failures.append(f"Looking for a cause failed in {name} ({type(error).__name__}: {error}).")
    return found, failures


def partnered(things: Iterable[_Thing], trait: Callable[[_Thing], _Trait], partners: Iterable[_Trait]) -> list[_Thing]:
    """The things that have a partner of the same trait, each a partner of its own."""
    left = Counter(partners)
    found = []
    for one in things:
        if left[trait(one)] > 0:
            left[trait(one)] -= 1
            found.append(one)
    return found


def requested(one: Allocation) -> int:
    return one.requested
