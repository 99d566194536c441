"""The arithmetic of PyTorch's caching allocator: how a request is rounded, which pool serves it, how big a segment it opens,
and when a block is cut in two. Pure functions of sizes in bytes; the allocator uses them to decide, the timeline to recount.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpumem_magic.snapshot.model import LARGE_POOL, SMALL_POOL
from gpumem_magic.units import MIB

MIN_BLOCK = 512
SMALL_LIMIT = MIB
SMALL_SEGMENT = 2 * MIB
# Large requests below this share a segment of `large_segment_size`; from here on they get one of their own.
OWN_SEGMENT = 10 * MIB
SEGMENT_STEP = 2 * MIB
INTERVALS = 16
# PyTorch's "no limit": the largest 64-bit number. Its statistics and snapshots show it as -1.
UNLIMITED = (1 << 64) - 1


@dataclass(frozen=True)
class AllocatorSettings:
    """The options of PYTORCH_CUDA_ALLOC_CONF that decide where memory is placed. Sizes are bytes.

    max_split_size: free blocks of this size and more are kept for requests of this size and more, and never cut.
    roundup_power2_divisions: one number for each interval [1 MiB, 2 MiB), [2 MiB, 4 MiB), ... 16 of them; 0 is off.
    garbage_collection_threshold: a share of the memory limit; 0 is off, and it only acts where a limit is set.
    max_non_split_rounding: how much an uncut large block may be bigger than the request that gets it.
    large_segment_size: the segment that large requests below 10 MiB share; the page size of large expandable segments.
    expandable_segments: segments grow and shrink by pages instead of being opened with a fixed size.
    memory_fraction: the share of the device's total that may be reserved; 1 is no limit.
    """

    max_split_size: int = UNLIMITED
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    garbage_collection_threshold: float = 0.0
    max_non_split_rounding: int = 20 * MIB
    large_segment_size: int = 20 * MIB
    expandable_segments: bool = False
    memory_fraction: float = 1.0


DEFAULT_SETTINGS = AllocatorSettings()


def round_size(size: int, settings: AllocatorSettings = DEFAULT_SETTINGS) -> int:
    """The block size that a request of `size` bytes asks for. A zero-byte request never gets this far in PyTorch."""
    if size < MIN_BLOCK:
        return MIN_BLOCK
    interval = min(max(size.bit_length() - 1 - 20, 0), INTERVALS - 1)
    divisions = settings.roundup_power2_divisions[interval]
    if divisions > 1 and size > MIN_BLOCK * divisions:
        return _round_to_division(size, divisions)
    return -(-size // MIN_BLOCK) * MIN_BLOCK


def _round_to_division(size: int, divisions: int) -> int:
    power = 1 << (size.bit_length() - 1)
    if size == power:
        return size
    # size > 512 * divisions, so a step is at least 256 bytes and never 0.
    step = power // divisions
    return -(-size // step) * step


def pool_of(rounded: int) -> str:
    """The pool that serves a rounded size: exactly 1 MiB is still small."""
    return SMALL_POOL if rounded <= SMALL_LIMIT else LARGE_POOL


def segment_size(rounded: int, settings: AllocatorSettings = DEFAULT_SETTINGS) -> int:
    """What the driver is asked for where no cached block fits a rounded size."""
    if rounded <= SMALL_LIMIT:
        return SMALL_SEGMENT
    if rounded < OWN_SEGMENT:
        return settings.large_segment_size
    return -(-rounded // SEGMENT_STEP) * SEGMENT_STEP


def page_size(pool: str, settings: AllocatorSettings = DEFAULT_SETTINGS) -> int:
    """By how much a pool's expandable segments grow and shrink."""
    return SMALL_SEGMENT if pool == SMALL_POOL else settings.large_segment_size


def should_split(
    remaining: int,
    rounded: int,
    pool: str,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    *,
    expandable: bool = False,
) -> bool:
    """Whether a block that exceeds the rounded request by `remaining` bytes is cut; otherwise the request keeps it all.

    expandable: whether expandable segments are in use for the request.
    """
    if pool == SMALL_POOL or expandable:
        return remaining >= MIN_BLOCK
    return rounded < settings.max_split_size and remaining > SMALL_LIMIT


def pool_of_segment(total_size: int) -> str:
    """The pool of a segment, or of newly mapped pages, known only by size (a trace event has no more): large ones are 10 MiB
    and up."""
    return SMALL_POOL if total_size <= SMALL_SEGMENT else LARGE_POOL
