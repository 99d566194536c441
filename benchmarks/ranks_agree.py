"""Ranks that run alone against real processes of the same program, event for event of their allocators.

    python benchmarks/ranks_agree.py [--world 2] [--only pp_1f1b fsdp_tp ...]

Each kind of parallelism, and combinations of them, trains a small model for a few steps: in as many processes as there are ranks,
which talk by gloo, and in ranks that are each alone in a process (`gpumem run --ranks`). For each it prints the number of events
(addresses, sizes and streams) and the highest allocated bytes of rank 0, and *same*, or what differs first.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
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


def program(names: list[str], place: str) -> None:
    """What each of these kinds does to this rank's device goes into a file."""
    from gpumem_magic.recording import under_way

    warnings.simplefilter("ignore")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    # When Python collects depends on how much it did, which is not the same alone.
    gc.disable()
    done: dict[str, Any] = {}
    before = 0
    for name in names:
        failed = ""
        torch.cuda.reset_peak_memory_stats()
        try:
            KINDS[name]()
        except Exception as raised:
            failed = "".join(traceback.format_exception_only(raised)).strip()
        gc.collect()
        log = under_way.current()._logs[local].growing.events
        events = [(event.action, event.size, event.address, event.stream) for event in log[before:]]
        before = len(log)
        done[name] = failed, events, torch.cuda.max_memory_allocated()
    Path(f"{place}-{os.environ['RANK']}").write_bytes(pickle.dumps(done))
    dist.destroy_process_group()


# ---- the comparison


def run(world: int, names: list[str], place: Path) -> None:
    """The program, twice."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        around = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(world)}
    around["LOCAL_WORLD_SIZE"] = str(world)
    command = [sys.executable, "-m", "gpumem_magic.cli", "run", "--device", f"{world}xA100-40GB"]

    def start(place: Path, more: dict[str, str], *flags: str) -> subprocess.Popen[bytes]:
        words = [*command, *flags, __file__, "--", "--program", str(place), "--only", *names]
        quiet = subprocess.DEVNULL
        return subprocess.Popen(words, env={**os.environ, **more}, stdout=quiet, stderr=quiet)

    ranks = range(world)
    ran = [start(place / "real", {**around, "RANK": str(one), "LOCAL_RANK": str(one)}) for one in ranks]
    for process in ran:
        process.wait()
    start(place / "alone", {}, "--ranks", str(world), "--as", f"0-{world - 1}").wait()


def told(real: Any, alone: Any) -> str:
    """How a kind went in both ways, for one rank."""
    (first, events, _), (second, others, _) = real, alone
    if first or second:
        return f"in processes: {first or 'runs'}; alone: {second or 'runs'}"
    if events == others:
        return "same"
    place = next((number for number, pair in enumerate(zip(events, others, strict=False)) if pair[0] != pair[1]), -1)
    return f"{len(others)} events alone; number {place}: {events[place]} and {others[place]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--world", type=int, default=2, help="how many ranks: 2 or 4")
    parser.add_argument("--only", nargs="*", metavar="KIND", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--program", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.program:
        program(chosen.only, chosen.program)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(chosen.world, chosen.only, Path(folder))
        ways = [
            [pickle.loads(Path(folder, f"{way}-{rank}").read_bytes()) for way in ("real", "alone")]
            for rank in range(chosen.world)
        ]
    print(f"{'':<20} {'events':>7} {'peak':>12}  {chosen.world} ranks, bytes of rank 0")
    for name in chosen.only:
        said = [told(real[name], alone[name]) for real, alone in ways]
        words = "same" if set(said) == {"same"} else "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(said))
        _, events, peak = ways[0][0][name]
        print(f"{name:<20} {len(events):>7,} {peak:>12,}  {words}")


if __name__ == "__main__":
    main()
