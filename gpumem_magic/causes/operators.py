"""Growth inside an operator: results far larger than what they were made of, where that is seldom meant or has another way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from math import prod

import torch

from gpumem_magic.causes.alike import (
    Alike,
    alive_in_shapes,
    births_in_order,
    bytes_of,
    made_by,
    reader_of_a_view,
    size_words,
    squeezed,
)
from gpumem_magic.causes.model import Scene
from gpumem_magic.devices.base import Birth
from gpumem_magic.recording.model import BACKWARD
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human, shape_words

# A result is so many times larger than all that it was made of.
_TIMES = 4
# What is made so often, a few rows each time, is made in parts.
_PARTS = 3
_COPIES = frozenset({"clone", "_to_copy", "copy", "repeat", "contiguous", "copy_"})
_PRODUCTS = frozenset({"mm", "bmm", "matmul", "baddbmm", "dot", "ger", "outer", "addr"})
_MULTIPLIES = re.compile(r"@|\b(?:matmul|b?mm|einsum|outer|inner|tensordot|ger|cdist)\s*\(")
# These make much of little wherever they are used; a recurrent layer's kernel keeps every step's states for its backward.
_ALWAYS_GROW = re.compile(r"conv|embedding|arange|linspace|addmm|_rnn")
_DISTANCES = re.compile(r"cdist|pairwise|euclidean")
_HEADS = re.compile(r"repeat_kv|attention")
_MEANT = re.compile(r"\bNone\b|unsqueeze|\[\s*:\s*,")
_HALVES = frozenset({"float16", "bfloat16"})
_FILLED = frozenset({"new_zeros", "zeros", "zeros_like", "empty", "new_empty"})
# A vocabulary, rather than features.
_WORDS = 4096
_MOST_NAMES = 40
_BEFORE_THE_HEAD = "Take the last position before the head (`hidden[:, -1:]`; in transformers `logits_to_keep=1`)"


def grown_results(scene: Scene) -> Iterator[Cause]:
    """A broadcast, all pairs, a copy of an expanded tensor, one-hot numbers; of each place the largest."""
    told: set[object] = set()
    for alikes in alive_in_shapes(scene, lambda birth: _is_grown(birth) or _is_one_hot(birth)):
        kinds = ((kind, one) for kind in (_one_hot, _broadcast, _expanded_copy, _pairs, _other) for one in alikes)
        for kind, alike in kinds:
            cause = kind(scene, alike)
            if cause is not None and (alike.birth.place or alike.event) not in told:
                told.add(alike.birth.place or alike.event)
                yield cause
                break
    yield from _grown_gradient(scene)


def wide_copies(scene: Scene) -> Iterator[Cause]:
    """A large tensor of 16-bit numbers that is copied to float32; and logits of positions that nobody reads."""
    for alike, *_ in alive_in_shapes(scene, _is_widened):
        birth = alike.birth
        width = birth.inputs[0][1]
        each = bytes_of(alike.shape, birth.dtype)
        more = f", and {alike.count} of that shape at once are {human(alike.bytes)}" if alike.count > 2 else ""
        sizes = f"{human(each)} beside {human(each // 2)}{more}"
        text = f"{made_by(scene, alike)} copies {shape_words(alike.shape)} from {width} to float32: {sizes}"
        if positions := _positions_unread(scene, alike.shape):
            yield Cause(
                "all_positions",
                f"{text}, for all {positions:,} positions though only the last one is read (`[:, -1]`).",
                f"{_BEFORE_THE_HEAD}, and convert only that.",
                alike.bytes,
            )
            return
        logits = len(alike.shape) >= 2 and alike.shape[-1] >= _WORDS
        remedy = (
            f"Compute the loss for a part of the positions at a time, or keep the logits in {width} up to the loss."
            if logits
            else f"Keep it in {width}, or convert it in pieces where float32 is needed."
        )
        # What a library does inside is not the program's to change.
        theirs = birth.place is not None and birth.place.file != birth.place.own_file
        yield Cause("float32_copy", f"{text}.", remedy, alike.bytes, describes=theirs and not logits)
        return
    for alike, *_ in alive_in_shapes(scene, lambda birth: _is_head(birth) and not birth.node):
        if positions := _positions_unread(scene, alike.shape):
            yield Cause(
                "all_positions",
                f"{made_by(scene, alike)} makes the logits of all {positions:,} positions, {shape_words(alike.shape)}: "
                f"{human(alike.bytes)}, though only the last one is read (`[:, -1]`).",
                f"{_BEFORE_THE_HEAD}.",
                alike.bytes,
            )
            return


# Which operators


def _given(birth: Birth) -> int:
    return sum(bytes_of(shape, dtype) for shape, dtype in birth.inputs)


def _is_grown(birth: Birth) -> bool:
    return bool(birth.inputs) and bytes_of(birth.shape or (), birth.dtype) >= _TIMES * _given(birth)


def _is_widened(birth: Birth) -> bool:
    return (
        birth.kernel == "_to_copy"
        and birth.dtype == "float32"
        and len(birth.inputs) == 1
        and birth.inputs[0][1] in _HALVES
        and prod(birth.inputs[0][0]) == prod(birth.shape or ())
    )


def _is_head(birth: Birth) -> bool:
    shape = birth.shape or ()
    return birth.kernel in ("mm", "addmm", "bmm") and len(shape) >= 2 and shape[-1] >= _WORDS


def _positions_unread(scene: Scene, shape: tuple[int, ...]) -> int:
    """How many positions (batch, position, word) has, where the program, which runs no backward, reads only the last; else 0."""
    if shape[-1] < _WORDS or scene.spans(BACKWARD) or not scene.reads_last_position:
        return 0
    if len(shape) == 3:
        return shape[1] if shape[1] > 1 else 0
    # Batch and position in one: told apart by another tensor of the same rows.
    shapes = [birth.shape for _, birth in births_in_order(scene)] + [one.shape for one in scene.held]
    told = (each for each in shapes if each is not None and len(each) == 3 and each[0] * each[1] == shape[0])
    return next((each[1] for each in told if each[1] > 1), 0)


# In words


def _operands(expression: str) -> list[str]:
    """The two operands of an expression in its own words: ``a - b``, ``a.sub(b)``, ``f(a, b)``; [] for another one."""
    try:
        node = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []
    found: list[ast.expr] = []
    if isinstance(node, ast.BinOp):
        found = [node.left, node.right]
    elif isinstance(node, ast.Compare) and len(node.comparators) == 1:
        found = [node.left, node.comparators[0]]
    elif isinstance(node, ast.Call):
        of = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        modules = ("torch", "F", "functional", "nn")
        found = [*(one for one in of if ast.unparse(one).rpartition(".")[2] not in modules), *node.args][:2]
    words = [ast.unparse(one) for one in found]
    return words if len(words) == 2 and max(map(len, words)) <= _MOST_NAMES else []


# The kinds


def _broadcast(scene: Scene, alike: Alike) -> Cause | None:
    birth = alike.birth
    shapes = [shape for shape, _ in birth.inputs if prod(shape) > 1]
    if birth.kernel in _PRODUCTS or birth.kernel in _COPIES or len(shapes) < 2 or _joint(shapes) != alike.shape:
        return None
    first, second = sorted(shapes[:2], key=lambda shape: -prod(shape)) if len(shapes) > 2 else shapes[:2]
    if _is_in_parts(scene, alike):
        return None
    expression = birth.place.expression if birth.place is not None else ""
    what = made_by(scene, alike)
    pair = f"{shape_words(first)} with {shape_words(second)}"
    told = f"{what} broadcasts {pair} to {shape_words(alike.shape)}: {size_words(alike)}."
    same = squeezed(first) == squeezed(second)
    if same and not _MEANT.search(expression) and (len(first) != len(second) or birth.operator.endswith("loss")):
        return Cause("broadcast", told, _squeeze(first, second, _operands(expression)), alike.bytes)
    remedy = "Work on some of the rows at a time, if every pair is meant; else give both the same shape."
    if len(alike.shape) >= 3 and first[-1] == second[-1]:
        names = ", ".join(re.sub(r"\[.*\]$|\.unsqueeze\(.*\)$", "", name) for name in _operands(expression)) or "a, b"
        remedy = f"`torch.cdist({names})` gives distances between all pairs without it; or work on some of the rows at a time."
    return Cause("all_pairs", told, remedy, alike.bytes)


def _squeeze(first: tuple[int, ...], second: tuple[int, ...], names: list[str]) -> str:
    """What makes the two shapes the same: without the dimension of 1, or with it in the other."""
    number = 0 if first and first[-1] == 1 else 1
    shape, other = (first, second) if number == 0 else (second, first)
    if shape and shape[-1] == 1:
        name = names[number] if names else "the first" if number == 0 else "the second"
        call = (
            f"`{name}.squeeze({len(shape) - 1})`"
            if names and name.isidentifier()
            else f"`.squeeze({len(shape) - 1})` of {name}"
        )
        other = squeezed(other)
        return (
            f"Unless every pair is meant, the result is wrong, too: {call} gives both the shape {shape_words(other)}."
        )
    return "Unless every pair is meant, the result is wrong, too: give both the same shape (`squeeze` or `unsqueeze`)."


def _joint(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape to which they broadcast."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        return None


def _expanded_copy(scene: Scene, alike: Alike) -> Cause | None:
    birth = alike.birth
    if birth.kernel not in _COPIES or len(birth.inputs) < 1:
        return None
    words = birth.place.expression or birth.place.text if birth.place is not None else ""
    what, small = made_by(scene, alike), birth.inputs[0][0]
    if prod(small) >= prod(alike.shape):
        return None
    told = f"{what} expands {shape_words(small)} to {shape_words(alike.shape)} and copies it: {size_words(alike)}."
    if _MULTIPLIES.search(words):
        remedy = (
            "`torch.einsum`, or `torch.bmm` with the expanded dimension among the rows, multiplies without the copy."
        )
    elif birth.place is not None and _HEADS.search(f"{birth.place.function} {birth.place.own_function} {words}"):
        remedy = "`scaled_dot_product_attention` with `enable_gqa=True` takes fewer key and value heads as they are."
    elif birth.kernel == "repeat":
        padded = (1,) * (len(alike.shape) - len(small)) + small
        one_to_many = all(few in (1, many) for few, many in zip(padded, alike.shape, strict=True))
        reader = reader_of_a_view(scene, alike) if one_to_many else ""
        if not reader:
            # What needs its rows in one piece would copy the view.
            return None
        remedy = f"With `.expand` it would be a view, which takes nothing: {reader} reads one as it is."
        told = f"{what} repeats {shape_words(small)} to {shape_words(alike.shape)}: {size_words(alike)}."
    else:
        remedy = (
            "Leave it expanded (a view takes nothing): let the next operator broadcast, without reshaping it before."
        )
    return Cause("expanded_copy", told, remedy, alike.bytes)


def _is_in_parts(scene: Scene, alike: Alike) -> bool:
    """Whether some rows at a time are worked on already: again and again, of a few rows with many, none kept for a backward."""
    sizes = sorted(prod(shape) for shape, _ in alike.birth.inputs if prod(shape) > 1)
    if scene.report.error is not None or len(sizes) < 2 or 2 * sizes[0] > sizes[-1]:
        return False
    births = scene.recording.logs[scene.device].births
    place = alike.birth.place
    its = [
        one
        for one in scene.timeline.allocations
        if (birth := births.get(one.born)) is not None
        and (birth.place, birth.kernel, birth.shape) == (place, alike.birth.kernel, alike.birth.shape)
    ]
    if place is None or len(its) < _PARTS:
        return False
    trains = any(its[0].born <= scene.start_of(one) <= its[-1].born for one in scene.spans(BACKWARD))
    # The next one is made while a name still has the last.
    gone = all(one.freed is not None and one.freed <= later.born for one, later in zip(its, its[2:], strict=False))
    return gone and not trains


def _is_one_hot(birth: Birth) -> bool:
    """One-hot numbers, or a copy of them as another type."""
    words = f"{birth.operator} {birth.place.expression if birth.place is not None else ''} {birth.kernel}"
    return "one_hot" in words and (birth.dtype == "int64" or birth.kernel == "_to_copy")


def _one_hot(scene: Scene, alike: Alike) -> Cause | None:
    birth = alike.birth
    size = bytes_of(alike.shape, birth.dtype)
    if not _is_one_hot(birth) or size < scene.part_of_peak(10):
        return None
    bytes_each = size // max(1, prod(alike.shape))
    if birth.dtype == "int64":
        return Cause(
            "one_hot",
            f"{made_by(scene, alike)} makes {shape_words(alike.shape)} of int64, 8 bytes for each class: {size_words(alike)}.",
            "`F.cross_entropy` takes the class numbers as they are; where one-hot is needed, build it as bool or uint8 "
            "(`torch.zeros(n, classes, dtype=torch.bool).scatter_`), or for a part at a time.",
            alike.bytes,
        )
    return Cause(
        "one_hot",
        f"{made_by(scene, alike)} makes {shape_words(alike.shape)} of {birth.dtype}, {bytes_each} bytes for each class, "
        f"and of int64 on the way, 8 bytes: {human(size)}.",
        "`F.cross_entropy` takes the class numbers as they are, and `gather` picks the right classes' numbers without it.",
        size,
    )


def _pairs(scene: Scene, alike: Alike) -> Cause | None:
    birth = alike.birth
    words = f"{birth.operator} {birth.place.expression or birth.place.text if birth.place is not None else ''}"
    distances = _DISTANCES.search(birth.operator) is not None
    shape = alike.shape
    square = len(shape) >= 2 and min(shape[-2:]) >= 256
    if not square or not (distances or (birth.kernel in _PRODUCTS and _MULTIPLIES.search(words))):
        return None
    if alike.bytes < scene.part_of_peak(3) or _is_in_parts(scene, alike):
        return None
    shapes = " and ".join(shape_words(one) for one, _ in birth.inputs[:2])
    return Cause(
        "all_pairs",
        f"{made_by(scene, alike)} makes one number for every pair, {shape_words(shape)} from {shapes}: {size_words(alike)}.",
        "Work on some of the rows at a time, and keep of each part only what is needed (its `topk`, its sum).",
        alike.bytes,
    )


def _other(scene: Scene, alike: Alike) -> Cause | None:
    """What other operator makes much of little: no fault, and often the reason."""
    birth = alike.birth
    if birth.kernel in _PRODUCTS or _ALWAYS_GROW.search(birth.kernel) or alike.bytes < scene.part_of_peak(4):
        return None
    times = bytes_of(alike.shape, birth.dtype) // max(1, _given(birth))
    given = " and ".join(shape_words(one) for one, _ in birth.inputs[:2])
    if birth.inputs[0][0] == alike.shape:
        given = birth.inputs[0][1]
    remedy = "Work on a part at a time, or make it smaller before."
    if _is_in_parts(scene, alike):
        remedy = "Fewer at a time take less."
    elif birth.kernel == "im2col":
        remedy = "Where the windows are multiplied with weights, `F.conv2d` does it without storing them."
    elif birth.kernel.startswith("upsample"):
        remedy = "A convolution to fewer channels before it, or a smaller size, makes it smaller."
    return Cause(
        "grown_result",
        f"{made_by(scene, alike)} makes {shape_words(alike.shape)} from {given}, "
        f"{times} times as much: {size_words(alike)}.",
        remedy,
        alike.bytes,
        describes=True,
    )


def _grown_gradient(scene: Scene) -> Iterator[Cause]:
    """A gradient in the shape of a view that was expanded, in which nothing else is stored."""
    births = scene.recording.logs[scene.device].births
    stored = {prod(birth.shape or ()) for birth in births.values() if not birth.node}
    for one in scene.timeline.live_at(scene.moment):
        birth = births.get(one.born)
        if birth is None or not birth.node or birth.shape is None or one.size < scene.part_of_peak(3):
            continue
        if birth.kernel in _FILLED and _is_grown(birth) and prod(birth.shape) not in stored:
            alike = Alike(birth.shape, 1, one.size, birth, one.born)
            yield Cause(
                "expanded_gradient",
                f"The gradient of {made_by(scene, alike)} has the shape that was expanded, {shape_words(birth.shape)}: "
                f"{human(one.size)}, though the tensor itself is a small one.",
                "Take from the tensor before it is expanded (`x[rows, index]`): the gradient then has its small shape.",
                one.size,
            )
            return
