"""What keeps objects alive in a notebook: its variables, its results, the last error, the user's modules, other threads."""

from __future__ import annotations

import builtins
import contextvars
import functools
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from traceback import walk_stack, walk_tb
from typing import Any

from gpumem_magic.looks.code import cell_of
from gpumem_magic.looks.objects import (
    attributes,
    entry,
    is_a,
    items,
    module_of_class,
    name_of_class,
    text,
    traceback_of,
)
from gpumem_magic.owners.model import FREE_TRACEBACK, THIS_ERROR, Root
from gpumem_magic.owners.traversal import is_users_module, users_modules

_CACHED = type(functools.lru_cache(str))
Rooted = tuple[Root, list[Any]]

FREE_OUT = "%gpumem_free out"
FREE_CYCLES = "%gpumem_free cycles"
RECENT = ("_", "__", "___")
"""The last results, as IPython names them."""


def roots_of(shell: Any, namespace: Mapping[str, Any], error: BaseException | None = None) -> list[Rooted]:
    """Every root with what it holds. shell: the notebook's, or None in a script; namespace: the program's variables.

    error: one that is on its way out of the program now.
    """
    return [
        *_results(shell, namespace),
        *_variables(shell, namespace),
        *_traceback(shell, error),
        *_modules(namespace),
        *_contexts(namespace),
        *_threads(namespace),
    ]


def closed_to(shell: Any, namespace: Mapping[str, Any]) -> list[Any]:
    """What a walk must not enter: the namespace itself (its variables are roots), the shell, and Python's own tables."""
    closed: list[Any] = [namespace, sys.modules, vars(builtins), vars(sys)]
    if shell is not None:
        closed += [shell, shell.user_ns, shell.user_global_ns, shell.user_ns_hidden, shell.displayhook]
        closed += [value for name in ("_oh", "_ih", "_dh") if (value := entry(namespace, name)) is not None]
    return closed


def results(namespace: Mapping[str, Any]) -> dict[Any, Any]:
    """``Out``, as a dictionary; empty in a script."""
    return {number: value for number, value in items(entry(namespace, "_oh")) if type(number) is int}


def class_name(value: Any) -> str:
    """The class as its author knows it: a virtual device's tensors are tensors."""
    kind = type(value)
    return "Tensor" if module_of_class(kind).startswith("gpumem_magic.virtual") else name_of_class(kind)


def _hidden(shell: Any) -> Mapping[str, Any]:
    return {} if shell is None else shell.user_ns_hidden


def _variables(shell: Any, namespace: Mapping[str, Any]) -> Iterator[Rooted]:
    hidden = _hidden(shell)
    for key, value in items(namespace):
        name = text(key)
        if not name or (name in hidden and hidden[name] is value):
            continue
        if is_result_name(name) and not _is_users_own(name, shell, namespace):
            continue
        if is_a(value, types.ModuleType):
            continue
        word = "del " + name if name.isidentifier() else f"del globals()[{name!r}]"
        if name.isidentifier() and _is_cache_alone(value):
            # The function is of use yet.
            word = f"{name}.cache_clear()"
        yield Root(name, "variable", word, class_name(value)), [value]


def _is_cache_alone(value: object) -> bool:
    """Whether it is a function with `functools.lru_cache` that holds nothing else."""
    if type(value) is not _CACHED:
        return False
    function = entry(attributes(value), "__wrapped__")
    return isinstance(function, types.FunctionType) and not (
        function.__closure__ or function.__defaults__ or function.__kwdefaults__
    )


def is_result_name(name: str) -> bool:
    """Whether IPython itself keeps this name: ``_``, ``__``, ``_7``, ``_i``, ``Out``."""
    return (
        name in RECENT
        or name in ("In", "Out", "_ih", "_oh", "_dh")
        or (name[:1] == "_" and name[1:].isdecimal())
        or (name[:2] == "_i" and (name[2:].isdecimal() or set(name[2:]) <= {"i"}))
    )


def _is_users_own(name: str, shell: Any, namespace: Mapping[str, Any]) -> bool:
    """Whether a name that IPython keeps for itself was given a value by the program: ``for _ in batches``."""
    if name in RECENT:
        return shell is None or getattr(shell.displayhook, name, None) is not entry(namespace, name)
    return name[1:].isdecimal() and (shell is None or int(name[1:]) not in results(namespace))


def _results(shell: Any, namespace: Mapping[str, Any]) -> Iterator[Rooted]:
    if shell is None:
        return
    cached = results(namespace)
    hidden = _hidden(shell)
    seen: set[int] = set()
    for number, value in cached.items():
        name = f"_{number}"
        held = [value]
        held += [one for one in (entry(namespace, name), hidden.get(name)) if one is not None and one is not value]
        seen.update(id(one) for one in held)
        yield Root(f"Out[{number}]", "out", FREE_OUT, class_name(value)), held
    for name in RECENT:
        for value in (getattr(shell.displayhook, name, None), hidden.get(name)):
            # What Out holds too is said once, as Out[n].
            if value is not None and id(value) not in seen:
                seen.add(id(value))
                yield Root(name, "out", FREE_OUT, class_name(value)), [value]
    last = getattr(shell, "last_execution_result", None)
    value = getattr(last, "result", None)
    if value is not None and id(value) not in seen:
        yield Root("the last cell's value", "out", FREE_OUT, class_name(value)), [value]


def _traceback(shell: Any, error: BaseException | None) -> Iterator[Rooted]:
    if error is not None:
        yield (
            Root(THIS_ERROR, "traceback", FREE_TRACEBACK, class_name(error)),
            [error, traceback_of(error)],
        )
    held = last_errors(shell)
    if held:
        last = next((one for one in held if is_a(one, BaseException)), None)
        kind = "" if last is None else ", ".join(filter(None, (class_name(last), _cell_of_error(last))))
        yield Root("the last error's traceback", "traceback", FREE_TRACEBACK, kind), held


def _cell_of_error(error: BaseException) -> str:
    """``In [3]`` where a cell raised it; "" where none is known to."""
    cells = (cell_of(frame.f_code.co_filename) for frame, _ in walk_tb(traceback_of(error)))
    return next((one for one in cells if one.startswith("In [")), "")


def last_errors(shell: Any) -> list[Any]:
    """The exceptions and tracebacks that Python and IPython keep of the last error."""
    held = [getattr(sys, name, None) for name in ("last_exc", "last_value", "last_traceback")]
    if shell is not None:
        result = getattr(shell, "last_execution_result", None)
        held += [getattr(result, "error_in_exec", None), getattr(result, "error_before_exec", None)]
        held.append(getattr(getattr(shell, "InteractiveTB", None), "tb", None))
    unique = {id(one): one for one in held if one is not None}
    return list(unique.values())


def _modules(namespace: Mapping[str, Any]) -> Iterator[Rooted]:
    for name, module in users_modules():
        if attributes(module) is namespace:
            continue
        for key, value in items(attributes(module)):
            variable = text(key)
            if variable == "__builtins__" or is_a(value, (types.ModuleType, types.FunctionType)):
                continue
            yield Root(f"{name}.{variable}", "module", f"del {name}.{variable}", class_name(value)), [value]


def _contexts(namespace: Mapping[str, Any]) -> Iterator[Rooted]:
    """The values of context variables, which no object that has a name refers to."""
    names = {id(value): text(key) for key, value in items(namespace) if is_a(value, contextvars.ContextVar)}
    for variable, value in contextvars.copy_context().items():
        if name := names.get(id(variable)):
            yield Root(name, "variable", f"{name}.set(None)", class_name(value)), [value]
        else:
            yield Root(text(variable.name), "module", None, class_name(value)), [value]


def _threads(namespace: Mapping[str, Any]) -> Iterator[Rooted]:
    """The user's functions that run in other threads, with what called them."""
    own = threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    # This very frame: as a variable of its own it would keep all others, and what they hold, until a garbage collection.
    frames.pop(own, None)
    for thread, top in frames.items():
        stack = [frame for frame, _ in walk_stack(top)]
        for number, frame in enumerate(stack):
            if frame.f_globals is namespace or is_users_module(
                sys.modules.get(text(entry(frame.f_globals, "__name__")))
            ):
                yield Root(f"thread {names.get(thread, thread)}", "thread", None), stack[number:]
                break
