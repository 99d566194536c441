"""Libraries that wrap PyTorch's functions while a virtual GPU is on, or a recording runs: their wrappers go on working."""

from __future__ import annotations

import functools
import importlib
import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd.profiler import record_function

from gpumem_magic import measure
from gpumem_magic.virtual import gpu

NAMES: list[tuple[Any, str]] = [
    (torch.nn.Module, "_apply"), (torch, "load"), (torch, "save"), (torch.Tensor, "to"), (torch.Tensor, "cuda"), (torch, "zeros"),
    (torch, "tensor"), (torch.cuda, "is_available"), (torch.cuda, "memory_allocated"), (torch.cuda, "synchronize"),
    (torch.autograd, "_engine_run_backward"), (torch.autograd.graph, "_engine_run_backward"), (torch, "compile"),
]  # fmt: skip


class Library:
    """Wraps functions as libraries do: keeps what it finds, counts calls, and can be taken out again."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.found: list[tuple[Any, str, Any]] = []
        self.wrappers: dict[tuple[Any, str], Any] = {}

    def wrap(self, names: list[tuple[Any, str]] = NAMES) -> None:
        for owner, name in names:
            inner = getattr(owner, name)
            self.found.append((owner, name, inner))
            wrapper = self.wrappers[owner, name] = self._wrapper(name, inner)
            setattr(owner, name, wrapper)

    def _wrapper(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return inner(*args, **kwargs)

        return wrapper

    def unwrap(self) -> None:
        while self.found:
            setattr(*self.found.pop())

    def stands(self) -> bool:
        return all(vars(owner)[name] is wrapper for (owner, name), wrapper in self.wrappers.items())


ORIGINALS = {(owner, name): vars(owner).get(name) for owner, name in NAMES}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Whatever a test leaves of a library's wrappers is taken out, and a device finds everything as it was."""
    gpu.turn_off()
    yield
    gpu.turn_off()
    for (owner, name), original in ORIGINALS.items():
        if original is not None:
            setattr(owner, name, original)
        elif name in vars(owner):
            delattr(owner, name)


def uses_the_host() -> None:
    """What the wrapped functions do without a device."""
    layer = torch.nn.Linear(2, 2).to(torch.float64)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    torch.load(file)
    layer(torch.tensor([[1.0, 2.0]], dtype=torch.float64).to("cpu")).sum().backward()
    assert torch.zeros(3).tolist() == [0, 0, 0]
    assert not torch.cuda.is_available()
    assert layer.weight.grad is not None
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(3).cuda()


def uses_the_device() -> None:
    layer = torch.nn.Linear(2, 2).to("cuda")
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    assert torch.load(file)["weight"].is_cuda
    layer(torch.tensor([[1.0, 2.0]]).cuda()).sum().backward()
    assert torch.zeros(3, device="cuda").is_cuda
    assert torch.cuda.is_available()
    assert torch.cuda.memory_allocated() > 0
    assert layer.weight.grad is not None
    assert layer.weight.grad.is_cuda


def test_a_library_that_wraps_while_a_device_is_on() -> None:
    gpu.turn_on("T4")
    library = Library()
    library.wrap()
    uses_the_device()
    gpu.turn_off()
    assert library.stands()
    library.calls.clear()
    uses_the_host()
    assert {"_apply", "load", "save", "to", "cuda", "zeros", "tensor", "is_available"} <= set(library.calls)
    assert library.calls["_engine_run_backward"] > 0


def test_a_library_that_wraps_before_a_device_is_on() -> None:
    library = Library()
    library.wrap()
    gpu.turn_on("T4")
    uses_the_device()
    gpu.turn_off()
    assert library.stands()
    uses_the_host()


def test_nested_wraps_around_several_devices() -> None:
    libraries = [Library() for _ in range(4)]
    for library, name in zip(libraries, ("T4", "2xT4", None, "L4"), strict=True):
        if name is None:
            gpu.turn_off()
        else:
            gpu.turn_on(name)
            uses_the_device()
        library.wrap()
    uses_the_device()
    assert all(library.calls["zeros"] for library in libraries)
    gpu.turn_off()
    assert libraries[-1].stands()
    for library in libraries:
        library.calls.clear()
    uses_the_host()
    assert all(library.calls["zeros"] for library in libraries)


def test_a_library_that_goes_after_the_device_leaves_pytorch_as_it_was() -> None:
    gpu.turn_on("T4")
    library = Library()
    library.wrap()
    gpu.turn_off()
    library.unwrap()
    uses_the_host()
    gpu.turn_on("T4")
    uses_the_device()
    gpu.turn_off()
    for (owner, name), original in ORIGINALS.items():
        assert vars(owner).get(name) is original, name


def test_switching_many_times_below_a_wrapper_costs_nothing_more() -> None:
    gpu.turn_on("T4")
    library = Library()
    library.wrap()
    for _ in range(25):
        gpu.turn_off()
        gpu.turn_on("T4")
    depth = []

    def look(storage: Any, location: str) -> Any:
        frame: Any = sys._getframe()
        while frame is not None:
            depth.append(frame.f_code.co_name)
            frame = frame.f_back
        return storage

    torch.load(io.BytesIO(_saved()), map_location=look)
    assert depth.count("relayed") <= 4
    gpu.turn_off()
    assert library.stands()


def _saved() -> bytes:
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    return file.getvalue()


def test_what_is_theirs_in_lists_in_the_path_and_in_the_dispatcher_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    optimizer = importlib.import_module("torch.optim.optimizer")

    class Finder:
        def find_spec(self, *args: object) -> None: ...

    finder = Finder()
    # It puts its own type into the list when it is imported, which our device does.
    importlib.import_module("torch.distributed.tensor")
    known = list(optimizer._foreach_supported_types)
    gpu.turn_on("T4")
    assert len(optimizer._foreach_supported_types) == len(known) + 1
    sys.meta_path.insert(0, finder)
    optimizer._foreach_supported_types.append(Finder)
    os.environ["PATH"] = f"/first{os.pathsep}{os.environ['PATH']}"
    seen = []

    def kernel(self: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return torch.zeros_like(self)

    theirs = torch.library.Library("aten", "IMPL")
    theirs.impl("exp", kernel, "AutocastCUDA", allow_override=True)
    before = torch._C._dispatch_dump("aten::exp")
    try:
        gpu.turn_off()
        assert sys.meta_path[0] is finder
        assert [type(one).__name__ for one in sys.meta_path].count("Libraries") == 0
        assert optimizer._foreach_supported_types == [*known, Finder]
        assert os.environ["PATH"].startswith(f"/first{os.pathsep}")
        assert "gpumem-magic" not in os.environ["PATH"]
        after = torch._C._dispatch_dump("aten::exp")
        assert "AutocastCUDA" in after
        assert before.count("AutocastCUDA") > after.count("AutocastCUDA")
    finally:
        theirs._destroy()
        sys.meta_path.remove(finder)
        optimizer._foreach_supported_types.remove(Finder)


def test_a_wrapper_around_the_binding_of_nvml_goes_on_working() -> None:
    pynvml: Any = importlib.import_module("pynvml")
    original = pynvml._nvmlGetFunctionPointer
    gpu.turn_on("T4")
    pynvml.nvmlInit()
    ours = pynvml._nvmlGetFunctionPointer
    asked = []

    def look_up(name: str) -> Any:
        asked.append(name)
        return ours(name)

    pynvml._nvmlGetFunctionPointer = look_up
    try:
        assert pynvml.nvmlDeviceGetCount() == 1
        gpu.turn_off()
        assert pynvml._nvmlGetFunctionPointer is look_up
        with pytest.raises(pynvml.NVMLError):
            pynvml.nvmlDeviceGetCount()
        assert len(asked) == 2
    finally:
        pynvml._nvmlGetFunctionPointer = original


# ---- while a recording runs


def trains(device: str) -> None:
    layer = torch.nn.Linear(4, 4).to(device)
    with record_function("mine"):
        layer(torch.ones(1, 4, device=device)).sum().backward()


RECORDED: list[tuple[Any, str]] = [
    (torch.autograd, "_engine_run_backward"), (torch.autograd.graph, "_engine_run_backward"), (record_function, "__enter__"),
    (record_function, "__exit__"), (torch.utils.checkpoint.CheckpointFunction, "backward"),
]  # fmt: skip


def test_a_library_that_wraps_while_a_recording_runs() -> None:
    before = {(owner, name): vars(owner).get(name) for owner, name in RECORDED}
    library = Library()
    try:
        with measure("T4") as measurement:
            library.wrap(RECORDED[:4])
            trains("cuda")
        assert measurement.report.peak.allocated > 0
        assert library.stands()
        library.calls.clear()
        trains("cuda")
        gpu.turn_off()
        trains("cpu")
        assert library.calls["_engine_run_backward"] >= 2
        assert library.calls["__enter__"] == library.calls["__exit__"] == 2
        library.unwrap()
        trains("cpu")
        with measure("T4"):
            trains("cuda")
        gpu.turn_off()
        assert {(owner, name): vars(owner).get(name) for owner, name in RECORDED} == before
    finally:
        for (owner, name), original in before.items():
            setattr(owner, name, original)


def test_a_wrapper_that_outlives_several_recordings_and_devices() -> None:
    before = {(owner, name): vars(owner).get(name) for owner, name in RECORDED}
    library = Library()
    try:
        for device in ("T4", "L4", "T4"):
            with measure(device) as measurement:
                trains("cuda")
                if not library.wrappers:
                    library.wrap(RECORDED[:2])
            assert measurement.report.peak.allocated > 0
            gpu.turn_off()
        assert library.stands()
        library.calls.clear()
        trains("cpu")
        assert library.calls == {"_engine_run_backward": 1}
    finally:
        for (owner, name), original in before.items():
            setattr(owner, name, original)


@pytest.mark.parametrize("before", [True, False], ids=["wrapped before", "wrapped while it is on"])
def test_a_function_in_python_that_is_counted_is_counted_once(before: bool) -> None:
    # As ptflops does it; these hand themselves on by their public names (`torch.overrides.handle_torch_function`).
    names = [
        "relu",
        "softmax",
        "layer_norm",
        "interpolate",
        "binary_cross_entropy_with_logits",
        "multi_head_attention_forward",
    ]
    library = Library()
    wrapped = [(torch.nn.functional, name) for name in names]
    if before:
        library.wrap(wrapped)
    gpu.turn_on("T4")
    if not before:
        library.wrap(wrapped)
    try:
        x = torch.randn(2, 4, 4, device="cuda", requires_grad=True)
        out = torch.nn.functional.relu(x)
        out = torch.nn.functional.layer_norm(torch.nn.functional.softmax(out, dim=-1), (4,))
        out = torch.nn.functional.interpolate(out, scale_factor=2.0)
        torch.nn.functional.binary_cross_entropy_with_logits(out, torch.ones_like(out)).backward()
        # (With weights it would call softmax.)
        torch.nn.MultiheadAttention(4, 2, device="cuda")(x, x, x, need_weights=False)
        assert x.grad is not None
    finally:
        library.unwrap()
    assert library.calls == dict.fromkeys(names, 1)
