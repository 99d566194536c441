"""The chart as SVG, made by hand: for ``--static``, which updates it in place, and needs neither a script nor matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from gpumem_magic.units import human
from gpumem_magic.views.layout import ticks
from gpumem_magic.views.palette import ALARM, PAPER, QUIET, TEXT
from gpumem_magic.widgets.columns import (
    ALLOCATED,
    DEVICE_USED,
    FIRST_LAYER,
    LAYER_COLOURS,
    LAYER_LABELS,
    LAYER_LINES,
    LAYERS,
    TIME,
)
from gpumem_magic.widgets.marks import CHECKPOINT, USER, named_marks, short
from gpumem_magic.widgets.samples import DeviceSamples, Samples, duration, present_layers, summary
from gpumem_magic.widgets.thin import Row, height, layers_of_height, runs, thin, top_of_scale

WIDTH = 860
POINTS = 150
_LEFT, _RIGHT, _TOP, _PLOT, _BOTTOM = 84, 92, 42, 190, 26
_BAR = 34
_FONT = 'font-family="system-ui,\'Segoe UI\',Roboto,Arial,sans-serif" font-size="12"'


Scale = Callable[[float], float]


def svg(samples: Samples) -> str:
    """One panel a device, a legend below. No script, no link; a white ground of its own, so that it reads in dark mode."""
    panel = _TOP + _PLOT + _BOTTOM
    names = present_layers(samples)
    rows_of_legend = math.ceil(len(names) / 4)
    height = panel * max(len(samples.devices), 1) + 18 * rows_of_legend + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'style="max-width:100%;height:auto" role="img" {_FONT} fill="{TEXT}">',
        f"<title>{escape(summary(samples))}</title>",
        f"<defs>{''.join(_pattern(layer) for layer in names if layer in LAYER_LINES)}</defs>",
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="{PAPER}"/>',
    ]
    if not samples.devices:
        parts.append(f'<text x="{_LEFT}" y="60" fill="{QUIET}">no GPU in use yet</text>')
    for number, device in enumerate(samples.devices):
        parts.append(f'<g transform="translate(0 {number * panel})">{_panel(device, samples)}</g>')
    top = panel * max(len(samples.devices), 1) + 10
    for number, layer in enumerate(names):
        x, y = _LEFT + (number % 4) * 190, top + (number // 4) * 18
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_fill(layer)}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 10}">{LAYER_LABELS[layer]}</text>')
    return "".join(parts) + "</svg>"


def _panel(device: DeviceSamples, samples: Samples) -> str:
    rows = thin(device.rows, POINTS)
    width = WIDTH - _LEFT - _RIGHT
    start, end = samples.started, max(samples.ended, samples.started + 1.0)
    top = top_of_scale(max(map(height, rows), default=0.0), device.facts.capacity)

    def across(time: float) -> float:
        return _LEFT + (time - start) / (end - start) * width

    def up(size: float) -> float:
        return _TOP + _PLOT - size / top * _PLOT

    now = device.latest
    used = (
        f"  ·  nvidia-smi {human(int(now[DEVICE_USED]))} of {human(device.facts.capacity)}"
        if now and _is_known(now)
        else ""
    )
    allocated = f"  ·  allocated {human(int(now[ALLOCATED]))}" if now else ""
    parts = [f'<text x="{_LEFT}" y="18"><tspan font-weight="600">{escape(device.name)}</tspan>{allocated}{used}</text>']
    for size, word in ticks(int(top)):
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + width}" y1="{up(size):.1f}" y2="{up(size):.1f}" stroke="#E6E6E6"/>'
        )
        parts.append(f'<text x="{_LEFT - 8}" y="{up(size) + 4:.1f}" text-anchor="end" fill="{QUIET}">{word}</text>')
    for run, until in runs(rows, 1 / samples.hz, device.per_row, end):
        parts += _areas(run, until, across, up)
    if now is not None:
        parts += _bar(now, _LEFT + width + 16, up)
    parts += _lines(device, samples, across, up, top)
    floor = _TOP + _PLOT
    parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + width}" y1="{floor}" y2="{floor}" stroke="{QUIET}"/>')
    parts.append(f'<text x="{_LEFT}" y="{floor + 16}" fill="{QUIET}">0 s</text>')
    words = duration(end - start)
    parts.append(f'<text x="{_LEFT + width}" y="{floor + 16}" text-anchor="end" fill="{QUIET}">{words}</text>')
    return "".join(parts)


def _areas(rows: list[Row], until: float, across: Scale, up: Scale) -> list[str]:
    """Each sample stands until the next; the last one until a time."""
    xs = [*(across(row[TIME]) for row in rows), across(max(until, rows[-1][TIME]))]
    parts = []
    base = [0.0] * len(rows)
    for place, layer in enumerate(LAYERS):
        # Nothing where it is not a number: zero stands first.
        sizes = [max(0.0, row[FIRST_LAYER + place]) for row in rows]
        if any(sizes):
            over = [low + size for low, size in zip(base, sizes, strict=True)]
            points = _steps(xs, over, up) + _steps(xs, base, up)[::-1]
            parts.append(f'<polygon points="{" ".join(points)}" fill="{_fill(layer)}"/>')
            base = over
    return parts


def _steps(xs: list[float], sizes: list[float], up: Scale) -> list[str]:
    """The corners of a staircase; none where nothing changes."""
    points = [f"{xs[0]:.1f},{up(sizes[0]):.1f}"]
    for number in range(1, len(sizes)):
        if sizes[number] != sizes[number - 1]:
            points.append(f"{xs[number]:.1f},{up(sizes[number - 1]):.1f}")
            points.append(f"{xs[number]:.1f},{up(sizes[number]):.1f}")
    return [*points, f"{xs[-1]:.1f},{up(sizes[-1]):.1f}"]


def _bar(row: Sequence[float], x: float, up: Scale) -> list[str]:
    parts = []
    base = 0.0
    for layer, size in layers_of_height(row):
        y, under = up(base + size), up(base)
        parts.append(
            f'<rect x="{x}" y="{y:.1f}" width="{_BAR}" height="{under - y:.1f}" fill="{_fill(layer)}" '
            f'stroke="{PAPER}" stroke-width="0.5"><title>{LAYER_LABELS[layer]} {human(int(size))}</title></rect>'
        )
        base += size
    parts.append(f'<text x="{x + _BAR / 2}" y="{_TOP + _PLOT + 16}" text-anchor="middle" fill="{QUIET}">now</text>')
    return parts


def _lines(device: DeviceSamples, samples: Samples, across: Scale, up: Scale, top: float) -> list[str]:
    """Marks, the peak and the capacity."""
    right = WIDTH - _RIGHT
    parts = []
    for mark in samples.marks:
        x = across(mark.time)
        if not _LEFT <= x <= right:
            continue
        title = f"<title>{escape(mark.label)}</title>"
        if mark.kind == CHECKPOINT:
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP + _PLOT}" y2="{_TOP + _PLOT + 5}" stroke="{QUIET}">{title}</line>'
            )
        else:
            dash = "" if mark.kind == USER else ' stroke-dasharray="1 3"'
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + _PLOT}" stroke="{TEXT}"{dash}>{title}</line>'
            )
    for mark, on_left in named_marks(samples.marks, samples.started, max(samples.ended - samples.started, 1.0)):
        x = across(mark.time)
        look = f'font-size="11" fill="{TEXT if mark.kind == USER else QUIET}" text-anchor="{"end" if on_left else "start"}"'
        parts.append(f'<text x="{x:.1f}" y="{_TOP - 4}" {look}>{escape(short(mark.label, 24))}</text>')
    if device.peak:
        y = up(device.peak)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{TEXT}" stroke-width="0.8"/>')
        words = f"peak {human(device.peak)}"
        # Below its line where the capacity's runs right above it.
        at = y + 12 if 0 <= y - up(device.facts.capacity) < 14 else y - 4
        halo = f'paint-order="stroke" stroke="{PAPER}" stroke-width="3"'
        parts.append(f'<text x="{_LEFT + 4}" y="{at:.1f}" font-size="11" {halo}>{words}</text>')
    if device.facts.capacity <= top:
        y = up(device.facts.capacity)
        parts.append(
            f'<line x1="{_LEFT}" x2="{right + 60}" y1="{y:.1f}" y2="{y:.1f}" stroke="{ALARM}" stroke-dasharray="6 4"/>'
        )
    return parts


def _fill(layer: str) -> str:
    return f"url(#gpumem-{layer})" if layer in LAYER_LINES else LAYER_COLOURS[layer]


def _pattern(layer: str) -> str:
    ink, direction = LAYER_LINES[layer]
    turned = {"/": 45, "\\": -45, "|": 0, "-": 90}[direction]
    return (
        f'<pattern id="gpumem-{layer}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate({turned})"><rect width="6" height="6" fill="{LAYER_COLOURS[layer]}"/>'
        f'<rect width="1.5" height="6" fill="{ink}"/></pattern>'
    )


def _is_known(row: Sequence[float]) -> bool:
    return not math.isnan(row[DEVICE_USED])
