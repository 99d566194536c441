"""The places in PyTorch without a public hook where the beginning and end of a phase can be observed.

Each function replaces attributes through `Patches`, so that they come back, and raises RuntimeError, naming what is missing,
where a PyTorch has no such place.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.profiler import record_function
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as nn_optimizer
from torch.utils.hooks import RemovableHandle

from gpumem_magic import private
from gpumem_magic.patching import Patches

Around = Callable[[], Callable[[bool], None]]
"""Called at the beginning; what it returns is called at the end with whether an exception left."""


def watch_backward(patches: Patches, begins: Around) -> None:
    """`begins` around every run of the autograd engine (``backward`` and ``grad``), nested ones too; not around those of a
    compiler that traces a program, which compute nothing."""
    private.require("recording.torch_seams:watch_backward")
    for place in (torch.autograd.graph, torch.autograd):
        original = vars(place)["_engine_run_backward"]
        patches.set(place, "_engine_run_backward", _around(original, uncompiled(lambda: _begun(begins))))


def _begun(begins: Around) -> Callable[[bool], None]:
    return not_watched if _traces() else uncompiled(begins())


def _traces() -> bool:
    return torch._guards.TracingContext.try_get() is not None


def uncompiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same where the compiler is at work between two graphs: it takes none of our own frames for the program's."""
    frames = torch._C._dynamo.eval_frame

    def called(*args: Any) -> Any:
        before = frames.set_eval_frame(None)
        try:
            return call(*args)
        finally:
            frames.set_eval_frame(before)

    return passed_over(called)


def passed_over(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiler does not take the function's frames for the program's; those of what it calls, it may."""
    frames = torch._C._dynamo.eval_frame
    action = frames._FrameAction
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
    return function


def watch_recomputation(patches: Patches, begins: Around) -> None:
    """`begins` around what activation checkpointing computes again inside a backward.

    With ``use_reentrant=True`` it also covers the nested backward that follows; the caller sees that one begin.
    """
    private.require("recording.torch_seams:watch_recomputation")
    hook, function = torch.utils.checkpoint._recomputation_hook, torch.utils.checkpoint.CheckpointFunction
    _watch_context(patches, hook, lambda _: begins(), key="_gpumem_magic_recomputation")
    original = function.backward
    patches.set(function, "backward", staticmethod(_around(original, begins)))


def watch_autocast(patches: Patches, begins: Around) -> None:
    """`begins` around each time that autocast lets go of its copies of weights: the outermost of its blocks ends."""
    patches.set(torch, "clear_autocast_cache", _around(torch.clear_autocast_cache, begins))


def watch_ranges(patches: Patches, begins: Callable[[str], Callable[[bool], None]]) -> None:
    """`begins` with the name of every ``record_function`` range. A C++ range is not seen; nor are torch.compile's own, which are
    Python's in 2.9."""
    if "__enter__" not in vars(record_function) or "__exit__" not in vars(record_function):
        raise RuntimeError(f"torch {torch.__version__} has another record_function: ranges are not seen")

    def begins_one(one: Any) -> Callable[[bool], None]:
        name = str(one.name)
        return not_watched if name.endswith("(dynamo_timed)") else begins(name)

    _watch_context(patches, record_function, begins_one, key="_gpumem_magic_range")


def watch_compiled(patches: Patches, begins: Around) -> None:
    """`begins` around every call of what Inductor compiled, also of graphs from before.

    Inductor is large: where nobody has imported it, its place is taken when the program first asks for it."""
    name = "torch._inductor.output_code"

    def install() -> None:
        graph = importlib.import_module(name).CompiledFxGraph
        patches.set(graph, "__call__", _around(graph.__call__, begins))

    if name in sys.modules:
        install()
        return
    first: Any = torch._TorchCompileInductorWrapper
    original = first.__call__
    asked: list[bool] = []

    def compile_first(*args: Any, **kwargs: Any) -> Any:
        if not asked:
            asked.append(True)
            install()
        return original(*args, **kwargs)

    patches.set(first, "__call__", compile_first)


def not_watched(failed: bool) -> None:
    """The end of what was left out."""


def remove_hooks(owner: object, handles: list[Any]) -> None:
    """Removes an object's global hooks altogether: a handle may leave the hook's number behind in PyTorch's private tables,
    and an interrupt may have lost a handle. May be called twice."""
    while handles:
        handles[-1].remove()
        for name in ("_global_forward_hooks_with_kwargs", "_global_forward_hooks_always_called"):
            getattr(nn_module, name, {}).pop(handles[-1].id, None)
        handles.pop()
    tables = _tables_of_hooks(nn_module, nn_optimizer)
    for number in {
        number for table in tables for number, hook in table.items() if getattr(hook, "__self__", None) is owner
    }:
        for table in tables:
            table.pop(number, None)


@contextmanager
def uncounted_hooks() -> Iterator[None]:
    """Hooks that are registered here have numbers from far away: the program's own are counted as ever."""
    count = RemovableHandle.next_id
    RemovableHandle.next_id = max(count, next(_numbers))
    try:
        yield
    finally:
        RemovableHandle.next_id = count


# Each hook of a process has another one.
_numbers = itertools.count(1 << 48, 1 << 8)


def _tables_of_hooks(*places: Any) -> list[dict[int, Any]]:
    """PyTorch's private tables of global hooks, by number. All numbers come from one counter."""
    return [
        table
        for place in places
        for name, table in vars(place).items()
        if name.startswith("_global_") and isinstance(table, dict)
    ]


def be_quiet_about_hooks(patches: Patches) -> None:
    """PyTorch warns the user of a compiled module about global hooks; of ours, which do nothing to it, it need not.

    Where a PyTorch has no such question, nothing is done.
    """
    if not callable(getattr(nn_module, "_has_any_global_hook", None)):
        return
    tables = _tables_of_hooks(nn_module)

    def has_others() -> bool:
        ours = {number for table in tables for number, hook in table.items() if _is_ours(hook)}
        return any(number not in ours for table in tables for number in table)

    patches.set(nn_module, "_has_any_global_hook", has_others)


def _is_ours(hook: object) -> bool:
    owner = type(getattr(hook, "__self__", None))
    return owner.__module__.partition(".")[0] == __name__.partition(".")[0]


def _around(original: Callable[..., Any], begins: Around) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # one frame less in the user's traceback, where the viewer honours it
        ended = begins()
        failed = True
        try:
            result = original(*args, **kwargs)
            failed = False
            return result
        finally:
            ended(failed)

    return passed_over(watched)


def _watch_context(
    patches: Patches, owner: type[Any], begins: Callable[[Any], Callable[[bool], None]], *, key: str
) -> None:
    """Puts `begins` behind a context manager's entry, and what it returns before its exit."""
    enter: Callable[..., Any] = owner.__enter__
    leave: Callable[..., Any] = owner.__exit__

    def watched_enter(self: Any) -> Any:
        result = enter(self)
        vars(self).setdefault(key, []).append(begins(self))
        return result

    def watched_exit(self: Any, kind: Any, error: Any, traceback: Any) -> Any:
        # A manager that was entered before we came has nothing to end.
        waiting = vars(self).get(key)
        if waiting:
            waiting.pop()(kind is not None)
        return leave(self, kind, error, traceback)

    patches.set(owner, "__enter__", watched_enter)
    patches.set(owner, "__exit__", watched_exit)
