"""Shells and a session for the tests of the magics: the session measures nothing and remembers what it was told."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumem_magic.devices.base import DeviceError
from gpumem_magic.report.model import ReportData


@dataclass
class FakeObserver:
    """Keeps (line, text, iteration, loops) of every row; header rows apart."""

    max_iterations: int | None = None
    rows: list[tuple[int, str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    headers: list[tuple[int, str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    started: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    broken: Exception | None = None

    @property
    def may_end(self) -> bool:
        return self.max_iterations is not None

    def before_statement(self, statement: Any, iteration: tuple[int, ...], loops: tuple[int, ...]) -> None:
        self.started.append((statement.line, iteration))

    def after_statement(self, statement: Any, iteration: tuple[int, ...], loops: tuple[int, ...]) -> None:
        if self.broken is not None:
            raise self.broken
        kept = self.headers if statement.header else self.rows
        kept.append((statement.line, statement.text, iteration, loops))

    def wants_stop(self, loop: Any, iteration: tuple[int, ...]) -> bool:
        return self.max_iterations is not None and iteration[-1] > self.max_iterations

    def lines(self) -> list[int]:
        return [row[0] for row in self.rows]


class FakeReport:
    """Shown as one line of text; of a program that put something on a device."""

    devices = ()
    checkpoints = (types.SimpleNamespace(peak_allocated=1),)

    def __init__(self, word: str = "report") -> None:
        self.word = word
        self.saved: list[str] = []

    def __repr__(self) -> str:
        return f"<<{self.word}>>"

    def view(self, kind: str | None, name: str = "report") -> FakeReport:
        return FakeReport(kind or self.word)

    def save(self, path: Any) -> None:
        with open(path, "w") as file:
            file.write("{}")


class FakeRecording:
    def __init__(self, session: FakeSession) -> None:
        self._session = session

    def observer(
        self, max_iterations: int | None = None, lines: bool = True, *, until_repeat: bool = False, source: str = ""
    ) -> FakeObserver:
        self._session.asked = (max_iterations, lines, until_repeat, source)
        self._session.observer.max_iterations = max_iterations
        return self._session.observer

    def close(
        self,
        error: BaseException | None,
        failed: Any,
        user_ns: Mapping[str, Any] | None,
        left: BaseException | None = None,
    ) -> FakeReport:
        self._session.open = False
        self._session.closed.append((None if error is None else repr(error), failed))
        if self._session.close_error is not None:
            raise self._session.close_error
        return FakeReport()


class FakeSession:
    """Stands where the functions of `gpumem_magic.session` would, once it is installed."""

    def __init__(self) -> None:
        self.observer = FakeObserver()
        self.open = False
        self.opened: list[tuple[str | None, frozenset[str]]] = []
        self.closed: list[tuple[str | None, Any]] = []
        self.asked: tuple[int | None, bool, bool, str] | None = None
        self.open_error: Exception | None = None
        self.close_error: Exception | None = None
        self.on: str | None = None

    def open_recording(
        self,
        device: str | None,
        *,
        names: frozenset[str],
        user_ns: Mapping[str, Any] | None = None,
        own_file: str | None = None,
        is_running: Any = None,
        words: Any = None,
    ) -> FakeRecording:
        if device == "nonsense":
            raise DeviceError("unknown device 'nonsense'; known are T4, L4")
        if self.open_error is not None:
            raise self.open_error
        self.opened.append((device, names))
        self.open = True
        return FakeRecording(self)

    def install(self, put: Callable[[Any, str, Any], None]) -> None:
        """put: as `setattr`."""
        from gpumem_magic.notebook import devices
        from gpumem_magic.session import device, recording
        from gpumem_magic.views import text

        # A report of these fakes is a word.
        render = text.render
        put(
            text,
            "render",
            lambda report, **how: render(report, **how) if isinstance(report, ReportData) else str(report),
        )
        put(recording, "open_recording", self.open_recording)
        put(recording, "last_report", lambda: None)
        put(device, "choose", self.choose)
        put(device, "is_any", lambda: self.on is not None)
        put(device, "off", self.off)
        put(devices, "state", lambda: f"on: {self.on}; known are T4, L4")
        put(devices, "memory_text", lambda: "state of all devices")
        put(devices, "smi_lines", lambda: ["3769MiB / 16160MiB", "2MiB / 16160MiB"])

    def choose(self, name: str) -> str:
        if name == "nonsense":
            raise DeviceError("unknown device 'nonsense'; known are T4, L4")
        self.on = name
        return f"{name} is on"

    def off(self) -> str:
        self.on = None
        return "off now"


def install_session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    session = FakeSession()
    session.install(monkeypatch.setattr)
    return session


@contextmanager
def clean_shell() -> Any:
    """A shell of its own, as the one that `get_ipython` finds."""
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False
    shell.run_line_magic("colors", "nocolor" if "nocolor" in _colour_names(shell) else "NoColor")
    shell.user_ns["get_ipython"] = lambda: shell
    try:
        yield shell
    finally:
        InteractiveShell.clear_instance()


def show_text_alone(shell: InteractiveShell) -> None:
    """As a terminal does: a report's pictures take a second."""
    shell.display_formatter.active_types = ["text/plain"]


@contextmanager
def shell_with_device(device: str = "T4") -> Any:
    """The same with the extension loaded, torch imported, and a virtual device on."""
    import torch

    from gpumem_magic.recording import under_way
    from gpumem_magic.virtual import gpu

    with clean_shell() as shell:
        shell.run_line_magic("load_ext", "gpumem_magic")
        shell.user_ns["torch"] = torch
        gpu.turn_on(device)
        try:
            yield shell
        finally:
            under_way.abandon()
            gpu.turn_off()


def _colour_names(shell: InteractiveShell) -> list[str]:
    trait = type(shell).colors
    return [str(value) for value in getattr(trait, "values", None) or ["nocolor"]]
