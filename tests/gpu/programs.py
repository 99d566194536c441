"""The models that are measured on a GPU: linear layers, a residual network, a decoder, an encoder as large as bert-large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Step = Callable[[], None]


class Bottleneck(nn.Module):
    """A residual block of three convolutions, the second with the stride."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(image) + self.shortcut(image))


def resnet50() -> nn.Module:
    """Fifty layers, 25,557,032 parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    inside = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Bottleneck(inside, width, stride if number == 0 else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class Encoder(nn.Module):
    """24 layers of 1024, 16 heads: bert-large's, where transformers is not installed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30522, 1024)
        self.places = nn.Embedding(512, 1024)
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, 0.1, nn.functional.gelu, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 24, enable_nested_tensor=False)
        self.classes = nn.Linear(1024, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.classes(self.layers(self.tokens(tokens) + self.places(places))[:, 0])


class Bert(nn.Module):
    """bert-large of transformers, giving its logits."""

    def __init__(self, transformers: Any) -> None:
        super().__init__()
        config = transformers.BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        )
        self.bert = transformers.BertForSequenceClassification(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=tokens).logits


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.together, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.body = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.together(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        if self.fused:
            found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
            ahead = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            found = scores.masked_fill(ahead, float("-inf")).softmax(-1) @ value
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.body(self.between(x))


class Decoder(nn.Module):
    """A small GPT. fused: with PyTorch's attention kernel; checkpointing: each layer's activations are computed again."""

    def __init__(
        self, layers: int, width: int, heads: int, vocabulary: int, *, fused: bool = True, checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.layers = nn.ModuleList(DecoderLayer(width, heads, fused) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return self.head(self.last(x))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of each next token."""
        scores = self(tokens)[:, :-1]
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def bert_large() -> nn.Module:
    try:
        import transformers
    except ImportError:
        return Encoder()
    return Bert(transformers)


def linear() -> tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    return (
        lambda: nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)),
        lambda: (torch.randn(256, 4096), torch.randint(0, 10, (256,))),
    )


class NextToken(nn.Module):
    """A decoder's scores, one row for each token."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.decoder = Decoder(**sizes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(tokens).flatten(0, 1)


def words(batch: int, length: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, vocabulary, (batch, length)), torch.randint(0, vocabulary, (batch * length,))


Batch = tuple[torch.Tensor, torch.Tensor]
SMALL = {"layers": 4, "width": 512, "heads": 8, "vocabulary": 8000}

PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], int]] = {
    "linear": (*linear(), 20),
    "resnet50": (resnet50, lambda: (torch.randn(16, 3, 224, 224), torch.randint(0, 1000, (16,))), 8),
    "gpt2": (
        lambda: NextToken(layers=12, width=768, heads=12, vocabulary=50257),
        lambda: words(2, 256, 50257),
        6,
    ),
    "bert-large": (bert_large, lambda: (torch.randint(0, 30000, (4, 256)), torch.randint(0, 2, (4,))), 6),
    "autocast": (lambda: NextToken(**SMALL), lambda: words(4, 256, 8000), 10),
    "checkpointing": (lambda: NextToken(**SMALL, checkpointing=True), lambda: words(4, 256, 8000), 10),
    "compile": (lambda: NextToken(**SMALL), lambda: words(4, 256, 8000), 10),
}
"""Name -> a maker of the model, a maker of a batch on the host, and how many iterations are timed."""

HIDES_ITS_GRAPH = ("checkpointing", "compile")
"""In these the autograd graph's nodes are Python's own, and do not name all that they keep."""


class Training:
    """A training run by statements: each method is one."""

    def __init__(self, name: str, device: str = "cuda") -> None:
        self.make_model, self.make_batch, self.iterations = PROGRAMS[name]
        self.name = name
        self.device = device

    def build(self) -> None:
        self.model = self.make_model().to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.run = torch.compile(self.model) if self.name == "compile" else self.model

    def load(self) -> None:
        self.x, self.y = (part.to(self.device) for part in self.make_batch())

    def forward(self) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.name == "autocast"):
            self.loss = nn.functional.cross_entropy(self.run(self.x), self.y)

    def backward(self) -> None:
        self.loss.backward()

    def step(self) -> None:
        self.optimizer.step()

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        del self.loss

    def statements(self, iterations: int) -> list[tuple[str, int, tuple[int, ...], Step]]:
        """(words, line, iteration, what to call) of each."""
        found: list[tuple[str, int, tuple[int, ...], Step]] = [("model = build()", 2, (), self.build)]
        for number in range(1, iterations + 1):
            found += [
                ("batch = load()", 4, (number,), self.load),
                ("loss = forward()", 5, (number,), self.forward),
                ("loss.backward()", 6, (number,), self.backward),
                ("optimizer.step()", 7, (number,), self.step),
                ("optimizer.zero_grad()", 8, (number,), self.clear),
            ]
        return found
