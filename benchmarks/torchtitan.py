"""Torchtitan, unmodified, on virtual ranks: the peak that a rank reserves, against the project's published tables.

    git clone https://github.com/pytorch/torchtitan && git -C torchtitan checkout 9dec370
    git clone https://github.com/pytorch/ao && git -C ao checkout eab345c
    PYTHONPATH=ao python benchmarks/torchtitan.py torchtitan [--only "8B on 8"] [--expandable] [--root-stays-whole]
        [--buffers-as-then] [--pipelining FOLDER] [--as RANKS] [--steps N]

Those are the commits of the published runs (torchtitan's benchmarks/llama3_h100_202412_torchtitan.md). It needs torchdata,
datasets, tensorboard, tiktoken and triton. The text that it trains on and the tokenizer, of Llama's size, are made here: sizes do
not depend on what they hold. For the rows with Float8, two changes of PyTorch's since then
are met: torchao is told of a new operator, and a buffer on meta may be selected from (both would stop a card, too).

The published figures are of long runs. Here a row takes a few steps, and says from which one on what is reserved rests (Adam's
states are made in the first). PyTorch is today's; that of the published runs kept the root's parameters whole between forward and
backward: `--root-stays-whole` has it so. Its compiler let buffers live longer: with `--buffers-as-then` they do, and the rows of
70B are met to the printed digit. Its pipelines kept what each stage gave until the step's end; with `--pipelining` they
are those of such a folder, `torch/distributed/pipelining` unpacked from a wheel of 2.7, say. With these a stage of 1F1B asks
nothing of later ones, so that the first can run alone (`--as 0`); today's eight wait for each other.

The published runs do not say which allocator settings they had. With PyTorch's own, ordinary segments, the rows of one dimension
are met; with the `expandable_segments:True` of torchtitan's script for one machine (`--expandable`) they are missed by 2 to 4 %.
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
from typing import NamedTuple


class Row(NamedTuple):
    model: str  # a configuration of torchtitan's, and what it takes beside it
    ranks: int
    words: str
    published: float  # GiB, the highest that the allocator had reserved on any rank
    flags: tuple[str, ...]
    asked: str = "0"  # such as 0,255,511


_COMPILED = ("--training.compile",)
_SHORT = ("--training.batch_size", "2")
# Weights travel as Float8, too, as in torchtitan's docs/float8.md.
_FLOAT8 = (
    *_COMPILED,
    "--float8.enable_float8_linear",
    "--float8.enable_fsdp_float8_all_gather",
    "--float8.precompute_float8_dynamic_scale_for_fsdp",
)
_ASYNC = ("--experimental.enable_async_tensor_parallel",)


def _long(batch: int, tokens: int, context: int) -> tuple[str, ...]:
    """Full checkpointing, and sequences that several ranks share."""
    return (
        *("--training.batch_size", str(batch), "--training.seq_len", str(tokens)),
        *("--experimental.context_parallel_degree", str(context), "--activation_checkpoint.mode", "full", *_FLOAT8),
    )


def _pipeline(schedule: str) -> tuple[str, ...]:
    return (
        *("--experimental.pipeline_parallel_degree", "8", "--experimental.pipeline_parallel_schedule", schedule),
        *_ASYNC,
    )


# The first rank of each of the eight pieces of the pipeline.
_PIECES = ",".join(str(64 * piece) for piece in range(8))
ROWS = (
    Row("8b", 8, "FSDP", 82.4, _SHORT),
    Row("8b", 8, "FSDP, compiled", 77.0, (*_SHORT, *_COMPILED)),
    Row("8b", 8, "FSDP, compiled, Float8", 76.8, (*_SHORT, *_FLOAT8)),
    Row("8b", 8, "FSDP 8, 32,768 tokens, Float8", 83.9, _long(1, 32_768, 1)),
    Row("8b", 8, "FSDP 4, CP 2, 65,536, Float8", 84.2, _long(1, 65_536, 2)),
    Row("8b", 8, "FSDP 2, CP 4, 131,072, Float8", 84.0, _long(1, 131_072, 4)),
    Row("8b", 8, "CP 8, 262,144, Float8", 84.5, _long(1, 262_144, 8)),
    Row("8b", 128, "FSDP", 67.0, _SHORT),
    Row("8b", 128, "FSDP, compiled", 62.0, (*_SHORT, *_COMPILED)),
    Row("8b", 128, "FSDP, compiled, Float8", 61.8, (*_SHORT, *_FLOAT8)),
    Row("70b", 256, "FSDP 32, TP 8, Float8", 71.9, _long(16, 8192, 1)),
    Row("70b", 256, "asynchronous TP, Float8", 67.6, (*_long(16, 8192, 1), *_ASYNC)),
    Row("405b", 512, "FSDP 8, TP 8, PP 8, 1F1B, Float8", 82.5, (*_long(32, 8192, 1), *_pipeline("1F1B")), _PIECES),
    Row("405b", 512, "interleaved 1F1B, Float8", 72.7, (*_long(32, 8192, 1), *_pipeline("Interleaved1F1B")), _PIECES),
    Row("405b", 512, "1F1B, 32,768 tokens, Float8", 75.3, (*_long(8, 32_768, 1), *_pipeline("1F1B")), _PIECES),
    Row("405b", 512, "FSDP 4, CP 2, 65,536, Float8", 75.9, (*_long(8, 65_536, 2), *_pipeline("1F1B")), _PIECES),
    Row("405b", 512, "FSDP 2, CP 4, 131,072, Float8", 77.1, (*_long(8, 131_072, 4), *_pipeline("1F1B")), _PIECES),
    Row("405b", 512, "CP 8, 262,144, Float8", 84.9, (*_long(8, 262_144, 8), *_pipeline("1F1B")), _PIECES),
)
# The published runs had H100 with 96 GB.
DEVICE = "H100,total=95GiB"
STEPS = 4
# `fully_shard(..., reshard_after_forward=True)` did until June 2025 what None does today (PyTorch's pull request 154704).
ROOT_STAYS_WHOLE = """
import functools
import torch.distributed._composable.fsdp as fsdp

today = fsdp.fully_shard

@functools.wraps(today)
def fully_shard(*args, reshard_after_forward=True, **kwargs):
    return today(*args, reshard_after_forward=None if reshard_after_forward is True else reshard_after_forward, **kwargs)

fsdp.fully_shard = fully_shard
"""
# An operator of PyTorch 2.11 and later, which torchao of the time does not know; as today's torchao has it.
KNOWN_TO_FLOAT8 = """
import torch
import torch.distributed._functional_collectives
from torchao.float8.float8_ops import implements
from torchao.float8.float8_tensor import Float8Tensor

def wrapped(operator, args, kwargs=None):
    tensor = args[0]
    return Float8Tensor(
        operator(tensor._data), tensor._scale, tensor._orig_dtype, tensor._linear_mm_config, tensor._gemm_input_role
    )

implements([torch.ops._c10d_functional._wrap_tensor_autograd.default])(wrapped)
"""
# Torchtitan shares out a buffer of the whole model, which stays on meta where a pipeline cuts it: PyTorch selects from it now.
SELECTED_ON_META = """
import torch

select = torch.index_select

def index_select(tensor, dim, index, **kwargs):
    return select(tensor, dim, index.to("meta") if tensor.is_meta else index, **kwargs)

torch.index_select = index_select
"""
# What the compiler did with buffers in December 2024, and up to PyTorch 2.7: one that was no longer used stayed for the next of
# its size, also where the highest need rises by that (`should_reuse_buffer` came later), and what a collective gave lived until
# the next collective (`is_fake` came later, for dependencies that are there for the order only).
BUFFERS_AS_THEN = """
import torch._inductor.codegen.wrapper as wrapper
import torch._inductor.comms as comms

wrapper.AllocateLine.should_reuse_buffer = lambda line, free_line, size: True
decide, dependency = comms.decide_global_ordering_of_comms, comms.WeakDep

def decide_global_ordering_of_comms(*given):
    comms.WeakDep = lambda name, mutating_buf, is_fake: dependency(name, mutating_buf)
    try:
        return decide(*given)
    finally:
        comms.WeakDep = dependency

comms.decide_global_ordering_of_comms = decide_global_ordering_of_comms
"""
# The pipelines of another version.
PIPELINES_OF = """
import importlib.util, sys
import torch.distributed

name, folder = "torch.distributed.pipelining", {folder!r}
found = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
torch.distributed.pipelining = sys.modules[name] = importlib.util.module_from_spec(found)
found.loader.exec_module(sys.modules[name])
"""
THEN = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
VOCABULARY = 128_000


def prepare(folder: Path, steps: int) -> list[str]:
    """Writes a text and a tokenizer, and returns the arguments that every row has."""
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
    return [
        "--training.dataset", "c4_test", "--training.steps", str(steps), "--training.warmup_steps", "1",
        "--metrics.log_freq", "1", "--model.tokenizer_path", str(tokenizer),
    ]  # fmt: skip


def configuration(model: str, folder: Path, checkout: Path) -> list[str]:
    """Writes torchtitan's configuration of a model, without what flags switch on, and returns the arguments for it."""
    settings = (checkout / "train_configs" / f"llama3_{model}.toml").read_text("utf-8")
    settings = re.sub(r"^((?:enable|precompute)_\w+|compile) = true", r"\1 = false", settings, flags=re.MULTILINE)
    (folder / "row.toml").write_text(settings, "utf-8")
    return ["--job.config_file", "row.toml"]


def printed(log: str) -> dict[int, list[float]]:
    """What torchtitan prints as memory after each step, on each rank that ran."""
    found: dict[int, list[float]] = {}
    for step, size in re.findall(r"step: *(\d+) .*memory: *([\d.]+)GiB", log):
        found.setdefault(int(step), []).append(float(size))
    return {step: sorted(sizes) for step, sizes in found.items()}


def rests_from(sizes: dict[int, list[float]]) -> int:
    """The step from which on they stay as they are at the end."""
    return 1 + max((step for step in sizes if sizes[step] != sizes[max(sizes)]), default=0)


class Measured(NamedTuple):
    reserved: dict[int, float]  # of each rank that ran, GiB
    first: float  # after the first step, GiB
    rests: int
    seconds: float
    busy: float
    host: float


def measure(row: Row, folder: Path, program: list[str], settings: str, checkout: Path, steps: int) -> Measured:
    """The peaks of reserved memory, from which step on it rests, and what it took: seconds, CPU seconds, GiB of the host."""
    target, log = folder / "row.json", folder / "row.log"
    target.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "gpumem_magic.cli",
        "run",
        "--ranks",
        str(row.ranks),
        "--as",
        row.asked,
        "--device",
        DEVICE,
    ]
    around = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings, "HF_DATASETS_OFFLINE": "1"}
    around["PYTHONPATH"] = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with log.open("wb") as written:
        subprocess.run(
            [*command, "--json", str(target), *program],
            cwd=folder, env=around, stdout=written, stderr=written, check=False,
        )  # fmt: skip
    said = log.read_text("utf-8", "replace")
    if not target.exists():
        sys.exit(said[-3000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rows = [one for one in json.loads(target.read_text("utf-8"))["ranks"]["rows"] if one["measured"]]
    if any(one["state"] != "done" for one in rows):
        sys.exit(said[-3000:])
    sizes = printed(said)
    rests = rests_from(sizes)
    if rests == steps:
        print(f"{row.words} on {row.ranks} ranks: what is reserved still rises in step {steps}")
    reserved = {one["rank"]: one["peak_reserved"] / (1 << 30) for one in rows}
    return Measured(
        reserved, max(sizes.get(1, [0.0])), rests, time.monotonic() - began, busy, after.ru_maxrss / (1 << 20)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="torchtitan's folder, at commit 9dec370")
    parser.add_argument("--only", default="", metavar="WORDS", help='only rows with these words, such as "8B on 128"')
    parser.add_argument("--expandable", action="store_true", help="expandable segments, as in run_llama_train.sh")
    parser.add_argument(
        "--root-stays-whole", action="store_true", help="between forward and backward, as in PyTorch of the time"
    )
    parser.add_argument("--buffers-as-then", action="store_true", help="in compiled code, as in PyTorch of the time")
    parser.add_argument(
        "--pipelining", type=Path, metavar="FOLDER", help="torch/distributed/pipelining of another version"
    )
    parser.add_argument(
        "--as", dest="ranks", metavar="RANKS", help="which ranks run, such as 0,64; by default each row's own"
    )
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    settings = "expandable_segments:True" if options.expandable else ""
    print("Llama 3.1; GiB reserved at the peak, of the rank that reserves most")
    columns = f"{'published':>10}{'step 1':>8}{'here':>8}{'off by':>9}{'from step':>11}{'seconds':>9}{'CPU s':>7}{'host GiB':>10}"
    print(f"{'model on ranks':<15}{'run':<34}{columns}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        general = prepare(folder, options.steps)
        for row in ROWS:
            label = f"{row.model.upper()} on {row.ranks}"
            if options.only not in f"{label} {row.words}":
                continue
            words = f"{label:<15}{row.words:<34}{row.published:>10.1f}"
            own = [*configuration(row.model, folder, checkout), *row.flags]
            first = [ROOT_STAYS_WHOLE] if options.root_stays_whole else []
            if options.buffers_as_then:
                first.append(BUFFERS_AS_THEN)
            if options.pipelining is not None and "1F1B" in " ".join(own):
                first.append(PIPELINES_OF.format(folder=str(options.pipelining.resolve())))
            if "Float8" in row.words:
                first += [KNOWN_TO_FLOAT8, SELECTED_ON_META]
            (folder / "then.py").write_text("".join([*first, THEN]), "utf-8")
            program = [str(folder / "then.py"), "--", str(checkout / "train.py"), *general, *own]
            row = row._replace(asked=options.ranks or row.asked)
            measured = measure(row, folder, program, settings, checkout, options.steps)
            here = max(measured.reserved.values())
            figures = f"{measured.first:>8.1f}{here:>8.1f}{100 * (here / row.published - 1):>8.1f}%{measured.rests:>11}"
            took = f"{measured.seconds:>9.0f}{measured.busy:>7.0f}{measured.host:>10.1f}"
            print(f"{words}{figures}{took}", flush=True)
            if len(measured.reserved) > 1:
                print("    " + ", ".join(f"rank {rank} {size:.1f}" for rank, size in measured.reserved.items()))


if __name__ == "__main__":
    main()
