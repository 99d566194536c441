"""Published peaks of eager and compiled programs beside those of the virtual GPU.

    python benchmarks/compiled_published.py [--only TEXT]

Each row is a run of its own with the installed PyTorch, which is not always the published one; 32 layers take minutes to compile.
Others: `benchmarks/torchtitan.py`, and the compiled rungs of `python benchmarks/accuracy --only Raschka`.
"""

from __future__ import annotations

import argparse
import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import nn

from gpumem_magic.units import MIB
from gpumem_magic.virtual import gpu

# Published: a GTX 1650, of the same generation, and cards that are not named. Small values say that no mask is needed.
LLAMA_CARD, OTHER_CARD = "T4,torch=2.14,values=auto", "A100-80GB"
# Published alike for an H100 and an H200.
ATTENTION_CARD = "H200"
Run = Callable[[], int]


@dataclass(frozen=True)
class Row:
    source: str
    words: str
    published: int
    card: str
    run: Run


class _Summed(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": layers, "vocab_size": 1000}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
        self.model = LlamaModel(LlamaConfig(**sizes, **heads, use_cache=False))

    def forward(self, ids: torch.Tensor) -> Any:
        return self.model(input_ids=ids).last_hidden_state.sum()


def _llama(layers: int, backend: str, budget: float) -> Run:
    """Forward and backward with gradients that stay, two sequences of 32 tokens for each layer."""

    def run() -> int:
        config: Any = torch._functorch.config
        config.activation_memory_budget = budget
        model, ids = _Summed(layers).to("cuda"), torch.randint(0, 1000, (2, 32 * layers)).to("cuda")
        step = model if backend == "eager" else torch.compile(model, backend=backend, dynamic=False)
        for _ in range(2):
            step(ids).backward()
            model.zero_grad(set_to_none=False)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        step(ids).backward()
        config.activation_memory_budget = 1.0
        return torch.cuda.max_memory_allocated()

    return run


def _two_products() -> int:
    def both(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return (a @ c).sum(dim=-1) + (b @ c).sum(dim=-1)

    a, b = (torch.randn(1 << 15, 16, device="cuda") for _ in range(2))
    c = torch.randn(16, 1 << 15, device="cuda")
    fast = torch.compile(both)
    fast(a, b, c)
    torch.cuda.reset_peak_memory_stats()
    kept = [
        torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    ]  # what Triton's timing empties the card's cache with
    fast(a, b, c)
    kept.clear()
    return torch.cuda.max_memory_allocated()


def _sliced(compiled: bool, narrow: bool) -> Run:
    """64 slices through one layer, in an autocast region or not, of a tensor that needs gradients: bytes that stay."""

    def run() -> int:
        x = torch.rand(50, 64, 2048, device="cuda")
        needs_gradients = torch.tensor([1.0], requires_grad=True).to("cuda")
        layer = nn.Linear(2048, 2048).to("cuda")
        step = torch.compile(layer) if compiled else layer
        with torch.autocast("cuda", torch.bfloat16, enabled=narrow):
            x += needs_gradients
            kept = [step(x[:, place, :]) for place in range(x.size(1))]
        return torch.cuda.memory_allocated() if kept else 0

    return run


def _radam(compiled: bool) -> Run:
    def run() -> int:
        parameters = [torch.ones(32, 32, device="cuda") for _ in range(10)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.RAdam(parameters, lr=0.1, capturable=True, foreach=True)

        def step() -> None:
            optimizer.step()

        torch.cuda.reset_peak_memory_stats()
        (torch.compile(step, backend="eager") if compiled else step)()
        return torch.cuda.max_memory_allocated()

    return run


# Attention without heads, written out, eight sequences: MiB at the most by numbers in a row, length, and as it is or compiled.
_ATTENTION: dict[int, dict[int, tuple[float, float]]] = {
    16: {256: (72.625, 68.75), 1024: (194.5, 131), 4096: (2122, 1100), 8192: (8276, 4184), 16384: (32872, 16496)},
    32: {256: (73.25, 69.5), 1024: (197, 134), 4096: (2132, 1112), 8192: (8296, 4208), 16384: (32912, 16544)},
    64: {256: (74.5, 71), 1024: (202, 140), 4096: (2152, 1136), 8192: (8336, 4256), 16384: (32992, 16640)},
    128: {256: (77, 74), 1024: (212, 152), 4096: (2192, 1184), 8192: (8416, 4352), 16384: (33152, 33152)},
}
# Published with it: the sum and its gradient, and what stays of them.
_BESIDE = 1 << 10


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    # By NumPy, as published: for each size it makes a program of its own.
    scores = torch.matmul(query, key.transpose(-2, -1)) / np.sqrt(query.size(-1))
    return torch.matmul(torch.softmax(scores, dim=-1), value)


@functools.cache
def _attention_sweep() -> dict[tuple[int, int, bool], int]:
    """All sizes one after another, as published: from the second on the compiler makes one program for many, and gives up after
    eight."""
    return {
        (size, length, compiled): _attention_steps(size, length, compiled)
        for size, lengths in _ATTENTION.items()
        for length in lengths
        for compiled in (False, True)
    }


def _attention_steps(size: int, length: int, compiled: bool) -> int:
    run = torch.compile(_attention) if compiled else _attention
    inputs = [torch.randn(8, length, size, device="cuda", requires_grad=True) for _ in range(3)]

    def forget() -> None:
        for one in inputs:
            one.grad = None

    for _ in range(2):
        out = run(*inputs)
        loss = out.sum()
        loss.backward()
        forget()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        out = run(*inputs)
    for _ in range(2):
        out = run(*inputs)
        loss = out.sum()
        forget()
        loss.backward()
    return torch.cuda.max_memory_allocated()


def _attention_rows() -> list[Row]:
    source = "TianqGuo/MachineLearningNotes, CS336 assignment 2, torch_compile_benchmarking (PyTorch 2.6)"

    def run(*cell: Any) -> Run:
        return lambda: _attention_sweep()[cell]

    return [
        Row(
            source,
            f"attention, {size} x {length}, {'compiled' if compiled else 'eager'}",
            int(peaks[compiled] * MIB) + _BESIDE,
            ATTENTION_CARD,
            run(size, length, compiled),
        )
        for size, lengths in _ATTENTION.items()
        for length, peaks in lengths.items()
        for compiled in (False, True)
    ]


# Llama 3.2 3B, all of it trained, two packed sequences of 4,096 tokens: GiB, and what was added to the row before.
_TUNED: dict[str, tuple[float, frozenset[str]]] = {
    "packed": (60.0, frozenset()),
    "compiled": (51.0, frozenset({"compile"})),
    "with a loss in pieces": (42.9, frozenset({"compile", "pieces"})),
    "with checkpoints": (24.9, frozenset({"compile", "pieces", "checkpoint"})),
}
_WIDTH, _HEADS, _GROUPS, _INNER, _LAYERS, _WORDS, _TOKENS, _PIECES = 3072, 24, 8, 8192, 28, 128256, 4096, 8
_ROTATED = 131072


class _Norm(nn.Module):
    """As in torchtune 0.4.0, of that time; later ones keep a wider result."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(_WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.scale


def _rotated(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs, by = x.float().reshape(*x.shape[:-1], -1, 2), turns[:, :, None]
    turned = torch.stack(
        [
            pairs[..., 0] * by[..., 0] - pairs[..., 1] * by[..., 1],
            pairs[..., 1] * by[..., 0] + pairs[..., 0] * by[..., 1],
        ],
        -1,
    )
    return turned.flatten(3).type_as(x)


class _TunedLayer(nn.Module):
    """As torchtune's: the attention is compiled by itself, and breaks the graph of a layer that is compiled."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend, size = attend, _WIDTH // _HEADS
        self.before, self.between = _Norm(), _Norm()
        self.query, self.out = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(_WIDTH, _GROUPS * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(_WIDTH, _INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(_INNER, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor, mask: Any, turns: torch.Tensor) -> torch.Tensor:
        y, size = self.before(x), _WIDTH // _HEADS
        query = _rotated(self.query(y).view(2, _TOKENS, _HEADS, size), turns).transpose(1, 2)
        key = _rotated(self.key(y).view(2, _TOKENS, _GROUPS, size), turns).transpose(1, 2)
        value = self.value(y).view(2, _TOKENS, _GROUPS, size).transpose(1, 2)
        shape = (2, _GROUPS, _HEADS // _GROUPS, _TOKENS, size)
        key, value = (one.unsqueeze(2).expand(shape).flatten(1, 2) for one in (key, value))
        seen = self.attend(query, key, value, mask).transpose(1, 2).contiguous().view(2, _TOKENS, _WIDTH)
        x = self.out(seen) + x
        y = self.between(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def _tuned(flags: frozenset[str]) -> Run:
    def run() -> int:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        from torch.utils.checkpoint import checkpoint

        compiled = torch.compile(flex_attention, dynamic=False)

        @torch.compiler.disable(recursive=False)
        def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
            return compiled(query, key, value, block_mask=mask)

        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            words, last = nn.Embedding(_WORDS, _WIDTH), _Norm()
            layers = nn.ModuleList(_TunedLayer(attend) for _ in range(_LAYERS))
        torch.set_default_dtype(torch.float32)
        turns = torch.zeros(_ROTATED, _WIDTH // _HEADS // 2, 2, device="cuda")
        loss_of: Any = functools.partial(
            lambda scores, labels: nn.functional.cross_entropy(scores.float(), labels, reduction="sum")
        )
        # The whole loss stays as it is: `full_finetune_single_device.py` of 0.4.0 drops what `compile_loss` returns, and only the
        # loss in pieces is compiled in its place.
        whole = nn.CrossEntropyLoss()
        if "compile" in flags:
            for layer in layers:
                layer.compile()
            loss_of = torch.compile(loss_of.func)
        parameters = [*words.parameters(), *layers.parameters(), *last.parameters()]
        optimizer = torch.optim.AdamW(parameters, fused=True)
        document = (torch.arange(_TOKENS, device="cuda") // 1024).expand(2, -1)
        mask = create_block_mask(
            lambda b, h, q, k: (q >= k) & (document[b, q] == document[b, k]), 2, None, _TOKENS, _TOKENS, device="cuda"
        )

        def step() -> None:
            ids, labels = (torch.zeros(2, _TOKENS, dtype=torch.long).cuda() for _ in range(2))
            place = torch.arange(_TOKENS).repeat(2, 1).cuda()
            x = words(ids)
            for layer in layers:
                by = turns[place]
                x = checkpoint(layer, x, mask, by, use_reentrant=False) if "checkpoint" in flags else layer(x, mask, by)
            x = last(x)
            if "pieces" in flags:
                scores = [nn.functional.linear(piece, words.weight) for piece in x.chunk(_PIECES, dim=1)]
                parts = zip(scores, labels.chunk(_PIECES, dim=1), strict=True)
                loss = sum(loss_of(part.flatten(0, 1), label.flatten()) for part, label in parts)
                del scores, parts
            else:
                loss = whole(nn.functional.linear(x, words.weight).float().flatten(0, 1), labels.flatten())
            loss.backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        return torch.cuda.memory_stats()["active_bytes.all.peak"]

    return run


def _tuned_rows() -> list[Row]:
    source = "torchtune, README, optimization flags (a nightly of PyTorch, end of 2024)"
    return [
        Row(source, f"Llama 3.2 3B, {words}", int(peak * (1 << 30)), "A100-80GB,torch=2.6", _tuned(flags))
        for words, (peak, flags) in _TUNED.items()
    ]


def _rows() -> list[Row]:
    budgets = "siddddd17/ackaudit, results/measured_backward (PyTorch 2.14)"
    runs: dict[tuple[int, str], dict[float, int]] = {
        (32, "eager"): {1.0: 1642860544},
        (16, "aot_eager"): {0.05: 408417792, 0.1: 243373568, 0.15: 200886272, 0.2: 212420608, 0.3: 236275712},
        (32, "aot_eager"): {0.1: 729847296, 0.5: 853555200, 1.0: 1335940096},
        (32, "inductor"): {0.05: 1125715968, 0.1: 805578752, 0.15: 605235200, 0.2: 636676096, 0.3: 695347200},
    }
    rows = [
        Row(budgets, f"Llama, {layers} layers, {backend}, {budget}", peak, LLAMA_CARD, _llama(layers, backend, budget))
        for (layers, backend), peaks in runs.items()
        for budget, peak in peaks.items()
    ]
    radam = "pytorch issue 125511 (PyTorch 2.4)"
    sliced = "pytorch issue 133637, eellison's comment (a nightly of August 2024; what stays)"
    stays = {(False, False): 78782976, (True, False): 78782976, (False, True): 87171584, (True, True): 615653888}
    return [
        *(
            Row(
                sliced,
                f"slices, {'compiled' if compiled else 'eager'}{', autocast' if narrow else ''}",
                published,
                OTHER_CARD,
                _sliced(compiled, narrow),
            )
            for (compiled, narrow), published in stays.items()
        ),
        Row("pytorch issue 138685, not fused (PyTorch 2.6)", "two products", 4_591_000_000, OTHER_CARD, _two_products),
        Row(radam, "RAdam, eager", 225280, OTHER_CARD, _radam(False)),
        Row(radam, 'RAdam, backend="eager"', 240640, OTHER_CARD, _radam(True)),
        *rows,
        *_attention_rows(),
        *_tuned_rows(),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="rows with TEXT in what ran or in the source")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{'program':<34} {'published':>14} {'here':>14} {'off by':>9}  bytes, the highest allocated")
    for row in _rows():
        if chosen.only in f"{row.words} {row.source}":
            machine = gpu.turn_on(row.card)
            here = row.run()
            notes = " ".join(machine.notes())
            off = here / row.published - 1
            print(f"{row.words:<34} {row.published:>14,} {here:>14,} {off:>+9.3%}  {row.source} {notes}", flush=True)
            gpu.turn_off()


if __name__ == "__main__":
    main()
