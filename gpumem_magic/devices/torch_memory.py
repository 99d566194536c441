"""What is asked of `torch.cuda` beyond its public functions, in one place.

Seen in torch 2.9 to 2.13; the underscored names may change. Each function raises AttributeError or RuntimeError where PyTorch
lacks what it needs, and the caller says so. `torch` is handed in everywhere: nothing here imports it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

BEGIN_HISTORY = "_cuda_record_memory_history"
BEGIN_HISTORY_LEGACY = "_cuda_record_memory_history_legacy"
RESET_TOTALS = "_cuda_resetAccumulatedMemoryStats"


def in_use(torch: Any) -> bool:
    """Whether this process uses CUDA already. Asking does not start it."""
    return bool(torch.cuda.is_initialized())


def has_context(torch: Any, index: int) -> bool:
    """Whether this process has a CUDA context on a device. Asking makes none."""
    if not in_use(torch):
        return False
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return bool(ask(index)) if ask is not None else torch.cuda.memory_reserved(index) > 0


def history_is_on(torch: Any) -> bool:
    """Whether somebody records the allocator's history now. CUDA must be in use."""
    return bool(torch._C._cuda_isHistoryEnabled())


def begin_history(torch: Any, entries: int) -> None:
    """Records what every allocator does, without stacks, in a ring of so many events per device."""
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=entries)


def end_history(torch: Any) -> None:
    """Ends the recording and gives its host memory back."""
    torch.cuda.memory._record_memory_history(enabled=None)


def snapshot(torch: Any) -> dict[str, Any]:
    """Segments and traces of all devices: some 7 microseconds for each event of a trace."""
    found: dict[str, Any] = torch.cuda.memory._snapshot()
    return found


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
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return bool(torch.cuda.is_available())
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
