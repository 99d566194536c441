"""Products whose result or weights have a type of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gpumem_magic.private import aten
from gpumem_magic.virtual import gpu

LEFT, RIGHT = torch.randn(3, 4).bfloat16(), torch.randn(4, 5).bfloat16()
TRUE = LEFT.float() @ RIGHT.float()


@pytest.fixture(params=["real", "stand-in"])
def values(request: pytest.FixtureRequest) -> Iterator[str]:
    gpu.turn_on(f"A100,values={request.param}")
    yield request.param
    gpu.turn_off()


Product = Callable[..., torch.Tensor]


@pytest.mark.parametrize(
    ("product", "added", "in_batches"),
    [
        (lambda added, a, b, **more: torch.mm(a, b, **more), 0, False),
        (lambda added, a, b, **more: torch.bmm(a[None], b[None], **more)[0], 0, True),
        (lambda added, a, b, **more: torch.addmm(added, a, b, **more), 1, False),
        (lambda added, a, b, **more: torch.addmm(added.bfloat16(), a, b, beta=2, alpha=1, **more), 2, False),
        (lambda added, a, b, **more: torch.baddbmm(added, a[None], b[None], **more)[0], 1, True),
    ],
)
@pytest.mark.parametrize("into", [False, True])
def test_a_product_of_halves_in_float32(
    values: str, product: Product, added: int, in_batches: bool, into: bool
) -> None:
    a, b, ones = LEFT.cuda(), RIGHT.cuda(), torch.ones(5, device="cuda")
    result = product(ones, a, b, out_dtype=torch.float32)
    if into:
        out = torch.empty((1, 3, 5) if in_batches else (3, 5), device="cuda")
        result = product(ones, a, b, out_dtype=torch.float32, out=out)
    assert (result.dtype, result.shape) == (torch.float32, (3, 5))
    if values == "real":
        torch.testing.assert_close(result.cpu(), TRUE + added)


def test_what_cuda_refuses(values: str) -> None:
    a, b = LEFT.cuda(), RIGHT.cuda()
    with pytest.raises(RuntimeError, match="fp32 for fp16/bf16 inputs"):
        torch.mm(a, b, out_dtype=torch.float64)
    with pytest.raises(RuntimeError, match="fp32 for fp16/bf16 inputs"):
        torch.addmm(a, a, b, out_dtype=torch.float64)
    with pytest.raises(RuntimeError, match="dtype of the provided out tensor"):
        torch.mm(a, b, out_dtype=torch.float32, out=torch.empty(3, 5, device="cuda", dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"expanded size of the tensor"):
        torch.addmm(torch.ones(2, 5, device="cuda"), a, b, out_dtype=torch.float32)


def test_the_result_alone_takes_memory() -> None:
    gpu.turn_on("A100,values=stand-in")
    a, b, one = (
        torch.ones(1, 64, 32).bfloat16().cuda(),
        torch.ones(1, 32, 64).bfloat16().cuda(),
        torch.ones(64, device="cuda"),
    )
    torch.bmm(a, b)
    before = torch.cuda.memory_allocated()
    kept = torch.baddbmm(one, a, b, out_dtype=torch.float32)
    assert torch.cuda.memory_allocated() - before == 4 * 64 * 64
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    assert kept.shape == (1, 64, 64)
    gpu.turn_off()


def test_weights_of_4_bits(values: str) -> None:
    rows, columns, group = 16, 64, 32
    numbers = torch.randint(0, 16, (rows, columns))
    scales = torch.randn(columns // group, rows, 2).bfloat16()
    x = torch.randn(5, columns).bfloat16()
    pairs: Any = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)
    packed = aten._convert_weight_to_int4pack.default(pairs.cuda(), 2)
    assert (packed.shape, packed.dtype) == ((2, 2, 32, 1), torch.int32)
    result = aten._weight_int4pack_mm.default(x.cuda(), packed, group, scales.cuda())
    assert (result.shape, result.dtype) == ((5, rows), torch.bfloat16)
    if values == "real":
        step, middle = (part.float().mT.repeat_interleave(group, 1) for part in scales.unbind(-1))
        weight = ((numbers - 8) * step + middle).bfloat16().float()
        torch.testing.assert_close(result.cpu().float(), x.float() @ weight.mT, rtol=1e-2, atol=1e-2)
