"""A recording becomes a report: attribution, rows with their parts, the peak and where it was, what was left out, notes.

Nothing is measured here. The state of every row is recounted from the device's log; where the device's own counters differ, a
note names the gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

from gpumem_magic.allocator.seed import seed_of
from gpumem_magic.allocator.verdict import Facts, verdict_of
from gpumem_magic.attribution.categories import labels_to_carry
from gpumem_magic.attribution.ledger import Balance, Outside
from gpumem_magic.attribution.places import place_in_program
from gpumem_magic.attribution.sites import folded
from gpumem_magic.attribution.tensors import TensorFacts
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.devices.base import Label
from gpumem_magic.recording.model import Checkpoint, CompiledCode, Failure, Recording
from gpumem_magic.report.answer import answer_of
from gpumem_magic.report.drafts import RowDraft, RowDrafts, ends
from gpumem_magic.report.filling import place_in_words
from gpumem_magic.report.model import LABELS, SKIPPED, Peak, ReportData, ReportError, Row, TensorKind
from gpumem_magic.report.notes import event_in_words, notes_of, place_of
from gpumem_magic.report.parts import Part, StatementInterval
from gpumem_magic.report.tensors import groups_at
from gpumem_magic.snapshot.timeline import Allocation

# Settings are tried on a failed cell for about a second at most.
_MOST_STEPS = 1_000_000
# Bytes of a number.
_ITEM_SIZES = (1, 2, 4, 8, 16)


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
    used = [report_of(views[index], lines=lines) for index in others if views[index].was_used]
    report = report_of(views[recording.primary], lines=lines)
    labels = {index: labels_to_carry(view.timeline, view.labels) for index, view in views.items()}
    report = replace(report, devices=tuple(used), overhead_seconds=recording.overhead_seconds)
    report = report if explain is None else explain(recording, views[recording.primary], report)
    return replace(report, answer=answer_of(report)), labels


def report_of(
    view: DeviceView,
    points: Sequence[Checkpoint] = (),
    *,
    lines: bool = True,
    most_steps: int = _MOST_STEPS,
) -> ReportData:
    """The report of one device. points: where rows are, by default at the recording's checkpoints. most_steps: how many steps
    the trials of settings may take, where memory ran out."""
    report = _Builder(view, points or view.recording.checkpoints, most_steps).report(lines=lines)
    report = replace(report, source=view)
    return replace(report, answer=answer_of(report))


class _Builder:
    """Makes the report of one device."""

    def __init__(self, view: DeviceView, points: Sequence[Checkpoint], most_steps: int) -> None:
        self.view = view
        self.points = points
        self.most_steps = most_steps
        self.recording = view.recording
        self.device = view.device
        self.log = view.log
        self.timeline = view.timeline
        self._balances: dict[int, Balance] = {}

    def report(self, *, lines: bool = True) -> ReportData:
        made = RowDrafts(self.view, self.points)
        drafts = made.drafts()
        span = StatementInterval(self.device, drafts[0].point.moment, drafts[-1].point.moment)
        highest, peak_position = self.timeline.peak(span.start_position, span.end_position)
        where = self._where(drafts, peak_position)
        shown, folds = made.folded(drafts) if lines else (ends(drafts), [])
        self._balances = self.view.ledger.at([peak_position, *_positions(shown)])
        rows = tuple(self._row(draft, with_parts=lines) for draft in shown)
        peak = self._balances[peak_position]
        return ReportData(
            torch=self.recording.torch,
            device=self.log.facts,
            checkpoints=rows,
            peak=Peak(
                where=where,
                allocated=peak.allocated,
                reserved=peak.reserved,
                device_used=self.view.outside(peak_position).device_used(peak.reserved),
                peak_allocated=highest,
                peak_reserved=self.timeline.peak_reserved(span.start_position, span.end_position)[0],
                categories=peak.categories(self.view.outside(peak_position)),
                tensors=groups_at(self.view, peak_position),
                position=peak_position,
            ),
            error=self._error(drafts),
            evidence=peak.evidence,
            retries=self._retries(),
            stand_ins=self.recording.stand_ins if self.device == self.recording.primary else (),
            folded=tuple(made.with_left_out(shown, folds)),
            remarks=tuple(notes_of(self.view, peak_position)),
            compiled=self.recording.compiled if self.recording.compiled != CompiledCode() else None,
        )

    # Rows

    def _row(self, draft: RowDraft, *, with_parts: bool) -> Row:
        point, interval = draft.point, draft.interval
        told = point.moment.counters.get(self.device)
        # Its own moment's counters: another moment at the same position may have seen the context grow.
        outside = self.view.outside(interval.end_position) if told is None else Outside.of(told)
        parts = draft.parts if with_parts else []
        start, end = interval.start_position, interval.end_position
        whole = Part(point.kind, point.label, start, end, 0, 0, parts=parts, gap=draft.gap)
        return self._figures(point, whole, point.kind, outside)

    def _figures(self, point: Checkpoint, part: Part, kind: str, outside: Outside) -> Row:
        start, end = part.start, part.end
        balance = self._balances[end]
        return Row(
            kind=kind,
            label=part.label,
            statement=point.statement,
            line=point.line,
            iteration=point.iteration,
            parts=tuple(
                self._figures(point, one, "part" if one.gap is None else SKIPPED, self.view.outside(one.end))
                for one in part.parts
            ),
            allocated=balance.allocated,
            reserved=balance.reserved,
            device_used=outside.device_used(balance.reserved),
            peak_allocated=self.timeline.peak(start, end)[0],
            peak_reserved=self.timeline.peak_reserved(start, end)[0],
            categories=balance.categories(outside),
            position=end,
            loops=point.loops,
            skipped=part.gap,
        )

    def _retries(self) -> int:
        first, last = self.points[0].moment, self.points[-1].moment
        if self.device not in first.counters or self.device not in last.counters:
            return 0
        return last.counters[self.device].retries - first.counters[self.device].retries

    # The error

    def _error(self, drafts: list[RowDraft]) -> ReportError | None:
        error = _error(self.recording.error, self.device)
        failed = next((draft for draft in reversed(drafts) if draft.point.kind == "error"), None)
        requested = None if error is None else error.requested
        if error is None or requested is None or failed is None:
            return error
        position = failed.interval.end_position
        if error.largest_free is None and position:
            stream = self.log.events[position - 1].stream
            error = replace(error, largest_free=self.timeline.largest_free_at(position, stream))
        found = verdict_of(
            self.log.start,
            self.log.events,
            self.timeline,
            self.log.settings,
            lambda life: self._in_words(life, drafts),
            event=position - 1,
            facts=Facts(self.log.facts.total_bytes, other_processes=self.view.outside(position).other_processes),
            final=self.log.final or (),
            most_steps=self.most_steps,
            can_replay=self._can_replay(),
            among=self._earlier(drafts, failed.point),
        )
        birth, asked = self.log.births.get(position - 1), None
        # (What an operator works with has no shape, or another size.)
        if birth is not None and birth.shape and requested / prod(birth.shape) in _ITEM_SIZES:
            asked = TensorKind(birth.shape, birth.dtype)
        place = "" if birth is None else _asked_in(self.view.tensors.request_facts(birth, error.line or 0), error.line)
        return replace(
            error, verdict=found, tensors=groups_at(self.view, position), asked=asked, place=error.place or place
        )

    def _can_replay(self) -> bool:
        if self.log.final is None:
            return not self.timeline.unmatched and not self.timeline.unplaced
        return seed_of(self.log.final, self.log.events, self.log.settings).reason is None

    def _earlier(self, drafts: list[RowDraft], failed: Checkpoint) -> list[range] | None:
        """The events of earlier runs of the failed statement; None where it is in no loop of the cell's own."""
        if not failed.iteration:
            return None
        runs = [
            draft.interval for draft in drafts if (draft.point.kind, draft.point.line) == ("statement", failed.line)
        ]
        return [range(run.start_position, run.end_position) for run in runs]

    def _in_words(self, life: Allocation, drafts: list[RowDraft]) -> str:
        """An allocation for a reader: ```output` (activations) of `output = model(input)` in iteration 2, line 9``; where no
        statements are known, ``activations of train.py:14 forward``."""
        label = self.view.labels[life.index]
        kind = "a block" if label.category == "unknown" else LABELS[label.category]
        what = f"`{label.name}` ({kind})" if label.name else kind
        if life.born < 0:
            return f"{what} from before the {'cell' if self.recording.was_watched else 'recording'}"
        if self.recording.was_watched:
            return f"{what} of {self._where(drafts, life.born + 1)}"
        frames = self.view.frames_of(life)
        return f"{what} of {folded(frames)[0] if frames else f'event {life.born:,}'}"

    # The peak

    def _where(self, drafts: list[RowDraft], position: int) -> str:
        if not self.recording.was_watched:
            program = place_in_program(self.log.events[position - 1].frames) if position else ""
            return event_in_words(position, len(self.timeline)) + (f" ({program})" if program else "")
        for draft in drafts:
            if draft.interval.start_position <= position <= draft.interval.end_position and (
                draft.point.kind == "before" or draft.interval.start_position < position
            ):
                return _words(draft, _path(draft.parts, position))
        return _words(drafts[0], [])


def _asked_in(facts: TensorFacts | None, line: int | None) -> str:
    """Where a request was made, `` of `head(x)` (line 18)``, or what it was for in a backward; "" where that is just the line."""
    if facts is None or (facts.line == line and not facts.inner and not facts.backward):
        return ""
    place = place_in_words(facts.expression or facts.statement, facts.line, facts.inner, facts.operator)
    return f" in the backward{place}" if facts.backward and place else place


def _positions(drafts: Iterable[RowDraft]) -> Iterator[int]:
    for draft in drafts:
        yield draft.interval.end_position
        todo = list(draft.parts)
        while todo:
            part = todo.pop()
            yield part.end
            todo += part.parts


def _path(parts: list[Part], position: int) -> list[Part]:
    """The parts around a position, outermost first; marks are points and hold nothing."""
    for part in parts:
        if part.kind != "mark" and part.start < position <= part.end:
            return [part, *_path(part.parts, position)]
    return []


def _words(draft: RowDraft, path: list[Part]) -> str:
    """```optimizer.step()` in iteration 1, line 14``, or ```trainer.train()`, iteration 2, backward``; empty where it has no
    name."""
    point = draft.point
    if point.kind == "before":
        return "the start"
    place = [] if point.kind == "after" else [place_of(point, with_line=not path)]
    return ", ".join([*place, *(part.label for part in path)])


def _error(failure: Failure | None, device: int) -> ReportError | None:
    """An error is every device's; the sizes of a failed request only those of the device where it failed."""
    if failure is None:
        return None
    sizes = failure.requested, failure.rounded, failure.segment, failure.largest_free
    if failure.device is not None and failure.device != device:
        sizes = None, None, None, None
    return ReportError(
        failure.type,
        failure.message,
        failure.line,
        *sizes,
        module=failure.module,
        operator=failure.operator,
        place=failure.place,
        elsewhere=failure.elsewhere,
    )
