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
from torch._C import _current_autograd_node

from gpumem_magic.devices.base import Birth, CodePlace
from gpumem_magic.looks import tensors
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

# Python functions of PyTorch's that users call by their names.
_FUNCTIONS = re.compile(r"[/\\]torch[/\\](?:nn[/\\])?functional\.py$")
_BACKWARD_FILE = re.compile(r"[/\\]torch[/\\]autograd[/\\]graph\.py$")
_ENGINE = "_engine_run_backward"
_FUNCTION, _GRAPH, _SHARING, _COMPILER = "function", "graph", "sharing", "compiler"
_MOST_SHARING = 4
_MOST_INPUTS = 8
# Alike births are kept once; so many different ones are a program's whose shapes never repeat.
_MOST = 50_000


class Births:
    """What one engine's operators tell."""

    def __init__(self) -> None:
        self._whose: dict[str, str] = {}
        self._places: dict[tuple[Any, ...], CodePlace] = {}
        self._births: dict[tuple[Any, ...], Birth] = {}
        self._kernels: dict[Any, str] = {}
        # The number of a node -> the kernel that it belongs to, the operator's name, and where that was called.
        self._nodes: dict[int, tuple[str, str, CodePlace | None]] = {}

    def forward(self, func: Any, number: int) -> None:
        """Autograd has made the node of this number for an operator that runs now."""
        if len(self._nodes) > 2 * _MOST:
            self._nodes.clear()
        place, function, _, _ = self._place()
        kernel = self._kernel(func)
        self._nodes[number] = kernel, _plain(function or kernel), place

    def of(self, call: tuple[Any, Any, Any] | None, tensor: torch.Tensor | None, maker: str = "") -> Birth:
        """Of an allocation under way. call: the operator and its arguments; maker: a factory's name, where there is no operator;
        tensor: what it holds, None for what a kernel works with."""
        node = _current_autograd_node()
        name, known = ("", None) if node is None else self._behind(node)
        place, function, in_engine, sharing = self._place(stops_at_engine=known is not None and known[2] is not None)
        kernel = maker if call is None else self._kernel(call[0])
        if not in_engine:
            name = ""
        elif known is None:
            name = name or "backward"
        else:
            function, place = known[1], known[2] or place
        inputs: list[tuple[Any, ...]] = []
        with tensors.no_functions(), tensors.no_dispatch():
            if call is not None:
                _collect((*call[1], *call[2].values()), inputs)
            look = None if tensor is None else (tensor.shape, tensor.dtype)
        # As PyTorch has them, which costs little; in Python's numbers once for all alike.
        key = function or kernel, kernel, look, tuple(inputs), place, name, sharing
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
        found = self._kernels.get(func)
        if found is None:
            found = self._kernels[func] = _kernel(func)
        return found

    def _place(self, stops_at_engine: bool = False) -> tuple[CodePlace | None, str, bool, tuple[str, ...]]:
        """Where the program is, the function of PyTorch's that it called, whether it is autograd's engine that runs, and the
        functions that share memory among ranks (see `Birth`); of the last two alone, where nobody needs to know who called."""
        frame: FrameType | None = sys._getframe(2)
        inner: FrameType | None = None
        function, in_engine, compiled = "", False, False
        sharing: tuple[str, ...] = ()
        known = self._whose
        while frame is not None:
            code = frame.f_code
            kind = known.get(code.co_filename) or self._kind_of(code.co_filename)
            if kind is OWN:
                return self._known_place(inner or frame, frame, function), function, in_engine, sharing
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
        return (None if inner is None else self._known_place(inner, None, function)), function, in_engine, sharing

    def _kind_of(self, filename: str) -> str:
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
        self._whose[filename] = kind
        return kind

    def _known_place(self, inner: FrameType, own: FrameType | None, function: str) -> CodePlace:
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
