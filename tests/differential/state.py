"""What a process is like, as plain text that two processes can be compared by: values, the shell, the interpreter, files.

Nothing here asks an object of the program's anything: types, dictionaries and builtin containers are read as they lie.
"""

from __future__ import annotations

import builtins
import gc
import hashlib
import linecache
import logging
import os
import random
import re
import signal
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any

DEEPEST = 5
LONGEST = 60
TEXT = 50_000
PARTS = 3000

_MEMBERS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.GetSetDescriptorType,
    staticmethod,
    classmethod,
    property,
)
_OWN_NAMES = frozenset({"In", "Out", "get_ipython", "exit", "quit", "open"})


def described(value: Any) -> str:
    """A value in words: equal for equal values of two processes. Looks at so many parts and no more."""
    return _described(value, DEEPEST, frozenset(), [PARTS])


def _described(value: Any, depth: int, seen: frozenset[int], left: list[int]) -> str:
    kind = type(value)
    left[0] -= 1
    if value is None or kind in (bool, int, float, complex, str, bytes):
        try:
            text = repr(value)
        except ValueError:  # an int of too many digits
            text = hex(value)
        return text if len(text) <= TEXT else f"{text[:TEXT]} and more, {_digest(text)}"
    if id(value) in seen:
        return f"<{_name_of(kind)} again>"
    if depth == 0 or left[0] < 0:
        return f"<{_name_of(kind)}>"
    seen |= {id(value)}

    def below(other: Any) -> str:
        return _described(other, depth - 1, seen, left)

    if any(_name_of(one) == "IPython.core.interactiveshell.InteractiveShell" for one in type.mro(kind)):
        return f"<{_name_of(kind)}>"  # see `of_shell`
    if kind in (list, tuple):
        return f"{kind.__name__}({_listed([below(one) for one in value[:LONGEST]], len(value))})"
    if kind in (set, frozenset):
        return f"{kind.__name__}({_listed(sorted(below(one) for one in value), len(value))})"
    if kind is dict:
        return f"dict({_listed([f'{below(key)}: {below(one)}' for key, one in list(value.items())[:LONGEST]], len(value))})"
    if kind is types.FunctionType:
        return (
            f"function {value.__module__}.{value.__qualname__} {below(value.__code__)} defaults {below(value.__defaults__)} "
            f"{below(value.__kwdefaults__)} doc {below(value.__doc__)} cells {_cells(value, below)} {below(value.__dict__)}"
        )
    if kind is types.CodeType:
        return _code(value, below)
    if kind is types.MethodType:
        return f"method {below(value.__func__)} of {_name_of(type(value.__self__))}"
    if kind is types.ModuleType:
        return f"module {value.__dict__.get('__name__')}"
    if isinstance(kind, type) and issubclass(kind, type):
        return f"class {_name_of(value)} {[_name_of(one) for one in type.mro(value)]} {_members(value, below)}"
    if kind in (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType):
        code = next(getattr(value, name) for name in ("gi_code", "cr_code", "ag_code") if hasattr(value, name))
        frame = next(getattr(value, name) for name in ("gi_frame", "cr_frame", "ag_frame") if hasattr(value, name))
        return f"{kind.__name__} of {code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}, {'over' if frame is None else frame.f_lineno}"
    if issubclass(kind, BaseException):
        return f"{_name_of(kind)}{below(vars(BaseException)['args'].__get__(value))} {_trace(value)}"
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return f"{_name_of(kind)} {_tensor(torch, value)}"
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except Exception:
        attributes = None
    inside = f" {below(attributes)}" if type(attributes) is dict else ""
    items = ""
    for base in (list, tuple, dict, set, frozenset, str, int, float, bytes):
        if issubclass(kind, base):
            try:
                items = " " + below(_plain(base, value))
            except Exception as error:
                items = f" {type(error).__name__}"
            break
    return f"<{_name_of(kind)}{items}{inside}>"


def _plain(base: type, value: Any) -> Any:
    """What a subclass of a builtin holds, as that builtin, without its own methods."""
    if base in (list, tuple):
        return [base.__getitem__(value, number) for number in range(base.__len__(value))]
    if base is dict:
        return {key: dict.__getitem__(value, key) for key in dict.__iter__(value)}
    if base in (set, frozenset):
        return set(base.__iter__(value))
    if base is bytes:
        return bytes.__getitem__(value, slice(None))
    plain: dict[type, Any] = {str: str.__str__, int: int.__int__, float: float.__float__}
    return plain[base](value)


def _name_of(kind: Any) -> str:
    names = type.__dict__["__qualname__"].__get__(kind)
    module = type.__dict__["__dict__"].__get__(kind).get("__module__", "builtins")
    return f"{module}.{names}" if type(module) is str else names


def _listed(parts: list[str], length: int) -> str:
    return ", ".join(parts[:LONGEST]) + (f" ... {length} in all" if length > LONGEST else "")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _cells(function: types.FunctionType, below: Any) -> list[str]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(below(cell.cell_contents))
        except ValueError:
            found.append("<empty>")
    return found


def _code(code: types.CodeType, below: Any) -> str:
    places = list(code.co_positions()) if hasattr(code, "co_positions") else list(code.co_lines())
    return (
        f"code {getattr(code, 'co_qualname', code.co_name)} in {code.co_filename} line {code.co_firstlineno} flags {code.co_flags} "
        f"{_digest(code.co_code.hex() + repr(places))} names {code.co_names} {code.co_varnames} {code.co_freevars} consts {below(code.co_consts)}"
    )


def _members(kind: type, below: Any) -> str:
    hidden = ("__dict__", "__weakref__", "__static_attributes__", "_abc_impl")
    if kind.__dict__.get("__module__") != "__main__":
        return ""
    return ", ".join(f"{name}: {below(value)}" for name, value in kind.__dict__.items() if name not in hidden)


def _trace(error: BaseException) -> list[str]:
    """The frames of the program's own, and those of libraries behind them. What the shell calls it by is left out."""
    places = []
    entry = error.__traceback__
    while entry is not None:
        code = entry.tb_frame.f_code
        if "IPython" not in code.co_filename and "gpumem_magic" not in code.co_filename:
            places.append(f"{code.co_filename}:{entry.tb_lineno} {code.co_name}")
        entry = entry.tb_next
    return places[:LONGEST]


def _tensor(torch: Any, value: Any) -> str:
    tensor = torch.Tensor
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(tensor.shape.__get__(value))
        words = f"{shape} {tensor.dtype.__get__(value)} {tensor.device.__get__(value)} grad {tensor.requires_grad.__get__(value)}"
        if (
            type(value) is tensor
            and value.device.type == "cpu"
            and value.layout is torch.strided
            and value.numel() < 10_000
        ):
            values = value.detach().resolve_conj().resolve_neg()
            words += " " + _digest(repr(values.tolist()))
            if values.is_floating_point():
                words += " about " + _digest(" ".join(f"{one:.3g}" for one in values.flatten().tolist()))
    return words


# ---- the whole


def of_shell(shell: Any) -> dict[str, Any]:
    """The namespace in its order, what IPython remembers, and what of the shell can be replaced."""
    names = {}
    for name, value in shell.user_ns.items():
        if name not in _OWN_NAMES and not name.startswith(("_i", "_o", "_dh")) and not _is_number_name(name):
            names[name] = described(value)
    kept = {name: shell.user_ns[name] for name in shell.user_ns if _is_number_name(name)}
    return {
        "namespace": names,
        "order": list(names),
        "missing": sorted(name for name in _OWN_NAMES if name not in shell.user_ns),
        "Out": {str(number): described(value) for number, value in (shell.user_ns.get("Out") or {}).items()},
        "numbered": {name: described(value) for name, value in kept.items()},
        "In": list(shell.history_manager.input_hist_raw),
        "In's length": len(shell.user_ns.get("In") or []),
        "last inputs": [shell.user_ns.get(name) for name in ("_i", "_ii", "_iii")],
        "_oh is Out": shell.user_ns.get("_oh") is shell.user_ns.get("Out"),
        "dh": [str(one) for one in shell.user_ns.get("_dh", [])],
        "execution count": shell.execution_count,
        "compiler flags": shell.compile.flags,
        "autoawait": shell.autoawait,
        "colors": str(shell.colors),
        "interactivity": shell.ast_node_interactivity,
        "ast transformers": [type(one).__name__ for one in shell.ast_transformers],
        "input transformers": [getattr(one, "__qualname__", repr(one)) for one in shell.input_transformers_post],
        "events": {name: [one.__qualname__ for one in chain] for name, chain in shell.events.callbacks.items()},
        "shell's own attributes": sorted(name for name in vars(shell) if not name.startswith("_")),
        "magics": sorted((kind, name) for kind, names in shell.magics_manager.magics.items() for name in names),
        "hidden": sorted(name for name in shell.user_ns_hidden),
        "displayhook": f"{type(sys.displayhook).__name__} {sys.displayhook is shell.displayhook}",
        "user_ns is __main__": shell.user_ns is getattr(sys.modules.get("__main__"), "__dict__", None),
        "custom exceptions": [one.__name__ for one in shell.custom_exceptions],
    }


def _is_number_name(name: str) -> bool:
    return name in ("_", "__", "___") or (name.startswith("_") and name[1:].isdigit())


def of_interpreter(before: dict[str, Any], deep: bool) -> dict[str, Any]:
    """Everything of the process that a program may rely on. before: what `bearings` said at the start.

    deep: torch's attributes too, which takes longer than all else."""
    now = bearings(deep)
    return {
        **{f"{name}": _changes(before[name], now[name]) for name in now},
        "signals": {name.name: _callable(signal.getsignal(name)) for name in signal.Signals},
        "alarm": [round(one, 0) for one in signal.getitimer(signal.ITIMER_REAL)],
        "trace": _callable(sys.gettrace()),
        "profile": _callable(sys.getprofile()),
        "thread trace": _callable(getattr(threading, "_trace_hook", None)),
        "thread profile": _callable(getattr(threading, "_profile_hook", None)),
        "monitoring": _monitoring(),
        "threads": sorted(one.name for one in threading.enumerate()),
        "excepthook": _callable(sys.excepthook),
        "unraisablehook": _callable(sys.unraisablehook),
        "thread excepthook": _callable(threading.excepthook),
        "breakpointhook": _callable(sys.breakpointhook),
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "path": list(sys.path),
        "path hooks": [_callable(one) for one in sys.path_hooks],
        "meta path": [_callable(one) for one in sys.meta_path],
        "argv": list(sys.argv),
        "streams": [type(one).__name__ for one in (sys.stdin, sys.stdout, sys.stderr)],
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), [_callable(one) for one in gc.callbacks]),
        "warning filters": [tuple(str(getattr(part, "pattern", part)) for part in one) for one in warnings.filters],
        "showwarning": _callable(warnings.showwarning),
        "random": _digest(repr(random.getstate())),
        "numpy random": _numpy_random(),
        "torch": _torch(),
        "logging": [type(one).__name__ for one in logging.getLogger().handlers] + [logging.getLogger().level],
        "working folder": os.getcwd(),
        "umask": _umask(),
        "open files": _open_files(),
        "children": _children(),
        "source lines": sorted(name for name in linecache.cache if not name.startswith(("/", "<ipython-input"))),
        "coroutine origin": sys.get_coroutine_origin_tracking_depth(),
        "async generator hooks": [_callable(one) for one in sys.get_asyncgen_hooks()],
        "int digits": sys.get_int_max_str_digits() if hasattr(sys, "get_int_max_str_digits") else None,
        "contextvars": _context(),
    }


def bearings(deep: bool = True) -> dict[str, Any]:
    """What is compared with the beginning, by identity."""
    return {
        "modules": dict.fromkeys(sys.modules, 0),
        "builtins": {name: id(value) for name, value in vars(builtins).items() if name != "_"},
        "environment": dict(os.environ),
        **({"torch's attributes": _attributes_of_torch()} if deep else {}),
    }


def _attributes_of_torch() -> dict[str, int]:
    """The identity of what can be replaced in torch: functions of its modules, methods of its classes."""
    found: dict[str, int] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" or not issubclass(type(module), types.ModuleType) or name.count(".") > 2:
            continue
        for key, value in list(vars(module).items()):
            if type(value) is types.FunctionType or type(value) is types.BuiltinFunctionType:
                found[f"{name}.{key}"] = id(value)
            elif issubclass(type(value), type) and value.__module__ == name:
                for part, member in list(vars(value).items()):
                    if type(member) in _MEMBERS:
                        found[f"{name}.{key}.{part}"] = id(member)
    return found


def _changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    return {
        "new": [name for name in now if name not in before],
        "gone": [name for name in before if name not in now],
        "other": sorted(name for name in now if name in before and now[name] != before[name]),
    }


def _callable(value: Any) -> str:
    if value is None or isinstance(value, int):
        return str(value)
    kind = type(value)
    if kind in (types.FunctionType, types.BuiltinFunctionType, types.MethodType):
        return f"{value.__module__}.{value.__qualname__}"
    return f"<{_name_of(value if isinstance(value, type) else kind)}>"


def _monitoring() -> Any:
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is None:
        return None
    tools = {number: monitoring.get_tool(number) for number in range(6)}
    return {number: (name, monitoring.get_events(number)) for number, name in tools.items() if name is not None}


def _numpy_random() -> str | None:
    numpy = sys.modules.get("numpy")
    return None if numpy is None or "numpy.random" not in sys.modules else _digest(repr(numpy.random.get_state()))


def _torch() -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    found = {
        "random": _digest(repr(torch.get_rng_state().tolist())),
        "grad": torch.is_grad_enabled(),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cuda"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "saved tensor hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["memory"] = {name: value for name, value in torch.cuda.memory_stats().items() if "num_device" not in name}
        found["used"] = torch.cuda.mem_get_info()
    return found


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _open_files() -> list[str]:
    folder = Path("/proc/self/fd")
    found = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        try:
            target = os.readlink(entry)
        except OSError:  # the one that reads this folder
            continue
        if "matplotlib" not in target:  # its fonts stay open
            found.append(target.partition(":")[0])
    return sorted(found)


def _children() -> int:
    tasks = Path(f"/proc/self/task/{os.getpid()}/children")
    return len(tasks.read_text().split()) if tasks.exists() else 0


def _context() -> list[str]:
    from contextvars import copy_context

    return sorted(one.name for one in copy_context())


def of_files(folder: Path) -> dict[str, str]:
    """Every file below a folder and what is in it."""
    found = {}
    inside = {path.name: of_file(path) for path in folder.iterdir()}
    # `tempfile` takes random names: they count in the order of what they hold.
    for number, (name, one) in enumerate(
        sorted(inside.items(), key=lambda one: (bool(_RANDOM.search(one[0])), str(one[1]), one[0]))
    ):
        known = _RANDOM.sub(f"temporary {number}", name)
        found[known] = "folder" if type(one) is dict else str(one)
        if type(one) is dict:
            found.update({f"{known}/{below}": what for below, what in one.items()})
    return dict(sorted(found.items()))


_RANDOM = re.compile(r"(?i)\btmp[a-z0-9_]{8}\b")


def of_file(path: Path) -> str | dict[str, str]:
    try:
        if path.is_symlink():
            return f"-> {_RANDOM.sub('temporary', os.readlink(path))}"
        if path.is_dir():
            return of_files(path)
        if path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        return type(error).__name__
    return "special"
