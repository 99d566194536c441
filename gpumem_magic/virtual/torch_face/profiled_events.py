"""What PyTorch's profiler has recorded over a virtual GPU, as it would be over a card.

Ranges of our own stand among its events (`profiling`). They go, and so does what lies inside an operator's handling; changes of
memory become the events that CUDA's allocator sends (``reportMemoryUsageToProfiler`` in ``CUDACachingAllocator.cpp``: the block's
bytes, when memory is taken and when it is given back). What the host takes in order to handle operators is left out.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import MEMORY_EVENT_NAME

from gpumem_magic.failures import swallows

# Names of our ranges: around an operator's handling; inside it, where a new tensor on the host comes of it, with its bytes; at a
# change of the device's memory, with its number.
HANDLED, RETURNED, CHANGED = "gpumem_magic: handled", "gpumem_magic: returned ", "gpumem_magic: changed "
_Event = TypeVar("_Event")

# `c10::DeviceType` of CUDA.
_CUDA = 1

# ns. (Up to PyTorch 2.9 the profiler compares times as microseconds in floating point.)
_BEFORE = 1000

# As the profiler calls what a dispatch mode, and a tensor class, of Python's does.
_OF_DISPATCH = ("PythonDispatchMode", "PythonSubclass")


class MemoryChange(NamedTuple):
    """Memory that was taken on a device, or given back (then `nbytes` is below zero), and what was in use after it.

    early: whether it had come before the operator that found it (`StorageTable.drain`).
    """

    nbytes: int
    device: int
    address: int
    allocated: int
    reserved: int
    early: bool


class _Profiled(NamedTuple):
    """A recorded event. Times in ns; nbytes: of memory on the host that was taken or, below zero, given back."""

    name: str
    lane: object
    start: int
    end: int
    nbytes: int = 0


class _DeviceChange(NamedTuple):
    """A change of the device's memory, and when it came."""

    change: MemoryChange
    start: int


class Results:
    """What the profiler's C++ gives at the end, with the events that a device would have. Everything else is C++'s."""

    def __init__(self, results: Any, changes: Sequence[MemoryChange | None]) -> None:
        self._results = results
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._results, name)

    @functools.cached_property
    def _events(self) -> list[Any]:
        return _shown(self._results.events(), _row_of_event, _MemoryEvent, self._changes)

    def events(self) -> list[Any]:
        return self._events

    def save(self, path: str) -> None:
        """Writes the trace as a file of JSON."""
        self._results.save(path)
        try:
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                trace = json.load(file)
            trace["traceEvents"] = _shown(trace["traceEvents"], _row_of_trace, _as_written, self._changes)
            text = json.dumps(trace)
        except Exception as error:
            # (It may be a trace of another form, or too large to be read whole.)
            if not swallows(error):
                raise
            warnings.warn(f"{path} shows how operators run on a virtual GPU, and not its memory", stacklevel=2)
            return
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)


class _MemoryEvent:
    """A change of the device's memory, as the profiler tells it. What is not said here, the event answers that stood there."""

    def __init__(self, event: Any, told: _DeviceChange) -> None:
        self._event = event
        self._change = told.change
        self._start = told.start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)

    def name(self) -> str:
        return str(MEMORY_EVENT_NAME)

    def nbytes(self) -> int:
        return self._change.nbytes

    def device_type(self) -> Any:
        return DeviceType.CUDA

    def device_index(self) -> int:
        return self._change.device

    def start_ns(self) -> int:
        return self._start

    def end_ns(self) -> int:
        return self._start

    def duration_ns(self) -> int:
        return 0


def _row_of_event(event: Any) -> _Profiled | None:
    if event.device_type() != DeviceType.CPU:
        return None
    name, nbytes = event.name(), 0
    if name == MEMORY_EVENT_NAME:
        nbytes = event.nbytes()
    return _Profiled(name, event.start_thread_id(), event.start_ns(), event.end_ns(), nbytes)


def _row_of_trace(event: Mapping[str, Any]) -> _Profiled | None:
    if event.get("ph") not in ("X", "i"):
        return None
    # (Microseconds with three decimals.)
    start = round(event["ts"] * 1000)
    nbytes = event["args"]["Bytes"] if event["name"] == MEMORY_EVENT_NAME else 0
    lane = event["pid"], event["tid"]
    return _Profiled(event["name"], lane, start, start + round(event.get("dur", 0) * 1000), nbytes)


def _as_written(event: Mapping[str, Any], told: _DeviceChange) -> dict[str, Any]:
    change = told.change
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "s": "t",
        "name": MEMORY_EVENT_NAME,
        "pid": event["pid"],
        "tid": event["tid"],
        "ts": told.start / 1000,
        "args": {
            "Total Reserved": change.reserved,
            "Total Allocated": change.allocated,
            "Bytes": change.nbytes,
            "Device Id": change.device,
            "Device Type": _CUDA,
            "Addr": change.address,
        },
    }


def _shown(
    events: Sequence[_Event],
    row_of: Callable[[_Event], _Profiled | None],
    made: Callable[[_Event, _DeviceChange], Any],
    changes: Sequence[MemoryChange | None],
) -> list[Any]:
    """The events that a device would have. row_of: None for what is none of the host's; made: an event of the device's memory."""
    lanes: defaultdict[object, dict[int, _Profiled]] = defaultdict(dict)
    for number, event in enumerate(events):
        row = row_of(event)
        if row is not None:
            lanes[row.lane][number] = row
    read = [_Lane(rows, changes) for rows in lanes.values()]
    hidden = {number for lane in read for number in lane.hidden}
    told = {number: one for lane in read for number, one in lane.told.items()}
    on_host = sorted((found for lane in read for found in lane.on_host), key=lambda one: one[0])
    hidden.update(_of_handling(on_host))
    return [
        made(event, told[number]) if number in told else event
        for number, event in enumerate(events)
        if number not in hidden
    ]


# When, the event's number, the bytes, and None where no operator was being handled, else whether the bytes are for what it
# returns.
_OnHost = tuple[int, int, int, "bool | None"]


def _of_handling(on_host: Sequence[_OnHost]) -> Iterator[int]:
    """The numbers of those that are none of the program's: memory that an operator's handling has taken, and where that is given
    back, now or later. What is given back is known by its bytes alone."""
    ours: Counter[int] = Counter()
    for _, number, nbytes, returned in on_host:
        if nbytes > 0 and returned is False:
            ours[nbytes] += 1
            yield number
        elif nbytes < 0 and ours[-nbytes]:
            ours[-nbytes] -= 1
            yield number


class _Lane:
    """The events of one thread, each inside of those that it began in.

    hidden: the numbers of those that are not shown. told: by number, what is told in the place of others. on_host: what became of
    the host's memory.
    """

    def __init__(self, rows: Mapping[int, _Profiled], changes: Sequence[MemoryChange | None]) -> None:
        self._rows = rows
        self._changes = changes
        self.hidden: set[int] = set()
        self.told: dict[int, _DeviceChange] = {}
        self.on_host: list[_OnHost] = []
        # The numbers of those that the next one is inside of, the outermost first, and where operators' handling is among them.
        self._above: list[int] = []
        self._handling: list[int] = []
        # Where in `on_host` the outermost handling began.
        self._since = 0
        # (Of two that begin together the longer one is around the other.)
        for number in sorted(rows, key=lambda one: (rows[one].start, -rows[one].end)):
            self._read(number, rows[number])

    def _read(self, number: int, row: _Profiled) -> None:
        while self._above and self._rows[self._above[-1]].end <= row.start:
            self._above.pop()
            if self._handling and self._handling[-1] == len(self._above):
                self._handling.pop()
        if row.name == MEMORY_EVENT_NAME:
            self.on_host.append((row.start, number, row.nbytes, False if self._handling else None))
        elif row.name.startswith(CHANGED):
            self._tell(number, self._changes[int(row.name[len(CHANGED) :])])
        elif row.name.startswith(RETURNED):
            self.hidden.add(number)
            self._return(int(row.name[len(RETURNED) :]))
        else:
            if row.name == HANDLED:
                if not self._handling:
                    self._since = len(self.on_host)
                self._show_operator()
                self._handling.append(len(self._above))
            if self._handling:
                self.hidden.add(number)
            self._above.append(number)

    def _show_operator(self) -> None:
        """What is handled next is an operator of the program's, and so is what brought it here."""
        inside = self._above[self._handling[-1] + 1 if self._handling else 0 :]
        self.hidden.difference_update(inside)
        if inside and self._rows[inside[-1]].name in _OF_DISPATCH:
            self.hidden.add(inside[-1])

    def _tell(self, number: int, change: MemoryChange | None) -> None:
        if change is None or not change.nbytes:
            self.hidden.add(number)
            return
        start = self._rows[number].start
        if change.early and self._handling:
            start = self._rows[self._operator()].start - _BEFORE
        self.told[number] = _DeviceChange(change, start)

    def _operator(self) -> int:
        """The operator that is handled now; where it came without C++, its handling."""
        at = first = self._handling[-1]
        while at and self._rows[self._above[at - 1]].name in _OF_DISPATCH:
            at -= 1
        return self._above[at - 1 if at and self._rows[self._above[at - 1]].name != HANDLED else first]

    def _return(self, nbytes: int) -> None:
        """Of the memory that was taken since, the last of that size is for what is returned."""
        for index in reversed(range(self._since, len(self.on_host))):
            start, number, taken, _ = self.on_host[index]
            if taken == nbytes:
                self.on_host[index] = start, number, taken, True
                return
