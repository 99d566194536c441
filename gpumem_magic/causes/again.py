"""Weights that are there several times, or wider than they were: a model for each thread, stacks of models, conversions, weights
that a parametrization computes anew in each call."""

from __future__ import annotations

import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator

from gpumem_magic.causes.alike import made_at
from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import quoted
from gpumem_magic.devices.base import Birth
from gpumem_magic.owners.model import Held, size_of
from gpumem_magic.recording.model import BACKWARD
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human

_SEVERAL = 3
_HALVES = frozenset({"float16", "bfloat16"})
_LOCAL = f"{threading.local.__module__}.{threading.local.__name__}"
_PARAMETRIZED = re.compile(r"^(?P<module>.*)\.parametrizations\.(?P<name>\w+)\.original\d*$")
_ASKS_FOR_FLOAT32 = re.compile(r"\.float\(|float32")
# What a library's function that widens weights is for.
_FOR_FEW_BITS = re.compile(r"\bprepare_model_for_kbit_training\b")


def models_of_threads(scene: Scene) -> Iterator[Cause]:
    """A model of its own for each thread, in a `threading.local`, of models that only answer."""
    places: Counter[str] = Counter()
    weights = [one for one in scene.held if one.kind == "parameter" and any(_LOCAL in at.bases for at in one.trail)]
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
        if [dtype for _, dtype in birth.inputs if dtype in _HALVES] and (facts := scene.tensors.facts(made)).line:
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
