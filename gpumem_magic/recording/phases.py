"""When forward, backward and the optimizer's step begin and end, wherever in the program they are called from.

Everything here is global and temporary: hooks and replaced functions go back at `stop`. A hook returns None always, so that no
result changes. Phases may begin in any thread; what another thread does inside a phase belongs to that phase.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from gpumem_magic.looks.objects import attribute, name_of_class
from gpumem_magic.looks.tensors import as_written
from gpumem_magic.patching import Patches
from gpumem_magic.recording import torch_seams
from gpumem_magic.recording.guard import Guard
from gpumem_magic.recording.hidden import Hidden
from gpumem_magic.recording.identity import Witness
from gpumem_magic.recording.model import (
    AUTOCAST_ENDS,
    BACKWARD,
    FORWARD,
    NO_WIDE_WEIGHTS,
    OPTIMIZER,
    PHASES,
    RECOMPUTATION,
    WORKSPACES_GO,
    Moment,
    Span,
)
from gpumem_magic.recording.modules import ModuleWatch

# What Inductor compiled, where it runs outside all other phases.
COMPILED = "compiled code"
# PyTorch wraps these names around its own work; they are the phases themselves, or nothing that a user asked to see.
_OWN_RANGES = (
    torch_seams.STEP_RANGE,
    "Optimizer.zero_grad#",
    "enumerate(DataLoader)#",
    "DistributedDataParallel.",
    "FullyShardedDataParallel.",
    "FSDP::",
)


@dataclass
class _Open:
    """A span that has begun. owner: id of the module or optimizer, to know its end by. in_threads: whether it is of a module that
    runs in threads itself. beside, evaluating: as of a span."""

    kind: str
    label: str
    start: Moment
    thread: int
    owner: int = 0
    in_threads: bool = False
    beside: bool = False
    evaluating: bool = False


class Phases:
    """Records spans from `start` to `stop`. `moment` reads the devices; `step_ended` is told of each first-optimizer step,
    `grown` of each span that is added, `began` of each that begins."""

    def __init__(
        self,
        moment: Callable[[], Moment],
        witness: Witness,
        guard: Guard,
        step_ended: Callable[[], None] = lambda: None,
        grown: Callable[[], None] = lambda: None,
        modules: ModuleWatch | None = None,
        began: Callable[[], None] = lambda: None,
    ) -> None:
        self.spans: list[Span] = []
        self.hidden = Hidden()
        self._moment = moment
        self._witness = witness
        self._guard = guard
        self._step_ended = step_ended
        self._grown = grown
        self._began = began
        self._modules = modules
        self._patches = Patches()
        self._handles: list[Any] = []
        self._open: list[_Open] = []
        self._local = threading.local()
        # By kind and id, with what it is: another may have its id once it is gone.
        self._labels: dict[tuple[str, int], tuple[weakref.ref[Any], str]] = {}
        # By a name, what has it: the first without a number.
        self._having: defaultdict[str, list[weakref.ref[Any]]] = defaultdict(list)
        self._first_optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._running = False

    def start(self) -> None:
        """What this PyTorch lacks becomes a note, and the rest is recorded. Raises nothing but what memory can't hold."""
        self._running = True
        for task, install in (
            ("watching modules", self._watch_modules),
            ("watching optimizers", lambda: torch_seams.watch_steps(self._patches, self._step_begins)),
            ("watching backward", lambda: torch_seams.watch_backward(self._patches, self._backward_begins)),
            (
                "watching recomputation",
                lambda: torch_seams.watch_recomputation(self._patches, self._recomputation_begins),
            ),
            (
                "watching compiled code",
                lambda: torch_seams.watch_compiled(self._patches, self._compiled_begins),
            ),
            ("watching CUDA graphs", lambda: self.hidden.watch_graphs(self._patches)),
            ("watching autocast", lambda: torch_seams.watch_autocast(self._patches, self._autocast_ends)),
            (
                "watching workspaces",
                lambda: torch_seams.watch_workspaces(self._patches, self._workspaces_go),
            ),
            ("watching record_function", lambda: torch_seams.watch_ranges(self._patches, self._range_begins)),
        ):
            with self._guard(task), torch_seams.uncounted_hooks():
                install()

    def stop(self) -> None:
        """Puts everything back and ends what is still open. May be called twice, and without `start`."""
        self._running = False
        torch_seams.remove_hooks(self, self._handles)
        self._patches.undo()
        with self._guard("ending phases"):
            for one in list(reversed(self._open)):
                self._close(one, failed=one.kind != "range")

    def mark(self, label: str) -> None:
        self._began()
        moment = self._moment()
        self.spans.append(Span("mark", label, moment, moment))
        self._grown()

    def begun(self) -> list[Moment]:
        """When the spans that have not ended yet began."""
        return [one.start for one in self._open]

    @property
    def innermost(self) -> str | None:
        """The kind of the phase that is under way, in whichever thread; None outside of all."""
        return next((one.kind for one in reversed(self._open) if one.kind in PHASES), None)

    def after(self, device: int, position: int) -> list[Span]:
        """The spans that end after a device's position, for who reads along in another thread. One under way has no end yet."""
        found = [
            Span(
                one.kind, one.label, one.start, Moment(dict.fromkeys(one.start.positions, sys.maxsize), {}, sys.maxsize)
            )
            for one in list(self._open)
        ]
        # They stand in the order of their ends.
        for span in reversed(list(self.spans)):
            if span.end.positions.get(device, sys.maxsize) <= position:
                break
            found.append(span)
        return found

    def statement_ended(self) -> None:
        """A statement of the cell has ended in this thread: a phase still open here was left by an exception unseen."""
        thread = threading.get_ident()
        self._stack().clear()
        if self._open:
            for one in list(reversed(self._open)):
                if one.thread == thread and one.kind != "range":
                    self._close(one, failed=True)

    # Spans

    def _begin(self, kind: str, label: str, owner: int = 0) -> _Open:
        self._began()
        one = _Open(kind, label, self._moment(), threading.get_ident(), owner)
        self._open.append(one)
        return one

    def _close(self, one: _Open, *, failed: bool = False, graph: bool = False) -> Moment | None:
        """The moment of its end; None where it had ended."""
        if any(other is one for other in self._open):
            self._open = [other for other in self._open if other is not one]
            moment = self._moment()
            span = Span(
                one.kind,
                one.label,
                one.start,
                moment,
                failed,
                graph=graph,
                beside=one.beside,
                evaluating=one.evaluating,
            )
            self.spans.append(span)
            self._grown()
            return moment
        return None

    def _is_open(self, kind: str) -> bool:
        return any(one.kind == kind for one in self._open)

    def _innermost(self, *kinds: str, owner: int | None = None) -> _Open | None:
        thread = threading.get_ident()
        return next(
            (
                one
                for one in reversed(self._open)
                if one.thread == thread and one.kind in kinds and owner in (None, one.owner)
            ),
            None,
        )

    def _label(self, kind: str, thing: object) -> str:
        """A variable's name, or the class's; where another is there that has it, the second is ``Adam (2)``."""
        key = kind, id(thing)
        of, label = self._labels.get(key, (None, ""))
        if of is None or of() is not thing:
            written = as_written(thing)
            found = (self._witness.variable_of(one) for one in (thing, written))
            name = next(filter(None, found), "") or name_of_class(type(written))
            having = self._having[name]
            place = next((place for place, one in enumerate(having) if one() is None), len(having))
            having[place : place + 1] = [weakref.ref(thing)]
            label = name if not place else f"{name} ({place + 1})"
            self._labels[key] = weakref.ref(thing), label
        return label

    # Modules. Every submodule's call comes through here, so the way of an inner one is short.

    def _stack(self) -> list[int]:
        stack: list[int] | None = getattr(self._local, "modules", None)
        if stack is None:
            stack = self._local.modules = []
        return stack

    def _watch_modules(self) -> None:
        self._handles.append(nn_module.register_module_forward_pre_hook(self._forward_begins))
        self._handles.append(
            nn_module.register_module_forward_hook(self._forward_ended, with_kwargs=True, always_call=True)
        )
        self._handles.append(nn_module.register_module_parameter_registration_hook(self._parameter_registered))
        torch_seams.be_quiet_about_hooks(self._patches)
        hooks: tuple[Any, ...] = (self._forward_begins, self._forward_ended, self._parameter_registered)
        for hook in hooks:
            torch_seams.passed_over(hook.__func__, with_all_below=True)
        torch_seams.hide_from_the_compiler(self._patches)

    def _parameter_registered(self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
        if not torch.compiler.is_compiling():
            with self._guard("a parameter's registration"):
                self._witness.parameter_registered(module)

    def _forward_begins(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        # The compiler, which reads this as a part of the user's program, finds nothing to do.
        if torch.compiler.is_compiling():
            return
        stack = self._stack()
        stack.append(id(module))
        if self._modules is not None and self._modules.running:
            with self._guard("following modules"):
                self._modules.begins(module, len(stack), lambda: self._label("module", module))
        if len(stack) > 1:
            return
        with self._guard("the start of a forward"):
            if self._is_open(BACKWARD):
                if not self._is_open(RECOMPUTATION):
                    self._begin(RECOMPUTATION, self._label("module", module), id(module))
            elif not self._is_open(FORWARD):
                one = self._begin(FORWARD, self._label("module", module), id(module))
                one.in_threads = isinstance(module, torch.nn.DataParallel)
                one.evaluating = attribute(module, "training") is False
                self.hidden.forward_of(module)
                self._witness.forward_begins(module, args, one.start)
            else:
                self._another_began()

    def _another_began(self) -> None:
        """A forward has begun in this thread while one is under way, which may be another thread's."""
        thread = threading.get_ident()
        for one in self._open:
            if one.kind == FORWARD and one.thread != thread and not one.in_threads:
                one.beside = True

    def _forward_ended(self, module: torch.nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # An exception may have jumped over the ends of inner modules.
        stack = self._stack()
        if id(module) not in stack:
            return
        while stack.pop() != id(module):
            pass
        if self._modules is not None and self._modules.running:
            with self._guard("following modules"):
                self._modules.ended(len(stack))
        if stack:
            return
        with self._guard("the end of a forward"):
            one = self._innermost(FORWARD, RECOMPUTATION, owner=id(module))
            if one is None:
                return
            # PyTorch calls us with the result, or, when an exception is on its way, with None.
            failed = rest[-1] is None and sys.exc_info()[1] is not None
            graph = one.kind == FORWARD and self._witness.has_graph(rest[-1])
            moment = self._close(one, failed=failed, graph=graph)
            if one.kind == FORWARD and len(rest) > 1:
                self._witness.forward_ended(rest[0], module, args, rest[-1], moment)

    # Backward

    def _backward_begins(self) -> Callable[[bool], None]:
        one: _Open | None = None
        with self._guard("the start of a backward"):
            if self._modules is not None:
                self._modules.stop()
            # A reentrant checkpoint computes forward again, then runs a backward of its own inside the outer one.
            again = self._innermost(RECOMPUTATION)
            if again is not None:
                self._close(again)
            elif not self._is_open(BACKWARD):
                one = self._begin(BACKWARD, BACKWARD)
        return self._end_of(one, "a backward")

    def _recomputation_begins(self) -> Callable[[bool], None]:
        one: _Open | None = None
        with self._guard("the start of a recomputation"):
            if self._is_open(BACKWARD) and not self._is_open(RECOMPUTATION):
                one = self._begin(RECOMPUTATION, RECOMPUTATION)
        return self._end_of(one, "a recomputation")

    def _end_of(self, one: _Open | None, words: str) -> Callable[[bool], None]:
        """What ends a span, and is told whether an exception left it."""

        def ended(failed: bool) -> None:
            if one is not None and self._running:
                with self._guard(f"the end of {words}"):
                    # PyTorch leaves a recomputation by an exception of its own once it has what it needs.
                    moment = self._close(one, failed=failed and one.kind != RECOMPUTATION)
                    if one.kind == BACKWARD:
                        self._witness.backward_ended(moment)

        return ended

    # Autocast

    def _autocast_ends(self) -> Callable[[bool], None]:
        one: _Open | None = None
        with self._guard("the end of autocast"):
            # (The block that ends is still on, if it was.)
            if self._witness.has_wide_weights:
                one = self._begin(AUTOCAST_ENDS, "")
            elif torch.is_autocast_enabled("cuda"):
                one = self._begin(AUTOCAST_ENDS, NO_WIDE_WEIGHTS)
        return self._end_of(one, "the end of autocast")

    def _workspaces_go(self) -> Callable[[bool], None]:
        one: _Open | None = None
        with self._guard("the end of workspaces"):
            one = self._begin(WORKSPACES_GO, "")
        return self._end_of(one, "the end of workspaces")

    # Optimizers

    def _step_begins(self, optimizer: torch.optim.Optimizer) -> Callable[[bool], None]:
        one: _Open | None = None
        with self._guard("the start of a step"):
            one = self._begin(OPTIMIZER, self._label("optimizer", optimizer), id(optimizer))
            self._witness.step_begins(optimizer, one.start)

        def ended(failed: bool) -> None:
            if one is not None and self._running:
                with self._guard("the end of a step"):
                    moment = self._close(one, failed=failed)
                    if not failed:
                        self._stepped(optimizer, moment)

        return ended

    def _stepped(self, optimizer: torch.optim.Optimizer, moment: Moment | None) -> None:
        # (Where each turn of a loop has an optimizer of its own, the next one is the first when that is gone.)
        if self._first_optimizer is None or self._first_optimizer() is None:
            self._first_optimizer = weakref.ref(optimizer)
        if self._first_optimizer() is optimizer:
            self._step_ended()
        self._witness.step_ended(optimizer, moment)

    # Ranges

    def _range_begins(self, name: str) -> Callable[[bool], None]:
        if name.startswith(_OWN_RANGES):
            return torch_seams.not_watched
        return self.begin_range(name)

    def _compiled_begins(self) -> Callable[[bool], None]:
        """A phase of its own where none is under way: a compiled loss, or an optimizer's compiled step."""
        self.hidden.compiled_graph()
        return torch_seams.not_watched if self._open_phases() else self.begin_range(COMPILED)

    def _open_phases(self) -> bool:
        return any(one.kind != "range" for one in self._open)

    def begin_range(self, name: str) -> Callable[[bool], None]:
        """Begins a range; the answer ends it, and is told whether an exception left it."""
        one: _Open | None = None
        with self._guard("the start of a range"):
            one = self._begin("range", name)
        return self._end_of(one, "a range")
