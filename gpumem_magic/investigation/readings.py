"""What somebody else read from nvidia-smi at the same statements, for comparison with our figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpumem_magic.investigation.memory_map import checkpoints_of
from gpumem_magic.report.model import ReportData
from gpumem_magic.units import MIB

Published = Mapping[str, Sequence[int | None]]


def readings_of(report: ReportData, published: Published) -> list[int | None]:
    """For each row of `report.checkpoints` the published reading in bytes, or None.

    published: a part of a statement's text -> what was read after its first run, its second and so on, in MiB; None where there
    is no reading. ``{"!nvidia-smi": [2, 2, 3769]}`` belongs to the first three runs of any statement with that text. Raises
    ValueError where a text is in no statement, or there are more readings than runs.
    """
    found: list[int | None] = [None] * len(report.checkpoints)
    runs = _runs(report)
    for text, readings in published.items():
        of_text = [row for statement, row in runs if text in statement]
        if not of_text:
            raise ValueError(f"published: no statement of this report has {text!r} in it")
        if len(readings) > len(of_text):
            times = "once" if len(of_text) == 1 else f"{len(of_text)} times"
            raise ValueError(f"published: {len(readings)} readings for {text!r}, which ran {times}")
        for reading, row in zip(readings, of_text, strict=False):
            if reading is not None and (isinstance(reading, bool) or not isinstance(reading, int) or reading < 0):
                raise ValueError(f"published: a reading for {text!r} is {reading!r}, and should be whole MiB, or None")
            if reading is not None and row is not None:
                found[row] = reading * MIB
    return found


def _runs(report: ReportData) -> list[tuple[str, int | None]]:
    """Every run of a statement with its row's number; None for a run whose row was folded away."""
    recording = report.recording
    rows = range(len(report.checkpoints))
    if recording is None or not recording.was_watched:
        return [(report.checkpoints[row].statement, row) for row in rows if report.checkpoints[row].statement]
    row_of = {
        id(point): row for row, point in zip(rows, checkpoints_of(report, recording), strict=True) if point is not None
    }
    return [(point.statement, row_of.get(id(point))) for point in recording.checkpoints if point.statement]
