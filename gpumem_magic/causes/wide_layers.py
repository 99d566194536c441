"""One weight that is nearly all of a model: that of a linear layer behind a flattened image, or of a bilinear one."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import module_of, quoted
from gpumem_magic.owners.model import size_of
from gpumem_magic.report.model import OF_A_MODEL, Cause
from gpumem_magic.units import human, shape_words

# Of all of a model's, in per cent; and with what trains it, one part in so many of the peak.
_NEARLY_ALL, _SHARE = 75, 3
_LINEAR, _BILINEAR = "torch.nn.modules.linear.Linear", "torch.nn.modules.linear.Bilinear"
# A batch, its channels, rows and columns.
_IMAGES = 4
_WITH_IT = {"gradients": "gradient", "optimizer_state": "states"}


def one_weight(scene: Scene) -> Iterator[Cause]:
    """It, its gradient and an optimizer's states."""
    weights = [one for one in scene.held if one.kind == "parameter"]
    largest = max(weights, key=lambda one: one.size, default=None)
    if largest is None or not (largest.goes_through(_LINEAR) or largest.goes_through(_BILINEAR)):
        return
    model = module_of(largest)
    its = [one for one in weights if module_of(one) == model]
    out, *given = largest.shape
    width = prod(given)
    living = [one for one in scene.timeline.live_at(scene.moment) if one.requested == largest.requested]
    there = [one for one in living if scene.labels[one.index].category in OF_A_MODEL]
    # (Another layer's of the same size.)
    alone = sum(one.requested == largest.requested for one in weights) == 1
    if not alone or 100 * largest.size < _NEARLY_ALL * size_of(its) or width < out or len(its) == 1:
        return
    pairs = largest.goes_through(_BILINEAR)
    if _SHARE * size_of(there) < scene.report.peak.allocated or not (pairs or _is_a_flattened_image(scene, width)):
        return
    kinds = {scene.labels[one.index].category for one in there}
    with_it = [words for category, words in _WITH_IT.items() if category in kinds]
    beside = f", and {human(size_of(there))} with its {' and '.join(with_it)}" if with_it else ""
    yield Cause(
        "one_weight",
        f"One weight is {100 * largest.size // size_of(its)} % of {quoted(model)}: {quoted(largest.place)}, "
        f"{shape_words(largest.shape)}, is {human(largest.size)}{beside}.",
        f"A bilinear layer has a number for each pair of its inputs' {given[0]:,} and {given[-1]:,} and each of {out:,} results: "
        "linear layers that make both narrower before it, or that make both as wide as the result and multiply them, take far "
        "less."
        if pairs
        else f"It multiplies {width:,} numbers: pooling, a convolution with a stride or a smaller image before it leave fewer.",
        size_of(there),
        describes=True,
    )


def _is_a_flattened_image(scene: Scene, width: int) -> bool:
    """Whether an image, or a layer's channels of one, has so many numbers."""
    shapes = (birth.shape for _, birth in scene.births)
    return any(shape is not None and len(shape) >= _IMAGES and prod(shape[1:]) == width for shape in shapes)
