"""What a report says of compiled code: its phases, where graphs break, and what was compiled again."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from causes_cells import notebook
from torch.torch_version import TorchVersion

import gpumem_magic
from gpumem_magic.recording.limit import IterationLimit
from gpumem_magic.report.schema import report_from_dict
from gpumem_magic.virtual import gpu

MIB = 1 << 20
# 2.10 and older say nothing of a function that breaks its graph within a loop.
SAYS_LOOPS = TorchVersion(torch.__version__) >= "2.11"


@pytest.fixture(scope="module")
def report() -> Iterator[Any]:
    with warnings.catch_warnings():
        # PyTorch's own advice about TF32.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        gpu.turn_on("A100-40GB")
        said = []

        @torch.compile
        def loss(x: torch.Tensor) -> torch.Tensor:
            y = x.sin().exp()
            torch._dynamo.graph_break()
            return y.cos().tanh().sum()

        @torch.compile
        def in_a_loop(x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = x.sin()
                said.append(x.mean().item())
            return x

        again = torch.compile(torch.nn.Linear(64, 32).cuda())
        x = torch.rand(MIB, device="cuda", requires_grad=True)
        with gpumem_magic.measure() as measured:
            loss(x).backward()
            in_a_loop(x)
            for rows in (16, 32):
                again(torch.rand(rows, 64, device="cuda"))
        yield measured.report
    gpu.turn_off()


def test_breaks_are_said_with_their_lines_and_reasons(report: Any) -> None:
    (note,) = (one for one in report.notes if "graphs break" in one)
    assert "`torch._dynamo.graph_break()`" in note
    assert "test_compiled_report.py:" in note
    assert "Call to `torch._dynamo.graph_break()`" in note
    assert "graphs break" in str(report.explain())


def test_a_default_device_breaks_no_graph() -> None:
    @torch.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.float().add_(torch.ones(4))
        return y.to(x.dtype).new_zeros(4) + torch.zeros_like(y)

    gpu.turn_on("A100-40GB")
    torch.set_default_device("cuda")
    try:
        x = torch.rand(1024, 4, dtype=torch.half)
        with gpumem_magic.measure() as measured:
            made = step(x)
    finally:
        torch.set_default_device(None)
        # In 2.9, `get_default_device` fails after that.
        vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)
    compiled = measured.report.compiled
    assert (made.device.type, compiled.graphs, compiled.breaks, compiled.failed) == ("cuda", 1, (), ())
    gpu.turn_off()


def test_a_line_that_breaks_twice_is_named_once() -> None:
    """Where the program branches by a value, within a function that is called and when that is compiled by itself."""
    gpu.turn_on("A100-40GB")
    try:

        def chosen(x: torch.Tensor) -> torch.Tensor:
            if x.sin().sum() > 0:
                return x.cos()
            return x.tanh()

        fast = torch.compile(lambda x: chosen(x).exp(), backend="aot_eager")
        with gpumem_magic.measure() as measured:
            fast(torch.rand(64, device="cuda"))
        (one,) = measured.report.compiled.breaks
        assert (one.text, one.reason, one.count) == ("if x.sin().sum() > 0:", "Data-dependent branching", 2)
    finally:
        gpu.turn_off()


def test_where_the_compiler_cuts_by_itself_is_said_without_a_line() -> None:
    """As between the buckets of DistributedDataParallel (`torch/_dynamo/backends/distributed.py`)."""
    tables = importlib.import_module("torch._dynamo.utils")
    reasons = importlib.import_module("torch._dynamo.output_graph").GraphCompileReason
    gpu.turn_on("A100-40GB")
    try:
        with gpumem_magic.measure() as measured:
            torch.rand(MIB, device="cuda")
            tables.graph_break_reasons.append(
                reasons("DDPOptimizer intentional graph-break", [traceback.FrameSummary(__file__, 0, "DDPOptimizer")])
            )
        (note,) = (one for one in measured.report.notes if "graphs break" in one)
        assert "graphs break at places of its own (DDPOptimizer intentional graph-break). Operators" in note
    finally:
        gpu.turn_off()


@pytest.mark.skipif(not SAYS_LOOPS, reason="this PyTorch does not say it")
def test_what_was_not_compiled_is_said_with_the_line_and_the_reason(report: Any) -> None:
    (note,) = (one for one in report.notes if "to run eagerly" in one)
    assert re.search(
        r"eagerly: `in_a_loop` \(.*test_compiled_report\.py:\d+\), because of .*:\d+, `said\.append\(x\.mean\(\)\.item\(\)\)`",
        note,
    )
    assert "Tensor.item()" in note or "loop" in note


def test_what_was_compiled_again_is_said_with_the_reason(report: Any) -> None:
    (note,) = (one for one in report.notes if "compiled again" in one)
    assert "a module of PyTorch's 1 time" in note
    assert "expected 16, actual 32" in note


def test_the_same_as_plain_data(report: Any) -> None:
    data = json.loads(json.dumps(report.to_dict()))
    (one,) = data["compiled"]["breaks"]
    assert one["count"] == 1
    assert data["compiled"]["graphs"] == 4
    assert [one["count"] for one in data["compiled"]["again"]] == [1]
    assert [one["count"] for one in data["compiled"].get("failed", ())] == [1] * SAYS_LOOPS
    assert report_from_dict(data).compiled == report.compiled


def test_code_outside_modules_has_phases(report: Any) -> None:
    labels = [part.label for row in report.checkpoints for part in row.parts]
    # Two graphs of the function; the layer's are its forward.
    assert labels == ["compiled code", "compiled code", "backward", "forward", "forward"]


def test_what_compiled_code_keeps_is_its_modules() -> None:
    """As Dynamo noted it."""

    def block() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False), torch.nn.GELU())

    gpu.turn_on("A100-40GB")
    try:
        for _ in ("compiled", "from the compiler's cache"):
            torch._dynamo.reset()
            fast = torch.compile(torch.nn.Sequential(block(), block()).cuda())
            with gpumem_magic.measure() as measured:
                fast(torch.rand(4096, 512, device="cuda")).sum().backward()
            (top,) = (one for one in measured.report.layers().children if one.name != "outside modules")
            assert top.name == "fast"
            assert [[inner.activations for inner in one.children] for one in top.children] == [[8 * MIB] * 2, [8 * MIB]]
    finally:
        gpu.turn_off()


def test_modules_that_only_a_compiled_function_calls_are_named_as_it_names_them() -> None:
    """No hook sees them: their forward is a part of the function's graph."""
    gpu.turn_on("A100-40GB")
    try:
        block = torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False), torch.nn.GELU()).cuda()
        fast = torch.compile(lambda x: block(x).sum())
        with gpumem_magic.measure() as measured:
            fast(torch.rand(4096, 512, device="cuda")).backward()
        (top,) = (one for one in measured.report.layers().children if one.name != "outside modules")
        assert (top.name, top.parameters) == ("block", MIB)
        assert [inner.activations for inner in top.children][:1] == [8 * MIB]
    finally:
        gpu.turn_off()


def test_what_compiled_code_made_is_told_as_such() -> None:
    cell = """
    def waves(x):
        for _ in range(4):
            x = (x @ x).sin()
        return x.sum()
    x = torch.rand(2048, 2048, device="cuda", requires_grad=True)
    {}(x).backward()
    """
    with notebook("A100-40GB") as book:
        plain = book.measured(cell.format("waves")).answer
        compiled = book.measured(cell.format("torch.compile(waves)")).answer
    assert "the compiled" not in plain
    assert "tensors of the compiled `x = (x @ x).sin()` (line " in compiled


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(512, 1024, bias=False)
        self.down = torch.nn.Linear(1024, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).sin())  # type: ignore[no-any-return]


@pytest.mark.parametrize("in_place", [False, True], ids=["a break behind each", "compiled in place"])
def test_alike_blocks_that_share_a_graph_keep_their_own(in_place: bool) -> None:
    """Dynamo makes one graph of all of them, with the modules of the first that it met."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
                torch._dynamo.graph_break()
            return x

    gpu.turn_on("A100-40GB")
    try:
        net = Net().cuda()
        x = torch.rand(4096, 512, device="cuda", requires_grad=True)
        if in_place:
            for block in net.blocks:
                block.compile()
        run = net if in_place else torch.compile(net)
        with gpumem_magic.measure() as measured:
            run(x).sum().backward()
        sizes = [
            next(inner.activations for inner in one.children if inner.name == "up")
            for top in measured.report.layers().children
            if top.name != "outside modules"
            for one in top.children[0].children
        ]
        assert sizes == [16 * MIB] * 4, measured.report.layers()
    finally:
        gpu.turn_off()


def test_a_function_compiled_too_often_and_an_error_of_the_compiler() -> None:
    """Beyond its limit Dynamo runs a function eagerly; what ended the program did not run eagerly."""
    machine = gpu.turn_on("A100-40GB")
    config = importlib.import_module("torch._dynamo.config")

    @torch.compile(backend="eager", dynamic=False)
    def scaled(x: torch.Tensor, times: int) -> torch.Tensor:
        return x * times

    @torch.compile(backend="eager")
    def product(x: torch.Tensor) -> torch.Tensor:
        return x.sin() @ x

    try:
        x = torch.rand(4, 8, device="cuda")
        with config.patch(recompile_limit=2), gpumem_magic.measure() as limited:
            for times in range(4):
                scaled(x, times)
        with gpumem_magic.measure() as caught, contextlib.suppress(RuntimeError):
            product(x)
        with pytest.raises(RuntimeError), gpumem_magic.measure() as ended:
            torch.compile(lambda value: torch._dynamo.graph_break(), backend="eager", fullgraph=True)(x)
    finally:
        gpu.turn_off()
    assert machine.notes() == []
    (failed,) = limited.report.compiled.failed
    (again,) = limited.report.compiled.again
    assert (failed.text, failed.place) == (again.text, again.place)
    assert failed.text == "scaled"
    assert "limit" in failed.reason
    assert again.reason == "times == 0"
    assert not any("runs eagerly" in note for note in [*caught.report.notes, *ended.report.notes])


def test_compiled_steps_are_seen() -> None:
    """As steps, and by what ends a run after so many iterations."""
    gpu.turn_on("A100-40GB")
    try:
        layer = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.Adam(layer.parameters())
        update = torch.compile(optimizer.step)
        layer(torch.rand(2, 64, device="cuda")).sum().backward()
        limit = IterationLimit(2, lambda: False, lambda: 0)
        limit.install()
        with gpumem_magic.measure() as measured:
            update()
            update()
        limit.remove()
        assert "Peak at\n  iteration 1, optimizer step." in str(measured.report)
        assert limit.steps == 2
    finally:
        gpu.turn_off()


class _InTwo(torch.nn.Module):
    """Two layers with a graph break in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        middle = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(middle)


@pytest.mark.parametrize("first", ["measured", "plain"])
def test_a_recording_is_no_reason_to_compile_again(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled in a measured cell holds in the next one and outside of both, and its guards name nothing of ours."""
    said: list[Any] = []
    filters = importlib.import_module("torch._dynamo.guards").CheckFunctionManager
    build = filters.build_guards

    def build_guards(self: Any, guards: Any, *args: Any, **kwargs: Any) -> Any:
        said.extend(str(guard) for guard in guards)
        return build(self, guards, *args, **kwargs)

    monkeypatch.setattr(filters, "build_guards", build_guards)
    gpu.turn_on("A100-40GB")
    try:
        torch._dynamo.reset()
        model = _InTwo().cuda()
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        fast, update = torch.compile(model, backend="aot_eager"), torch.compile(optimizer.step, backend="aot_eager")
        x = torch.rand(4, 8, device="cuda")

        def step() -> None:
            fast(x).sum().backward()
            update()
            optimizer.zero_grad()

        def measured() -> None:
            with gpumem_magic.measure():
                step()

        # (SGD's momentum is there from the second step on, which is compiled again for it.)
        for way in (measured, measured) if first == "measured" else (step, step):
            way()
        tables = importlib.import_module("torch._dynamo.utils")
        graphs = tables.counters["stats"]["unique_graphs"]
        for way in (measured, step, measured):
            way()
        assert tables.counters["stats"]["unique_graphs"] == graphs
        assert said
        assert not [one for one in said if "gpumem" in one]
    finally:
        gpu.turn_off()


class _Hooked(torch.nn.Module):
    """A layer with a hook, as tensor parallelism puts on layers: the code that runs hooks asks for global ones, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x).relu()


@pytest.mark.parametrize("kept", ["in a variable", "in a global"])
def test_layers_with_hooks_share_what_is_compiled_in_a_recording(kept: str) -> None:
    """Twelve are more than PyTorch compiles anew before it gives up (`recompile_limit`)."""
    gpu.turn_on("A100-40GB")
    try:
        torch._dynamo.reset()
        layers = [_Hooked().cuda() for _ in range(12)]
        x = torch.rand(4, 8, device="cuda", requires_grad=True)
        if kept == "in a variable":
            calls: list[Any] = [torch.compile(layer, backend="aot_eager", fullgraph=True) for layer in layers]
        else:
            names: dict[str, Any] = {"layer": layers[0]}
            exec("def call(x):\n    return layer(x)", names)
            calls = [torch.compile(names["call"], backend="aot_eager", fullgraph=True)] * 12
        tables = importlib.import_module("torch._dynamo.utils")
        before = tables.counters["stats"]["unique_graphs"]
        with gpumem_magic.measure():
            out = x
            for call in calls:
                out = call(out)
            out.sum().backward()
        # (The second layer's argument has a graph, the first one's is a leaf.)
        assert tables.counters["stats"]["unique_graphs"] <= before + 2
    finally:
        gpu.turn_off()


def test_what_only_a_first_run_takes_is_told_as_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A product of odd sizes is tried beside copies of its factors and 40 MiB for the cache: more than the program takes."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    gpu.turn_on("A100-40GB")
    weight = torch.rand(4095, 4095, device="cuda", dtype=torch.float16)
    weight[:8] @ weight  # the workspace, which stays
    fast = torch.compile(lambda x: (x @ weight).sin().sum(1))
    for first in (True, False):
        with gpumem_magic.measure() as measured:
            fast(weight)
        words = str(measured.report).replace("\n  ", " ")
        tried = [group for group in measured.report.peak.tensors if group.operator == "trials of compiled kernels"]
        # Both factors, three padded ones, and the buffer.
        assert [(one.category, one.count) for one in tried] == ([("temporaries", 6)] if first else [])
        assert (
            "200 MiB are trials of compiled kernels of `fast(weight)`, which come in the first run alone" in words
        ) == first
    gpu.turn_off()
