"""Gradients that PyTorch writes into fresh zeros in place: of an index, `gather`, `topk`, `sort`, `max` along a dimension.

C++ takes another way for subclasses of tensors (``areAnyTensorSubclassLike`` in ``FunctionsManual.cpp``):
there the zeros stay, and the gradient is written into a copy of them. On a device there is no copy, so there is none here.

Likewise the gradient of `binary_cross_entropy_with_logits`, which is worked out in one tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.calls import node_now
from gpumem_magic.virtual.engine.engine import Engine, special
from gpumem_magic.virtual.engine.modes import STATE
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


def writes_into_zeros() -> bool:
    """Whether the operator that runs now is the last step of such a gradient, outside of a gradient's own gradient."""
    if not STATE.backward or torch.is_grad_enabled():
        return False
    node = _current_node()
    return node is not None and node.name() in _NODES


# Those that hold memory of their own call `writes_into_zeros` themselves.
_ELSEWHERE = overloads("index_put masked_scatter")


@special(*(function for function in IN_PLACE if function not in _ELSEWHERE))
def _written(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    return engine.run(IN_PLACE[func] if writes_into_zeros() else func, args, kwargs, device)


_IN_ONE_TENSOR = "BinaryCrossEntropyWithLogitsBackward0"
_STEPS: dict[Any, Any] = dict(
    zip(overloads("sub.Tensor mul.Tensor"), overloads("sub_.Tensor mul_.Tensor"), strict=True)
)


@special(*_STEPS)
def _step(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    if STATE.backward and _is_worked_out_here(engine, args):
        return engine.run(_STEPS[func], args, kwargs, device)
    return engine.run(func, args, kwargs, device)


def _is_worked_out_here(engine: Engine, args: Any) -> bool:
    """Whether the first argument is the gradient that the node which runs is working out."""
    node = None if torch.is_grad_enabled() else _current_node()
    if node is None or node.name() != _IN_ONE_TENSOR or not isinstance(args[0], VirtualTensor):
        return False
    placement = engine.table.find(args[0].untyped_storage())
    return placement is not None and placement.node == node_now()
