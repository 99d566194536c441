"""What only Linux has stands in one place each; the other way is tried here by taking it away. (Not run: Windows, macOS.)"""

from __future__ import annotations

import builtins
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpumem_magic.devices import driver
from gpumem_magic.virtual.card import smi
from gpumem_magic.virtual.engine import host_memory

PACKAGE = Path(__file__).parents[1] / "gpumem_magic"
# What Windows or macOS lack -> the only files that may speak of it.
ONLY_IN = {
    # (Who runs on a GPU; and the memory that a host has left.)
    # Whether a rank that has ended only waits to be asked after; without it, it counts as alive. How many threads a process has,
    # and what a trial's has started; without it, what has its session ends.
    r"/proc\b": {
        "devices/driver.py",
        "virtual/engine/host_memory.py",
        "files/rank_files.py",
        "trials/process.py",
        "trials/ending.py",
    },
    r"\bimport_module\(\"pwd\"\)|^\s*import pwd|from pwd ": {"devices/driver.py"},
    r"\bos\.fork\b|register_at_fork|\bos\.killpg\b|\bos\.getuid\b|\bos\.geteuid\b|import resource": {
        # Trials are refused in one line without `os.fork`; ranks of one user find each other only where users have numbers;
        # groups of processes are those that PyTorch's launcher, or a trial, has started. What forks waits for the virtual device.
        "virtual/gpu.py",
        "uninterrupted.py",
        "trials/process.py",
        "trials/ending.py",
        "session/rank_process.py",
        "commands/ending.py",
        "commands/launch.py",
    },
    r"\bfcntl\b": {"virtual/card/smi.py", "own_folders.py"},
    r"signal\.(?!SIGINT\b|getsignal\b|Signals\b|strsignal\b)[A-Z]\w*|\bos\.kill\b": {
        "trials/process.py",
        "trials/ending.py",
        "session/rank_process.py",
        "commands/ending.py",
        "commands/launch.py",
        "files/rank_files.py",
    },
    r"\bos\.name\b": {"virtual/card/smi.py"},
    # (A trial asks Linux to end it with its parent.)
    r"\bsys\.platform\b": {"virtual/card/calibration.py", "trials/ending.py"},
    r"environ\[\"PATH\"\]": {"virtual/card/smi.py", "patching.py"},
}


class AsWindows:
    """The module `os` as another system has it."""

    name = "nt"

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    usual_open, usual_stat = builtins.open, os.stat

    def refuse(path: Any) -> None:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(path)

    def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(path)
        return usual_open(path, *args, **kwargs)

    def stated(path: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(path)
        return usual_stat(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", opened)
    monkeypatch.setattr(os, "stat", stated)


@pytest.mark.parametrize("pattern", ONLY_IN)
def test_it_stands_in_one_place(pattern: str) -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(pattern, path.read_text("utf-8"), re.M)
    }
    assert found <= ONLY_IN[pattern]


def test_without_proc_a_process_has_no_owner_and_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    no_proc(monkeypatch)
    assert driver._user(os.getpid()) is None
    assert driver._command(os.getpid()) is None


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_without_users_names_an_owner_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    assert driver._command(os.getpid()) is not None
    monkeypatch.setattr(driver, "import_module", missing)
    assert driver._user(os.getpid()) == str(os.stat("/proc/self").st_uid)


def test_on_windows_nvidia_smi_is_a_batch_file_that_starts_the_same_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(smi, "os", AsWindows())
    smi._write_program(str(tmp_path), str(tmp_path / "no such state"))
    batch = (tmp_path / "nvidia-smi.bat").read_text("utf-8")
    assert not (tmp_path / "nvidia-smi").exists()
    command = re.fullmatch(r'@"(?P<python>.+)" -IS "(?P<script>.+)" %\*\n', batch)
    assert command is not None
    assert command["python"] == sys.executable
    ran = subprocess.run(
        [sys.executable, "-IS", command["script"], "--version"], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in ran.stderr


def test_a_host_that_does_not_say_what_it_has_left_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("_MEMINFO", "_LIMIT", "_CURRENT"):
        monkeypatch.setattr(host_memory, name, tmp_path / name)
    assert host_memory.available() is None
    host_memory.HostMemory().ask(1 << 60)
