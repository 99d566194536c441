"""What backward kernels hold beside their results, against recordings of GPUs and the sizes in PyTorch's source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import made
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.operators.attention_gradients import Blocks, Heads, kernel_for, workspace_bytes


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    gpu.turn_off()


# ---- attention


def attention(backend: Any, *, dtype: Any, tokens: int, heads: int = 32, size: int = 64, groups: int = 0) -> list[int]:
    def random(count: int) -> torch.Tensor:
        return torch.randn(1, count, tokens, size, device="cuda", dtype=dtype, requires_grad=True)

    query, key, value = random(heads), random(groups or heads), random(groups or heads)
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=bool(groups))
    gradient = torch.ones_like(out)
    return made(lambda: torch.autograd.grad(out, (query, key, value), gradient))


def test_efficient_attentions_gradient_is_as_recorded() -> None:
    gpu.turn_on("A100-40GB,torch=2.1")
    # From a recording of a 1.1-billion-parameter Llama with torch 2.1.
    assert attention(SDPBackend.EFFICIENT_ATTENTION, dtype=torch.float32, tokens=1000) == [
        8192000, 8192000, 8192000, 8192000, 128000, 128000, 8396800,
    ]  # fmt: skip


def test_in_half_precision_the_kernel_makes_the_sums() -> None:
    gpu.turn_on("T4")
    sizes = attention(SDPBackend.EFFICIENT_ATTENTION, dtype=torch.float16, tokens=1000)
    assert sizes == [4096000] * 3 + [128000, 8396800]


@pytest.mark.parametrize(
    ("capability", "half", "size", "kernel"),
    [
        ((8, 0), True, 64, Blocks(64, 64, True)),
        ((8, 0), True, 128, Blocks(128, 128, True)),
        ((8, 6), True, 128, Blocks(64, 64, False)),
        ((8, 6), True, 80, Blocks(128, 64, True)),
        ((8, 0), False, 128, Blocks(128, 64, False)),
        ((7, 0), True, 128, Blocks(128, 64, True)),
        ((7, 5), True, 128, Blocks(128, 64, True)),
        ((7, 5), True, 256, Blocks(128, 64, False)),
        ((9, 0), True, 256, Blocks(128, 64, False)),
    ],
)
def test_the_kernel_follows_from_head_size_and_generation(
    capability: tuple[int, int], half: bool, size: int, kernel: Blocks
) -> None:
    assert kernel_for(capability, half, size, dropout=False) == kernel


def test_gradients_of_keys_and_values_are_split_over_few_blocks() -> None:
    shape = Heads(batch=2, heads=10, queries=64, keys=6400, size=128)
    query_part = 2 * (4 + 64 * 64)
    # 100 blocks of keys, but only as many parts as 200 // (2 * 10).
    assert workspace_bytes(shape, Blocks(64, 64, False), half=True) == 20 * 4 * (query_part + 2 * 10 * 64 * 128)
    assert workspace_bytes(shape, Blocks(64, 64, False), half=False) == 20 * 4 * query_part


def test_flash_attentions_gradient_adds_up_in_float32() -> None:
    gpu.turn_on("A100-40GB")
    sizes = attention(SDPBackend.FLASH_ATTENTION, dtype=torch.bfloat16, tokens=1000, size=72)
    padded = 32 * 1000 * 72 * 2
    # Heads lie before tokens here: the result's gradient and the result are laid out first.
    assert sizes == [padded] * 2 + [padded] * 3 + [32 * 1024 * 4, 32 * 1024 * 96 * 4]


def test_shared_keys_have_a_gradient_for_each_query_head_first() -> None:
    gpu.turn_on("A100-40GB")
    sizes = attention(SDPBackend.FLASH_ATTENTION, dtype=torch.bfloat16, tokens=1024, groups=8)
    whole = 32 * 1024 * 64 * 2
    assert sizes == [whole, whole, whole, whole // 4, whole // 4, 32 * 1024 * 4, 32 * 1024 * 64 * 4, whole, whole]


# ---- batch norm, dropout, products with a bias


# PyTorch's own kernel, for two dimensions, makes two sums, which its gradient in `eval` needs as well.
@pytest.mark.parametrize(("dims", "extra", "in_eval"), [(4, 2, 0), (2, 2, 2)])
def test_a_frozen_batch_norm_of_cudnns_makes_gradients_that_nobody_wants(dims: int, extra: int, in_eval: int) -> None:
    gpu.turn_on("T4")
    norm = torch.nn.BatchNorm2d(64).cuda() if dims == 4 else torch.nn.BatchNorm1d(64).cuda()
    x = torch.randn((8, 64, 4, 4)[:dims], device="cuda", requires_grad=True)
    gradient = torch.ones_like(x)

    def run() -> Any:
        return torch.autograd.grad(norm(x), x, gradient)

    for parameter in norm.parameters():
        parameter.requires_grad = False
    sizes = made(run)
    assert sizes.count(256) == 2 + extra
    norm.eval()
    assert made(run).count(256) <= 2 + in_eval


def test_dropout_makes_its_mask_first() -> None:
    gpu.turn_on("T4")
    x = torch.randn(1000, device="cuda")
    assert made(lambda: F.dropout(x)) == [1000, 4000]


@pytest.mark.parametrize(
    ("version", "rows", "columns", "expected"),
    [
        ("2.2", 16, 8, [512, 1048576, 8519680]),
        ("2.2", 1, 8, [32, 1048576, 8519680]),
        ("2.2", 16, 1, [64, 8519680]),
        ("2.10", 1, 8, [32, 8519680]),
        ("2.11", 16, 8, [512, 8519680, 1048576]),
        ("2.12", 16, 8, [512, 8519680]),
    ],
)
def test_products_with_a_bias_go_to_cublaslt_with_several_rows_and_columns(
    version: str, rows: int, columns: int, expected: list[int]
) -> None:
    gpu.turn_on(f"A100-40GB,torch={version}")
    layer = torch.nn.Linear(32, columns, device="cuda")
    x = torch.randn(rows, 32, device="cuda")
    assert made(lambda: layer(x).detach()) == expected


def test_an_answer_about_all_is_a_reduction_like_another() -> None:
    gpu.turn_on("TITAN-RTX")
    values = torch.zeros(1 << 22, dtype=torch.bool, device="cuda")
    # 144 blocks of 512 threads, a byte each, and one semaphore.
    assert made(lambda: torch.ops.aten._is_any_true(values)) == [1, 144, 4]


# ---- copies, losses, linear


def test_between_host_and_device_what_is_not_plain_is_copied_on_the_device() -> None:
    gpu.turn_on("T4")
    matrix = torch.zeros(64, 64, device="cuda")
    column, row = torch.zeros(64), torch.zeros(64)
    assert made(lambda: matrix[:, 0].cpu()) == [256]
    assert made(lambda: matrix.t().cpu()) == []
    assert made(lambda: matrix[0].cpu()) == []
    assert made(lambda: matrix[:, 1].copy_(column)) == [256]
    assert made(lambda: matrix[1].copy_(row)) == []
    # Converted on the host; or on the device, where nobody waits.
    assert made(lambda: row.to("cuda", torch.half)) == [128]
    assert made(lambda: row.to("cuda", torch.half, non_blocking=True)) == [128, 256]


def test_indices_on_the_host_come_to_the_device() -> None:
    gpu.turn_on("T4")
    rows, places = torch.zeros(64, 16, device="cuda"), torch.tensor([1, 2, 3])
    assert made(lambda: rows[places]) == [24, 3 * 16 * 4]
    assert made(lambda: rows[places.cuda()]) == [24, 3 * 16 * 4]
    mask = torch.zeros(64, dtype=torch.bool)
    mask[:5] = True
    assert made(lambda: rows[mask]) == [40, 5 * 16 * 4]
    values = torch.ones(3, 16, device="cuda")
    assert made(lambda: rows.index_put_((places,), values)) == [24]


def test_indices_on_the_host_are_made_one_list_there_where_values_are_added_up() -> None:
    """As a recording of a cross entropy by `logits[torch.arange(512), targets]` shows, with 2.6 on an H100."""
    gpu.turn_on("H100,torch=2.6")
    logits = torch.zeros(512, 10000, device="cuda", requires_grad=True)
    targets = torch.zeros(512, dtype=torch.int64, device="cuda")
    chosen = logits[torch.arange(512), targets]
    gradient = torch.ones_like(chosen)
    # The gradient; the host's list, the other wrapped around and multiplied; two more and the places, and CUB's.
    assert made(lambda: torch.autograd.grad(chosen, logits, gradient)) == [512 * 10000 * 4, *[4096] * 6, 1]


@pytest.mark.parametrize(
    ("loss", "sizes", "kept"),
    [
        (F.mse_loss, [4000, 4000], 4000),
        (F.smooth_l1_loss, [4000, 4000], 4000),
        (F.binary_cross_entropy, [4000, 4], 4000),
        (F.huber_loss, [4000, 4], 4),
    ],
)
def test_a_losss_shares_are_memory(loss: Any, sizes: list[int], kept: int) -> None:
    gpu.turn_on("T4")
    x, y = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    start = torch.cuda.memory_allocated()
    assert made(lambda: loss(x, y)) == sizes
    result = loss(x, y)
    assert result.shape == ()
    assert torch.cuda.memory_allocated() - start == -(-kept // 512) * 512
    assert made(lambda: loss(x, y, reduction="none")) == [4000]


def test_a_loss_of_whole_tensors_has_its_gradient() -> None:
    gpu.turn_on("T4")
    x = torch.zeros(1000, device="cuda", requires_grad=True)
    for loss in (F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.huber_loss):
        (gradient,) = torch.autograd.grad(loss(x, torch.zeros(1000, device="cuda")), x)
        assert gradient.shape == x.shape


def test_linear_adds_its_bias_in_place_where_the_input_is_not_plain() -> None:
    gpu.turn_on("T4")
    layer = torch.nn.Linear(64, 32, device="cuda")
    x = torch.zeros(8, 64, 16, device="cuda").transpose(1, 2)
    layer(x)
    assert made(lambda: layer(x)) == [8 * 16 * 64 * 4, 8 * 16 * 32 * 4]
    layer(x).sum().backward()
    assert layer.bias.grad is not None
    assert layer.bias.grad.shape == (32,)


def test_cudnns_batch_norm_keeps_a_plain_input_and_gives_a_plain_result() -> None:
    gpu.turn_on("T4")
    norm = torch.nn.BatchNorm2d(16).cuda()
    x = torch.zeros(16, 8, 4, 4, device="cuda", requires_grad=True).transpose(0, 1)
    plain = x.numel() * 4
    assert made(lambda: norm(x))[:2] == [plain, plain]
    assert norm(x).is_contiguous()
    last = torch.zeros(8, 16, 4, 4, device="cuda").contiguous(memory_format=torch.channels_last)
    assert norm(last).is_contiguous(memory_format=torch.channels_last)
    assert made(lambda: norm(last)).count(plain) == 1


@pytest.mark.parametrize(("has_bias", "frozen"), [(True, False), (True, True), (False, False)])
def test_a_batch_norm_without_a_bias_is_not_cudnns(has_bias: bool, frozen: bool) -> None:
    """An instance norm with a weight alone made one gradient of its channels on an H100, and no copy of what lies otherwise. In
    evaluation PyTorch's own kernel keeps two numbers for each channel."""
    gpu.turn_on("H100,torch=2.11")
    weight = torch.ones(16, device="cuda", requires_grad=True)
    bias = torch.zeros(16, device="cuda", requires_grad=not frozen) if has_bias else None
    x = torch.zeros(16, 8, 4, 4, device="cuda", requires_grad=True).transpose(0, 1)
    plain = x.numel() * 4
    assert made(lambda: F.batch_norm(x, None, None, weight, bias, True)).count(plain) == 1 + has_bias
    mean, variance = (torch.ones(16, device="cuda") for _ in range(2))
    assert made(lambda: F.batch_norm(x, mean, variance, weight, bias, False)).count(64) == (0 if has_bias else 2)
    out = F.batch_norm(x.detach().contiguous(), None, None, weight, bias, True)
    gradient = torch.ones_like(out)
    # (That of the input, which nobody wants, is cuDNN's.)
    found = made(lambda: out.backward(gradient))
    assert found == ([plain, 64, 64] if has_bias else [64])


def test_padding_makes_a_plain_input_after_its_result() -> None:
    gpu.turn_on("T4")
    x = torch.zeros(2, 8, 8, 4, device="cuda").permute(0, 3, 1, 2)
    padded = 2 * 4 * 10 * 10 * 4
    assert made(lambda: F.pad(x, (1, 1, 1, 1), mode="reflect")) == [padded, x.numel() * 4]
    assert made(lambda: F.pad(x.contiguous(), (1, 1, 1, 1), mode="reflect"))[-1] == padded


@pytest.mark.parametrize(("last", "lies"), [(False, False), (False, True), (True, True), (True, False)])
def test_cudnns_batch_norm_lays_a_gradient_out_as_the_input_lies(last: bool, lies: bool) -> None:
    gpu.turn_on("T4")
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.zeros(4, 8, 6, 6, device="cuda").to(memory_format=layout).requires_grad_()
    y = torch.nn.BatchNorm2d(8, device="cuda")(x)
    gradient = (
        torch.zeros(4, 8, 6, 6, device="cuda").to(memory_format=layout) if lies else torch.zeros((), device="cuda")
    )
    size = 4 * 8 * 6 * 6 * 4
    # (A sum's gradient is one number, expanded.)
    found = made(lambda: torch.autograd.grad(y, x, gradient.expand_as(y)))
    assert found[: 2 - lies] == [size] * (2 - lies)
    assert found[2 - lies :] == [8 * 4] * 2


@pytest.mark.parametrize(
    ("align", "mode", "copies"), [(True, "bilinear", 1), (False, "bilinear", 0), (True, "nearest", 0)]
)
def test_cudnn_samples_no_gradient_that_is_one_number(align: bool, mode: str, copies: int) -> None:
    gpu.turn_on("T4")
    x, grid = (torch.zeros(shape, device="cuda", requires_grad=True) for shape in ((2, 3, 8, 8), (2, 5, 5, 2)))
    out = F.grid_sample(x, grid, mode=mode, align_corners=align)
    one = torch.zeros((), device="cuda").expand_as(out)
    found = made(lambda: torch.autograd.grad(out, (x, grid), one))
    assert found == [2 * 3 * 5 * 5 * 4] * copies + [2 * 3 * 8 * 8 * 4, 2 * 5 * 5 * 2 * 4]


def test_cudnn_samples_by_grids_that_lie_plainly() -> None:
    gpu.turn_on("T4")
    x, grid = torch.zeros(2, 3, 8, 8, device="cuda"), torch.zeros(2, 2, 5, 5, device="cuda").permute(0, 2, 3, 1)
    assert made(lambda: F.grid_sample(x, grid, align_corners=True)) == [2 * 3 * 5 * 5 * 4, 2 * 5 * 5 * 2 * 4]
    assert made(lambda: F.grid_sample(x, grid, align_corners=False)) == [2 * 3 * 5 * 5 * 4]
