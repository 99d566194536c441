"""Snapshots without a history: what is allocated at one moment, block by block, as a real GPU and a virtual one have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gpumem_magic.snapshot.files import read
from gpumem_magic.snapshot.model import INACTIVE, Segment
from gpumem_magic.units import human


@dataclass(frozen=True)
class State:
    """The segments of one device."""

    segments: tuple[Segment, ...]

    @cached_property
    def sizes(self) -> Counter[int]:
        """How many blocks are in use of each size, as they were asked for."""
        return Counter(block.requested_size for one in self.segments for block in one.blocks if block.state != INACTIVE)

    @cached_property
    def layouts(self) -> Counter[tuple[tuple[int, bool], ...]]:
        """How the segments are cut: the size of each block, and whether it is in use."""
        return Counter(tuple((block.size, block.state != INACTIVE) for block in one.blocks) for one in self.segments)

    @property
    def requested(self) -> int:
        return sum(size * count for size, count in self.sizes.items())

    @property
    def reserved(self) -> int:
        return sum(one.total_size for one in self.segments)


def state(path: Path, device: int | None = None) -> State:
    """That of the given device, or of the one with the most segments."""
    segments = read(path).snapshot.segments
    if device is None:
        device = Counter(one.device for one in segments).most_common(1)[0][0]
    return State(tuple(one for one in segments if one.device == device))


def matched(real: State, virtual: State) -> float:
    """The share of all blocks that have a partner of the same size on the other side."""
    common = (real.sizes & virtual.sizes).total()
    return 2 * common / max(1, real.sizes.total() + virtual.sizes.total())


def alike(real: State, virtual: State) -> float:
    """The share of the real segments that a virtual one equals, block by block."""
    return (real.layouts & virtual.layouts).total() / max(1, real.layouts.total())


def words(real: State, virtual: State, most: int) -> Iterator[str]:
    yield f"{100 * matched(real, virtual):.2f} % of the blocks match."
    for name, one in (("A", real), ("B", virtual)):
        yield (
            f"{name}  blocks {one.sizes.total():,}  requested {human(one.requested)}  segments {len(one.segments):,}"
            f"  reserved {human(one.reserved)}"
        )
    yield f"{100 * alike(real, virtual):.1f} % of A's segments lie in B, too"
    for name, alone in (("A", real.sizes - virtual.sizes), ("B", virtual.sizes - real.sizes)):
        largest = sorted(alone.items(), key=lambda item: -item[0] * item[1])[:most]
        yield from (f"only in {name} {count:>6,} x {size:>14,} bytes" for size, count in largest)
