"""What factorizing by Cholesky holds, solving by it and by triangles."""

from __future__ import annotations

from typing import Any

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.calls import bytes_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.mismatch import in_full_precision
from gpumem_magic.virtual.engine.rules import BESIDE, special
from gpumem_magic.virtual.operators import cusolver
from gpumem_magic.virtual.operators.linear_algebra import (
    ADDRESS,
    CODE,
    batch_of,
    by_cusolver,
    copied_unless_plain,
    look_at_codes,
    solve_triangular,
)

# Many matrices of Cholesky's were MAGMA's before. (The builds of 2.12 and 2.13 ask cuSOLVER, those of 2.11 and older do not.)
_CHOLESKY_BY_CUSOLVER_FROM = (2, 12)


@in_full_precision(_aten.linalg_cholesky_ex.default, _aten.cholesky.default)
def _cholesky_kernel(*_: Any, **named: Any) -> str:
    return "cholesky_cusolver"


# (Of one matrix; several are MAGMA's in versions before 2.12. These names, and those of reflections, LDL and eigenvalues,
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
    batch = batch_of(matrices.shape)
    if not matrices.numel():  # (`linalg_cholesky_ex_out` in ``BatchLinearAlgebra.cpp``.)
        return
    if batch == 1:
        by_cusolver(engine, device, cusolver.potrf(matrices.shape[-1], matrices.element_size(), upper))
    with engine.scratch(device, batch * ADDRESS if batch > 1 else 0):
        pass


@special(_aten.cholesky.default, table=BESIDE)
def _cholesky_before(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    """Its older name, which looks at the codes itself."""
    if args[0].numel():
        batch = batch_of(args[0].shape)
        with engine.scratch(device, batch * CODE):
            _factorize_half(engine, device, args[0], args[1] if len(args) > 1 else kwargs.get("upper", False))
            look_at_codes(engine, device, batch)
    return ()


@special(_aten._cholesky_solve_helper.default)
def _cholesky_solve(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """cuSOLVER's code of errors stands before the result (2.11 on an H100)."""
    alone = batch_of(args[1].shape) == 1 and engine.memory.torch_version(device) < _CHOLESKY_BY_CUSOLVER_FROM
    with engine.scratch(device, CODE if alone else 0):
        out = engine.run(func, args, kwargs, device)
        if alone:
            with engine.scratch(device, bytes_of(args[1])):
                return out
        _solve_by_cholesky(engine, device, args[1])
    return out


def _solve_by_cholesky(engine: Engine, device: int, matrices: Any) -> None:
    batch = batch_of(matrices.shape)
    if batch == 1 or engine.memory.torch_version(device) < _CHOLESKY_BY_CUSOLVER_FROM:
        # cuSOLVER's code of errors, and the copy that is worked in.
        with engine.scratch(device, *([CODE] * (batch == 1) + [bytes_of(matrices)])):
            return
    for _ in range(2):
        with engine.scratch(device, *copied_unless_plain(matrices, batch)):
            solve_triangular(engine, device, matrices.shape[-1], batch)


@special(_aten.cholesky_inverse.default, table=BESIDE)
def _cholesky_inverse(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    matrices = args[0]
    if engine.memory.torch_version(device) < _CHOLESKY_BY_CUSOLVER_FROM:
        return [bytes_of(matrices), CODE if batch_of(matrices.shape) == 1 else 0]
    with engine.scratch(device, bytes_of(matrices)):
        _solve_by_cholesky(engine, device, matrices)
    return []


@in_full_precision(_aten.linalg_solve_triangular.default)
def _triangular_kernel(*_: Any, **named: Any) -> str:
    return "triangular_solve_cuda"


@special(_aten.linalg_solve_triangular.default, table=BESIDE)
def _triangular(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    batch = batch_of(out.shape)
    with engine.scratch(device, *copied_unless_plain(args[0], batch)):
        solve_triangular(engine, device, args[0].shape[-1], batch)
    return ()


@special(_aten.triangular_solve.default, table=BESIDE)
def _triangular_before(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> tuple[int, ...]:
    """The same under its older name."""
    solve_triangular(engine, device, args[1].shape[-1], batch_of(out[0].shape))
    return ()
