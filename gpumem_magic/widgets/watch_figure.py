"""The chart as a matplotlib figure: what a finished watch leaves in the notebook, and what `plot()` gives.

Made without pyplot and under matplotlib's default style, like the report's picture. Only this module of the watch imports
matplotlib, and never while samples are taken.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter

from gpumem_magic.units import human
from gpumem_magic.views.figure import QuietFigure
from gpumem_magic.views.layout import ticks
from gpumem_magic.views.palette import ALARM, PAPER, QUIET, TEXT
from gpumem_magic.views.pen import patterned
from gpumem_magic.widgets.columns import (
    DEVICE_USED,
    FIRST_LAYER,
    HATCH_COLOUR,
    LAYER_COLOURS,
    LAYER_LABELS,
    LAYERS,
    NOT_YET_KNOWN,
    TIME,
)
from gpumem_magic.widgets.marks import CELL, CHECKPOINT, USER, named_marks, short
from gpumem_magic.widgets.samples import DeviceSamples, Samples, duration, present_layers
from gpumem_magic.widgets.thin import Row, height, layers_of_height, runs, thin, top_of_scale

WIDTH = 7.8
DPI = 130
POINTS = 600
_PANEL = 2.8
# The device's line, and below it the names of marks.
_TITLE = 0.44
# The height of words in a panel, of the panel's.
_TAG = 0.1
_HATCH: Any = {"hatch.color": HATCH_COLOUR, "hatch.linewidth": 1.6}


class WatchFigure(QuietFigure):
    """A figure that a notebook shows as a picture even where nobody has loaded pyplot."""

    def _repr_png_(self) -> bytes:
        return _render(self)


def draw(samples: Samples) -> Figure:
    """One panel a device, with the last moment as a bar on its right, and a legend below."""
    with matplotlib.style.context("default"):
        return _draw(samples)


def png(samples: Samples) -> tuple[bytes, int, int]:
    """The chart as a PNG, and its width and height in pixels."""
    figure = draw(samples)
    with matplotlib.style.context("default"):
        data = _render(figure)
    width, height = figure.get_size_inches() * DPI
    return data, round(width), round(height)


def _render(figure: Figure) -> bytes:
    file = io.BytesIO()
    FigureCanvasAgg(figure).print_png(file, metadata={"Software": None})  # type: ignore[no-untyped-call]
    if figure.dpi != DPI:
        file = io.BytesIO()
        figure.savefig(file, dpi=DPI, format="png")
    return file.getvalue()


def _draw(samples: Samples) -> Figure:
    names = present_layers(samples)
    legend = 0.19 * math.ceil(len(names) / 4) + 0.1
    panels = max(len(samples.devices), 1)
    height = panels * _PANEL + legend
    figure = WatchFigure(figsize=(WIDTH, height), dpi=DPI, facecolor=PAPER)
    FigureCanvasAgg(figure)
    for number, device in enumerate(samples.devices):
        bottom = height - (number + 1) * _PANEL
        box = (0.7 / WIDTH, (bottom + 0.4) / height, (WIDTH - 1.4) / WIDTH, (_PANEL - 0.4 - _TITLE) / height)
        bar = ((WIDTH - 0.57) / WIDTH, box[1], 0.42 / WIDTH, box[3])
        _panel(figure.add_axes(box), figure.add_axes(bar), device, samples)
    if not samples.devices:
        figure.text(0.5, 0.5, "no GPU was in use", ha="center", color=QUIET)
    with matplotlib.rc_context(_HATCH):
        handles = [Patch(label=LAYER_LABELS[name], **_look(name)) for name in names]
    if handles:
        figure.legend(
            handles=_by_columns(handles, 4), loc="upper left", ncols=4, frameon=False, fontsize=8.5, labelcolor=TEXT,
            bbox_to_anchor=(0.62 / WIDTH, legend / height), handlelength=1.1, handleheight=1.1, columnspacing=1.8,
            borderaxespad=0, borderpad=0.2,
        )  # fmt: skip
    return figure


def _panel(axes: Any, bar: Any, device: DeviceSamples, samples: Samples) -> None:
    rows = thin(device.rows, POINTS)
    length = max(samples.ended - samples.started, 1.0)
    top = top_of_scale(max(map(height, rows), default=0.0), device.facts.capacity)
    for run, until in runs(rows, 1 / samples.hz, device.per_row, samples.ended):
        _areas(axes, run, samples.started, until)
    if device.latest is not None:
        _bar(bar, device.latest)
    for mark in samples.marks:
        at = mark.time - samples.started
        if mark.kind == CHECKPOINT:
            axes.plot([at, at], [-0.025, 0], transform=axes.get_xaxis_transform(), color=QUIET, lw=0.7, clip_on=False)
        elif mark.kind == CELL:
            axes.axvline(at, color=QUIET, lw=0.7, ls=":")
        elif mark.kind == USER:
            axes.axvline(at, color=TEXT, lw=0.8)
    for mark, on_left in named_marks(samples.marks, samples.started, length):
        axes.annotate(
            short(mark.label, 24), (mark.time - samples.started, 1), (0, 2), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="right" if on_left else "left", va="bottom",
            fontsize=8, color=TEXT if mark.kind == USER else QUIET,
        )  # fmt: skip
    if device.peak:
        axes.axhline(device.peak, color=TEXT, lw=0.8)
        # Below its line where the capacity's runs right above it.
        below = 0 <= device.facts.capacity - device.peak < _TAG * top
        axes.annotate(
            f"peak allocated {human(device.peak)}", (1, device.peak), (-3, -3 if below else 3),
            xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8, color=TEXT, ha="right",
            va="top" if below else "baseline", bbox={"facecolor": PAPER, "alpha": 0.75, "lw": 0, "pad": 1},
        )  # fmt: skip
    if device.facts.capacity <= top:
        for each in (axes, bar):
            each.axhline(device.facts.capacity, color=ALARM, lw=1, ls=(0, (5, 4)))
    _furniture(axes, bar, length, top)
    axes.set_title(_title(device), loc="left", fontsize=9.5, color=TEXT, pad=15)


def _areas(axes: Any, rows: Sequence[Row], start: float, until: float) -> None:
    """Each sample stands until the next; the last one until a time."""
    times = [*(row[TIME] - start for row in rows), max(until, rows[-1][TIME]) - start]
    base = np.zeros(len(times))
    for place, layer in enumerate(LAYERS):
        sizes = np.nan_to_num(np.array([row[FIRST_LAYER + place] for row in (*rows, rows[-1])]))
        if sizes.any():
            with matplotlib.rc_context(_HATCH):
                axes.fill_between(times, base, base + sizes, step="post", **_look(layer))
            base = base + sizes


def _bar(axes: Any, row: Row) -> None:
    base = 0.0
    for layer, size in layers_of_height(row):
        with matplotlib.rc_context(_HATCH):
            axes.bar([0], [size], bottom=[base], width=1, **_look(layer))
        base += size


def _furniture(axes: Any, bar: Any, length: float, top: float) -> None:
    for each in (axes, bar):
        each.set_ylim(0, top)
        for side in ("top", "right", "left"):
            each.spines[side].set_visible(False)
        each.spines["bottom"].set_color(QUIET)
        each.tick_params(colors=QUIET, length=0, labelsize=8, pad=6)
    words = dict(ticks(int(top)))
    axes.yaxis.set_major_locator(FixedLocator(list(words)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: words.get(int(size), "")))
    axes.grid(axis="y", color="#E6E6E6", lw=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(0, length)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: _clock(seconds)))
    bar.set_xlim(-0.55, 0.55)
    bar.set_yticks([])
    bar.set_xticks([0], ["end"])


def _title(device: DeviceSamples) -> str:
    words = device.name
    driver = max((row[DEVICE_USED] for row in device.rows if row[DEVICE_USED] == row[DEVICE_USED]), default=None)
    if driver is not None:
        words += f"   nvidia-smi up to {human(int(driver))} of {human(device.facts.capacity)}"
    return words


def _clock(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 60 else duration(seconds)


def _look(layer: str) -> dict[str, Any]:
    if layer == NOT_YET_KNOWN:
        return {"facecolor": LAYER_COLOURS[layer], "hatch": "////", "linewidth": 0, "edgecolor": HATCH_COLOUR}
    return patterned(layer, LAYER_COLOURS[layer])


def _by_columns(things: list[Any], columns: int) -> list[Any]:
    """Reordered, so that a legend that fills columns reads along its rows."""
    return [thing for column in range(columns) for thing in things[column::columns]]
