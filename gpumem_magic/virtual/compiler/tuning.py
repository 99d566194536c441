"""The trials that a kernel of Inductor's goes through when it is first launched: each promising way to launch it is timed.

What they take is a buffer with which the card's cache is emptied before each run, and copies of what the kernel changes in
place. After `CachingAutotuner.bench` (`torch/_inductor/runtime/triton_heuristics.py`, the same in 2.6 to 2.13). How many ways
there are is asked of the heuristics themselves, which decide it from the kernel's decorator; with one there is no trial.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from gpumem_magic import private
from gpumem_magic.virtual.engine.device import MachineForTorch
from gpumem_magic.virtual.engine.modes import TRIAL, origin
from gpumem_magic.virtual.engine.tensors import VirtualTensor

# Triton's own trials, which Inductor used before 2.7 (`get_empty_cache_for_benchmark` of its driver). Since then the buffer is as
# large as the card's cache (`InductorBenchmarker.benchmark_gpu` in `torch/_inductor/runtime/benchmarking.py`).
_TRITONS_BUFFER = 256 << 20
_INDUCTORS_SINCE = (2, 7)


def leave_out_trials() -> None:
    """From now on, in this process, compiled code takes what it takes in later runs than the first. It is never undone."""
    Tuning.left_out = True


@dataclass
class Tuning:
    """`kernels`: how many were tried. Alike ones are tried once: the result is kept on disk."""

    machine: MachineForTorch
    left_out: ClassVar[bool] = False
    kernels: int = 0
    buffer: int = 0
    _tried: set[str] = field(default_factory=set)

    def first_launch(self, source: str, args: tuple[Any, ...]) -> None:
        """Takes what the trials of a kernel take, and gives it back."""
        tensors = [arg for arg in args if isinstance(arg, VirtualTensor)]
        if source in self._tried or not tensors:
            return
        self._tried.add(source)
        ways, changed, spares_memory = _ways(source)
        if ways < 2:
            return
        self.kernels += 1
        device = tensors[0].device.index or 0
        self.buffer = self.buffer_of(device)
        if self.left_out:
            return
        written = [args[place] for place in changed if place < len(args) and isinstance(args[place], VirtualTensor)]
        sizes = [_reached(tensor) for tensor in written]
        engine = self.machine.engine
        for _ in range(ways):
            copied = self._copied(sizes) if spares_memory else sizes
            with engine.uninterrupted, engine.lock, origin(TRIAL):
                # Once to see that it runs, and in turns with the buffer being written.
                with engine.scratch(device, *copied):
                    pass
                with engine.scratch(device, self.buffer), engine.scratch(device, *copied):
                    pass

    @staticmethod
    def _copied(sizes: list[int]) -> list[int]:
        """Those copied on the device: what would raise the peak, as it is now, is copied to the host. (The buffer raises it, too,
        so that a second way may be given what the first was not.)"""
        room = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        copied = []
        for size in sizes:
            if size <= room:
                copied.append(size)
                room -= size
        return copied

    def buffer_of(self, device: int) -> int:
        """Bytes of what the card's cache is emptied with."""
        if self.machine.engine.memory.torch_version(device) < _INDUCTORS_SINCE:
            return _TRITONS_BUFFER
        return self.machine.devices[device].model.l2_cache_bytes


class _Config:
    """What Triton's class of that name, and Inductor's below it, are to the heuristics, where Triton is not installed."""

    def __init__(self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, **others: Any) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages
        vars(self).update(others)


class _DecoratorNames(dict[str, Any]):
    """What a kernel's decorator may name. What decides nothing here is nothing."""

    def __missing__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _reached(tensor: VirtualTensor) -> int:
    """Bytes from a tensor's first number to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.itemsize if tensor.numel() else 0


def _ways(source: str) -> tuple[int, list[int], bool]:
    """In how many ways a kernel would be launched for a trial, which of its arguments it changes in place, and whether copies of
    these may not raise the peak: not so in a forward pass that a backward follows. One way where the heuristics are others than
    those that were read."""
    if private.lacking("virtual.compiler.tuning"):
        return 1, [], True
    heuristics = importlib.import_module("torch._inductor.runtime.triton_heuristics")
    called = next((_decorator(node) for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)), None)
    if called is None:
        return 1, [], True
    hints = importlib.import_module("torch._inductor.runtime.hints")
    names = _DecoratorNames(vars(hints), triton_heuristics=heuristics, set=set, dict=dict, __file__="")
    asked = {one.arg: one.value for one in called.keywords if one.arg}
    given = {name: eval(compile(ast.Expression(value), "", "eval"), {}, names) for name, value in asked.items()}
    inductors, signature = given.get("inductor_meta") or {}, list((given.get("triton_meta") or {}).get("signature", ()))
    if inductors.get("deterministic") or inductors.get("are_deterministic_algorithms_enabled"):
        return 1, [], True
    changed = [signature.index(name) for name in inductors.get("mutated_arg_names", ()) if name in signature]
    with _only_configs(heuristics):
        configs = getattr(heuristics, ast.unparse(called.func).rpartition(".")[2])(**given)
    return len(heuristics.unique_configs(configs)), changed, bool(inductors.get("optimize_mem", True))


def _decorator(function: ast.FunctionDef) -> ast.Call | None:
    return next(
        (
            one
            for one in function.decorator_list
            if isinstance(one, ast.Call) and ast.unparse(one.func).startswith("triton_heuristics.")
        ),
        None,
    )


@contextmanager
def _only_configs(heuristics: Any) -> Iterator[None]:
    """The heuristics answer with their list, and need no Triton for it."""

    def listed(size_hints: Any, configs: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        return configs

    replaced: list[tuple[Any, str, Any]] = [(heuristics, "cached_autotune", listed)]
    if heuristics.Config is object:
        replaced += [(heuristics, "Config", _Config), (heuristics, "InductorConfig", _Config)]
        replaced.append((heuristics.triton, "Config", _Config))
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
