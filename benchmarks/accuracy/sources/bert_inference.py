"""Hugging Face's PyTorchBenchmark: BertModel in inference on a TITAN RTX with torch 1.4, nvidia-smi's figure."""

from __future__ import annotations

import re

import torch

from accuracy.building import unfilled
from accuracy.plans import Plan, Readings, Skip, readings
from accuracy.table import Row

DEVICE = "TITAN-RTX,torch=1.4"


def plan(row: Row) -> Plan | Skip:
    hidden = re.search(r"hidden_size=(\d+)", row.how_to_build)
    layers = re.search(r"num_hidden_layers=(\d+)", row.how_to_build)
    if "BertConfig(" not in row.how_to_build or "inference" not in row.optimizer:
        return Skip("not inference with a BertModel")
    batch, sequence = int(row.batch), int(row.seq_or_image)
    sizes = {name: int(found[1]) for name, found in (("hidden_size", hidden), ("num_hidden_layers", layers)) if found}

    def run() -> Readings:
        return _run(batch, sequence, sizes)

    return Plan((batch, sequence, tuple(sizes.items())), DEVICE, run, "nvidia-smi")


@torch.no_grad()
def _run(batch: int, sequence: int, sizes: dict[str, int]) -> Readings:
    from transformers import BertConfig, BertModel

    with unfilled():
        model = BertModel(BertConfig(**sizes, attn_implementation="eager"))
    model.to("cuda").eval()
    tokens = torch.zeros(batch, sequence, dtype=torch.long, device="cuda")
    for _ in range(2):
        model(tokens)
    return readings()
