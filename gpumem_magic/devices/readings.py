"""One cheap reading of PyTorch's allocator statistics, and the number of trace events that it stands for.

The allocator counts each thing that it writes into its trace: requests, frees asked for, frees done, segments taken and given
back, requests that failed. So a reading of the counters is a position in the trace, exact and without a snapshot. (A snapshot
leaves an event too, which nothing counts; those are left out of logs.)
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import add, sub
from typing import Any, NamedTuple

Counts = tuple[int, ...]
"""How often each kind of event has happened: as many numbers as `KINDS`."""

KINDS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "oom")
NOTHING: Counts = (0,) * len(KINDS)

# The counters do not tell opened segments from mapped pages of expandable ones.
KIND_OF_ACTION = {
    "alloc": 0,
    "free_requested": 1,
    "free_completed": 2,
    "segment_alloc": 3,
    "segment_map": 3,
    "segment_free": 4,
    "segment_unmap": 4,
    "oom": 5,
}


class CountersReading(NamedTuple):
    """Bytes now and at their peaks (since the user's last reset), and how many events there have been."""

    counts: Counts = NOTHING
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    retries: int = 0


def reading_of(stats: Mapping[str, Any]) -> CountersReading:
    """From `torch.cuda.memory_stats_as_nested_dict`, which is empty until CUDA is in use.

    The counters are the caching allocator's of torch 2.3 and later; one that it lacks counts as 0, and the trace is then found
    to disagree.
    """
    if not stats:
        return CountersReading()
    try:
        # (Asked for at every moment of a recording: the way of an allocator that has them all is short.)
        allocation, allocated, reserved = (stats[name]["all"] for name in _WHOLE)
        return CountersReading(
            (
                allocation["allocated"],
                allocation["freed"],
                stats["active"]["all"]["freed"],
                stats["num_device_alloc"],
                stats["num_device_free"],
                stats["num_ooms"],
            ),
            allocated["current"],
            reserved["current"],
            allocated["peak"],
            reserved["peak"],
            stats["num_alloc_retries"],
        )
    except KeyError:
        return _reading_of_some(stats)


_WHOLE = ("allocation", "allocated_bytes", "reserved_bytes")


def _reading_of_some(stats: Mapping[str, Any]) -> CountersReading:
    """Of an allocator that does not count all of it."""
    allocation, active = _of(stats, "allocation"), _of(stats, "active")
    allocated, reserved = _of(stats, "allocated_bytes"), _of(stats, "reserved_bytes")
    return CountersReading(
        (
            int(allocation.get("allocated", 0)),
            int(allocation.get("freed", 0)),
            int(active.get("freed", 0)),
            int(stats.get("num_device_alloc", 0)),
            int(stats.get("num_device_free", 0)),
            int(stats.get("num_ooms", 0)),
        ),
        int(allocated.get("current", 0)),
        int(reserved.get("current", 0)),
        int(allocated.get("peak", 0)),
        int(reserved.get("peak", 0)),
        int(stats.get("num_alloc_retries", 0)),
    )


def plus(one: Counts, other: Counts) -> Counts:
    return tuple(map(add, one, other))


def minus(one: Counts, other: Counts) -> Counts:
    return tuple(map(sub, one, other))


def _of(stats: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = stats.get(name, {}).get("all", {})
    return found
