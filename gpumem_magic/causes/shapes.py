"""What is larger than necessary because of its type or shape: float64, one dominating layer, attention scores."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from math import prod

from gpumem_magic.causes.model import Scene
from gpumem_magic.owners.model import size_of
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import counted, human

_WIDE = {"float64": "float32", "complex128": "complex64"}
_ON_PURPOSE = re.compile(r"float64|\.double\(|complex128|torch\.double|DoubleTensor|set_default_dtype")
_PRODUCTS = frozenset({"bmm", "baddbmm", "matmul", "mm", "unsafe_view", "einsum"})
# What a loss saves is no layer's.
_LOSS = re.compile(r"loss|log_softmax|cross_entropy|kl_div")
# Square scores below this are small change.
_LEAST_LENGTH = 128


def wide_numbers(scene: Scene) -> Iterator[Cause]:
    """Tensors of float64 in a program that never asked for it: NumPy's default came along."""
    if _ON_PURPOSE.search(scene.typed):
        return
    wide = [one for one in scene.held if one.dtype in _WIDE and one.kind != "workspace"]
    if size_of(wide) < scene.part_of_peak(100):
        return
    first = wide[0]
    name = first.place
    yield Cause(
        "wide_numbers",
        f"{human(size_of(wide))} is in {first.dtype}, chiefly `{name}`: twice what {_WIDE[first.dtype]} takes.",
        f"`{name.partition('.')[0].partition('[')[0]}` as {_WIDE[first.dtype]} (`.float()`, or `dtype=` where it is made) "
        f"saves {human(size_of(wide) // 2)}.",
        size_of(wide) // 2,
    )


def dominating_layer(scene: Scene) -> Iterator[Cause]:
    """Activations are much of the peak, and one layer among several saved most of them."""
    by_layer = Counter[str]()
    saved = _saved(scene)
    for one, layer, _ in saved:
        by_layer[layer] += one.size
    total = sum(by_layer.values())
    named = [layer for layer in by_layer if layer]
    if total < scene.part_of_peak(4) or len(named) < 3:
        return
    layer, most = max(((name, by_layer[name]) for name in named), key=lambda pair: pair[1])
    if 2 * most < total:
        return
    yield Cause(
        "dominating_layer",
        f"One layer saves most of the activations: `{layer}`, with the operations after it, keeps {human(most)} "
        f"of {human(total)} for backward.",
        "Activation checkpointing of that layer (`torch.utils.checkpoint`), or a smaller input to it, saves the most.",
        most,
    )


def attention_scores(scene: Scene) -> Iterator[Cause]:
    """Square tensors, a row and a column for every token, that softmax and its neighbours saved."""
    # What softmax saved, and what has the same shape beside it (dropout's, the masked scores). Scores are multiplied with the
    # values afterwards: a softmax over the classes of an image's pixels is none.
    weighed = {prod(one.shape) for one in scene.saved if not _PRODUCTS.isdisjoint(one.operations)}
    shapes = {one.shape for one in scene.saved if "softmax" in one.operations and prod(one.shape) in weighed}
    scores = [
        (one, shape[-1])
        for one, _, shape in _saved(scene)
        if len(shape) in (3, 4) and shape[-1] == shape[-2] >= _LEAST_LENGTH and shape in shapes
    ]
    total = size_of(one for one, _ in scores)
    if total < scene.part_of_peak(10):
        return
    length = scores[0][1]
    yield Cause(
        "attention_scores",
        f"Attention scores are stored in full: {human(total)} in {counted(len(scores), 'tensor')} of {length} x "
        f"{length} for each head.",
        '`torch.nn.functional.scaled_dot_product_attention` (`attn_implementation="sdpa"`) never stores them.',
        total,
    )


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
