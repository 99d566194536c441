"""optimum-benchmark's continuous tests: bert-base inference on NVIDIA, GPT-2 training on an AMD MI2xx.

NVML is read there with the first version of its call, which counts what the driver keeps for itself as used.
"""

from __future__ import annotations

import torch

from accuracy.building import unfilled
from accuracy.plans import Plan, Readings, Skip, readings
from accuracy.table import Row
from accuracy.training import train

NVIDIA = "A10G,torch=2.3"
# ROCm's allocator is the same code; the device has 64 GiB, and the context is what that source's own rows leave over.
ROCM = "virtual:64GiB,torch=2.2+rocm,name=AMD Instinct MI200"
STEPS = 5


def plan(row: Row) -> Plan | Skip:
    reading = {
        "max_memory_allocated": "max_memory_allocated",
        "max_memory_reserved": "max_memory_reserved",
        "nvml_used": "nvml",
    }[row.metric]
    if row.model.startswith("bert-base-uncased fill-mask"):
        moment = "load" if row.extras.startswith("load_model") else "forward"
        batch, sequence = int(row.batch), int(row.seq_or_image)
        return Plan(("bert", batch, sequence), NVIDIA, lambda: _bert(batch, sequence), f"{moment}: {reading}")
    if row.model.startswith("GPT-2 124M text-generation training"):
        if reading == "nvml":
            return Skip("the memory of an AMD runtime outside PyTorch's allocator: no device of the catalogue has one")
        batch, sequence = int(row.batch), int(row.seq_or_image)
        return Plan(("gpt2", batch, sequence), ROCM, lambda: _gpt2(batch, sequence), reading)
    return Skip("that run of optimum-benchmark is not written down")


def _bert(batch: int, sequence: int) -> Readings:
    from transformers import BertConfig, BertForMaskedLM

    # Without weights to load, the model is made on the device itself, and its tied decoder exists for a moment.
    with unfilled(), torch.device("cuda"):
        model = BertForMaskedLM(BertConfig(attn_implementation="sdpa")).eval()
        model.tie_weights()
    found = readings("load: ")
    torch.cuda.reset_peak_memory_stats()
    inputs = {
        name: torch.zeros(batch, sequence, dtype=torch.long, device="cuda")
        for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    with torch.inference_mode():
        model(**inputs)
        model(**inputs)
    return found | readings("forward: ")


def _gpt2(batch: int, sequence: int) -> Readings:
    from transformers import GPT2Config, GPT2LMHeadModel

    with unfilled():
        model = GPT2LMHeadModel(GPT2Config(attn_implementation="eager"))
        model.tie_weights()
    model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_of() -> torch.Tensor:
        tokens = torch.zeros(batch, sequence, dtype=torch.long).to("cuda")
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens)[0]
        return loss

    train(model, optimizer, loss_of, steps=STEPS)
    return readings()
