"""Growth inside an operator: results far larger than what they were made of, where that is seldom meant or has another way."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from gpumem_magic.causes.alike import (
    HALVES,
    Alike,
    alive_in_shapes,
    alone,
    behind,
    births_alive,
    bytes_of,
    first_reader,
    goes_by_numbers,
    made_by,
    made_of_it,
    of_birth,
    reader_of_a_view,
    size_words,
    statement_of,
    taken_in_by,
)
from gpumem_magic.causes.libraries import widening
from gpumem_magic.causes.model import WORTH, Scene
from gpumem_magic.causes.one_hot import is_one_hot, multiplied, one_hot
from gpumem_magic.causes.pairs import (
    COPIES,
    MULTIPLIES,
    PRODUCTS,
    broadcast,
    is_in_parts,
    is_repeated,
    operands,
    pairs,
    product_with,
)
from gpumem_magic.causes.remedies import LOSS_IN_PARTS
from gpumem_magic.causes.unread import unread
from gpumem_magic.causes.written import Written, name_given
from gpumem_magic.devices.base import MOST_INPUTS, Birth
from gpumem_magic.recording.model import AUTOCAST_ENDS, BACKWARD, FORWARD
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human, shape_words

# A result is so many times larger than all that it was made of.
_TIMES = 4
# What these tell of is made on the way to something else.
_ON_THE_WAY = frozenset({"grown_result", "all_pairs"})
# These make much of little wherever they are used; a recurrent layer's kernel keeps every step's states for its backward.
_ALWAYS_GROW = re.compile(r"conv|native_multi_head_attention|embedding|arange|linspace|addmm|_rnn")
# (They go by strides: `restride_dim` of ATen/native/cuda/ScatterGatherKernel.cu.)
_BY_INDEX = tuple(
    f"{name}{end}"
    for name in ("gather", "scatter", "scatter_add", "scatter_reduce", "take_along_dim")
    for end in ("", "_")
)
# These work on rows or images that lie in one piece.
_NEEDS_ROWS = re.compile(r"conv|pool|_rnn|norm|pad|upsample")
_REPEATS = re.compile(r"\b(?:repeat_interleave|repeat|tile)\(")
_HEADS = re.compile(r"repeat_kv|attention")
# A wider type -> the narrower ones that it may come to instead.
_WIDER = {"float32": HALVES, "float64": HALVES | {"float32"}, "complex128": frozenset({"complex64"})}
# What a program calls to have another type. Under autocast other operators convert what they are given.
_CONVERSIONS = frozenset({"to", "float", "type", "type_as", "_to_copy"})
_FACTORIES = frozenset(
    {"ones", "zeros", "full", "eye", "ones_like", "zeros_like", "full_like", "new_ones", "new_zeros"}
)
# The dimensions of several images.
_IMAGES = 4
_FILLED = frozenset({"new_zeros", "zeros", "zeros_like", "empty", "new_empty"})
# Two factors of a product of batches; from so many rows on, and such sides, a matrix for each is much.
_FACTORS, _TWICE, _BATCHED, _MANY_ROWS, _WIDE = 2, 2, 3, 1024, 16
# Fewer positions have not many pairs.
_PAIRS_FROM = 256
# What is less than one part in so many is no fault.
_SMALL_PART = 4
# A vocabulary, rather than features.
_WORDS = 4096
_LOG_OF_SOFTMAX = re.compile(r"\blog\(.*softmax\(|softmax\(.*\.log\(\)$")
_HESSIAN = re.compile(r"\bhessian\(")
_BEFORE_THE_HEAD = "Take the last position before the head (`hidden[:, -1:]`; in transformers `logits_to_keep=1`)"


def grown_results(scene: Scene) -> Iterator[Cause]:
    """A broadcast, all pairs, a copy of an expanded tensor, one-hot numbers; of each place the largest."""
    told: set[object] = set()
    for alikes in alive_in_shapes(scene, lambda birth: birth.kernel == "cat" or _is_grown(birth) or is_one_hot(birth)):
        alikes = [
            one for one in (_of_grown(scene, each) for each in alikes) if _is_grown(one.birth) or is_one_hot(one.birth)
        ]
        kinds = (
            (kind, one) for kind in (_diagonal, one_hot, broadcast, _expanded_copy, pairs, _other) for one in alikes
        )
        for kind, alike in kinds:
            cause = kind(scene, alike)
            if cause is not None and (alike.birth.place or alike.event) not in told:
                told.add(alike.birth.place or alike.event)
                easier = cause.name in _ON_THE_WAY and _keeps_one_of(scene, alike)
                yield replace(cause, remedy=_first_let_go(scene, cause.remedy)) if easier else cause
                break
    yield from _grown_gradient(scene)


def matrices_of_rows(scene: Scene) -> Iterator[Cause]:
    """A batched product in which each row has a matrix of its own (edges of a graph, experts that were looked up): what the
    matrices take, with their gradients."""
    births = scene.recording.logs[scene.device].births
    living = [
        (one, birth)
        for one in scene.timeline.live_at(scene.moment)
        if (birth := births.get(one.born)) is not None and birth.shape is not None
    ]
    for event, birth in reversed(scene.births):
        if birth.kernel != "bmm" or birth.node or len(birth.inputs) < _FACTORS:
            continue
        (rows, _), (matrices, dtype) = sorted(birth.inputs[:_FACTORS], key=lambda each: prod(each[0]))
        single = min(rows[-2:], default=0) == 1
        if len(matrices) != _BATCHED or matrices[0] < _MANY_ROWS or not single or min(matrices[1:]) < _WIDE:
            continue
        there = [one.size for one, its in living if prod(its.shape or ()) == prod(matrices) and its.dtype == dtype]
        if sum(there) < scene.part_of_peak(2):
            continue
        alike = Alike(matrices, len(there), sum(there), birth._replace(dtype=dtype), event)
        in_parts = ", each part in a `torch.utils.checkpoint.checkpoint`" if scene.spans(BACKWARD) else ""
        yield Cause(
            "matrices_of_rows",
            f"{made_by(scene, alike)} multiplies each of {matrices[0]:,} rows with a matrix of its own, "
            f"{shape_words(matrices[1:])}: {size_words(alike)}.",
            f"Make and use some of the matrices at a time{in_parts}; one matrix for all, or smaller ones, take less.",
            alike.bytes,
            describes=True,
        )
        return


def wide_copies(scene: Scene) -> Iterator[Cause]:
    """A large tensor of 16-bit numbers that is copied to float32; and logits of positions that nobody reads."""
    for last, *_ in alive_in_shapes(scene, _is_widened):
        alike = behind(scene, last, _is_widened)
        # (In parts, it is worth a word where a part is much.)
        if alike is None or alike.bytes < scene.part_of_peak(2 if is_repeated(scene, alike) else 10):
            continue
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
        # (A weight's gradient, too, may be that wide.)
        of_weights = any(one.shape == alike.shape and one.kind in ("parameter", "gradient") for one in scene.held)
        logits = len(alike.shape) >= 2 and alike.shape[-1] >= _WORDS and not of_weights
        by_autocast = last.birth.operator not in _CONVERSIONS and bool(scene.spans(AUTOCAST_ENDS))
        remedy = f"Keep it in {width}, or convert it in pieces where float32 is needed."
        if logits:
            # A graph keeps every part's.
            parts = LOSS_IN_PARTS if scene.spans(BACKWARD) else "Compute the loss for a part of the positions at a time"
            # (What autocast copies for the loss is in 16 bits up to there.)
            remedy = f"{parts}." if by_autocast else f"Keep the logits in {width} up to the loss. {parts}."
            if not any("log_softmax" in made.kernel or "nll" in made.kernel for _, made in scene.births):
                remedy = f"Keep the logits in {width}, or work on a part of the positions at a time."
        if of_weights:
            remedy = (
                "For a norm, `torch.linalg.vector_norm(x, dtype=torch.float32)` converts inside, without a copy; else convert "
                "it in pieces."
            )
        if not logits and by_autocast:
            yield Cause(
                "float32_copy",
                f"{made_by(scene, last)} runs `{last.birth.operator}` in float32, as autocast has it: "
                f"{shape_words(alike.shape)} is {sizes}.",
                f'In a block with `torch.autocast("cuda", enabled=False)` it stays in {width}; its weights, where '
                "it has any, must be so, too.",
                alike.bytes,
                describes=True,
            )
            return
        # What a library does inside is not the program's to change.
        theirs = birth.place is not None and birth.place.file != birth.place.own_file
        if theirs and not logits:
            yield Cause("float32_copy", f"{text}.", widening(birth.place), alike.bytes, describes=True)
            return
        few = _SMALL_PART * alike.bytes < scene.report.peak.allocated or alike.bytes < WORTH // _SMALL_PART
        yield Cause("float32_copy", f"{text}.", remedy, alike.bytes, describes=few)
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


def promoted(scene: Scene) -> Iterator[Cause]:
    """A result in float32 of 16-bit numbers and of a smaller tensor in float32; or in float64, as NumPy has its numbers."""
    for last, *_ in alive_in_shapes(scene, _is_promoted):
        alike = behind(scene, last, _is_promoted)
        if alike is None or alike.bytes < scene.part_of_peak(10):
            continue
        wide = alike.birth.dtype
        shapes = {dtype: shape for shape, dtype in alike.birth.inputs}
        rest = next(dtype for dtype in shapes if dtype != wide)
        place = alike.birth.place
        names = operands(place.expression) if place is not None else []
        small = names[[dtype for _, dtype in alike.birth.inputs].index(wide)] if names else "the other"
        quoted = f"`{small}`" if names else small
        of_it = bytes_of(alike.shape, wide) // bytes_of(alike.shape, rest)
        yield Cause(
            "promoted",
            f"{made_by(scene, alike)} gives {wide}, because {quoted} {shape_words(shapes[wide])} is {wide}, where the "
            f"rest is {rest}: {size_words(alike)}.",
            f"{f'`{small}.to(torch.{rest})`' if names else f'The other in {rest}'} leaves the result in {rest}, "
            f"{'half' if of_it == _TWICE else 'a quarter'} of that.",
            alike.bytes - alike.bytes // of_it,
        )
        return


def narrowed(scene: Scene) -> Iterator[Cause]:
    """``torch.ones(n, n).tril().bool()``: numbers that are made in float32, and are truth values by the end of the statement."""
    for event, birth in scene.births:
        shape, dtype = birth.inputs[0] if birth.inputs else ((), "")
        large = bytes_of(shape, dtype) >= scene.part_of_peak(4) and bytes_of(shape, dtype) >= WORTH
        if birth.kernel != "_to_copy" or birth.dtype != "bool" or dtype != "float32" or birth.node or not large:
            continue
        begin = scene.start_of_row(event)
        row = {at: one for at, one in scene.births if begin <= at < event and (one.shape, one.dtype) == (shape, dtype)}
        made = next((at for at, one in row.items() if one.operator in _FACTORIES), None)
        living = [one for one in scene.timeline.live_at(scene.moment) if one.born in row]
        if made is None or not living:
            continue
        yield Cause(
            "narrowed",
            f"{of_birth(scene, made, row[made])} makes {shape_words(shape)} in float32, of which only truth values are wanted: "
            f"{human(sum(one.size for one in living))} for {human(prod(shape))} of them.",
            "With `dtype=torch.bool` where they are made they take a quarter, and no copy.",
            sum(one.size for one in living),
        )
        return


def wide_losses(scene: Scene) -> Iterator[Cause]:
    """What a loss makes of logits over many classes: their log-softmax, their gradients, copies in another type."""
    for alike, *_ in alive_in_shapes(scene, _is_log_of_softmax):
        row = scene.start_of_row(alike.event)
        steps = [
            size
            for event, size, birth in births_alive(scene)
            if scene.start_of_row(event) == row and birth.shape == alike.shape and not birth.node
        ]
        if len(steps) > 1 and sum(steps) >= scene.part_of_peak(4):
            yield Cause(
                "log_of_softmax",
                f"{made_by(scene, alike)} makes {len(steps)} tensors of {shape_words(alike.shape)} that are there at once: "
                f"{human(sum(steps))}.",
                "`F.log_softmax` makes one, and is exact for small ones; `F.cross_entropy` takes the logits as they are.",
                sum(steps) - steps[0],
            )
            return
    for alike, *_ in alive_in_shapes(scene, lambda birth: "log_softmax" in birth.kernel):
        alike = _of_its_forward(scene, alike)
        if len(alike.shape) < 2 or alike.shape[-1] < _WORDS or alike.bytes < max(WORTH, scene.part_of_peak(3)):
            continue
        rows = prod(alike.shape[:-1])
        if not scene.spans(BACKWARD) and not any(span.graph for span in scene.spans(FORWARD)):
            # Scores that are looked at, and no loss: `growth` says who keeps them.
            return
        yield Cause(
            "wide_loss",
            f"{made_by(scene, alike)} is a loss over {alike.shape[-1]:,} classes at {rows:,} positions: {size_words(alike)}.",
            _first_let_go(scene, f"{LOSS_IN_PARTS}."),
            alike.bytes,
            describes=True,
        )
        return


def _of_its_forward(scene: Scene, alike: Alike) -> Alike:
    """Without what earlier iterations made in that shape, and something keeps: that is no loss's."""
    begun = max((start for one in scene.spans(FORWARD) if (start := scene.start_of(one)) < alike.event), default=0)
    sizes = [
        size
        for event, size, birth in births_alive(scene)
        if event >= begun and prod(birth.shape or ()) == prod(alike.shape)
    ]
    return replace(alike, count=min(alike.count, len(sizes)), bytes=min(alike.bytes, sum(sizes)))


def _keeps_one_of(scene: Scene, alike: Alike) -> bool:
    """Whether what nobody reads any more is of this shape."""
    found, births = unread(scene), scene.recording.logs[scene.device].births
    made = (births.get(one.born) for one in found.held) if found is not None else ()
    return any(birth is not None and prod(birth.shape or ()) == prod(alike.shape) for birth in made)


def _first_let_go(scene: Scene, remedy: str) -> str:
    """The remedy, behind the easier one where a variable keeps what the loss was made of, and nothing reads it any more."""
    found = unread(scene)
    return remedy if found is None else f"{found.advice(by_name=True)}. {remedy}"


# Which operators


def _given(birth: Birth) -> int:
    return sum(bytes_of(shape, dtype) for shape, dtype in birth.inputs)


def _is_grown(birth: Birth) -> bool:
    # (Of many inputs, as a `stack` has them, not all are known.)
    return 0 < len(birth.inputs) < MOST_INPUTS and bytes_of(birth.shape or (), birth.dtype) >= _TIMES * _given(birth)


def _of_grown(scene: Scene, alike: Alike) -> Alike:
    """Of what joins parts that all have grown in the same statement, the same with what those were made of."""
    if alike.birth.kernel != "cat":
        return alike
    row = scene.start_of_row(alike.event)
    left = [
        birth for event, birth in scene.births if row <= event < alike.event and not birth.node and _is_grown(birth)
    ]
    inputs: list[tuple[tuple[int, ...], str]] = []
    for part in alike.birth.inputs:
        # (`repeat_interleave` makes a view of what it has made.)
        made = next((one for one in left if (prod(one.shape or ()), one.dtype) == (prod(part[0]), part[1])), None)
        if made is None:
            return alike
        left.remove(made)
        inputs += made.inputs
    return replace(alike, birth=alike.birth._replace(inputs=tuple(inputs)))


def _is_widened(birth: Birth) -> bool:
    return (
        birth.kernel == "_to_copy"
        and birth.dtype == "float32"
        and len(birth.inputs) == 1
        and birth.inputs[0][1] in HALVES
        and prod(birth.inputs[0][0]) == prod(birth.shape or ())
    )


def _is_promoted(birth: Birth) -> bool:
    types, narrower = [dtype for _, dtype in birth.inputs], _WIDER.get(birth.dtype, frozenset())
    if len(types) != _FACTORS or birth.dtype not in types or not narrower.intersection(types):
        return False
    (wide, _), (small, _) = sorted(birth.inputs, key=lambda each: each[1] == birth.dtype)
    return wide == birth.shape and prod(small) * _TIMES <= prod(wide) and goes_by_numbers(birth.kernel)


def _is_log_of_softmax(birth: Birth) -> bool:
    return (
        birth.kernel == "log" and birth.place is not None and _LOG_OF_SOFTMAX.search(birth.place.expression) is not None
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
    shapes = [birth.shape for _, birth in scene.births] + [one.shape for one in scene.held]
    told = (each for each in shapes if each is not None and len(each) == 3 and each[0] * each[1] == shape[0])
    return next((each[1] for each in told if each[1] > 1), 0)


# The kinds


def _expanded_copy(scene: Scene, alike: Alike) -> Cause | None:
    birth = alike.birth
    if birth.kernel not in COPIES or len(birth.inputs) < 1:
        return None
    words = birth.place.expression or birth.place.text if birth.place is not None else ""
    what, small = made_by(scene, alike), birth.inputs[0][0]
    if prod(small) >= prod(alike.shape):
        return None
    # What else has the shape is no copy of it, nor made of one: the scores that a mask is added to.
    dtype = birth.dtype
    if dtype not in alike.types:
        # It is gone, and what the same statement made of it alone is there: ``mask.expand(…).reshape(…).float() * -1e9``.
        dtype = next((one.dtype for one in made_of_it(scene, alike)), dtype)
    count = alike.types.count(dtype) if dtype == birth.dtype else 1
    size = count * bytes_of(alike.shape, dtype)
    alike = replace(alike, count=count, bytes=size, types=(dtype,) * count, birth=birth._replace(dtype=dtype))
    told = f"{what} expands {shape_words(small)} to {shape_words(alike.shape)} and copies it: {size_words(alike)}."
    if MULTIPLIES.search(words):
        remedy = (
            "`torch.einsum`, or `torch.bmm` with the expanded dimension among the rows, multiplies without the copy."
        )
    elif mask := _as_a_mask(scene, alike):
        # (`expand` of `preprocess_mask`, and `add_` of the plain kernel, ATen/native/transformers/attention.cpp.)
        remedy = f"Leave it as it is: {mask} broadcasts its mask itself, without a copy."
    elif _goes_into_attention(scene, alike) or (
        birth.place is not None and _HEADS.search(f"{birth.place.function} {birth.place.own_function} {words}")
    ):
        # (`pre_process_group_query_attention_input` of ATen/native/transformers/attention.cpp repeats them for the plain one.)
        remedy = (
            "Where `scaled_dot_product_attention` has FlashAttention (16 bits, no mask, Ampere or newer), `enable_gqa=True` "
            "takes fewer key and value heads as they are; its plain kernel repeats them itself."
        )
    elif birth.kernel == "repeat":
        padded = (1,) * (len(alike.shape) - len(small)) + small
        one_to_many = all(few in (1, many) for few, many in zip(padded, alike.shape, strict=True))
        reader = (reader_of_a_view(scene, alike) or _index_of(scene, alike)) if one_to_many else ""
        if not reader or _is_written_to(scene, alike):
            # What needs its rows in one piece would copy the view; and who writes to it needs all of it.
            return None
        remedy = f"With `.expand` it would be a view, which takes nothing: {reader} reads one as it is."
        told = f"{what} repeats {shape_words(small)} to {shape_words(alike.shape)}: {size_words(alike)}."
    elif (first := first_reader(scene, alike)) is not None and _NEEDS_ROWS.search(first[1].kernel):
        return None
    else:
        remedy = (
            "Leave it expanded (a view takes nothing): let the next operator broadcast, without reshaping it before."
        )
    return Cause("expanded_copy", told, remedy, alike.bytes)


def _is_written_to(scene: Scene, alike: Alike) -> bool:
    """Whether the program assigns to parts of the variable that gets it, or calls what works in place."""
    name = name_given(alike.birth.place.text) if alike.birth.place is not None else ""
    return bool(name) and scene.program.matches_any(
        re.compile(rf"\b{name}(?:\[[^=\n]*\]\s*[-+*/&|]?=(?!=)|\.[a-z]\w*_\()")
    )


def _goes_into_attention(scene: Scene, alike: Alike) -> bool:
    """Whether the variable that it is made for goes into fused attention: keys or values in which heads are repeated."""
    return bool(_calls_with(scene, alike, ("scaled_dot_product_attention",)))


def _as_a_mask(scene: Scene, alike: Alike) -> str:
    """The attention that takes it in as its mask, behind queries, keys and values; "" where none does."""
    for event, birth in scene.births:
        if event > alike.event and not birth.node and "scaled_dot_product" in birth.operator:
            shapes = [shape for shape, _ in birth.inputs]
            if alike.shape in shapes and alike.shape not in shapes[: len("qkv")]:
                return of_birth(scene, event, birth)
    return ""


def _index_of(scene: Scene, alike: Alike) -> str:
    """The calls that take it as an index for each number, which an expanded one is, too."""
    calls = _calls_with(scene, alike, _BY_INDEX) if alike.birth.dtype == "int64" else []
    return f"`{calls[0].statement.strip()}` ({calls[0].words})" if calls else ""


def _calls_with(scene: Scene, alike: Alike, called: Sequence[str]) -> list[Written]:
    """The statements with a call of one of these that mention the variable that it is made for."""
    name = name_given(statement_of(scene, alike))
    if not name:
        return []
    taken = re.compile(rf"\b{name}\b")
    return [call for each in called for call in scene.program.calls(each) if taken.search(call.statement)]


def _other(scene: Scene, alike: Alike) -> Cause | None:
    """What other operator makes much of little: no fault, and often the reason."""
    birth = alike.birth
    if birth.kernel == "embedding" and (rows := _looked_up_for_pairs(birth)):
        return _rows_for_pairs(scene, alike, rows)
    if birth.kernel in PRODUCTS or _ALWAYS_GROW.search(birth.kernel):
        return None
    if birth.dtype == "bool" or birth.kernel == "_to_copy":
        # What else has the shape was there before: who asks which numbers are positive has the numbers.
        alike = alone(scene, alike)
    if alike.bytes < scene.part_of_peak(4):
        return None
    if birth.kernel.startswith("upsample") and (enlarged := alone(scene, alike)).count:
        # (What is computed of an enlarged image has its size for that; where the image itself is gone, it is all there is.)
        alike = enlarged
    times = bytes_of(alike.shape, birth.dtype) // max(1, _given(birth))
    given = " and ".join(shape_words(one) for one, _ in birth.inputs[:2])
    if birth.inputs[0][0] == alike.shape:
        given = birth.inputs[0][1]
    remedy = "Work on a part at a time, or make it smaller before."
    if is_in_parts(scene, alike):
        remedy = "Fewer at a time take less."
    elif "svd" in birth.kernel and alike.shape[-1] == alike.shape[-2]:
        # (`torch.linalg.svd` makes all of U unless it is told not to.)
        few = (*alike.shape[:-1], min(birth.inputs[0][0][-2:]))
        remedy = f"`full_matrices=False` makes {shape_words(few)} of it."
    elif _REPEATS.search(birth.place.expression if birth.place is not None else "") and (
        product := product_with(scene, alike)
    ):
        remedy = (
            f"{product} needs no copies: with what is repeated among the rows of its other operand (`torch.einsum`, or a "
            "`view`), it multiplies with the small one as it is."
        )
    elif birth.kernel == "cat" and (linear := multiplied(scene, alike)):
        remedy = (
            f"{linear} is a linear layer: apply its weight's parts to the parts before they are paired, and add the results by "
            "broadcasting; or work on some of the rows at a time."
        )
    elif birth.place is not None and _HESSIAN.search(birth.place.expression):
        remedy = "`torch.autograd.functional.vhp` (or `hvp`) gives its product with a vector, and makes no matrix."
    elif birth.kernel == "im2col" and _is_multiplied_by_numbers(scene, alike):
        remedy = (
            "Smaller windows, or fewer channels before it, make it smaller; so does a part of the images at a time."
        )
    elif birth.kernel == "im2col":
        remedy = "Where the windows are multiplied with weights, `F.conv2d` does it without storing them."
    elif birth.kernel.startswith("upsample"):
        # (A library's layers are as they are.)
        ours = birth.place is None or birth.place.file == birth.place.own_file
        fewer = "A convolution to fewer channels before it, or a smaller size," if ours else "A smaller size"
        remedy = f"{fewer} makes it smaller."
        trains = bool(scene.spans(BACKWARD))
        if len(alike.shape) == _IMAGES and alike.shape[0] > 1 and (not trains or _are_classes(scene, alike)):
            own = ", each with a backward of its own," if trains else ""
            each = human(alike.bytes // alike.shape[0])
            remedy = f"One of the {alike.shape[0]} images at a time{own} makes {each} of it."
    return Cause(
        "grown_result",
        f"{made_by(scene, alike)} makes {shape_words(alike.shape)} from {given}, "
        f"{times} times as much: {size_words(alike)}.",
        remedy,
        alike.bytes,
        describes=True,
    )


def _diagonal(scene: Scene, alike: Alike) -> Cause | None:
    """``torch.diag(d) @ A``, told before all that has its shape."""
    product = taken_in_by(scene, alike, PRODUCTS.__contains__) if alike.birth.kernel == "diag_embed" else ""
    if not product:
        return None
    alike = alone(scene, alike)
    its = _born_there(scene, alike)
    highest, _ = scene.highest_without(its)
    size = max(alike.bytes, scene.report.peak.allocated - highest)
    if size < scene.part_of_peak(10):
        return None
    each = bytes_of(alike.shape, alike.birth.dtype)
    return Cause(
        "diagonal_matrix",
        f"{made_by(scene, alike)} makes {shape_words(alike.shape)}, zeros but for its diagonal: {human(each)}.",
        f"{product} scales rows or columns: `d[:, None] * A` (columns: `A * d`) does so without it, and the peak would be "
        f"about {human(highest)}.",
        size,
        describes=True,
    )


def _is_multiplied_by_numbers(scene: Scene, alike: Alike) -> bool:
    """Whether what computes with it first goes number by number: windows of which each has weights of its own. (A product may
    have it copied into one piece before.)"""
    size = prod(alike.shape)
    later = (
        birth for event, birth in scene.births if event > alike.event and not birth.node and birth.kernel not in COPIES
    )
    reader = next((one for one in later if any(prod(shape) == size for shape, _ in one.inputs)), None)
    return reader is not None and goes_by_numbers(reader.kernel)


def _looked_up_for_pairs(birth: Birth) -> int:
    """The rows of a table of which one is looked up for each pair of positions, or of nodes; 0 for what else is looked up."""
    shape, (table, *_rest) = birth.shape or (), (*(shape for shape, _ in birth.inputs), ())
    pairs = len(shape) == _BATCHED and shape[0] == shape[1] >= _PAIRS_FROM and len(table) == _FACTORS
    return table[0] if pairs and table[0] * _TIMES <= shape[0] * shape[1] else 0


def _rows_for_pairs(scene: Scene, alike: Alike, rows: int) -> Cause | None:
    if alike.bytes < scene.part_of_peak(4):
        return None
    count, _, width = alike.shape
    return Cause(
        "grown_result",
        f"{made_by(scene, alike)} looks up {width:,} numbers for each pair of {count:,} in {rows:,} rows: {size_words(alike)}.",
        "A product with the table's rows first, and its results looked up for each pair (`gather`), makes one number for each; "
        "once for all layers that share a table is less, too.",
        alike.bytes,
        describes=True,
    )


def _born_there(scene: Scene, alike: Alike) -> list[Allocation]:
    """All that one operator at one place has made."""
    births, made = scene.recording.logs[scene.device].births, (alike.birth.kernel, alike.birth.place)
    found = ((one, births.get(one.born)) for one in scene.timeline.allocations)
    return [one for one, birth in found if birth is not None and (birth.kernel, birth.place) == made]


def _are_classes(scene: Scene, alike: Alike) -> bool:
    """Whether its channels are the classes of a loss, of which there can't be fewer."""
    later = (birth for event, birth in scene.births if event > alike.event)
    return any("log_softmax" in one.kernel and one.shape == alike.shape for one in later)


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
