"""Runs cases and writes what each asked the allocator for: python running.py OUT < JSON.

JSON: {"cases": [[name, setup, expression], ...], "virtual": SPEC or null}, or "samples": FILE, "of": WHAT in place of the cases
(see samples.py). They run in one forked child until one crashes, and in another from the next on. It runs in either
environment, and so needs nothing but PyTorch.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import samples
import torch


def main(out: str) -> None:
    asked = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    if "samples" in asked:
        database = samples.database(asked["of"])
    if asked["virtual"]:
        from gpumem_magic.virtual import gpu

        machine = gpu.turn_on(asked["virtual"])

        def begin() -> None:
            machine.process = machine.engine.process = os.getpid()

    else:
        begin = torch.cuda.init
    (nothing,) = forked(lambda: run(begin, [("pass", "None")]))
    if isinstance(nothing, str):
        sys.exit(nothing)
    if "samples" in asked:
        answers = sampled(begin, asked["of"], database, pickle.loads(Path(asked["samples"]).read_bytes()))
    else:
        cases = asked["cases"]
        codes = [code for _, *code in cases]
        found = until_all_are_done(lambda first: run(begin, codes[first:]), len(cases))
        answers = {name: answer for (name, *_), answer in zip(cases, found, strict=True)}
    Path(out).write_text(json.dumps(answers), encoding="utf-8")


def sampled(
    begin: Callable[[], object], of: str, database: dict[str, Any], groups: list[samples.Group]
) -> dict[str, Any]:
    """The events of all that is run of each sample."""
    every = [
        (f"{name} {dtype} {number}", (of, entry, name, dtype, *sample))
        for name, dtype, drawn in groups
        if (entry := database.get(name) or database.get(name.rpartition(".")[0]))
        for number, sample in enumerate(drawn)
    ]
    answers: dict[str, Any] = {}
    found = until_all_are_done(lambda first: run_samples(begin, every[first:]), len(every))
    for (name, _), answer in zip(every, found, strict=True):
        of_ways = {"forward": answer} if isinstance(answer, str) else answer
        answers |= {f"{name} {way}": events for way, events in of_ways.items()}
    return answers


def until_all_are_done(work: Callable[[int], Iterable[Any]], count: int) -> list[Any]:
    """What each of so many gives, in one child until one crashes, and in another from the next on."""
    answers: list[Any] = []
    while len(answers) < count:
        answers += forked(partial(work, len(answers)))
    return answers


def run_samples(begin: Callable[[], object], every: list[tuple[str, Any]]) -> Iterator[Any]:
    begin()
    first_products()
    for _, sample in every:
        answer: dict[str, Any] = {}
        way = "first"
        try:
            steps = samples.ways(*sample)
            way, work = next(steps)
            while True:
                answer[way], result = recorded(work)
                way, work = steps.send(result)
        except StopIteration:
            pass
        except Exception as error:
            answer[way] = said(error)
        steps = work = result = None
        torch.cuda.empty_cache()
        yield answer


def recorded(call: Callable[[], Any]) -> tuple[Any, Any]:
    """What a call asks for, and its result."""
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._record_memory_history(context=None)
    result = call()
    torch.cuda.synchronize()
    return events(torch.cuda.memory._snapshot()["device_traces"][0]), result


def forked(work: Callable[[], Iterable[Any]]) -> list[Any]:
    """What a child's work yields, and a last line if it ended by a failure. CUDA is begun in the child only: after a fork it
    would refuse to go on."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            with os.fdopen(writing, "w") as pipe:
                try:
                    for answer in work():
                        print(json.dumps(answer), file=pipe, flush=True)
                except Exception as error:
                    print(json.dumps(said(error)), file=pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answers = [json.loads(line) for line in pipe]
    _, status = os.waitpid(child, 0)
    if not status:
        return answers
    return [*answers, f"crashed with signal {status & 127}" if status & 127 else "ended its process"]


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error)[:150].split())}"


def run(begin: Callable[[], object], cases: list[Any]) -> Iterator[Any]:
    begin()
    first_products()
    for case in cases:
        try:
            answer = asked_for(*case)
        except Exception as error:
            answer = said(error)
        os.environ.pop("STAND_IN_TOLD", None)
        # What a case turned on, and did not get to turn off.
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled(False)
        torch.use_deterministic_algorithms(False)
        if not torch.backends.cudnn.enabled:
            torch.backends.cudnn.enabled = True
        # What no kernel writes is read as zero in fresh memory only.
        torch.cuda.empty_cache()
        yield answer


def first_products() -> None:
    """cuBLAS's workspaces come with the first product of a thread, and stay."""
    one = torch.zeros(8, 8, device="cuda", requires_grad=True)
    torch.mm(one, one).sum().backward()


def asked_for(setup: str, expression: str) -> list[tuple[str, int]]:
    """What an expression asks for after its setup."""
    told = re.match(r"told=(\d+);", setup)
    scope = {
        "torch": torch, "F": torch.nn.functional, "r": zeros, "some": some, "opt": optimizer, "d": "cuda", "h": torch.half,
        "bf": torch.bfloat16, "i8": torch.int64, "i4": torch.int32, "bool": torch.bool,
    }  # fmt: skip
    exec(setup[told.end() if told else 0 :].strip(), scope)
    if told:
        os.environ["STAND_IN_TOLD"] = told[1]
    return recorded(partial(exec, f"out = ({expression.strip()})", scope))[0]


def zeros(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device="cuda", requires_grad=grad)


def some(count: int, *shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """So many ones, then zeros. Made on the host: there is no kernel to make them."""
    host = torch.zeros(*shape, dtype=dtype)
    host.view(-1)[:count] = 1
    return host.to("cuda")


def optimizer(
    name: str, sizes: Any = ((100, 100), (100,), (3, 7), (1,)), dtype: Any = None, others: Any = None, **options: Any
) -> Any:
    """An optimizer whose parameters have gradients. others: the dtype of every other parameter."""
    dtypes = [dtype, others or dtype] * len(sizes)
    parameters = [
        torch.nn.Parameter(torch.zeros(*size, dtype=of, device="cuda")) for size, of in zip(sizes, dtypes, strict=False)
    ]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return getattr(torch.optim, name)(parameters, **options)


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
