"""All detectors, in the order in which a report gives their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpumem_magic.causes import copies, device_memory, graphs, holding, loops, shapes, shortage, training, untrained
from gpumem_magic.causes.model import Scene
from gpumem_magic.failures import swallows
from gpumem_magic.report.model import Cause

Detector = Callable[[Scene], Iterable[Cause]]

DETECTORS: tuple[Detector, ...] = (
    loops.retry_while_handling,
    device_memory.fragmentation,
    shortage.memory_ran_out,
    device_memory.another_process,
    graphs.graphs_alive,
    graphs.gradients_with_graphs,
    loops.summed_losses,
    loops.kept_by_retain_graph,
    graphs.growth,
    graphs.graph_without_backward,
    untrained.untrained_gradients,
    copies.built_again,
    copies.held_checkpoint,
    copies.loaded_to_device,
    holding.freed_nothing,
    holding.pinned,
    holding.reference_cycle,
    training.late_zero_grad,
    training.missing_zero_grad,
    training.optimizer_states,
    training.optimizer_temporaries,
    shapes.attention_scores,
    shapes.dominating_layer,
    shapes.wide_numbers,
    holding.only_cached,
)
# A cause that another one explains better is not told twice.
_COVERED = {
    "growth": ("kept_graphs", "gradients_with_graphs"),
    "retained_graph": ("kept_graphs", "gradients_with_graphs"),
    "dominating_layer": ("attention_scores",),
    "map_location_missing": ("held_checkpoint",),
    "pinned_by_traceback": ("retry_in_except",),
    "pinned_by_out": (shortage.NAME,),
    "reference_cycle": (shortage.NAME,),
}


def find_causes(scene: Scene) -> tuple[list[Cause], list[str]]:
    """What the detectors found; and, for each that failed, a line about it. A detector's failure is not the others'."""
    found: list[Cause] = []
    failures: list[str] = []
    for detector in DETECTORS:
        try:
            found += list(detector(scene))
        except Exception as error:
            if not swallows(error):
                raise
            failures.append(f"Looking for a cause failed in {detector.__name__} ({type(error).__name__}: {error}).")
    names = {one.name for one in found}
    found = [one for one in found if not names.intersection(_COVERED.get(one.name, ()))]
    if shortage.NAME in names:
        # Where memory ran out: what went wrong, who held it, and then what is at stake, the most first.
        first = {"retry_in_except": -1, "fragmentation": 0, shortage.NAME: 1}
        found.sort(key=lambda one: (first.get(one.name, 2), -one.bytes))
    return found, failures
