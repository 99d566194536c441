"""Hugging Face's guide to training on one GPU: bert-large on a V100, nvidia-smi's figure at the end of an epoch.

January 2022, torch 1.9: kernels loaded at once, cuBLAS's workspaces outside PyTorch, gradients cleared by writing zeros,
attention by the plain steps, torch-1-style optimizers and clipping that go through the parameters one by one.
"""

from __future__ import annotations

import re

import torch

from accuracy.building import unfilled
from accuracy.older import old_attention
from accuracy.plans import Plan, Readings, Skip, readings
from accuracy.table import Row
from accuracy.training import EightBitAdam, OldAdamW, train, with_decay_first

DEVICE = "V100-16GB,torch=1.9"
STEPS = 3


def plan(row: Row) -> Plan | Skip:
    if "torch.ones((1,1))" in row.model:
        return Plan("first tensor", DEVICE, _first_tensor, "nvidia-smi")
    if "weights only" in row.model:
        return Plan("weights", DEVICE, _weights, "nvidia-smi")
    accumulate = re.search(r"grad_accum=(\d+)", row.extras)
    optimizer = next((name for name in ("AdamW", "Adafactor", "Adam8bit") if name in row.optimizer), None)
    if not row.model.startswith("bert-large-uncased") or accumulate is None or optimizer is None:
        return Skip("not one of the guide's runs with bert-large")
    batch, sequence, micro = int(row.batch), int(row.seq_or_image), int(accumulate[1])
    again, half = "gradient_checkpointing=True" in row.extras, "autocast" in row.dtype

    def run() -> Readings:
        return _train(batch, sequence, micro, again, half, optimizer)

    return Plan((batch, sequence, micro, again, half, optimizer), DEVICE, run, "nvidia-smi")


def _first_tensor() -> Readings:
    one = torch.ones((1, 1)).cuda()
    found = readings()
    del one
    return found


def _model() -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation=old_attention(),
    )
    with unfilled():
        model: torch.nn.Module = BertForSequenceClassification(config)
    return model.to("cuda")


def _weights() -> Readings:
    model = _model()
    found = readings()
    del model
    return found


def _train(batch: int, sequence: int, micro: int, again: bool, half: bool, optimizer: str) -> Readings:
    from transformers.optimization import Adafactor

    model = _model()
    if again:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})  # type: ignore[operator]
    parameters = with_decay_first(model)
    made: torch.optim.Optimizer
    if optimizer == "AdamW":
        made = OldAdamW(parameters)
    elif optimizer == "Adam8bit":
        made = EightBitAdam(parameters)
    else:
        made = Adafactor(parameters, lr=1e-5, scale_parameter=False, relative_step=False)

    def loss_of() -> torch.Tensor:
        tokens = torch.zeros(batch, sequence, dtype=torch.long).to("cuda")
        labels = torch.zeros(batch, dtype=torch.long).to("cuda")
        loss: torch.Tensor = model(input_ids=tokens, labels=labels)[0]
        return loss

    train(model, made, loss_of, steps=STEPS, accumulate=micro, half=half, before_2=True)
    return readings()
