"""The rows of a report before they have figures: which moments have one, its parts, and what of a loop is folded away."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.recording.model import Checkpoint
from gpumem_magic.report.folding import (
    Gap,
    LoopIteration,
    LoopRow,
    fold_rows,
    folds_of,
    gaps_between,
    same_moves,
    shown_iterations,
    unseen_of,
)
from gpumem_magic.report.model import SKIPPED, Folded, Skipped
from gpumem_magic.report.parts import Part, StatementInterval, parts_of, with_failing_place


@dataclass
class RowDraft:
    """A row before its figures: what it shows and which interval of the log it is about."""

    point: Checkpoint
    interval: StatementInterval
    parts: list[Part]
    gap: Skipped | None = None


class RowDrafts:
    """Of one device. points: where rows are."""

    def __init__(self, view: DeviceView, points: Sequence[Checkpoint]) -> None:
        self.device = view.device
        self.recording = view.recording
        self.timeline = view.timeline
        self.points = points

    def drafts(self) -> list[RowDraft]:
        """One for each point, with what happened inside of it."""
        points = self.points
        drafts = []
        for before, point in zip((points[0], *points), points, strict=False):
            interval = StatementInterval(self.device, point.begin or before.moment, point.moment)
            drafts.append(RowDraft(point, interval, []))
        starts = [span.start.tick for span in self.recording.spans]
        for draft in drafts[1:]:
            # Those that began after the statement did and before it ended, by the recorder's ticks.
            first = bisect_right(starts, draft.interval.begin.tick)
            last = bisect_right(starts, draft.interval.end.tick)
            if inside := self.recording.spans[first:last]:
                draft.parts = parts_of(draft.interval, inside, failed=draft.point.kind == "error")
            error = self.recording.error
            if draft.point.kind == "error" and error is not None and error.module:
                place = f"{error.module}, {error.operator}" if error.operator else error.module
                draft.parts = with_failing_place(draft.parts, draft.interval, place)
        return drafts

    def folded(self, drafts: list[RowDraft]) -> tuple[list[RowDraft], list[Folded]]:
        """Those that are shown, with one for each gap among them, and which loops have iterations that are not."""
        rows = [
            LoopRow(
                number,
                draft.point.loops,
                draft.point.iteration,
                self.timeline.peak(draft.interval.start_position, draft.interval.end_position)[0],
                self.timeline.allocated_at(draft.interval.start_position),
                self.timeline.allocated_at(draft.interval.end_position),
                draft.point.line,
                draft.point.begin is None,
            )
            for number, draft in enumerate(drafts)
        ]
        keys, folds = fold_rows(rows)
        # The row of an error is never folded away: it is in the last iteration.
        gaps = {gap.after: gap for gap in gaps_between(rows, keys)}
        totals: dict[int, list[int]] = {}
        shown: list[RowDraft] = []
        for place, key in enumerate(keys):
            draft = drafts[key]
            draft.parts = self._fold_parts(draft.parts, draft.point.line, totals)
            shown.append(draft)
            if key in gaps:
                shown.append(self._left_out(gaps[key], draft, drafts[keys[place + 1]]))
        return shown, [*folds, *folds_of(totals)]

    def _left_out(self, gap: Gap, before: RowDraft, following: RowDraft) -> RowDraft:
        """The row of iterations that have none of their own."""
        loops = following.point.loops[: gap.depth + 1]
        point = Checkpoint(
            SKIPPED,
            _numbers(gap.skipped),
            "",
            loops[-1] if loops else 0,
            following.interval.begin,
            (*following.point.iteration[: gap.depth], gap.skipped.first),
            loops,
        )
        interval = StatementInterval(self.device, before.point.moment, following.interval.begin)
        return RowDraft(point, interval, [], gap.skipped)

    def with_left_out(self, shown: list[RowDraft], folds: list[Folded]) -> list[Folded]:
        """Of a long run, the recording itself holds only some of the iterations."""
        found = {fold.line: fold for fold in folds}
        for line, count in self.recording.left_out.items():
            if line not in found:
                points = [one.point for one in shown if line in one.point.loops and one.point.kind != SKIPPED]
                iterations = {point.iteration[: point.loops.index(line) + 1] for point in points}
                found[line] = Folded(line, len(iterations), len(iterations))
            found[line] = replace(found[line], total=found[line].total + count)
        return list(found.values())

    def _fold_parts(self, parts: list[Part], line: int, totals: dict[int, list[int]]) -> list[Part]:
        """Iterations inside a call are folded as those of a loop."""
        iterations = [part for part in parts if part.kind == "iteration"]
        chosen = shown_iterations([self._as_iteration(part) for part in iterations])
        if iterations:
            total = totals.setdefault(line, [0, 0])
            total[0] += len(iterations) + sum(part.skipped for part in iterations)
            total[1] += len(chosen)
        gaps = self._gaps(iterations, chosen)
        left_out = {id(part) for number, part in enumerate(iterations) if number not in set(chosen)}
        found: list[Part] = []
        for part in parts:
            if id(part) in left_out:
                continue
            part.parts = self._fold_parts(part.parts, line, totals)
            found += [gaps[id(part)], part] if id(part) in gaps else [part]
        return found

    def _gaps(self, iterations: Sequence[Part], chosen: Sequence[int]) -> dict[int, Part]:
        """By the iteration after them, what stands for those that are missing before it."""
        rows = [row for place, part in enumerate(iterations) for row in self._as_rows(part, place)]
        unseen = unseen_of(row.peak for row in rows)
        found: dict[int, Part] = {}
        for first, second in pairwise(chosen):
            last, following = iterations[first], iterations[second]
            missing = iterations[first + 1 : second]
            if not missing and not following.skipped:
                continue
            whole = not any(part.skipped for part in (*missing, following))
            like = self._as_rows(last, 0)
            alike = whole and all(same_moves(like, self._as_rows(part, 0), unseen) for part in missing)
            gap = Skipped(last.number + 1, following.number - 1, last.number if alike else None)
            found[id(following)] = Part(
                SKIPPED, _numbers(gap), last.end, following.start, last.ends, following.begins, gap=gap
            )
        return found

    def _as_rows(self, iteration: Part, key: int) -> list[LoopRow]:
        """An iteration inside a call, as folding sees it: itself and its phases."""
        return [
            LoopRow(
                key,
                (),
                (),
                self.timeline.peak(part.start, part.end)[0],
                self.timeline.allocated_at(part.start),
                self.timeline.allocated_at(part.end),
            )
            for part in (iteration, *iteration.parts)
        ]

    def _as_iteration(self, part: Part) -> LoopIteration:
        return LoopIteration(
            self.timeline.peak(part.start, part.end)[0],
            self.timeline.allocated_at(part.end) - self.timeline.allocated_at(part.start),
        )


def ends(drafts: list[RowDraft]) -> list[RowDraft]:
    """The rows of a report without lines. What lies between two of them belongs to the later one."""
    shown = [draft for draft in drafts if draft.point.kind in ("before", "error", "after")]
    for before, draft in pairwise(shown):
        draft.interval = StatementInterval(draft.interval.device, before.point.moment, draft.point.moment)
        draft.parts = []
    return shown


def _numbers(gap: Skipped) -> str:
    return f"iteration {gap.first:,}" if gap.first == gap.last else f"iterations {gap.first:,}-{gap.last:,}"
