"""The programs that trials run: a notebook's cell, a function that makes one step, a script."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from gpumem_magic.recording.cell import CellRun, PreparedCell, names_in
from gpumem_magic.recording.model import Failed
from gpumem_magic.recording.script import ScriptRun, as_main, main_of
from gpumem_magic.trials.before_values import untouched
from gpumem_magic.trials.counting import own_functions
from gpumem_magic.trials.given_numbers import given_numbers, variable_of, with_variables
from gpumem_magic.trials.libraries import import_ahead
from gpumem_magic.trials.values import VaryError, usual_value, with_values

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from gpumem_magic.recording.hook import CellObserver
    from gpumem_magic.recording.recorder import Recorder
    from gpumem_magic.trials.further_turns import FurtherTurns
    from gpumem_magic.trials.loops import LoopEnds


AWAITS = "a cell that awaits at its top level cannot be tried: only the notebook's event loop runs it"


class Running(Protocol):
    """A program with its values, ready to run once."""

    names: frozenset[str]
    filename: str
    source: str
    values: Mapping[str, int]

    def observe(self, observer: CellObserver, recorder: Recorder, further: FurtherTurns, ends: LoopEnds) -> None:
        """further: says when it is long enough, to a program that asks for itself. ends: for the loops of its functions."""

    def namespace(self) -> Mapping[str, Any]: ...

    def run(self) -> None:
        """Raises what the program raises."""

    def failed(self, traceback: TracebackType | None) -> Failed | None: ...


Ask = Callable[[], Mapping[str, int]]
"""Says the values. It returns once in each trial: what came before was run once, and each is a copy of that process."""


class Subject(Protocol):
    """What is tried."""

    def prepared(self, values: Mapping[str, int]) -> Running:
        """With these values. Called in the trial's own process: it may change what it likes there."""


class Variable(Subject, Protocol):
    """What is tried with several values."""

    def begun(self, names: Sequence[str], ask: Ask) -> Running:
        """As `prepared`, and asks for the values where they first matter."""

    def check(self, names: Sequence[str]) -> None:
        """Raises VaryError where one of the names cannot be varied."""

    def usual(self, name: str) -> int | None:
        """The value that the name has by itself, where that is known."""

    def places(self, name: str) -> Sequence[int]:
        """The lines at which the name is given its values, where it is no variable."""


class CellProgram:
    """A notebook's cell."""

    def __init__(self, shell: Any, cell: PreparedCell) -> None:
        if cell.needs_await:
            raise VaryError(AWAITS)
        self._shell = shell
        self._cell = cell

    def check(self, names: Sequence[str]) -> None:
        """A name has to be assigned or read, by the cell or by a function that it calls, or given a number in it."""
        known = {*with_values(self._cell.tree, dict.fromkeys(names, 0))[1], *self._read(), *self._given(names)}
        for name in names:
            if name not in known and name not in self._shell.user_ns:
                raise VaryError(
                    f"the cell neither assigns nor reads `{name}`, and gives no argument of this name a number"
                )

    def _read(self) -> frozenset[str]:
        return names_in(self._cell.python)

    def _given(self, names: Sequence[str]) -> frozenset[str]:
        """Those that are no variables of the cell, but arguments, fields or the like that it gives numbers."""
        return frozenset(names).intersection(one.name for one in given_numbers(self._cell.tree)) - self._read()

    def usual(self, name: str) -> int | None:
        return usual_value(self._cell.tree, name, self._shell.user_ns)

    def places(self, name: str) -> Sequence[int]:
        is_given = name in self._given([name])
        return [one.line for one in given_numbers(self._cell.tree) if is_given and one.name == name]

    def prepared(self, values: Mapping[str, int]) -> _RunningCell:
        given = self._given([*values])
        tree, assigned = with_values(with_variables(self._cell.tree, given), values)
        variables = _variables(values, given)
        self._shell.user_ns.update({name: value for name, value in variables.items() if name not in assigned})
        return _RunningCell(self._shell, replace(self._cell, tree=tree), values)

    def begun(self, names: Sequence[str], ask: Ask) -> _RunningCell:
        given = self._given(names)
        tree = with_values(with_variables(self._cell.tree, given), dict.fromkeys(names, 0))[0]
        variables = [*_variables(dict.fromkeys(names, 0), given)]
        count = 0 if self._shell.ast_transformers else untouched(tree, variables, self._shell.user_ns)
        if not count:
            import_ahead(self._cell.tree)
            return self.prepared(ask())
        running = _RunningCell(self._shell, replace(self._cell, tree=tree), {})
        running.ask_before(count, ask, lambda values: _variables(values, given), variables)
        return running


def _variables(values: Mapping[str, int], given: Collection[str]) -> dict[str, int]:
    """What a trial sets: the names, or what the places read that give them numbers."""
    return {variable_of(name) if name in given else name: value for name, value in values.items()}


class _RunningCell:
    def __init__(self, shell: Any, cell: PreparedCell, values: Mapping[str, int]) -> None:
        self._shell = shell
        self.values = values
        self._run = CellRun(shell, cell)
        self.names, self.filename, self.source = self._run.names, self._run.filename, self._run.source

    def ask_before(
        self,
        statement: int,
        ask: Ask,
        set_by: Callable[[Mapping[str, int]], Mapping[str, int]],
        variables: Sequence[str],
    ) -> None:
        """The values are asked for before that one; up to there the variables that they set are not to be had."""

        def before(number: int) -> None:
            namespace = self._shell.user_ns
            if number < statement:
                for name in variables:
                    namespace.pop(name, None)
            elif number == statement:
                self.values = ask()
                namespace.update(set_by(self.values))

        self._run.before_statement = before

    def observe(self, observer: CellObserver, recorder: Recorder, further: FurtherTurns, ends: LoopEnds) -> None:
        ends.in_functions(own_functions(self.names, self._shell.user_ns))
        ends.in_imports()
        self._run.observe(observer)

    def namespace(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._shell.user_ns
        return found

    def run(self) -> None:
        self._run.run()

    def failed(self, traceback: TracebackType | None) -> Failed | None:
        return self._run.failed(traceback)


class ScriptProgram:
    """A script; what is varied are its arguments."""

    def __init__(self, path: str, arguments: Sequence[str], spec: ModuleSpec | None = None) -> None:
        self._path = path
        self._arguments = list(arguments)
        self._spec = spec

    def check(self, names: Sequence[str]) -> None:
        """A script is asked nothing: it says itself what it makes of its arguments."""

    def usual(self, name: str) -> int | None:
        return None

    def places(self, name: str) -> Sequence[int]:
        return ()

    def arguments(self, values: Mapping[str, int]) -> list[str]:
        """``--batch-size=8``, in the place of the same argument where the script has it already."""
        given = list(self._arguments)
        for name, value in values.items():
            text = f"{name}={value}"
            places = [place for place, one in enumerate(given) if one.startswith(f"{name}=")]
            if places:
                given[places[-1]] = text
            elif name in given[:-1]:
                given[given.index(name) + 1] = str(value)
            else:
                given.append(text)
        return given

    def prepared(self, values: Mapping[str, int]) -> _RunningScript:
        return _RunningScript(self._path, self.arguments(values), self._spec, values)

    def begun(self, names: Sequence[str], ask: Ask) -> _RunningScript:
        with suppress(OSError, SyntaxError):
            import_ahead(ast.parse(Path(self._path).read_bytes()))
        return self.prepared(ask())


class _RunningScript:
    def __init__(self, path: str, arguments: list[str], spec: ModuleSpec | None, values: Mapping[str, int]) -> None:
        self.values = values
        self._script = ScriptRun(path)
        # Never left: the process ends with it.
        self._main = main_of(path, spec)
        self._around = as_main(self._main, arguments)
        self._around.__enter__()
        self.names, self.filename, self.source = self._script.names, path, self._script.source

    def observe(self, observer: CellObserver, recorder: Recorder, further: FurtherTurns, ends: LoopEnds) -> None:
        ends.in_imports()
        self._script.observe(observer, ends.in_tree)

    def namespace(self) -> Mapping[str, Any]:
        return vars(self._main)

    def run(self) -> None:
        self._script.run(self._main)

    def failed(self, traceback: TracebackType | None) -> Failed | None:
        return self._script.failed(traceback)


class StepProgram:
    """A function that makes one training step (or all of it), called until its calls repeat exactly."""

    # So many calls are made where they never do.
    MOST = 20

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step

    def check(self, names: Sequence[str]) -> None:
        """Python says it, at the first call."""

    def usual(self, name: str) -> int | None:
        return None

    def places(self, name: str) -> Sequence[int]:
        return ()

    def prepared(self, values: Mapping[str, int]) -> _RunningStep:
        return _RunningStep(self._step, values)

    def begun(self, names: Sequence[str], ask: Ask) -> _RunningStep:
        return self.prepared(ask())


class _RunningStep:
    def __init__(self, step: Callable[..., Any], values: Mapping[str, int]) -> None:
        self._step, self.values = step, values
        code = getattr(step, "__code__", None)
        self.filename: str = "" if code is None else code.co_filename
        self.source = ""
        self.names = frozenset(() if code is None else code.co_names)
        self._recorder: Recorder | None = None
        self._further: FurtherTurns | None = None
        self._calls = 0

    def observe(self, observer: CellObserver, recorder: Recorder, further: FurtherTurns, ends: LoopEnds) -> None:
        self._recorder, self._further = recorder, further

    def namespace(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = getattr(self._step, "__globals__", {})
        return found

    def run(self) -> None:
        recorder, further = self._recorder, self._further
        assert recorder is not None
        assert further is not None
        told = ", ".join(f"{name}={value}" for name, value in self.values.items())
        label = f"{getattr(self._step, '__name__', 'step')}({told})"
        while self._calls < StepProgram.MOST and not further.are_known():
            self._calls += 1
            before = len(recorder.iterations)
            self._step(**self.values)
            recorder.checkpoint("statement", label, label, 0, (self._calls,), (0,))
            if len(recorder.iterations) == before:
                # It steps no optimizer: its calls are the iterations.
                recorder.iteration_ended()

    def failed(self, traceback: TracebackType | None) -> Failed | None:
        line = 0
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == self.filename:
                line = traceback.tb_lineno or line
            traceback = traceback.tb_next
        return linecache.getline(self.filename, line).strip(), line, (self._calls,), (0,)
