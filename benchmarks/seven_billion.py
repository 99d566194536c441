"""A LoRA training step of a Llama with 7 billion parameters on a virtual A100-80GB: time and the host's memory that it takes.

    python benchmarks/seven_billion.py [--layers 32] [--batch 1] [--length 512]

The model (Llama 2 7B's sizes, bfloat16) is built on the device by transformers, its weights are frozen, and each query and value
projection gets two low-rank matrices, which AdamW trains. `%%gpumem` measures building and the step. The limits are 30 s from the
beginning of building to the report, and 4 GiB of the host's memory for the whole process.
"""

from __future__ import annotations

import argparse
import platform
import resource
import sys
import time

import torch
import transformers
from torch import nn

from gpumem_magic import measure
from gpumem_magic.units import GIB, MIB
from gpumem_magic.virtual import gpu

SECONDS, BYTES = 30.0, 4 * GIB


class LoRA(nn.Module):
    """A frozen linear layer with a trained product of two thin matrices beside it, as in the LoRA paper (Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float = 16.0) -> None:
        super().__init__()
        self.base = base
        like = base.weight
        self.down = nn.Parameter(torch.randn(rank, base.in_features, dtype=like.dtype, device=like.device) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, dtype=like.dtype, device=like.device))
        self.scale = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thin = nn.functional.linear(nn.functional.linear(x, self.down), self.up)
        return self.base(x) + thin * self.scale  # type: ignore[no-any-return]


def config(layers: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        dtype=torch.bfloat16,
    )


def build(layers: int, rank: int = 8) -> nn.Module:
    """The model on ``cuda``, with LoRA on the query and value projections; only these are trained."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model: nn.Module = transformers.LlamaForCausalLM(config(layers))
    finally:
        torch.set_default_dtype(default)
    model.requires_grad_(False)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj = LoRA(attention.q_proj, rank)
        attention.v_proj = LoRA(attention.v_proj, rank)
    return model.train()


def highest_host_bytes() -> int:
    """The most of the host's memory that this process has held so far."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="layers of the model (default 32, 7 billion parameters)")
    parser.add_argument("--batch", type=int, default=1, help="sequences in the batch (default 1)")
    parser.add_argument("--length", type=int, default=512, help="tokens in a sequence (default 512)")
    options = parser.parse_args()

    transformers.logging.set_verbosity_error()
    before = highest_host_bytes()
    start = time.perf_counter()
    gpu.turn_on("A100-80GB")
    with measure() as measured:
        model = build(options.layers)
        built = time.perf_counter() - start
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4)
        tokens = torch.zeros(options.batch, options.length, dtype=torch.int64, device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - start
    host = highest_host_bytes()
    peak = measured.report.peak
    count = sum(parameter.numel() for parameter in model.parameters())
    adapters = sum(parameter.numel() for parameter in trained)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}")
    print(f"{count:,} parameters, of which {adapters:,} are trained")
    print(f"peak of the step: {peak.allocated / GIB:.2f} GiB allocated, {peak.reserved / GIB:.2f} GiB reserved")
    print(
        "  "
        + ", ".join(f"{name} {size / MIB:,.0f} MiB" for name, size in peak.categories.items() if (size or 0) >= MIB)
    )
    print(f"time: {seconds:.1f} s, of which building the model {built:.1f} s (limit {SECONDS:.0f} s)")
    print(
        f"host memory: {host / GIB:.2f} GiB for the process ({before / GIB:.2f} GiB after imports; limit {BYTES / GIB:.0f} GiB)"
    )
    del model, optimizer, trained, tokens
    gpu.turn_off()
    if seconds > SECONDS or host > BYTES:
        raise SystemExit("over the limit")


if __name__ == "__main__":
    main()
