"""Ranks that run alone against real processes of the same program, event for event of their allocators.

    python benchmarks/ranks_agree.py [--world 2] [--only pp_1f1b fsdp_tp ...]
    python benchmarks/ranks_agree.py [--world 2] --script "train.py --its arguments"

Each kind of parallelism, and combinations of them, trains a small model for a few steps: in as many processes as there are ranks,
which talk by gloo, and in ranks that are each alone in a process (`gpumem run --ranks`). For each it prints the number of events
(addresses, sizes and streams) and the highest allocated bytes of rank 0, and *same*, or the same blocks in another order, or what
differs first: also in what NCCL is said to take beside the allocator. With --script it is a program of anybody's, which starts
its process group itself.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import runpy
import shlex
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, WORDS = 128, 512
KINDS: dict[str, Callable[[], None]] = {}


def kind(function: Callable[[], None]) -> Callable[[], None]:
    KINDS[function.__name__] = function
    return function


# ---- the program


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A piece of a language model; the whole of one by default. skips: each step leaves another block out."""

    def __init__(self, blocks: int = 4, first: bool = True, last: bool = True, skips: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH) if first else None
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.out = nn.Linear(WIDTH, WORDS, bias=False) if last else None
        self.step, self.skips = 0, skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.words is None else self.words(x)
        self.step += 1
        for number, block in enumerate(self.blocks):
            if not self.skips or number != self.step % len(self.blocks):
                x = block(x)
        return x if self.out is None else self.out(x)


def words() -> torch.Tensor:
    return torch.randint(0, WORDS, (8, 64), device="cuda")


def error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def train(model: Any, optimizer: Any = None, steps: int = 3, before: Callable[[int], None] = lambda step: None) -> None:
    """before: called with the number of each backward; a step follows each second one."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), foreach=True)
    for step in range(2 * steps):
        before(step)
        given = words()
        error(model(given), given).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def mesh(*sizes: int, names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cuda", sizes, mesh_dim_names=names)


def halves(*names: str) -> Any:
    return mesh(2, dist.get_world_size() // 2, names=names)


def sharded(model: Any, **settings: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for part in (*model.blocks, model):
        fully_shard(part, **settings)
    return model


def in_columns(model: Any, mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def staged(schedule: str, pieces: int = 1, wrap: Callable[[Any], Any] = lambda model: model, group: Any = None) -> None:
    from torch.distributed import pipelining

    mine, size = dist.get_rank(group), dist.get_world_size(group)
    numbers = range(mine, pieces * size, size)
    ends = 0, pieces * size - 1
    models = [wrap(Net(2, number == ends[0], number == ends[1]).cuda()) for number in numbers]
    device = torch.device("cuda", torch.cuda.current_device())
    stages = [
        pipelining.PipelineStage(model, number, pieces * size, device, group=group)
        for model, number in zip(models, numbers, strict=True)
    ]
    made = getattr(pipelining, schedule)
    steps = made(stages[0] if pieces == 1 else stages, 4, loss_fn=error)
    optimizer = torch.optim.AdamW([parameter for model in models for parameter in model.parameters()], foreach=True)
    for _ in range(2):
        given = words()
        steps.step(*([given] if ends[0] in numbers else []), **({"target": given} if ends[1] in numbers else {}))
        optimizer.step()
        optimizer.zero_grad()


@kind
def ddp_in_place() -> None:
    train(DistributedDataParallel(Net().cuda(), gradient_as_bucket_view=True))


@kind
def ddp_static() -> None:
    train(DistributedDataParallel(Net().cuda(), static_graph=True, bucket_cap_mb=1))


@kind
def ddp_unused() -> None:
    train(DistributedDataParallel(Net(skips=True).cuda(), find_unused_parameters=True))


@kind
def ddp_join() -> None:
    model = DistributedDataParallel(Net().cuda())
    with model.join():
        train(model, steps=2 + dist.get_rank() % 2)


@kind
def ddp_half_precision() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DistributedDataParallel(Net().cuda())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model)


@kind
def ddp_power_sgd() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = DistributedDataParallel(Net().cuda())
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    train(model)


@kind
def zero() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(Net().cuda())
    parameters, settings = model.parameters(), {"parameters_as_bucket_view": True, "lr": 1e-3}
    train(model, ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **settings))


@kind
def fsdp_mixed() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    train(sharded(Net().cuda(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)))


@kind
def fsdp_offloaded() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    train(sharded(Net(), offload_policy=CPUOffloadPolicy()))


@kind
def fsdp_kept_whole() -> None:
    train(sharded(Net().cuda(), reshard_after_forward=False))


@kind
def fsdp_accumulated() -> None:
    model = sharded(Net().cuda())
    train(model, before=lambda step: model.set_requires_gradient_sync(step % 2 == 1))


@kind
def fsdp_clipped() -> None:
    model = sharded(Net().cuda())
    train(model, before=lambda step: step and torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))  # type: ignore[arg-type, return-value]


@kind
def fsdp_first() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    how = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    train(FullyShardedDataParallel(Net(), device_id=torch.cuda.current_device(), **how))


@kind
def hybrid() -> None:
    model = sharded(Net().cuda(), mesh=halves("copies", "shards"))
    train(model, before=lambda step: model.set_requires_all_reduce(step % 2 == 1))


@kind
def fsdp_tp() -> None:
    both = halves("dp", "tp")
    train(sharded(in_columns(Net().cuda(), both["tp"]), mesh=both["dp"]))


@kind
def pp_1f1b() -> None:
    staged("Schedule1F1B")


@kind
def pp_interleaved() -> None:
    staged("ScheduleInterleaved1F1B", 2)


@kind
def pp_ddp() -> None:
    both = halves("pp", "dp")
    group = both["dp"].get_group()
    staged("Schedule1F1B", 1, lambda model: DistributedDataParallel(model, process_group=group), both["pp"].get_group())


@kind
def pp_fsdp_tp() -> None:
    all_three = mesh(
        2, max(dist.get_world_size() // 4, 1), min(dist.get_world_size() // 2, 2), names=("pp", "dp", "tp")
    )

    def wrap(model: Any) -> Any:
        return sharded(in_columns(model, all_three["tp"]), mesh=all_three["dp"], reshard_after_forward=False)

    staged("ScheduleInterleaved1F1B", 2, wrap, all_three["pp"].get_group())


@kind
def ddp_accumulated() -> None:
    model = DistributedDataParallel(Net().cuda(), gradient_as_bucket_view=True)
    train(model, before=lambda step: setattr(model, "require_backward_grad_sync", step % 2 == 1))


@kind
def ddp_checkpointed() -> None:
    from torch.utils.checkpoint import checkpoint

    model = Net().cuda()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    train(DistributedDataParallel(model, static_graph=True))


@kind
def ddp_compiled() -> None:
    train(torch.compile(DistributedDataParallel(Net().cuda())))


@kind
def ddp_averaged_later() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook

    model = DistributedDataParallel(Net().cuda())
    model.register_comm_hook(hook.PostLocalSGDState(None, None, 2), hook.post_localSGD_hook)
    train(model)


@kind
def batch_norm_together() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 30 * 30, 10))
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        model(torch.rand(4, 3, 32, 32, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@kind
def fsdp_compiled() -> None:
    model = Net().cuda()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block)
    train(sharded(model))


@kind
def fsdp_ahead() -> None:
    model = sharded(Net().cuda())
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    train(model)


@kind
def fsdp_first_offloaded() -> None:
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    how = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "cpu_offload": CPUOffload(True)}
    train(FullyShardedDataParallel(Net(), device_id=torch.cuda.current_device(), **how))


@kind
def fsdp_saved() -> None:
    import torch.distributed.checkpoint as saving
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = sharded(Net().cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, steps=1)
    weights, states = get_state_dict(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        places = [folder]
        dist.broadcast_object_list(places, 0)
        saving.save({"model": weights, "optimizer": states}, checkpoint_id=places[0])
        saving.load({"model": weights, "optimizer": states}, checkpoint_id=places[0])
        dist.barrier()
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


@kind
def tp_by_hand() -> None:
    """As Megatron-LM has it: an operator that sums going forward, and one that sums going back."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor, there: bool) -> torch.Tensor:
            context.there = there
            if there:
                x = x.clone()
                dist.all_reduce(x)
            return x

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> Any:
            if not context.there:
                gradient = gradient.contiguous()
                dist.all_reduce(gradient)
            return gradient, None

    part = 4 * WIDTH // dist.get_world_size()
    model = Net().cuda()
    for block in model.blocks:
        block.up, block.down = nn.Linear(WIDTH, part).cuda(), nn.Linear(part, WIDTH, bias=False).cuda()
        up, down = block.up.forward, block.down.forward
        block.up.forward = lambda x, up=up: up(Sum.apply(x, False))
        block.down.forward = lambda x, down=down: Sum.apply(down(x), True)
    train(model)


@kind
def tp_with_sequences() -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    ranks = mesh(dist.get_world_size(), names=("tp",))
    model = Net().cuda()
    first = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    last = tp.ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    tp.parallelize_module(model, ranks, {"words": first, "out": last})
    for block in model.blocks:
        up, down = tp.ColwiseParallel(input_layouts=Shard(1)), tp.RowwiseParallel(output_layouts=Shard(1))
        tp.parallelize_module(block, ranks, {"norm": tp.SequenceParallel(), "up": up, "down": down})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(3):
        given = words()
        with tp.loss_parallel():
            error(model(given), given).backward()
        optimizer.step()
        optimizer.zero_grad()


@kind
def tp_compiled() -> None:
    model = torch.compile(in_columns(Net().cuda(), mesh(dist.get_world_size(), names=("tp",))))
    train(model, torch.optim.AdamW(model.parameters(), foreach=False))


@kind
def context_parallel() -> None:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ranks = mesh(dist.get_world_size(), names=("cp",))
    shared = [torch.rand(2, 4, 256, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    for _ in range(2):
        with context_parallel(ranks, buffers=shared, buffer_seq_dims=[2] * 3), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            parts = [tensor.detach().clone().requires_grad_() for tensor in shared]
            nn.functional.scaled_dot_product_attention(*parts, is_causal=True).sum().backward()


@kind
def experts() -> None:
    import torch.distributed.nn.functional as functional

    world = dist.get_world_size()
    expert = nn.Linear(WIDTH, WIDTH).cuda()
    given = torch.rand(8 * world, WIDTH, device="cuda", requires_grad=True)
    for _ in range(2):
        sent = functional.all_to_all_single(torch.empty_like(given), given)
        functional.all_to_all_single(torch.empty_like(given), expert(sent)).sum().backward()


@kind
def experts_unevenly() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = [1 + (rank + other) % 3 for other in range(world)]
    given = torch.rand(sum(sizes), WIDTH, device="cuda")
    received = torch.empty(sum(sizes), WIDTH, device="cuda")
    dist.all_to_all_single(received, given, sizes, sizes)
    dist.all_to_all([torch.empty(size, WIDTH, device="cuda") for size in sizes], list(given.split(sizes)))


@kind
def each_its_own() -> None:
    """Ranks that need unlike amounts, and collectives that some take part in."""
    world, rank = dist.get_world_size(), dist.get_rank()
    kept = torch.empty(rank + 1, 1 << 18, device="cuda")
    pairs = [dist.new_group([number, (number + 1) % world]) for number in range(0, world, 2)]
    dist.all_reduce(kept[0], group=pairs[rank // 2])
    if rank % 2 == 0:
        kept = torch.cat([kept, kept])
    dist.new_subgroups(2)
    dist.barrier()


@kind
def objects_and_stores() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, {"width": 5})
    dist.gather_object({"width": 5}, everybody if rank == 0 else None, 0)
    told = [{"width": 5}] if rank == 0 else [None]
    dist.broadcast_object_list(told, 0)
    given: list[Any] = [None]
    dist.scatter_object_list(given, [3] * world if rank == 0 else None, 0)
    dist.barrier()
    kept = torch.empty(told[0]["width"] * given[0], 1 << 18, device="cuda")
    dist.all_reduce(kept)


@kind
def plain_collectives() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.rand(1 << 16, device="cuda")
    for one in (dist.all_reduce, lambda x: dist.broadcast(x, 0), lambda x: dist.reduce(x, world - 1)):
        one(x)
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x)
    dist.gather(x, parts if rank == 0 else None, 0)
    dist.scatter(x, parts if rank == 0 else None, 0)
    dist.reduce_scatter(x, parts)
    if rank < 2:
        (dist.send if rank == 0 else dist.recv)(x, 1 - rank)
    around = [dist.P2POp(dist.isend, x, (rank + 1) % world), dist.P2POp(dist.irecv, x + 1, (rank - 1) % world)]
    for work in dist.batch_isend_irecv(around):
        work.wait()
    work = dist.all_reduce(x, async_op=True)
    meanwhile = torch.empty(1 << 18, device="cuda")
    work.wait()
    del meanwhile


@kind
def distributed_tensors() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, zeros

    ranks = mesh(dist.get_world_size(), names=("x",))
    first = distribute_tensor(torch.rand(32, 48, device="cuda"), ranks, [Shard(0)])
    kept = [first]
    for how in (Replicate(), Shard(1), Shard(0), Replicate()):
        kept.append(kept[-1].redistribute(ranks, [how]))
    sums = DTensor.from_local(torch.rand(32, 48, device="cuda"), ranks, [Partial()])
    kept += [sums.redistribute(ranks, [how]) for how in (Shard(0), Shard(1), Replicate())]
    uneven = distribute_tensor(torch.rand(7, 5, device="cuda"), ranks, [Shard(0)])
    kept += [uneven.full_tensor(), (uneven @ uneven.t()).full_tensor(), uneven.sum().full_tensor()]
    kept += [zeros(9, 3, device_mesh=ranks, placements=[Shard(0)]), torch.cat([first, first]), first.t().contiguous()]
    leaf = distribute_tensor(torch.rand(16, 16, device="cuda"), ranks, [Shard(0)]).requires_grad_()
    (leaf.redistribute(ranks, [Replicate()]) * 2).sum().backward()


@kind
def three_dimensions() -> None:
    world = dist.get_world_size()
    ranks = mesh(world // 2 or 1, 2, 1, names=("copies", "shards", "tp"))
    train(sharded(in_columns(Net().cuda(), ranks["tp"]), mesh=ranks["copies", "shards"]))


@kind
def pp_gpipe() -> None:
    staged("ScheduleGPipe")


@kind
def pp_looped() -> None:
    staged("ScheduleLoopedBFS", 2)


@kind
def pp_zero_bubble() -> None:
    """PyTorch walks a set here to let go of what a backward in two parts no longer needs: in another order each time."""
    staged("ScheduleInterleavedZeroBubble", 2)


@kind
def pp_hugging_face() -> None:
    """A model of transformers', cut by the tracing front of `torch.distributed.pipelining`."""
    from torch.distributed import pipelining
    from transformers import GPT2Config, GPT2LMHeadModel

    world, rank = dist.get_world_size(), dist.get_rank()
    config = GPT2Config(n_layer=world, n_embd=WIDTH, n_head=4, vocab_size=WORDS, use_cache=False)
    config._attn_implementation = "eager"
    model = GPT2LMHeadModel(config).eval()
    cuts = {f"transformer.h.{number}": pipelining.SplitPoint.BEGINNING for number in range(1, world)}
    given = torch.randint(0, WORDS, (8, 64))
    cut = pipelining.pipeline(model, (given[:2],), split_spec=cuts)
    device = torch.device("cuda", torch.cuda.current_device())
    stage = cut.build_stage(rank, device)
    steps = pipelining.ScheduleGPipe(stage, 4)
    with torch.no_grad():
        steps.step(*([given.to(device)] if rank == 0 else []))


def program(names: list[str], place: str, script: str) -> None:
    """What each of these kinds, or a script, does to this rank's device goes into a file."""
    from gpumem_magic.recording import under_way

    warnings.simplefilter("ignore")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    if not script:
        dist.init_process_group("nccl")
    # When Python collects depends on how much it did, which is not the same alone.
    gc.disable()
    done: dict[str, Any] = {}
    before = 0
    for name in [script] if script else names:
        failed = ""
        torch.cuda.reset_peak_memory_stats()
        try:
            if script:
                file, *sys.argv[1:] = shlex.split(script)
                sys.path.insert(0, str(Path(file).resolve().parent))
                runpy.run_path(file, run_name="__main__")
            else:
                KINDS[name]()
        except (Exception, SystemExit) as raised:
            failed = "".join(traceback.format_exception_only(raised)).strip()
        gc.collect()
        log = under_way.current()._logs[local].growing.events
        events = [(event.action, event.size, event.address, event.stream) for event in log[before:]]
        before = len(log)
        free, total = torch.cuda.mem_get_info(local)
        beside = total - free - torch.cuda.memory_reserved(local)
        done[name] = failed, [*events, ("beside", beside, 0, 0)], torch.cuda.max_memory_allocated()
    Path(f"{place}-{os.environ['RANK']}").write_bytes(pickle.dumps(done))
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- the comparison


def run(world: int, names: list[str], script: str, place: Path) -> None:
    """The program, twice."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        around = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(world)}
    around["LOCAL_WORLD_SIZE"] = str(world)
    command = [sys.executable, "-m", "gpumem_magic.cli", "run", "--device", f"{world}xA100-40GB"]

    def start(way: str, more: dict[str, str], *flags: str) -> subprocess.Popen[bytes]:
        words = [*command, *flags, __file__, "--", "--program", str(place / way), "--script", script, "--only", *names]
        # Where the compiler finds a model that it made before, it doesn't trace its patterns, which takes a number on the device.
        more = more | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        with open(place / f"{way}.log", "ab") as log:
            return subprocess.Popen(words, env={**os.environ, **more}, stdout=log, stderr=log)

    ran = [start("real", {**around, "RANK": str(one), "LOCAL_RANK": str(one)}) for one in range(world)]
    for process in ran:
        process.wait()
    start("alone", {}, "--ranks", str(world), "--as", f"0-{world - 1}").wait()


def results(place: Path, way: str, rank: int) -> Any:
    """What a rank did. Ends the command where it never came so far, with what was said there."""
    file = place / f"{way}-{rank}"
    if not file.exists():
        said = (place / f"{way}.log").read_text("utf-8", "replace")
        sys.exit(f"{said[-3000:]}\nRank {rank} ({way}) did not come to the end.")
    return pickle.loads(file.read_bytes())


def told(real: Any, alone: Any) -> str:
    """How a kind went in both ways, for one rank."""
    (first, events, _), (second, others, _) = real, alone
    if first or second:
        return f"in processes: {first or 'runs'}; alone: {second or 'runs'}"
    if events == others:
        return "same"
    plain = (sorted((action, size, stream) for action, size, _, stream in each) for each in (events, others))
    place = next((number for number, pair in enumerate(zip(events, others, strict=False)) if pair[0] != pair[1]), -1)
    if len({tuple(each) for each in plain}) == 1:
        return f"the same blocks, from number {place} on in another order"
    return f"{len(others)} events alone; number {place}: {events[place]} and {others[place]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--world", type=int, default=2, help="how many ranks: 2 or 4")
    parser.add_argument("--only", nargs="*", metavar="KIND", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--program", help=argparse.SUPPRESS)
    parser.add_argument(
        "--script", default="", metavar="WORDS", help="a program and its arguments, in place of the kinds"
    )
    chosen = parser.parse_args()
    if chosen.program:
        program(chosen.only, chosen.program, chosen.script)
        return
    names = [chosen.script] if chosen.script else chosen.only
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run(chosen.world, chosen.only, chosen.script, place)
        ways = [[results(place, way, rank) for way in ("real", "alone")] for rank in range(chosen.world)]
    print(f"{'':<20} {'events':>7} {'peak':>12}  {chosen.world} ranks, bytes of rank 0")
    for name in names:
        said = [told(real[name], alone[name]) for real, alone in ways]
        words = "same" if set(said) == {"same"} else "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(said))
        _, events, peak = ways[0][0][name]
        print(f"{name:<20} {len(events) - 1:>7,} {peak:>12,}  {words}")


if __name__ == "__main__":
    main()
