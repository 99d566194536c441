"""What the numbers of one sample of one device mean: a row of float64, the same in Python, on the wire and in the page.

Bytes throughout, and not-a-number where a figure is unavailable (never 0). float64 holds every byte count below 2^53 exactly.
"""

from __future__ import annotations

from gpumem_magic.report.model import CATEGORIES, LABELS
from gpumem_magic.views.palette import COLOURS, PATTERNS, line_on

NOT_YET_KNOWN = "not_yet_known"

_AFTER_TENANTS = CATEGORIES.index("unknown") + 1
# What is allocated and has no category yet stands where `unknown` does, of which it is the forerunner.
LAYERS = (*CATEGORIES[:_AFTER_TENANTS], NOT_YET_KNOWN, *CATEGORIES[_AFTER_TENANTS:])
FIGURES = ("allocated", "reserved", "device_used", "peak")
SENT = ("time", *LAYERS, *FIGURES)
# recording: the serial number of the recording under way, 0 without one. position: the events in its log so far.
COLUMNS = (*SENT, "recording", "position")

TIME = 0
FIRST_LAYER = 1
ALLOCATED = COLUMNS.index("allocated")
RESERVED = COLUMNS.index("reserved")
DEVICE_USED = COLUMNS.index("device_used")
PEAK = COLUMNS.index("peak")
RECORDING = COLUMNS.index("recording")
POSITION = COLUMNS.index("position")

# Bluish grey, and hatched wherever it can be: provisional, and no category of its own.
LAYER_COLOURS = {layer: COLOURS.get(layer, "#B4BCCB") for layer in LAYERS}
HATCH_COLOUR = "#8590A6"
# The lines on a layer's colour, and their direction, where it is not plain.
LAYER_LINES = {NOT_YET_KNOWN: (HATCH_COLOUR, "/")} | {
    layer: (line_on(LAYER_COLOURS[layer]), PATTERNS[layer]) for layer in LAYERS if layer in PATTERNS
}
LAYER_LABELS = {layer: LABELS.get(layer, "not yet known") for layer in LAYERS}


def value(row: list[float], column: int) -> int | None:
    """A figure of a row in bytes; None where it is unavailable."""
    figure = row[column]
    return None if figure != figure else int(figure)


def layers_of(row: list[float]) -> dict[str, int | None]:
    """Layer -> bytes, bottom to top."""
    return {layer: value(row, FIRST_LAYER + place) for place, layer in enumerate(LAYERS)}
