"""First steps: tensors, autograd, modules, optimizers, data, saving."""

# ruff: noqa: B007 - programs print after their loops how far they came
from __future__ import annotations

import copy
import io
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


def show(*values: Any) -> None:
    print(*(f"{value:.4f}" if isinstance(value, float) else value for value in values))


def tensors(device: str) -> None:
    x = torch.arange(12.0, device=device).reshape(3, 4)
    print(x, x.T @ x, x.sum(0), x[1], x[:, ::2], sep="\n")
    print(x.mean().item(), x.std().item(), x.argmax().item(), (x > 5).sum().item())


def autograd_scalars(device: str) -> None:
    a = torch.tensor([2.0, 3.0], device=device, requires_grad=True)
    b = torch.tensor([6.0, 4.0], device=device, requires_grad=True)
    (3 * a**3 - b**2).backward(torch.ones(2, device=device))
    print(a.grad, b.grad, 9 * a**2 == a.grad)


def sine_by_polynomial(device: str) -> None:
    x = torch.linspace(-math.pi, math.pi, 2000, device=device)
    y = torch.sin(x)
    a, b, c, d = (torch.randn((), device=device, requires_grad=True) for _ in range(4))
    for step in range(200):
        loss = (a + b * x + c * x**2 + d * x**3 - y).pow(2).sum()
        loss.backward()
        with torch.no_grad():
            for weight in (a, b, c, d):
                weight -= 1e-6 * weight.grad
                weight.grad = None
        if step % 50 == 0:
            show(step, loss.item())
    show(a.item(), b.item(), c.item(), d.item())


class LegendrePolynomial3(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input)
        return 0.5 * (5 * input**3 - 3 * input)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        (input,) = ctx.saved_tensors
        return grad_output * 1.5 * (5 * input**2 - 1)


def own_autograd_function(device: str) -> None:
    x = torch.linspace(-math.pi, math.pi, 500, device=device)
    y = torch.sin(x)
    weights = [torch.full((), value, device=device, requires_grad=True) for value in (0.0, -1.0, 0.0, 0.3)]
    for _ in range(50):
        a, b, c, d = weights
        loss = (a + b * LegendrePolynomial3.apply(c + d * x) - y).pow(2).sum()
        loss.backward()
        with torch.no_grad():
            for weight in weights:
                weight -= 5e-6 * weight.grad
                weight.grad = None
    show(loss.item(), *(weight.item() for weight in weights))


def dynamic_weights(device: str) -> None:
    import random

    random.seed(0)
    x = torch.linspace(-3, 3, 300, device=device)
    y = torch.sin(x)
    w = [torch.nn.Parameter(torch.randn((), device=device)) for _ in range(5)]
    optimizer = torch.optim.SGD(w, lr=1e-8, momentum=0.9)
    for _ in range(40):
        out = w[0] + w[1] * x + w[2] * x**2 + w[3] * x**3
        for power in range(4, random.randint(4, 6)):
            out = out + w[4] * x**power
        loss = (out - y).pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    show(loss.item(), *(one.item() for one in w))


def classifier(device: str) -> None:
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = torch.randn(200, 20).to(device), torch.randint(0, 5, (200,)).to(device)
    for epoch in range(10):
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        correct = (logits.argmax(1) == y).float().mean().item()
        show(epoch, loss.item(), correct)


def data_loader(device: str) -> None:
    data = TensorDataset(torch.randn(130, 8), torch.randn(130, 1))
    model = nn.Linear(8, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        total = 0.0
        for x, y in DataLoader(data, batch_size=32, shuffle=True, pin_memory=False):
            x, y = x.to(device, non_blocking=True), y.to(device)
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        show(epoch, total / len(data))


def save_and_load(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 4, device=device)).sum().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        torch.save({"model": model.state_dict()}, path.with_name("again.pt"))
        stored = torch.load(path, map_location=device)
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    other.load_state_dict(stored["model"])
    x = torch.randn(3, 4, device=device)
    print(torch.equal(model.eval()(x), other.eval()(x)), stored["optimizer"]["state"][0]["exp_avg"].sum().item())


def whole_model_in_a_file(device: str) -> None:
    buffer = io.BytesIO()
    model = nn.Linear(3, 2).to(device)
    torch.save(model, buffer)
    buffer.seek(0)
    print(torch.load(buffer, weights_only=False)(torch.ones(3, device=device)))


def optimizers(device: str) -> None:
    for kind, options in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.RMSprop, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.Adadelta, {}),
        (torch.optim.NAdam, {"lr": 0.01}),
        (torch.optim.RAdam, {"lr": 0.01}),
        (torch.optim.Adamax, {"lr": 0.01}),
        (torch.optim.ASGD, {"lr": 0.1}),
        (torch.optim.Rprop, {"lr": 0.01}),
    ):
        w = torch.nn.Parameter(torch.linspace(-1, 2, 7, device=device))
        optimizer = kind([w], **options)
        for _ in range(5):
            optimizer.zero_grad()
            (w.sin() + w**2).sum().backward()
            optimizer.step()
        print(kind.__name__, w.detach().cpu())


def fused_optimizers(device: str) -> None:
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        w = torch.nn.Parameter(torch.linspace(-1, 2, 7, device=device))
        optimizer = kind([w], lr=0.05, fused=True)
        for _ in range(5):
            optimizer.zero_grad()
            (w.sin() + w**2).sum().backward()
            optimizer.step()
        print(kind.__name__, w.detach().cpu())


def second_order_by_lbfgs(device: str) -> None:
    point = torch.tensor([-1.5, 2.0], device=device, requires_grad=True)
    optimizer = torch.optim.LBFGS([point], max_iter=50, line_search_fn="strong_wolfe")
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (1 - point[0]) ** 2 + 100 * (point[1] - point[0] ** 2) ** 2
        loss.backward()
        return loss

    optimizer.step(closure)
    print(calls, [round(value, 3) for value in point.tolist()])


def schedules(device: str) -> None:
    model = nn.Linear(5, 1).to(device)
    x, y = torch.randn(50, 5, device=device), torch.randn(50, 1, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
    for _ in range(12):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plateau.step(loss)
        show(optimizer.param_groups[0]["lr"], loss.item())


def early_stopping(device: str) -> None:
    model = nn.Linear(3, 1).to(device)
    x = torch.randn(64, 3, device=device)
    y = x @ torch.tensor([[1.0], [2.0], [-1.0]], device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best, waited = math.inf, 0
    for epoch in range(200):
        loss = F.mse_loss(model(x), y)
        if loss < best - 1e-4:
            best, waited = loss.item(), 0
        else:
            waited += 1
        if waited > 2:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    show(epoch, best)


def clipped_and_averaged(device: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(32, 6, device=device)
    for _ in range(6):
        optimizer.zero_grad()
        (model(x) ** 2).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        nn.utils.clip_grad_value_(model.parameters(), 0.3)
        optimizer.step()
        average.update_parameters(model)
        show(norm.item())
    show(average(x).sum().item())


def accumulated(device: str) -> None:
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(8):
        (F.mse_loss(model(torch.randn(4, 4, device=device)), torch.zeros(4, 2, device=device)) / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    print(model.weight)


def mixed_precision(device: str) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=3)
    x, y = torch.randn(32, 16, device=device), torch.randint(0, 4, (32,), device=device)
    for _ in range(7):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        print(f"{loss.item():.2f}", scaler.get_scale())


def overflow_in_the_scaler(device: str) -> None:
    w = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.SGD([w], lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**20)
    for factor in (1.0, 1e38, 1.0):
        optimizer.zero_grad()
        scaler.scale((w * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        print(w.detach().cpu(), scaler.get_scale())


def checkpointed(device: str) -> None:
    block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8)).to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False).sum().backward()
    show(x.grad.sum().item(), block[0].weight.grad.abs().sum().item())


def hooks(device: str) -> None:
    seen: list[Any] = []
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).to(device)
    for module in model:
        module.register_forward_hook(lambda module, args, out: seen.append(round(out.sum().item(), 4)))
        module.register_full_backward_hook(lambda module, gi, go: seen.append(round(go[0].sum().item(), 4)))
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    model(torch.ones(2, 3, device=device, requires_grad=True)).sum().backward()
    print(seen, model[0].weight.grad)


def copies(device: str) -> None:
    model = nn.Linear(2, 2).to(device)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.weight.add_(1)
    print((model.weight - other.weight).tolist(), other.weight.data_ptr() != model.weight.data_ptr())


def initialised(device: str) -> None:
    w = torch.empty(6, 5, device=device)
    for fill in (
        nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.orthogonal_, nn.init.trunc_normal_, nn.init.eye_,
        nn.init.zeros_,
    ):  # fmt: skip
        show(fill.__name__, fill(w).abs().sum().item())
    nn.init.sparse_(w, 0.5)
    print((w == 0).sum(0))


def dropout_of_all_kinds(device: str) -> None:
    x = torch.ones(4, 6, 3, 3, device=device)
    for layer in (nn.Dropout(0.4), nn.Dropout2d(0.4), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)):
        show(type(layer).__name__, layer(x).sum().item())
    print(F.dropout(x, 0.5, training=False).sum().item())


def seeds(device: str) -> None:
    torch.manual_seed(3)
    first = torch.rand(4, device=device)
    generator = torch.Generator(device).manual_seed(5)
    print(first, torch.randn(3, device=device, generator=generator), torch.randperm(6, device=device))
    state = torch.get_rng_state()
    again = torch.rand(2, device=device)
    torch.set_rng_state(state)
    print(torch.rand(2, device=device) == again)


def parametrized(device: str) -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)).to(device)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)).to(device)
    x = torch.randn(5, 4, device=device)
    (layer(x).sum() + spectral(x).square().sum()).backward()
    show(layer(x).sum().item(), spectral(x).sum().item())
    print([(name, round(p.grad.abs().sum().item(), 4)) for name, p in layer.named_parameters()])


def pruned(device: str) -> None:
    from torch.nn.utils import prune

    layer = nn.Linear(6, 6).to(device)
    prune.l1_unstructured(layer, "weight", 0.5)
    prune.random_unstructured(layer, "bias", 2)
    print((layer.weight == 0).sum().item(), layer(torch.ones(6, device=device)))


def nested_modules(device: str) -> None:
    class Block(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.inner = Block(width, depth - 1) if depth else nn.Identity()
            self.lin = nn.Linear(width, width)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(torch.tanh(self.lin(x)) + x)

    model = Block(5, 3).to(device)
    print(
        model(torch.ones(2, 5, device=device)).sum(),
        {k: v.item() for k, v in model.state_dict().items() if "calls" in k},
    )
