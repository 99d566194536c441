"""What factorizing by LU holds, solving by it, inverses and determinants."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.calls import bytes_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.mismatch import in_full_precision
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import BESIDE, special
from gpumem_magic.virtual.operators import cusolver
from gpumem_magic.virtual.operators.linear_algebra import (
    CODE,
    INDEX,
    PIVOT,
    batch_of,
    by_cublas,
    by_cusolver,
    solve_triangular,
)

# Solving factorized the transposed matrix before, which needs no copy (`_linalg_solve_ex_out` in ``BatchLinearAlgebra.cpp``). So
# do 2.8, 2.9 and 2.10 (by their CUDA builds); an H100 with 2.11 does not, nor 2.13 (pull request 154983).
_SOLVED_AS_IT_IS_FROM = (2, 11)
_CUSOLVER, _CUBLAS, _TRIANGULAR = "cusolver", "cublas", "triangular"


def _is_by_cublas(rows: int, columns: int, batch: int) -> bool:
    """Whether the kernel of `lu_factor` is cuBLAS's, for many small matrices at once."""
    return rows == columns and batch > 1 and (rows <= 16 or (rows <= 128 and batch <= 16))


@in_full_precision(
    _aten.linalg_lu.default,
    _aten.linalg_lu_factor_ex.default,
    _aten._linalg_solve_ex.default,
    _aten._linalg_det.default,
)
def _lu_kernel(matrices: Any, *_: Any, **named: Any) -> str:
    rows, columns = matrices.shape[-2:]
    batch = batch_of(matrices.shape)
    if batch == 1:
        return "lu_factor_cusolver"
    return "lu_factor_cublas" if _is_by_cublas(rows, columns, batch) else "lu_factor_magma_batched"


def _factorize(engine: Engine, device: int, matrices: Any) -> None:
    """What the kernel of `lu_factor` takes."""
    rows, columns = matrices.shape[-2:]
    batch = batch_of(matrices.shape)
    if not matrices.numel():
        return
    if _is_by_cublas(rows, columns, batch):
        by_cublas(engine, device, batch, 1)
    elif rows == columns and batch == 1:
        by_cusolver(engine, device, cusolver.getrf(rows))


def _solver(size: int, width: int, batch: int, transposed: bool) -> str:
    """Which way `lu_solve` takes for matrices of this size and right-hand sides of this width."""
    if size == width:
        return _CUBLAS if size <= 16 else _TRIANGULAR
    if size <= 8:
        return _CUBLAS
    if size <= 64:
        if batch <= 2 and (width <= 64 or transposed or size <= 32):
            return _CUSOLVER
        return _CUBLAS if width <= 8 else _TRIANGULAR
    if size <= 128 and width <= 2:
        return _CUSOLVER if batch <= 2 else _CUBLAS
    return _TRIANGULAR


def _solve(engine: Engine, device: int, factors: Any, right: Sequence[int], transposed: bool) -> None:
    """What the kernel of `lu_solve` takes. right: the shape of the right-hand side, in columns."""
    size, width, batch = factors.shape[-1], right[-1], batch_of(right)
    if not prod(right):
        return
    solver = _solver(size, width, batch, transposed)
    if solver == _CUSOLVER:
        with engine.scratch(device, CODE):
            return
    one = batch * size * factors.element_size()
    with engine.scratch(device, *([one * size, batch * size * PIVOT] if batch != batch_of(factors.shape) else [])):
        if solver == _CUBLAS:
            by_cublas(engine, device, batch, 2)
            return
        # The pivots become a permutation, by which the right-hand side is put in order in a copy.
        with _permutation(engine, device, size, batch):
            order = [] if transposed else [size * INDEX, batch * size * INDEX, one * width]
            with engine.scratch(device, *order):
                for _ in range(2):
                    solve_triangular(engine, device, size, batch)
            with engine.scratch(device, one * width if transposed else 0):
                return


def _permutation(engine: Engine, device: int, size: int, batch: int) -> ExitStack:
    """The places from 0 on; of many matrices each gets its own after these."""
    held = ExitStack()
    with ExitStack() as passing:
        (held if batch == 1 else passing).enter_context(engine.scratch(device, size * INDEX))
        if batch > 1:
            held.enter_context(engine.scratch(device, batch * size * INDEX))
    return held


def _is_solved_transposed(engine: Engine, matrices: Any, device: int) -> bool:
    """Whether the transposed matrix is factorized."""
    older = engine.memory.torch_version(device) < _SOLVED_AS_IT_IS_FROM
    return bool(older and matrices.is_contiguous() and not matrices.is_complex())


@special(_aten.linalg_lu_factor_ex.default, table=BESIDE)
def _lu_factor(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    _factorize(engine, device, args[0])
    return ()


@special(_aten.linalg_lu.default, table=BESIDE)
def _lu(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    matrices = args[0]
    batch = batch_of(matrices.shape)
    # Both factors in one, column by column, which the results do not lie in.
    with ExitStack() as both, ExitStack() as others:
        both.enter_context(engine.scratch(device, bytes_of(matrices)))
        others.enter_context(engine.scratch(device, batch * min(matrices.shape[-2:]) * PIVOT, batch * CODE))
        _factorize(engine, device, matrices)
        both.close()
        if args[1] if len(args) > 1 else kwargs.get("pivot", True):
            with _permutation(engine, device, matrices.shape[-2], batch):
                pass
    return ()


@special(_aten.lu_unpack.default, table=BESIDE)
def _lu_unpack(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    if args[3] if len(args) > 3 else kwargs.get("unpack_pivots", True):
        with _permutation(engine, device, args[0].shape[-2], batch_of(args[0].shape)):
            pass
    return ()


@in_full_precision(_aten.linalg_lu_solve.default)
def _lu_solve_kernel(factors: Any, pivots: Any, right: Any, *, left: bool = True, adjoint: bool = False) -> str:
    batch = torch.broadcast_shapes(factors.shape[:-2], right.shape[:-2])
    solver = _solver(factors.shape[-1], right.shape[-1 if left else -2], prod(batch), adjoint == left)
    return "triangular_solve_cuda" if solver == _TRIANGULAR else f"lu_solve_{solver}"


@special(_aten.linalg_lu_solve.default, table=BESIDE)
def _lu_solve(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    factors = args[0]
    left, adjoint = kwargs.get("left", True), kwargs.get("adjoint", False)
    with engine.scratch(device, 0 if factors.mT.is_contiguous() else bytes_of(factors)):
        _solve(engine, device, factors, (out if left else out.mT).shape, adjoint == left)
    return ()


@special(_aten._linalg_solve_ex.default, _aten._linalg_solve_ex.result)
def _solve_by_lu(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """What ``out=`` names, and the factors that nobody asked for, grow first."""
    if func._schema.is_mutable:
        engine.fake_call(func, args, kwargs)
        # (PyTorch's shape rule returns others.)
        out = tuple(kwargs[name] for name in ("result", "LU", "pivots", "info"))
        for one in out:
            engine.table.resized(one.untyped_storage())
    else:
        out = engine.run(func, args, kwargs, device)
    matrices, result = args[0], out[0]
    _factorize(engine, device, matrices)
    copied = 0
    if result.dim() < matrices.dim():
        # (A vector is no matrix of one column, by its strides.)
        copied, result = bytes_of(result), result.unsqueeze(-1)
    left = kwargs.get("left", True)
    with engine.scratch(device, copied):
        _solve(
            engine,
            device,
            out[1],
            (result if left else result.mT).shape,
            _is_solved_transposed(engine, matrices, device) == left,
        )
    return out


@special(_aten.linalg_inv_ex.default, table=BESIDE)
def _inverse(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    matrices = args[0]
    if not matrices.numel():
        return ()
    with engine.scratch(device, bytes_of(matrices), matrices[..., 0].numel() * PIVOT):
        _factorize(engine, device, matrices)
        _solve(engine, device, matrices, matrices.shape, _is_solved_transposed(engine, matrices, device))
    return ()


@special(_aten._linalg_det.default, _aten._linalg_slogdet.default, table=BESIDE)
def _determinant(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    """From the diagonal of one factor, and whether rows were exchanged an odd number of times."""
    factors, pivots = out[-2:]
    with engine.scratch(device, batch_of(factors.shape) * CODE):
        _factorize(engine, device, args[0])
        diagonal = factors.diagonal(0, -2, -1)
        with pushed(engine.mode):
            # (Of a product of two numbers C++ works out the second first.)
            if func is _aten._linalg_det.default:
                product = diagonal.prod(-1)
                exchanged = _exchanged(pivots)
                # (And lets go of the last first, all of it before the codes.)
                del exchanged, product
            else:
                exchanged = _exchanged(pivots)
                signs = diagonal.sgn()
                product = signs.prod(-1)
                del product, signs, exchanged
                diagonal.abs().log_()
        engine.table.drain()
    return ()


def _exchanged(pivots: Any) -> Any:
    """How many rows were exchanged."""
    in_place = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    return (in_place != pivots).sum(-1, dtype=torch.int64)
