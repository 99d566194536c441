"""Two reports side by side: what the second has more or less at its peak and at its end, where, and a picture of both."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpumem_magic.report.model import ALLOCATED_CATEGORIES, CATEGORIES, LABELS, OF_A_MODEL, ReportData, TensorGroup
from gpumem_magic.report.tensors import all_groups
from gpumem_magic.units import MIB, amount, human
from gpumem_magic.views.display import HTML, PLAIN, asked_for, in_terminal
from gpumem_magic.views.explain import device_name, highest_in_use
from gpumem_magic.views.quiet import quiet
from gpumem_magic.views.sheet import Sheet
from gpumem_magic.views.what_failed import failure_word

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What moved by less than one part in so many of the higher peak is not told.
SMALL = 50
# Places, and statements, that are told.
_MOST = 5
_LINE = re.compile(r", line \d+")
# Their sizes follow from other categories, or are nobody's code.
_NO_PLACE = (*OF_A_MODEL, "workspace", "rounding", "")


class Comparison:
    """The first report and the second, of the same device: a table in words and a picture, to be printed or displayed."""

    def __init__(self, first: ReportData, second: ReportData) -> None:
        self.first, self.second = first, second
        other = {one.device.index: one for one in second.devices}
        self.devices = tuple(
            Comparison(one, other[one.device.index]) for one in first.devices if one.device.index in other
        )

    def __repr__(self) -> str:
        return "\n\n".join([str(self._sheet()), *map(repr, self.devices)])

    def _repr_mimebundle_(
        self, include: Container[str] | None = None, exclude: Container[str] | None = None
    ) -> dict[str, Any]:
        wanted = asked_for(include, exclude)
        data = {PLAIN: repr(self)}
        if HTML in wanted and not in_terminal():
            data[HTML] = "".join(one._sheet().html(between=one._picture()) for one in (self, *self.devices))
        return {kind: text for kind, text in data.items() if kind in wanted}

    @quiet()
    def plot(self, *, dark: bool = False) -> Figure:
        """Both reports' bars at the peak and at the end as a matplotlib Figure, made without pyplot."""
        from gpumem_magic.views.compared_picture import draw

        return draw(self.first, self.second, dark=dark)

    @quiet()
    def _picture(self) -> str:
        from gpumem_magic.views.compared_picture import element

        return element(self.first, self.second, self._answer())

    def _sheet(self) -> Sheet:
        return Sheet(self._answer(), list(self._rows()), after="\n".join(self._after()))

    # In words

    def _answer(self) -> str:
        sentences = [*_endings(self.first, self.second), self._sizes()]
        first, second = (_LINE.sub("", one.peak.where) for one in (self.first, self.second))
        if first != second and first and second:
            sentences.append(f"The first peaks at {self.first.peak.where}, the second at {self.second.peak.where}.")
        left, now = _at_end(self.first), _at_end(self.second)
        if abs(now - left) >= MIB:
            sentences.append(f"At the end {amount(now)} stay allocated, in place of {amount(left)}.")
        return " ".join(sentences)

    def _sizes(self) -> str:
        before, now = self.first.peak.allocated, self.second.peak.allocated
        moved = moves(self.first.peak.categories, self.second.peak.categories, max(before, now))
        if abs(now - before) < MIB:
            said = f"Both peak at {amount(now)}"
        elif before and now >= 2 * before:
            said = f"The second peaks at {amount(now)}, {now / before:.1f} times as much as the first"
        else:
            share = f" ({abs(now - before) / before:.0%})" if before else ""
            kind = "more" if now > before else "less"
            said = f"The second peaks at {amount(now)}, {amount(abs(now - before))}{share} {kind} than the first"
        return f"{said}: {moved}." if moved else f"{said}."

    def _after(self) -> Iterator[str]:
        start, then = _at_start(self.first), _at_start(self.second)
        if abs(then - start) >= MIB:
            yield (
                f"They did not begin alike: {amount(start)} were allocated before the first, {amount(then)} before the second, "
                "and are in all figures."
            )
        cached, later = _cached_at_start(self.first), _cached_at_start(self.second)
        if abs(later - cached) >= MIB:
            yield (
                f"{amount(later)} were cached before the second began, and {amount(cached)} before the first: nvidia-smi counts "
                "that, too. `%gpumem_free cache` between the two gives it back."
            )
        cards = [device_name(one.device) for one in (self.first, self.second)]
        if cards[0] != cards[1]:
            yield f"The first ran on {cards[0]}, the second on {cards[1]}."

    # In figures

    def _rows(self) -> Iterator[Sequence[str]]:
        yield "at the peak", "first", "second", "change"
        before, now = self.first.peak, self.second.peak
        for name in CATEGORIES:
            if name == "cached":
                yield row("allocated", before.allocated, now.allocated)
            size, other = before.categories.get(name) or 0, now.categories.get(name) or 0
            if size or other:
                yield row(LABELS[name], size, other)
        used, later = highest_in_use(self.first), highest_in_use(self.second)
        if used is not None and later is not None:
            yield row("nvidia-smi at its highest", used, later)
        yield row("allocated before", _at_start(self.first), _at_start(self.second))
        yield row("allocated at the end", _at_end(self.first), _at_end(self.second))
        least = max(before.allocated, now.allocated) // SMALL
        for head, sizes in (
            ("tensors at the peak, by what made them", _by_place(self.first, self.second)),
            ("highest inside each statement", _by_statement(self.first, self.second)),
        ):
            told = [(name, pair) for name, pair in sizes.items() if abs(pair[1] - pair[0]) > least]
            told.sort(key=lambda one: -abs(one[1][1] - one[1][0]))
            if told:
                yield head, "", "", ""
            for name, pair in told[:_MOST]:
                yield row(f"  {name}", *pair)


def row(name: str, first: int, second: int) -> Sequence[str]:
    """A line of a table: two sizes, and by how much the second is larger."""
    difference = second - first
    sign = "+" if difference > 0 else "-"
    return name, human(first), human(second), f"{sign}{human(abs(difference))}" if difference else "0"


def moves(first: Mapping[str, int | None], second: Mapping[str, int | None], whole: int) -> str:
    """The categories of what is allocated that differ by a good part of the whole: ``activations 768 MiB -> 384 MiB``."""
    pairs = [(LABELS[name], first.get(name) or 0, second.get(name) or 0) for name in ALLOCATED_CATEGORIES]
    told = [one for one in pairs if one[1] != one[2] and abs(one[2] - one[1]) * SMALL >= whole]
    told.sort(key=lambda one: -abs(one[2] - one[1]))
    return ", ".join(f"{name} {amount(size)} -> {amount(other)}" for name, size, other in told)


def _endings(first: ReportData, second: ReportData) -> Iterator[str]:
    """What became of each, where one of them failed."""
    words = [f"fails with {failure_word(one)}{one.error.at}" if one.error else "" for one in (first, second)]
    words = [word.replace("fails with out of memory", "runs out of memory") for word in words]
    if words[0] and words[1]:
        yield f"The first {words[0]}, the second {words[1]}."
    elif any(words):
        yield f"The first {words[0] or 'passes'}, the second {words[1] or 'passes'}."


def _at_start(report: ReportData) -> int:
    return report.checkpoints[0].allocated if report.checkpoints else 0


def _cached_at_start(report: ReportData) -> int:
    return (report.checkpoints[0].categories.get("cached") or 0) if report.checkpoints else 0


def _at_end(report: ReportData) -> int:
    return report.checkpoints[-1].allocated if report.checkpoints else 0


def _by_statement(first: ReportData, second: ReportData) -> dict[str, tuple[int, int]]:
    """The highest inside each statement that both have, over all iterations, where that is near one of the peaks."""
    highest: list[Counter[str]] = [Counter(), Counter()]
    for found, report in zip(highest, (first, second), strict=True):
        for one in report.checkpoints:
            if one.kind in ("statement", "error") and (name := one.statement.strip().partition("\n")[0]):
                found[name] = max(found[name], one.peak_allocated)
    near = max(first.peak.allocated, second.peak.allocated) / 2
    pairs = {name: (size, highest[1][name]) for name, size in highest[0].items() if name in highest[1]}
    return {name: pair for name, pair in pairs.items() if max(pair) > near}


def _by_place(first: ReportData, second: ReportData) -> dict[str, tuple[int, int]]:
    """What the same code made, in the same category, that lives at both peaks; what only one of them has where that is known."""
    sides = [all_groups(one, one.peak.position, one.peak.tensors) for one in (first, second)]
    sums = [_sums(groups) for groups in sides]
    is_whole = [all(one.category for one in groups) for groups in sides]
    return {
        name: (sums[0][name], sums[1][name])
        for name in dict.fromkeys([*sums[0], *sums[1]])
        if all(name in found or whole for found, whole in zip(sums, is_whole, strict=True))
    }


def _sums(groups: Sequence[TensorGroup]) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in groups:
        # What a library's line made is known by that, whatever the cell calls it by.
        own = not one.inner or one.inner.startswith("In [")
        made = (one.expression or one.statement or one.operator) if own else one.inner
        if one.category not in _NO_PLACE and made:
            found[f"{LABELS[one.category]}: {made}"] += one.bytes
    return found
