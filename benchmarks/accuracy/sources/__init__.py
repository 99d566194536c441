"""One module for each source of published figures: `plan(row)` says how the row's figure is made here."""

from __future__ import annotations

from collections.abc import Callable

from accuracy.plans import Plan, Skip
from accuracy.sources import (
    attention_sweep,
    bert_inference,
    gpt2_ladder,
    one_gpu_guide,
    optimum,
    units,
    vit_step,
)
from accuracy.table import Row

_PLANNERS: dict[str, Callable[[Row], Plan | Skip]] = {
    "CS336 A2 attention sweep": attention_sweep.plan,
    "HF efficient-training-on-single-GPU": one_gpu_guide.plan,
    "HF PyTorchBenchmark doc": bert_inference.plan,
    "Raschka LLMs-from-scratch training speed": gpt2_ladder.plan,
    "PyTorch tutorial optimizer-in-backward": vit_step.plan,
    "pytorch_memlab README": units.plan,
    "PyTorch forum 178671": units.plan,
    "pytorch issue 95668": units.plan,
    "optimum-benchmark CI": optimum.plan,
}


def plan(row: Row) -> Plan | Skip:
    """How to make the row's figure, or why it can't be made."""
    if row.group is None:
        return Skip(f"no reading here is called {row.metric}")
    if row.source.startswith("TorchTitan"):
        return Skip("several GPUs: FSDP shards across 8 or 128 of them, and one process stands for one device here")
    for start, planner in _PLANNERS.items():
        if row.source.startswith(start):
            return planner(row)
    return Skip("nobody has written down how this source built its runs")
