"""Running a cell's body once, in the user's namespace, through IPython's own steps, with an observer told of each statement.

The steps are those of IPython's ``run_cell``: input transformers, the shell's compiler (which remembers ``from __future__``),
AST transformers, then one statement at a time, which IPython itself runs (`statement_run`).
"""

from __future__ import annotations

import ast
import io
import symtable
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any

from gpumem_magic.patching import OwnBuiltins
from gpumem_magic.recording.hook import CellObserver, StatementHook, may_end, new_hook_name
from gpumem_magic.recording.instrument import COMPOUND, Instrumenter, Statement, with_constants
from gpumem_magic.recording.model import Failed
from gpumem_magic.recording.quiet import no_warnings_of
from gpumem_magic.recording.source import Source, align
from gpumem_magic.recording.statement_run import StatementRun, Value

__all__ = ["CellObserver", "CellRun", "PreparedCell", "Statement", "compiles", "names_in", "place", "prepare"]


@dataclass(frozen=True)
class PreparedCell:
    """A cell's body, ready to run once.

    raw: as it was typed, with blank lines before it for the lines of the notebook's cell above it. python: what IPython made of
    it, line by line at the same places (`extents`: see `Source`). filename: the name under which tracebacks find it.
    silenced: a ``;`` at the end says that the value is not to be shown.
    """

    raw: str
    python: str
    extents: dict[int, int]
    filename: str
    tree: ast.Module
    needs_await: bool
    silenced: bool

    @property
    def empty(self) -> bool:
        """Nothing to run: blank lines and comments only."""
        return not self.tree.body


@dataclass(frozen=True)
class _Placed:
    """A body as IPython transforms it, on the notebook's lines. The fields are `PreparedCell`'s."""

    raw: str
    python: str
    extents: dict[int, int]
    transformed: str


# Of the last body: IPython may print as it transforms, so that it is done once for each run. (shell, body, lines above, found)
_placed: tuple[Any, str, int, _Placed] | None = None


def place(shell: Any, body: str, lines_above: int = 1) -> _Placed:
    """Transforms a body, for `prepare` too. lines_above: the lines of the notebook's cell before it, 1 for the magic's own."""
    global _placed
    transformed = shell.transform_cell(body)
    above = "\n" * lines_above
    aligned, extents = align(body, transformed) or (transformed, {})
    extents = {first + lines_above: last + lines_above for first, last in extents.items()}
    found = _Placed(above + body, above + aligned, extents, transformed)
    _placed = shell, body, lines_above, found
    return found


def prepare(shell: Any, body: str, lines_above: int = 1) -> PreparedCell:
    """Transforms and parses a body (see `place`). Raises SyntaxError, with the notebook's line, for what Python cannot read."""
    global _placed
    last, _placed = _placed, None
    placed = last[3] if last is not None and last[:3] == (shell, body, lines_above) else place(shell, body, lines_above)
    _placed = None
    filename = shell.compile.cache(placed.python, _execution_count(shell), raw_code=placed.raw)
    with no_warnings_of("<>"):
        needs_await = shell.should_run_async(body, transformed_cell=placed.python)
    return PreparedCell(
        raw=placed.raw,
        python=placed.python,
        extents=placed.extents,
        filename=filename,
        tree=shell.compile.ast_parse(placed.python, filename=filename),
        needs_await=needs_await,
        silenced=_ends_with_semicolon(placed.transformed),
    )


def compiles(shell: Any, python: str) -> bool:
    """Whether every statement of a (transformed) body compiles as IPython will compile it."""
    flags = shell.compile.flags | (ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if shell.autoawait else 0)
    try:
        with no_warnings_of("<gpumem>"):
            for node in shell.compile.ast_parse(python, "<gpumem>").body:
                compile(ast.Module([node], []), "<gpumem>", "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, MemoryError, TypeError):
        return False
    return True


def names_in(python: str) -> frozenset[str]:
    """The names of the notebook that a program mentions: those at module level, and the globals that its functions use."""
    try:
        with no_warnings_of("<gpumem>"):
            table = symtable.symtable(python, "<gpumem>", "exec")
    except (SyntaxError, ValueError):
        return frozenset()
    names: set[str] = set(table.get_identifiers())
    todo = list(table.get_children())
    while todo:
        scope = todo.pop()
        names.update(symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global())
        todo.extend(scope.get_children())
    return frozenset(names)


@dataclass(frozen=True)
class _CompiledUnit:
    """What is compiled at once. mode: "exec", "single" (shows its expressions) or "value" (its value is the cell's).

    index: the statement's, where the run and not the rewritten code tells the hook of it. jumps: nothing runs behind it.
    """

    nodes: list[ast.stmt]
    mode: str
    index: int | None = None
    jumps: bool = False

    def compiled(self, compiler: Any, filename: str, holder: str) -> CodeType:
        """holder: what stands in the code for the object whose ``value`` is to be set."""
        nodes = self.nodes
        if self.mode == "value":
            (node,) = nodes
            assert isinstance(node, ast.Expr)
            put = ast.copy_location(ast.Constant(holder), node)
            target = ast.copy_location(ast.Attribute(put, "value", ast.Store()), node)
            nodes = [ast.copy_location(ast.Assign([target], node.value), node)]
        interactive = self.mode == "single"
        made: ast.mod = ast.Interactive(nodes) if interactive else ast.Module(nodes, [])
        code: CodeType = compiler(made, filename, "single" if interactive else "exec")
        return code


class CellRun:
    """One run of a prepared cell: plain, unless it is told of an observer before it starts."""

    def __init__(self, shell: Any, cell: PreparedCell) -> None:
        self._shell = shell
        self._cell = cell
        # Of the statement under way: as in a plain cell, what its constants hold is gone with it.
        self._codes: set[CodeType] = set()
        self._hook: StatementHook | None = None
        self._builtins = OwnBuiltins()
        self._holder, self._value = new_hook_name(), Value()
        # A StopIteration of the cell's own, which leaves `run_awaited` as a RuntimeError.
        self.stopped: BaseException | None = None
        # Is called before each of the cell's statements, with its number.
        self.before_statement: Callable[[int], None] = lambda number: None
        self._plain = [_CompiledUnit([node], mode) for node, mode in _plan(shell, cell)]
        self._units = self._plain

    @property
    def cell(self) -> PreparedCell:
        """What is run."""
        return self._cell

    @property
    def names(self) -> frozenset[str]:
        """See `names_in`."""
        return names_in(self._cell.python)

    @property
    def filename(self) -> str:
        """The name under which the cell's code is compiled."""
        return self._cell.filename

    @property
    def source(self) -> str:
        """The cell as it was typed; its line numbers are the notebook's."""
        return self._cell.raw

    @property
    def _shows_value(self) -> bool:
        return not self._cell.silenced

    def observe(self, observer: CellObserver) -> None:
        """Rewrites the statements, so that the run tells `observer` of them. Where this fails the run stays a plain one."""
        name = new_hook_name()
        instrumenter = Instrumenter(
            Source(self._cell.python, self._cell.raw, self._cell.extents), name, limited=may_end(observer)
        )
        units = [_unit(instrumenter, unit.nodes[0], unit.mode) for unit in self._plain]
        self._hook = StatementHook(instrumenter.sites, observer, name, self._codes)
        self._units = units

    @property
    def hook_failure(self) -> str | None:
        """What went wrong in the observer, in one line, or None."""
        return None if self._hook is None else self._hook.failure

    def run(self) -> Any:
        """Runs the cell and returns the value of its last expression, as ``%%time`` does. Raises what the cell raises."""
        __tracebackhide__ = True
        for code in self._steps():
            StatementRun(self._shell).run(code)
        return self._value.value if self._shows_value else None

    async def run_awaited(self) -> Any:
        """The same for a cell that awaits."""
        __tracebackhide__ = True
        for code in self._steps():
            one = StatementRun(self._shell)
            try:
                await one.run_awaited(code)
            except RuntimeError:
                if isinstance(one.error_in_exec, StopIteration):
                    self.stopped = one.error_in_exec
                raise
        return self._value.value if self._shows_value else None

    def failed(self, traceback: TracebackType | None) -> Failed | None:
        """Which statement an error came through."""
        return None if self._hook is None else self._hook.failed(traceback, self._codes)

    def silence(self) -> None:
        """The observer is told of nothing more."""
        if self._hook is not None:
            self._hook.silence()

    def forget(self) -> None:
        """After the run: what its code holds would hold the code, and Python's collector does not look into code objects."""
        self.silence()
        self._value.value = self.stopped = None
        self._codes.clear()

    def leave(self, traceback: TracebackType | None) -> None:
        """Gives the statement that was left in the middle, by what is no error of the user's, its row."""
        if self._hook is not None:
            self._hook.leave(traceback, self._codes)

    def _steps(self) -> Iterator[CodeType]:
        """The code of each unit in turn. Compiled just before it runs, since an earlier one may import from __future__."""
        __tracebackhide__ = True
        compiler = self._shell.compile
        filename = self._cell.filename
        for number, (unit, plain) in enumerate(zip(self._units, self._plain, strict=True)):
            self.before_statement(number)
            with compiler.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if self._shell.autoawait else 0):
                code = self._builtins.run(self._code_of, unit, plain, compiler, filename)
            if self._hook is None or unit.index is None:
                yield code
            else:
                self._hook.before(unit.index)
                if unit.jumps:  # its row is taken before it
                    self._hook.after(unit.index)
                yield code
                self._hook.after(unit.index)
            self._codes.clear()

    def _code_of(self, unit: _CompiledUnit, plain: _CompiledUnit, compiler: Any, filename: str) -> CodeType:
        __tracebackhide__ = True
        with no_warnings_of(filename) as held:
            code = _named(self._shell, unit.compiled(compiler, filename, self._holder))
        if held:
            # Rewritten code may say them twice.
            plain.compiled(compiler, filename, self._holder)
        code = with_constants(code, {**({} if self._hook is None else self._hook.constants), self._holder: self._value})
        self._codes.add(code)
        return code


def _unit(instrumenter: Instrumenter, node: ast.stmt, mode: str) -> _CompiledUnit:
    if isinstance(node, COMPOUND):
        return _CompiledUnit(instrumenter.rewrite(node), mode)
    if isinstance(node, _ReadVariable):
        return _CompiledUnit([node], mode)
    return _CompiledUnit([node], mode, instrumenter.add(node), isinstance(node, ast.Raise))


class _ReadVariable(ast.Expr):
    """A variable's value, read for display and not written by the user."""


def _plan(shell: Any, cell: PreparedCell) -> list[tuple[ast.stmt, str]]:
    """The statements of the cell, each with its mode: what IPython's ``run_ast_nodes`` makes of ``ast_node_interactivity``."""
    nodes: list[ast.stmt] = list(shell.transform_ast(cell.tree).body)
    interactivity = "none" if cell.silenced else shell.ast_node_interactivity
    if not nodes:
        return []
    if interactivity == "last_expr_or_assign":
        target = _assigned_name(nodes[-1])
        if target is not None:
            # Where IPython has it: on the first line that was typed.
            above = len(cell.raw) - len(cell.raw.lstrip("\n"))
            read = ast.fix_missing_locations(_ReadVariable(ast.Name(target, ast.Load())))
            nodes.append(ast.increment_lineno(read, above))
        interactivity = "last_expr"
    if interactivity == "last_expr":
        interactivity = "last" if isinstance(nodes[-1], ast.Expr) else "none"
    if cell.silenced and isinstance(nodes[-1], ast.Expr):
        # A value that nobody sees: as the only statement of a module, a string would be its docstring.
        interactivity = "last"
    shown = {"none": 0, "last": 1, "all": len(nodes)}[interactivity]
    modes = ["exec"] * (len(nodes) - shown) + ["single"] * shown
    if shown and isinstance(nodes[-1], ast.Expr):
        modes[-1] = "value"
    return list(zip(nodes, modes, strict=True))


def _assigned_name(node: ast.stmt) -> str | None:
    """The variable of ``x = ...``, ``x += ...`` and ``x: T = ...``."""
    target: ast.expr | None = None
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        target = node.target
    return target.id if isinstance(target, ast.Name) else None


def _ends_with_semicolon(python: str) -> bool:
    """IPython's rule for silencing values: not at the end of a block.

    Its own decorator for it came in 8.10 and would swallow a coroutine.
    """
    last = ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(python).readline):
            if token.type not in _UNSEEN_TOKENS:
                last = token.string
    except (tokenize.TokenError, SyntaxError):
        return False
    return last == ";"


_UNSEEN_TOKENS = (tokenize.ENDMARKER, tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT)


def _named(shell: Any, code: CodeType) -> CodeType:
    """IPython up to 8 names a statement's code ``<cell line: 3>``, which its tracebacks show."""
    rename = getattr(shell, "_update_code_co_name", None)
    return code if rename is None else rename(code)


def _execution_count(shell: Any) -> int:
    """The number in ``In [n]`` of the cell that runs. IPython 9 has counted on by then, 7.34 has not."""
    result = getattr(shell.displayhook, "exec_result", None)
    count = None if result is None else result.execution_count
    return int(shell.execution_count if count is None else count)
