"""Weights that are there several times, or wider than they were: a model for each thread, stacks of models, conversions, weights
that a parametrization, or a layer itself, computes anew in each call, and pruned ones."""

from __future__ import annotations

import ast
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from gpumem_magic.causes.alike import HALVES, made_at
from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import quoted
from gpumem_magic.devices.base import Birth
from gpumem_magic.looks.parsing import expression_of
from gpumem_magic.owners.model import Held, size_of
from gpumem_magic.recording.model import BACKWARD
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human

_SEVERAL = 3
_LOCAL = f"{threading.local.__module__}.{threading.local.__name__}"
_PARAMETRIZED = re.compile(r"^(?P<module>.*)\.parametrizations\.(?P<name>\w+)\.original\d*$")
_ASKS_FOR_FLOAT32 = re.compile(r"\.float\(|float32")
# What a library's function that widens weights is for.
# What `torch.nn.utils.prune` calls what it keeps (`BasePruningMethod.apply`), and its functions.
_ORIGINAL, _MASK = "orig", "mask"
_PRUNES = re.compile(r"\bprune\.\w+\(|\b\w+_(?:un)?structured\(")
_FOR_FEW_BITS = re.compile(r"\bprepare_model_for_kbit_training\b")


def models_of_threads(scene: Scene) -> Iterator[Cause]:
    """A model of its own for each thread, in a `threading.local`, of models that only answer."""
    places: Counter[str] = Counter()
    weights = [one for one in scene.held if one.kind == "parameter" and one.goes_through(_LOCAL)]
    places.update(one.place for one in weights)
    threads = max(places.values(), default=0)
    if threads < _SEVERAL or scene.spans(BACKWARD) or size_of(weights) < scene.part_of_peak(2):
        return
    local = next(at for at in weights[0].trail if _LOCAL in at.bases)
    name = weights[0].place.removeprefix(f"{local.place}.").partition(".")[0]
    made = scene.program.adding(local.place.partition(".")[0], name)
    at = f" ({made.words}, `{made.shown}`)" if made is not None else ""
    each = size_of(weights) // threads
    yield Cause(
        "models_of_threads",
        f"Each of {threads} threads has a model of its own as `{local.place}.{name}`{at}: {human(size_of(weights))}, "
        f"{human(each)} each.",
        "Threads can share one that is made outside of them: calling it changes nothing in it, in evaluation mode.",
        size_of(weights) - each,
    )


def stacked_weights(scene: Scene) -> Iterator[Cause]:
    """The weights of several models once more, stacked (`torch.func.stack_module_state`), beside the models."""
    births = scene.recording.logs[scene.device].births
    models = Counter(one.shape for one in scene.held if one.kind == "parameter")
    stacks: dict[int, list[Allocation]] = defaultdict(list)
    for one in scene.timeline.live_at(scene.moment):
        birth = births.get(one.born)
        shape = (
            (birth.shape or ()) if birth is not None and not birth.node and birth.operator in ("stack", "cat") else ()
        )
        if len(shape) > 1 and shape[0] >= _SEVERAL and models[shape[1:]] >= shape[0] and one.freed is None:
            stacks[shape[0]].append(one)
    for number, its in sorted(stacks.items(), key=lambda pair: -size_of(pair[1]))[:1]:
        if size_of(its) < scene.part_of_peak(4) or scene.tensors is None:
            continue
        shapes = {(births[one.born].shape or ())[1:] for one in its}
        theirs = [one for one in scene.held if one.kind == "parameter" and one.shape in shapes]
        names = Counter(number for one in theirs for number in one.roots if scene.holdings.roots[number].statement)
        root, _ = names.most_common(1)[0] if names else (-1, 0)
        freed = size_of(scene.freed([root])) if root >= 0 else 0
        let_go = f"`{scene.holdings.roots[root].statement}` frees {human(freed)}" if freed else "let go of the models"
        yield Cause(
            "stacked_weights",
            f"{made_at(scene, max(its, key=lambda one: one.size))} copies the weights of {number} models into stacks, "
            f"{human(size_of(its))}, beside the models' own.",
            f"Where only the stacks are used from then on, {let_go}.",
            size_of(its),
        )


def widened_weights(scene: Scene) -> Iterator[Cause]:
    """A model's weights that a statement turned from 16 bits to 32."""
    weights: dict[tuple[int, str], list[tuple[Held, Birth]]] = defaultdict(list)
    births = scene.recording.logs[scene.device].births
    for one in scene.held:
        made = scene.alive.get(one.address) if one.kind == "parameter" and one.dtype == "float32" else None
        birth = births.get(made.born) if made is not None else None
        if made is None or birth is None or birth.kernel != "_to_copy" or scene.tensors is None:
            continue
        if [dtype for _, dtype in birth.inputs if dtype in HALVES] and (facts := scene.tensors.facts(made)).line:
            weights[facts.line, facts.statement].append((one, birth))
    for (line, statement), pairs in sorted(weights.items(), key=lambda pair: -len(pair[1]))[:1]:
        its = [one for one, _ in pairs]
        if size_of(its) < scene.part_of_peak(4):
            continue
        width = pairs[0][1].inputs[0][1]
        # (Who writes so means it.)
        meant_so = _ASKS_FOR_FLOAT32.search(statement) is not None
        if meant_so and any((one.device, one.address) in scene.holdings.optimized for one in its):
            # An optimizer's own copies, of which 16 bits would lose small steps.
            continue
        meant = "; it is meant for weights in 8 or 4 bits" if _FOR_FEW_BITS.search(statement) else ""
        yield Cause(
            "widened_weights",
            f"`{statement}` (line {line}) turns weights of {quoted(its[0].trail[0].place)} from {width} to float32: "
            f"{human(size_of(its))}, twice as much.",
            f"Without it they stay in {width}{meant}." if not meant_so else f"Where {width} is enough, leave them so.",
            size_of(its) // 2,
            describes=meant_so,
        )


def pruned_weights(scene: Scene) -> Iterator[Cause]:
    """What `torch.nn.utils.prune` keeps of a weight: as it was, a mask of numbers, and the product of both."""
    halves = {one.place: one for one in scene.held if one.kind in ("parameter", "buffer", "tensor")}
    its: list[Held] = []
    weights: list[Held] = []
    name = ""
    for place, mask in halves.items():
        whole, _, ending = place.rpartition("_")
        original = halves.get(f"{whole}_{_ORIGINAL}")
        if mask.kind == "buffer" and ending == _MASK and original is not None and original.kind == "parameter":
            its += [mask, *(one for one in [halves.get(whole)] if one is not None and one.kind == "tensor")]
            weights.append(original)
            name = whole.rpartition(".")[2]
    size = size_of(its)
    if not its or size < scene.part_of_peak(5):
        return
    call = scene.program.stating(_PRUNES)
    at = f" (`{call.shown}`, {call.words})" if call is not None else ""
    yield Cause(
        "pruned_weights",
        f"Pruning{at} keeps each weight as it was (`{name}_{_ORIGINAL}`), a mask of numbers (`{name}_{_MASK}`) and their "
        f"product (`{name}`): {human(size)} more than the {human(size_of(weights))} of weights.",
        f'`prune.remove(layer, "{name}")` after it leaves the product alone. (Zeros take as much room as other numbers.)',
        size,
    )


def computed_weights(scene: Scene) -> Iterator[Cause]:
    """``w = self.q.float() * self.scale``: weights that forwards compute of what layers store, kept for backward."""
    if scene.tensors is None:
        return
    stored: dict[str, list[Held]] = defaultdict(list)
    for one in scene.held:
        if one.kind in ("parameter", "buffer"):
            stored[one.place.rpartition(".")[2]].append(one)
    found: dict[str, list[Allocation]] = defaultdict(list)
    for each in scene.living_in(scene.moment, "activations"):
        birth = scene.tensors.birth_of(each)
        place = birth.place if birth is not None and not birth.node else None
        if birth is not None and place is not None and birth.shape in _shapes_of(place.expression, stored):
            found[place.expression].append(each)
    for expression, its in sorted(found.items(), key=lambda pair: -size_of(pair[1]))[:1]:
        if len(its) < _SEVERAL or size_of(its) < scene.part_of_peak(4):
            continue
        its_own = [one for name in _own_names(expression) for one in stored[name]]
        yield Cause(
            "recomputed_weights",
            f"{made_at(scene, its[-1])} computes a layer's weight of what that stores ({human(size_of(its_own))} in all), and "
            f"{len(its)} of them are kept for backward: {human(size_of(its))}.",
            "A method that makes the weight and multiplies with it, called by `torch.utils.checkpoint.checkpoint` "
            "with `use_reentrant=False`, makes it again in backward, and keeps none.",
            size_of(its) - its[0].size,
        )


def _own_names(expression: str) -> list[str]:
    """The attributes of ``self`` of which an expression is made; none where there is anything else in it, but for PyTorch's
    functions."""
    node = expression_of(expression)
    if node is None:
        return []
    owned = [one for one in ast.walk(node) if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self"]
    inside = {id(one.value) for one in owned}
    others = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and id(one) not in inside}
    return [one.attr for one in owned] if others <= {"torch", "F"} else []


def _shapes_of(expression: str, stored: Mapping[str, Sequence[Held]]) -> set[tuple[int, ...] | None]:
    names = _own_names(expression)
    # (Of a method's result nothing is known, nor of what is no tensor of the layer's.)
    return {one.shape for name in names for one in stored[name]} if all(name in stored for name in names) else set()


def recomputed_weights(scene: Scene) -> Iterator[Cause]:
    """A weight that a parametrization (`weight_norm`, `spectral_norm`) computes anew in each call of its layer, each kept for
    backward."""
    shapes = {}
    for one in scene.held:
        if one.kind == "parameter" and (found := _PARAMETRIZED.match(one.place)):
            shapes[one.shape] = found["module"], found["name"]
    if not shapes or scene.tensors is None:
        return
    kept: dict[tuple[int, ...], list[Allocation]] = defaultdict(list)
    for each in scene.living_in(scene.moment, "activations"):
        birth = scene.tensors.birth_of(each)
        if birth is not None and not birth.node and birth.shape in shapes and birth.shape is not None:
            kept[birth.shape].append(each)
    for shape, its in sorted(kept.items(), key=lambda pair: -size_of(pair[1]))[:1]:
        if len(its) < _SEVERAL or size_of(its) < scene.part_of_peak(4):
            continue
        module, name = shapes[shape]
        yield Cause(
            "recomputed_weights",
            f"{made_at(scene, its[-1])} computes the {name} of `{module}` from its parametrization anew in each call, "
            f"and {len(its)} of them are kept for backward: {human(size_of(its))}.",
            "`with torch.nn.utils.parametrize.cached():` around the forward computes it once.",
            size_of(its) - its[0].size,
        )
