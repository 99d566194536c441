"""What a recording says about one device, with every allocation labelled: the basis of reports, timelines and causes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

from gpumem_magic.attribution.categories import attribute
from gpumem_magic.attribution.from_stacks import Attribution, attribute_by_stacks
from gpumem_magic.attribution.ledger import Ledger, Outside
from gpumem_magic.attribution.tensors import Tensors
from gpumem_magic.devices.base import Label
from gpumem_magic.recording.model import Moment, Recording
from gpumem_magic.snapshot.model import Frame
from gpumem_magic.snapshot.recount import Extent
from gpumem_magic.snapshot.timeline import Allocation, Timeline
from gpumem_magic.snapshot.unpickle import SnapshotFileError, one_line


class DeviceView:
    """One device of a recording. What costs time is done when it is first asked for, and kept: make one for each recording."""

    def __init__(self, recording: Recording, device: int) -> None:
        self.recording = recording
        self.device = device
        self.log = recording.logs[device]

    @cached_property
    def timeline(self) -> Timeline:
        """Raises SnapshotFileError where a damaged file's sizes are beyond counting."""
        try:
            return Timeline(self.log.start, self.log.events, self.log.settings)
        except OverflowError:
            name = "the recording" if self.recording.file is None else one_line(self.recording.file.path)
            raise SnapshotFileError(
                f"{name}: its sizes add up to more than 8 EiB: they are damaged. Copy or record it again."
            ) from None

    @cached_property
    def attribution(self) -> Attribution:
        """By the best evidence that there is: labels that were kept, live objects and phases, or stacks, lifetimes and sizes."""
        known = self.recording.labels.get(self.device)
        if known is not None:
            return Attribution(known.of(self.timeline.allocations), {})
        if self.recording.was_watched:
            seen = self.recording.spans, self.recording.sightings, self.recording.checkpoints, self.recording.holds
            return Attribution(tuple(attribute(self.log, self.timeline, *seen)), {})
        return attribute_by_stacks(self.timeline, self.log.events, self.log.final or ())

    @property
    def labels(self) -> Sequence[Label]:
        """One for each allocation of the timeline, in order."""
        return self.attribution.labels

    @cached_property
    def tensors(self) -> Tensors:
        """What each allocation holds, what made it and what keeps it."""
        return Tensors(self.recording, self.log, self.timeline.allocations, self.labels, self.frames_of)

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger(self.timeline, self.labels)

    @property
    def end(self) -> int:
        """The last position."""
        return len(self.timeline)

    @property
    def peak(self) -> tuple[int, int]:
        """The highest allocated bytes, and the first position that has them."""
        return self.timeline.peak(0, self.end)

    @property
    def was_used(self) -> bool:
        """Whether anything lived or happened on the device."""
        return bool(self.timeline.allocations) or bool(self.log.events)

    def outside(self, position: int) -> Outside:
        """What the driver said at the nearest moment at or before a position; after it, where the context came in between."""
        rank = bisect_left(self._moments, position + 1, key=lambda pair: pair[0])
        at_or_before = self._moments[rank - 1][1] if rank else None
        behind = self._moments[rank][1] if rank < len(self._moments) else None
        if at_or_before is None:
            return Outside() if behind is None else Outside.of(behind.counters[self.device])
        now = Outside.of(at_or_before.counters[self.device])
        exact = at_or_before.positions[self.device] == position
        if not exact and now.context == 0 and behind is not None and self.timeline.reserved_at(position):
            return Outside.of(behind.counters[self.device])
        return now

    @cached_property
    def _moments(self) -> list[tuple[int, Moment]]:
        moments = [point.moment for point in self.recording.checkpoints]
        for span in self.recording.spans:
            moments += [span.start, span.end]
        known = [
            (moment.positions[self.device], moment)
            for moment in moments
            if self.device in moment.positions and self.device in moment.counters
        ]
        return sorted(known, key=lambda pair: (pair[0], pair[1].tick))

    def sizes(self, position: int) -> dict[str, int]:
        """Bytes by category at a position, in the order of a bar, then "allocated" and "reserved"."""
        balance = self.ledger.at([position])[position]
        known = {name: size for name, size in balance.categories(Outside()).items() if size is not None}
        return {**known, "allocated": balance.allocated, "reserved": balance.reserved}

    def why(self, one: Allocation) -> str:
        """How its category is known, or why it is not, as what is said of it; "" where live objects told it."""
        known = self.attribution
        return known.reasons.get(one.index) or known.grounds.get(one.index, "")

    def frames_of(self, one: Allocation) -> tuple[Frame, ...]:
        """The stack that asked for it, innermost first; () where none was recorded."""
        if one.born >= 0:
            return self.log.events[one.born].frames
        return self._frames_at_end.get(one.address, ()) if one.freed is None else ()

    def frames_of_free(self, one: Allocation) -> tuple[Frame, ...]:
        """The stack that gave it back; () where it lives on, or the trace has the request's stack there, too."""
        frames = () if one.freed is None else self.log.events[one.freed].frames
        return () if frames is self.frames_of(one) else frames

    def frames_of_extent(self, one: Extent) -> tuple[Frame, ...]:
        """The stack that asked the driver for it; () where none was recorded."""
        if one.born >= 0:
            # What only a block tells of was asked for before.
            event = self.log.events[one.born]
            return () if event.action == "alloc" else event.frames
        return self._segments_at_end.get(one.address, ()) if one.gone is None else ()

    def stacks_of_segments(self, position: int) -> dict[int, tuple[Frame, ...]]:
        """What asked for the memory that begins at an address, for all that is reserved at a position."""
        return {one.address: self.frames_of_extent(one) for one in self.timeline.extents if one.holds(position)}

    @cached_property
    def _segments_at_end(self) -> dict[int, tuple[Frame, ...]]:
        return {segment.address: segment.frames for segment in self.log.final or ()}

    @cached_property
    def _frames_at_end(self) -> dict[int, tuple[Frame, ...]]:
        return {block.address: block.frames for one in self.log.final or () for block in one.blocks if block.frames}
