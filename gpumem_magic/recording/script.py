"""Running a script as ``python script.py`` would, with an observer told of each statement that it runs at module level."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from gpumem_magic.recording.cell import names_in
from gpumem_magic.recording.functions import opened_functions
from gpumem_magic.recording.hook import CellObserver, StatementHook, may_end, new_hook_name
from gpumem_magic.recording.instrument import Instrumenter, with_constants
from gpumem_magic.recording.model import Failed
from gpumem_magic.recording.source import Source

Change = Callable[[ast.Module, str], Callable[[CodeType], CodeType]]
"""Changes a file's tree, and returns what finishes the code that is compiled of it."""


class ScriptRun:
    """One run of a script: plain, unless it is told of an observer before it starts.

    Raises OSError for a file that cannot be read; SyntaxError, as Python words it, for one that is no Python.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._bytes = Path(path).read_bytes()
        self._code: CodeType = compile(self._bytes, path, "exec", dont_inherit=True)
        self._text = importlib.util.decode_source(self._bytes)
        self._hook: StatementHook | None = None

    @property
    def names(self) -> frozenset[str]:
        """The names that the script mentions; see `names_in`."""
        return names_in(self._text)

    @property
    def source(self) -> str:
        """The script's text."""
        return self._text

    @property
    def hook_failure(self) -> str | None:
        """What went wrong in the observer, in one line, or None."""
        return None if self._hook is None else self._hook.failure

    def observe(self, observer: CellObserver, change: Change | None = None, *, opens: bool = False) -> None:
        """Rewrites the statements, so that the run tells `observer` of them. Where this fails the run stays a plain one.

        change: of the script's functions, too; it gets the tree and the path. opens: statements of the script's own functions
        are told as well (see `functions`).
        """
        tree = ast.parse(self._bytes, self.path)
        finished = (lambda code: code) if change is None else change(tree, self.path)
        name = new_hook_name()
        opened = opened_functions(tree) if opens else {}
        instrumenter = Instrumenter(Source(self._text), name, limited=may_end(observer), opened=opened)
        tree.body = instrumenter.module(tree.body)
        codes: set[CodeType] = set()
        functions: dict[CodeType, int] = {}
        self._hook = StatementHook(instrumenter.sites, observer, name, codes, functions)
        code = finished(compile(tree, self.path, "exec", dont_inherit=True))
        definitions = {site.start[0]: index for index, site in enumerate(instrumenter.sites) if site.is_definition}
        self._code = with_constants(code, self._hook.constants, definitions)
        codes.add(self._code)
        functions.update(_codes_at(self._code, definitions))

    def run(self, main: ModuleType) -> None:
        """Runs it in the module `main` (see `as_main`). Raises what the script raises, SystemExit included."""
        exec(self._code, main.__dict__)

    def failed(self, traceback: TracebackType | None) -> Failed | None:
        """Which statement an error came through."""
        return None if self._hook is None else self._hook.failed(traceback, {self._code})

    def own_frames(self, traceback: TracebackType | None) -> TracebackType | None:
        """The part of a traceback that begins in the script."""
        while traceback is not None and traceback.tb_frame.f_code is not self._code:
            traceback = traceback.tb_next
        return traceback


def _codes_at(code: CodeType, lines: Mapping[int, int]) -> Iterator[tuple[CodeType, int]]:
    """The code of what is defined on these lines, each with the number that is given for its line."""
    for one in code.co_consts:
        if isinstance(one, CodeType) and one.co_firstlineno in lines:
            yield one, lines[one.co_firstlineno]
            yield from _codes_at(one, lines)


def find_module(name: str) -> ModuleSpec:
    """What ``python -m name`` runs: the module, or a package's ``__main__``. Raises ImportError, in Python's words."""
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            inside = importlib.util.find_spec(f"{name}.__main__")
            if inside is None:
                raise ImportError(
                    f"No module named {name}.__main__; {name!r} is a package and cannot be directly executed"
                )
            spec = inside
    finally:
        sys.path.pop(0)
    if spec is None:
        raise ImportError(f"No module named {name}")
    if spec.origin is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        raise ImportError(f"{name} has no source file")
    return spec


def main_of(path: str, spec: ModuleSpec | None = None) -> ModuleType:
    """A module for the script at `path` to run in, as ``python path`` makes it. spec: of a module that runs as under
    ``python -m``."""
    module = ModuleType("__main__")
    module.__dict__.update(
        __file__=path,
        __builtins__=sys.modules["builtins"],
        __loader__=importlib.machinery.SourceFileLoader("__main__", path) if spec is None else spec.loader,
        __package__=None if spec is None else spec.parent,
        __cached__=None if spec is None else spec.cached,
        __spec__=spec,
    )
    return module


@contextmanager
def as_main(module: ModuleType, arguments: Sequence[str]) -> Iterator[ModuleType]:
    """Has a module (see `main_of`) be ``__main__``, and sets up ``sys.argv`` and ``sys.path[0]`` as ``python path arguments``
    does; puts them back after."""
    path = str(module.__file__)
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    sys.argv = [path, *arguments]
    folder = os.path.dirname(os.path.realpath(path)) if module.__spec__ is None else os.getcwd()
    # The first entry is the folder of the `gpumem` command, unless Python was told to leave that out.
    sys.path[: 0 if _has_safe_path() else 1] = [folder]
    sys.modules["__main__"] = module
    try:
        yield module
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before[0], before[1], before[2]


def _has_safe_path() -> bool:
    return bool(getattr(sys.flags, "safe_path", False))
