"""A process that has imported everything already and runs each cell in a child of its own, which it forks.

It reads requests, one JSON object a line, from its standard input, and answers each with one line; what a child found lies in
the file that the request names. Plain and measured children come from the same process, so that they agree in everything that
a process has by chance: addresses, the hashes' seed, the modules that are loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import io
import json
import os
import pickle
import random
import re
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import interrupted
import state

# Of <malloc.h>: what `mallopt` is told.
M_PERTURB = -6
# Seconds.
LOOK_AFTER = 2.0
MOST_WRITTEN = 64 << 20
MOST_MEMORY = 6 << 30
FLAGS = {"quiet": "-q", "counters": "-q --no-lines", "shown": "", "kernel": "-q"}


class Stream(io.TextIOBase):
    """Takes what is written into the list that all streams share, so that their order is known."""

    encoding = "utf-8"
    errors = "strict"

    def __init__(self, name: str, events: list[list[Any]]) -> None:
        self._name, self._events = name, events

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"string argument expected, got {type(text).__name__!r}")
        if self._events and self._events[-1][0] == self._name:
            self._events[-1][1] += str(text)
        else:
            self._events.append([self._name, str(text)])
        return len(text)


def make_shell() -> Any:
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "NoColor"
    shell = InteractiveShell.instance(config=config)
    # As in every front, the notebook's names are those of `__main__`.
    sys.modules["__main__"] = shell.user_module
    return shell


def warm(shell: Any, device: str | None, cells: list[str]) -> None:
    """Everything that measured cells (and these `cells`) import is there before the first fork."""
    import numpy.random  # noqa: F401
    import torch

    from gpumem_magic import session  # noqa: F401

    shell.extension_manager.load_extension("gpumem_magic")
    for cell in (
        "%gpumem_device T4",
        "%%gpumem -q\nimport torch\nx = torch.ones(3, device='cuda')\nx.sum()\ndel x",
        "%%gpumem -q\n1 / 0",
        "%%gpumem\n1",
        "%gpumem_auto on",
        "1",
        "%gpumem_auto off",
        *cells,
        "%gpumem_device off",
    ):
        run_quietly(shell, cell)
    shell.extension_manager.unload_extension("gpumem_magic")
    shell.reset(new_session=True)
    torch.set_num_threads(1)
    if device is not None:
        shell.extension_manager.load_extension("gpumem_magic")
        shell.run_line_magic("gpumem_device", device)
        run_quietly(shell, "%%gpumem -q\nimport torch\ntorch.ones(3, device='cuda').sum()")
        shell.reset(new_session=True)
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    warnings.resetwarnings()
    warnings.simplefilter("default")
    gc.collect()
    gc.freeze()


def run_quietly(shell: Any, cell: str) -> None:
    out, err = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = io.StringIO()
    try:
        shell.run_cell(cell)
    finally:
        sys.stdout, sys.stderr = out, err


# ---- in the child


# A kernel's one.
_loops: list[asyncio.AbstractEventLoop] = []


def run_cell(shell: Any, cell: str, as_kernel: bool) -> Any:
    """As a terminal runs it, or as a kernel does (what `ipykernel` does with IPython, step by step)."""
    if not as_kernel:
        return shell.run_cell(cell, store_history=True)

    async def execute() -> Any:
        failure = None
        try:
            transformed = shell.transform_cell(cell)
        except Exception:
            transformed, failure = cell, sys.exc_info()
        if not shell.should_run_async(cell, transformed_cell=transformed, preprocessing_exc_tuple=failure):
            return shell.run_cell(cell, store_history=True)
        future = asyncio.ensure_future(
            shell.run_cell_async(
                cell, store_history=True, transformed_cell=transformed, preprocessing_exc_tuple=failure
            )
        )
        # Ctrl-C cancels what awaits, and does not raise wherever the loop is.
        handler = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, lambda *_: loop.call_soon_threadsafe(future.cancel))
        result = None
        try:
            result = await future
        finally:
            signal.signal(signal.SIGINT, handler)
            shell.events.trigger("post_execute")
            shell.events.trigger("post_run_cell", result)
        return result

    from IPython.core.async_helpers import _asyncio_runner

    usual, shell.loop_runner = shell.loop_runner, _asyncio_runner
    if not _loops:
        _loops.append(asyncio.new_event_loop())
    (loop,) = _loops
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(execute())
    finally:
        shell.loop_runner = usual


def outcome_of(result: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"result": state.described(result.result), "success": result.success}
    for name in ("error_before_exec", "error_in_exec"):
        error = getattr(result, name)
        chain: list[Any] = []
        while error is not None and len(chain) < 9:
            notes = getattr(error, "__notes__", None)
            chain.append((state.described(error), state.described(notes), error.__suppress_context__))
            error = error.__cause__ or error.__context__
        found[name] = chain
    return found


def is_report(data: Any) -> bool:
    """Whether what is displayed is the report of a measured cell, which plain cells have not."""
    report = sys.modules["gpumem_magic"].last_report()
    view = sys.modules["gpumem_magic.user_report"].View
    return report is not None and str(data.get("text/plain", "")) == str(view(report, None, name=""))


class Child:
    """One run: a case's cells, one after another, and what is found after them."""

    def __init__(self, shell: Any, request: dict[str, Any], bearings: dict[str, Any]) -> None:
        self.shell = shell
        self.bearings = bearings
        self.request = request
        self.events: list[list[Any]] = []
        self.mode = request["mode"]
        self.cells: list[dict[str, Any]] = []

    def interrupted(self) -> dict[str, Any]:
        self._surroundings()
        return interrupted.run(self.shell, self.request, self.bearings, run_cell)

    def run(self) -> dict[str, Any]:
        request, shell = self.request, self.shell
        self._surroundings()
        junk = self._shake(request.get("shake", 0))
        measured = self.mode != "plain"
        if measured and request["device"] is None:
            shell.extension_manager.load_extension("gpumem_magic")
        if self.mode == "auto":
            self._quietly("gpumem_auto", "on")
        for cell in request.get("setup", []):
            result = shell.run_cell(cell, store_history=True)
            if not result.success:
                return {
                    "setup": f"{type(result.error_before_exec or result.error_in_exec).__name__}: {result.error_in_exec}"
                }
        self.events.clear()
        shell.ast_node_interactivity = request.get("interactivity", "last_expr")
        flags = FLAGS.get(self.mode)
        as_kernel = request.get("kernel", False)
        depth = request.get("deeper", 0)
        for cell in request["cells"]:
            magic = f"%%gpumem {flags}" if flags is not None else None
            text = with_first_line(cell, magic, shell.ast_node_interactivity)
            litter(request.get("shake", 0))
            self._at_depth(depth, text, as_kernel)
        found = self._state(measured)
        del junk
        return found

    def _surroundings(self) -> None:
        """Limits, a folder, and streams of its own."""
        request, shell = self.request, self.shell
        self._limit(request)
        os.chdir(request["folder"])
        random.seed(5)  # Python seeds it anew in every child
        share_counts()
        files = [
            os.open(f"{request['result']}.{number}", os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600) for number in (1, 2)
        ]
        silent = os.open(os.devnull, os.O_RDONLY)
        for number, file in zip((0, 1, 2), (silent, *files), strict=True):
            os.dup2(file, number)
            os.close(file)
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
        sys.stdout, sys.stderr = Stream("stdout", self.events), Stream("stderr", self.events)
        shell.display_pub.publish = self._publish

    def _at_depth(self, depth: int, text: str, as_kernel: bool) -> None:
        if depth:
            return self._at_depth(depth - 1, text, as_kernel)
        first = len(self.events)
        self.events.append(["cell", ""])
        try:
            found = outcome_of(run_cell(self.shell, text, as_kernel))
        except BaseException as error:
            found = {"left by": state.described(error)}
        self.cells.append({**found, "shown": [list(one) for one in self.events[first + 1 :]]})
        return None

    def _state(self, measured: bool) -> dict[str, Any]:
        signal.setitimer(signal.ITIMER_REAL, 0)
        leaving = []
        if measured and self.request["device"] is None:
            # Where nothing was on before, everything is as it was once it is off.
            for name in ("gpumem_auto off", "gpumem_device off"):
                try:
                    self._quietly(*name.split())
                except BaseException as error:
                    leaving.append(f"%{name}: {type(error).__name__}: {error}")
            self.shell.extension_manager.unload_extension("gpumem_magic")
        elif self.mode == "auto":
            self._quietly("gpumem_auto", "off")
        interpreter = state.of_interpreter(self.bearings, self.request.get("deep", True))
        return {
            "cells": self.cells,
            "shell": state.of_shell(self.shell),
            "interpreter": interpreter,
            "leaving": leaving,
            "files": state.of_files(Path(self.request["folder"])),
        }

    def _quietly(self, magic: str, words: str) -> None:
        """A line magic whose words are no part of what is compared."""
        events = len(self.events)
        try:
            self.shell.run_line_magic(magic, words)
        finally:
            del self.events[events:]

    def _publish(self, data: Any, metadata: Any = None, **options: Any) -> None:
        if self.mode == "shown" and is_report(data):
            return
        update = {key: value for key, value in options.items() if key in ("update", "transient") and value}
        self.events.append(["display", repr((data, metadata, update))])

    def _limit(self, request: dict[str, Any]) -> None:
        seconds = int(request.get("processor", request["seconds"]))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds + 2, seconds + 4))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_WRITTEN, MOST_WRITTEN))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))

    @staticmethod
    def _shake(amount: int) -> Any:
        """Another plain run is not the same process: other addresses, another moment, garbage collection elsewhere, other
        contents of memory that nobody has written."""
        if not amount:
            return None
        time.sleep(0.003 * amount)
        fill_unwritten(40 * amount)
        return [[{} for _ in range(amount * 217)], [object() for _ in range(amount * 1009)], bytearray(amount * 70_001)]


def fill_unwritten(byte: int) -> None:
    """From now on memory holds this byte (or its complement) where nothing has been written, numpy's store of small blocks too."""
    with contextlib.suppress(AttributeError):  # another libc
        ctypes.CDLL(None).mallopt(M_PERTURB, byte)
    numpy = sys.modules["numpy"]
    for size in range(1, 1025):
        for block in [numpy.empty(size, numpy.uint8) for _ in range(7)]:
            block.fill(byte)


def litter(amount: int) -> None:
    """Leaves so much garbage in circles, as anything does that ran before: `gc.collect()` returns how much it found."""
    for _ in range(amount):
        one: list[Any] = []
        one.append(one)


def share_counts() -> None:
    """Of what Python itself holds anywhere, small numbers among them, nobody owns a count of references: `sys.getrefcount` gives one
    figure, as it does from Python 3.12 on. The package's rows are full of zeros."""
    if sys.version_info >= (3, 12):
        return
    real = sys.getrefcount
    held_here = 0

    def getrefcount(thing: object, /) -> int:
        if thing is None or type(thing) is bool or (type(thing) is int and -5 <= thing <= 256):
            return (1 << 32) - 1
        return real(thing) - held_here

    probe = object()
    held_here = getrefcount(probe) - real(probe)
    sys.getrefcount = getrefcount


def with_first_line(cell: str, magic: str | None, interactivity: str = "last_expr") -> str:
    """The measured cell, or a plain one with its statements on the same lines."""
    if magic is not None:
        return f"{magic}\n{cell}"
    if is_shifted(cell, interactivity):
        return cell
    first = next((line for line in cell.splitlines() if line.strip()), "")
    # IPython takes away the indentation that the first line has, and its prompt.
    above = re.match(r"\s*(>>> |In \[\d+\]: )?", first)
    return f"{above[0] if above else ''}#\n{cell}"


def is_shifted(cell: str, interactivity: str = "last_expr") -> bool:
    """Whether a cell can have no line before it: another magic's, one that has prompts and none that is whole at its start, a word
    that IPython may take for a magic where it is the cell's only line, or a variable whose value IPython reads on the first line."""
    if interactivity == "last_expr_or_assign" and re.search(r"(?m)^\w+ *:[^=\n]*\s*\Z", cell):
        return True
    lines = [line.lstrip() for line in cell.lstrip().splitlines()[:2]]
    if len(cell.strip().splitlines()) == 1 and re.match(r"[a-z]\w*( [^=].*)?$", lines[0]):
        return True
    if lines and re.match(r">>> |In \[\d+\]: ", lines[0]):
        return False
    return cell.lstrip().startswith("%%") or any(re.match(r">>>|In \[\d+\]:|\.\.\.", line) for line in lines)


# The entry of what was found that has the number of the process.
PROCESS = "process"


def without_process(value: Any, number: str) -> Any:
    """What was found, without the number of the process, which no two of them share."""
    if isinstance(value, str):
        return re.sub(rf"(?<![0-9a-f]){number}(?![0-9a-f])", "PROCESS", value)
    if isinstance(value, dict):
        return {without_process(key, number): without_process(one, number) for key, one in value.items()}
    return [without_process(one, number) for one in value] if isinstance(value, list | tuple) else value


def in_child(shell: Any, request: dict[str, Any], bearings: dict[str, Any]) -> None:
    os.setsid()
    try:
        child = Child(shell, request, bearings)
        found = child.interrupted() if {"interrupt", "line"} & request.keys() else child.run()
    except BaseException:
        found = {"harness": traceback.format_exc()}
    path = Path(request["result"])
    try:
        for number, name in ((1, "written to stdout"), (2, "written to stderr")):
            raw = Path(f"{path}.{number}")
            found[name] = raw.read_bytes()[:100_000].decode("utf-8", "replace") if raw.exists() else ""
        own = str(os.getpid())
        content = pickle.dumps({**without_process(found, own), PROCESS: own})
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_WRITTEN, MOST_WRITTEN))
        # Whole or not at all: a cell may have set limits of its own, or the time may be up.
        Path(f"{path}.part").write_bytes(content)
        os.replace(f"{path}.part", path)
    finally:
        os._exit(0)


# ---- the server


def serve(shell: Any) -> None:
    bearings = state.bearings()
    for line in sys.stdin:
        request = json.loads(line)
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            in_child(shell, request, bearings)
        answer = interrupt(process, request) if "interrupt" in request else {}
        answer |= wait_for(process, request.get("processor", request["seconds"]))
        print(json.dumps(answer), flush=True)


def interrupt(process: int, request: dict[str, Any]) -> dict[str, Any]:
    """Sends SIGINT to a child once its cell runs, after each of the times; says how often, and how long the cell took."""
    ready, done = Path(request["result"] + ".ready"), Path(request["result"] + ".done")
    last = time.monotonic() + request["seconds"]
    while not ready.exists() and time.monotonic() < last:
        time.sleep(0.0005)
    began = time.monotonic()
    sent = 0
    for delay in request["interrupt"]:
        time.sleep(delay)
        if done.exists():
            break
        os.kill(process, signal.SIGINT)
        sent += 1
    while not request["interrupt"] and not done.exists() and time.monotonic() < last:
        time.sleep(0.0005)
    seconds = time.monotonic() - began
    Path(request["result"] + ".sent").touch()
    return {"sent": sent, "seconds": seconds}


def wait_for(process: int, seconds: float) -> dict[str, Any]:
    """Waits for a child, ends it when it has slept so long, and ends whatever it left in its process group.

    What computes has its limit of a processor's time (`_limit`), which it gets late where others compute as well.
    """
    handle = os.pidfd_open(process)
    last = time.monotonic() + 20 * seconds
    asleep, before, timed_out = 0.0, "", True
    try:
        while timed_out and asleep < seconds and time.monotonic() < last:
            timed_out = not select.select([handle], [], [], LOOK_AFTER)[0]
            used = slept_at(process)
            asleep = asleep + LOOK_AFTER if used and used == before else 0.0
            before = used
    finally:
        os.close(handle)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    return {"timed out": timed_out, "status": status if timed_out else os.waitstatus_to_exitcode(status)}


def slept_at(process: int) -> str:
    """What a process that sleeps has used of a processor so far; nothing for one that runs, or waits for a processor."""
    with contextlib.suppress(OSError):
        state, *numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        if state == "S":
            return f"{numbers[10]} and {numbers[11]}"
    return ""


def main() -> None:
    device = None if sys.argv[1] == "none" else sys.argv[1]
    answers, sys.stdout = sys.stdout, io.StringIO()
    shell = make_shell()
    warm(shell, device, json.loads(sys.argv[2]))
    sys.stdout = answers
    import IPython
    import torch

    print(
        json.dumps({"python": sys.version.split()[0], "IPython": IPython.__version__, "torch": torch.__version__}),
        flush=True,
    )
    serve(shell)


if __name__ == "__main__":
    main()
