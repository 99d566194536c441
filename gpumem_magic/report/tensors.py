"""What is allocated at a moment, opened up: alike tensors as groups, the largest first, which add up to `allocated`."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from gpumem_magic.attribution.sites import GATHERERS
from gpumem_magic.attribution.tensors import TensorFacts, common_path
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.recording.model import KEPT_BY_NAME
from gpumem_magic.report.model import OF_A_MODEL, ReportData, TensorGroup, TensorKind
from gpumem_magic.snapshot.timeline import Allocation

MOST_GROUPS = 12
"""Groups of a moment; what is left out is one more, the last."""
ALL_GROUPS = 1 << 20
"""The same where none is to be left out."""

_LONG = 10**7
_NUMBER = re.compile(r"\d+")
# A group is large if it is one part in so many of what is allocated.
_LARGE = 20

# Of a model's memory, what a constructor makes; gradients and states follow from it.
_MADE_BY_A_LINE = ("parameters", "buffers")

_Member = tuple[Allocation, TensorFacts, str, str]
"""An allocation, what is known of it, and what keeps it where."""


def groups_at(view: DeviceView, position: int, most: int = MOST_GROUPS) -> tuple[TensorGroup, ...]:
    """The groups of what is live at a position."""
    alike: dict[tuple[object, ...], list[_Member]] = defaultdict(list)
    rounding = 0
    for one in view.timeline.live_at(position):
        rounding += one.size - one.requested
        facts = view.tensors.facts(one)
        if facts.category == "workspace" and not facts.operator:
            # A library keeps it for all that follows: who came first says nothing.
            facts = replace(facts, statement="", line=0, expression="", inner="")
        keeper, place = view.tensors.keeper(one, position)
        if view.tensors.is_former(one, place, position):
            place = f"the former `{place}`"
        alike[_kind(facts, keeper, place)].append((one, facts, keeper, place))
    found = alike.values() if len(alike) <= most else _across_lines(alike.values())
    groups = [_group(members) for members in found]
    if rounding:
        groups.append(TensorGroup(rounding, 0, "rounding"))
    groups.sort(key=lambda group: -group.bytes)
    return (*groups[:most], *_rest(groups[most:]))


def all_groups(report: ReportData, position: int, kept: Sequence[TensorGroup]) -> Sequence[TensorGroup]:
    """The groups of a moment without end where the recording is at hand, else those that were kept."""
    return kept if report.source is None or position < 0 else groups_at(report.source, position, ALL_GROUPS)


def _across_lines(groups: Iterable[list[_Member]]) -> list[list[_Member]]:
    """Where there are many: small groups that differ only in the line that made them are one."""
    found = list(groups)
    total = sum(one.requested for members in found for one, *_ in members)
    joined: dict[tuple[object, ...], list[_Member]] = defaultdict(list)
    for number, members in enumerate(found):
        _, facts, keeper, _ = members[0]
        large = _LARGE * sum(one.requested for one, *_ in members) >= total
        apart = large or facts.category in OF_A_MODEL or facts.shape is None
        joined[(number,) if apart else (facts.category, facts.dtype, facts.shape, facts.operator, keeper)] += members
    return list(joined.values())


def _kind(facts: TensorFacts, keeper: str, place: str) -> tuple[object, ...]:
    """What members of a group have in common."""
    if facts.category in OF_A_MODEL:
        return facts.category, _owner(place) if "." in place or "[" in place or place in GATHERERS else ""
    return replace(facts, module="", inputs=()), keeper


def _owner(place: str) -> str:
    """``model`` of ``model.layers[0].weight``, the former ``model`` of its former weight; "" for what a method calls ``self``, of
    which the program's author knows no name."""
    if place.startswith("self.") and " of " in place:
        return ""
    owner = re.split(r"[.\[]", place, maxsplit=1)[0]
    return owner + "`" * (owner.count("`") % 2)


def _group(members: Sequence[_Member]) -> TensorGroup:
    size, count = sum(one.requested for one, *_ in members), len(members)
    _, facts, keeper, place = members[0]
    if len({(each.line, each.expression, each.inner) for _, each, _, _ in members}) > 1:
        facts = replace(facts, statement="", line=0, expression="", inner="")
    if facts.category in OF_A_MODEL and count > 1:
        dtypes = {each.dtype for _, each, _, _ in members}
        shapes = {each.shape for _, each, _, _ in members}
        places = {each for *_, each in members}
        owners = {_owner(each) for each in places}
        kept_by = place if len(places) == 1 else owners.pop() if len(owners) == 1 else ""
        # A model that has no name (yet: its constructor still runs) is told by the line that makes it.
        told = not kept_by and facts.category in _MADE_BY_A_LINE
        statement, line, inner = _line_of_nearly_all(members, size) if told else ("", 0, "")
        return TensorGroup(
            size,
            count,
            facts.category,
            dtypes.pop() if len(dtypes) == 1 else "",
            shapes.pop() if len(shapes) == 1 else None,
            statement=statement,
            line=line,
            inner=inner,
            keeper=KEPT_BY_NAME if any(places) else keeper,
            kept_by=kept_by,
        )
    return TensorGroup(
        size,
        count,
        facts.category,
        facts.dtype,
        facts.shape,
        facts.operator,
        tuple(TensorKind(shape, dtype) for shape, dtype in facts.inputs),
        facts.backward,
        facts.statement,
        facts.line,
        facts.expression,
        facts.inner,
        common_path({each.module for _, each, _, _ in members if each.module}),
        keeper,
        places_in_words([each for *_, each in members]),
    )


def _line_of_nearly_all(members: Sequence[_Member], size: int) -> tuple[str, int, str]:
    made: Counter[tuple[str, int, str]] = Counter()
    for one, facts, *_ in members:
        made[facts.statement, facts.line, facts.inner] += one.requested
    line, most = made.most_common(1)[0]
    return line if 10 * most >= 9 * size else ("", 0, "")


def places_in_words(places: Sequence[str]) -> str:
    """Several as one: ``losses[0…7]`` where only a number differs, else most of them so, and how many more there are."""
    alike: dict[str, list[str]] = defaultdict(list)
    for place in dict.fromkeys(filter(None, places)):
        alike[_NUMBER.sub("#", place)].append(place)
    if not alike:
        return ""
    most = max(alike.values(), key=len)
    words, told = number_range(most), len(most)
    if not words:
        words, told = most[0], 1
    more = sum(map(len, alike.values())) - told
    return f"{words} and {more:,} more" if more else words


def number_range(places: Sequence[str], most: int = 1) -> str:
    """``losses[0…7]`` for places that differ in one number, or ``outs[0…4].layers[0…5].keys`` for all of those that differ in
    at most so many; "" where they differ otherwise."""
    if len(places) == 1:
        return places[0]
    if len({_NUMBER.sub("#", place) for place in places}) > 1:
        return ""
    numbers = [_NUMBER.findall(place) for place in places]
    columns = list(zip(*numbers, strict=True))
    differing = [place for place, column in enumerate(columns) if len(set(column)) > 1]
    if not 0 < len(differing) <= most or len(set(map(tuple, numbers))) != prod(
        len(set(columns[one])) for one in differing
    ):
        return ""
    shown = [column[0] for column in columns]
    for place in differing:
        values = sorted(map(int, columns[place]))
        # (Long ones are no places in an order, but hashes and addresses.)
        shown[place] = f"{values[0]}…{values[-1]}" if max(map(abs, values)) < _LONG else "…"
    parts = _NUMBER.split(places[0])
    return "".join(part + number for part, number in zip(parts, [*shown, ""], strict=True))


def _rest(groups: Iterable[TensorGroup]) -> list[TensorGroup]:
    left = list(groups)
    if not left:
        return []
    return [TensorGroup(sum(one.bytes for one in left), sum(one.count for one in left), "")]
