"""What a cell of plain Python costs under ``%%gpumem``: time and memory over a loop's length, a cell's, and a notebook's size.

    python benchmarks/plain_python.py [--runs 7] [--only loops cells notebook]

Times are of the processor (``time.process_time``), plain and measured by turns, and of each the least: other programs on the
same computer change little. Memory is the highest use by Python's objects, without what the plain cell uses.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

# name: (iterations at most, the cell)
LOOPS = {
    "for": (1_000_000, "s = 0\nfor i in range({count}):\n    s += i\n"),
    "while": (1_000_000, "i = 0\nwhile i < {count}:\n    i += 1\n"),
    "three statements": (1_000_000, "s = t = 0\nfor i in range({count}):\n    s += i\n    t = s - i\n    u = t\n"),
    "three, while": (1_000_000, "i = t = 0\nwhile i < {count}:\n    i += 1\n    t = i - 1\n    u = t\n"),
    "nested": (1_000_000, "s = 0\nfor i in range({count} // 1000):\n    for j in range(1000):\n        s += j\n"),
    "branches": (
        1_000_000,
        "s = 0\nfor i in range({count}):\n    if i % 3 == 0:\n        s += 1\n"
        "    elif i % 3 == 1:\n        continue\n    else:\n        s -= 1\n",
    ),
    "function calls": (1_000_000, "def f(x):\n    return x + 1\ns = 0\nfor i in range({count}):\n    s = f(s)\n"),
    "try and with": (
        300_000,
        "import contextlib\nc = contextlib.nullcontext()\ns = 0\nfor i in range({count}):\n    with c:\n"
        "        try:\n            s += i\n        finally:\n            t = s\n",
    ),
    "comprehensions": (
        50_000,
        "for i in range({count}):\n    x = [j * i for j in range(20)]\n    y = sum(j for j in x if j % 2)\n",
    ),
    "a device's tensor": (
        30_000,
        "x = torch.ones(9, device='cuda')\ns = 0\nfor i in range({count}):\n    s += x.shape[0]\n",
    ),
}
FLAGS = ("", "--no-lines")
HEAD = f"{'loop':17} {'flags':10} {'iterations':>10} {'plain s':>9} {'measured s':>11} {'ratio':>6} {'rows':>6} {'MiB more':>9}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="how often each is run; the least time counts")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS), help="which of the three tables")
    options = parser.parse_args()
    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False
    shell.run_cell("import torch")
    shell.run_line_magic("load_ext", "gpumem_magic")
    shell.run_line_magic("gpumem_device", "T4")
    for _ in range(3):
        run(shell, "%%gpumem -q\nx = torch.ones(1, device='cuda')\n")
    for name in options.only:
        PARTS[name](shell, options.runs)
    return 0


def loops(shell: Any, runs: int) -> None:
    print(HEAD)
    for name, (most, loop) in LOOPS.items():
        for flags in FLAGS:
            for count in (10_000, 100_000, 1_000_000) if name in ("for", "while") else (most,):
                body = loop.format(count=count)
                plain, measured = best(shell, [body, f"%%gpumem -q -o found {flags}\n{body}"], runs)
                rows = len(shell.user_ns["found"].recording.checkpoints)
                more = memory(shell, f"%%gpumem -q {flags}\n{body}") - memory(shell, body)
                words = f"{plain:9.4f} {measured:11.4f} {measured / plain:6.2f} {rows:6} {more:9.2f}"
                print(f"{name:17} {flags or '-':10} {count:10,} {words}", flush=True)


def cells(shell: Any, runs: int) -> None:
    print(f"\n{'cell of':28} {'plain s':>9} {'measured s':>11} {'ms more per statement':>22}")
    for name, line in (
        ("assignments", "v{n} = {n}"),
        ("tensors on the device", "t{n} = torch.ones(4, device='cuda')"),
    ):
        for count in (100, 300, 1_000, 3_000):
            body = "\n".join(line.format(n=number) for number in range(count)) + "\n"
            plain, measured = best(shell, [body, f"%%gpumem -q\n{body}"], max(1, runs // 2))
            shell.run_cell("for _n in [n for n in globals() if n[1:].isdigit()]: del globals()[_n]")
            print(
                f"{count:5} {name:22} {plain:9.3f} {measured:11.3f} {(measured - plain) / count * 1e3:22.3f}",
                flush=True,
            )


def notebook(shell: Any, runs: int) -> None:
    print(f"\n{'notebook of':20} {'cell':36} {'plain ms':>9} {'measured ms':>12}")
    for count in (0, 10_000, 100_000, 1_000_000):
        run(shell, f"many = [{{'a': [n]}} for n in range({count})]\n")
        for body in ("x = 1\n", "x = torch.ones(4, device='cuda')\n", "x = torch.ones(4, device='cuda')\ndel x\n"):
            plain, measured = best(shell, [body, f"%%gpumem -q\n{body}"], runs)
            words = body.strip().replace("\n", "; ")
            print(f"{count:9,} {'dicts':10} {words:36} {plain * 1e3:9.2f} {measured * 1e3:12.2f}", flush=True)
            run(shell, "x = None\n")


PARTS: dict[str, Callable[[Any, int], None]] = {"loops": loops, "cells": cells, "notebook": notebook}


def run(shell: Any, text: str) -> None:
    with capture_output():
        shell.run_cell(text).raise_error()


def best(shell: Any, texts: list[str], runs: int) -> list[float]:
    """The least processor time of each, which run by turns."""
    found = [float("inf")] * len(texts)
    for _ in range(runs):
        for place, text in enumerate(texts):
            began = time.process_time()
            run(shell, text)
            found[place] = min(found[place], time.process_time() - began)
    return found


def memory(shell: Any, text: str) -> float:
    """In MiB."""
    tracemalloc.start()
    try:
        run(shell, text)
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    sys.exit(main())
