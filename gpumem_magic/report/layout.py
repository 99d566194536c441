"""Sums that a picture's layout needs and that know nothing of drawing: ticks of an axis, things flowing into lines."""

from __future__ import annotations

from collections.abc import Sequence

from gpumem_magic.units import GIB, MIB


def ticks(top: int) -> list[tuple[int, str]]:
    """(bytes, word) of at most six marks from 0 to `top`, at powers of two of a MiB (or KiB)."""
    step = 1 << 10
    while top / step > 5:
        step *= 2
    unit, name = (GIB, "GiB") if step >= GIB else (MIB, "MiB") if step >= MIB else (1 << 10, "KiB")
    return [(size, f"{size // unit:,} {name}" if size else "0") for size in range(0, top + 1, step)]


def flow(widths: Sequence[float], room: float) -> list[list[int]]:
    """Puts things of these widths into lines of `room`, in order; the indices of each line."""
    flow: list[list[int]] = []
    left = room
    for number, width in enumerate(widths):
        if not flow or width > left:
            flow.append([])
            left = room
        flow[-1].append(number)
        left -= width
    return flow
