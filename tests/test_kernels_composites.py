"""Operators that C++ puts together differently for CUDA: what they keep and what they make on the way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from asked_for import made

from gpumem_magic.units import MIB
from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    gpu.turn_on("A100-40GB")
    yield
    gpu.turn_off()


def square(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(2048, 2048, device="cuda", dtype=dtype, requires_grad=True)


def growth_and_peak(before: int) -> tuple[float, float]:
    return (torch.cuda.memory_allocated() - before) / MIB, (torch.cuda.max_memory_allocated() - before) / MIB


def test_dropout_keeps_one_byte_an_element_for_its_mask() -> None:
    x = square()
    before = torch.cuda.memory_allocated()
    y = F.dropout(x, 0.1)
    assert growth_and_peak(before)[0] == 16 + 4
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False)])
def test_dropout_that_drops_nothing_is_its_input(p: float, train: bool) -> None:
    x = square()
    before = torch.cuda.memory_allocated()
    y = torch.dropout(x, p, train)
    assert growth_and_peak(before) == (0, 0)
    assert y.shape == x.shape


def test_dropout_of_everything_has_a_result_and_a_gradient() -> None:
    x = square()
    F.dropout(x, 1.0).sum().backward()
    assert x.grad is not None


def test_dropout_of_nothing_and_under_inference() -> None:
    assert F.dropout(torch.zeros(0, 3, device="cuda"), 0.5).shape == (0, 3)
    with torch.inference_mode():
        x = torch.zeros(2048, 2048, device="cuda")
        before = torch.cuda.memory_allocated()
        y = F.dropout(x, 0.5)
        assert growth_and_peak(before) == (16, 20)
        assert y.shape == x.shape


@pytest.mark.parametrize("operator", [F.softmax, F.log_softmax])
def test_float16_scores_become_float32_inside_the_kernel(operator: object) -> None:
    x = square(torch.float16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = operator(x, -1, dtype=torch.float32)  # type: ignore[operator]
    assert y.dtype == torch.float32
    assert growth_and_peak(before) == (16, 16)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float16


def test_bfloat16_scores_are_converted_first() -> None:
    x = square(torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = F.softmax(x, -1, dtype=torch.float32)
    assert y.dtype == torch.float32
    assert growth_and_peak(before) == (16, 32)


def test_the_hosts_own_operators_are_back_afterwards() -> None:
    F.dropout(square(), 0.5)
    gpu.turn_off()
    y = F.dropout(torch.ones(1000), 0.5)
    assert set(y.tolist()) <= {0.0, 2.0}
    gpu.turn_on("T4")


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, 0), (torch.bfloat16, 16 * 4)])
def test_batch_norm_in_evaluation_keeps_what_its_kernel_returns(dtype: torch.dtype, kept: int) -> None:
    """cuDNN's has no mean and deviation, which PyTorch's own kernel has (bfloat16 goes there): two of each channel's."""
    layer = torch.nn.BatchNorm2d(16).cuda().eval()
    x = torch.zeros(4, 16, 8, 8, device="cuda", dtype=dtype)
    assert made(lambda: layer(x)) == [x.numel() * dtype.itemsize, *[kept] * (2 if kept else 0)]


def test_batch_norm_of_too_many_samples_is_not_cudnns() -> None:
    layer = torch.nn.BatchNorm1d(2).cuda().eval()
    x = torch.zeros(65536, 2, 1, device="cuda")
    assert made(lambda: layer(x[:-1])) == [65535 * 2 * 4]
    assert made(lambda: layer(x)) == [65536 * 2 * 4, 8, 8]


def test_autocast_casts_the_last_argument_first() -> None:
    layer = torch.nn.Linear(8, 16).cuda()
    x = torch.zeros(32, 8, device="cuda")
    with torch.autocast("cuda", torch.float16):
        asked = made(lambda: layer(x))
    assert asked[:4] == [16 * 2, 16 * 8 * 2, 32 * 8 * 2, 32 * 16 * 2], "bias, weight, input, result"


def test_autocast_casts_a_list_in_its_order() -> None:
    first, second = torch.zeros(4, 8, device="cuda"), torch.zeros(8, 16, device="cuda")
    with torch.autocast("cuda", torch.float16):
        asked = made(lambda: torch.einsum("ab,bc->ac", first, second))
    assert asked[:2] == [4 * 8 * 2, 8 * 16 * 2]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(("version", "least"), [("2.8", []), ("2.11", [4])])
def test_how_alike_rows_are_is_limited_by_a_number_of_the_host_in_older_versions(
    version: str, least: list[int], inference: bool
) -> None:
    gpu.turn_off()
    gpu.turn_on(f"A100-40GB,torch={version}")
    x, y = torch.zeros(100, 1024, device="cuda"), torch.zeros(100, 1024, device="cuda")
    row, whole = 100 * 4, 100 * 1024 * 4
    with torch.inference_mode(inference):
        # Each norm and a copy of it; both divided, their product, and its sums.
        assert made(lambda: F.cosine_similarity(x, y)) == [row, row, row, row, *least, whole, whole, whole, row]
