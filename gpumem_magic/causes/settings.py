"""Settings that do nothing where they stand, or that cost memory without a word."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from gpumem_magic.causes.model import Scene, requested
from gpumem_magic.causes.places import module_of
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTATION
from gpumem_magic.report.failure import is_of_memory
from gpumem_magic.report.model import Cause
from gpumem_magic.units import MIB, counted, human

# A table with so many times more rows than were looked up.
_TIMES = 8
_LARGE = 64 * MIB
# So many parts that are recomputed.
_PIECES = 3
_LOOKUPS = frozenset({"embedding_dense_backward", "_embedding_bag_dense_backward"})
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
    if size_of(kept) < scene.part_of_peak(4) or 10 * size_of(again) > size_of(kept):
        return
    yield Cause(
        "checkpointed_for_nothing",
        f"Checkpointing saves nothing here (`{calls[0].shown}`, {calls[0].words}): it keeps each part's input, "
        f"{human(size_of(kept))} in all, and without it a part would keep nothing else.",
        "Checkpoint several layers in one part: of each only the first one's input is kept.",
        size_of(kept),
    )


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
    name = module_of(wide[0])
    yield Cause(
        "wide_inference",
        f"`{name}` runs without training in float32: its weights take {human(size_of(wide))}.",
        f"`{name}.to(torch.bfloat16)`, or `dtype=torch.bfloat16` where it is loaded, halves them.",
        size_of(wide) // 2,
    )


def autocast_copies(scene: Scene) -> Iterator[Cause]:
    """The 16-bit copies of weights that autocast makes, and keeps until its block ends or backward has used them."""
    copies = scene.living_in(scene.moment, "autocast_copies")
    if size_of(copies) < scene.part_of_peak(10):
        return
    births = scene.recording.logs[scene.device].births
    dtype = next((birth.dtype for one in copies if (birth := births.get(one.born)) is not None), "")
    name = next((module_of(one) for one in scene.held if one.kind == "parameter"), "the model")
    trains = bool(scene.spans(BACKWARD))
    convert = f"to(torch.{dtype})" if dtype else "half()"
    yield Cause(
        "autocast_copies",
        f"autocast keeps a {dtype or '16-bit'} copy of each weight of `{name}` beside the float32 one, until its block ends"
        f"{' and backward has run' if trains else ''}: {human(size_of(copies))} in {counted(len(copies), 'tensor')}.",
        f"Where nothing is trained, `{name}.{convert}` without autocast has the 16-bit weights only."
        if not trains
        else "It is what mixed precision costs; `cache_enabled=False` makes a copy for each use instead.",
        size_of(copies),
    )


def dense_lookup_gradient(scene: Scene) -> Iterator[Cause]:
    """The gradient of a huge embedding, of which a step looks up a few rows."""
    births = scene.recording.logs[scene.device].births
    for one in sorted(scene.timeline.live_at(scene.moment), key=requested, reverse=True):
        birth = births.get(one.born)
        if (
            birth is None
            or birth.kernel not in _LOOKUPS
            or birth.shape is None
            or one.size < max(_LARGE, scene.part_of_peak(10))
        ):
            continue
        rows = birth.shape[0]
        read = max((prod(shape) for shape, dtype in birth.inputs if dtype in ("int64", "int32")), default=0)
        if not read or rows < _TIMES * read:
            continue
        place = birth.place
        line = f" (line {place.own_line})" if place is not None and place.own_file == scene.recording.own_file else ""
        kept_by = scene.tensors.keeper(one, scene.moment)[1] if scene.tensors is not None else ""
        name = kept_by.removesuffix(".grad") or scene.labels[one.index].name
        what = f"`{name}`" if name else "an embedding"
        yield Cause(
            "dense_lookup_gradient",
            f"The gradient of {what}{line} has all {rows:,} rows, {human(one.size)}, for {read:,} that were looked up; an "
            "optimizer's states are as large.",
            "`sparse=True` of `nn.Embedding` with `torch.optim.SparseAdam` or SGD has gradients of the rows looked up only.",
            one.size,
        )
        return


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
