"""The user's error as strings and numbers, and the moment at which an out-of-memory request failed, before unwinding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpumem_magic.devices.base import Counters, DeviceLog
from gpumem_magic.looks.objects import attribute, message_of, module_of_class, name_of_class, qualified_name
from gpumem_magic.recording.model import Failure, Moment
from gpumem_magic.snapshot.rules import segment_size
from gpumem_magic.snapshot.timeline import Timeline


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a GPU's memory ran out, whatever its type."""
    return name_of_class(type(error)) == "OutOfMemoryError" or "CUDA out of memory" in message_of(error)


def failure_of(error: BaseException, line: int | None) -> Failure:
    """Keeps nothing of the exception. Sizes are there only where a virtual device attached them (`gpumem_failure`)."""
    name = qualified_name(type(error))
    module = module_of_class(type(error))
    failure = Failure(name if module in ("builtins", "__main__") else f"{module}.{name}", message_of(error), line)
    facts = attribute(error, "gpumem_failure")
    if facts is None:
        return failure
    return replace(
        failure,
        requested=int(facts.requested),
        rounded=int(facts.rounded),
        segment=int(facts.segment_size),
        largest_free=int(facts.largest_free),
        device=int(facts.device),
    )


def failing_request(
    logs: Mapping[int, DeviceLog], device: int | None, since: Mapping[int, int], until: Mapping[int, int]
) -> tuple[int, int] | None:
    """(device, index of its event) of the last request that failed, on `device` if that is known.

    Only events after the last checkpoint (`since`) and before the error reached us (`until`) count: an older failure was
    caught, and is not this error.
    """
    for index in [device] if device is not None else sorted(logs):
        if index not in logs:
            continue
        events = logs[index].events
        for number in range(min(until.get(index, 0), len(events)) - 1, since.get(index, 0) - 1, -1):
            if events[number].action == "oom":
                return index, number
    return None


def moment_of_failure(moment: Moment, log: DeviceLog, event: int, timeline: Timeline) -> Moment:
    """`moment` (when the error reached us) put back, on the log's device, to just after the failing request."""
    device, position = log.facts.index, event + 1
    return moment._replace(
        positions={**moment.positions, device: position},
        counters={**moment.counters, device: counters_at(timeline, position, moment.counters[device])},
    )


def counters_at(timeline: Timeline, position: int, now: Counters) -> Counters:
    """What the counters said at an earlier position. The context and other processes are taken to be as `now`."""
    reserved = timeline.reserved_at(position)
    used = None if now.device_used is None else now.device_used - now.reserved + reserved
    return now._replace(allocated=timeline.allocated_at(position), reserved=reserved, device_used=used)


def with_event(failure: Failure, log: DeviceLog, event: int, timeline: Timeline) -> Failure:
    """Sizes from the trace for an error that carries none. A trace knows the rounded request only: it stands for both."""
    if failure.requested is not None:
        return failure
    size = log.events[event].size
    return replace(
        failure,
        requested=size,
        rounded=size,
        segment=segment_size(size, log.settings),
        largest_free=timeline.largest_free_at(event + 1, log.events[event].stream),
        device=log.facts.index,
    )
