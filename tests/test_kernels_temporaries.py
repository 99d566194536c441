"""What kernels take while they run: the sorted way of an embedding's gradient."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import gpumem_magic
from gpumem_magic.units import MIB
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.operators.temporaries import embedding_scratch


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("virtual:1GiB,context=0MiB")
    gpu.turn_off()


def beside_the_gradient(count: int, width: int = 64, dtype: torch.dtype = torch.float32, **options: bool) -> int:
    """Bytes at the peak of the gradient's computation that neither the gradient nor what was there explains."""
    table = nn.Embedding(128, width, device="cuda", dtype=dtype, **options)
    gradient = torch.zeros(count, width, device="cuda", dtype=dtype)
    tokens = torch.zeros(count, dtype=torch.int64, device="cuda")
    out = table(tokens)
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out.backward(gradient)
    assert torch.cuda.memory_allocated() - start == table.weight.nbytes
    return torch.cuda.max_memory_allocated() - start - table.weight.nbytes


def test_few_indices_need_nothing_beside_the_gradient() -> None:
    assert beside_the_gradient(3072) == 0


@pytest.mark.parametrize(
    ("dtype", "accumulated"), [(torch.float32, 4), (torch.float16, 4), (torch.bfloat16, 4), (torch.float64, 8)]
)
def test_more_are_sorted_and_have_a_row_each(dtype: torch.dtype, accumulated: int) -> None:
    # Six lists of indices, and two counters of 8 bytes in blocks of 512.
    assert beside_the_gradient(4096, dtype=dtype) == 6 * 4096 * 8 + 2 * 512 + 4096 * 64 * accumulated


def test_scaling_by_frequency_sorts_always_and_counts() -> None:
    assert beside_the_gradient(1024, scale_grad_by_freq=True) == 7 * 1024 * 8 + 2 * 512 + 1024 * 64 * 4


def test_a_gradient_that_is_not_contiguous_is_copied_first() -> None:
    table = nn.Embedding(128, 64, device="cuda")
    out = table(torch.zeros(1024, dtype=torch.int64, device="cuda"))
    gradient = torch.zeros(64, 1024, device="cuda").t()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out.backward(gradient)
    assert torch.cuda.max_memory_allocated() - start == table.weight.nbytes + gradient.nbytes


def test_indices_of_four_bytes_make_shorter_lists() -> None:
    long, short = (embedding_scratch(4096, size, 64, torch.float32, False) for size in (8, 4))
    assert sum(long) - sum(short) == 6 * 4096 * 4


def test_what_does_not_fit_is_out_of_memory_and_all_is_given_back() -> None:
    table = nn.Embedding(128, 1024, device="cuda")
    tokens = torch.zeros(8, 1024, 8, dtype=torch.int64, device="cuda")
    gradient = torch.zeros(1, device="cuda").expand(*tokens.shape, 1024)
    start = torch.cuda.memory_allocated()
    # The gradient's copy is 256 MiB, and so are the rows: only the first fits beside this.
    filler = torch.zeros(600 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.ops.aten.embedding_dense_backward(gradient, tokens, 128, -1, False)
    del filler
    assert torch.cuda.memory_allocated() == start
    assert table.weight.grad is None


def test_the_report_knows_them_as_memory_of_the_backward_pass() -> None:
    table = nn.Embedding(128, 64, device="cuda")
    tokens = torch.zeros(8192, dtype=torch.int64, device="cuda")
    with gpumem_magic.measure() as measured:
        table(tokens).sum().backward()
    peak = measured.report.peak.categories
    assert peak["unknown"] == 0
    assert (peak["activation_gradients"] or 0) + (peak["temporaries"] or 0) >= 8192 * 64 * 4
