"""Sizes of blocks from before a recording: lower bounds, which rise where the recorded allocator did not reuse a block.

Such a block has a free piece behind it, which is at most as large as assumed. A request that the emulator puts there and the
recording did not, went elsewhere because the piece was too small: among those that fit it would have been the best one, the
smaller the better. So the block in front reaches further, at least until the request does not fit any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpumem_magic.allocator.replay import replay
from gpumem_magic.allocator.seed import Seed
from gpumem_magic.snapshot.model import INACTIVE, Block, Segment, TraceEvent
from gpumem_magic.snapshot.rules import MIN_BLOCK, SMALL_LIMIT, AllocatorSettings, round_size
from gpumem_magic.snapshot.timeline import Timeline

# Each raise takes a replay; so many events are replayed for it in all.
_MOST_EVENTS = 3_000_000


def settled(
    seed: Seed,
    events: Sequence[TraceEvent],
    settings: AllocatorSettings,
    device: int = 0,
    final: Sequence[Segment] = (),
) -> Seed:
    """The seed with what the recording's decisions prove about its unsettled sizes; itself where they prove nothing more."""
    sizes: dict[int, int] = {}
    found = seed
    for _ in range(_MOST_EVENTS // max(len(events), 1) if seed.unsettled else 0):
        try:
            result = replay(found.start, events, settings, device, final)
        except ValueError:
            return seed
        if result.first_moved is None:
            break
        index, place = result.first_moved
        raised = _raised(found, Timeline(found.start, events, settings), index, place, events[index], settings)
        if raised is None:
            break
        address, size = raised
        sizes[address] = size
        found = replace(found, start=tuple(_with_size(one, address, size) for one in found.start), raised=len(sizes))
    return found


def _raised(
    seed: Seed, timeline: Timeline, index: int, place: int, event: TraceEvent, settings: AllocatorSettings
) -> tuple[int, int] | None:
    """The unsettled block in front of a place, and the least size of it with which the request would not fit there."""
    before: Block | None = None
    for segment in timeline.segments_at(index):
        if not segment.address < place < segment.address + segment.total_size:
            continue
        for block in segment.blocks:
            if block.address == place:
                if before is None or before.address not in seed.unsettled or block.state != INACTIVE:
                    return None
                size = before.size + block.size - round_size(event.size, settings) + MIN_BLOCK
                is_possible = size - round_size(before.requested_size, settings) <= SMALL_LIMIT
                return (before.address, size) if size > before.size and is_possible else None
            before = block
    return None


def _with_size(segment: Segment, address: int, size: int) -> Segment:
    """A segment whose block at the address reaches further, into the free piece behind it."""
    if not segment.address <= address < segment.address + segment.total_size:
        return segment
    blocks = list(segment.blocks)
    number = next(number for number, block in enumerate(blocks) if block.address == address)
    block, behind = blocks[number : number + 2]
    more = size - block.size
    blocks[number : number + 2] = [
        replace(block, size=size),
        replace(behind, address=behind.address + more, size=behind.size - more),
    ]
    return replace(segment, blocks=tuple(blocks))
