"""A recording becomes a report: attribution, rows with their parts, the peak and where it was, what was left out, notes.

Nothing is measured here. The state of every row is recounted from the device's log; where the device's own counters differ, a
note names the gap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from gpumem_magic.allocator.verdict import Facts, verdict_of
from gpumem_magic.attribution.categories import attribute, labels_to_carry
from gpumem_magic.attribution.ledger import Balance, Ledger, Outside, gaps
from gpumem_magic.devices.base import Label
from gpumem_magic.recording.model import Checkpoint, Failure, Moment, Recording
from gpumem_magic.report.folding import Fold, LoopRow, Turn, fold_rows, kept_turns
from gpumem_magic.report.model import LABELS, Folded, Peak, ReportData, ReportDevice, ReportError, Row
from gpumem_magic.report.notes import notes_of, place_of
from gpumem_magic.report.out_of_memory import out_of_memory
from gpumem_magic.report.parts import Part, Stretch, parts_of, spans_in, with_failing_place
from gpumem_magic.snapshot.timeline import Allocation, Timeline

# Settings are tried on a failed cell for about a second at most.
_MOST_STEPS = 1_000_000


def build(recording: Recording, *, lines: bool = True) -> ReportData:
    """The report of the recording's primary device, with those of the others that were used under `devices`.

    lines: False leaves only the rows before, the error's, if any, and after. Raises ValueError for a recording without
    checkpoints, or without the primary device's log.
    """
    return build_with_labels(recording, lines=lines)[0]


def build_with_labels(
    recording: Recording,
    *,
    lines: bool = True,
    explain: Callable[[Recording, DeviceView, ReportData], ReportData] | None = None,
) -> tuple[ReportData, dict[int, dict[int, Label]]]:
    """The same, and per device index the labels of what is still live at the end by address, for its `remember`.

    explain: adds to the primary device's report what follows from more than the recording (who holds what, and why).
    """
    if not recording.checkpoints or recording.primary not in recording.logs:
        raise ValueError("the recording is incomplete: it has no checkpoint, or no log of its device")
    others = [index for index in sorted(recording.logs) if index != recording.primary]
    views = {index: DeviceView(recording, index) for index in [recording.primary, *others]}
    used = [replace(views[index].report(lines=lines), recording=recording) for index in others if views[index].was_used]
    report = views[recording.primary].report(lines=lines)
    labels = {index: labels_to_carry(view.timeline, view.labels) for index, view in views.items()}
    report = replace(report, devices=tuple(used), overhead_seconds=recording.overhead_seconds, recording=recording)
    return (report if explain is None else explain(recording, views[recording.primary], report)), labels


@dataclass
class _Draft:
    """A row before its figures: what it shows and which stretch of the log it is about."""

    point: Checkpoint
    stretch: Stretch
    parts: list[Part]


class DeviceView:
    """What a recording says about one device."""

    def __init__(self, recording: Recording, device: int) -> None:
        self.recording = recording
        self.device = device
        self.log = recording.logs[device]
        self.timeline = Timeline(self.log.start, self.log.events, self.log.settings)
        self.labels = attribute(self.log, self.timeline, recording.spans, recording.sightings, recording.checkpoints)
        self._ledger = Ledger(self.timeline, self.labels)
        self._balances: dict[int, Balance] = {}
        self._moments = self._known_moments()

    @property
    def was_used(self) -> bool:
        """Whether anything lived or happened on the device."""
        return bool(self.timeline.allocations) or bool(self.log.events)

    def report(self, *, lines: bool = True) -> ReportData:
        drafts = self._drafts()
        span = Stretch(self.device, drafts[0].point.moment, drafts[-1].point.moment)
        highest, peak_position = self.timeline.peak(span.start_position, span.end_position)
        where = self._where(drafts, peak_position)
        kept, folds = self._folded(drafts) if lines else (_ends(drafts), [])
        self._balances = self._ledger.at([peak_position, *self._positions(kept)])
        rows = tuple(self._row(draft, with_parts=lines) for draft in kept)
        peak = self._balances[peak_position]
        return ReportData(
            torch=self.recording.torch,
            device=ReportDevice(**vars(self.log.facts)),
            checkpoints=rows,
            peak=Peak(
                where=where,
                allocated=peak.allocated,
                reserved=peak.reserved,
                device_used=self._outside(peak_position).device_used(peak.reserved),
                peak_allocated=highest,
                peak_reserved=self.timeline.peak_reserved(span.start_position, span.end_position)[0],
                categories=peak.categories(self._outside(peak_position)),
            ),
            error=self._error(drafts),
            evidence=peak.evidence,
            retries=self._retries(),
            stand_ins=self.recording.stand_ins if self.device == self.recording.primary else (),
            folded=tuple(self._with_left_out(kept, folds)),
            notes=(*notes_of(self.recording, self.device, self.timeline, peak_position), *self.gaps()),
        )

    # Rows

    def _drafts(self) -> list[_Draft]:
        points = self.recording.checkpoints
        drafts = []
        for before, point in zip((points[0], *points), points, strict=False):
            stretch = Stretch(self.device, point.begin or before.moment, point.moment)
            drafts.append(_Draft(point, stretch, []))
        starts = [span.start.tick for span in self.recording.spans]
        for draft in drafts[1:]:
            first = bisect_left(starts, draft.stretch.begin.tick)
            last = bisect_left(starts, draft.stretch.end.tick + 1)
            inside = spans_in(draft.stretch, self.recording.spans[first:last])
            if inside:
                draft.parts = parts_of(draft.stretch, inside, failed=draft.point.kind == "error")
            error = self.recording.error
            if draft.point.kind == "error" and error is not None and error.module:
                place = f"{error.module}, {error.operator}" if error.operator else error.module
                draft.parts = with_failing_place(draft.parts, draft.stretch, place)
        return drafts

    def _folded(self, drafts: list[_Draft]) -> tuple[list[_Draft], list[Fold]]:
        rows = [
            LoopRow(
                number,
                draft.point.loops,
                draft.point.iteration,
                self.timeline.peak(draft.stretch.start_position, draft.stretch.end_position)[0],
                self.timeline.allocated_at(draft.stretch.start_position),
                self.timeline.allocated_at(draft.stretch.end_position),
            )
            for number, draft in enumerate(drafts)
        ]
        keys, folds = fold_rows(rows)
        # The row of an error is never folded away: it is in the last iteration.
        kept = [drafts[key] for key in keys]
        totals: dict[int, list[int]] = {}
        for draft in kept:
            draft.parts = self._fold_parts(draft.parts, draft.point.line, totals)
        inner = [Fold(line, total, left) for line, (total, left) in totals.items() if left < total]
        return kept, [*folds, *inner]

    def _with_left_out(self, kept: list[_Draft], folds: list[Fold]) -> list[Folded]:
        """Of a long run, the recording itself holds only some of the iterations."""
        found = {fold.line: Folded(fold.line, fold.total, fold.kept) for fold in folds}
        for line, count in self.recording.left_out.items():
            if line not in found:
                turns = {
                    point.iteration[: point.loops.index(line) + 1]
                    for point in (draft.point for draft in kept)
                    if line in point.loops
                }
                found[line] = Folded(line, len(turns), len(turns))
            found[line] = replace(found[line], total=found[line].total + count)
        return list(found.values())

    def _fold_parts(self, parts: list[Part], line: int, totals: dict[int, list[int]]) -> list[Part]:
        """Iterations inside a call are folded as those of a loop."""
        turns = [part for part in parts if part.kind == "iteration"]
        chosen = kept_turns([self._turn(part) for part in turns])
        if turns:
            total = totals.setdefault(line, [0, 0])
            total[0] += len(turns) + sum(part.skipped for part in turns)
            total[1] += len(chosen)
        left_out = {id(part) for number, part in enumerate(turns) if number not in set(chosen)}
        parts = [part for part in parts if id(part) not in left_out]
        for part in parts:
            part.parts = self._fold_parts(part.parts, line, totals)
        return parts

    def _turn(self, part: Part) -> Turn:
        return Turn(
            self.timeline.peak(part.start, part.end)[0],
            self.timeline.allocated_at(part.end) - self.timeline.allocated_at(part.start),
        )

    def _positions(self, drafts: Iterable[_Draft]) -> list[int]:
        positions: list[int] = []
        for draft in drafts:
            positions.append(draft.stretch.end_position)
            todo = list(draft.parts)
            while todo:
                part = todo.pop()
                positions.append(part.end)
                todo += part.parts
        return positions

    def _row(self, draft: _Draft, *, with_parts: bool) -> Row:
        point, stretch = draft.point, draft.stretch
        told = point.moment.counters.get(self.device)
        # Its own moment's counters: another moment at the same position may have seen the context grow.
        outside = self._outside(stretch.end_position) if told is None else Outside.of(told)
        parts = tuple(self._part_row(part, point) for part in draft.parts) if with_parts else ()
        return self._figures(
            point, point.kind, point.label, (stretch.start_position, stretch.end_position), parts, outside
        )

    def _part_row(self, part: Part, point: Checkpoint) -> Row:
        inner = tuple(self._part_row(one, point) for one in part.parts)
        return self._figures(point, "part", part.label, (part.start, part.end), inner, self._outside(part.end))

    def _figures(
        self,
        point: Checkpoint,
        kind: str,
        label: str,
        positions: tuple[int, int],
        parts: tuple[Row, ...],
        outside: Outside,
    ) -> Row:
        start, end = positions
        balance = self._balances[end]
        return Row(
            kind=kind,
            label=label,
            statement=point.statement,
            line=point.line,
            iteration=point.iteration,
            parts=parts,
            allocated=balance.allocated,
            reserved=balance.reserved,
            device_used=outside.device_used(balance.reserved),
            peak_allocated=self.timeline.peak(start, end)[0],
            peak_reserved=self.timeline.peak_reserved(start, end)[0],
            categories=balance.categories(outside),
        )

    def gaps(self) -> list[str]:
        """Where the recount differs from the device's own counters, at every checkpoint, shown or not; at most three."""
        points = [point for point in self.recording.checkpoints if self.device in point.moment.counters]
        balances = self._ledger.at(point.moment.positions[self.device] for point in points)
        found = []
        for point in points:
            told = point.moment.counters[self.device]
            balance = balances[point.moment.positions[self.device]]
            words = gaps(balance.categories(Outside.of(told)), told)
            found += [f"The figures do not add up after {place_of(point)}: {gap}." for gap in words]
        return [*found[:3], f"{len(found) - 3:,} more gaps like these."] if len(found) > 4 else found

    # What is not in the log

    def _known_moments(self) -> list[tuple[int, Moment]]:
        moments = [point.moment for point in self.recording.checkpoints]
        for span in self.recording.spans:
            moments += [span.start, span.end]
        known = [
            (moment.positions[self.device], moment)
            for moment in moments
            if self.device in moment.positions and self.device in moment.counters
        ]
        return sorted(known, key=lambda pair: (pair[0], pair[1].tick))

    def _outside(self, position: int) -> Outside:
        """What the driver said at the nearest moment at or before a position; after it, where the context came in between."""
        rank = bisect_left(self._moments, position + 1, key=lambda pair: pair[0])
        at_or_before = self._moments[rank - 1][1] if rank else None
        behind = self._moments[rank][1] if rank < len(self._moments) else None
        if at_or_before is None:
            return Outside() if behind is None else Outside.of(behind.counters[self.device])
        now = Outside.of(at_or_before.counters[self.device])
        exact = at_or_before.positions[self.device] == position
        if not exact and now.context == 0 and behind is not None and self.timeline.reserved_at(position):
            return Outside.of(behind.counters[self.device])
        return now

    def _retries(self) -> int:
        first, last = self.recording.checkpoints[0].moment, self.recording.checkpoints[-1].moment
        if self.device not in first.counters or self.device not in last.counters:
            return 0
        return last.counters[self.device].retries - first.counters[self.device].retries

    # The error

    def _error(self, drafts: list[_Draft]) -> ReportError | None:
        error = _error(self.recording.error, self.device)
        failed = next((draft for draft in reversed(drafts) if draft.point.kind == "error"), None)
        if error is None or error.requested is None or failed is None:
            return error
        position = failed.stretch.end_position
        verdict = verdict_of(
            self.log.start,
            self.log.events,
            self.timeline,
            self.log.settings,
            event=position - 1,
            facts=Facts(self.log.facts.total_bytes, other_processes=self._outside(position).other_processes),
            most_steps=_MOST_STEPS,
            can_replay=not self.timeline.unmatched and not self.timeline.unplaced,
            among=self._earlier(drafts, failed.point),
        )
        if verdict is None:
            return error
        kept = self.timeline.reserved_at(0)
        return replace(error, verdict=out_of_memory(verdict, lambda life: self._in_words(life, drafts), kept))

    def _earlier(self, drafts: list[_Draft], failed: Checkpoint) -> list[range] | None:
        """The events of earlier runs of the failed statement; None where it is in no loop of the cell's own."""
        if not failed.iteration:
            return None
        runs = [draft.stretch for draft in drafts if (draft.point.kind, draft.point.line) == ("statement", failed.line)]
        return [range(run.start_position, run.end_position) for run in runs]

    def _in_words(self, life: Allocation, drafts: list[_Draft]) -> str:
        """An allocation for a reader: ```output` (activations) of output = model(input) in iteration 2, line 9``."""
        label = self.labels[life.index]
        kind = "a block" if label.category == "unknown" else LABELS[label.category]
        what = f"`{label.name}` ({kind})" if label.name else kind
        return f"{what} from before the cell" if life.born < 0 else f"{what} of {self._where(drafts, life.born + 1)}"

    # The peak

    def _where(self, drafts: list[_Draft], position: int) -> str:
        for draft in drafts:
            if draft.stretch.start_position <= position <= draft.stretch.end_position and (
                draft.point.kind == "before" or draft.stretch.start_position < position
            ):
                return _words(draft, _path(draft.parts, position))
        return _words(drafts[0], [])


def _path(parts: list[Part], position: int) -> list[Part]:
    """The parts around a position, outermost first; marks are points and hold nothing."""
    for part in parts:
        if part.kind != "mark" and part.start < position <= part.end:
            return [part, *_path(part.parts, position)]
    return []


def _words(draft: _Draft, path: list[Part]) -> str:
    """``optimizer.step() in iteration 1, line 14``, or ``trainer.train(), iteration 2, backward``; empty where it has no name."""
    point = draft.point
    if point.kind == "before":
        return "the start"
    place = [] if point.kind == "after" else [place_of(point, with_line=not path)]
    return ", ".join([*place, *(part.label for part in path)])


def _ends(drafts: list[_Draft]) -> list[_Draft]:
    """The rows of a report without lines. What lies between two of them belongs to the later one."""
    kept = [draft for draft in drafts if draft.point.kind in ("before", "error", "after")]
    for before, draft in pairwise(kept):
        draft.stretch = Stretch(draft.stretch.device, before.point.moment, draft.point.moment)
        draft.parts = []
    return kept


def _error(failure: Failure | None, device: int) -> ReportError | None:
    """An error is every device's; the sizes of a failed request only those of the device where it failed."""
    if failure is None:
        return None
    error = ReportError(failure.type, failure.message, failure.line, module=failure.module, operator=failure.operator)
    if failure.device is not None and failure.device != device:
        return error
    return replace(
        error,
        requested=failure.requested,
        rounded=failure.rounded,
        segment=failure.segment,
        largest_free=failure.largest_free,
    )
