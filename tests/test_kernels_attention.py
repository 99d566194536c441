"""What attention takes beside its results, worked out from ATen/native/transformers and seen in PyTorch's CUDA builds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import made, steps
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.operators.attention import parts_of_keys

HALF = torch.float16


@pytest.fixture(autouse=True)
def _a_card() -> Iterator[None]:
    gpu.turn_on("A100-40GB,torch=2.13")
    yield
    gpu.turn_off()


def heads_first(*shape: int, dtype: torch.dtype = HALF, grad: bool = True) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device="cuda", requires_grad=grad)


def tokens_first(*shape: int, dtype: torch.dtype = HALF) -> Any:
    batch, heads, tokens, size = shape
    return torch.zeros(batch, tokens, heads, size, dtype=dtype, device="cuda", requires_grad=True).transpose(1, 2)


# ---- without samples a fused kernel runs, and without tokens none


@pytest.mark.parametrize(("dtype", "asked"), [(torch.float16, [16, 8]), (torch.float32, [])])
def test_an_empty_batch_takes_flash_in_half_precision_and_the_efficient_kernel_else(
    dtype: torch.dtype, asked: list[int]
) -> None:
    # `check_nonzero_sequence_lengths_dense` in sdp_utils_cpp.h asks for queries and keys only. Flash makes its seeds.
    query = heads_first(0, 4, 64, 64, dtype=dtype)
    assert made(lambda: F.scaled_dot_product_attention(query, query, query)) == asked


def test_no_queries_take_the_math_path() -> None:
    query, key = heads_first(2, 4, 0, 64), heads_first(2, 4, 5, 64)
    assert F.scaled_dot_product_attention(query, key, key).shape == (2, 4, 0, 64)


# ---- gradients want plain tensors, token by token

# Of 2 x 4 heads, 100 tokens and 64 elements in half precision.
TENSOR = 2 * 4 * 100 * 64 * 2


def of_gradient(query: Any, backend: Any) -> list[int]:
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(query, query, query)
    gradient = torch.zeros(out.shape, dtype=out.dtype, device="cuda")
    return made(lambda: torch.autograd.grad(out, query, gradient))


def test_gradients_stay_as_they_are_where_algorithms_that_are_not_deterministic_only_warn() -> None:
    """(``attention_backward.cu``; the CUDA build of 2.6.)"""
    query, rows = heads_first(2, 4, 100, 64), 2 * 4 * 128 * 4
    usual = of_gradient(query, SDPBackend.FLASH_ATTENTION)
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert of_gradient(query, SDPBackend.FLASH_ATTENTION) == usual
        torch.use_deterministic_algorithms(True)
        # A copy for each group of the card's 108 multiprocessors.
        assert of_gradient(query, SDPBackend.FLASH_ATTENTION)[6] == 14 * usual[6] == 14 * rows * 64
    finally:
        torch.use_deterministic_algorithms(False)


def test_flash_lays_out_the_gradient_and_the_result_where_heads_lie_first() -> None:
    rows = 2 * 4 * 128 * 4
    found = of_gradient(heads_first(2, 4, 100, 64), SDPBackend.FLASH_ATTENTION)
    assert found[:7] == [TENSOR] * 5 + [rows, rows * 64]


def test_flash_makes_the_result_by_token_where_heads_are_one_that_is_expanded() -> None:
    # mha_fwd: at::empty_like of the queries by token, (2, 100, 4, 64) with strides (6400, 64, 0, 1). A stride of 0 moves no
    # dimension, so it lies plainly: only the gradient is laid out anew.
    rows = 2 * 4 * 128 * 4
    found = of_gradient(heads_first(2, 1, 100, 64).expand(2, 4, 100, 64), SDPBackend.FLASH_ATTENTION)
    assert found[:6] == [TENSOR] * 4 + [rows, rows * 64]


def test_flash_copies_no_result_that_lies_by_token() -> None:
    rows = 2 * 4 * 128 * 4
    found = of_gradient(tokens_first(2, 4, 100, 64), SDPBackend.FLASH_ATTENTION)
    assert found[:6] == [TENSOR] * 4 + [rows, rows * 64]


def test_the_efficient_kernel_lays_out_the_gradient_alone() -> None:
    sums = 2 * 4 * 100 * 4
    found = of_gradient(heads_first(2, 4, 100, 64), SDPBackend.EFFICIENT_ATTENTION)
    assert found[:5] == [TENSOR] * 4 + [sums]


def test_its_sums_go_before_its_workspace() -> None:
    query = heads_first(2, 4, 100, 64)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = F.scaled_dot_product_attention(query, query, query)
    gradient = torch.zeros_like(out)
    found = steps(lambda: torch.autograd.grad(out, query, gradient))
    freed = [size for action, size in found if action == "free_requested"]
    sums = 2 * 4 * 100 * 4
    assert freed.index(sums) + 1 == freed.index(max(freed))


@pytest.mark.parametrize(("heads", "queries", "copied"), [(4, 16, 1), (4, 1, 0), (1, 16, 0)])
def test_its_sums_lie_head_by_head_already_where_there_is_one_head_or_one_query(
    heads: int, queries: int, copied: int
) -> None:
    query = tokens_first(8, heads, queries, 64, dtype=torch.float32)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = F.scaled_dot_product_attention(query, query, query)
    gradient = torch.zeros_like(out)
    # For each row of 64 a sum.
    assert made(lambda: torch.autograd.grad(out, query, gradient)).count(8 * heads * queries * 4) == 1 + copied


# ---- keys in parts


@pytest.mark.parametrize(
    ("rows", "processors", "blocks", "parts"),
    [
        (16, 216, 12, 12),  # each further part fills more: up to one for each block
        (2, 216, 20, 20),
        (173, 216, 12, 1),  # 80 % of the processors have work already
        (90, 216, 4, 2),  # 180 of 216 at once are 83 %, and four parts, 360 in two turns, are no better
        (108, 216, 4, 2),  # two parts fill all
        (8, 216, 1, 1),
    ],
)
def test_as_many_parts_as_fill_the_card(rows: int, processors: int, blocks: int, parts: int) -> None:
    assert parts_of_keys(rows, processors, blocks) == parts


def test_one_query_and_a_long_cache_have_partial_results() -> None:
    query, cache = heads_first(2, 8, 1, 64, grad=False), heads_first(2, 8, 3000, 64, grad=False)
    # 12 blocks of 256 keys, a part each: sums and results in float32.
    sums = 12 * 2 * 8 * 4
    out = 2 * 8 * 64 * 2
    assert made(lambda: F.scaled_dot_product_attention(query, cache, cache)) == [out, 64, sums, sums * 64, 16, 8]


def test_heads_that_share_keys_are_rows_of_one_query() -> None:
    query, cache = heads_first(1, 8, 1, 64, grad=False), heads_first(1, 2, 3000, 64, grad=False)
    sums = 12 * 2 * 4 * 4
    found = made(lambda: F.scaled_dot_product_attention(query, cache, cache, enable_gqa=True))
    assert found == [8 * 64 * 2, 32, sums, sums * 64, 16, 8]


def test_dropout_takes_no_parts_and_makes_the_seeds_twice() -> None:
    query = heads_first(2, 4, 1024, 64, grad=False)
    out, sums = 2 * 4 * 1024 * 64 * 2, 2 * 4 * 1024 * 4
    found = made(lambda: F.scaled_dot_product_attention(query, query, query, dropout_p=0.1))
    assert found == [out, sums, 16, 8, 16]


# ---- masks


def test_a_mask_of_what_is_seen_is_chosen_from_two_numbers() -> None:
    query, mask = heads_first(2, 4, 100, 64, grad=False), torch.zeros(100, 100, dtype=torch.bool, device="cuda")
    # The numbers, the choice, and rows of a multiple of 8.
    found = made(lambda: F.scaled_dot_product_attention(query, query, query, mask))
    assert found == [2, 2, 100 * 100 * 2, 100 * 104 * 2, TENSOR]


def test_a_mask_that_learns_has_a_gradient_of_the_kernel() -> None:
    query, mask = heads_first(2, 4, 100, 64, grad=False), heads_first(1, 4, 100, 100)
    out = F.scaled_dot_product_attention(query, query, query, mask)
    gradient = torch.zeros_like(out)
    found = made(lambda: torch.autograd.grad(out, mask, gradient))
    # For each head of each sample, in rows of a multiple of 16.
    assert found[:4] == [TENSOR] * 3 + [2 * 4 * 100 * 112 * 2]


def test_wide_rows_of_half_precision_are_added_up_in_float32() -> None:
    for size, sums in ((128, []), (320, [2 * 4 * 100 * 320 * 4])):
        query = heads_first(2, 4, 100, size, grad=False)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            found = made(lambda query=query: F.scaled_dot_product_attention(query, query, query))  # type: ignore[misc]
        assert found == [2 * 4 * 100 * size * 2, *sums]


def test_step_by_step_the_mask_is_added_to_the_scores() -> None:
    query, mask = heads_first(2, 4, 100, 64, dtype=torch.float32), torch.zeros(100, 100, device="cuda")
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(query, query, query, mask)  # cuBLAS's workspace
        found = made(lambda: F.scaled_dot_product_attention(query, query, query, mask))
        out = F.scaled_dot_product_attention(query, query, query, mask)
    scores = 2 * 4 * 100 * 100 * 4
    # The product, which the mask is added to, and its softmax.
    assert found.count(scores) == 2
    out.sum().backward()
    assert query.grad is not None


@pytest.mark.parametrize(("torch_version", "looked_at"), [("2.4", False), ("2.6", True)])
def test_step_by_step_rows_that_see_nothing_are_looked_for_since_2_5(torch_version: str, looked_at: bool) -> None:
    gpu.turn_off()
    gpu.turn_on(f"A100-40GB,torch={torch_version}")
    query = heads_first(2, 4, 16, 32, dtype=torch.float32)
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(query, query, query)  # cuBLAS's workspace
        found = made(lambda: F.scaled_dot_product_attention(query, query, query))
    scores, of_bool = 2 * 4 * 16 * 16 * 4, 2 * 4 * 16 * 16
    # Which are minus infinity, of which rows all are, and the number that these get.
    asked = [of_bool, of_bool // 16, 4] if looked_at else []
    first = found.index(scores)
    assert found[first:-1] == [scores, scores, *asked]


# ---- multi-head attention


def test_projections_of_batches_that_come_first_take_one_tensor() -> None:
    attention = torch.nn.MultiheadAttention(64, 4, batch_first=True, device="cuda")
    x = torch.zeros(2, 16, 64, device="cuda")
    attention(x, x, x, need_weights=False)
    found = made(lambda: attention(x, x, x, need_weights=False))
    # The input by token, queries with keys and values, the same laid out anew.
    assert found[:3] == [2 * 16 * 64 * 4, 2 * 16 * 192 * 4, 2 * 16 * 192 * 4]
    assert found.count(2 * 16 * 192 * 4) == 2


def test_a_mask_whose_rows_do_not_lie_in_one_piece_is_added_step_by_step() -> None:
    """As T5's position bias, which is one number for each head, looked up and turned. 2.1, 2.6, 2.11 and 2.13 choose so."""
    query = torch.rand(2, 4, 16, 64, device="cuda", dtype=HALF)
    turned = torch.rand(16, 16, 4, device="cuda", dtype=HALF).permute(2, 0, 1)[None]
    column = torch.rand(16, 2, device="cuda", dtype=HALF)[:, :1]
    first = query[:, :, :1]
    for own, bias in ((query, turned), (first, turned[..., :1, :1])):
        with pytest.raises(RuntimeError, match="No available kernel"), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            F.scaled_dot_product_attention(own, own, own, attn_mask=bias)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        for mask in (turned.contiguous(), column):
            assert F.scaled_dot_product_attention(query, query, query, attn_mask=mask).shape == query.shape
