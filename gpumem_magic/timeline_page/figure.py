"""The timeline as a still picture, for places that show no pages: a saved notebook on GitHub, a PDF, a mail.

Each column is the moment with the most allocated in its interval, so that no peak is lost. Made without pyplot, as the report's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gpumem_magic.attribution.ledger import TENANT_CATEGORIES, Outside
from gpumem_magic.report.model import LABELS
from gpumem_magic.snapshot.model import INACTIVE, Segment
from gpumem_magic.timeline_page.data import plain
from gpumem_magic.timeline_page.source import TimelineSource
from gpumem_magic.units import GIB, MIB, counted, human
from gpumem_magic.views.figure import QuietFigure, rendered
from gpumem_magic.views.palette import ALARM, COLOURS, PAPER, QUIET, TEXT

MOST_DEVICES = 4
_LAYERS = (*TENANT_CATEGORIES, "rounding", "cached")
_COLUMNS = 900
_WIDTH = 10.6
_PANEL = 2.9  # inches
_SEGMENTS = 1.9
_ROWS = 12
_ROW_PIXELS = 1000


def png(title: str, sources: Sequence[TimelineSource], *, dpi: int = 110) -> tuple[bytes, int, int]:
    """The picture, its width and its height in pixels: at most four devices, and the segments at the first one's peak."""
    shown = sources[:MOST_DEVICES]
    with matplotlib.style.context("default"):
        heights = [*(_PANEL for _ in shown), _SEGMENTS]
        figure = QuietFigure(figsize=(_WIDTH, sum(heights) + 0.9), layout="constrained", facecolor=PAPER)
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        figure.suptitle(_words(title), fontsize=12, fontweight="bold", x=0.01, ha="left", color=TEXT)
        there: set[str] = set()
        for axes, source in zip(panels, shown, strict=False):
            there |= _stack(axes, source, named=len(sources) > 1)
        _segments(panels[-1], shown[0])
        handles = [Patch(color=COLOURS[name], label=LABELS[name]) for name in _LAYERS if name in there]
        figure.legend(
            handles=handles,
            loc="outside lower left",
            ncols=6,
            fontsize=9,
            frameon=False,
            handlelength=1,
            labelcolor=TEXT,
        )
        if len(sources) > MOST_DEVICES:
            figure.text(0.99, 0.01, f"and {len(sources) - MOST_DEVICES} more", ha="right", fontsize=9, color=QUIET)
    return rendered(figure, dpi), round(figure.get_figwidth() * dpi), round(figure.get_figheight() * dpi)


def _stack(axes: Axes, source: TimelineSource, *, named: bool) -> set[str]:
    """Draws one device's timeline; returns the layers that are in it."""
    end = len(source.view.timeline)
    columns = min(end + 1, _COLUMNS)
    edges = [number * (end + 1) // columns for number in range(columns + 1)]
    positions = [source.view.timeline.peak(edges[one], edges[one + 1] - 1)[1] for one in range(columns)]
    balances = source.view.ledger.at(positions)
    layers = [balances[position].categories(Outside()) for position in positions]
    heights = np.array([[float(layer[name] or 0) for layer in layers] for name in _LAYERS])
    there = {name for name, sizes in zip(_LAYERS, heights, strict=True) if sizes.any()}
    top = float(heights.sum(axis=0).max())
    unit, name = (GIB, "GiB") if top >= 4 * GIB else (MIB, "MiB")
    # A column reaches to the next one's edge.
    heights = np.concatenate([heights, heights[:, -1:]], axis=1) / unit
    axes.stackplot(
        edges, heights, colors=[COLOURS[name] for name in _LAYERS], step="post", linewidth=0, antialiased=False
    )
    for mark in source.marks:
        if mark.kind == "error":
            axes.axvline(mark.position + 0.5, color=ALARM, linewidth=1.2)
    highest = source.view.peak[0]
    axes.axvline(source.view.peak[1] + 0.5, color=TEXT, linewidth=1, linestyle=(0, (4, 3)))
    words = f"peak {human(highest)} allocated, {human(source.view.timeline.peak_reserved(0, end)[0])} reserved at most"
    axes.set_title(f"{_words(source.name)}: {words}" if named else words, fontsize=10, loc="left", color=TEXT)
    axes.set_xlim(0, end + 1)
    axes.set_ylim(0, top / unit * 1.04 or 1)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.6g}"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda event, _: f"{event:,.0f}"))
    axes.set_ylabel(name, color=QUIET, fontsize=9)
    axes.set_xlabel("event", color=QUIET, fontsize=9)
    axes.tick_params(labelsize=9, colors=QUIET)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return there


def _segments(axes: Axes, source: TimelineSource) -> None:
    """The segments at the peak, side by side in rows, those with the most free memory first."""
    position = source.view.peak[1]
    segments = sorted(source.view.timeline.segments_at(position), key=lambda one: (-_free(one), one.address))
    live = {
        one.address: TENANT_CATEGORIES.index(source.view.labels[one.index].category)
        for one in source.view.timeline.live_at(position)
    }
    free = sum(map(_free, segments))
    pieces = sum(1 for segment in segments for block in segment.blocks if block.state == INACTIVE)
    words = (
        f"{counted(len(segments), 'segment')} at the peak, most free first: {human(free)} cached but free in "
        f"{counted(pieces, 'piece')}"
    )
    axes.set_title(words, fontsize=10, loc="left", color=TEXT)
    axes.axis("off")
    if segments:
        axes.imshow(_drawn(segments, live), aspect="auto", interpolation="nearest")


def _free(segment: Segment) -> int:
    return sum(block.size for block in segment.blocks if block.state == INACTIVE)


def _drawn(segments: Sequence[Segment], live: dict[int, int]) -> Any:
    """Pixels: each segment as wide as it is big, at least 2, wrapped into rows with a white line between."""
    total = sum(segment.total_size for segment in segments) or 1
    per_pixel = max(total / (_ROWS * _ROW_PIXELS), 1.0)
    paper, cached = _rgb(PAPER), _rgb(COLOURS["cached"])
    shades = [_rgb(COLOURS[name]) for name in TENANT_CATEGORIES]
    most = 3 * _ROWS * _ROW_PIXELS
    line: list[Any] = []
    drawn = 0
    for segment in segments:
        width = max(round(segment.total_size / per_pixel), 2)
        bar = np.tile(np.array(cached, np.uint8), (width, 1))
        scale = width / max(segment.total_size, 1)
        for block in segment.blocks:
            if block.state == INACTIVE:
                continue
            begin = (block.address - segment.address) * scale
            first, last = round(begin), max(round(begin + block.size * scale), round(begin) + 1)
            # A block that waits for a stream is neither live nor free.
            bar[first:last] = shades[live[block.address]] if block.address in live else _rgb(COLOURS["context"])
        line += [bar, np.tile(np.array(paper, np.uint8), (1, 1))]
        drawn += len(bar) + 1
        if drawn > most:
            break
    flat = np.concatenate(line)
    rows = -(-len(flat) // _ROW_PIXELS)
    padded = np.tile(np.array(paper, np.uint8), (rows * _ROW_PIXELS, 1))
    padded[: len(flat)] = flat
    picture = np.full((rows * 8, _ROW_PIXELS, 3), 255, np.uint8)
    for row in range(rows):
        picture[row * 8 : row * 8 + 7] = padded[row * _ROW_PIXELS : (row + 1) * _ROW_PIXELS]
    return picture


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _words(text: str) -> str:
    """matplotlib takes what stands between dollars for mathematics."""
    return plain(text).replace("$", r"\$")
