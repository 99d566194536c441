"""Ctrl-C at any moment: in host code, inside operators, inside our own work, twice, in ``input()``, while a device is switched.

    python tests/differential/interrupts.py [--count 1000] [--seed 1] [--jobs 2]

Each interrupt has a process of its own, forked from a warm one. Half of the signals come from another process after a time
drawn by lot, a quarter of those twice; the other half come at a line of the package's own code drawn by lot. Afterwards
``%gpumem_device off`` must work, nothing of torch, the shell or the interpreter may be other than before, a next measured cell
must say the right figures, and ``%unload_ext`` must work. Exit status 1 where anything is left over.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from run import OLDEST, Kind, Zygote

MODEL = """\
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
optimizer = torch.optim.Adam(model.parameters())
def step(number=0):
    optimizer.zero_grad()
    x = torch.randn(16, 64, device="cuda")
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    return loss
def fit(steps=3):
    for number in range(steps):
        step(number)
"""
ON = ["%gpumem_device T4", MODEL]
HEAVY = [
    *ON,
    "many = [{'a': [n], 'b': (n,)} for n in range(20_000)]\ntensors = [torch.empty(100 + n, device='cuda') for n in range(200)]",
]
# name: (cells before, the cell, as a kernel runs it)
SCENARIOS: dict[str, tuple[list[str], str, bool]] = {
    "host code": (["%gpumem_device T4"], "%%gpumem -q\ntotal = 0\nfor n in range(3000):\n    total += n * n\n    x = [n] * 3", False),
    "host code without rows": ([], "%%gpumem -q --no-lines\nfor n in range(4_000):\n    x = n * n", False),
    "a long sleep": (["import time"], "%%gpumem -q\ntime.sleep(0.1)\nx = 1\ntime.sleep(0.1)", False),
    "operators": (ON, "%%gpumem -q\nfor n in range(4):\n    step()", False),
    "operators, first device": ([], f"%%gpumem -q\n{MODEL}\nstep()", False),
    "the report": (HEAVY, "%%gpumem\ny = [t + 1 for t in tensors[:20]]\ndel y", False),
    "the report, shown": (ON, "%%gpumem\nloss = step()\nloss", False),
    "a picture": (ON, "%%gpumem --plot\nstep()", False),
    "an error of the cell's": (ON, "%%gpumem -q\nstep()\n1 / 0", False),
    "into": (ON, "%%gpumem -q --into fit,step\nfit(2)", False),
    "a limit": (ON, "%%gpumem -q --max-iterations 2\nfor n in range(5):\n    step()", False),
    "one statement": (ON, "%gpumem -q fit(2)", False),
    "device on": ([], "%gpumem_device A100-40GB", False),
    "device off": (ON, "%gpumem_device off", False),
    "another device": (ON, "%gpumem_device 2xT4\n%gpumem_device L4", False),
    "another device for a cell": (ON, "%%gpumem -q --device L4\nt = torch.empty(1000, device='cuda')", False),
    "input": (["%gpumem_device T4"], "%%gpumem -q\nx = 1\nname = input('name? ')\ny = 2", False),
    "await": ([*ON, "import asyncio"], "%%gpumem -q\nawait asyncio.sleep(0.02)\nstep()\nawait asyncio.sleep(0.02)", True),
    "await in a terminal": ([*ON, "import asyncio"], "%%gpumem -q\nawait asyncio.sleep(0.02)\nstep()\nawait asyncio.sleep(0.02)", False),
    "every cell": ([*ON, "%gpumem_auto on"], "step()\nstep()", False),
    "who and free": (HEAVY, "%gpumem_who\n%gpumem_free", False),
    "load and unload": ([], "%unload_ext gpumem_magic\n%load_ext gpumem_magic\n%gpumem_device T4", False),
    "measure": ([*ON, "import gpumem_magic"], "with gpumem_magic.measure() as m:\n    step()", False),
    "a watch": (ON, "%gpumem_watch --static --hz 20\nstep()\n%gpumem_watch stop", False),
}  # fmt: skip


# What the scenarios import, PyTorch's own changes to itself among it (an optimizer's first step), is there before they begin.
WARM = tuple(
    cell
    for name, (setup, cell, kernel) in SCENARIOS.items()
    if name not in ("input", "await", "await in a terminal", "load and unload")
    for cell in (*setup, cell)
)


class Interrupts:
    def __init__(self, kind: Kind, seed: str) -> None:
        self.zygote = Zygote(kind)
        self.source = random.Random(seed)
        self.measures: dict[str, tuple[float, int]] = {}
        self.counts: Counter[str] = Counter()
        self.landed: Counter[str] = Counter()
        self.found: list[str] = []

    def once(self, name: str) -> None:
        setup, cell, kernel = SCENARIOS[name]
        seconds, lines = self._measure(name)
        options: dict[str, Any] = {}
        twice = False
        if self.source.random() < 0.5 and lines:
            options["line"] = self.source.randint(1, lines)
            words = f"line {options['line']} of {lines}"
        else:
            delay = self.source.uniform(0, seconds * 1.05)
            twice = self.source.random() < 0.25
            options["interrupt"] = [delay, *([self.source.choice([0.0002, 0.001, 0.005, 0.03])] if twice else [])]
            words = f"after {options['interrupt']} s of {seconds:.3f}"
        answer = self.zygote.interrupt(setup, cell, kernel=kernel, **options)
        self.counts["runs"] += 1
        sent = answer.get("sent", 1 if answer.get("place") else 0)
        self.counts["signals"] += sent
        self.counts["interrupts"] += bool(sent)
        self.counts["twice"] += twice and sent == 2
        self.landed[name] += bool(sent)
        troubles = answer.get("troubles")
        if troubles is None:
            troubles = [("ended", json.dumps(answer)[:500])]
        if troubles and sent:
            self.counts["with leftovers"] += 1
            place = answer.get("place", "")
            self.found.append(
                "\n".join([f"--- {name}, {words} {place}", *(f"  {which}: {trouble}" for which, trouble in troubles)])
            )
        elif troubles:
            self.found.append(f"--- {name} without an interrupt: {troubles}")
            self.counts["troubles without an interrupt"] += 1

    def _measure(self, name: str) -> tuple[float, int]:
        """How long the cell takes, and how many lines of our own it runs, when nothing interrupts it."""
        if name not in self.measures:
            setup, cell, kernel = SCENARIOS[name]
            timed = self.zygote.interrupt(setup, cell, kernel=kernel, interrupt=[])
            counted = self.zygote.interrupt(setup, cell, kernel=kernel, line=0)
            for answer in (timed, counted):
                if name != "input" and answer.get("troubles") != []:
                    self.found.append(f"--- {name}, not interrupted: {answer}")
                    self.counts["troubles without an interrupt"] += 1
            self.measures[name] = (timed.get("seconds", 0.2), counted.get("lines", 0))
        return self.measures[name]


def spread(numbers: list[int], most: int) -> list[int]:
    """At most so many of them, evenly."""
    return numbers if len(numbers) <= most else [numbers[len(numbers) * (2 * n + 1) // (2 * most)] for n in range(most)]


def sweep(name: str, options: argparse.Namespace) -> int:
    """Interrupts a scenario once at each place of our own code; after some of these, at each place thereafter a second time."""
    zygote = Zygote(Kind(sys.executable, options.oldest, warm=WARM))
    setup, cell, kernel = SCENARIOS[name]

    def places(**where: int) -> list[int]:
        return sorted(zygote.interrupt(setup, cell, kernel=kernel, **where)["places"].values())

    def run(numbers: list[dict[str, int]], of: int) -> int:
        left = 0
        for where in numbers:
            answer = zygote.interrupt(setup, cell, kernel=kernel, **where)
            troubles = answer.get("troubles", [("ended", json.dumps(answer, default=str)[:500])])
            left += bool(troubles)
            for which, trouble in troubles:
                print(f"--- {name}, {where} {answer.get('place', '')}: {which}: {trouble}", flush=True)
        print(f"{name}: {len(numbers):,} of {of:,} places, from {numbers[0]}: {left} left something over", flush=True)
        return left

    try:
        lines = places(line=0)
        left = run([{"line": line} for line in spread(lines, options.sweep)], len(lines))
        for line in spread(lines, options.twice):
            later = places(line=line, second=0)
            left += run([{"line": line, "second": second} for second in spread(later, options.sweep)], len(later))
    finally:
        zygote.close()
    return left


def work(options: argparse.Namespace) -> dict[str, Any]:
    interrupts = Interrupts(Kind(sys.executable, options.oldest, warm=WARM), f"{options.seed} {options.part}")
    names = options.scenario or list(SCENARIOS)
    began = time.monotonic()
    begin = interrupts.source.randrange(len(names))
    try:
        while (
            interrupts.counts["interrupts"] < options.count
            and interrupts.counts["runs"] < 2 * options.count + 20
            and time.monotonic() - began < options.seconds
        ):
            interrupts.once(names[(begin + interrupts.counts["runs"]) % len(names)])
            if options.show and interrupts.found:
                print(interrupts.found[-1], file=sys.stderr, flush=True)
                interrupts.found.clear()
    finally:
        interrupts.zygote.close()
    return {"counts": interrupts.counts, "landed": interrupts.landed, "found": interrupts.found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="interrupt nothing more after so long")
    parser.add_argument("--scenario", nargs="*", choices=list(SCENARIOS), default=[])
    parser.add_argument("--oldest", action="store_true", help="only on the oldest IPython; else a quarter of them are")
    parser.add_argument("--show", action="store_true", help="show each leftover as it is found")
    parser.add_argument(
        "--sweep", type=int, metavar="N", help="at most N places of the package's own code instead, one by one"
    )
    parser.add_argument("--twice", type=int, default=0, metavar="N", help="with --sweep: a second time after N of them")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        json.dump(work(options), sys.stdout)
        return 0
    if options.sweep:
        return int(sum(sweep(name, options) for name in options.scenario or SCENARIOS) > 0)
    began = time.monotonic()
    running = []
    for part in range(options.jobs):
        count = (options.count + part) // options.jobs
        old = count // 4 if OLDEST.is_dir() and not options.oldest else 0
        for number, share in enumerate((count - old, old)):
            if share:
                command = [
                    sys.executable,
                    __file__,
                    "--part",
                    str(2 * part + number),
                    "--seed",
                    options.seed,
                    "--count",
                    str(share),
                    "--seconds",
                    str(options.seconds),
                ]
                command += ["--oldest"] * (options.oldest or number == 1) + ["--show"] * options.show
                command += ["--scenario", *options.scenario] if options.scenario else []
                running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    counts: Counter[str] = Counter()
    landed: Counter[str] = Counter()
    found = []
    for process in running:
        text, _ = process.communicate()
        if process.returncode:
            print(f"a process ended with {process.returncode}", file=sys.stderr)
            return 2
        answer = json.loads(text)
        counts.update(answer["counts"])
        landed.update(answer["landed"])
        found += answer["found"]
    print("\n".join(found))
    print("interrupts: " + ", ".join(f"{count} in {name}" for name, count in landed.most_common()))
    print(
        f"{counts['interrupts']:,} cells interrupted by {counts['signals']:,} signals ({counts['twice']} twice) in "
        f"{time.monotonic() - began:,.0f} s: {counts['with leftovers']} left something over"
    )
    return int(counts["with leftovers"] > 0 or counts["troubles without an interrupt"] > 0)


if __name__ == "__main__":
    sys.exit(main())
