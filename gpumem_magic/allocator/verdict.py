"""Why a request failed: what was requested and what was free, what was in the way, and which settings would have let it succeed.

Facts come from a recording. Settings are tried by running the recorded program through the emulated allocator, never by
running the user's code again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from gpumem_magic.allocator.program import ALLOC, Program, RepeatedPart
from gpumem_magic.allocator.repetition import growth_of, last_iteration
from gpumem_magic.allocator.what_if import Capacity, what_if
from gpumem_magic.snapshot.model import INACTIVE, Segment, TraceEvent
from gpumem_magic.snapshot.rules import INTERVALS, AllocatorSettings, page_size, pool_of, segment_size
from gpumem_magic.snapshot.timeline import Allocation, Timeline
from gpumem_magic.units import MIB

CAPACITY = "capacity"
FRAGMENTATION = "fragmentation"
OTHER_PROCESS = "other_process"
LIMIT = "limit"
UNKNOWN = "unknown"

# Repetitions of the last iteration that settings have to survive.
ROUNDS = 5
# Of the device, one part in so many: a longer batch, a library's workspace or whole pages take as much, however memory is packed.
_SMALL = 20
# Settings that people are told to try, as PYTORCH_CUDA_ALLOC_CONF has them.
_SPLIT_SIZES_MB = (128, 512, 2048)
_DIVISIONS = 8
_THRESHOLD = 0.8
# What stands in the way is listed up to here.
_MOST_PIECES = 3


@dataclass(frozen=True)
class Facts:
    """What is known beside the trace. Bytes; None is unknown. total: the device's. limit: what the allocator may reserve.
    other_processes: what they hold."""

    total: int | None = None
    limit: int | None = None
    other_processes: int | None = None


@dataclass(frozen=True)
class AllocationInWords:
    """An allocation in words, and its bytes."""

    what: str
    bytes: int


@dataclass(frozen=True)
class Trial:
    """One setting tried. conf: as PYTORCH_CUDA_ALLOC_CONF has it, beside what was set already. passes: whether the failed
    request, and all before it, would have been served. rounds: how many repetitions of the last iteration then went through.
    peak_reserved: bytes."""

    conf: str
    passes: bool
    rounds: int
    peak_reserved: int


@dataclass(frozen=True)
class FailedRequest:
    """Why a request failed. Sizes are bytes; None is unknown.

    cause: one of the constants above. free: what the driver had. cached: reserved and not allocated. spare: what would be left
    with perfect packing; negative is what was missing. limit: what the allocator was allowed.

    place: how large the place is that would have held the request without `pieces`, the largest first (and `more_pieces` that
    are not listed); None where fragmentation is not the cause, or no place is mostly free. left_by: what had that place to
    itself before, in words, "" where nothing is known.

    trials: settings by replay; rounds: how many repetitions each was to survive, of an iteration of so many `requests`; both 0
    where the recording shows no earlier iteration. tried: False where the replay was not possible, or too long. kept: bytes that
    were reserved before the recording, which a replay leaves as they were. lasts: how many more iterations the spare would do
    for at most, where each keeps more for good and that is fewer than ran; else None.
    """

    cause: str
    free: int | None
    cached: int | None
    spare: int | None
    limit: int | None = None
    place: int | None = None
    left_by: str = ""
    pieces: tuple[AllocationInWords, ...] = ()
    more_pieces: int = 0
    trials: tuple[Trial, ...] = ()
    rounds: int = 0
    requests: int = 0
    tried: bool = False
    kept: int = 0
    lasts: int | None = None

    @property
    def helpful(self) -> list[str]:
        """The settings with which the request passes, and as many more iterations as were to."""
        return [one.conf for one in self.trials if one.passes and one.rounds == self.rounds]

    @property
    def lasting(self) -> bool:
        """Whether some setting is known to mend it for later iterations, too."""
        return bool(self.rounds and self.helpful) and self.lasts is None


def capacity_of(
    events: Sequence[TraceEvent],
    timeline: Timeline,
    settings: AllocatorSettings,
    facts: Facts = Facts(),
) -> Capacity:
    """What there was to have when a request last failed; not known where none did, since a trace does not say."""
    event = last_failure(events)
    if event is None:
        return Capacity(total=facts.total)
    return _capacity_at(events[event], timeline.reserved_at(event), settings, facts)


def last_failure(events: Sequence[TraceEvent]) -> int | None:
    """The index of the last request that failed; None where none did."""
    return next((index for index in range(len(events) - 1, -1, -1) if events[index].action == "oom"), None)


def _capacity_at(failed: TraceEvent, reserved: int, settings: AllocatorSettings, facts: Facts) -> Capacity:
    available = reserved + failed.address
    limit = _limit(settings, facts)
    if limit is not None:
        available = min(available, max(limit, reserved))
    elif failed.address >= needed_from_driver(failed.size, settings):
        # The driver had room, so something else set the limit: this much at least was allowed.
        available = reserved
    return Capacity(available, facts.total)


def _limit(settings: AllocatorSettings, facts: Facts) -> int | None:
    if facts.limit is not None or facts.total is None or settings.memory_fraction >= 1.0:
        return facts.limit
    return int(settings.memory_fraction * facts.total)


def needed_from_driver(rounded: int, settings: AllocatorSettings) -> int:
    """What the driver has to have: a segment, or whole pages."""
    if not settings.expandable_segments:
        return segment_size(rounded, settings)
    page = page_size(pool_of(rounded), settings)
    return -(-rounded // page) * page


def verdict_of(
    start: Sequence[Segment],
    events: Sequence[TraceEvent],
    timeline: Timeline,
    settings: AllocatorSettings,
    words: Callable[[Allocation], str],
    *,
    event: int | None = None,
    final: Sequence[Segment] = (),
    facts: Facts = Facts(),
    rounds: int = ROUNDS,
    most_steps: int | None = None,
    can_replay: bool = True,
    among: Sequence[range] | None = None,
) -> FailedRequest | None:
    """The failed request at `event`, by default the last one; None where there is none.

    words: an allocation for a reader. timeline: of the same start, events and settings. most_steps: how many steps the trials
    may take in all; with more to do they are left out. can_replay: False for a trace that lacks what a replay needs. among: see
    `last_iteration`.
    """
    if event is None:
        event = last_failure(events)
    if event is None or events[event].action != "oom":
        return None
    failed = events[event]
    reserved, allocated = timeline.reserved_at(event), timeline.allocated_at(event)
    cached = reserved - allocated
    spare = failed.address + cached - failed.size
    limit = _limit(settings, facts)
    needed = needed_from_driver(failed.size, settings)
    cause = cause_of(
        failed.address,
        needed,
        spare,
        others=facts.other_processes,
        limited=limit is not None and reserved + needed > limit,
    )
    found = FailedRequest(cause, failed.address, cached, spare, limit, kept=timeline.reserved_at(0))
    # Beyond what rounding costs, no setting makes blocks smaller.
    hopeless = cause in (CAPACITY, OTHER_PROCESS) and -spare > allocated - timeline.requested_at(event)
    # What is cached would not do in one piece either, and no option lifts a limit.
    beyond = cause == LIMIT and spare < failed.address
    if hopeless:
        found = replace(found, tried=True)
    elif can_replay and not beyond:
        capacity = _capacity_at(failed, reserved, settings, facts)
        program = Program(start, events, final, event + 1)
        repetition = last_iteration(program, events, settings, among)
        if repetition is not None:
            growth = growth_of(program, repetition)
            if 0 <= spare < growth * event // (repetition.stop - repetition.first):
                found = replace(found, lasts=spare // growth)
        # A damaged recording says what can't have happened.
        with suppress(ValueError):
            found = _with_trials(found, failed.size, program, repetition, settings, capacity, rounds, most_steps)
    if cause != FRAGMENTATION:
        return found
    total = facts.total or reserved + failed.address
    if found.lasts is not None or (is_small(spare, total) and not found.lasting):
        return replace(found, cause=CAPACITY)
    return _with_place(found, _usable(timeline.segments_at(event), failed), timeline, failed.size, event, words)


def cause_of(
    free: int | None,
    needed: int,
    spare: int | None,
    *,
    others: int | None = None,
    limited: bool = False,
    fits: bool = False,
) -> str:
    """The cause of a failure, by the figures at that moment, in bytes; None is unknown. Fragmentation with a small spare is
    capacity, unless a replay shows that it lasts.

    free: what the driver had; needed: what it was to give. spare: as in `FailedRequest`. others: what other processes hold.
    limited: the request would have gone beyond what the allocator may reserve. fits: some cached block was large enough, of a
    pool that is not known, so that fragmentation need not explain it.
    """
    if (free is not None and free >= needed) or (limited and spare is not None and spare >= 0):
        return LIMIT
    if spare is None:
        return UNKNOWN
    if spare >= 0:
        return UNKNOWN if fits else FRAGMENTATION
    return OTHER_PROCESS if spare + (others or 0) >= 0 else CAPACITY


def is_small(spare: int, total: int) -> bool:
    """Whether a device of `total` bytes is full, for all that perfect packing would leave."""
    return spare * _SMALL < total


def _usable(segments: Iterable[Segment], failed: TraceEvent) -> list[Segment]:
    """The segments whose free blocks the request could be given."""
    pool, pool_id = pool_of(failed.size), failed.pool_id or (0, 0)
    return [
        one for one in segments if (one.stream, one.segment_type, one.segment_pool_id) == (failed.stream, pool, pool_id)
    ]


def _with_place(
    found: FailedRequest,
    segments: Sequence[Segment],
    timeline: Timeline,
    wanted: int,
    event: int,
    words: Callable[[Allocation], str],
) -> FailedRequest:
    """With the place where the request would have fitted but for the least that is in use there, less than half of it."""
    best: tuple[int, int, int] | None = None
    for segment in segments:
        blocks = segment.blocks
        first = size = in_use = 0
        for block in blocks:
            size += block.size
            in_use += block.size if block.state != INACTIVE else 0
            # Without its first block it would still do.
            while size - blocks[first].size >= wanted:
                size -= blocks[first].size
                in_use -= blocks[first].size if blocks[first].state != INACTIVE else 0
                first += 1
            if size >= wanted and (best is None or in_use < best[0]):
                best = in_use, blocks[first].address, size
    # Where most of a place is in use, nothing "splits" it.
    if best is None or 2 * best[0] > wanted:
        return found
    _, address, size = best
    inside = [life for life in timeline.live_at(event) if address <= life.address < address + size]
    inside.sort(key=lambda life: (-life.size, life.address))
    left_by = _left_by(timeline, address, size, wanted)
    return replace(
        found,
        place=size,
        left_by="" if left_by is None else words(left_by),
        pieces=tuple(AllocationInWords(words(life), life.size) for life in inside[:_MOST_PIECES]),
        more_pieces=max(len(inside) - _MOST_PIECES, 0),
    )


def _left_by(timeline: Timeline, address: int, size: int, wanted: int) -> Allocation | None:
    """The last block that had the place, or most of it, to itself."""
    found: Allocation | None = None
    for life in timeline.allocations:
        overlap = min(life.address + life.size, address + size) - max(life.address, address)
        if (
            life.completed is not None
            and 2 * overlap > wanted
            and (found is None or life.completed > (found.completed or 0))
        ):
            found = life
    return found


def _with_trials(
    found: FailedRequest,
    wanted: int,
    program: Program,
    repetition: RepeatedPart | None,
    settings: AllocatorSettings,
    capacity: Capacity,
    rounds: int,
    most_steps: int | None,
) -> FailedRequest:
    candidates = _candidates(settings, wanted)
    rounds = rounds if repetition is not None else 0
    again = [] if repetition is None else [s for s in program.steps if repetition.first <= s.event < repetition.stop]
    steps = len(program.steps) + rounds * len(again)
    if most_steps is not None and steps * len(candidates) > most_steps:
        return found
    requests = sum(step.action == ALLOC for step in again)
    trials = []
    for conf, chosen in candidates:
        outcome = what_if(program, chosen, capacity, repetition=repetition, rounds=rounds, until_failure=True)
        early = any(failure.round == 0 for failure in outcome.failed)
        passes = not early and outcome.passed_last
        trials.append(Trial(conf, passes, outcome.rounds if passes else 0, outcome.peak_reserved))
    return replace(found, trials=tuple(trials), rounds=rounds, requests=requests, tried=True)


def _candidates(settings: AllocatorSettings, rounded: int) -> list[tuple[str, AllocatorSettings]]:
    """Settings that are not on already, each with what it is called."""
    found = [("expandable_segments:True", replace(settings, expandable_segments=True))]
    found += [
        (f"max_split_size_mb:{size}", replace(settings, max_split_size=size * MIB))
        for size in _SPLIT_SIZES_MB
        if size * MIB <= rounded
    ]
    divided = replace(settings, roundup_power2_divisions=(_DIVISIONS,) * INTERVALS)
    found.append((f"roundup_power2_divisions:{_DIVISIONS}", divided))
    collecting = replace(settings, garbage_collection_threshold=_THRESHOLD)
    found.append((f"garbage_collection_threshold:{_THRESHOLD}", collecting))
    return [(conf, chosen) for conf, chosen in found if chosen != settings]
