"""A training step of bert-large on the virtual GPU: its memory, and its time against the same step under bare FakeTensorMode.

    python benchmarks/bert_step.py [--steps 5] [--layers 24]

transformers' BertForSequenceClassification with bert-large's sizes, eager (math) attention, batch 4, sequence 512, AdamW
(foreach). Both sides run in one process, in turn, so that the machine's load falls on both; the ratio is that of the
medians. Under FakeTensorMode the fakes are on meta, which needs neither CUDA nor our patches and takes the same foreach
path. `%%gpumem` on top of the virtual GPU (recording, attribution and report) is timed as a third side.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertConfig, BertForSequenceClassification

from gpumem_magic import measure
from gpumem_magic.units import MIB
from gpumem_magic.virtual import gpu

BATCH, SEQUENCE = 4, 512


def config(layers: int) -> BertConfig:
    return BertConfig(
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
    )


def prepare(device: str, layers: int) -> Callable[[], None]:
    """The model on `device` and a function that runs one step."""
    with torch.device("meta"):
        model = BertForSequenceClassification(config(layers))
    if device != "meta":
        model = model.to_empty(device=device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.long, device=device)
    labels = torch.zeros(BATCH, dtype=torch.long, device=device)

    def step() -> None:
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def fake_side(layers: int) -> Callable[[], None]:
    """A step under bare FakeTensorMode."""
    return fake_parts(layers)[3]


def fake_parts(
    layers: int,
) -> tuple[FakeTensorMode, torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """The mode, the model and the optimizer on fakes, and a function that runs one step."""
    from torch.optim import optimizer as optim
    from torch.utils import _foreach_utils

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        model = BertForSequenceClassification(config(layers))
    model.train()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = mode.from_tensor(torch.empty(parameter.shape), static_shapes=True)
                module._parameters[name] = torch.nn.Parameter(fake)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = mode.from_tensor(
                    torch.empty(buffer.shape, dtype=buffer.dtype), static_shapes=True
                )
    # Without this the fakes would take the single-tensor path, and the two sides would not do the same.
    kind = type(next(model.parameters()))
    for place in (optim, _foreach_utils):
        place._foreach_supported_types = [*place._foreach_supported_types, kind]  # type: ignore[attr-defined]
    with mode:
        adam = torch.optim.AdamW(model.parameters(), foreach=True)
        tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
        labels = torch.zeros(BATCH, dtype=torch.long)

    def step() -> None:
        with mode:
            model(input_ids=tokens, labels=labels).loss.backward()
            adam.step()
            adam.zero_grad()

    return mode, model, adam, step


def dropout_in_parts(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout as fakes have it: the mask has the type of the tensor, where CUDA's kernel keeps a byte for each element."""
    return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p) if training and p else x


def peak_in_tensors(machine: gpu.VirtualMachine) -> float:
    """MiB asked for by tensors at the peak so far; the libraries' workspaces come beside them."""
    device = machine.devices[0]
    requested = device.allocator.memory_stats()["requested_bytes.all.peak"]
    return (requested - 2 * device.model.cublas_workspace_bytes) / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="timed steps on each side (default 5)")
    parser.add_argument("--layers", type=int, default=24, help="layers of the model (default 24, bert-large)")
    options = parser.parse_args()

    bare = fake_side(options.layers)
    machine = gpu.turn_on("V100-16GB")
    ours = prepare("cuda", options.layers)
    allocator = machine.devices[0].allocator
    print(f"parameters: {torch.cuda.memory_allocated() / MIB:,.0f} MiB allocated")

    def measured() -> None:
        with measure():
            ours()

    bare(), ours(), ours()
    stats = allocator.memory_stats()
    print(
        f"peak of two steps: {stats['requested_bytes.all.peak'] / MIB:,.1f} MiB requested, of which "
        f"{2 * machine.devices[0].model.cublas_workspace_bytes / MIB:.2f} MiB are two cuBLAS workspaces; "
        f"{stats['allocated_bytes.all.peak'] / MIB:,.1f} MiB allocated, "
        f"{stats['reserved_bytes.all.peak'] / MIB:,.0f} MiB reserved"
    )
    print(f"in tensors: {peak_in_tensors(machine):,.0f} MiB", end="; ")
    original, torch.nn.functional.dropout = torch.nn.functional.dropout, dropout_in_parts
    ours(), ours()
    torch.nn.functional.dropout = original
    print(f"{peak_in_tensors(machine):,.0f} MiB with dropout's masks as fakes keep them (so MemTracker counts them)")
    measured()
    times: dict[str, list[float]] = {"bare": [], "ours": [], "measured": []}
    for _ in range(options.steps):
        times["bare"].append(timed(bare))
        times["ours"].append(timed(ours))
        times["measured"].append(timed(measured))
    gpu.turn_off()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads")
    base = statistics.median(times["bare"])
    for side, words in (
        ("bare", "bare FakeTensorMode"),
        ("ours", "virtual GPU"),
        ("measured", "virtual GPU, measured"),
    ):
        seconds = sorted(times[side])
        median = statistics.median(seconds)
        print(
            f"{words:>22}: {median:6.2f} s a step (median of {len(seconds)}, {seconds[0]:.2f} to {seconds[-1]:.2f}), "
            f"{median / base:.2f} x bare"
        )


if __name__ == "__main__":
    main()
