"""Gradients that PyTorch writes into fresh zeros in place: of an index, `gather`, `topk`, `sort`, `max` along a dimension.

C++ takes another way for subclasses of tensors (``areAnyTensorSubclassLike`` in ``FunctionsManual.cpp``):
there the zeros stay, and the gradient is written into a copy of them. On a device there is no copy, so there is none here.

Likewise the gradients of `binary_cross_entropy_with_logits`, which is worked out in one tensor, of `trace`, `atan2`, `aminmax`,
the larger and the smaller of two, and of `max`, `min`, the medians of a whole tensor and `clamp` by tensors, which find in one
tensor who shares in them; and that of eigenvectors, into whose diagonal the eigenvalues' is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.calls import node_now
from gpumem_magic.virtual.engine.engine import Engine, version_of
from gpumem_magic.virtual.engine.modes import STATE
from gpumem_magic.virtual.engine.overlaps import meets_itself
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.engine.tensors import VirtualTensor

# What C++ calls for subclasses, and for others.
IN_PLACE: dict[Any, Any] = dict(
    zip(
        overloads("index_put scatter.src scatter_add index_add masked_scatter put"),
        overloads("index_put_ scatter_.src scatter_add_ index_add_ masked_scatter_ put_"),
        strict=True,
    )
)
_OF_ZEROS = (
    "Index", "Gather", "IndexSelect", "Topk", "Sort", "Max", "Min", "Kthvalue", "Median", "Nanmedian", "Mode", "Cummax", "Cummin",
    "MaskedSelect", "Take",
)  # fmt: skip
# The node that the backward pass is in, None outside.
_current_node = getattr(torch._C, "_current_autograd_node", lambda: None)
_NODES = frozenset(f"{name}Backward{number}" for name in _OF_ZEROS for number in (0, 1))


def writes_into_zeros(func: Any, zeros: Any) -> bool:
    """Whether an operator that runs now is the last step of such a gradient, and has room for all of it. (One that has a graph of
    its own is no other: zeros have no gradient. `torch.vmap` has all samples share the zeros of one, which are copied.)"""
    if not STATE.backward:
        return False
    node = _current_node()
    return node is not None and node.name() in _NODES and not meets_itself(func, zeros)


# Those that hold memory of their own call `writes_into_zeros` themselves.
_ELSEWHERE = overloads("index_put masked_scatter index_add scatter_add scatter.src")


def is_no_gradient(engine: Engine, args: Any, kwargs: Any) -> bool:
    return not STATE.backward


@special(
    *(function for function in IN_PLACE if function not in _ELSEWHERE), plain=is_no_gradient, outside_backward=True
)
def _written(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    return engine.run(IN_PLACE[func] if writes_into_zeros(func, args[0]) else func, args, kwargs, device)


_CROSS_ENTROPY = frozenset(("BinaryCrossEntropyWithLogitsBackward0", "BinaryCrossEntropyBackward0"))
(_NEGATIVE,) = overloads("neg")
# Which elements share in a gradient is found out in one tensor.
_SHARED = frozenset(
    f"{name}Backward{number}" for name in ("Max", "Min", "Median", "Nanmedian", "Clamp") for number in (0, 1)
)
# `clamp` by tensors no more, since what has no share is found first (``derivatives.yaml``; the builds of 2.12 and 2.14).
WITHOUT_FIRST_FROM = (2, 14)
_BY_BOUNDS = "ClampBackward0"
_TRACE = frozenset(("TraceBackward0",))
_CLEARED = frozenset(
    f"{name}Backward{number}"
    for name, number in (
        ("Atan2", 0),
        ("Maximum", 0),
        ("Minimum", 0),
        ("Fmax", 0),
        ("Fmin", 0),
        ("ClampMin", 1),
        ("ClampMax", 1),
    )
)
_BOTH_ENDS = frozenset(("AminmaxBackward0",))
_STEPS: dict[Any, tuple[Any, frozenset[str]]] = {
    function: (in_place, nodes)
    for names, written, nodes in (
        ("sub.Tensor mul.Tensor", "sub_.Tensor mul_.Tensor", _CROSS_ENTROPY),
        ("logical_and logical_or", "logical_and_ logical_or_", _SHARED),
        ("index_fill.int_Tensor", "index_fill_.int_Tensor", _TRACE),
        ("masked_fill.Scalar", "masked_fill_.Scalar", _CLEARED),
        ("add.Tensor", "add_.Tensor", _BOTH_ENDS),
    )
    for function, in_place in zip(overloads(names), overloads(written), strict=True)
}


def _is_no_step_of(nodes: frozenset[str]) -> Callable[[Engine, Any, Any], bool]:
    """Whether the operator that runs now belongs to none of these gradients."""

    def plain(engine: Engine, args: Any, kwargs: Any) -> bool:
        if not STATE.backward:
            return True
        node = _current_node()
        return node is None or node.name() not in nodes

    return plain


def _step(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    return engine.run(as_device_does(engine, func, args), args, kwargs, device)


for _function, (_, _nodes) in _STEPS.items():
    if _function not in overloads("logical_and logical_or add.Tensor"):
        special(_function, plain=_is_no_step_of(_nodes), outside_backward=True)(_step)


@special(_NEGATIVE, plain=_is_no_step_of(_CROSS_ENTROPY), outside_backward=True)
def _negated(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The gradient of a cross entropy's target begins with the negative scores, and what these are multiplied with comes into
    another tensor (`binary_cross_entropy_with_logits_target_backward`)."""
    out = engine.run(func, args, kwargs, device)
    node = _current_node()
    if node is not None and node.name() in _CROSS_ENTROPY:
        placement = engine.table.find(out.untyped_storage())
        if placement is not None:
            # No step of the node is to write to it.
            placement.node = 0
    return out


_EIGENVECTORS = frozenset(("LinalgEighBackward0",))


def writes_onto_its_diagonal(engine: Engine, args: Any) -> bool:
    """Whether `diagonal_scatter` is a step of that gradient (`linalg_eig_backward` in ``FunctionsManual.cpp``)."""
    return bool(STATE.backward) and _is_worked_out_here(engine, args, _EIGENVECTORS)


def as_device_does(engine: Engine, func: Any, args: Any) -> Any:
    """The operator that a device runs for this one: the one in place where it is a step of such a gradient."""
    if STATE.backward and func in _STEPS:
        in_place, nodes = _STEPS[func]
        if _is_worked_out_here(engine, args, nodes):
            return in_place
    return func


def _is_worked_out_here(engine: Engine, args: Any, nodes: frozenset[str]) -> bool:
    """Whether the first argument was made by the node which runs, and that is one of these."""
    node = _current_node()
    if node is None or node.name() not in nodes or not isinstance(args[0], VirtualTensor) or args[0].requires_grad:
        return False
    if node.name() == _BY_BOUNDS and version_of(args[0]) >= WITHOUT_FIRST_FROM:
        return False
    placement = engine.table.find(args[0].untyped_storage())
    return placement is not None and placement.node == node_now()
