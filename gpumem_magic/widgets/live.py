"""Categories while the cell runs: what the recording under way has seen so far, without guessing.

Parameters, gradients, optimizer states and inputs are known once the recording has seen who holds them, workspaces from
birth, and labels of earlier recordings stay. Everything else is `not_yet_known` until the cell is over: most categories
depend on when an allocation *ends*. Then `relabel` gives the samples of the cell the categories that the report has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpumem_magic.devices.base import Counters, Label
from gpumem_magic.recording.model import Recording, Sighting
from gpumem_magic.snapshot.model import ACTIVE, Segment, TraceEvent
from gpumem_magic.widgets.columns import LAYERS, NOT_YET_KNOWN

if TYPE_CHECKING:
    from gpumem_magic.attribution.ledger import Balance

# A longer log takes the attribution seconds, in which the next cell would run slower: its samples stay as they were.
RELABEL_LIMIT = 100_000

# The roles that decide by themselves, in the order of the rules that the report has (`attribution.categories`).
_ROLES = {
    "parameter": (5, "parameters"),
    "buffer": (4, "buffers"),
    "optimizer_state": (3, "optimizer_state"),
    "gradient": (2, "gradients"),
    "input": (1, "inputs"),
}


class LiveLabels:
    """What is live on one device and what is known about it, kept up to date with a log's events and the sightings.

    An allocation's category is decided by the best sighting in its life, like the report's.
    """

    def __init__(
        self, device: int, start: Iterable[Segment], carried: Mapping[int, Label], origins: Mapping[int, str]
    ) -> None:
        self._device = device
        self._origins = origins
        # address -> [requested bytes, rank of what is known, category, position of birth]
        self._live: dict[int, list[Any]] = {}
        self._sums = dict.fromkeys(LAYERS, 0)
        # How many events have been taken in.
        self.position = 0
        self._looked = 0
        for segment in start:
            for block in segment.blocks:
                if block.state == ACTIVE:
                    label = carried.get(block.address)
                    category = label.category if label is not None else NOT_YET_KNOWN
                    self._live[block.address] = [block.requested_size, 0, category, -1]
                    self._sums[category] += block.requested_size

    def requested(self) -> dict[str, int]:
        """Layer -> requested bytes of what is live."""
        return dict(self._sums)

    def advance(self, events: Sequence[TraceEvent], sightings: Sequence[Sighting], end: int) -> None:
        """Takes in what has been added to both since the last call, the events up to `end`."""
        looks = len(sightings)
        while self._looked < looks:
            look = sightings[self._looked]
            self._looked += 1
            if look.device == self._device:
                self._replay(events, min(look.position, end))
                self._see(look)
        self._replay(events, end)

    def _replay(self, events: Sequence[TraceEvent], end: int) -> None:
        for position in range(self.position, end):
            event = events[position]
            action = event.action
            if action == "alloc":
                category = (
                    "workspace"
                    if self._origins.get(position) in ("workspace", "estimate", "recurrent_scratch")
                    else NOT_YET_KNOWN
                )
                self._live[event.address] = [event.size, 0, category, position]
                self._sums[category] += event.size
            elif action in ("free_requested", "free_completed"):
                gone = self._live.pop(event.address, None)
                if gone is not None:
                    self._sums[gone[2]] -= gone[0]
        self.position = max(self.position, end)

    def _see(self, look: Sighting) -> None:
        rank, category = _ROLES.get(look.role, (0, ""))
        block = self._live.get(look.address)
        # A look from before the block's birth was at an earlier tenant of its address.
        if block is None or rank <= block[1] or block[3] >= look.position or block[2] == "workspace":
            return
        # The weakest evidence does not overrule what an earlier recording said.
        if rank == 1 and block[2] != NOT_YET_KNOWN:
            return
        self._sums[block[2]] -= block[0]
        self._sums[category] += block[0]
        block[1], block[2] = rank, category


def requested_now(
    segments: Iterable[Segment], carried: Mapping[int, Label], at_end: Mapping[int, tuple[int, str]]
) -> tuple[dict[str, int], dict[int, tuple[int, str]]]:
    """Layer -> requested bytes of what is allocated now, without a recording; and what of `at_end` is still there.

    carried: address -> label, from the device. at_end: address -> (requested bytes, category) when the last recording ended,
    which includes what it could not explain.
    """
    sums = dict.fromkeys(LAYERS, 0)
    left: dict[int, tuple[int, str]] = {}
    for segment in segments:
        for block in segment.blocks:
            if block.state != ACTIVE:
                continue
            known = at_end.get(block.address)
            # A block of another size has another tenant.
            if known is not None and known[0] == block.requested_size:
                left[block.address] = known
            label = carried.get(block.address)
            category = label.category if label is not None else left.get(block.address, (0, NOT_YET_KNOWN))[1]
            sums[category] += block.requested_size
    return sums, left


def sums_of(live: Mapping[int, tuple[int, str]]) -> dict[str, int]:
    """Layer -> requested bytes of blocks given as address -> (requested bytes, category)."""
    sums = dict.fromkeys(LAYERS, 0)
    for size, category in live.values():
        sums[category] += size
    return sums


def layers(requested: Mapping[str, int] | None, counters: Counters) -> dict[str, int | None]:
    """All layers of a moment, which add up to what the counters say. requested: None where no category is known."""
    found: dict[str, int | None] = dict.fromkeys(LAYERS, 0)
    if requested is None:
        found[NOT_YET_KNOWN] = counters.allocated
    else:
        found.update(requested)
        found["rounding"] = counters.allocated - sum(requested.values())
    found["cached"] = counters.reserved - counters.allocated
    found["context"] = counters.context
    found["other_processes"] = counters.other_processes
    found["context_or_others"] = counters.context_or_others
    return found


def relabel(
    recording: Recording, device: int, positions: Iterable[int]
) -> tuple[dict[int, Balance], dict[int, tuple[int, str]]]:
    """The report's categories for samples of a recording that is over.

    positions: as the device told them; those that its log had to leave out are left out. Returns position -> what was there,
    and address -> (requested bytes, category) of what was live at the end.
    Raises ValueError where the log is longer than `RELABEL_LIMIT` events.
    """
    from gpumem_magic.attribution.categories import attribute
    from gpumem_magic.attribution.ledger import Ledger
    from gpumem_magic.snapshot.timeline import Timeline

    log = recording.logs[device]
    if len(log.events) > RELABEL_LIMIT:
        raise ValueError(f"{len(log.events):,} events are too many to go through again")
    timeline = Timeline(log.start, log.events, log.settings)
    labels = attribute(log, timeline, recording.spans, recording.sightings, recording.checkpoints)
    if log.places is None:
        places = {position: position for position in positions if 0 <= position <= len(log.events)}
    else:
        places = {position: log.places[position] for position in positions if position in log.places}
    balances = Ledger(timeline, labels).at(places.values())
    at_end = {
        allocation.address: (allocation.requested, label.category)
        for allocation, label in zip(timeline.allocations, labels, strict=True)
        if allocation.freed is None
    }
    return {position: balances[place] for position, place in places.items()}, at_end
