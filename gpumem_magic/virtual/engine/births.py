"""How large allocations came to be: which operator made them, of what, and where in the program.

Asked at each such allocation while a device's log runs. Numbers and strings are kept, alike ones once; of a graph the numbers
that PyTorch gives to its nodes, so that what a backward makes is known by the line of its forward.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch._C import _current_autograd_node, _len_torch_function_stack

from gpumem_magic.devices.base import MOST_INPUTS, Birth, CodePlace
from gpumem_magic.looks.code import (
    LIBRARY,
    MOVES,
    OWN,
    PASSED_OVER,
    TORCH,
    expression_at,
    is_compiler_file,
    is_generated_file,
    is_module_file,
    is_runner_file,
    is_sharing_file,
    line_at,
    moves,
    whose,
)
from gpumem_magic.looks.tensors import no_dispatch, no_functions, size
from gpumem_magic.virtual.engine.alike import Answer
from gpumem_magic.virtual.engine.modes import STATE
from gpumem_magic.virtual.engine.node_numbers import number_of
from gpumem_magic.virtual.engine.tensors import VirtualParameter, VirtualTensor

# Python functions of PyTorch's that users call by their names.
_FUNCTIONS = re.compile(r"[/\\]torch[/\\](?:nn[/\\])?functional\.py$")
_BACKWARD_FILE = re.compile(r"[/\\]torch[/\\]autograd[/\\]graph\.py$")
_ENGINE = "_engine_run_backward"
_FUNCTION, _GRAPH, _SHARING, _COMPILER, _MODULE = "function", "graph", "sharing", "compiler", "module"
_GENERATED, _RUNNER = "generated", "runner"
_MOST_SHARING = 4
# Alike births are kept once; so many different ones are a program's whose shapes never repeat.
_MOST = 50_000
# Where there are only these, and no mode of functions, reading a tensor's looks runs no code but PyTorch's.
_ASKS_NOBODY = frozenset(
    (VirtualTensor, VirtualParameter, torch.Tensor, type(None), bool, int, float, str, torch.dtype)
)

# The frames of the engine's own at least, from `Births._way` on to where the program may be: each costs time to look at.
# `forward` and `_handle`; `of` and who asks it, then `perform` and `_handle`; `of` and who asks it.
_OPERATOR, _ALLOCATING, _FACTORY = 3, 5, 3


@dataclass(frozen=True, eq=False, slots=True)
class _Path:
    """Where the program is, the function of PyTorch's that it called, whether it is autograd's engine that runs, and the
    functions that share memory among ranks or move a module (see `Birth`). One object for all alike."""

    place: CodePlace | None
    function: str
    in_engine: bool
    sharing: tuple[str, ...]


# An operator under way, its arguments, and the way to it where that is known by now.
Call = tuple[Any, Any, Any, _Path | None]
# The kernel that a node of autograd's belongs to, and the way to its forward.
_Forward = tuple[str, _Path]


class _FrameKinds(dict[str, str]):
    """By file, whose code it is, "" for what is passed over: asked of each frame between an operator and the program."""

    def __missing__(self, filename: str) -> str:
        kind = whose(filename)
        if kind is TORCH:
            kind = PASSED_OVER
            if _FUNCTIONS.search(filename):
                kind = _FUNCTION
            elif _BACKWARD_FILE.search(filename):
                kind = _GRAPH
            elif is_sharing_file(filename):
                kind = _SHARING
            elif is_compiler_file(filename):
                kind = _COMPILER
            elif is_module_file(filename):
                kind = _MODULE
        elif kind is PASSED_OVER and is_generated_file(filename):
            kind = _GENERATED
        elif is_runner_file(filename):
            kind = _RUNNER
        found = self[filename] = "" if kind is PASSED_OVER else kind
        return found


class Births:
    """What one engine's operators tell."""

    def __init__(self) -> None:
        self._whose = _FrameKinds()
        self._ways: dict[tuple[Any, ...], _Path] = {}
        self._births: dict[tuple[Any, ...], Birth] = {}
        # By an operator's id, with itself, so that no other has that: operators are hashed by Python.
        self._kernels: dict[int, tuple[str, Any]] = {}
        # By a node's number.
        self._nodes: dict[int, _Forward] = {}

    def forward(self, func: Any, number: int) -> _Path:
        """Autograd has made the node of this number for an operator that runs now: the way to it."""
        if len(self._nodes) > 2 * _MOST:
            self._nodes.clear()
        way = self._way(_OPERATOR)
        self._nodes[number] = self._kernel(func), way
        return way

    def of(self, call: Call | None, answer: Answer | None, tensor: torch.Tensor | None, maker: str = "") -> Birth:
        """Of an allocation under way. answer: what the call has in common with all that look alike, where that is known: it
        spares a look at the arguments. tensor: what it holds, None for what a kernel works with. maker: a factory's name, where
        there is no operator."""
        node = _current_autograd_node()
        name, forward = "", None
        if node is not None:
            name, forward = node.name(), self._nodes.get(number_of(node))
            if forward is not None and not _is_of(name, forward[0]):
                forward = None
        what: Any
        if call is None:
            way, what = self._way(_FACTORY), maker
        else:
            way = call[3] or self._way(_ALLOCATING, forward is not None and forward[1].place is not None)
            what = answer or (self._kernel(call[0]), _inputs(call))
        # As PyTorch has them, which costs little; in Python's numbers and words once for all alike.
        look = None if tensor is None else _look(tensor)
        key = what, look, way, name, forward, STATE.why
        birth = self._births.get(key)
        if birth is None:
            if len(self._births) > _MOST:
                self._births.clear()
            kernel = maker if call is None else self._kernel(call[0])
            inputs = () if call is None else _inputs(call)
            birth = self._births[key] = _birth(kernel, look, inputs, way, name, forward, STATE.why)
        return birth

    def _kernel(self, func: Any) -> str:
        found = self._kernels.get(id(func))
        if found is None:
            found = self._kernels[id(func)] = _kernel(func), func
        return found[0]

    def _way(self, inside: int, stops_at_engine: bool = False) -> _Path:
        """The way from the program to the operator; of the engine and the sharing functions alone where nobody needs to know who
        called. inside: so many frames are the virtual GPU's own for sure, from this one on."""
        frame: FrameType | None = sys._getframe(inside)
        inner: FrameType | None = None
        written: CodePlace | None = None
        function, in_engine, compiled = "", False, False
        sharing: tuple[str, ...] = ()
        known = self._whose
        while frame is not None:
            code = frame.f_code
            kind = known[code.co_filename]
            if kind:
                if kind is OWN:
                    break
                if kind is _RUNNER:
                    frame = None
                    break
                if inner is None:
                    if kind is LIBRARY:
                        inner = None if compiled else frame
                    elif kind is _COMPILER:
                        compiled = True
                    elif kind is _GENERATED:
                        compiled, written = True, written or STATE.generated_lines.get(frame.f_lineno or 0)
                    elif kind is _FUNCTION:
                        function = code.co_name
                    elif kind is _GRAPH and code.co_name == _ENGINE:
                        function, in_engine = "", True
                        if stops_at_engine:
                            frame = None
                            break
                    elif kind is _SHARING and len(sharing) < _MOST_SHARING:
                        sharing = (*sharing, code.co_name)
                    elif kind is _MODULE and moves(code.co_name) and MOVES not in sharing:
                        sharing = (*sharing, MOVES)
            frame = frame.f_back
        key = _key(inner), _key(frame), written, function, in_engine, sharing
        way = self._ways.get(key)
        if way is None:
            if len(self._ways) > _MOST:
                self._ways.clear()
            way = self._ways[key] = _Path(_place(inner or frame, frame, written), function, in_engine, sharing)
        return way


def _place(inner: FrameType | None, own: FrameType | None, written: CodePlace | None) -> CodePlace | None:
    """written: what generated code is for, where it is that which asks."""
    if written is not None:
        return (
            written
            if written.own_file or own is None
            else CodePlace(written.file, written.line, written.function, *_own(own))
        )
    if inner is None:
        return None
    code = inner.f_code
    return CodePlace(
        code.co_filename,
        inner.f_lineno or 0,
        code.co_name,
        *(("", 0, "", "", "") if own is None else _own(own)),
    )


def _own(frame: FrameType) -> tuple[str, int, str, str, str]:
    code, line = frame.f_code, frame.f_lineno or 0
    return code.co_filename, line, code.co_name, line_at(code.co_filename, line), expression_at(code, frame.f_lasti)


def _key(frame: FrameType | None) -> tuple[Any, ...] | None:
    if frame is None:
        return None
    code = frame.f_code
    # (The statements of a cell are compiled one by one: their instructions are counted from the same start.)
    return code.co_filename, frame.f_lineno, code.co_name, frame.f_lasti


def _kernel(func: Any) -> str:
    """``aten::add.Tensor`` as ``add``; with its namespace where that is another (``flash_attn::fwd``)."""
    schema = getattr(func, "_schema", None)
    name = str(schema.name if schema is not None else getattr(func, "__name__", ""))
    return name.removeprefix("aten::")


def _plain(kernel: str) -> str:
    """As a user knows it: ``_log_softmax`` is log_softmax, ``add_`` add, ``_to_copy`` to."""
    name = kernel.rpartition("::")[2].strip("_")
    return _SPOKEN.get(name, name)


_SPOKEN = {
    "to_copy": "to",
    "unsafe_view": "view",
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "native_batch_norm": "batch_norm",
    "cudnn_batch_norm": "batch_norm",
    "native_dropout": "dropout",
    "fused_dropout": "dropout",
    "addmm": "linear",
    "scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
    "scaled_dot_product_cudnn_attention": "scaled_dot_product_attention",
}


@lru_cache(maxsize=4096)
def _is_of(node: str, kernel: str) -> bool:
    """Whether a node's name (``LogSoftmaxBackward0``) is that of a kernel's (``_log_softmax``)."""
    return node.lower().startswith(kernel.rpartition("::")[2].replace("_", "").lower()) or "Backward" not in node


def _look(tensor: torch.Tensor) -> tuple[Any, Any]:
    """The shape and type of what is made."""
    if type(tensor) in _ASKS_NOBODY and not _len_torch_function_stack():
        return tensor.shape, tensor.dtype
    with no_functions(), no_dispatch():
        return tensor.shape, tensor.dtype


def _inputs(call: Call) -> tuple[tuple[Any, ...], ...]:
    """The looks of the tensors among the arguments."""
    values = (*call[1], *call[2].values())
    found: list[tuple[Any, ...]] = []
    if _ASKS_NOBODY.issuperset(map(type, values)) and not _len_torch_function_stack():
        _collect(values, found)
    else:
        with no_functions(), no_dispatch():
            _collect(values, found)
    return tuple(found)


def _collect(values: Any, found: list[tuple[Any, ...]]) -> None:
    """The shapes, strides (None where there are none) and types of the tensors among an operator's arguments."""
    for value in values:
        if len(found) >= MOST_INPUTS:
            return
        if isinstance(value, torch.Tensor):
            strides = value.stride() if value.layout is torch.strided else None
            found.append((size(value), strides, value.dtype))
        elif isinstance(value, (list, tuple)):
            _collect(value, found)


def _birth(
    kernel: str,
    look: Any,
    inputs: tuple[tuple[Any, ...], ...],
    way: _Path,
    node: str,
    forward: _Forward | None,
    why: str,
) -> Birth:
    function, place = way.function, way.place
    if not way.in_engine:
        node = ""
    elif forward is None:
        node = node or "backward"
    else:
        function, place = forward[1].function or forward[0], forward[1].place or place
    shape, dtype = look or (None, None)
    return Birth(
        _plain(function or kernel),
        kernel,
        None if shape is None else tuple(map(int, shape)),
        _type(dtype),
        tuple((_held_shape(lengths, strides), _type(its)) for lengths, strides, its in inputs),
        place,
        node,
        way.sharing,
        why,
    )


def _type(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _held_shape(lengths: Any, strides: Any) -> tuple[int, ...]:
    """The shape without what is only expanded: a dimension along which every element is the same one counts as 1."""
    if strides is None:
        return tuple(map(int, lengths))
    return tuple(1 if stride == 0 else int(length) for length, stride in zip(lengths, strides, strict=True))
