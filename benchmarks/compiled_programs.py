"""Small compiled programs of many kinds, and what is recorded of one: `python benchmarks/compiled.py` runs them.

Each is built by a function below that returns what one step does. `python benchmarks/compiled_programs.py NAME FILE` runs it in
this process, on the GPU that is there or, with `--device CARD`, on a virtual one, and writes to FILE: the allocator's figures
after each step, its events with their Python stacks, the code that Inductor wrote, and the versions.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import lzma
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

Step = Callable[[], Any]
PROGRAMS: dict[str, Callable[[], Step]] = {}
GPU = "cuda"
STEPS = 4
EAGER = False


def program(make: Callable[[], Step]) -> Callable[[], Step]:
    PROGRAMS[make.__name__] = make
    return make


def compiled(what: Any, **settings: Any) -> Any:
    return what if EAGER else torch.compile(what, **settings)


def training(model: Any, run: Any, *inputs: Any, optimizer: Any = None, autocast: Any = None) -> Step:
    """A step of training: what `run` returns is a loss, or has one."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> None:
        with torch.autocast(GPU, autocast or torch.bfloat16, enabled=autocast is not None):
            loss = run(*inputs)
        getattr(loss, "loss", loss).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, written: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.written, self.dropout = heads, written, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        if self.written:
            scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
            causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            weights = F.softmax(scores.masked_fill(~causal, float("-inf")), dim=-1)
            y = F.dropout(weights, self.dropout, self.training) @ v
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
            )
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, **settings: Any) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads, **settings)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(settings.get("dropout", 0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, words: int = 50304, width: int = 384, layers: int = 3, heads: int = 6, **settings: Any) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width, heads, **settings) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.checkpoints = False

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def text(batch: int = 8, length: int = 256, words: int = 50304) -> torch.Tensor:
    return torch.randint(0, words, (batch, length), device=GPU)


def perceptron(width: int = 1024, deep: int = 4096, out: int | None = None) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, deep),
        nn.GELU(),
        nn.LayerNorm(deep),
        nn.Linear(deep, deep),
        nn.SiLU(),
        nn.Linear(deep, out or width),
    ).to(GPU)


def squared(run: Any) -> Any:
    return lambda *inputs: run(*inputs).float().square().mean()


# ---- plain models


@program
def mlp() -> Step:
    model = perceptron()
    return training(model, squared(compiled(model)), torch.randn(4096, 1024, device=GPU))


@program
def odd_sizes() -> Step:
    model = nn.Sequential(nn.Linear(1001, 2003), nn.ReLU(), nn.Linear(2003, 517)).to(GPU, torch.bfloat16)
    x = torch.randn(2047, 1001, device=GPU, dtype=torch.bfloat16)
    return training(model, squared(compiled(model)), x)


@program
def gpt2_autocast() -> Step:
    model = GPT().to(GPU)
    ids = text()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    return training(model, compiled(model), ids, ids, autocast=torch.bfloat16, optimizer=optimizer)


@program
def gpt2_written() -> Step:
    model = GPT(words=8000, written=True, dropout=0.1).to(GPU)
    ids = text(words=8000)
    return training(model, compiled(model), ids, ids)


@program
def gpt2_odd_words() -> Step:
    model = GPT(words=50257, layers=1).to(GPU)
    ids = text(4, words=50257)
    return training(model, compiled(model), ids, ids, autocast=torch.bfloat16)


@program
def gpt2_scaled() -> Step:
    """float16 with a scaler, clipped gradients, and several parts of a batch to a step."""
    model = GPT(words=8000, layers=2).to(GPU)
    run, scaler, ids = compiled(model), torch.amp.GradScaler(), text(words=8000)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step() -> None:
        for _ in range(2):
            with torch.autocast(GPU, torch.float16):
                loss = run(ids, ids)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@program
def bert() -> Step:
    import transformers

    settings = transformers.BertConfig(num_hidden_layers=2, vocab_size=8000)
    model = transformers.BertForMaskedLM(settings).to(GPU)
    ids = text(8, 128, 8000)
    mask = torch.ones_like(ids)
    mask[:, 100:] = 0
    run = compiled(model)
    return training(model, lambda: run(input_ids=ids, attention_mask=mask, labels=ids))


@program
def llama() -> Step:
    import transformers

    settings = transformers.LlamaConfig(
        vocab_size=8000, hidden_size=512, intermediate_size=1376, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(settings).to(GPU, torch.bfloat16)
    ids = text(4, 512, 8000)
    run = compiled(model)
    return training(model, lambda: run(input_ids=ids, labels=ids))


@program
def mixtral() -> Step:
    import transformers

    settings = transformers.MixtralConfig(
        vocab_size=8000, hidden_size=512, intermediate_size=1376, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(settings).to(GPU, torch.bfloat16)
    ids = text(4, 256, 8000)
    run = compiled(model)
    return training(model, lambda: run(input_ids=ids, labels=ids))


class Experts(nn.Module):
    def __init__(self, width: int = 512, experts: int = 4) -> None:
        super().__init__()
        self.route = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every expert sees every token, weighted: no shape depends on values."""
        weights, chosen = self.route(x).softmax(-1).topk(2, dim=-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            y = y + share * expert(x)
        return y


@program
def experts() -> Step:
    model = Experts().to(GPU)
    return training(model, squared(compiled(model)), torch.randn(4096, 512, device=GPU))


@program
def vit() -> Step:
    import timm

    model = timm.create_model("vit_small_patch16_224", depth=3, num_classes=100).to(GPU)
    images, labels = torch.randn(16, 3, 224, 224, device=GPU), torch.randint(0, 100, (16,), device=GPU)
    run = compiled(model)
    return training(model, lambda: F.cross_entropy(run(images), labels), autocast=torch.bfloat16)


@program
def resnet50() -> Step:
    import torchvision

    model = torchvision.models.resnet50(num_classes=100).to(GPU)
    images, labels = torch.randn(8, 3, 224, 224, device=GPU), torch.randint(0, 100, (8,), device=GPU)
    run = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return training(model, lambda: F.cross_entropy(run(images), labels), optimizer=optimizer)


@program
def resnet18_channels_last() -> Step:
    import torchvision

    model = torchvision.models.resnet18(num_classes=100).to(GPU, memory_format=torch.channels_last)
    images = torch.randn(32, 3, 160, 160, device=GPU).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 100, (32,), device=GPU)
    run = compiled(model)
    return training(model, lambda: F.cross_entropy(run(images), labels), autocast=torch.bfloat16)


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, times: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(8, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(times, outside)
        self.norm2, self.conv2 = nn.GroupNorm(8, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv(F.silu(self.norm(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class UNet(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 128), nn.SiLU(), nn.Linear(128, 128))
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down1, self.down2 = Residual(width, width, 128), Residual(width, 2 * width, 128)
        self.smaller = nn.ModuleList(nn.Conv2d(n, n, 3, stride=2, padding=1) for n in (width, 2 * width))
        self.middle, self.attention = (
            Residual(2 * width, 2 * width, 128),
            nn.MultiheadAttention(2 * width, 4, batch_first=True),
        )
        self.up1, self.up2 = Residual(4 * width, width, 128), Residual(2 * width, width, 128)

    def forward(self, x: torch.Tensor, time: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        time = self.time(time[:, None])
        first = self.down1(self.enter(x), time)
        second = self.down2(self.smaller[0](first), time)
        lowest = self.middle(self.smaller[1](second), time)
        rows = lowest.flatten(2).transpose(1, 2)
        lowest = lowest + self.attention(rows, rows, rows, need_weights=False)[0].transpose(1, 2).reshape(lowest.shape)
        y = self.up1(torch.cat([F.interpolate(lowest, scale_factor=2.0), second], 1), time)
        y = self.up2(torch.cat([F.interpolate(y, scale_factor=2.0), first], 1), time)
        return F.mse_loss(self.leave(y), noise)


@program
def unet() -> Step:
    model = UNet().to(GPU)
    images, times = torch.randn(8, 3, 64, 64, device=GPU), torch.rand(8, device=GPU)
    return training(model, compiled(model), images, times, torch.randn_like(images))


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 16 * 16, 256),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(128, 64 * 16 * 16), nn.Unflatten(1, (64, 16, 16)), nn.ConvTranspose2d(64, 32, 4, 2, 1),
            nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, logs = self.encoder(x).chunk(2, dim=1)
        made = self.decoder(mean + torch.randn_like(mean) * (0.5 * logs).exp())
        return F.binary_cross_entropy(made, x) - 0.5 * (1 + logs - mean.pow(2) - logs.exp()).mean()


@program
def vae() -> Step:
    model = VAE().to(GPU)
    return training(model, compiled(model), torch.rand(128, 3, 64, 64, device=GPU))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8000, 256)
        self.lstm = nn.LSTM(256, 512, num_layers=2, batch_first=True, dropout=0.1)
        self.tags = nn.Linear(512, 8000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.tags(self.lstm(self.words(ids))[0]).flatten(0, 1), ids.flatten())


@program
def lstm() -> Step:
    model = Tagger().to(GPU)
    return training(model, compiled(model), text(16, 64, 8000))


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20000, 64, mode="sum") for _ in range(4))
        self.ids = nn.ModuleList(nn.Embedding(5000, 64) for _ in range(4))
        self.dense, self.over = nn.Linear(13, 64), nn.Sequential(nn.Linear(64 + 36, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(
        self, dense: torch.Tensor, ids: torch.Tensor, bags: torch.Tensor, clicked: torch.Tensor
    ) -> torch.Tensor:
        rows = [table(bags[number]) for number, table in enumerate(self.tables)]
        rows += [table(ids[:, number]) for number, table in enumerate(self.ids)]
        first = F.relu(self.dense(dense))
        every = torch.stack([first, *rows], dim=1)
        pairs = every @ every.transpose(1, 2)
        one, other = torch.triu_indices(9, 9, offset=1, device=dense.device)
        return F.binary_cross_entropy_with_logits(
            self.over(torch.cat([first, pairs[:, one, other]], 1)).squeeze(1), clicked
        )


@program
def embeddings() -> Step:
    model = Clicks().to(GPU)
    inputs = (
        torch.randn(2048, 13, device=GPU), torch.randint(0, 5000, (2048, 4), device=GPU),
        torch.randint(0, 20000, (4, 2048, 5), device=GPU), torch.randint(0, 2, (2048,), device=GPU).float(),
    )  # fmt: skip
    return training(model, compiled(model), *inputs)


# ---- flex_attention


class Flexible(nn.Module):
    def __init__(self, mask: Any, score: Any = None, width: int = 512, heads: int = 8, groups: int = 8) -> None:
        super().__init__()
        self.heads, self.groups, self.mask, self.score = heads, groups, mask, score
        self.q, self.kv, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * groups * (width // heads)),
            nn.Linear(width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = (part.view(batch, length, self.groups, -1).transpose(1, 2) for part in self.kv(x).chunk(2, dim=-1))
        y = flex_attention(q, k, v, self.score, self.mask, enable_gqa=self.groups != self.heads)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


@program
def flex() -> Step:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(causal, None, None, 1024, 1024, device=GPU)
    model = Flexible(mask).to(GPU, torch.bfloat16)
    x = torch.randn(4, 1024, 512, device=GPU, dtype=torch.bfloat16)
    return training(model, squared(compiled(model)), x)


@program
def flex_bias() -> Step:
    """Grouped heads, documents, and a learned bias in the scores."""
    from torch.nn.attention.flex_attention import create_block_mask

    document = (torch.arange(512, device=GPU) // 100).repeat(2, 1)
    bias = nn.Parameter(torch.zeros(8, 1024, device=GPU, dtype=torch.bfloat16))
    mask = create_block_mask(
        lambda b, h, q, k: (document[b, q] == document[b, k]) & (q >= k),
        2,
        None,
        512,
        512,
        device=GPU,
        _compile=not EAGER,
    )
    model = Flexible(mask, lambda score, b, h, q, k: score + bias[h, q - k + 512], groups=2).to(GPU, torch.bfloat16)
    model.bias = bias
    return training(model, squared(compiled(model)), torch.randn(2, 512, 512, device=GPU, dtype=torch.bfloat16))


@program
def flex_decode() -> Step:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(4, 8, 1, 64, device=GPU, dtype=torch.bfloat16)
    k, v = (torch.randn(4, 2, 2048, 64, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    attend = compiled(functools.partial(flex_attention, enable_gqa=True))

    def step() -> None:
        with torch.no_grad():
            attend(q, k, v)

    return step


# ---- modes


@program
def reduce_overhead() -> Step:
    model = GPT(words=8000, layers=2).to(GPU)
    ids = text(words=8000)
    return training(model, compiled(model, mode="reduce-overhead"), ids, ids)


@program
def reduce_overhead_inference() -> Step:
    """Two shapes, each a graph of its own."""
    model = GPT(words=8000, layers=2).to(GPU, torch.float16).eval()
    run, inputs = compiled(model, mode="reduce-overhead"), (text(2, 256, 8000), text(2, 128, 8000))

    def step() -> None:
        with torch.no_grad():
            for ids in inputs:
                run(ids)

    return step


@program
def reduce_overhead_parts() -> Step:
    """A break parts it in two graphs of one tree."""
    first, second = perceptron(512, 1024), perceptron(512, 1024)

    def both(x: torch.Tensor) -> torch.Tensor:
        y = first(x)
        torch._dynamo.graph_break()
        return second(y)

    run, x = compiled(both, mode="reduce-overhead"), torch.randn(1024, 512, device=GPU)
    every = nn.ModuleList([first, second])
    return training(every, squared(run), x, optimizer=torch.optim.SGD(every.parameters(), 0.01))


@program
def max_autotune() -> Step:
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).to(GPU, torch.bfloat16)
    x = torch.randn(2048, 512, device=GPU, dtype=torch.bfloat16)
    return training(model, squared(compiled(model, mode="max-autotune-no-cudagraphs")), x)


@program
def dynamic() -> Step:
    model = GPT(words=8000, layers=2).to(GPU)
    run, lengths = compiled(model), iter([128, 192, 256, 100])
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        ids = text(4, next(lengths), 8000)
        run(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def breaks() -> Step:
    first, second = perceptron(512, 2048), perceptron(512, 2048)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = first(x)
        print("mean", y.mean().item())
        return second(y).square().mean()

    every = nn.ModuleList([first, second])
    return training(every, compiled(run), torch.randn(2048, 512, device=GPU))


@program
def compiled_optimizer() -> Step:
    model = perceptron(512, 2048)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x = torch.randn(512, 512, device=GPU)
    update = compiled(optimizer.step)

    def step() -> None:
        model(x).square().mean().backward()
        update()
        optimizer.zero_grad()

    return step


@program
def whole_step() -> Step:
    """Forward, backward and update in one compiled function."""
    model = perceptron(512, 2048)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def once(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return functools.partial(compiled(once), torch.randn(512, 512, device=GPU))


@program
def compiled_autograd() -> Step:
    torch._dynamo.config.compiled_autograd = not EAGER
    model, inner = perceptron(512, 2048), perceptron(512, 2048)
    x, run = torch.randn(1024, 512, device=GPU), compiled(inner)
    backwards = compiled(lambda loss: loss.backward())

    def step() -> None:
        backwards(run(model(x)).square().mean())
        model.zero_grad()
        inner.zero_grad()

    return step


@program
def checkpoints() -> Step:
    model = GPT(words=8000).to(GPU)
    model.checkpoints = True
    ids = text(words=8000)
    return training(model, compiled(model), ids, ids, autocast=torch.bfloat16)


@program
def checkpoint_policy() -> Step:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    kept = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    blocks = nn.ModuleList(Block(384, 6) for _ in range(3)).to(GPU)

    def run(x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x.square().mean()

    return training(blocks, compiled(run), torch.randn(8, 256, 384, device=GPU))


@program
def budget() -> Step:
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = 0.5
    model = GPT(words=8000).to(GPU)
    ids = text(words=8000)
    return training(model, compiled(model), ids, ids)


@program
def regional() -> Step:
    model = GPT(words=8000).to(GPU)
    for block in model.blocks:
        if not EAGER:
            block.compile()
    ids = text(words=8000)
    return training(model, model, ids, ids, autocast=torch.bfloat16)


# ---- without gradients


@program
def no_grad() -> Step:
    model = GPT(words=8000, layers=2).to(GPU, torch.bfloat16).eval()
    run, ids = compiled(model), text(words=8000)

    def step() -> None:
        with torch.no_grad():
            run(ids)

    return step


@program
def inference_mode() -> Step:
    """A decoder's steps with its keys and values kept in place."""
    width, heads, longest = 512, 8, 256
    qkv, out = (nn.Linear(width, n, device=GPU, dtype=torch.bfloat16) for n in (3 * width, width))
    keys, values = (torch.zeros(4, heads, longest, 64, device=GPU, dtype=torch.bfloat16) for _ in range(2))

    def decode(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(4, 1, heads, 64).transpose(1, 2) for part in qkv(x).chunk(3, -1))
        keys.index_copy_(2, place, k)
        values.index_copy_(2, place, v)
        mask = (torch.arange(longest, device=GPU) <= place)[None, None]
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return out(y.transpose(1, 2).reshape(4, 1, width))

    run = compiled(decode, fullgraph=True)
    x = torch.randn(4, 1, width, device=GPU, dtype=torch.bfloat16)

    def step() -> None:
        with torch.inference_mode():
            for place in range(4):
                run(x, torch.tensor([place], device=GPU))

    return step


@program
def resnet18_inference() -> Step:
    import torchvision

    model = torchvision.models.resnet18(num_classes=100).to(GPU).eval()
    run, images = compiled(model), torch.randn(16, 3, 224, 224, device=GPU)

    def step() -> None:
        with torch.no_grad():
            run(images)

    return step


# ---- the less usual


@program
def cond() -> Step:
    small, large = nn.Linear(512, 512).to(GPU), perceptron(512, 1024)

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: large(x), lambda x: small(x), (x,)).sin()

    go, x = compiled(run), torch.randn(1024, 512, device=GPU).abs()

    def step() -> None:
        with torch.no_grad():
            go(x)

    return step


@program
def fourier() -> Step:
    weight = nn.Parameter(torch.randn(256, 129, device=GPU, dtype=torch.complex64))

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft2(torch.fft.rfft2(x) * weight).square().mean()

    holder = nn.Module()
    holder.weight = weight
    return training(
        holder, compiled(run), torch.randn(16, 256, 256, device=GPU), optimizer=torch.optim.SGD([weight], 0.1)
    )


@program
def many_operators() -> Step:
    """Sorts, sums along the rows, scatters, picks and convolutions of one dimension."""
    conv, table = nn.Conv1d(64, 128, 5, padding=2).to(GPU), nn.Parameter(torch.randn(1000, 128, device=GPU))

    def run(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        y = conv(x).transpose(1, 2)
        ordered, order = y.sum(-1).sort(dim=1)
        y = y.gather(1, order[:, :, None].expand_as(y)).cumsum(1)
        added = (
            torch.zeros_like(table)
            .index_add(0, where, y.flatten(0, 1))
            .scatter_add(0, where[:, None].expand(-1, 128), y.flatten(0, 1))
        )
        return (added * table).logsumexp(0).sum() + ordered.std() + torch.topk(y, 5, dim=1).values.var()

    every = nn.ParameterList([*conv.parameters(), table])
    x, where = torch.randn(16, 64, 512, device=GPU), torch.randint(0, 1000, (16 * 512,), device=GPU)
    return training(every, compiled(run), x, where)


@program
def jagged() -> Step:
    model = perceptron(256, 512)
    parts = [torch.randn(n, 256, device=GPU) for n in (100, 300, 50, 511)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    run = compiled(model)
    return training(model, lambda: run(x).values().square().mean())


@program
def exported() -> Step:
    model = GPT(words=8000, layers=2).to(GPU).eval()
    ids = text(4, 128, 8000)
    run = compiled(torch.export.export(model, (ids,)).module())

    def step() -> None:
        with torch.no_grad():
            run(ids)

    return step


def one_rank() -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("nccl", init_method=f"file://{tempfile.mkdtemp()}/meeting", rank=0, world_size=1)
        torch.cuda.set_device(0)


@program
def ddp() -> Step:
    one_rank()
    inner = GPT(words=8000, layers=2).to(GPU)
    model = nn.parallel.DistributedDataParallel(inner, device_ids=[0])
    ids = text(words=8000)
    return training(model, compiled(model), ids, ids)


@program
def fsdp2() -> Step:
    one_rank()
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = GPT(words=8000, layers=2).to(GPU)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        if not EAGER:
            block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    ids = text(words=8000)
    return training(model, model, ids, ids)


@program
def aot_inductor() -> Step:
    model = perceptron(512, 1024).eval()
    x = torch.randn(256, 512, device=GPU)
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)))
        run = torch._inductor.aoti_load_package(package)

    def step() -> None:
        with torch.no_grad():
            run(x)

    return step


# ---- what is recorded


def figures(step: str) -> dict[str, Any]:
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {
        "step": step, "allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(),
        "max_allocated": torch.cuda.max_memory_allocated(), "max_reserved": torch.cuda.max_memory_reserved(),
        "allocations": stats.get("allocation.all.allocated", 0), "frees": stats.get("allocation.all.freed", 0),
    }  # fmt: skip


def events(snapshot: dict[str, Any]) -> dict[str, Any]:
    """The device's events, with each stack and each frame once."""
    frames: dict[tuple[str, str, int], int] = {}
    stacks: dict[tuple[int, ...], int] = {}

    def number(stack: list[dict[str, Any]]) -> int:
        keys = [(frame["filename"], frame["name"], frame["line"]) for frame in stack]
        return stacks.setdefault(tuple(frames.setdefault(key, len(frames)) for key in keys), len(stacks))

    trace = max(snapshot["device_traces"], key=len, default=[])
    rows = [
        [one["action"], one.get("addr", 0), one["size"], one.get("stream", 0), number(one.get("frames", []))]
        for one in trace
    ]
    return {"events": rows, "stacks": list(stacks), "frames": list(frames)}


def libraries() -> dict[str, Any]:
    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    for name in ("triton", "transformers", "torchvision", "timm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {**found, "device": torch.cuda.get_device_name()}


def record(name: str, cache: Path) -> dict[str, Any]:
    """cache: where Inductor writes its code."""
    torch.cuda.memory._record_memory_history(max_entries=2_000_000, stacks="python")
    torch.manual_seed(0)
    rows, error = [figures("begin")], ""
    try:
        step = PROGRAMS[name]()
        rows.append(figures("made"))
        for number in range(STEPS):
            torch.cuda.reset_peak_memory_stats()
            step()
            rows.append(figures(f"step {number + 1}"))
    except Exception as failure:
        traceback.print_exc()
        error = f"{type(failure).__name__}: {str(failure)[:2000]}"
    codes = {path.name: text for path in cache.rglob("*.py") if "def call(" in (text := path.read_text())}
    counted = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return {
        "name": name, "eager": EAGER, "rows": rows, "error": error, "libraries": libraries(), "codes": codes,
        "counters": {key: dict(value) for key, value in counted.items() if value}, **events(torch.cuda.memory._snapshot()),
    }  # fmt: skip


def main() -> None:
    global EAGER
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=list(PROGRAMS))
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", help="a virtual card; without it, the machine's own GPU")
    parser.add_argument("--eager", action="store_true")
    chosen = parser.parse_args()
    EAGER = chosen.eager
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        if chosen.device:
            from gpumem_magic.virtual import gpu

            gpu.turn_on(chosen.device)
        found = record(chosen.name, Path(cache))
        with lzma.open(chosen.file, "wt", preset=3) as file:
            json.dump(found, file)
    # (Inductor's own processes may wait for work.)
    sys.stdout.flush()
    os._exit(bool(found["error"]))


if __name__ == "__main__":
    main()
