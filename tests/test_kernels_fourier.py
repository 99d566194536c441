"""What Fourier transforms take beside their results, worked out by hand from the source."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from asked_for import made

from gpumem_magic.virtual import gpu


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("A100-40GB,context=0MiB")
    gpu.turn_off()


def zeros(*shape: int, dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


def test_what_lies_at_equal_distances_is_not_copied() -> None:
    matrices = zeros(8, 64, 64)
    assert made(lambda: torch.fft.fft2(matrices)) == [matrices.nbytes]
    assert made(lambda: torch.fft.fft(matrices)) == [matrices.nbytes]
    # The first dimension: 4096 signals side by side.
    assert made(lambda: torch.fft.fft(matrices, dim=0)) == [matrices.nbytes]
    images = zeros(8, 64, 64, dtype=torch.float32)
    assert made(lambda: torch.fft.rfft2(images)) == [8 * 64 * 33 * 8]


def test_what_lies_otherwise_is_copied_first() -> None:
    matrices = zeros(8, 64, 64)
    # Signals along the middle: 64 lie side by side, and the next 64 not after them.
    assert made(lambda: torch.fft.fft(matrices, dim=1)) == [matrices.nbytes] * 2
    spread = zeros(1, 64, 64).expand(8, 64, 64)
    assert made(lambda: torch.fft.fft2(spread)) == [matrices.nbytes] * 2


def test_to_real_numbers_the_input_is_copied_always() -> None:
    spectrum = zeros(8, 64, 33)
    assert made(lambda: torch.fft.irfft2(spectrum)) == [8 * 64 * 64 * 4, spectrum.nbytes]


def test_the_first_two_dimensions_of_real_numbers_are_two_steps() -> None:
    image, spectrum = zeros(64, 64, dtype=torch.float32), zeros(64, 33)
    assert made(lambda: torch.fft.rfft2(image)) == [64 * 33 * 8] * 2
    assert made(lambda: torch.fft.irfft2(spectrum)) == [64 * 64 * 4, 64 * 33 * 8]
    # Both sides are written into a buffer of their size.
    assert made(lambda: torch.fft.fft2(image)) == [64 * 64 * 8] * 2


def test_more_than_three_dimensions_are_several_steps() -> None:
    whole = zeros(2, 4, 4, 4)
    assert made(lambda: torch.fft.fftn(whole)) == [whole.nbytes] * 2
