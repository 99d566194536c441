"""How long the first `%%gpumem` cell of a fresh process takes, from pressing enter to the report with its picture.

    python benchmarks/first_answer.py [--times 5] [--layers 24]

The cell is a training step of bert-large (batch 4, sequence 512, eager attention, AdamW) on a virtual A100-40GB. Model and
optimizer are there from a cell before, as in a notebook. Everything that is imported or compiled at first use counts. Each
time is that of a new process; beside it stands the same cell once more.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

_SET_UP = """
import torch, bert_step
%gpumem_device A100-40GB
model = bert_step.BertForSequenceClassification(bert_step.config({layers}))
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.zeros(bert_step.BATCH, bert_step.SEQUENCE, dtype=torch.long)
labels = torch.zeros(bert_step.BATCH, dtype=torch.long)
"""
_CELL = """%%gpumem
model = model.to("cuda")
tokens, labels = tokens.to("cuda"), labels.to("cuda")
loss = model(input_ids=tokens, labels=labels).loss
loss.backward()
optimizer.step()
optimizer.zero_grad()
"""


def once(layers: int) -> list[float]:
    """Seconds of the cell's first and second run in this process."""
    from overhead import open_shell

    shell = open_shell()
    if shell is None:
        raise SystemExit("this benchmark needs IPython")
    shell.run_cell(_SET_UP.format(layers=layers)).raise_error()
    taken = []
    for _ in range(2):
        shown = io.StringIO()
        began = time.perf_counter()
        with contextlib.redirect_stdout(shown):
            shell.run_cell(_CELL).raise_error()
        taken.append(time.perf_counter() - began)
        if "optimizer.step()" not in shown.getvalue():
            raise SystemExit("the cell showed no report")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="new processes (default 5)")
    parser.add_argument("--layers", type=int, default=24, help="layers of the model (default 24, bert-large)")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.times < 1 or options.layers < 1:
        parser.error("--times and --layers want whole numbers of at least 1")
    if options.once:
        print(json.dumps(once(options.layers)))
        return
    command = [sys.executable, str(Path(__file__)), "--once", "--layers", str(options.layers)]
    found = []
    for _ in range(options.times):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.strip().splitlines()[-1]))
    for name, seconds in zip(("first", "again"), zip(*found, strict=True), strict=True):
        print(f"{name}: {statistics.median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f}")


if __name__ == "__main__":
    main()
