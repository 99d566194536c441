"""What a detector looks at, and what it answers. Numbers and strings only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gpumem_magic.devices.base import Label
from gpumem_magic.owners.model import Held, Holdings
from gpumem_magic.owners.saved import Place, Saved
from gpumem_magic.recording.model import OPTIMIZER, Checkpoint, Recording, Span
from gpumem_magic.report.model import ReportData
from gpumem_magic.snapshot.timeline import Allocation, Timeline
from gpumem_magic.units import MIB

# Below this nothing is worth a sentence.
LEAST = MIB


@dataclass(frozen=True)
class Iteration:
    """One iteration: the positions at its start and end in the device's log."""

    start: int
    end: int


@dataclass(frozen=True)
class Scene:
    """One device's recording with everything that was found out about it.

    holdings: who held what at the end, None where nobody could look. evaluating: the names of the notebook's modules that were in
    evaluation mode at the end. typed: the text of this cell and of those before it. modules: a variable's name -> the addresses
    of the parameters that it had before the cell's first statement. saved: what the first backward's graph kept, when the
    device's log stood at `saved_at`. never_clears: whether the cell's text runs backward and steps, and nothing clears gradients.
    mentioned: the names that the cell uses, itself or in the functions that it calls; empty where that is not known.
    """

    recording: Recording
    device: int
    timeline: Timeline
    labels: Sequence[Label]
    report: ReportData
    holdings: Holdings | None = None
    evaluating: frozenset[str] = frozenset()
    typed: str = ""
    modules: Mapping[str, frozenset[int]] = field(default_factory=dict)
    saved: Sequence[Saved] = ()
    saved_at: int = 0
    never_clears: bool = False
    mentioned: frozenset[str] = frozenset()

    @property
    def end(self) -> int:
        return len(self.timeline)

    @cached_property
    def peak(self) -> int:
        """The position of the peak."""
        return self.timeline.peak(0, self.end)[1]

    @cached_property
    def alive(self) -> dict[int, Allocation]:
        """Address -> allocation, of what is live at the end."""
        return {one.address: one for one in self.timeline.live_at(self.end)}

    @cached_property
    def held(self) -> list[Held]:
        """What has an owner at the end, on this device."""
        return [] if self.holdings is None else [one for one in self.holdings.held if one.device == self.device]

    @cached_property
    def saved_allocations(self) -> dict[Place, Allocation]:
        """(device, address) -> allocation, of what was live when the graph was looked at."""
        if not self.saved:
            return {}
        return {(self.device, one.address): one for one in self.timeline.live_at(self.saved_at)}

    def layer_at(self, parameter: Place | None) -> str:
        """The name of the layer whose parameter lies there; "" where it is not known."""
        allocation = None if parameter is None else self.saved_allocations.get(parameter)
        name = None if allocation is None else self.labels[allocation.index].name
        return (name or "").rpartition(".")[0]

    def held_by(self, root: int) -> list[Held]:
        return [one for one in self.held if root in one.roots]

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

    @cached_property
    def iterations(self) -> list[Iteration]:
        """The iterations: from one step of the first optimizer to its next, else those of the loop that turned most often."""
        steps = [span for span in self.spans(OPTIMIZER) if not span.failed]
        ends = [self.end_of(step) for step in steps if step.label == steps[0].label]
        if len(ends) < 2:
            ends = self._loop_ends()
        return [Iteration(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def _loop_ends(self) -> list[int]:
        iterations: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        for point, _, position in self.points:
            if point.kind == "statement" and point.loops:
                iterations[point.loops, point.iteration] = position
        # No loop, or one whose very first statement failed.
        if not iterations:
            return []
        most = Counter(loop for loop, _ in iterations).most_common(1)[0][0]
        return sorted(position for (loop, _), position in iterations.items() if loop == most)

    def living_in(self, position: int, *categories: str) -> list[Allocation]:
        """The allocations of these categories that are live at a position."""
        return [one for one in self.timeline.live_at(position) if self.labels[one.index].category in categories]


def size(allocations: Iterable[Allocation]) -> int:
    return sum(one.size for one in allocations)
