"""Functions that come down to several operators, on a virtual GPU that computes: the second call takes a shorter way, and nothing
else about it is another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.engine.sequences import OperatorSequence

Made = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    gpu.turn_off()


def made(device: str) -> Made:
    numbers = torch.arange(64 * 96, dtype=torch.float32).view(64, 96).sin()
    host = {
        "x": numbers,
        "y": numbers.cos(),
        "weight": numbers[:8] * 0.1,
        "bias": numbers[0, :8].clone(),
        "turned": numbers.clone().t(),
        "rows": torch.tensor([3, 1, 1, 60]),
    }
    return {name: one.to(device) if name != "turned" else one.t().to(device).t() for name, one in host.items()}


CALLS: dict[str, Callable[[Made], Any]] = {
    "linear": lambda t: F.linear(t["x"], t["weight"]),
    "linear with a bias": lambda t: F.linear(t["x"].view(2, 32, 96), t["weight"], t["bias"]),
    "reshaped by a copy": lambda t: t["turned"].reshape(-1),
    "one hot": lambda t: F.one_hot(t["rows"], 70),
    "a row of rows": lambda t: t["x"].__setitem__(slice(0, 8), t["y"][2]),
    "rows by a list written": lambda t: t["x"].__setitem__(t["rows"][:1], t["y"][:1]),
    "turned into rows": lambda t: t["x"].__setitem__(slice(None), t["turned"].t()),
    "number minus": lambda t: 1.0 - t["x"],
    "layer norm": lambda t: F.layer_norm(t["x"], (96,), t["y"][0], t["y"][1]),
}


def run(call: Callable[[Made], Any], device: str) -> tuple[list[Any], list[int]]:
    """What a call gives three times (where it gives nothing, what it has written to), and what was taken on the device."""
    given = made(device)
    found: list[Any] = []
    figures: list[int] = []
    for _ in range(3):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        out = call(given)
        found.append((given["x"] if out is None else out).cpu().clone())
        versions = given["x"]._version
        if device == "cuda":
            stats = torch.cuda.memory_stats()
            del out
            names = (
                "allocated_bytes.all.current allocated_bytes.all.peak allocation.all.allocated requested_bytes.all.peak"
            )
            figures += [stats[name] for name in names.split()]
            figures += [versions, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]
    return found, figures


@pytest.mark.parametrize("name", CALLS)
def test_the_shorter_way_has_the_same_values_and_memory(name: str) -> None:
    wanted, _ = run(CALLS[name], "cpu")
    gpu.turn_on("T4")
    _, figures = run(CALLS[name], "cuda")
    gpu.turn_off()
    gpu.turn_on("T4,values=real")
    found, computed = run(CALLS[name], "cuda")
    assert computed == figures
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, found[0])
        assert torch.allclose(one, other, rtol=1e-6)
        assert one.stride() == other.stride()


def test_operators_of_a_function_run_one_by_one_from_the_second_call_on() -> None:
    machine = gpu.turn_on("T4,values=real")
    given = made("cuda")
    entered: list[Any] = []
    handle = machine.engine._handle
    for name in ("linear", "reshaped by a copy", "one hot"):
        CALLS[name](given)
        CALLS[name](given)
    assert sum(isinstance(way, OperatorSequence) for way in machine.engine.functions._found.values()) >= 3
    machine.engine._handle = lambda func, *args: entered.append(func) or handle(func, *args)
    computed = machine.engine.computed
    for name in ("linear", "reshaped by a copy", "one hot"):
        CALLS[name](given)
    assert not entered
    assert machine.engine.computed > computed + 3


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (1, 1.5),
        ((2, 3), True),
        ((slice(None), 4), 2),
        ((..., None, slice(0, 8)), -1.0),
        (slice(1, 9, 2), "row"),
        (0, "row"),
    ],
)
def test_what_is_written_to_one_piece_takes_nothing(index: Any, value: Any) -> None:
    machine = gpu.turn_on("T4,values=real")
    given, host = made("cuda"), made("cpu")
    entered: list[Any] = []
    handle = machine.engine._handle
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.memory_allocated()
    row, same = given["y"][5], host["y"][5]
    machine.engine._handle = lambda func, *args: entered.append(func) or handle(func, *args)
    version = given["x"]._version
    given["x"][index] = row if value == "row" else value
    host["x"][index] = same if value == "row" else value
    assert not entered
    assert given["x"]._version == version + 1
    machine.engine._handle = handle
    assert (torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.max_memory_allocated()) == before
    assert torch.equal(given["x"].cpu(), host["x"])


def test_a_piece_that_is_not_there_is_refused_in_pytorchs_words() -> None:
    gpu.turn_on("T4,values=real")
    x = made("cuda")["x"]
    with pytest.raises(IndexError, match="index 64 is out of bounds for dimension 0 with size 64"):
        x[64] = 1.0
    with pytest.raises(RuntimeError, match="expanded size of the tensor"):
        x[0] = x[0, :5]
    tracked = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad is being used in an in-place"):
        tracked[0] = 1.0


def test_out_of_memory_in_the_midst_of_operators_leaves_nothing() -> None:
    """The sum of a copy that fits, and one that does not."""
    gpu.turn_on("virtual:1GiB,values=real")
    x = torch.ones(64, 96, device="cuda").t()
    for _ in range(3):
        x.reshape(-1)
    before = torch.cuda.memory_allocated()
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - before
    filled = torch.empty(free - (2 << 20), dtype=torch.uint8, device="cuda")
    rest: list[Any] = []

    def fill() -> None:
        while True:
            rest.append(x.reshape(-1))

    with pytest.raises(torch.OutOfMemoryError):
        fill()
    held = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        x.reshape(-1)
    assert torch.cuda.memory_allocated() == held
    rest.clear()
    del filled
    assert torch.equal(x.reshape(-1).cpu(), torch.ones(64 * 96))


def test_two_arguments_that_are_one_tensor_are_told_apart() -> None:
    gpu.turn_on("T4,values=real")
    given, host = made("cuda"), made("cpu")
    for _ in range(3):
        one = F.linear(given["x"], given["x"]), F.linear(given["x"], given["y"])
        other = F.linear(host["x"], host["x"]), F.linear(host["x"], host["y"])
        assert all(map(torch.allclose, (x.cpu() for x in one), other))
