"""How much of the host's memory a long recording takes, from its first statement to its report.

    python benchmarks/long_run.py                       on a computer with a GPU
    python benchmarks/long_run.py --virtual T4          on a virtual GPU that answers as a real one, through the same code
    python benchmarks/long_run.py --iterations 72000    an hour of steps of 50 ms

A training loop with five rows an iteration, its phases and its optimizer's steps is recorded as ``%%gpumem`` does. After each
tenth the process's resident memory is read; what it has grown by since the recording began is all that the recording holds, with
the history that PyTorch keeps for it (on a virtual GPU these are Python's objects, which are larger). What is kept is bounded, so
an hour takes no more than the figure at which the growth ends. At the end the peak is compared with the one that was provoked.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests"), str(HERE.parent / "tests" / "gpu")]

ALLOWED_MIB = 200
HIGHEST_AT = 0.43
"""The part of the run after which one iteration needs more than all others, in the middle of what is thinned out."""


def resident() -> int:
    """This process's memory in bytes. Linux tells that of now, other systems the highest so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return highest_resident()


def highest_resident() -> int:
    """The most that this process had at any time, in bytes."""
    import resource

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def statements(device: str) -> list[tuple[str, int, Callable[[int], None]]]:
    """(words, line, what to call with the size of an extra allocation) of an iteration."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: dict[str, Any] = {}

    def load(_: int) -> None:
        state["x"] = torch.randn(32, 64).to(device)

    def forward(extra: int) -> None:
        if extra:
            torch.empty(extra, dtype=torch.uint8, device=device)
        state["loss"] = model(state["x"]).square().mean()

    return [
        ("x = load()", 2, load),
        ("loss = model(x)", 3, forward),
        ("loss.backward()", 4, lambda _: state["loss"].backward()),
        ("optimizer.step()", 5, lambda _: optimizer.step()),
        ("optimizer.zero_grad()", 6, lambda _: optimizer.zero_grad()),
    ]


def record(iterations: int) -> bool:
    """Runs the loop and prints what it took. The answer: whether it stayed within bounds and found the peak."""
    import torch
    from measured import machine

    from gpumem_magic.recording.recorder import Recorder
    from gpumem_magic.report.build import build
    from gpumem_magic.units import MIB

    calls = statements("cuda")
    for _ in range(100):
        for _, _, call in calls:
            call(0)
    special = int(iterations * HIGHEST_AT) + 1
    extra = 64 * MIB
    # What was there before belongs to nobody here.
    gc.collect()
    before = highest = resident()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    recorder = Recorder(machine())
    recorder.start({})
    print(f"{'iterations':>10} {'rows':>9} {'MiB':>7}", flush=True)
    for turn in range(1, iterations + 1):
        for words, line, call in calls:
            call(extra if turn == special else 0)
            recorder.checkpoint("statement", words, words, line, (turn,), (1,))
        if turn % max(iterations // 10, 1) == 0:
            now = resident()
            highest = max(highest, now)
            print(f"{turn:>10,} {turn * len(calls):>9,} {(now - before) / MIB:>7.1f}", flush=True)
    told = torch.cuda.max_memory_allocated()
    spent = time.perf_counter() - began
    recording = recorder.finish(namespace={})
    highest = max(highest, resident())
    report = build(recording)
    at_end = resident()
    highest = max(highest, at_end, highest_resident())
    log = recording.logs[recording.primary]
    print(f"with the report {(at_end - before) / MIB:.1f} MiB; most at any time {(highest - before) / MIB:.1f} MiB")
    print(
        f"{iterations:,} iterations in {spent:.0f} s ({1000 * spent / iterations:.2f} ms each); kept: "
        f"{len(recording.checkpoints):,} rows, {len(recording.spans):,} spans, {len(log.events):,} events"
    )
    for note in report.notes:
        print(f"note: {note}")
    exact = report.peak.peak_allocated == told
    print(f"peak {report.peak.peak_allocated:,} bytes in {report.peak.where}; PyTorch says {told:,}: {_words(exact)}")
    within = highest - before < ALLOWED_MIB * MIB
    print(f"below {ALLOWED_MIB} MiB: {_words(within)}")
    return exact and within


def _words(holds: bool) -> str:
    return "yes" if holds else "NO"


@contextlib.contextmanager
def device(virtual: str | None) -> Iterator[str]:
    """The GPU that is recorded, in words."""
    import measured
    import torch

    if virtual is None:
        yield torch.cuda.get_device_name(0)
        return
    from virtual_as_real import real

    with real(virtual) as machine:
        measured.stand_in = machine
        try:
            yield f"virtual {torch.cuda.get_device_name(0)} that answers as a real one"
        finally:
            measured.stand_in = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20_000)
    parser.add_argument("--virtual", metavar="NAME", help="a virtual GPU in place of a real one")
    options = parser.parse_args()
    if options.iterations < 10:
        parser.error("--iterations wants a number of at least 10")
    import torch

    from gpumem_magic.devices import torch_memory

    if options.virtual is None and not torch_memory.is_present(torch):
        parser.error("there is no GPU here that PyTorch can use; --virtual T4 takes a virtual one")
    torch.set_num_threads(1)
    with device(options.virtual) as words:
        print(f"{words}; torch {torch.__version__}, Python {platform.python_version()}")
        return 0 if record(options.iterations) else 1


if __name__ == "__main__":
    sys.exit(main())
