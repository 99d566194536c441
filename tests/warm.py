"""Python processes that have PyTorch and the package loaded already: what tests start by the dozen costs a fork in place of five
seconds of imports.

`executable()` stands for `sys.executable`. What is run finds its own `__main__`, folder, environment, input and output, and ends
as Python ends it. Where a command has options of Python's, or an environment that Python or PyTorch read as they are loaded, a
new Python runs it after all. For tests whose subject is not how a process starts. (The processes of multiprocessing's server of
forks run functions of the process that asks: launchers and Jupyter start a command.)
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import io
import json

# (It starts processes with the Python that is `sys.executable` when it is loaded, and hands them pipes, which a fork has not.)
import multiprocessing.spawn  # noqa: F401
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib.machinery import BuiltinImporter, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import pytest

HERE = Path(__file__).resolve().parent
# As it is before a test changes it.
_environment = dict(os.environ)
_folder = tempfile.TemporaryDirectory(prefix="gpumem-tests-")
# What `gpumem run` and kernels load, beside what measuring a line of a program does.
_LOADED = (
    "gpumem_magic.commands.run",
    "gpumem_magic.commands.shown_ranks",
    "ipykernel.kernelapp",
    "torch._dynamo",
    "torch.distributed.run",
)
# Of the environment, what is read as they are loaded.
_READ_EARLY = (
    "PYTHON",
    "OMP_",
    "MKL_",
    "KMP_",
    "LD_",
    "LC_",
    "LANG",
    "TORCH_",
    "PYTORCH_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
)
_SEARCHED = "PYTHONPATH"
_THREADS = "OMP_NUM_THREADS"
# What PyTorch's launcher of ranks gives them, which is read where they meet.
_READ_LATE = ("TORCH_NCCL_", "TORCH_ELASTIC_")
HANDED_ON = "GPUMEM_TESTS_EXECUTABLE"
"""The variable that says what `sys.executable` is to a process."""


@functools.cache
def executable() -> str:
    """What runs Python's commands where `sys.executable` would. (It is that where the system has no such processes.)"""
    if not sys.platform.startswith("linux"):
        return sys.executable
    name = f"gpumem-tests-{os.getpid()}"
    _servers.append(_started(name))
    file = Path(_folder.name, "python")
    words = (sys.executable, "-S", "-E", str(HERE / "warm_client.py"), name)
    file.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
    file.chmod(0o755)
    return str(file)


def in_place_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a fixture: what the test starts as `sys.executable`, and what that starts, is run so."""
    monkeypatch.setenv(HANDED_ON, executable())
    monkeypatch.setattr(sys, "executable", executable())


# Kept, and with it the other end of its input.
_servers: list[subprocess.Popen[bytes]] = []


def _started(name: str) -> subprocess.Popen[bytes]:
    """A server that listens. It ends when nobody holds the other end of its input any more."""
    begins = "import sys; sys.path.insert(0, sys.argv[1]); import warm; warm.main(sys.argv[2])"
    server = subprocess.Popen(
        [sys.executable, "-c", begins, str(HERE), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment,
        start_new_session=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return server


def main(name: str) -> None:
    """The server's life, and that of each process that it forks."""
    searched = os.environ.get(_SEARCHED, "").split(os.pathsep)
    # (Two folders are the command's own: where it was started, and this one.)
    path = [one for one in sys.path[2:] if one not in searched]
    environment = _read_early(os.environ)
    for one in _LOADED:
        importlib.import_module(one)
    _measure()
    # Nothing that is there now is garbage of theirs.
    gc.collect()
    gc.freeze()
    request = _serve(name)
    if request is not None:
        _run(request, path, environment)


def _measure() -> None:
    import torch

    import gpumem_magic
    from gpumem_magic.virtual import gpu

    with gpumem_magic.measure(device="T4") as measured:
        torch.nn.Linear(8, 8).cuda()(torch.ones(8, 8, device="cuda")).sum().backward()
    str(measured.report)
    gpu.turn_off()


def _serve(name: str) -> dict[str, Any] | None:
    """Until nobody needs it (None), or in a process that it forked: what that is to run."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(f"\0{name}")
    listening.listen(64)
    wakes, woken = socket.socketpair()
    for one in (wakes, woken):
        one.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    waiting = selectors.DefaultSelector()
    for one in (listening, wakes, sys.stdin.buffer):
        waiting.register(one, selectors.EVENT_READ)
    clients: dict[int, socket.socket] = {}
    print("ready", flush=True)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is listening:
                connection, _ = listening.accept()
                try:
                    request, files = _received(connection)
                except ConnectionError:
                    connection.close()
                    continue
                process = os.fork()
                if not process:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    waiting.close()
                    for one in (listening, wakes, woken, connection, *clients.values()):
                        one.close()
                    for number, file in enumerate(files):
                        os.dup2(file, number)
                        os.close(file)
                    return request
                for file in files:
                    os.close(file)
                clients[process] = connection
                waiting.register(connection, selectors.EVENT_READ, process)
                # (Where whoever asked is gone by now, that is read next.)
                with suppress(OSError):
                    connection.sendall(b"%d\n" % process)
            elif key.fileobj is wakes:
                wakes.recv(4096)
            elif key.fileobj is sys.stdin.buffer:
                for process in clients:
                    os.kill(process, signal.SIGKILL)
                return None
            elif key.data in clients:
                # Whoever asked for it is gone, killed perhaps.
                os.kill(key.data, signal.SIGKILL)
                waiting.unregister(key.fileobj)
        _tell_the_ended(clients, waiting)


def _received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request, and the three files that came with it. Raises ConnectionError where whoever asks is gone before all of it came:
    a launcher ends its other processes when one fails, also those that have only begun."""
    length, files, _, _ = socket.recv_fds(connection, 10, 3)
    # (Who is gone before that sends nothing more, either.)
    text, wanted = b"", int(length or 1)
    while len(text) < wanted:
        part = connection.recv(wanted - len(text))
        if not part:
            for file in files:
                os.close(file)
            raise ConnectionError("whoever asked is gone")
        text += part
    return json.loads(text), files


def _tell_the_ended(clients: dict[int, socket.socket], waiting: selectors.BaseSelector) -> None:
    while clients:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        connection = clients.pop(process)
        if connection in waiting.get_map():
            waiting.unregister(connection)
        with suppress(OSError):
            connection.sendall(b"%d\n" % status)
        connection.close()


def _read_early(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: text
        for name, text in environment.items()
        if name.startswith(_READ_EARLY) and not name.startswith(_READ_LATE) and name not in (_SEARCHED, _THREADS)
    }


def _run(request: dict[str, Any], path: list[str], early: Mapping[str, str]) -> None:
    """As `python` runs these arguments, with this environment and folder. path, early: where the server, as it began, searched,
    and what of its environment is read then."""
    arguments, environment = request["argv"], request["env"]
    os.chdir(request["cwd"])
    if _read_early(environment) != early or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")):
        os.execve(sys.executable, [sys.executable, *arguments], environment)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        was = getattr(sys, name)
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        buffer = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        now = io.TextIOWrapper(buffer, was.encoding, was.errors, line_buffering=number == 2 or raw.isatty())
        setattr(sys, name, now)
        setattr(sys, f"__{name}__", now)
    sys.executable = environment.get(HANDED_ON, sys.executable)
    if _THREADS in environment:
        sys.modules["torch"].set_num_threads(int(environment[_THREADS]))
    tempfile.tempdir = None
    main = sys.modules["__main__"] = ModuleType("__main__")
    kind, first, is_folder = arguments[0], os.getcwd(), False
    searched = [one for one in environment.get(_SEARCHED, "").split(os.pathsep) if one]
    if kind in ("-m", "-c"):
        sys.argv[:] = [kind, *arguments[2:]]
        first = first if kind == "-m" else ""
    else:
        sys.argv[:] = arguments
        is_folder = os.path.isdir(kind)
        kind = os.path.abspath(kind)
        first = kind if is_folder else str(Path(kind).resolve().parent)
    sys.path[:] = [first, *searched, *path]
    try:
        if kind == "-m":
            runpy._run_module_as_main(arguments[1])
        elif is_folder:
            runpy._run_module_as_main("__main__", False)
        else:
            file = "<string>" if kind == "-c" else kind
            text = arguments[1] if kind == "-c" else Path(kind).read_bytes()
            main.__loader__ = BuiltinImporter
            if kind != "-c":
                main.__file__ = kind
                main.__loader__ = SourceFileLoader("__main__", kind)
            exec(compile(text, file, "exec"), main.__dict__)
        status = 0
    except BaseException as error:
        status = _status_of(error)
    _end(status)


def _status_of(error: BaseException) -> int:
    """What a program ends with that raised this, which is shown where Python shows it."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return int(error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    # Without this file's lines.
    while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename in (
        __file__,
        runpy.__file__,
    ):
        error.__traceback__ = error.__traceback__.tb_next
    sys.excepthook(type(error), error, error.__traceback__)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _end(status: int) -> NoReturn:
    """As Python ends, but for what the server had loaded: taking that down takes seconds. status: below zero, of which signal."""
    threading._shutdown()
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
