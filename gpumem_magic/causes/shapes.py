"""What is larger than necessary because of its type or shape: float64, one dominating layer, attention scores."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod

from gpumem_magic.causes.alike import births_alive, bytes_of
from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import quoted
from gpumem_magic.causes.remedies import WITHOUT_SCORES
from gpumem_magic.devices.base import Birth
from gpumem_magic.owners.model import OF_FUNCTION, size_of
from gpumem_magic.recording.model import FORWARD, KEPT_BY_LIST, KEPT_BY_NAME
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import counted, human

_WIDE = {"float64": "float32", "complex128": "complex64"}
_ON_PURPOSE = re.compile(r"float64|\.double\(|complex128|torch\.double|DoubleTensor|set_default_dtype")
_PRODUCTS = frozenset({"bmm", "baddbmm", "matmul", "mm", "unsafe_view", "einsum"})
_INDICES = frozenset({"sort", "argsort", "topk", "nonzero", "randperm", "kthvalue", "max_pool2d_with_indices"})
# What a loss saves is no layer's.
_LOSS = re.compile(r"loss|log_softmax|cross_entropy|kl_div")
_ASKED_FOR = re.compile(r"\boutput_attentions\s*=\s*True")
# What `nn.MultiheadAttention` runs in evaluation, without gradients.
_IN_ONE = "native_multi_head_attention"
_ONLY_PLAIN = re.compile(r"sdpa_kernel\(\s*\[?\s*(?:\w+\.)*SDPBackend\.MATH\s*\]?\s*\)")
# Scores of so many layers are kept by something.
_LAYERS = 3
# Square scores below this are small change.
_LEAST_LENGTH = 128


def wide_numbers(scene: Scene) -> Iterator[Cause]:
    """Tensors of float64: in a program that never asked for it, NumPy's default came along; in another they are told where they
    are most of the peak."""
    if _ON_PURPOSE.search(scene.typed):
        yield from _double(scene)
        return
    wide = [one for one in scene.held if one.dtype in _WIDE and one.kind != "workspace"]
    if size_of(wide) < scene.part_of_peak(100):
        return
    first = wide[0]
    name = first.place
    at_the_peak = _bytes_of_types(scene)[first.dtype]
    if at_the_peak > 2 * size_of(wide):
        # What meets it becomes wide, too.
        yield Cause(
            "wide_numbers",
            f"`{name}` is in {first.dtype}, and so is what is computed with it: {human(at_the_peak)} of the peak's "
            f"{human(scene.report.peak.allocated)}, twice what {_WIDE[first.dtype]} takes.",
            f"`{name.partition('.')[0].partition('[')[0]}` as {_WIDE[first.dtype]} (`.float()`, or `dtype=` where it is made) "
            f"saves up to {human(at_the_peak // 2)}.",
            at_the_peak // 2,
        )
        return
    yield Cause(
        "wide_numbers",
        f"{human(size_of(wide))} is in {first.dtype}, chiefly `{name}`: twice what {_WIDE[first.dtype]} takes.",
        f"`{name.partition('.')[0].partition('[')[0]}` as {_WIDE[first.dtype]} (`.float()`, or `dtype=` where it is made) "
        f"saves {human(size_of(wide) // 2)}.",
        size_of(wide) // 2,
    )


def _double(scene: Scene) -> Iterator[Cause]:
    """A model in it: somebody who made both fit may not know what it costs."""
    if not any(one.kind == "parameter" and one.dtype in _WIDE for one in scene.held):
        return
    wide = _bytes_of_types(scene)
    dtype = max(_WIDE, key=lambda one: wide[one])
    if wide[dtype] < scene.part_of_peak(2):
        return
    at = scene.program.place_of(_ON_PURPOSE)
    yield Cause(
        "double_precision",
        f"{human(wide[dtype])} of the peak's {human(scene.report.peak.allocated)} are {dtype}{at}, twice what {_WIDE[dtype]} "
        "takes.",
        f"Where {_WIDE[dtype]} is enough, have both the data and the model in it (`.float()`): about "
        f"{human(wide[dtype] // 2)} less.",
        wide[dtype] // 2,
        describes=True,
    )


def _bytes_of_types(scene: Scene) -> Counter[str]:
    """Bytes of each type at the moment."""
    births = scene.recording.logs[scene.device].births
    types = {one.address: one.dtype for one in scene.held}
    wide = Counter[str]()
    for one in scene.timeline.live_at(scene.moment):
        birth = births.get(one.born)
        wide[types.get(one.address, "") if birth is None or birth.shape is None else birth.dtype] += one.size
    return wide


def wide_indices(scene: Scene) -> Iterator[Cause]:
    """Indices of many numbers, at 8 bytes each, that a name keeps."""
    births = scene.recording.logs[scene.device].births
    if scene.tensors is None:
        return
    for one in sorted(scene.timeline.live_at(scene.moment), key=lambda each: -each.size):
        birth = births.get(one.born)
        if one.size < scene.part_of_peak(10):
            return
        if birth is None or birth.dtype != "int64" or birth.kernel not in _INDICES:
            continue
        facts, (kept, place) = scene.tensors.facts(one), scene.tensors.keeper(one, scene.moment)
        if kept not in (KEPT_BY_NAME, KEPT_BY_LIST):
            continue
        remedy = f"Where it only indexes, `{place}.int()` in its place takes half"
        if "sort" in birth.kernel:
            remedy += "; where only the first ones are read, `topk` makes no others"
        yield Cause(
            "wide_indices",
            f"`{facts.expression or facts.statement}` (line {facts.line}) gives an index of 8 bytes (int64) for each number, "
            f"kept by `{place}`: {human(one.size)}.",
            f"{remedy}.",
            one.size // 2,
            describes=True,
        )
        return


def dominating_layer(scene: Scene) -> Iterator[Cause]:
    """Activations are much of the peak, and one layer among several saved most of them."""
    by_layer = Counter[str]()
    saved = _saved(scene)
    given = {one.address: bytes_of(one.shape, one.dtype) for one in scene.saved}
    for one, layer, _ in saved:
        # Of data from which batches are taken, a layer keeps the batch.
        is_data = scene.labels[one.index].category == "inputs"
        by_layer[layer] += min(one.size, given[one.address]) if is_data else one.size
    total = sum(by_layer.values())
    named = [layer for layer in by_layer if layer]
    if total < scene.part_of_peak(4) or len(named) < 3:
        return
    layer, most = max(((name, by_layer[name]) for name in named), key=lambda pair: pair[1])
    if 2 * most < total or _are_frozen(scene, named):
        return
    inputs = {one.address for one in scene.saved if one.given}
    own = sum(one.size for one, name, _ in saved if name == layer and _is_made_in(scene, one, layer))
    its_input = sum(one.size for one, name, _ in saved if name == layer and one.address in inputs)
    yield Cause(
        "dominating_layer",
        f"One layer keeps most of the activations for backward: `{_as_program_has(scene, layer)}`, with the operations after it, "
        f"{human(most)} of {human(total)}.",
        "Activation checkpointing of that layer (`torch.utils.checkpoint`), or a smaller input to it, saves the most."
        if 2 * own >= most
        # What a checkpoint is given it keeps.
        else "Most of that is its input: a smaller one saves the most, or activation checkpointing (`torch.utils.checkpoint`) of "
        "a block that begins before it and ends behind it."
        if 2 * its_input >= most
        else "Activation checkpointing (`torch.utils.checkpoint`) of a block with that layer and these operations, or a smaller "
        "input to it, saves the most.",
        most,
    )


def _is_made_in(scene: Scene, one: Allocation, layer: str) -> bool:
    trace = scene.recording.modules
    number = trace.of(scene.device, one)
    return number is not None and trace.names[number].path.partition(".")[2] == layer


def _as_program_has(scene: Scene, layer: str) -> str:
    """``tr.net.3`` for a layer ``3``, where one variable leads to it."""
    named = [one.place for one in scene.held if one.kind == "parameter"]
    # (A function's own is ``local `net.3.weight` of train()``.)
    named = [place if (own := OF_FUNCTION.fullmatch(place)) is None else own["variable"] for place in named]
    held = [place.rpartition(".")[0] for place in named]
    places = {place for place in held if place == layer or place.endswith(f".{layer}")}
    return places.pop() if len(places) == 1 else layer


def attention_scores(scene: Scene) -> Iterator[Cause]:
    """Square tensors, a row and a column for every token, that softmax and its neighbours saved."""
    # What softmax saved, and what has the same shape beside it (dropout's, the masked scores). Scores are multiplied with the
    # values afterwards: a softmax over the classes of an image's pixels is none.
    births = scene.recording.logs[scene.device].births
    weighed = {prod(one.shape) for one in scene.saved if not _PRODUCTS.isdisjoint(one.operations)}
    # (Where the values need no gradient, the product saves no scores.)
    weighed |= {count for count, _ in _square_factors(births.values())}
    scored = {
        (prod(one.shape), one.shape[-1])
        for one in scene.saved
        if one.shape and "softmax" in one.operations and prod(one.shape) in weighed
    }
    scores = [
        (one, shape[-1])
        for one, _, shape in _saved(scene)
        if len(shape) in (3, 4) and shape[-1] == shape[-2] >= _LEAST_LENGTH and (prod(shape), shape[-1]) in scored
    ]
    sizes = [one.size for one, _ in scores]
    length = scores[0][1] if scores else 0
    birth = next((births[one.born] for one, _ in scores if one.born in births), None)
    # (Where memory ran out, the last graph that a backward looked at may have been of another batch.)
    least, seen = scene.part_of_peak(10), bool(scene.saved) and scene.report.error is None
    if sum(sizes) < least and (made := _scores_that_failed(scene) or (None if seen else _scores_at(scene))) is not None:
        birth, sizes, length = made
    where, remedy = ("", WITHOUT_SCORES) if birth is None else _written(scene, birth)
    if not sizes or sum(sizes) < least:
        return
    if birth is not None and (keeper := _keeper_of_scores(scene, birth, len(sizes))):
        remedy = (
            f"{keeper} keeps them: of each only what is needed (its mean over the heads), or on the host (`.cpu()`), takes less. "
            f"Where nothing reads them, {remedy[0].lower() if not remedy.startswith('`') else remedy[0]}{remedy[1:]}"
        )
    yield Cause(
        "attention_scores",
        f"Attention scores are stored in full{where}: {human(sum(sizes))} in {counted(len(sizes), 'tensor')} of {length} x "
        f"{length} for each head.",
        remedy,
        sum(sizes),
    )


def _keeper_of_scores(scene: Scene, birth: Birth, count: int) -> str:
    """The variable that has those of several layers at the end, where no graph does; "" where there is none."""
    births = scene.recording.logs[scene.device].births
    if count < _LAYERS or any(one.graph for one in scene.spans(FORWARD)):
        return ""
    its = [
        one
        for one in scene.held
        if (made := births.get(scene.alive[one.address].born)) is not None
        and (made.place, made.shape) == (birth.place, birth.shape)
    ]
    roots = {scene.holdings.roots[one.roots[0]].name for one in its}
    return quoted(roots.pop()) if len(its) >= _LAYERS and len(roots) == 1 else ""


def _scores_that_failed(scene: Scene) -> tuple[Birth, list[int], int] | None:
    """The same where the request that failed was for the first of them, or for what is made of them before they are multiplied
    with the values: square, of an attention by its name."""
    birth = scene.failed
    if birth is None or birth.place is None:
        return None
    shape, words = birth.shape or (), f"{birth.operator} {birth.place.expression} {birth.place.function}"
    if len(shape) not in (3, 4) or not shape[-1] == shape[-2] >= _LEAST_LENGTH or "attention" not in words.lower():
        return None
    alike = [size for _, size, one in births_alive(scene) if one.shape and one.shape[-2:] == shape[-2:]]
    births = scene.recording.logs[scene.device].births.values()
    products = (one.shape for one in births if one.kernel in _PRODUCTS and one.shape is not None)
    made = birth.kernel in _PRODUCTS or any(prod(one) == prod(shape) for one in products)
    return (birth, alike, shape[-1]) if made else None


def _square_factors(births: Iterable[Birth]) -> set[tuple[int, int]]:
    """How many numbers are in square tensors that products took, and their lengths."""
    return {
        (prod(shape), shape[-1])
        for birth in births
        # (A backward multiplies the scores' gradients, whatever reads the scores.)
        if birth.kernel in _PRODUCTS and not birth.node
        for shape, _ in birth.inputs
        if len(shape) >= 2 and shape[-1] == shape[-2] >= _LEAST_LENGTH
    }


def _scores_at(scene: Scene) -> tuple[Birth, list[int], int] | None:
    """Where no backward looked at a graph: the softmax over square tensors that a product takes up, the sizes of all tensors of
    that shape at the moment, and the length."""
    births = scene.recording.logs[scene.device].births
    weighed = _square_factors(births.values())
    found: dict[tuple[int, int], Birth] = {}
    for birth in births.values():
        shape = birth.shape or (0,)
        key = prod(shape), shape[-1]
        by_softmax = "softmax" in birth.kernel and key in weighed
        by_attention = birth.operator == _IN_ONE and shape[-2:] == (shape[-1],) * 2 and shape[-1] >= _LEAST_LENGTH
        if (by_softmax or by_attention) and len(shape) in (3, 4) and not birth.node:
            found[key] = birth
    best: tuple[Birth, list[int], int] | None = None
    for (count, length), birth in found.items():
        sizes = [
            one.size
            for one in scene.timeline.live_at(scene.moment)
            if (made := births.get(one.born)) is not None
            and made.shape is not None
            and prod(made.shape) == count
            and made.shape[-2:] == (length, length)
        ]
        if sizes and (best is None or sum(sizes) > sum(best[1])):
            best = birth, sizes, length
    return best


def _written(scene: Scene, birth: Birth) -> tuple[str, str]:
    """Where the scores are made, and what stores none there."""
    place = birth.place
    if place is None:
        return "", WITHOUT_SCORES
    line = f"line {place.own_line}" if place.own_file == scene.recording.own_file else ""
    at = f" (`{place.expression}`{f', {line}' if line else ''})" if place.expression else f" ({line})" if line else ""
    if birth.operator in ("multi_head_attention_forward", _IN_ONE):
        return at, "`need_weights=False` in the call of `nn.MultiheadAttention` never stores them."
    if birth.why or "scaled_dot_product_attention" in f"{birth.operator} {place.expression}":
        if (asked := _ONLY_PLAIN.search(scene.typed)) is not None:
            return (
                at,
                f"`{asked[0]}` asks for PyTorch's plain kernel: without it, a fused one is taken, which stores none.",
            )
        reason = birth.why or (
            "they want inputs of four dimensions (batch, heads, length, features), and most of them 16-bit numbers"
        )
        return at, f"PyTorch took its plain kernel here, and the fused ones store none: {reason}."
    if "eager" in place.function:
        if _ASKED_FOR.search(scene.typed):
            return at, '`output_attentions=True` asks for them: without it, `attn_implementation="sdpa"` stores none.'
        return at, '`attn_implementation="sdpa"`, where the model is loaded or made, never stores them.'
    return at, WITHOUT_SCORES


def _are_frozen(scene: Scene, named: Sequence[str]) -> bool:
    """Whether nearly all parameters are in other layers than these: frozen ones, of which the graph names none.

    What those saved stands under the trained layer before them (an adapter of LoRA), which then says nothing.
    """
    there = [one for one in scene.timeline.live_at(scene.saved_at) if scene.labels[one.index].category == "parameters"]
    ours = [one for one in there if (scene.labels[one.index].name or "").rpartition(".")[0] in named]
    return 10 * size_of(ours) < size_of(there)


def _saved(scene: Scene) -> list[tuple[Allocation, str, tuple[int, ...]]]:
    """What the first backward's graph kept: the allocation, its layer ("" where unknown) and its shape."""
    live = scene.timeline.live_at(scene.saved_at) if scene.saved else ()
    allocations = {(scene.device, one.address): one for one in live}
    found = []
    for one in scene.saved:
        allocation = allocations.get((one.device, one.address))
        if allocation is not None and scene.labels[allocation.index].category not in ("parameters", "buffers"):
            is_loss = all(_LOSS.search(operation) for operation in one.operations)
            weight = None if one.parameter is None or is_loss else allocations.get(one.parameter)
            name = None if weight is None else scene.labels[weight.index].name
            found.append((allocation, (name or "").rpartition(".")[0], one.shape))
    return found
