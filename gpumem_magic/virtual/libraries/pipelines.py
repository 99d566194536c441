"""Stages of `torch.distributed.pipelining` (from 2.13 on) vote on how they learn each other's shapes, by a number on the device.

A rank that knows no others' values takes them to vote as it does: by its own arguments, as PyTorch's stages do.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.tensors import VirtualTensor, engine_of


def prepare(module: ModuleType, patches: Patches) -> None:
    stage = module.PipelineStage
    forward, backward = (getattr(stage, name, None) for name in ("_warmup_forward_vote", "_warmup_backward_result"))
    if forward is None or backward is None:
        return
    trains: dict[int, bool] = {}

    def vote(self: Any, has_backward: bool, received_acc: Any = None) -> Any:
        trains[self.stage_index] = has_backward
        return forward(self, has_backward, received_acc)

    def result(self: Any, received_result: Any = None) -> Any:
        told = backward(self, received_result)
        if isinstance(told, VirtualTensor) and not engine_of(told).computes:
            told.fill_(0 if module.InferenceMode.needs_dynamic(self._user_meta, trains[self.stage_index]) else 1)
        return told

    patches.set(stage, "_warmup_forward_vote", vote)
    patches.set(stage, "_warmup_backward_result", result)
