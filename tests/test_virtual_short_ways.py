"""The short way to an operator that was met before does what the long one does: the same memory, values and tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import steps
from hypothesis import given, settings
from hypothesis import strategies as st
from seen_operators import Seen

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.card import catalog
from gpumem_magic.virtual.engine import kernel_rules
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.functions import FunctionCalls
from gpumem_magic.virtual.engine.real import RealEngine
from gpumem_magic.virtual.engine.refusals import DeviceGone

Operator = Callable[[torch.Tensor, torch.Tensor], Any]

# Of two tensors of one shape and type, each with several dimensions.
OPERATORS: dict[str, Operator] = {
    "add": torch.add,
    "add with a factor": lambda x, y: torch.add(x, y, alpha=2),
    "to itself": lambda x, _: x + x,
    "reversed": lambda x, y: torch.sub(y, x),
    "number": lambda x, _: x * 3,
    "number first": lambda x, _: 2 - x,
    "compare": lambda x, y: x > y,
    "where": lambda x, y: torch.where(x > y, x, y),
    "relu": lambda x, _: x.relu(),
    "clamp": lambda x, _: x.clamp(0, 1),
    "half": lambda x, _: x.half(),
    "to": lambda x, _: x.to(torch.float64),
    "sum": lambda x, _: x.sum(),
    "sum along": lambda x, _: x.sum(-1, keepdim=True),
    "mean": lambda x, _: x.double().mean(0),
    "largest": lambda x, _: x.max(),
    "largest along": lambda x, _: x.max(0),
    "softmax": lambda x, _: x.double().softmax(-1),
    "cat": lambda x, y: torch.cat([x, y]),
    "cat the other way": lambda x, y: torch.cat([y, x], -1),
    "cat of one": lambda x, _: torch.cat([x]),
    "stack": lambda x, y: torch.stack((x, y)),
    "in place": lambda x, _: x.mul_(2),
    "in place of two": lambda x, y: x.add_(y),
    "copied": lambda x, y: x.copy_(y),
    "filled": lambda x, _: x.fill_(3),
    "into": lambda x, y: torch.add(x, y, out=torch.empty_like(x)),
    "view": lambda x, _: x.flatten()[1:],
    "rows": lambda x, _: x[1:, ...],
    "last row in place": lambda x, y: x[-1].copy_(y[0]),
    "every other": lambda x, _: x[::2].sum(),
    "shaped": lambda x, _: x.contiguous().view(-1).unsqueeze(0),
    "transposed": lambda x, _: x.transpose(0, -1) + 1,
    "part": lambda x, y: x[0] + y[:1],
    "part in place": lambda x, y: x[0].add_(y[0]),
    "broadcast": lambda x, y: x + y[..., :1],
    "product": lambda x, y: x.double().flatten(1) @ y.double().flatten(1).t(),
    "linear": lambda x, y: F.linear(x.double().flatten(1), y.double().flatten(1)),
    "reshaped": lambda x, _: x.transpose(0, -1).reshape(-1),
    "taken from a number": lambda x, _: 1 - x.double(),
    "rows of a row": lambda x, y: (x.__setitem__(slice(1), y[0]), x)[1],
    "one number written": lambda x, _: (x.__setitem__((..., 0), 2), x)[1],
    "cumulated": lambda x, _: x.cumsum(0),
    "sorted": lambda x, _: x.sort(),
    "times itself": lambda x, _: x * x,
    "reversed with itself": lambda x, _: torch.rsub(x, x),
    "picked by a list": lambda x, _: x[[0, 0]],
    "picked by two lists": lambda x, _: x[[0, 0], [0, 0]],
    "sent": lambda x, _: x.cpu().clone().to(x.device),
    "sent, its columns": lambda x, _: x.cpu().transpose(0, -1).clone().to(x.device),
    "of values": lambda x, _: torch.tensor([[1, 2]], device=x.device),
    "written by a list": lambda x, y: (x.__setitem__(torch.tensor([0], device=x.device), y[:1]), x)[1],
    "written by two lists": lambda x, y: (x.__setitem__(([0], [0]), y[0, :1]), x)[1],
    "written by a mask": lambda x, y: (x.__setitem__(x == x, y.flatten()), x)[1],
    "a part written by a list": lambda x, y: (x[:1].__setitem__(torch.tensor([0], device=x.device), y[:1]), x)[1],
    "picked": lambda x, _: x[torch.tensor([0, 0], device=x.device)],
    "masked": lambda x, y: x.masked_fill(x > y, 0),
    "each": lambda x, y: torch._foreach_add([x, y], 1.0 if x.is_floating_point() else 1),
    "each with each": lambda x, y: torch._foreach_sub([x, y], [y, x]),
    "each in place": lambda x, y: torch._foreach_mul_([x, y], 2),
    "largest three": lambda x, _: x.flatten().topk(1),
    "variance and mean": lambda x, _: torch.var_mean(x.double(), 0, correction=0),
    "least and most": lambda x, _: torch.aminmax(x, dim=-1),
    "parts": lambda x, _: x.split(1),
    "norm": lambda x, _: F.layer_norm(x.double(), x.shape[1:]),
    "norm in a group": lambda x, _: F.group_norm(torch.stack([x, x], -1).double(), 1),
    "standardised": lambda x, _: F.batch_norm(torch.stack([x, x], -1).double(), None, None, training=True),
    "pooled": lambda x, _: F.max_pool2d(x.double().flatten(1)[None], 1, return_indices=True),
    "middle": lambda x, _: x.double().median(0),
    "alike": lambda x, _: torch.zeros_like(x),
    "none of it": lambda x, _: x.contiguous(),
    "assigned": lambda x, _: (x.__setitem__(slice(None), 3), x)[1],
    "assigned in part": lambda x, _: (x.__setitem__(slice(1), 3), x)[1],
    "number of the host": lambda x, _: x * torch.tensor(3),
    "channels last": lambda x, _: x.clone(memory_format=torch.preserve_format),
}  # fmt: skip


@contextmanager
def the_long_way() -> Iterator[None]:
    """Inside, nothing that was met before shortens an operator's way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "again", lambda *_: None)
        patch.setattr(RealEngine, "_met_again", lambda *_: NotImplemented)
        patch.setattr(RealEngine, "sent", lambda *_: NotImplemented)
        patch.setattr(FunctionCalls, "looks", lambda *_: None)
        yield


def told(out: Any, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    """What a program may see of results, and of the arguments after them."""
    parts = list(out) if isinstance(out, (tuple, list)) else [out]
    return [
        (
            part.shape, part.stride(), part.storage_offset(), part.dtype, str(part.device), part.requires_grad, part.is_leaf,
            part.is_inference(), None if part.is_inference() else (part._version, part._is_view()), part is x,
            part.untyped_storage()._cdata == x.untyped_storage()._cdata, part.untyped_storage().nbytes(), part.tolist(),
        )
        for part in (*parts, x, y)
    ]  # fmt: skip


def run(
    values: str,
    names: list[str],
    make: Callable[[str], list[torch.Tensor]],
    device: str = "cuda",
    recorded: bool = True,
    told: Callable[[Any, torch.Tensor, torch.Tensor], object] = told,
) -> Any:
    """What is told of each operator's results, and the allocator's events, with the arguments made anew before each. Where no log
    runs, what the allocator says of itself after each."""
    machine = gpu.turn_on(f"T4,values={values}") if device == "cuda" else None
    try:
        x, y = make(device)
        first = x.clone()
        log = None if machine is None or not recorded else machine.devices[0].start_log()
        seen, states = [], []
        for name in names:
            seen.append(told(OPERATORS[name](x, y), x, y))
            if machine is not None and log is None:
                states.append((torch.cuda.memory_stats(), torch.cuda.memory_snapshot()))
            with torch.no_grad():
                x = first.clone()
        if machine is None or log is None:
            return seen, states
        del x, y, first
        machine.settle()
        return seen, [(event.action, event.size, event.address) for event in log.events]
    finally:
        if machine is not None:
            gpu.turn_off()


SHAPES = st.lists(st.integers(1, 5), min_size=2, max_size=4)
KINDS = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8])


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from(sorted(OPERATORS)), min_size=1, max_size=8),
    SHAPES,
    KINDS,
    st.sampled_from(["contiguous", "transposed", "expanded", "part"]),
    st.sampled_from(["plain", "no_grad", "inference"]),
    st.booleans(),
)
def test_the_short_way_ends_where_the_long_one_does(
    names: list[str], shape: list[int], dtype: torch.dtype, lies: str, mode: str, recorded: bool
) -> None:
    def make(device: str) -> list[torch.Tensor]:
        made = []
        for start in (1, 3):
            whole = torch.arange(start, start + 2 * torch.Size(shape).numel(), device=device).to(dtype)
            tensor = whole[1::2].reshape(shape) if lies != "part" else whole[1::2].view(shape)
            if lies == "transposed":
                tensor = tensor.transpose(0, 1)
            elif lies == "expanded":
                # (Nothing is written where several elements are one.)
                tensor = tensor[:1].expand(shape).contiguous().clone()
            made.append(tensor)
        return made

    # Each twice: the second time it was met before.
    names = [*names, *names]
    state = {"plain": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    with state():
        host = run("", names, make, "cpu")[0]
        with the_long_way():
            long = run("real", names, make, recorded=recorded)
        short = run("real", names, make, recorded=recorded)
        standing_in = run("stand-in", names, make, recorded=recorded)
    assert short == long
    assert short[1] == standing_in[1]
    for ours, its in zip(short[0], host, strict=True):
        for mine, other in zip(ours, its, strict=True):
            assert torch.allclose(torch.tensor(mine[-1]).double(), torch.tensor(other[-1]).double(), rtol=1e-3)
            assert (mine[0], mine[3], *mine[5:10]) == (other[0], other[3], *other[5:10])


TRACKED: dict[str, Operator] = {
    name: OPERATORS[name]
    for name in ("add", "to itself", "where", "relu", "half", "mean", "largest along", "softmax", "cat", "rows", "product")
}  # fmt: skip
TRACKED |= {
    **{name: OPERATORS[name] for name in ("norm", "norm in a group", "standardised", "middle")},
    "pooled": lambda x, _: F.max_pool2d(x.double().flatten(1)[None], 1),
    "written to": lambda x, y: (x * 2).mul_(y).relu_(),
    "assigned": lambda x, _: (made := x * 2, made.__setitem__(slice(1), 3))[0],
    "dropped": lambda x, _: F.dropout(x, 0.5, training=False),
    "under autocast": lambda x, y: torch.autocast("cuda", dtype=torch.bfloat16, enabled=x.is_cuda).__call__(torch.mm)(
        x, y.t()
    ),
}


@pytest.mark.parametrize("name", TRACKED)
@pytest.mark.parametrize("recorded", [True, False])
def test_the_short_way_holds_where_autograd_follows(name: str, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(x: torch.Tensor, y: torch.Tensor) -> Any:
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        out = TRACKED[name](x, y)
        out = out[0] if isinstance(out, tuple) else out
        out.double().square().sum().backward()
        return [one for one in (x.grad, y.grad) if one is not None]

    def make(device: str) -> list[torch.Tensor]:
        return [torch.linspace(start, 2, 64, device=device).view(8, 8) for start in (-1, 1)]

    monkeypatch.setitem(OPERATORS, name, gradients)
    host = run("", [name] * 3, make, "cpu")[0]
    with the_long_way():
        long = run("real", [name] * 3, make, recorded=recorded)
    short = run("real", [name] * 3, make, recorded=recorded)
    assert short == long
    assert short[1] == run("stand-in", [name] * 3, make, recorded=recorded)[1]
    for ours, its in zip(short[0], host, strict=True):
        for mine, other in zip(ours, its, strict=True):
            assert torch.allclose(torch.tensor(mine[-1]), torch.tensor(other[-1]), rtol=0.05, atol=0.05)


@pytest.fixture
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("T4,values=real")
    gpu.turn_off()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The operators that a function went to at once."""
    taken: list[Any] = []
    found = FunctionCalls.found

    def spy(self: FunctionCalls, *call: Any) -> Any:
        way = found(self, *call)
        if isinstance(way, tuple):
            taken.append(way[0])
        return way

    monkeypatch.setattr(FunctionCalls, "found", spy)
    return taken


LARGE: dict[str, Operator] = {
    name: OPERATORS[name]
    for name in ("add", "number", "sum", "sum along", "largest", "softmax", "cat", "half", "in place", "transposed", "cumulated")
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("values", ["stand-in", "real"])
@pytest.mark.parametrize("recorded", [True, False])
def test_what_a_kernel_takes_beside_its_result_is_taken_again(name: str, values: str, recorded: bool) -> None:
    """A sum of so many is shared by blocks, which take a buffer and semaphores (`reductions`)."""

    def make(device: str) -> list[torch.Tensor]:
        return [torch.ones(1024, 512, device=device) for _ in range(2)]

    def allocated(values: str) -> Any:
        # (What so many numbers are is not read.)
        return run(values, [name] * 3, make, recorded=recorded, told=lambda *_: None)[1]

    with the_long_way():
        long = allocated("stand-in")
    assert allocated(values) == long
    assert len(long) > 3 * 2 if recorded else len(long) == 3


def test_another_card_splits_a_sum_in_another_way(machine: gpu.VirtualMachine) -> None:
    """A T4 has 40 multiprocessors with 1,024 threads each, an A100 108 with 2,048: so many more blocks share the sum of as many
    numbers, with 4 bytes each in the buffer (`setReduceConfig` in Reduce.cuh)."""
    x = torch.ones(1 << 22, device="cuda")

    def buffer() -> int:
        log = machine.devices[0].start_log()
        x.sum()
        return max(event.size for event in log.events if event.action == "alloc")

    for _ in range(3):
        x.sum()
    small = buffer()
    spec = catalog.parse("A100-40GB,values=real")
    assert isinstance(spec, catalog.DeviceSpec)
    machine.become(spec)
    large = buffer()
    # Blocks of 512 threads: 40 * 2 and 108 * 4 of them.
    assert (small, large) == (4 * 80, 4 * 432)


def test_a_type_that_the_hosts_kernel_lacks_is_computed_in_a_wider_one(machine: gpu.VirtualMachine) -> None:
    """PyTorch has no `histc` of integers on the host, nor the absolute value of flags."""
    flags, numbers = torch.tensor([True, False], device="cuda"), torch.tensor([0, 1, 1, 3], device="cuda")
    for _ in range(3):
        assert flags.abs().tolist() == [True, False]
        assert numbers.histc(4, 0, 3).tolist() == [1, 2, 0, 1]


def test_a_tensor_of_inference_mode_is_not_written_to_outside_of_it(machine: gpu.VirtualMachine) -> None:
    with torch.inference_mode():
        x = torch.ones(4, device="cuda")
        for _ in range(3):
            x.mul_(2.0)
    for _ in range(2):
        torch.ones(4, device="cuda").mul_(2.0)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        x.mul_(2.0)
    # (As on the host: PyTorch says so once it has written.)
    assert x.tolist() == [16.0] * 4


def test_a_tensor_that_gets_another_look_is_another_call(machine: gpu.VirtualMachine) -> None:
    """By each of PyTorch's ways to change a tensor in place, without and with another storage."""
    ways: list[Callable[[torch.Tensor], Any]] = [
        lambda x: x.t_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.resize_(3, 2),
        lambda x: x.resize_(4, 6),
        lambda x: x.set_(torch.ones(2, 2, device=x.device)),
        lambda x: setattr(x, "data", torch.full((5,), 3.0, dtype=torch.float64, device=x.device)),
        lambda x: torch.add(torch.ones(2, device=x.device), 1, out=x.resize_(0)),
        lambda x: x.as_strided_((2, 2), (2, 1), 1),
    ]

    def looked_at(way: Callable[[torch.Tensor], Any], device: str) -> list[Any]:
        found = []
        x = torch.arange(6.0, device=device).reshape(2, 3)
        for _ in range(3):
            x * 2, x.sum(), x.mul_(1.0)
        if way is not ways[3]:
            way(x)
        else:
            # (What it grows by has no values.)
            way(x).fill_(2.0)
        for _ in range(2):
            found += [(one.shape, one.stride(), one.dtype, one.tolist()) for one in (x * 2, x.sum(), x.mul_(2.0), x)]
        return found

    for way in ways:
        assert looked_at(way, "cuda") == looked_at(way, "cpu")


def test_a_program_of_threads_computes_as_on_the_host(machine: gpu.VirtualMachine) -> None:
    def work(start: float) -> float:
        x = torch.full((64,), start, device="cuda")
        for _ in range(200):
            x = (x * 0.5 + start).relu()
        return float(x.sum())

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(work, [1.0, 2.0, 3.0, 4.0] * 3))
    # x = x / 2 + start ends at 2 * start.
    assert found == pytest.approx([128.0, 256.0, 384.0, 512.0] * 3)


def test_a_function_goes_to_its_operator_at_once_from_the_second_time_on(
    machine: gpu.VirtualMachine, at_once: list[Any]
) -> None:
    x, y = torch.ones(4, device="cuda"), torch.full((4,), 2.0, device="cuda")
    assert [torch.sub(x, y).tolist(), torch.sub(y, x).tolist(), torch.sub(x, x).tolist()] == [
        [-1.0] * 4,
        [1.0] * 4,
        [0.0] * 4,
    ]
    # (Where both are one tensor, it is known by now which is which.)
    assert at_once.count(torch.ops.aten.sub.Tensor) == 2
    assert [torch.sub(y, x).tolist(), torch.sub(x, y, alpha=2).tolist()] == [[1.0] * 4, [-3.0] * 4]
    assert at_once.count(torch.ops.aten.sub.Tensor) == 3


def test_a_tensor_with_itself_is_a_call_of_its_own(machine: gpu.VirtualMachine, at_once: list[Any]) -> None:
    """Which of the two is which is known of others alone."""
    x, y = torch.full((4,), 3.0, device="cuda"), torch.full((4,), 2.0, device="cuda")
    assert [torch.rsub(x, x).tolist() for _ in range(6)] == [[0.0] * 4] * 6
    assert at_once.count(torch.ops.aten.rsub.Tensor) == 5
    assert [torch.rsub(x, y).tolist(), torch.rsub(x, y).tolist()] == [[-1.0] * 4] * 2
    assert at_once.count(torch.ops.aten.rsub.Tensor) == 6


def test_rows_are_written_at_once(machine: gpu.VirtualMachine, at_once: list[Any]) -> None:
    x, rows = torch.zeros(4, 2, device="cuda"), torch.tensor([1, 3], device="cuda")
    for turn in range(3):
        before = x._version
        x[rows] = torch.full((2, 2), turn + 1.0, device="cuda")
        assert (x._version, x.tolist()) == (before + 1, [[0.0] * 2, [turn + 1.0] * 2] * 2)
        assert at_once.count(torch.ops.aten.index_put_.default) == turn
    with pytest.raises(IndexError):
        x[rows + 3] = torch.ones(2, 2, device="cuda")
    with pytest.raises(RuntimeError, match="shape mismatch"):
        x[rows] = torch.ones(3, 2, device="cuda")
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        # (The places are sorted, in memory of their own.)
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        x[rows] = x[:2].clone()
        assert torch.cuda.max_memory_allocated() > allocated + 1024
    finally:
        torch.use_deterministic_algorithms(deterministic)
    source = torch.ones(2, 2, device="cuda", requires_grad=True)
    x[rows] = source
    x.sum().backward()
    assert source.grad is not None
    assert source.grad.tolist() == [[1.0] * 2] * 2


def test_what_is_sent_to_the_device_is_a_copy(machine: gpu.VirtualMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bool] = []
    send = RealEngine.sent

    def spy(self: RealEngine, *call: Any) -> Any:
        made = send(self, *call)
        sent.append(made is not NotImplemented)
        return made

    monkeypatch.setattr(RealEngine, "sent", spy)
    host = torch.arange(4.0)
    there = host.to("cuda")
    host.zero_()
    assert (there.tolist(), there._version, there.is_leaf) == ([0.0, 1.0, 2.0, 3.0], 0, True)
    there.add_(1)
    assert host.tolist() == [0.0] * 4
    assert sent == [True]
    # Autograd, modes, logs and tensors that lie otherwise take the ordinary way.
    tracked = host.clone().requires_grad_()
    tracked.to("cuda").sum().backward()
    assert tracked.grad is not None
    with Seen() as mode:
        host.to("cuda")
    assert torch.ops.aten._to_copy.default in mode.seen
    host.view(2, 2).t().to("cuda")
    with torch.inference_mode():
        assert host.to("cuda").is_inference()
    log = machine.devices[0].start_log()
    host.to("cuda")
    assert "alloc" in [event.action for event in log.stop().events]
    assert sent == [True, False, False, False, True, False]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1).expand(1 << 33).to("cuda")


def test_what_is_made_like_another_tensor_goes_at_once_too(machine: gpu.VirtualMachine, at_once: list[Any]) -> None:
    """C++ has `detach` behind these, of what they made."""
    x = torch.ones(4, device="cuda")
    likes: list[Callable[[torch.Tensor], torch.Tensor]] = [torch.zeros_like, torch.ones_like]
    for like in likes:
        at_once.clear()
        assert [like(x).sum().item() for _ in range(3)] == [float(like is torch.ones_like) * 4] * 3
        assert len([one for one in at_once if one.name() == f"aten::{like.__name__}"]) == 2
        made = like(x)
        assert made.untyped_storage()._cdata != x.untyped_storage()._cdata
        assert not made._is_view()
        made.add_(1.0)
        assert like(x).tolist() == [float(like is torch.ones_like)] * 4


def test_functions_of_several_tensors_go_at_once_too(machine: gpu.VirtualMachine, at_once: list[Any]) -> None:
    x = torch.tensor([[1.0, 5.0], [7.0, 3.0]], device="cuda")
    for turn in range(3):
        largest = x.max(1)
        assert (largest.values.tolist(), largest.indices.tolist()) == ([5.0, 7.0], [1, 0])
        doubled = torch._foreach_mul([x, x[0]], 2.0)
        assert [one.tolist() for one in doubled] == [[[2.0, 10.0], [14.0, 6.0]], [2.0, 10.0]]
        assert at_once.count(torch.ops.aten.max.dim) == at_once.count(torch.ops.aten._foreach_mul.Scalar) == turn
    assert type(largest).__name__ == "max"
    largest.values.add_(1.0)
    assert x.max(1).values.tolist() == [5.0, 7.0]


def test_views_go_at_once_and_are_views_to_autograd(machine: gpu.VirtualMachine, at_once: list[Any]) -> None:
    weight = torch.full((2,), 3.0, device="cuda", requires_grad=True)
    for turn in range(3):
        x = torch.arange(6.0, device="cuda").view(3, 2)
        part = x[1:, :]
        assert at_once.count(torch.ops.aten.slice.Tensor) == turn
        assert part._is_view()
        assert part._base is x._base
        assert part.untyped_storage()._cdata == x.untyped_storage()._cdata
        before = x._version
        part[0] = weight * 2
        assert (x._version, x.requires_grad) == (before + 1, True)
        assert x.tolist() == [[0.0, 1.0], [6.0, 6.0], [4.0, 5.0]]
        x.sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0 * (turn + 1)] * 2


def test_a_number_is_read_at_once_unless_somebody_looks_on(machine: gpu.VirtualMachine) -> None:
    x = torch.tensor([3.0], device="cuda")
    flag, tracked = x > 2, x.clone().requires_grad_()
    for _ in range(3):
        assert (tracked.item(), float(x), int(x), bool(flag), bool(flag.logical_not())) == (3.0, 3.0, 3, True, False)
    torch.set_warn_always(True)
    try:
        with pytest.warns(UserWarning, match="Converting a tensor with requires_grad=True to a scalar"):
            float(tracked)
    finally:
        torch.set_warn_always(False)
    assert machine.engine.functions.reading
    view = torch.arange(6.0, device="cuda").view(2, 3).t()[1, 1]
    assert view.item() == 4.0
    with pytest.raises(RuntimeError, match="with 2 elements cannot be converted to Scalar"):
        torch.ones(2, device="cuda").item()
    with Seen() as mode:
        assert x.item() == 3.0
    assert torch.ops.aten._local_scalar_dense.default in mode.seen
    assert complex(torch.tensor(1 + 2j, device="cuda").conj()) == 1 - 2j


def test_a_copy_to_the_host_goes_at_once_and_shares_nothing(machine: gpu.VirtualMachine, at_once: list[Any]) -> None:
    x = torch.arange(6.0, device="cuda").reshape(2, 3)
    host = torch.device("cpu")
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda one: one.cpu(),
        lambda one: one.to("cpu"),
        lambda one: one.to(host, copy=True),
        lambda one: one.to(torch.float64).to("cpu", torch.float64),
    ]
    for way in ways:
        at_once.clear()
        copies = [way(x) for _ in range(3)]
        assert at_once.count(torch.ops.aten._to_copy.default) >= 2
        for copy in copies:
            assert (type(copy), copy.device, copy.stride(), copy.tolist()) == (torch.Tensor, host, (3, 1), x.tolist())
            copy.add_(1.0)
        assert x.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    x[0, 0] = 7.0
    assert x[:1].cpu().tolist() == [[7.0, 1.0, 2.0]]
    tracked = torch.ones(2, device="cuda", requires_grad=True)
    for _ in range(3):
        assert tracked.detach().cpu().requires_grad is False
        assert tracked.cpu().grad_fn is not None
    with torch.inference_mode():
        assert [x.cpu().is_inference() for _ in range(2)] == [True, True]
    assert not x.cpu().is_inference()


def test_other_numbers_and_types_are_other_calls(machine: gpu.VirtualMachine) -> None:
    x = torch.ones(4, 2, dtype=torch.int64, device="cuda")
    for _ in range(2):
        assert [(x * factor).dtype for factor in (2, 2.0, True)] == [torch.int64, torch.float32, torch.int64]
        assert [x.sum(dim).shape for dim in (0, 1, -1)] == [(2,), (4,), (4,)]


def test_what_autograd_follows_takes_the_long_way(machine: gpu.VirtualMachine, at_once: list[Any]) -> None:
    x = torch.ones(4, device="cuda", requires_grad=True)
    for _ in range(2):
        with torch.no_grad():
            x * 2
    at_once.clear()
    assert [(x * 2).requires_grad for _ in range(2)] == [True, True]
    assert not at_once
    with torch.no_grad():
        assert not (x * 2).requires_grad
    assert at_once


def test_writing_counts_versions_and_asks_views(machine: gpu.VirtualMachine, at_once: list[Any]) -> None:
    x = torch.ones(4, device="cuda")
    for version in (1, 2, 3):
        assert x.mul_(2.0)._version == version
    assert at_once
    leaf = torch.ones(4, device="cuda", requires_grad=True)
    for _ in range(2):
        torch.ones(2, device="cuda").mul_(2.0)
        with torch.no_grad():
            view = leaf[:2]
        with pytest.raises(RuntimeError, match="is being modified inplace with grad mode enabled"):
            view.mul_(2.0)
    weight = torch.ones(4, device="cuda", requires_grad=True)
    loss = (weight * weight).sum()
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_modes_transforms_and_traces_see_every_operator(machine: gpu.VirtualMachine) -> None:
    x, y = torch.ones(4, 4, device="cuda"), torch.ones(4, 4, device="cuda")
    for _ in range(2):
        x @ y, x.sum()
    with torch.autocast("cuda", dtype=torch.float16):
        assert (x @ y).dtype == torch.float16
    with Seen() as mode:
        x.sum()
    assert mode.seen == [torch.ops.aten.sum.default]
    assert torch.func.vmap(lambda row: row.sum())(x).tolist() == [4.0] * 4
    assert torch.func.jvp(lambda a: a.sum(), (x,), (y,))[1].item() == 16.0
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, y)
        assert torch.autograd.forward_ad.unpack_dual(dual.sum()).tangent.item() == 16.0
    traced = torch.jit.trace(lambda a: a.sum().relu(), (x,))
    assert "aten::sum" in str(traced.graph)


def test_a_users_rule_is_obeyed_although_the_operator_was_met(machine: gpu.VirtualMachine) -> None:
    x = torch.ones(256, device="cuda")
    for _ in range(3):
        x.erfinv()
    asked = []

    def rule(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(tensor.shape)
        return tensor.new_empty(tensor.shape)

    kernel_rules.register_kernel("aten::erfinv", rule)
    try:
        x.erfinv()
    finally:
        del kernel_rules.rules_of_users["aten::erfinv"]
    assert asked == [(256,)]


def test_a_device_that_is_off_says_so(machine: gpu.VirtualMachine) -> None:
    x = torch.ones(4, device="cuda")
    for _ in range(3):
        x * 2
    gpu.turn_off()
    with pytest.raises(DeviceGone):
        x * 2
    gpu.turn_on("T4,values=real")


def test_a_function_of_several_operators_keeps_none_of_their_results_when_it_is_met_first() -> None:
    gpu.turn_on("A100-40GB")
    try:
        weights = torch.ones(4, 32000, device="cuda")
        first, second = (steps(lambda: weights.multinomial(1)) for _ in range(2))
        assert first == second
        # The comparison of all weights with infinity, a byte each, was given back before as many numbers are drawn.
        drawn = first.index(("alloc", 4 * 32000 * 4))
        assert first[:drawn].count(("free_requested", 1)) >= 2
    finally:
        gpu.turn_off()
