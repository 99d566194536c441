"""Gradients that PyTorch writes into fresh zeros in place: of an index, `gather`, `topk`, `sort`, `max` along a dimension.

C++ takes another way for subclasses of tensors (``areAnyTensorSubclassLike`` in ``FunctionsManual.cpp``):
there the zeros stay, and the gradient is written into a copy of them. On a device there is no copy, so there is none here.
"""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.engine import Engine, special
from gpumem_magic.virtual.engine.modes import STATE

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
