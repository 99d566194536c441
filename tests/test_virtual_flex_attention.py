"""`flex_attention` on the virtual GPU: compiled it is one kernel, otherwise the scores are written."""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from asked_for import made

from gpumem_magic.virtual import gpu

MIB = 1 << 20
flex: Any = importlib.import_module("torch.nn.attention.flex_attention")


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    gpu.turn_on("A100-40GB")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without")
        # Without trials of the kernels beside the attention.
        with importlib.import_module("torch._inductor.config").patch({"triton.autotune_pointwise": False}):
            yield
    gpu.turn_off()


def half(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device="cuda", dtype=torch.float16, requires_grad=True)


def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def distance(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return score + (key - query)


def attend(compiled: bool, **options: Any) -> tuple[int, int, int]:
    """(bytes kept, highest in the forward pass, highest in the backward pass), beyond the arguments'."""
    query, key, value = (half(1, 8, 1024, 64) for _ in range(3))
    mask = flex.create_block_mask(causal, None, None, 1024, 1024, device="cuda")
    call = torch.compile(flex.flex_attention) if compiled else flex.flex_attention
    call(query, key, value, block_mask=mask, **options)  # the workspaces
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = call(query, key, value, block_mask=mask, **options)
    assert out.shape == query.shape
    kept, forward = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    gradient = torch.ones_like(out)
    torch.cuda.reset_peak_memory_stats()
    out.backward(gradient)
    assert all(tensor.grad is not None and tensor.grad.shape == tensor.shape for tensor in (query, key, value))
    return kept, forward, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("options", [{}, {"score_mod": distance}])
def test_compiled_it_keeps_its_result_and_a_sum_for_each_row(options: dict[str, Any]) -> None:
    attend(True, **options)  # (The first launches' trials.)
    kept, forward, backward = attend(True, **options)
    rows = 8 * 1024 * 4
    assert kept == MIB + rows
    # The template asks for the highest scores of the rows, too, and lets them go.
    assert forward == kept + rows
    # The gradient that comes in, three that go out, and another sum for each row.
    assert backward == kept + MIB + 3 * MIB + rows


def test_not_compiled_it_writes_the_scores() -> None:
    kept, forward, backward = attend(False)
    scores = 8 * 1024 * 1024 * 4
    assert kept < 2 * MIB, "they are gone after it"
    assert forward > scores
    assert backward > scores


def test_not_compiled_its_gradients_are_worked_out_by_hand() -> None:
    """`sdpa_dense_backward` in torch/_higher_order_ops/flex_attention.py: three gradients, each made twice, then scores."""
    query, key, value = (half(1, 2, 256, 64) for _ in range(3))
    out = flex.flex_attention(query, key, value, score_mod=distance)
    ones = torch.ones_like(out)
    rows = 2 * 256 * 4  # (2.9 first makes zeros for the gradients of the rows' sums.)
    found = [size for size in made(lambda: out.backward(ones)) if size != rows]
    tensor = 2 * 256 * 64 * 2
    assert found[:6] == [tensor] * 6
    assert found.count(2 * 256 * 256 * 4) > 4, "scores"


def test_inside_a_compiled_model_and_with_more_results() -> None:
    mask = flex.create_block_mask(causal, None, None, 256, 256, device="cuda")

    def model(x: torch.Tensor) -> Any:
        return flex.flex_attention(x, x, x, return_aux=flex.AuxRequest(lse=True), block_mask=mask)

    x = half(2, 4, 256, 32)
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, (sums, _) = torch.compile(model, fullgraph=True)(x)
    assert torch.cuda.max_memory_allocated() - before < 4 * 2 * 4 * 256 * 256, "no scores"
    assert (out.shape, sums.shape, sums.dtype) == (x.shape, (2, 4, 256), torch.float32)


def test_where_graphs_run_operator_by_operator_it_is_the_kernel_as_well() -> None:
    x = half(1, 4, 1024, 32)
    slope = torch.rand(4, device="cuda", requires_grad=True)
    mask = flex.create_block_mask(causal, None, None, 1024, 1024, device="cuda")

    def scaled(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return score * slope[head]

    call = torch.compile(
        lambda: flex.flex_attention(x, x, x, score_mod=scaled, block_mask=mask), backend="aot_eager", fullgraph=True
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call().sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 4 * 1024 * 1024 * 2, "no scores"
    assert x.grad is not None
    assert slope.grad is not None
    assert slope.grad.shape == slope.shape


def test_grouped_queries_and_their_order_in_memory() -> None:
    query = half(2, 256, 8, 64).transpose(1, 2)
    key, value = half(2, 2, 256, 64), half(2, 2, 256, 64)
    out = torch.compile(flex.flex_attention)(query, key, value, enable_gqa=True)
    assert (out.shape, out.stride()) == (query.shape, query.stride())
    out.sum().backward()
    assert key.grad is not None
    assert key.grad.shape == key.shape


def test_on_the_host_pytorchs_own_runs() -> None:
    x = torch.rand(1, 2, 128, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    assert torch.allclose(flex.flex_attention(x, x, x), expected, atol=1e-5)


def test_compiled_its_numbers_are_the_hosts_where_values_are_real() -> None:
    gpu.turn_on("A100-40GB,values=real")
    torch.manual_seed(0)
    on_host = [torch.randn(1, 2, 128, 16, requires_grad=True) for _ in range(3)]
    on_device = [one.detach().cuda().requires_grad_() for one in on_host]
    expected = torch.nn.functional.scaled_dot_product_attention(*on_host, is_causal=True)
    mask = flex.create_block_mask(causal, None, None, 128, 128, device="cuda")
    out = torch.compile(flex.flex_attention)(*on_device, block_mask=mask)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)
    expected.sum().backward()
    out.sum().backward()
    for ours, its in zip(on_device, on_host, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), its.grad, rtol=1e-4, atol=1e-5)


class Slopes(torch.nn.Module):
    """A layer whose score function uses a parameter, an index of it and a tensor that wants no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor([0.5, -1.0]))
        self.register_buffer("unit", torch.tensor(0.01))

    def forward(self, query: torch.Tensor, compiled: bool) -> Any:
        call = torch.compile(flex.flex_attention) if compiled else flex.flex_attention
        return call(query, query, query, score_mod=lambda x, b, h, i, j: x + self.slope[h] * (i - j) * self.unit)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("values", ["real", "stand-in"])
def test_a_parameter_that_the_score_function_uses_gets_its_gradient(values: str, compiled: bool) -> None:
    gpu.turn_on(f"A100-40GB,values={values}")
    torch.manual_seed(0)
    on_host = torch.randn(1, 2, 128, 16, requires_grad=True)
    layer = Slopes()
    places = torch.arange(128)
    scores = layer.slope[None, :, None, None] * (places[:, None] - places) * layer.unit
    torch.nn.functional.scaled_dot_product_attention(on_host, on_host, on_host, attn_mask=scores).pow(
        2
    ).sum().backward()
    expected = layer.slope.grad
    query = on_host.detach().cuda().requires_grad_()
    layer = Slopes().cuda()
    layer(query, compiled).pow(2).sum().backward()
    assert (query.grad is None, layer.slope.grad is None) == (False, False)
    assert layer.slope.grad.shape == (2,)  # type: ignore[union-attr]
    if values == "real":
        torch.testing.assert_close(layer.slope.grad.cpu(), expected, rtol=1e-3, atol=1e-3)  # type: ignore[union-attr]
        torch.testing.assert_close(query.grad.cpu(), on_host.grad, rtol=1e-3, atol=1e-4)  # type: ignore[union-attr]


def capped(score: Any, *_: Any) -> Any:
    return torch.tanh(score / 20) * 20


def test_gradients_of_a_score_function_that_keeps_its_result_are_the_hosts() -> None:
    """PyTorch traces the score function's backward pass with tensors without values among those of the device."""
    gpu.turn_on("A100-40GB,values=real")
    torch.manual_seed(0)
    on_host = [torch.randn(1, 2, 128, 16, requires_grad=True) for _ in range(3)]
    on_device = [one.detach().cuda().requires_grad_() for one in on_host]
    query, key, value = on_host
    (capped(query @ key.mT / 4).softmax(-1) @ value).sum().backward()
    flex.flex_attention(*on_device, score_mod=capped).sum().backward()
    for ours, its in zip(on_device, on_host, strict=True):
        assert ours.grad is not None
        assert its.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), its.grad, rtol=1e-4, atol=1e-5)
