"""Everything used of `torch.cuda` beyond its public functions, in one place.

Read in the sources of torch 2.9 to 2.13; the underscored names may change. Between these versions only two things did:
`memory_snapshot(include_traces=)` came (pull request 172672, in 2.11), and `skip_actions=`, with which a user's own recording may
leave kinds of events out (168183, after 2.9). Each function raises AttributeError or RuntimeError where PyTorch lacks what it
needs, and the caller says so. `torch` is handed in everywhere: nothing here imports it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpumem_magic.patching import Patches

BEGIN_HISTORY = "_cuda_record_memory_history"
BEGIN_HISTORY_LEGACY = "_cuda_record_memory_history_legacy"
RESET_TOTALS = "_cuda_resetAccumulatedMemoryStats"


def in_use(torch: Any) -> bool:
    """Whether this process uses CUDA already. Asking does not start it."""
    return bool(torch.cuda.is_initialized())


def count_below(torch: Any) -> int:
    """How many GPUs PyTorch's C++ finds, whatever stands in the place of `torch.cuda`; 0 in a build for the host.

    `_cuda_getDeviceCount` is what `torch.cuda.device_count` ends in. Tested on torch 2.9, 2.11 and 2.15 (CUDA builds), and 2.13.
    """
    ask = getattr(torch._C, "_cuda_getDeviceCount", None)
    try:
        return int(ask()) if ask is not None else 0
    except RuntimeError:
        # A driver that does not answer.
        return 0


def has_context(torch: Any, index: int) -> bool:
    """Whether this process has a CUDA context on a device. Asking makes none."""
    if not in_use(torch):
        return False
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return bool(ask(index)) if ask is not None else torch.cuda.memory_reserved(index) > 0


def memory_fraction(torch: Any, index: int) -> float:
    """The share of a device's memory that this process may reserve; 1 is no limit, also where PyTorch can't tell or CUDA is
    not in use. (`get_per_process_memory_fraction` is in 2.9 to 2.13.)"""
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return float(ask(index)) if ask is not None and in_use(torch) else 1.0


def history_is_on(torch: Any) -> bool:
    """Whether somebody records the allocator's history now. CUDA must be in use."""
    return bool(torch._C._cuda_isHistoryEnabled())


def check_history(torch: Any) -> None:
    """Raises RuntimeError, in one line with the version, where PyTorch does not have what a history is made of.

    What is asked for is the same in torch 2.9 to 2.13. It changes nothing and brings nothing into use.
    """
    version = getattr(torch, "__version__", "of unknown version")
    for owner, name in (
        (torch._C, BEGIN_HISTORY),
        (torch._C, "_cuda_isHistoryEnabled"),
        (torch.cuda.memory, "_snapshot"),
    ):
        if not callable(getattr(owner, name, None)):
            raise RuntimeError(f"torch {version} has no {name}, by which 2.9 to 2.13 record")
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record is None:
        raise RuntimeError(f"torch {version} has no _record_memory_history, by which 2.9 to 2.13 record")
    taken = inspect.signature(record).parameters
    lacking = [name for name in ("enabled", "context", "stacks", "max_entries") if name not in taken]
    if lacking and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        raise RuntimeError(
            f"_record_memory_history of torch {version} has no {' and no '.join(lacking)}=, unlike that of 2.9 to 2.13"
        )


def begin_history(torch: Any, entries: int, *, stacks: bool) -> None:
    """Records what every allocator does in a ring of so many events per device, with Python's stack of each request or without.

    Called again, it changes what is recorded from then on: `setMaxEntries` and `record_context_` in `CUDACachingAllocator.cpp`,
    2.9 to 2.13, leave the events that are there.
    """
    check_history(torch)
    context = "alloc" if stacks else None
    torch.cuda.memory._record_memory_history(enabled="all", context=context, stacks="python", max_entries=entries)


def end_history(torch: Any) -> None:
    """Ends the recording and gives its host memory back."""
    torch.cuda.memory._record_memory_history(enabled=None)


def snapshot(torch: Any) -> dict[str, Any]:
    """Segments and traces of all devices: some 7 microseconds for each event of a trace. RuntimeError if it has other fields."""
    found: dict[str, Any] = torch.cuda.memory._snapshot()
    _check_fields(torch, found, ("segments", "device_traces"), "a snapshot")
    for segment in found["segments"][:1]:
        _check_fields(torch, segment, _SEGMENT_FIELDS, "a segment")
    for trace in found["device_traces"]:
        for event in trace[-1:]:
            # One for an allocation that failed has no address.
            address = "device_free" if event.get("action") == "oom" else "addr"
            _check_fields(torch, event, ("action", address, "size", "stream"), "an event")
    return found


_SEGMENT_FIELDS = ("device", "address", "total_size", "stream", "segment_type", "blocks")


def _check_fields(torch: Any, found: Mapping[str, Any], names: Sequence[str], what: str) -> None:
    lacking = [name for name in names if name not in found]
    if lacking:
        version = getattr(torch, "__version__", "of unknown version")
        raise RuntimeError(
            f"{what} of torch {version} has no {' and no '.join(map(repr, lacking))}, unlike those of 2.9 to 2.13"
        )


def segments(torch: Any) -> Sequence[Mapping[str, Any]]:
    """The segments of all devices, without traces where PyTorch can leave them out (2.11 and later)."""
    try:
        found: Sequence[Mapping[str, Any]] = torch.cuda.memory_snapshot(include_traces=False)
    except TypeError:
        found = torch.cuda.memory_snapshot()
    return found


def backend(torch: Any) -> str:
    """``native``, ``cudaMallocAsync``, ``pluggable``, or ``uncached`` (PYTORCH_NO_CUDA_MEMORY_CACHING is set)."""
    # PyTorch looks whether it is set, not what it says.
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        return "uncached"
    return str(torch.cuda.get_allocator_backend())


def on_first_use(torch: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Has `call` run when CUDA comes into use; returns what takes that back."""
    queue = torch.cuda._queued_calls
    entry = (call, ["gpumem_magic: begins to record the allocator's history\n"])
    queue.append(entry)

    def forget() -> None:
        # PyTorch empties or replaces the queue when it has run.
        for position, other in enumerate(list(torch.cuda._queued_calls)):
            if other is entry:
                del torch.cuda._queued_calls[position]

    return forget


def is_present(torch: Any) -> bool:
    """Whether there is a GPU for `torch.cuda`. Unlike a plain `is_available`, asking leaves a later fork usable."""
    if in_use(torch):
        return True
    with Patches() as patches:
        patches.environment("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        return bool(torch.cuda.is_available())
