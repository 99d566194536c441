"""What a step changed, in short sentences that say no more than the figures do."""

from __future__ import annotations

from gpumem_magic.investigation.memory_map import FREE, WAITING, SegmentPiece, Strip
from gpumem_magic.report.model import LABELS, ReportData
from gpumem_magic.units import amount, counted, mib
from gpumem_magic.views import explain, what_failed
from gpumem_magic.views.lines import Line

KIND_WORDS = LABELS | {FREE: "cached, free", WAITING: "freed, waiting for a stream"}
# A hole that matters: a share of what is reserved.
_LARGE_HOLE = 1 / 20


def sentences(report: ReportData, line: Line, before: Strip | None, now: Strip | None) -> list[str]:
    """The sentences of one row. before: the strip of the row above."""
    row = line.row
    if line.before is None:
        used = row.reserved if row.device_used is None else row.device_used
        return [f"At the start, {amount(used)} is in use."]
    if row.kind == "error":
        return [what_failed.verdict(report) or "The program failed here."]
    if line.moved_nothing or (row.kind == "after" and row.categories == line.before.categories):
        return ["No memory moved."]
    found = [_figures(line)]
    if before is not None and now is not None:
        found += [_segments(before, now), _hole(before, now)]
    if row.peak_allocated > max(row.allocated, line.before.allocated):
        found.append(f"Inside it, up to {amount(row.peak_allocated)} was allocated at once.")
    return [sentence for sentence in found if sentence]


def _figures(line: Line) -> str:
    row = line.row
    figure = "nvidia-smi's figure" if row.device_used is not None else "PyTorch's reserved memory"
    change = line.change or 0
    what = f"{figure} {'grows' if change > 0 else 'falls'} by {amount(abs(change))}" if change else f"{figure} stays"
    moves = explain.moves(line)
    return f"{what}: {moves} MiB." if moves else f"{what}."


def _segments(before: Strip, now: Strip) -> str:
    """What came from the device and what went back to it."""
    old = {(segment.address, segment.size) for segment in before.segments}
    new = {(segment.address, segment.size) for segment in now.segments}
    came, went = new - old, old - new
    words = []
    if came:
        words.append(f"{counted(len(came), 'segment')} ({mib(sum(size for _, size in came))} MiB) came from the device")
    if went:
        words.append(f"{counted(len(went), 'segment')} ({mib(sum(size for _, size in went))} MiB) went back to it")
    if not words:
        return "No segment came or went."
    text = " and ".join(words)
    return f"{text[0].upper()}{text[1:]}."


def _hole(before: Strip, now: Strip) -> str:
    """What became of the largest free piece that was cut since the row above."""
    reserved = before.reserved
    for hole in before.free_pieces:
        if hole.size < reserved * _LARGE_HOLE:
            return ""
        inside = _inside(now, hole)
        rest = max((piece.size for piece in inside if piece.kind == FREE), default=0)
        if not inside or rest >= hole.size:
            # Given back to the device, or as whole as it was.
            continue
        if not rest:
            return f"The free piece of {amount(hole.size)} is taken: {_tenants(inside)}."
        lie = "lies" if sum(piece.kind != FREE for piece in inside) == 1 else "lie"
        return (
            f"The free piece of {amount(hole.size)} is split: {_tenants(inside)} {lie} in it now, and the largest "
            f"piece left is {amount(rest)}."
        )
    return ""


def _inside(strip: Strip, hole: SegmentPiece) -> list[SegmentPiece]:
    """What lies within a range of addresses, cut to it; nothing where no segment covers it."""
    found = []
    for segment in strip.segments:
        if segment.address <= hole.address and hole.address + hole.size <= segment.address + segment.size:
            for piece in segment.pieces:
                low = max(piece.address, hole.address)
                high = min(piece.address + piece.size, hole.address + hole.size)
                if low < high:
                    found.append(SegmentPiece(low, high - low, piece.kind, piece.name))
    return found


def _tenants(pieces: list[SegmentPiece]) -> str:
    """``activations 1,916 MiB, inputs 76 MiB``, or the one variable's name."""
    tenants = [piece for piece in pieces if piece.kind != FREE]
    if len(tenants) == 1:
        only = tenants[0]
        name = f" (`{only.name}`)" if only.name else ""
        return f"{KIND_WORDS[only.kind]} {amount(only.size)}{name}"
    sizes: dict[str, int] = {}
    for piece in tenants:
        sizes[piece.kind] = sizes.get(piece.kind, 0) + piece.size
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{KIND_WORDS[kind]} {amount(size)}" for kind, size in largest)
