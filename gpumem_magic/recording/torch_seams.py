"""The places in PyTorch without a public hook where the beginning and end of a phase can be observed.

Each function replaces attributes through `Patches`, so that they come back, and raises RuntimeError, naming what is missing,
where a PyTorch has no such place.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.profiler import record_function
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as nn_optimizer
from torch.utils.hooks import RemovableHandle

from gpumem_magic import private
from gpumem_magic.looks import objects, tensors
from gpumem_magic.looks.objects import locals_of
from gpumem_magic.patching import Patches

# How PyTorch names its range around an optimizer's step; what follows is the class.
STEP_RANGE = "Optimizer.step#"
# From the range's beginning to the step that it is around, with what watches ranges in between.
_FRAMES_TO_STEP = 8
_HOOKS_OF_A_MODULE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
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


def passed_over(function: Callable[..., Any], *, with_all_below: bool = False) -> Callable[..., Any]:
    """The compiler does not take the function's frames for the program's; those of what it calls, it may, unless
    `with_all_below`."""
    frames = torch._C._dynamo.eval_frame
    action = frames._FrameAction
    below = action.SKIP if with_all_below else action.DEFAULT
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(action.SKIP, below))
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


def watch_workspaces(patches: Patches, begins: Around) -> None:
    """`begins` around each time that a program has PyTorch give cuBLAS's workspaces back."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        patches.set(torch._C, "_cuda_clearCublasWorkspaces", _around(clear, begins))


# How the range begins that 2.9 puts around each run of a compiled graph (``CompiledFxGraph.__call__``).
_COMPILED = "## Call CompiledFxGraph"


def watch_ranges(patches: Patches, begins: Callable[[str], Callable[[bool], None]]) -> None:
    """`begins` with the name of every ``record_function`` range. A C++ range is not seen; nor are torch.compile's own, which are
    Python's in 2.9."""
    if "__enter__" not in vars(record_function) or "__exit__" not in vars(record_function):
        raise RuntimeError(f"torch {torch.__version__} has another record_function: ranges are not seen")

    def begins_one(one: Any) -> Callable[[bool], None]:
        name = str(one.name)
        return not_watched if name.endswith("(dynamo_timed)") or name.startswith(_COMPILED) else begins(name)

    _watch_context(patches, record_function, begins_one, key="_gpumem_magic_range")


def watch_steps(patches: Patches, begins: Callable[[torch.optim.Optimizer], Callable[[bool], None]]) -> None:
    """`begins` with the optimizer around every step: the range that PyTorch puts around it (`Optimizer.profile_hook_step`).

    Not by PyTorch's global hooks of optimizers: a compiled step would take them for a part of the program, and be compiled
    again wherever they are others. The function with the range is passed over meanwhile, so that the range is there; what it
    calls is compiled as ever, since graphs end there anyway (`_use_grad_for_differentiable`)."""
    private.require("recording.torch_seams:watch_steps")
    around = nn_optimizer.Optimizer.profile_hook_step(len)
    patches.also_undo(lambda: _seen_by_the_compiler(around))
    _watchers_of_steps.append(passed_over(around))

    def begins_one(one: Any) -> Callable[[bool], None]:
        if str(one.name).startswith(STEP_RANGE):
            frame: FrameType | None = sys._getframe(1)
            for _ in range(_FRAMES_TO_STEP):
                if frame is not None and frame.f_code.co_filename == nn_optimizer.__file__:
                    optimizer = locals_of(frame).get("self")
                    return begins(optimizer) if isinstance(optimizer, nn_optimizer.Optimizer) else not_watched
                frame = frame and frame.f_back
        return not_watched

    _watch_context(patches, record_function, begins_one, key=f"_gpumem_magic_step_{next(_numbers)}")


_watchers_of_steps: list[Callable[..., Any]] = []


def _seen_by_the_compiler(around: Callable[..., Any]) -> None:
    if around in _watchers_of_steps:
        _watchers_of_steps.remove(around)
    if not _watchers_of_steps:
        # (All steps have one code.)
        frames = torch._C._dynamo.eval_frame
        default = frames._FrameAction.DEFAULT
        frames.set_code_exec_strategy(around.__code__, frames._FrameExecStrategy(default, default))


def watch_compiled(patches: Patches, begins: Around) -> None:
    """`begins` around every call of what Inductor compiled, also of graphs from before.

    Inductor is large: where nobody has imported it, its place is taken when the program first asks for it."""
    name = "torch._inductor.output_code"

    def install() -> None:
        graph = importlib.import_module(name).CompiledFxGraph
        patches.set(graph, "__call__", _around(graph.__call__, begins))

    _when_imported(patches, name, install, (torch._TorchCompileInductorWrapper, "__call__"))


def hide_from_the_compiler(patches: Patches) -> None:
    """Our hooks of modules are not there while Dynamo traces a function and writes its guards, so that what it makes is what
    it makes without us, and holds for the program with and without them: by `skip_nnmodule_hook_guards` it asks of no module
    at each call whether there are hooks.

    Where the program has global hooks of its own or wants those guards, they are traced as the program's; so they are where one
    of the modules has a hook (a tensor-parallel layer, say), since the code that runs it asks for global ones, too. Modules that
    run in another thread meanwhile are not seen."""
    name = "torch._dynamo.convert_frame"

    def install() -> None:
        private.require("recording.torch_seams:hide_from_the_compiler")
        module = importlib.import_module(name)
        compile_ = module._compile

        def compile_without(
            code: CodeType,
            names: dict[str, Any],
            variables: dict[str, Any],
            builtins: Any,
            closure: Any,
            *more: Any,
            **given: Any,
        ) -> Any:
            things = [*variables.values(), *_mentioned(code, names, closure)]
            # (A function of PyTorch's own that calls the program's: that of `torch.compile`, until 2.11.)
            for function in [thing for thing in things if objects.is_a(thing, FunctionType)]:
                things.extend(_mentioned(function.__code__, function.__globals__, function.__closure__))
            with nullcontext() if _any_has_hooks(things) else _hooks_away():
                return compile_(code, names, variables, builtins, closure, *more, **given)

        patches.set(module, "_compile", compile_without)

    wrappers = torch._TorchCompileInductorWrapper, torch._TorchCompileWrapper
    _when_imported(patches, name, install, *((wrapper, "__init__") for wrapper in wrappers))


def _when_imported(patches: Patches, name: str, install: Callable[[], None], *first: tuple[Any, str]) -> None:
    """Calls `install` now if a module is imported, else before the first call of any of these: an owner and a function's name."""
    if name in sys.modules:
        install()
        return
    asked: list[bool] = []

    def installing(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if not asked:
                asked.append(True)
                install()
            return original(*args, **kwargs)

        return called

    for owner, function in first:
        patches.set(owner, function, installing(getattr(owner, function)))


# The hooks that are away while the compiler traces: the table, the number and the hook.
_away: list[tuple[dict[int, Any], int, Any]] = []


def _mentioned(code: CodeType, names: dict[str, Any], closure: tuple[Any, ...] | None) -> Iterator[Any]:
    """The global variables that a function mentions, and what those of its closure hold, but for those without a value yet."""
    yield from (objects.entry(names, name) for name in code.co_names if name in names)
    for cell in closure or ():
        with suppress(ValueError):
            yield cell.cell_contents


def _any_has_hooks(things: Iterable[Any]) -> bool:
    """Whether one of these is a module that has hooks, itself or in a part of it."""
    modules = filter(tensors.is_module, things)
    parts = (part for module in modules for _, part in tensors.modules_in(module))
    return any(objects.attribute(part, table) for part in parts for table in _HOOKS_OF_A_MODULE)


@contextmanager
def _hooks_away() -> Iterator[None]:
    tables = _tables_of_hooks(nn_module)
    ours = {number for table in tables for number, hook in table.items() if _is_ours(hook)}
    guarded = not getattr(sys.modules.get("torch._dynamo.config"), "skip_nnmodule_hook_guards", True)
    # (A trace within a trace finds none.)
    if guarded or not ours or any(number not in ours for table in tables for number in table):
        yield
        return
    for table in tables:
        _away.extend((table, number, table.pop(number)) for number in ours & table.keys())
    try:
        yield
    finally:
        while _away:
            table, number, hook = _away.pop()
            table[number] = hook


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
    tables = _tables_of_hooks(nn_module)
    hooks = [*((number, hook) for table in tables for number, hook in table.items()), *(one[1:] for one in _away)]
    numbers = {number for number, hook in hooks if getattr(hook, "__self__", None) is owner}
    for number in numbers:
        for table in tables:
            table.pop(number, None)
    _away[:] = [one for one in _away if one[1] not in numbers]


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


def _tables_of_hooks(place: Any) -> list[dict[int, Any]]:
    """A module's private tables of global hooks, by number. All numbers come from one counter."""
    return [table for name, table in vars(place).items() if name.startswith("_global_") and isinstance(table, dict)]


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
    begin = uncompiled(begins)
    end = uncompiled(lambda ended, failed: ended(failed))

    def watched_enter(self: Any) -> Any:
        result = enter(self)
        vars(self).setdefault(key, []).append(begin(self))
        return result

    def watched_exit(self: Any, kind: Any, error: Any, traceback: Any) -> Any:
        # A manager that was entered before we came has nothing to end.
        waiting = vars(self).get(key)
        if waiting:
            end(waiting.pop(), kind is not None)
        return leave(self, kind, error, traceback)

    patches.set(owner, "__enter__", passed_over(watched_enter))
    patches.set(owner, "__exit__", passed_over(watched_exit))
