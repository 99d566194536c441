"""The model of PyTorch's memory snapshot (`torch.cuda.memory._snapshot()`): segments, their blocks, and trace events.

Every source of memory produces these, and whatever stands above never asks which source it was. All sizes are bytes.
`plain` converts them to PyTorch's own dictionaries, and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SMALL_POOL = "small"
LARGE_POOL = "large"

ACTIVE = "active_allocated"
PENDING_FREE = "active_pending_free"
INACTIVE = "inactive"

# From here on lie blocks that stand for several, whose places nobody knows; no device has such addresses.
BLOCK_ADDRESS = 1 << 62


class Frame(NamedTuple):
    """One line of a stack, innermost first in a stack."""

    filename: str
    name: str
    line: int


class TraceEvent(NamedTuple):
    """One thing that the allocator did.

    action: alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, segment_unmap, snapshot or oom.
    address: of the block or segment; for oom the device's free bytes at that moment (PyTorch's `device_free`).
    size: alloc and free_* carry the *requested* bytes, segment_* real bytes, oom the rounded request.
    pool_id: of the private pool that it is about, (0, 0) for the default one; None where the trace does not say (up to 2.12).
    metadata: what the program called the time at which it happened (PyTorch's `user_metadata`); "" where it said nothing.
    """

    action: str
    address: int
    size: int
    stream: int = 0
    time_us: int = 0
    frames: tuple[Frame, ...] = ()
    pool_id: tuple[int, int] | None = None
    metadata: str = ""


@dataclass(frozen=True)
class Block:
    """A piece of a segment. `requested_size` of an inactive block is its last tenant's, and means nothing."""

    address: int
    size: int
    requested_size: int
    state: str
    frames: tuple[Frame, ...] = ()


def with_free_space(address: int, size: int, used: Iterable[Block]) -> tuple[Block, ...]:
    """The blocks of so many bytes from an address on: those in use, by address, and the free space between them."""
    blocks: list[Block] = []
    end = address + size
    for block in used:
        if block.address > address:
            blocks.append(Block(address, block.address - address, 0, INACTIVE))
        blocks.append(block)
        address = block.address + block.size
    if address < end:
        blocks.append(Block(address, end - address, 0, INACTIVE))
    return tuple(blocks)


@dataclass(frozen=True)
class Segment:
    """Memory that the allocator got from the driver in one piece, cut into blocks that touch each other."""

    device: int
    address: int
    total_size: int
    stream: int
    segment_type: str
    blocks: tuple[Block, ...]
    is_expandable: bool = False
    segment_pool_id: tuple[int, int] = (0, 0)
    frames: tuple[Frame, ...] = ()

    @property
    def allocated_size(self) -> int:
        return sum(block.size for block in self.blocks if block.state == ACTIVE)

    @property
    def active_size(self) -> int:
        return sum(block.size for block in self.blocks if block.state != INACTIVE)

    @property
    def requested_size(self) -> int:
        return sum(block.requested_size for block in self.blocks if block.state != INACTIVE)


@dataclass(frozen=True)
class Snapshot:
    """All segments of all devices, and one trace per device index, oldest event first."""

    segments: tuple[Segment, ...]
    device_traces: tuple[tuple[TraceEvent, ...], ...]
    allocator_settings: Mapping[str, Any] = field(default_factory=dict)
    external_annotations: tuple[Mapping[str, Any], ...] = ()
