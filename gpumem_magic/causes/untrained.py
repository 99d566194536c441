"""Gradients and graphs for parameters that no optimizer knows: a teacher, a frozen body, a network that only measures."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem_magic.causes.model import LEAST, Scene
from gpumem_magic.causes.places import quoted
from gpumem_magic.owners.model import Held, size_of
from gpumem_magic.recording.model import OPTIMIZER
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human

_GRADIENT = ".grad"


def untrained_gradients(scene: Scene) -> Iterator[Cause]:
    """A backward that makes gradients, and keeps activations, for a module that no optimizer steps."""
    steps = [span for span in scene.spans(OPTIMIZER) if not span.failed]
    known = scene.holdings.optimized
    if not steps or not known:
        return
    parameters = {one.place: one for one in scene.held if one.kind == "parameter"}
    loose: dict[str, list[Held]] = {}
    trained: set[str] = set()
    for one in parameters.values():
        if (one.device, one.address) in known:
            trained.add(_module(one))
    for one in scene.held:
        owner = parameters.get(one.place.removesuffix(_GRADIENT)) if one.kind == "gradient" else None
        if owner is not None and (owner.device, owner.address) not in known and _is_certain(scene, one):
            loose.setdefault(_module(owner), []).append(one)
    for module, gradients in sorted(loose.items(), key=lambda pair: -size_of(pair[1])):
        addresses = {parameters[one.place.removesuffix(_GRADIENT)].address for one in gradients}
        live = {one.address: one for one in scene.timeline.live_at(scene.saved_at)} if scene.saved else {}
        saved = {one.address for one in scene.saved if one.parameter is not None and one.parameter[1] in addresses}
        kept = size_of(live[address] for address in saved if address in live)
        fresh = any(
            allocation.born >= 0 for one in gradients if (allocation := scene.alive.get(one.address)) is not None
        )
        if not (fresh or kept) or size_of(gradients) + kept < scene.part_of_peak(20):
            # Those of an earlier cell are not this one's fault.
            continue
        # The cell's own call first.
        calls = sorted(scene.program.calls(module.rpartition(".")[2]), key=lambda one: one.where != "")
        at = f" ({calls[0].words}, `{calls[0].shown}`)" if calls else ""
        partly = ", in part," if module in trained else ""
        graph = f", and {human(kept)} of its activations are kept for backward" if kept >= LEAST else ""
        yield Cause(
            "untrained_gradients",
            f"{quoted(module)}{at} runs with gradients, though{partly} no optimizer trains it: its parameters got "
            f"{human(size_of(gradients))} of gradients{graph}.",
            f"`{module}.requires_grad_(False)`, or `with torch.no_grad():` around the call where nothing before it is trained."
            if not partly
            else "`.requires_grad_(False)` on the parameters that the optimizer was not given.",
            size_of(gradients) + kept,
        )
        return


def _module(one: Held) -> str:
    """The variable, or the attribute of one that is no module itself, under which a module is known."""
    modules = [station.place for station in one.trail if "torch.nn.modules.module.Module" in station.bases]
    if len(modules) > 1 and one.trail and "torch.nn.modules.module.Module" in one.trail[0].bases:
        return modules[0]
    return modules[0] if modules else one.place.partition(".")[0]


def _is_certain(scene: Scene, gradient: Held) -> bool:
    """Whether no optimizer that is gone by now can have known the parameter: all that stepped have names, or nobody ever cleared
    the gradient while others were."""
    names = {root.name for root in scene.holdings.roots}
    steps = [span for span in scene.spans(OPTIMIZER) if not span.failed]
    if all(span.label in names for span in steps):
        return True
    allocation = scene.alive.get(gradient.address)
    return (
        allocation is not None
        and len(steps) > 1
        and allocation.born < scene.end_of(steps[0])
        and not scene.never_clears
    )
