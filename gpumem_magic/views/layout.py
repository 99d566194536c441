"""What a picture needs besides drawing: ticks of an axis, things flowing into lines, the few colours of its file."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from gpumem_magic.units import GIB, MIB
from gpumem_magic.views.palette import COLOURS, ON_LIGHT, PATTERNS, Inks, line_on

_SHADES = 14


def ticks(top: int) -> list[tuple[int, str]]:
    """(bytes, word) of at most six marks from 0 to `top`, at powers of two of a MiB (or KiB)."""
    step = 1 << 10
    while top / step > 5:
        step *= 2
    unit, name = (GIB, "GiB") if step >= GIB else (MIB, "MiB") if step >= MIB else (1 << 10, "KiB")
    return [(size, f"{size // unit:,} {name}" if size else "0") for size in range(0, top + 1, step)]


def flow(widths: Sequence[float], line_width: float) -> list[list[int]]:
    """Puts things of these widths into lines of `line_width`, in order; the indices of each line."""
    flow: list[list[int]] = []
    left = line_width
    for number, width in enumerate(widths):
        if not flow or width > left:
            flow.append([])
            left = line_width
        flow[-1].append(number)
        left -= width
    return flow


def palette_image(inks: Inks = ON_LIGHT) -> Image.Image:
    """The colours of categories and of their patterns, and the shades between ink and paper for the edges of letters."""
    colours = [_parts(inks.colour(name)) for name in COLOURS]
    colours += [_parts(line_on(inks.colour(name))) for name in PATTERNS]
    paper = _parts(inks.paper)
    for ink in map(_parts, (inks.text, inks.quiet, inks.alarm)):
        for step in range(_SHADES):
            share = step / (_SHADES - 1)
            colours.append([round(part + (ground - part) * share) for part, ground in zip(ink, paper, strict=True)])
    image = Image.new("P", (1, 1))
    image.putpalette([part for colour in colours for part in colour])
    return image


def _parts(colour: str) -> list[int]:
    return list(bytes.fromhex(colour[1:]))
