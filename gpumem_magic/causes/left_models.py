"""Models that their function let go of, and that the graph of what it gave back still leads to."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem_magic.causes.detaching import detaching
from gpumem_magic.causes.graphs import by_graphs_alone, is_the_programs
from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.own_functions import backward_went_through
from gpumem_magic.causes.places import added, detach, quoted, spots
from gpumem_magic.owners.model import A_LEAF, Held, size_of
from gpumem_magic.report.model import LABELS, OF_A_MODEL, Cause
from gpumem_magic.units import human, listed


def models_of_graphs(scene: Scene) -> Iterator[Cause]:
    """A backward has gone through the graph, and freed what was saved for it; but its leaves are weights with gradients."""
    graphs = [one for one in scene.held if one.kind == "graph" and is_the_programs(scene, one)]
    found = [one for one in spots(graphs) if _leads_to_weights(scene, one.held)]
    found = [one for one in found if backward_went_through(scene, one)]
    if scene.report.error is not None or not found:
        return
    spot = found[0]
    freed = detach(scene, [spot])
    if 2 * freed < spot.size:
        # Several tensors there lead to the same graph: a loss and what it was computed of.
        freed = by_graphs_alone(scene, [spot])
    kinds = {_category(scene, one) for one in spot.held}
    what = listed([LABELS[name] for name in OF_A_MODEL if name in kinds])
    model, way = ("a model", "its graph") if spot.container is None else ("models", "the graphs of its tensors")
    place = added(scene, spot)
    at = f" ({place.words}, `{place.shown}`)" if place is not None else ""
    yield Cause(
        "models_of_graphs",
        f"{quoted(spot.place)}{at} keeps {model} by {way}, though no name leads there any more: {human(freed)} of {what}.",
        detaching(scene, [spot], place, [], freed),
        freed,
    )


def _leads_to_weights(scene: Scene, held: tuple[Held, ...]) -> bool:
    """Whether most of it is a model's: what else requires gradients (an image that is attacked) is a leaf, too."""
    of_a_model = [one for one in held if A_LEAF in one.place and _category(scene, one) in OF_A_MODEL]
    return 2 * size_of(of_a_model) > size_of(held)


def _category(scene: Scene, one: Held) -> str:
    made = scene.alive.get(one.address)
    return "" if made is None else scene.labels[made.index].category
