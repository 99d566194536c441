"""Autograd's graph, read without running anything: no unpack hook, no recomputation."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from types import FrameType, GetSetDescriptorType
from typing import Any

import torch

from gpumem_magic.looks.objects import from_class, name_of_class
from gpumem_magic.looks.tensors import is_tensor

_PREFIX = "_raw_saved_"
# How a tensor class takes part in unpacking.
_OF_TENSORS = ("__torch_dispatch__", "__torch_function__", "find_torch_dispatch_rule")
_names: dict[type, tuple[str, ...]] = {}


def is_node_type(kind: type) -> bool:
    """Whether objects of this type are nodes of autograd's graph."""
    return type(from_class(kind, "next_functions")) is GetSetDescriptorType


def variable_of(node: Any) -> torch.Tensor | None:
    """The leaf whose gradient a node collects; None for other nodes."""
    is_slot = type(from_class(type(node), "variable")) is GetSetDescriptorType
    return node.variable if is_slot and is_tensor(node.variable) else None


def next_nodes(node: Any) -> list[Any]:
    """The nodes that feed this one's inputs; none where its function's forward failed, or its graph is gone."""
    try:
        following = node.next_functions
    except RuntimeError:
        # In 2.11 the program's object (`ctx`) does not keep its node (torch/csrc/autograd/python_function.cpp); in 2.13 it does.
        return []
    return [found for found, _ in following if found is not None]


def graph_behind(tops: Iterable[Any]) -> Iterator[Any]:
    """The nodes of the graphs that end in these, each once."""
    todo = list(tops)
    # They are kept, so that an id stays its node's own.
    found: dict[int, Any] = {}
    while todo:
        node = todo.pop()
        if id(node) not in found:
            found[id(node)] = node
            todo += next_nodes(node)
            yield node


def saved_by(node: Any) -> list[tuple[str, Any]]:
    """(argument, value) of what a node keeps for backward: tensors, or what the user's pack hook made of them.

    `_raw_saved_*` and `SavedTensor.data` are private. Where a value can't be read it is left
    out, because the ways that there are else (`_saved_*`, `unpack`) run the user's hooks; 2.9 has no `data`, see `_unhooked`.
    """
    found = []
    for name in _raw_names(type(node)):
        try:
            raw = getattr(node, name)
        except RuntimeError:
            # Freed by backward.
            continue
        several = raw if type(raw) in (tuple, list) else (raw,)
        if several and not hasattr(several[0], "data"):
            several = _unhooked(node, name.removeprefix("_raw"))
        else:
            several = [saved.data for saved in several]
        found += [(name.removeprefix(_PREFIX), value) for value in several if value is not None]
    return found


def _raw_names(kind: type) -> tuple[str, ...]:
    if issubclass(kind, torch.autograd.function.BackwardCFunction):
        # A class of the program's, of which nothing is to be kept.
        return (f"{_PREFIX}tensors",)
    if kind not in _names:
        _names[kind] = tuple(name for name in dir(kind) if name.startswith(_PREFIX))
    return _names[kind]


class _HookFound(BaseException):
    """A saved tensor has a hook, which must not run."""


def _unhooked(node: Any, name: str) -> tuple[Any, ...]:
    """What a node of torch 2.9 keeps under a name, if no hook has to run for it; else nothing.

    There, a saved tensor does not say whether it has hooks. So it is unpacked under a profile function, which Python calls before
    any function of its own, and which raises: a hook is not run. A hook that is not written in Python would be (PyTorch's are).
    Where somebody profiles the program, nothing is read.
    """
    if sys.getprofile() is not None:
        return ()
    sys.setprofile(_refuse_hooks)
    try:
        # Nodes of a program's own functions have no underscore.
        value = getattr(node, name) if hasattr(type(node), name) else getattr(node, name.removeprefix("_"))
    except (_HookFound, RuntimeError):
        # RuntimeError: freed by backward, or changed in place since.
        return ()
    finally:
        sys.setprofile(None)
    several = value if isinstance(value, (tuple, list)) else (value,)
    # The node's own result comes back with the node, which would hold itself.
    return tuple(one.detach() if one is not None and one.grad_fn is node else one for one in several)


def _refuse_hooks(called: FrameType, event: str, argument: Any) -> None:
    caller = called.f_back
    directly = event == "call" and caller is not None and caller.f_code is _unhooked.__code__
    if directly and called.f_code.co_name not in _OF_TENSORS:
        raise _HookFound


def operation_of(node: Any) -> str:
    """What a reader calls a node: ``gelu`` of ``GeluBackward0``."""
    name = name_of_class(type(node))
    short = name.rstrip("0123456789").removesuffix("Backward")
    # (The D of MaxPool2D begins no word.)
    words = re.sub(r"(?<=[^\d_])(?=[A-Z])", "_", short).lower()
    return words if short and short != name else name
