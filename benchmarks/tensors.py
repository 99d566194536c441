"""What it costs to note how large allocations came to be: a measured cell on a virtual device with it and without, in one run.

    python benchmarks/tensors.py

Pairs of the same training steps run side by side in random order; in one of the two the device's logs are told of no operator.
What counts is the processor time of the whole measured cell, its report included, which a busy computer does not change much.
The figures are the median of the pairs' ratios, with a bootstrap interval of 95 %.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

SETUP = """
import torch
from torch import nn
def blocks(width, layers):
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
    return nn.Sequential(*parts).cuda()
model = blocks(256, 24)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
x = torch.randn(512, 256, device="cuda")
"""
CELL = """%%gpumem -q
for _ in range(3):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
PAIRS = 60


def main() -> None:
    from IPython.core.interactiveshell import InteractiveShell

    from gpumem_magic.virtual.engine.device import VirtualDevice

    shell: Any = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "gpumem_magic")
    shell.run_line_magic("gpumem_device", "T4")
    shell.run_cell(SETUP)
    told = VirtualDevice.is_recorded

    def run(tells: bool) -> float:
        VirtualDevice.is_recorded = told if tells else property(lambda device: False)  # type: ignore[assignment]
        large = VirtualDevice.is_large
        if not tells:
            VirtualDevice.is_large = lambda device, nbytes: False  # type: ignore[method-assign]
        try:
            # What others have left is not collected on this one's time.
            gc.collect()
            began = time.process_time()
            shell.run_cell(CELL)
            return time.process_time() - began
        finally:
            VirtualDevice.is_recorded = told  # type: ignore[method-assign]
            VirtualDevice.is_large = large  # type: ignore[method-assign]

    for tells in (True, False, True):
        run(tells)
    ratios = []
    for _ in range(PAIRS):
        first = random.random() < 0.5
        times = {tells: run(tells) for tells in (first, not first)}
        ratios.append(times[True] / times[False])
    resampled = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(2000))
    low, high = resampled[50], resampled[-50]
    print(
        f"measured cell with notes / without: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}), {PAIRS} pairs"
    )


if __name__ == "__main__":
    main()
