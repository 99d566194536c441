"""What Fourier transforms take beside their results, worked out by hand from the source."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from asked_for import made

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.operators.fourier import work_area


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


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_half_precision_takes_room_where_the_result_has_both_sides() -> None:
    signals = zeros(4, 128, dtype=torch.float16)
    assert made(lambda: torch.fft.fft(signals)) == [4 * 128 * 4, signals.nbytes]
    assert made(lambda: torch.fft.rfft(signals)) == [4 * 65 * 4]


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


# ---- what cuFFT works in: recorded on an H100 (driver 580.159, torch 2.11.0+cu130)


@pytest.mark.parametrize(
    ("length", "batch", "is_real", "recorded"),
    [
        (1024, 1000, False, 0),
        (10_000, 16, False, 0),
        (16_384, 16, False, 0),
        (19_683, 16, False, 0),
        (14_641, 16, False, 1_874_048),
        (65_536, 16, False, 8_388_608),
        (8191, 16, False, 4_194_304),
        (99_991, 16, False, 51_200_000),
        (1000, 16, True, 0),
        (16_384, 16, True, 0),
        (3125, 16, True, 0),
        (10_000, 16, True, 640_000),
        (44_100, 16, True, 2_822_528),
        (4001, 1, True, 64_776),
        (4001, 16, True, 513_088),
        (65_537, 1, True, 2_625_544),
        (65_537, 16, True, 20_992_064),
    ],
)
def test_long_transforms_and_those_of_large_primes_work_in_buffers(
    length: int, batch: int, is_real: bool, recorded: int
) -> None:
    assert work_area((length,), batch, 8, is_real) == recorded


@pytest.mark.parametrize(
    ("lengths", "batch", "is_real", "recorded"),
    [
        # Of a large prime a convolution of 200,000 (the next of 2, 3 and 5), in two buffers; in several dimensions the same.
        ((2, 99_991), 1, False, 6_400_000),
        ((4566,), 3, False, 442_368),
        ((289_282,), 1, True, 5_824_520),
        # Odd ones two at a time, and each plane's by themselves.
        ((605,), 7, True, 38_816),
        ((24, 277), 5, True, 319_296),
    ],
)
def test_parts_of_a_convolution_begin_at_multiples(
    lengths: tuple[int, ...], batch: int, is_real: bool, recorded: int
) -> None:
    assert work_area(lengths, batch, 8, is_real) == recorded


def test_along_several_dimensions_only_large_primes_do() -> None:
    assert work_area((1024, 1024), 2, 8, is_real=False) == work_area((17, 19, 23), 1, 8, is_real=True) == 0
    assert work_area((127, 129), 2, 8, is_real=False) == 2 * 127 * 129 * 8 == 262_128


def test_the_buffer_comes_after_the_result_and_the_copy() -> None:
    x = torch.zeros(16, 22_051, dtype=torch.complex64, device="cuda")
    numbers = 16 * 44_100 * 4
    assert made(lambda: torch.fft.irfft(x, n=44_100)) == [numbers, x.nbytes, 16 * 22_051 * 8]
    y = torch.zeros(16, 40_000, dtype=torch.complex64, device="cuda")
    assert made(lambda: torch.fft.fft(y)) == [y.nbytes, y.nbytes]


def test_numbers_that_lie_apart_go_through_a_buffer_sooner() -> None:
    """As recorded on an H100."""
    few, fifty = zeros(8, 30, 40), zeros(26, 1200)
    assert made(lambda: torch.fft.irfftn(few, dim=(0,))) == [14 * 1200 * 4, few.nbytes, 7 * 1200 * 8]
    assert made(lambda: torch.fft.irfftn(few[:5], dim=(0,))) == [8 * 1200 * 4, 5 * 1200 * 8]
    assert made(lambda: torch.fft.irfft(fifty, dim=0)) == [50 * 1200 * 4, fifty.nbytes]
    # The second step of the first two dimensions: its numbers lie one of the first step's results apart.
    small = zeros(2, 7)
    assert made(lambda: torch.fft.irfft2(small)) == [12 * 2 * 4, small.nbytes, 6 * 2 * 8]
    long = zeros(2000, 100)
    assert made(lambda: torch.fft.fft(long, dim=0)) == [long.nbytes, long.nbytes]
    in_rows = long.T.contiguous()
    assert made(lambda: torch.fft.fft(in_rows)) == [long.nbytes]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_half_precision_takes_room_unless_transforms_follow_each_other() -> None:
    # As an H100 with 2.11 was asked in PyTorch's own samples.
    x = torch.zeros(2, 8, 16, dtype=torch.float16, device="cuda")
    assert made(lambda: torch.fft.rfftn(x, dim=(0, -1))) == [2 * 8 * 9 * 4, 512]
    assert made(lambda: torch.fft.rfft2(x, s=(4, 8), dim=(1, 2))) == [2 * 4 * 5 * 4, 128]
    assert made(lambda: torch.fft.rfft2(x, dim=(1, 2))) == [2 * 8 * 9 * 4]
    # Along columns of both sides: a copy of them, and the room.
    assert made(lambda: torch.fft.fft(x, dim=1)) == [1024, 512, 512]
    y = torch.zeros(2, 8, 9, dtype=torch.complex32, device="cuda")
    assert made(lambda: torch.fft.irfft2(y, dim=(0, -1))) == [512, y.nbytes, 512]
    assert made(lambda: torch.fft.irfft2(y, dim=(1, 2))) == [512, y.nbytes]


def test_half_precision_is_of_powers_of_two() -> None:
    x = torch.zeros(4, 100, dtype=torch.float16, device="cuda")
    with pytest.raises(RuntimeError, match=r"powers of two .* but got a signal size of\[100\]"):
        torch.fft.rfft(x)
    assert torch.fft.rfft(x[:, :64]).shape == (4, 33)
