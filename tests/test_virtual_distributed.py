"""Programs for many GPUs, in one process: NCCL's groups, collectives, sharded parameters, distributed tensors."""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from asked_for import made
from torch import nn
from torch.utils._pytree import tree_map_only

import gpumem_magic
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.torch_face.alone import one_of_many

dist: Any = torch.distributed
if not dist.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

MIB = 1 << 20


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")  # a product's workspace would come and go in 2.15
    gpu.turn_on("A100-40GB")
    with pytest.warns(UserWarning, match="a virtual GPU has no NCCL: gloo is used instead"):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()
    gpu.turn_off()


def like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def together(x: torch.Tensor) -> None:
    """Several sent as one, which NCCL can and gloo cannot."""
    with dist._coalescing_manager(device=x.device, async_ops=True) as sent:
        dist.all_reduce(x)
        dist.all_reduce(x)
    sent.wait()


COLLECTIVES: list[Callable[[torch.Tensor], Any]] = [
    lambda x: dist.all_reduce(x),
    lambda x: dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True).wait(),
    lambda x: dist.broadcast(x, 0),
    lambda x: dist.reduce(x, 0),
    lambda x: dist.all_gather([like(x)], x),
    lambda x: dist.all_gather_into_tensor(like(x), x),
    lambda x: dist.reduce_scatter_tensor(like(x), x),
    lambda x: dist.gather(x, [like(x)], 0),
    lambda x: dist.scatter(x, [like(x)], 0),
    lambda x: dist.all_to_all_single(like(x), x),
    lambda x: together(x),
    lambda x: dist.all_gather_object([None], {"loss": 1.0}),
    lambda x: dist.broadcast_object_list(["a"], 0),
]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collectives_leave_no_memory_behind(collective: Callable[[torch.Tensor], Any]) -> None:
    x = torch.rand(MIB // 4, device="cuda")
    gc.collect()
    before = torch.cuda.memory_allocated()
    collective(x)
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    host = torch.ones(3)
    dist.all_reduce(host)
    assert host.tolist() == [1.0, 1.0, 1.0], "tensors of the host go on being sent"


def _asked_for(run: Callable[[], object]) -> list[int]:
    """The sizes that the allocator is asked for meanwhile."""
    torch.cuda.memory._record_memory_history()
    run()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    return [event["size"] for event in events if event["action"] == "alloc"]


def test_lists_of_equal_tensors_are_sent_as_one() -> None:
    x, half = torch.rand(1024, device="cuda"), torch.rand(512, device="cuda")
    (same,), (other,) = [like(x)], [like(half)]
    assert _asked_for(lambda: dist.all_gather([same], x)) == [4096]
    assert _asked_for(lambda: dist.reduce_scatter(other, [half])) == [2048]
    assert _asked_for(lambda: dist.gather(x, [same], 0)) == []


def test_a_barrier_sums_one_number_and_keeps_what_names_the_device() -> None:
    before = torch.cuda.memory_allocated()
    assert _asked_for(dist.barrier) == [1, 4]
    assert torch.cuda.memory_allocated() - before == 512
    dist.barrier()
    assert torch.cuda.memory_allocated() - before == 512


def test_a_data_parallel_model_compares_its_shapes_first() -> None:
    # The number of parameters, each process's, these as one; then two numbers for each dimension: 2 of the weight, 1 of the bias.
    layer = torch.nn.Linear(512, 512).cuda()
    asked = _asked_for(lambda: torch.nn.parallel.DistributedDataParallel(layer, device_ids=[0]))
    assert asked[:4] == [8, 8, 8, 2 * 3 * 8]
    assert asked[4] == 4 * (512 * 512 + 512)


def test_a_group_of_ones_own_and_what_a_program_asks() -> None:
    assert dist.is_nccl_available()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = dist.new_group([0], backend="nccl")
    dist.all_reduce(torch.rand(3, device="cuda"), group=other)
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    # A program takes another way with gloo; a group for the host goes on to be one.
    assert dist.get_backend() == dist.get_backend(other) == dist.Backend.NCCL
    assert dist.group.WORLD._get_backend_name() == "nccl"
    host = dist.new_group([0], backend="gloo")
    assert (dist.get_backend(host), host._get_backend_name()) == ("gloo", "gloo")
    dist.monitored_barrier(host)
    with pytest.raises(ValueError, match="only implemented for GLOO"):
        dist.monitored_barrier()


def test_what_is_waited_for_lies_where_it_lay() -> None:
    functional = torch.ops._c10d_functional
    name = dist.group.WORLD.group_name
    x = torch.rand(MIB // 4, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gathered = functional.all_gather_into_tensor(x, 1, name)
    waited = functional.wait_tensor(gathered)
    assert waited.data_ptr() == gathered.data_ptr()
    assert functional.all_gather_into_tensor_out(x, 1, name, out=gathered).data_ptr() == gathered.data_ptr()
    if hasattr(functional, "reduce_scatter_tensor_out"):
        scattered = functional.reduce_scatter_tensor_out(x, "sum", 1, name, out=gathered)
        assert scattered.data_ptr() == gathered.data_ptr()
        del scattered
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == before + MIB
    del gathered, waited
    # As distributed tensors do it: a copy of it, and the gathered one is let go.
    module = importlib.import_module("torch.distributed._functional_collectives")
    gather = getattr(module, "all_gather_single", None) or module.all_gather_tensor
    torch.cuda.reset_peak_memory_stats()
    held = gather(x, 0, dist.group.WORLD)
    assert torch.cuda.max_memory_allocated() == before + MIB
    copied = held + 0
    del held
    assert torch.cuda.max_memory_allocated() == before + 2 * MIB
    assert torch.cuda.memory_allocated() == before + MIB
    del copied


def test_where_a_device_computes_what_is_gathered_has_values() -> None:
    dist.destroy_process_group()
    gpu.turn_off()
    gpu.turn_on("A100-40GB,values=real")
    with pytest.warns(UserWarning, match="gloo is used instead"):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    x, weight = torch.rand(2, 8, 16, device="cuda"), torch.rand(16, 4, device="cuda")
    module = importlib.import_module("torch.distributed._functional_collectives")
    gather = getattr(module, "all_gather_single", None) or module.all_gather_tensor
    assert torch.equal(gather(x, 0, dist.group.WORLD) + 0, x)
    name = dist.group.WORLD.group_name
    importlib.import_module("torch.distributed._symmetric_memory")
    gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight], 1, name)
    assert torch.equal(gathered, x)
    assert torch.allclose(product, x @ weight)


def test_products_that_overlap_with_sending_gather_beside_the_allocator() -> None:
    module = importlib.import_module("torch.distributed._symmetric_memory")
    name = dist.group.WORLD.group_name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module.enable_symm_mem_for_group(name)
    x = torch.rand(2, 512, 1024, dtype=torch.bfloat16, device="cuda")
    weight = torch.rand(1024, 512, dtype=torch.bfloat16, device="cuda")
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    reserved = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight], 1, name)
    # x is laid out by its second dimension for it, 2 MiB; all of x is gathered, 2 MiB; the product has 1 MiB.
    assert (gathered.shape, product.shape) == ((2, 512, 1024), (2, 512, 512))
    assert torch.cuda.memory_allocated() - before == 3 * MIB
    assert torch.cuda.max_memory_allocated() - before == 5 * MIB
    # What other cards read has the 2 MiB of x, and signals behind them: two pieces of the driver's.
    taken = free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - reserved)
    assert taken == 4 * MIB
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    reduced = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", 1, name)
    # x by its second dimension, what each rank's part is the sum of, and that.
    assert (reduced.shape, reduced.is_contiguous()) == ((2, 512, 512), True)
    assert torch.cuda.memory_allocated() - before == MIB
    assert torch.cuda.max_memory_allocated() - before == 4 * MIB
    # The program's own.
    own = module.empty(1000, device="cuda")
    handle = module.rendezvous(own, name)
    assert (handle.rank, handle.world_size, handle.buffer_size) == (0, 1, 4000)
    assert handle.get_buffer(0, (2, 3), torch.bfloat16, 4).shape == (2, 3)
    with pytest.raises(RuntimeError, match="exceeds the allocated size"):
        handle.get_buffer(0, (1001,), torch.float32)
    assert module.rendezvous(x, name) is None
    del own, handle
    gc.collect()
    assert free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - reserved) == taken


def test_batches_are_normalised_together() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(plain).cuda()
    wrapped = nn.parallel.DistributedDataParallel(module=model, device_ids=[0])  # by name, as Lightning does
    for _ in range(2):
        wrapped(torch.rand(2, 4, device="cuda")).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_no_word_of_a_device_that_pytorchs_log_does_not_know(capfd: pytest.CaptureFixture[str]) -> None:
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 4, device="cuda"))
        for _ in range(2):
            wrapped(torch.rand(2, 4, device="cuda")).sum().backward()
    finally:
        torch.set_warn_always(always)
    assert "logger.cpp" not in capfd.readouterr().err
    assert wrapped._get_ddp_logging_data()["world_size"] == 1


def test_buckets_of_gradients_are_gradients() -> None:
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(40)]).cuda()
    with gpumem_magic.measure() as wrapping:
        wrapped = nn.parallel.DistributedDataParallel(model)
    # Parameters are sent in pieces of just above 250 MiB, two at a time; then one bucket is as large as all of them.
    assert wrapping.report.peak.categories["gradients"] == 640 * MIB
    reserved = torch.cuda.memory_reserved()
    assert 640 * MIB + 2 * 256 * MIB + 640 * MIB <= reserved < (640 + 2 * 256 + 640 + 8) * MIB
    wrapped(torch.rand(2, 2048, device="cuda")).sum().backward()
    with gpumem_magic.measure() as measured:
        wrapped(torch.rand(2, 2048, device="cuda")).sum().backward()
    # The buckets are made anew, in the order in which gradients came, and NCCL keeps the first until the second is sent.
    assert measured.report.peak.categories["gradients"] == 3 * 640 * MIB
    assert measured.report.peak.categories["activations"] < 10 * MIB
    held = {group.kept_by: group.bytes for group in measured.report.peak.tensors if group.category == "gradients"}
    assert held.pop("DistributedDataParallel") == 2 * 640 * MIB
    assert sum(held.values()) == 640 * MIB, "the parameters' own"
    causes = {cause.name: cause for cause in measured.report.causes}
    assert causes["gradients_in_buckets"].bytes == causes["buckets_made_anew"].bytes == 640 * MIB
    assert "later iterations have one set" in causes["buckets_made_anew"].text


def test_gradients_that_are_views_of_buckets_are_there_once() -> None:
    """What the report advises where they are there twice."""
    highest = []
    for view in (False, True):
        model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)]).cuda()
        with gpumem_magic.measure():
            wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
            for _ in range(2):
                wrapped(torch.rand(2, 2048, device="cuda")).sum().backward()
        with gpumem_magic.measure() as measured:
            wrapped(torch.rand(2, 2048, device="cuda")).sum().backward()
        found = [cause.bytes for cause in measured.report.causes if cause.name == "gradients_in_buckets"]
        assert found == ([] if view else [128 * MIB])
        highest.append(measured.report.peak.allocated)
        del model, wrapped
    assert highest[0] - highest[1] == 128 * MIB


def test_what_is_sent_is_kept_until_somebody_waits_or_a_later_backward_sends() -> None:
    """PyTorch 2.8 and newer; before, the stream did it, and a block that was let go of was free once it had been sent."""

    def iteration(model: nn.Module) -> None:
        model(torch.ones(1, 1024, device="cuda")).sum().backward()
        model.zero_grad()

    def after_a_second_forward() -> int:
        layer = nn.Linear(1024, 1024, bias=False).cuda()
        model = nn.parallel.DistributedDataParallel(layer, gradient_as_bucket_view=True)
        iteration(model)
        before = torch.cuda.memory_allocated()
        # The buckets are made anew: gradients are views of the new one from now on.
        loss = model(torch.ones(1, 1024, device="cuda")).sum()
        both = torch.cuda.memory_allocated() - before
        loss.backward()
        model.zero_grad()
        gc.collect()
        assert torch.cuda.memory_allocated() - before < MIB, "the first is gone"
        return both // MIB

    assert after_a_second_forward() == 4
    gc.collect()
    before = torch.cuda.memory_allocated()
    dist.all_reduce(torch.rand(1, device="cuda"))
    assert torch.cuda.memory_allocated() == before - 4 * MIB, "the second bucket, which was kept likewise"
    x = torch.rand(MIB // 4, device="cuda")
    before = torch.cuda.memory_allocated()
    work = dist.all_reduce(x, async_op=True)
    del x
    assert torch.cuda.memory_allocated() == before
    work.wait()
    assert torch.cuda.memory_allocated() == before - MIB
    y = torch.rand(MIB // 4, device="cuda")
    dist.all_reduce(y, async_op=True)
    del y
    assert torch.cuda.memory_allocated() == before
    dist.all_reduce(torch.rand(1, device="cuda"))
    assert torch.cuda.memory_allocated() == before - MIB
    y = torch.rand(MIB // 4, device="cuda")
    dist.all_reduce(y)
    del y
    assert torch.cuda.memory_allocated() == before - MIB, "what PyTorch waits for itself"


def test_sharded_parameters_are_whole_only_while_they_are_needed() -> None:
    fsdp = importlib.import_module("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch has no fully_shard")
    layers = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)]).cuda()
    layers(torch.rand(2, 512, device="cuda")).sum().backward()  # the workspaces
    layers.zero_grad()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for layer in layers:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(layers)
    assert torch.cuda.memory_allocated() == before, "one process holds all of every parameter"
    assert {parameter.device for parameter in layers.parameters()} == {torch.device("cuda", 0)}
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        layers(torch.rand(2, 512, device="cuda"))
    gc.collect()
    # A whole copy of one layer or two, of one MiB each, at a time; not all four.
    assert MIB <= torch.cuda.max_memory_allocated() - before < 3 * MIB
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(2):
        layers(torch.rand(2, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    states = torch.cuda.memory_allocated() - before
    assert 2 * 4 * MIB <= states < 2 * 4 * MIB + 4 * MIB
    larger = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]).cuda()
    for layer in (*larger, larger):
        fsdp.fully_shard(layer)
    with gpumem_magic.measure() as measured, torch.no_grad():
        larger(torch.rand(2, 1024, device="cuda"))
    whole = [one.bytes for one in measured.report.peak.tensors if one.kept_by == "fully_shard"]
    assert 4 * MIB <= sum(whole) <= 3 * 4 * MIB, "by name, beside the pieces"


def test_what_sharding_copies_with_takes_lists_about_the_tensors() -> None:
    fsdp = importlib.import_module("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch has no fully_shard")
    layer = nn.Linear(512, 512, bias=False).cuda()
    fsdp.fully_shard(layer)
    loss = layer(torch.rand(2, 512, device="cuda")).sum()
    # A MiB of gradients is 512 blocks of 2048 bytes.
    assert made(loss.backward).count(8 * (6 + 2 + 512)) == 1
    gathered = torch.zeros(2, 512, device="cuda")
    parts = [torch.zeros(2, 256, device="cuda") for _ in range(2)]
    copied = made(lambda: torch.ops.fsdp.split_with_sizes_copy(gathered, [256, 256], dim=1, out=parts))
    assert copied == [8 * (4 * 2 + 1 + 2)]


def test_distributed_tensors_are_where_their_pieces_are() -> None:
    tensors = importlib.import_module("torch.distributed.tensor")
    mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cuda", (1,))
    x = tensors.distribute_tensor(torch.rand(4, 4, device="cuda"), mesh, [tensors.Shard(0)])
    assert (x.device, x.is_cuda, x.is_meta) == (torch.device("cuda", 0), True, False)
    assert (x @ x).full_tensor().is_cuda


class Cast(torch.Tensor):
    """A weight that is sent in another type, as torchao's Float8 weights are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Cast, lambda cast: cast.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, Cast, out) if func in KEEP_THE_CLASS else out

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Cast(inner["inner"])

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.inner.to(torch.float8_e4m3fn),), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (gathered[0].to(dtype), gathered)


KEEP_THE_CLASS = {
    getattr(torch.ops.aten, name).default
    for name in ("empty_like", "new_zeros", "copy_", "view", "as_strided", "_to_copy", "clone", "detach")
} | {torch.ops.aten.slice.Tensor, torch.ops.aten.split.Tensor}


def test_sharded_weights_of_a_class_of_the_programs_own_come_from_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))
    for layer in model:
        layer.weight = nn.Parameter(Cast(layer.weight.detach()))
        importlib.import_module("torch.distributed.fsdp").fully_shard(layer)
    model.to_empty(device="cuda")
    weight: Any = model[0].weight
    assert type(weight._local_tensor) is Cast
    assert (weight.device, weight.is_cuda, weight.is_meta) == (torch.device("cuda", 0), True, False)
    assert torch.cuda.memory_allocated() == 2 * MIB
    model(torch.zeros(8, 512, device="cuda")).sum().backward()
    assert weight.grad.device == weight.device


def test_a_pipelines_stages_vote_alike() -> None:
    """On how they learn each other's shapes (2.13 and newer): what the others voted is no unknown value."""
    stages = pytest.importorskip("torch.distributed.pipelining.stage")
    if not hasattr(stages.PipelineStage, "_warmup_backward_result"):
        pytest.skip("stages do not vote before PyTorch 2.13")
    dist.destroy_process_group()
    with one_of_many(0, 2):
        dist.init_process_group("nccl")
        stage = stages.PipelineStage(nn.Linear(4, 4, device="cuda"), 0, 2, torch.device("cuda", 0))
        with gpumem_magic.measure() as measured:
            stage._warmup_forward_vote(True)
            vote = stage._warmup_backward_result()
            dynamic = int(vote.item()) == 0
        assert dynamic
        assert measured.report.to_dict()["stand_ins"] == []
        dist.destroy_process_group()
    with pytest.warns(UserWarning, match="gloo is used instead"):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def test_numbers_that_deepspeed_compares_with_the_first_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stage 3 of its ZeRO: what the first rank sends is not known on the others, who put -1 there meanwhile."""
    module = tmp_path / "deepspeed" / "runtime" / "zero" / "utils.py"
    module.parent.mkdir(parents=True)
    for folder in (module.parent, module.parent.parent, module.parent.parent.parent):
        (folder / "__init__.py").write_text("", "utf-8")
    module.write_text(
        """
import torch
import torch.distributed as dist

def assert_lst_len_same_as_other_ranks(lst):
    told = torch.tensor(len(lst) if dist.get_rank() == 0 else -1, device="cuda")
    dist.broadcast(told, src=0)
    assert told.cpu().item() == len(lst)

def get_lst_from_rank0(lst):
    told = torch.tensor(lst if dist.get_rank() == 0 else [-1] * len(lst), device="cuda")
    dist.broadcast(told, src=0)
    return [number.item() for number in told.cpu()]
""",
        "utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    dist.destroy_process_group()
    with one_of_many(1, 2):
        dist.init_process_group("nccl")
        utils = importlib.import_module("deepspeed.runtime.zero.utils")
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        utils.assert_lst_len_same_as_other_ranks([3, 4])
        assert utils.get_lst_from_rank0([3, 4]) == [3, 4]
        assert torch.cuda.max_memory_allocated() == before + 512
        assert torch.cuda.memory_allocated() == before
        dist.destroy_process_group()
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]
    with pytest.warns(UserWarning, match="gloo is used instead"):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def test_a_compiled_function_that_sums_up_over_ranks_is_one_graph() -> None:
    """Dynamo knows PyTorch's functions by their identity."""

    def summed(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        dist.all_reduce(doubled)
        return doubled.relu()

    x = torch.ones(4, 4, device="cuda")
    assert torch.compile(summed, fullgraph=True)(x).shape == (4, 4)
    assert torch._dynamo.explain(summed)(x).graph_count == 1
