"""A text of the program, the measured cell, another one or a file, and a statement in it. Nothing of it is run."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from gpumem_magic.causes.statements import ADDING, FUNCTIONS, LOOPS, gives, last_name, makes_several
from gpumem_magic.looks.expressions import targets
from gpumem_magic.looks.parsing import parsed

_MAGIC = re.compile(r"^(\s*)[!%].*$", re.M)
_SHORT = 60
_ADDING_ONE = frozenset({"append", "appendleft", "add", "push"})
_Node = TypeVar("_Node", bound=ast.AST)


@dataclass(frozen=True)
class Written:
    """A statement of the program's. where: "" for the measured cell, else ``In [4]`` or ``train.py``."""

    where: str
    line: int
    statement: str

    @property
    def words(self) -> str:
        """``line 5``, or ``In [4], line 33``."""
        return f"{self.where}, line {self.line}" if self.where else f"line {self.line}"

    @property
    def shown(self) -> str:
        """The statement, its first line, cut where it is long."""
        line = self.statement.strip().partition("\n")[0]
        return line if len(line) <= _SHORT else f"{line[: _SHORT - 1]}…"


class StillToRun(NamedTuple):
    """What is still to run from a line on. in_loop: whether a loop is around the line."""

    source: str
    in_loop: bool


@dataclass(frozen=True)
class Text:
    """where: as a place's. ahead: lines in front of the text, such as the magic's own. whole: whether what stands outside of
    functions counts, too: it has run in this very cell."""

    where: str
    source: str
    ahead: int = 0
    whole: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        """Parsed once, for all that ask. Empty where the text is no Python."""
        return ast.Module(statements_in(self.source), [])

    @cached_property
    def statements(self) -> list[ast.stmt]:
        """All simple statements, those in functions too (or only those)."""
        found: list[ast.stmt] = []
        _simple(self.tree.body, self.whole, found)
        return found

    @cached_property
    def running(self) -> list[tuple[ast.stmt, ast.AST]]:
        """The same, each with itself; and of the statements outside of functions, what lambdas in them do when called."""
        inside = [(node, node) for node in self.statements]
        known = {id(node) for node in self.statements}
        lambdas = [
            (node, part.body)
            for node in self.everywhere
            if id(node) not in known
            for part in ast.walk(node)
            if isinstance(part, ast.Lambda)
        ]
        return sorted([*inside, *lambdas], key=lambda pair: pair[0].lineno)

    @cached_property
    def everywhere(self) -> list[ast.stmt]:
        """All simple statements, those outside of functions too."""
        found: list[ast.stmt] = []
        _simple(self.tree.body, True, found)
        return found

    def around(self, line: int, kinds: tuple[Any, ...] = FUNCTIONS) -> list[str]:
        """The names of the functions (or classes) around a line."""
        return [one.name for one in self.nodes_around(line, kinds)]

    def nodes_around(self, line: int, kinds: tuple[Any, ...]) -> list[Any]:
        """The loops, functions, classes or ``with`` around a line."""
        found = (node for node in self._blocks if isinstance(node, kinds))
        return [one for one in found if one.lineno <= line <= (one.end_lineno or one.lineno)]

    @cached_property
    def _blocks(self) -> list[Any]:
        kinds = (*LOOPS, *FUNCTIONS, ast.ClassDef, ast.With)
        return [node for top in self.tree.body for node in ast.walk(top) if isinstance(node, kinds)]

    def loops_around(self, line: int) -> tuple[Any, list[Any]]:
        """The innermost function around a line, None outside of all; and the loops in it around the line, the outermost first."""
        around = sorted(self.nodes_around(line, (*LOOPS, *FUNCTIONS)), key=lambda node: node.lineno)
        functions = [number for number, node in enumerate(around) if isinstance(node, FUNCTIONS)]
        return (around[functions[-1]], around[functions[-1] + 1 :]) if functions else (None, around)

    def belongs(self, node: ast.stmt, name: str, function: str) -> bool:
        """Whether a variable in a statement is a function's own, or was handed on to another under the same name; or, where the
        function has its variable from one around it, is that one's."""
        around = self.nodes_around(node.lineno, FUNCTIONS)
        if any(one.name == function or name in {given.arg for given in one.args.args} for one in around):
            return True
        outside = [one for one in around if one.lineno < max(each.lineno for each in around)]
        return any(gives(inner, name) for one in outside for inner in ast.walk(one))

    def rest(self, line: int, *, outermost: bool = False) -> StillToRun:
        """What is still to run from a line on in its function, or outside of functions: from the head of the innermost (or the
        outermost) loop around it."""
        function, loops = self.loops_around(line)
        first = loops[0 if outermost else -1].lineno if loops else line
        end = function.end_lineno if function is not None else None
        return StillToRun("\n".join(self.source.splitlines()[first - 1 : end]), bool(loops))

    def behind(self, line: int) -> str:
        """What stands behind a line in its function, or outside of functions."""
        function, _ = self.loops_around(line)
        end = function.end_lineno if function is not None else None
        return "\n".join(self.source.splitlines()[line:end])

    def rest_of_turns(self, line: int, again: int) -> StillToRun:
        """The same of the outermost loop, where turns of the innermost one have run another line again and again: what they left
        out stays out that an ``if`` of that loop decides by nothing that a turn changes (``if training:``)."""
        rest, (_, loops) = self.rest(line, outermost=True), self.loops_around(line)
        if not loops or loops[-1] not in self.loops_around(again)[1] or makes_several(loops[-1], again):
            return rest
        lines = rest.source.splitlines()
        given = {node.id for node in ast.walk(loops[-1]) if isinstance(node, ast.Name) and type(node.ctx) is ast.Store}
        for node in ast.walk(loops[-1]):
            if isinstance(node, ast.If) and not any(isinstance(one, ast.Call) for one in ast.walk(node.test)):
                first, last = node.lineno - loops[0].lineno, (node.body[-1].end_lineno or node.lineno) - loops[0].lineno
                if given.isdisjoint(one.id for one in ast.walk(node.test) if isinstance(one, ast.Name)):
                    lines[first : last + 1] = [""] * (last + 1 - first)
        return StillToRun("\n".join(lines), True)

    def cached(self, name: str) -> ast.stmt | None:
        """The last ``return`` of a property whose value its object keeps."""
        for function in (node for top in self.tree.body for node in ast.walk(top)):
            if not isinstance(function, ast.FunctionDef) or function.name != name:
                continue
            if any(last_name(one) == "cached_property" for one in function.decorator_list):
                found = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
                return found[-1] if found else None
        return None

    def adding_at(self, line: int) -> tuple[str, Written] | None:
        """What a statement on this line puts something into by a method (``updates.append({...})``), and the statement."""
        for node in self.everywhere:
            call = node.value if isinstance(node, ast.Expr) else None
            if not node.lineno <= line <= (node.end_lineno or node.lineno) or not isinstance(call, ast.Call):
                continue
            if isinstance(call.func, ast.Attribute) and call.func.attr in ADDING and call.args:
                return ast.unparse(call.func.value), self.place(node)
        return None

    def line(self, number: int) -> str:
        """One of its lines, without its indentation."""
        lines = self.source.splitlines()
        return lines[number - 1].strip() if 0 < number <= len(lines) else ""

    def function_at(self, line: int, name: str) -> Any:
        """The innermost function of this name around a line; None where there is none."""
        found = [one for one in self.nodes_around(line, FUNCTIONS) if one.name == name]
        return max(found, key=lambda one: one.lineno, default=None)

    @property
    def is_file(self) -> bool:
        return self.where.endswith(".py")

    def place(self, node: ast.stmt) -> Written:
        words = ast.get_source_segment(_MAGIC.sub(r"\1pass", self.source), node) or ""
        return Written(self.where, node.lineno + self.ahead, words)


def statements_in(source: str) -> list[ast.stmt]:
    try:
        return parsed(_MAGIC.sub(r"\1pass", source)).body
    except (SyntaxError, ValueError, RecursionError):
        return []


def _simple(body: Iterable[ast.AST], counts: bool, found: list[ast.stmt]) -> None:
    for node in body:
        inside = counts or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody", "handlers", "cases")]
        if any(blocks):
            for block in blocks:
                _simple(block, inside, found)
        elif inside and isinstance(node, ast.stmt):
            found.append(node)


def nodes_in(one: Text, kind: type[_Node]) -> list[_Node]:
    return [node for top in one.tree.body for node in ast.walk(top) if isinstance(node, kind)]


def name_given(statement: str) -> str:
    """The one name to which a statement gives its value; "" where it gives it to none, or to something else."""
    name, equals, _ = statement.strip().partition(" = ")
    return name if equals and name.isidentifier() else ""


def names_given(statement: str) -> list[str]:
    """The names to which an assignment gives values; [] where it gives one to something else, or is none."""
    body = statements_in(textwrap.dedent(statement))
    if len(body) != 1 or not isinstance(body[0], ast.Assign) or len(body[0].targets) != 1:
        return []
    names = list(targets(body[0].targets[0]))
    return names if all(name.isidentifier() for name in names) else []


def put_into(statement: str) -> str:
    """What a statement adds to a container, as it is written: ``loss`` of ``losses.append(loss)``; "" where that is not plain."""
    try:
        (node,) = parsed(statement.strip()).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ""
    value: ast.expr | None = None
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        call = node.value
        value = call.args[0] if node.value.func.attr in _ADDING_ONE and len(call.args) == 1 else None
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        value = node.value
    if not isinstance(value, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
        return ""
    words = ast.unparse(value)
    return words if len(words) <= _SHORT else ""
