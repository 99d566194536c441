"""PyTorch's profiler over the virtual GPU: the program's operators, and the card's memory."""

from __future__ import annotations

import gzip
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.torch_version import TorchVersion

from gpumem_magic.virtual import gpu

KIB, MIB = 1 << 10, 1 << 20
WORKSPACE = 8519680
_BOTH = [ProfilerActivity.CPU, ProfilerActivity.CUDA]


@pytest.fixture(autouse=True, params=["A100-40GB", "A100-40GB,values=real"], ids=["stand-ins", "real"])
def machine(request: pytest.FixtureRequest) -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on(request.param)
    gpu.turn_off()


def rand(*shape: int, **options: Any) -> torch.Tensor:
    return torch.rand(*shape, device="cuda", **options)


def profiled(program: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    """The profiler that has followed a program with its memory, and what that gave."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a virtual GPU runs no kernels")
        with profile(activities=_BOTH, profile_memory=True, **options) as profiler:
            result = program()
    return profiler, result


def on_device(profiler: Any) -> dict[str, int]:
    """What each outermost event took of the device's memory, less what it gave back; by names."""
    found: Counter[str] = Counter()
    for event in profiler.events():
        if event.cpu_parent is None and event.device_memory_usage:
            found[event.name] += event.device_memory_usage
    return dict(found)


def test_it_shows_the_hosts_times_and_says_so() -> None:
    layer = nn.Linear(4, 4).cuda()
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    with pytest.warns(UserWarning, match="a virtual GPU runs no kernels: the profiler's times are the host's$"):
        profiler.start()
    with record_function("mine"):
        layer(rand(2, 4)).sum().backward()
    profiler.stop()
    assert "mine" in {event.key for event in profiler.key_averages()}


def test_asked_for_the_device_alone_it_records_the_host() -> None:
    with (
        pytest.warns(UserWarning, match="the profiler's times are the host's"),
        profile(activities=[ProfilerActivity.CUDA], profile_memory=True) as profiler,
    ):
        rand(2, 4) + 1
    assert "aten::add" in {event.key for event in profiler.key_averages()}


def test_it_writes_no_stacks_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "stacks.txt"
    with (
        pytest.warns(UserWarning, match="the profiler's times are the host's"),
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], with_stack=True) as profiler,
    ):
        rand(2, 4)
    with pytest.warns(UserWarning, match=r"the profiler records no stacks on a virtual GPU: .*stacks.txt is empty"):
        profiler.export_stacks(str(file), "self_cuda_time_total")
    assert file.read_text() == ""
    with (
        pytest.warns(UserWarning, match="the profiler's times are the host's"),
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as unasked,
    ):
        rand(2, 4)
    with pytest.raises(AssertionError, match="requires with_stack=True"):
        unasked.export_stacks(str(file))


def test_its_memory_timeline_says_what_to_use_instead(tmp_path: Path) -> None:
    with profile(record_shapes=True, profile_memory=True, with_stack=True) as profiler:
        rand(2, 4)
    with pytest.warns(
        UserWarning, match="memory timeline cannot show a virtual GPU, and was not written: use %%gpumem"
    ):
        profiler.export_memory_timeline(str(tmp_path / "timeline.html"), device="cuda:0")
    assert not list(tmp_path.iterdir())


# ---- memory


def test_each_operator_has_what_it_takes_of_the_device() -> None:
    def program() -> Any:
        a = torch.randn(512, 512, device="cuda")
        b = torch.ones(256, 512).to("cuda")
        c = b @ a
        return a, b, c, torch.zeros(100, device="cuda"), torch.zeros_like(b)

    profiler, kept = profiled(program)
    assert on_device(profiler) == {
        "aten::randn": MIB,
        "aten::to": 512 * KIB,
        "aten::matmul": 512 * KIB + WORKSPACE,
        "aten::zeros": 512,
        "aten::zeros_like": 512 * KIB,
    }
    table = profiler.key_averages().table(sort_by="self_cuda_memory_usage", row_limit=5)
    assert "CUDA Mem" in table
    assert table.splitlines()[3].split()[0] == "aten::mm"
    del kept


def test_a_training_step_adds_up_to_what_is_allocated() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    before = torch.cuda.memory_allocated()

    def step() -> None:
        with record_function("forward"):
            loss = model(rand(32, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    profiler, _ = profiled(step)
    found = on_device(profiler)
    assert sum(found.values()) == torch.cuda.memory_allocated() - before
    assert found["Optimizer.step#AdamW.step"] == sum(
        -(-one.nbytes // 512) * 512 for state in optimizer.state.values() for one in state.values() if one.is_cuda
    )
    assert found["forward"] > 32 * 256 * 4 * 2


def test_what_is_given_back_between_operators_is_none_of_theirs() -> None:
    old = rand(256, 256)

    def program() -> Any:
        nonlocal old
        new = torch.empty(512, 512, device="cuda")
        del new
        del old
        return torch.zeros(100, device="cuda")

    profiler, kept = profiled(program)
    assert on_device(profiler) == {"aten::empty": MIB, "[memory]": -MIB - 256 * KIB, "aten::zeros": 512}
    del kept


def test_what_comes_to_the_host_is_its_memory_and_how_operators_run_is_not() -> None:
    there = rand(512, 512)

    def program() -> Any:
        doubled = there * 2 + 1
        return doubled.relu(), doubled.cpu()

    profiler, kept = profiled(program)
    on_host = Counter[str]()
    for event in profiler.events():
        if event.cpu_parent is None and event.cpu_memory_usage:
            on_host[event.name] += event.cpu_memory_usage
    # (A number is a tensor of 8 bytes on the host for a moment.)
    assert +on_host == {"aten::to": MIB}
    del kept


def test_only_the_programs_own_operators_are_shown() -> None:
    def program() -> None:
        layer = nn.Linear(16, 4, device="cuda")
        layer(rand(8, 16)).softmax(1).sum().backward()

    profiler, _ = profiled(program)
    found = {event.name for event in profiler.events()}
    assert {"aten::linear", "aten::addmm", "aten::softmax", "aten::_softmax", "aten::sum", "AddmmBackward0"} <= found
    assert not [name for name in found if "gpumem" in name or name.startswith(("Python", "prims::"))]
    assert not found & {"aten::new_empty", "aten::empty_permuted", "aten::where"}


def test_a_mode_of_the_programs_own_is_shown_around_operators() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Doubling(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    x = rand(4, 4)

    def program() -> torch.Tensor:
        with Doubling():
            return x + 1

    profiler, kept = profiled(program)
    assert on_device(profiler) == {"aten::add": 512}
    if TorchVersion(torch.__version__) >= "2.13":
        # (2.9 has no events for what modes do.)
        assert "PythonDispatchMode" in {event.name for event in profiler.events()}
    del kept


# ---- its files, and its end


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_its_trace_has_the_devices_memory(tmp_path: Path, name: str) -> None:
    profiler, kept = profiled(lambda: [rand(64, 64) @ rand(64, 64) for _ in range(3)])
    profiler.export_chrome_trace(str(tmp_path / name))
    content = (tmp_path / name).read_bytes()
    events = json.loads(gzip.decompress(content) if name.endswith("gz") else content)["traceEvents"]
    assert not [event for event in events if str(event.get("name")).startswith(("gpumem", "PythonDispatch"))]
    found = [event["args"] for event in events if event.get("name") == "[memory]"]
    found = [one for one in found if one["Device Type"] == 1]
    assert sum(one["Bytes"] for one in found) == torch.cuda.memory_allocated()
    assert found[-1]["Total Allocated"] == torch.cuda.memory_allocated()
    assert found[-1]["Total Reserved"] == torch.cuda.memory_reserved()
    assert kept[0].data_ptr() in {one["Addr"] for one in found}
    del kept


def test_without_memory_it_has_none(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=_BOTH) as profiler:
            rand(8, 8) + 1
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "[memory]" not in (tmp_path / "trace.json").read_text()
    assert on_device(profiler) == {}
    assert "Mem" not in profiler.key_averages().table()


def test_a_schedule_follows_each_of_its_cycles() -> None:
    seen: list[list[int]] = []

    def taken(profiler: Any) -> None:
        seen.append([event.device_memory_usage for event in profiler.events() if event.name == "aten::rand"])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(
            activities=_BOTH,
            profile_memory=True,
            schedule=schedule(wait=1, warmup=1, active=1, repeat=2),
            on_trace_ready=taken,
        ) as profiler:
            for _ in range(6):
                rand(256, 256)
                profiler.step()
    assert seen == [[256 * KIB], [256 * KIB]]


def test_it_leaves_nothing_behind_also_after_an_error(machine: gpu.VirtualMachine) -> None:
    before = dict(vars(machine.engine))
    sinks = [list(device.allocator.sinks) for device in machine.devices]

    def failing() -> None:
        kept = rand(8, 8)
        assert "handle" in vars(machine.engine)
        raise ZeroDivisionError(kept.shape)

    with pytest.raises(ZeroDivisionError):
        profiled(failing)
    assert vars(machine.engine).keys() == before.keys()
    assert [list(device.allocator.sinks) for device in machine.devices] == sinks


def test_a_device_that_goes_while_it_runs_is_no_trouble() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=_BOTH, profile_memory=True) as profiler:
            rand(8, 8)
            gpu.turn_off()
            torch.rand(8, 8)
    assert "aten::rand" in {event.name for event in profiler.events()}
