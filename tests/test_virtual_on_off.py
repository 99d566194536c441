"""Turning the virtual GPU on and off: every replaced name comes back, whatever happens, and nothing of the host's moves."""

from __future__ import annotations

import builtins
import importlib
import os
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.accelerator.memory
import torch.cuda.random
import torch.cuda.streams
import torch.distributions
import torch.utils._device
import torch.utils._foreach_utils
from asked_for import made
from torch._subclasses import fake_tensor

from gpumem_magic.patching import Patches
from gpumem_magic.snapshot.rules import AllocatorSettings
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.operators import gradients_that_meet

OPERATORS = ("mm", "linear", "softmax.int", "scaled_dot_product_attention", "binary_cross_entropy")


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    gpu.turn_off()
    yield
    gpu.turn_off()


def owners() -> list[Any]:
    pynvml = importlib.import_module("pynvml")
    optimizer = importlib.import_module("torch.optim.optimizer")
    scripts = importlib.import_module("torch.jit._builtins"), importlib.import_module("torch.jit._recursive")
    return [
        torch, torch._C, torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.accelerator,
        torch.accelerator.memory, torch.autograd, torch.autograd.graph, torch.autograd.profiler.profile,
        torch.profiler.profile, torch.fft,
        torch.serialization, torch.Tensor, torch._C.StorageBase, torch.UntypedStorage, torch.TypedStorage, torch.nn.Module,
        torch.nn.Parameter, torch.nn.functional, torch.distributions.Distribution, torch.backends.cudnn,
        torch.utils._device.DeviceContext, torch.utils._foreach_utils, optimizer, *scripts, fake_tensor, fake_tensor.FakeTensor,
        fake_tensor.FakeTensorMode, fake_tensor.log, builtins, pynvml,
    ]  # fmt: skip


def state() -> dict[str, Any]:
    """Every attribute of everything that could be patched (not PyTorch's own counts), the kernels, the environment, and the
    generators."""
    found: dict[str, Any] = {}
    for owner in owners():
        for name, value in vars(owner).items():
            if name not in ("__warningregistry__", "cache_hits", "cache_misses", "cache_bypasses"):
                found[f"{getattr(owner, '__name__', owner)}.{name}"] = value
    found["filters"] = list(fake_tensor.log.filters)
    found["environ"] = dict(os.environ)
    found["path"] = list(sys.path)
    found["kernels"] = {name: torch._C._dispatch_dump(f"aten::{name}") for name in OPERATORS}
    found["torch rng"] = torch.get_rng_state().tolist()
    found["python rng"] = random.getstate()
    found["numpy rng"] = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]
    found["initialised"] = torch.cuda.is_initialized(), torch.cuda.is_available()
    found["default device"] = torch.get_default_device()
    found["what torch.device is"] = type(torch.device)
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is not as it was. A submodule that was imported meanwhile is no difference."""
    by_value = {"filters", "environ", "path", "kernels", "torch rng", "python rng", "numpy rng", "initialised"}
    by_value |= {"default device"}
    found = [name for name in by_value if before[name] != after[name]]
    found += [name for name in set(before) - by_value if name not in after or after[name] is not before[name]]
    new = {name for name in set(after) - set(before) if not isinstance(after[name], types.ModuleType)}
    return sorted(found) + sorted(new)


def work() -> None:
    """A bit of everything that the replaced names take part in."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, device="cuda"), torch.nn.BatchNorm1d(8)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(4, 8, device="cuda")).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.nn.functional.scaled_dot_product_attention(*[torch.randn(1, 1, 8, 8, device="cuda") for _ in range(3)])
    torch.cuda.manual_seed_all(3)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.rand(3, device="cuda").cpu()


def test_the_names_are_replaced_while_it_is_on() -> None:
    before = state()
    machine = gpu.turn_on("T4")
    assert len(machine.replaced()) > 100
    changed = differences(before, state())
    for name in (
        "torch.zeros",
        "torch.save",
        "torch.cuda.is_available",
        "Tensor.to",
        "Module._apply",
        "kernels",
        "environ",
    ):
        assert name in changed


def test_everything_is_as_before_after_off() -> None:
    before = state()
    gpu.turn_on("2xT4")
    work()
    gpu.turn_off()
    assert differences(before, state()) == []
    # (A build for a card makes one, as before.)
    with nullcontext() if torch.version.cuda else pytest.raises(RuntimeError, match="accelerator"):
        torch.device(0)


def test_everything_is_as_before_after_an_error_of_the_program() -> None:
    before = state()
    gpu.turn_on("virtual:1GiB")
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1 << 30, device="cuda")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.nn.Linear(3, 4, device="cuda")(torch.zeros(2, 5, device="cuda"))
    gpu.turn_off()
    assert differences(before, state()) == []


def test_everything_is_as_before_after_an_interrupt_in_the_middle() -> None:
    before = state()
    gpu.turn_on("T4")
    weight = torch.ones(4, device="cuda", requires_grad=True)

    def interrupt(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        (weight * 2).sum().backward()
    with pytest.raises(KeyboardInterrupt):
        torch.nn.Module._apply(torch.nn.Linear(2, 2, device="cuda"), interrupt)
    (torch.ones(2, device="cuda") + 1).cpu()
    gpu.turn_off()
    assert differences(before, state()) == []


@pytest.mark.parametrize("setting", [torch.no_grad, torch.inference_mode, torch.autograd.detect_anomaly])
def test_it_is_turned_on_whatever_the_program_has_set(
    setting: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients_that_meet._Learning, "found", None)
    with warnings.catch_warnings():
        # (PyTorch says that looking for anomalies is slow.)
        warnings.filterwarnings("ignore", "Anomaly Detection")
        with setting():
            gpu.turn_on("T4")
            assert torch.is_anomaly_enabled() == (setting is torch.autograd.detect_anomaly)
    x = torch.zeros(1024, device="cuda", requires_grad=True)
    # The second gradient is added to the first.
    out = x.neg() + x.neg()
    assert made(lambda: torch.autograd.grad(out, x, torch.zeros_like(out))) == [4096, 4096, 4096]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", range(0, 200, 23))
def test_a_failure_while_it_is_turned_on_undoes_what_was_done(
    monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException
) -> None:
    before = state()
    original: Callable[..., Any] = Patches.set
    done = [0]

    def fail_at_step(self: Any, owner: Any, name: str, value: Any, **options: Any) -> Any:
        done[0] += 1
        if done[0] > step:
            raise error
        return original(self, owner, name, value, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Patches, "set", fail_at_step)
        # Where it is a library's rules that fail, there is a warning, which is an error in these tests.
        with pytest.raises((type(error), UserWarning)):
            gpu.turn_on("T4")
    assert gpu.current() is None
    assert differences(before, state()) == []


def test_the_hosts_random_numbers_do_not_move() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    gpu.turn_on("T4")
    torch.randn(10, device="cuda")
    torch.nn.functional.dropout(torch.ones(10, device="cuda"))
    torch.randperm(10, device="cuda")
    torch.empty(10, device="cuda").normal_().uniform_().bernoulli_(0.5).exponential_()
    torch.multinomial(torch.ones(4, device="cuda"), 2)
    torch.cuda.manual_seed(7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(9)
    assert torch.cuda.initial_seed() == 9


def test_a_host_program_draws_the_same_numbers_as_without_the_device() -> None:
    torch.manual_seed(5)
    expected = torch.nn.Linear(4, 4).weight.detach(), torch.randperm(10)
    gpu.turn_on("T4")
    torch.manual_seed(5)
    linear = torch.nn.Linear(4, 4)
    assert torch.equal(linear.weight, expected[0])
    assert torch.equal(torch.randperm(10), expected[1])


def test_a_leftover_says_in_one_line_why_it_is_of_no_use() -> None:
    gpu.turn_on("T4")
    left = torch.ones(3, device="cuda")
    layer = torch.nn.Linear(3, 3).cuda()
    scalar = torch.ones((), device="cuda")
    assert gpu.turn_off() == 4
    uses: list[Callable[[], Any]] = [
        lambda: left + 1, left.cpu, scalar.item, left.sum, lambda: left[0], lambda: layer(torch.ones(1, 3)), left.clone,
        lambda: torch.ones(3).copy_(left), lambda: left.add_(1), lambda: torch.cat([torch.ones(3), left]), lambda: layer.cpu(),
        lambda: left.to("cpu"),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(RuntimeError, match=r"virtual GPU \(T4\), which has been turned off") as caught:
            use()
        assert "\n" not in str(caught.value)
    assert "cuda:0" in repr(left)


def test_a_leftover_stays_out_of_reach_of_a_second_device() -> None:
    gpu.turn_on("T4")
    left = torch.ones(3, device="cuda")
    gpu.turn_on("L4")
    with pytest.raises(RuntimeError, match="turned off"):
        left + torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="turned off"):
        torch.ones(3, device="cuda") + left


def test_off_counts_what_was_left_and_twice_is_harmless() -> None:
    assert gpu.turn_off() == 0
    gpu.turn_on("T4")
    kept = torch.ones(3, device="cuda")
    view = kept[1:]
    assert gpu.turn_off() == 1
    assert gpu.turn_off() == 0
    del kept, view


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_split_size_mb:5", "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:5: max_split_size_mb must be at least 20, not 5"),
        ("what", "expected name:value"),
        ("roundup_power2_divisions:3", "must be a power of two"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_line_and_nothing_is_turned_on(
    monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    before = state()
    with monkeypatch.context() as patch:
        patch.setenv("PYTORCH_CUDA_ALLOC_CONF", text)
        with pytest.raises(gpu.DeviceError) as caught:
            gpu.turn_on("T4")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert gpu.current() is None
    assert differences(before, state()) == []


def test_bad_settings_leave_the_device_that_is_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = gpu.turn_on("T4")
    kept = torch.ones(3, device="cuda")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "nonsense")
    with pytest.raises(gpu.DeviceError, match="PYTORCH_ALLOC_CONF=nonsense"):
        gpu.turn_on("L4")
    assert gpu.current() is machine
    assert (kept + 1).is_cuda


def test_settings_are_those_of_the_moment_when_it_is_turned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,per_process_memory_fraction:0.5")
    gpu.turn_on("T4")
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    assert settings["expandable_segments"] is True
    assert settings["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True,per_process_memory_fraction:0.5"
    assert torch.cuda.get_per_process_memory_fraction() == 0.5
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    gpu.turn_on("T4")
    assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"] is False


def test_a_program_may_set_them_until_it_first_asks_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `gpumem run` meets them: the device is on before the script's first line (``CUDAAllocatorConfig::instance``)."""
    gpu.turn_on("T4")
    torch.cuda.get_device_name()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    kept = torch.ones(3, device="cuda")
    assert torch.cuda.memory_snapshot()[0]["is_expandable"]
    assert torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    # Too late.
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    other = torch.empty(2**25, device="cuda")
    assert all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    del kept, other


def test_settings_that_pytorch_refuses_are_an_error_where_memory_is_first_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu.turn_on("T4")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:5")
    with pytest.raises(RuntimeError, match="max_split_size_mb must be at least 20"):
        torch.ones(3, device="cuda")


@pytest.mark.filterwarnings("ignore:torch.cuda._set_allocator_settings is deprecated")
def test_settings_of_a_running_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the text doesn't name is reset for three options, and kept for the others (``parseArgs``)."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,max_non_split_rounding_mb:32")
    gpu.turn_on("T4")
    kept = [torch.ones(3, device="cuda")]
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    kept.append(torch.empty(2**25, device="cuda"))
    assert [segment["is_expandable"] for segment in torch.cuda.memory_snapshot()] == [False, True]
    settings = gpu.current().devices[0].allocator.settings  # type: ignore[union-attr]
    assert settings == AllocatorSettings(expandable_segments=True, max_non_split_rounding=32 * 2**20)
    with pytest.raises(RuntimeError, match="unknown option 'what'"):
        torch.cuda.memory._set_allocator_settings("what:1")
    del kept


def test_a_setting_that_is_not_emulated_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gpu.turn_on("T4")
    assert ["not emulated" in str(warning.message) for warning in caught] == [True]


def test_it_is_not_turned_on_or_off_inside_a_mode() -> None:
    with fake_tensor.FakeTensorMode(), pytest.raises(gpu.DeviceError, match="can't be turned on inside"):
        gpu.turn_on("T4")
    gpu.turn_on("T4")
    with fake_tensor.FakeTensorMode(), pytest.raises(gpu.DeviceError, match="can't be turned off inside"):
        gpu.turn_off()
    assert torch.cuda.is_available()


@pytest.mark.parametrize("name", ["", "P1000", "0xT4", "virtual:", "T4,what=1", "T4,context=-1MiB", "cuda:0"])
def test_a_device_that_there_is_not_is_one_line(name: str) -> None:
    with pytest.raises(gpu.DeviceError) as caught:
        gpu.turn_on(name)
    assert "\n" not in str(caught.value)
    assert gpu.current() is None
