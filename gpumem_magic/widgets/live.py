"""Categories while the cell runs: what has been seen so far.

Parameters, gradients, optimizer states, KV caches and inputs are known once somebody has been seen to hold them, workspaces and
autocast's copies from birth, and labels of earlier recordings stay. What a forward makes counts as activations, what a backward
makes as their gradients, until an object is seen to hold it. Everything else is `not_yet_known`: most categories depend on when
an allocation *ends*. When a measured cell is over, `relabel` gives its samples the categories that the report has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpumem_magic.attribution.categories import OF_A_TRAINING
from gpumem_magic.attribution.phase_map import Phase, PhaseMap, phases_on
from gpumem_magic.devices.base import Counters, DeviceLog, Label
from gpumem_magic.recording.model import BACKWARD, FORWARD, RECOMPUTATION, Recording, Sighting, Span
from gpumem_magic.snapshot.model import ACTIVE, Segment, TraceEvent
from gpumem_magic.widgets.columns import LAYERS, NOT_YET_KNOWN

if TYPE_CHECKING:
    from gpumem_magic.attribution.ledger import Balance

# A longer log takes the attribution seconds, in which the next cell would run slower: its samples stay as they were.
RELABEL_LIMIT = 100_000

# The roles that decide by themselves, in the order of the rules that the report has (`attribution.categories`).
_ROLES = {
    "parameter": (6, "parameters"),
    "kv_cache": (5, "kv_cache"),
    "buffer": (4, "buffers"),
    "optimizer_state": (3, "optimizer_state"),
    "gradient": (2, "gradients"),
    "input": (1, "inputs"),
}
# What the device tells at birth.
_ORIGINS = {
    "workspace": "workspace",
    "estimate": "workspace",
    "convolution_scratch": "workspace",
    "recurrent_scratch": "workspace",
    "autocast": "autocast_copies",
}
_RANKS = {category: rank for rank, category in _ROLES.values()}
_MADE = ("host_copy", "factory")
# What a phase makes, until the end of the cell tells which of it was only passing.
_OF_PHASE = {FORWARD: "activations", RECOMPUTATION: "activations", BACKWARD: "activation_gradients"}


class LiveLabels:
    """What is live on one device and what is known about it, told by what its allocator does, in which phase, and by sightings.

    An allocation's category is decided by the best sighting in its life, like the report's; before there is one, by its birth.
    """

    def __init__(self, device: int, start: Iterable[Segment], carried: Mapping[int, Label]) -> None:
        self._device = device
        # address -> [requested bytes, rank of what is known, category, position of birth]
        self._live: dict[int, list[Any]] = {}
        self._sums = dict.fromkeys(LAYERS, 0)
        # Results from outside of all phases: what is still there when backward begins was made for it.
        self._between: set[int] = set()
        self._phase: str | None = None
        # How many events have been taken in.
        self.position = 0
        self._looked = 0
        for segment in start:
            for block in segment.blocks:
                if block.state == ACTIVE:
                    self._live[block.address] = [block.requested_size, 0, NOT_YET_KNOWN, -1]
                    self._sums[NOT_YET_KNOWN] += block.requested_size
        self.carry(carried)

    def requested(self) -> dict[str, int]:
        """Layer -> requested bytes of what is live."""
        return dict(self._sums)

    def learn(self, at_end: Mapping[int, tuple[int, str]]) -> None:
        """Takes over what a report says of blocks. at_end: address -> (requested bytes, category)."""
        for address, (size, category) in at_end.items():
            block = self._live.get(address)
            # A block of another size has another tenant.
            if block is not None and block[0] == size:
                self._becomes(block, category)
                block[1] = _RANKS.get(category, 0)

    def carry(self, labels: Mapping[int, Label]) -> None:
        """Takes what a recording has found out, for blocks of which nothing was known."""
        for address, label in list(labels.items()):
            block = self._live.get(address)
            if block is not None and block[2] == NOT_YET_KNOWN:
                self._becomes(block, label.category)

    def advance(
        self, log: DeviceLog, sightings: Sequence[Sighting], end: int, spans: Callable[[int, int], Sequence[Span]]
    ) -> None:
        """Takes in what has been added since the last call, the events up to `end`. spans: by device, those after a position."""
        looks = len(sightings)
        of_event = PhaseMap(phases_on(self._device, spans(self._device, self.position))).at_event
        while self._looked < looks:
            look = sightings[self._looked]
            self._looked += 1
            if look.device == self._device:
                self._replay(log, min(look.position, end), of_event)
                self.see(look)
        self._replay(log, end, of_event)

    def _replay(self, log: DeviceLog, end: int, of_event: Callable[[int], Phase | None]) -> None:
        while self.position < end:
            phase = of_event(self.position)
            self.take(
                log.events[self.position],
                log.origins.get(self.position, "compute"),
                None if phase is None else phase.kind,
                log.copied.get(self.position),
            )

    def take(self, event: TraceEvent, origin: str, phase: str | None, source: int | None = None) -> None:
        """The next event. phase: its kind, None outside of all. source: the address of what it is a copy of."""
        if phase != self._phase:
            self._phase = phase
            if phase == BACKWARD:
                self._backward_begins()
        if event.action == "alloc":
            category = _ORIGINS.get(origin) or _OF_PHASE.get(phase or "", NOT_YET_KNOWN)
            if phase == BACKWARD and origin == "host_copy":
                # Saved on the host by forward, mostly.
                category = "activations"
            copied = self._live.get(source) if source is not None and phase is None else None
            if copied is not None and copied[2] in OF_A_TRAINING:
                category = copied[2]
            self._live[event.address] = [event.size, 0, category, self.position]
            self._sums[category] += event.size
            if phase is None and category == NOT_YET_KNOWN and origin not in _MADE:
                self._between.add(event.address)
        elif event.action in ("free_requested", "free_completed"):
            gone = self._live.pop(event.address, None)
            self._between.discard(event.address)
            if gone is not None:
                self._sums[gone[2]] -= gone[0]
        self.position += 1

    def _backward_begins(self) -> None:
        for address in self._between:
            block = self._live[address]
            if block[2] == NOT_YET_KNOWN:
                self._becomes(block, "activations")
        self._between.clear()

    def see(self, look: Sighting) -> None:
        """A look at a live object."""
        rank, category = _ROLES.get(look.role, (0, ""))
        block = self._live.get(look.address)
        # A look from before the block's birth was at an earlier tenant of its address.
        if block is None or rank <= block[1] or block[3] >= look.position or block[2] in _ORIGINS.values():
            return
        # The weakest evidence does not overrule what an earlier recording said.
        if rank == 1 and block[2] != NOT_YET_KNOWN:
            return
        self._becomes(block, category)
        block[1] = rank

    def _becomes(self, block: list[Any], category: str) -> None:
        self._sums[block[2]] -= block[0]
        self._sums[category] += block[0]
        block[2] = category


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
