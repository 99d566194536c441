"""The history of PyTorch's real allocators while recordings are open: a ring of events, and marks at one reading each.

A user's own recording is left as it is and read along. Where CUDA is not in use yet, ours begins with it. What the ring
dropped stays known as totals, from the marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gpumem_magic.allocator.settings import settings_from_dict
from gpumem_magic.devices import torch_memory
from gpumem_magic.devices.driver import words_of
from gpumem_magic.devices.readings import KIND_OF_ACTION, NOTHING, CountersReading, Counts, minus, plus, reading_of
from gpumem_magic.failures import swallows
from gpumem_magic.patching import Patches
from gpumem_magic.snapshot.model import Segment, TraceEvent
from gpumem_magic.snapshot.plain import events_from_data, segments_from_data
from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS, AllocatorSettings

RING = 100_000
"""Events kept per device: about 20 MB in PyTorch, and some 70 MB more for a moment while they are read."""

STACKS = 20_000
"""Of so many events per device the requests have Python's stacks. A long run is spared what they cost."""

_TRIES = 3


class CountersMark(NamedTuple):
    """What a device's counters said when somebody asked for the position. raw: the number of events since the log began."""

    raw: int
    counts: Counts
    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int


@dataclass
class Chunk:
    """Consecutive events of a log, from its event number `first` on, and the segments behind the last of them."""

    first: int
    events: list[TraceEvent]
    segments: tuple[Segment, ...]

    @property
    def end(self) -> int:
        return self.first + len(self.events)


@dataclass
class OpenLog:
    """A log under way. base: the device's counts when it began."""

    device: int
    base: Counts
    start: tuple[Segment, ...]
    marks: list[CountersMark] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    drained: bool = False


@dataclass
class _Taken:
    """A snapshot, with the counts of each device that belong to it."""

    data: Mapping[str, Any]
    counts: dict[int, Counts]


class AllocatorHistory:
    """The logs of all devices of a machine. Not thread-safe: whoever shares it holds a lock.

    ring: how many events PyTorch is asked to keep per device.
    """

    def __init__(self, torch: Any, devices: int, ring: int = RING) -> None:
        self._torch = torch
        self._devices = range(devices)
        self._ring = ring
        self._open: list[OpenLog] = []
        self._patches = Patches()
        self._is_ours = False
        self._has_stacks = False
        # Our own call of what is patched is under way.
        self._calling = False
        self._waits: Any = None
        self._taken: _Taken | None = None
        # The backend while logs are open, once CUDA is in use: it is the same from then on.
        self._settled: str | None = None
        # What the user's own resets took from the counters.
        self._lost: dict[int, Counts] = {}
        # What a reader must know about the logs that ended last.
        self.notes: list[str] = []
        # Whether PyTorch would not record, in the logs that are open or ended last.
        self.is_refused = False

    @property
    def backend(self) -> str:
        """``native`` where there is a history; else what stands in its way."""
        if self._settled is not None:
            return self._settled
        found = torch_memory.backend(self._torch)
        if self._open and torch_memory.in_use(self._torch):
            self._settled = found
        return found

    def read(self, index: int) -> CountersReading:
        """The counters of now, all 0 where there are none: CUDA not in use, or an allocator of somebody else's."""
        if not torch_memory.in_use(self._torch):
            return CountersReading()
        try:
            return reading_of(self._torch.cuda.memory_stats_as_nested_dict(index))
        except (RuntimeError, NotImplementedError) as error:
            self._note(f"PyTorch does not report its counters for cuda:{index}: {words_of(error)}.")
            return CountersReading()

    def segments(self, index: int) -> tuple[Segment, ...]:
        """The segments of now; () where CUDA is not in use or the allocator has none."""
        if self.backend != "native" or not torch_memory.in_use(self._torch):
            return ()
        return _segments_of(torch_memory.segments(self._torch), index)

    # ---- logs

    def open(self, index: int) -> OpenLog:
        """Begins a log. Where PyTorch can't record, which becomes a note, it has totals only."""
        if not self._open:
            self.notes.clear()
            self._taken = self._settled = None
            self.is_refused = False
            if self.backend == "native":
                self._begin()
        log = self._opened(index)
        self._mark(log, self.read(index))
        self._open.append(log)
        return log

    def _opened(self, index: int) -> OpenLog:
        """Start and counts of the same moment, also where another thread allocates just then."""
        for _ in range(_TRIES):
            counts = self._counts(index)
            start = self.segments(index)
            if self._counts(index) == counts:
                break
        if self.backend != "native":
            counts = NOTHING
        return OpenLog(index, counts, start)

    def position(self, log: OpenLog) -> int:
        """The number of events so far, or, where events are not counted, of changes seen so far."""
        return self.moment(log)[0]

    def moment(self, log: OpenLog) -> tuple[int, CountersReading]:
        """The position of now, and the reading that it is from."""
        reading = self.read(log.device)
        mark = self._mark(log, reading)
        if self._has_stacks and mark.raw > STACKS:
            self._record(stacks=False)
        # The beginning of a long run is the part that people look at: it is kept, once, before the ring loses it.
        if self._is_ours and not log.drained and self._ring // 2 <= mark.raw <= self._ring:
            self._drain()
        return mark.raw, reading

    def forget(self, log: OpenLog, needed: Set[int]) -> None:
        """Drops marks at positions that are not needed, but for the highest of those that follow each other."""
        chosen: list[CountersMark] = []
        dropped: list[CountersMark] = []
        last = log.marks[-1]
        for mark in log.marks:
            if chosen and mark is not last and mark.raw not in needed:
                dropped.append(mark)
                continue
            chosen += _highest(dropped, chosen[-1], mark) if dropped else ()
            chosen.append(mark)
            dropped.clear()
        log.marks[:] = chosen

    def close(self, log: OpenLog) -> AllocatorSettings:
        """Ends a log: its marks and chunks are complete then. Returns the allocator's settings."""
        self._mark(log, self.read(log.device))
        settings = DEFAULT_SETTINGS
        try:
            if self.backend == "native" and torch_memory.in_use(self._torch):
                taken = self._take(log)
                self._keep(log, taken)
                settings = settings_from_dict(taken.data.get("allocator_settings", {}))
                # A program may have set it since: a snapshot tells what the environment said only.
                settings = replace(settings, memory_fraction=torch_memory.memory_fraction(self._torch, log.device))
        except Exception as error:
            if not swallows(error):
                raise
            self._note(f"The history of cuda:{log.device} could not be read: {words_of(error)}.")
        finally:
            self._leave([other for other in self._open if other is not log])
        return settings

    def drop(self, index: int) -> None:
        """Ends a device's logs that are still open, without reading them."""
        self._leave([other for other in self._open if other.device != index])

    def _leave(self, left: list[OpenLog]) -> None:
        if self._open and not left:
            self._end()
        self._open = left

    def _mark(self, log: OpenLog, reading: CountersReading) -> CountersMark:
        figures = reading[1:5]
        if not log.marks:
            raw, counts = 0, NOTHING
        elif self.backend == "native":
            lost = self._lost.get(log.device)
            counts = minus(reading.counts if lost is None else plus(reading.counts, lost), log.base)
            raw = max(sum(counts), log.marks[-1].raw)
        else:
            counts = NOTHING
            raw = log.marks[-1].raw + (log.marks[-1][2:] != figures)
        mark = CountersMark(raw, counts, *figures)
        if log.marks and log.marks[-1].raw == raw:
            log.marks[-1] = mark
        else:
            log.marks.append(mark)
        return mark

    def _counts(self, index: int) -> Counts:
        return plus(self.read(index).counts, self._lost.get(index, NOTHING))

    # ---- reading the history

    def _take(self, log: OpenLog) -> _Taken:
        """A snapshot of now; the last one where nothing has happened on the log's device since."""
        if self._taken is None or self._taken.counts.get(log.device) != self._counts(log.device):
            for _ in range(_TRIES):
                counts = {index: self._counts(index) for index in self._devices}
                self._taken = _Taken(torch_memory.snapshot(self._torch), counts)
                if all(self._counts(index) == count for index, count in counts.items()):
                    break
        assert self._taken is not None
        return self._taken

    def _keep(self, log: OpenLog, taken: _Taken) -> None:
        """Adds the events of the log that a snapshot holds, oldest first."""
        counts = minus(taken.counts[log.device], log.base)
        traces = taken.data.get("device_traces", ())
        events = newest(traces[log.device] if log.device < len(traces) else (), counts)
        segments = _segments_of(taken.data["segments"], log.device)
        log.chunks.append(Chunk(sum(counts) - len(events), events, segments))

    def _drain(self) -> None:
        self._taken = None
        for log in self._open:
            self._keep(log, self._take(log))
            log.drained = True
        self._taken = None

    # ---- PyTorch's own recording

    def _begin(self) -> None:
        try:
            self._watch_user()
            if torch_memory.in_use(self._torch):
                self._record()
            else:
                self._waits = torch_memory.on_first_use(self._torch, self._record)
        except BaseException:
            self._end()
            raise

    def _record(self, stacks: bool = True) -> None:
        """Raises nothing of PyTorch's: it also runs inside the user's first call of CUDA."""
        self._calling = True
        try:
            if self._is_ours or not torch_memory.history_is_on(self._torch):
                torch_memory.begin_history(self._torch, self._ring, stacks=stacks)
                self._is_ours, self._has_stacks = True, stacks
        except Exception as error:
            if not swallows(error):
                raise
            self.is_refused = True
            self._note(f"PyTorch can't record its allocator's history here ({words_of(error)}): rows show totals.")
        finally:
            self._calling = False

    def _end(self) -> None:
        self._taken = None
        self._patches.undo()
        self._lost.clear()
        if self._waits is not None:
            self._waits()
            self._waits = None
        if self._is_ours:
            torch_memory.end_history(self._torch)
        self._is_ours = self._has_stacks = False

    def _watch_user(self) -> None:
        """While logs are open: the user's program may begin or end a recording of its own, or reset the counters."""
        binding = self._torch._C
        for name in (torch_memory.BEGIN_HISTORY, torch_memory.BEGIN_HISTORY_LEGACY):
            begin = getattr(binding, name, None)
            if begin is not None:
                self._patches.set(binding, name, self._user_history(begin))
        reset = getattr(binding, torch_memory.RESET_TOTALS, None)
        if reset is not None:
            self._patches.set(binding, torch_memory.RESET_TOTALS, self._user_reset(reset))

    def _user_history(self, begin: Any) -> Any:
        def record(enabled: Any = None, *arguments: Any, **options: Any) -> Any:
            if self._calling or not torch_memory.in_use(self._torch):
                return begin(enabled, *arguments, **options)
            # Whatever they ask for may forget the trace, which is ours as well.
            try:
                self._drain()
            except Exception as error:
                if not swallows(error):
                    raise
            result = begin(enabled, *arguments, **options)
            ours, self._is_ours, self._has_stacks = self._is_ours, False, False
            if enabled is None or enabled is False:
                self._record()
            elif ours:
                self._note(
                    "The program began a memory history of its own, which goes on; this report was read from it."
                )
            return result

        return record

    def _user_reset(self, reset: Any) -> Any:
        def forget(device: Any = 0, *arguments: Any, **options: Any) -> Any:
            index = int(device)
            before = self._counts(index)
            result = reset(device, *arguments, **options)
            self._lost[index] = minus(before, self.read(index).counts)
            return result

        return forget

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _highest(dropped: Sequence[CountersMark], before: CountersMark, after: CountersMark) -> list[CountersMark]:
    """Those that rise above their surroundings, in order: a peak that no later mark may tell."""
    allocated = max(dropped, key=lambda mark: mark.allocated)
    reserved = max(dropped, key=lambda mark: mark.reserved)
    found = {
        mark.raw: mark
        for mark, rises in (
            (allocated, allocated.allocated > max(before.allocated, after.allocated)),
            (reserved, reserved.reserved > max(before.reserved, after.reserved)),
        )
        if rises
    }
    return [found[raw] for raw in sorted(found)]


def newest(trace: Sequence[Mapping[str, Any]], counts: Counts) -> list[TraceEvent]:
    """The newest events of a trace that the counts of a log account for; what is older was before it."""
    remaining = list(counts)
    missing = sum(counts)
    events: list[Mapping[str, Any]] = []
    for event in reversed(trace):
        if not missing:
            break
        kind = KIND_OF_ACTION.get(event["action"])
        if kind is None:
            continue
        if not remaining[kind]:
            break
        remaining[kind] -= 1
        missing -= 1
        events.append(event)
    events.reverse()
    return list(events_from_data(events))


def _segments_of(segments: Sequence[Mapping[str, Any]], index: int) -> tuple[Segment, ...]:
    return segments_from_data([segment for segment in segments if segment.get("device", 0) == index])
