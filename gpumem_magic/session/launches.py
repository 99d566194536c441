"""Processes that a measured program starts as its ranks, by `torch.multiprocessing`: `spawn`, `start_processes`, and what is made
of these, such as PyTorch's elastic launcher and Accelerate's `notebook_launcher`.

Each measures itself and writes its report into a folder of the recording's, from which one report of all is made.
"""

from __future__ import annotations

import importlib
import inspect
import multiprocessing.spawn
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from gpumem_magic.failures import swallowed
from gpumem_magic.files import rank_files
from gpumem_magic.own_folders import own_folder
from gpumem_magic.patching import Patches
from gpumem_magic.recording import under_way
from gpumem_magic.report.model import ReportData
from gpumem_magic.report.side_by_side import together
from gpumem_magic.session import device as choosing
from gpumem_magic.session.rank_process import RankProcess, place_of
from gpumem_magic.user_report import Report

_PLAIN = "from multiprocessing.spawn import spawn_main; spawn_main("
# How long processes that nobody waits for any more have to end, in seconds: a rank makes its report meanwhile.
_PATIENCE = 30.0
# Frames from PyTorch's function to what Python calls for it, at most.
_DEPTH = 20


class OwnRecording(Protocol):
    """What is needed of a rank's own recording."""

    def close(self, error: BaseException | None = None) -> Report: ...


class Launches:
    """What a recording knows of them. open_recording: begins one in a started process."""

    def __init__(self, open_recording: Callable[[], OwnRecording]) -> None:
        self._open_recording = open_recording
        self._patches = Patches()
        self._around = ExitStack()
        self._folder: Path | None = None
        self._process = os.getpid()
        # Of the last launch: how many processes it starts, on which virtual devices, and whether it waits for them.
        self._count = 0
        self._device: str | None = None
        self._waits = False
        self._others: set[Any] = set()

    def watch(self) -> None:
        self._patches.attempt(replace_wrap, self._wrap)
        if self._patches.lacking:
            return
        spawn = multiprocessing.spawn
        # PyTorch asks for it before it starts the first process.
        self._patches.set(multiprocessing, "get_context", self._get_context(multiprocessing.get_context))
        self._patches.set(spawn, "get_command_line", self._get_command_line(spawn.get_command_line))

    def put_back(self) -> None:
        """May be called twice."""
        self._patches.undo()

    def with_ranks(self, own: ReportData) -> ReportData:
        """The report of all ranks of the last launch, the worst first; of this process, where none were started. What a rank
        writes later is lost."""
        if self._folder is None:
            return own
        if self._waits:
            # Somebody interrupted that, and nobody can wait for them any more.
            _end(set(multiprocessing.active_children()) - self._others)
        try:
            merged = together([one.known for one in rank_files.read(self._folder)], self._count)
        except (OSError, ValueError) as error:
            return replace(own, remarks=(f"Of the {self._count} processes that this started: {error}.", *own.remarks))
        finally:
            self._around.close()
        notes = [f"The process that started them: {own.answer}"] * any(row.peak_allocated for row in own.checkpoints)
        return replace(merged, remarks=(*merged.remarks, *notes))

    def _get_context(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_context(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            start = _starting()
            if start is not None and self._process == os.getpid():
                try:
                    self._begin(start)
                except Exception as error:
                    swallowed(error)
            return found

        return get_context

    def _begin(self, start: Mapping[str, Any]) -> None:
        self._around.close()
        self._folder = None
        count = start.get("nprocs")
        # (A server that forks for others has nothing of what was replaced here.)
        if type(count) is not int or count < 1 or start.get("start_method") == "forkserver":
            return
        machine = choosing.virtual()
        self._count, self._waits = count, start.get("join") is True
        self._device = None if machine is None else choosing.for_ranks(machine.spec.text, count)
        self._others = set(multiprocessing.active_children())
        self._folder = self._around.enter_context(own_folder("gpumem-ranks-"))

    def _wrap(self, original: Callable[..., None]) -> Callable[..., None]:
        """In a forked process; one that starts afresh has `spawned.main`."""

        def wrap(function: Any, number: int, args: Any, error_file: Any) -> None:
            if self._folder is None or self._process == os.getpid():
                return original(function, number, args, error_file)

            def begin() -> OwnRecording:
                under_way.abandon()
                machine = choosing.virtual()
                if machine is not None:
                    machine.forked()
                    choosing.put_on(self._device)
                return self._open_recording()

            rank = RankProcess(self._folder, number, number, self._count, forked=True)
            try:
                return as_rank(rank, begin, lambda: original(function, number, args, error_file))
            finally:
                machine = choosing.virtual()
                if machine is not None:
                    machine.smi.remove()

        return wrap

    def _get_command_line(self, original: Callable[..., list[str]]) -> Callable[..., list[str]]:
        def get_command_line(**pipe: Any) -> list[str]:
            words = original(**pipe)
            if self._folder is None or _starting() is None:
                return words
            given = f"{self._device!r}, {str(self._folder)!r}, {self._count}"
            own = f"from gpumem_magic.session.spawned import main; main({given}, "
            # (The interpreter's path is bytes.)
            return [one.replace(_PLAIN, own, 1) if isinstance(one, str) else one for one in words]

        return get_command_line


def replace_wrap(patches: Patches, wrapped: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Puts another function in the place of what a process of PyTorch's runs first."""
    patches.set(_module(), "_wrap", wrapped(_module()._wrap))


def as_rank(rank: RankProcess, begin: Callable[[], OwnRecording], run: Callable[[], None]) -> None:
    """Runs a process's program measured. What the program raises is raised, and none of ours."""
    recording: OwnRecording | None = None
    try:
        recording = begin()
        rank.begin(recording.close)
    except Exception as error:
        _say(rank, "measuring is not possible here", error)
    failure: BaseException | None = None
    try:
        run()
    except BaseException as error:
        if not rank.was_ended:
            failure = error
            if isinstance(error, SystemExit):
                # PyTorch writes the program's error down, and leaves with a status of its own.
                failure = (error.__context__ or error) if error.code else None
        raise
    finally:
        rank.leaves()
        try:
            rank.end(None if recording is None else recording.close(failure), where=place_of(failure))
        except Exception as error:
            _say(rank, "the report could not be made", error)


def _say(rank: RankProcess, what: str, error: Exception) -> None:
    print(f"gpumem: rank {rank.file.rank}: {what} ({swallowed(error).splitlines()[0]})", file=sys.stderr)


def _module() -> Any:
    """(`torch.multiprocessing.spawn` is its function of that name.)"""
    return importlib.import_module("torch.multiprocessing.spawn")


def _starting() -> Mapping[str, Any] | None:
    """What PyTorch was asked to start, while it does so; None where it does not."""
    code, frame = _module().start_processes.__code__, inspect.currentframe()
    for _ in range(_DEPTH):
        if frame is None or frame.f_code is code:
            return frame and frame.f_locals
        frame = frame.f_back
    return None


def _end(processes: set[Any]) -> None:
    try:
        for one in processes:
            one.terminate()
        for one in processes:
            one.join(_PATIENCE)
    finally:
        for one in processes:
            if one.is_alive():
                one.kill()
            one.join()
