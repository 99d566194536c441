"""Gradients and graphs for parameters that no optimizer knows: a teacher, a frozen body, a network that only measures."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from gpumem_magic.causes.model import LEAST, Scene, partnered, requested
from gpumem_magic.causes.places import in_common, module_of, quoted
from gpumem_magic.causes.training import added_to
from gpumem_magic.owners.model import Held, size_of
from gpumem_magic.recording.model import BACKWARD, OPTIMIZER, Span
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human, listed

_GRADIENT = ".grad"
# As peft, and those who write their own, call adapters of low rank; and where peft trains a copy of a layer.
_COPY = re.compile(r"(?P<layer>\w+)\.modules_to_save\b")
_COPIED = re.compile(r"\bmodules_to_save\s*=")
# Two matrices with as few numbers in between as one in so many of their sides.
_OF_A_MATRIX, _A_PAIR, _NARROW = 2, 2, 4
_ADAPTER = re.compile(r"(^|[._])lora_|lora\b", re.IGNORECASE)
# They save their input for the gradient of their weight alone (tools/autograd/derivatives.yaml).
_FOR_WEIGHTS = frozenset({"addmm", "mm", "linear", "convolution"})
# Something in the program has them require gradients again: networks that are trained in turn.
_UNFREEZES = re.compile(r"requires_grad(?:_\(\s*|\s*=\s*)(?!\s*False\b)|unfreeze")


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
            # (A list that the optimizer was given has it, too.)
            trained |= {module_of(one), *(scene.holdings.roots[number].name for number in one.roots)}
    for one in scene.held:
        owner = parameters.get(one.place.removesuffix(_GRADIENT)) if one.kind == "gradient" else None
        if owner is not None and (owner.device, owner.address) not in known and _is_certain(scene, one):
            loose.setdefault(module_of(owner), []).append(one)
    for module, gradients in sorted(loose.items(), key=lambda pair: -size_of(pair[1])):
        if (left_behind := _of_the_one_before(scene, module, gradients)) is not None:
            yield left_behind
            return
        if scene.program.takes_gradients(module.partition(".")[0]):
            # Copies of these parameters are stepped by them, say.
            continue
        addresses = {parameters[one.place.removesuffix(_GRADIENT)].address for one in gradients}
        live = {one.address: one for one in scene.timeline.live_at(scene.saved_at)} if scene.saved else {}
        its = [one for one in scene.saved if one.parameter is not None and one.parameter[1] in addresses]
        # What is trained lies in front of it (an image, a policy): gradients go through it all the same, and only what is saved
        # for its own weights' is not needed.
        shared = [one for one in its if any(each.others(addresses) for each in one.leaves)]
        for_weights = {one.address for one in shared if _FOR_WEIGHTS.issuperset(one.operations)}
        needless = for_weights | {one.address for one in its if one not in shared}
        kept = size_of(live[address] for address in needless if address in live)
        # (A loss leads to all that is trained, and other layers have the same input.)
        through = any(
            not _FOR_WEIGHTS.isdisjoint(one.operations) and all(each.others(addresses) for each in one.leaves)
            for one in shared
        )
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
        partly = module in trained
        graph = f", and {human(kept)} of its activations are kept for backward" if kept >= LEAST else ""
        got = f"{human(size_of(gradients))} of gradients{graph}"
        part = _part_of(gradients, [one for one in parameters.values() if (one.device, one.address) in known])
        text = f"runs with gradients, though no optimizer trains it: its parameters got {got}"
        if partly and part:
            text = f"runs with gradients, though no optimizer trains its `{part.removeprefix(f'{module}.')}`: that got {got}"
        elif partly:
            text = f"has parameters that no optimizer trains, and they got {got}"
        yield Cause(
            "untrained_gradients",
            f"{quoted(module)}{at} {text}.",
            _only_named(scene, module) + _frozen(part if partly else module, through=through),
            size_of(gradients) + kept,
        )
        return


def _only_named(scene: Scene, module: str) -> str:
    """That ``body.requires_grad = False`` gives a module an attribute, and its parameters nothing."""
    wanted = re.compile(rf"(^|\W){re.escape(module)}\.requires_grad\s*=\s*False")
    place = scene.program.stating(wanted)
    return f"`{place.shown}` ({place.words}) only gives the module an attribute: " if place is not None else ""


def _part_of(gradients: Sequence[Held], trained: Sequence[Held]) -> str:
    """The part of a module that has all of these, and nothing that is trained: `probe.backbone`; "" where it has none."""
    part = in_common(one.place.removesuffix(_GRADIENT).split(".")[:-1] for one in gradients)
    place = ".".join(part)
    return place if len(part) > 1 and not any(one.place.startswith(f"{place}.") for one in trained) else ""


def _frozen(module: str, *, through: bool) -> str:
    """What to do; module: "" where that is a part of one without a name of its own. through: whether gradients go on through it
    to what is trained."""
    if not module:
        return "`.requires_grad_(False)` on the parameters that the optimizer was not given."
    if through:
        return f"`{module}.requires_grad_(False)`: the gradients still go through it to what is trained."
    return f"`{module}.requires_grad_(False)`, or `with torch.no_grad():` around the call where nothing before it is trained."


def _of_the_one_before(scene: Scene, module: str, gradients: list[Held]) -> Cause | None:
    """An optimizer that steps, of parameters that it alone holds, of the shapes of a module's that none steps: the module was
    built again, and the optimizer was not."""
    steps = {span.label for span in scene.spans(OPTIMIZER) if not span.failed}
    for name in sorted(steps & scene.holdings.optimizers.keys()):
        number = scene.holdings.number(name)
        theirs = [one for one in scene.held if one.roots == (number,) and one.device == scene.device]
        weights = [one for one in theirs if (one.device, one.address) in scene.holdings.optimizers[name]]
        same = partnered(weights, _form, map(_form, gradients))
        if not weights or 10 * size_of(same) < 9 * size_of(gradients):
            continue
        return Cause(
            "optimizer_of_the_former",
            f"`{name}` steps the parameters of the model that was there before {quoted(module)}, and none trains "
            f"{quoted(module)}: {human(size_of(theirs))} of old parameters, with their states and gradients.",
            f"Make `{name}` anew from `{module}.parameters()`, behind the line that builds {quoted(module)}.",
            size_of(theirs),
        )
    return None


def kept_by_optimizer(scene: Scene) -> Iterator[Cause]:
    """Parameters that an optimizer alone holds, of a part of the model that was replaced behind it, with their states."""
    for name, known in scene.holdings.optimizers.items():
        number = scene.holdings.number(name)
        theirs = [one for one in scene.held if one.roots == (number,) and one.device == scene.device]
        weights = [one for one in theirs if one.kind == "parameter" and (one.device, one.address) in known]
        if not weights or size_of(theirs) < scene.part_of_peak(5) or len(weights) == len(known):
            # (Of a model that is gone as a whole others tell.)
            continue
        at = _replaced_at(scene)
        yield Cause(
            "optimizer_of_the_former",
            f"`{name}`{at} alone holds {human(size_of(weights))} of parameters that no model has any more, "
            f"{human(size_of(theirs))} with their states, and does not train what took their place.",
            f"A new `{name}` after the line that replaced them frees {human(size_of(theirs))}; the other parameters' states "
            "start again, too.",
            size_of(theirs),
        )
        return


def _replaced_at(scene: Scene) -> str:
    """The statement that made the largest parameter that no optimizer knows, in brackets; "" where an earlier cell did."""
    made = [
        allocation
        for one in scene.held
        if one.kind == "parameter"
        and (one.device, one.address) not in scene.holdings.optimized
        and (allocation := scene.alive.get(one.address)) is not None
        and allocation.born >= 0
    ]
    if not made or scene.tensors is None:
        return ""
    facts = scene.tensors.facts(max(made, key=lambda one: one.size))
    return f" (since line {facts.line}, `{facts.statement}`)" if facts.line else ""


def trained_beside_adapters(scene: Scene) -> Iterator[Cause]:
    """An optimizer that steps a model's own weights beside adapters, which are to be trained in their place."""
    weights = [one for one in scene.held if one.kind == "parameter"]
    for name, known in scene.holdings.optimizers.items():
        trained = known - scene.holdings.frozen
        stepped = [one for one in weights if (one.device, one.address) in trained]
        small = _adapters(stepped, [one for one in weights if (one.device, one.address) not in trained])
        adapters = [one for one in stepped if one.place in small]
        others = [one for one in stepped if one.place not in small]
        if not adapters or 10 * size_of(adapters) > size_of(others):
            continue
        states = _states_of(scene, name, others)
        total = size_of(others) + size_of(states)
        if not states or total < scene.part_of_peak(5):
            continue
        sizes = (
            f"{human(size_of(others))} of gradients and {human(size_of(states))} of states, for adapters of "
            f"{human(size_of(adapters))}"
        )
        copies = list(dict.fromkeys(found["layer"] for one in others if (found := _COPY.search(one.place))))
        if copies and all(_COPY.search(one.place) for one in others):
            at = scene.program.place_of(_COPIED)
            yield Cause(
                "trained_beside_adapters",
                f"`{name}` trains whole copies of {listed([f'`{layer}`' for layer in copies[:3]])} beside the adapters, as "
                f"`modules_to_save` has it{at}: {human(size_of(others))} of weights, {sizes}.",
                "Leave out of `modules_to_save` what need not be trained as a whole; of an embedding, `trainable_token_indices` "
                "trains some rows alone.",
                total + size_of(others),
            )
            return
        at = scene.program.place_of(_UNFREEZES)
        yield Cause(
            "trained_beside_adapters",
            f"`{name}` trains the model's own weights beside the adapters{at}: {sizes}.",
            "Where only the adapters are to be trained, `.requires_grad_(False)` on all other weights, and give the optimizer "
            "what is left: `[p for p in model.parameters() if p.requires_grad]`.",
            total,
        )
        return


def _adapters(stepped: Sequence[Held], others: Sequence[Held]) -> frozenset[str]:
    """The places of adapters: two narrow matrices in one module with a weight that is not stepped, or a module's own around any
    layer, which multiplied have its shape, or go from its width back to it; or by what peft, and those who write their own, call
    them."""
    found = {one.place for one in stepped if _ADAPTER.search(one.place)}
    beside: dict[str, list[Held]] = defaultdict(list)
    for one in stepped:
        for module in _modules_around(one):
            beside[module].append(one)
    matrices = [one for one in stepped if len(one.shape) == _OF_A_MATRIX]
    for one in matrices:
        # (Of a weight that is stepped, too, only two that are a module's own, around the layer, are no layers of the model.)
        around = one.place.rpartition(".")[0].rpartition(".")[0]
        own = [each for each in matrices if each is not one and each.place.rpartition(".")[0] == around != ""]
        if len(own) == _A_PAIR and _is_narrow(own[0].shape, own[1].shape, one.shape):
            found.update(each.place for each in own)
    for one in others if len(stepped) > 1 else ():
        if len(one.shape) != _OF_A_MATRIX:
            continue
        for module in _modules_around(one):
            near = [each for each in beside.get(module, ()) if len(each.shape) == _OF_A_MATRIX]
            if len(near) == _A_PAIR and _is_narrow(near[0].shape, near[1].shape, one.shape):
                found.update(each.place for each in near)
    return frozenset(found)


def _modules_around(one: Held) -> list[str]:
    """The module that a parameter is of, and the one around that."""
    module = one.place.rpartition(".")[0]
    return [each for each in (module, module.rpartition(".")[0], module.rpartition(".")[0].rpartition(".")[0]) if each]


def _is_narrow(one: tuple[int, ...], other: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether two matrices go through few numbers, and in between as the whole one does, or from one of its sides back to it."""
    for (rows, rank), (inner, columns) in ((one, other), (other, one), (one[::-1], other[::-1])):
        as_whole = sorted((rows, columns)) == sorted(whole) or (rows == columns and rows in whole)
        if rank == inner and _NARROW * rank <= min(rows, columns) and as_whole:
            return True
    return False


def _form(one: Held) -> tuple[tuple[int, ...], str]:
    return one.shape, one.dtype


def frozen_too_late(scene: Scene) -> Iterator[Cause]:
    """Parameters that were frozen when they had gradients and states: an optimizer's step goes on by the old gradients."""
    if not scene.holdings.frozen or _UNFREEZES.search(scene.typed):
        return
    steps = {span.label for span in scene.spans(OPTIMIZER) if not span.failed}
    # Inside a function a step goes by its optimizer's class.
    stepping = steps & scene.holdings.optimizers.keys() or (scene.holdings.optimizers.keys() if steps else set())
    for optimizer in sorted(stepping):
        known = scene.holdings.optimizers[optimizer] & scene.holdings.frozen
        parameters = {
            one.place: one for one in scene.held if one.kind == "parameter" and (one.device, one.address) in known
        }
        gradients = [
            one
            for one in scene.held
            if one.kind == "gradient"
            and one.place.removesuffix(_GRADIENT) in parameters
            and (allocation := scene.alive.get(one.address)) is not None
            and all(allocation.born < scene.start_of(span) for span in scene.spans(BACKWARD))
        ]
        # A backward that adds to some is one that trains them, whatever they are at the end.
        ours = [scene.alive[one.address] for one in gradients]
        passed = [(scene.start_of(span), scene.end_of(span)) for span in scene.spans(BACKWARD)]
        if any(2 * size_of(added_to(scene, ours, begin, end)) >= size_of(ours) for begin, end in passed):
            continue
        frozen = [parameters[one.place.removesuffix(_GRADIENT)] for one in gradients]
        states = _states_of(scene, optimizer, frozen)
        if not gradients or size_of(gradients) + size_of(states) < scene.part_of_peak(20):
            continue
        # (A loop's variable may be the shortest name of one of them.)
        modules = sorted({module_of(one) for one in frozen if len(one.trail) > 1}) or [module_of(frozen[0])]
        beside = f", beside {human(size_of(states))} of states" if states else ""
        yield Cause(
            "frozen_too_late",
            f"{listed(list(map(quoted, modules[:2])))} {'has' if len(modules) == 1 else 'have'} parameters that require no "
            f"gradient any more, yet `{optimizer}` goes on stepping them by their last gradients: {human(size_of(gradients))} "
            f"of gradients{beside}.",
            f"Set the gradients to None when you freeze them (`{modules[0]}.zero_grad()`), and give the optimizer only what is "
            "trained: one that is made anew has no states for the rest.",
            size_of(gradients) + size_of(states),
        )
        return


def _states_of(scene: Scene, optimizer: str, parameters: Sequence[Held]) -> list[Held]:
    begins = tuple(f"{optimizer}.state[{one.place}]" for one in parameters)
    return [one for one in scene.held if one.kind == "optimizer_state" and one.place.startswith(begins)]


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
            others = [one for one in made if one not in lost]
            # (A generator's layers may have the shapes of its discriminator's.)
            theirs = Counter(map(requested, known[step.label]))
            theirs.subtract(map(requested, partnered(others, requested, theirs.elements())))
            ours = partnered(lost, requested, (+theirs).elements())
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
