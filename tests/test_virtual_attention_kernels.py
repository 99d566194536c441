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

import gpumem_magic
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


@pytest.mark.parametrize("device", ["A100-40GB,torch=2.1", "A100-40GB,torch=2.9"])
def test_seeds_of_dropout_are_on_the_host_as_recordings_show(device: str) -> None:
    """Recordings: Llama with 2.1, OPT with 2.9."""
    gpu.turn_on(device)
    query = torch.randn(1, 8, 96, 64, device="cuda", requires_grad=True)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        sizes = made(lambda: F.scaled_dot_product_attention(query, query, query, dropout_p=0.1).sum().backward())
    assert sizes[:2] == [8 * 96 * 64 * 4, 8 * 96 * 4]
    assert 8 not in sizes


def test_seeds_are_on_the_device_as_published_peaks_of_new_versions_show() -> None:
    gpu.turn_on("T4,torch=2.14")
    query = torch.randn(1, 8, 96, 64, device="cuda", requires_grad=True)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        sizes = made(lambda: F.scaled_dot_product_attention(query, query, query).sum().backward())
    # Before the results, which the build of 2.14 shows, too.
    assert sizes[:4] == [8, 8, 8 * 96 * 64 * 4, 8 * 96 * 4]


def test_seeds_of_dropout_are_on_the_device_while_a_graph_is_captured() -> None:
    gpu.turn_on("A100-40GB")
    query = torch.zeros(1, 8, 96, 64, device="cuda")

    def captured() -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            F.scaled_dot_product_attention(query, query, query, dropout_p=0.1)
        return graph

    assert made(captured)[-2:] == [8, 8]


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(SDPBackend.EFFICIENT_ATTENTION, torch.float32), (SDPBackend.FLASH_ATTENTION, torch.float16)],
)
@pytest.mark.parametrize("version", ["2.5", "2.11"])
def test_compiled_code_attends_whatever_the_devices_version(backend: Any, dtype: Any, version: str) -> None:
    """It asks for the shapes that its own version's results have."""
    gpu.turn_on(f"A100-40GB,torch={version}")
    query = torch.zeros(1, 8, 96, 64, device="cuda", dtype=dtype, requires_grad=True)

    @torch.compile
    def attended(query: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query * 2, query, query, dropout_p=0.1).sum()

    with sdpa_kernel(backend):
        attended(query).backward()
    assert query.grad is not None


@pytest.mark.parametrize(("version", "seeds"), [("2.5", []), ("2.7", [16, 8])])
def test_where_flashs_random_numbers_began_is_on_the_device_since_2_7(version: str, seeds: list[int]) -> None:
    gpu.turn_on(f"A100-40GB,torch={version}")
    query = torch.zeros(8, 4, 1024, 64, dtype=torch.float16, device="cuda", requires_grad=True)
    # The result and its sums, and where the random numbers began.
    assert made(lambda: F.scaled_dot_product_attention(query, query, query)) == [4 * MIB, 8 * 4 * 1024 * 4, *seeds]
    F.scaled_dot_product_attention(query, query, query).sum().backward()
    assert query.grad is not None


@pytest.mark.parametrize(
    ("version", "sizes"), [("2.4", [4096, 1024]), ("2.5", [4, 1024, 4, 4096]), ("2.6", [4, 4, 4096])]
)
@pytest.mark.parametrize("kernel", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def test_a_mask_of_what_may_be_seen_becomes_one_that_is_added(version: str, sizes: list[int], kernel: Any) -> None:
    """Since 2.6 it chooses between two numbers on the device, in 2.5 turned round; before, zeros are filled by that."""
    gpu.turn_on(f"A100-40GB,torch={version}")
    query = torch.zeros(2, 4, 32, 64, device="cuda")
    mask = torch.zeros(32, 32, dtype=torch.bool, device="cuda")
    with sdpa_kernel(kernel):
        taken = made(lambda: F.scaled_dot_product_attention(query, query, query, attn_mask=mask))
    assert taken[: len(sizes)] == sizes
    # The scaled query.
    assert taken[len(sizes)] == query.nbytes


def test_the_efficient_kernels_gradient_takes_a_scale_of_the_programs() -> None:
    """The operator itself, as libraries call it: gradients, sums, and parts where numbers are in single precision (an H100's)."""
    gpu.turn_on("H100,torch=2.11")
    query = torch.zeros(4, 11, 4, 8, device="cuda", requires_grad=True)
    key, value = (torch.zeros(4, 32, 4, 8, device="cuda", requires_grad=True) for _ in range(2))
    attend: Any = torch.ops.aten._efficient_attention_forward
    out = attend(query, key, value, None, None, None, None, None, 0.5, 2, True, scale=1.0)[0]
    gradient = torch.zeros_like(out)
    blocks = [5632, 16384, 16384, 5632, 704, 704, 262400]
    assert made(lambda: torch.autograd.grad(out, (query, key, value), gradient))[-7:] == blocks


_CAUSAL = {
    "2.4": [102400, 10000, 10000, 20000, 10000, 102400, 160000, 160000, 102400],
    "2.5": [
        *[204800] * 4, 10000, 10000, 4, 10000, 4, 40000, 204800, 320000, 320000, 4, 80000, 800, 4, 320000,
        160000, 204800, 102400,
    ],
}  # fmt: skip


@pytest.mark.parametrize("version", _CAUSAL)
def test_step_by_step_attention_is_that_of_the_devices_pytorch(version: str) -> None:
    """As its builds ask for it: since 2.5 in float32, where rows that see nothing are looked for."""
    gpu.turn_on(f"A100-40GB,torch={version}")
    query = torch.zeros(2, 4, 100, 64, dtype=torch.float16, device="cuda", requires_grad=True)
    query.detach() @ query.detach().transpose(-2, -1)  # cuBLAS's workspace
    with sdpa_kernel(SDPBackend.MATH):
        assert made(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True)) == _CAUSAL[version]
        F.scaled_dot_product_attention(query, query, query, is_causal=True, dropout_p=0.5).sum().backward()
    assert query.grad is not None
    assert query.grad.dtype == torch.float16


@pytest.mark.parametrize(("version", "parts"), [("2.4", 6), ("2.5", 12)])
def test_flash_counts_the_multiprocessors_twice_since_2_5(version: str, parts: int) -> None:
    """One query and 3,000 keys for each of 16 heads, as the builds have it."""
    gpu.turn_on(f"A100-40GB,torch={version}")
    query, key = (torch.zeros(2, 8, count, 64, dtype=torch.float16, device="cuda") for count in (1, 3000))
    sums = 16 * 4
    made_here = made(lambda: F.scaled_dot_product_attention(query, key, key))
    assert made_here == [2 * 8 * 64 * 2, sums, parts * sums, parts * sums * 64]


@pytest.mark.parametrize(
    ("device", "changes", "wanted"),
    [
        ("T4", {"dtype": torch.bfloat16}, "float16 or float32"),
        ("A100-40GB", {"dtype": torch.float64}, "16-bit numbers"),
        ("A100-40GB", {"size": 300}, "at most 256"),
        ("A100-40GB", {"size": 60, "dtype": torch.float32, "keys": 2}, "as many heads"),
    ],
)
def test_what_the_plain_kernel_is_taken_for_is_noted_with_what_it_allocates(
    device: str, changes: dict[str, Any], wanted: str
) -> None:
    gpu.turn_on(device)
    keys = changes.pop("keys", 4)
    query, key, value = tensors(**changes)
    with gpumem_magic.measure() as measured:
        out = F.scaled_dot_product_attention(query, key[:, :keys], value[:, :keys], enable_gqa=keys < 4)
    recording = measured.report.source.recording
    births = recording.logs[0].births.values()
    assert {wanted in birth.why for birth in births if birth.shape and birth.shape[-2:] == (1024,) * 2} == {True}
    del out


def test_who_repeats_grouped_keys_gets_the_memory_efficient_kernel() -> None:
    """As is said where `enable_gqa` kept it away."""
    gpu.turn_on("T4")
    query, key, value = tensors()
    with gpumem_magic.measure() as measured:
        key, value = (one[:, :2].repeat_interleave(2, 1) for one in (key, value))
        F.scaled_dot_product_attention(query, key, value)
    births = measured.report.source.recording.logs[0].births.values()
    assert not any(birth.why for birth in births)
    assert not any(birth.shape and birth.shape[-2:] == (1024, 1024) for birth in births)
