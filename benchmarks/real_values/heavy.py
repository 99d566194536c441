"""Programs whose tensors are above 1 MiB, for timing: functions of the device that give one step, to be run again and again."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Step = Callable[[], object]


def steps() -> dict[str, Callable[[str], Step]]:
    """All of them by their names."""
    return {
        name.replace("_", " "): function
        for name, function in globals().items()
        if inspect.isfunction(function)
        and function.__module__ == __name__
        and list(inspect.signature(function).parameters) == ["device"]
    }


def _training(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> Step:
    def step() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value.item()

    return step


def perceptron(device: str) -> Step:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).to(device)
    x = torch.randn(512, 1024, device=device)
    return _training(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), lambda: model(x).square().mean())


def gelu_perceptron_of_a_transformer(device: str) -> Step:
    model = nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 512)).to(
        device
    )
    x = torch.randn(1024, 512, device=device)
    return _training(model, torch.optim.AdamW(model.parameters()), lambda: (x + model(x)).square().mean())


def convolutional_network(device: str) -> Step:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).to(device)
    x, y = torch.randn(16, 3, 32, 32, device=device), torch.arange(16, device=device) % 10
    return _training(model, torch.optim.SGD(model.parameters(), 0.01), lambda: F.cross_entropy(model(x), y))


def transformer_encoder(device: str) -> Step:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 2).to(device)
    x = torch.randn(8, 128, 512, device=device)
    return _training(model, torch.optim.AdamW(model.parameters()), lambda: model(x).square().mean())


def language_model(device: str) -> Step:
    embedding, head = nn.Embedding(4096, 512).to(device), nn.Linear(512, 4096).to(device)
    body = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 1).to(device)
    model = nn.ModuleList([embedding, body, head])
    ids = torch.randint(0, 4096, (4, 128), device=device)
    mask = nn.Transformer.generate_square_subsequent_mask(128, device=device)

    def loss() -> torch.Tensor:
        return F.cross_entropy(head(body(embedding(ids), mask=mask)).flatten(0, 1), ids.flatten())

    return _training(model, torch.optim.Adam(model.parameters()), loss)


def long_short_term_memory(device: str) -> Step:
    model, head = nn.LSTM(512, 512, 2, batch_first=True).to(device), nn.Linear(512, 512).to(device)
    x = torch.randn(64, 32, 512, device=device)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
    return _training(model, optimizer, lambda: head(model(x)[0]).square().mean())


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(64, 32, 2, stride=2), nn.Conv2d(64, 3, 3, padding=1)
        self.norm = nn.GroupNorm(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = F.silu(self.norm(self.down(x)))
        up = F.silu(self.up(F.silu(self.middle(first))))
        out: torch.Tensor = self.out(torch.cat([first, up], 1))
        return out


def unet(device: str) -> Step:
    model = _UNet().to(device)
    x = torch.randn(8, 3, 64, 64, device=device)
    return _training(model, torch.optim.AdamW(model.parameters()), lambda: F.mse_loss(model(x), x))


def diffusion_sampler(device: str) -> Step:
    model = _UNet().to(device)
    betas = torch.linspace(1e-4, 0.02, 8, device=device)
    kept = (1 - betas).cumprod(0)

    @torch.no_grad()
    def step() -> float:
        x = torch.randn(8, 3, 128, 128, device=device)
        for t in reversed(range(8)):
            noise = model(x)
            mean = (x - betas[t] / (1 - kept[t]).sqrt() * noise) / (1 - betas[t]).sqrt()
            x = mean + betas[t].sqrt() * torch.randn_like(x) if t else mean
        return x.clamp(-1, 1).mean().item()

    return step


def adversarial_networks(device: str) -> Step:
    maker = nn.Sequential(nn.Linear(128, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 1024), nn.Tanh()).to(device)
    judge = nn.Sequential(nn.Linear(1024, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 1)).to(device)
    first, second = torch.optim.Adam(maker.parameters(), 2e-4), torch.optim.Adam(judge.parameters(), 2e-4)
    real = torch.randn(512, 1024, device=device)
    yes, no = torch.ones(512, 1, device=device), torch.zeros(512, 1, device=device)

    def step() -> float:
        made = maker(torch.randn(512, 128, device=device))
        first.zero_grad()
        F.binary_cross_entropy_with_logits(judge(made), yes).backward()
        first.step()
        second.zero_grad()
        loss = F.binary_cross_entropy_with_logits(judge(real), yes)
        loss = loss + F.binary_cross_entropy_with_logits(judge(made.detach()), no)
        loss.backward()
        second.step()
        return loss.item()

    return step


def variational_autoencoder(device: str) -> Step:
    encoder = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 512)).to(device)
    decoder = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 784)).to(device)
    model = nn.ModuleList([encoder, decoder])
    x = torch.rand(512, 784, device=device)

    def loss() -> torch.Tensor:
        mean, spread = encoder(x).chunk(2, -1)
        out = decoder(mean + torch.randn_like(spread) * (spread / 2).exp())
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum()
        return F.binary_cross_entropy_with_logits(out, x, reduction="sum") + divergence

    return _training(model, torch.optim.Adam(model.parameters(), 1e-3), loss)


def steps_of_an_optimizer(device: str) -> Step:
    weights = [torch.randn(1024, 1024, device=device, requires_grad=True) for _ in range(4)]
    optimizer = torch.optim.AdamW(weights)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return optimizer.step


def attention_by_hand(device: str) -> Step:
    query, key, value = (torch.randn(4, 8, 256, 64, device=device, requires_grad=True) for _ in range(3))

    def step() -> float:
        scores = query @ key.transpose(-1, -2) / math.sqrt(64)
        out = (
            scores.masked_fill(torch.ones(256, 256, dtype=torch.bool, device=device).triu(1), -math.inf).softmax(-1)
            @ value
        )
        loss = out.square().mean()
        loss.backward()
        return loss.item()

    return step


def nothing_but_cheap_operators(device: str) -> Step:
    x, y = torch.randn(512, 1024, device=device), torch.randn(512, 1024, device=device)

    def step() -> float:
        z = x
        for _ in range(20):
            z = (z * 0.9 + y).relu().sub(0.1)
        return z.sum().item()

    return step
