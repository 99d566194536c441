"""PyTorch's own tests of CUDA, run over a virtual GPU that computes: what fails there, and does not fail on the CPU?

    python benchmarks/pytorchs_tests.py --tests DIR [--card T4] [--values real] [--names EXPRESSION] [--show] FILE ...

DIR is the folder `test` of a checkout of PyTorch (of any version near the one that is installed), and FILE a test file in it
(`test_torch.py`). Tests whose names have "cuda" run, or those that EXPRESSION (pytest's `-k`) chooses, each for at most a
minute. Those that fail run once more on the CPU, under the name that they have there: what fails there as well is of the
versions or of the computer. Tests that are for CUDA alone have no such name, and are counted by themselves. --show prints each
that fails here alone, with its error. Needs pytest-timeout and expecttest; `conftest.py` and pytest's settings beside the tests
are not read.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_SECONDS = "60"
_HELPERS = ("cuda", "device_type", "dtype", "methods_invocations", "mkldnn", "modules", "nn", "optimizers", "utils")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--tests", type=Path, required=True, metavar="DIR")
    parser.add_argument("--card", default="T4")
    parser.add_argument("--values", default="real", choices=("real", "auto", "stand-in"))
    parser.add_argument("--names", default="CUDA or cuda", metavar="EXPRESSION")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is not None:
        _run_inside(given)
    print("| tests | passed | failed | of these not on the CPU | for CUDA alone |\n|---|---|---|---|---|")
    for file in given.files:
        _compare(given, file)


def _compare(given: argparse.Namespace, file: str) -> None:
    found = _run(given, f"{given.card},values={given.values}", file, given.names)
    failed = {name: words for name, (outcome, words) in found.items() if outcome == "failed"}
    hosts = {name: name.replace("CUDA::", "CPU::").replace("_cuda", "_cpu") for name in failed}
    alone = [name for name, other in hosts.items() if "CPU::" not in other]
    asked = " or ".join(sorted({other.rpartition("::")[2] for other in hosts.values() if "CPU::" in other}))
    on_host = _run(given, "cpu", file, asked) if asked else {}
    ours = [name for name, other in hosts.items() if on_host.get(other, ("", ""))[0] == "passed"]
    passed = sum(outcome == "passed" for outcome, _ in found.values())
    print(f"| {file} | {passed:,} | {len(failed):,} | {len(ours):,} | {len(alone):,} |", flush=True)
    for name in (*ours, *alone) if given.show else ():
        print(f"    {name}\n        {failed[name]}")


def _run(given: argparse.Namespace, device: str, file: str, names: str) -> dict[str, tuple[str, str]]:
    """Each test's outcome, and the first words of its error, from a process of its own."""
    command = [sys.executable, __file__, "--tests", str(given.tests), "--inside", device, "--names", names, file]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace")
    line = next((line for line in reversed(process.stdout.splitlines()) if line.startswith("{")), None)
    if line is None:
        raise SystemExit(f"{file} did not end: {process.stdout[-600:]}{process.stderr[-600:]}")
    found: dict[str, tuple[str, str]] = json.loads(line)
    return found


class _Outcomes:
    """What pytest tells of each test."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.failed:
            said = [
                line[4:] for line in str(report.longrepr).splitlines() if line.startswith("E  ") and line[4:].strip()
            ]
            self.found[report.nodeid] = report.outcome, said[0][:300] if report.failed and said else ""


def _run_inside(given: argparse.Namespace) -> None:
    os.chdir(given.tests)
    sys.path.insert(0, os.getcwd())
    if given.inside != "cpu":
        from gpumem_magic.virtual import gpu

        gpu.turn_on(given.inside)
    import pytest

    for name in _HELPERS:
        _stand_in(f"torch.testing._internal.common_{name}")
    utils: Any = importlib.import_module("torch.testing._internal.common_utils")
    # (As their own runner has it.)
    utils.GRAPH_EXECUTOR = utils.ProfilingMode.PROFILING
    outcomes = _Outcomes()
    options = ["-q", "--noconftest", "-c", os.devnull, "-p", "no:cacheprovider", f"--timeout={_SECONDS}", "--tb=short"]
    pytest.main([given.files[0], *options, "-k", given.names], plugins=[outcomes])
    print("\n" + json.dumps(outcomes.found), flush=True)
    # (Threads that a test has left would be waited for.)
    os._exit(0)


def _stand_in(name: str) -> None:
    """What tests of another version look for in PyTorch's helpers: a decorator that changes nothing, or a flag that says no."""
    module: Any = importlib.import_module(name)

    def missing(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if attribute.endswith("_tests"):
            return []
        if not attribute[0].islower():
            return False
        return lambda *args, **_: args[0] if args and callable(args[0]) else lambda one: one

    module.__getattr__ = missing


if __name__ == "__main__":
    main()
