"""A virtual GPU that computes: programs print what they print on the host, and memory is what it is without values."""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gpumem_magic
from gpumem_magic.devices.base import DeviceError
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.card import catalog
from gpumem_magic.virtual.engine import host_memory

FOLDER = Path(__file__).parents[1] / "benchmarks" / "real_values"
sys.path.append(str(FOLDER))

import basics  # noqa: E402 - the programs of `benchmarks/real_values`
import modern  # noqa: E402
import networks  # noqa: E402
import numerics  # noqa: E402


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    gpu.turn_off()


def printed(program: Callable[[str], None], device: str, capsys: pytest.CaptureFixture[str]) -> str:
    torch.manual_seed(0)
    capsys.readouterr()
    program(device)
    text = capsys.readouterr().out.replace("device='cuda:0'", "").replace(",", " ")
    return " ".join(text.split()).replace(" )", ")")


# One of each kind; `python benchmarks/real_values` runs all.
PROGRAMS = [
    modern.symbolic_trace, modern.own_operator, modern.hooks_of_all_kinds, modern.hessian_vector_products,
    modern.modules_and_tensors_in_files, modern.checkpoints_across_devices, modern.arrays, modern.captured_graphs,
    modern.prefetched_by_a_stream, modern.spline_network, modern.dreaming,
    basics.tensors, basics.classifier, basics.data_loader, basics.save_and_load, basics.optimizers,
    basics.fused_optimizers,
    basics.second_order_by_lbfgs, basics.early_stopping, basics.mixed_precision, basics.overflow_in_the_scaler,
    basics.checkpointed, basics.hooks, basics.copies, basics.initialised, basics.dropout_of_all_kinds, basics.seeds,
    basics.nested_modules,
    numerics.linear_algebra, numerics.fourier, numerics.complex_numbers, numerics.indexing, numerics.gather_and_scatter,
    numerics.boolean_masks, numerics.sorting, numerics.sizes_from_values, numerics.sparse_matrices,
    numerics.embeddings_with_sparse_gradients, numerics.distributions, numerics.sampling, numerics.metropolis, numerics.jacobians,
    numerics.per_sample_gradients, numerics.gradient_penalty, numerics.runge_kutta_with_steps_that_adapt, numerics.neural_ode,
    numerics.k_means, numerics.integers_and_bits, numerics.other_looks, networks.mnist, networks.resnet, networks.channels_last,
    networks.depthwise_and_dilated, networks.normalisations, networks.losses, networks.style_transfer,
    networks.boxes_and_suppression, networks.language_model_by_lstm, networks.sine_waves_by_cells,
    networks.translation_with_attention, networks.packed_sequences, networks.speech_by_ctc, networks.small_gpt,
    networks.generation, networks.beam_search, networks.encoder_with_padding, networks.whole_transformer,
    networks.mixture_of_experts, networks.scripted, networks.variational_autoencoder, networks.adversarial, networks.diffusion,
    networks.policy_gradient, networks.deep_q_learning, networks.meta_learning, networks.message_passing,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_half_precision_have_gradients(dtype: torch.dtype) -> None:
    """The card keeps their means in float32; the host's kernel would have them in half precision."""
    gpu.turn_on("A100-40GB,values=real")
    gradients = []
    for device in ("cpu", "cuda"):
        norm = torch.nn.LayerNorm(8).to(device, dtype)
        x = torch.linspace(-2, 3, 32).view(4, 8).square().to(device, dtype).requires_grad_()
        (norm(x) * torch.linspace(0, 1, 8).to(device, dtype)).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad.cpu().float())
    assert torch.allclose(*gradients, atol=0.02)
    assert gradients[0].abs().max() > 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("of", [torch.softmax, torch.log_softmax])
def test_softmax_of_half_precision_is_float32_where_autocast_asks(of: Callable[..., Any], dtype: torch.dtype) -> None:
    start = torch.linspace(-3, 3, 20).view(4, 5)
    found = {}
    for device in ("cpu", "cuda"):
        if device == "cuda":
            gpu.turn_on("T4,values=real")
        x = start.to(device, dtype).requires_grad_()
        with torch.autocast(device, dtype):
            y = of(x, -1) if device == "cuda" else of(x, -1, dtype=torch.float32)
        assert y.dtype == torch.float32
        y.square().sum().backward()
        found[device] = y.detach().cpu(), x.grad.cpu()
    for one, other in zip(*found.values(), strict=True):
        assert one.dtype == other.dtype
        assert torch.allclose(one.float(), other.float(), atol=4e-3)
    with torch.autocast("cuda", dtype):
        torch.nn.functional.cross_entropy(start.to("cuda", dtype), torch.arange(4, device="cuda"))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_types_that_only_cudas_kernels_take() -> None:
    gpu.turn_on("T4,values=real")
    experts = torch.tensor([0, 1, 1, 3], device="cuda", dtype=torch.int32)
    counted = torch.histc(experts, bins=4, min=0, max=3)
    assert (counted.dtype, counted.tolist()) == (torch.int32, [1, 2, 0, 1])
    # (Whole numbers, as CUDA reckons: none falls below its bin by rounding.)
    assert torch.histc(torch.arange(49, device="cuda"), bins=49, min=0, max=49).tolist() == [1] * 49
    flags = torch.tensor([True, False], device="cuda")
    assert flags.abs().tolist() == flags.abs_().tolist() == [True, False]
    assert torch.tensor([1 + 1j, float("nan")], device="cuda").nansum().item() == 1 + 1j
    wave = torch.arange(8.0, device="cuda").half()
    spectrum = torch.fft.rfft(wave)
    assert spectrum.dtype == torch.complex32
    back = torch.fft.irfft(spectrum)
    assert back.dtype == torch.float16
    assert torch.allclose(back.float(), wave.float(), atol=0.02)


@pytest.mark.parametrize("device", ["T4", "T4,values=real"])
def test_what_cuda_has_no_kernel_for_is_an_error_as_there(device: str) -> None:
    gpu.turn_on(device)
    whole = torch.ones(2, 3, 3, device="cuda", dtype=torch.int64)
    for product, kernel in (
        (lambda: whole[0] @ whole[1], "\"addmm_cuda\" not implemented for 'Long'"),
        (lambda: whole @ whole, "\"baddbmm_cuda\" not implemented for 'Long'"),
        (lambda: whole[0] @ whole[0, 0], "\"addmv_impl_cuda\" not implemented for 'Long'"),
        (lambda: whole[0, 0] @ whole[0, 1], "\"dot\" not implemented for 'Long'"),
        (lambda: whole[0].bool() @ whole[1].bool(), "\"addmm_cuda\" not implemented for 'Bool'"),
    ):
        with pytest.raises(NotImplementedError) as error:
            product()
        assert str(error.value) == kernel
    with pytest.raises(
        NotImplementedError, match=r"^Could not run 'aten::histogram.bin_ct' with arguments from the 'CUDA' backend"
    ):
        torch.histogram(whole.float(), 10)
    assert torch.histogram(whole.float().cpu(), 10).hist.shape == (10,)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = torch.eye(3, device="cuda").to_sparse_csr()
    with pytest.raises(NotImplementedError, match=r"^Could not run 'aten::_sparse_mm_reduce_impl' with arguments from"):
        # (Its gradient ended the process.)
        torch.sparse.mm(rows, whole[0].float(), reduce="mean")
    assert F.max_pool2d(whole.float(), 2).shape == (2, 1, 1)
    assert (whole[0].float() @ whole[1].float()).shape == (3, 3)
    assert (whole[0, :0] @ whole[1]).shape == (0, 3)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The order in which threads add numbers up shows in the last digit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", [torch.nn.GRUCell, torch.nn.LSTMCell])
def test_cells_round_as_the_hosts_do(kind: Callable[..., torch.nn.Module]) -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        cell = kind(30, 172).to(device)
        x, state = (torch.randn(40, size).to(device) for size in (30, 172))
        out = cell(x, state) if kind is torch.nn.GRUCell else sum(cell(x, (state, state)))
        out.square().sum().backward()
        return [one.detach().cpu() for one in (out, *(it.grad for it in cell.parameters()))]

    expected = run("cpu")
    gpu.turn_on("T4,values=real")
    for ours, theirs in zip(run("cuda"), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_print_what_they_print_on_the_host(
    program: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = printed(program, "cpu", capsys)
    machine = gpu.turn_on("T4,values=real")
    assert printed(program, "cuda", capsys) == wanted
    assert wanted
    assert not machine.reads.counts
    assert not machine.engine.largest_sizes


def events(program: Callable[[str], None], device: str) -> list[tuple[str, int, int]]:
    """(action, address, bytes) of all that the allocator did."""
    machine = gpu.turn_on(device)
    log = machine.devices[0].start_log()
    torch.manual_seed(0)
    program("cuda")
    machine.settle()
    return [(event.action, event.address, event.size) for event in log.stop().events]


# Programs whose way does not depend on values.
STRAIGHT = [
    basics.autograd_scalars, basics.optimizers, basics.accumulated, basics.checkpointed, basics.dropout_of_all_kinds,
    networks.resnet, networks.depthwise_and_dilated, networks.u_net, networks.language_model_by_lstm, networks.packed_sequences,
    networks.small_gpt, networks.encoder_with_padding, networks.losses, numerics.einsum_of_all_kinds, numerics.complex_numbers,
    numerics.gaussian_process, numerics.gradient_penalty,
]  # fmt: skip


@pytest.mark.parametrize("program", STRAIGHT, ids=lambda program: program.__name__)
def test_memory_is_that_without_values_event_for_event(program: Callable[[str], None]) -> None:
    computed = events(program, "A100-40GB,values=real")
    assert len(computed) > 10
    assert computed == events(program, "A100-40GB")


def attention(device: str, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    masked = options.pop("masked", False)
    inputs = [torch.randn(2, 4, 9, 16, dtype=dtype).to(device).requires_grad_() for _ in range(3)]
    mask = (torch.rand(2, 1, 9, 9) > 0.3).to(device) if masked else None
    out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, **options)
    out.float().square().sum().backward()
    return [tensor.detach().float().cpu() for tensor in (out, *[one.grad for one in inputs])]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kernel", "dtype", "options"),
    [
        (SDPBackend.FLASH_ATTENTION, torch.float16, {}),
        (SDPBackend.FLASH_ATTENTION, torch.float16, {"is_causal": True}),
        (SDPBackend.FLASH_ATTENTION, torch.float16, {"dropout_p": 0.3}),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32, {"masked": True}),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32, {"masked": True, "dropout_p": 0.2}),
        (SDPBackend.CUDNN_ATTENTION, torch.float16, {"masked": True}),
        (SDPBackend.CUDNN_ATTENTION, torch.float16, {"dropout_p": 0.1}),
        (SDPBackend.MATH, torch.float32, {"is_causal": True}),
    ],
)
def test_kernels_of_cudas_own_by_the_hosts(kernel: SDPBackend, dtype: torch.dtype, options: dict[str, Any]) -> None:
    wanted = attention("cpu", dtype, **options)
    # (With 2.13 cuDNN takes no dropout.)
    gpu.turn_on("H100,torch=2.11,values=real")
    with sdpa_kernel(kernel):
        found = attention("cuda", dtype, **options)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=5e-3 if dtype == torch.float16 else 1e-5)


def test_a_captured_graph_is_computed_when_it_is_replayed() -> None:
    gpu.turn_on("T4,values=real")
    weight = torch.ones(3, device="cuda")
    x = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = weight * x
        weight += 1
    assert weight.tolist() == [1, 1, 1]
    graph.replay()
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    graph.replay()
    assert y.tolist() == [2, 4, 6]
    assert weight.tolist() == [3, 3, 3]


def test_a_captured_batch_norm_of_an_evaluation_is_replayed() -> None:
    """In half precision the device has its statistics as results, the host's kernel gives none."""
    gpu.turn_on("T4,values=real")
    layer = torch.nn.BatchNorm2d(2).eval().cuda().half()
    x = torch.ones(1, 2, 1, 1, device="cuda", dtype=torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = layer(x) * 2
    x.fill_(3.0)
    graph.replay()
    assert y.flatten().tolist() == [6.0, 6.0]


def test_random_numbers_are_those_of_the_host_and_of_a_device() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(2), torch.rand(2)
    gpu.turn_on("T4,values=real")
    torch.manual_seed(5)
    torch.cuda.manual_seed_all(5)
    # One stream of numbers for both, as on the host.
    assert torch.equal(torch.rand(2), wanted[0])
    assert torch.equal(torch.rand(2, device="cuda").cpu(), wanted[1])
    torch.cuda.manual_seed(7)
    first = torch.rand(2, device="cuda")
    state = torch.get_rng_state()
    torch.cuda.manual_seed(7)
    assert torch.equal(torch.rand(2, device="cuda"), first)
    assert torch.equal(torch.get_rng_state(), state), (
        "a device with a seed of its own leaves the host's generator alone"
    )
    kept = torch.cuda.get_rng_state()
    again = torch.rand(2, device="cuda")
    torch.cuda.set_rng_state(kept)
    assert torch.equal(torch.rand(2, device="cuda"), again)
    with torch.random.fork_rng():
        torch.rand(5, device="cuda")
    one, other = (torch.Generator("cuda").manual_seed(3) for _ in range(2))
    assert torch.equal(torch.randn(4, device="cuda", generator=one), torch.randn(4, device="cuda", generator=other))


def test_tensors_print_as_on_a_device() -> None:
    gpu.turn_on("T4,values=real")
    assert repr(torch.ones(2, device="cuda")) == "tensor([1., 1.], device='cuda:0')"
    assert repr(torch.tensor(3, device="cuda")) == "tensor(3, device='cuda:0')"
    assert repr(torch.zeros(0, 3, device="cuda")) == "tensor([], device='cuda:0', size=(0, 3))"
    x = torch.ones(2, device="cuda", dtype=torch.float64, requires_grad=True)
    assert repr(x) == "tensor([1., 1.], device='cuda:0', dtype=torch.float64, requires_grad=True)"
    assert repr(x * 2) == "tensor([2., 2.], device='cuda:0', dtype=torch.float64, grad_fn=<MulBackward0>)"
    assert (
        repr(torch.tensor(0.5, device="cuda", dtype=torch.float64))
        == "tensor(0.5000, device='cuda:0', dtype=torch.float64)"
    )


def test_a_checkpoint_holds_the_values_and_may_be_overwritten(tmp_path: Path) -> None:
    gpu.turn_on("T4,values=real")
    model = nn.Linear(2, 2).cuda()
    for _ in range(2):
        torch.save(model.state_dict(), tmp_path / "model.pt")
    tied = torch.ones(4, device="cuda")
    buffer = io.BytesIO()
    torch.save([tied, tied[1:]], buffer)
    buffer.seek(0)
    whole, part = torch.load(buffer)
    whole[1] = 5
    assert part.tolist() == [5, 1, 1]
    assert str(whole.device) == "cuda:0"
    gpu.turn_off()
    stored = torch.load(tmp_path / "model.pt", map_location="cpu")
    assert stored["weight"].abs().sum() > 0


def test_storages_resized_set_and_copied() -> None:
    gpu.turn_on("2xT4,values=real")
    x = torch.arange(4.0, device="cuda")
    x.untyped_storage().resize_(32)
    x.resize_(8)
    x[4:] = 1
    assert x.tolist() == [0, 1, 2, 3, 1, 1, 1, 1]
    y = torch.zeros(2, device="cuda")
    y.data = x[1:3]
    assert y.tolist() == [1, 2]
    y.set_(x.untyped_storage(), 2, (2,), (2,))
    assert y.to("cuda:1").tolist() == [2, 1]
    assert x.untyped_storage().cpu()[4:8].tolist() == list(b"\x00\x00\x80?")
    saved = torch.UntypedStorage(32)
    saved.copy_(x.untyped_storage(), non_blocking=False)
    assert saved[4:8].tolist() == list(b"\x00\x00\x80?")


def test_an_operator_without_a_shape_rule_has_the_shape_of_what_is_computed() -> None:
    gpu.turn_on("T4,values=real")
    library = torch.library.Library("gpumem_tests", "DEF")
    library.define("evens(Tensor x) -> Tensor")
    library.impl("evens", lambda x: x[x % 2 == 0], "CPU")
    x = torch.arange(5, device="cuda")
    assert torch.ops.gpumem_tests.evens(x).tolist() == [0, 2, 4]
    assert torch.cuda.memory_allocated() == 512, "nothing is left of the result"


def test_a_kernel_of_a_library_that_only_cuda_has_gives_zeros_and_is_named() -> None:
    machine = gpu.turn_on("T4,values=real")
    library = torch.library.Library("gpumem_tests_cuda", "DEF")
    library.define("fused(Tensor x) -> Tensor")
    gpumem_magic.register_kernel("gpumem_tests_cuda::fused", lambda x: x.new_empty(3))
    assert torch.ops.gpumem_tests_cuda.fused(torch.ones(2, device="cuda")).tolist() == [0, 0, 0]
    assert any("gpumem_tests_cuda::fused" in note for note in machine.notes())


def test_what_does_not_fit_into_the_hosts_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = gpu.turn_on("T4,values=real")
    monkeypatch.setattr(host_memory, "available", lambda: 512 * 2**20)
    torch.zeros(2**20, device="cuda")
    with pytest.raises(host_memory.HostMemoryFull, match="512 MiB are available"):
        torch.zeros(2**28, device="cuda")
    machine.settle()
    assert torch.cuda.memory_allocated() == 0
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(2**33, device="cuda")
    monkeypatch.setattr(host_memory, "available", lambda: None)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(2**33, device="cuda")


def test_checks_of_values_see_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch's compiler turns it off for the whole process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    gpu.turn_on("T4,values=real")
    with pytest.raises(ValueError, match="Expected parameter scale"):
        torch.distributions.Normal(torch.zeros(2, device="cuda"), -torch.ones(2, device="cuda"))
    with pytest.raises(torch.linalg.LinAlgError, match="cholesky"):
        torch.linalg.cholesky(-torch.eye(3, device="cuda"))
    with pytest.raises(IndexError):
        torch.zeros(3, device="cuda")[torch.tensor([5], device="cuda")]
    assert torch.isnan(torch.tensor([float("nan")], device="cuda")).any()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_whose_last_offset_is_their_end(mode: str) -> None:
    table, rows = torch.randn(4, 6), torch.tensor([0, 2, 3, 1])

    def bags(device: str) -> list[torch.Tensor]:
        weight = table.to(device, copy=True).requires_grad_()
        given = (rows.to(device), weight, torch.tensor([0, 2, 4], device=device))
        out = torch.nn.functional.embedding_bag(*given, mode=mode, include_last_offset=True)
        (out * out).sum().backward()
        with torch.no_grad():
            again = torch.nn.functional.embedding_bag(*given, mode=mode, include_last_offset=True)
        assert weight.grad is not None
        return [one.detach().cpu() for one in (out, again, weight.grad)]

    on_the_host = bags("cpu")
    gpu.turn_on("T4,values=real")
    for found, expected in zip(bags("cuda"), on_the_host, strict=True):
        torch.testing.assert_close(found, expected)


def test_two_devices_add_up_gradients() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(6, 3)
    model(x).square().sum().backward()
    wanted, model.weight.grad = model.weight.grad, None
    gpu.turn_on("2xT4,values=real")
    nn.DataParallel(model.cuda())(x.cuda()).square().sum().backward()
    assert model.weight.grad is not None
    assert wanted is not None
    assert torch.allclose(model.weight.grad.cpu(), wanted, atol=1e-4)


def test_the_spec_and_the_report_say_so() -> None:
    spec = catalog.parse("2xT4, values=real, context=300MiB")
    assert isinstance(spec, catalog.DeviceSpec)
    assert spec.computes
    with pytest.raises(DeviceError, match=r"values=some: write values=real \(computed on the host\)"):
        catalog.parse("T4,values=some")
    assert not catalog.parse("T4,values=stand-in").computes  # type: ignore[union-attr]
    assert "values=real" in catalog.describe()
    gpu.turn_on("T4,values=real")
    with gpumem_magic.measure() as measured:
        print(torch.ones(3, device="cuda").sum().item())
    text = str(measured.report.explain())
    assert "Values are real" in text
    assert "stand-in" not in text


@pytest.mark.parametrize("values", ["real", "stand-in"])
def test_a_pickle_brings_tensors_back_to_their_device(values: str) -> None:
    gpu.turn_on(f"2xT4,values={values}")
    weight = nn.Parameter(torch.arange(4.0, device="cuda:1"))
    weight.note = "mine"  # type: ignore[attr-defined]
    before = torch.cuda.memory_allocated(1)
    again = pickle.loads(pickle.dumps(weight))
    assert torch.cuda.memory_allocated(1) == before + 512
    assert (str(again.device), again.note, again.requires_grad) == ("cuda:1", "mine", True)
    assert isinstance(again, nn.Parameter)
    assert again.tolist() == [0.0, 1.0, 2.0, 3.0]
    plain = pickle.loads(pickle.dumps({"x": weight.detach()[1:]}))["x"]
    assert (plain.is_cuda, plain.requires_grad, type(plain) == torch.Tensor) == (True, False, True)  # noqa: E721


def test_shape_rules_that_see_the_meta_device_take_no_memory() -> None:
    """The tangent of a tensor that does not depend on the direction is zero, and C++ asks for a product's shape alone."""
    gpu.turn_on("T4,values=stand-in")
    w, v = torch.ones(512, device="cuda"), torch.ones(512, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    product = torch.func.jvp(torch.func.grad(lambda a: (a.sin() * a.flip(0)).sum()), (w,), (v,))[1]
    assert product.shape == (512,)
    with pytest.raises(RuntimeError, match="cuda:0 and meta"):
        w * torch.empty(512, device="meta")


def test_a_loss_holds_the_memory_of_its_shares_and_what_lies_behind_it_may_be_looked_at() -> None:
    gpu.turn_on("T4,values=real")
    x, y = torch.ones(64, 64, device="cuda"), torch.zeros(64, 64, device="cuda")
    loss = torch.nn.functional.mse_loss(x, y)
    assert (loss.item(), loss.shape, loss.untyped_storage().nbytes()) == (1.0, (), 4 * 64 * 64)
    whole = torch.empty(0, device="cuda").set_(loss.untyped_storage(), 0, (64, 64), (64, 1))
    whole.fill_(3.0)
    assert (loss.item(), whole.sum().item()) == (3.0, 3.0 * 64 * 64)
    assert (loss + whole[5, 7]).item() == 6.0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("dtype", [torch.float, torch.double, torch.bfloat16])
@pytest.mark.parametrize(("normed", "gelu", "lengths"), [(False, True, (7, 10)), (True, False, (1, 9))])
def test_an_encoder_gives_zeros_for_padding_as_where_it_unpacks_sequences(
    normed: bool, gelu: bool, lengths: tuple[int, int], dtype: torch.dtype
) -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        activation = "gelu" if gelu else "relu"
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0, activation=activation)
        encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16) if normed else None)
        encoder = encoder.to(device, dtype).eval()
        x = torch.randn(2, 10, 16).to(device, dtype)
        padding = (torch.arange(10) >= torch.tensor(lengths)[:, None]).to(device)
        with torch.no_grad():
            packed, whole = encoder(x, src_key_padding_mask=padding), encoder(x)
        return [one.cpu() for one in (packed, whole, encoder(x, src_key_padding_mask=padding).detach())]

    hosts = run("cpu")
    gpu.turn_on("T4,values=real")
    alike = {"atol": 0.05, "rtol": 0.05} if dtype == torch.bfloat16 else {}
    for here, there in zip(run("cuda"), hosts, strict=True):
        torch.testing.assert_close(here, there, **alike)


def test_a_devices_own_generator_may_be_given() -> None:
    gpu.turn_on("T4,values=real")
    for seed in (None, 7):
        if seed is not None:
            torch.cuda.manual_seed(seed)
        generator = torch.cuda.default_generators[0]
        assert torch.empty(3, device="cuda").normal_(generator=generator).std() > 0
        assert torch.rand(3, device="cuda", generator=generator).is_cuda
    assert generator.device == torch.device("cuda:0")


def test_what_ended_is_given_back_on_the_host_where_it_computes_next() -> None:
    """Its allocator gives the block to the first who asks: to the next result, as in a program on the host."""
    machine = gpu.turn_on("T4,values=real")
    x = torch.rand(256, 1024, device="cuda")
    for _ in range(3):
        x.relu()
    gone = machine.engine.table.gone
    machine.engine.table.drain()
    assert [one.host.shape for one in gone] == [x.shape]
    x.relu()
    assert not gone
    # Of a whole model that is deleted no more waits than a few blocks.
    layers = [torch.rand(64, 1024, device="cuda") for _ in range(10)]
    del layers
    machine.engine.table.drain()
    assert 0 < len(gone) < 10
