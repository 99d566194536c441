"""What a recording can't look into is said: compiled code, CUDA graphs, private pools. And compiling goes on as without us."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from cuda_fakes import FakeNvml, FakeTorch
from test_phases import state_of_torch
from torch import nn

from gpumem_magic.devices.cuda import CudaMachine
from gpumem_magic.devices.driver import Driver
from gpumem_magic.recording.model import Recording
from gpumem_magic.recording.recorder import Recorder
from gpumem_magic.units import MIB


def record(program: Any, names: dict[str, Any] | None = None) -> Recording:
    fake = FakeTorch()
    recorder = Recorder(CudaMachine(fake, Driver(FakeNvml(fake))), names=names or {})
    before = state_of_torch(), torch.nn.modules.module._has_any_global_hook
    recorder.start(names)
    try:
        program(fake)
    finally:
        recording = recorder.finish(namespace=names)
    assert (state_of_torch(), torch.nn.modules.module._has_any_global_hook) == before
    return recording


def steps(module: Any) -> None:
    for _ in range(2):
        module(torch.ones(2, 4)).sum().backward()


@pytest.fixture
def counters() -> Any:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    return counters


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def test_a_compiled_model_is_compiled_as_ever_and_named(counters: Any) -> None:
    plain = torch.compile(net(), backend="eager", fullgraph=True)
    steps(plain)
    expected = dict(counters["stats"])
    counters.clear()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recording = record(lambda fake: steps(torch.compile(net(), backend="eager", fullgraph=True)))
    assert dict(counters["stats"]) == expected
    assert not counters["graph_break"]
    assert [span.kind for span in recording.spans] == ["forward", "backward"] * 2
    assert any("A compiled model ran" in note for note in recording.notes)


def test_a_compiled_model_that_is_told_to_run_eagerly_is_not_said_to_be_compiled(counters: Any) -> None:
    model = torch.compile(net(), backend="eager", fullgraph=True)
    with torch.compiler.set_stance("force_eager"):
        recording = record(lambda fake: steps(model))
    assert not counters["stats"]["unique_graphs"]
    assert not [note for note in recording.notes if "compiled model" in note]
    assert any("A compiled model ran" in note for note in record(lambda fake: steps(model)).notes)


def test_a_model_that_was_compiled_before_is_not_compiled_again(counters: Any) -> None:
    model = torch.compile(net(), backend="eager", fullgraph=True)
    steps(model)
    once = dict(counters["stats"])
    recording = record(lambda fake: steps(model))
    assert dict(counters["stats"]) == once
    steps(model)
    assert dict(counters["stats"]) == once
    assert [span.kind for span in recording.spans] == ["forward", "backward"] * 2


def test_a_module_compiled_in_place_is_named(counters: Any) -> None:
    class Model(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)  # type: ignore[no-any-return]

    model = Model(nn.Linear(4, 4), nn.ReLU())
    model.compile(backend="eager")
    recording = record(lambda fake: steps(model), {"model": model})
    assert counters["stats"]["unique_graphs"]
    assert [span.kind for span in recording.spans if span.kind == "backward"] == ["backward"] * 2
    assert any("compiled in place (`module.compile()`)" in note for note in recording.notes)
    assert not counters["graph_break"]


def test_layers_of_pytorchs_compiled_in_place_are_said_to_run_eagerly(counters: Any) -> None:
    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    model = layer()
    model.compile(backend="eager")
    (note,) = (one for one in record(lambda fake: steps(model), {"model": model}).notes if "compile" in one)
    assert "compiles nothing" in note
    assert not counters["stats"]["unique_graphs"]
    steps(torch.compile(layer(), backend="eager"))
    assert counters["stats"]["unique_graphs"], "what the note recommends"


def test_other_peoples_global_hooks_are_still_warned_about(counters: Any) -> None:
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, args: None)
    try:
        with pytest.warns(UserWarning, match="global hooks"):
            record(lambda fake: steps(torch.compile(net(), backend="eager")))
    finally:
        handle.remove()


def test_cuda_graphs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        replayed = 0

        def capture_begin(self, pool: Any = None) -> None: ...

        def replay(self) -> None:
            self.replayed += 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    before = dict(vars(Graph))
    graph = Graph()

    def program(fake: FakeTorch) -> None:
        graph.capture_begin(pool=(0, 1))
        for _ in range(3):
            graph.replay()

    recording = record(program)
    assert graph.replayed == 3
    assert any("CUDA graphs ran (1 capture, 3 replays)" in note for note in recording.notes)
    assert dict(vars(Graph)) == before


def test_nothing_is_said_where_nothing_is_hidden() -> None:
    assert record(lambda fake: steps(net())).notes == ()


def test_a_capture_is_not_disturbed() -> None:
    fake = FakeTorch()
    machine = CudaMachine(fake, Driver(None))
    fake.alloc(MIB)
    assert machine.devices[0].counters().device_used == fake.gpus[0].used
    fake.cuda.is_current_stream_capturing = lambda: True
    fake.broken = True
    assert machine.devices[0].counters().device_used is None
