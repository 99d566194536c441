"""Programs as people have them, unmodified, on the virtual GPU: plain PyTorch."""

from __future__ import annotations

import functools
import importlib
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import made
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import gpumem_magic
from gpumem_magic.virtual import gpu

KIB = 1 << 10
MIB = 1 << 20
WORKSPACE = 8519680


of_many_processes = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed"
)


@pytest.fixture(autouse=True)
def machine() -> Iterator[gpu.VirtualMachine]:
    yield gpu.turn_on("A100-40GB")
    gpu.turn_off()


def rand(*shape: int, **options: Any) -> torch.Tensor:
    return torch.rand(*shape, device="cuda", **options)


def allocated() -> int:
    return torch.cuda.memory_allocated()


# ---- activation checkpointing


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_keeps_less_and_recomputes(use_reentrant: bool) -> None:
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)]).cuda()
    x = rand(1024, 256, requires_grad=True)
    layers(x)  # the workspace
    before = allocated()
    plain = layers(x)
    with_everything = allocated() - before
    del plain
    y = x
    for layer in layers:
        y = checkpoint(layer, y, use_reentrant=use_reentrant)
    assert allocated() - before == 8 * MIB, "one output for each layer"
    assert with_everything == 16 * MIB - 8 * MIB, "the ReLU's output, which is saved, for each layer"
    y.sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is not None for parameter in layers.parameters())


def test_checkpointing_in_sequence_and_by_choice() -> None:
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).cuda()
    checkpoint_sequential(layers, 2, rand(8, 64, requires_grad=True), use_reentrant=False).sum().backward()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        kept = op == torch.ops.aten.mm.default
        policies = torch.utils.checkpoint.CheckpointPolicy
        return policies.MUST_SAVE if kept else policies.PREFER_RECOMPUTE

    contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, policy)
    x = rand(8, 64, requires_grad=True)
    checkpoint(layers, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert x.grad is not None


# ---- layers


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_and_packed_sequences(kind: Any) -> None:
    model = kind(16, 32, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1).cuda()
    model(rand(4, 7, 16))[0].sum().backward()
    packed = nn.utils.rnn.pack_padded_sequence(rand(4, 7, 16), torch.tensor([7, 5, 3, 1]), batch_first=True)
    assert packed.data.shape == (16, 16)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
    assert padded.shape == (4, 7, 64)
    assert lengths.tolist() == [7, 5, 3, 1]
    padded.sum().backward()
    moved = nn.utils.rnn.pack_sequence([torch.rand(3, 2), torch.rand(2, 2)]).to("cuda")
    assert moved.is_cuda


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_and_batch_norm(channels_last: bool) -> None:
    form = torch.channels_last if channels_last else torch.contiguous_format
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3),
        nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    ).to("cuda", memory_format=form)  # fmt: skip
    x = rand(2, 3, 32, 32).to(memory_format=form)
    y = model[:5](x)
    assert y.is_contiguous(memory_format=form)
    F.cross_entropy(model(x), torch.tensor([1, 2], device="cuda")).backward()
    assert model[0].weight.grad.shape == (8, 3, 3, 3)
    model.eval()
    with torch.no_grad():
        assert model(x).shape == (2, 10)
    nn.ConvTranspose2d(8, 4, 2, 2).cuda()(rand(1, 8, 4, 4)).sum().backward()
    nn.Conv1d(3, 4, 3).cuda()(rand(1, 3, 9)).sum().backward()
    nn.Conv3d(1, 2, 3).cuda()(rand(1, 1, 5, 5, 5)).sum().backward()


def test_one_channels_last_argument_is_enough_and_doubles_have_none() -> None:
    layer = nn.Conv2d(4, 8, 3).cuda()
    x = rand(2, 4, 8, 8)
    assert layer(x).is_contiguous()
    assert layer(x.to(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)
    assert layer.double()(x.double().to(memory_format=torch.channels_last)).is_contiguous()


def test_transformers_of_pytorchs_own() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, batch_first=True), 2).cuda()
    encoder(rand(2, 5, 32)).sum().backward()
    mask = torch.zeros(2, 5, dtype=torch.bool, device="cuda")
    with torch.inference_mode():
        assert encoder.eval()(rand(2, 5, 32), src_key_padding_mask=mask).shape == (2, 5, 32)
    nn.Transformer(32, 4, 1, 1, batch_first=True).cuda()(rand(2, 5, 32), rand(2, 3, 32)).sum().backward()
    attention = nn.MultiheadAttention(32, 4, batch_first=True).cuda()
    assert attention(*[rand(2, 5, 32)] * 3)[1].shape == (2, 5, 5)


def test_sparse_gradients_of_embeddings() -> None:
    table = nn.Embedding(10000, 64, sparse=True).cuda()
    optimizer = torch.optim.SparseAdam(list(table.parameters()))
    before = allocated()
    table(torch.tensor([1, 2, 3, 3], device="cuda")).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    assert allocated() - before < 8 * KIB, "a dense gradient would be 2.4 MiB"
    optimizer.step()
    table.zero_grad()
    nn.EmbeddingBag(10, 3, mode="sum").cuda()(
        torch.tensor([1, 2], device="cuda"), torch.tensor([0], device="cuda")
    ).sum().backward()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padding", [None, 0])
def test_no_bags_at_all_are_an_empty_result(mode: str, dtype: torch.dtype, padding: int | None) -> None:
    """One offset, which is the last: the host's own kernels end the process there."""
    weight = torch.rand(10, 4, dtype=dtype, device="cuda").requires_grad_()
    last = torch.tensor([0], device="cuda")
    indices = torch.tensor([1, 2, 4], device="cuda")
    found = F.embedding_bag(indices, weight, last, mode=mode, include_last_offset=True, padding_idx=padding)
    assert found.shape == (0, 4)


def test_weights_that_are_made_from_others() -> None:
    for make in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm):
        make(nn.Linear(4, 4)).cuda()(rand(2, 4)).sum().backward()
    layer = nn.Linear(4, 4).cuda()
    prune.l1_unstructured(layer, "weight", amount=0.5)
    layer(rand(2, 4)).sum().backward()


def test_many_operators_have_their_shapes() -> None:
    x = rand(8, 8)
    index = torch.zeros(8, 8, dtype=torch.long, device="cuda")
    shapes = [
        x.sort()[0], x.topk(3)[1], x.cumsum(0), torch.linalg.svd(x)[1], torch.linalg.inv(x), torch.linalg.qr(x)[0],
        torch.einsum("ij,jk", x, x), torch.cdist(x, x), x.kthvalue(2)[0], x.median(), torch.histc(x), x.quantile(0.5),
        torch.searchsorted(x[0], x[1]), x.scatter_add(0, index, x), x.gather(1, index), torch.kron(x, x), x.roll(1, 0),
        torch.stft(rand(1000), 64, window=rand(64), return_complex=True), F.one_hot(torch.arange(5, device="cuda"), 5),
        F.gumbel_softmax(x), torch.isin(x, x), torch.bucketize(x, x[0]), F.interpolate(rand(1, 3, 8, 8), scale_factor=2),
        F.grid_sample(rand(1, 3, 8, 8), rand(1, 4, 4, 2), align_corners=False), x.std(), torch.multinomial(x, 2),
    ]  # fmt: skip
    assert all(tensor.is_cuda for tensor in shapes)
    log_probs = rand(50, 4, 20, requires_grad=True).log_softmax(2)
    targets = torch.randint(1, 20, (4, 30), device="cuda")
    F.ctc_loss(log_probs, targets, torch.full((4,), 50), torch.full((4,), 30)).backward()


@pytest.mark.parametrize(("torch_version", "refuses"), [("2.11", True), ("2.10", False)])
def test_cudnns_ctc_loss_wants_the_lengths_on_the_device(torch_version: str, refuses: bool) -> None:
    """Targets and lengths of 32 bits, none longer than its input: cuDNN takes them, and the mean divides by the host's."""
    gpu.turn_off()
    gpu.turn_on(f"T4,torch={torch_version}")
    scores = torch.rand(50, 4, 20, device="cuda").log_softmax(2)
    targets = torch.ones(16, dtype=torch.int32)
    given, wanted = torch.full((4,), 50, dtype=torch.int32), torch.full((4,), 4, dtype=torch.int32)
    if refuses:
        with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cpu!"):
            F.ctc_loss(scores, targets, given, wanted)
    else:
        F.ctc_loss(scores, targets, given, wanted)
    # The kernel of PyTorch's own copies them: with another reduction, type, length, or blank.
    F.ctc_loss(scores, targets, given, wanted, reduction="sum")
    F.ctc_loss(scores, targets.long(), given, wanted)
    F.ctc_loss(scores, targets, given.long(), wanted)
    F.ctc_loss(scores, targets, [50] * 4, [4] * 4)
    F.ctc_loss(scores, targets, given, wanted.cuda())
    F.ctc_loss(scores, targets, given // 25, wanted)
    F.ctc_loss(scores, targets, given, wanted, blank=19)


# ---- autograd


def test_hooks_and_saved_tensors_on_the_host() -> None:
    layer, seen = nn.Linear(512, 512).cuda(), []
    layer.register_forward_pre_hook(lambda *args: seen.append("before"))
    layer.register_forward_hook(lambda *args: seen.append("forward"))
    layer.register_full_backward_hook(lambda *args: seen.append("backward"))
    x = rand(512, 512, requires_grad=True)
    layer(x).sum().backward()
    assert seen == ["before", "forward", "backward"]
    x.grad = None
    before = allocated()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = (x * 2).sin()
    assert allocated() - before == MIB, "what backward needs went to the host"
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.is_cuda


class Square(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_functions_of_ones_own_and_second_derivatives() -> None:
    x = rand(4, requires_grad=True)
    with torch.autocast("cuda"):
        Square.apply(x).sum().backward()
    assert x.grad is not None
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    first.sum().backward()
    assert torch.autograd.functional.jacobian(lambda y: y**2, rand(3)).shape == (3, 3)
    loss = (x * x).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_functional_transforms() -> None:
    layer = nn.Linear(4, 2).cuda()
    parameters = dict(layer.named_parameters())

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(torch.func.functional_call(layer, params, (x,)), y)

    with gpumem_magic.measure() as measured:
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, rand(8, 4), rand(8, 2))
    assert measured.report is not None
    assert not [note for note in measured.report.notes if "failed" in note]
    assert each["weight"].shape == (8, 2, 4)
    assert torch.func.jacrev(torch.sin)(rand(3)).shape == (3, 3)
    assert torch.func.hessian(lambda x: (x**3).sum())(rand(3)).is_cuda
    assert torch.func.jvp(torch.sin, (rand(3),), (rand(3),))[1].is_cuda
    filled = torch.func.vmap(lambda x: x.new_zeros(5).scatter(0, torch.arange(3, device="cuda"), x))(rand(7, 3))
    assert filled.shape == (7, 5)
    assert filled.is_cuda


def test_inside_a_transform_a_tensor_is_on_its_device() -> None:
    said = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        said.append((str(x.device), x.is_cuda, x.is_meta, x.get_device()))
        return (x * torch.ones(3, device=x.device)).sum()

    assert torch.func.grad(loss)(rand(3)).is_cuda
    assert torch.func.vmap(loss)(rand(2, 3)).is_cuda
    assert set(said) == {("cuda:0", True, False, 0)}
    assert torch.zeros(2, device="meta").is_meta
    assert torch.zeros(2).device == torch.device("cpu")


@pytest.mark.parametrize("values", ["stand-in", "auto", "real"])
def test_a_step_between_two_backward_passes_is_refused_as_on_a_card(values: str) -> None:
    """The first pass's parameters are others then: what people meet who train a discriminator before its generator."""
    gpu.turn_on(f"A100-40GB,values={values}")
    for options, counts in (({}, True), ({"foreach": False}, True), ({"fused": True}, False)):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
        optimizer = torch.optim.Adam(model.parameters(), **options)
        loss = model(rand(2, 4)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        if counts:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            # (Fused kernels do not say that they write: ATen/native/cuda/FusedAdamKernel.cu.)
            loss.backward()


def test_kernels_that_write_to_lists_count_as_on_a_card() -> None:
    # `increment_version` in ATen/native/cuda/Foreach*.cu, which the last two have not.
    x, y = [rand(3), rand(2)], [rand(3), rand(2)]
    kernels: list[tuple[Callable[[], Any], int]] = [
        (lambda: torch._foreach_add_(x, 1.0), 1),
        (lambda: torch._foreach_copy_(x, y), 1),
        (lambda: torch._foreach_addcdiv_(x, y, y), 1),
        (lambda: torch._foreach_add(x, 1.0), 0),
        (lambda: torch._foreach_zero_(x), 0),
        (lambda: torch._foreach_lerp_(x, y, 0.5), 0),
    ]
    for kernel, by in kernels:
        before = [tensor._version for tensor in x]
        kernel()
        assert [tensor._version for tensor in x] == [version + by for version in before]


_FACTORIES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: torch.ones(256, device="cuda"),
    lambda x: torch.zeros(256, device=x.device),
    lambda x: torch.arange(256.0, device="cuda"),
    lambda x: torch.linspace(0, 1, 256, device="cuda"),
    lambda x: torch.full((256,), 2.0).cuda(),
]


@pytest.mark.parametrize("factory", _FACTORIES)
def test_a_transformed_function_makes_tensors_on_the_device(factory: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def weighed(x: torch.Tensor) -> torch.Tensor:
        return (x * factory(x)).sum()

    x, way = rand(256), rand(256)
    # The factory's, the product, the sum; the sum's gradient, and that of `x` (of one number expanded).
    assert made(lambda: torch.func.grad(weighed)(x)) == [1024, 1024, 4, 4, 1024]
    for result in (
        torch.func.jvp(weighed, (x,), (way,))[1],
        torch.func.vjp(weighed, x)[1](torch.ones((), device="cuda"))[0],
        torch.func.hessian(weighed)(x),
    ):
        assert result.is_cuda


def test_a_hessian_times_a_vector_by_forward_over_reverse() -> None:
    # `tanh_backward` has two differentiable arguments: the tangent of the constant one is known zeros, on the device.
    x, way = rand(16), rand(16)
    product = torch.func.jvp(torch.func.grad(lambda x: x.tanh().sum()), (x,), (way,))[1]
    assert product.is_cuda
    assert product.shape == (16,)


def test_inference_mode_and_no_grad_keep_nothing() -> None:
    layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).cuda()
    x = rand(1024, 256)
    layers(x)
    before = allocated()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            y = layers(x)
        assert allocated() - before == MIB
        assert not y.requires_grad
        del y


# ---- what surrounds a program


def test_graphs_take_memory_of_their_own_once(machine: gpu.VirtualMachine) -> None:
    x = rand(256 * KIB)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        y = x * 2
    captured = allocated()
    for _ in range(3):
        graph.replay()
    assert allocated() == captured
    pools = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
    assert pools == {(0, 0), tuple(graph.pool())}
    del y
    graph.reset()
    torch.cuda.empty_cache()
    assert {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()} == {(0, 0)}
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        torch.cuda.CUDAGraph().replay()


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="this PyTorch has no torch.accelerator.Graph")
def test_an_accelerators_graph_is_the_same_graph(machine: gpu.VirtualMachine) -> None:
    x = rand(256 * KIB)
    first = torch.accelerator.Graph()
    with torch.Stream(), first:
        y = x * 2
    captured = allocated()
    first.replay()
    assert allocated() == captured
    second = torch.accelerator.Graph(pool=first.pool())
    with torch.Stream(), second:
        z = x * 3
    pools = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
    assert pools == {(0, 0), tuple(first.pool())}
    assert second.pool() == first.pool()
    del y, z


def test_the_default_stream_is_not_captured(machine: gpu.VirtualMachine) -> None:
    with pytest.raises(RuntimeError, match="must be captured on a non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()
    rand(KIB)


_WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a number": lambda x: x.sum().item(),
    "an if": lambda x: bool(x.isnan().any()),
    "places": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "the device": lambda x: torch.cuda.synchronize(),
    "its stream": lambda x: torch.cuda.current_stream().synchronize(),
    "pinned": lambda x: x.copy_(torch.zeros(8).pin_memory()),
}


@pytest.mark.parametrize("line", _WAITS.values(), ids=_WAITS)
def test_a_capture_is_lost_where_the_host_waits(line: Callable[[torch.Tensor], Any]) -> None:
    x = rand(8)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(torch.AcceleratorError, match="previous error during capture") as error, torch.cuda.graph(graph):
        line(x)
    assert "not permitted when stream is capturing" in str(error.value.__context__)
    assert not torch.cuda.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    line(x)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x * 2


_COPIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a new tensor": lambda x: torch.tensor([1.0, 2.0], device="cuda"),
    "to the device": lambda x: torch.zeros(8).to("cuda", non_blocking=True),
    "into it": lambda x: x.copy_(torch.zeros(8)),
    "to the host": lambda x: x.cpu(),
    "a list": lambda x: x.tolist(),
    "an index": lambda x: x[[0, 2]],
}


@pytest.mark.parametrize("line", _COPIES.values(), ids=_COPIES)
def test_a_capture_takes_no_copy_to_or_from_pageable_memory(line: Callable[[torch.Tensor], Any]) -> None:
    x = rand(8)
    with (
        pytest.raises(RuntimeError, match="unless the CPU tensor is pinned"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        line(x)
    line(x)


def test_a_capture_takes_pinned_memory_that_nobody_waits_for() -> None:
    x = rand(8)
    pinned = torch.zeros(8).pin_memory()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert torch.cuda.current_stream().is_capturing()
        x.copy_(pinned, non_blocking=True)
        x[:2] = 3
        x.add_(torch.tensor(2.0))
        pinned.copy_(x, non_blocking=True)
        x.to("cpu", non_blocking=True)
    assert not torch.cuda.current_stream().is_capturing()


def test_a_memory_pool_of_ones_own() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = rand(256 * KIB)
    other = rand(256 * KIB)
    (segment,) = pool.snapshot()
    assert segment["address"] == kept.data_ptr()
    assert len(torch.cuda.memory_snapshot()) == 2
    del kept, other


@of_many_processes
@pytest.mark.parametrize("view", [False, True])
def test_distributed_data_parallel_with_one_process(view: bool) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        layers = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)).cuda()
        layers(rand(1, 256)).sum().backward()
        layers.zero_grad()
        x, weights, before = rand(2, 256), 2 * 256 * KIB, allocated()
        model = nn.parallel.DistributedDataParallel(layers, device_ids=[0], gradient_as_bucket_view=view)
        assert allocated() - before >= weights, "a bucket for all gradients"
        for _ in range(3):
            model(x).sum().backward()
        assert allocated() - before == (weights if view else 2 * weights), "gradients in the buckets, or beside them"
        torch.optim.AdamW(model.parameters()).step()
        with model.no_sync():
            model(x).sum().backward()
        model.zero_grad()
        before = allocated()
        hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
        model.register_comm_hook(None, hooks.bf16_compress_hook)
        torch.cuda.reset_peak_memory_stats()
        model(x).sum().backward()
        grown = torch.cuda.max_memory_allocated() - before
        # A bucket in 16 bits while it is sent, beside all gradients, or beside the one that goes into its bucket.
        assert weights * (1 if view else 1.5) <= grown < weights * (1 if view else 1.5) + 64 * KIB
    finally:
        torch.distributed.destroy_process_group()


@of_many_processes
def test_callbacks_of_what_nccl_sends_multiply_on_streams_of_their_own() -> None:
    """As the H100 of `ddp_hooks_and_views` has it: a workspace of cuBLAS for each of PowerSGD's callbacks that multiplies."""
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        x, main, told = rand(256, 256), torch.cuda.current_stream(), []

        def multiply(done: torch.futures.Future[Any]) -> Any:
            told.append(torch.cuda.current_stream())
            return done.value() if len(told) > 1 else [done.value()[0] @ x]

        x @ x
        before = allocated()
        future = torch.distributed.all_reduce(x, async_op=True).get_future()  # type: ignore[union-attr]
        last = future.then(multiply).then(multiply)
        assert allocated() - before == x.nbytes + WORKSPACE
        assert len({main, *told}) == 3
        assert torch.cuda.current_stream() == main
        assert last.wait()[0].shape == x.shape
        broken = future.then(lambda done: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            broken.wait()
    finally:
        torch.distributed.destroy_process_group()


@of_many_processes
def test_what_processes_exchange_costs_nothing_and_draws_nothing() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        x, parts, state = rand(256), [rand(256)], random.getstate()
        before = allocated()
        torch.distributed.all_reduce(x)
        torch.distributed.broadcast(x, src=0)
        work = torch.distributed.all_gather(parts, x, async_op=True)
        assert work.wait()  # type: ignore[union-attr]
        torch.distributed.all_gather_into_tensor(x, x)
        torch.distributed.reduce_scatter(x, parts)
        torch.distributed.reduce(x, dst=0)
        assert allocated() == before
        assert random.getstate() == state, "PyTorch's own rules for these draw from it"
    finally:
        torch.distributed.destroy_process_group()


def test_averages_scripts_and_optimizers_that_look_back() -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
    AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn()).update_parameters(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.jit.script(nn.Linear(4, 4).cuda())(rand(2, 4)).is_cuda
        assert torch.jit.trace(nn.Linear(4, 4).cuda(), rand(2, 4))(rand(2, 4)).is_cuda
    layer = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.LBFGS(layer.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(rand(2, 4)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def test_operators_of_the_compiler_run_or_say_what_to_do_instead() -> None:
    class Strange(torch._ops.HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__("strange")
            self.fallthrough(torch._C.DispatchKey.AutogradCUDA)  # type: ignore[no-untyped-call]

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x)

    x = rand(3)
    found = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    assert (found.shape, found.device) == (x.shape, x.device)
    with pytest.raises(NotImplementedError, match=r"virtual GPU cannot run strange.*Python's own if and for"):
        Strange()(x)
