"""Streams, events, generators and device contexts of the virtual GPU: they keep their places, and do nothing.

In a backward pass a node runs on the stream on which it was made (torch/csrc/autograd/engine.cpp, `opt_parent_stream`), unless
its hooks enter another. Nodes are numbered in their order, so that it is enough to note at which number streams change.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import Counter
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

from gpumem_magic.virtual.engine.modes import STATE
from gpumem_magic.virtual.engine.node_numbers import number_of
from gpumem_magic.virtual.engine.waiting import CAPTURING, refuse_waiting

# So many changes of streams are remembered for each device: graphs are not older.
_MOST = 10_000
# So many streams of each priority has a device; a program that makes more gets the first ones again (`kStreamsPerPool` in
# ``CUDAStream.cpp``).
_POOL = 32
# By device and priority how many were given out.
_given: Counter[tuple[int, int]] = Counter()


class StreamState(threading.local):
    """Each thread's current device and current streams, as in CUDA."""

    device = 0
    within_pass = 0
    """How many streams the hooks of a backward pass have entered and not left."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.changes: dict[int, tuple[list[int], list[Stream | None]]] = {}
        """For each device with other streams than its first: from which node on (by number) which was the current one."""

    def change(self, device: int, stream: Stream) -> None:
        before = self.streams.get(device)
        self.streams[device] = stream
        if STATE.backward:
            return
        numbers, streams = self.changes.setdefault(device, ([-1], [before]))
        number = _get_sequence_nr()
        if numbers[-1] == number:
            streams[-1] = stream
            return
        numbers.append(number)
        streams.append(stream)
        del numbers[:-_MOST], streams[:-_MOST]

    def stream(self, device: int) -> Stream | None:
        """The current one; None stands for the device's first."""
        if STATE.backward and not self.within_pass and device in self.changes:
            node = torch._C._current_autograd_node()
            if node is not None:
                numbers, streams = self.changes[device]
                return streams[max(0, bisect_right(numbers, number_of(node)) - 1)]
        return self.streams.get(device)


CURRENT = StreamState()


def device_index(device: Any) -> int:
    """The index that a device argument means (int, "cuda:1", torch.device, torch.cuda.device, None for the current one).

    Raises ValueError for a device that is not CUDA.
    """
    if device is None:
        return CURRENT.device
    if isinstance(device, int):
        return CURRENT.device if device < 0 else device
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, DeviceContext):
        return device.idx
    if device.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return CURRENT.device if device.index is None else int(device.index)


def _from_pool(device: int, priority: int) -> int:
    """The number of the next stream of such a priority, from 1 on; 0 is the device's first stream."""
    level = min(max(0, -priority), -Stream.priority_range()[1])
    taken = _given[device, level]
    _given[device, level] += 1
    return 1 + _POOL * level + taken % _POOL


def begin_pool(device: int) -> None:
    """The first stream that a program makes comes with all of PyTorch's pool. What takes its place knows what they take."""


class Stream:
    """Stands for `torch.cuda.Stream`. Memory belongs to the stream that it was first allocated on, as on a device."""

    def __init__(self, device: Any = None, priority: int = 0, **numbers: int) -> None:
        """numbers: `stream_id`, and `device_index`, of a stream that is there; a new one has none."""
        self.device = torch.device(
            "cuda", numbers["device_index"] if "device_index" in numbers else device_index(device)
        )
        self.device_index = self.device.index
        if "stream_id" not in numbers:
            begin_pool(self.device_index)
            numbers["stream_id"] = _from_pool(self.device_index, priority)
        self.device_type = 1
        self.priority = priority
        self.cuda_stream = self.stream_id = numbers["stream_id"]
        self._outer: list[Stream] = []

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest: PyTorch has streams of four priorities (``CUDAStream.h``)."""
        return 0, -3

    def synchronize(self) -> None:
        """There is nothing to wait for."""
        if self.is_capturing():
            refuse_waiting()

    def _wait(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing to wait for."""

    wait_event = wait_stream = _wait

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return CAPTURING.graphs > 0 and current_stream(self.device) == self

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._outer.append(current_stream(self.device))
        CURRENT.change(self.device_index, self)
        CURRENT.within_pass += STATE.backward > 0
        return self

    def __exit__(self, *error: object) -> None:
        CURRENT.change(self.device_index, self._outer.pop())
        CURRENT.within_pass -= STATE.backward > 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.cuda_stream, self.device) == (other.cuda_stream, other.device)

    def __hash__(self) -> int:
        return hash((self.cuda_stream, self.device))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class ExternalStream(Stream):
    """Stands for `torch.cuda.ExternalStream`."""

    def __init__(self, stream_ptr: int, device: Any = None, **kwargs: Any) -> None:
        super().__init__(device, stream_id=stream_ptr)


class Event:
    """Stands for `torch.cuda.Event`. Nothing runs on a device, so the time between two is the host's."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        # C++ makes an event when it is recorded first.
        self.cuda_event = self.event_id = 0
        self.device = torch.device("cuda", CURRENT.device)
        self._at: float | None = None
        self._is_timed = enable_timing

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {self.cuda_event:#x}>" if self.cuda_event else "<torch.cuda.Event uninitialized>"

    def record(self, stream: Any = None) -> None:
        self.cuda_event = self.event_id = id(self)
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def ipc_handle(self) -> bytes:
        """As many bytes as `cudaIpcEventHandle_t` has. What another process makes of them waits for nothing either."""
        return bytes(64)

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Event:
        return cls(interprocess=True)

    def elapsed_time(self, end_event: Event) -> float:
        """Host milliseconds between the two records."""
        if not (self._is_timed and end_event._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at is None or end_event._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._at - self._at) * 1000


_DEVICE, _STREAM, _EVENT = torch.device, torch.Stream, torch.Event


class _AnyKind(type):
    """Stands for a type that serves every kind of device, `torch.Stream` or `torch.Event`."""

    theirs: Any
    ours: Any

    def __call__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(device, str):
            device = _DEVICE(device)
        if isinstance(device, _DEVICE) and device.type != "cuda":
            return cls.theirs(device, *args, **kwargs)
        # An event belongs to the device that records it.
        return cls.ours(device, *args, **kwargs) if cls.ours is Stream else cls.ours(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.theirs, cls.ours))


class AnyStream(metaclass=_AnyKind):
    """`torch.Stream` while the virtual GPU is on; without a device, a stream of the current CUDA device."""

    theirs, ours = _STREAM, Stream


class AnyEvent(metaclass=_AnyKind):
    """`torch.Event` while the virtual GPU is on."""

    theirs, ours = _EVENT, Event


class StreamContext:
    """Stands for `torch.cuda.StreamContext` (``with torch.cuda.stream(s)``)."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._device = CURRENT.device
            CURRENT.device = self.stream.device_index
            self.stream.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()
            CURRENT.device = self._device


def current_stream(device: Any = None) -> Stream:
    index = device_index(device)
    stream = CURRENT.stream(index)
    return Stream(index, stream_id=0) if stream is None else stream


def default_stream(device: Any = None) -> Stream:
    return Stream(device_index(device), stream_id=0)


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        CURRENT.device = stream.device_index
        CURRENT.change(stream.device_index, stream)


class DeviceContext:
    """Stands for `torch.cuda.device` (``with torch.cuda.device(1)``). None and negative numbers change nothing."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = CURRENT.device
        if self.idx >= 0:
            CURRENT.device = self.idx

    def __exit__(self, *error: object) -> None:
        CURRENT.device = self.prev_idx


class DeviceOf(DeviceContext):
    """Stands for `torch.cuda.device_of`."""

    def __init__(self, tensor: Any) -> None:
        super().__init__(tensor.get_device() if getattr(tensor, "is_cuda", False) else None)


class _GeneratorKind(type(torch.Generator)):  # type: ignore[misc]
    """``isinstance(g, torch.Generator)`` holds for every generator while the name is replaced."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(torch.Generator, metaclass=_GeneratorKind):
    """A generator on a virtual device: it has a seed and a state, and nothing draws from it."""

    _index: int

    def __new__(cls, device: Any = None) -> Any:
        if device is None or device == "cpu":
            return torch._C.Generator()
        target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cpu")
        if target.type != "cuda":
            return torch._C.Generator(device=target)
        generator: Any = super().__new__(cls)
        generator._index = device_index(target)
        return generator

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self._index)

    def get_state(self) -> torch.Tensor:
        """Seed and offset, 16 bytes, as CUDA's generator has them."""
        return rng_state(self.initial_seed())

    def set_state(self, state: torch.Tensor) -> Any:
        self.manual_seed(int(state.view(torch.int64)[0]))
        return self

    def clone_state(self) -> Any:
        """A generator of the same device in the same state: compiled code takes one for each draw that backward repeats."""
        return type(self)(self.device).graphsafe_set_state(self)

    def graphsafe_get_state(self) -> Any:
        return self.clone_state()

    def graphsafe_set_state(self, state: Any) -> Any:
        torch._C.Generator.set_state(self, torch._C.Generator.get_state(state))
        return self


def rng_state(seed: int) -> torch.Tensor:
    """The state of a CUDA generator with this seed and offset 0: 16 bytes."""
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    return torch._C._VariableFunctions.tensor([signed, 0], dtype=torch.int64).view(torch.uint8)
