"""The child's part of `interrupts.py`: a cell that is interrupted, and what it left behind.

The signal comes from the process that forked this one, after some time, or from this one itself at a line of the package's own
that was drawn by lot.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import state

OWN = f"{os.sep}gpumem_magic{os.sep}"
# PyTorch's, in which gradients are switched off and on again.
SWITCHES = (f"autograd{os.sep}grad_mode.py", f"utils{os.sep}_contextlib.py", f"optim{os.sep}optimizer.py")
_SECOND = (OWN, f"{os.sep}torch{os.sep}", "contextlib.py")
# What a working session says of a cell that takes 4 MiB.
CHECK = "%%gpumem -q -o _report --device T4\nimport torch\n_kept = torch.empty(2**20, device='cuda')"
EXPECTED = 4 << 20
# IPython takes its names out of builtins behind each cell; an interrupt there is none of ours.
IPYTHONS = {"new": ["get_ipython"], "gone": ["exit", "quit"], "other": []}
# Things that a cell may leave in the process by itself.
_MAY_CHANGE = (
    "modules", "environment", "random", "numpy random", "warning filters", "torch", "working folder", "source lines", "gc", "logging",
)  # fmt: skip
# An event loop's.
_OF_LOOPS = ("anon_inode", "socket")
# Where Ctrl-C ends its run of a cell that awaits in a terminal (in 51 of 200 plain cells), or a second one comes as it puts them back,
# IPython leaves its own in the place of Python's. This package replaces neither.
_OF_IPYTHON = {
    "excepthook": "IPython.core.interactiveshell.InteractiveShell.excepthook",
    "displayhook": "DisplayHook True",
}


class AtLine:
    """A trace function that interrupts at the n-th line of our own code, or only counts.

    second: at which call thereafter, or end of a call of C's, in our own code or PyTorch's, it does so once more; None: never.
    """

    def __init__(self, number: int | None, second: int | None = None) -> None:
        self.number = number
        self.second = second
        self.seen = 0
        self.seen_after = 0
        self.place = ""
        # The number of the first event at each place, for each place that called it.
        self.places: dict[str, int] = {}

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if OWN not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.seen += 1
            if self.number == 0:
                self.places.setdefault(_called(frame), self.seen)
            if self.seen == self.number:
                self.place = _place(frame)
                if self.second is not None:
                    self.places.clear()
                    sys.setprofile(self._after)
                signal.raise_signal(signal.SIGINT)
        return self

    def _after(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Here Python looks for signals."""
        if event not in ("call", "c_return") or not any(part in frame.f_code.co_filename for part in _SECOND):
            return
        self.seen_after += 1
        if self.second == 0:
            self.places.setdefault(_called(frame), self.seen_after)
        if self.seen_after == self.second:
            sys.setprofile(None)
            self.place += f", {_place(frame)}"
            signal.raise_signal(signal.SIGINT)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition(OWN)[2]}:{frame.f_lineno}"


def _called(frame: FrameType) -> str:
    return f"{_place(frame)} from {_place(frame.f_back)}" if frame.f_back is not None else _place(frame)


def left_over(shell: Any, before: dict[str, Any]) -> dict[str, Any]:
    """What differs from `before`, apart from what cells do by themselves."""
    now = whole(shell, before["bearings"])
    found = {}
    for one in (now, before):
        files = one["interpreter"]["open files"]
        # (The interrupt may come while the file is made that asks for it.)
        one["interpreter"]["open files"] = [
            name for name in files if name not in _OF_LOOPS and not name.endswith("result.ready")
        ]
    for part in ("interpreter", "shell"):
        for name, value in now[part].items():
            if name not in _MAY_CHANGE and value != before[part][name] and value != IPYTHONS:
                found[name] = (before[part][name], value)
    modes = {
        name: value for name, value in now["interpreter"]["torch"].items() if name not in ("random", "memory", "used")
    }
    was = {
        name: value
        for name, value in before["interpreter"]["torch"].items()
        if name not in ("random", "memory", "used")
    }
    if modes != was:
        found["torch"] = (was, modes)
    if now["interpreter"]["gc"] != before["interpreter"]["gc"]:
        found["gc"] = (before["interpreter"]["gc"], now["interpreter"]["gc"])
    return found


def ours(found: dict[str, Any], request: dict[str, Any], within: list[str]) -> dict[str, Any]:
    """What is left over without what IPython and PyTorch leave there by themselves. within: the files of the innermost frames."""
    is_second = len(request.get("interrupt", ())) == 2 or "second" in request
    if (is_second or any(name.endswith(SWITCHES) for name in within)) and "torch" in found:
        # `no_grad`, and an optimizer's step, end in Python: where a Ctrl-C comes just then, gradients stay off.
        was, now = found["torch"]
        if now == {**was, "grad": False}:
            del found["torch"]
    if not is_second and ("await " not in request["cell"] or request.get("kernel", False)):
        return found
    return {name: pair for name, pair in found.items() if pair[1] != _OF_IPYTHON.get(name)}


def whole(shell: Any, bearings: dict[str, Any]) -> dict[str, Any]:
    of_shell = state.of_shell(shell)
    names = (
        "events",
        "shell's own attributes",
        "magics",
        "compiler flags",
        "displayhook",
        "input transformers",
        "custom exceptions",
        "colors",
    )
    return {
        "interpreter": state.of_interpreter(bearings, True), "shell": {name: of_shell[name] for name in names}, "bearings": bearings,
    }  # fmt: skip


def run(shell: Any, request: dict[str, Any], bearings: dict[str, Any], run_cell: Any) -> dict[str, Any]:
    """Runs the scenario's cell under interruption, then asks everything that must still work."""
    # A process in the background of a shell begins with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    shell.extension_manager.load_extension("gpumem_magic")
    before = whole(shell, bearings)
    for cell in request["setup"]:
        shell.run_cell(cell, store_history=True)
    tracer = AtLine(request["line"], request.get("second")) if "line" in request else None
    found: dict[str, Any] = {"landed": False, "troubles": []}
    within: list[str] = []
    ready = Path(request["result"] + ".ready")
    try:
        try:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                ready.touch()
                sys.settrace(tracer)
                result = run_cell(shell, request["cell"], request.get("kernel", False))
                sys.settrace(None)
                sys.setprofile(None)
                error = result.error_in_exec or result.error_before_exec
                found["landed"] = isinstance(error, KeyboardInterrupt)
                found["error"] = type(error).__name__
                within = [one.filename for one in traceback.extract_tb(error.__traceback__)[-2:]] if error else []
            except (KeyboardInterrupt, asyncio.CancelledError):
                found.update(landed=True, error="left the shell")
            except Exception as error:
                # IPython 7 fails at the traceback of an interrupt that comes as it makes one.
                found.update(landed=True, error=f"left the shell: {type(error).__name__}: {error}")
                if OWN in traceback.extract_tb(error.__traceback__)[-1].filename:
                    found["troubles"].append(("left the shell", traceback.format_exc()[-1500:]))
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.settrace(None)
    sys.setprofile(None)
    (Path(request["result"] + ".done")).touch()
    while "interrupt" in request and not Path(request["result"] + ".sent").exists():
        time.sleep(0.0005)  # a signal may be on its way
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if tracer is not None:
        found.update(lines=tracer.seen, place=tracer.place, places=tracer.places)
    if "GpuMemMagics" not in shell.magics_manager.registry:
        shell.extension_manager.reload_extension("gpumem_magic")
    asked = [
        ("memory", _memory_of_nobody),
        ("%gpumem_auto off", lambda: _magic(shell, "gpumem_auto", "off")),
        ("%gpumem_watch stop", _stop_watch),
        ("%gpumem_device off", lambda: _magic(shell, "gpumem_device", "off")),
        ("state", lambda: ours(left_over(shell, before), request, within)),
        ("next cell", lambda: _next_cell(shell)),
        ("%gpumem_device off again", lambda: _magic(shell, "gpumem_device", "off")),
        ("state again", lambda: ours(left_over(shell, before), request, within)),
        ("%unload_ext", lambda: shell.extension_manager.unload_extension("gpumem_magic")),
        ("names in builtins", lambda: [name for name in dir(builtins) if "gpumem" in name]),
    ]  # fmt: skip
    for name, ask in asked:
        try:
            trouble = ask()
        except BaseException as error:
            trouble = f"{type(error).__name__}: {error}"
        if trouble:
            found["troubles"].append((name, str(trouble)[:600]))
    return found


def _magic(shell: Any, name: str, words: str) -> None:
    shell.run_line_magic(name, words)


def _memory_of_nobody() -> list[str]:
    """Where a virtual device says that more or less is allocated than storages and workspaces hold."""
    gpu: Any = sys.modules.get("gpumem_magic.virtual.gpu")
    machine = None if gpu is None else gpu.current()
    if machine is None:
        return []
    machine.settle()
    owned = {one.address for one in machine.engine.table._placements.values() if one.nbytes}
    owned |= {address for address, _ in machine.workspaces._workspaces.values()}
    found = []
    for device in machine.devices:
        blocks = [block for segment in device.segments() for block in segment.blocks]
        held = [block for block in blocks if block.state == "active_allocated"]
        if sum(block.size for block in held) != device.allocator.allocated:
            found.append(
                f"{device.allocator.allocated} bytes are allocated, in blocks of {sum(one.size for one in held)}"
            )
        found += [f"{block.size} bytes at {block.address:#x}" for block in held if block.address not in owned]
    return found


def _stop_watch() -> None:
    watch: Any = sys.modules.get("gpumem_magic.widgets.watch")
    if watch is not None:
        stop: Any = watch.stop_if_running
        stop()


def _next_cell(shell: Any) -> str | None:
    result = shell.run_cell(CHECK, store_history=True)
    if not result.success:
        return f"{result.error_in_exec or result.error_before_exec!r}"
    report = shell.user_ns.get("_report")
    found = None if report is None else report.peak.allocated
    shell.run_cell("del _report, _kept")
    return None if found == EXPECTED else f"a cell that takes {EXPECTED} bytes is said to take {found}"
