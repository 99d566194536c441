"""Ending a run early: after a given number of training iterations, or once iterations repeat exactly.

An iteration is a step of the first optimizer. A loop that the cell wrote itself ends as `break` would end it. A loop inside
a call (``trainer.train()``) is left by raising `StopRun` where its next iteration would begin, at the next forward of an
outermost module.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from gpumem_magic.looks.objects import attribute
from gpumem_magic.patching import Patches
from gpumem_magic.recording import torch_seams
from gpumem_magic.recording.instrument import Statement
from gpumem_magic.recording.progress import StopRun
from gpumem_magic.units import counted


class IterationLimit:
    """Decides when a run is long enough: after `most` iterations (None: no limit), or when `repeating` says so.

    position: how far the devices' logs have come, in all. A loop that makes none of them longer is not ended: it only prepares.
    runs_in: gives the number of the process in which the program goes on (None: it is this one).
    """

    def __init__(
        self,
        most: int | None,
        repeating: Callable[[], bool],
        position: Callable[[], int],
        runs_in: Callable[[], int] | None = None,
    ) -> None:
        self.stopped = False
        self.steps = 0
        # Iterations of a loop without steps, after which it ended.
        self._turns = 0
        self._most = most
        self._repeating = repeating
        self._position = position
        self._first: weakref.ref[Any] | None = None
        self._step_statement: int | None = None
        self._statement: int | None = None
        self._thread, process = threading.get_ident(), os.getpid()
        self._runs_in = runs_in or (lambda: process)
        # Of each loop, the steps and the position at its start.
        self._at_start: dict[int, int] = {}
        self._position_at_start: dict[int, int] = {}
        self._handles: list[Any] = []
        self._patches = Patches()

    def install(self) -> None:
        torch_seams.watch_steps(self._patches, self._step_begins)
        torch_seams.passed_over(self._before_forward.__func__, with_all_below=True)  # type: ignore[attr-defined]
        self._handles.append(register_module_forward_pre_hook(self._before_forward))

    def remove(self) -> None:
        torch_seams.remove_hooks(self, self._handles)
        self._patches.undo()

    def ran(self) -> str:
        """How far a run that was stopped had come, in words."""
        if self.steps or not self._turns:
            return counted(self.steps, "training iteration")
        return f"{counted(self._turns, 'iteration')} of a loop"

    # ---- what the cell tells

    def statement_began(self, statement: Statement) -> None:
        self._statement = statement.index
        if statement.kind in ("for", "while"):
            self._at_start[statement.index] = self.steps
            self._position_at_start[statement.index] = self._position()

    def should_end(self, loop: Statement, iteration: tuple[int, ...], steps_expected: bool) -> bool:
        """Whether the loop, which begins this iteration, is to end. steps_expected: its body calls an optimizer's step."""
        stepped_in_loop = self.steps > self._at_start.get(loop.index, 0)
        if self._enough() and stepped_in_loop:
            self.stopped = True
            return True
        counts_turns = not stepped_in_loop and not steps_expected and len(iteration) == 1
        if counts_turns and self._at_most(iteration[0] - 1) and self._moved_in(loop):
            self.stopped, self._turns = True, iteration[0] - 1
            return True
        return False

    def _moved_in(self, loop: Statement) -> bool:
        return self._position() > self._position_at_start.get(loop.index, 0)

    def _enough(self) -> bool:
        return self._at_most(self.steps) or self._repeating()

    def _in_its_thread(self) -> bool:
        """Not in another, nor in a forked process (a DataLoader's worker), which has the hooks and the thread's number, too."""
        return threading.get_ident() == self._thread and os.getpid() == self._runs_in()

    def _at_most(self, count: int) -> bool:
        """Whether so many iterations are as many as are wanted."""
        return self._most is not None and count >= self._most

    # ---- what PyTorch tells

    def _step_begins(self, optimizer: torch.optim.Optimizer) -> Callable[[bool], None]:
        return lambda failed: None if failed else self._stepped(optimizer)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        if self._first() is optimizer:
            self.steps += 1
            self._step_statement = self._statement

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        """At the head of an iteration inside a call: the last steps were made by this very statement, and are enough."""
        inside = self._statement is not None and self._step_statement == self._statement
        if inside and self.steps and self._in_its_thread() and self._enough() and attribute(module, "training"):
            self.stopped = True
            raise StopRun
