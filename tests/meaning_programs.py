"""Small programs that train or infer, each in two parts: what may come before a recording begins, and what is recorded."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Step = Callable[[], object]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, 4 * width)
        self.second = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(F.gelu(self.first(x)))


class Own(nn.Module):
    """A module that makes its own parameters on the device, as courses teach it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


class OwnModel(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Own(width, width) for _ in range(layers)])
        self.head = Own(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


class OwnOptimizer(torch.optim.Optimizer):
    """Puts a new tensor in the place of every parameter and of every state, as courses teach it."""

    def __init__(self, params: object, rate: float = 1e-3) -> None:
        super().__init__(params, {"lr": rate})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                old = state.get("m", torch.zeros_like(p))
                state["m"] = 0.9 * old + p.grad
                p.data = p.data - group["lr"] * state["m"]


def model(width: int = 768, layers: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(500, width), *[Block(width) for _ in range(layers)], nn.Linear(width, 1000)).cuda()


def training(optimizer: str = "AdamW", cast: bool = False, again: bool = False) -> Step:
    """One step after another. again: activations are computed again in backward."""
    net = model()
    steps = getattr(torch.optim, optimizer)(net.parameters(), lr=1e-3)

    def step() -> None:
        x, y = torch.randn(512, 500).cuda(), torch.randint(1000, (512,)).cuda()
        steps.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=cast):
            out = net[0](x)
            for block in net[1:-1]:
                out = checkpoint(block, out, use_reentrant=False) if again else block(out)
            loss = F.cross_entropy(net[-1](out).float(), y)
        loss.backward()
        steps.step()

    return step


def own_training() -> Step:
    net = OwnModel(1024, 6)
    steps = OwnOptimizer(net.parameters())

    def step() -> None:
        x, y = torch.randn(256, 1024, device="cuda"), torch.randint(1000, (256,), device="cuda")
        steps.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        steps.step()

    return step


def inference(cast: bool = False) -> Step:
    net = model()

    @torch.no_grad()
    def step() -> None:
        x = torch.randn(2048, 500).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=cast):
            net(x).float().sum()

    return step


def forward_only() -> Step:
    """The results, and with them what a backward would need, are kept until the next."""
    net = model()
    kept: list[torch.Tensor] = []

    def step() -> None:
        out = net(torch.randn(2048, 500).cuda())
        kept[:] = [out]

    return step


PROGRAMS: dict[str, Callable[[], Step]] = {
    "AdamW": training,
    "SGD": lambda: training("SGD"),
    "autocast": lambda: training(cast=True),
    "checkpoints": lambda: training(again=True),
    "own optimizer and modules": own_training,
    "inference": inference,
    "inference under autocast": lambda: inference(cast=True),
    "forward only": forward_only,
}
