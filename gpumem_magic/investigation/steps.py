"""Everything that the stepper shows, worked out once: numbers and strings, ready for the page and for the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpumem_magic.investigation.listing import ListedLine, listing_of
from gpumem_magic.investigation.memory_map import SegmentStrip, Strip, strips_of
from gpumem_magic.investigation.readings import Published, readings_of
from gpumem_magic.investigation.words import KIND_WORDS, sentences
from gpumem_magic.report.model import ReportData
from gpumem_magic.views import explain
from gpumem_magic.views.lines import PEAK, Line, lines, present
from gpumem_magic.views.palette import COLOURS

FREE_COLOUR = COLOURS["cached"]
WAITING_COLOUR = "#B8B8B8"


@dataclass(frozen=True)
class Step:
    """One row. published: nvidia-smi's figure as somebody else read it, in bytes; None where there is none."""

    line: Line
    published: int | None
    strip: Strip | None
    sentences: tuple[str, ...]

    @property
    def title(self) -> str:
        """``2: output = model(input, comb)``."""
        iteration = self.line.iteration
        return f"{iteration} {self.line.text}" if iteration else self.line.text

    @property
    def heading(self) -> str:
        """The same alone, where no column of numbers explains the first: ``output = model(input, comb), iteration 2``."""
        turn = self.line.iteration.removesuffix(":")
        return f"{self.line.text}, iteration {turn}" if turn else self.line.text

    @property
    def is_quiet(self) -> bool:
        """Nothing moved, and nobody else's figure is there: arrows pass over it."""
        return self.line.moved_nothing and self.published is None


@dataclass(frozen=True)
class Investigation:
    """A report, taken apart into steps. wanted: the bytes of the request that failed, or None."""

    report: ReportData
    listing: tuple[ListedLine, ...]
    steps: tuple[Step, ...]

    @property
    def wanted(self) -> int | None:
        return None if self.report.error is None else self.report.error.wanted

    @property
    def opens_at(self) -> int:
        """The step of the failure, or of the first statement in which the peak was."""
        rows = [step.line.row for step in self.steps]
        failed = next((number for number, row in enumerate(rows) if row.kind == "error"), None)
        return max(range(len(rows)), key=lambda number: rows[number].peak_allocated) if failed is None else failed

    @property
    def has_strips(self) -> bool:
        return any(step.strip is not None and step.strip.segments for step in self.steps)

    def text(self) -> str:
        """All steps in words, one paragraph each: for a terminal, and for a reader who does not see the picture."""
        steps = [
            f"{number}. {step.title}: {' '.join(step.sentences)}" for number, step in enumerate(self.steps, start=1)
        ]
        return "\n".join([explain.headline(self.report), *steps])

    @property
    def has_published(self) -> bool:
        return any(step.published is not None for step in self.steps)


def investigation_of(
    report: ReportData, *, published: Published | None = None, source: str | None = None
) -> Investigation:
    """The steps of a report. published: see `readings_of`; source: the cell's text, else it is looked up in the session.

    Raises ValueError for a report without rows, and for readings that belong to none.
    """
    if not report.checkpoints:
        raise ValueError("this report has no rows to step through")
    readings = readings_of(report, published or {})
    strips = strips_of(report)
    shown = [line for line in lines(report, parts=False) if line.row.kind != PEAK]
    steps = []
    before: Strip | None = None
    for line, reading, strip in zip(shown, readings, strips, strict=True):
        steps.append(Step(line, reading, strip, tuple(sentences(report, line, before, strip))))
        before = strip
    return Investigation(report, listing_of(report, source), tuple(steps))


def facts(investigation: Investigation) -> dict[str, Any]:
    """What the page needs, as JSON: a segment that did not change between steps is sent once."""
    report = investigation.report
    kinds = list(KIND_WORDS)
    segments: dict[SegmentStrip, int] = {}
    steps = [_step(step, segments) for step in investigation.steps]
    return {
        "device": explain.device_name(report.device),
        "capacity": report.device.capacity or max(step.line.used for step in investigation.steps),
        "headline": explain.headline(report),
        "wanted": investigation.wanted,
        "present": present(report),
        "kinds": [
            {"name": kind, "label": KIND_WORDS[kind], "colour": COLOURS.get(kind, _OWN_COLOURS.get(kind, ""))}
            for kind in kinds
        ],
        "listing": [[line.number, line.text] for line in investigation.listing],
        "segments": [_segment(segment, kinds) for segment in segments],
        "steps": steps,
    }


_OWN_COLOURS = {"free": FREE_COLOUR, "waiting": WAITING_COLOUR}


def _step(step: Step, segments: dict[SegmentStrip, int]) -> dict[str, Any]:
    row = step.line.row
    return {
        "kind": row.kind,
        "quiet": step.is_quiet,
        "title": step.heading,
        "line": row.line,
        "last": row.line + row.statement.strip().count("\n"),
        "used": step.line.used,
        "change": step.line.change,
        "published": step.published,
        "allocated": row.allocated,
        "reserved": row.reserved,
        "smi": row.device_used,
        "peak": row.peak_allocated,
        "categories": {name: size for name, size in row.categories.items() if size},
        "words": list(step.sentences),
        "strip": None
        if step.strip is None
        else [segments.setdefault(segment, len(segments)) for segment in step.strip.segments],
    }


def _segment(segment: SegmentStrip, kinds: Sequence[str]) -> dict[str, Any]:
    pieces: list[list[Any]] = []
    for piece in segment.pieces:
        made: list[Any] = [piece.size, kinds.index(piece.kind)]
        pieces.append([*made, piece.name] if piece.name else made)
    return {"size": segment.size, "pool": segment.pool, "pieces": pieces}
