"""How large allocations came to be: which operator made them, of what, and where in the program.

Asked at each such allocation while a device's log runs. Numbers and strings are kept, alike ones once; of a graph the numbers
that PyTorch gives to its nodes, so that what a backward makes is known by the line of its forward.
"""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any

import torch
from torch._C import _current_autograd_node, _len_torch_function_stack

from gpumem_magic.devices.base import Birth, CodePlace
from gpumem_magic.looks.code import (
    LIBRARY,
    OWN,
    PASSED_OVER,
    TORCH,
    expression_at,
    is_compiler_file,
    is_sharing_file,
    line_at,
    whose,
)
from gpumem_magic.looks.tensors import no_dispatch, no_functions
from gpumem_magic.virtual.engine.tensors import VirtualTensor

# Python functions of PyTorch's that users call by their names.
_FUNCTIONS = re.compile(r"[/\\]torch[/\\](?:nn[/\\])?functional\.py$")
_BACKWARD_FILE = re.compile(r"[/\\]torch[/\\]autograd[/\\]graph\.py$")
_ENGINE = "_engine_run_backward"
_FUNCTION, _GRAPH, _SHARING, _COMPILER = "function", "graph", "sharing", "compiler"
_MOST_SHARING = 4
_MOST_INPUTS = 8
# Alike births are kept once; so many different ones are a program's whose shapes never repeat.
_MOST = 50_000
# Where there are only these, and no mode of functions, reading a tensor's looks runs no code but PyTorch's.
_ASKS_NOBODY = frozenset((VirtualTensor, torch.Tensor, type(None), bool, int, float, str, torch.dtype))

# The frames of the engine's own at least, from `Births._way` on to where the program may be: each costs time to look at.
# `forward` and `_handle`; `of` and who asks it, then `perform` and `_handle`; `of` and who asks it.
_OPERATOR, _ALLOCATING, _FACTORY = 3, 5, 3

# Where the program is, the function of PyTorch's that it called, whether it is autograd's engine that runs, and the functions
# that share memory among ranks (see `Birth`).
_Way = tuple[CodePlace | None, str, bool, tuple[str, ...]]
# An operator under way, its arguments, and the way to it where that is known by now.
Call = tuple[Any, Any, Any, _Way | None]


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
        found = self[filename] = "" if kind is PASSED_OVER else kind
        return found


class Births:
    """What one engine's operators tell."""

    def __init__(self) -> None:
        self._whose = _FrameKinds()
        self._places: dict[tuple[Any, ...], CodePlace] = {}
        self._births: dict[tuple[Any, ...], Birth] = {}
        # By an operator's id, with itself, so that no other has that: operators are hashed by Python.
        self._kernels: dict[int, tuple[str, Any]] = {}
        # The number of a node -> the kernel that it belongs to, the operator's name, and where that was called.
        self._nodes: dict[int, tuple[str, str, CodePlace | None]] = {}

    def forward(self, func: Any, number: int) -> _Way:
        """Autograd has made the node of this number for an operator that runs now: the way to it."""
        if len(self._nodes) > 2 * _MOST:
            self._nodes.clear()
        way = self._way(_OPERATOR)
        kernel = self._kernel(func)
        self._nodes[number] = kernel, _plain(way[1] or kernel), way[0]
        return way

    def of(self, call: Call | None, tensor: torch.Tensor | None, maker: str = "") -> Birth:
        """Of an allocation under way. maker: a factory's name, where there is no operator; tensor: what it holds, None for what a
        kernel works with."""
        node = _current_autograd_node()
        name, known = ("", None) if node is None else self._behind(node)
        if call is None:
            way, kernel = self._way(_FACTORY), maker
        else:
            way = call[3] or self._way(_ALLOCATING, known is not None and known[2] is not None)
            kernel = self._kernel(call[0])
        place, function, in_engine, sharing = way
        if not in_engine:
            name = ""
        elif known is None:
            name = name or "backward"
        else:
            function, place = known[1], known[2] or place
        # As PyTorch has them, which costs little; in Python's numbers once for all alike.
        key = function or kernel, kernel, *_looks(call, tensor), place, name, sharing
        birth = self._births.get(key)
        if birth is None:
            if len(self._births) > _MOST:
                self._births.clear()
            birth = self._births[key] = _birth(*key)
        return birth

    def _behind(self, node: Any) -> tuple[str, tuple[str, str, CodePlace | None] | None]:
        """The name of a graph's node, and what its forward noted: the kernel, its operator's name and where that was called."""
        name = node.name()
        known = self._nodes.get(node._sequence_nr())
        return name, known if known is not None and _is_of(name, known[0]) else None

    def _kernel(self, func: Any) -> str:
        found = self._kernels.get(id(func))
        if found is None:
            found = self._kernels[id(func)] = _kernel(func), func
        return found[0]

    def _way(self, inside: int, stops_at_engine: bool = False) -> _Way:
        """The way from the program to the operator; of the engine and the sharing functions alone where nobody needs to know who
        called. inside: so many frames are the virtual GPU's own for sure, from this one on."""
        frame: FrameType | None = sys._getframe(inside)
        inner: FrameType | None = None
        function, in_engine, compiled = "", False, False
        sharing: tuple[str, ...] = ()
        known = self._whose
        while frame is not None:
            code = frame.f_code
            kind = known[code.co_filename]
            if kind:
                if kind is OWN:
                    return self._known_place(inner or frame, frame), function, in_engine, sharing
                if inner is None:
                    if kind is LIBRARY:
                        inner = None if compiled else frame
                    elif kind is _COMPILER:
                        compiled = True
                    elif kind is _FUNCTION:
                        function = code.co_name
                    elif kind is _GRAPH and code.co_name == _ENGINE:
                        if stops_at_engine:
                            return None, "", True, sharing
                        function, in_engine = "", True
                    elif kind is _SHARING and len(sharing) < _MOST_SHARING:
                        sharing = (*sharing, code.co_name)
            frame = frame.f_back
        return (None if inner is None else self._known_place(inner, None)), function, in_engine, sharing

    def _known_place(self, inner: FrameType, own: FrameType | None) -> CodePlace:
        key = _key(inner) if own is None or own is inner else (*_key(inner), *_key(own))
        place = self._places.get(key)
        if place is None:
            if len(self._places) > _MOST:
                self._places.clear()
            place = self._places[key] = CodePlace(
                inner.f_code.co_filename,
                inner.f_lineno or 0,
                inner.f_code.co_name,
                *(("", 0, "", "", "") if own is None else _own(own)),
            )
        return place


def _own(frame: FrameType) -> tuple[str, int, str, str, str]:
    code, line = frame.f_code, frame.f_lineno or 0
    return code.co_filename, line, code.co_name, line_at(code.co_filename, line), expression_at(code, frame.f_lasti)


def _key(frame: FrameType) -> tuple[Any, ...]:
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


def _is_of(node: str, kernel: str) -> bool:
    """Whether a node's name (``LogSoftmaxBackward0``) is that of a kernel's (``_log_softmax``)."""
    return node.lower().startswith(kernel.rpartition("::")[2].replace("_", "").lower()) or "Backward" not in node


def _looks(call: Call | None, tensor: torch.Tensor | None) -> tuple[Any, tuple[Any, ...]]:
    """The shape and type of what is made (None for what a kernel works with); the looks of the tensors among the arguments."""
    values = (tensor,) if call is None else (tensor, *call[1], *call[2].values())
    if _ASKS_NOBODY.issuperset(map(type, values)) and not _len_torch_function_stack():
        return _read(*values)
    with no_functions(), no_dispatch():
        return _read(*values)


def _read(tensor: torch.Tensor | None, *values: Any) -> tuple[Any, tuple[Any, ...]]:
    inputs: list[tuple[Any, ...]] = []
    _collect(values, inputs)
    return None if tensor is None else (tensor.shape, tensor.dtype), tuple(inputs)


def _collect(values: Any, found: list[tuple[Any, ...]]) -> None:
    """The shapes, strides (None where there are none) and types of the tensors among an operator's arguments."""
    for value in values:
        if len(found) >= _MOST_INPUTS:
            return
        if isinstance(value, torch.Tensor):
            strides = value.stride() if value.layout is torch.strided else None
            found.append((value.shape, strides, value.dtype))
        elif isinstance(value, (list, tuple)):
            _collect(value, found)


def _birth(
    operator: str,
    kernel: str,
    look: Any,
    inputs: tuple[tuple[Any, ...], ...],
    place: CodePlace | None,
    node: str,
    sharing: tuple[str, ...],
) -> Birth:
    shape, dtype = look or (None, None)
    return Birth(
        _plain(operator),
        kernel,
        None if shape is None else tuple(map(int, shape)),
        _type(dtype),
        tuple((_held_shape(lengths, strides), _type(its)) for lengths, strides, its in inputs),
        place,
        node,
        sharing,
    )


def _type(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _held_shape(lengths: Any, strides: Any) -> tuple[int, ...]:
    """The shape without what is only expanded: a dimension along which every element is the same one counts as 1."""
    if strides is None:
        return tuple(map(int, lengths))
    return tuple(1 if stride == 0 else int(length) for length, stride in zip(lengths, strides, strict=True))
