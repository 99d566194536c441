"""Fewer points for the same picture: of the rows that fall on one column the highest is drawn, so that no peak is lost."""

from __future__ import annotations

from collections.abc import Sequence

from gpumem_magic.widgets.columns import ALLOCATED, FIRST_LAYER, LAYERS, TIME

Row = Sequence[float]


def thin(rows: Sequence[Row], points: int) -> list[Row]:
    """At most `points` rows and the last one: for each of `points` equal intervals the one with the most allocated."""
    if len(rows) <= points or points < 1:
        return list(rows)
    start = rows[0][TIME]
    width = (rows[-1][TIME] - start) / points or 1.0
    highest: list[Row] = []
    column = -1
    for row in rows[:-1]:
        at = int((row[TIME] - start) / width)
        if at != column:
            highest.append(row)
            column = at
        elif row[ALLOCATED] > highest[-1][ALLOCATED]:
            highest[-1] = row
    return [*highest, rows[-1]]


def without_gaps(rows: Sequence[Row], longest: float) -> list[list[Row]]:
    """Rows that follow each other without a gap of more than `longest` seconds: a pause is not drawn over."""
    found: list[list[Row]] = []
    for row in rows:
        if not found or row[TIME] - found[-1][-1][TIME] > longest:
            found.append([])
        found[-1].append(row)
    return found


def longest_gap(rows: Sequence[Row], period: float, per_row: int) -> float:
    """How far apart two rows may be without a pause between them, in seconds: a few samples, and what a busy machine is late."""
    thinned = (rows[-1][TIME] - rows[0][TIME]) / len(rows) if rows else 0.0
    return max(2.5, 5 * period, 4 * period * per_row, 3 * thinned)


def top_of_scale(highest: float, capacity: float) -> float:
    """Where the vertical axis ends, in bytes: the device's capacity where that leaves the chart readable, else a little room."""
    if capacity > 0 and highest > 0.35 * capacity:
        return max(highest, capacity) * 1.04
    return max(highest * 1.15, 1 << 20)


def layers_of_height(row: Row) -> list[tuple[str, float]]:
    """(layer, bytes) of the layers that a bar of this row shows, bottom to top."""
    sizes = row[FIRST_LAYER : FIRST_LAYER + len(LAYERS)]
    return [(layer, size) for layer, size in zip(LAYERS, sizes, strict=True) if size > 0]


def height(row: Row) -> float:
    """How high its bar is, in bytes."""
    return sum(size for _, size in layers_of_height(row))


def runs(rows: Sequence[Row], period: float, per_row: int, end: float) -> list[tuple[list[Row], float]]:
    """The rows between pauses, and until when the last row of each stands: to the end of the axis where nothing follows."""
    gap = longest_gap(rows, period, per_row)
    return [
        (run, min(end, run[-1][TIME] + gap) if run[-1] is rows[-1] else run[-1][TIME] + period)
        for run in without_gaps(rows, gap)
    ]
