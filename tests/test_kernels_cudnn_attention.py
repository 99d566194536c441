"""cuDNN's attention on a virtual H100: when it is taken, what it makes and works in (as recorded with 2.11 on a real one)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from asked_for import made
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.operators.attention import CUDNN, FLASH, Chooser, first_of

SEEDS = [8, 8]


@pytest.fixture(autouse=True)
def _a_card() -> Iterator[None]:
    gpu.turn_on("H100,torch=2.11")
    yield
    gpu.turn_off()


def heads(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float16, device="cuda", requires_grad=grad)


@pytest.mark.parametrize(
    ("capability", "version", "kernel"),
    [
        ((9, 0), (2, 8), FLASH),
        # With cuDNN 9.10, which is new enough for 2.9 alone.
        ((9, 0), (2, 9), CUDNN),
        ((9, 0), (2, 10), FLASH),
        ((9, 0), (2, 11), CUDNN),
        ((9, 0), (2, 15), CUDNN),
        ((10, 3), (2, 11), CUDNN),
        ((8, 0), (2, 13), FLASH),
        ((12, 0), (2, 13), FLASH),
    ],
)
def test_it_comes_first_on_hopper_and_large_blackwell_with_a_new_library(
    capability: tuple[int, int], version: tuple[int, int], kernel: str
) -> None:
    assert first_of({FLASH, CUDNN}, Chooser(capability, version)) == kernel


def test_a_variable_and_an_order_of_the_programs_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    which = Chooser((9, 0), (2, 11))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert first_of({FLASH, CUDNN}, which) == FLASH
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert first_of({FLASH, CUDNN}, which) == FLASH


def test_seeds_come_first_and_sums_only_where_a_gradient_wants_them() -> None:
    query = heads(2, 4, 100, 64)
    size = 2 * 4 * 100 * 64 * 2
    assert made(lambda: F.scaled_dot_product_attention(query, query, query)) == [*SEEDS, size, 256]
    query = heads(2, 4, 100, 64, grad=True)
    sums = 2 * 4 * 100 * 4
    assert made(lambda: F.scaled_dot_product_attention(query, query, query)) == [*SEEDS, size, sums, 256]


@pytest.mark.parametrize(
    ("query", "key", "parts"),
    [
        ((2, 8, 1, 64), (2, 8, 3000, 64), 16),
        ((1, 8, 1, 64), (1, 2, 3000, 64), 16),
        ((1, 32, 1, 96), (1, 32, 4000, 96), 8),
        ((4, 16, 1, 128), (4, 4, 2000, 128), 8),
        ((1, 16, 1, 256), (1, 4, 700, 256), 4),
    ],
)
def test_the_keys_of_a_single_query_are_divided(query: tuple[int, ...], key: tuple[int, ...], parts: int) -> None:
    """Each with its result, and two numbers for each row, in float32."""
    given, kept = heads(*query), heads(*key)
    found = made(lambda: F.scaled_dot_product_attention(given, kept, kept, enable_gqa=True))
    rows = query[0] * query[1]
    assert found == [*SEEDS, rows * query[3] * 2, 128 + parts * rows * (query[3] + 2) * 4]


def test_keys_of_many_rows_and_with_a_mask_are_not_divided() -> None:
    query, key = heads(2, 45, 1, 64), heads(2, 45, 3000, 64)
    assert made(lambda: F.scaled_dot_product_attention(query, key, key)) == [*SEEDS, 2 * 45 * 64 * 2]
    query, key, mask = heads(2, 8, 1, 64), heads(2, 8, 301, 64), heads(2, 1, 1, 301)
    assert made(lambda: F.scaled_dot_product_attention(query, key, key, mask)) == [*SEEDS, 2 * 8 * 64 * 2]


def test_backward_sums_in_float32_and_apart_for_heads_that_share_keys() -> None:
    query, key, gradient = heads(2, 8, 100, 64, grad=True), heads(2, 2, 100, 64, grad=True), heads(2, 8, 100, 64)
    out = F.scaled_dot_product_attention(query, query, query)
    size, sums = 2 * 8 * 100 * 64 * 2, 2 * 8 * 100 * 4
    # (Where three gradients meet, they are added in place.)
    found = made(lambda: torch.autograd.grad(out, query, gradient))
    assert found[:4] == [size, size, size, 256 + 2 * size + sums]
    out = F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    found = made(lambda: torch.autograd.grad(out, (query, key), gradient))
    assert found[:4] == [size, size // 4, size // 4, 256 + 2 * size + sums + 2 * size]


def test_a_gradient_that_is_one_number_is_laid_out_after_the_results() -> None:
    query = heads(2, 4, 100, 64, grad=True)
    total = F.scaled_dot_product_attention(query, query, query).sum()
    size, sums = 2 * 4 * 100 * 64 * 2, 2 * 4 * 100 * 4
    found = made(lambda: torch.autograd.grad(total, query))
    assert found[1:6] == [size, size, size, size, 256 + 2 * size + sums]


@pytest.mark.parametrize(
    ("version", "dropout", "kept"), [("2.11", 0.1, True), ("2.13", 0.1, False), ("2.13", 0.0, True)]
)
def test_dropout_is_left_to_flash_since_2_13(version: str, dropout: float, kept: bool) -> None:
    gpu.turn_off()
    gpu.turn_on(f"H100,torch={version}")
    query = heads(2, 4, 100, 64)
    assert (made(lambda: F.scaled_dot_product_attention(query, query, query, dropout_p=dropout))[:2] == SEEDS) is kept


def test_a_mask_of_three_dimensions_is_left_to_another_kernel() -> None:
    """As an H100 took it for one query: no seeds, and the result alone."""
    query, key = heads(4, 8, 1, 64), heads(4, 8, 256, 64)
    mask = torch.zeros(1, 1, 256, dtype=torch.float16, device="cuda")
    with torch.inference_mode():
        assert made(lambda: F.scaled_dot_product_attention(query, key, key, mask)) == [query.nbytes]
        for dims in (mask[0], mask[None]):
            asked = made(lambda dims=dims: F.scaled_dot_product_attention(query, key, key, dims))
            assert asked[:3] == [*SEEDS, query.nbytes]
