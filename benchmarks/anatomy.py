"""The anatomy of a training step on the virtual GPU beside the textbook's: bytes for each parameter, and activations.

    python benchmarks/anatomy.py [--layers 4] [--device A100-80GB]

A GPT-2 in plain torch (attention by hand, dropout 0.1, batch 4, 512 tokens) trains for two steps with each optimizer in float32,
bfloat16 and under autocast; what is there after the second step is divided by the number of parameters. Then what one more
layer keeps for the backward pass is laid beside the formula.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from accuracy.gpt2 import GPT2, Variant
from textbook import OPTIMIZERS, PRECISIONS, layer_activation_bytes, measured, textbook

from gpumem_magic import measure
from gpumem_magic.report.dnnmem import dnnmem_view
from gpumem_magic.units import MIB
from gpumem_magic.virtual import gpu

BATCH, TOKENS = 4, 512
MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd+momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def variant(layers: int) -> Variant:
    return Variant(mask_buffer=False, native_layers=True, layers=layers, context=TOKENS)


def model_on_device(layers: int, precision: str) -> GPT2:
    with torch.device("meta"):
        model = GPT2(variant(layers))
    return model.to_empty(device="cuda").to(torch.bfloat16 if precision == "bf16" else torch.float32)


def loss_of(model: GPT2, precision: str) -> torch.Tensor:
    tokens = torch.zeros(BATCH, TOKENS, dtype=torch.long, device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def row_of(optimizer: str, precision: str, layers: int, device: str) -> str:
    gpu.turn_on(device)
    with measure() as measuring:
        model = model_on_device(layers, precision)
        made = MAKERS[optimizer](model.parameters())
        for _ in range(2):
            made.zero_grad()
            loss_of(model, precision).backward()
            made.step()
    count = sum(parameter.numel() for parameter in model.parameters())
    del model, made
    gpu.turn_off()
    report = measuring.report
    (after,) = [row for row in report.checkpoints if row.kind == "after"]
    found, said = measured(after.categories, count), textbook(optimizer, precision)
    peak = dnnmem_view(report.peak.categories)
    groups = "".join(f"{(peak.groups[name] or 0) / MIB:>9,.0f}" for name in peak.groups if name != "outside")
    return (
        f"{optimizer:<13}{precision:<9}"
        f"{found.parameters:>6.2f}{found.gradients:>6.2f}{found.optimizer_state:>6.2f}{found.total:>7.2f}{said.total:>9.2f}{groups}"
    )


def requested() -> int:
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def activations(precision: str, layers: int) -> int:
    """What the forward pass of so many layers keeps, in bytes as requested, without the loss."""
    model = model_on_device(layers, precision)
    tokens = torch.zeros(BATCH, TOKENS, dtype=torch.long, device="cuda")
    before = requested()
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
        out = model(tokens)
    kept = requested() - before
    del out
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default 4)")
    parser.add_argument("--device", default="A100-80GB", help="the virtual GPU")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{'':<22}bytes for each parameter{'':<10}MiB at the peak, in DNNMem's groups")
    print(f"{'optimizer':<13}{'precision':<9}{'P':>6}{'G':>6}{'O':>6}{'total':>7}{'textbook':>9}", end="")
    print(f"{'weights':>9}{'grads':>9}{'in/out':>9}{'ephem.':>9}{'context':>9}{'fragm.':>9}{'reserv.':>9}")
    for precision in PRECISIONS:
        for optimizer in OPTIMIZERS:
            print(row_of(optimizer, precision, options.layers, options.device), flush=True)
    print(f"\n{'activations of a layer':<24}{'measured':>10}{'textbook':>10}   MiB")
    shape = variant(1)
    for precision, size in (("fp32", 4), ("bf16", 2)):
        gpu.turn_on(options.device)
        kept = activations(precision, 3) - activations(precision, 2)
        gpu.turn_off()
        said = layer_activation_bytes(BATCH, TOKENS, shape.width, shape.heads, size)
        print(f"{precision:<24}{kept / MIB:>10.2f}{said / MIB:>10.2f}")


if __name__ == "__main__":
    main()
