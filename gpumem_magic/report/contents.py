"""What a device holds at one moment of a recording, allocation by allocation and segment by segment, each with its stack."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from gpumem_magic.attribution.groups import alike
from gpumem_magic.attribution.ledger import KINDS_OF_EVIDENCE, TENANT_CATEGORIES
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.snapshot.model import INACTIVE, Frame

# Of a group, so many different sizes are told.
_MOST_SIZES = 20


@dataclass(frozen=True)
class StackFrame:
    """One line of a stack."""

    filename: str
    name: str
    line: int


@dataclass(frozen=True)
class AllocationGroup:
    """Allocations of one category that were asked for by one stack.

    count: of allocations. requested: the bytes that the program asked for, bytes: those of the blocks that it got. sizes: the
    different requested sizes, the largest first, at most 20. evidence: how the category is known; why: more of that in words,
    where there is more to say. name: of what held them, where objects were seen. first_event: when the first of them was made;
    -1 is before the recording. stack: its number in `stacks`.
    """

    bytes: int
    requested: int
    count: int
    category: str = field(metadata={"one_of": TENANT_CATEGORIES})
    evidence: str = field(metadata={"one_of": KINDS_OF_EVIDENCE})
    why: str
    name: str
    first_event: int
    sizes: tuple[int, ...]
    stack: int


@dataclass(frozen=True)
class SegmentContents:
    """Memory from the driver in one piece. in_use: bytes of blocks that are not free. stack: the number of what asked for it."""

    address: int
    bytes: int
    pool: str = field(metadata={"one_of": ("small", "large")})
    stream: int
    is_expandable: bool
    is_private: bool
    in_use: int
    largest_free: int
    stack: int


@dataclass(frozen=True)
class Contents:
    """where: the moment, in words; position: how many events came before. allocations: the largest groups first, whose `bytes`
    add up to what is allocated then. segments: by address, whose `bytes` add up to what is reserved. stacks: each a list of
    numbers in `frames`, innermost first; the first is the empty one, for what has none.
    """

    where: str
    position: int
    allocations: tuple[AllocationGroup, ...]
    segments: tuple[SegmentContents, ...]
    stacks: tuple[tuple[int, ...], ...]
    frames: tuple[StackFrame, ...]


def contents_of(view: DeviceView, position: int, where: str) -> Contents:
    """At a position of the device's recording."""
    stacks: dict[tuple[Frame, ...], int] = {(): 0}
    groups, segments = _groups(view, position, stacks), _segments(view, position, stacks)
    numbers = {frame: number for number, frame in enumerate(dict.fromkeys(chain.from_iterable(stacks)))}
    return Contents(
        where,
        position,
        groups,
        segments,
        tuple(tuple(numbers[frame] for frame in stack) for stack in stacks),
        tuple(StackFrame(frame.filename, frame.name, frame.line) for frame in numbers),
    )


def _groups(view: DeviceView, position: int, stacks: dict[tuple[Frame, ...], int]) -> tuple[AllocationGroup, ...]:
    groups = [
        AllocationGroup(
            bytes=sum(one.size for one in found),
            requested=sum(one.requested for one in found),
            count=len(found),
            category=common.category,
            evidence=common.evidence,
            why=common.why,
            name=common.name or "",
            first_event=min(one.born for one in found),
            sizes=tuple(sorted({one.requested for one in found}, reverse=True)[:_MOST_SIZES]),
            stack=stacks.setdefault(view.frames_of(found[0]), len(stacks)),
        )
        for common, found in alike(view, position, lambda frames: frames).items()
    ]
    return tuple(sorted(groups, key=lambda group: (-group.bytes, group.first_event)))


def _segments(view: DeviceView, position: int, stacks: dict[tuple[Frame, ...], int]) -> tuple[SegmentContents, ...]:
    stack_of = view.stacks_of_segments(position)
    found = []
    for segment in view.timeline.segments_at(position):
        frames = stack_of.get(segment.address, ())
        free = [block.size for block in segment.blocks if block.state == INACTIVE]
        found.append(
            SegmentContents(
                address=segment.address,
                bytes=segment.total_size,
                pool=segment.segment_type,
                stream=segment.stream,
                is_expandable=segment.is_expandable,
                is_private=segment.segment_pool_id != (0, 0),
                in_use=segment.total_size - sum(free),
                largest_free=max(free, default=0),
                stack=stacks.setdefault(frames, len(stacks)),
            )
        )
    return tuple(found)
