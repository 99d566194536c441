"""`torch.compile` on a virtual GPU: PyTorch's own compiler decides, and the code that it generates asks for the memory."""

from __future__ import annotations

import functools
import gc
import importlib
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import gpumem_magic
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.compiler import inductor, tracing

MIB = 1 << 20


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    with warnings.catch_warnings():
        # PyTorch's own advice about TF32.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        device = gpu.turn_on("A100-40GB")
        # First launches are without trials, but in the tests of these.
        with importlib.import_module("torch._inductor.config").patch({"triton.autotune_pointwise": False}):
            yield device
    gpu.turn_off()


def peak(run: Callable[[], object]) -> int:
    """Bytes above what was there, at the most."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def wave(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp().cos().tanh()


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return wave(x + self.bias)


def test_what_is_fused_is_one_buffer() -> None:
    x = torch.rand(4 * MIB, device="cuda")
    fast = torch.compile(wave)
    fast(x)
    assert peak(lambda: fast(x)) == 16 * MIB
    assert peak(lambda: wave(x)) == 32 * MIB


def test_an_input_that_begins_elsewhere_is_copied() -> None:
    """Kernels that were made for inputs which begin at multiples of 16 bytes take a copy of one that does not."""
    x = torch.rand(4 * MIB + 4, device="cuda")
    fast = torch.compile(wave)
    fast(x[4:])
    assert peak(lambda: fast(x[4:])) == 16 * MIB
    assert peak(lambda: fast(x[1:-3])) == 32 * MIB


@pytest.mark.parametrize(("card", "buffer"), [("H100", 50), ("H100,torch=2.6", 256)])
def test_the_first_launch_of_a_kernel_is_tried(card: str, buffer: int) -> None:
    """Of a pointwise kernel in one dimension there are two ways (`triton_heuristics.pointwise`); the buffer is the card's cache,
    with Triton's own trials 256 MiB. One in two dimensions that is taken to be square has one way, and so have most sums."""
    machine = gpu.turn_on(card)
    x = torch.rand(4 * MIB, device="cuda")

    def tile(value: torch.Tensor) -> torch.Tensor:
        return value.view(2048, -1).T.contiguous() + 1

    with importlib.import_module("torch._inductor.config").patch({"triton.autotune_pointwise": True}):
        fast = torch.compile(wave)
        assert peak(lambda: fast(x)) == (16 + buffer) * MIB
        assert peak(lambda: fast(x)) == 16 * MIB
        # The same kernel in another graph: its result is kept.
        torch._dynamo.reset()
        assert peak(lambda: torch.compile(wave)(x)) == 16 * MIB
        assert peak(lambda: torch.compile(tile)(x)) == 16 * MIB
        # What is changed in place is copied where that does not raise the peak: there was a peak of 1,040 MiB before.
        y = torch.rand(4 * MIB, device="cuda")
        gc.collect()
        before = torch.cuda.memory_allocated()
        high = torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")
        del high
        taken = []
        plain = machine.engine.scratch

        def scratch(device: int, *sizes: int) -> Any:
            taken.append([size // MIB for size in sizes])
            return plain(device, *sizes)

        machine.engine.scratch = scratch  # type: ignore[method-assign]
        torch.compile(lambda value: value.mul_(2))(y)
        # (As the pointer that is read and as the one that is written.)
        assert taken == [[16, 16], [buffer], [16, 16]] * 2
        assert torch.cuda.memory_allocated() == before
    assert "2 kernels of compiled code were tried in several ways at the first launch" in " ".join(machine.notes())


@pytest.mark.parametrize("learns", [False, True])
def test_copies_for_a_trial_may_raise_the_peak_that_a_buffer_raised(learns: bool) -> None:
    """The room is asked for before each way: the first has none, and its buffer of 50 MiB is the second's. In a forward that a
    backward follows nobody asks (`optimize_mem` in ``codegen/triton.py``). As a real H100 did, with PyTorch 2.11."""
    machine = gpu.turn_on("H100,torch=2.11")
    weight = torch.rand(1024, 4096, device="cuda", requires_grad=learns)
    x = torch.rand(1024, 1024, device="cuda")

    def changed_in_place(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).relu()

    taken = []
    plain = machine.engine.scratch

    def scratch(device: int, *sizes: int, **kwargs: Any) -> Any:
        taken.append([size // MIB for size in sizes])
        return plain(device, *sizes, **kwargs)

    torch.cuda.reset_peak_memory_stats()
    machine.engine.scratch = scratch  # type: ignore[method-assign]
    with importlib.import_module("torch._inductor.config").patch({"triton.autotune_pointwise": True}):
        torch.compile(changed_in_place)(x)
    trial = [[16], [50], [16]]
    assert taken[-6:] == (trial * 2 if learns else [[], [50], [], *trial])


def test_older_versions_leave_gradients_as_they_lie() -> None:
    peaks = []
    for version in ("2.11", "2.12"):
        gpu.turn_off()
        gpu.turn_on(f"A100-40GB,torch={version}")
        torch._dynamo.reset()
        x = torch.zeros(1024, 2048, device="cuda", requires_grad=True)
        out = torch.compile(lambda x: x.sin().t())(x)
        gradient = torch.zeros(2048, 1024, device="cuda")
        peaks.append(peak(functools.partial(torch.autograd.grad, out, x, gradient)))
    assert peaks == [8 * MIB, 16 * MIB]


def test_example_inputs_are_the_traces_own_where_pytorch_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2.9 and 2.10 do: tensors of another fake mode than the trace's are refused."""

    def refuse(inputs: object) -> None:
        raise AssertionError("of another mode")

    monkeypatch.setattr(torch._guards, "detect_fake_mode", refuse)
    x, mode = torch.rand(6, 4, device="cuda").t(), FakeTensorMode(shape_env=ShapeEnv())
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        made, number = tracing.of_the_trace([x, 3])
    assert type(made) is FakeTensor
    assert made.fake_mode is mode
    assert (made.shape, made.stride(), made.device, number) == (x.shape, x.stride(), x.device, 3)
    assert tracing.of_the_trace([x])[0] is x


def test_what_a_graph_has_as_its_own_is_the_traces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as an optimizer's states, which 2.9 to 2.11 refuse of another mode."""

    def refuse(inputs: object) -> None:
        raise AssertionError("of another mode")

    torch.compile(wave)
    monkeypatch.setattr(torch._guards, "detect_fake_mode", refuse)
    state, mode = torch.rand(6, 4, device="cuda"), FakeTensorMode(shape_env=ShapeEnv())
    whole = importlib.import_module("torch._functorch.aot_autograd")
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        assert whole.construct_fake_mode([state], None)[0] is mode


def test_what_is_traced_without_torch_compile() -> None:
    """Operator by operator. Kept are what `sin` takes, what `exp` gives and `cos` takes, and the result, which `tanh` needs."""
    ahead = importlib.import_module("functorch.compile")
    x = torch.rand(MIB, device="cuda", requires_grad=True)
    programs = (2, ahead.aot_function(wave, ahead.nop)), (3, ahead.aot_module(Waves().cuda(), ahead.nop))
    for kept, fast in programs:
        before = torch.cuda.memory_allocated()
        out = fast(x)
        assert torch.cuda.memory_allocated() - before == kept * x.nbytes
        out.sum().backward()
        assert x.grad is not None
        x.grad = out = None
    make_fx = importlib.import_module("torch.fx.experimental.proxy_tensor").make_fx
    for mode in ("real", "fake", "symbolic"):
        traced = make_fx(wave, tracing_mode=mode)(x)
        targets = {node.target for node in traced.graph.nodes}
        assert targets > {getattr(torch.ops.aten, name).default for name in ("sin", "exp", "cos", "tanh")}
        assert traced(x).shape == x.shape


def products_are_kept(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    product = operator is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


def contexts() -> Any:
    return create_selective_checkpoint_contexts(products_are_kept)


def test_graphs_whose_operators_run_one_by_one() -> None:
    """A gradient with a kernel of its own is one of them; what a graph makes is on the card, also after a break."""

    def program(value: torch.Tensor) -> torch.Tensor:
        places = torch.arange(MIB, device=value.device)
        torch._dynamo.graph_break()
        return F.mish(F.silu(value)) * places.float()

    x = torch.rand(MIB, device="cuda", requires_grad=True)
    torch.compile(program, backend="aot_eager")(x).backward(torch.ones_like(x))
    assert x.grad is not None


def test_8_bit_products_are_compiled() -> None:
    gpu.turn_on("H100")
    a, b = (torch.rand(1024, 1024, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device="cuda")
    fast = torch.compile(lambda: torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.bfloat16).relu() * 2)
    fast()
    assert peak(fast) == 2 * MIB


@pytest.mark.filterwarnings("ignore::UserWarning:torch._logging")
@pytest.mark.parametrize(
    ("exact", "budget", "policy"), [(True, 1.0, False), (False, 1.0, False), (True, 0.4, False), (True, 1.0, True)]
)
def test_what_is_kept_for_backward_is_what_the_partitioner_chose(exact: bool, budget: float, policy: bool) -> None:
    """Beside the compiler's own word on the host, where the same partitioner cuts the same graph."""

    def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(x @ up, approximate="none" if exact else "tanh")
        return F.layer_norm(x + inner @ down, x.shape[-1:])

    def checked(*tensors: torch.Tensor) -> Any:
        return checkpoint(block, *tensors, use_reentrant=False, context_fn=contexts)

    shapes = ((512, 256), (256, 1024), (1024, 256))

    def kept(device: str) -> list[int]:
        tensors = [torch.rand(*shape, device=device, requires_grad=True) for shape in shapes]
        with importlib.import_module("torch._functorch.config").patch(activation_memory_budget=budget):
            out = torch.compile(checked if policy else block, backend="aot_eager_decomp_partition")(*tensors)
        saved = out.grad_fn.saved_tensors  # type: ignore[union-attr]
        own = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sorted(one.numel() * 4 for one in saved if one.untyped_storage()._cdata not in own)

    on_device = kept("cuda")
    gpu.turn_off()
    assert on_device == kept("cpu")
    gpu.turn_on("A100-40GB")


def test_a_training_step_keeps_its_gradients_and_states(machine: gpu.VirtualMachine) -> None:
    model = nn.Sequential(
        nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256), nn.LayerNorm(256)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    fast = torch.compile(model)
    x = torch.rand(512, 256, device="cuda")
    for _ in range(2):
        fast(x).square().mean().backward()
        optimizer.step()
    parameters = sum(parameter.numel() * 4 for parameter in model.parameters())
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.is_cuda for gradient in gradients)
    states = sum(value.numel() * 4 for state in optimizer.state.values() for value in state.values() if value.is_cuda)
    assert states == 2 * parameters
    assert machine.notes() == []


def test_attention_and_autocast_are_the_cards() -> None:
    def attend(query: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, query, query, is_causal=True)

    query = torch.rand(2, 8, 1024, 64, device="cuda", dtype=torch.float16)
    scores = 2 * 8 * 1024 * 1024 * 2
    fast = torch.compile(attend)
    fast(query)
    assert peak(lambda: fast(query)) < scores // 4

    weight = torch.rand(1024, 1024, device="cuda", requires_grad=True)
    x = torch.rand(1024, 1024, device="cuda")

    @torch.compile
    def narrow() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return x @ weight

    assert narrow().dtype == torch.bfloat16


def test_shapes_breaks_and_loops_are_as_ever(machine: gpu.VirtualMachine) -> None:
    counters = importlib.import_module("torch._dynamo.utils").counters
    counters.clear()
    layer = torch.compile(nn.Linear(64, 32).cuda())
    for batch in (32, 64, 100, 17):
        assert layer(torch.rand(batch, 64, device="cuda")).shape == (batch, 32)
    assert counters["stats"]["unique_graphs"] == 2

    said = []

    @torch.compile
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        said.append(len(y))
        torch._dynamo.graph_break()
        return torch.cat([y.cos(), torch.zeros(3, device="cuda"), torch.tensor([1.0], device=x.device)])

    assert broken(torch.rand(4, device="cuda")).shape == (8,)
    assert said == [4]
    assert machine.notes() == []


def test_a_loop_that_breaks_is_named(machine: gpu.VirtualMachine) -> None:
    """Before 2.11 by the device, as Dynamo's tables have nothing of it (`test_compiled_report` has the later ones)."""

    @torch.compile(backend="eager")
    def summed(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x.sin()
            torch._dynamo.graph_break()
        return x

    @torch.compile(backend="eager")
    def nothing(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            pass
        return x

    with gpumem_magic.measure() as measured:
        nothing(summed(torch.rand(4, device="cuda")))
    (note,) = [note for note in measured.report.notes if "eagerly" in note]
    assert Path(__file__).name in note
    assert ("`summed`" if TorchVersion(torch.__version__) < "2.11" else "graph_break()") in note


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return wave(super().forward(x))


def test_regions_share_what_is_compiled_for_any_size(machine: gpu.VirtualMachine) -> None:
    counters = importlib.import_module("torch._dynamo.utils").counters
    counters.clear()
    layers = [Layer(32, 32).cuda() for _ in range(3)]

    @torch.compiler.nested_compile_region
    def region(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)  # type: ignore[no-any-return]

    together = torch.compile(lambda x: functools.reduce(lambda y, one: region(one, y), layers, x), fullgraph=True)
    together(torch.rand(8, 32, device="cuda", requires_grad=True)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    counters.clear()
    for layer in layers:
        layer.compile(fullgraph=True, dynamic=True)
    for rows in (3, 8, 5):
        x = torch.rand(rows, 32, device="cuda", requires_grad=True)
        functools.reduce(lambda y, one: one(y), layers, x).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not [note for note in machine.notes() if "first launch" not in note]


def test_what_a_kernel_only_reads_stays_known(machine: gpu.VirtualMachine) -> None:
    def once(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        y = x * counter
        counter.add_(1)
        return y

    fast = torch.compile(once)
    factor, counter = torch.full((4,), 3.0, device="cuda"), torch.full((4,), 2.0, device="cuda")
    out = fast(factor, counter)
    assert factor.tolist() == [3.0] * 4
    assert not machine.reads.counts
    counter.tolist()
    out.tolist()
    assert sum(machine.reads.counts.values()) == 2


def test_the_optimizer_compiled() -> None:
    model = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(8, 512, device="cuda")).sum().backward()
    step = torch.compile(optimizer.step)
    step()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert peak(step) < parameters * 4


def test_what_goes_another_way_is_named(machine: gpu.VirtualMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = importlib.import_module("torch._inductor.graph")

    def fail(*args: object, **kwargs: object) -> Any:
        raise RuntimeError("no such lowering\nand more")

    monkeypatch.setattr(compiler.GraphLowering, "run", fail)
    y = torch.rand(64, device="cuda", requires_grad=True)
    torch.compile(lambda value: wave(value) * 2)(y).sum().backward()
    assert y.grad is not None
    (note,) = (note for note in machine.notes() if "operator by operator" in note)
    assert "2 graphs" in note
    assert "no such lowering" in note
    assert "and more" not in note


def test_bfloat16_on_a_card_without_it_runs_eagerly_as_on_that_card() -> None:
    """Inductor hands the graph back (`compile_fx._check_triton_bf16_support`), and Dynamo leaves the function as it is."""
    found = []
    for compiled in (False, True):
        gpu.turn_off()
        machine = gpu.turn_on("T4")
        weight = torch.rand(512, 512, device="cuda", requires_grad=True)
        x = torch.rand(4096, 512, device="cuda", dtype=torch.bfloat16)

        def layer(value: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
            return wave(value @ weight.bfloat16()) * 2

        def step(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor = x) -> None:
            run(x).float().sum().backward()

        if compiled:
            with pytest.warns(UserWarning, match="does not support bfloat16 compilation natively"):
                found.append(peak(functools.partial(step, torch.compile(layer))))
        else:
            found.append(peak(functools.partial(step, layer)))
    assert found[0] == found[1]
    assert [note for note in machine.notes() if "eagerly, as on a card (BF16 is not supported)" in note]


def test_trials_of_max_autotune_take_what_they_compare(machine: gpu.VirtualMachine) -> None:
    x, weight = torch.rand(1024, 1024, device="cuda"), torch.rand(1024, 2048, device="cuda")
    # What would run the result's product in C++ is left alone.
    options: dict[str, Any] = {"max_autotune": True, "cpp_wrapper": True, "coordinate_descent_tuning": True}
    fast = torch.compile(lambda: (x @ weight).relu(), options=options)
    trial = (4 + 8 + 8) * MIB + torch.cuda.get_device_properties().L2_cache_size
    assert peak(fast) == trial
    assert peak(fast) == 8 * MIB
    kernels, took = machine.notes()
    assert "1 graph ran with the kernels of the default mode" in kernels
    assert f"trials took {trial / MIB:.1f} MiB at most" in took


def test_fusions_that_a_card_would_time_are_made(machine: gpu.VirtualMachine) -> None:
    x, y = (torch.rand(4 * MIB, device="cuda") for _ in range(2))
    options: dict[str, Any] = {"combo_kernels": True, "benchmark_combo_kernel": True, "benchmark_fusion": True}
    fast = torch.compile(lambda: (wave(x), wave(y)), options=options)
    assert fast()[1].shape == y.shape
    assert peak(fast) == 2 * 16 * MIB
    (note,) = machine.notes()
    assert "1 graph ran with all fusions" in note


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_graphs_for_a_card_are_told_of(machine: gpu.VirtualMachine, device: str) -> None:
    """A program may compile for the host, too: what a card would try does not matter there."""
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            node.meta["val"] = node.meta.get("example_value")
        seen.append(inductor._is_for_a_card(graph))
        return graph.forward

    torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(3, device=device))
    assert seen == [device == "cuda"]


def test_products_that_a_card_may_pad(
    machine: gpu.VirtualMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """4095 numbers a row in half precision are no multiple of 16 bytes: both inputs are copied. Not where the program says so."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, weight = (torch.rand(4095, 4095, device="cuda", dtype=torch.float16) for _ in range(2))
    # Both factors anew (in segments of 32 MiB), a padded copy of each, the padded product, and what empties the cache.
    trial = 5 * 32 * MIB + torch.cuda.get_device_properties().L2_cache_size
    for cached in (False, True):  # from the compiler's cache, too, where nothing is tried
        gpu.turn_off()
        machine = gpu.turn_on("A100-40GB")
        x, weight = (torch.rand(4095, 4095, device="cuda", dtype=torch.float16) for _ in range(2))
        x[:8] @ weight  # the workspace
        fast = torch.compile(lambda value: value @ weight)  # noqa: B023
        first = peak(lambda: fast(x))  # noqa: B023
        assert first < 150 * MIB if cached else first == trial
        assert peak(lambda: fast(x)) > 90 * MIB  # noqa: B023
        (note,) = (one for one in machine.notes() if "first launch" not in one)
        assert "(1 kind of products): a card times those padded" in note
    # Rows that begin at multiples of 16 bytes, however many: a copy would gain nothing.
    long, aligned = (torch.rand(size, 4096, device="cuda", dtype=torch.float16) for size in (4095, 4096))
    tall = torch.compile(lambda: long @ aligned)
    tall()
    assert peak(tall) == 32 * MIB
    # 2 GFLOP do not last as long as the copy of 32 MiB.
    thin = torch.rand(4095, 65, device="cuda", dtype=torch.float16)
    narrow = torch.compile(lambda value: value @ thin)
    narrow(x)
    assert peak(lambda: narrow(x)) < MIB
    as_it_is = torch.compile(lambda value: value @ weight, options={"shape_padding": False})
    as_it_is(x)
    assert peak(lambda: as_it_is(x)) == 32 * MIB
    gpu.turn_off()
    machine = gpu.turn_on("A100-40GB")
    x = torch.rand(4096, 4096, device="cuda", dtype=torch.float16)
    torch.compile(lambda value: value @ value)(x)
    assert machine.notes() == []


def test_a_graph_that_the_compiler_makes_anew_is_no_failure(machine: gpu.VirtualMachine) -> None:
    x = torch.rand(100, 8, device="cuda")
    torch._dynamo.mark_dynamic(x, 0)
    fast = torch.compile(lambda tensor: tensor.sin() * tensor.shape[0], backend="inductor")
    assert fast(x).shape == (100, 8)
    assert machine.notes() == []


def test_compiled_autograd() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256)).cuda()
    x = torch.rand(512, 64, device="cuda")

    with (
        importlib.import_module("torch._dynamo.config").patch(compiled_autograd=True),
        gpumem_magic.measure() as measured,
    ):
        torch.compile(lambda: model(x).square().mean().backward(), backend="aot_eager")()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.is_cuda for gradient in gradients)
    assert importlib.import_module("torch._dynamo.utils").counters["compiled_autograd"]["captures"] == 1
    # The compiler does not look into the measuring.
    (one,) = measured.report.compiled.breaks
    assert "backward()" in one.text


def test_a_compiled_backward_pass_runs_in_the_programs_own_thread() -> None:
    """With the workspace of its handle; autograd's thread for the device has another."""

    def workspaces() -> int:
        blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
        return sum(block["state"] == "active_allocated" and block["size"] > 8 << 20 for block in blocks)

    layer, x = nn.Linear(64, 256).cuda(), torch.rand(512, 64, device="cuda")
    with importlib.import_module("torch._dynamo.config").patch(compiled_autograd=True):
        torch.compile(lambda: layer(x).square().mean().backward(), backend="aot_eager")()
    assert workspaces() == 1
    layer(x).square().mean().backward()
    assert workspaces() == 2


def test_what_runs_in_a_backward_pass_may_trace() -> None:
    """As the compiler does there with a graph from its cache: proxies are no tensors, and are asked for their own ways."""
    traced = []

    def trace(gradient: torch.Tensor) -> None:
        module = torch.fx.symbolic_trace(lambda one: torch.ops.aten.view.default(one, [-1]))
        traced.append(module(gradient).shape)

    x = torch.rand(4, 2, device="cuda", requires_grad=True)
    x.register_hook(trace)
    x.sum().backward()
    torch.autograd.grad(x.sum(), x)
    assert traced == [(8,), (8,)]


def test_loops_of_the_compilers_own_and_pinned_memory(machine: gpu.VirtualMachine) -> None:
    operators = importlib.import_module("torch._higher_order_ops")
    x = torch.rand(4, 64, device="cuda")

    def sums(x: torch.Tensor) -> Any:
        return operators.scan(lambda carry, row: (carry + row, carry * row), torch.zeros_like(x[0]), x)[1]

    with torch.no_grad():
        assert torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)).shape == x.shape
        assert torch.compile(sums)(x).shape == sums(x).shape == x.shape
    # Where Inductor could not lower it, the report says so.
    assert all("operator by operator" in note for note in machine.notes() if "torch.compile" in note)
    # What generated code calls for pinned memory, which needs a driver.
    pinned = getattr(importlib.import_module("torch._C._dynamo.guards"), "_empty_strided_cpu_pinned", None)
    assert pinned is None or pinned((2,), (1,), torch.int64).shape == (2,)


def in_graphs() -> dict[tuple[int, int], int]:
    """Bytes of the segments of private pools."""
    pools: dict[tuple[int, int], int] = {}
    for segment in torch.cuda.memory_snapshot():
        pool = tuple(segment["segment_pool_id"])
        pools[pool] = pools.get(pool, 0) + segment["total_size"]
    pools.pop((0, 0), None)
    return pools


def test_cuda_graphs_keep_a_pool_and_replays_take_nothing(machine: gpu.VirtualMachine) -> None:
    """PyTorch itself checks at each recording that what lives in the pool is what it knows of (`check_memory_pool`)."""
    x = torch.rand(4 * MIB, device="cuda")
    fast = torch.compile(wave, mode="reduce-overhead")
    # To warm up: the result, and to 2.11 two numbers of a generator, which stay. Recorded: a copy of the input, too.
    numbers = 1024 if TorchVersion(torch.__version__) < "2.12" else 0
    assert peak(lambda: fast(x)) == 16 * MIB + numbers
    (before,) = in_graphs().values()
    assert peak(lambda: fast(x)) == 32 * MIB
    ((pool, after),) = in_graphs().items()
    assert (before, after) == (16 * MIB, 32 * MIB)
    assert peak(lambda: fast(x)) == 0
    # Another graph behind a replayed one, whose result lives: the pool is put back as it was after the first one's recording.
    other = torch.compile(lambda value: value.cos() * 2, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        result = fast(x)
        second = other(result)
        assert result.data_ptr() != second.data_ptr()
        del result, second
    # The input's copy is free by then: the second result lies there.
    assert in_graphs() == {pool: 32 * MIB}
    assert not [note for note in machine.notes() if "torch.compile" in note]


@pytest.mark.parametrize("settings", [{}, {"backend": "aot_eager"}], ids=str)
def test_branches_and_loops_have_gradients(machine: gpu.VirtualMachine, settings: dict[str, Any]) -> None:
    operators = importlib.import_module("torch._higher_order_ops")
    x = torch.rand(4, 1 << 18, device="cuda", requires_grad=True)

    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # type: ignore[no-any-return]

    def sums(x: torch.Tensor) -> Any:
        return operators.scan(lambda carry, row: (carry + row, carry * row), torch.zeros_like(x[0]), x)[1]

    for program in (branch, sums):
        fast = torch.compile(program, **settings)
        fast(x).sum().backward()
        assert x.grad is not None
        assert peak(lambda: fast(x).sum().backward()) >= x.nbytes  # noqa: B023
        x.grad = None
    gc.collect()
    assert torch.cuda.memory_allocated() == x.nbytes


def test_what_a_branch_outside_of_compiled_code_traces_holds_no_memory() -> None:
    x = torch.rand(MIB, device="cuda", requires_grad=True)
    after = []
    for _ in range(3):
        out = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        out.sum().backward()
        x.grad = None
        after.append(torch.cuda.memory_allocated())
    # The result, the predicates and sums of a few bytes.
    assert after[0] >= 2 * x.nbytes
    assert max(after) < 3 * x.nbytes


def test_vmap_and_attention_without_a_mask_are_in_one_graph(machine: gpu.VirtualMachine) -> None:
    def rowwise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: (row @ weight).relu())(x)

    x, weight = (torch.rand(64, 64, device="cuda", requires_grad=True) for _ in range(2))
    torch.compile(rowwise, fullgraph=True)(x, weight).sum().backward()
    assert x.grad is not None
    query = torch.rand(1, 2, 256, 64, device="cuda", requires_grad=True)
    flex_attention = importlib.import_module("torch.nn.attention.flex_attention").flex_attention
    for backend in ("inductor", "aot_eager"):
        query.grad = None
        torch.compile(flex_attention, fullgraph=True, backend=backend)(query, query, query).sum().backward()
        assert query.grad is not None
    assert not [note for note in machine.notes() if "first launch" not in note]


def test_scans_in_several_blocks_are_compiled_without_triton(machine: gpu.VirtualMachine) -> None:
    modules = set(sys.modules)
    x = torch.rand(2048, 64, device="cuda")
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        fast = torch.compile(lambda value: wave(wave(value).cumsum(0)))
        values = x.to(dtype)
        fast(values)
        # Beside the result, the buffer that the scan writes, and a little for its blocks: `wave` is fused on both sides.
        assert peak(lambda: fast(values)) < 2.5 * values.nbytes  # noqa: B023
    assert machine.notes() == []
    assert not [name for name in set(sys.modules) - modules if name.partition(".")[0] == "triton"]


def test_tensors_that_wrap_others_are_compiled(machine: gpu.VirtualMachine) -> None:
    x, y = (torch.rand(MIB, device="cuda") for _ in range(2))
    pair = TwoTensor(x, y).requires_grad_()  # type: ignore[no-untyped-call]
    fast = torch.compile(lambda value: (value.sin() * 2).exp().sum())
    with warnings.catch_warnings():
        # PyTorch's own, on this class and its cache.
        warnings.filterwarnings("ignore", "TwoTensor does not implement")
        fast(pair).backward()
    assert isinstance(pair.grad, TwoTensor)
    pair.grad = None
    # The two gradients, and what the forward keeps of each.
    assert peak(lambda: fast(pair).backward()) <= 4 * 4 * MIB + 4096
    assert machine.notes() == []


def test_a_value_that_compiled_code_reads_is_read_at_the_programs_line(machine: gpu.VirtualMachine) -> None:
    def selected(rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        count = mask.sum().item()
        torch._check(count >= 0)
        return rows[mask].sum() + count

    config = importlib.import_module("torch._dynamo.config")
    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        rows, mask = torch.rand(4096, 8, device="cuda"), torch.rand(4096, device="cuda") > 0.5
        torch.compile(selected, fullgraph=True)(rows, mask)
    ((file, _),) = machine.reads.counts
    assert file == __file__


def test_what_a_checkpoint_computes_anew_stays_compiled(machine: gpu.VirtualMachine) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return wave(x @ x)

    fast = torch.compile(run)
    x = torch.rand(1024, 1024, device="cuda", requires_grad=True)
    # 2.9 compiles nothing under a policy, on any device (`CatchErrorsWrapper` in `torch/_dynamo/convert_frame.py`).
    for settings in ({"context_fn": contexts}, {})[TorchVersion(torch.__version__) < "2.10" :]:
        step = functools.partial(checkpoint, fast, x, use_reentrant=False, **settings)
        step().sum().backward()
        assert peak(lambda: step().sum().backward()) < peak(lambda: run(x).sum().backward())  # noqa: B023
    assert machine.notes() == []


def test_a_checkpoints_policy_sees_of_a_compiled_part_what_it_sees_on_the_host() -> None:
    """The first run; in 2.11 and older, what is computed anew, too."""
    fast = torch.compile(wave, backend="aot_eager")
    seen: list[str] = []

    def keep(policy: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append(operator.__name__)
        return CheckpointPolicy.MUST_SAVE

    def seen_of(x: torch.Tensor) -> list[str]:
        seen.clear()
        selective = functools.partial(create_selective_checkpoint_contexts, keep)
        checkpoint(fast, x, use_reentrant=False, context_fn=selective).sum().backward()
        return list(seen)

    on_host = seen_of(torch.rand(1024, requires_grad=True))
    assert on_host[:4] == ["sin.default", "exp.default", "cos.default", "tanh.default"]
    x = torch.rand(1024, device="cuda", requires_grad=True)
    assert seen_of(x) == seen_of(x) == on_host


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dynamic": True},
        {"mode": "reduce-overhead"},
        {"backend": "aot_eager"},
        {"backend": "aot_eager_decomp_partition"},
    ],
    ids=str,
)
def test_draws_that_backward_repeats_stay_compiled(machine: gpu.VirtualMachine, settings: dict[str, Any]) -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(2, 512, 4, 64).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True, dropout_p=0.1)
        noise = torch.rand(256, device="cuda", dtype=x.dtype)
        return F.dropout(attended.transpose(1, 2).reshape(2, 512, 256), 0.5) * noise

    def recomputed(x: torch.Tensor) -> Any:
        return checkpoint(inner, x, use_reentrant=False)

    x = torch.rand(2, 512, 256, device="cuda", dtype=torch.float16, requires_grad=True)
    fast, plain = torch.compile(recomputed, **settings), torch.compile(inner, **settings)

    def kept(run: Callable[[torch.Tensor], torch.Tensor]) -> int:
        for _ in range(3):
            x.grad = None
            before = torch.cuda.memory_allocated()
            out = run(x)
            forward = torch.cuda.memory_allocated() - before
            out.sum().backward()
            del out
        return forward

    if "mode" in settings:  # (its pool holds what is kept)
        assert kept(fast) <= kept(plain)
        assert len(in_graphs()) == 1
    else:
        assert kept(fast) < kept(plain)
    assert x.grad is not None
    assert machine.notes() == []


def test_the_backend_of_cuda_graphs_alone(machine: gpu.VirtualMachine) -> None:
    x = torch.rand(4 * MIB, device="cuda")
    fast = torch.compile(wave, backend="cudagraphs")
    for _ in range(2):
        fast(x)
    # Operator by operator, in the pool: two results at once. The input's copy is given back after its only use.
    assert list(in_graphs().values()) == [32 * MIB]
    assert peak(lambda: fast(x)) == 0


def test_a_result_that_a_later_run_overwrote_is_refused_as_on_a_card() -> None:
    fast = torch.compile(wave, mode="reduce-overhead")
    x = torch.rand(1024, device="cuda")
    first = fast(x)
    second = fast(x)
    assert first.shape == x.shape
    uses: list[Callable[[], object]] = [lambda: first + 1, first.cpu, first.data_ptr, lambda: repr(first)]
    for use in uses:
        with pytest.raises(RuntimeError, match="CUDAGraphs that has been overwritten by a subsequent run") as raised:
            use()
        assert "in wave" in str(raised.value)
    kept = (second + x).clone()
    for _ in range(3):
        kept = kept + fast(x)
    assert kept.cpu().shape == x.shape


def test_training_in_cuda_graphs(machine: gpu.VirtualMachine) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).cuda()
    fast = torch.compile(model, mode="reduce-overhead")
    x = torch.rand(4096, 256, device="cuda")

    def step(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        run(x).square().mean().backward()
        model.zero_grad(set_to_none=True)

    peaks = [peak(lambda: step(fast)) for _ in range(4)]  # noqa: F821 - it is deleted below
    # What is kept for backward lies in the pool, which replays only use.
    assert peaks[2] == peaks[3] < min(peaks[:2])
    assert len(in_graphs()) == 1
    allocated = torch.cuda.memory_allocated()
    torch._dynamo.reset()
    del fast
    gc.collect()
    torch.cuda.empty_cache()
    assert in_graphs() == {}
    assert torch.cuda.memory_allocated() <= allocated


def test_nothing_is_left_when_the_device_is_off() -> None:
    fake = importlib.import_module("torch._subclasses.fake_tensor")
    rules = importlib.import_module("torch._dynamo.trace_rules")
    config = importlib.import_module("torch._inductor.config")
    gpu.turn_off()
    tag = torch.compiler.config.cache_key_tag
    before = (list(rules.SKIP_DIRS), dict(vars(fake.FakeTensor)), config.compile_threads)
    gpu.turn_on("T4")
    torch.compile(wave)(torch.rand(8, device="cuda"))
    assert "T4" in torch.compiler.config.cache_key_tag != tag
    gpu.turn_off()
    after = (list(rules.SKIP_DIRS), dict(vars(fake.FakeTensor)), config.compile_threads)
    assert after == before
    assert torch.compiler.config.cache_key_tag == tag
    x = torch.rand(8)
    assert torch.equal(torch.compile(wave, backend="aot_eager")(x), wave(x))
    gpu.turn_on("T4")


def test_what_is_compiled_is_compiled_once_and_only_its_folder_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cache", "temporary", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "here")
    x = torch.rand(64, device="cuda", requires_grad=True)
    counters = importlib.import_module("torch._dynamo.utils").counters

    def program() -> Any:
        return torch.compile(lambda value: wave(value) * 3)

    fast = program()
    fast(x).sum().backward()
    hits = counters["inductor"]["fxgraph_cache_hit"]
    written = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {"cache"}
    graphs = counters["stats"]["unique_graphs"]
    with gpumem_magic.measure() as measured:
        fast(x).sum().backward()
    assert counters["stats"]["unique_graphs"] == graphs
    assert measured.report.compiled is None
    torch._dynamo.reset()
    program()(x).sum().backward()
    assert counters["inductor"]["fxgraph_cache_hit"] == hits + 2
    gpu.turn_on("T4")
    program()(torch.rand(64, device="cuda", requires_grad=True)).sum().backward()
    assert counters["inductor"]["fxgraph_cache_hit"] == hits + 2


def test_real_values_run_eagerly() -> None:
    machine = gpu.turn_on("T4,values=real")
    x = torch.rand(8)
    assert torch.allclose(torch.compile(wave)(x.cuda()).cpu(), wave(x))
    (note,) = [note for note in machine.notes() if "ran eagerly (1 call)" in note]
    assert note.endswith("It is compiled where the device is taken without values=real.")


def test_a_device_and_a_branch_by_its_values_load_no_inductor() -> None:
    """Neither while it is turned on nor, with what Dynamo has looked at, while it is turned off."""
    program = """
import sys, torch
from gpumem_magic.virtual import gpu
gpu.turn_on("A100-40GB")
x = torch.rand(3, device="cuda")
print(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)).shape)
gpu.turn_off()
print("torch._inductor.compile_fx" in sys.modules, torch.cuda.is_available())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["torch.Size([3])", "False", "False"]
