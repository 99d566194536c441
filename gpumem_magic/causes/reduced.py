"""What is stored only to be made one: results that are joined (of experts, of views of an image), products that are added up."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod

from gpumem_magic.causes.alike import Alike, births_alive, made_by, of_birth
from gpumem_magic.causes.model import WORTH, Scene
from gpumem_magic.causes.pairs import is_repeated
from gpumem_magic.causes.written import name_given
from gpumem_magic.devices.base import Birth, CodePlace
from gpumem_magic.recording.model import BACKWARD
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human, shape_words

_REDUCES = frozenset({"sum", "mean", "amax", "amin", "max", "min", "prod", "logsumexp", "nansum"})
_JOINS = frozenset({"stack", "cat"})
# So many parts are worth a loop; and one part in so many of the peak a word.
_PARTS, _SHARE = 3, 3
# Two factors; and a sum that is one part in so many of its products, or less.
_FACTORS, _FEWER = 2, 4
# What an `EmbeddingBag` makes of (texts, words, numbers).
_ROWS, _OF_A_BAG = 3, ("sum", "mean")
_AVERAGED = {"sum": "are only added up", "mean": "are only averaged"}


def joined_to_be_reduced(scene: Scene) -> Iterator[Cause]:
    """``torch.stack([f(x) for f in experts]).sum(0)``, where autograd has no part."""
    if scene.spans(BACKWARD) or scene.report.error is not None:
        return
    living = sorted(births_alive(scene), key=lambda each: -each[1])
    for event, size, birth in living:
        if size < max(WORTH // 2, scene.part_of_peak(2 * _SHARE)):
            return
        if birth.kernel not in _JOINS or birth.node or birth.shape is None or not birth.inputs:
            continue
        parts = prod(birth.shape) // max(1, prod(birth.inputs[0][0]))
        same = len(set(birth.inputs)) == 1
        found = _reduced(scene, event, birth, birth.inputs[0][0]) if same and parts >= _PARTS else None
        if found is None:
            continue
        event_of_it, reduced = found
        alive = sum(each for _, each, one in living if prod(one.shape or ()) == prod(birth.shape))
        if alive < scene.part_of_peak(_SHARE):
            continue
        what = made_by(scene, Alike(birth.shape, 1, size, birth, event))
        yield Cause(
            "joined_to_be_reduced",
            f"{what} joins {parts} results to {shape_words(birth.shape)}, of which "
            f"{of_birth(scene, event_of_it, reduced)} makes one again: {human(alive)} of that size at the peak.",
            "Add each to a total as it comes (`total += part`; for the largest `torch.maximum(total, part)`): then one is "
            f"there at a time, {human(size // parts)}.",
            alive,
            describes=True,
        )
        return


def _reduced(scene: Scene, event: int, birth: Birth, part: tuple[int, ...]) -> tuple[int, Birth] | None:
    """What makes one of the parts of it, or of what has its shape, in the same statement."""
    row = scene.start_of_row(event)
    for later, one in scene.births:
        given = [shape for shape, _ in one.inputs]
        taken = later > event and one.kernel in _REDUCES and birth.shape in given and one.shape is not None
        if taken and scene.start_of_row(later) == row and prod(one.shape or ()) <= prod(part):
            return later, one
    return None


def products_summed(scene: Scene) -> Iterator[Cause]:
    """``(a.unsqueeze(1) * b).sum(-1)``: the products, and what a backward makes of them at the same place."""
    sizes: Counter[tuple[CodePlace, tuple[int, ...]]] = Counter()
    for _, size, birth in births_alive(scene):
        if birth.kernel == "mul" and birth.place is not None and birth.shape:
            sizes[birth.place, birth.shape] += size
    if not sizes or max(sizes.values()) < max(WORTH, scene.part_of_peak(_SHARE)):
        return
    [((place, shape), size)] = sizes.most_common(1)
    births = [(event, one) for event, one in scene.births if not one.node]
    its = (one for one in births if (one[1].kernel, one[1].place, one[1].shape) == ("mul", place, shape))
    if (multiplied := next(its, None)) is None:
        return
    event, birth = multiplied
    factors = [one for one, _ in birth.inputs if prod(one) > 1]
    reader = next((one for at, one in births if at > event and shape in [its for its, _ in one.inputs]), None)
    if len(factors) < _FACTORS or reader is None or reader.kernel != "sum":
        return
    summed = reader.shape or ()
    if _FEWER * prod(summed) > prod(shape) or not _is_one_product(shape, factors[:_FACTORS], summed):
        return
    if not is_repeated(scene, Alike(shape, 1, size, birth, event)):
        yield Cause(
            "products_summed",
            f"{of_birth(scene, event, birth)} stores products, {shape_words(shape)}, only to add them up: {human(size)} at "
            "the peak.",
            "`torch.einsum` of both multiplies and adds up without storing them.",
            size,
            describes=True,
        )


def _is_one_product(shape: tuple[int, ...], factors: Sequence[tuple[int, ...]], summed: tuple[int, ...]) -> bool:
    """Whether `einsum` multiplies two factors as they lie: what both have, and the sum keeps, stands in front of all else. (It
    copies them in that order otherwise: `sumproduct_pair` of ATen/native/Linear.cpp.)"""
    padded = [(1,) * (len(shape) - len(one)) + one for one in factors]
    gone = [side for side in range(len(shape)) if summed in (shape[:side] + shape[side + 1 :], _with_one(shape, side))]
    if not gone or len(padded) < _FACTORS:
        return False
    in_both = [side for side in range(len(shape)) if side != gone[-1] and all(one[side] > 1 for one in padded)]
    others = [side for side in range(len(shape)) if side not in in_both and shape[side] > 1]
    return max(in_both, default=-1) < min(others, default=len(shape))


def _with_one(shape: tuple[int, ...], side: int) -> tuple[int, ...]:
    return (*shape[:side], 1, *shape[side + 1 :])


def _over_words(scene: Scene, birth: Birth) -> str:
    """What the program makes of the second dimension of it, or of the variable that gets it: sum or mean; else "". (A small
    result has no birth.)"""
    if birth.place is None:
        return ""
    name = name_given(birth.place.text)
    for how in _OF_A_BAG:
        over = rf"\.{how}\(\s*(?:(?:dim|axis)\s*=\s*)?1\s*[,)]"
        if re.search(re.escape(birth.place.expression) + over, birth.place.text):
            return how
        if name.isidentifier() and scene.program.matches_any(re.compile(rf"\b{name}{over}")):
            return how
    return ""


def rows_averaged(scene: Scene) -> Iterator[Cause]:
    """``self.embed(ids).mean(1)``: rows of a table that are looked up only to be added up."""
    births = [(event, one) for event, one in scene.births if not one.node]
    alive: Counter[tuple[int, ...]] = Counter()
    for _, size, birth in births_alive(scene):
        alive[birth.shape or ()] += size
    # (A loop's turns are alike.)
    tables = {birth.place: event for event, birth in births if birth.kernel == "embedding"}
    for event, birth in births:
        shape = birth.shape or ()
        if (
            tables.get(birth.place) != event
            or len(shape) != _ROWS
            or alive[shape] < max(WORTH, scene.part_of_peak(_SHARE))
        ):
            continue
        if not (how := _over_words(scene, birth)):
            continue
        others = (one for at, one in births if at > event and one.kernel not in _OF_A_BAG)
        if not any(shape in [its for its, _ in one.inputs] for one in others):
            yield Cause(
                "rows_averaged",
                f"{of_birth(scene, event, birth)} looks up {shape_words(shape)}, which {_AVERAGED[how]}: "
                f"{human(alive[shape])} of that shape at the peak.",
                f'`nn.EmbeddingBag` with `mode="{how}"` does both, and stores the result alone.',
                alive[shape],
                describes=True,
            )
            return
