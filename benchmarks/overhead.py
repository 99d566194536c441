"""What measuring costs: a training cell plain and measured, for steps of about 1, 5 and 50 ms, all in one run.

    python benchmarks/overhead.py                     on a computer with a GPU
    python benchmarks/overhead.py --virtual T4        a dry run of the benchmark; its figures are not those of a GPU

Beside the plain cell run ``%%gpumem``, ``%%gpumem --no-lines``, ``%gpumem_watch``, ``torch.profiler`` with ``profile_memory``,
and pytorch_memlab's line profiler where it is installed. A pair is the same steps twice, side by side, in random order: plain
and measured. For the control both are plain. Pairs of all kinds and lengths of step are shuffled, in rounds of one of each, so
that the machine's moods fall on all of them. The clock is read by the cell itself before its first step and, with the device
idle, after its last; what is done before and after that (the report, the profiler's tables) is told apart, in seconds. The
figure is the median of the pairs' ratios with a bootstrap interval of 95 %.

Without IPython the cell is rewritten and told of row by row as ``%%gpumem`` does (the road of ``gpumem run``), ``measure()``
stands for ``--no-lines``, and the watch writes its line to nowhere; the first line of the answer says so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import platform
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

GOALS = {1.0: 1.10, 5.0: 1.03, 50.0: 1.03}
"""Milliseconds of a step -> the ratio that is aimed at on a GPU."""

CELL = """
synchronize(); began.append(clock())
for _ in range(steps):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
synchronize(); ended.append(clock())
""".lstrip()

WIDTH, BATCH = 256, 64


def namespace(layers: int) -> dict[str, Any]:
    """What the cell needs. The layers are narrow: a step is made of many small kernels, which is the hard case."""
    import torch
    from torch import nn

    model = nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]).cuda()
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters()),
        "x": torch.randn(BATCH, WIDTH, device="cuda"),
        "synchronize": torch.cuda.synchronize,
        "clock": time.perf_counter,
        "began": [],
        "ended": [],
        "steps": 1,
    }


@dataclass
class Bench:
    """A length of step: the cell's variables, and what was found. spent: seconds of steps, and all seconds, of a run."""

    wanted_ms: float
    variables: dict[str, Any]
    layers: int
    found: dict[str, Found] = field(default_factory=dict)

    def run(self, side: Callable[[dict[str, Any]], None]) -> tuple[float, float]:
        variables = self.variables
        variables["began"].clear()
        variables["ended"].clear()
        start = time.perf_counter()
        side(variables)
        whole = time.perf_counter() - start
        return variables["ended"][0] - variables["began"][0], whole


@dataclass
class Found:
    """ratios: of the steps' time, each of a pair. around: seconds before and after the steps. step_ms: of the plain sides."""

    ratios: list[float] = field(default_factory=list)
    around: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)


def plain(variables: dict[str, Any]) -> None:
    exec(compile(CELL, "<cell>", "exec"), variables)


def bench_of(wanted_ms: float, seconds: float) -> Bench:
    """As many layers as a step of that length needs, found by trying; and the steps that fill one side of a pair."""

    def step_ms(variables: dict[str, Any], steps: int) -> float:
        bench = Bench(wanted_ms, variables, 0)
        variables["steps"] = steps
        bench.run(plain)
        return 1000 * min(bench.run(plain)[0] for _ in range(2)) / steps

    layers, taken = 1, step_ms(namespace(1), 5)
    for _ in range(4):
        wanted = max(1, min(round(layers * wanted_ms / taken), 2000))
        if wanted == layers:
            break
        layers = wanted
        taken = step_ms(namespace(layers), 5)
        if abs(taken / wanted_ms - 1) < 0.1:
            break
    variables = namespace(layers)
    taken = step_ms(variables, 5)
    variables["steps"] = max(3, round(1000 * seconds / taken))
    return Bench(wanted_ms, variables, layers)


# ---- the sides


def sides(shell: Any) -> dict[str, Callable[[dict[str, Any]], None]]:
    """Name -> what runs the cell measured so. shell: IPython's, or None where it is not installed."""
    found: dict[str, Callable[[dict[str, Any]], None]] = {
        "plain again": plain if shell is None else in_shell(shell, "")
    }
    if shell is None:
        found["%%gpumem"] = by_rows
        found["%%gpumem --no-lines"] = by_measure
        found["%gpumem_watch"] = watched
    else:
        found["%%gpumem"] = in_shell(shell, "%%gpumem --quiet\n")
        found["%%gpumem --no-lines"] = in_shell(shell, "%%gpumem --quiet --no-lines\n")
        found["%gpumem_watch"] = in_shell(shell, "", "gpumem_watch")
    found["torch.profiler"] = profiled
    if importlib.util.find_spec("pytorch_memlab") is not None:
        found["pytorch_memlab"] = by_memlab
    return found


def in_shell(shell: Any, first_line: str, magic: str | None = None) -> Callable[[dict[str, Any]], None]:
    def side(variables: dict[str, Any]) -> None:
        shell.user_ns.update(variables)
        with contextlib.redirect_stdout(io.StringIO()):
            if magic is not None:
                shell.run_line_magic(magic, "")
            try:
                shell.run_cell(first_line + CELL, store_history=False).raise_error()
            finally:
                if magic is not None:
                    shell.run_line_magic(magic, "stop")

    return side


def by_rows(variables: dict[str, Any]) -> None:
    """A row after each statement, as ``%%gpumem`` has it."""
    from gpumem_magic.recording.script import ScriptRun
    from gpumem_magic.session.recording import open_recording

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cell.py"
        path.write_text(CELL, encoding="utf-8")
        script = ScriptRun(str(path))
        recording = open_recording(names=script.names, user_ns=variables, own_file=script.path)
        try:
            script.observe(recording.observer(None, True, source=script.source))
            module = type(sys)("cell")
            module.__dict__.update(variables)
            script.run(module)
        finally:
            recording.close(user_ns=variables)


def by_measure(variables: dict[str, Any]) -> None:
    import gpumem_magic

    with gpumem_magic.measure():
        plain(variables)


def watched(variables: dict[str, Any]) -> None:
    from gpumem_magic.widgets.fronts import LineFront
    from gpumem_magic.widgets.watch import DEFAULT_HZ, Watch

    watch = Watch(DEFAULT_HZ, lambda watch: LineFront(watch.observer, io.StringIO()))
    watch.start()
    try:
        plain(variables)
    finally:
        watch.stop()


def profiled(variables: dict[str, Any]) -> None:
    from torch.profiler import profile

    with profile(profile_memory=True):
        plain(variables)


def by_memlab(variables: dict[str, Any]) -> None:
    from pytorch_memlab import LineProfiler

    def cell() -> None:
        optimizer, model, x = variables["optimizer"], variables["model"], variables["x"]
        variables["synchronize"]()
        variables["began"].append(variables["clock"]())
        for _ in range(variables["steps"]):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        variables["synchronize"]()
        variables["ended"].append(variables["clock"]())

    with LineProfiler(cell):
        cell()


# ---- pairs


def carry_out(
    benches: list[Bench], ways: dict[str, Callable[[dict[str, Any]], None]], pairs: int, seed: int, ends: float
) -> None:
    """Whole rounds, one pair of each kind and length in each, as many as begin before `ends` (of `time.monotonic`)."""
    order = random.Random(seed)
    base = ways["plain again"]
    for bench in benches:
        for name, way in ways.items():
            # Once without the clock: imports, and what a library loads on first use.
            bench.run(way)
            bench.found[name] = Found()
    for bench, name in rounds([(bench, name) for bench in benches for name in ways], pairs, order, ends):
        if order.random() < 0.5:
            alone, _ = bench.run(base)
            taken, whole = bench.run(ways[name])
        else:
            taken, whole = bench.run(ways[name])
            alone, _ = bench.run(base)
        found = bench.found[name]
        found.ratios.append(taken / alone)
        found.around.append(whole - taken)
        found.step_ms.append(1000 * alone / bench.variables["steps"])


def rounds(
    kinds: list[tuple[Bench, str]], pairs: int, order: random.Random, ends: float
) -> Iterator[tuple[Bench, str]]:
    for done in range(pairs):
        if done and time.monotonic() >= ends:
            return
        yield from order.sample(kinds, len(kinds))


def lines(benches: list[Bench], real: bool) -> list[str]:
    """The table, which is Markdown too."""
    from watch import again, interval

    found = ["| step | side | ratio | 95 % | beside the steps | goal |", "|---|---|---:|---|---:|---|"]
    for bench in benches:
        step = statistics.median(ms for one in bench.found.values() for ms in one.step_ms)
        for name, one in bench.found.items():
            low, high = interval(lambda chance, ratios=one.ratios: again(ratios, chance))  # type: ignore[misc]
            ratio = statistics.median(one.ratios)
            goal = ""
            if "gpumem" in name:
                goal = f"{GOALS[bench.wanted_ms]:.2f}" if bench.wanted_ms in GOALS else ""
                if real and goal:
                    goal += ", met" if ratio <= GOALS[bench.wanted_ms] else ", MISSED"
            found.append(
                f"| {step:.1f} ms | {name} | {ratio:.3f} | {low:.3f} to {high:.3f} | "
                f"{statistics.median(one.around):.2f} s | {goal} |"
            )
    return found


def open_shell() -> Any:
    """IPython's shell with the extension loaded, or None."""
    if importlib.util.find_spec("IPython") is None:
        return None
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    # Nobody's history of commands gets ours.
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_line_magic("load_ext", "gpumem_magic")
    return shell


def machine(real: bool) -> str:
    import torch

    name = torch.cuda.get_device_name(0)
    if not real:
        return f"virtual {name} on the CPU ({platform.machine()}): NOT FIGURES OF A GPU, a dry run of the benchmark"
    from gpumem_magic.devices.driver import Driver

    driver = Driver.open().ask("SystemGetDriverVersion")
    words = driver.decode() if isinstance(driver, bytes) else driver
    return f"{name}, driver {words or 'not told'}, CUDA {torch.version.cuda}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--virtual", metavar="NAME", help="a virtual GPU instead of this computer's: a dry run")
    parser.add_argument("--steps-ms", type=float, nargs="+", default=list(GOALS), help="lengths of a step")
    parser.add_argument("--pairs", type=int, default=15, help="pairs for each side and length")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begin no further round after so long (default: 60)"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one side of a pair")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write every ratio")
    parser.add_argument("--without-ipython", action="store_true", help="as where IPython is not installed")
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    if options.pairs < 1 or options.seconds <= 0 or min(options.steps_ms) <= 0:
        parser.error("--pairs, --seconds and --steps-ms want numbers above 0")
    import torch

    from gpumem_magic.devices import torch_memory
    from gpumem_magic.session import device

    if options.virtual is not None:
        device.choose(options.virtual)
    elif not torch_memory.is_present(torch):
        parser.error("there is no GPU here that PyTorch can use; --virtual T4 makes a dry run")
    warnings.simplefilter("ignore")
    shell = None if options.without_ipython else open_shell()
    real = options.virtual is None
    road = (
        "IPython's own magics" if shell is not None else "without IPython: rows by `gpumem run`'s road, and measure()"
    )
    print(f"{machine(real)}; torch {torch.__version__}, Python {platform.python_version()}; {road}")
    torch.manual_seed(0)
    benches = [bench_of(wanted, options.seconds) for wanted in options.steps_ms]
    ways = sides(shell)
    print(f"{options.pairs} pairs of {options.seconds:g} s for each, seed {options.seed}", flush=True)
    if "pytorch_memlab" not in ways:
        print("pytorch_memlab is not installed: left out")
    carry_out(benches, ways, options.pairs, options.seed, ends)
    done = len(benches[0].found["plain again"].ratios)
    if done < options.pairs:
        print(f"{done} of {options.pairs} pairs: the time was over")
    print("\n".join(lines(benches, real)))
    for bench in benches:
        print(f"steps of {bench.wanted_ms:g} ms: {bench.layers} layers, {bench.variables['steps']} steps a side")
    if options.json is not None:
        ratios = {f"{bench.wanted_ms:g}": {name: one.ratios for name, one in bench.found.items()} for bench in benches}
        options.json.write_text(json.dumps({"machine": machine(real), "ratios": ratios}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
