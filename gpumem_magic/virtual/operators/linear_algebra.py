"""What linear algebra holds beside its results: copies that are worked in, pivots, codes of errors, lists of addresses.

After ``native/BatchLinearAlgebra.cpp``, ``native/LinearAlgebra.cpp`` and ``native/cuda/linalg`` in ATen, torch 2.9 to 2.13, with
the backend that PyTorch prefers. MAGMA factorizes many matrices by LU, unless they are small; what it takes does not come from
PyTorch's allocator. How much cuSOLVER asks for to work in is known of an H100 only (`cusolver`). What cuBLAS solves takes its
workspace. Gradients are made of these operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.operators import cusolver

ADDRESS = INDEX = 8
PIVOT = CODE = 4


def batch_of(shape: Sequence[int]) -> int:
    return prod(shape[:-2])


def _takes_workspace(engine: Engine, device: int) -> None:
    """A function of cuBLAS's, as a product is."""
    engine.memory.after_operator(_aten.mm.default, (), device)


def by_cusolver(engine: Engine, device: int, *sizes: int) -> None:
    """One after the other, of functions of `cusolver`."""
    if cusolver.is_known(engine.memory.capability(device), engine.memory.torch_version(device)):
        for size in sizes:
            with engine.scratch(device, size):
                pass


def by_cublas(engine: Engine, device: int, batch: int, lists: int) -> None:
    """A function for many matrices at once, which takes lists of their addresses."""
    with engine.scratch(device, *([batch * ADDRESS] * lists)):
        _takes_workspace(engine, device)


def solve_triangular(engine: Engine, device: int, size: int, batch: int) -> None:
    if not batch * size:
        return
    if batch <= 8 and size >= 64:
        _takes_workspace(engine, device)
    else:
        by_cublas(engine, device, batch, 2)


def copied_unless_plain(matrices: Any, batch: int) -> list[int]:
    """Of matrices that lie neither in rows nor in columns, or are fewer than what they are used for."""
    if batch_of(matrices.shape) == batch and (matrices.is_contiguous() or matrices.mT.is_contiguous()):
        return []
    return [batch * matrices.shape[-1] ** 2 * matrices.element_size()]


def look_at_codes(engine: Engine, device: int, count: int) -> None:
    """Whether any code says that it went wrong; one alone is converted to a truth value."""
    with engine.scratch(device, 1, 1 if count == 1 else 0):
        pass


def results_in_order(engine: Engine, func: Any, args: Any, kwargs: Any, device: int, order: Sequence[int]) -> Any:
    """An operator's results, which come in this order; those that ``out=`` names become larger in it."""
    if func._schema.is_mutable:
        return engine.run(func, args, kwargs, device, order)
    out = engine.fake_call(func, args, kwargs)
    engine.settle(tuple(out[place] for place in order))
    return out
