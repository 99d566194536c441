"""What a cell of plain Python costs under ``%%gpumem``: time and rows over a loop's length, and time over the cell's length.

    python benchmarks/plain_python.py [--runs 3]

Each figure is the best of the runs. The first table is about loops of cheap statements, with a row for each statement and with
``--no-lines``; the second about cells of so many assignments, and of so many tensors on a virtual device.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

LOOPS = {
    "for": "s = 0\nfor i in range({count}):\n    s += i\n",
    "while": "i = 0\nwhile i < {count}:\n    i += 1\n",
    "nested": "s = 0\nfor i in range({count} // 1000):\n    for j in range(1000):\n        s += j\n",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="how often each is run; the best counts")
    runs = parser.parse_args().runs
    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False
    shell.run_cell("import torch")
    shell.run_line_magic("load_ext", "gpumem_magic")
    shell.run_line_magic("gpumem_device", "T4")
    run(shell, "%%gpumem -q\nx = 1\n")
    print(
        f"{'loop':8} {'flags':11} {'iterations':>10} {'plain s':>9} {'measured s':>11} {'ratio':>6} {'rows':>6} {'MiB more':>9}"
    )
    for name, loop in LOOPS.items():
        for flags in ("", "--no-lines"):
            for count in (10_000, 100_000, 1_000_000):
                body = loop.format(count=count)
                plain = best(shell, body, runs)
                measured = best(shell, f"%%gpumem -q -o found {flags}\n{body}", runs)
                rows = len(shell.user_ns["found"].recording.checkpoints)
                more = memory(shell, f"%%gpumem -q {flags}\n{body}") - memory(shell, body)
                words = f"{plain:9.4f} {measured:11.4f} {measured / plain:6.2f} {rows:6} {more:9.2f}"
                print(f"{name:8} {flags or '-':11} {count:10,} {words}", flush=True)
    print(f"\n{'cell of':28} {'plain s':>9} {'measured s':>11} {'ms per statement':>17}")
    for count in (250, 500, 1_000, 2_000):
        for name, line in (
            ("assignments", "v{n} = {n}"),
            ("tensors on the device", "t{n} = torch.ones(4, device='cuda')"),
        ):
            body = "\n".join(line.format(n=number) for number in range(count)) + "\n"
            plain = best(shell, body, 1)
            measured = best(shell, f"%%gpumem -q\n{body}", runs)
            shell.run_cell("for _n in [n for n in globals() if n[1:].isdigit()]: del globals()[_n]")
            print(
                f"{count:5} {name:22} {plain:9.3f} {measured:11.3f} {(measured - plain) / count * 1e3:17.3f}",
                flush=True,
            )
    return 0


def run(shell: Any, text: str) -> None:
    with capture_output():
        shell.run_cell(text).raise_error()


def best(shell: Any, text: str, runs: int) -> float:
    found = []
    for _ in range(runs):
        began = time.perf_counter()
        run(shell, text)
        found.append(time.perf_counter() - began)
    return min(found)


def memory(shell: Any, text: str) -> float:
    """The highest use of memory by Python's objects while it runs, in MiB; at most 100,000 iterations, since this takes long."""
    tracemalloc.start()
    try:
        run(shell, text.replace("1000000", "100000"))
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    sys.exit(main())
