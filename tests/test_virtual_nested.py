"""Nested tensors in the strided layout on the virtual GPU: what they answer, compute and cost, beside PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import made

import gpumem_magic
from gpumem_magic.virtual import gpu

# (Said once a process, by the first.)
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

torch.manual_seed(0)
ROWS = [torch.randn(2, 6), torch.randn(5, 6), torch.randn(3, 6)]
HEADS = [torch.randn(2, 4, 8), torch.randn(5, 4, 8)]
MASKS = [torch.rand(one.shape) > 0.5 for one in ROWS]
WEIGHT, BIAS, SQUARE = torch.randn(7, 6), torch.randn(7), torch.randn(6, 6)


@pytest.fixture
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("A100-40GB")
    gpu.turn_off()


def nested(device: str, tensors: list[torch.Tensor] = ROWS, **more: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([one.to(device) for one in tensors], device=device, **more)


def heads(device: str) -> torch.Tensor:
    """[3, 4, *, 8]"""
    return nested(device, HEADS).transpose(1, 2).contiguous()


CASES: dict[str, Callable[[str], Any]] = {
    **{
        name: lambda d, name=name: getattr(torch, name)(nested(d))  # type: ignore[misc]
        for name in ("relu", "tanh", "abs", "cos", "sin", "sqrt", "neg", "sgn", "logical_not", "isnan", "isinf")
    },
    "relu of a module": lambda d: torch.nn.ReLU()(nested(d)),
    "relu in place": lambda d: F.relu(nested(d), inplace=True),
    "gelu": lambda d: F.gelu(nested(d)),
    "silu": lambda d: F.silu(nested(d)),
    "without such an operator": lambda d: torch.exp(nested(d)),
    "a sum": lambda d: nested(d).sum(),
    "a power": lambda d: nested(d) ** 2,
    "+": lambda d: nested(d) + nested(d),
    "-": lambda d: nested(d) - nested(d),
    "+ of one that lies otherwise": lambda d: nested(d, HEADS).transpose(1, 2) + heads(d),
    "*": lambda d: nested(d) * nested(d),
    "* a number": lambda d: 2 * nested(d) / 3,
    "+ of other sizes": lambda d: nested(d) + nested(d, HEADS),
    "compared": lambda d: [nested(d) > 0, nested(d).ge(0.5), nested(d).eq(0)],
    "compared with another": lambda d: nested(d).eq(nested(d)),
    "masked": lambda d: nested(d).masked_fill(nested(d, MASKS), 9.0),
    "chosen": lambda d: torch.where(nested(d, MASKS), torch.tensor(2.0, device=d), nested(d)),
    "chosen of two": lambda d: torch.where(nested(d, MASKS), nested(d), nested(d) * 2),
    "in place": lambda d: [nested(d).relu_(), nested(d).add_(nested(d)), nested(d).mul_(2), nested(d).fill_(1)],
    "copied into": lambda d: nested(d).copy_(nested(d) * 3),
    "like it": lambda d: [torch.ones_like(nested(d)), torch.zeros_like(nested(d))],
    "linear": lambda d: F.linear(nested(d), WEIGHT.to(d), BIAS.to(d)),
    "linear of four dimensions": lambda d: F.linear(nested(d, HEADS), SQUARE.to(d)),
    "linear of another width": lambda d: F.linear(nested(d), torch.ones(3, 4).to(d)),
    "layer norm": lambda d: F.layer_norm(nested(d), (6,), WEIGHT[0].to(d), WEIGHT[1].to(d)),
    "layer norm over what differs": lambda d: F.layer_norm(nested(d), (2, 6), SQUARE[:2].to(d), SQUARE[:2].to(d)),
    "softmax": lambda d: torch.softmax(nested(d), -1),
    "softmax down": lambda d: F.softmax(nested(d), dim=1),
    "softmax over all": lambda d: torch.softmax(nested(d), 0),
    "dropout": lambda d: [F.dropout(nested(d), 0.5, False), F.dropout(nested(d), 0.0)],
    "embedding": lambda d: F.embedding(nested(d, [torch.tensor([1, 2, 3]), torch.tensor([4])]), SQUARE.to(d)),
    "padded": lambda d: torch.nested.to_padded_tensor(nested(d), -1.0),
    "padded to a size": lambda d: nested(d).to_padded_tensor(0.0, output_size=(3, 7, 6)),
    "padded to too small a size": lambda d: nested(d).to_padded_tensor(0.0, output_size=(3, 2, 6)),
    "padded of bfloat16": lambda d: nested(d).bfloat16().to_padded_tensor(0.0),
    "padded of four dimensions": lambda d: heads(d).to_padded_tensor(0.0),
    "bmm": lambda d: torch.bmm(nested(d), nested(d).transpose(1, 2)),
    "bmm with a dense one": lambda d: torch.bmm(nested(d), SQUARE.expand(3, 6, 6).contiguous().to(d)),
    "matmul": lambda d: torch.matmul(nested(d), nested(d).transpose(1, 2)),
    "matmul by heads": lambda d: heads(d) @ heads(d).transpose(2, 3).contiguous(),
    "matmul of what does not fit": lambda d: torch.matmul(nested(d), nested(d)),
    "matmul with a dense one": lambda d: torch.matmul(nested(d, HEADS), torch.arange(24.0).reshape(8, 3).to(d)),
    "matmul with another dense one": lambda d: torch.matmul(nested(d), SQUARE.to(d)),
    "views": lambda d: [
        nested(d).transpose(1, 2), nested(d).view(3, -1, 2, 3), nested(d).unsqueeze(-1), nested(d).unsqueeze(-1).squeeze(-1),
        *nested(d).chunk(3, -1), nested(d).split_with_sizes([2, 4], -1)[1], nested(d).narrow(0, 1, 2),
    ],
    "a view that needs a copy": lambda d: nested(d).transpose(1, 2).reshape(3, 6, -1),
    "parts": lambda d: [nested(d)[1], nested(d)[1, 2], nested(d).select(0, -1), *nested(d), *nested(d).unbind()],
    "length": lambda d: len(nested(d)),
    "a slice": lambda d: nested(d)[:, 1],
    "unbound otherwise": lambda d: nested(d).unbind(1),
    "asked": lambda d: [
        nested(d).dim(), nested(d).numel(), nested(d).size(0), nested(d).size(2), nested(d).is_nested, nested(d).dtype,
        nested(d).layout, nested(d).is_contiguous(), nested(d).transpose(1, 2).is_contiguous(), nested(d).is_floating_point(),
    ],
    "asked for a size that differs": lambda d: nested(d).size(1),
    "asked for all sizes": lambda d: nested(d).size(),
    "put together": lambda d: [torch.cat([nested(d), nested(d)]), torch.cat([nested(d), nested(d)], -1)],
    "copies": lambda d: [nested(d).clone(), nested(d).detach(), nested(d).transpose(1, 2).contiguous()],
    "types": lambda d: [nested(d).half(), nested(d).to(torch.float64), nested(d).double().dtype],
    "to the host": lambda d: [nested(d).cpu(), nested(d).transpose(1, 2).to("cpu")],
    "from the host": lambda d: nested("cpu").transpose(1, 2).to(d),
    "of lists": lambda d: torch.nested.nested_tensor([[1.0, 2.0], [3.0]], device=d),
    "of nothing": lambda d: torch.nested.nested_tensor([], device=d),
    "of different ranks": lambda d: nested(d, [torch.ones(2), torch.ones(2, 2)]),
    "as nested": lambda d: torch.nested.as_nested_tensor([one.to(d) for one in ROWS]),
    "as nested of a dense one": lambda d: torch.nested.as_nested_tensor(torch.arange(12.0).reshape(2, 3, 2).to(d)),
    "printed": lambda d: repr(nested(d)).replace(", device='cuda:0'", ""),
    "attention": lambda d: F.scaled_dot_product_attention(heads(d), heads(d), heads(d)),
    "attention where lengths differ": lambda d: F.scaled_dot_product_attention(heads(d)[:1], heads(d), heads(d)),
    "gradients of layers": lambda d: gradients(d, lambda n, w: torch.softmax(F.linear(n, w).relu(), -1)),
    "gradients of a product": lambda d: gradients(d, lambda n, w: torch.bmm(n, n.transpose(1, 2))),
    "gradients of a padded product": lambda d: gradients(d, lambda n, w: torch.matmul(n, n.transpose(1, 2))),
    "gradients of a norm": lambda d: gradients(d, lambda n, w: F.layer_norm(F.linear(n, w[:6]), (6,), w[0], w[1])),
    "gradients of copies": lambda d: gradients(d, lambda n, w: n.transpose(1, 2).contiguous().transpose(1, 2).contiguous()),
    "gradients of parts": lambda d: gradients(d, lambda n, w: torch.stack([one.sum() for one in n.relu().unbind()])),
    "a leaf's gradient": lambda d: leaf(d),
    "a nested gradient": lambda d: from_a_nested_gradient(d),
}  # fmt: skip


def gradients(device: str, of: Callable[[Any, Any], Any]) -> list[torch.Tensor]:
    leaves = [one.clone().to(device).requires_grad_() for one in ROWS]
    weight = WEIGHT.clone().to(device).requires_grad_()
    out = of(torch.nested.as_nested_tensor(leaves), weight)
    out = out.to_padded_tensor(0.0) if out.is_nested else out
    (out * torch.arange(out.numel(), device=device).reshape(out.shape).cos()).sum().backward()
    return [one.grad for one in (*leaves, weight) if one.grad is not None]


def leaf(device: str) -> Any:
    made_there = nested(device, requires_grad=True)
    (made_there * 3).to_padded_tensor(0.0).sum().backward()
    return [made_there.requires_grad, made_there.is_leaf, made_there.grad]


def from_a_nested_gradient(device: str) -> Any:
    made_there = nested(device, requires_grad=True)
    out = made_there * 3
    out.backward(torch.ones_like(out))
    return made_there.grad


def described(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [described(one) for one in value]
    if isinstance(value, torch.Tensor) and value.is_nested:
        return ["nested", value.dtype, [described(one) for one in value.unbind()]]
    return value


def outcome(case: Callable[[str], Any], device: str) -> Any:
    try:
        return described(case(device))
    except (RuntimeError, NotImplementedError, IndexError) as error:
        words = str(error).replace("CUDA", "CPU").partition("\n")[0].partition(". This could be")[0].rstrip(".")
        return f"{type(error).__name__}: {words}"


def assert_same(there: Any, here: Any) -> None:
    if isinstance(here, list):
        assert len(there) == len(here)
        for one, other in zip(there, here, strict=True):
            assert_same(one, other)
    elif isinstance(here, torch.Tensor):
        torch.testing.assert_close(there.detach().cpu(), here.detach(), rtol=1e-4, atol=1e-5, equal_nan=True)
    else:
        assert there == here


@pytest.mark.parametrize("name", CASES)
def test_all_is_as_on_the_host(name: str) -> None:
    here = outcome(CASES[name], "cpu")
    gpu.turn_on("A100-40GB,values=real")
    try:
        assert_same(outcome(CASES[name], "cuda"), here)
    finally:
        gpu.turn_off()


# ---- what they cost, in bytes


@pytest.mark.usefixtures("machine")
def test_tensors_of_the_device_are_put_together_there_and_those_of_the_host_are_copied_at_once() -> None:
    here, there = ROWS, [one.cuda() for one in ROWS]
    assert made(lambda: torch.nested.nested_tensor(here, device="cuda")) == [240]
    assert made(lambda: torch.nested.nested_tensor(there)) == [240]
    assert made(lambda: nested("cpu").cuda()) == [240]


@pytest.mark.usefixtures("machine")
def test_views_and_questions_ask_for_nothing() -> None:
    large = nested("cuda", [torch.empty(n, 256) for n in (100, 300)])
    assert (
        made(lambda: [large.transpose(1, 2), large.chunk(2, -1), large.view(2, -1, 4, 64), large.numel(), large[1]])
        == []
    )


@pytest.mark.usefixtures("machine")
def test_padding_makes_its_result_and_a_list_of_places() -> None:
    """``NestedTensorTransformerFunctions.cpp`` of CUDA: 32-bit numbers, one more place than tensors and their sizes; of three
    dimensions it sees rows of numbers."""
    rows = nested("cuda", [torch.empty(n, 256) for n in (100, 300, 200)])
    assert made(lambda: rows.to_padded_tensor(0.0)) == [3 * 300 * 256 * 4, (3 * 2 + 1) * 4]
    many = nested("cuda", [torch.empty(1, 8)] * 300)
    assert made(lambda: many.to_padded_tensor(0.0)) == [300 * 8 * 4, (300 * 2 + 1) * 4]
    # (Each padded by itself, then stacked: bfloat16 has no kernel.)
    half = rows.bfloat16()
    assert made(lambda: half.to_padded_tensor(0.0)) == [3 * [300 * 256 * 2], [3 * 300 * 256 * 2]][0] + [
        3 * 300 * 256 * 2
    ]


@pytest.mark.usefixtures("machine")
def test_products_and_softmax_write_into_one_buffer() -> None:
    rows = nested("cuda", [torch.empty(n, 256) for n in (128, 256)])
    other = rows.transpose(1, 2)
    torch.mm(torch.empty(8, 8, device="cuda"), torch.empty(8, 8, device="cuda"))  # (cuBLAS takes its workspace)
    assert made(lambda: torch.bmm(rows, other)) == [(128 * 128 + 256 * 256) * 4]
    assert made(lambda: torch.softmax(rows, -1)) == [384 * 256 * 4]


@pytest.mark.usefixtures("machine")
def test_a_softmax_keeps_its_result_for_the_gradient_and_not_what_it_read() -> None:
    weight = torch.empty(256, 256, device="cuda", requires_grad=True)
    scores = F.linear(nested("cuda", [torch.empty(n, 256) for n in (128, 256)]), weight)
    shares = torch.softmax(scores, -1)
    before = torch.cuda.memory_allocated()
    del scores
    assert before - torch.cuda.memory_allocated() == 384 * 256 * 4
    assert shares.requires_grad


@pytest.mark.usefixtures("machine")
def test_attention_takes_the_flash_kernel_for_sequences_of_any_length() -> None:
    """Two lists of ends for it; where heads lie behind each other the buffer is handed on, else copied."""
    tokens = nested("cuda", [torch.empty(n, 3 * 256, dtype=torch.half) for n in (100, 300)])
    query, key, value = (one.view(2, -1, 4, 64).transpose(1, 2) for one in tokens.chunk(3, -1))
    asked = made(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True))
    assert asked[:2] == [3 * 4, 3 * 4]
    assert 400 * 256 * 2 in asked
    assert max(asked) == 400 * 256 * 2
    out = F.scaled_dot_product_attention(query, key, value)
    assert out.transpose(1, 2).is_contiguous()
    assert [tuple(one.shape) for one in out.unbind()] == [(4, 100, 64), (4, 300, 64)]


@pytest.mark.usefixtures("machine")
def test_what_trains_has_no_memory_efficient_attention() -> None:
    query = nested("cuda", [torch.empty(n, 4, 64) for n in (100, 300)], requires_grad=True).transpose(1, 2)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        with pytest.raises(RuntimeError, match="No available kernel"):
            F.scaled_dot_product_attention(query, query, query)
        plain = query.detach()
        assert F.scaled_dot_product_attention(plain, plain, plain).is_nested


# ---- the rest


def by_a_mask(device: str) -> torch.Tensor:
    mask = torch.arange(4) < torch.tensor([[4], [2], [3]])
    return torch._nested_tensor_from_mask(torch.arange(60.0).reshape(3, 4, 5).to(device), mask.to(device))


def test_what_a_mask_leaves_is_a_nested_tensor_where_the_mask_is_known() -> None:
    here = described(by_a_mask("cpu"))
    gpu.turn_on("A100-40GB,values=real")
    try:
        assert_same(described(by_a_mask("cuda")), here)
        with pytest.raises(RuntimeError, match="left-aligned without gaps"):
            torch._nested_tensor_from_mask(torch.ones(1, 3, 2).cuda(), torch.tensor([[True, False, True]]).cuda())
    finally:
        gpu.turn_off()
    gpu.turn_on("A100-40GB")
    try:
        assert [len(one) for one in by_a_mask("cuda").unbind()] == [4, 2, 3]
        mask = torch.rand(3, 400, device="cuda") > 0.5
        with pytest.raises(NotImplementedError, match="a mask whose values are not known"):
            torch._nested_tensor_from_mask(torch.ones(3, 400, 2, device="cuda"), mask)
    finally:
        gpu.turn_off()


@pytest.mark.usefixtures("machine")
def test_what_is_not_emulated_is_refused_in_one_line_and_in_pytorchs_words_where_it_has_none(tmp_path: Path) -> None:
    rows = nested("cuda")
    with pytest.raises(NotImplementedError, match="'aten::exp' with arguments from the 'NestedTensorCUDA' backend"):
        torch.exp(rows)
    with pytest.raises(NotImplementedError, match=r"nested tensor in the strided layout.*Use its tensors"):
        torch.save(rows, tmp_path / "rows.pt")
    with pytest.raises(NotImplementedError, match=r"strided layout. Use layout=torch\.jagged or"):
        torch.sum(rows, -1, keepdim=True)


def test_all_is_undone_when_the_device_goes() -> None:
    before = torch.nested.nested_tensor, torch._nested_tensor_from_tensor_list, torch._nested_view_from_buffer
    gpu.turn_on("T4")
    nested("cuda")
    gpu.turn_off()
    assert before == (torch.nested.nested_tensor, torch._nested_tensor_from_tensor_list, torch._nested_view_from_buffer)
    assert nested("cpu").device.type == "cpu"


@pytest.mark.usefixtures("machine")
def test_the_report_tells_its_memory_by_the_name_of_the_nested_tensor() -> None:
    with gpumem_magic.measure() as measured:
        batch = nested("cuda", [torch.empty(n, 1024) for n in (1000, 3000)])
    assert "batch" in str(measured.report).partition("\n\n")[0]
    del batch


def test_the_gradient_of_padding_out_is_laid_out_plainly_first_and_what_was_padded_is_there_for_its_sizes(
    machine: gpu.VirtualMachine,
) -> None:
    rows = torch.nested.nested_tensor([torch.zeros(300, 256), torch.zeros(200, 256)], device="cuda", requires_grad=True)
    nested = rows * 2
    before = torch.cuda.memory_allocated()
    padded = nested.to_padded_tensor(0.0)
    del nested
    assert torch.cuda.memory_allocated() - before == padded.numel() * 4
    one = torch.ones((), device="cuda").expand_as(padded)
    # The nested gradient, its sizes and places (copied in 64 bits), and the one number as many times as there are places.
    assert made(lambda: padded.backward(one))[:4] == [500 * 256 * 4, 10 * 4, 10 * 8, 2 * 300 * 256 * 4]
