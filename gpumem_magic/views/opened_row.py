"""The rows of the report that opens: each a line of figures, and under it what is in it, down to tensors and phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from gpumem_magic.report.model import ALLOCATED_CATEGORIES, CATEGORIES, LABELS, Owner, ReportData, Row, TensorGroup
from gpumem_magic.report.rows import ALIKE, REST, ROW, STILL, TURN, Entry, entries
from gpumem_magic.report.tensors import groups_at
from gpumem_magic.units import amount, counted, mib
from gpumem_magic.views import explain
from gpumem_magic.views.elements import grid, paragraph, stack, swatch, words
from gpumem_magic.views.lines import Line, SizeFormat, little, numbers_of, turns_in_words, words_of
from gpumem_magic.views.story import TENSOR_HEADS, tensor_rows

# What a stored notebook has room for: lines in all, and of them with tables.
MOST_LINES, MOST_TABLES = 200, 24
_MOST_OWNERS = 12
_HEADS = ("line", "", "", "allocated", "change", "peak within")


class OpenedRows:
    """All rows of a report as nested `details`. What failed, or else the peak, is in sight."""

    def __init__(self, report: ReportData) -> None:
        self.report = report
        self.figures = SizeFormat(report)
        self.tree = entries(report)
        # A report from a file may have figures in an inner row alone.
        self.scale = max(max((entry.row.peak_allocated for entry in self.tree), default=0), 1)
        self.open = _way(self.tree, self.scale)
        self.lines = self.tables = 0
        self.left_out = 0

    def html(self) -> str:
        heads = "".join(f"<span>{head}</span> " for head in _HEADS)
        empty = (
            self.tree[:1] if self.tree and self.tree[0].row.kind == "before" and not self.tree[0].row.allocated else ()
        )
        body = "".join(self._entry(entry) for entry in self.tree[len(empty) :])
        if self.left_out:
            body += paragraph(f"{counted(self.left_out, 'more row')} in `report.to_dict()`.", "gpumem-quiet")
        return f'<section class="gpumem-rows"><div class="gpumem-line gpumem-quiet">{heads}</div>{body}</section>'

    def _entry(self, entry: Entry) -> str:
        if self.lines >= MOST_LINES:
            self.left_out += len(entry.rows)
            return ""
        self.lines += 1
        failed = " gpumem-failed" if entry.failed and entry.kind == ROW else ""
        quiet = " gpumem-at-rest" if not entry.moved else ""
        line = f'class="gpumem-line{quiet}"'
        inside = self._inside(entry)
        if not inside:
            return f'<div class="gpumem-row{failed}"><div {line}>{self._cells(entry)}</div></div>'
        opened = " open" if id(entry) in self.open else ""
        return (
            f'<details class="gpumem-row{failed}"{opened}><summary {line}>{self._cells(entry)}</summary>'
            f'<div class="gpumem-inside">{inside}</div></details>'
        )

    def _cells(self, entry: Entry) -> str:
        """Six: line, name, bar, allocated, change, the highest inside."""
        row, scale = entry.row, self.scale
        sizes = [(name, size) for name in ALLOCATED_CATEGORIES if (size := row.categories.get(name) or 0) > 0]
        bar, peak = stack(sizes, scale), ""
        if row.peak_allocated > row.allocated:
            left, right = 100 * row.allocated / scale, 100 * row.peak_allocated / scale
            bar += f'<u style="left:{left:.3g}%;width:{right - left:.3g}%"></u>'
            peak = self.figures.size(row.peak_allocated)
        change = self.figures.change(entry.change) if entry.change else ""
        return (
            f"<span>{_numbers(entry)}</span> {_name(entry)} <span>{bar}</span> <b>{self.figures.size(row.allocated)}</b> "
            f"<span>{change}</span> <span>{peak}</span>"
        )

    def _inside(self, entry: Entry) -> str:
        if entry.kind == REST:
            # Another one shows what they did, or nothing was recorded.
            return ""
        inner = "".join(map(self._entry, entry.inner))
        if entry.kind != ROW:
            return inner
        row, before = entry.row, entry.before
        text = row.statement.strip()
        whole = f"<pre>{escape(text)}</pre>" if "\n" in text and row.kind != "part" else ""
        if not (entry.moved_at_all or row.kind == "after"):
            return whole + inner
        said = paragraph(_sentence(row, before), "gpumem-quiet")
        if row.kind == "part" or self.tables >= MOST_TABLES:
            return whole + said + inner
        self.tables += 1
        held = owners(self.report.owners) if row.kind == "after" else ""
        return f"{whole}{said}{inner}{held}{self._tensors(row)}{self._categories(row, before)}"

    def _tensors(self, row: Row) -> str:
        """What is allocated after a row; for the one that failed, when it did."""
        error, source = self.report.error, self.report.source
        if row.kind == "error" and error is not None and error.tensors:
            return tensors(error.tensors, row.categories, "when it failed")
        if source is None or row.position < 0:
            return ""
        return tensors(groups_at(source, row.position), row.categories, "tensors after it")

    def _categories(self, row: Row, before: Row | None) -> str:
        rows = []
        for name in CATEGORIES:
            size, old = row.categories.get(name), None if before is None else before.categories.get(name)
            if size or old:
                change = self.figures.change(size - old) if size is not None and old is not None and size != old else ""
                rows.append((f"{swatch(name)}{LABELS[name]}", self.figures.size(size), change))
        return grid(("after it, by category", "MiB", "change"), rows, (1, 2)) if rows else ""


def _way(found: Sequence[Entry], highest: int) -> set[int]:
    """The loops that lead to what failed, or else to the peak."""
    way: set[int] = set()
    while True:
        entry = next((one for one in found if one.failed), None)
        entry = entry or next((one for one in found if one.row.peak_allocated >= highest > 0), None)
        if entry is None or entry.kind not in (TURN, ALIKE):
            return way
        way.add(id(entry))
        found = entry.inner


def _numbers(entry: Entry) -> str:
    """The lines in the cell."""
    if entry.row.kind == "part":
        return ""
    depth = len(entry.outer)
    if entry.kind in (TURN, ALIKE, REST):
        return str(entry.rows[0].loops[depth]) if len(entry.rows[0].loops) > depth else ""
    numbers = [row.line for row in entry.rows if row.line > 0]
    if not numbers:
        return ""
    return str(numbers[0]) if min(numbers) == max(numbers) else f"{min(numbers)}-{max(numbers)}"


def _name(entry: Entry) -> str:
    if entry.kind == ROW:
        text = Line(entry.row, 0, entry.before, None).text
        return f"<code>{escape(text)}</code>" if entry.row.statement.strip() else f"<em>{escape(text)}</em>"
    return f"<em>{escape(_folded_name(entry))}</em>"


def _folded_name(entry: Entry) -> str:
    """``iterations 1-60: alike, each +64.0 MiB``, ``2 statements: no change``."""
    if entry.kind == STILL:
        return f"{counted(len(entry.rows), 'statement')}: {little(entry)}"
    if entry.in_call:
        return words_of(entry)
    numbers = numbers_of(entry)
    if entry.kind == TURN:
        return f"iteration {numbers}"
    if entry.turns == 1:
        return f"iteration {numbers}: {turns_in_words(entry)}"
    said = "without rows" if entry.kind == REST and entry.like is None else turns_in_words(entry)
    return f"iterations {numbers}: {said}"


def _sentence(row: Row, before: Row | None) -> str:
    said = [f"{amount(row.allocated)} allocated", f"{amount(row.reserved)} reserved"]
    if row.device_used is not None:
        said.append(f"{amount(row.device_used)} in nvidia-smi")
    text = f"After it: {', '.join(said)}."
    if moves := explain.moves(Line(row, 0, before, None)):
        text += f" Changed (MiB): {moves}."
    return text


def tensors(groups: Sequence[TensorGroup], categories: Mapping[str, int | None], heading: str) -> str:
    """The largest tensors of a moment as a table; empty where none is known. categories: all that is allocated then."""
    rows = [(size, *map(escape, (what, made, kept))) for size, what, made, kept in tensor_rows(groups, categories)]
    heads = (TENSOR_HEADS[0], heading, *TENSOR_HEADS[2:])
    return grid(heads, rows, (0,)) if rows else ""


def owners(found: Sequence[Owner]) -> str:
    """Who holds memory at the end of the cell; empty where nobody does."""
    rows = [
        (
            mib(one.bytes),
            mib(one.frees) if one.statement else "",
            f"<code>{escape(one.name)}</code> {escape(one.type)}",
            words(f"`{one.statement}`") if one.statement else "",
        )
        for one in found[:_MOST_OWNERS]
    ]
    if not rows:
        return ""
    left = len(found) - len(rows)
    more = paragraph(f"{counted(left, 'more owner')}: `%gpumem_who --all`", "gpumem-quiet") if left else ""
    return grid(("MiB", "frees alone", "held by", "lets go of it"), rows, (0, 1)) + more
