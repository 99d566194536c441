"""All checkpoints in one picture: for each the segments of PyTorch's allocator, to scale and by address.

Where nothing moved there is no row. A report without a recording has no segments: then it is the report's own picture of bars.
Made without pyplot and under matplotlib's default style, as that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.style
from matplotlib.patches import Rectangle

from gpumem_magic.investigation.memory_map import FREE, Strip
from gpumem_magic.investigation.steps import WAITING_COLOUR, Investigation, Step
from gpumem_magic.investigation.words import KIND_WORDS
from gpumem_magic.units import mib
from gpumem_magic.views import figure as bars
from gpumem_magic.views.lines import SizeFormat, fit
from gpumem_magic.views.palette import ALARM, COLOURS, PAPER, QUIET, TEXT
from gpumem_magic.views.pen import WIDTH

MAX_ROWS = 60
_ROW = 0.34
_HEAD, _FOOT = 0.36, 0.62
_LEFT, _RIGHT = 3.35, 1.75
_LARGEST_LABELLED = 1 / 26  # of the strip's width: a piece that has room for its figure
_DARK = ("parameters", "optimizer_state", "temporaries", "unknown", "gradients", "activation_gradients")


def png(investigation: Investigation, *, dpi: int = 150) -> tuple[bytes, int, int]:
    """The picture as a PNG with few colours, and its width and height in pixels."""
    if not investigation.has_strips:
        return bars.png(investigation.report, dpi=dpi)
    with matplotlib.style.context("default"):
        figure = _Map(investigation).figure
    return bars.few_colours(bars.rendered(figure, dpi))


def rows_of(steps: Sequence[Step]) -> list[Step]:
    """The steps at which something moved, the failure and those with a published figure that changed. At most `MAX_ROWS`."""
    chosen: list[Step] = []
    for step in steps:
        before = chosen[-1] if chosen else None
        moved = before is None or step.strip != before.strip or step.line.used != before.line.used
        told = step.published is not None and (before is None or step.published != before.published)
        if step.line.row.kind == "error" or moved or (told and moved):
            chosen.append(step)
        elif before is not None and step.published is not None and before.published is None:
            # A reading belongs to the state that it was taken in, not to the line that printed it.
            chosen[-1] = Step(before.line, step.published, before.strip, before.sentences)
    if len(chosen) <= MAX_ROWS:
        return chosen
    return [*chosen[: MAX_ROWS // 2], *chosen[-MAX_ROWS // 2 :]]


class _Map:
    def __init__(self, investigation: Investigation) -> None:
        self.investigation = investigation
        self.words = SizeFormat(investigation.report)
        steps = rows_of(investigation.steps)
        height = _HEAD + _ROW * (len(steps) + bool(investigation.wanted)) + _FOOT
        self.figure, self.axes = bars.canvas()
        self.figure.set_size_inches(WIDTH, height)
        self.axes.set_ylim(height, 0)
        most = max(step.strip.reserved for step in steps if step.strip is not None)
        count = max(len(step.strip.segments) for step in steps if step.strip is not None)
        width = WIDTH - _LEFT - _RIGHT - 0.2
        self.gap = min(0.02, 0.2 * width / max(count, 1))
        self.scale = (width - self.gap * count) / max(most, 1)
        self._head(investigation.has_published)
        y = _HEAD
        for step in steps:
            self._row(step, y)
            y += _ROW
            if step.line.row.kind == "error" and investigation.wanted and step.strip is not None:
                self._wanted(step.strip, investigation.wanted, y)
                y += _ROW
        self._legend(steps, y + 0.16)

    def _text(self, x: float, y: float, text: str, colour: str = TEXT, size: float = 9.0, **more: Any) -> None:
        font = more.pop("family", "DejaVu Sans")
        # No mathematics: a dollar sign in a statement is a dollar sign.
        self.axes.text(
            x,
            y,
            text,
            color=colour,
            fontsize=size,
            va="center",
            parse_math=False,
            fontfamily=font,
            clip_on=False,
            **more,
        )

    def _head(self, published: bool) -> None:
        self._text(0.2, 0.16, "after this statement", QUIET)
        self._text(_LEFT, 0.16, "PyTorch's segments, to scale, by address", QUIET)
        self._text(WIDTH - 1.0 if published else WIDTH - 0.2, 0.16, "nvidia-smi", QUIET, ha="right")
        if published:
            self._text(WIDTH - 0.2, 0.16, "published", QUIET, ha="right")

    def _row(self, step: Step, y: float) -> None:
        failed = step.line.row.kind == "error"
        middle = y + _ROW / 2
        self._text(0.2, middle, fit(step.title, 40), ALARM if failed else TEXT, 8.6, family="DejaVu Sans Mono")
        if step.strip is not None:
            self._strip(step.strip, y + 0.04, _ROW - 0.08)
        right = WIDTH - 1.0 if self.investigation.has_published else WIDTH - 0.2
        self._text(right, middle, self.words.size(step.line.row.device_used), ha="right")
        if step.published is not None:
            self._text(WIDTH - 0.2, middle, mib(step.published), QUIET, ha="right")

    def _strip(self, strip: Strip, y: float, height: float) -> None:
        x = _LEFT
        for segment in strip.segments:
            inside = x
            for piece in segment.pieces:
                width = piece.size * self.scale
                colour = PAPER if piece.kind == FREE else COLOURS.get(piece.kind, WAITING_COLOUR)
                self.axes.add_patch(Rectangle((inside, y), width, height, facecolor=colour, edgecolor="none"))
                if width > _LARGEST_LABELLED * (WIDTH - _LEFT - _RIGHT):
                    dark = piece.kind in _DARK
                    self._text(
                        inside + width / 2, y + height / 2, mib(piece.size), PAPER if dark else TEXT, 7.2, ha="center"
                    )
                inside += width
            frame = Rectangle((x, y), segment.size * self.scale, height, facecolor="none", edgecolor=QUIET, lw=0.5)
            self.axes.add_patch(frame)
            x += segment.size * self.scale + self.gap

    def _wanted(self, strip: Strip, wanted: int, y: float) -> None:
        """The request that failed, beneath the largest free piece."""
        hole = strip.free_pieces[0] if strip.free_pieces else None
        x = end = _LEFT
        for segment in strip.segments:
            if hole is not None and segment.address <= hole.address < segment.address + segment.size:
                x = end + (hole.address - segment.address) * self.scale
            end += segment.size * self.scale + self.gap
        x = min(x, WIDTH - 0.2 - wanted * self.scale)
        box = Rectangle(
            (x, y + 0.03), wanted * self.scale, _ROW - 0.1, facecolor="none", edgecolor=ALARM, lw=1.1, ls="--"
        )
        self.axes.add_patch(box)
        note = f"{mib(wanted)} MiB wanted"
        if hole is not None:
            note += f"; the largest free piece has {mib(hole.size)}"
        self._text(x - 0.08, y + _ROW / 2 - 0.02, note, ALARM, 8.6, ha="right")

    def _legend(self, steps: Sequence[Step], y: float) -> None:
        there = {
            piece.kind
            for step in steps
            if step.strip is not None
            for segment in step.strip.segments
            for piece in segment.pieces
        }
        x = 0.2
        for kind in [kind for kind in KIND_WORDS if kind in there]:
            words = KIND_WORDS[kind]
            width = 0.42 + 0.078 * len(words)
            if x + width > WIDTH - 0.2:
                x, y = 0.2, y + 0.22
            colour = PAPER if kind == FREE else COLOURS.get(kind, WAITING_COLOUR)
            self.axes.add_patch(Rectangle((x, y - 0.06), 0.14, 0.13, facecolor=colour, edgecolor=QUIET, lw=0.5))
            self._text(x + 0.2, y, words, TEXT, 8.6)
            x += width
