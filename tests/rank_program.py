"""A training script for several ranks, as people write it for torchrun. First argument: the kinds of parallelism, with commas."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

KINDS = sys.argv[1].split(",")
SIZE = 128
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
device = torch.device("cuda", torch.cuda.current_device())


def layers(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*[part for _ in range(count) for part in (nn.Linear(SIZE, SIZE), nn.ReLU())])


def train(model: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        model(torch.randn(64, SIZE, device=device)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def experts(gate: nn.Module, expert: nn.Module) -> None:
    """Tokens go to their experts' ranks and back: how many is sent first."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    optimizer = torch.optim.AdamW([*gate.parameters(), *expert.parameters()])
    for _ in range(2):
        tokens = torch.randn(64, SIZE, device=device)
        weights = gate(tokens).softmax(-1).max(-1).values
        leave = torch.tensor([64 // world] * world, device=device)
        arrive = torch.empty_like(leave)
        dist.all_to_all_single(arrive, leave)
        sent, got = leave.tolist(), arrive.tolist()
        here = expert(all_to_all_single_autograd(tokens, got, sent, dist.group.WORLD))
        back = all_to_all_single_autograd(here, sent, got, dist.group.WORLD)
        (back * weights[:, None]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def events() -> dict[int, list[tuple[object, ...]]]:
    """What each device's allocator did so far, in this process."""
    from gpumem_magic.recording import under_way

    logs = under_way.current()._logs.items()
    return {
        index: [(event.action, event.size, event.address, event.stream) for event in log.growing.events]
        for index, log in logs
    }


def nap() -> None:
    time.sleep(600)


def tell_of(place: Path, function: str) -> None:
    """Makes a file when the program is in this function."""
    while True:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            if frame.f_code.co_name == function:
                place.touch()
                return
            frame = frame.f_back
        time.sleep(0.01)


def run(kind: str) -> None:
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(layers().append(nn.BatchNorm1d(SIZE)).to(device))
        train(wrapped, torch.optim.AdamW(wrapped.parameters()))
    elif kind == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        wrapped = nn.parallel.DistributedDataParallel(layers().to(device), gradient_as_bucket_view=True)
        train(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW))
    elif kind == "fully_shard":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        with torch.device("meta"):
            model = layers()
        mesh = init_device_mesh("cuda", (world,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in [*model[::2], model]:
            fully_shard(part, mesh=mesh, mp_policy=policy)
        model.to_empty(device="cuda")
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        train(model, torch.optim.AdamW(model.parameters()))
    elif kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        flat: nn.Module = FullyShardedDataParallel(
            layers(),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
            device_id=device,
        )
        train(flat, torch.optim.AdamW(flat.parameters()))
    elif kind == "hybrid":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("copies", "shards"))
        model = layers().to(device)
        for part in [*model[::2], model]:
            fully_shard(part, mesh=mesh)
        train(model, torch.optim.AdamW(model.parameters()))
    elif kind == "context_parallel":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def heads(length: int) -> list[torch.Tensor]:
            shape = 2, 4, length, 16
            return [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

        whole = [tensor.detach() for tensor in heads(64 * world)]
        mesh = init_device_mesh("cuda", (world,))
        with context_parallel(mesh, buffers=whole, buffer_seq_dims=[2, 2, 2]):
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
                attended = nn.functional.scaled_dot_product_attention(*heads(64), is_causal=True)
            attended.sum().backward()
    elif kind == "expert_parallel":
        experts(nn.Linear(SIZE, world, device=device), nn.Linear(SIZE, SIZE, device=device))
    elif kind == "load_checkpoint":
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
        from torch.distributed.fsdp import fully_shard

        model = layers().to(device)
        for part in [*model[::2], model]:
            fully_shard(part)
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=sys.argv[3])
        set_model_state_dict(model, state)
        train(model, torch.optim.AdamW(model.parameters()))
    elif kind == "batch_norm":
        # By the name of the group's backend, statistics are gathered in one tensor or in a list of them.
        model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE)))
        train(nn.parallel.DistributedDataParallel(model.to(device)), torch.optim.SGD(model.parameters(), 0.1))
        gathered = torch.distributed.nn.functional.all_gather(torch.rand(SIZE, SIZE, device=device, requires_grad=True))
        sum(gathered).sum().backward()  # type: ignore[union-attr]
    elif kind == "zero_gathered":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = nn.parallel.DistributedDataParallel(layers().to(device))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
        train(model, optimizer)
        optimizer.consolidate_state_dict(1)
        if rank == 1:
            assert len(optimizer.state_dict()["state"]) == len(list(model.parameters())), "every rank's"
    elif kind == "save_checkpoint":
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_model_state_dict
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(layers().to(device))
        train(model, torch.optim.AdamW(model.parameters()))
        state = get_model_state_dict(model)
        dcp.save(state, checkpoint_id=sys.argv[2] + "-saved")
        dcp.load(state, checkpoint_id=sys.argv[2] + "-saved")
    elif kind == "tensor_parallel":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}
        model = parallelize_module(layers().to(device), init_device_mesh("cuda", (world,)), plan)
        train(model, torch.optim.AdamW(model.parameters()))
    elif kind == "pipeline":
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        model = layers().to(device)
        if rank == world - 1:
            model.append(nn.Linear(SIZE, 5000, device=device))
        stage = PipelineStage(model, rank, world, device)
        schedule = Schedule1F1B(stage, world, loss_fn=lambda output, target: output.pow(2).mean())
        for _ in range(2):
            inputs = (torch.randn(64, SIZE, device=device),) if rank == 0 else ()
            schedule.step(*inputs, **({"target": torch.zeros(64, device=device)} if rank == world - 1 else {}))
    elif kind == "one_fails":
        if rank == 1:
            torch.empty(1 << 40, device=device)
        torch.empty(1 << 20, device=device)
    elif kind == "one_fails_and_one_is_killed":
        from gpumem_magic.files.rank_files import is_alive

        torch.empty(1 << 20, device=device)
        if rank == 2:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, when rank 1 has failed
        processes: list[Any] = [None] * world
        dist.all_gather_object(processes, os.getpid())
        if rank == 1:
            torch.empty(1 << 40, device=device)
        if rank == 2:
            while is_alive(processes[1]):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    elif kind == "one_hangs":
        torch.empty(1 << 20, device=device)
        place, waits_in = Path(f"{sys.argv[2]}-{rank}"), "nap" if rank == 0 else "barrier"
        threading.Thread(target=tell_of, args=(place, waits_in), daemon=True).start()
        if rank == 0:
            nap()
        dist.barrier()
    elif kind == "leaves":
        torch.empty(1 << 20, device=device)
        sys.exit(3)
    elif kind == "objects":
        found = ["from rank 0"] if rank == 0 else [None]
        dist.broadcast_object_list(found, src=0)
        everybody: list[Any] = [None] * world
        dist.all_gather_object(everybody, {"rank": rank})
        print(found, everybody)
    elif kind == "stores":
        store = dist.TCPStore("127.0.0.1", 29500, world, is_master=rank == 0)
        if rank == 0:
            store.set("shape", "3,4")
        there = dist.PrefixStore("all", store).add("there", 1)
        dist.monitored_barrier(dist.new_group(backend="gloo"))
        print(store.get("shape").decode(), there)
        try:
            store.get("nobody's")
        except dist.DistStoreError as error:
            print(error)


# When Python collects depends on how much it did, which is not the same alone.
gc.disable()
done = {}
for kind in KINDS:
    run(kind)
    gc.collect()
    # What is left are modules, which the next kind's collection need not look at.
    gc.freeze()
    if len(sys.argv) > 2:
        done[kind] = events()
if done:
    Path(f"{sys.argv[2]}-{rank}").write_bytes(pickle.dumps(done))
dist.destroy_process_group()
