"""Settings that do nothing where they stand, or that cost memory without a word."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import MODULE, base, module_of, quoted
from gpumem_magic.devices.base import Birth
from gpumem_magic.owners.model import Held, size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTATION
from gpumem_magic.report.failure import failed_request, is_of_memory
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import MIB, counted, human, listed

# A table with so many times more rows than were looked up.
_TIMES = 8
_LARGE = 64 * MIB
# So many parts that are recomputed.
_PIECES = 3
_LOOKUPS = frozenset({"embedding_dense_backward", "_embedding_bag_dense_backward", "_embedding_bag_backward"})
_MODEL = "transformers.modeling_utils.PreTrainedModel"
# A program with this knows of it.
_CHECKPOINTS = re.compile(r"checkpointing|utils\.checkpoint")
# So much of all weights, in per cent, is nearly all.
_NEARLY = 90
# Weights of which one may ask why they are so many bytes.
_MANY_WEIGHTS = 1024 * MIB


def idle_checkpointing(scene: Scene) -> Iterator[Cause]:
    """Activation checkpointing that is switched on in a model that trains in evaluation mode, where libraries leave it out."""
    if not scene.idle_checkpointing or not scene.spans(BACKWARD) or scene.spans(RECOMPUTATION):
        return
    kept = size_of(scene.living_in(scene.moment, "activations"))
    name = min(scene.idle_checkpointing)
    yield Cause(
        "idle_checkpointing",
        f"Gradient checkpointing of `{name}` is on and does nothing, because `{name}` is in evaluation mode: {human(kept)} of "
        "activations are kept.",
        f"`{name}.train()` before training makes it work.",
        kept,
    )


def without_checkpointing(scene: Scene) -> Iterator[Cause]:
    """Memory ran out in a training of one of transformers' models, most of it for layers that could be recomputed."""
    models = [at for one in scene.held if one.kind == "parameter" for at in one.trail[:1] if _is_of_transformers(one)]
    if failed_request(scene.report) is None or not models or scene.program.matches_any(_CHECKPOINTS):
        return
    training = any(span.graph or span.failed for span in scene.spans(FORWARD)) and scene.holdings.optimized
    kept = scene.living_in(scene.moment, "activations")
    if not training or scene.spans(RECOMPUTATION) or 2 * size_of(kept) < scene.report.peak.allocated:
        return
    name = quoted(models[0].place)
    yield Cause(
        "without_checkpointing",
        f"The layers of {name} keep {human(size_of(kept))} of activations for backward.",
        f"`{models[0].place}.gradient_checkpointing_enable()` keeps each layer's input alone, and computes the rest once more.",
        size_of(kept),
        describes=True,
    )


def _is_of_transformers(one: Held) -> bool:
    """Whether one of transformers' models, which have a switch for it, has the parameter, in an object with a name."""
    return one.goes_through(_MODEL) and MODULE in one.trail[0].bases and quoted(one.trail[0].place).startswith("`")


def checkpointed_whole(scene: Scene) -> Iterator[Cause]:
    """A backward that recomputes everything in one piece, and so has at once what checkpointing was to save."""
    moment = scene.moment
    backward = next((one for one in scene.spans(BACKWARD) if scene.start_of(one) < moment <= scene.end_of(one)), None)
    if backward is None:
        return
    begin, end = scene.start_of(backward), scene.end_of(backward)
    pieces = [one for one in scene.spans(RECOMPUTATION) if begin <= scene.start_of(one) < end]
    if len(pieces) != 1:
        return
    kept = scene.living_in(moment, "activations")
    again = [one for one in kept if scene.start_of(pieces[0]) <= one.born < scene.end_of(pieces[0])]
    if 10 * size_of(again) < 8 * size_of(kept) or size_of(again) < scene.part_of_peak(3):
        return
    calls = scene.program.calls("checkpoint")
    # The cell's own come first.
    where = f" (`{calls[0].shown}`, {calls[0].words})" if calls else ""
    yield Cause(
        "checkpointed_whole",
        f"Backward recomputes everything in one piece{where}: {human(size_of(again))} of activations at once, as many as without "
        "checkpointing.",
        "Checkpoint its layers one by one (of an `nn.Sequential`, `checkpoint_sequential(model, segments, x)`): backward then "
        "has those of one at a time.",
        size_of(again),
    )


def checkpointed_for_nothing(scene: Scene) -> Iterator[Cause]:
    """Parts that keep nothing for backward but their inputs, which checkpointing keeps, too: a linear layer each."""
    begin = next((scene.start_of(one) for one in scene.spans(BACKWARD)), None)
    pieces = [(scene.start_of(one), scene.end_of(one)) for one in scene.spans(RECOMPUTATION)]
    calls = scene.program.calls("checkpoint")
    if begin is None or len(pieces) < _PIECES or not calls:
        return
    kept = [one for one in scene.timeline.live_at(begin) if scene.labels[one.index].category == "activations"]
    again = [one for one in scene.timeline.allocations if any(start <= one.born < end for start, end in pieces)]
    births = scene.recording.logs[scene.device].births
    between = [one for one in kept if (birth := births.get(one.born)) is not None and _is_checkpointed(birth)]
    if size_of(kept) < scene.part_of_peak(4) or 10 * size_of(again) > size_of(kept):
        return
    if 2 * size_of(between) < size_of(kept):
        # Most is kept by what is not checkpointed.
        return
    yield Cause(
        "checkpointed_for_nothing",
        f"Checkpointing saves nothing here (`{calls[0].shown}`, {calls[0].words}): it keeps each part's input, "
        f"{human(size_of(kept))} in all, and without it a part would keep nothing else.",
        "Checkpoint several layers in one part: of each only the first one's input is kept.",
        size_of(kept),
    )


def _is_checkpointed(birth: Birth) -> bool:
    """Whether a part that is checkpointed made it."""
    return birth.place is not None and "checkpoint" in birth.place.text


def wide_inference(scene: Scene) -> Iterator[Cause]:
    """A large model that only runs forward, with weights of 32 bits."""
    if scene.spans(BACKWARD, OPTIMIZER) or not scene.spans(FORWARD):
        return
    weights = scene.living_in(scene.moment, "parameters")
    addresses = {one.address for one in weights}
    wide = [
        one for one in scene.held if one.address in addresses and one.dtype == "float32" and one.kind == "parameter"
    ]
    error = scene.report.error
    if error is not None and not is_of_memory(error):
        # It may have failed before it came to train.
        return
    crowded = error is not None or 2 * scene.report.peak.allocated >= (scene.report.device.capacity or 0)
    # (Elsewhere it is worth a word where there is little else.)
    if size_of(wide) < (scene.part_of_peak(2) if crowded else max(_MANY_WEIGHTS, 3 * scene.report.peak.allocated // 4)):
        return
    name, others = _models(wide)
    yield Cause(
        "wide_inference",
        f"`{name}`{others} {'run' if others else 'runs'} without training in float32: {'their' if others else 'its'} weights "
        f"take {human(size_of(wide))}{' together' if others else ''}.",
        f"`{name}.to(torch.bfloat16)`{' and so on for each' if others else ''}, or `dtype=torch.bfloat16` where "
        f"{'they are' if others else 'it is'} loaded, halves them.",
        size_of(wide) // 2,
    )


def _models(weights: Sequence[Held]) -> tuple[str, str]:
    """The model that has most of these, and `` and 7 others`` where it does not have nearly all."""
    sizes = Counter[str]()
    for one in weights:
        sizes[module_of(one)] += one.size
    if not sizes:
        return "the model", ""
    name, most = sizes.most_common(1)[0]
    more = len(sizes) - 1
    return name, "" if _NEARLY * sizes.total() <= 100 * most else f" and {counted(more, 'other')}"


def autocast_copies(scene: Scene) -> Iterator[Cause]:
    """The 16-bit copies of weights that autocast makes, and keeps until its block ends or backward has used them."""
    copies = scene.living_in(scene.moment, "autocast_copies")
    if size_of(copies) < scene.part_of_peak(10):
        return
    births = scene.recording.logs[scene.device].births
    dtype = next((birth.dtype for one in copies if (birth := births.get(one.born)) is not None), "")
    name, others = _models([one for one in scene.held if one.kind == "parameter"])
    trains = bool(scene.spans(BACKWARD))
    convert = f"to(torch.{dtype})" if dtype else "half()"
    yield Cause(
        "autocast_copies",
        f"autocast keeps a {dtype or '16-bit'} copy of each weight of `{name}`{others} beside the float32 one, until its block "
        f"ends{' and backward has run' if trains else ''}: {human(size_of(copies))} in {counted(len(copies), 'tensor')}.",
        f"Where nothing is trained, `{name}.{convert}`{' and so on for each' if others else ''} without autocast has the "
        "16-bit weights only."
        if not trains
        else "It is what mixed precision costs; `cache_enabled=False` makes a copy for each use instead.",
        size_of(copies),
    )


class _Lookup(NamedTuple):
    """The gradient of a table: its bytes, its birth, the table's name ("": unknown), and how many rows were looked up at most."""

    size: int
    birth: Birth
    table: str
    read: int

    @property
    def rows(self) -> int:
        return (self.birth.shape or (0,))[0]


def dense_lookup_gradient(scene: Scene) -> Iterator[Cause]:
    """The gradients of huge embeddings, of which a step looks up a few rows; also one that memory ran out for."""
    found = sorted(_of_lookups(scene), key=lambda each: (-each.size, each.table))
    size = sum(each.size for each in found)
    if not found or found[0].size < _LARGE or size < scene.part_of_peak(10):
        return
    place = found[0].birth.place
    line = f" (line {place.own_line})" if place is not None and place.own_file == scene.recording.own_file else ""
    names = [each.table for each in found if each.table]
    read = max(each.read for each in found)
    if len(found) == 1:
        what, rows = f"The gradient of {quoted(names[0]) if names else 'an embedding'}{line} has", f"{found[0].rows:,}"
        for_these = f"for {read:,} that were looked up"
    else:
        which = listed(list(map(quoted, names[:3]))) if len(names) == len(found) <= 3 else f"{len(found)} embeddings"
        what, rows = (
            f"The gradients of {which}{line} have",
            listed([f"{rows:,}" for rows in dict.fromkeys(each.rows for each in found)]),
        )
        for_these = f"for at most {read:,} that were looked up in each"
    yield Cause(
        "dense_lookup_gradient",
        f"{what} all {rows} rows, {human(size)}, {for_these}; an optimizer's states are as large.",
        "`sparse=True` of `nn.Embedding` with `torch.optim.SparseAdam` or SGD has gradients of the rows looked up only.",
        size,
    )


def _of_lookups(scene: Scene) -> Iterator[_Lookup]:
    """Those at the moment, and that of the request that failed."""
    births, error = scene.recording.logs[scene.device].births, scene.report.error
    living = (one for one in scene.timeline.live_at(scene.moment) if one.born in births)
    known: list[tuple[int, Birth, Allocation | None]] = [(one.size, births[one.born], one) for one in living]
    if error is not None and error.wanted and scene.failed is not None:
        known.append((error.wanted, scene.failed, None))
    for size, birth, gradient in known:
        if birth.kernel not in _LOOKUPS or birth.shape is None:
            continue
        read = max((prod(shape) for shape, dtype in birth.inputs if dtype in ("int64", "int32")), default=0)
        if read and birth.shape[0] >= _TIMES * read:
            yield _Lookup(size, birth, _table_of(scene, birth.shape, gradient), read)


def _table_of(scene: Scene, shape: tuple[int, ...], gradient: Allocation | None) -> str:
    if gradient is None:
        tables = {base(one) for one in scene.held if one.kind == "parameter" and one.shape == shape}
        return tables.pop() if len(tables) == 1 else ""
    kept_by = scene.tensors.keeper(gradient, scene.moment)[1] if scene.tensors is not None else ""
    return kept_by.removesuffix(".grad") or scene.labels[gradient.index].name or ""


def convolution_scratch(scene: Scene) -> Iterator[Cause]:
    """A good part of the moment is what cuDNN works with, which its search for the fastest way makes larger."""
    origins = scene.recording.logs[scene.device].origins
    used = [
        one
        for one in scene.timeline.live_at(scene.moment)
        if origins.get(one.born) in ("estimate", "convolution_scratch")
    ]
    estimated = any(origins.get(one.born) == "estimate" for one in used)
    if not scene.searches_convolutions or size_of(used) < scene.part_of_peak(5):
        return
    yield Cause(
        "convolution_scratch",
        f"cuDNN works with {human(size_of(used))} beside the convolution's tensors{' (an estimate)' if estimated else ''}.",
        "`torch.backends.cudnn.benchmark = False` lets it choose ways that need less.",
        size_of(used),
    )
