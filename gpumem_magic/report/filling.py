"""What is allocated, in words: the largest first, each with the line that made it and what keeps it.

Tensors of one line and one shape are told together; where no shape has most of its line's, the line's are, and where no lines
have most of a category, the category's.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpumem_magic.attribution.sites import GATHERERS, TRIALS
from gpumem_magic.attribution.tensors import FROM
from gpumem_magic.recording.model import OF_A_CYCLE, OF_A_GRAPH
from gpumem_magic.report.model import LABELS, OF_A_MODEL, TensorGroup
from gpumem_magic.report.tensors import number_range
from gpumem_magic.units import amount, shape_words

# Groups are told until they are so much of what is allocated, in per cent, and at most so many. A table has the others.
_ENOUGH, MOST = 80, 3
# A category of which nothing else is told is named where it is one part in so many.
_NAMED = 8
# A line that made one part in so many of a category is named with it.
_MAIN = 5
# What is said of all where it is so of nearly all, in per cent.
_NEARLY_ALL = 90
# These say no more of a tensor than that it is one.
_VAGUE = frozenset({"unknown", "temporaries"})
_MOST_LABELS = 2
_BEHIND_A_PLACE = re.compile(r" of | and \d")
# A word that needs one.
_EXPLAINED = {"workspace": " (scratch memory of cuBLAS and cuDNN)"}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


@dataclass(frozen=True)
class _Item:
    """Tensors that are told together, and their bytes. largest: those of them that stand for the others, where these are of
    several shapes. lines: how many lines made them, where these are not one."""

    size: int
    members: Sequence[TensorGroup]
    largest: _Item | None = None
    lines: int = 1

    @property
    def category(self) -> str:
        """That of most of it."""
        return _majority((one.category, one.bytes) for one in self.members)[0]

    @property
    def has_shapes(self) -> bool:
        """Whether it is tensors that operators made, of which each is a line's."""
        first = self.members[0]
        return first.shape is not None and not _keeps_for_cudnn(first) and self.category not in OF_A_MODEL


def in_words(
    groups: Sequence[TensorGroup],
    categories: Mapping[str, int | None],
    most: int = MOST,
    needed: Container[str] = (),
) -> str:
    """What is allocated, the largest first: ``6,104 MiB are four (20000, 20000) float32 tensors of `pred - y` (line 4)``.

    categories: all that is allocated, since small groups are left out of a long list. most: how many groups are told.
    needed: categories of which more than a twentieth is told in any case."""
    total = sum(one.bytes for one in groups)
    told: list[_Item] = []
    left = total
    alike = _alike(groups)
    lists = Counter(members[0].category for members in alike)
    sizes = [sum(one.bytes for one in members) for members in alike]
    for number, members in enumerate(alike):
        # What is called by its category alone is all of it.
        if lists[members[0].category] == 1 and _is_nameless(members):
            sizes[number] = max(sizes[number], categories.get(members[0].category) or 0)
    items = _by_category(_by_line([_Item(*one) for one in zip(sizes, alike, strict=True)]), most)
    for number, one in enumerate(sorted(items, key=_rank)):
        enough = number >= most or 100 * (total - left) >= _ENOUGH * total
        if told and (20 * one.size < total or (enough and one.category not in needed)):
            continue
        told.append(one)
        left -= one.size
    words: list[str] = []
    untold = dict(categories)
    named: list[tuple[int, str]] = []
    missing = {one.category for one in items} - {each.category for one in told for each in one.members}
    # (Their parts were too small each, or behind what is enough. Where a sentence says what to do, it is not to be buried.)
    for name in missing - _EXPLAINED.keys() if most >= MOST else ():
        parts, size = [one for one in items if one.category == name], categories.get(name) or 0
        if _NAMED * size >= total:
            named.append((-size, _told(parts[0], 0) if len(parts) == 1 else f"{amount(size)} are {LABELS[name]}"))
    for one in told:
        untold[one.category] = (untold.get(one.category) or 0) - one.size
    for one in reversed(told):
        # What is left of a category is told behind its last part, so that a table's figure is here, too.
        whole, more = categories.get(one.category) or 0, untold.pop(one.category, 0) or 0
        words.append(_told(one, whole if _is_nameless(one.members) or 20 * more >= whole else 0))
    return "; ".join([*reversed(words), *(one for _, one in sorted(named))])


def _by_line(items: Sequence[_Item]) -> list[_Item]:
    """Items of one line as one, where none of its shapes has most of it."""
    found: dict[object, list[_Item]] = defaultdict(list)
    for number, one in enumerate(items):
        first = one.members[0]
        place = first.line or first.inner
        found[place if place and one.has_shapes else (number,)].append(one)
    joined = []
    for parts in found.values():
        largest, size = max(parts, key=lambda one: one.size), sum(one.size for one in parts)
        members = [one for part in parts for one in part.members]
        joined += parts if 2 * largest.size > size else [_Item(size, members, largest)]
    return joined


def _by_category(items: Sequence[_Item], most: int) -> list[_Item]:
    """Items of one category as one, where as many as are told have less than half of it: a net's layers, each on its line."""
    found: dict[str, list[_Item]] = defaultdict(list)
    for one in items:
        if one.has_shapes:
            found[one.category].append(one)
    joined = [one for one in items if not one.has_shapes]
    for parts in found.values():
        parts.sort(key=lambda one: -one.size)
        size = sum(one.size for one in parts)
        if 2 * sum(one.size for one in parts[:most]) >= size:
            joined += parts
            continue
        members = [one for part in parts for one in part.members]
        joined.append(_Item(size, members, parts[0], len({one.line or one.inner for one in members})))
    return joined


def _rank(one: _Item) -> float:
    """The largest first; a library's own memory, which nobody can make smaller, and what has no name, behind what is about as
    large."""
    if one.category == "workspace":
        return -one.size / 2
    return -0.95 * one.size if _is_nameless(one.members) else -one.size


def _alike(groups: Sequence[TensorGroup]) -> list[list[TensorGroup]]:
    """Groups that one line made in one shape, whichever of its operators it was, and the parts of a model, are told together."""
    found: dict[tuple[object, ...], list[TensorGroup]] = defaultdict(list)
    for one in groups:
        if not one.category:
            continue
        if one.category in _EXPLAINED:
            # What asked for it first says little: a library keeps it.
            found[one.category, None].append(replace(one, shape=None, statement="", line=0, expression="", inner=""))
        elif one.category in OF_A_MODEL or one.shape is None:
            found[one.category, one.kept_by, one.line, one.operator == TRIALS].append(one)
        else:
            found[one.shape, one.dtype, one.line, one.inner].append(one)
    return list(found.values())


def _is_nameless(members: Sequence[TensorGroup]) -> bool:
    """Whether nothing but a category is said of them."""
    first = members[0]
    if first.category in OF_A_MODEL:
        return not first.kept_by
    return first.shape is None and not (_place(members) or _kept(members))


def _told(one: _Item, whole: int) -> str:
    """whole: what their category has, where they are to be told as a part of it; else 0."""
    if one.largest is None:
        return _words(one.members, one.size, whole)
    kept = _kept_mostly(one) or (_labels(one.members) if one.lines == 1 else "")
    largest = f"{amount(one.largest.size)}, {_tensors(one.largest.members)}"
    if one.lines > 1:
        members, place = one.members, _place(one.largest.members)
        alike = [each for each in members if _form(each) == _form(one.largest.members[0])]
        if 100 * sum(each.bytes for each in alike) >= _NEARLY_ALL * one.size:
            count = sum(each.count for each in one.largest.members)
            members, largest = alike, f"{amount(one.largest.size // count)} each, one"
            kept = _kept(alike) or kept
        lines = len({each.line or each.inner for each in members})
        what = f"{LABELS[one.category]}: {_tensors(members)} of {lines:,} lines{kept}"
        return f"{amount(one.size)} are {what} ({'largest: ' * (members is one.members)}{largest}{place})"
    places = [each.inner for each in one.members]
    inner = one.largest.members[0].inner if len(set(places)) > 1 else ""
    inner = inner.removesuffix(f"{FROM}{_shared_place(places)}")
    what = f"{_tensors(one.members)}{_place(one.members)}{kept}"
    return f"{amount(one.size)} are {what} (largest: {largest}{f' of {inner}' if inner else ''})"


def _words(members: Sequence[TensorGroup], size: int, whole: int) -> str:
    """whole: what their category has, where they are to be told as a part of it; else 0."""
    first = members[0]
    part = f" (of {amount(whole)} in all)" if whole > size and amount(whole) != amount(size) else ""
    made = _place(members) if first.category in OF_A_MODEL and _is_nameless(members) else ""
    if made:
        # (They are what is left of a model that a function dropped, say.)
        part = f", of {amount(whole)} in all" if part else ""
        return f"{amount(size)} are {LABELS[first.category]} made by{made.removeprefix(' of')}{part}"
    if part and _is_nameless(members):
        return f"{amount(size)} are {LABELS[first.category]}{part}"
    if first.category in OF_A_MODEL:
        is_a_place = first.kept_by.startswith(OF_A_GRAPH) or re.search(r"[.\[]", first.kept_by)
        link = ", kept by" if is_a_place else " of"
        of = f"{link} {_in_code(first.kept_by)}" if first.kept_by else ""
        of = f" that `{first.kept_by}` gathered for layers at work" if first.kept_by in GATHERERS else of
        return f"{amount(size)} are {LABELS[first.category]}{of}{part}"
    place = _place(members)
    if first.operator == TRIALS:
        return f"{amount(size)} are {TRIALS}{place}, which come in the first run alone"
    if first.shape is None:
        place = place or _main_place(members, size)
        return f"{amount(size)} are {LABELS[first.category]}{_EXPLAINED.get(first.category, '')}{place}{_kept(members)}"
    if _keeps_for_cudnn(first):
        return f"{amount(size)} are what cuDNN keeps for the backward{place}"
    return f"{amount(size)} are {_tensors(members)}{place}{_kept(members) or _labels(members)}"


def _main_place(members: Sequence[TensorGroup], whole: int) -> str:
    """Of those of several lines, the line that made most, where that is worth a word: `` (3,072 MiB by net.py:12 forward)``."""
    largest = max(members, key=lambda one: one.bytes)
    if not largest.inner or _MAIN * largest.bytes < whole:
        return ""
    nearly_all = 100 * largest.bytes >= _NEARLY_ALL * whole
    return f", nearly all of {largest.inner}" if nearly_all else f" ({amount(largest.bytes)} by {largest.inner})"


def _keeps_for_cudnn(one: TensorGroup) -> bool:
    """Whether it is bytes without a form that anybody would know."""
    return one.dtype == "uint8" and one.operator.startswith("cudnn")


def _form(one: TensorGroup) -> tuple[tuple[int, ...] | None, str]:
    return one.shape, one.dtype


def _tensors(members: Sequence[TensorGroup]) -> str:
    """How many there are of which shape; of several shapes, how many."""
    count = sum(one.count for one in members)
    kind = "tensor" if count == 1 else "tensors"
    number = _NUMBERS[count] if count < len(_NUMBERS) else f"{count:,}"
    shapes = {_form(one) for one in members}
    shape, dtype = shapes.pop()
    told = "" if shapes or shape is None else f"{shape_words(shape)} {dtype} "
    return f"{number} {told}{kind}"


def _place(members: Sequence[TensorGroup]) -> str:
    """Which line made them, and which expression of it nearly all of their bytes."""
    first = members[0]
    total = sum(one.bytes for one in members)
    expressions = sorted({one.expression for one in members if one.expression}, key=len)
    words = next(
        (
            outer
            for outer in expressions
            if 100 * sum(one.bytes for one in members if one.expression and one.expression in outer)
            >= _NEARLY_ALL * total
        ),
        first.statement,
    )
    return place_in_words(words, first.line, _shared_place([one.inner for one in members]), first.operator)


def place_in_words(words: str, line: int, inner: str, operator: str) -> str:
    """`` of `model(x)` (line 12: net.py:7 forward)``; words: what stands in the line, "" where no cell has it."""
    if not words:
        # Without lines of a cell (in a file), members may be from anywhere.
        return f" of {inner}" if inner else ""
    at = f" (line {line}{f': {inner}' if inner else ''})" if line else ""
    compiled = "the compiled " if operator == "torch.compile" else ""
    return f" of {compiled}`{words}`{at}"


def _shared_place(places: Sequence[str]) -> str:
    """The place inside, or, of several, the program's own line from which all were reached; "" where they have none in common."""
    if len(set(places)) == 1:
        return places[0]
    reached = {place.partition(FROM)[2] for place in places}
    return reached.pop() if len(reached) == 1 else ""


def _labels(members: Sequence[TensorGroup]) -> str:
    """What they are, where nothing more is known of them, and that is said of most."""
    vague = sum(one.bytes for one in members if one.category in _VAGUE)
    if 2 * vague > sum(one.bytes for one in members):
        return ""
    words = [LABELS[name] for name in dict.fromkeys(one.category for one in members) if name not in _VAGUE]
    return f": {' and '.join(words)}" if 0 < len(words) <= _MOST_LABELS else ""


def _kept(members: Sequence[TensorGroup]) -> str:
    """What keeps them, where it is one and the same, or where names differ in a number alone (`outs[0…7]`)."""
    keepers = {(one.keeper, one.kept_by if one.keeper != "backward" else "") for one in members}
    keeper = members[0].keeper
    if any(other != keeper for other, _ in keepers):
        return ""
    places = list(dict.fromkeys(one.kept_by for one in members))
    place = places[0] if len(keepers) == 1 else number_range(places)
    if keeper == "backward":
        return ", kept for backward"
    if keeper not in ("name", "list") or not place:
        return ""
    return f", kept by {_in_code(place)}"


def _kept_mostly(item: _Item) -> str:
    """What keeps most of their bytes, and whether it keeps all but a few."""
    keeper, size = _majority((one.keeper, one.bytes) for one in item.members)
    if 2 * size <= item.size:
        return ""
    theirs = [one for one in item.members if one.keeper == keeper]
    kept = _kept(theirs)
    return kept if 100 * size >= _NEARLY_ALL * item.size else kept.replace(", kept", ", most of it kept", 1)


def _majority(sizes: Iterable[tuple[str, int]]) -> tuple[str, int]:
    """The word with the most bytes, and these."""
    found: Counter[str] = Counter()
    for word, size in sizes:
        found[word] += size
    return found.most_common(1)[0]


def _in_code(place: str) -> str:
    """```outs[0]` of run()`` of ``outs[0] of run()``, and ```a` and 1 more``. (What has its marks already stays, and a
    cycle's own words are no code.)"""
    if "`" in place or place.startswith(OF_A_CYCLE):
        return place
    if place.startswith(OF_A_GRAPH):
        # (Which of its leaves, or what saved it, is the table's.)
        return f"the {OF_A_GRAPH}{_in_code(place.removeprefix(OF_A_GRAPH).partition(':')[0])}"
    variable = _BEHIND_A_PLACE.split(place, maxsplit=1)[0]
    return f"`{variable}`{place.removeprefix(variable)}"
