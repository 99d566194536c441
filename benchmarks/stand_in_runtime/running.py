"""Runs every case in a forked child of its own and writes what each asked the allocator for: python running.py OUT < JSON.

JSON: {"cases": [[name, setup, expression], ...], "virtual": SPEC or null}. It runs in either environment, and so needs nothing
but PyTorch.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def main(out: str) -> None:
    asked = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    if asked["virtual"]:
        from gpumem_magic.virtual import gpu

        machine = gpu.turn_on(asked["virtual"])

        def begin() -> None:
            machine.process = machine.engine.process = os.getpid()

    else:
        begin = torch.cuda.init
    nothing = forked(begin, "pass", "None")
    if isinstance(nothing, str):
        sys.exit(nothing)
    answers = {name: forked(begin, *case) for name, *case in asked["cases"]}
    Path(out).write_text(json.dumps(answers), encoding="utf-8")


def forked(begin: Callable[[], object], setup: str, expression: str) -> Any:
    """The events of a case, or one line about its failure: nothing that it does reaches the next. CUDA is begun
    in the child only (`begin`): after a fork it would refuse to go on."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, json.dumps(run(begin, setup, expression)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(answer) if answer else f"crashed with signal {status & 127}"


def run(begin: Callable[[], object], setup: str, expression: str) -> Any:
    told = re.match(r"told=(\d+);", setup)
    scope = {
        "torch": torch, "F": torch.nn.functional, "r": zeros, "some": some, "d": "cuda", "h": torch.half, "bf": torch.bfloat16,
        "i8": torch.int64, "i4": torch.int32, "bool": torch.bool,
    }  # fmt: skip
    try:
        begin()
        exec(setup[told.end() if told else 0 :].strip(), scope)
        torch.cuda.memory._record_memory_history(context=None)
        if told:
            os.environ["STAND_IN_TOLD"] = told[1]
        exec(f"out = ({expression.strip()})", scope)
        torch.cuda.synchronize()
        return events(torch.cuda.memory._snapshot()["device_traces"][0])
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error)[:150].split())}"


def zeros(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device="cuda", requires_grad=grad)


def some(count: int, *shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """So many ones, then zeros. Made on the host: there is no kernel to make them."""
    host = torch.zeros(*shape, dtype=dtype)
    host.view(-1)[:count] = 1
    return host.to("cuda")


def events(trace: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """("+", bytes) for an allocation, ("-", its number) where a block is given back."""
    found: list[tuple[str, int]] = []
    live: dict[int, int] = {}
    count = 0
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = count
            count += 1
            found.append(("+", event["size"]))
        elif event["action"] == "free_requested" and event["addr"] in live:
            found.append(("-", live.pop(event["addr"])))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
