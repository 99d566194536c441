"""What lay where in PyTorch's segments at each row of a report: the strips that the stepper draws.

A strip is as exact as a screen can show: neighbours that are too small to be seen are put together by what they are, and no
byte is lost thereby. It is recounted from the recording, so a report without one (from a JSON file) has no strips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpumem_magic.devices.base import Label
from gpumem_magic.recording.model import Checkpoint, Recording
from gpumem_magic.report.model import ReportData, Row
from gpumem_magic.snapshot.model import INACTIVE, Block, Segment
from gpumem_magic.snapshot.timeline import Timeline

FREE = "free"
# Freed, but a stream has not come so far yet.
WAITING = "waiting"
# A piece below this share of the device is less than half a pixel wide.
_SMALLEST_SHARE = 1 / 2000


@dataclass(frozen=True)
class SegmentPiece:
    """A piece of a segment, in bytes. kind: a category, "free" or "waiting". name: of its only tenant, where that has one."""

    address: int
    size: int
    kind: str
    name: str | None = None


@dataclass(frozen=True)
class SegmentStrip:
    """One segment: memory that PyTorch got from the device in one piece. pool: "large" or "small"."""

    address: int
    size: int
    pool: str
    pieces: tuple[SegmentPiece, ...]


@dataclass(frozen=True)
class Strip:
    """All segments at a moment, by address."""

    segments: tuple[SegmentStrip, ...]

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def free_pieces(self) -> list[SegmentPiece]:
        """What is cached and free, largest first."""
        found = [piece for segment in self.segments for piece in segment.pieces if piece.kind == FREE]
        return sorted(found, key=lambda piece: -piece.size)


def strips_of(report: ReportData) -> list[Strip | None]:
    """A strip for each row of `report.checkpoints`, in order; None where the recording does not say."""
    view = report.source
    if view is None:
        return [None] * len(report.checkpoints)
    total = report.device.capacity or max(row.reserved for row in report.checkpoints)
    known: dict[int, Strip] = {}
    strips: list[Strip | None] = []
    for point in checkpoints_of(report, view.recording):
        position = None if point is None else point.moment.positions.get(report.device.index)
        if position is None:
            strips.append(None)
            continue
        if position not in known:
            known[position] = strip_at(view.timeline, view.labels, position, round(total * _SMALLEST_SHARE))
        strips.append(known[position])
    return strips


def checkpoints_of(report: ReportData, recording: Recording) -> list[Checkpoint | None]:
    """The recording's checkpoint of each row. Rows are some of the checkpoints, in their order; None where one is not found."""
    points = list(recording.checkpoints)
    found: list[Checkpoint | None] = []
    place = 0
    for row in report.checkpoints:
        ahead = next((number for number in range(place, len(points)) if _is_of(points[number], row)), None)
        found.append(None if ahead is None else points[ahead])
        place = place if ahead is None else ahead + 1
    return found


def _is_of(point: Checkpoint, row: Row) -> bool:
    return (point.kind, point.line, point.iteration, point.statement) == (
        row.kind,
        row.line,
        row.iteration,
        row.statement,
    )


def strip_at(timeline: Timeline, labels: Sequence[Label], position: int, smallest: int) -> Strip:
    """The strip at a position of the timeline. smallest: neighbours below this many bytes are put together."""
    tenants = {life.address: labels[life.index] for life in timeline.live_at(position)}
    return Strip(tuple(_segment_strip(segment, tenants, smallest) for segment in timeline.segments_at(position)))


def _segment_strip(segment: Segment, tenants: Mapping[int, Label], smallest: int) -> SegmentStrip:
    pieces = tuple(_together([_piece(block, tenants) for block in segment.blocks], smallest))
    return SegmentStrip(segment.address, segment.total_size, segment.segment_type, pieces)


def _piece(block: Block, tenants: Mapping[int, Label]) -> SegmentPiece:
    if block.state == INACTIVE:
        return SegmentPiece(block.address, block.size, FREE)
    label = tenants.get(block.address)
    if label is None:
        return SegmentPiece(block.address, block.size, WAITING)
    return SegmentPiece(block.address, block.size, label.category, label.name)


def _together(pieces: Sequence[SegmentPiece], smallest: int) -> list[SegmentPiece]:
    """Runs of pieces that are too small to be seen become one piece for each kind in the run."""
    done: list[SegmentPiece] = []
    run: list[SegmentPiece] = []
    for piece in pieces:
        if piece.size < smallest:
            run.append(piece)
            continue
        done += _by_kind(run)
        run = []
        done.append(piece)
    return done + _by_kind(run)


def _by_kind(run: Sequence[SegmentPiece]) -> list[SegmentPiece]:
    if len(run) < 2:
        return list(run)
    sizes: dict[str, int] = {}
    for piece in run:
        sizes[piece.kind] = sizes.get(piece.kind, 0) + piece.size
    merged, address = [], run[0].address
    for kind, size in sizes.items():
        merged.append(SegmentPiece(address, size, kind))
        address += size
    return merged
