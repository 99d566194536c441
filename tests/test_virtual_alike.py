"""An operator's result is made from what the fake mode gave for arguments alike, and is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gpumem_magic.virtual import gpu


@pytest.fixture
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("T4,values=stand-in")
    gpu.turn_off()


OPERATORS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.relu(),
    lambda x: x.mul_(2.0),
    lambda x: x + 1,
    lambda x: x[1:, 2],
    lambda x: x.t().reshape(-1),
    lambda x: x.expand(3, 4, 6),
    lambda x: x.split(2),
    lambda x: x.half(),
    lambda x: x.max(1),
    lambda x: torch.cat([x, x], 1),
    lambda x: x.to(memory_format=torch.contiguous_format),
    lambda x: torch._foreach_mul([x, x], 2.0),
    lambda x: x.view_as(x).squeeze_(0),
    lambda x: torch.native_layer_norm(x, (6,), None, None, 1e-5),
]


def looks(out: Any, x: torch.Tensor) -> list[Any]:
    return [
        (
            one.shape, one.stride(), one.dtype, one.device, one.storage_offset() - x.storage_offset(), one is x,
            one.untyped_storage()._cdata == x.untyped_storage()._cdata, one.untyped_storage().nbytes(), one.is_inference(),
            one.requires_grad, type(one),
        )
        for one in (out if isinstance(out, (tuple, list)) else [out])
    ]  # fmt: skip


@pytest.mark.parametrize("inference", [False, True])
def test_the_second_result_looks_like_the_first(
    machine: gpu.VirtualMachine, monkeypatch: pytest.MonkeyPatch, inference: bool
) -> None:
    with torch.inference_mode(inference):
        first = [looks(operator(x), x) for operator in OPERATORS for x in [torch.empty(4, 6, device="cuda")]]
        asked: list[str] = []
        dispatch = machine.engine.fake.dispatch
        monkeypatch.setattr(
            machine.engine.fake, "dispatch", lambda *call: asked.append(str(call[0])) or dispatch(*call)
        )
        # Another place in a larger storage.
        rows = torch.empty(2, 4, 6, device="cuda")
        second = [looks(operator(x), x) for operator in OPERATORS[:10] for x in [torch.empty(4, 6, device="cuda")]]
        placed = looks(rows[1][1:, 2], rows[1])
    assert second == first[:10]
    assert placed[0][:5] == first[3][0][:5]
    assert "aten.relu.default" not in asked
    assert "aten.max.dim" not in asked


def test_what_a_result_is_written_into_is_given_back_and_may_have_to_grow(
    machine: gpu.VirtualMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.rand(64, 64, device="cuda")
    x @ x  # and cuBLAS takes its workspace
    asked: list[str] = []
    dispatch = machine.engine.fake.dispatch
    monkeypatch.setattr(machine.engine.fake, "dispatch", lambda *call: asked.append(str(call[0])) or dispatch(*call))
    for _ in range(3):
        into, empty = torch.empty(64, 64, device="cuda"), torch.empty(0, device="cuda")
        before = torch.cuda.memory_allocated()
        assert torch.mm(x, x, out=into) is into
        assert into._version == 1
        assert torch.cuda.memory_allocated() == before
        assert torch.mm(x, x.t(), out=empty).shape == (64, 64)
        assert torch.cuda.memory_allocated() == before + 4 * 64 * 64
    # Once for the one that was large enough, each time for the other.
    assert asked.count("aten.mm.out") == 4


def test_numbers_that_make_a_shape_are_told_apart(machine: gpu.VirtualMachine) -> None:
    x = torch.empty(4, 6, device="cuda")
    for count in (1, 3, 1, 2):
        assert x.narrow(1, 2, count).shape == (4, count)
        assert (x + count).dtype == (x + count * 1.0).dtype == torch.float32
    whole = torch.ones(3, dtype=torch.int64, device="cuda")
    assert [(whole * factor).dtype for factor in (2, 2.0, True)] == [torch.int64, torch.float32, torch.int64]
    assert torch.empty(4, 6, device="cuda").add_(torch.empty(6, device="cuda")).shape == (4, 6)
    with pytest.raises(RuntimeError, match="size of tensor"):
        torch.empty(4, 6, device="cuda").add_(torch.empty(5, device="cuda"))
    with torch.no_grad():
        torch.set_default_dtype(torch.float64)
        try:
            assert (whole * 2.0).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "operator", [*OPERATORS, lambda x: x.var(0), lambda x: x.log_softmax(1), lambda x: x.cumsum(0)]
)
def test_the_first_use_of_a_shape_asks_for_the_same_memory(
    machine: gpu.VirtualMachine, operator: Callable[[torch.Tensor], Any]
) -> None:
    x = torch.empty(4, 6, device="cuda")
    asked = []
    for _ in range(2):
        log = machine.devices[0].start_log()
        operator(x)
        machine.settle()
        asked.append([(event.action, event.size) for event in log.events if not event.action.startswith("segment")])
        log.stop()
    assert asked[0] == asked[1]


def test_a_shape_rule_may_name_a_tensor_whose_values_are_known(machine: gpu.VirtualMachine) -> None:
    assert torch.arange(7.0, device="cuda").quantile(0.3).item() == pytest.approx(1.8)
