"""What a virtual GPU costs code that does not use it: the same host programs with the device off, on, and on and in use.

    python benchmarks/host_only.py [--rounds 7] [--json]

The processor's time is taken, and each program runs alternately off and on: what else the machine does hardly counts. The
medians are compared. The aim is a factor of at most 1.5 for each program. "in use" is with a model's training step on the
device done before, and its tensors alive.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from gpumem_magic.virtual import gpu

AIM = 1.5


def training() -> Callable[[], Any]:
    """Small steps, where the calls cost more than the arithmetic."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(16, 32), torch.randint(0, 10, (16,))

    def run() -> None:
        for _ in range(20):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    return run


def operators() -> Callable[[], Any]:
    """Nothing but small operators, factories, views and conversions."""
    a, b = torch.randn(64), torch.randn(64)

    def run() -> None:
        for _ in range(300):
            c = torch.cat([a + b, torch.zeros(8), torch.arange(8)])
            c[3:9].to(torch.float64).sum().item()
            torch.tensor([1.0, 2.0]).softmax(0).clone()

    return run


def batches() -> Callable[[], Any]:
    """A data loader and its transforms."""
    data = TensorDataset(torch.randn(512, 3, 8, 8), torch.randint(0, 10, (512,)))

    def run() -> None:
        for images, labels in DataLoader(data, batch_size=16, shuffle=True):
            ((images - images.mean((2, 3), keepdim=True)) / 2).flip(-1).float()
            torch.nn.functional.one_hot(labels, 10)

    return run


def recurrent() -> Callable[[], Any]:
    """A loop of a cell, and its backward pass: a deep graph of small nodes."""
    cell = torch.nn.GRUCell(16, 16)
    inputs = torch.randn(50, 4, 16)

    def run() -> None:
        state = torch.zeros(4, 16)
        for step in inputs:
            state = cell(step, state)
        state.sum().backward()

    return run


def attention() -> Callable[[], Any]:
    """A layer that is large enough to compute."""
    layer = torch.nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    x = torch.randn(4, 64, 128)

    def run() -> None:
        layer(x).sum().backward()

    return run


PROGRAMS = (training, operators, batches, recurrent, attention)


def seconds(program: Callable[[], Any]) -> float:
    start = time.process_time()
    program()
    return time.process_time() - start


def used_device() -> Any:
    """A model on the device, after a step."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(8, 256, device="cuda")).sum().backward()
    optimizer.step()
    return model, optimizer


def compare(make: Callable[[], Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of a program with the device off, on, and in use."""
    torch.manual_seed(0)
    program = make()
    program()
    times: dict[str, list[float]] = {"off": [], "on": [], "in use": []}
    for _ in range(rounds):
        times["off"].append(seconds(program))
        gpu.turn_on("T4")
        try:
            program()
            times["on"].append(seconds(program))
            held = used_device()
            times["in use"].append(seconds(program))
            del held
        finally:
            gpu.turn_off()
    return {state: statistics.median(measured) for state, measured in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="how often each program runs in each state")
    parser.add_argument("--json", action="store_true", help="print figures for programs to read")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {make.__name__: compare(make, options.rounds) for make in PROGRAMS}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'program':12}{'off, ms':>10}{'on, ms':>10}{'in use, ms':>12}{'on / off':>10}{'in use / off':>14}")
    for name, times in found.items():
        off, on, used = (times[state] * 1e3 for state in ("off", "on", "in use"))
        print(f"{name:12}{off:10.2f}{on:10.2f}{used:12.2f}{on / off:10.2f}{used / off:14.2f}")
    worst = max(times[state] / times["off"] for times in found.values() for state in ("on", "in use"))
    print(f"the worst factor is {worst:.2f}; the aim is at most {AIM}")


if __name__ == "__main__":
    main()
