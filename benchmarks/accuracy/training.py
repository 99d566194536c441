"""Optimizers and casts of older releases, and one training loop, as their documentation and sources describe them.

Each allocates what the original allocated; the arithmetic is the textbook's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class OldAdamW(torch.optim.Optimizer):
    """AdamW as transformers had it until version 4: one tensor after the other, with one temporary of its size until the next has
    its own."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["mean"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                state["square"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
                root = state["square"].sqrt().add_(1e-8)
                parameter.addcdiv_(state["mean"], root, value=-group["lr"])


class EightBitAdam(torch.optim.Optimizer):
    """The memory of a blockwise 8-bit Adam: two bytes a value, two scales for 2048 values, two tables of 256 values.

    Tensors of fewer than 4096 values keep 32-bit states. The update is one kernel without temporaries. Layout: the
    bitsandbytes documentation, "8-bit optimizers".
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-5})
        self._tables: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or self.state[parameter]:
                    continue
                small = parameter.numel() < 4096
                kind = torch.float32 if small else torch.uint8
                state = self.state[parameter]
                state["mean"] = torch.zeros_like(parameter, dtype=kind)
                state["square"] = torch.zeros_like(parameter, dtype=kind)
                if small:
                    continue
                if not self._tables:
                    self._tables = [torch.zeros(256, device=parameter.device) for _ in range(2)]
                blocks = -(-parameter.numel() // 2048)
                state["scales"] = [torch.zeros(blocks, device=parameter.device) for _ in range(2)]


def with_decay_first(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters as transformers' Trainer gives them to its optimizer: weights that decay, then biases and layer norms'."""
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    of_norms = {id(parameter) for norm in norms for parameter in norm.parameters()}
    named = [(name.endswith("bias") or id(one) in of_norms, one) for name, one in model.named_parameters()]
    return [one for is_last in (False, True) for stays, one in named if stays is is_last]


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[], torch.Tensor],
    *,
    steps: int,
    accumulate: int = 1,
    half: bool = False,
    clip: float | None = 1.0,
    before_2: bool = False,
) -> None:
    """Optimizer steps as a trainer makes them: micro batches, the scaler, clipping, the step, gradients cleared.

    half: fp16 autocast with a GradScaler. before_2: as before torch 2.0 gradients are cleared by writing zeros, and clipped
    one by one.
    """
    scaler = torch.amp.GradScaler("cuda", enabled=half)
    model.train()
    for _ in range(steps):
        for _ in range(accumulate):
            with torch.autocast("cuda", torch.float16, enabled=half):
                loss = loss_of()
            scaler.scale(loss / accumulate).backward()
            del loss
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=False if before_2 else None)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad(set_to_none=not before_2)
