"""One FSDP2 training, as a virtual rank and as PyTorch's own `FSDPMemTracker` estimate it: the peak of a rank, and the time.

    python benchmarks/fsdp_estimators.py [--ranks 8] [--device A100-80GB]

Both run the same text in a process of its own: three steps of encoder layers in bfloat16 on a process group that only pretends.
PyTorch's tracker (`torch.distributed._tools`) counts the bytes of tensors, on fakes; without a CUDA build these lie on the host,
whose operators it sees. What it has no place for is in the last columns: kernels' workspaces, what blocks have beyond what was
asked for, and what the rank reserves. Optimizer states are made before it looks, as in PyTorch's own tests of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAM = """
import sys
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

device, layers, width, tokens, reshard, recompute = sys.argv[1], *map(int, sys.argv[2:])
with torch.device(device):
    blocks = [nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True, dropout=0.0) for _ in range(layers)]
    model = nn.Sequential(*blocks)
if recompute:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.TransformerEncoderLayer))
options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32), "reshard_after_forward": bool(reshard)}
for block in model:
    fully_shard(block, **options)
fully_shard(model, **options)
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
x = torch.randn(8, tokens, width, device=device)


def step():
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OURS = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
{program}
for _ in range(3):
    step()
"""
TRACKED = """
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size={ranks})
mesh = init_device_mesh("cpu", ({ranks},))
with FakeTensorMode():
    exec(compile({program!r}, "program", "exec"))
    step()
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((x,))
    with tracker:
        step()
        step()
print(sum(one["Total"] for one in tracker.get_tracker_snapshot("peak").values()))
"""
# (layers, width, tokens, whether parameters are let go of after a forward, whether layers are computed again in backward)
CASES = (
    (8, 1024, 512, 1, 0),
    (8, 1024, 512, 0, 0),
    (8, 1024, 512, 1, 1),
    (24, 1024, 512, 1, 0),
    (16, 2048, 1024, 1, 1),
)


def virtual_rank(case: tuple[int, ...], ranks: int, device: str, folder: Path) -> tuple[float, dict[str, float], float]:
    """MiB at the peak of a rank, parts of it, and seconds."""
    program, report = folder / "program.py", folder / "report.json"
    program.write_text(OURS.format(program=PROGRAM))
    command = [sys.executable, "-m", "gpumem_magic.cli", "run", f"--ranks={ranks}", "--as=0", f"--device={device}"]
    began = time.perf_counter()
    run([*command, f"--json={report}", str(program), "--", "cuda", *map(str, case)])
    seconds = time.perf_counter() - began
    peak = json.loads(report.read_text())["peak"]
    parts = {name: (peak["categories"][name] or 0) / 2**20 for name in ("workspace", "rounding")}
    return peak["allocated"] / 2**20, {**parts, "reserved": peak["reserved"] / 2**20}, seconds


def tracked(case: tuple[int, ...], ranks: int, folder: Path) -> tuple[float, float]:
    """MiB at the peak by PyTorch's tracker, and seconds."""
    program = folder / "tracked.py"
    program.write_text(TRACKED.format(program=PROGRAM, ranks=ranks))
    began = time.perf_counter()
    said = run([sys.executable, str(program), "cpu", *map(str, case)])
    return int(said.split()[-1]) / 2**20, time.perf_counter() - began


def run(command: list[str]) -> str:
    """What a command prints. Raises RuntimeError with its last words where it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command[1]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--device", default="A100-80GB")
    options = parser.parse_args()
    print(
        "layers width tokens reshard recompute | virtual rank  tracker  ratio | workspace rounding reserved (MiB) | seconds"
    )
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            ours, parts, seconds = virtual_rank(case, options.ranks, options.device, Path(folder))
            theirs, tracking = tracked(case, options.ranks, Path(folder))
            sizes = " ".join(f"{number:>6}" for number in case)
            inside = " ".join(f"{size:>9,.0f}" for size in parts.values())
            print(
                f"{sizes} | {ours:>9,.0f} {theirs:>9,.0f}  {theirs / ours:.3f} | {inside} | {seconds:.1f} and {tracking:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
