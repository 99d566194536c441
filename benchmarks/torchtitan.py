"""Torchtitan, unmodified, on virtual ranks: the peak that one rank reserves, against the project's published tables.

    git clone https://github.com/pytorch/torchtitan && git -C torchtitan checkout 9dec370
    python benchmarks/torchtitan.py torchtitan [--only 8] [--root-stays-whole]

That is the commit of the published runs. It needs torchdata, datasets, tensorboard, tiktoken and triton, and a moment for each
row. The text that it trains on and the tokenizer, of Llama's size, are made here: sizes do not depend on what they hold.

The published figures are of long runs. Here a row takes five steps, and says from which one on what is reserved rests (Adam's
states are made in the first). PyTorch is today's; that of the published runs kept the root's parameters whole between forward and
backward: `--root-stays-whole` has it so, which adds 2 GiB of tensors and nothing to what is reserved.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_COMPILED = ("--training.compile",)
# Ranks, what ran, published GiB of each GPU (the highest that the allocator had reserved), the flags for it; None: not run here.
ROWS: tuple[tuple[int, str, float, tuple[str, ...] | None], ...] = (
    (8, "FSDP", 82.4, ()),
    (8, "FSDP + torch.compile", 77.0, _COMPILED),
    (8, "FSDP + torch.compile + Float8", 76.8, None),
    (128, "FSDP", 67.0, ()),
    (128, "FSDP + torch.compile", 62.0, _COMPILED),
    (128, "FSDP + torch.compile + Float8", 61.8, None),
)
# The published runs had H100 with 96 GB.
DEVICE = "H100,total=95GiB"
STEPS = 5
# `fully_shard(..., reshard_after_forward=True)` did until June 2025 what None does today (PyTorch's pull request 154704).
ROOT_STAYS_WHOLE = """
import functools, runpy, sys
import torch.distributed._composable.fsdp as fsdp

today = fsdp.fully_shard

@functools.wraps(today)
def fully_shard(*args, reshard_after_forward=True, **kwargs):
    return today(*args, reshard_after_forward=None if reshard_after_forward is True else reshard_after_forward, **kwargs)

fsdp.fully_shard = fully_shard
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
VOCABULARY = 128_000


def prepare(folder: Path, checkout: Path) -> list[str]:
    """Writes a text and a tokenizer, and returns the command's arguments for the 8B model of the tables."""
    data = folder / "tests" / "assets" / "c4_test"
    data.mkdir(parents=True)
    lines = (
        json.dumps({"text": f"The {number} quick brown foxes jump over lazy dogs. " * 40}) for number in range(500)
    )
    (data / "data.json").write_text("\n".join(lines), "utf-8")
    pieces = itertools.chain(
        (bytes([number]) for number in range(256)),
        map(bytes, itertools.product(range(97, 123), repeat=4)),
    )
    words = (
        f"{base64.b64encode(piece).decode()} {rank}" for rank, piece in enumerate(itertools.islice(pieces, VOCABULARY))
    )
    tokenizer = folder / "tokenizer.model"
    tokenizer.write_text("\n".join(words) + "\n", "utf-8")
    settings = (checkout / "train_configs" / "llama3_8b.toml").read_text("utf-8")
    for name in ("enable_profiling", "enable_tensorboard"):
        settings = settings.replace(f"{name} = true", f"{name} = false")
    (folder / "8b.toml").write_text(settings, "utf-8")
    return [
        "--job.config_file", "8b.toml", "--training.batch_size", "2", "--training.dataset", "c4_test", "--training.steps",
        str(STEPS), "--training.warmup_steps", "1", "--metrics.log_freq", "1", "--model.tokenizer_path", str(tokenizer),
    ]  # fmt: skip


def rests_from(log: str) -> int:
    """The step from which on what torchtitan prints as memory stays as it is at the end."""
    printed = re.findall(r"step: *(\d+) .*memory: *([\d.]+)GiB", log)
    last = next((place for place, (_, size) in enumerate(reversed(printed)) if size != printed[-1][1]), len(printed))
    return int(printed[-last][0])


def measure(ranks: int, checkout: Path, folder: Path, program: list[str]) -> tuple[float, int, float, float, float]:
    """Rank 0's peak of reserved memory in GiB, and from which step on it rests; seconds and CPU seconds that it took; the host's
    memory in GiB. Exits where it does not rest."""
    target = folder / f"{ranks}.json"
    command = [sys.executable, "-m", "gpumem_magic.cli", "run", "--ranks", str(ranks), "--as", "0", "--device", DEVICE]
    around = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "HF_DATASETS_OFFLINE": "1"}
    around["PYTHONPATH"] = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with (folder / f"{ranks}.log").open("wb") as log:
        subprocess.run(
            [*command, "--json", str(target), *program],
            cwd=folder, env=around, stdout=log, stderr=log, check=False,
        )  # fmt: skip
    if not target.exists():
        sys.exit((folder / f"{ranks}.log").read_text("utf-8", "replace")[-3000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    (row,) = (one for one in json.loads(target.read_text("utf-8"))["ranks"]["rows"] if one["rank"] == 0)
    rests = rests_from((folder / f"{ranks}.log").read_text("utf-8", "replace"))
    if rests == STEPS:
        sys.exit(f"{ranks} ranks: what is reserved still rises in step {STEPS}")
    return row["peak_reserved"] / (1 << 30), rests, time.monotonic() - began, busy, after.ru_maxrss / (1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="torchtitan's folder, at commit 9dec370")
    parser.add_argument("--only", type=int, metavar="RANKS", help="only the rows with so many ranks")
    parser.add_argument(
        "--root-stays-whole", action="store_true", help="between forward and backward, as in PyTorch of the time"
    )
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    print(
        "Llama 3.1 8B, local batch 2, 8,192 tokens, selective activation checkpointing; GiB reserved at the peak on rank 0"
    )
    print(
        f"{'ranks':>5}  {'run':<30}{'published':>10}{'here':>8}{'off by':>9}{'from step':>11}{'seconds':>9}{'CPU s':>7}"
        f"{'host GiB':>10}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = str(checkout / "train.py")
        program = [train, "--", *prepare(folder, checkout)]
        if options.root_stays_whole:
            (folder / "then.py").write_text(ROOT_STAYS_WHOLE, "utf-8")
            program = [str(folder / "then.py"), "--", train, *program[2:]]
        for ranks, words, published, flags in ROWS:
            if options.only not in (None, ranks):
                continue
            start = f"{ranks:>5}  {words:<30}{published:>10.1f}"
            if flags is None:
                print(f"{start}  not run: it needs torchao of the time")
                continue
            (folder / f"{ranks}.json").unlink(missing_ok=True)
            here, rests, seconds, busy, host = measure(ranks, checkout, folder, [*program, *flags])
            print(
                f"{start}{here:>8.1f}{100 * (here / published - 1):>8.1f}%{rests:>11}{seconds:>9.0f}{busy:>7.0f}{host:>10.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
