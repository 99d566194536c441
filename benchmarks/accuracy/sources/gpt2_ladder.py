"""A book's ladder of training speed-ups: GPT-2 in plain torch on an A100, reserved memory after an epoch."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F

from accuracy.building import unfilled
from accuracy.gpt2 import GPT2, Variant, generate
from accuracy.plans import Plan, Readings, Skip, readings
from accuracy.table import Row

DEVICE = "A100-80GB,torch=2.6"
STEPS = 3
PROMPT, NEW_TOKENS = 4, 50
PADDED_VOCABULARY = 50304


def plan(row: Row) -> Plan | Skip:
    rung = re.search(r"cumulative step: (\d*)", row.how_to_build)
    level = int(rung[1] or 0) if rung else 0
    vocabulary = PADDED_VOCABULARY if level >= 9 else Variant.vocabulary
    variant = Variant(level == 0, level >= 6, level >= 7, vocabulary)
    half, fused, compiled = row.dtype == "bf16", "fused" in row.optimizer, "compiled" in row.extras
    batch = int(row.batch)

    def run() -> Readings:
        return _run(variant, batch, half, fused, compiled)

    return Plan((variant, batch, half, fused, compiled), DEVICE, run, row.metric)


def _run(variant: Variant, batch: int, half: bool, fused: bool, compiled: bool) -> Readings:
    with unfilled():
        model = GPT2(variant)
    model.to("cuda")
    if half:
        model.to(torch.bfloat16)
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, fused=fused or None)

    def loss_of() -> torch.Tensor:
        tokens, targets = (torch.zeros(batch, variant.context, dtype=torch.long).to("cuda") for _ in range(2))
        return F.cross_entropy(run(tokens).flatten(0, 1), targets.flatten())

    model.train()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        if step == 0:
            model.eval()
            with torch.no_grad():
                loss_of(), loss_of()
            model.train()
    model.eval()
    generate(run, torch.zeros(1, PROMPT, dtype=torch.long, device="cuda"), NEW_TOKENS)
    return readings()
