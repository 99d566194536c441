"""What the magics need of IPython beyond its magic API, one small function or class for each.

Loading adds an input transformer and completions; `ShellHooks.remove` takes all of them out again.
"""

from __future__ import annotations

import ast
import asyncio
import re
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Any

from IPython.core.async_helpers import _asyncio_runner
from IPython.core.error import UsageError

from gpumem_magic.failures import swallowed
from gpumem_magic.looks.parsing import parsed
from gpumem_magic.patching import Patches
from gpumem_magic.recording.cell import compiles, place
from gpumem_magic.recording.source import split_lines
from gpumem_magic.recording.statement_run import as_without_us, without_recording
from gpumem_magic.spelling import did_you_mean
from gpumem_magic.tracebacks import leave_out_ours, traceback_of
from gpumem_magic.uninterrupted import whole

MAGIC = "gpumem"
_NO_MAGIC = re.compile(r"Line magic function `%(\w+)` not found\.|Cell magic `%%(\w+)` not found\.")
# What a completer is given has `line` (up to the cursor) and `symbol` (the word under it).
Completer = Callable[[Any], list[str]]


class ShellHooks:
    """The input transformer and the completions of one shell.

    statement_of: the statement on a line of ``%gpumem``, behind the flags. Raises UsageError for flags that are wrong.
    """

    def __init__(self, shell: Any, statement_of: Callable[[str], str]) -> None:
        self._shell = shell
        self._statement_of = statement_of
        self._completed: list[str] = []
        self._patches = Patches()
        self._patches.insert(shell, "input_transformers_post", self.rewrite_lines)
        usual = shell.showtraceback

        def show(exc_tuple: Any = None, *places: Any, **options: Any) -> None:
            """IPython hides frames that ask for it, but never the last one."""
            kind, error, trace = exc_tuple or sys.exc_info()
            if error is not None and trace is traceback_of(error):
                leave_out_ours(error)
                exc_tuple = kind, error, traceback_of(error)
            usual(exc_tuple, *places, **options)

        self._patches.set(shell, "showtraceback", show)

    def complete(self, key: str, completer: Completer) -> None:
        """Completes words on lines that begin with `key`, such as ``%gpumem``."""
        self._shell.set_hook("complete_command", lambda _shell, event: completer(event), str_key=key)
        self._completed.append(key)

    def suggest(self, magics: Mapping[str, Iterable[str]]) -> None:
        """Where IPython says that there is no magic of a name, it also says which of these (by kind) that name is near to."""
        usual = self._shell.show_usage_error

        def show(error: Any) -> None:
            usual(_with_suggestion(error, magics))

        self._patches.set(self._shell, "show_usage_error", show)

    def remove(self) -> None:
        """Takes out what was put in. May be called twice."""
        self._patches.undo()
        # IPython has no call that removes a completion.
        chains = self._shell.strdispatchers["complete_command"].strs
        while self._completed:
            chains.pop(self._completed.pop(), None)

    def rewrite_lines(self, lines: list[str]) -> list[str]:
        """The input transformer.

        A body that awaits: the call of our magic is awaited too, so that the body runs in the notebook's own event loop. A body
        that does not compile is left to IPython, which then shows the error as it would without us.
        """
        __tracebackhide__ = True  # as IPython hides its own
        text = "".join(lines)
        if f"'{MAGIC}'" not in text:
            return lines
        try:
            tree = parsed(text)
        except (SyntaxError, ValueError):
            return lines
        waiting: list[ast.Call] = []
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or (code := self._code_of(call)) is None:
                continue
            alone = _is_cell_magic(call) and len(tree.body) == 1
            python = None
            try:
                python = place(self._shell, code, int(_is_cell_magic(call))).python
            except Exception as error:
                swallowed(error)
            if alone and (python is None or not compiles(self._shell, python)):
                # What can't be transformed fails here once more, and IPython shows it as it would without us.
                return str(self._shell.transform_cell(_behind_a_remark(code))).splitlines(keepends=True)
            if python is not None and self._shell.should_run_async(text, transformed_cell=python):
                waiting.append(call)
        return _with_await(lines, waiting)

    def _code_of(self, call: ast.Call) -> str | None:
        """The code that a call of our magic is to run; None for anything else."""
        match call:
            case ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython")), attr=attribute),
                args=[ast.Constant(value="gpumem"), *_, ast.Constant(value=str(code))],
            ) if attribute in ("run_cell_magic", "run_line_magic"):
                try:
                    return code if _is_cell_magic(call) else self._statement_of(code)
                except Exception as error:  # the magic meets it again, and IPython shows it then
                    swallowed(error)
                    return None
        return None


def _with_suggestion(error: Any, magics: Mapping[str, Iterable[str]]) -> Any:
    if type(error) is not UsageError:
        return error
    said = str(error)
    missing = _NO_MAGIC.fullmatch(said)
    if missing is None:
        return error
    kind, percent, typed = ("line", "%", missing[1]) if missing[1] else ("cell", "%%", missing[2])
    hint = did_you_mean(f"{percent}{typed}", [f"{percent}{name}" for name in magics[kind]])
    return UsageError(f"{said.rstrip('.')}{hint}") if hint else error


_PROMPTS = (">>> ", re.compile(r"(>>>|\.\.\.)( |$)")), ("In [1]: ", re.compile(r"In \[\d+\]: |\s*\.{3,}: ?"))


def _behind_a_remark(code: str) -> str:
    """A comment stands for the magic's line. IPython takes away the indentation that the first line has, and prompts where one of
    the first two lines has one."""
    first = next((line for line in code.splitlines() if line.strip()), "")
    prompt = ""
    for line in code.splitlines()[1:2]:
        prompt = next((one for one, pattern in _PROMPTS if pattern.match(line)), "")
    return f"{first[: len(first) - len(first.lstrip())]}{prompt}#\n{code}"


def _is_cell_magic(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "run_cell_magic"


def _with_await(lines: list[str], calls: list[ast.Call]) -> list[str]:
    rows = split_lines("".join(lines))
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset), reverse=True):
        row = rows[call.lineno - 1].encode()
        rows[call.lineno - 1] = (row[: call.col_offset] + b"await " + row[call.col_offset :]).decode()
    return "\n".join(rows).splitlines(keepends=True) if calls else lines


def value_or_coroutine(shell: Any, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The coroutine itself where an event loop runs already (there the input transformer awaits it), and else its value."""
    if shell.loop_runner is _asyncio_runner:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return shell.loop_runner(coroutine)
    return coroutine


def result_of_cell(shell: Any) -> Any:
    """IPython's result of the cell that it runs now, if that is our magic's alone, and else None. A cell may run others later."""
    result = getattr(shell.displayhook, "exec_result", None)
    return result if result is not None and result.info.raw_cell.lstrip().startswith(f"%%{MAGIC}") else None


def show_as_plain_once(shell: Any, result: Any, error: BaseException, traceback: TracebackType | None) -> None:
    """Lets IPython show the error that leaves the running cell as without us: its own frame that runs code, then the cell's.

    result: see `result_of_cell`; no other code could catch the error. traceback: the error's, from a frame of ours that it
    passes through now.
    """
    patches = Patches()
    usual, usual_custom = shell.showtraceback, getattr(shell, "CustomTB", None)

    def plain(exc_tuple: Any) -> Any:
        """The error and its traceback as IPython would have caught them; what was given, for another error."""
        _, shown, caught = exc_tuple or sys.exc_info()
        if caught is None or not (shown is error or (shown is not None and shown.__cause__ is error)):
            return exc_tuple
        whole = as_without_us(traceback, caught)
        if whole is None:
            return exc_tuple
        caught.tb_next = whole.tb_next  # Python 3.10 still has this one at hand
        result.error_in_exec = BaseException.with_traceback(error, whole)
        without_recording(error)
        return type(error), error, whole

    def show(exc_tuple: Any = None, filename: str | None = None, tb_offset: int | None = None, **options: Any) -> None:
        restore()
        usual(plain(exc_tuple), filename=filename, tb_offset=tb_offset, **options)

    def show_custom(*exc_tuple: Any) -> None:
        restore()
        if usual_custom is not None:
            usual_custom(*plain(exc_tuple))

    def restore() -> None:
        with whole:
            patches.undo()
            if ended in shell.events.callbacks["post_execute"]:
                shell.events.unregister("post_execute", ended)

    def ended() -> None:
        """Nothing was shown (so leaves one a debugger), but the error is in the cell's result."""
        restore()
        plain((type(error), error, error.__traceback__))

    with whole:
        shell.events.register("post_execute", ended)
        patches.set(shell, "showtraceback", show)
        if shell.custom_exceptions:
            patches.set(shell, "CustomTB", show_custom)
