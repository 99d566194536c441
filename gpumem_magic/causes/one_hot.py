"""One-hot numbers: 8 bytes for each class, to count, to pick rows, to add rows up, or for a loss; each has a way without."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

from gpumem_magic.causes.alike import Alike, bytes_of, made_by, of_birth, size_words
from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.pairs import PRODUCTS
from gpumem_magic.devices.base import Birth
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human, shape_words

_LOSSES = re.compile(r"entropy|(?:\b|_)loss|dice|target|label", re.I)


def is_one_hot(birth: Birth) -> bool:
    """One-hot numbers, or a copy of them as another type."""
    words = f"{birth.operator} {birth.place.expression if birth.place is not None else ''} {birth.kernel}"
    return "one_hot" in words and (birth.dtype == "int64" or birth.kernel == "_to_copy")


def one_hot(scene: Scene, alike: Alike) -> Cause | None:
    birth = alike.birth
    size = bytes_of(alike.shape, birth.dtype)
    if not is_one_hot(birth) or size < scene.part_of_peak(10):
        return None
    bytes_each = size // max(1, prod(alike.shape))
    instead = _instead(scene, alike)
    if birth.dtype == "int64":
        return Cause(
            "one_hot",
            f"{made_by(scene, alike)} makes {shape_words(alike.shape)} of int64, 8 bytes for each class: {size_words(alike)}.",
            f"{instead}; where one-hot is needed, build it as bool or uint8 "
            "(`torch.zeros(n, classes, dtype=torch.bool).scatter_`), or for a part at a time.",
            alike.bytes,
        )
    right = "" if multiplied(scene, alike) else ", and `gather` picks the right classes' numbers without it"
    return Cause(
        "one_hot",
        f"{made_by(scene, alike)} makes {shape_words(alike.shape)} of {birth.dtype}, {bytes_each} bytes for each class, "
        f"and of int64 on the way, 8 bytes: {human(size)}.",
        f"{instead}{right}.",
        size,
    )


def multiplied(scene: Scene, alike: Alike) -> str:
    """The product with weights that takes all rows of it, or whose request failed; "" where none does."""
    rows = prod(alike.shape[:-1]), alike.shape[-1]
    for event, birth in scene.births:
        taken = event >= alike.event and birth.kernel in ("mm", "addmm") and not birth.node
        if taken and any(shape == rows for shape, _ in birth.inputs):
            return of_birth(scene, event, birth)
    return ""


def _instead(scene: Scene, alike: Alike) -> str:
    """What does without it what is done with it."""
    if product := multiplied(scene, alike):
        return (
            f"{product} picks rows of the weights: `F.embedding(numbers, weight.t())` (an `nn.Embedding`) looks them up"
        )
    places, operators = [alike.birth.place], list[str]()
    for event, birth in _readers(scene, alike):
        if birth.kernel == "sum":
            counts = "`torch.bincount(numbers)`"
            if len(birth.shape or ()) > 1:
                counts = f"`scatter_add_` of ones into zeros of {shape_words(birth.shape or ())}"
            return f"{of_birth(scene, event, birth)} only counts, as {counts} does without it"
        if birth.kernel in PRODUCTS:
            adds = "`zeros.index_add_(0, numbers, rows)` does so without it"
            return f"{of_birth(scene, event, birth)} only puts or adds up rows: {adds}"
        places.append(birth.place)
        operators.append(birth.operator)
    read = len(places) > 1
    words = [f"{one.expression} {one.function} {one.own_function}" for one in places if one is not None]
    words += operators
    if not (_LOSSES.search(" ".join(words)) if read else scene.program.matches_any(_LOSSES)):
        return "Indexing by the numbers (`x[index]`, `index_add_`) picks and puts rows without it"
    return "`F.cross_entropy` takes the class numbers as they are"


def _readers(scene: Scene, alike: Alike) -> Iterator[tuple[int, Birth]]:
    """What takes it in, as it is, in another type or turned over, but for a backward's."""
    count, classes = prod(alike.shape), alike.shape[-1]
    for event, birth in scene.births:
        taken = event > alike.event and not birth.node and birth.kernel != "_to_copy"
        if taken and any(
            prod(shape) == count and classes in (shape[0], shape[-1]) for shape, _ in birth.inputs if shape
        ):
            yield event, birth
