"""Traces of the compiler's: its own fake and functional tensors on ``cuda:i``, in builds that have no device guard for CUDA.

As our own fake mode does (`engine.modes`): C++ is told ``meta:i``, Python ``cuda:i``. What C++ itself puts into a graph then says
``meta:i``, and is put right where the trace ends.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.compiler.settings import configure
from gpumem_magic.virtual.engine.modes import DEVICE_QUERY, META, cuda_for_meta, is_ours
from gpumem_magic.virtual.engine.tensors import VirtualTensor
from gpumem_magic.virtual.torch_face.wrappers import PARAMETERS

# Where `_make_wrapper_subclass` takes the device.
_DEVICE = PARAMETERS.index("device")


def install(patches: Patches) -> None:
    """Until the patches are undone, traces of tensors on ``cuda`` work in every build."""
    _answer_for_the_card(patches)
    _make_wrappers_on_the_card(patches)
    _put_graphs_right(patches)
    _know_wrapped_ones(patches)
    _leave_the_programs_tensors_out(patches)


def _answer_for_the_card(patches: Patches) -> None:
    """Fake tensors say ``cuda:i``, and are made there where the call says so."""
    plain = FakeTensorMode.dispatch
    operators = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def dispatch(
        self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_QUERY:
            answer = _device(args[0])
            return plain(self, func, types, args, kwargs or {}) if answer is None else answer
        if kwargs and not self.in_kernel_invocation and is_ours(kwargs.get("device")):
            kwargs = cuda_for_meta(kwargs)
        out = plain(self, func, types, args, kwargs or {})
        if type(out) is FakeTensor and isinstance(out.constant, VirtualTensor):
            # What is known of a constant on the host is not known of its copy on a device without values.
            out.constant = None
        return out

    def torch_dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _device(args[0]) if func is DEVICE_QUERY else None
        return operators(cls, func, types, args, kwargs or {}) if answer is None else answer

    patches.set(FakeTensorMode, "dispatch", dispatch)
    patches.set(FakeTensor, "__torch_dispatch__", classmethod(torch_dispatch))
    for kind in ("cuda", "cpu", "meta"):
        patches.set(FakeTensor, f"is_{kind}", _is_on(kind))


def _make_wrappers_on_the_card(patches: Patches) -> None:
    """Functional tensors, and the program's classes that wrap tensors."""
    make: Any = torch.Tensor._make_wrapper_subclass  # not always PyTorch's own: `torch_face.wrappers`

    def make_wrapper_subclass(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Functional tensors have CUDA's keys, so that CUDA's rules hold, and C++ is answered as for what is inside. Classes of
        the program's that wrap these are on the card."""
        device = args[_DEVICE] if len(args) > _DEVICE else kwargs.get("device")
        # (Tracers give ours as a device; a program may give a name.)
        if isinstance(device, torch.device) and is_ours(device):
            given = {**dict(zip(PARAMETERS, args, strict=False)), **kwargs}
            given["device"] = _card(given["device"])
            if cls is FunctionalTensor:
                given["dispatch_device"] = True
            shapes = [given.pop(name) for name in PARAMETERS[:2] if name in given]
            return make(cls, *shapes, **given)
        return make(cls, *args, **kwargs)

    patches.set(torch.Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper_subclass))


def _put_graphs_right(patches: Patches) -> None:
    """What a trace wrote down says ``cuda:i``, and what it notes of the program's tensors holds no memory."""
    proxies = importlib.import_module("torch.fx.experimental.proxy_tensor")
    trace = proxies.dispatch_trace

    def dispatch_trace(*args: Any, **kwargs: Any) -> torch.fx.GraphModule:
        graph: torch.fx.GraphModule = trace(*args, **kwargs)
        _for_the_card(graph)
        return graph

    patches.set(proxies, "dispatch_trace", dispatch_trace)
    snapshot = proxies.snapshot_fake

    def snapshot_fake(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """A trace that runs with the program's own tensors (`torch.cond` outside of compiled code) notes of each what one is
        like. As of a card's tensors, that note holds no memory."""
        if not isinstance(tensor, VirtualTensor):
            return snapshot(tensor, *args, **kwargs)
        with FakeTensorMode(allow_fallback_kernels=True):
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    patches.set(proxies, "snapshot_fake", snapshot_fake)


def _leave_the_programs_tensors_out(patches: Patches) -> None:
    """Virtual tensors are fakes to PyTorch: where the compiler asks whether somebody traces already, they do not count."""
    settings = importlib.import_module("torch._functorch.config")
    if hasattr(settings, "check_custom_op_aliasing"):
        # A check that runs the first call of each graph under a mode of its own, which passes over virtual tensors: modes of
        # the program's below it would not see what that call runs.
        configure(patches, settings, "check_custom_op_aliasing", False)
    backends = importlib.import_module("torch._dynamo.backends.common")
    compile_ = backends.aot_module_simplified

    def aot_module_simplified(module: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return compile_(module, of_the_trace(inputs), *args, **kwargs)

    patches.set(backends, "aot_module_simplified", aot_module_simplified)
    whole = importlib.import_module("torch._functorch.aot_autograd")
    construct, detect, process = whole.construct_fake_mode, whole.detect_fake_mode, whole.process_inputs

    def construct_fake_mode(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return construct(_others(inputs), *args, **kwargs)

    def detect_fake_mode(inputs: Any = None) -> Any:
        return detect(_others(inputs))

    def process_inputs(inputs: Any, settings: Any, mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        """Beside the inputs, what a graph has as its own: an optimizer's states."""
        return process([_traced(one, mode) for one in inputs], settings, mode, *args, **kwargs)

    patches.set(whole, "construct_fake_mode", construct_fake_mode)
    patches.set(whole, "detect_fake_mode", detect_fake_mode)
    patches.set(whole, "process_inputs", process_inputs)
    if hasattr(whole, "maybe_get_fake_mode"):  # (2.14 asks the first fake input whether sizes are symbols)
        patches.set(whole, "maybe_get_fake_mode", _mode_of_an_input(whole.maybe_get_fake_mode))
    checks = importlib.import_module("torch._dynamo.utils")
    check = checks.assert_no_fake_params_or_buffers

    def assert_no_fake_params_or_buffers(module: torch.nn.Module) -> None:
        if not any(map(_is_the_programs, (*module.parameters(), *module.buffers()))):
            check(module)

    patches.set(checks, "assert_no_fake_params_or_buffers", assert_no_fake_params_or_buffers)
    tracer = importlib.import_module("torch.fx.experimental.proxy_tensor")._MakefxTracer
    begin = tracer._init_modes_from_inputs

    def init_modes_from_inputs(self: Any, function: Any, inputs: tuple[Any, ...]) -> Any:
        return begin(self, function, tuple(_others(inputs)))

    patches.set(tracer, "_init_modes_from_inputs", init_modes_from_inputs)


def _know_wrapped_ones(patches: Patches) -> None:
    """A tensor that wraps some on the device is the device's, also where others beside them are the host's: a jagged nested
    tensor keeps the lengths of its shortest and longest row in the shapes of two empty ones."""
    fakes = importlib.import_module("torch._subclasses.fake_tensor")
    builder = importlib.import_module("torch._dynamo.variables.builder")
    mode_of, is_one = fakes.maybe_get_fake_mode, fakes.is_fake

    def maybe_get_fake_mode(value: object) -> FakeTensorMode | None:
        inside = _inside(value)
        mode: FakeTensorMode | None = mode_of(value if inside is None else inside)
        return mode

    def is_fake(value: object) -> bool:
        return _inside(value) is not None or bool(is_one(value))

    for module in (fakes, builder):
        patches.set(module, "maybe_get_fake_mode", maybe_get_fake_mode)
        patches.set(module, "is_fake", is_fake)


def _inside(value: Any) -> VirtualTensor | None:
    """A tensor on the device that another wraps."""
    if not is_traceable_wrapper_subclass(value):
        return None
    inner = (getattr(value, name) for name in value.__tensor_flatten__()[0])
    return next(
        (one for part in inner if (one := part if isinstance(part, VirtualTensor) else _inside(part)) is not None), None
    )


def _mode_of_an_input(mode_of: Callable[[object], FakeTensorMode | None]) -> Callable[[object], FakeTensorMode | None]:
    """The trace's, for the program's tensors: that is the mode of what Dynamo makes of them."""
    guards = importlib.import_module("torch._guards")

    def maybe_get_fake_mode(value: object) -> FakeTensorMode | None:
        if not _is_the_programs(value):
            return mode_of(value)
        tracing = guards.TracingContext.try_get()
        return None if tracing is None else tracing.fake_mode

    return maybe_get_fake_mode


def _others(inputs: Any) -> list[Any]:
    """What tells the trace's mode."""
    return [one for one in tree_leaves(inputs) if not _is_the_programs(one)]


def _is_the_programs(value: Any) -> bool:
    """Whether it is a tensor of the device's: a fake one by its class, and none of a trace's. Or one that wraps such tensors."""
    return isinstance(value, VirtualTensor) or _inside(value) is not None


def of_the_trace(inputs: Any) -> Any:
    """A graph's example inputs, virtual tensors as fake ones of the trace's own mode.

    2.9 and 2.10 refuse fake tensors of another mode (`torch/_functorch/_aot_autograd/frontend_utils.py`, `process_inputs`, and
    `detect_fake_mode`); 2.13 takes them anew itself.
    """
    guards = importlib.import_module("torch._guards")
    tracing = guards.TracingContext.try_get()
    if tracing is None or tracing.fake_mode is None:
        return inputs
    try:
        guards.detect_fake_mode(inputs)
    except AssertionError:
        return [_traced(one, tracing.fake_mode) for one in inputs]
    return inputs


def _traced(value: Any, mode: FakeTensorMode) -> Any:
    """A tensor of the program's as one of the trace's, with those of its sizes as symbols that Dynamo took for symbols."""
    if not _is_the_programs(value):
        return value
    tracing = importlib.import_module("torch._guards").TracingContext.try_get()
    if tracing is None:
        return mode.from_tensor(value)
    context = tracing.tensor_to_context.get(value)
    if context is None:
        return mode.from_tensor(value, static_shapes=True)
    return mode.from_tensor(value, symbolic_context=context, source=context.tensor_source, trace=False)


def _is_on(kind: str) -> property:
    return property(lambda tensor: tensor.fake_device.type == kind)


def _for_the_card(graph: torch.fx.GraphModule) -> None:
    """Names the card in a graph where C++ said ``meta:i``. A graph without it stays untouched."""
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            nodes = [node for node in module.graph.nodes if any(map(is_ours, _devices(node)))]
            for node in nodes:
                node.args = tree_map_only(torch.device, _card, node.args)
                node.kwargs = tree_map_only(torch.device, _card, node.kwargs)
            if nodes:
                module.recompile()


def _devices(node: torch.fx.Node) -> list[torch.device]:
    return [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, torch.device)]


def _card(device: torch.device) -> torch.device:
    return torch.device("cuda", device.index) if is_ours(device) else device


def _device(tensor: Any) -> torch.device | None:
    """What C++ is told of a traced tensor on a card; None for all others."""
    if isinstance(tensor, FunctionalTensor):
        return _device(torch._from_functional_tensor(tensor.elem))
    if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != "cuda":
        return None
    return META if tensor.fake_mode.in_kernel_invocation else torch.device("meta", tensor.fake_device.index)
