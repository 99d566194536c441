"""Attention kernels that the program chooses itself: cuDNN's, an order of its own, and none that fits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import made
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpumem_magic.virtual import gpu

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    gpu.turn_off()


def tensors(size: int = 64, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return [torch.zeros(2, 4, 1024, size, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3)]


def kept_and_gone_through(inputs: list[torch.Tensor], mask: torch.Tensor | None = None) -> tuple[int, int]:
    """Bytes that the result keeps, and the most in the backward pass, beyond the inputs'."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    kept = torch.cuda.memory_allocated() - before
    out.backward(torch.zeros_like(out))
    assert all(tensor.grad is not None for tensor in inputs)
    return kept, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("masked", [False, True])
def test_cudnns_kernel_writes_no_scores(masked: bool) -> None:
    gpu.turn_on("H100")
    mask = torch.ones(1024, 1024, dtype=torch.bool, device="cuda") if masked else None
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        kept, most = kept_and_gone_through(tensors(), mask)
    rows, seeds = 2 * 4 * 1024 * 4, 2 * 512
    # The mask is made one that is added: 2 bytes for each score, for all heads together.
    assert kept == MIB + rows + seeds + masked * 2 * MIB
    assert most >= kept + 4 * MIB


@pytest.mark.parametrize(
    ("device", "size", "dtype", "fits"),
    [
        ("H100", 64, torch.bfloat16, True),
        ("H100", 256, torch.float16, True),
        ("A100-40GB", 128, torch.float16, True),
        ("A100-40GB", 256, torch.float16, False),
        ("A100-40GB", 60, torch.float16, False),
        ("A100-40GB", 64, torch.float32, False),
        ("T4", 64, torch.float16, False),
    ],
)
def test_where_the_only_kernel_allowed_does_not_fit_the_call_fails(
    device: str, size: int, dtype: torch.dtype, fits: bool
) -> None:
    gpu.turn_on(device)
    inputs = tensors(size, dtype)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        if fits:
            assert F.scaled_dot_product_attention(*inputs).shape == inputs[0].shape
        else:
            with pytest.raises(RuntimeError, match="No available kernel"):
                F.scaled_dot_product_attention(*inputs)


def test_flash_alone_refuses_a_mask() -> None:
    gpu.turn_on("A100-40GB")
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(RuntimeError, match="No available kernel"),
    ):
        F.scaled_dot_product_attention(*tensors(), attn_mask=torch.zeros(1024, 1024, device="cuda").half())


def test_an_order_of_the_programs_own() -> None:
    if not hasattr(torch._C, "_get_sdp_priority_order"):
        pytest.skip("this PyTorch has one order")
    gpu.turn_on("A100-40GB")
    inputs = tensors()
    names = []
    for order in (
        [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION],
        [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    ):
        with sdpa_kernel(order, set_priority=True):
            names.append(type(F.scaled_dot_product_attention(*inputs).grad_fn).__name__)
    assert names == ["ScaledDotProductCudnnAttentionBackward0", "ScaledDotProductEfficientAttentionBackward0"]
    assert type(F.scaled_dot_product_attention(*inputs).grad_fn).__name__ == "ScaledDotProductFlashAttentionBackward0"


@pytest.mark.parametrize(
    ("device", "backend", "dtype", "more"),
    [
        ("A100-40GB,torch=2.9", SDPBackend.EFFICIENT_ATTENTION, torch.float32, []),
        ("A100-40GB,torch=2.1", SDPBackend.EFFICIENT_ATTENTION, torch.float32, []),
        ("A100-40GB,torch=2.5", SDPBackend.FLASH_ATTENTION, torch.float16, []),
        ("A100-40GB,torch=2.7", SDPBackend.FLASH_ATTENTION, torch.float16, [16, 8]),
    ],
)
def test_seeds_of_dropout_are_where_the_recordings_version_has_them(
    device: str, backend: Any, dtype: Any, more: list[int]
) -> None:
    """Recordings: OPT with 2.9 and Llama with 2.1 (memory-efficient), Qwen2 with 2.5 (flash). 2.7: pull request 146372."""
    gpu.turn_on(device)
    query = torch.randn(1, 8, 96, 64, device="cuda", dtype=dtype, requires_grad=True)
    with sdpa_kernel(backend):
        sizes = made(lambda: F.scaled_dot_product_attention(query, query, query, dropout_p=0.1).sum().backward())
    assert sizes[:2] == [8 * 96 * 64 * dtype.itemsize, 8 * 96 * 4]
    assert sizes[2 : 2 + len(more)] == more
    assert sizes.count(8) == len(more) // 2


def test_seeds_of_dropout_are_on_the_device_while_a_graph_is_captured() -> None:
    gpu.turn_on("A100-40GB,torch=2.5")
    query = torch.zeros(1, 8, 96, 64, device="cuda", dtype=torch.float16)

    def captured() -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(query, query, query, dropout_p=0.1)
        return graph

    assert len(made(captured)) == 4
