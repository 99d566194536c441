"""Backends of the program's own get Dynamo's graphs on the virtual GPU, with values and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True, params=["T4", "T4,values=real"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    torch._dynamo.reset()
    gpu.turn_on(request.param)
    yield request.param
    gpu.turn_off()
    torch._dynamo.reset()


def breaking(x: torch.Tensor) -> torch.Tensor:
    y = x.sin() + 1
    print(end="")
    return y.relu() * 2


def test_explain_counts_graphs_breaks_and_calls() -> None:
    found = torch._dynamo.explain(breaking)(torch.ones(3, device="cuda"))
    assert (found.graph_count, found.graph_break_count, found.op_count) == (2, 1, 2)


def test_a_function_gets_the_graphs_and_what_it_returns_runs(device: str) -> None:
    seen: list[list[str]] = []

    def mine(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append([node.name for node in graph.graph.nodes if node.op == "call_method"])
        assert [one.device.type for one in inputs if isinstance(one, torch.Tensor)] == ["cuda"]
        return lambda *args: [3 * out for out in graph.forward(*args)]

    x = torch.ones(3, device="cuda", requires_grad=True)
    out = torch.compile(breaking, backend=mine)(x)
    out.sum().backward()
    assert seen == [["sin"], ["relu"]]
    assert x.grad is not None
    if "real" in device:
        on_host = torch.ones(3, requires_grad=True)
        (3 * (3 * (on_host.sin() + 1)).relu() * 2).sum().backward()
        assert x.grad.tolist() == pytest.approx(on_host.grad.tolist())  # type: ignore[union-attr]


def test_what_counts_compilations_counts_them() -> None:
    counter = CompileCounter()
    call = torch.compile(lambda x: x.sin() + 1, backend=counter, dynamic=True)
    for size in (3, 4, 5):
        assert call(torch.ones(size, device="cuda")).shape == (size,)
    assert (counter.frame_count, counter.op_count) == (1, 2)


def test_graphs_of_both_passes_come_from_autograds_backend() -> None:
    sizes = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        sizes.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

    x = torch.ones(3, device="cuda", requires_grad=True)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    torch.compile(lambda x: (x * x).sum(), backend=backend)(x).backward()
    assert len(sizes) == 2
    assert x.grad is not None


@pytest.mark.parametrize("name", [None, "inductor"])
def test_one_that_hands_its_graph_to_inductor(name: str | None, device: str) -> None:
    graphs = []

    def mine(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        graphs.append(graph)
        return compile_fx(graph, inputs) if name is None else torch._dynamo.lookup_backend(name)(graph, inputs)

    x = torch.ones(4, 8, device="cuda", requires_grad=True)
    out = torch.compile(lambda x: (x.sin() * 2).relu(), backend=mine)(x)
    out.sum().backward()
    assert len(graphs) == 1
    assert x.grad is not None
    if "real" in device:
        assert out.tolist() == (torch.ones(4, 8).sin() * 2).relu().tolist()
