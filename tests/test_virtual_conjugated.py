"""Views that are conjugated or negated, with values."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.engine.host_calls import FactoryCall

_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "pinv": lambda matrix, _: torch.linalg.pinv(matrix),
    "pinv of an adjoint": lambda matrix, _: torch.linalg.pinv(matrix.mH),
    "hermitian pinv": lambda matrix, _: torch.linalg.pinv(matrix + matrix.mH, hermitian=True),
    "lstsq": lambda matrix, other: torch.linalg.lstsq(matrix, other.mH).solution,
    "lu_solve": lambda matrix, other: torch.linalg.lu_solve(*torch.linalg.lu_factor(matrix), other, adjoint=True),
    "cholesky": lambda matrix, other: torch.cholesky_solve(
        other, torch.linalg.cholesky(matrix @ matrix.mH + torch.eye(5, device=matrix.device))
    ),
    "reflections": lambda matrix, _: torch.linalg.householder_product(matrix.mH, matrix[0]),
    "a column's adjoint": lambda matrix, other: matrix[None, :, :1].matmul(other[None, :, :1].mH),
    "a view of ones": lambda matrix, _: matrix[None, :, :1].mH.view(1, 1, 5) * 1,
    "imaginary": lambda matrix, other: matrix.conj().imag.exp() @ other.mH.imag,
}


def _gradient(call: Callable[[Any, Any], Any], matrix: Any, other: Any) -> tuple[Any, Any]:
    given = [one.clone().requires_grad_() for one in (matrix, other)]
    result = call(*given)
    (result * 0.5).abs().square().sum().backward()
    return result.detach(), given[0].grad


@pytest.mark.parametrize("name", _CALLS)
@pytest.mark.parametrize("values", ["real", "auto"])
def test_adjoints_have_the_values_of_the_host(name: str, values: str) -> None:
    """The dispatcher leaves out what resolves them once an operator has come to Python: a pseudoinverse read others."""
    gpu.turn_on(f"T4,values={values}")
    matrix, other = (torch.randn(5, 5, dtype=torch.complex128) for _ in range(2))
    expected = _gradient(_CALLS[name], matrix, other)
    found = _gradient(_CALLS[name], matrix.cuda(), other.cuda())
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), its)


def test_gradients_of_vectors_that_are_solved_for() -> None:
    """A view whose dimensions of one lie otherwise lost that it is conjugated."""
    gpu.turn_on("T4,values=real")
    matrix, vector = torch.randn(2, 5, 5, dtype=torch.complex128), torch.randn(5, dtype=torch.complex128)
    _, expected = _gradient(torch.linalg.solve, matrix, vector)
    _, found = _gradient(torch.linalg.solve, matrix.cuda(), vector.cuda())
    torch.testing.assert_close(found.cpu(), expected)


def test_views_stay_conjugated_without_values() -> None:
    gpu.turn_on("T4")
    column = torch.empty(1, 5, 1, dtype=torch.complex64, device="cuda").mH
    viewed = column.view(1, 1, 5)
    assert viewed.is_conj()
    assert viewed.stride() == (5, 5, 1)
    assert column.imag.view(5, 1, 1).is_neg()


def test_inference_mode_conjugates_inside_what_comes_whole() -> None:
    gpu.turn_on("T4,values=real")
    signal = torch.randn(4, 6, dtype=torch.complex64)
    with torch.inference_mode():
        for transform in (torch.fft.hfft, torch.fft.hfft2, torch.fft.hfftn, torch.fft.ihfft):
            given = signal.real if transform is torch.fft.ihfft else signal
            torch.testing.assert_close(transform(given.cuda()).cpu(), transform(given))


def test_nothing_is_kept_of_what_makes_a_tensor() -> None:
    """By what an operator is called with was looked up for good, and a call of a factory has its arguments in it."""
    gpu.turn_on("T4,values=real")
    for _ in range(9):
        torch.rand(3, device="cuda")
    gc.collect()
    assert not any(type(one) is FactoryCall for one in gc.get_objects())
