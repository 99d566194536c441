"""What the other devices held when a request failed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpumem_magic.snapshot.files import LoadedSnapshot
from gpumem_magic.snapshot.model import TraceEvent
from gpumem_magic.units import human

_DATA_PARALLEL = re.compile(r"torch[/\\]nn[/\\]parallel[/\\](?:data_parallel|scatter_gather|_functions|comm)\.py$")
# One device holds so many times what each other one holds: then the load is uneven.
_UNEVEN = 2


def elsewhere(loaded: LoadedSnapshot, device: int, event: int) -> str:
    """What PyTorch had reserved on each device when the request failed; "" where there is no other, or no times tell."""
    traces = loaded.snapshot.device_traces
    when = traces[device][event].time_us
    others = [one.device for one in loaded.devices if one.device != device]
    if not others or not when:
        return ""
    held = {device: _reserved_after(loaded, device, traces[device][event + 1 :])}
    for other in others:
        trace = traces[other] if other < len(traces) else ()
        held[other] = _reserved_after(loaded, other, [one for one in trace if one.time_us > when])
    figures = ", ".join(f"cuda:{number} {human(size)}" for number, size in sorted(held.items()))
    words = f"Reserved on each device then: {figures}."
    if held[device] < _UNEVEN * max(held[other] for other in others):
        return words
    if not any(_DATA_PARALLEL.search(frame.filename) for one in traces[device] for frame in one.frames):
        return f"{words} The load is uneven."
    if device == min(held):
        return f"{words} DataParallel gathers on the first: DistributedDataParallel spreads the load."
    return (
        f"{words} DataParallel runs a replica on each, and the part of the batch that cuda:{device} got took the most."
    )


def _reserved_after(loaded: LoadedSnapshot, device: int, later: Sequence[TraceEvent]) -> int:
    """The bytes of a device's segments at the end, less what later events brought, with what they took."""
    size = sum(segment.total_size for segment in loaded.snapshot.segments if segment.device == device)
    for event in later:
        if event.action in ("segment_alloc", "segment_map"):
            size -= event.size
        elif event.action in ("segment_free", "segment_unmap"):
            size += event.size
    return max(size, 0)
