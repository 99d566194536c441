"""Nested tensors in the jagged layout, on a virtual GPU: PyTorch's own class, around values and offsets that lie there."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import made

from gpumem_magic.virtual import gpu

LENGTHS = (3, 5, 7)
TOKENS = sum(LENGTHS)


@pytest.fixture(params=["A100,torch=2.13", "A100,torch=2.13,values=real"])
def machine(request: pytest.FixtureRequest) -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on(request.param)
    gpu.turn_off()


@pytest.fixture
def shapes_only() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("A100")
    gpu.turn_off()


def rows(width: int = 64, *, on: str = "cuda") -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(length, width, device=on) for length in LENGTHS]


def nested(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def blocks(*bytes_: int) -> int:
    return sum(-(-one // 512) * 512 for one in bytes_)


def test_it_takes_what_its_values_and_offsets_take(machine: gpu.VirtualMachine) -> None:
    parts = rows()
    before = torch.cuda.memory_allocated()
    whole = nested(parts)
    assert torch.cuda.memory_allocated() - before == blocks(TOKENS * 64 * 4, (len(LENGTHS) + 1) * 8)
    assert whole.device == torch.device("cuda", 0)
    assert whole.is_cuda
    assert whole.is_nested
    assert [one.shape[0] for one in whole.unbind()] == [*LENGTHS]
    before = torch.cuda.memory_allocated()
    more = whole + whole
    assert torch.cuda.memory_allocated() - before == blocks(TOKENS * 64 * 4)
    assert more.shape == whole.shape
    padded = torch.nested.to_padded_tensor(whole, 0.0)
    assert padded.shape == (3, 7, 64)


def test_what_is_padded_is_packed_by_way_of_a_place_for_the_values(machine: gpu.VirtualMachine) -> None:
    """``NestedTensorTransformerFunctions.cu``: the values and, like them, the result; the gradient of padding packs."""
    values = torch.randn(TOKENS, 64, device="cuda", requires_grad=True)
    offsets = torch.tensor([0, 3, 8, 15], device="cuda")
    padded = torch.nested.to_padded_tensor(torch.nested.nested_tensor_from_jagged(values, offsets), 0.0)
    gradient = torch.ones_like(padded)
    asked = made(lambda: padded.backward(gradient))
    assert asked == [TOKENS * 64 * 4] * 2


def test_the_gradient_of_float32_attention_has_no_bias_s(shapes_only: gpu.VirtualMachine) -> None:
    """Three gradients; the result times its own, summed up, and the sums head by head."""
    parts = [part.view(-1, 4, 16) for part in rows()]
    query = nested(parts).requires_grad_()
    out = F.scaled_dot_product_attention(*[query.transpose(1, 2)] * 3)
    gradient = torch.ones_like(out)
    tensor, sums = TOKENS * 64 * 4, TOKENS * 4 * 4
    asked = made(lambda: torch.autograd.grad(out, query, gradient))
    assert asked[:6] == [tensor] * 4 + [sums] * 2


def test_a_layer_with_attention_learns(machine: gpu.VirtualMachine) -> None:
    """By the kernels for sequences one after the other, as the card would choose them (`torch.nested._internal.sdpa`)."""
    project = torch.nn.Linear(64, 3 * 64).cuda().half()

    def attend(x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (4, 16)).transpose(1, 2) for part in project(x.to(torch.float16)).chunk(3, dim=-1)
        )
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2)

    out = attend(nested(rows()))
    assert out.values().shape == (TOKENS, 64)
    out.values().sum().backward()
    assert project.weight.grad is not None
    assert project.weight.grad.shape == project.weight.shape


def test_real_values_are_those_of_the_host() -> None:
    project = torch.nn.Linear(64, 32)
    expected = project(nested(rows(on="cpu"))).relu().values().sum()
    gpu.turn_on("A100,values=real")
    try:
        found = project.cuda()(nested([one.cuda() for one in rows(on="cpu")])).relu().values().sum()
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    finally:
        gpu.turn_off()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_that_of_each_sequence(dtype: torch.dtype, is_causal: bool) -> None:
    """Flash attention's kernel in half precision, the memory-efficient one in float32."""
    parts = [one.unflatten(-1, (4, 16)).to(dtype) for one in rows(on="cpu")]
    weights = [torch.randn_like(one) for one in parts]
    leaves = [one.clone().requires_grad_() for one in parts]
    expected = [
        F.scaled_dot_product_attention(*[leaf.transpose(0, 1)[None]] * 3, is_causal=is_causal)[0].transpose(0, 1)
        for leaf in leaves
    ]
    torch.autograd.backward(expected, weights)
    gpu.turn_on("A100,values=real")
    try:
        values = torch.cat(parts).cuda().requires_grad_()
        ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()]).cuda()
        query = torch.nested.nested_tensor_from_jagged(values, ends).transpose(1, 2)
        out = F.scaled_dot_product_attention(query, query, query, is_causal=is_causal).transpose(1, 2).values()
        out.backward(torch.cat(weights).cuda())
        close = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.float16 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(out.cpu(), torch.cat(expected), **close)
        assert values.grad is not None
        gradients = torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None])
        torch.testing.assert_close(values.grad.cpu(), gradients, **close)
    finally:
        gpu.turn_off()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("queries", [[0, 15, 40], [0, 3, 9]], ids=["as many", "fewer queries"])
def test_flash_attention_of_sequences_sees_its_window(queries: list[int], window: tuple[int, int]) -> None:
    """As `torch.nn.attention.varlen` calls it: a window ends with the last key, and the seed of the backward pass is another."""
    keys = [0, 15, 40]
    given = [torch.randn(ends[-1], 2, 16).bfloat16() for ends in (queries, keys, keys)]
    leaves = [one.float().requires_grad_() for one in given]
    expected = []
    for first, last, start, end in zip(queries, queries[1:], keys, keys[1:], strict=False):
        parts = [
            one[a:b].transpose(0, 1)[None]
            for one, (a, b) in zip(leaves, [(first, last), (start, end), (start, end)], strict=True)
        ]
        distance = torch.arange(end - start)[None] - torch.arange(end - start - (last - first), end - start)[:, None]
        seen = ((distance >= -window[0]) | (window[0] < 0)) & ((distance <= window[1]) | (window[1] < 0))
        expected.append(F.scaled_dot_product_attention(*parts, attn_mask=seen)[0].transpose(0, 1))
    weights = torch.randn(queries[-1], 2, 16).bfloat16()
    torch.autograd.backward(torch.cat(expected), weights.float())
    aten = torch.ops.aten
    gpu.turn_on("A100,values=real")
    try:
        query, key, value = (one.cuda() for one in given)
        ends = [torch.tensor(one, dtype=torch.int32).cuda() for one in (queries, keys)]
        sizes: tuple[Any, ...] = (*ends, 25, 25, 0.0, window == (-1, 0))
        sides = {"window_size_left": window[0], "window_size_right": window[1]}
        out, sums, *_ = aten._flash_attention_forward(query, key, value, *sizes, False, **sides)
        seed, unused = torch.zeros(2, dtype=torch.uint64, device="cuda"), torch.empty(0, device="cuda")
        gradients = aten._flash_attention_backward(
            weights.cuda(), query, key, value, out, sums, *sizes, seed, unused, **sides
        )
        close = {"rtol": 5e-2, "atol": 5e-2}
        torch.testing.assert_close(out.cpu().float(), torch.cat(expected), **close)
        for leaf, found in zip(leaves, gradients, strict=True):
            assert leaf.grad is not None
            torch.testing.assert_close(found.cpu().float(), leaf.grad, **close)
    finally:
        gpu.turn_off()


def test_the_kernel_for_sequences_of_one_length_is_refused_in_one_line_with_real_values() -> None:
    """`xformers` calls it; the host computes it for sequences one after the other."""
    gpu.turn_on("A100,values=real")
    try:
        query = torch.randn(2, 15, 4, 16, device="cuda")
        with pytest.raises(
            NotImplementedError, match=r"values=real cannot compute .*_efficient_attention_forward.*Run this"
        ):
            torch.ops.aten._efficient_attention_forward(
                query, query, query, None, None, None, None, None, 0.0, 0, False
            )
    finally:
        gpu.turn_off()


def test_it_moves_to_the_device_and_back(machine: gpu.VirtualMachine) -> None:
    on_host = nested(rows(on="cpu"))
    there = on_host.cuda()
    assert there.device.type == "cuda"
    # Of one shape, so that the two go together.
    assert there.shape == on_host.shape
    assert there.to("cpu").device.type == "cpu"
    assert there.to(torch.bfloat16).values().dtype == torch.bfloat16


def test_they_are_compiled(shapes_only: gpu.VirtualMachine) -> None:
    """Each result of the graph is one block of all rows; what is in between is fused away."""
    counted = importlib.import_module("torch._dynamo.utils").counters
    counted.clear()

    @torch.compile(fullgraph=True)
    def run(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp().cos()

    with torch.no_grad():
        x = nested(rows())
        run(x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = run(x)
    assert out.shape == x.shape
    assert torch.cuda.max_memory_allocated() - before == blocks(TOKENS * 64 * 4)
    assert counted["stats"]["unique_graphs"] == 1
    assert not [note for note in shapes_only.notes() if "torch.compile" in note]


def test_their_attention_is_compiled(shapes_only: gpu.VirtualMachine) -> None:
    project = torch.nn.Linear(64, 192).cuda()

    def attend(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, [2, 32]).transpose(1, 2) for part in project(x).chunk(3, -1))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)

    fast = torch.compile(attend)
    for _ in range(2):
        out = fast(nested(rows()))
        out.values().sum().backward()
    assert out.values().shape == (TOKENS, 64)
    assert not [note for note in shapes_only.notes() if "torch.compile" in note]


def test_everything_is_undone() -> None:
    attention = pytest.importorskip("torch.nested._internal.sdpa")
    before = attention.can_use_flash_attention, torch.Tensor._make_wrapper_subclass
    gpu.turn_on("A100")
    nested(rows())
    gpu.turn_off()
    assert (attention.can_use_flash_attention, torch.Tensor._make_wrapper_subclass) == before
    assert nested(rows(on="cpu")).device.type == "cpu"
