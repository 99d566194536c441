"""What runs in float32 in a program that uses autocast, because its block has ended by then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from gpumem_magic.causes.alike import HALVES, made_at
from gpumem_magic.causes.model import WORTH, Scene
from gpumem_magic.devices.base import Birth, CodePlace
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import AUTOCAST_ENDS, BACKWARD
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human

# What autocast runs in 16 bits (`AT_FORALL_LOWER_PRECISION_FP` of ATen/autocast_mode.h, PyTorch 2.13), as kernels have it.
_LOWER = frozenset({"convolution", "mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "linear"})
_OF_WEIGHTS = frozenset({"parameters", "gradients", "optimizer_state", "buffers", "workspace"})
_SHARE = 3


def outside_of_autocast(scene: Scene) -> Iterator[Cause]:
    """Layers that come behind the block: their results, and all that the same line makes of them."""
    if not scene.spans(AUTOCAST_ENDS) or not scene.spans(BACKWARD):
        return
    layers = [birth for _, birth in scene.births if birth.kernel in _LOWER and not birth.node]
    if not any(birth.dtype in HALVES for birth in layers):
        return
    half = {birth.place for birth in layers if birth.dtype in HALVES}
    wide = {birth.place for birth in layers if birth.dtype == "float32"} - half
    births = scene.recording.logs[scene.device].births
    found: dict[CodePlace, list[tuple[Allocation, Birth]]] = defaultdict(list)
    for one in scene.timeline.live_at(scene.moment):
        birth = births.get(one.born)
        computed = scene.labels[one.index].category not in _OF_WEIGHTS
        if (
            birth is not None
            and birth.dtype == "float32"
            and computed
            and birth.place is not None
            and birth.place in wide
        ):
            found[birth.place].append((one, birth))
    for its in sorted(found.values(), key=lambda pairs: -size_of(one for one, _ in pairs))[:1]:
        size = size_of(one for one, _ in its)
        if size < max(WORTH, scene.part_of_peak(_SHARE)):
            return
        forward = next((one for one, birth in its if not birth.node), its[0][0])
        yield Cause(
            "outside_of_autocast",
            f"{made_at(scene, forward)} runs outside of the autocast block, in float32: {human(size)} at the peak.",
            "Inside of the block its convolutions and products give 16-bit numbers, which take half.",
            size // 2,
            describes=True,
        )
