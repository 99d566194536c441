"""Gradients that come to one node from several sides: the second is added into the first, without a new tensor.

After ``accumulate`` in torch/csrc/autograd/input_buffer.cpp: gradient mode is off, nobody but the engine holds the first
gradient, and it lies densely. C++ takes another way for subclasses of tensors, which virtual tensors are: the sum comes as a
plain ``add``, and is told here from one of a gradient's own formula, whose first tensor was made by that very node. Likewise a
leaf keeps a sparse gradient as it comes, where C++ would copy one of a subclass.
"""

from __future__ import annotations

import operator
import sys
import threading
from typing import Any, NamedTuple

import torch
from torch._C import _storage_Use_Count

from gpumem_magic.virtual.engine.calls import node_now
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import STATE
from gpumem_magic.virtual.engine.node_numbers import none_of_the_programs
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.engine.tensors import is_ordinary
from gpumem_magic.virtual.operators.attention import is_mask_added
from gpumem_magic.virtual.operators.sorting import is_dense
from gpumem_magic.virtual.operators.written_gradients import as_device_does

_aten = torch.ops.aten


# Since when the sum is made in place: the builds of 1.9 to 1.12 make a new tensor, those of 2.0 and 2.1 none (1.13 is not known).
_IN_PLACE_FROM = (2, 0)


class _Holders(NamedTuple):
    """How often a tensor is held when it comes here: by Python, by C++, and its storage."""

    references: int
    uses: int
    storage_uses: int


class _Learning:
    """What one holds that only the engine holds, and a sparse one that comes to a leaf; found out once, since it depends on the
    version."""

    running = False
    found: _Holders | None = None
    of_sparse: _Holders | None = None


def learn(engine: Engine) -> None:
    """Has a gradient of no elements meet another, and a sparse one come to a leaf, and keeps how often each is held then."""
    if _Learning.found is not None:
        return
    _Learning.running = True
    try:
        # Whatever the program has set.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autograd.set_detect_anomaly(False),
            none_of_the_programs(),
        ):
            leaf = torch.empty(0, device="cuda", requires_grad=True)
            middle = leaf.neg()
            # None of these keeps a tensor, so no hook of the program's is called.
            torch.autograd.grad(middle.neg() + middle.neg(), leaf, torch.empty_like(leaf))
            weight = torch.empty(1, 0, device="cuda", requires_grad=True)
            # (PyTorch warns where nobody has said whether it is to check the indices.)
            with torch.sparse.check_sparse_tensor_invariants(torch.sparse.check_sparse_tensor_invariants.is_enabled()):
                rows = torch.embedding(weight, torch.empty(0, dtype=torch.long, device="cuda"), sparse=True)
                rows.backward(torch.empty_like(rows))
    finally:
        _Learning.running = False
        # That one is gone.
        engine.holds_sparse = False


def _is_forward_sum(engine: Engine, args: Any, kwargs: Any) -> bool:
    return not (STATE.backward or is_mask_added(args))


@special(_aten.add.Tensor, plain=_is_forward_sum, outside_backward=True)
def _add(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    if not STATE.backward or kwargs or torch.is_grad_enabled() or not _is_engines_sum(engine, args):
        if is_mask_added(args):
            # (A tensor of its own on the same memory: C++ makes it part of the graph.)
            return engine.run(_aten.detach.default, (engine.run(_aten.add_.Tensor, args, kwargs, device),), {}, device)
        return engine.run(as_device_does(engine, func, args), args, kwargs, device)
    if engine.memory.torch_version(device) >= _IN_PLACE_FROM and is_free(args):
        return engine.run(_aten.add_.Tensor, args, kwargs, device)
    out = engine.run(func, args, kwargs, device)
    placement = engine.table.find(out.untyped_storage())
    if placement is not None:
        # No node made it: the next gradient that comes here is added to it.
        placement.node = 0
    return out


def _is_engines_sum(engine: Engine, args: Any) -> bool:
    """Whether two gradients meet here, and it is no sum within a gradient's own formula."""
    first, second = args
    if not is_ordinary(first) or not is_ordinary(second):
        return False
    if first.shape != second.shape or first.dtype != second.dtype or torch.strided is not first.layout:
        return False
    placement = engine.table.find(first.untyped_storage())
    node = torch._C._current_autograd_node()
    # (Compiled autograd runs no nodes: its sums are its own.)
    if placement is None or node is None:
        return False
    return placement.node != node_now() or _meets_itself(node)


def _meets_itself(node: Any) -> bool:
    """Whether two of a node's own gradients go to the same place, as those of ``x * x``, and all is done that comes before."""
    following = [edge for edge in node.next_functions if edge[0] is not None]
    if len(set(following)) == len(following):
        return False
    own = _OWN_SUMS.get(node.name(), 0)
    if not own:
        return True
    if _SUMMED.node != node_now():
        _SUMMED.node, _SUMMED.times = node_now(), 0
    _SUMMED.times += 1
    if _SUMMED.times <= own:
        return False
    # (The node of a graph that is kept runs again.)
    _SUMMED.node = 0
    return True


# Nodes that add up tensors of their own before, and how often (``FunctionsManual.cpp``).
_OWN_SUMS = {"Atan2Backward0": 1, "LinalgLstsqBackward0": 2}


class _Summed(threading.local):
    """The one of these that is at it in this thread, and whose gradients have not met yet (0 for none); and how often it has."""

    node = 0
    times = 0


_SUMMED = _Summed()


# Both are asked about the first of an operator's arguments, and not given it: who calls a function in Python holds what it
# passes, too, once the compiler watches the interpreter's frames, in whichever thread.


def is_free(args: Any) -> bool:
    """Whether only the engine holds the tensor, which lies densely."""
    tensor = args[0]
    held = _Holders(sys.getrefcount(tensor), tensor._use_count(), _storage_Use_Count(tensor.untyped_storage()._cdata))
    if _Learning.running:
        _Learning.found = held
    alone = _Learning.found
    return alone is not None and all(map(operator.le, held, alone)) and is_dense(tensor)


def may_be_stolen(args: Any) -> bool:
    """Whether only the engine holds a sparse gradient that a leaf without one would copy (``accumulate_grad.h``): C++ takes its
    parts, as they come from Python, for held by others, too."""
    gradient = args[0]
    node = torch._C._current_autograd_node()
    if node is None or type(node).__name__ != "AccumulateGrad" or torch.is_grad_enabled():
        return False
    held = _Holders(sys.getrefcount(gradient), gradient._use_count(), 0)
    if _Learning.running:
        _Learning.of_sparse = held
    alone = _Learning.of_sparse
    return alone is not None and all(map(operator.le, held, alone))
