"""What QR, LDL and least squares hold."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.calls import bytes_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.half_precision import HALF
from gpumem_magic.virtual.engine.mismatch import in_full_precision, refuse_half_precision, scalar_name
from gpumem_magic.virtual.engine.rules import BESIDE, special
from gpumem_magic.virtual.operators import cusolver
from gpumem_magic.virtual.operators.data_dependent import _placed
from gpumem_magic.virtual.operators.linear_algebra import (
    CODE,
    INDEX,
    batch_of,
    by_cublas,
    by_cusolver,
    look_at_codes,
    solve_triangular,
)


def _reflects_many(rows: int, batch: int) -> bool:
    """Whether the kernel of `geqrf` is cuBLAS's."""
    return rows <= 256 and batch >= max(2, rows // 16)


@in_full_precision(_aten.linalg_qr.default, _aten.geqrf.default)
def _qr_kernel(matrices: Any, *_: Any, **named: Any) -> str:
    many = _reflects_many(matrices.shape[-2], batch_of(matrices.shape))
    return "geqrf_batched_cuda" if many else "geqrf_cuda"


def _reflect(engine: Engine, device: int, rows: int, columns: int, batch: int, item: int) -> None:
    """What the kernel of `geqrf` takes."""
    if _reflects_many(rows, batch):
        by_cublas(engine, device, batch, 2)
    else:
        with engine.scratch(device, CODE):
            by_cusolver(engine, device, *[cusolver.geqrf(columns, item)] * batch)


@special(_aten.geqrf.default)
def _geqrf(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The matrix, column by column, and the factors of its reflections."""
    refuse_half_precision(func, args, kwargs)
    *batch, rows, columns = args[0].shape
    packed = _placed(engine, (*batch, columns, rows), args[0].dtype, device).mT
    factors = _placed(engine, (*batch, min(rows, columns)), args[0].dtype, device)
    _reflect(engine, device, rows, columns, prod(batch), args[0].element_size())
    return packed, factors


@special(_aten.geqrf.a)
def _geqrf_into(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """In tensors of its own, where those given do not lie column by column."""
    matrices, packed, factors = args[0], kwargs["a"], kwargs["tau"]
    *batch, rows, columns = matrices.shape
    packed.resize_(matrices.shape)
    factors.resize_((*batch, min(rows, columns)))
    lies_right = packed.mT.is_contiguous() and factors.is_contiguous() and packed.dtype == matrices.dtype
    with engine.scratch(device, *([] if lies_right else [bytes_of(matrices), bytes_of(factors)])):
        _reflect(engine, device, rows, columns, prod(batch), matrices.element_size())
    return packed, factors


@special(_aten.linalg_qr.default, table=BESIDE)
def _qr(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    matrices = args[0]
    first, second = out
    rows, columns = matrices.shape[-2:]
    batch, wants_first = batch_of(matrices.shape), bool(first.numel())
    held = [batch * min(rows, columns) * matrices.element_size()]
    if not (wants_first and first.shape[-1] == columns) and second.shape[-2] != rows:
        held.append(bytes_of(matrices))
    with engine.scratch(device, *held):
        item = matrices.element_size()
        _reflect(engine, device, rows, columns, batch, item)
        if wants_first:
            with engine.scratch(device, CODE):
                by_cusolver(engine, device, *[cusolver.orgqr(rows, min(rows, columns), item)] * batch)
    return ()


@in_full_precision(_aten.linalg_householder_product.default)
def _householder_kernel(*_: Any, **named: Any) -> str:
    return "orgqr_cuda"


@special(_aten.linalg_householder_product.default, table=BESIDE)
def _householder(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    rows, reflections, item = out.shape[-2], args[1].shape[-1], out.element_size()
    with engine.scratch(device, CODE):
        by_cusolver(engine, device, *[cusolver.orgqr(rows, reflections, item)] * batch_of(out.shape))
    return ()


@in_full_precision(_aten.linalg_ldl_factor_ex.default)
def _ldl_kernel(*_: Any, **named: Any) -> str:
    return "ldl_factor_looped_cusolver"


@special(_aten.linalg_ldl_factor_ex.default, table=BESIDE)
def _ldl(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    """Complex matrices that count as Hermitian are MAGMA's, in memory of its own
    (`ldl_factor_kernel` of CUDA; so on an H100 with 2.11)."""
    matrices, is_magmas = args[0], args[0].is_complex() and kwargs.get("hermitian", False)
    if matrices.numel() and not is_magmas:
        by_cusolver(engine, device, cusolver.sytrf(matrices.shape[-1], matrices.element_size()))
    return ()


@in_full_precision(_aten.linalg_ldl_solve.default)
def _ldl_solve_kernel(*_: Any, **named: Any) -> str:
    return "ldl_solve_looped_cusolver"


@special(_aten.linalg_ldl_solve.default, table=BESIDE)
def _ldl_solve(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """Pivots of 64 bits."""
    if not args[0].numel():
        return []
    return [args[1].numel() * INDEX, CODE]


@in_full_precision(_aten.ormqr.default)
def _ormqr_kernel(*_: Any, **named: Any) -> str:
    return "orgmr_cuda"


@special(_aten.ormqr.default, table=BESIDE)
def _ormqr(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    reflections, factors = args[:2]
    left = args[3] if len(args) > 3 else kwargs.get("left", True)
    with engine.scratch(device, 0 if reflections.mT.is_contiguous() else bytes_of(reflections), CODE):
        _multiply(engine, device, reflections.shape[-2], factors.shape[-1], out, left)
    return ()


def _multiply(engine: Engine, device: int, rows: int, reflections: int, others: Any, left: bool = True) -> None:
    """What the kernel of `ormqr` takes, for so many reflections of columns of so many rows."""
    height, width = others.shape[-2:]
    size = cusolver.ormqr(rows, reflections, height, width, others.element_size(), left)
    by_cusolver(engine, device, *[size] * batch_of(others.shape))


def _check_least_squares(matrices: Any, right: Any, rcond: float | None, driver: str | None) -> None:
    """As `linalg_lstsq_out` in ``BatchLinearAlgebra.cpp`` does."""
    if matrices.dim() < 2:
        raise RuntimeError("torch.linalg.lstsq: input must have at least 2 dimensions.")
    if right.dim() < 1:
        raise RuntimeError("torch.linalg.lstsq: other must have at least 1 dimension.")
    if matrices.dtype != right.dtype:
        names = (scalar_name(one.dtype) for one in (right, matrices))
        raise RuntimeError(
            "torch.linalg.lstsq: Expected input and other to have the same dtype, but got input's dtype {1} and other's dtype "
            "{0}".format(*names)
        )
    if matrices.dim() < right.dim() or matrices.dim() - right.dim() > 1:
        raise RuntimeError(
            "torch.linalg.lstsq: input.dim() must be greater or equal to other.dim() and (input.dim() - other.dim()) <= 1"
        )
    vector = right.dim() == 1 or (matrices.dim() - 1 == right.dim() and right.shape == matrices.shape[:-1])
    if matrices.shape[-2] != right.shape[-1 if vector else -2]:
        place = -1 if vector else -2
        raise RuntimeError(f"torch.linalg.lstsq: input.size(-2) should match other.size({place})")
    if driver not in (None, "gels"):
        raise RuntimeError("torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA")
    if rcond is None and matrices.dtype in HALF:
        # (`_get_epsilon` there.)
        raise RuntimeError("This function doesn't handle types other than float and double")


@special(_aten.linalg_lstsq.default)
def _least_squares(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """CUDA's only driver takes matrices of full rank for granted: there is neither rank nor singular values."""
    matrices, right = args[:2]
    rcond = kwargs.get("rcond", args[2] if len(args) > 2 else None)
    _check_least_squares(matrices, right, rcond, kwargs.get("driver", args[3] if len(args) > 3 else None))
    rows, columns = matrices.shape[-2:]
    vector = right.dim() == 1 or (matrices.dim() - 1 == right.dim() and right.shape == matrices.shape[:-1])
    width = () if vector else (right.shape[-1],)
    batch = torch.broadcast_shapes(matrices.shape[:-2], right.shape[:-1] if vector else right.shape[:-2])

    def made(*shape: int, dtype: torch.dtype = matrices.dtype) -> Any:
        return _placed(engine, shape, dtype, device)

    with engine.scratch(device, max(1, batch_of(matrices.shape)) * CODE):
        # Worked out in a copy of the right-hand side, column by column.
        solution = made(*batch, *width, max(rows, columns)).narrow(-1, 0, columns)
        with engine.scratch(device, bytes_of(matrices)):
            if matrices.numel() and right.numel():
                _by_reflections(engine, device, matrices, solution.unsqueeze(-1) if vector else solution.mT)
            residuals = made(*batch, *width) if rows > columns else made(0)
        look_at_codes(engine, device, max(1, batch_of(matrices.shape)))
    return solution if vector else solution.mT, residuals, made(0, dtype=torch.int64), made(0)


def _by_reflections(engine: Engine, device: int, matrices: Any, solution: Any) -> None:
    """What least squares take, beside copies of both sides."""
    rows, columns = matrices.shape[-2:]
    few, given, item = min(rows, columns), batch_of(matrices.shape), matrices.element_size()
    batch = batch_of(solution.shape)
    every = batch * rows * columns * item
    spread = [] if batch == given else [every]
    if columns <= rows <= 256 and batch >= max(2, rows // 16):
        with engine.scratch(device, every):
            by_cublas(engine, device, batch, 2)
        return
    turned = [bytes_of(matrices)] if rows < columns else []
    with engine.scratch(device, given * few * item, *turned):
        _reflect(engine, device, max(rows, columns), few, given, item)
        with engine.scratch(device, *spread, batch * few * item if spread else 0):
            if rows < columns:
                solve_triangular(engine, device, few, batch)
            with engine.scratch(device, CODE):
                _multiply(engine, device, max(rows, columns), few, solution)
            if rows >= columns:
                solve_triangular(engine, device, few, batch)
