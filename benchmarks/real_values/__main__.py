"""Programs on the virtual GPU with ``values=real`` beside the same programs on the host: do they print the same?

    python benchmarks/real_values [--device T4] [--only WORD] [--overhead | --ways]

The programs are in `basics`, `numerics`, `networks`, `modern` and `deciding`: small ones in the shape of PyTorch's tutorials and
examples, each a function of the device. They print losses, predictions, choices and counts; what they print must be the same to
the last digit that is printed. ``--ways`` runs them with stand-ins and with values=auto instead, and says which go another way
than with real values though the report's first line has no word about it. ``--overhead`` times operators on tensors of 1 to 8
MiB, and the steps of the programs in `heavy`, whose tensors are above 1 MiB, on the host and on the virtual GPU, in turn. It says
which take at most twice as long.
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
    for mib in (1, 1.25, 1.5, 2, 3, 4, 6, 8):
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
}


def _backward(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, gradient: torch.Tensor | None) -> None:
    tracked = x.detach().requires_grad_()
    function(tracked).backward(gradient)


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
