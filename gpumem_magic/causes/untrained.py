"""Gradients and graphs for parameters that no optimizer knows: a teacher, a frozen body, a network that only measures."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem_magic.causes.model import LEAST, Scene, partnered, requested
from gpumem_magic.causes.places import module_of, quoted
from gpumem_magic.owners.model import Held, size_of
from gpumem_magic.recording.model import BACKWARD, OPTIMIZER, Span
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
            trained.add(module_of(one))
    for one in scene.held:
        owner = parameters.get(one.place.removesuffix(_GRADIENT)) if one.kind == "gradient" else None
        if owner is not None and (owner.device, owner.address) not in known and _is_certain(scene, one):
            loose.setdefault(module_of(owner), []).append(one)
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
        call = calls[0] if calls else scene.program.using(module)
        at = f" ({call.words}, `{call.shown}`)" if call is not None else ""
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


def wasted_gradients(scene: Scene) -> Iterator[Cause]:
    """A backward that goes on into a module whose gradients are thrown away before its own optimizer steps: a generator that is
    not detached in its discriminator's step.

    Only what lies before the trained module counts: a loss has to go through what lies behind it.
    """
    steps = sorted((span for span in scene.spans(OPTIMIZER) if not span.failed), key=scene.start_of)
    known = {
        name: [scene.alive[address] for device, address in places if device == scene.device and address in scene.alive]
        for name, places in scene.holdings.optimizers.items()
    }
    if len({step.label for step in steps}) < 2 or not all(step.label in known for step in steps):
        return
    worst: dict[str, int] = {}
    # A later backward, that of its own step, may need the same graph.
    again = bool(scene.program.calls("backward", "retain_graph"))
    for backward in scene.spans(BACKWARD):
        begin, end = scene.start_of(backward), scene.end_of(backward)
        step = next((one for one in steps if scene.start_of(one) >= end), None)
        if step is None:
            continue
        made = sorted(
            (one for one in scene.living_in(end, "gradients") if one.born >= begin),
            key=lambda one: one.born,
            reverse=True,
        )
        for name, weights in known.items():
            own = next((one for one in steps if one.label == name and scene.start_of(one) >= end), None)
            if name == step.label or own is None:
                continue
            lost = partnered(
                (one for one in made if one.freed is not None and one.freed < scene.start_of(own)),
                requested,
                map(requested, weights),
            )
            ours = partnered(lost, requested, map(requested, known[step.label]))
            others = [one for one in made if one not in lost]
            first = min((one.born for one in lost), default=-1)
            if 10 * size_of(lost) < 9 * size_of(weights) or 2 * size_of(ours) >= size_of(lost):
                continue
            # A backward runs from the end: what it reaches last lay in front.
            if others and max(one.born for one in others) > first:
                continue
            if others or _made_since(scene, step, begin):
                saved = 0 if again else _saved_for(scene, name, begin)
                worst[name] = max(worst.get(name, 0), size_of(lost) + saved)
    for name, size in sorted(worst.items(), key=lambda pair: -pair[1])[:1]:
        module = _module_of(scene, name)
        what = quoted(module) if module else f"the parameters of {quoted(name)}"
        calls = (
            sorted(scene.program.calls(module.rpartition(".")[2]), key=lambda one: one.where != "") if module else []
        )
        at = f" ({calls[0].words}, `{calls[0].shown}`)" if calls else ""
        other = next(step.label for step in steps if step.label != name)
        detach = f"`.detach()` its output in the loss of `{other}`, and leave out `retain_graph=True`"
        if not again:
            detach = "`.detach()` its output there, or make it under `torch.no_grad()`"
        yield Cause(
            "wasted_gradients",
            f"The backward before `{other}.step()` goes on into {what}{at}, whose gradients are thrown away before `{name}` "
            f"steps: {human(size)} of gradients{'' if again else ' and activations'} for nothing.",
            f"{detach}: only what `{other}` trains needs a graph.",
            size,
        )


def _made_since(scene: Scene, step: Span, begin: int) -> bool:
    """Whether an earlier backward since the step before made gradients for this one."""
    before = max((scene.end_of(one) for one in scene.spans(OPTIMIZER) if scene.end_of(one) <= begin), default=0)
    return any(before <= one.born < begin for one in scene.living_in(scene.start_of(step), "gradients"))


def _saved_for(scene: Scene, name: str, begin: int) -> int:
    """Bytes of activations that the first backward's graph kept for the parameters of an optimizer."""
    known = scene.holdings.optimizers[name]
    live = {one.address: one for one in scene.timeline.live_at(scene.saved_at)} if scene.saved else {}
    saved = {one.address for one in scene.saved if one.parameter in known and one.address in live}
    weights = {address for _, address in known}
    return size_of(live[address] for address in saved - weights) if scene.saved_at <= begin else 0


def _module_of(scene: Scene, optimizer: str) -> str:
    """The module whose parameters an optimizer steps, where it is one."""
    known = scene.holdings.optimizers[optimizer]
    names = {module_of(one) for one in scene.held if one.kind == "parameter" and (one.device, one.address) in known}
    return names.pop() if len(names) == 1 else ""


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
