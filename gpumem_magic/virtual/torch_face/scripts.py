"""TorchScript on a virtual device: what `torch.jit` compiled, traced or loaded runs in C++, which asks for a real one.

Three kinds of operators in a graph do so before any dispatch. Those that move to a device initialise CUDA (`to_dispatch` in
``torch/csrc/jit/runtime/register_special_ops.cpp``); others make a tensor of numbers there, or ask a tensor where it lies, and
C++ tells them ``meta:i`` (see `modes`). A graph that has any runs as a copy, in which operators of our own stand in their places
and ask Python; the program's own graph stays as it is, to be printed and saved.

A trace, in turn, is written down by C++ as operators pass: ``meta:i`` among the constants is what it takes for ``cuda:i``.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.jit
import torch.library

from gpumem_magic.looks.tensors import is_tracing
from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import META, STATE, cuda, is_ours, pushed
from gpumem_magic.virtual.engine.tensors import VirtualTensor

_NAMESPACE = "gpumem_magic_script"
_HOW = "bool non_blocking, bool copy, MemoryFormat? memory_format"
_WHERE = "bool cuda_enabled, bool cpu_enabled"
_SCHEMAS = {
    "to": f"(Tensor(a) self, Device? device, ScalarType? dtype, {_HOW}) -> Tensor(a)",
    "to_other": f"(Tensor(a) self, Tensor other, {_HOW}) -> Tensor(a)",
    "reduced": f"(Tensor(a) self, {_WHERE}, ScalarType cuda_dtype, ScalarType cpu_dtype) -> Tensor(a)",
    "full": f"(Tensor(a) self, {_WHERE}) -> Tensor(a)",
    "put": "(Tensor made, Device? device, bool requires_grad) -> Tensor",
    "device": "(Tensor self) -> Device",
    "is_cuda": "(Tensor self) -> bool",
    "is_cpu": "(Tensor self) -> bool",
    "is_meta": "(Tensor self) -> bool",
    "get_device": "(Tensor self) -> int",
}
# By the kind of a node, which of ours takes its place whatever it is given. (The casts are what the interpreter puts before
# operators in a block of autocast's, ``torch/csrc/jit/passes/autocast.cpp``.)
_IN_PLACE_OF = {
    "prim::device": "device",
    "prim::is_cuda": "is_cuda",
    "prim::is_cpu": "is_cpu",
    "prim::is_meta": "is_meta",
    "aten::get_device": "get_device",
    "aten::type_as": "to_other",
    "aten::_autocast_to_reduced_precision": "reduced",
    "aten::_autocast_to_full_precision": "full",
}
_FLAGS = ("non_blocking", "copy", "requires_grad")
_MADE_OF_NUMBERS = ("aten::tensor", "aten::as_tensor")
_TRACERS = (
    (torch._C, "_create_function_from_trace", 1),
    (torch._C, "_create_function_from_trace_with_dict", 1),
    (torch._C, "_create_graph_by_tracing", 0),
    (torch._C.ScriptModule, "_create_method_from_trace", 2),
    (torch._C.ScriptModule, "_create_method_from_trace_with_dict", 2),
)
"""The functions of PyTorch 2.9 to 2.13 that trace, and at which place each is given what it is to trace."""


def install(patches: Patches, engine: Engine) -> None:
    _knowing_names(patches)
    _traces(patches)
    copies = _Copies()
    patches.also_undo(copies.end)
    for kind in (torch.jit.ScriptFunction, torch._C.ScriptMethod):
        patches.set(kind, "__call__", _calling(kind.__call__, engine, copies))
    for name in _WORKING_OUT:
        patches.set(torch._C, name, _with_our_mode(getattr(torch._C, name), engine))


def _knowing_names(patches: Patches) -> None:
    """TorchScript knows `torch.zeros` and its like by identity: under a replaced name it finds the original."""
    original: Any = torch.jit._builtins._find_builtin

    def find_builtin(function: Any) -> Any:
        return original(inspect.unwrap(function) if callable(function) else function)

    annotations: Any = importlib.import_module("torch.jit.annotations")
    of_annotation = annotations.try_ann_to_type

    def try_ann_to_type(ann: Any, *args: Any, **kwargs: Any) -> Any:
        # (In `Optional[torch.device]`, written before the device was turned on, is the type itself.)
        return of_annotation(torch.device if ann is type(META) else ann, *args, **kwargs)

    patches.set(annotations, "try_ann_to_type", try_ann_to_type)
    for module in ("torch.jit._builtins", "torch.jit._recursive"):
        patches.set(importlib.import_module(module), "_find_builtin", find_builtin)


# ---- running


def _calling(original: Callable[..., Any], engine: Engine, copies: _Copies) -> Callable[..., Any]:
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        """What C++ runs makes tensors on the device of its arguments, or on one that it names."""
        # (A trace writes down a call of what the program has.)
        copied, may_be_ours = (None, False) if is_tracing() else copies.of(self)
        if not may_be_ours and not any(isinstance(arg, VirtualTensor) for arg in (*args, *kwargs.values())):
            return original(self, *args, **kwargs)
        outer, STATE.words = STATE.words, []
        try:
            with pushed(engine.mode):
                given = None if copied is None else _given(self, args, kwargs)
                return original(self, *args, **kwargs) if given is None else _CALL(copied, *given)
        except RuntimeError as error:
            _with_words(error, STATE.words)
            raise
        finally:
            STATE.words = outer

    return called


def _with_our_mode(original: Callable[..., Any], engine: Engine) -> Callable[..., Any]:
    def work_out(*args: Any, **kwargs: Any) -> Any:
        with pushed(engine.mode):
            return original(*args, **kwargs)

    return work_out


_WORKING_OUT = ("_freeze_module", "_jit_pass_optimize_frozen_graph", "_jit_pass_optimize_for_inference")
"""What runs the operators of a module that is frozen wherever their inputs are known (`torch.jit.freeze` of 2.9 to 2.13)."""


def _with_words(error: RuntimeError, words: list[str]) -> None:
    """The interpreter says where an operator failed, and of a Python error not a word (`handleError` in ``interpreter.cpp``)."""
    text = error.args[0] if error.args else None
    if words and type(text) is str and text.endswith(_WORDLESS):
        error.args = (f"{text.rstrip()} {words[-1]}\n",)


_WORDLESS = "\nRuntimeError: \n"


def _given(callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """All arguments in their order, a method's module first: what is made of a graph knows no names and no defaults.

    None where they are not what it takes, which it says in words of its own.
    """
    of_method = isinstance(callee, torch._C.ScriptMethod)
    expected = callee.schema.arguments[of_method:]
    open_ones = expected[len(args) :]
    defaults = {one.name: one.default_value for one in open_ones if one.has_default_value()}
    named = {**defaults, **kwargs}
    if len(args) > len(expected) or {one.name for one in open_ones} != {*named}:
        return None
    return [*((callee.owner,) if of_method else ()), *args, *(named[one.name] for one in open_ones)]


_CALL: Callable[..., Any] = torch.jit.ScriptFunction.__call__


class _Copies:
    """For each function and method in TorchScript that asks C++ for a device, the copy that asks Python: one for each state of
    autocast, of which there is an executor each (``torch/csrc/jit/api/function_impl.h``).

    They go with what they are copies of: a graph may hold tensors.
    """

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Any, dict[Any, tuple[Any, bool]]] = WeakKeyDictionary()
        self._made: WeakSet[Any] = WeakSet()
        self._library: torch.library.Library | None = None

    def of(self, callee: Any) -> tuple[Any, bool]:
        """The copy, if there is any; and whether it may come to a device though none of its arguments lies there."""
        autocast = _autocast()
        try:
            return self._of[callee][autocast]
        except KeyError:
            pass
        found: tuple[Any, bool] = None, False
        if callee not in self._made:
            try:
                found = self._make(callee)
            except (RuntimeError, ValueError) as error:
                warnings.warn(
                    f"`{callee.name}` runs in TorchScript as it is: what it puts on a virtual GPU fails there "
                    f"({type(error).__name__}: {error})",
                    stacklevel=3,
                )
        self._of.setdefault(callee, {})[autocast] = found
        return found

    def _make(self, callee: Any) -> tuple[Any, bool]:
        graph = callee.graph.copy()
        _prepare(graph)
        names_one = any(_names_a_card(node) for node in _nodes(graph))
        if not names_one and not any(_substitute(node) is not None for node in _nodes(graph)):
            return None, False
        self._define()
        _rewrite(graph)
        copied = torch._C._create_function_from_graph(callee.name, graph)
        self._made.add(copied)
        # (A module has tensors of its own.)
        return copied, names_one or isinstance(callee, torch._C.ScriptMethod)

    def _define(self) -> None:
        if self._library is not None:
            return
        self._library = library = torch.library.Library(_NAMESPACE, "DEF")
        for name, schema in _SCHEMAS.items():
            library.define(name + schema)
            library.impl(name, _IN_PYTHON[name], "CompositeImplicitAutograd")

    def end(self) -> None:
        self._of.clear()
        if self._library is not None:
            self._library._destroy()
            self._library = None


def _prepare(graph: Any) -> None:
    """What an executor does first (`preoptimizeGraph`, ``torch/csrc/jit/api/function_impl.cpp``): casts go by constants."""
    passes: Any = torch._C
    passes._jit_pass_inline(graph)
    passes._jit_pass_peephole(graph, True)
    passes._jit_pass_constant_propagation_immutable_types(graph)
    passes._jit_pass_autocast(graph)


def _autocast() -> Any:
    """What a graph's casts go by, if any is on outside of it."""
    if not torch._C._is_any_autocast_enabled():
        return None
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu"))


def _nodes(block: Any, *, in_forks: bool = True) -> Iterator[Any]:
    """Every node of a graph or block, with those inside it and those of the graphs that forks run."""
    for node in list(block.nodes()):
        for inner in node.blocks():
            yield from _nodes(inner, in_forks=in_forks)
        if in_forks and node.hasAttribute(_SUBGRAPH):
            yield from _nodes(node.g(_SUBGRAPH))
        yield node


_SUBGRAPH = "Subgraph"


def _names_a_card(node: Any) -> bool:
    value = _constant(node)
    named = isinstance(value, torch.device) and (value.type == "cuda" or is_ours(value))
    return named or isinstance(value, VirtualTensor) or bool(node.kind() == "aten::cuda")


def _constant(node: Any) -> Any:
    return node.output().toIValue() if node.kind() == "prim::Constant" else None


def _substitute(node: Any) -> str | None:
    """By which of our operators a node is to be replaced."""
    kind = node.kind()
    if kind in _IN_PLACE_OF:
        return _IN_PLACE_OF[kind]
    if kind in ("aten::cuda", "aten::to"):
        names = _argument_names(node)
        return "to_other" if "other" in names else "to" if kind == "aten::cuda" or "device" in names else None
    return "put" if kind in _MADE_OF_NUMBERS and not _is_none(_arguments(node).get("device")) else None


def _is_none(value: Any) -> bool:
    return value is None or str(value.type()) == "NoneType"


def _argument_names(node: Any) -> list[str]:
    schema = node.schema()
    return [] if schema == "(no schema)" else _names_in(schema)


def _names_in(schema: str) -> list[str]:
    return [argument.name for argument in torch._C.parse_schema(schema).arguments]


def _arguments(node: Any) -> dict[str, Any]:
    return dict(zip(_argument_names(node), node.inputs(), strict=True))


def _rewrite(graph: Any) -> None:
    for node in _nodes(graph, in_forks=False):
        if node.hasAttribute(_SUBGRAPH):
            inner = node.g(_SUBGRAPH).copy()
            _rewrite(inner)
            node.g_(_SUBGRAPH, inner)
        name = _substitute(node)
        if name is None:
            continue
        with graph.insert_point_guard(node):
            if name == "put":
                _put_after(graph, node)
            else:
                _put_in_its_place(graph, node, name)


def _put_in_its_place(graph: Any, node: Any, name: str) -> None:
    """(What an overload lacks is the default of `torch.Tensor.to`.)"""
    given = _arguments(node)
    if node.kind() == "aten::cuda":
        given["device"] = graph.insertConstant(torch.device("cuda"))
    wanted = [_given_or_default(graph, given, argument) for argument in _names_in(name + _SCHEMAS[name])]
    made = _create(graph, node, name, wanted)
    node.output().replaceAllUsesWith(made.output())
    node.destroy()


def _given_or_default(graph: Any, given: dict[str, Any], argument: str) -> Any:
    if argument == "self":
        return next(iter(given.values()))
    found = given.get(argument)
    return graph.insertConstant(False if argument in _FLAGS else None) if found is None else found


def _put_after(graph: Any, node: Any) -> None:
    """Made on the host, and then put where it is wanted."""
    given = _arguments(node)
    tracked = _given_or_default(graph, given, "requires_grad")
    names = list(given)
    device = given["device"]
    node.replaceInput(names.index("device"), graph.insertConstant(None))
    if "requires_grad" in given:
        node.replaceInput(names.index("requires_grad"), graph.insertConstant(False))
    made = _create(graph, node, "put", [node.output(), device, tracked])
    made.moveAfter(node)
    node.output().replaceAllUsesWith(made.output())
    made.replaceInput(0, node.output())


def _create(graph: Any, node: Any, name: str, inputs: list[Any]) -> Any:
    made = graph.create(f"{_NAMESPACE}::{name}", inputs, 1)
    made.insertBefore(node)
    made.copyMetadata(node)
    made.output().setType(node.output().type())
    return made


# ---- what our operators do


def _device_in_python(device: torch.device | None) -> torch.device | None:
    """As Python knows it: C++ may have worked out ``meta:i`` for a tensor of a module that was frozen."""
    return cuda(device.index) if device is not None and is_ours(device) else device


def _to(
    self: torch.Tensor,
    device: torch.device | None,
    dtype: Any,
    non_blocking: bool,
    copy: bool,
    memory_format: Any,
) -> torch.Tensor:
    place, keep = _device_in_python(device), {} if memory_format is None else {"memory_format": memory_format}
    return self.to(self.device if place is None else place, dtype or self.dtype, non_blocking, copy, **keep)


def _to_other(
    self: torch.Tensor, other: torch.Tensor, non_blocking: bool, copy: bool, memory_format: Any
) -> torch.Tensor:
    return _to(self, other.device, other.dtype, non_blocking, copy, memory_format)


def _put(made: torch.Tensor, device: torch.device | None, requires_grad: bool) -> torch.Tensor:
    place = _device_in_python(device)
    there = made if place is None else made.to(place)
    return there.detach().requires_grad_() if requires_grad else there


def _reduced(
    self: torch.Tensor, cuda_enabled: bool, cpu_enabled: bool, cuda_dtype: torch.dtype, cpu_dtype: torch.dtype
) -> torch.Tensor:
    if self.dtype is not torch.float32 or not (cuda_enabled if self.is_cuda else cpu_enabled and self.is_cpu):
        return self
    return self.to(cuda_dtype if self.is_cuda else cpu_dtype)


def _full(self: torch.Tensor, cuda_enabled: bool, cpu_enabled: bool) -> torch.Tensor:
    is_on = cuda_enabled if self.is_cuda else cpu_enabled and self.is_cpu
    return self.float() if is_on and self.dtype in (torch.float16, torch.bfloat16) else self


_IN_PYTHON: dict[str, Callable[..., Any]] = {
    "to": _to,
    "to_other": _to_other,
    "reduced": _reduced,
    "full": _full,
    "put": _put,
    "device": lambda self: self.device,
    "is_cuda": lambda self: self.is_cuda,
    "is_cpu": lambda self: self.is_cpu,
    "is_meta": lambda self: self.is_meta,
    "get_device": lambda self: self.get_device(),
}


# ---- tracing


def _traces(patches: Patches) -> None:
    for owner, name, place in _TRACERS:
        original = getattr(owner, name, None)
        if original is not None:
            patches.set(owner, name, _naming_devices(original, place))


def _naming_devices(original: Callable[..., Any], place: int) -> Callable[..., Any]:
    def trace(*args: Any, **kwargs: Any) -> Any:
        traced = args[place]

        def run(*inputs: Any, **named: Any) -> Any:
            found = traced(*inputs, **named)
            if is_tracing():
                _name_devices(torch._C._get_tracing_state().graph())
            return found

        return original(*args[:place], run, *args[place + 1 :], **kwargs)

    return trace


def _name_devices(graph: Any) -> None:
    for node in _nodes(graph):
        value = _constant(node)
        if isinstance(value, torch.device) and is_ours(value):
            node.s_("value", str(cuda(value.index)))
