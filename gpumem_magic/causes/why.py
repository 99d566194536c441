"""Observing the program while a recording runs, so that its report can say who holds the memory, and why.

A look keeps numbers and strings. What goes wrong in here becomes a note of the report.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.causes.catalog import find_causes
from gpumem_magic.causes.inside import inside_of
from gpumem_magic.causes.left import left_functions
from gpumem_magic.causes.model import LEAST, LeftFunctions, Scene, Untied
from gpumem_magic.causes.padding import numbers_for_padding
from gpumem_magic.causes.program import ProgramText, placed, read_program
from gpumem_magic.causes.source import (
    mentioned_and_unread,
    never_clears_gradients,
    reads_last_position,
)
from gpumem_magic.causes.ties import find_untied
from gpumem_magic.devices.base import DeviceLog, FilledPart, Machine
from gpumem_magic.failures import swallows
from gpumem_magic.looks import tensors
from gpumem_magic.looks.fresh import only_deleted
from gpumem_magic.looks.objects import attribute, entry, is_a, items, text
from gpumem_magic.owners.holders import holders
from gpumem_magic.owners.model import NAMELESS, Holdings, where_it_failed
from gpumem_magic.owners.running import RunningFunction, running_functions
from gpumem_magic.owners.saved import Saved, saved_in_graph
from gpumem_magic.owners.search import find_owners
from gpumem_magic.owners.traversal import Place
from gpumem_magic.patching import Patches
from gpumem_magic.recording.model import KEPT_BY_GRAPH, KEPT_BY_LIST, KEPT_BY_NAME, Hold, Recording
from gpumem_magic.recording.torch_seams import passed_over, uncompiled
from gpumem_magic.report.inside import ActivationBreakdown
from gpumem_magic.report.model import Cause, Owner, ReportData

# The report names so many; `%gpumem_who` has them all.
_OWNERS = 20
# So many of the largest tensors are known by who holds them.
_HOLDS = 5000
_KEEPERS = {"graph": KEPT_BY_GRAPH}
# So many cells before this one are read for where a variable came from.
_CELLS = 50
# Bytes that the last search found no owner for, by place.
_known_lost: dict[Place, int] = {}


class Why:
    """Made when a recording begins; `stop` when the program has ended, before the recording does; then `explain`."""

    def __init__(self, machine: Machine, namespace: Mapping[str, Any] | None) -> None:
        self.seconds = 0.0
        self._machine = machine
        self._shell = _shell_of(namespace)
        self._patches = Patches()
        self._failures: list[str] = []
        self._saved: tuple[Saved, ...] = ()
        self._saved_at: dict[int, int] = {}
        self._running: tuple[RunningFunction, ...] = ()
        self._holdings = Holdings()
        self._evaluating: frozenset[str] = frozenset()
        self._evaluated: frozenset[int] = frozenset()
        self._left = LeftFunctions()
        self._modules: dict[str, frozenset[int]] = {}
        # The program's variables, from the start to the cell's first statement.
        self._namespace: Mapping[str, Any] | None = None
        self._deleted: dict[str, frozenset[int]] = {}
        self._typed = ""
        self._source = ""
        self._never_clears = False
        self._mentioned: frozenset[str] = frozenset()
        self._unread: frozenset[str] = frozenset()
        self._program = ProgramText()
        self._idle_checkpointing: frozenset[str] = frozenset()
        self._searches_convolutions = False
        self._steps_first = False
        self._weights: dict[str, dict[str, int]] = {}
        self._reads_last_position = False
        self._filled: Mapping[tuple[int, int], tuple[FilledPart, ...]] = {}
        self._rewritten: Mapping[tuple[int, int], int] = {}
        self._untied: tuple[Untied, ...] = ()
        self._numbers_for_padding: frozenset[int] = frozenset()

    def read(self, source: str) -> None:
        """The cell's own text, before it runs."""
        self._source = source
        namespace, self._namespace = self._namespace, None
        with self._timed("looking at what the cell deletes"):
            self._deleted = self._memory_of(only_deleted(source), namespace or {})

    def start(self, namespace: Mapping[str, Any] | None, positions: Any) -> None:
        """positions: a function from a device's index to where its log stands."""
        with self._timed("looking at the notebook's models"):
            self._modules = _parameters_of(namespace or {}, self._machine)
            self._searches_convolutions = bool(torch.backends.cudnn.benchmark)
        self._namespace = namespace
        with self._timed("watching the first backward"):
            self._watch_first_backward(positions)

    def stop(self, namespace: Mapping[str, Any] | None, error: BaseException | None) -> None:
        """Puts PyTorch back, and looks who holds what now. May be called without `start`."""
        self.put_back()
        self._namespace = None
        with self._timed("looking for who holds the memory"):
            if namespace is not None:
                self._holdings = find_owners(
                    self._machine, namespace, self._shell, error=error, cycles=self._worth_a_search
                )
                _remember_lost(self._holdings)
                self._filled = self._machine.filled_parts()
                self._rewritten = self._machine.rewritten()
                if error is not None:
                    self._left = left_functions(error)
                    self._weights = _weights_of(namespace)
                everything = _without_parts(self._left.modules, dict(_modules_in(namespace)))
                self._left.modules.clear()
                self._evaluating = _evaluating(everything)
                self._evaluated = frozenset().union(
                    *_parameters_of({name: everything[name] for name in self._evaluating}, self._machine).values()
                )
                del everything
                self._reads_last_position = reads_last_position(self._source, namespace)
                self._idle_checkpointing = _idle_checkpointing(namespace)
                self._steps_first = _steps_first(namespace)
                self._searches_convolutions |= bool(torch.backends.cudnn.benchmark)
                self._typed = _typed(namespace)
                self._never_clears = never_clears_gradients(self._source, namespace)
                self._mentioned, self._unread = mentioned_and_unread(self._source, namespace)
                self._program = read_program(self._source, namespace)
                with tensors.no_functions(), tensors.no_dispatch():
                    modules = dict(_modules_in(namespace))
                    self._untied = find_untied(self._program, modules, self._machine.locate)
                    self._numbers_for_padding = numbers_for_padding(modules)
                    del modules

    def holds(self, logs: Mapping[int, DeviceLog]) -> tuple[Hold, ...]:
        """Who holds what at the end, and what the first backward's graph had saved; the largest, where these are very many."""
        with self._timed("noting who holds the memory"):
            at_end = [
                Hold(
                    one.device,
                    len(logs[one.device].events),
                    one.address,
                    _KEEPERS.get(one.kind, KEPT_BY_LIST if "[" in one.place else KEPT_BY_NAME),
                    where_it_failed(one.place),
                    one.dtype,
                    one.shape,
                )
                for one in self._holdings.held[:_HOLDS]
                if one.device in logs and one.kind != "workspace"
            ]
            in_graph = []
            for one in self._saved[:_HOLDS]:
                at = _position_in(logs.get(one.device), self._saved_at.get(one.device))
                if at is not None:
                    words = f"backward of {one.operations[0]}"
                    in_graph.append(Hold(one.device, at, one.address, KEPT_BY_GRAPH, words, one.dtype, one.shape))
            return (*at_end, *in_graph)
        return ()

    def put_back(self) -> None:
        """May be called twice."""
        self._patches.undo()

    def explain(self, recording: Recording, view: DeviceView, report: ReportData) -> ReportData:
        """The report with its owners, its causes, and its causes before its notes."""
        causes: list[Cause] = []
        owners: tuple[Owner, ...] = ()
        scene: Scene | None = None
        with self._timed("looking for causes"):
            saved_at = self._place_in(view)
            saved = [one for one in self._saved if one.device == view.device and saved_at is not None]
            scene = Scene(
                recording,
                view.device,
                view.timeline,
                view.labels,
                report,
                self._holdings,
                self._evaluating,
                "\n".join([self._typed, self._source, *(point.statement for point in recording.checkpoints)]),
                self._modules,
                saved,
                saved_at or 0,
                self._never_clears,
                self._mentioned,
                placed(self._program, recording.checkpoints),
                unread=self._unread,
                tensors=view.tensors,
                idle_checkpointing=self._idle_checkpointing,
                searches_convolutions=self._searches_convolutions,
                steps_first=self._steps_first,
                weights=self._weights,
                reads_last_position=self._reads_last_position,
                evaluated=self._evaluated,
                left=self._left,
                deleted=self._deleted,
                filled=self._filled,
                rewritten=self._rewritten,
                untied=self._untied,
                numbers_for_padding=self._numbers_for_padding,
                running=self._running,
            )
            causes, failures = find_causes(scene)
            self._failures += failures
            owners = _owners(self._holdings)
        inside: ActivationBreakdown | None = None
        with self._timed("sorting activations by module"):
            inside = inside_of(scene) if scene is not None else None
        return replace(
            report,
            owners=owners,
            inside=inside,
            remarks=(*causes, *report.remarks, *self._failures),
            overhead_seconds=report.overhead_seconds + self.seconds,
        )

    def _memory_of(self, names: frozenset[str], namespace: Mapping[str, Any]) -> dict[str, frozenset[int]]:
        """Of some variables, the addresses of all memory that they lead to."""
        variables = {name: value for name, value in items(namespace) if name in names}
        if not variables:
            return {}
        found = find_owners(self._machine, variables, self._shell)
        return {
            root.name: frozenset(one.address for one in found.held if number in one.roots)
            for number, root in enumerate(found.roots)
            if root.kind == "variable" and root.name in variables
        }

    def _place_in(self, view: DeviceView) -> int | None:
        """Where the device's log stood at the look at the first graph; None where there was none, or it was left out."""
        return _position_in(view.log, self._saved_at.get(view.device))

    def _worth_a_search(self, missing: Mapping[Place, int], allocated: int) -> bool:
        """Whether so much is held by no name that all of Python's objects are looked through for reference cycles."""
        fresh = sum(size for place, size in missing.items() if _known_lost.get(place) != size)
        return fresh >= max(LEAST, allocated // NAMELESS)

    def _watch_first_backward(self, positions: Any) -> None:
        for place in (torch.autograd.graph, torch.autograd):
            original = vars(place).get("_engine_run_backward")
            if original is not None:
                self._patches.set(place, "_engine_run_backward", self._looking(original, positions))

    def _looking(self, original: Any, positions: Any) -> Any:
        """The engine's entry, with a look at the graph before it runs for the first time."""

        @uncompiled
        def look(outputs: Any) -> None:
            with self._timed("looking at the first graph"):
                self._saved = tuple(saved_in_graph(outputs, self._machine.locate))
                self._saved_at = {one.facts.index: positions(one.facts.index) for one in self._machine.devices}
                self._running = tuple(running_functions(sys._getframe(1), self._machine.locate))

        def watched(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if not self._saved:
                look(outputs)
            return original(outputs, *args, **kwargs)

        return passed_over(watched)

    @contextmanager
    def _timed(self, task: str) -> Iterator[None]:
        """Around our own work: counts its time, and keeps its failure from the user's program."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            if not swallows(error):
                raise
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self._failures.append(f"gpumem_magic failed while {task} ({text}); the figures are not affected.")
        finally:
            self.seconds += time.perf_counter() - began


def _position_in(log: DeviceLog | None, at: int | None) -> int | None:
    """A place that `Log.position` gave, as a position among the log's events."""
    return at if at is None or log is None or log.places is None else log.places.get(at)


def _remember_lost(holdings: Holdings) -> None:
    """What no search finds an owner for is searched for once, and not after each cell."""
    _known_lost.clear()
    _known_lost.update({(one.device, one.address): one.size for one in holdings.lost})


def _owners(holdings: Holdings) -> tuple[Owner, ...]:
    return tuple(
        Owner(
            one.name,
            one.kind,
            one.type,
            one.bytes,
            one.frees,
            one.statement,
            "; ".join(one.together),
            one.together_frees,
        )
        for one in holders(holdings)[:_OWNERS]
        if one.bytes
    )


def _shell_of(namespace: Mapping[str, Any] | None) -> Any:
    """The notebook's shell, where the program is a notebook's."""
    ipython = sys.modules.get("IPython.core.getipython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if shell is not None and namespace is shell.user_ns else None


def _evaluating(namespace: Mapping[str, Any]) -> frozenset[str]:
    """Variables that are modules in evaluation mode. No attribute is asked for that the user could have written."""
    return frozenset(name for name, module in _modules_in(namespace) if name and attribute(module, "training") is False)


def _without_parts(left: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The notebook's modules, and those of the functions that an error left, but for parts of the former (`self`)."""
    parts = {id(one) for module in named.values() for _, one in tensors.modules_in(module)}
    return {**{name: one for name, one in left.items() if id(one) not in parts}, **named}


def _idle_checkpointing(namespace: Mapping[str, Any]) -> frozenset[str]:
    """Variables that are modules with activation checkpointing, as libraries switch it on, in a part in evaluation mode."""
    return frozenset(
        name
        for name, module in _modules_in(namespace)
        if any(
            attribute(one, "gradient_checkpointing") is True and attribute(one, "training") is False
            for _, one in tensors.modules_in(module)
        )
    )


def _weights_of(namespace: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """A module's name -> a type -> the bytes of its parameters of that type, wherever they are."""
    found: dict[str, dict[str, int]] = {}
    for name, module in _modules_in(namespace):
        with tensors.no_functions(), tensors.no_dispatch():
            sizes = Counter[str]()
            for one in {id(each): each for _, each in tensors.tensors_of(module, tensors.PARAMETERS)}.values():
                sizes[tensors.dtype_name(one)] += tensors.nbytes(one)
        if sizes:
            found[name] = sizes
    return found


def _steps_first(namespace: Mapping[str, Any]) -> bool:
    """Whether the notebook's recurrent and attention layers take sequences with their steps in front, as PyTorch's own do unless
    they are told ``batch_first``."""
    found = {
        attribute(one, "batch_first") is True
        for _, module in _modules_in(namespace)
        for _, one in tensors.modules_in(module)
        if is_a(one, torch.nn.RNNBase) or is_a(one, torch.nn.MultiheadAttention)
    }
    return found == {False}


def _modules_in(namespace: Mapping[str, Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    modules = ((text(key), value) for key, value in items(namespace) if tensors.is_module(value))
    return ((name, value) for name, value in modules if not name.startswith("_"))


def _typed(namespace: Mapping[str, Any]) -> str:
    """What was typed in the last cells, as IPython keeps it; empty in a script."""
    lines = entry(namespace, "_ih")
    return "\n".join(text(one) for one in list.__getitem__(lines, slice(-_CELLS, None))) if is_a(lines, list) else ""


def _parameters_of(namespace: Mapping[str, Any], machine: Machine) -> dict[str, frozenset[int]]:
    found = {}
    for name, module in _modules_in(namespace):
        with tensors.no_functions(), tensors.no_dispatch():
            places = [
                machine.locate(piece)
                for _, one in tensors.tensors_of(module, tensors.PARAMETERS)
                for piece in tensors.pieces(one)
            ]
        addresses = frozenset(place[1] for place in places if place is not None)
        if addresses:
            found[name] = addresses
    return found
