"""What autograd keeps on a device with an older PyTorch, and the installed one does not: the input of `mean`, before 2.2.

The gradient's formula there has ``self.sym_numel()``, for which the code generator kept the whole tensor
(``tools/autograd/load_derivatives.py``; pytorch issue 109876). The generators of 2.1, 2.2, 2.10 and 2.13, asked for every
operator, tell of no other input that one of them keeps and another does not, but for `nextafter`. What C++ puts together with
`mean` (pooling to one element, losses) keeps it likewise: replaced is autograd's own kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.tensors import VirtualTensor

_FROM, _UNTIL = (2, 0), (2, 2)
_OPERATORS = (_aten.mean.default, _aten.mean.dim)


def install(patches: Patches, versions: list[tuple[int, int]]) -> None:
    """Replaces the operators, if a device's PyTorch is one of those. versions: of each device."""
    keeping = frozenset(index for index, version in enumerate(versions) if _FROM <= version < _UNTIL)
    if keeping:
        kernels = [(operator, partial(_mean, operator, keeping)) for operator in _OPERATORS]
        patches.kernels("AutogradCUDA", kernels, with_keys=True)


class _MeanKeepsItsInput(torch.autograd.Function):
    """A step before the mean that keeps what autograd's own node kept, as long as that did."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input)
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _mean(
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
        self = _MeanKeepsItsInput.apply(self)  # type: ignore[no-untyped-call]
    # The kernel that was replaced is still there under another name of autograd's.
    key = torch._C.DispatchKey
    return operator.redispatch(keys.remove(key.AutogradCUDA).add(key.AutogradMeta), self, *args, **kwargs)  # type: ignore[attr-defined]
