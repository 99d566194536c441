"""What an answer of `%%gpumem --fit` takes for two large models: bert-large's batch on a T4, a 7B LoRA's on an A100-40GB.

    python benchmarks/fit_time.py [--only bert,lora]

Each is a cell of a notebook that has imported nothing else. Said for each: the answer, its trials with the iterations that each
ran, and the time: of the processor, the trials' included, and of the wall. Wanted are 30 and 60 s of the wall on two quiet cores.
"""

from __future__ import annotations

import argparse
import os
import time

from IPython.core.interactiveshell import InteractiveShell

from gpumem_magic.recording.cell import prepare
from gpumem_magic.trials.programs import CellProgram
from gpumem_magic.trials.values import varied
from gpumem_magic.trials.what_fits import largest

STEP = """
for step in range(30):
    tokens = torch.zeros(batch, 128, dtype=torch.long, device="cuda")
    {loss}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PROGRAMS = {
    "bert": (
        "T4",
        """
import torch
from transformers import BertConfig, BertForSequenceClassification
batch = 4
config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
model = BertForSequenceClassification(config).cuda().train()
optimizer = torch.optim.AdamW(model.parameters())
"""
        + STEP.format(loss="loss = model(input_ids=tokens, labels=tokens[:, 0]).loss"),
    ),
    "lora": (
        "A100-40GB",
        """
import torch
from seven_billion import build
batch = 1
model = build(32)
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
"""
        + STEP.format(loss="loss = model(input_ids=tokens, labels=tokens).loss"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="bert,lora")
    shell = InteractiveShell.instance()
    for name in parser.parse_args().only.split(","):
        device, cell = PROGRAMS[name]
        begun, used = time.perf_counter(), _processor()
        found = largest(CellProgram(shell, prepare(shell, cell)), [varied("batch=1..256")], [device], subject="cell")
        seconds, wall = _processor() - used, time.perf_counter() - begun
        trials = ", ".join(f"{one.values['batch']} ({one.iterations})" for one in found.trials)
        print(f"{name:5} {device:10} {found.largest} fits; trials (iterations): {trials}; {seconds:.0f} s of the processor, "
              f"{wall:.0f} s", flush=True)  # fmt: skip


def _processor() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main()
