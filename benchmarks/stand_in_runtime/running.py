"""Runs cases and writes what each asked the allocator for, a line each: python running.py OUT < JSON.

JSON: {"cases": [[name, setup, expression], ...], "virtual": SPEC or null}, or "samples": FILE, "of": WHAT in place of the cases
(see samples.py); "names": [NAME, ...] runs only those, and "part": [3, 5] every fifth, from the third on. They run in one forked
child until one crashes, leaves the device with an error or takes too long, and in another from the next on. It runs in either
environment, and so needs nothing but PyTorch.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import re
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import samples
import torch

# Seconds that a child may take for one case, the imports before the first one with it.
PATIENCE = 120


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
    (nothing,) = forked(lambda: run(begin, [("pass", "None")]))
    if isinstance(nothing, str):
        sys.exit(nothing)
    first, step = asked.get("part", (0, 1))
    if "samples" in asked:
        every = wanted(asked, by_name(pickle.loads(Path(asked["samples"]).read_bytes())))[first::step]
        database = samples.database(asked["of"])
        found = until_all_are_done(lambda first: run_samples(begin, asked["of"], database, every[first:]), len(every))
    else:
        every = wanted(asked, [(name, code) for name, *code in asked["cases"]])[first::step]
        found = until_all_are_done(lambda first: run(begin, [code for _, code in every[first:]]), len(every))
    # (Appended in one piece: several processes may write the file.)
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for (name, _), answer in zip(every, found, strict=True):
        of_ways = {"forward": answer} if isinstance(answer, str) else answer
        for one, events in (
            [(f"{name} {way}", of_ways[way]) for way in of_ways] if "samples" in asked else [(name, answer)]
        ):
            os.write(file, f"{json.dumps([one, events])}\n".encode())


def wanted(asked: dict[str, Any], every: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Those that are asked for by name; a sample also by that of one of its ways."""
    if "names" not in asked:
        return every
    names = {part for name in asked["names"] for part in (name, name.rpartition(" ")[0])}
    return [one for one in every if one[0] in names]


def by_name(groups: list[samples.Group]) -> list[tuple[str, Any]]:
    """All samples, the first of each group before the second of any."""
    every = [
        (number, f"{name} {dtype} {number}", (name, dtype, *sample))
        for name, dtype, drawn in groups
        for number, sample in enumerate(drawn)
    ]
    return [(name, sample) for _, name, sample in sorted(every, key=lambda one: one[0])]


def until_all_are_done(work: Callable[[int], Iterable[Any]], count: int) -> Iterator[Any]:
    """What each of so many gives, in one child until that ends, and in another from the next on."""
    done = 0
    while done < count:
        for answer in forked(partial(work, done)):
            done += 1
            yield answer


def run_samples(
    begin: Callable[[], object], of: str, database: dict[str, Any], every: list[tuple[str, Any]]
) -> Iterator[Any]:
    """Nothing of what is not known here."""
    begin()
    gc.freeze()
    first_products()
    for _, (name, *sample) in every:
        answer: dict[str, Any] = {}
        way = "first"
        entry = database.get(name) or database.get(name.rpartition(".")[0])
        if entry is None:
            yield answer
            continue
        try:
            steps = samples.ways(of, entry, name, *sample)
            way, work = next(steps)
            while True:
                answer[way], result = recorded(work)
                way, work = steps.send(result)
        except StopIteration:
            pass
        except Exception as error:
            answer[way] = said(error)
        steps = work = result = None
        yield answer
        if not usable():
            return


def recorded(call: Callable[[], Any]) -> tuple[Any, Any]:
    """What a call asks for, and its result."""
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._record_memory_history(context=None)
    result = call()
    torch.cuda.synchronize()
    return events(torch.cuda.memory._snapshot()["device_traces"][0]), result


def forked(work: Callable[[], Iterable[Any]]) -> Iterator[Any]:
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
    rest = b""
    while in_time := bool(select.select([reading], [], [], PATIENCE)[0]):
        piece = os.read(reading, 1 << 16)
        if not piece:
            break
        *lines, rest = (rest + piece).split(b"\n")
        yield from map(json.loads, lines)
    os.close(reading)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if status:
        ended = f"crashed with signal {status & 127}" if status & 127 else "ended its process"
        yield ended if in_time else f"took more than {PATIENCE} s"


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error)[:150].split())}"


def run(begin: Callable[[], object], cases: list[Any]) -> Iterator[Any]:
    begin()
    gc.freeze()
    alone = is_fresh(cases[0])
    if not alone:
        first_products()
    for case in cases[:1] if alone else itertools.takewhile(lambda case: not is_fresh(case), cases):
        try:
            answer = asked_for(*case)
        except Exception as error:
            answer = said(error)
        os.environ.pop("STAND_IN_TOLD", None)
        yield answer
        as_at_first()
        if not usable():
            return


def is_fresh(case: Any) -> bool:
    """Whether it wants a process in which nothing ran before."""
    return bool(case[0].startswith("fresh;"))


def as_at_first() -> None:
    """Ends what a case turned on and did not get to turn off."""
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled(False)
    if hasattr(torch, "set_autocast_dtype"):
        torch.set_autocast_dtype("cuda", torch.half)
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.preferred_linalg_library("default")
    # (PyTorch's tests refuse to have the flags set, even to what they are.)
    for flags, name, usual in (
        (torch.backends.cudnn, "enabled", True),
        (torch.backends.cudnn, "benchmark", False),
        (torch.backends.cudnn, "deterministic", False),
        (torch.backends.cudnn, "allow_tf32", True),
        (torch.backends.cuda.matmul, "allow_tf32", False),
    ):
        if getattr(flags, name) != usual:
            setattr(flags, name, usual)


def usable() -> bool:
    """Whether the device takes more work: an assertion in a kernel leaves an error that stays."""
    gc.collect()
    try:
        torch.cuda.synchronize()
        # What no kernel writes is read as zero in fresh memory only.
        torch.cuda.empty_cache()
    except Exception:
        return False
    return True


def first_products() -> None:
    """The workspaces of cuBLAS and cuBLASLt come with the first product of a thread, and stay: here and in backward's."""
    one = torch.zeros(8, 8, device="cuda", requires_grad=True)
    torch.addmm(one[0], one, one)
    one.register_hook(lambda gradient: torch.addmm(gradient[0], gradient, gradient))
    torch.mm(one, one).sum().backward()


def asked_for(setup: str, expression: str) -> list[tuple[str, int]]:
    """What an expression asks for after its setup."""
    setup = setup.removeprefix("fresh;").strip()
    told = re.match(r"told=(\d+);", setup)
    scope = {
        "torch": torch, "F": torch.nn.functional, "r": zeros, "some": some, "rn": normal, "opt": optimizer, "d": "cuda",
        "h": torch.half, "bf": torch.bfloat16, "i8": torch.int64, "i4": torch.int32, "bool": torch.bool,
    }  # fmt: skip
    exec(setup[told.end() if told else 0 :].strip(), scope)
    if told:
        os.environ["STAND_IN_TOLD"] = told[1]
    return recorded(partial(exec, f"out = ({expression.strip()})", scope))[0]


def zeros(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device="cuda", requires_grad=grad)


def normal(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    """Random numbers, for what wants a matrix that can be inverted or values that differ."""
    return torch.randn(*shape, dtype=dtype, device="cuda", requires_grad=grad)


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
