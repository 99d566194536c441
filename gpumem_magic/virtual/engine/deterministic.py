"""What a program is refused that asked for deterministic algorithms, where a card's kernel has none.

`torch.use_deterministic_algorithms` counts on virtual devices as on a card: the operators below raise there, or warn with
``warn_only=True``, in PyTorch's words. The table is that of the callers of `alertNotDeterministic` in the CUDA builds of 2.9.1,
2.13.0 and 2.14.1, read from their code; where those of 2.9.1 go no further because C++ chose another way before, it has nothing.
(`torch.nn.functional` has its own ways for some, which come here as other operators. cuDNN's sampling of grids, which 2.13
refuses under a name of its own and 2.9.1 does not, is not told from PyTorch's.)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.utils.deterministic
from torch._C import _get_deterministic_algorithms, _get_deterministic_algorithms_warn_only

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.calls import users_line

are_asked_for = _get_deterministic_algorithms

# What its kernel begins with no element and makes as large as it has to be, as the CUDA builds of 2.1, 2.6, 2.12 and 2.13 do, and
# a recording with 2.1. (Others begin with their result's size.)
GROWN = frozenset(
    overloads(
        "embedding index_select where.self arange arange.start arange.start_step range range.step eye eye.m median.dim"
        " nanmedian.dim kthvalue mode std.correction var.correction std_mean.correction var_mean.correction bucketize.Tensor"
        " searchsorted.Tensor searchsorted.Scalar bucketize.Scalar max_unpool2d max_unpool3d glu_backward multinomial"
        " max_pool3d_with_indices _adaptive_avg_pool3d multi_margin_loss_backward abs logical_not logical_and"
        " logical_or logical_xor complex polar"
    )
)
_FILLED_FROM = (2, 1)

# By operator, in all its forms or one: where its kernel has no order (``-``: everywhere), and what it calls itself.
_TABLE = """
_adaptive_avg_pool2d_backward - adaptive_avg_pool2d_backward_cuda
_adaptive_avg_pool3d_backward - adaptive_avg_pool3d_backward_cuda
adaptive_max_pool2d_backward - adaptive_max_pool2d_backward_cuda
avg_pool3d_backward - avg_pool3d_backward_cuda
max_pool3d_with_indices_backward - max_pool3d_with_indices_backward_cuda
fractional_max_pool2d_backward - fractional_max_pool2d_backward_cuda
fractional_max_pool3d_backward - fractional_max_pool3d_backward_cuda
max_unpool2d - max_unpooling2d_forward_out
max_unpool3d - max_unpooling3d_forward_out
grid_sampler_2d_backward - grid_sampler_2d_backward_cuda
grid_sampler_3d_backward - grid_sampler_3d_backward_cuda
reflection_pad1d_backward - reflection_pad1d_backward_out_cuda
reflection_pad3d_backward - reflection_pad3d_backward_out_cuda
replication_pad1d_backward - replication_pad1d_backward_cuda
replication_pad2d_backward - replication_pad2d_backward_cuda
replication_pad3d_backward - replication_pad3d_backward_cuda
upsample_linear1d_backward - upsample_linear1d_backward_out_cuda
upsample_bilinear2d_backward - upsample_bilinear2d_backward_out_cuda
upsample_bicubic2d_backward - upsample_bicubic2d_backward_out_cuda
upsample_trilinear3d_backward - upsample_trilinear3d_backward_out_cuda
_upsample_bilinear2d_aa_backward - upsample_bilinear2d_aa_backward_out_cuda
_upsample_bicubic2d_aa_backward - upsample_bicubic2d_aa_backward_out_cuda
_ctc_loss_backward - ctc_loss_backward_gpu
_embedding_bag_dense_backward largest embedding_bag_backward_cuda_max
nll_loss2d_forward reduced nll_loss2d_forward_out_cuda_template
index_reduce - index_reduce_cuda
index_reduce_ - index_reduce_cuda
put - put_
put_ - put_
scatter_reduce.two multiplied scatter_reduce_cuda_prod_
scatter_reduce_.two multiplied scatter_reduce_cuda_prod_
scatter.reduce multiplied scatter_reduce_cuda_kernel
scatter_.reduce multiplied scatter_reduce_cuda_kernel
bincount weighted _bincount_cuda
histc fractions _histc_cuda with floating point input
median.dim - median CUDA with indices output
median.dim_values - median CUDA with indices output
nanmedian.dim - median CUDA with indices output
nanmedian.dim_values - median CUDA with indices output
kthvalue older kthvalue CUDA
"""
# The products of cuBLAS, which up to 2.9 wants a setting of its own (`alertCuBLASConfigNotDeterministic`).
_PRODUCTS = "mm addmm addmm_ bmm baddbmm baddbmm_ addbmm mv addmv addmv_ dot vdot _addmm_activation linear"
# In 2.9.1 and not in 2.13.0; what is between was not looked at.
_OLDER = (2, 10)
_LARGEST = 2
_ORDERLY_WORKSPACES = (":4096:8", ":16:8")


def are_ensured() -> bool:
    """Whether such are asked for without ``warn_only=True``, with which the kernels of attention stay as they are, and warn
    (``attention_backward.cu``)."""
    return are_asked_for() and not _get_deterministic_algorithms_warn_only()


def fills_what_grows(version: tuple[int, int]) -> bool:
    """Whether PyTorch fills what a tensor grows by: a tensor of one element comes and goes (`fill_resize_deterministic_` in
    ``Resize.h``)."""
    settings: Any = torch.utils.deterministic
    return are_asked_for() and settings.fill_uninitialized_memory and version >= _FILLED_FROM


def _argument(args: Any, kwargs: Any, place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


# Each is asked with the operator's arguments and the version of the device's PyTorch.
_WHERE: dict[str, Callable[[Any, Any, tuple[int, int]], bool]] = {
    "-": lambda args, kwargs, version: True,
    "largest": lambda args, kwargs, version: _argument(args, kwargs, 7, "mode") == _LARGEST,
    "reduced": lambda args, kwargs, version: _argument(args, kwargs, 3, "reduction", 1) != 0,
    # (Sums and means are written as `index_put_` does it.)
    "multiplied": lambda args, kwargs, version: _argument(args, kwargs, 4, "reduce") in ("prod", "multiply"),
    "weighted": lambda args, kwargs, version: _argument(args, kwargs, 1, "weights") is not None,
    "fractions": lambda args, kwargs, version: args[0].is_floating_point(),
    "older": lambda args, kwargs, version: version < _OLDER,
    "cuBLAS": lambda args, kwargs, version: (
        version < _OLDER and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _ORDERLY_WORKSPACES
    ),
}

_CUBLAS = (
    "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
    "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses CuBLAS and you "
    "have CUDA >= 10.2. To enable deterministic behavior in this case, you must set an environment variable before running your "
    "PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8. For more information, go to "
    "https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility"
)

_REFUSAL = (
    "{} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'. You can turn off "
    "determinism just for this operation, or you can use the 'warn_only=True' option, if that's acceptable for your "
    "application. You can also file an issue at https://github.com/pytorch/pytorch/issues to help us prioritize adding "
    "deterministic support for this operation."
)
_WARNING = (
    "{} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True, warn_only=True)'. "
    "You can file an issue at https://github.com/pytorch/pytorch/issues to help us prioritize adding deterministic support for "
    "this operation."
)


# PyTorch's rules for shapes warn of these.
_WARNED_OF = ("median", "histc", "max_unpool2d", "max_unpool3d")


class _Said(NamedTuple):
    """Where an operator has no order, and the words of the refusal and of the warning; None where another warns."""

    where: Callable[[Any, Any, tuple[int, int]], bool]
    refusal: str
    warning: str | None


def _table() -> Iterator[tuple[Any, _Said]]:
    for line in _TABLE.split("\n")[1:-1]:
        operator, where, name = line.split(" ", 2)
        warning = None if operator.partition(".")[0] in _WARNED_OF else _WARNING.format(name)
        yield from ((one, _Said(_WHERE[where], _REFUSAL.format(name), warning)) for one in _forms(operator))
    for operator in _PRODUCTS.split():
        yield from ((one, _Said(_WHERE["cuBLAS"], _CUBLAS, _CUBLAS)) for one in _forms(operator))


def _forms(operator: str) -> list[Any]:
    packet, _, form = operator.partition(".")
    operators = getattr(_aten, packet)
    return [getattr(operators, one) for one in ((form,) if form else operators.overloads())]


_SAID = dict(_table())


def refuse_other_orders(func: Any, args: Any, kwargs: Any, version: tuple[int, int]) -> None:
    """Raises RuntimeError, or warns, as the device's PyTorch does before an operator whose result depends on the order in which
    its threads come. To be called where such are asked for (`are_asked_for`). version: of the device's PyTorch."""
    said = _SAID.get(func)
    if said is None or not said.where(args, kwargs, version):
        return
    if not _get_deterministic_algorithms_warn_only():
        raise RuntimeError(said.refusal)
    if said.warning is not None:
        warnings.warn_explicit(said.warning, UserWarning, *users_line())
