"""The activations that a forward leaves, by module and by operator, at the start of the first backward.

A module is known by what was at work when the memory was asked for. Where that was not followed (on a real device it would cost
too much) it is the module whose parameters autograd's graph names. What has neither is a line of its own.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from gpumem_magic.causes.model import Scene
from gpumem_magic.owners.saved import Saved
from gpumem_magic.owners.tree import Layer
from gpumem_magic.recording.model import BACKWARD, ModuleTrace
from gpumem_magic.report.inside import DEEPEST, NOT_SAVED, OUTSIDE, ActivationBreakdown, LayerRow, OperatorRow
from gpumem_magic.snapshot.timeline import Allocation

# As Hugging Face's "model memory anatomy" groups the operators of a transformer; the first class that fits counts.
CONTRACTIONS, NORMALISATIONS, ELEMENTWISE, OTHERS = (
    "contractions",
    "normalisations",
    "element-wise",
    "other operators",
)
_CLASSES = (
    (
        CONTRACTIONS,
        re.compile(r"(add|badd)?b?mm$|addb?mv$|addr$|^mv$|dot$|linear|conv|matmul|einsum|attention|(^|_)rnn|lstm|gru"),
    ),
    (NORMALISATIONS, re.compile(r"softmax|softmin|logsumexp|(^|_)norm|norm$")),
    (
        ELEMENTWISE,
        re.compile(
            r"relu|gelu|silu|mish|elu$|glu$|tanh|sigmoid|softplus|hard(swish|shrink)|dropout|bernoulli|"
            r"^(add|sub|rsub|mul|div|pow|exp|log|log1p|log2|sqrt|rsqrt|abs|neg|sin|cos|erf|square|reciprocal|clamp\w*|where|"
            r"masked_fill|maximum|minimum|lerp|addcmul|addcdiv|sgn|to_copy|foreach_\w+)$"
        ),
    ),
)
_ORDER = (CONTRACTIONS, NORMALISATIONS, ELEMENTWISE, OTHERS)


def inside_of(scene: Scene) -> ActivationBreakdown | None:
    """None where no module ran in the recording. Bytes are requested ones, as in the category."""
    trace = scene.recording.modules
    if not trace.names:
        return None
    moment, position = _moment(scene)
    live = scene.timeline.live_at(position)
    saved = {one.address: one for one in scene.saved}
    activations = [one for one in live if scene.labels[one.index].category == "activations"]
    # Names of parameters, as gradients are called after them; one that two modules use is nobody's.
    owners: dict[str, set[int]] = defaultdict(set)
    top = Layer("")
    for one in activations:
        top.add(_path(_module_of(scene, trace, one, saved.get(one.address)), trace), "activations", one.requested)
    for one in live:
        label = scene.labels[one.index]
        if label.category in ("parameters", "buffers"):
            number = trace.parameters.get((scene.device, one.address))
            top.add(_path(number, trace), "parameters", one.requested)
            if number is not None and label.name:
                owners[label.name].add(number)
    for one in scene.living_in(_end_of_backward(scene, position), "gradients"):
        known = owners.get(scene.labels[one.index].name or "", set())
        top.add(_path(next(iter(known)) if len(known) == 1 else None, trace), "gradients", one.requested)
    types = {name.path: name.type for name in trace.names}
    return ActivationBreakdown(moment, _row(top, "", types), _operators(activations, saved) if scene.saved else ())


def _moment(scene: Scene) -> tuple[str, int]:
    """Which moment it is, in words, and where the device's log stood."""
    if scene.saved:
        return "at the start of the first backward", scene.saved_at
    backward = scene.spans(BACKWARD)
    if backward:
        return "at the start of the first backward", scene.start_of(backward[0])
    failed = next((position for point, _, position in scene.points if point.kind == "error"), None)
    return ("at the peak", scene.peak) if failed is None else ("at the error", failed)


def _end_of_backward(scene: Scene, otherwise: int) -> int:
    backward = scene.spans(BACKWARD)
    return scene.end_of(backward[0]) if backward else otherwise


def _module_of(scene: Scene, trace: ModuleTrace, one: Allocation, saved: Saved | None) -> int | None:
    number = trace.of(scene.device, one)
    if number is not None or saved is None or saved.parameter is None or trace.switches:
        return number
    return trace.parameters.get(saved.parameter)


def class_of(operation: str) -> str:
    """The class of an operation by the name that autograd gives it (``addmm``, ``native_layer_norm``)."""
    return next((name for name, pattern in _CLASSES if pattern.search(operation)), OTHERS)


def _operators(activations: list[Allocation], saved: dict[int, Saved]) -> tuple[OperatorRow, ...]:
    counted: Counter[str] = Counter()
    shared: Counter[str] = Counter()
    operations: dict[str, Counter[str]] = defaultdict(Counter)
    for one in activations:
        keeper = saved.get(one.address)
        if keeper is None:
            counted[NOT_SAVED] += one.requested
            continue
        classes = {name: operation for operation in reversed(keeper.operations) for name in [class_of(operation)]}
        first, *others = [name for name in _ORDER if name in classes]
        counted[first] += one.requested
        operations[first][classes[first]] += one.requested
        for name in others:
            shared[name] += one.requested
    return tuple(
        OperatorRow(name, counted[name], shared[name], dict(operations[name].most_common()))
        for name in (*_ORDER, NOT_SAVED)
        if counted[name] or shared[name]
    )


def _path(number: int | None, trace: ModuleTrace) -> list[str]:
    return [OUTSIDE] if number is None else trace.names[number].path.split(".")[:DEEPEST]


def _row(layer: Layer, path: str, types: dict[str, str]) -> LayerRow:
    """Children stand in the order in which they ran; what no module accounts for is the last."""
    around = f"{path}." if path else ""
    inner = sorted(layer.inner.values(), key=lambda each: each.name == OUTSIDE)
    return LayerRow(
        layer.name,
        types.get(path, ""),
        layer.bytes["activations"],
        layer.bytes["parameters"],
        layer.bytes["gradients"],
        tuple(_row(each, f"{around}{each.name}", types) for each in inner),
    )
