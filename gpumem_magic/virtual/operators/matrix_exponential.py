"""`matrix_exp`, which is made of other operators: how many products it takes goes by the matrix's norm.

After `linalg_matrix_exp` in ``native/LinearAlgebra.cpp``, torch 2.11: Taylor polynomials of five degrees, up to a norm each, and
of the eighteenth with matrices that are made smaller first and then multiplied with themselves. Several matrices, and a norm that
nobody knows, always take the eighteenth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.calls import users_line
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.operators.data_dependent import _placed

# Up to which norm the polynomials of the degrees 1, 2, 4, 8, 12 and 18 are exact.
_UP_TO = {
    torch.float32: (
        1.192092800768788e-07, 5.978858893805233e-04, 5.116619363445086e-02, 5.800524627688768e-01, 1.461661507209034,
        3.010066362817634,
    ),
    torch.float64: (
        2.220446049250313e-16, 2.580956802971767e-08, 3.397168839976962e-04, 4.991228871115323e-02, 2.996158913811580e-01,
        1.090863719290036,
    ),
}  # fmt: skip


@special(_aten._compute_linear_combination.default)
def _linear_combination(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """Sums of tensors, in zeros: a row of coefficients for each."""
    tensors, coefficients = args
    return _placed(engine, (coefficients.shape[0], *tensors.shape[1:]), tensors.dtype, device)


@special(_aten.linalg_matrix_exp.default)
def _exponential(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    (matrices,) = args
    with pushed(engine.mode):
        if not matrices.numel():
            return matrices.clone()
        if matrices.shape[-1] == 1:
            return matrices.exp()
        flat = matrices.reshape(-1, *matrices.shape[-2:])
        known = values.known(matrices)
        if known is None or not known.exact:
            engine.reads.works(users_line())
        host = None if known is None else known.host.reshape(flat.shape).abs().sum(-2).amax(-1)
        return (_of_one if len(flat) == 1 else _of_several)(flat, host).view(matrices.shape)


def _bounds(dtype: torch.dtype) -> tuple[float, ...]:
    return _UP_TO.get(dtype.to_real(), _UP_TO[torch.float64])


def _norms(matrices: torch.Tensor) -> torch.Tensor:
    absolute = matrices.abs()
    sums = absolute.sum(-2)
    norms, places = sums.max(-1)
    del places, sums, absolute
    return norms


def _of_one(matrix: torch.Tensor, known: torch.Tensor | None) -> torch.Tensor:
    norms = _norms(matrix)
    out = torch.full_like(matrix, math.nan, memory_format=torch.contiguous_format)
    norm = math.inf if known is None else float(known)
    bounds = _bounds(matrix.dtype)
    polynomial = next((made for most, made in zip(bounds, _POLYNOMIALS, strict=False) if norm <= most), None)
    place = torch.zeros(1, dtype=torch.int64).to(matrix.device)
    chosen = matrix.index_select(0, place)
    if polynomial:
        made = polynomial(chosen)
        out.index_put_((place,), made)
        del made
    else:
        its = norms.index_select(0, place)
        made = _of_all(chosen, its, known)
        # (By the place as it is on the host.)
        out.index_put_((torch.zeros(1, dtype=torch.int64),), made)
        del made, its
    del chosen, place, norms
    return out


def _powers(matrices: torch.Tensor, count: int, room: int) -> torch.Tensor:
    """One, the matrices, their squares and cubes, and room for more, in one tensor."""
    powers = matrices.new_empty(room, *matrices.shape)
    ones = torch.ones(1, dtype=powers.dtype, device=powers.device)
    diagonals = torch.diag_embed(ones.expand(matrices.shape[:-1]))
    powers[0].copy_(diagonals)
    del diagonals, ones
    powers[1].copy_(matrices)
    for power, (left, right) in enumerate(((1, 1), (1, 2), (3, 3))[: count - 2], 2):
        torch.matmul(powers[left], powers[right], out=powers[power])
    return powers


def _sums(powers: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """With a coefficient for each power in each of so many sums, which are brought to the device."""
    return _aten._compute_linear_combination.default(powers, _coefficients(powers, rows))  # type: ignore[no-any-return]


def _coefficients(powers: torch.Tensor, rows: int) -> torch.Tensor:
    return powers.new_empty(rows, len(powers), dtype=powers.dtype.to_real())


def _first(matrices: torch.Tensor) -> torch.Tensor:
    return _powers(matrices, 2, 2).sum(0)


def _second(matrices: torch.Tensor) -> torch.Tensor:
    return _powers(matrices, 3, 3).sum(0)


def _fourth(matrices: torch.Tensor) -> torch.Tensor:
    powers = _powers(matrices, 3, 4)
    torch.matmul(powers[2], _sums(powers[:3])[0], out=powers[3])
    return _sums(powers)[0]


def _eighth(matrices: torch.Tensor) -> torch.Tensor:
    powers = _powers(matrices, 3, 5)
    torch.matmul(powers[2], _sums(powers[1:3])[0], out=powers[3])
    right = _sums(powers[:4])
    torch.matmul(_sums(powers[2:4])[0], right[0], out=powers[4])
    del right
    return _sums(powers)[0]


def _by_sums(matrices: torch.Tensor, count: int) -> torch.Tensor:
    """Of the twelfth and the eighteenth degree: as many sums as powers, which are multiplied; a sum is the result."""
    coefficients = matrices.new_empty(count, count, dtype=matrices.dtype.to_real())
    powers = _powers(matrices, count, count)
    sums: torch.Tensor = _aten._compute_linear_combination.default(powers, coefficients)
    for _ in range(2):
        torch.matmul(sums[0], sums[1], out=powers[0])
    del powers, coefficients
    return sums[0]


def _twelfth(matrices: torch.Tensor) -> torch.Tensor:
    return _by_sums(matrices, 4)


def _eighteenth(matrices: torch.Tensor) -> torch.Tensor:
    return _by_sums(matrices, 5)


_POLYNOMIALS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (_first, _second, _fourth, _eighth, _twelfth)


def _of_several(matrices: torch.Tensor, known: torch.Tensor | None) -> torch.Tensor:
    norms = _norms(matrices)
    out = _of_all(matrices, norms, known)
    del norms
    return out


def _of_all(matrices: torch.Tensor, norms: torch.Tensor, known: torch.Tensor | None) -> torch.Tensor:
    """By the eighteenth degree: those that are multiplied equally often together. (What C++ frees at the end of a line, or of
    all, goes by hand.)"""
    bound = _bounds(matrices.dtype)[-1]
    sections = _sections(known, bound, len(norms))
    larger = norms / bound
    power = larger.log2()
    whole = power.ceil()
    times = whole.clamp(min=0)
    del whole, power, larger
    factors = torch.pow(2, -times)
    shrunk = matrices * factors.view(-1, 1, 1)
    made = _eighteenth(shrunk)
    ordered, order = times.sort(dim=0)
    ordered = ordered.to(torch.int64)
    distinct, places, counts = torch.unique_consecutive(ordered, return_inverse=True, return_counts=True)
    del distinct, places
    # (Its memory is that of the most there could be.)
    counts.resize_(len(sections))
    edges = counts.cumsum(0) - 1
    different = ordered.index_select(0, edges).clamp(min=0)
    more = torch.diff(different, prepend=different.new_zeros(1))
    _ = torch.cat((counts, more)).cpu()
    pieces = []
    rest = made.index_select(0, order)
    done = 0
    for so_often, count in sections:
        for _ in range(so_often - done):
            rest = torch.matmul(rest, rest, out=torch.empty_like(rest))
        done = so_often
        pieces.append(rest[:count])
        rest = rest[count:]
    joined = torch.cat(pieces)
    back = order.argsort()
    out = joined.index_select(0, back)
    del back, joined, pieces, rest, more, different, edges, counts, ordered, order, made, shrunk, factors, times
    return out


def _sections(norms: torch.Tensor | None, bound: float, count: int) -> list[tuple[int, int]]:
    """How often matrices are multiplied with themselves, and how many of them are: the fewest first. Unknown ones are not."""
    if norms is None:
        return [(0, count)]
    times, counts = (norms / bound).log2().ceil().clamp(min=0).to(torch.int64).unique(return_counts=True)
    return list(zip(times.tolist(), counts.tolist(), strict=True))
