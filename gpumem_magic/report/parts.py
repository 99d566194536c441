"""What happened inside a statement, as a tree: iterations, phases, ranges and marks, nested by when they began and ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from gpumem_magic.recording.model import Moment, Span
from gpumem_magic.report.model import Skipped

_SHOWN = frozenset({"forward", "backward", "optimizer", "range", "mark"})
_PHASES = frozenset({"forward", "backward", "optimizer"})
# So many forwards in a row are a loop.
_COUNTED = 4


@dataclass
class Part:
    """A part of a statement. start and end are positions in one device's log, within those of what is around it.

    skipped: how many iterations just before it were left out of the recording. number: an iteration's. gap: the iterations that a
    part of the kind "skipped" stands for.
    """

    kind: str
    label: str
    start: int
    end: int
    begins: int
    ends: int
    failed: bool = False
    parts: list[Part] = field(default_factory=list)
    skipped: int = 0
    number: int = 0
    gap: Skipped | None = None


@dataclass(frozen=True)
class StatementInterval:
    """A statement's interval: from one moment to another, on one device."""

    device: int
    begin: Moment
    end: Moment

    @property
    def start_position(self) -> int:
        return self.begin.positions.get(self.device, 0)

    @property
    def end_position(self) -> int:
        return max(self.start_position, self.end.positions.get(self.device, 0))


def parts_of(interval: StatementInterval, spans: Iterable[Span], *, failed: bool = False) -> list[Part]:
    """The parts of a statement, in order. `spans` are those that began in it, in order of their beginning.

    failed: the statement failed, so that its last, unfinished iteration counts, and a lone phase says where.
    """
    chosen = [span for span in spans if span.kind in _SHOWN]
    parts = _nested([_part(span, interval) for span in chosen])
    parts = _with_iterations(parts, interval.start_position, interval.end_position)
    if not failed and len(parts) == 1 and parts[0].kind in _PHASES:
        return parts[0].parts
    return parts


def with_failing_place(parts: list[Part], interval: StatementInterval, place: str) -> list[Part]:
    """The parts of a statement that failed, with the place of the failure in the innermost one that failed.

    It is a point, as a mark is: the state at the failure, under the words of the place.
    """
    end = interval.end_position
    point = Part("mark", place, end, end, interval.end.tick, interval.end.tick, failed=True)
    last = _last_failed(parts)
    if last is None:
        return [*parts, point]
    last.parts = [*last.parts, point]
    return parts


def _last_failed(parts: Sequence[Part]) -> Part | None:
    found = None
    while inner := [part for part in parts if part.failed]:
        found = inner[-1]
        parts = found.parts
    return found


def _part(span: Span, interval: StatementInterval) -> Part:
    low, high = interval.start_position, interval.end_position
    start = min(max(span.start.positions.get(interval.device, low), low), high)
    end = min(max(span.end.positions.get(interval.device, start), start), high)
    ends = max(span.end.tick, span.start.tick)
    return Part(span.kind, span.label, start, end, span.start.tick, ends, span.failed, skipped=span.skipped)


def _nested(parts: Sequence[Part]) -> list[Part]:
    """A tree by ticks. What only overlaps another part (another thread's) stands beside it, after it."""
    roots: list[Part] = []
    around: list[Part] = []
    for part in sorted(parts, key=lambda one: (one.begins, -one.ends)):
        while around and around[-1].ends < part.ends:
            around.pop()
        (around[-1].parts if around else roots).append(part)
        around.append(part)
    # Phases are named after their phase, and after their module or optimizer only where there are several.
    for kind, words in (("forward", "forward"), ("optimizer", "optimizer step")):
        alike = [part for part in parts if part.kind == kind]
        several = len({part.label for part in alike}) > 1
        for part in alike:
            part.label = f"{words} of {part.label}" if several else words
    _count(roots)
    return roots


def _count(roots: Sequence[Part]) -> None:
    """Forwards one after the other are turns of a loop, and are numbered as such."""
    for (kind, _), run in groupby(roots, lambda part: (part.kind, part.label)):
        alike = list(run)
        if kind == "forward" and len(alike) >= _COUNTED and not any(part.skipped or part.failed for part in alike):
            for number, part in enumerate(alike, 1):
                part.label += f" {number}"


def _give_back(groups: list[list[Part]], closing: str) -> None:
    """What steps in some iterations only, a generator every fifth, does so at their end: its parts go to the group before."""
    others = [
        [any(step.label != closing for step in _steps(part)) and not _closes(part, closing) for part in group]
        for group in groups
    ]
    if any(others[0]):
        return
    for before, group, late in zip(groups, groups[1:], others[1:], strict=False):
        count = max((place for place, is_late in enumerate(late, 1) if is_late), default=0)
        before += group[:count]
        del group[:count]


def _closes(part: Part, closing: str) -> bool:
    return any(step.label == closing for step in _steps(part))


def _with_iterations(parts: list[Part], start: int, end: int) -> list[Part]:
    """Groups parts into iterations where there is more than one: each ends with a step of the same optimizer, of several the one
    that steps last before the first one steps again.

    The first begins at `start`, the others where the one before ended. Phases after the last step are an iteration that did
    not come to its step. A range may hold a step, or (an epoch) many: then the iterations are within it.
    """
    closing = _closing([step.label for part in parts for step in _steps(part)])
    counts = [sum(step.label == closing for step in _steps(part)) for part in parts]
    if any(count > 1 for count in counts):
        for part in parts:
            part.parts = _with_iterations(part.parts, part.start, part.end)
        return parts
    groups: list[list[Part]] = [[]]
    for part, count in zip(parts, counts, strict=True):
        groups[-1].append(part)
        if count:
            groups.append([])
    if closing is not None:
        _give_back(groups, closing)
    rest = groups.pop()
    unfinished = any(_has_phase(part) for part in rest)
    if unfinished:
        groups.append(rest)
        rest = []
    if len(groups) < 2:
        return parts
    iterations: list[Part] = []
    number = 0
    for group in groups:
        last = group[-1]
        is_open = unfinished and group is groups[-1]
        skipped = sum(_skipped(part) for part in group)
        number += 1 + skipped
        before = iterations[-1].end if iterations else start
        iterations.append(
            Part(
                "iteration",
                f"iteration {number}",
                # What came before those that were left out is not its own.
                group[0].start if skipped else before,
                end if is_open else last.end,
                group[0].begins,
                last.ends,
                any(part.failed for part in group),
                group,
                skipped,
                number,
            )
        )
    return [*iterations, *rest]


def _closing(stepped: Sequence[str]) -> str | None:
    """The optimizer whose step ends an iteration (a critic's, a policy's, a temperature's), of those that stepped, in order."""
    again = next((number for number, one in enumerate(stepped) if number and one == stepped[0]), len(stepped))
    return stepped[again - 1] if stepped else None


def _steps(part: Part) -> list[Part]:
    """The steps in a part that came to their end, itself included."""
    own = [part] if part.kind == "optimizer" and not part.failed else []
    return own + [step for inner in part.parts for step in _steps(inner)]


def _skipped(part: Part) -> int:
    return part.skipped + sum(_skipped(inner) for inner in part.parts)


def _has_phase(part: Part) -> bool:
    return part.kind in _PHASES or any(_has_phase(inner) for inner in part.parts)
