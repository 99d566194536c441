"""Segments as lines of text: what is in use, and what is free between it."""

from __future__ import annotations

from collections.abc import Mapping

from gpumem_magic.snapshot.model import INACTIVE, Segment
from gpumem_magic.units import counted, human


def fragmentation(segments: tuple[Segment, ...], count: int = 12, width: int = 60) -> list[str]:
    """A picture in text of the segments with the most free memory: ``#`` is in use, ``.`` is free; and what it adds up to."""
    free_of: Mapping[int, int] = {
        number: sum(block.size for block in segment.blocks if block.state == INACTIVE)
        for number, segment in enumerate(segments)
    }
    alike: dict[str, int] = {}
    for number in sorted(free_of, key=lambda one: (-free_of[one], one)):
        segment = segments[number]
        if not free_of[number]:
            break
        largest = max((block.size for block in segment.blocks if block.state == INACTIVE), default=0)
        line = (
            f"{human(segment.total_size):>10} {_drawn(segment, width)} {human(free_of[number])} free, "
            f"largest piece {human(largest)}"
        )
        if line not in alike and len(alike) == count:
            break
        alike[line] = alike.get(line, 0) + 1
    lines = [f"{line} ({times:,} alike)" if times > 1 else line for line, times in alike.items()]
    total = sum(free_of.values())
    pieces = sum(1 for segment in segments for block in segment.blocks if block.state == INACTIVE)
    if not pieces:
        return [f"{counted(len(segments), 'segment')}, all in use."] if segments else ["No segments."]
    split = sum(size for number, size in free_of.items() if size < segments[number].total_size)
    lines.append(
        f"{counted(len(segments), 'segment')}; {human(total)} cached but free in {counted(pieces, 'piece')}, "
        f"{human(split)} of it in segments "
        "that are partly in use."
    )
    return lines


def _drawn(segment: Segment, width: int) -> str:
    """Each character is an equal share of the segment; ``:`` where it is partly in use."""
    used = [0] * width
    if not segment.total_size:
        return "[]"
    for block in segment.blocks:
        if block.state == INACTIVE:
            continue
        begin, end = block.address - segment.address, block.address - segment.address + block.size
        for cell in range(begin * width // segment.total_size, min(-(-end * width // segment.total_size), width)):
            low, high = cell * segment.total_size // width, (cell + 1) * segment.total_size // width
            used[cell] += max(0, min(end, high) - max(begin, low))
    cells = []
    for cell, size in enumerate(used):
        cell_bytes = (cell + 1) * segment.total_size // width - cell * segment.total_size // width
        cells.append("#" if size >= cell_bytes else ":" if size else ".")
    return f"[{''.join(cells)}]"
