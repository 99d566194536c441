"""What torchvision's deformable convolution takes, worked out by hand from ``deform_conv2d_kernel.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from asked_for import made

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.libraries import vision

_F = 4
# cuBLAS's own workspace, which the first product takes.
_CUBLAS = 33_554_432
HOW = (1, 1, 0, 0, 1, 1)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    gpu.turn_on("H100,torch=2.11")
    yield
    gpu.turn_off()


def arguments(samples: int, groups: int = 1) -> tuple[Any, ...]:
    """Four channels of 8 x 8, five or six kernels of 3 x 3: 6 x 6 places, two offsets of each of nine points."""
    kernels = 6 if groups == 2 else 5
    return tuple(
        torch.zeros(*shape, device="cuda")
        for shape in ((samples, 4, 8, 8), (kernels, 4 // groups, 3, 3), (samples, 18, 6, 6), (samples, 1), (kernels,))
    )


def test_the_columns_of_some_samples_and_their_products() -> None:
    out = 5 * 36 * _F
    given = arguments(1)
    # As an H100 was asked: the result, the products, the columns, and what has the bias.
    asked = made(lambda: vision.deform(*given, *HOW, 1, 1, False))
    assert asked == [out, out, 36 * 36 * _F, _CUBLAS, out]
    # 34 samples: 17 at a time.
    given = arguments(34)
    assert made(lambda: vision.deform(*given, *HOW, 1, 1, False)) == [34 * out, 34 * out, 36 * 17 * 36 * _F, 34 * out]
    # Of 37, which is prime and more than 32, each by itself.
    given = arguments(37)
    assert made(lambda: vision.deform(*given, *HOW, 1, 1, False))[2] == 36 * 36 * _F
    assert vision.deform(*given, *HOW, 1, 1, False).shape == (37, 5, 6, 6)
    assert vision.deform(*arguments(0), *HOW, 1, 1, False).shape == (0, 5, 6, 6)


def test_gradients_lay_samples_together_once_for_each_product() -> None:
    given = arguments(4, groups=2)
    vision.deform(*given, *HOW, 2, 1, False)
    gradient = torch.zeros(4, 6, 6, 6, device="cuda")
    asked = made(lambda: vision.deform_backward(gradient, *given, *HOW, 2, 1, False))
    columns, group = 36 * 4 * 36 * _F, 3 * 4 * 36 * _F
    of_input, of_weight, of_offset, of_mask, of_bias = (one.numel() * _F for one in given)
    # Each group of the result's gradient is laid out for the first product, all of them for the second.
    first = [of_input, of_offset, of_mask, columns, group, group]
    assert asked == [*first, of_weight, 2 * group, columns, of_bias, of_bias, of_bias]
    results = vision.deform_backward(gradient, *given, *HOW, 2, 1, False)
    assert [one.shape for one in results] == [one.shape for one in given]


def test_a_product_in_place_takes_cublas_workspace() -> None:
    out, left, right = (torch.zeros(8, 8, device="cuda") for _ in range(3))
    assert made(lambda: out.addmm_(left, right)) == [_CUBLAS]
