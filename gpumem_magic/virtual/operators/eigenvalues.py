"""What eigenvalues and singular values hold."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from gpumem_magic.looks.tensors import no_functions
from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.calls import bytes_of, copies_of, users_line
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.host_calls import host_keys
from gpumem_magic.virtual.engine.mismatch import in_full_precision
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.operators import cusolver
from gpumem_magic.virtual.operators.linear_algebra import CODE, batch_of, by_cusolver, look_at_codes, results_in_order

# The longest side of matrices that cuSOLVER decomposes many at once of.
_BATCHED_JACOBI = 32
_SVD_DRIVERS = "gesvdj", "gesvd", "gesvda"
# (2.10 has MAGMA, too, and its CUDA build takes cuSOLVER; 2.9's takes MAGMA.)
_EIG_BY_CUSOLVER_FROM = (2, 10)


@in_full_precision(_aten._linalg_eigh.default)
def _eigh_kernel(*_: Any, **named: Any) -> str:
    return "linalg_eigh_cuda"


@special(_aten._linalg_eigh.default, _aten._linalg_eigh.eigenvalues)
def _eigh(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The vectors come before the values (`_linalg_eigh` in ``BatchLinearAlgebra.cpp``)."""
    out = results_in_order(engine, func, args, kwargs, device, (1, 0))
    codes = batch_of(args[0].shape)
    if args[0].numel():
        with engine.scratch(device, 0 if out[1].numel() else bytes_of(args[0]), codes * CODE):
            rows, item, dtype = args[0].shape[-1], args[0].element_size(), args[0].dtype
            by_cusolver(engine, device, *cusolver.eigh(rows, codes, item, dtype == torch.float32))
            look_at_codes(engine, device, codes)
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
    codes, is_real, rows = batch_of(matrices.shape), not matrices.is_complex(), max(1, matrices.shape[-1])
    # Both are complex.
    vectors = bytes_of(matrices) * (2 if is_real else 1)
    values = vectors // rows
    with engine.scratch(device, codes * CODE), ExitStack() as of_values, ExitStack() as of_vectors:
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
                    by_cusolver(engine, device, room)
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
        look_at_codes(engine, device, codes)
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
    out = results_in_order(engine, func, args, kwargs, device, (0, 2, 1))
    if args[0].numel():
        codes = batch_of(args[0].shape)
        with engine.scratch(device, codes * CODE):
            with engine.scratch(device, *_svd(args, kwargs, out)):
                full = args[1] if len(args) > 1 else kwargs.get("full_matrices", False)
                _by_svd(engine, args[0], driver, bool(full), device)
            look_at_codes(engine, device, codes)
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
        by_cusolver(engine, device, cusolver.gesvdj(rows, columns, item, full))
    elif driver == "gesvd":
        room = cusolver.gesvd(max(rows, columns), few, item)
        with engine.scratch(device, room, few * matrices.dtype.to_real().itemsize, few**2 * item):
            pass
    else:
        room = cusolver.gesvda(max(rows, columns), few, batch_of(matrices.shape), matrices.dtype)
        with engine.scratch(device, room):
            pass


def _svd(args: Any, kwargs: Any, out: Any) -> list[int]:
    """A copy, which is worked in, and room for vectors that nobody asked for."""
    matrices, (left, _, right) = args[0], out
    rows, columns = matrices.shape[-2:]
    few, batch, item = min(rows, columns), batch_of(matrices.shape), matrices.element_size()
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
        with no_functions(), host_keys():
            func(known, *args[1:], **kwargs)
