"""What linear algebra holds beside its results: copies that are worked in, pivots, codes of errors, lists of addresses.

After ``native/BatchLinearAlgebra.cpp``, ``native/LinearAlgebra.cpp`` and ``native/cuda/linalg`` in ATen, torch 2.9 to 2.13, with
the backend that PyTorch prefers. MAGMA factorizes many matrices by LU, unless they are small; what it takes does not come from
PyTorch's allocator. How much cuSOLVER asks for to work in is known of an H100 only (`cusolver`). What cuBLAS solves takes its
workspace. Gradients are made of these operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.calls import bytes_of, copies_of, users_line
from gpumem_magic.virtual.engine.engine import BESIDE, Engine, special
from gpumem_magic.virtual.engine.half_precision import HALF
from gpumem_magic.virtual.engine.host_calls import host_only
from gpumem_magic.virtual.engine.mismatch import in_full_precision, refuse_half_precision, scalar_name
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.operators import cusolver
from gpumem_magic.virtual.operators.data_dependent import _placed

_ADDRESS = _INDEX = 8
_PIVOT = _CODE = 4
# The longest side of matrices that cuSOLVER decomposes many at once of.
_BATCHED_JACOBI = 32
_SVD_DRIVERS = "gesvdj", "gesvd", "gesvda"
_CUSOLVER, _CUBLAS, _TRIANGULAR = "cusolver", "cublas", "triangular"
# Many matrices of Cholesky's were MAGMA's before.
_CHOLESKY_BY_CUSOLVER_FROM = (2, 13)
# Solving factorized the transposed matrix before, which needs no copy (`_linalg_solve_ex_out` in ``BatchLinearAlgebra.cpp``). So
# do 2.8, 2.9 and 2.10 (by their CUDA builds); an H100 with 2.11 does not, nor 2.13 (pull request 154983).
_SOLVED_AS_IT_IS_FROM = (2, 11)
# (2.10 has MAGMA, too, and its CUDA build takes cuSOLVER; 2.9's takes MAGMA.)
_EIG_BY_CUSOLVER_FROM = (2, 10)


def _batch(shape: Sequence[int]) -> int:
    return prod(shape[:-2])


def _takes_workspace(engine: Engine, device: int) -> None:
    """A function of cuBLAS's, as a product is."""
    engine.memory.after_operator(_aten.mm.default, (), device)


def _by_cusolver(engine: Engine, device: int, *sizes: int) -> None:
    """One after the other, of functions of `cusolver`."""
    if cusolver.is_known(engine.memory.capability(device), engine.memory.torch_version(device)):
        for size in sizes:
            with engine.scratch(device, size):
                pass


def _by_cublas(engine: Engine, device: int, batch: int, lists: int) -> None:
    """A function for many matrices at once, which takes lists of their addresses."""
    with engine.scratch(device, *([batch * _ADDRESS] * lists)):
        _takes_workspace(engine, device)


def _solve_triangular(engine: Engine, device: int, size: int, batch: int) -> None:
    if not batch * size:
        return
    if batch <= 8 and size >= 64:
        _takes_workspace(engine, device)
    else:
        _by_cublas(engine, device, batch, 2)


# ---- by LU


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
    batch = _batch(matrices.shape)
    if batch == 1:
        return "lu_factor_cusolver"
    return "lu_factor_cublas" if _is_by_cublas(rows, columns, batch) else "lu_factor_magma_batched"


def _factorize(engine: Engine, device: int, matrices: Any) -> None:
    """What the kernel of `lu_factor` takes."""
    rows, columns = matrices.shape[-2:]
    batch = _batch(matrices.shape)
    if not matrices.numel():
        return
    if _is_by_cublas(rows, columns, batch):
        _by_cublas(engine, device, batch, 1)
    elif rows == columns and batch == 1:
        _by_cusolver(engine, device, cusolver.getrf(rows))


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
    size, width, batch = factors.shape[-1], right[-1], _batch(right)
    if not prod(right):
        return
    solver = _solver(size, width, batch, transposed)
    if solver == _CUSOLVER:
        with engine.scratch(device, _CODE):
            return
    one = batch * size * factors.element_size()
    with engine.scratch(device, *([one * size, batch * size * _PIVOT] if batch != _batch(factors.shape) else [])):
        if solver == _CUBLAS:
            _by_cublas(engine, device, batch, 2)
            return
        # The pivots become a permutation, by which the right-hand side is put in order in a copy.
        with _permutation(engine, device, size, batch):
            order = [] if transposed else [size * _INDEX, batch * size * _INDEX, one * width]
            with engine.scratch(device, *order):
                for _ in range(2):
                    _solve_triangular(engine, device, size, batch)
            with engine.scratch(device, one * width if transposed else 0):
                return


def _permutation(engine: Engine, device: int, size: int, batch: int) -> ExitStack:
    """The places from 0 on; of many matrices each gets its own after these."""
    held = ExitStack()
    with ExitStack() as passing:
        (held if batch == 1 else passing).enter_context(engine.scratch(device, size * _INDEX))
        if batch > 1:
            held.enter_context(engine.scratch(device, batch * size * _INDEX))
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
    batch = _batch(matrices.shape)
    # Both factors in one, column by column, which the results do not lie in.
    with ExitStack() as both, ExitStack() as others:
        both.enter_context(engine.scratch(device, bytes_of(matrices)))
        others.enter_context(engine.scratch(device, batch * min(matrices.shape[-2:]) * _PIVOT, batch * _CODE))
        _factorize(engine, device, matrices)
        both.close()
        if args[1] if len(args) > 1 else kwargs.get("pivot", True):
            with _permutation(engine, device, matrices.shape[-2], batch):
                pass
    return ()


@special(_aten.lu_unpack.default, table=BESIDE)
def _lu_unpack(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    if args[3] if len(args) > 3 else kwargs.get("unpack_pivots", True):
        with _permutation(engine, device, args[0].shape[-2], _batch(args[0].shape)):
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
    with engine.scratch(device, bytes_of(matrices), matrices[..., 0].numel() * _PIVOT):
        _factorize(engine, device, matrices)
        _solve(engine, device, matrices, matrices.shape, _is_solved_transposed(engine, matrices, device))
    return ()


@special(_aten._linalg_det.default, _aten._linalg_slogdet.default, table=BESIDE)
def _determinant(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    """From the diagonal of one factor, and whether rows were exchanged an odd number of times."""
    factors, pivots = out[-2:]
    with engine.scratch(device, _batch(factors.shape) * _CODE):
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


# ---- by Cholesky


@in_full_precision(_aten.linalg_cholesky_ex.default, _aten.cholesky.default)
def _cholesky_kernel(*_: Any, **named: Any) -> str:
    return "cholesky_cusolver"


# (Of one matrix; several are MAGMA's in versions before 2.13. These names, and those of reflections, LDL and eigenvalues below,
# are in ``BatchLinearAlgebraLib.cpp`` of ATen/native/cuda/linalg.)
@in_full_precision(_aten._cholesky_solve_helper.default)
def _cholesky_solve_kernel(*_: Any, **named: Any) -> str:
    return "cholesky_cuda_potrs"


@in_full_precision(_aten.cholesky_inverse.default)
def _cholesky_inverse_kernel(*_: Any, **named: Any) -> str:
    return "cholesky_cuda_potri"


@special(_aten.linalg_cholesky_ex.default, table=BESIDE)
def _cholesky(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    _factorize_half(engine, device, args[0], kwargs.get("upper", False))
    return ()


def _factorize_half(engine: Engine, device: int, matrices: Any, upper: bool) -> None:
    batch = _batch(matrices.shape)
    if not matrices.numel():  # (`linalg_cholesky_ex_out` in ``BatchLinearAlgebra.cpp``.)
        return
    if batch == 1:
        _by_cusolver(engine, device, cusolver.potrf(matrices.shape[-1], matrices.element_size(), upper))
    with engine.scratch(device, batch * _ADDRESS if batch > 1 else 0):
        pass


@special(_aten.cholesky.default, table=BESIDE)
def _cholesky_before(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    """Its older name, which looks at the codes itself."""
    if args[0].numel():
        batch = _batch(args[0].shape)
        with engine.scratch(device, batch * _CODE):
            _factorize_half(engine, device, args[0], args[1] if len(args) > 1 else kwargs.get("upper", False))
            _look_at_codes(engine, device, batch)
    return ()


@special(_aten._cholesky_solve_helper.default)
def _cholesky_solve(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """cuSOLVER's code of errors stands before the result (2.11 on an H100)."""
    alone = _batch(args[1].shape) == 1 and engine.memory.torch_version(device) < _CHOLESKY_BY_CUSOLVER_FROM
    with engine.scratch(device, _CODE if alone else 0):
        out = engine.run(func, args, kwargs, device)
        if alone:
            with engine.scratch(device, bytes_of(args[1])):
                return out
        _solve_by_cholesky(engine, device, args[1])
    return out


def _solve_by_cholesky(engine: Engine, device: int, matrices: Any) -> None:
    batch = _batch(matrices.shape)
    if batch == 1 or engine.memory.torch_version(device) < _CHOLESKY_BY_CUSOLVER_FROM:
        # cuSOLVER's code of errors, and the copy that is worked in.
        with engine.scratch(device, *([_CODE] * (batch == 1) + [bytes_of(matrices)])):
            return
    for _ in range(2):
        with engine.scratch(device, *_copied_unless_plain(matrices, batch)):
            _solve_triangular(engine, device, matrices.shape[-1], batch)


@special(_aten.cholesky_inverse.default, table=BESIDE)
def _cholesky_inverse(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    matrices = args[0]
    if engine.memory.torch_version(device) < _CHOLESKY_BY_CUSOLVER_FROM:
        return [bytes_of(matrices), _CODE if _batch(matrices.shape) == 1 else 0]
    with engine.scratch(device, bytes_of(matrices)):
        _solve_by_cholesky(engine, device, matrices)
    return []


@in_full_precision(_aten.linalg_solve_triangular.default)
def _triangular_kernel(*_: Any, **named: Any) -> str:
    return "triangular_solve_cuda"


@special(_aten.linalg_solve_triangular.default, table=BESIDE)
def _triangular(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    batch = _batch(out.shape)
    with engine.scratch(device, *_copied_unless_plain(args[0], batch)):
        _solve_triangular(engine, device, args[0].shape[-1], batch)
    return ()


@special(_aten.triangular_solve.default, table=BESIDE)
def _triangular_before(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    """The same under its older name."""
    _solve_triangular(engine, device, args[1].shape[-1], _batch(out[0].shape))
    return ()


def _copied_unless_plain(matrices: Any, batch: int) -> list[int]:
    """Of matrices that lie neither in rows nor in columns, or are fewer than what they are used for."""
    if _batch(matrices.shape) == batch and (matrices.is_contiguous() or matrices.mT.is_contiguous()):
        return []
    return [batch * matrices.shape[-1] ** 2 * matrices.element_size()]


# ---- by reflections


def _reflects_many(rows: int, batch: int) -> bool:
    """Whether the kernel of `geqrf` is cuBLAS's."""
    return rows <= 256 and batch >= max(2, rows // 16)


@in_full_precision(_aten.linalg_qr.default, _aten.geqrf.default)
def _qr_kernel(matrices: Any, *_: Any, **named: Any) -> str:
    many = _reflects_many(matrices.shape[-2], _batch(matrices.shape))
    return "geqrf_batched_cuda" if many else "geqrf_cuda"


def _reflect(engine: Engine, device: int, rows: int, columns: int, batch: int, item: int) -> None:
    """What the kernel of `geqrf` takes."""
    if _reflects_many(rows, batch):
        _by_cublas(engine, device, batch, 2)
    else:
        with engine.scratch(device, _CODE):
            _by_cusolver(engine, device, *[cusolver.geqrf(columns, item)] * batch)


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
    batch, wants_first = _batch(matrices.shape), bool(first.numel())
    held = [batch * min(rows, columns) * matrices.element_size()]
    if not (wants_first and first.shape[-1] == columns) and second.shape[-2] != rows:
        held.append(bytes_of(matrices))
    with engine.scratch(device, *held):
        item = matrices.element_size()
        _reflect(engine, device, rows, columns, batch, item)
        if wants_first:
            with engine.scratch(device, _CODE):
                _by_cusolver(engine, device, *[cusolver.orgqr(rows, min(rows, columns), item)] * batch)
    return ()


@in_full_precision(_aten.linalg_householder_product.default)
def _householder_kernel(*_: Any, **named: Any) -> str:
    return "orgqr_cuda"


@special(_aten.linalg_householder_product.default, table=BESIDE)
def _householder(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    rows, reflections, item = out.shape[-2], args[1].shape[-1], out.element_size()
    with engine.scratch(device, _CODE):
        _by_cusolver(engine, device, *[cusolver.orgqr(rows, reflections, item)] * _batch(out.shape))
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
        _by_cusolver(engine, device, cusolver.sytrf(matrices.shape[-1], matrices.element_size()))
    return ()


@in_full_precision(_aten.linalg_ldl_solve.default)
def _ldl_solve_kernel(*_: Any, **named: Any) -> str:
    return "ldl_solve_looped_cusolver"


@special(_aten.linalg_ldl_solve.default, table=BESIDE)
def _ldl_solve(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """Pivots of 64 bits."""
    if not args[0].numel():
        return []
    return [args[1].numel() * _INDEX, _CODE]


@in_full_precision(_aten.ormqr.default)
def _ormqr_kernel(*_: Any, **named: Any) -> str:
    return "orgmr_cuda"


@special(_aten.ormqr.default, table=BESIDE)
def _ormqr(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    reflections, factors = args[:2]
    left = args[3] if len(args) > 3 else kwargs.get("left", True)
    with engine.scratch(device, 0 if reflections.mT.is_contiguous() else bytes_of(reflections), _CODE):
        _multiply(engine, device, reflections.shape[-2], factors.shape[-1], out, left)
    return ()


def _multiply(engine: Engine, device: int, rows: int, reflections: int, others: Any, left: bool = True) -> None:
    """What the kernel of `ormqr` takes, for so many reflections of columns of so many rows."""
    height, width = others.shape[-2:]
    size = cusolver.ormqr(rows, reflections, height, width, others.element_size(), left)
    _by_cusolver(engine, device, *[size] * _batch(others.shape))


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

    with engine.scratch(device, max(1, _batch(matrices.shape)) * _CODE):
        # Worked out in a copy of the right-hand side, column by column.
        solution = made(*batch, *width, max(rows, columns)).narrow(-1, 0, columns)
        with engine.scratch(device, bytes_of(matrices)):
            if matrices.numel() and right.numel():
                _by_reflections(engine, device, matrices, solution.unsqueeze(-1) if vector else solution.mT)
            residuals = made(*batch, *width) if rows > columns else made(0)
        _look_at_codes(engine, device, max(1, _batch(matrices.shape)))
    return solution if vector else solution.mT, residuals, made(0, dtype=torch.int64), made(0)


def _by_reflections(engine: Engine, device: int, matrices: Any, solution: Any) -> None:
    """What least squares take, beside copies of both sides."""
    rows, columns = matrices.shape[-2:]
    few, given, item = min(rows, columns), _batch(matrices.shape), matrices.element_size()
    batch = _batch(solution.shape)
    every = batch * rows * columns * item
    spread = [] if batch == given else [every]
    if columns <= rows <= 256 and batch >= max(2, rows // 16):
        with engine.scratch(device, every):
            _by_cublas(engine, device, batch, 2)
        return
    turned = [bytes_of(matrices)] if rows < columns else []
    with engine.scratch(device, given * few * item, *turned):
        _reflect(engine, device, max(rows, columns), few, given, item)
        with engine.scratch(device, *spread, batch * few * item if spread else 0):
            if rows < columns:
                _solve_triangular(engine, device, few, batch)
            with engine.scratch(device, _CODE):
                _multiply(engine, device, max(rows, columns), few, solution)
            if rows >= columns:
                _solve_triangular(engine, device, few, batch)


# ---- eigenvalues and singular values


def _look_at_codes(engine: Engine, device: int, count: int) -> None:
    """Whether any code says that it went wrong; one alone is converted to a truth value."""
    with engine.scratch(device, 1, 1 if count == 1 else 0):
        pass


@in_full_precision(_aten._linalg_eigh.default)
def _eigh_kernel(*_: Any, **named: Any) -> str:
    return "linalg_eigh_cuda"


def _results(engine: Engine, func: Any, args: Any, kwargs: Any, device: int, order: Sequence[int]) -> Any:
    """An operator's results, which come in this order; those that ``out=`` names become larger in it."""
    if func._schema.is_mutable:
        return engine.run(func, args, kwargs, device, order)
    out = engine.fake_call(func, args, kwargs)
    engine.settle(tuple(out[place] for place in order))
    return out


@special(_aten._linalg_eigh.default, _aten._linalg_eigh.eigenvalues)
def _eigh(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The vectors come before the values (`_linalg_eigh` in ``BatchLinearAlgebra.cpp``)."""
    out = _results(engine, func, args, kwargs, device, (1, 0))
    codes = _batch(args[0].shape)
    if args[0].numel():
        with engine.scratch(device, 0 if out[1].numel() else bytes_of(args[0]), codes * _CODE):
            rows, item, dtype = args[0].shape[-1], args[0].element_size(), args[0].dtype
            _by_cusolver(engine, device, *cusolver.eigh(rows, codes, item, dtype == torch.float32))
            _look_at_codes(engine, device, codes)
    return out


def _ask_for_all(engine: Engine, flags: Any) -> None:
    with pushed(engine.mode):
        flags.all()
    engine.table.drain()


@in_full_precision(_aten.linalg_eig.default, _aten._linalg_eigvals.default)
def _eig_kernel(*_: Any, **named: Any) -> str:
    return "linalg_eig_cuda"


_WITH_VECTORS = (_aten.linalg_eig.default, _aten.linalg_eig.out)


@special(*_WITH_VECTORS, _aten._linalg_eigvals.default, _aten.linalg_eigvals.out)
def _eig(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """MAGMA worked on the host. cuSOLVER makes complex results apart, from real ones where the matrices are real, and they are
    copied into those that are returned (`linalg_eig_out_info` in ``BatchLinearAlgebra.cpp``; recorded on an H100 with 2.11).
    With vectors every version looks first whether all are finite (so does 2.9's CUDA build)."""
    matrices = args[0]
    wants_vectors = func in _WITH_VECTORS
    if wants_vectors:
        with pushed(engine.mode):
            flags = torch.isfinite(matrices)
        _ask_for_all(engine, flags)
        del flags
        engine.table.drain()
    if engine.memory.torch_version(device) < _EIG_BY_CUSOLVER_FROM:
        return engine.run(func, args, kwargs, device)
    codes, is_real, rows = _batch(matrices.shape), not matrices.is_complex(), max(1, matrices.shape[-1])
    # Both are complex.
    vectors = bytes_of(matrices) * (2 if is_real else 1)
    values = vectors // rows
    with engine.scratch(device, codes * _CODE), ExitStack() as of_values, ExitStack() as of_vectors:
        # (The vectors go first.)
        if wants_vectors:
            of_vectors.enter_context(engine.scratch(device, vectors))
        of_values.enter_context(engine.scratch(device, values))
        with ExitStack() as real:
            if is_real:
                real.enter_context(engine.scratch(device, values))
                if wants_vectors:
                    real.enter_context(engine.scratch(device, bytes_of(matrices)))
            with engine.scratch(device, *copies_of(matrices.mT)):
                if matrices.numel():
                    room = cusolver.geev(rows, matrices.element_size(), matrices.is_complex())
                    _by_cusolver(engine, device, room)
            if is_real:
                # Whether any has an imaginary part.
                with pushed(engine.mode):
                    flags = matrices.new_empty(matrices.shape[:-1], dtype=torch.bool)
                _ask_for_all(engine, flags)
                del flags
                engine.table.drain()
        out = engine.run(func, args, kwargs, device)
        of_vectors.close()
        of_values.close()
        _look_at_codes(engine, device, codes)
    return out


@in_full_precision(_aten._linalg_svd.default)
def _svd_kernel(matrices: Any, *_: Any, driver: str | None = None, **named: Any) -> str:
    if driver == "gesvda":
        return "svd_cuda_gesvdaStridedBatched"
    if driver == "gesvd":
        return "svd_cuda_gesvd"
    return f"svd_cuda_gesvdj{'Batched' * (max(matrices.shape[-2:]) <= _BATCHED_JACOBI)}"


@special(_aten._linalg_svd.default, _aten._linalg_svd.U)
def _svd_of(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The vectors of both sides come before the values (`_linalg_svd` in ``BatchLinearAlgebra.cpp``)."""
    driver = kwargs.get("driver") or _SVD_DRIVERS[0]
    if driver not in _SVD_DRIVERS and args[0].numel():
        # (`svd_cusolver` in ``BatchLinearAlgebraLib.cpp``.)
        raise RuntimeError(
            f"torch.linalg.svd: unknown svd driver {driver} in svd_cusolver computation. Check doc at "
            "https://pytorch.org/docs/stable/generated/torch.linalg.svd.html"
        )
    out = _results(engine, func, args, kwargs, device, (0, 2, 1))
    if args[0].numel():
        codes = _batch(args[0].shape)
        with engine.scratch(device, codes * _CODE):
            with engine.scratch(device, *_svd(args, kwargs, out)):
                full = args[1] if len(args) > 1 else kwargs.get("full_matrices", False)
                _by_svd(engine, args[0], driver, bool(full), device)
            _look_at_codes(engine, device, codes)
        if out[2].is_complex() and out[2].numel() and not func._schema.is_mutable:
            # cuSOLVER gives the other side as it is before it is turned; that it is conjugated is noted (`svd_kernel`).
            torch._C._set_conj(out[2], True)
    return out


def _by_svd(engine: Engine, matrices: Any, driver: str, full: bool, device: int) -> None:
    """What a driver works in; `gesvd` has numbers that are real, and the other side's vectors of one matrix, beside it."""
    if not cusolver.is_known(engine.memory.capability(device), engine.memory.torch_version(device)):
        return
    rows, columns = matrices.shape[-2:]
    item, few = matrices.element_size(), min(rows, columns)
    if driver == "gesvdj":
        _by_cusolver(engine, device, cusolver.gesvdj(rows, columns, item, full))
    elif driver == "gesvd":
        room = cusolver.gesvd(max(rows, columns), few, item)
        with engine.scratch(device, room, few * matrices.dtype.to_real().itemsize, few**2 * item):
            pass
    else:
        room = cusolver.gesvda(max(rows, columns), few, _batch(matrices.shape), matrices.dtype)
        with engine.scratch(device, room):
            pass


def _svd(args: Any, kwargs: Any, out: Any) -> list[int]:
    """A copy, which is worked in, and room for vectors that nobody asked for."""
    matrices, (left, _, right) = args[0], out
    rows, columns = matrices.shape[-2:]
    few, batch, item = min(rows, columns), _batch(matrices.shape), matrices.element_size()
    sides: list[int] = []
    driver = kwargs.get("driver") or "gesvdj"
    if driver == "gesvdj" and max(rows, columns) <= _BATCHED_JACOBI:
        # All vectors of both sides, whatever is asked for.
        asked = ((left, rows), (right, columns))
        sides = [batch * size**2 for vectors, size in asked if vectors.numel() < batch * size**2]
    elif not left.numel():
        sides = {"gesvdj": [rows * few, columns * few], "gesvda": [batch * rows * columns, batch * few**2]}.get(
            driver, []
        )
    return [bytes_of(matrices), *(side * item for side in sides)]


@special(_aten._linalg_check_errors.default)
def _check(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> None:
    """Whether any code says that it went wrong (``BatchLinearAlgebra.cpp``). C++ asks no meta tensor; codes that are known raise
    what it says of them."""
    with pushed(engine.mode):
        args[0].any()
    known = values.exact(args[0])
    if known is None:
        engine.reads.may_raise(users_line())
    else:
        with host_only():
            func(known, *args[1:], **kwargs)
