"""What is as large as it is because an operator made more rows of few, and all that is computed of those rows has as many: pairs,
neighbours that were gathered, an image that was enlarged before the layers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from gpumem_magic.causes.alike import Alike, births_alive, bytes_of, goes_by_numbers, made_by
from gpumem_magic.causes.model import WORTH, Scene
from gpumem_magic.causes.pairs import MULTIPLIES, PRODUCTS, is_repeated, rows_at_a_time
from gpumem_magic.devices.base import Birth
from gpumem_magic.recording.model import BACKWARD
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human, shape_words

# A result has so many times the rows of all that it was made of.
_TIMES = 4
# These put the same rows, or what lies between them, in more places.
_GATHERS = re.compile(r"repeat|^(?:index|index_select|gather|take_along_dim|clone)$")
_ENLARGES = re.compile(r"^_?upsample|grid_sampler")
# All pairs of fewer are not many.
_PAIRS_FROM = 256
# What is cut off, or chosen, has nearly as many numbers: all pairs but those of a row with itself.
_NEARLY = 0.99
# What is told is one part in so many of the peak, in several tensors.
_SHARE, _TENSORS = 3, 2
# The dimensions of several signals; images have more.
_OF_SIGNALS = 3
# So many places that make the most rows are looked at.
_MOST = 12


@dataclass(frozen=True)
class _MadeMany:
    """An operator's result with its number of rows (pixels, pairs), of how many and of what they were made, and the sizes, in
    numbers, that what is computed of it has."""

    event: int
    birth: Birth
    rows: int
    before: int
    made_of: list[tuple[int, ...]]
    sizes: frozenset[int]


def carried_on(scene: Scene) -> Iterator[Cause]:
    """Of the operators that made many rows of few, the one of which most of the memory at the peak was computed."""
    living = list(births_alive(scene, at_work=True))
    found: tuple[int, int, _MadeMany] | None = None
    for grown in _grown(scene):
        its = [size for event, size, birth in living if event >= grown.event and _is_among(birth, grown.sizes)]
        # (Of several that lead to the same, the first.)
        if len(its) >= _TENSORS and (found is None or (sum(its), -grown.event) > (found[0], -found[2].event)):
            found = sum(its), len(its), grown
    if found is None or found[0] < max(WORTH, scene.part_of_peak(_SHARE)):
        return
    size, count, grown = found
    shape = grown.birth.shape or ()
    alike = Alike(shape, count, size, grown.birth, grown.event)
    if is_repeated(scene, alike):
        return
    made, times = made_by(scene, alike), grown.rows // grown.before
    rows = rows_at_a_time(scene, alike)
    remedy = f"{rows[0].upper()}{rows[1:]}; fewer of them take less."
    if grown.birth.kernel in PRODUCTS:
        told = f"{made} makes one number for every pair, {shape_words(shape)}, and what is computed of them is as large"
        remedy = f"{rows[0].upper()}{rows[1:]}, and keep of each part only what is needed (its sum)."
    elif _ENLARGES.search(grown.birth.kernel):
        small = shape_words(grown.birth.inputs[0][0])
        dots = "pixels" if len(shape) > _OF_SIGNALS else "positions"
        told = f"{made} enlarges {small} to {shape_words(shape)}, and all layers behind it work on {times} times the {dots}"
        remedy = (
            "Enlarge behind them, where these layers can work on the small one; or smaller images, or fewer at a time."
        )
        place = grown.birth.place
        if place is not None and place.file != place.own_file:
            # (A library's layers are as they are.)
            one = (
                f"One of the {shape[0]} images at a time, or smaller ones, take"
                if shape[0] > 1
                else "Smaller images take"
            )
            remedy = f"{one} less."
    else:
        small = " and ".join(map(shape_words, grown.made_of[:2]))
        told = f"{made} makes {shape_words(shape)} from {small}, {times} times the rows, and what is computed of it has as many"
    yield Cause("carried_on", f"{told}: {human(size)} in {count} tensors.", remedy, size, describes=True)


def _grown(scene: Scene) -> Iterator[_MadeMany]:
    """The forward operators before the moment that made many rows of few, where nothing that they were made of had as many."""
    births = [(event, one) for event, one in scene.births if event < scene.moment and one.shape and not one.node]
    backwards = [scene.end_of(one) for one in scene.spans(BACKWARD)]
    least = scene.part_of_peak(100)
    weights = {one.shape for one in scene.held if one.kind == "parameter"}
    # (Noise, say, for each of the rows that there are to be.)
    blank = {one.shape or () for _, one in births if not one.inputs}
    # Of each place the last; a loop's turns are alike.
    last: dict[object, tuple[int, int]] = {}
    for number, (event, birth) in enumerate(births):
        if bytes_of(birth.shape or (), birth.dtype) >= least and (rows := _rows(birth, weights, blank)):
            last[birth.place or event, birth.kernel, birth.shape] = number, rows
    for number, rows in sorted(last.values(), key=lambda each: -each[1])[:_MOST]:
        event, birth = births[number]
        made_of = _made_of(birth, blank)
        channels = _channels(birth, made_of)
        before = max((prod(one) // channels for one in made_of), default=0)
        since = max((one for one in backwards if one <= event), default=0)
        earlier = [one for at, one in births[:number] if at >= since]
        if before and rows >= _TIMES * before and not _had_as_many(earlier, made_of, rows, channels):
            sizes = _sizes(births[number + 1 :], prod(birth.shape or ()), rows)
            yield _MadeMany(event, birth, rows, before, made_of, sizes)


def _rows(birth: Birth, weights: set[tuple[int, ...]], blank: set[tuple[int, ...]]) -> int:
    """How many rows its result has, if it is one of those that make many of few; else 0."""
    shape = birth.shape or ()
    if birth.kernel in PRODUCTS:
        words = birth.place.expression or birth.place.text if birth.place is not None else ""
        factors = [one for one, _ in birth.inputs]
        # (A layer's rows are those of its input.)
        is_layer = any(one in weights or one[::-1] in weights for one in factors)
        is_pair = len(shape) > 1 and min(shape[-2:]) >= _PAIRS_FROM and MULTIPLIES.search(words)
        return prod(shape) if is_pair and not is_layer else 0
    made_of = _made_of(birth, blank)
    if _is_placed(birth):
        return prod(shape) // _channels(birth, made_of) if len(shape) > 1 and birth.inputs else 0
    given = [one for one in made_of if prod(one) > 1]
    is_broadcast = goes_by_numbers(birth.kernel) and len(birth.inputs) > 1 and bool(given)
    if not is_broadcast or any(_TIMES * prod(one) > prod(shape) for one in given):
        return 0
    return prod(shape) // _channels(birth, made_of)


def _is_placed(birth: Birth) -> bool:
    """Whether it puts the rows of its first input, or what lies between its pixels, in more places."""
    return bool(_ENLARGES.search(birth.kernel) or _GATHERS.search(birth.kernel))


def _made_of(birth: Birth, blank: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The shapes of its inputs, but for what was made of nothing; of what gathers rows or pixels, without where they go."""
    if _is_placed(birth):
        return [shape for shape, _ in birth.inputs[:1]]
    return [shape for shape, _ in birth.inputs if not (goes_by_numbers(birth.kernel) and shape in blank)]


def _channels(birth: Birth, made_of: list[tuple[int, ...]]) -> int:
    """How many numbers a row has: as many as what it was made of has, in the last dimension, or (of images and sounds) in the
    second; of pairs one."""
    shape = birth.shape or ()
    if birth.kernel in PRODUCTS:
        return 1
    for place in (1, -1) if _ENLARGES.search(birth.kernel) else (-1, 1):
        if all(len(one) > max(place, 0) and one[place] == shape[place] for one in [shape, *made_of] if len(shape) > 1):
            return max(1, shape[place]) if len(shape) > 1 else 1
    return 1


def _sizes(later: list[tuple[int, Birth]], size: int, rows: int) -> frozenset[int]:
    """The sizes of what is computed of it, and has as many rows, of how many channels each."""
    sizes = {size}
    for _, birth in later:
        taken = sum(prod(shape) for shape, _ in birth.inputs if _is_near(prod(shape), sizes))
        made = prod(birth.shape or ())
        # (Joined along rows, they are more than there were.)
        if taken and (_has_rows(birth.shape or (), rows) or (birth.kernel == "cat" and 2 * taken >= made)):
            sizes.add(made)
    return frozenset(sizes)


def _had_as_many(earlier: list[Birth], made_of: list[tuple[int, ...]], rows: int, channels: int) -> bool:
    """Whether what it was made of had as many rows once: an image that was made small before."""
    sizes = set(map(prod, made_of))
    for one in reversed(earlier):
        if prod(one.shape or ()) in sizes:
            shapes = [one.shape or (), *(shape for shape, _ in one.inputs)]
            if any(rows * length == prod(shape) for shape in shapes for length in shape if length > 1 or channels == 1):
                return True
            sizes.update(prod(shape) for shape, _ in one.inputs)
    return False


def _has_rows(shape: tuple[int, ...], rows: int) -> bool:
    size = prod(shape)
    return any(_is_near(size // length, {rows}) for length in {1, *shape} if length)


def _is_among(birth: Birth, sizes: frozenset[int]) -> bool:
    """Whether it is of such a size, or what an operator takes for its work on one."""
    shapes = [shape for shape, _ in birth.inputs] if birth.shape is None else [birth.shape]
    return any(_is_near(prod(shape), sizes) for shape in shapes)


def _is_near(size: int, sizes: set[int] | frozenset[int]) -> bool:
    return size in sizes or any(_NEARLY * one <= size <= one for one in sizes)
