"""`matrix_rank`, which C++ puts together otherwise for subclasses of tensors, which virtual ones are.

How many singular values or eigenvalues are large is written into the result, which was made first (`matrix_rank_impl` in
``LinearAlgebra.cpp``, as in 2.9 to 2.13; an H100 was asked so with 2.11). For subclasses C++ makes another result, and leaves
`out` as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.modes import has_others
from gpumem_magic.virtual.engine.tensors import VirtualTensor, engine_of

_DIMS_OF_A_MATRIX = 2


def _by_two(usual: Any) -> Callable[..., torch.Tensor]:
    def rank(
        input: torch.Tensor, *, atol: Any = None, rtol: Any = None, hermitian: bool = False, out: Any = None
    ) -> torch.Tensor:
        if _is_counted(input, atol, rtol, out):
            return _counted(input, atol, rtol, hermitian, out)
        return _usual(usual, (input,), {"atol": atol, "rtol": rtol, "hermitian": hermitian}, out)

    return rank


def _by_one(usual: Any) -> Callable[..., torch.Tensor]:
    def rank(input: torch.Tensor, tol: Any, hermitian: bool = False, *, out: Any = None) -> torch.Tensor:
        if _is_counted(input, tol, None, out):
            return _counted(input, tol, 0.0, hermitian, out)
        return _usual(usual, (input, tol, hermitian), {}, out)

    return rank


def _usual(usual: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> torch.Tensor:
    """C++'s way for subclasses, which also refuses what is refused."""
    into = {} if out is None else {"out": out}
    return usual._op_dk(  # type: ignore[no-any-return]
        torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs, **into
    )


def _is_counted(input: Any, atol: Any, rtol: Any, out: Any) -> bool:
    if not isinstance(input, VirtualTensor) or has_others(engine_of(input).mode) or input.dim() < _DIMS_OF_A_MATRIX:
        return False
    tolerances = [one for one in (atol, rtol) if isinstance(one, torch.Tensor)]
    if any(one.is_complex() or one.device != input.device for one in tolerances):
        return False
    if out is None:
        return True
    if not isinstance(out, VirtualTensor) or out.device != input.device or out.dtype != torch.int64:
        return False
    return not out.numel() or out.shape == input.shape[:-2]


def _counted(input: torch.Tensor, atol: Any, rtol: Any, hermitian: bool, out: Any) -> torch.Tensor:
    shape = input.shape[:-2]
    result: torch.Tensor = input.new_empty(shape, dtype=torch.int64) if out is None else out.resize_(shape)
    absolute, relative = _tolerances(input, atol, rtol)
    if not input.numel():
        return result.fill_(0)
    if hermitian:
        found = _aten.linalg_eigvalsh.default(input)
        found = found.abs()
        largest = found.amax(-1, keepdim=True)
    else:
        found = _aten.linalg_svdvals.default(input)
        largest = found.narrow(-1, 0, 1)
    product = relative.unsqueeze(-1) * largest
    least = absolute.unsqueeze(-1).maximum(product)
    del product
    are_large = found > least
    _aten.sum.IntList_out(are_large, [-1], out=result)
    # C++ lets go of the last first.
    del are_large, least, largest, found, absolute, relative
    return result


def _tolerances(input: torch.Tensor, atol: Any, rtol: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers on the device, the absolute one first (`get_atol_rtol` in ``LinearAlgebra.cpp``)."""

    def number(value: float) -> torch.Tensor:
        return input.new_full((), value, dtype=torch.float64)

    usual = torch.finfo(input.dtype).eps * max(input.shape[-2:])
    if isinstance(atol, torch.Tensor):
        if rtol is not None:
            return atol, rtol if isinstance(rtol, torch.Tensor) else number(rtol)
        relative, none = number(usual), number(0.0)
        is_given = atol > 0
        return atol, torch.where(is_given, none, relative)
    absolute = number(atol or 0.0)
    if isinstance(rtol, torch.Tensor):
        return absolute, rtol
    if rtol is None:
        rtol = 0.0 if atol is not None and atol > 0 else usual
    return absolute, number(rtol)


_RANK = _aten.linalg_matrix_rank
WAYS: dict[Any, Callable[..., torch.Tensor]] = {
    **{
        kind: _by_two(kind)
        for kind in (
            _RANK.atol_rtol_tensor,
            _RANK.atol_rtol_float,
            _RANK.atol_rtol_tensor_out,
            _RANK.atol_rtol_float_out,
        )
    },
    **{kind: _by_one(kind) for kind in (_RANK.default, _RANK.tol_tensor, _RANK.out, _RANK.out_tol_tensor)},
}
