"""Puts an `nvidia-smi` that answers for the virtual GPUs first on the PATH of `!` commands, and removes it again.

Nothing is installed: a private directory holds a small program (`smi_script.py`, precompiled, since it starts after every
line of a training loop) and the state file that it reads. This process writes 16 bytes there whenever memory changes.
A forked child (a DataLoader worker, say) neither writes nor cleans up: the directory is its parent's.
"""

from __future__ import annotations

import functools
import os
import py_compile
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gpumem_magic.own_folders import clear_away, lock
from gpumem_magic.patching import Patches
from gpumem_magic.virtual.card import smi_script
from gpumem_magic.virtual.card.catalog import DeviceState, bus_id

# Kernels before 5.1 cut a `#!` line off here, its end included.
_SHEBANG_BYTES = 127
_PREFIX = "gpumem-magic-"
_STATE = "state"
# Beyond what programs count to, below what systems allow (256 in some).
_HIGH = 200


class VirtualSmi:
    """The `nvidia-smi` of `devices` (whose indices are 0, 1, ...), from `install` to `remove`. Both may be called twice."""

    def __init__(self, devices: Sequence[DeviceState]) -> None:
        self._devices = devices
        self._directory: str | None = None
        self._patches = Patches()
        self._file: int | None = None
        self._pid = 0
        # Re-entrant: a finalizer that frees memory may run inside `update` and call it again.
        self._lock = threading.RLock()

    @property
    def directory(self) -> str | None:
        """Where the program is while it is installed."""
        return self._directory

    def install(self) -> None:
        """Raises OSError where no directory takes a program that can be run; nothing has changed then."""
        if self._directory is not None:
            return
        directory = _private_directory()
        opened: int | None = None
        try:
            state = os.path.join(directory, _STATE)
            with open(state, "wb") as file:
                for device in self._devices:
                    file.write(_record(device))
            _write_program(directory, state)
            opened = os.open(state, os.O_WRONLY | getattr(os, "O_BINARY", 0))
            self._file = _out_of_the_way(opened)
            lock(self._file)
            if self._file != opened:
                os.close(opened)
        except BaseException:
            for number in {opened, self._file}:
                with suppress(OSError):
                    if number is not None:
                        os.close(number)
            self._file = None
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._directory, self._pid = directory, os.getpid()
        self._patches.search_first(directory)

    def update(self, index: int, used_bytes: int) -> None:
        """Device `index` uses `used_bytes` now. About a microsecond; nothing after `remove`, or in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._file is not None:
                data = smi_script.pack_used(max(0, used_bytes))
                _write_at(self._file, data, index * smi_script.RECORD_BYTES)

    def remove(self) -> None:
        """Puts the PATH back as it was (where the user changed it meanwhile, only our entry goes) and cleans up."""
        if self._directory is None or os.getpid() != self._pid:
            return
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                os.close(file)
        self._patches.undo()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = None

    def __enter__(self) -> VirtualSmi:
        self.install()
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def _record(device: DeviceState) -> bytes:
    model = device.model
    return smi_script.pack(
        device.used_bytes(),
        model.smi_total_bytes,
        model.driver_reserved_bytes,
        model.capability,
        device.uuid,
        bus_id(device.index),
        model.name,
    )


def _write_at(file: int, data: bytes, offset: int) -> None:
    if hasattr(os, "pwrite"):
        os.pwrite(file, data, offset)
    else:
        os.lseek(file, offset, os.SEEK_SET)
        os.write(file, data)


def _private_directory() -> str:
    """A new directory (mode 0700) on the first file system that lets programs run and whose path fits into PATH."""
    places = [tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR"), os.path.expanduser("~")]
    for place in places:
        if not place or os.pathsep in place:
            continue
        with suppress(OSError):
            clear_away(place, _PREFIX, _STATE)
            directory = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
            probe = Path(directory, "probe")
            probe.write_bytes(b"")
            probe.chmod(0o700)
            # False on a file system that is mounted `noexec`.
            runs = os.access(probe, os.X_OK)
            probe.unlink()
            if runs:
                return directory
            shutil.rmtree(directory, ignore_errors=True)
    raise OSError(f"no place for a program among {', '.join(repr(place) for place in places if place)}")


def _out_of_the_way(file: int) -> int:
    """The file under a high number, too, where there are such: those that the program opens have the numbers that they have
    without it."""
    try:
        import fcntl

        return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except (ImportError, AttributeError, OSError):
        return file


@functools.cache
def _files() -> tuple[tuple[str, bytes], ...]:
    """The program's files by their names in its directory: the module, its words, and the module compiled."""
    module = Path(smi_script.__file__).with_suffix(".py")
    with tempfile.TemporaryDirectory() as place:
        compiled = Path(place, "compiled")
        # (It holds for whatever time the file has where it is written to.)
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(module), str(compiled), module.name, doraise=True, invalidation_mode=mode)
        code = compiled.read_bytes()
    words = module.with_suffix(".txt")
    return (
        (module.name, module.read_bytes()),
        (words.name, words.read_bytes()),
        (f"__pycache__/{module.stem}.{sys.implementation.cache_tag}.pyc", code),
    )


def _write_program(directory: str, state: str) -> None:
    # -I and -S: nothing of the user's environment is read, which is also what makes it start fast.
    for name, data in _files():
        path = Path(directory, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    start = f"import sys\nsys.path.append({directory!r})\nfrom smi_script import main\nmain({state!r})\n"
    python = sys.executable or "python3"
    if os.name == "nt":
        script = Path(directory, "start.py")
        script.write_text(start, encoding="utf-8")
        program = Path(directory, "nvidia-smi.bat")
        program.write_text(f'@"{python}" -IS "{script}" %*\n', encoding="utf-8")
        return
    program = Path(directory, "nvidia-smi")
    shebang = f"#!{python} -IS"
    if os.path.isabs(python) and not any(c.isspace() for c in python) and len(os.fsencode(shebang)) < _SHEBANG_BYTES:
        program.write_text(f"{shebang}\n{start}", encoding="utf-8", errors="surrogateescape")
    else:
        script = Path(directory, "start.py")
        script.write_text(start, encoding="utf-8")
        command = f'#!/bin/sh\nexec {shlex.quote(python)} -IS {shlex.quote(str(script))} "$@"\n'
        program.write_text(command, encoding="utf-8", errors="surrogateescape")
    program.chmod(0o700)
