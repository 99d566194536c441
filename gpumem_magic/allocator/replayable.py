"""A device of a snapshot file, prepared for a replay: its start, events and settings, or the reason why it can't be replayed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpumem_magic.allocator.seed import Seed, seed_of
from gpumem_magic.allocator.settings import settings_from_dict, settings_of_another_backend
from gpumem_magic.allocator.settling import settled
from gpumem_magic.snapshot.files import LoadedSnapshot
from gpumem_magic.snapshot.model import Segment, TraceEvent
from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS, AllocatorSettings
from gpumem_magic.units import counted


@dataclass(frozen=True)
class Replayable:
    """events: the device's trace; final: its segments at the end; settings: those that it was recorded with. notes: what a
    reader of the replay has to know, one sentence each."""

    device: int
    events: tuple[TraceEvent, ...]
    final: tuple[Segment, ...]
    settings: AllocatorSettings
    seed: Seed
    notes: tuple[str, ...]


def replayables(loaded: LoadedSnapshot) -> list[Replayable]:
    """One for each device that has segments or events."""
    settings, notes = DEFAULT_SETTINGS, []
    try:
        settings = settings_from_dict(loaded.snapshot.allocator_settings)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        notes.append(f"The allocator's settings in the file are not understood ({error}); defaults are used.")
    found = [_of_device(loaded, found.device, settings, notes) for found in loaded.devices]
    if settings_of_another_backend(loaded.snapshot.allocator_settings):
        reason = "it was recorded under backend:cudaMallocAsync, which is not emulated"
        found = [replace(one, seed=Seed(reason=reason)) for one in found]
    return found


def _of_device(loaded: LoadedSnapshot, device: int, settings: AllocatorSettings, notes: list[str]) -> Replayable:
    traces = loaded.snapshot.device_traces
    events = traces[device] if device < len(traces) else ()
    final = tuple(segment for segment in loaded.snapshot.segments if segment.device == device)
    seed = settled(seed_of(final, events, settings), events, settings, device, final)
    own = list(notes)
    if seed.start:
        what = counted(len(seed.start), "segment at its start was", "segments at its start were")
        own.append(f"It begins in the middle: the {what} worked out from its end.")
    if seed.uncertain:
        whose = "size of a block" if seed.uncertain == 1 else f"sizes of {seed.uncertain:,} blocks"
        bounds = (
            "is a lower bound (by up to 1 MiB)" if seed.uncertain == 1 else "are lower bounds (by up to 1 MiB each)"
        )
        follows = counted(seed.raised, "follows", "follow") if seed.uncertain > 1 else "it follows"
        known = f"; {follows} from where blocks were not put" if seed.raised else ""
        own.append(f"The {whose} from before the recording {bounds}{known}: a difference may come from that.")
    has_private = any(segment.segment_pool_id != (0, 0) for segment in (*seed.start, *final))
    if has_private and not any(event.pool_id is not None for event in events):
        own.append(
            "Its events do not say which private pool they were for (PyTorch's do since 2.13): the segments at its end tell it, "
            "as far as they are still there. A difference may come from that."
        )
    return Replayable(device, events, final, settings, seed, tuple(own))
