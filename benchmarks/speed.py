"""A training step on the virtual GPU against bare FakeTensorMode and PyTorch's own MemTracker.

    python benchmarks/speed.py [--layers 4] [--steps 5]

transformers' BertForSequenceClassification with bert-large's widths (24 layers are bert-large), batch 4, sequence 512, eager
attention, AdamW with foreach on all sides, in one process and in turn, so that the machine's load falls on all. "Everything on"
is `%%gpumem` around the step: recording, attribution and the report. Ratios are of medians.

MemTracker's fakes keep dropout's masks in the values' type, as fakes on the host do; CUDA keeps a byte for each element, which is
the difference in activations.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import warnings
from collections.abc import Callable

import torch
from bert_step import fake_parts, prepare, timed
from torch._subclasses.fake_tensor import FakeTensorMode

from gpumem_magic import measure
from gpumem_magic.virtual import gpu


def tracked(
    mode: FakeTensorMode, model: torch.nn.Module, optimizer: torch.optim.Optimizer, bare: Callable[[], None]
) -> Callable[[], None]:
    """The step of bare FakeTensorMode under MemTracker, which is told of the model and the optimizer."""
    from torch.distributed._tools.mem_tracker import MemTracker

    def step() -> None:
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        # The other way round it would see no operator.
        with mode, tracker:
            bare()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default 4; bert-large has 24)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each side (default 5)")
    options = parser.parse_args()

    warnings.simplefilter("ignore")
    mode, model, optimizer, bare = fake_parts(options.layers)
    tracker = tracked(mode, model, optimizer, bare)
    gpu.turn_on("virtual:32GiB")
    ours = prepare("cuda", options.layers)

    def everything() -> None:
        with measure():
            ours()

    sides = {
        "bare FakeTensorMode": bare,
        "virtual GPU": ours,
        "virtual GPU, everything on": everything,
        "MemTracker": tracker,
    }
    for run in sides.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.steps):
        for name, run in sides.items():
            times[name].append(timed(run))
    gpu.turn_off()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads")
    print(f"{options.layers} layers, median of {options.steps} steps\n")
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    base, slow = medians["bare FakeTensorMode"], medians["MemTracker"]
    for name, seconds in times.items():
        print(
            f"{name:>28}: {medians[name]:6.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), {medians[name] / base:5.2f} x bare, "
            f"{slow / medians[name]:5.1f} x faster than MemTracker"
        )


if __name__ == "__main__":
    main()
