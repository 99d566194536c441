"""Programs on the virtual GPU with ``values=real`` beside the same programs on the host: do they print the same?

    python benchmarks/real_values [--device T4] [--only WORD] [--overhead | --ways]

The programs are in `basics`, `numerics`, `networks`, `modern` and `deciding`: small ones in the shape of PyTorch's tutorials and
examples, each a function of the device. They print losses, predictions, choices and counts; what they print must be the same to
the last digit that is printed. ``--ways`` runs them with stand-ins and with values=auto instead, and says which go another way
than with real values though the report's first line has no word about it. ``--overhead`` times operators, their gradients and
optimizers' steps on tensors of 1 to 16 MiB, and the steps of the programs in `heavy`, whose tensors are above 1 MiB, on the host
and on the virtual GPU, in turn. It says which take at most twice as long.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import inspect
import io
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import basics
import deciding
import heavy
import modern
import networks
import numerics
import torch
import torch.nn.functional as F
import ways

from gpumem_magic.virtual import gpu

Program = Callable[[str], None]


def programs() -> dict[str, Program]:
    """All programs by their names, in the order of the files."""
    return {
        name: function
        for module in (basics, numerics, networks, modern, deciding)
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and list(inspect.signature(function).parameters) == ["device"]
    }


def printed(program: Program, device: str) -> str:
    """What a program prints, without the device's name; an error's text where it fails."""
    torch.manual_seed(0)
    # (Compiling a program turns it off for all that follow.)
    torch.distributions.Distribution.set_default_validate_args(True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program(device)
        except Exception:
            out.write(traceback.format_exc())
    return plain(out.getvalue())


def plain(text: str) -> str:
    """Without the device, and without the line breaks that its name brings about."""
    words = text.replace("device='cuda:0'", "").replace(",", " ").split()
    return " ".join(words).replace(" )", ")")


def overhead(word: str) -> None:
    """How long operators and programs take on the host and on the virtual GPU, in turn, by one thread."""
    torch.set_num_threads(1)
    print(f"{'':<40}{'host, ms':>12}{'values=real, ms':>18}{'ratio':>8}")
    operators = {name: operator for name, operator in OPERATORS.items() if word in name}
    ratios: dict[str, dict[float, float]] = {name: {} for name in operators}
    for mib in SIZES:
        for name, operator in operators.items():
            ratios[name][mib] = _timed(f"{name}, {mib} MiB", functools.partial(_prepared, operator, mib), 60)
    found = {name: _timed(name, make, 15) for name, make in heavy.steps().items() if word in name}
    for name, by_size in ratios.items():
        too_slow = [mib for mib, ratio in by_size.items() if ratio > 2]
        within = [mib for mib in by_size if mib > max(too_slow, default=0)]
        print(
            f"{name}: at most twice the host's time {f'from {within[0]} MiB on' if within else 'at none of these sizes'}"
        )
    if found:
        fast = sum(ratio <= 2 for ratio in found.values())
        median = statistics.median(found.values())
        print(f"{fast} of {len(found)} programs take at most twice the host's time, the median {median:.2f}")


def _timed(name: str, make: Callable[[str], Callable[[], object]], times: int) -> float:
    """The first quartile of the processor's time on the virtual GPU by that on the host: other programs count little in it."""
    sides = [make("cpu"), make("cuda")]
    taken: list[list[float]] = [[], []]
    for run in sides:
        run()
    for _ in range(times):
        for side, run in enumerate(sides):
            began = time.process_time()
            run()
            taken[side].append(time.process_time() - began)
    host, ours = (statistics.quantiles(one)[0] * 1000 for one in taken)
    print(f"{name:<40}{host:>12.3f}{ours:>18.3f}{ours / host:>8.2f}", flush=True)
    return ours / host


# Of the tensors, in MiB.
SIZES = (1, 2, 4, 16)
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
    "SGD with momentum": lambda x, y: _step(torch.optim.SGD, x, y, lr=0.0, momentum=0.9),
    "Adam": lambda x, y: _step(torch.optim.Adam, x, y, lr=0.0),
    "AdamW, one by one": lambda x, y: _step(torch.optim.AdamW, x, y, lr=0.0, foreach=False),
    "AdamW, fused": lambda x, y: _step(torch.optim.AdamW, x, y, lr=0.0, fused=True),
}
_OPTIMIZERS: dict[tuple[Any, str], tuple[torch.Tensor, torch.optim.Optimizer]] = {}


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
    key = kind, str(x.device)
    kept = _OPTIMIZERS.get(key)
    if kept is None or kept[0] is not x:
        x.requires_grad_()
        kept = _OPTIMIZERS[key] = x, kind([x], **options)
        x.grad = y
    kept[1].step()


def _without(mode: Callable[[], contextlib.AbstractContextManager[object]], x: torch.Tensor) -> torch.Tensor:
    with mode():
        return x.tanh()


def _prepared(
    operator: Callable[[torch.Tensor, torch.Tensor], object], mib: float, device: str
) -> Callable[[], object]:
    x, y = torch.randn(int(256 * mib), 1024, device=device), torch.randn(int(256 * mib), 1024, device=device)
    return lambda: operator(x, y)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="T4", help="the virtual GPU (default T4)")
    parser.add_argument("--only", default="", help="programs with this word in their name")
    parser.add_argument("--overhead", action="store_true", help="time operators instead")
    parser.add_argument(
        "--ways", action="store_true", help="compare the ways that programs take with stand-ins instead"
    )
    options = parser.parse_args()
    chosen = {name: program for name, program in programs().items() if options.only in name}
    if options.overhead:
        gpu.turn_on(f"{options.device},values=real")
        overhead(options.only)
        return 0
    if options.ways:
        return int(ways.compare(chosen, options.device) > 0)
    wanted = {name: printed(program, "cpu") for name, program in chosen.items()}
    machine = gpu.turn_on(f"{options.device},values=real")
    same = 0
    for name, program in chosen.items():
        found = printed(program, "cuda")
        if found == wanted[name] and "Traceback" not in found:
            same += 1
            continue
        print(f"-- {name}")
        print(
            "\n".join(
                difflib.unified_diff(wanted[name].split(" "), found.split(" "), "host", "virtual", lineterm="", n=2)
            )
        )
    print(f"{same} of {len(chosen)} programs print the same; {sum(machine.reads.counts.values())} stand-ins were read")
    return int(same < len(chosen))


if __name__ == "__main__":
    raise SystemExit(main())
