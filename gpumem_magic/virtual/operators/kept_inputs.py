"""What autograd keeps on a device with an older PyTorch, and the installed one does not.

The input of `mean`, before 2.2: the gradient's formula there has ``self.sym_numel()``, for which the code generator kept the
whole tensor (``tools/autograd/load_derivatives.py``; pytorch issue 109876). The generators of 2.1, 2.2, 2.10 and 2.13, asked for
every operator, tell of no other input that one of them keeps and another does not, but for `nextafter`. What C++ puts together
with `mean` (pooling to one element, losses) keeps it likewise: replaced is autograd's own kernel.

The input of `softmax` and `log_softmax`, before 1.11: their derivative took it for its type (`_softmax_backward_data` in
``derivatives.yaml``; the nodes of 1.9 and 1.10 have it as ``_saved_self``, those of 1.11 have not).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.tensors import VirtualTensor

# The first version that keeps the input, and the first that does no more.
_KEPT = {
    _aten.mean.default: ((2, 0), (2, 2)),
    _aten.mean.dim: ((2, 0), (2, 2)),
    _aten._softmax.default: ((0, 0), (1, 11)),
    _aten._log_softmax.default: ((0, 0), (1, 11)),
}


def install(patches: Patches, versions: list[tuple[int, int]]) -> None:
    """Replaces the operators, if a device's PyTorch is one of those. versions: of each device."""
    for operator, (since, until) in _KEPT.items():
        keeping = frozenset(index for index, version in enumerate(versions) if since <= version < until)
        if keeping:
            kernel = partial(_keeping, operator, keeping)
            patches.kernels("AutogradCUDA", [(operator, kernel)], with_keys=True)


class _KeepsItsInput(torch.autograd.Function):
    """A step before the operator that keeps what autograd's own node kept, as long as that did."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input)
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def replaced(operator: Any, keys: Any) -> Callable[..., Any]:
    """Autograd's kernel of an operator on CUDA that one of ours replaced: it is still there under another name.

    keys: those of the call. The dispatcher in Python, which is on while the compiler traces, would look the kernel up anew and
    come back to ours.
    """
    key = torch._C.DispatchKey
    others = keys.remove(key.AutogradCUDA).remove(key.PythonDispatcher)
    return partial(operator.redispatch, others.add(key.AutogradMeta))


def _keeping(
    operator: Callable[..., Any], keeping: frozenset[int], keys: Any, self: Any, *args: Any, **kwargs: Any
) -> Any:
    if (
        isinstance(self, VirtualTensor)
        and self.requires_grad
        and torch.is_grad_enabled()
        and self.device.index in keeping
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad.unpack_dual(self).tangent is None
    ):
        self = _KeepsItsInput.apply(self)  # type: ignore[no-untyped-call]
    return replaced(operator, keys)(self, *args, **kwargs)
