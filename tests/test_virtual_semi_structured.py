"""Matrices of which two in four numbers are kept: what they take on a virtual GPU, and what they are multiplied to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("A100-40GB")
    gpu.turn_off()


@pytest.fixture(params=[False, True], ids=["cusparselt", "cutlass"])
def cutlass(request: Any, monkeypatch: Any) -> bool:
    monkeypatch.setattr(SparseSemiStructuredTensor, "_FORCE_CUTLASS", request.param)
    return bool(request.param)


def two_in_four(dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, which every type holds, at places that differ from row to row."""
    numbers = torch.arange(128 * 128).reshape(128, 32, 4) % 5 + 1
    kept = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1]])
    return (numbers * kept[torch.arange(128) % 4][:, None]).reshape(128, 128).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    # Half of the numbers, and two bits for each of them: an eighth of 128 x 128 bytes.
    [(torch.float16, 128 * 128 * 9 // 8), (torch.bfloat16, 128 * 128 * 9 // 8), (torch.int8, 128 * 128 * 5 // 8)],
)
def test_half_of_the_numbers_are_kept_and_where_they_stand(cutlass: bool, dtype: torch.dtype, nbytes: int) -> None:
    matrix = two_in_four(dtype).cuda()
    before = torch.cuda.memory_allocated()
    kept = to_sparse_semi_structured(matrix)
    assert torch.cuda.memory_allocated() - before == nbytes
    assert kept.shape == (128, 128)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_those_of_the_whole_matrix(cutlass: bool, dtype: torch.dtype) -> None:
    gpu.turn_on("A100-40GB,values=real")
    matrix, other = two_in_four(dtype), (torch.arange(128 * 64).reshape(128, 64) % 3).to(dtype)
    kept = to_sparse_semi_structured(matrix.cuda())
    assert torch.equal(torch.mm(kept, other.cuda()).cpu(), matrix @ other)
    assert torch.equal(kept.to_dense().cpu(), matrix)
    layer = torch.nn.Linear(128, 128).to(dtype).cuda()
    layer.weight, layer.bias.data = torch.nn.Parameter(kept), torch.ones(128, dtype=dtype, device="cuda")
    # (A sum is rounded once, with its bias.)
    expected = (other.t().float() @ matrix.t().float() + 1).to(dtype)
    assert torch.equal(layer(other.t().contiguous().cuda()).cpu(), expected)


def test_whole_numbers_of_8_bits_are_cut_off_at_their_ends() -> None:
    gpu.turn_on("A100-40GB,values=real")
    matrix, other = two_in_four(torch.int8), torch.ones(128, 64, dtype=torch.int8)
    compressed = torch._cslt_compress(matrix.cuda())
    exact = matrix.int() @ other.int()
    in_32 = torch._cslt_sparse_mm(compressed, other.cuda(), out_dtype=torch.int32)
    assert torch.equal(in_32.cpu(), exact)
    assert int(exact.max()) > 127
    assert torch.equal(torch._cslt_sparse_mm(compressed, other.cuda()).cpu(), exact.clamp(-128, 127).to(torch.int8))


def test_what_a_program_wrote_in_python_is_computed_step_by_step() -> None:
    gpu.turn_on("A100-40GB,values=real")
    seen = []

    @torch.library.custom_op("gpumem_test::by_steps", mutates_args=())
    def by_steps(x: torch.Tensor) -> torch.Tensor:
        # (What only CUDA has, with numbers in between that the program reads.)
        compressed = torch._cslt_compress(x)
        seen.append(float(x.sum()))
        return torch._cslt_sparse_mm(compressed, torch.eye(128, dtype=x.dtype, device=x.device)) * 2

    matrix = two_in_four(torch.float16)
    assert torch.equal(by_steps(matrix.cuda()).cpu(), matrix * 2)
    assert seen == [float(matrix.sum())]


def test_older_cards_have_none() -> None:
    gpu.turn_on("T4")
    with pytest.raises(RuntimeError, match="cuSPARSELT not supported on your machine"):
        torch._cslt_compress(two_in_four(torch.float16).cuda())
