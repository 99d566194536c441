"""The examples in PyTorch's documentation, with new tensors on a virtual GPU: does each statement show what the host shows?

    python benchmarks/docstrings.py [--card T4] [--values real] [--show]

Every docstring of PyTorch's public modules that has examples (``>>>``) runs statement by statement, once on the host and once
after ``torch.set_default_device("cuda")``, each time from the same seeds, in a process of its own. What a statement shows and the
class of the error that it raises are compared; words for the device and spaces are left out of the comparison, and so is what
the host cannot do because it has no CUDA. --show prints each statement that differs. Some always will: memory that nobody wrote,
what CUDA refuses, what asks for the device itself.
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import importlib
import inspect
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

_MODULES = """
    torch torch.Tensor torch.nn torch.nn.functional torch.nn.init torch.nn.utils torch.nn.utils.rnn torch.nn.utils.prune
    torch.nn.utils.parametrize torch.nn.utils.parametrizations torch.nn.attention torch.nn.attention.flex_attention torch.nn.grad
    torch.linalg torch.fft torch.special torch.distributions torch.optim torch.optim.lr_scheduler torch.optim.swa_utils torch.func
    torch.sparse torch.nested torch.masked torch.autograd torch.autograd.functional torch.autograd.forward_ad torch.autograd.graph
    torch.autograd.function torch.autograd.profiler torch.utils.data torch.utils.checkpoint torch.utils.dlpack torch.utils.hooks
    torch.utils.benchmark torch.utils.flop_counter torch.signal.windows torch.amp torch.random torch.cuda torch.accelerator
    torch.overrides torch.library torch.futures torch.fx torch.jit torch.profiler torch.serialization torch.storage torch.compiler
    torch.export torch.monitor
"""
# An example may wait for ever, for a server that is not there.
_SECONDS = 20
_NO_CUDA = re.compile(
    "not compiled with CUDA|not linked with support|Cannot get CUDA gen|accelerator (device )?when none|Accelerator exp"
)


class Shown(NamedTuple):
    """A statement, with what it showed and the error that it raised."""

    statement: str
    text: str
    error: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--card", default="T4")
    parser.add_argument("--values", default="real", choices=("real", "auto", "stand-in"))
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is not None:
        json.dump(_run_all(given.inside), sys.stdout)
        return
    on_host, on_card = _in_a_process("cpu"), _in_a_process(f"{given.card},values={given.values}")
    same = others = 0
    for name, statements in on_host.items():
        for its, ours in zip(statements, on_card.get(name, ()), strict=False):
            if _NO_CUDA.search(its.error):
                # What follows builds on it.
                break
            if _without_device(its) == _without_device(ours):
                same += 1
                continue
            others += 1
            if given.show:
                print(
                    f"{name}\n    {its.statement.strip()}\n    host: {its.text}{its.error}\n    here: {ours.text}{ours.error}"
                )
    print(f"{len(on_card)} docstrings, {same:,} of {same + others:,} statements the same")


def _in_a_process(device: str) -> dict[str, list[Shown]]:
    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(__file__).resolve().parents[1])
        around = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, __file__, "--inside", device]
        ran = subprocess.run(command, cwd=folder, env=around, capture_output=True, text=True, errors="replace")
    if ran.returncode:
        raise SystemExit(f"{device} did not end: {ran.stderr[-600:]}")
    found: dict[str, list[list[str]]] = json.loads(ran.stdout.splitlines()[-1])
    return {name: [Shown(*one) for one in shown] for name, shown in found.items()}


def _without_device(shown: Shown) -> tuple[str, str]:
    text = re.sub(r",\s*device='(cuda:0|cpu)'", "", shown.text)
    return re.sub(r"\s+", "", text).replace(",)", ")"), shown.error.partition(":")[0]


def _run_all(device: str) -> dict[str, list[Shown]]:
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _ring)
    found = dict(_docstrings())
    if device != "cpu":
        from gpumem_magic.virtual import gpu

        gpu.turn_on(device)
    return {name: _run(text, name, device) for name, text in found.items()}


def _ring(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def _display(value: object) -> None:
    if value is not None:
        print(repr(value))


def _docstrings() -> Iterator[tuple[str, str]]:
    """Those that have examples, by name; each text once."""
    seen = set()
    for place in _MODULES.split():
        home, _, last = place.rpartition(".")
        try:
            module = importlib.import_module(place) if last != "Tensor" else importlib.import_module(home).Tensor
        except ImportError:
            continue
        for name, value in sorted(vars(module).items() if place == "torch" else inspect.getmembers_static(module)):
            members = sorted(vars(value).items()) if inspect.isclass(value) else ()
            for path, one in ((name, value), *((f"{name}.{member}", its) for member, its in members)):
                text = None if path.rpartition(".")[2].startswith("_") else _documentation(one)
                if text is not None and ">>>" in text and text not in seen:
                    seen.add(text)
                    yield f"{place}.{path}", text


def _documentation(value: object) -> str | None:
    with contextlib.suppress(Exception):
        return inspect.getdoc(value)
    return None


def _run(text: str, name: str, device: str) -> list[Shown]:
    import numpy as np
    import torch

    try:
        examples = doctest.DocTestParser().get_examples(text)
    except ValueError:
        return []
    torch.set_default_device(None if device == "cpu" else "cuda")
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    namespace: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "__name__": "__main__"}
    return [_shown(example.source, name, namespace) for example in examples]


def _shown(statement: str, name: str, namespace: dict[str, Any]) -> Shown:
    shown, error, hook = io.StringIO(), "", sys.displayhook
    if signal.getsignal(signal.SIGALRM) is _ring:
        signal.alarm(_SECONDS)
    # (Python's own leaves a value in `builtins`.)
    sys.displayhook = _display
    try:
        with (
            contextlib.redirect_stdout(shown),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            exec(compile(statement, f"<{name}>", "single"), namespace)
    except BaseException as raised:
        error = f"{type(raised).__name__}: {str(raised)[:200]}"
    finally:
        signal.alarm(0)
        sys.displayhook = hook
    return Shown(statement, re.sub("0x[0-9a-f]+", "0x", shown.getvalue()), error)


if __name__ == "__main__":
    main()
