"""What is made whole though a part may do: an order of all numbers, a unit matrix for some rows, a spectrum's two halves, an
int64 copy of a mask."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from math import prod

from gpumem_magic.causes.alike import (
    Alike,
    births_alive,
    bytes_of,
    made_by,
    of_birth,
    reader_of_a_view,
    statement_of,
    taken_in_by,
)
from gpumem_magic.causes.model import WORTH, Scene
from gpumem_magic.causes.pairs import PRODUCTS, is_repeated, operands, product_with
from gpumem_magic.devices.base import Birth
from gpumem_magic.report.model import Cause
from gpumem_magic.units import MIB, human, shape_words

# One part in so many of the peak is worth a word, from so many bytes on.
_SHARE, _LEAST = 4, 16 * MIB
_OF_A_SORT = 3
_FILLED = frozenset({"ones", "zeros", "full", "ones_like", "zeros_like", "full_like", "new_ones", "new_zeros"})
_MATRIX = 2
_ROWS = frozenset({"index", "index_select", "embedding"})
# Of a unit matrix, one row in so many.
_FEW = 4
_FULL_SPECTRUM = re.compile(r"\bfft\.(fft[2n]?)\(")
_THE_SAME = re.compile(r"\b(stack|cat|concat)\(\s*\[\s*([\w.]+)\s*\]\s*\*\s*([\w.]+)\s*(?:,\s*(?:dim\s*=\s*)?0\s*)?\)$")
# A tensor's own, and not `F.unfold`, which copies by itself.
_UNFOLDED = re.compile(r"(?<!\bF)(?<!functional)\.unfold\(\s*-?\d+\s*,\s*(\d+)\s*,\s*(\d+)\s*\)")
_PADDED = re.compile(r"\bpad_sequence\(\s*(\w+)\b")
_SUMS = re.compile(r"\bsum\((?!.*dtype)")
# (Others sort inside: a quantile.)
_SORTS = re.compile(r"sort\(")
# They are added up in 64 bits, as a copy (`make_reduction` of ATen/native/ReduceOpsUtils.h, PyTorch 2.13).
_NARROW = frozenset({"bool", "uint8", "int8", "int16", "int32"})
# Behind a sort: ``[0][:k]``, ``.indices[:, :k]``.
_FIRST_ONES = re.compile(r"(?:\[[01]\]|\.values|\.indices)?\[[^\]]*:\s*(?!-)\w+\s*\]")


def made_whole(scene: Scene) -> Iterator[Cause]:
    """At the peak, or where a request failed; of each place all that it has there."""
    found: dict[object, list[tuple[int, int, Birth]]] = defaultdict(list)
    for event, size, birth in births_alive(scene, at_work=True):
        if not birth.node and birth.place is not None:
            found[birth.place].append((event, size, birth))
    for its in found.values():
        size = sum(size for _, size, _ in its)
        if size < max(_LEAST, scene.part_of_peak(_SHARE)):
            continue
        event, birth, kind = next(
            ((event, one, _KINDS[one.kernel]) for event, _, one in its if one.kernel in _KINDS), (0, its[0][2], None)
        )
        inside = any(one.shape is None for _, _, one in its)
        if kind is not None and (cause := kind(scene, Alike(birth.shape or (), 1, size, birth, event), inside)):
            yield cause


def _sorted(scene: Scene, alike: Alike, inside: bool) -> Cause | None:
    """inside: whether the sort is at work."""
    birth, place = alike.birth, alike.birth.place
    if not inside or not birth.inputs or place is None or alike.bytes < scene.part_of_peak(_OF_A_SORT):
        return None
    shape, dtype = birth.inputs[0]
    behind = statement_of(scene, alike).partition(place.expression)[2] if place.expression else ""
    first = _FIRST_ONES.match(behind) is not None
    smallest = "" if "descending" in place.expression else "with `largest=False` "
    remedy = f"Only the first ones are read: {smallest}`topk` makes no others."
    if not first:
        rows = "; else sort some of the rows at a time" if len(shape) > 1 else ""
        remedy = f"Where only the first ones are wanted, {smallest}`topk` makes no others{rows}."
    if not _SORTS.search(place.expression):
        remedy = "A sample of the numbers takes less, and gives an estimate."
    return Cause(
        "sorted",
        f"{made_by(scene, alike)} takes {human(alike.bytes)} to sort {human(bytes_of(shape, dtype))}: the order, an index of 8 "
        "bytes for each number, and its own copies of both.",
        remedy,
        alike.bytes,
        describes=not first,
    )


def _summed(scene: Scene, alike: Alike, inside: bool) -> Cause | None:
    shape, dtype = alike.birth.inputs[0] if alike.birth.inputs else ((), "")
    each = bytes_of((), "int64")
    # (Of one mask after the other, each is a part as it is.)
    if not inside or dtype not in _NARROW or alike.bytes < each * prod(shape) or is_repeated(scene, alike):
        return None
    place = alike.birth.place
    half = place is not None and _SUMS.search(place.expression) is not None
    remedy = "With `dtype=torch.int32` the copy is half as large; some" if half else "Some"
    asked = "; `.any()` and `.all()` need none, if that is the question" if dtype == "bool" else ""
    return Cause(
        "summed_as_integers",
        f"{made_by(scene, alike)} copies {shape_words(shape)} from {dtype} to int64 before it adds them up: "
        f"{human(each * prod(shape))} beside {human(bytes_of(shape, dtype))}.",
        f"{remedy} of the rows at a time need only their part of it{asked}.",
        alike.bytes,
        describes=True,
    )


def _compared(scene: Scene, alike: Alike, inside: bool) -> Cause | None:
    """`isin` with few to compare with (`isin_Tensor_Tensor_out` of ATen/native/TensorCompare.cpp, PyTorch 2.13)."""
    birth, place = alike.birth, alike.birth.place
    sizes = [prod(shape) for shape, _ in birth.inputs]
    if not inside or len(sizes) < 2 or alike.bytes < prod(sizes[:2]) or place is None:
        return None
    ids, few = operands(place.expression) or ["ids", "these"]
    return Cause(
        "compared_with_each",
        f"{made_by(scene, alike)} compares each of {sizes[0]:,} numbers with each of {sizes[1]:,}: {human(prod(sizes[:2]))} of "
        "truth values.",
        "Some of them at a time need only their part of it; with a table, whole numbers that are not too large need none "
        f'(`table = torch.zeros(largest + 1, dtype=torch.bool, device="cuda")`, `table[{few}] = True`, `table[{ids}]`).',
        alike.bytes,
        describes=True,
    )


def _unit_matrix(scene: Scene, alike: Alike, _: bool) -> Cause | None:
    later = ((event, birth) for event, birth in scene.births if event > alike.event and not birth.node)
    event, reader = next((one for one in later if alike.shape in (shape for shape, _ in one[1].inputs)), (0, None))
    if reader is None or reader.kernel not in _ROWS or _FEW * prod(reader.shape or ()) > prod(alike.shape):
        return None
    rows, classes = prod(reader.shape or ()) // alike.shape[-1], alike.shape[-1]
    return Cause(
        "unit_matrix",
        f"{made_by(scene, alike)} makes a unit matrix, {shape_words(alike.shape)}, of which {of_birth(scene, event, reader)} "
        f"takes {rows:,} rows: {human(alike.bytes)}.",
        f"`F.one_hot(numbers, {classes})` makes these rows alone; `F.cross_entropy` takes the class numbers as they are.",
        alike.bytes,
    )


def _windows(scene: Scene, alike: Alike, _: bool) -> Cause | None:
    """`torch.stft`: each number is in several windows (`hop_length` is a quarter of `n_fft` where none is given)."""
    births = scene.recording.logs[scene.device].births.items()
    begin = scene.start_of_row(alike.event)
    its = [(event, one) for event, one in births if one.operator == "stft" and begin <= event <= alike.event]
    signal = next((one.shape or () for _, one in its if "pad" in one.kernel), ())
    frames, width = next((one.shape[-2:] for _, one in its if one.kernel == "mul" and one.shape), (0, 0))
    if not signal or frames < _FEW or not width:
        return None
    hop = (signal[-1] - width) // (frames - 1)
    usual = width // _FEW
    if hop >= usual:
        return None
    living = {event: size for event, size, _ in births_alive(scene)}
    size = sum(living.get(event, 0) for event, one in its if one.shape and frames in one.shape)
    return Cause(
        "many_windows",
        f"{made_by(scene, alike)} cuts {signal[-1]:,} numbers into {frames:,} windows of {width:,}, one every {hop}, and each "
        f"is in {width // max(1, hop)} of them: {human(size)}.",
        f"`hop_length={usual}`, a quarter of the window as is usual, makes {usual // max(1, hop)} times fewer.",
        size,
    )


def _overlapping(scene: Scene, alike: Alike, _: bool) -> Cause | None:
    """``x.unfold(0, 96, 1).contiguous()``: windows of a view, each made whole."""
    birth = alike.birth
    cut = _UNFOLDED.search(birth.place.expression) if birth.place is not None else None
    if cut is None or alike.bytes < WORTH:
        return None
    size, step = map(int, cut.groups())
    if not step or size < _FEW * step:
        return None
    return Cause(
        "overlapping_windows",
        f"{made_by(scene, alike)} copies windows of {size:,}, one every {step:,}: each number is in {size // step:,} of them, "
        f"{human(alike.bytes)}.",
        "As a view they take nothing: leave out the copy, and make whole only what a batch takes of it (`windows[i:j]`).",
        alike.bytes,
        describes=True,
    )


def _padded(scene: Scene, alike: Alike, _: bool) -> Cause | None:
    """`pad_sequence` of sequences that are in a list still, of which one is far longer than the others."""
    place, (rows, longest, *_rest) = alike.birth.place, (*alike.shape, 0, 0)
    words = place.expression or place.text if place is not None else ""
    first = _PADDED.search(words)
    if first is None or alike.birth.operator not in ("pad_sequence", "full"):
        return None
    known = re.compile(rf"{re.escape(first[1])}\[\d+\]$")
    its = [one.shape[0] for one in scene.held if one.shape and known.match(one.place)]
    if len(its) not in (rows, longest) or max(its) not in (rows, longest) or _FEW * sum(its) > 3 * len(its) * max(its):
        return None
    return Cause(
        "padded_sequences",
        f"{made_by(scene, alike)} pads {len(its):,} sequences of {sum(its) // len(its):,} rows on average to the longest one's "
        f"{max(its):,}: {human(alike.bytes)}, of which {human(alike.bytes * sum(its) // (len(its) * max(its)))} are no padding.",
        "Some of them at a time, of similar length, need less; so does a limit to their length.",
        alike.bytes,
    )


def _spectrum(scene: Scene, alike: Alike, inside: bool) -> Cause | None:
    if alike.birth.operator == "stft":
        return _windows(scene, alike, inside)
    birth, place = alike.birth, alike.birth.place
    written = _FULL_SPECTRUM.search(place.expression) if place is not None else None
    # (Which real numbers are made complex first, or by the same kernel.)
    real = birth.kernel == "_fft_r2c" or any(
        one.place == place and one.dtype == birth.dtype and one.inputs and one.inputs[0][1] in ("float32", "float64")
        for one in scene.recording.logs[scene.device].births.values()
    )
    if written is None or not real or not birth.inputs or birth.inputs[0][0] != birth.shape:
        return None
    half = (*alike.shape[:-1], alike.shape[-1] // 2 + 1)
    return Cause(
        "both_halves",
        f"{made_by(scene, alike)} makes the whole spectrum of real numbers, {shape_words(alike.shape)} in {birth.dtype}, of "
        f"which one half mirrors the other: {human(alike.bytes)}.",
        f"`torch.fft.r{written[1]}` makes one half, {shape_words(half)}.",
        alike.bytes,
        describes=True,
    )


def _same_masks(scene: Scene, alike: Alike, _: bool) -> Cause | None:
    """``torch.ones(b, h, n, n).tril()``: one mask as often as there are sequences and heads."""
    begin, shape = scene.start_of_row(alike.event), alike.shape
    filled = any(
        birth.operator in _FILLED and birth.shape == shape
        for event, birth in scene.births
        if begin <= event < alike.event
    )
    if not filled or len(shape) <= _MATRIX or shape[-1] != shape[-2] or prod(shape[:-_MATRIX]) == 1:
        return None
    each = bytes_of(shape[-_MATRIX:], alike.birth.dtype)
    return Cause(
        "same_masks",
        f"{made_by(scene, alike)} makes the same mask for each of {prod(shape[:-_MATRIX]):,}: {human(alike.bytes)}.",
        f"One of {shape_words(shape[-_MATRIX:])}, {human(each)}, is broadcast to all of them as it is.",
        alike.bytes,
    )


def _blocks(scene: Scene, alike: Alike, _: bool) -> Cause:
    multiplied = taken_in_by(scene, alike, PRODUCTS.__contains__)
    remedy = "Keep the blocks in a list, or stacked where they have one size."
    if multiplied:
        remedy = f"{multiplied} needs none of the zeros: `torch.bmm(torch.stack(blocks), ...)`, or one block at a time."
    return Cause(
        "block_diagonal",
        f"{made_by(scene, alike)} makes {shape_words(alike.shape)}, zeros but for the blocks on its diagonal: "
        f"{human(alike.bytes)}.",
        remedy,
        alike.bytes,
    )


def _zeros(scene: Scene, alike: Alike, _: bool) -> Cause | None:
    row = scene.start_of_row(alike.event)
    for event, birth in scene.births:
        takes = birth.kernel == "where" and alike.shape in (shape for shape, _ in birth.inputs)
        if event > alike.event and takes and scene.start_of_row(event) == row:
            size = bytes_of(alike.shape, alike.birth.dtype)
            return Cause(
                "zeros_for_where",
                f"{made_by(scene, alike)} makes {human(size)} of one number for {of_birth(scene, event, birth)}.",
                "`torch.where` takes the number itself (`torch.where(mask, x, 0.0)`), and needs no tensor of it.",
                size,
            )
    return None


def _the_same(scene: Scene, alike: Alike, _: bool) -> Cause | None:
    """``torch.stack([x] * n)``, ``torch.cat([x] * n)`` of one row."""
    place = alike.birth.place
    written = _THE_SAME.search(place.expression) if place is not None else None
    if written is None or not alike.birth.inputs:
        return None
    how, name, given = written.groups()
    times = prod(alike.shape) // max(1, prod(alike.birth.inputs[0][0]))
    if how != "stack" and alike.birth.inputs[0][0][:1] != (1,):
        return None
    reader, size = reader_of_a_view(scene, alike), bytes_of(alike.shape, alike.birth.dtype)
    view = f"{name}.expand({given}, *{name}.shape{'' if how == 'stack' else '[1:]'})"
    remedy = f"`{view}` is a view, which takes nothing: {reader} reads it as it is."
    if not reader:
        product = product_with(scene, alike)
        if not product:
            return None
        remedy = f"{product} needs no copies of it: `torch.einsum` multiplies with `{name}` itself."
    return Cause(
        "expanded_copy", f"{made_by(scene, alike)} copies the same tensor {times:,} times: {human(size)}.", remedy, size
    )


_KINDS = {
    "stack": _the_same,
    "cat": _the_same,
    "zeros_like": _zeros,
    "full_like": _zeros,
    "zeros": _zeros,
    "sort": _sorted,
    "sum": _summed,
    "count_nonzero": _summed,
    "isin": _compared,
    "eye": _unit_matrix,
    "tril": _same_masks,
    "triu": _same_masks,
    "full": _padded,
    "mul": _windows,
    "_fft_c2c": _spectrum,
    "_fft_r2c": _spectrum,
    "block_diag": _blocks,
    "clone": _overlapping,
    "contiguous": _overlapping,
}
