"""Operators, their gradients and optimizers' steps, each a function of two tensors with rows of 1024 numbers, to be timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "add": torch.add,
    "times a number": lambda x, _: x * 2.0,
    "relu": lambda x, _: x.relu(),
    "gelu": lambda x, _: F.gelu(x),
    "softmax": lambda x, _: x.softmax(-1),
    "sum": lambda x, _: x.sum(),
    "mean": lambda x, _: x.mean(),
    "sum of rows": lambda x, _: x.sum(-1),
    "sum, read": lambda x, _: x.sum().item(),
    "max": lambda x, _: x.max(),
    "max of rows": lambda x, _: x.max(-1),
    "argmax": lambda x, _: x.argmax(),
    "norm": lambda x, _: x.norm(),
    "standard deviation": lambda x, _: x.std(),
    "comparison": lambda x, y: x > y,
    "equality": lambda x, y: x.eq(y),
    "any": lambda x, _: x.isnan().any(),
    "all, read": lambda x, _: bool(x.isfinite().all()),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "clamp": lambda x, _: x.clamp(-1, 1),
    "cat": lambda x, y: torch.cat([x, y]),
    "clone": lambda x, _: x.clone(),
    "zeros": lambda x, _: torch.zeros_like(x),
    "rows by number": lambda x, _: x.index_select(0, torch.arange(len(x), device=x.device)),
    "transposed, contiguous": lambda x, _: x.t().contiguous(),
    "half of it, sum": lambda x, _: x[: len(x) // 2].sum(),
    "split, add": lambda x, _: torch.add(*x.chunk(2)),
    "in place": lambda x, _: x.mul_(1.0),
    "relu in place": lambda x, _: x.relu_(),
    "add in place": lambda x, y: x.add_(y, alpha=0.0),
    "fill": lambda x, _: x.fill_(1.0),
    "zero": lambda x, _: x.zero_(),
    "copy": lambda x, y: x.copy_(y),
    "assignment": lambda x, _: x.__setitem__(slice(None), 1.0),
    "to half precision": lambda x, _: x.half(),
    "to double precision": lambda x, _: x.double(),
    "to the host": lambda x, _: x.to("cpu", copy=True),
    "foreach": lambda x, y: torch._foreach_mul([x, y], 2.0),
    "foreach in place": lambda x, y: torch._foreach_mul_([x, y], 1.0),
    "product with a vector": lambda x, y: x @ y[0],
    "relu, backward": lambda x, y: _backward(torch.relu, x, y),
    "sum, backward": lambda x, y: _backward(torch.sum, x, None),
    "without gradients": lambda x, _: _without(torch.no_grad, x),
    "in inference mode": lambda x, _: _without(torch.inference_mode, x),
    "view": lambda x, _: x.view(-1),
    "product of matrices": lambda x, y: x[:128] @ y.t(),
    "product of matrices, backward": lambda x, y: _backward(lambda one: one[:128] @ y.t(), x),
    "linear, backward": lambda x, y: _backward(lambda one: F.linear(one, y[:64]), x),
    "softmax, backward": lambda x, _: _backward(lambda one: one.softmax(-1), x),
    "layer norm": lambda x, y: F.layer_norm(x, (1024,), y[0], y[1]),
    "layer norm, backward": lambda x, y: _backward(lambda one: F.layer_norm(one, (1024,), y[0], y[1]), x),
    "root mean square norm": lambda x, y: F.rms_norm(x, (1024,), y[0]),
    "batch norm, backward": lambda x, _: _backward(lambda one: F.batch_norm(one, None, None, training=True), x),
    "convolution": lambda x, y: F.conv2d(x.view(-1, 16, 32, 32), y[0, :144].view(1, 16, 3, 3)),
    "convolution, backward": lambda x, y: _backward(
        lambda one: F.conv2d(one.view(-1, 16, 32, 32), y[0, :144].view(1, 16, 3, 3)), x
    ),
    "pooling": lambda x, _: F.max_pool2d(x.view(-1, 16, 32, 32), 2),
    "attention": lambda x, y: _attended(x, y),
    "attention, backward": lambda x, y: _backward(lambda one: _attended(one, y), x),
    "embedding": lambda x, _: F.embedding(torch.arange(len(x), device=x.device).flip(0), x),
    "embedding, backward": lambda x, _: _backward(lambda one: F.embedding(torch.arange(64, device=x.device), one), x),
    "cross entropy, backward": lambda x, _: _backward(
        lambda one: F.cross_entropy(one, torch.arange(len(one), device=one.device) % 1024), x
    ),
    "dropout": lambda x, _: F.dropout(x, 0.1),
    "cumulative sum": lambda x, _: x.cumsum(-1),
    "sort": lambda x, _: x.sort(-1),
    "topk": lambda x, _: x.topk(8),
    "gather": lambda x, _: x.gather(0, torch.zeros(64, 1024, dtype=torch.int64, device=x.device)),
    "scatter_add": lambda x, y: x.scatter_add(0, torch.zeros(64, 1024, dtype=torch.int64, device=x.device), y[:64]),
    "rows by a list": lambda x, _: x[[0, 2, 4, 6]],
    "by a mask": lambda x, _: x[x > 1],
    "rows written": lambda x, y: x.__setitem__(torch.arange(64, device=x.device), y[:64]),
    "stack": lambda x, y: torch.stack([x, y]),
    "drawn": lambda x, _: torch.randn_like(x),
    "einsum": lambda x, y: torch.einsum("ij,ij->i", x, y),
    "number added in place": lambda x, _: x.add_(1.0),
    "added without a name": lambda x, y: x + y,
    "one row written": lambda x, _: x.__setitem__(1, 1.0),
    "one number written": lambda x, _: x.__setitem__((1, 2), 1.0),
    "rows from a row": lambda x, y: x.__setitem__(slice(0, 64), y[1]),
    "row by an int": lambda x, _: x[3],
    "number, read": lambda x, _: x[3, 4].item(),
    "columns": lambda x, _: x[:, 2:-2] * 2.0,
    "every second row": lambda x, _: x[::2].clone(),
    "with a new dimension": lambda x, y: x[:, None, :8] + y[0, :8],
    "rows and columns by lists": lambda x, _: x[[0, 1, 2], [3, 4, 5]],
    "rows by a list, columns": lambda x, _: x[[0, 1, 2], :8],
    "rows by a list, written": lambda x, _: x.__setitem__([0, 1, 2], 2.0),
    "by a mask, written": lambda x, _: x.__setitem__(x > 5, 5.0),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 0.0),
    "masked_fill in place": lambda x, y: x.masked_fill_(y > 9, 0.0),
    "clamp in place": lambda x, _: x.clamp_(min=-9.0),
    "exponential": lambda x, _: x.exp(),
    "power": lambda x, _: x**2,
    "negative, absolute": lambda x, _: (-x).abs(),
    "difference, squared, mean": lambda x, y: ((x - y) ** 2).mean(),
    "number minus": lambda x, _: 1.0 - x,
    "divided by its sum": lambda x, _: x / x.sum(-1, keepdim=True),
    "permuted, reshaped": lambda x, _: x.view(-1, 64, 1024).permute(1, 0, 2).reshape(64, -1),
    "repeated": lambda x, _: x[:8].repeat(4, 1),
    "expanded, added": lambda x, y: x + y[0].expand_as(x),
    "rolled": lambda x, _: x.roll(1, 0),
    "flipped": lambda x, _: x.flip(0),
    "upper triangle": lambda x, _: x.triu(),
    "argmax of rows": lambda x, _: x.argmax(-1),
    "equal shares": lambda x, y: (x.argmax(-1) == y.argmax(-1)).float().mean().item(),
    "numbers": lambda x, _: torch.arange(x.numel(), device=x.device),
    "one hot": lambda x, _: F.one_hot(torch.arange(256, device=x.device), 1024),
    "ones, eye": lambda x, _: torch.ones(512, 512, device=x.device) + torch.eye(512, device=x.device),
    "tensor of a list": lambda x, _: torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "uniform in place": lambda x, _: x.uniform_(-1.0, 1.0),
    "coins": lambda x, _: torch.bernoulli(torch.full_like(x, 0.5)),
    "halves": lambda x, y: _of(x, torch.float16) * 2.0,
    "halves in place": lambda x, y: _of(x, torch.bfloat16).add_(1.0),
    "integers": lambda x, y: _of(x, torch.int64) + 1,
    "integers, remainder": lambda x, _: _of(x, torch.int64) % 7,
    "from the host": lambda x, _: _on_host(x).to(x.device),
    "times a tracked number, backward": lambda x, _: _backward(lambda one: one * 2.0, x),
    "sum of squares, backward": lambda x, _: _backward(lambda one: (one**2).sum(), x, None),
    "slices, backward": lambda x, _: _backward(lambda one: one[: len(one) // 2] * 2.0, x),
    "chain, backward": lambda x, y: _backward(lambda one: ((one * y).relu() + 1.0).mean(), x, None),
    "tracked, no backward": lambda x, y: x.detach().requires_grad_() * y,
    "small net, backward": lambda x, _: _net(x),
    "gradients clipped": lambda x, y: _clipped(x, y),
    "SGD": lambda x, y: _step(torch.optim.SGD, x, y, lr=0.0),
    "RMSprop": lambda x, y: _step(torch.optim.RMSprop, x, y, lr=0.0),
    "SGD with momentum": lambda x, y: _step(torch.optim.SGD, x, y, lr=0.0, momentum=0.9),
    "Adam": lambda x, y: _step(torch.optim.Adam, x, y, lr=0.0),
    "AdamW, one by one": lambda x, y: _step(torch.optim.AdamW, x, y, lr=0.0, foreach=False),
    "AdamW, fused": lambda x, y: _step(torch.optim.AdamW, x, y, lr=0.0, fused=True),
}
_KEPT: dict[tuple[Any, ...], Any] = {}


def _kept(make: Callable[[], Any], x: torch.Tensor, *key: Any) -> Any:
    """What was made for this tensor, once."""
    kept = _KEPT.get((*key, str(x.device)))
    if kept is None or kept[0] is not x:
        kept = _KEPT[(*key, str(x.device))] = x, make()
    return kept[1]


def _of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As many bytes of another type."""
    return _kept(lambda: torch.ones(x.numel() * 4 // dtype.itemsize, dtype=dtype, device=x.device), x, dtype)


def _on_host(x: torch.Tensor) -> torch.Tensor:
    return _kept(lambda: torch.ones(x.shape), x, "host")


def _net(x: torch.Tensor) -> None:
    def make() -> torch.nn.Module:
        layers = torch.nn.Linear(1024, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        return torch.nn.Sequential(*layers).to(x.device)

    net = _kept(make, x, "net")
    net.zero_grad()
    F.cross_entropy(net(x), torch.zeros(len(x), dtype=torch.int64, device=x.device)).backward()


def _clipped(x: torch.Tensor, y: torch.Tensor) -> None:
    x.requires_grad_().grad = y
    torch.nn.utils.clip_grad_norm_([x], 1e9)


def _backward(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, gradient: torch.Tensor | None = None
) -> None:
    tracked = x.detach().requires_grad_()
    made = function(tracked)
    made.backward(made.detach() if gradient is None and made.dim() else gradient)


def _attended(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    query, key = (one.view(-1, 4, 64, 64) for one in (x, y))
    return F.scaled_dot_product_attention(query, key, key, is_causal=True)


def _step(kind: Callable[..., torch.optim.Optimizer], x: torch.Tensor, y: torch.Tensor, **options: Any) -> None:
    """A step of an optimizer that keeps its state from one to the next."""

    def make() -> torch.optim.Optimizer:
        x.requires_grad_().grad = y
        return kind([x], **options)

    _kept(make, x, kind, *options).step()


def _without(mode: Callable[[], contextlib.AbstractContextManager[object]], x: torch.Tensor) -> torch.Tensor:
    with mode():
        return x.tanh()


def prepared(operator: Callable[[torch.Tensor, torch.Tensor], object], mib: float, device: str) -> Callable[[], object]:
    x, y = torch.randn(int(256 * mib), 1024, device=device), torch.randn(int(256 * mib), 1024, device=device)
    return lambda: operator(x, y)
