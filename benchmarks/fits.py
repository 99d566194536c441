"""The largest value that fits, by few trials, against running them all: 40 programs on three cards.

    python benchmarks/fits.py [--only NAME,NAME] [--devices T4,V100-16GB,A100-40GB] [--again | --anew] [--results PATH]

Each program is a cell with a name `n`. The truth is the largest value up to 40 that passes as a plain program to its end, without
a recording, on an empty card, also where smaller ones fail: all above it are run. Every pair is written down as soon as it is
known (`fits.json`) and not run again: `--again` searches again and keeps the truths, `--anew` keeps nothing. Exit status 1 where
an answer is above the truth, more than 5 % below it, took more than eight trials, or fewer than 95 % are exact.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from IPython.core.interactiveshell import InteractiveShell

from gpumem_magic.recording.cell import prepare
from gpumem_magic.session import device as choosing
from gpumem_magic.trials.process import in_a_fork
from gpumem_magic.trials.programs import CellProgram
from gpumem_magic.trials.search import MOST_TRIALS
from gpumem_magic.trials.values import Varied
from gpumem_magic.trials.what_fits import largest

VALUES = range(1, 41)
HEAD = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\nn = 1\n"
LOOP = """
for step in range(10):
    optimizer.zero_grad()
    loss = model({batch}).float().square().mean()
    loss.backward()
    optimizer.step()
"""


def trained(model: str, batch: str, optimizer: str = "torch.optim.Adam(model.parameters())", loop: str = LOOP) -> str:
    return f"{HEAD}model = {model}.cuda()\noptimizer = {optimizer}\n" + loop.format(batch=batch)


def programs() -> Iterator[tuple[str, str]]:
    """(name, cell). Sizes are such that the walls of cards of 15 to 40 GiB lie between 1 and 40, or beyond."""
    mlp = "nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 2048))"
    rows = "torch.randn(n * 6000, 2048, device='cuda')"
    for name, optimizer in {
        "adam": "torch.optim.Adam(model.parameters())",
        "adam-single": "torch.optim.Adam(model.parameters(), foreach=False)",
        "adam-fused": "torch.optim.Adam(model.parameters(), fused=True)",
        "sgd": "torch.optim.SGD(model.parameters(), lr=0.1)",
        "momentum": "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    }.items():
        yield f"mlp-{name}", trained(mlp, rows, optimizer)
    yield "mlp-autocast", trained(mlp, rows, loop=_indented(LOOP, "torch.autocast('cuda', torch.float16)"))
    yield "mlp-kept-gradients", trained(mlp, rows, loop=LOOP.replace("zero_grad()", "zero_grad(set_to_none=False)"))
    yield "mlp-late-zero", trained(mlp, rows, loop=LOOP.replace("    optimizer.zero_grad()\n", "").rstrip()
                                   + "\n    optimizer.zero_grad()\n")  # fmt: skip
    conv = "nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.ReLU())"
    for size in (128, 200, 256):
        yield f"conv-{size}", trained(conv, f"torch.randn(n * 12, 3, {size}, {size}, device='cuda')")
    yield "conv-strided", trained("nn.Sequential(nn.Conv2d(3, 96, 7, 4), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(96, 256, 5))",
                                  "torch.randn(n * 100, 3, 224, 224, device='cuda')")  # fmt: skip
    yield "conv-half", trained(f"{conv}.half()", "torch.randn(n * 20, 3, 160, 160, device='cuda').half()")
    for heads, length in ((8, 256), (16, 512), (4, 777)):
        layer = f"nn.TransformerEncoder(nn.TransformerEncoderLayer(512, {heads}, 2048, batch_first=True), 3)"
        yield (
            f"transformer-{length}",
            trained(layer, f"torch.randn(n * {8 * 256 // length + 1}, {length}, 512, device='cuda')"),
        )
    yield "length", trained("nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)",
                            "torch.randn(8, n * 128, 256, device='cuda')")  # fmt: skip
    for rows_of, width in ((4, 1024), (1, 2048)):
        yield (
            f"scores-{width}",
            (
                f"{HEAD}q = torch.randn({rows_of}, n * 512, {width}, device='cuda', requires_grad=True)\n"
                "for step in range(8):\n    out = (q @ q.transpose(1, 2)).softmax(-1) @ q\n    out.sum().backward()\n"
            ),
        )
    yield (
        "pairs",
        HEAD + "x = torch.randn(n * 1500, 64, device='cuda')\nd = (x[:, None] - x[None]).square().sum(-1).sqrt()\n",
    )
    yield "cube", HEAD + "for step in range(4):\n    v = torch.zeros(n * 40, n * 40, n * 40, device='cuda').cumsum(0)\n"
    for keep in ("x", "x[:1]", "x.sum()"):
        yield (
            f"growing-{len(keep)}",
            (
                f"{HEAD}kept = []\nfor step in range(12):\n"
                f"    x = torch.randn(n, 1 << 25, device='cuda')\n    kept.append({keep})\n"
            ),
        )
    yield (
        "growing-graph",
        (
            f"{HEAD}w = torch.randn(1 << 22, device='cuda', requires_grad=True)\ntotal = 0\n"
            "for step in range(12):\n    total = total + (torch.randn(n, 1 << 22, device='cuda') * w).sigmoid().mean()\n"
        ),
    )
    for spread in (3, 5, 7):
        batch = f"torch.randn(n * 16, 512 + 97 * (step * {spread} % 11), 512, device='cuda')"
        model = "nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))"
        yield f"lengths-{spread}", trained(model, batch)
    for share in (2, 3, 5):
        yield (
            f"pieces-{share}",
            (
                f"{HEAD}M = 1 << 18\nbig = [torch.empty(n * 140 * M, device='cuda') for _ in range({share})]\ndel big\n"
                f"small = [torch.empty(n * 90 * M, device='cuda') for _ in range({share})]\n"
                f"again = [torch.empty(n * 140 * M, device='cuda') for _ in range({share})]\n"
            ),
        )
    for holes in (3, 4):
        yield (
            f"holes-{holes}",
            (
                f"{HEAD}M = 1 << 18\n"
                f"parts = [torch.empty((41 + 14 * (i % {holes})) * n * M // 4, device='cuda') for i in range(40)]\n"
                f"parts = parts[::{holes}]\nx = torch.empty(n * 200 * M, device='cuda')\ny = x * 2\n"
            ),
        )
    yield (
        "inference",
        HEAD
        + (
            f"model = {mlp}.cuda()\nwith torch.no_grad():\n    for step in range(8):\n"
            "        y = model(torch.randn(n * 9000, 2048, device='cuda'))\n"
        ),
    )
    yield "words", trained("nn.Sequential(nn.Embedding(50000, 256), nn.Linear(256, 50000))",
                           "torch.zeros(n * 700, dtype=torch.long, device='cuda')")  # fmt: skip
    yield (
        "joined",
        HEAD
        + (
            "out = torch.empty(0, 4096, device='cuda')\nfor step in range(12):\n"
            "    out = torch.cat([out, torch.randn(n * 2000, 4096, device='cuda')])\n"
        ),
    )
    yield "sorted", HEAD + "for step in range(5):\n    x, order = torch.randn(n, 30_000_000, device='cuda').sort()\n"
    yield "weights", trained("nn.Linear(n * 1024, 4096)", "torch.randn(64, n * 1024, device='cuda')")
    yield (
        "layers",
        trained("nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(n)])", "torch.randn(4096, 4096, device='cuda')"),
    )
    yield (
        "recomputed",
        HEAD
        + (
            "from torch.utils.checkpoint import checkpoint\n"
            f"model = nn.ModuleList([{mlp} for _ in range(3)]).cuda()\noptimizer = torch.optim.AdamW(model.parameters())\n"
            "for step in range(8):\n    x = torch.randn(n * 4000, 2048, device='cuda', requires_grad=True)\n"
            "    for block in model:\n        x = checkpoint(block, x, use_reentrant=False)\n"
            "    x.sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
        ),
    )


def _indented(loop: str, manager: str) -> str:
    return loop.replace("    loss = model", f"    with {manager}:\n        loss = model")


def truth(cell: str, device: str) -> int:
    """The largest value with which the cell, a plain program, runs to its end on an empty card; 0 for none."""

    def run() -> int:
        choosing.choose(device)
        for value in reversed(VALUES):
            names: dict[str, Any] = {"__name__": "__main__"}
            try:
                exec(compile(cell.replace("n = 1\n", f"n = {value}\n", 1), "<program>", "exec"), names)
                return value
            except torch.OutOfMemoryError as error:
                error.__traceback__ = None
            names.clear()
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            if torch.cuda.memory_reserved():
                raise RuntimeError("the card is not empty")
        return 0

    found: int = in_a_fork(run)
    return found


class Known:
    """The pairs that have been compared, in a file with a line for each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        rows = json.loads(path.read_text("utf-8")) if path.exists() else []
        self.rows: dict[tuple[str, str], dict[str, Any]] = {(row["program"], row["device"]): row for row in rows}

    def add(self, row: dict[str, Any]) -> None:
        self.rows[row["program"], row["device"]] = row
        lines = ",\n".join(json.dumps(each) for _, each in sorted(self.rows.items()))
        self._path.write_text(f"[\n{lines}\n]\n", "utf-8")


def compared(shell: InteractiveShell, name: str, cell: str, device: str, true: int | None) -> dict[str, Any]:
    begun = time.perf_counter()
    fits = largest(CellProgram(shell, prepare(shell, cell)), [Varied("n", VALUES)], [device], subject="cell")
    seconds = round(time.perf_counter() - begun, 1)
    true = truth(cell, device) if true is None else true
    return {"program": name, "device": device, "true": true, "found": fits.largest or 0, "trials": len(fits.trials),
            "proven": fits.cases[0].found.is_proven, "seconds": seconds}  # fmt: skip


def judged(row: dict[str, Any]) -> str:
    """What is wrong with an answer, "" for nothing."""
    true, found = row["true"], row["found"]
    if found > true or found < 0.95 * true or row["trials"] > MOST_TRIALS:
        return f"{row['program']} on {row['device']}: {found}, in truth {true}, in {row['trials']} trials"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="programs' names, or parts of them")
    parser.add_argument("--devices", default="T4,V100-16GB,A100-40GB")
    parser.add_argument("--again", action="store_true", help="search again, with the truths that are known")
    parser.add_argument("--anew", action="store_true", help="search and compare again")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    shell = InteractiveShell.instance()
    known = Known(options.results)
    chosen = [
        one for one in programs() if options.only is None or any(part in one[0] for part in options.only.split(","))
    ]
    for name, cell in chosen:
        for device in options.devices.split(","):
            row = None if options.anew else known.rows.get((name, device))
            if row is None or options.again:
                row = compared(shell, name, cell, device, None if row is None else row["true"])
                known.add(row)
                mark = "" if row["found"] == row["true"] else "  <- not exact"
                print(f"{name:20} {device:12} {row['found']:3} of {row['true']:3}  {row['trials']} trials  "
                      f"{row['seconds']:5.1f} s{mark}", flush=True)  # fmt: skip
    rows = list(known.rows.values())
    exact = sum(row["true"] == row["found"] for row in rows)
    above = sum(row["found"] > row["true"] for row in rows)
    trials = [row["trials"] for row in rows]
    print(f"{exact} of {len(rows)} exact, {above} above the truth; "
          f"{sum(trials) / len(trials):.1f} trials on average, {max(trials)} at most")  # fmt: skip
    wrong = [words for row in rows if (words := judged(row))]
    print("\n".join(wrong))
    return int(bool(wrong) or exact < 0.95 * len(rows))


if __name__ == "__main__":
    sys.exit(main())
