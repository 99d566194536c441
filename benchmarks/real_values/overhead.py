"""How long operators and steps take on the virtual GPU that computes, by what they take on the host."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import heavy
import operators
import torch

# Of the tensors, in MiB.
SIZES = (1, 2, 4, 16)


def compare(word: str, sizes: Sequence[float]) -> None:
    """Operators and programs with this word in their names, on the host and on the virtual GPU in turn, by one thread."""
    torch.set_num_threads(1)
    print(f"{'':<40}{'host, ms':>12}{'values=real, ms':>18}{'ratio':>8}")
    chosen = {name: operator for name, operator in operators.OPERATORS.items() if word in name}
    for mib in sizes:
        ratios = {
            name: _timed(f"{name}, {mib:g} MiB", functools.partial(operators.prepared, operator, mib), 60)
            for name, operator in chosen.items()
        }
        _summed_up(f"operators at {mib:g} MiB", ratios)
    _summed_up("programs", {name: _timed(name, make, 15) for name, make in heavy.steps().items() if word in name})


def _summed_up(what: str, ratios: dict[str, float]) -> None:
    if not ratios:
        return
    fast = sum(ratio <= 2 for ratio in ratios.values())
    median = statistics.median(ratios.values())
    print(f"{fast} of {len(ratios)} {what} take at most twice the host's time, the median {median:.2f}")
    for name, ratio in sorted(ratios.items(), key=lambda item: -item[1]):
        if ratio > 2:
            print(f"    {name:<40}{ratio:>6.2f}")


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
