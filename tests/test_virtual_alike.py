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


def never(*call: Any) -> Any:
    raise AssertionError(f"asked for {call[0]}")


@pytest.mark.parametrize("values", ["stand-in", "real"])
def test_numbers_of_the_host_copies_and_named_devices_are_looked_up_too(
    monkeypatch: pytest.MonkeyPatch, values: str
) -> None:
    machine = gpu.turn_on(f"T4,values={values}")
    try:
        x, two = torch.ones(4, 6, device="cuda"), torch.tensor(2.0)
        rows = torch.tensor([2, 0], device="cuda")
        operators: list[Callable[[], Any]] = [
            lambda: x * two,
            lambda: x * two.double(),
            lambda: torch.where(x > 0, x, two),
            lambda: x.__setitem__(0, 3.0),
            lambda: x.t().cpu(),
            lambda: x.to("cpu", torch.float16),
            lambda: torch.ones(4, 6, device="cuda", requires_grad=True).sum().backward(),
            lambda: x[rows],
            lambda: x[:, rows],
        ]
        first = [operator() for operator in operators]
        asked: list[str] = []
        dispatch = machine.engine.fake.dispatch
        monkeypatch.setattr(
            machine.engine.fake, "dispatch", lambda *call: asked.append(str(call[0])) or dispatch(*call)
        )
        second = [operator() for operator in operators]
    finally:
        gpu.turn_off()
    assert asked == []
    for one, other in zip(first, second, strict=True):
        if one is not None:
            assert looks(one, one) == looks(other, other)
    assert second[1].dtype == torch.float32
    assert second[4].stride() == (1, 6)
    assert second[5].dtype == torch.float16


def test_a_tensor_of_the_host_that_may_not_be_there_is_refused_each_time(machine: gpu.VirtualMachine) -> None:
    x = torch.ones(4, device="cuda")
    for _ in range(3):
        assert (x + torch.tensor(1.0)).shape == (4,)
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(4)
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(1)
    # One that is tracked, or lies in another way.
    tracked = torch.tensor(2.0, requires_grad=True)
    assert [(x * tracked).requires_grad, (x * tracked.detach()).requires_grad] == [True, False]


def test_a_factory_is_asked_for_the_looks_of_numbers_once(machine: gpu.VirtualMachine) -> None:
    for _ in range(2):
        made = [torch.arange(end, device="cuda") for end in (3, 3.0, 4)]
        assert [(one.dtype, len(one)) for one in made] == [(torch.int64, 3), (torch.float32, 3), (torch.int64, 4)]
        assert torch.full((2,), True, device="cuda").dtype == torch.bool
        assert torch.full((2,), 1, device="cuda").dtype == torch.int64
        assert torch.arange(1, 7, 2, device="cuda").shape == torch.arange(3, device="cuda").shape
        assert torch.zeros(2, 3, device="cuda").shape == torch.zeros((2, 3), device="cuda").shape
        assert [torch.zeros(2, device="cuda", requires_grad=on).requires_grad for on in (False, True)] == [False, True]
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.arange(3.0, device="cuda").dtype == torch.zeros(2, 3, device="cuda").dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        assert torch.arange(3, device="cuda").is_inference()
    assert not torch.arange(3, device="cuda").is_inference()


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


def chosen(x: torch.Tensor, numbers: torch.Tensor, flags: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    return {
        "rows": lambda: x[numbers],
        "columns": lambda: x[:, numbers],
        "of 32 bits": lambda: x[numbers.int()],
        "from the host": lambda: x[numbers.cpu()],
        "two lists alike": lambda: x[numbers, numbers],
        "two lists": lambda: x[numbers[:, None], numbers],
        "by a mask": lambda: x[flags],
        "the half of it": lambda: x[1:3, ::2].sum(),
    }


@pytest.mark.parametrize("values", ["stand-in", "auto", "real"])
def test_chosen_rows_take_the_same_each_time(values: str) -> None:
    gpu.turn_on(f"T4,values={values}")
    try:
        numbers, flags = torch.tensor([2, 0, 1], device="cuda"), torch.tensor([True, True, False, True], device="cuda")
        x = torch.randn(4, 256, device="cuda")
        taken: dict[str, list[Any]] = {}
        for _ in range(3):
            for name, choose in chosen(x, numbers, flags).items():
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                out = choose()
                now = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
                taken.setdefault(name, []).append((now, looks(out, x)[0][:4]))
                del out
        assert all(one == found[0] for found in taken.values() for one in found)
        assert taken["rows"][0][0] == (3072, 3072)
        # (The list in 64 bits.)
        assert taken["of 32 bits"][0][0] == (3072, 3072 + 1024)
        assert taken["two lists"][0][0][1] > taken["two lists alike"][0][0][1]
    finally:
        gpu.turn_off()


def test_rows_are_chosen_by_the_numbers_of_now(machine: gpu.VirtualMachine) -> None:
    gpu.turn_off()
    gpu.turn_on("T4,values=real")
    host = torch.arange(1024.0).reshape(4, 256)
    x = host.to("cuda")
    for numbers, flags in (([2, 0, 1], [1, 1, 0, 1]), ([3, 3, 0], [0, 0, 1, 0]), ([0, 1, 2], [1, 1, 1, 1])):
        here = torch.tensor(numbers), torch.tensor(flags, dtype=torch.bool)
        wanted = chosen(host, *here)
        for name, choose in chosen(x, *(one.to("cuda") for one in here)).items():
            assert torch.equal(choose().cpu(), wanted[name]()), name
    with pytest.raises(IndexError):
        x[torch.tensor([4, 0, 0], device="cuda")]


def test_a_function_is_looked_at_though_it_mostly_does_something_else(
    machine: gpu.VirtualMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.turn_off()
    machine = gpu.turn_on("T4,values=real")
    x = torch.randn(4, 6, device="cuda")
    for _ in range(2):
        x[:2]
    for _ in range(8):
        x[x > 0]
    ran: list[str] = []
    handle = machine.engine.mode.handle
    monkeypatch.setattr(machine.engine.mode, "handle", lambda *call: ran.append(str(call[0])) or handle(*call))
    assert x[:2].shape == (2, 6)
    assert ran == []
