"""Where a device's events stand among the phases: which phase an allocation was born in, and what came before and after."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpumem_magic.recording.model import FORWARD, PHASES, RECOMPUTATION, Checkpoint, Span


@dataclass(frozen=True)
class Phase:
    """A phase in one device's positions: it holds the events from `start` up to, not including, `end`."""

    kind: str
    label: str
    start: int
    end: int
    order: int
    failed: bool = False


def phases_on(device: int, spans: Iterable[Span], checkpoints: Iterable[Checkpoint] = ()) -> list[Phase]:
    """The phases among `spans`, as they began. A failed one ends at the failing request, before its frees of unwinding."""
    failure = next(
        (point.moment.positions.get(device) for point in checkpoints if point.kind == "error"),
        None,
    )
    phases: list[Phase] = []
    for span in sorted(spans, key=lambda one: (one.start.tick, one.start.positions.get(device, 0))):
        if span.kind not in PHASES or device not in span.start.positions:
            continue
        start = span.start.positions[device]
        end = span.end.positions.get(device, start)
        if span.failed and failure is not None and start <= failure < end:
            end = failure
        phases.append(Phase(span.kind, span.label, start, max(start, end), len(phases), span.failed))
    return phases


class PhaseMap:
    """Answers by bisection; building it costs O(n log n) in the number of phases."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self._phases = phases
        self._starts_of = {
            kind: sorted(phase.start for phase in phases if phase.kind == kind) for kind in sorted(PHASES)
        }
        self._starts = sorted(phase.start for phase in phases)
        ended = sorted((phase for phase in phases if phase.kind != RECOMPUTATION), key=lambda one: (one.end, one.order))
        self._ended = ended
        self._ends = [phase.end for phase in ended]
        self._cuts, self._inside = self._innermost()

    def _innermost(self) -> tuple[list[int], list[Phase | None]]:
        """Positions where the innermost phase changes, and which it is from there on."""
        cuts = sorted({phase.start for phase in self._phases} | {phase.end for phase in self._phases})
        starting = sorted((phase for phase in self._phases if phase.start < phase.end), key=lambda one: one.start)
        inside: list[Phase | None] = []
        active: list[Phase] = []
        upcoming = 0
        for cut in cuts:
            active = [phase for phase in active if phase.end > cut]
            while upcoming < len(starting) and starting[upcoming].start == cut:
                active.append(starting[upcoming])
                upcoming += 1
            inside.append(max(active, key=lambda one: one.order, default=None))
        return cuts, inside

    def at_event(self, event: int) -> Phase | None:
        """The innermost phase that event number `event` (0-based) happened in."""
        rank = bisect_right(self._cuts, event) - 1
        return self._inside[rank] if rank >= 0 else None

    def next_start(self, event: int, *kinds: str) -> int | None:
        """The first position after event number `event` at which a phase (of these kinds, if given) begins."""
        starts = []
        for positions in [self._starts_of[kind] for kind in kinds] if kinds else [self._starts]:
            rank = bisect_left(positions, event + 1)
            if rank < len(positions):
                starts.append(positions[rank])
        return min(starts, default=None)

    def follows_forward(self, event: int) -> bool:
        """Whether the phase that ended last before this event was a forward: then what is computed now is an output."""
        rank = bisect_right(self._ends, event) - 1
        return rank >= 0 and self._ended[rank].kind == FORWARD
