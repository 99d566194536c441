"""Layers that keep much for backward, where a file's stacks are all that is known: each line of theirs has a block for each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from gpumem_magic.causes.forwards_by_stacks import after_backwards, go_backward
from gpumem_magic.causes.model import WORTH, Scene
from gpumem_magic.causes.stack_loops import loops_of
from gpumem_magic.owners.model import size_of
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.model import Frame
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human

# Fewer are no stack of layers; and of all that is kept for backward, so much of ten parts is theirs.
_LAYERS, _MOST_OF_TEN = 4, 7
# That is a part of the peak, at least one in so many.
_PART = 3
_TURNS = 2
_CHECKPOINTS = "checkpoint.py"


def layers_by_stacks(scene: Scene) -> Iterator[Cause]:
    """A good part of the peak is what layers that are alike saved in a forward that goes backward."""
    events = scene.recording.logs[scene.device].events
    begun = after_backwards(scene)
    kept = [
        one for one in scene.living_in(scene.moment, "activations") if one.born >= begun and events[one.born].frames
    ]
    if size_of(kept) < max(WORTH, scene.part_of_peak(_PART)) or not go_backward(scene, kept):
        return
    by_stack: dict[tuple[Frame, ...], list[Allocation]] = defaultdict(list)
    for one in kept:
        by_stack[events[one.born].frames].append(one)
    if any(frame.filename.endswith(_CHECKPOINTS) for at in by_stack for frame in at):
        return
    # (A loop of the program's has its own.)
    if any(len(one.between(kept[0].born + 1, kept[-1].born).begins) >= _TURNS for one in loops_of(scene)):
        return
    sizes = Counter[int]()
    for its in by_stack.values():
        sizes[len(its)] += size_of(its)
    # How many layers there are: as many as most stacks have blocks, or have several times.
    covered = {
        layers: sum(size for count, size in sizes.items() if count % layers == 0)
        for layers in sizes
        if layers >= _LAYERS
    }
    layers = max(covered, key=lambda count: (covered[count], count), default=0)
    if not layers or 10 * covered[layers] < _MOST_OF_TEN * size_of(kept):
        return
    yield Cause(
        "repeated_modules",
        f"{layers} layers that are alike keep {human(covered[layers])} for backward, {human(covered[layers] // layers)} each.",
        "Activation checkpointing (`model.gradient_checkpointing_enable()` in transformers, else "
        "`torch.utils.checkpoint.checkpoint` for each layer) keeps what each is given, and computes the rest again in backward.",
        covered[layers],
        describes=True,
    )
