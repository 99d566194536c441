"""The program's text: where something is put into a list, under a key or in an attribute. Nothing of it is run."""

from __future__ import annotations

import ast
import linecache
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from gpumem_magic.devices.base import CodePlace
from gpumem_magic.looks.code import cell_of
from gpumem_magic.looks.objects import attribute, attributes, entry, is_a, text
from gpumem_magic.looks.parsing import parsed
from gpumem_magic.recording.model import Checkpoint

# So many cells before this one are read, so many files, and of each so many lines.
_CELLS = 50
_FILES = 40
_LINES = 5000
_ADDING = frozenset(
    {
        "append",
        "appendleft",
        "add",
        "extend",
        "insert",
        "put",
        "put_nowait",
        "push",
        "setdefault",
        "__setitem__",
        "store",
        "record",
    }
)
# What a program does to gradients without taking them for anything: it clears or clips them in place, or looks at them.
_LOOKS = re.compile(r".*_$|norm$|item$|isfinite$")
_ADDING_ONE = frozenset({"append", "appendleft", "add", "push"})
# Functions of the standard library's that put something into the list that they are given first.
_PUTTING = frozenset({"heappush", "heappushpop", "heapreplace", "insort", "insort_left", "insort_right"})
_MAGIC = re.compile(r"^(\s*)[!%].*$", re.M)
_HOOKS = re.compile(r"register_\w*hook$")
_TRAINS = re.compile(r"backward|step|fit|train(?!ing)")
_BACKWARD = re.compile(r"backward\(")
_PARAMETERS = re.compile(r"parameters\(")
_SHORT = 60
_Node = TypeVar("_Node", bound=ast.AST)
_LOOPS = (ast.For, ast.While)
# What a tensor gives without its graph.
_NO_GRAPH = frozenset(("detach", "detach_", "item", "tolist", "data", "shape", "size"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


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


class Tie(NamedTuple):
    """A statement that gives one layer another's weight (``self.head.weight = self.emb.weight``), in the constructor of a class,
    or outside of functions. of: the class, whose object the two paths start from; "" outside: then they have the variable.
    is_of_data: whether it gives the numbers alone, so that the two stay two.
    """

    of: str
    to: tuple[str, ...]
    given: tuple[str, ...]
    is_of_data: bool
    place: Written


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
        return ast.Module(_parsed(self.source), [])

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
        kinds = (*_LOOPS, *FUNCTIONS, ast.ClassDef, ast.With)
        return [node for top in self.tree.body for node in ast.walk(top) if isinstance(node, kinds)]

    def loops_around(self, line: int) -> tuple[Any, list[Any]]:
        """The innermost function around a line, None outside of all; and the loops in it around the line, the outermost first."""
        around = sorted(self.nodes_around(line, (*_LOOPS, *FUNCTIONS)), key=lambda node: node.lineno)
        functions = [number for number, node in enumerate(around) if isinstance(node, FUNCTIONS)]
        return (around[functions[-1]], around[functions[-1] + 1 :]) if functions else (None, around)

    def belongs(self, node: ast.stmt, name: str, function: str) -> bool:
        """Whether a variable in a statement is a function's own, or was handed on to another under the same name; or, where the
        function has its variable from one around it, is that one's."""
        around = self.nodes_around(node.lineno, FUNCTIONS)
        if any(one.name == function or name in {given.arg for given in one.args.args} for one in around):
            return True
        outside = [one for one in around if one.lineno < max(each.lineno for each in around)]
        return any(_gives(inner, name) for one in outside for inner in ast.walk(one))

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
        if not loops or loops[-1] not in self.loops_around(again)[1] or _makes_several(loops[-1], again):
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
            if any(_last(one) == "cached_property" for one in function.decorator_list):
                found = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
                return found[-1] if found else None
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


def _parsed(source: str) -> list[ast.stmt]:
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


@dataclass(frozen=True)
class ProgramText:
    """cells: this one first. files: the paths of the user's modules, which are read when something is looked for in them."""

    cells: tuple[Text, ...] = field(default=())
    files: tuple[str, ...] = field(default=())

    def _mentioning(self, *names: str) -> Iterator[Text]:
        """The texts in which all of these names stand: what reads no other parses few."""
        for one in chain(self.cells, self._modules):
            # (Python reads other letters as those of ASCII, too.)
            if not one.source.isascii() or all(name in one.source for name in names):
                yield one

    @cached_property
    def _modules(self) -> list[Text]:
        found = []
        for file in self.files:
            lines = linecache.getlines(file)
            if 0 < len(lines) <= _LINES:
                found.append(Text(re.split(r"[/\\]", file)[-1], "".join(lines)))
        return found[:_FILES]

    def matches(self, pattern: re.Pattern[str], place: Written) -> bool:
        """Whether a pattern is found in the cells, or in the file in which a statement stands."""
        texts = (one for one in chain(self.cells, self._modules) if not one.is_file or one.where == place.where)
        return any(pattern.search(one.source) for one in texts)

    def matches_any(self, pattern: re.Pattern[str]) -> bool:
        """Whether a pattern is found in any of the cells."""
        return any(pattern.search(one.source) for one in self.cells)

    def place_of(self, pattern: re.Pattern[str]) -> str:
        """The first statement of the cells in which a pattern is found, and where, in brackets; "" where there is none."""
        found = self.stating(pattern)
        return f" (`{found.shown}`, {found.words})" if found is not None else ""

    def stating(self, pattern: re.Pattern[str]) -> Written | None:
        """The first statement of the cells in which a pattern is found."""
        written = (one.place(node) for one in self.cells for node in one.everywhere)
        return next((one for one in written if pattern.search(one.statement)), None)

    def summed(self, name: str) -> str:
        """The expression of the cell that joins a list of tensors and only takes their sum or mean,
        ``torch.stack(outs).mean(0)`` or ``sum(outs)``; "" where nothing else of the list is read, or something else is."""
        found = ""
        for one in self.cells[:1]:
            nodes = _all(one, ast.AST)
            sums = [node for node in nodes if isinstance(node, ast.Call) and _sums(node, name)]
            inside = {id(part) for node in sums for part in ast.walk(node)}
            read = [node for node in nodes if isinstance(node, ast.Name) and node.id == name and id(node) not in inside]
            puts = {
                id(node.func.value)
                for node in nodes
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            }
            others = [node for node in read if isinstance(node.ctx, ast.Load) and id(node) not in puts]
            found = ast.unparse(sums[0]) if sums and not others else ""
        return found

    def adding(self, name: str, attribute: str = "", key: str = "", function: str = "") -> Written | None:
        """Where the program puts something into what a variable, or its attribute, holds: the last place in the cell, else in
        a function. `lit` and ``outs`` find ``self.outs.append(...)``; with a key, first what puts it under that one. function:
        whose own variable it is, where it is one's."""
        wanted = attribute or name
        for certain in (True, False):
            for one in self._mentioning(wanted):
                own = [node for node, part in one.running if _adds(part, wanted, certain, of_object=bool(attribute))]
                # A variable of the same name in somebody else's function is another one.
                if function and not attribute:
                    own = [node for node in own if one.belongs(node, name, function)] if certain else []
                else:
                    own = [
                        node for node in own if one.whole or attribute or (not one.is_file and _is_global(one, name))
                    ]
                keyed = [node for node in own if key and _mentions_key(node, wanted, key)]
                keyed = [node for node in keyed if _gives_key(node, wanted, key)] or keyed
                if own:
                    # (``pool[i] = new`` of a list takes the place of another, where an ``append`` fills it.)
                    more = [node for node in own if _appends(node, wanted)]
                    return one.place((keyed or more or own)[-1])
        for one in self._mentioning(attribute, "cached_property") if attribute else ():
            if (result := one.cached(attribute)) is not None:
                return one.place(result)
        return None

    def emptying(self, kinds: Sequence[str], emptied: str) -> str:
        """The method, to be called without arguments, by which a class empties an attribute of its objects
        (``self.items.clear()``, ``self._models = []``); "" where it has none. kinds: the class and those above it, each with its
        module; of a library's, the text is read that Python has of it."""
        for kind in kinds:
            module, _, name = kind.rpartition(".")
            lines = linecache.getlines(text(attribute(sys.modules.get(module), "__file__")))
            ours = self._mentioning("class ", emptied)
            theirs = [Text("", "".join(lines))] if 0 < len(lines) <= _LINES else []
            for node in (node for one in chain(ours, theirs) for node in _all(one, ast.ClassDef)):
                for method in node.body if node.name == name else ():
                    if isinstance(method, ast.FunctionDef) and _empties(method, emptied):
                        return method.name
        return ""

    def putting(self, name: str, place: CodePlace) -> tuple[str, Written] | None:
        """What a function puts a variable of its own into, alone or in another object (``steps.append(Step(logits))``), and
        where; None where it puts it nowhere, or into several. place: of the line that gave it its value."""
        one = self.text_of(place.own_file, "")
        function = one.function_at(place.own_line, place.own_function) if one is not None else None
        found: dict[str, Written] = {}
        if one is None or function is None or not name:
            return None
        for node in (node for node in ast.walk(function) if isinstance(node, ast.Expr)):
            call = node.value
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            into, given = call.func.value, (part for part in call.args if name in _going_in(part))
            if call.func.attr in _ADDING and isinstance(into, ast.Name) and any(given):
                found[into.id] = one.place(node)
        return next(iter(found.items())) if len(found) == 1 else None

    def added_within(self, place: Written, key: str) -> Written | None:
        """Where a function whose result a statement assigns (``out = sample(32)``) puts something into the list that it returns,
        alone or under a key."""
        made = next(iter(_parsed(textwrap.dedent(place.statement))), None)
        called = _last(made.value.func) if isinstance(made, ast.Assign) and isinstance(made.value, ast.Call) else ""
        for one in self._mentioning(called, "return") if called else ():
            for function in (node for top in one.tree.body for node in ast.walk(top) if isinstance(node, FUNCTIONS)):
                returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
                if function.name != called or len(returns) != 1:
                    continue
                value = returns[0]
                if key and isinstance(value, ast.Dict):
                    pairs = zip(value.keys, value.values, strict=True)
                    value = next(
                        (its for of, its in pairs if isinstance(of, ast.Constant) and repr(of.value) == key), None
                    )
                if isinstance(value, ast.Name):
                    return self.adding(value.id, function=called)
        return None

    def filling(self, name: str) -> Written | None:
        """The last statement in a loop that gives a variable's parts their values, where nothing else in the loop names it."""
        for one in self._mentioning(name):
            for loop in (node for top in one.tree.body for node in ast.walk(top) if isinstance(node, _LOOPS)):
                inside = list(ast.walk(loop))
                writes = [node for node in inside if isinstance(node, ast.stmt) and _fills(node, name)]
                named = sum(isinstance(node, ast.Name) and node.id == name for node in inside)
                if writes and named == len(writes):
                    return one.place(writes[-1])
        return None

    def using(self, name: str) -> Written | None:
        """The last statement of the cell that calls a variable's method, or hands it to a function; else one in a function of
        another cell."""
        for place, one in enumerate(self.cells):
            own = [node for node in one.statements if _uses(node, name) and (not place or one.around(node.lineno))]
            if own:
                return one.place(own[-1])
        return None

    def calls(self, called: str, keyword: str = "") -> list[Written]:
        """The statements with a call of a method or function, with this keyword where one is given."""
        return [
            one.place(node)
            for one in self._mentioning(called, keyword)
            for node in one.statements
            if any(
                _last(call.func) == called and (not keyword or any(_is_on(given, keyword) for given in call.keywords))
                for call in ast.walk(node)
                if isinstance(call, ast.Call)
            )
        ]

    def asking(self) -> list[Written]:
        """The statements with an ``output_...=True`` in a call."""
        return [
            one.place(node)
            for one in self._mentioning("output_")
            for node in one.statements
            if any(
                (given.arg or "").startswith("output_")
                and isinstance(given.value, ast.Constant)
                and given.value.value is True
                for call in ast.walk(node)
                if isinstance(call, ast.Call)
                for given in call.keywords
            )
        ]

    def ties(self) -> list[Tie]:
        """Those of all classes' constructors, and of the cell outside of functions, that nothing is a condition of, and where
        nothing else gives either layer a weight (a head that is made anew, to be trained by itself)."""
        found: list[Tie] = []
        for one in self._mentioning("weight"):
            for kind in _all(one, ast.ClassDef):
                said: list[Tie] = []
                for method in kind.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "__init__" and method.args.args:
                        said += _ties_in(one, kind.name, method.args.args[0].arg, method.body)
                # (A class that was written again is as it was written last.)
                if said and kind is self._written_last(kind.name):
                    found += said
            if one.whole:
                found += _ties_in(one, "", "", one.tree.body)
        return [one for one in found if not self._is_given_anew(one)] if found else []

    def _written_last(self, name: str) -> ast.ClassDef | None:
        kinds = (kind for one in self._mentioning(name) for kind in _all(one, ast.ClassDef) if kind.name == name)
        return next(kinds, None)

    def _is_given_anew(self, tie: Tie) -> bool:
        """Whether one of the two layers, or its weight, is assigned anywhere but before the tie."""
        for path in (tie.to, tie.given):
            for one in self._mentioning(path[-2]):
                makers = {
                    id(node): kind
                    for kind in _all(one, ast.ClassDef)
                    for method in kind.body
                    if isinstance(method, ast.FunctionDef) and method.name == "__init__"
                    for node in ast.walk(method)
                }
                for node in _all(one, ast.Assign):
                    found = [_path(to) for to in node.targets if isinstance(to, (ast.Attribute, ast.Subscript))]
                    if not any(
                        len(to) > 1 and path[-2] in (to[-1], to[-2] if to[-1] == path[-1] else "") for to in found
                    ):
                        continue
                    if isinstance(node.value, ast.Attribute) and node.value.attr in (path[-1], "data"):
                        continue
                    place, kind = one.place(node), makers.get(id(node))
                    is_later = place.where == tie.place.where and place.line > tie.place.line
                    if kind is not None:
                        if is_later if kind.name == tie.of else tie.of in map(_last, kind.bases):
                            return True
                    elif tie.of or is_later:
                        return True
        return False

    def carried(self, kind: str) -> tuple[str, Written] | None:
        """An attribute of a class's objects that is made from itself (``out, self.h = self.lstm(x, self.h)``), and where."""
        for one in self._mentioning("self"):
            for node in one.everywhere:
                if not isinstance(node, ast.Assign) or kind not in one.around(node.lineno, (ast.ClassDef,)):
                    continue
                again = [part for part in ast.walk(node.value) if isinstance(part, ast.Attribute)]
                for target in each_target(node.targets[0]):
                    if isinstance(target, ast.Attribute):
                        whole = ast.dump(target.value)
                        if any(part.attr == target.attr and ast.dump(part.value) == whole for part in again):
                            return target.attr, one.place(node)
        return None

    def carried_on(self, names: Collection[str]) -> list[tuple[str, Written]]:
        """Those of these variables that a loop makes from themselves (``out, h = lstm(x, h)``), each with where; not sums, nor
        what is detached there."""
        found: dict[str, Written] = {}
        for one in self.cells:
            for loop in (node for top in one.tree.body for node in ast.walk(top) if isinstance(node, _LOOPS)):
                ended = _detached_in(loop)
                for node in ast.walk(loop):
                    if isinstance(node, ast.Assign) and not isinstance(node.value, ast.BinOp):
                        made = {part.id for target in node.targets for part in _plain_targets(target)}
                        for name in made.intersection(names, _going_in(node.value)) - ended:
                            found.setdefault(name, one.place(node))
        return list(found.items())

    def does_nothing(self, called: Collection[str]) -> Written | None:
        """A statement that only calls one of these context managers, and so has no effect: ``torch.no_grad()``."""
        for one in self.texts:
            for node in one.statements:
                call = node.value if isinstance(node, ast.Expr) else None
                if isinstance(call, ast.Call) and _last(call.func) in called:
                    return one.place(node)
        return None

    def inside_with(self, line: int, called: Collection[str]) -> Written | None:
        """The innermost ``with`` around a line of the cell that enters one of these context managers."""
        found = None
        for one in self.cells[:1]:
            for node in one.nodes_around(line - one.ahead, (ast.With,)):
                calls = (item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call))
                if any(_last(call.func) in called for call in calls):
                    found = one.place(node)
        return found

    def entering(self, called: str) -> Written | None:
        """The first ``with`` of the cells that enters this context manager."""
        for one in self._mentioning(called):
            for node in _all(one, ast.With):
                calls = (item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call))
                if any(_last(call.func) == called for call in calls):
                    return one.place(node)
        return None

    def sums_up(self, name: str) -> bool:
        """Whether the cell adds tensors to a variable (``total += loss``), not their numbers."""
        return any(
            isinstance(node, ast.AugAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == name
            and bool(_going_in(node.value))
            for node in (self.cells[0].everywhere if self.cells else ())
        )

    def hook_of(self, place: Written) -> Written | None:
        """The statement that registers, as a hook, the function in which a statement stands."""
        if _registers_lambda(place.statement):
            return place
        theirs = (one for one in self._mentioning("def ") if one.where == place.where)
        names = {name for one in theirs for name in one.around(place.line - one.ahead)}
        for one in self._mentioning("register", "hook") if names else ():
            for node in one.everywhere:
                for call in ast.walk(node):
                    if isinstance(call, ast.Call) and _HOOKS.match(_last(call.func)):
                        given = {_last(part) for part in ast.walk(call) if isinstance(part, (ast.Name, ast.Attribute))}
                        if given & names:
                            return one.place(node)
        return None

    def removes_hooks(self) -> bool:
        """Whether the program takes off hooks: ``handle.remove()``, which has no arguments, unlike a list's."""
        calls = (node for one in self._mentioning(".remove()") for node in _all(one, ast.Call))
        return any(_last(node.func) == "remove" and not node.args for node in calls)

    def loop_only_looks(self, place: Written) -> bool:
        """Whether neither the innermost loop around a line nor what follows it (in its function) has a backward or a step."""
        rest = next((one.rest(place.line - one.ahead) for one in self.cells if one.where == place.where), None)
        return rest is not None and rest.in_loop and not _TRAINS.search(rest.source)

    @property
    def texts(self) -> list[Text]:
        """The cells and the files, the measured one first."""
        return [*self.cells, *self._modules]

    def text_of(self, file: str, own_file: str) -> Text | None:
        """The text that was compiled under a file's name. own_file: that of the measured cell."""
        where = "" if file == own_file else cell_of(file) or re.split(r"[/\\]", file)[-1]
        return next((one for one in self.texts if one.where == where), None)

    def may_go_backward(self, way: Sequence[Written], again: int = 0) -> bool:
        """Whether one of the functions that lead to a line has a backward or a step in what it would run next: in its rest and in
        the loops around its line. Where a text is not known, it may. again: a line of the last one's that has run several times
        since the last backward; of those around that one only a backward of their own counts."""
        texts = {one.where: one for one in reversed(self.texts)}
        for place in way:
            one = texts.get(place.where)
            if one is None:
                return True
            line, is_last = place.line - one.ahead, place is way[-1]
            rest = one.rest_of_turns(line, again - one.ahead) if again and is_last else one.rest(line, outermost=True)
            if (_BACKWARD if again and not is_last else _TRAINS).search(rest.source):
                return True
        return False

    def goes_on_backward(self, way: Sequence[Written]) -> bool:
        """Whether one of the functions that lead to a line has a backward behind its line, or calls a function that has one."""
        texts = {one.where: one for one in reversed(self.texts)}
        theirs = {
            node.name
            for one in self._mentioning("backward")
            for node in ast.walk(one.tree)
            if isinstance(node, FUNCTIONS) and _BACKWARD.search(ast.unparse(node))
        }
        calls = re.compile(rf"\b(?:backward|{'|'.join(map(re.escape, theirs))})\(" if theirs else _BACKWARD.pattern)
        return any(
            (one := texts.get(place.where)) is not None and calls.search(one.behind(place.line - one.ahead)) is not None
            for place in way
        )

    def trains(self, place: Written) -> bool:
        """Whether the text that a line is in has a backward or a step anywhere."""
        return any(one.where == place.where and _TRAINS.search(one.source) for one in self.cells)

    def own_methods_kept(self) -> Iterator[tuple[str, str, Written]]:
        """Classes whose objects hold one of their own methods in an attribute (``self.pool = self.mean``): class, attribute, and
        where that is."""
        for one in self._mentioning("class ", "self."):
            for kind in _all(one, ast.ClassDef):
                functions = [node for node in kind.body if isinstance(node, FUNCTIONS)]
                # (What is decorated may be no method.)
                methods = {node.name for node in functions if not node.decorator_list}
                for node in (part for function in functions for part in ast.walk(function)):
                    if isinstance(node, ast.Assign) and methods.intersection(_own_attributes(node.value)):
                        for target in node.targets:
                            if isinstance(target, ast.Attribute) and _last(target.value) == "self":
                                yield kind.name, target.attr, one.place(node)

    def takes_gradients(self, name: str) -> bool:
        """Whether the cell goes through the parameters of what a variable has and takes their gradients for something, as one
        does that steps copies of them; or a function does, of what it is given."""
        return any(
            _takes_gradients(node, name if one.whole and not isinstance(node, FUNCTIONS) else "")
            for one in self._mentioning("parameters", ".grad")
            for node in one.tree.body
            if one.whole or isinstance(node, (*FUNCTIONS, ast.ClassDef))
        )

    def handlers(self) -> list[tuple[int, int, int]]:
        """The cell's own ``except`` blocks: the first line of what is tried, and their own first and last lines."""
        found = []
        for one in self.cells[:1]:
            for node in (inner for top in one.tree.body for inner in ast.walk(top)):
                if not isinstance(node, ast.Try):
                    continue
                for handler in node.handlers:
                    last = max(inner.end_lineno or inner.lineno for inner in handler.body)
                    found.append((node.body[0].lineno + one.ahead, handler.lineno + one.ahead, last + one.ahead))
        return found


def _all(one: Text, kind: type[_Node]) -> list[_Node]:
    return [node for top in one.tree.body for node in ast.walk(top) if isinstance(node, kind)]


def _ties_in(one: Text, kind: str, owner: str, body: Iterable[ast.stmt]) -> Iterator[Tie]:
    for node in body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Attribute):
            continue
        paths = [_path(part) for part in (*node.targets, node.value)]
        paths = [path[1:] if kind and path[:1] == (owner,) else path for path in paths]
        # (A path of one name is a variable, or an attribute that is no layer's.)
        if min(map(len, paths)) > 1 and len({path[-1] for path in paths}) == 1:
            for path in paths[:-1]:
                yield Tie(kind, path, paths[-1], node.value.attr == "data", one.place(node))


def _path(node: ast.AST) -> tuple[str, ...]:
    """``("self", "head", "weight")`` of ``self.head.weight`` and of its ``data``; () of what is none."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        around = _path(node.value)
        return around if node.attr == "data" or not around else (*around, node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        around = _path(node.value)
        return (*around, str(node.slice.value)) if around else ()
    return ()


def _own_attributes(value: ast.expr) -> set[str]:
    """The attributes of `self` that an expression is, or chooses from; not those that it calls."""
    if isinstance(value, ast.IfExp):
        return _own_attributes(value.body) | _own_attributes(value.orelse)
    if isinstance(value, (ast.List, ast.Tuple)):
        return {name for part in value.elts for name in _own_attributes(part)}
    if isinstance(value, ast.Dict):
        return {name for part in value.values for name in _own_attributes(part)}
    if isinstance(value, ast.Subscript):
        return _own_attributes(value.value)
    return {value.attr} if isinstance(value, ast.Attribute) and _last(value.value) == "self" else set()


def _takes_gradients(node: ast.AST, name: str) -> bool:
    """Whether a loop over parameters in it takes their gradients for something. name: whose parameters, "" for anybody's."""
    for loop in ast.walk(node):
        heads: Sequence[Any] = [loop] if isinstance(loop, ast.For) else getattr(loop, "generators", ())
        over = [one for one in heads if _PARAMETERS.search(words := ast.unparse(one.iter)) and name in words]
        names = {part.id for one in over for part in ast.walk(one.target) if isinstance(part, ast.Name)}
        read = {
            id(part): part
            for part in (ast.walk(loop) if names else ())
            if isinstance(part, ast.Attribute)
            and part.attr == "grad"
            and isinstance(part.ctx, ast.Load)
            and _last(part.value) in names
        }
        if read.keys() - _only_looked_at(loop):
            return True
    return False


def _only_looked_at(loop: ast.AST) -> set[int]:
    """The parts of a loop of which it is only asked whether they are None, or which are only changed in place or measured."""
    found: set[int] = set()
    for part in ast.walk(loop):
        if isinstance(part, ast.Compare) and any(isinstance(one, ast.Constant) for one in part.comparators):
            found.add(id(part.left))
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and _LOOKS.match(part.func.attr):
            found.update(map(id, ast.walk(part.func.value)))
    return found


def _is_on(given: ast.keyword, keyword: str) -> bool:
    """Whether a call's keyword is this one, and not plainly switched off."""
    return given.arg == keyword and not (isinstance(given.value, ast.Constant) and not given.value.value)


def _is_global(one: Text, name: str) -> bool:
    return re.search(rf"\bglobal\b[^\n]*\b{re.escape(name)}\b", one.source) is not None or not re.search(
        rf"(?m)^[ \t]+{re.escape(name)}\s*=[^=]", one.source
    )


def _registers_lambda(statement: str) -> bool:
    calls = (
        node for top in _parsed(textwrap.dedent(statement)) for node in ast.walk(top) if isinstance(node, ast.Call)
    )
    return any(_HOOKS.match(_last(one.func)) and any(isinstance(arg, ast.Lambda) for arg in one.args) for one in calls)


def _makes_several(loop: ast.AST, line: int) -> bool:
    """Whether a line may run several times in one turn of a loop: in a comprehension, or in a loop of its own."""
    kinds = (*_LOOPS, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
    return any(
        node is not loop and isinstance(node, kinds) and node.lineno <= line <= (node.end_lineno or node.lineno)
        for node in ast.walk(loop)
    )


def _last(node: ast.expr) -> str:
    """The last name of an expression: ``outs`` of ``self.outs[0]``."""
    while isinstance(node, (ast.Subscript, ast.Starred)):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _mentions_key(node: ast.stmt, wanted: str, key: str) -> bool:
    """Whether a statement has ``wanted["key"]``."""
    return any(
        isinstance(part, ast.Subscript)
        and isinstance(part.slice, ast.Constant)
        and repr(part.slice.value) == key
        and _last(part.value) == wanted
        for part in ast.walk(node)
    )


def _gives_key(node: ast.stmt, wanted: str, key: str) -> bool:
    """Whether a statement gives ``wanted["key"]`` its value, and does not only read it."""
    return isinstance(node, ast.Assign) and any(_mentions_key(ast.Expr(target), wanted, key) for target in node.targets)


def _adds(node: ast.AST, wanted: str, certain: bool, of_object: bool) -> bool:
    """Whether a statement puts something into a container of this name; or, less certain, gives the name a value. of_object: it
    is an attribute's, and a variable of the same name is another one."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            if inner.func.attr in _ADDING and _last(inner.func.value) == wanted:
                return True
            if inner.func.attr == "update" and _last(inner.func.value) == wanted and inner.args:
                return True
        given = inner.args if isinstance(inner, ast.Call) and _last(inner.func) in _PUTTING else []
        if given and _last(given[0]) == wanted:
            return True
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = [part for one in node.targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
        if isinstance(node, ast.AugAssign) and _last(node.target) == wanted:
            return True
    for one in targets:
        if isinstance(one, ast.Subscript) and _last(one) == wanted:
            return True
        if _last(one) == wanted and isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            mentions = any(
                _last(part) == wanted for part in ast.walk(node.value) if isinstance(part, (ast.Name, ast.Attribute))
            )
            # (``pool = pool[::2]`` puts nothing in.)
            takes_out = isinstance(node.value, ast.Subscript) and _last(node.value) == wanted
            gives = not certain and not _is_empty(node.value) and not (of_object and isinstance(one, ast.Name))
            if (mentions and not takes_out) or gives:
                return True
    return False


def _appends(node: ast.AST, wanted: str) -> bool:
    """Whether a statement makes a container of this name longer, by a method that only lists and sets have."""
    return any(
        isinstance(inner, ast.Call)
        and isinstance(inner.func, ast.Attribute)
        and inner.func.attr in ("append", "extend", "insert", "add")
        and _last(inner.func.value) == wanted
        for inner in ast.walk(node)
    )


def _sums(node: ast.Call, name: str) -> bool:
    """``torch.stack(name).mean(0)``, ``torch.stack(name).sum(dim=0)``, ``sum(name)``."""
    if isinstance(node.func, ast.Name) and node.func.id == "sum":
        return bool(node.args) and isinstance(node.args[0], ast.Name) and node.args[0].id == name
    over = [*node.args, *(one.value for one in node.keywords if one.arg == "dim")]
    joined = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr in ("mean", "sum") else None
    return (
        isinstance(joined, ast.Call)
        and _last(joined.func) == "stack"
        and len(joined.args) == 1
        and isinstance(joined.args[0], ast.Name)
        and joined.args[0].id == name
        and len(over) == 1
        and isinstance(over[0], ast.Constant)
        and over[0].value == 0
    )


def _fills(node: ast.stmt, name: str) -> bool:
    """``out[a:b] = part``, ``out[a:b] += part``; not ``out[:] = whole``."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return any(
        isinstance(one, ast.Subscript)
        and isinstance(one.value, ast.Name)
        and one.value.id == name
        and ast.unparse(one.slice) not in (":", "...")
        for one in targets
    )


def _plain_targets(target: ast.expr) -> Iterator[ast.Name]:
    """The variables among what is assigned to."""
    yield from (part for part in each_target(target) if isinstance(part, ast.Name))


def each_target(target: ast.expr) -> Iterator[ast.expr]:
    """What is assigned to, each for itself."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for part in target.elts:
            yield from each_target(part)
    else:
        yield target


def _going_in(value: ast.expr) -> set[str]:
    """The variables in an expression, but for those of which it takes what has no graph (``h.detach()``, ``loss.item()``)."""
    without = {id(part.value) for part in ast.walk(value) if isinstance(part, ast.Attribute) and part.attr in _NO_GRAPH}
    return {part.id for part in ast.walk(value) if isinstance(part, ast.Name) and id(part) not in without}


def _detached_in(loop: ast.AST) -> set[str]:
    """The variables whose graph a loop ends: ``h = h.detach()``, ``h, c = h.detach(), c.detach()``, ``h.detach_()``."""
    found: set[str] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach_":
            found |= {part.id for part in [node.func.value] if isinstance(part, ast.Name)}
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = list(zip(target.elts, value.elts, strict=True))
        for to, what in pairs:
            if isinstance(to, ast.Name):
                read = {part.id for part in ast.walk(what) if isinstance(part, ast.Name)}
                found |= ({to.id} & read) - _going_in(what)
    return found


def _empties(method: ast.FunctionDef, attribute: str) -> bool:
    """Whether a method that anybody may call, with no arguments, empties an attribute of its object for good."""
    wanted = len(method.args.args) - len(method.args.defaults) + sum(one is None for one in method.args.kw_defaults)
    if method.name.startswith("_") or method.decorator_list or wanted != 1:
        return False
    for node in method.body:
        if isinstance(node, ast.Assign) and _is_empty(node.value):
            emptied: list[ast.expr] = node.targets
        else:
            call = node.value if isinstance(node, ast.Expr) else None
            emptied = []
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "clear":
                emptied = [call.func.value]
        if attribute in {name for one in emptied for name in _own_attributes(one)}:
            # (What fills it again afterwards begins anew.)
            return not any(_adds(later, attribute, True, True) for later in method.body[method.body.index(node) + 1 :])
    return False


def _gives(node: ast.AST, name: str) -> bool:
    """Whether a statement gives a variable of this name a value."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(one, ast.Name) and one.id == name for target in targets for one in each_target(target))


def _is_empty(value: ast.expr) -> bool:
    """``[]``, ``None``, ``0``, ``dict()``: how a name begins."""
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return not value.elts
    if isinstance(value, ast.Dict):
        return all(map(_is_empty, value.values))
    return isinstance(value, ast.Constant) or (
        isinstance(value, ast.Call) and not value.args and _last(value.func) in ("list", "dict", "set", "deque")
    )


def name_given(statement: str) -> str:
    """The one name to which a statement gives its value; "" where it gives it to none, or to something else."""
    name, equals, _ = statement.strip().partition(" = ")
    return name if equals and name.isidentifier() else ""


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


def _uses(node: ast.stmt, name: str) -> bool:
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            given = [*call.args, *(one.value for one in call.keywords)]
            if any(isinstance(one, ast.Name) and one.id == name for one in (call.func, *given)):
                return True
            base = call.func
            while isinstance(base, (ast.Attribute, ast.Subscript)):
                base = base.value
            if isinstance(base, ast.Name) and base.id == name:
                return True
    return False


def read_program(source: str, namespace: Mapping[str, Any]) -> ProgramText:
    """The measured cell, the cells before it, and the files of the user's own modules."""
    return ProgramText((Text("", source, whole=True), *_cells(namespace)), tuple(_files(namespace)))


def _cells(namespace: Mapping[str, Any]) -> Iterator[Text]:
    lines = entry(namespace, "_ih")
    if not is_a(lines, list):
        return
    known = list.__len__(lines)
    # The last is the measured one.
    for number in range(known - 2, max(0, known - 2 - _CELLS), -1):
        source, ahead = _unwrapped(text(list.__getitem__(lines, number)))
        yield Text(f"In [{number}]", source, ahead)


@lru_cache(2 * _CELLS)
def _unwrapped(source: str) -> tuple[str, int]:
    """A cell's body, and the lines before it: below a magic's line it is an argument of a call, as IPython keeps it."""
    if "run_cell_magic" in source:
        try:
            body = parsed(source).body
        except (SyntaxError, ValueError, RecursionError):
            return "", 0
        for node in body:
            call = node.value if isinstance(node, ast.Expr) else None
            if isinstance(call, ast.Call) and call.args and isinstance(call.args[-1], ast.Constant):
                return text(call.args[-1].value), 1
    return source, 0


def _files(namespace: Mapping[str, Any]) -> Iterator[str]:
    from gpumem_magic.owners.traversal import users_modules

    for _, module in users_modules():
        file = text(attribute(module, "__file__"))
        if attributes(module) is not namespace and file.endswith(".py"):
            yield file


def placed(program: ProgramText, rows: Iterable[Checkpoint]) -> ProgramText:
    """The program with the cell's lines counted as its rows count them: from the magic's own line on."""
    row = next((one for one in rows if one.kind == "statement"), None)
    if row is None or not program.cells:
        return program
    first, *others = program.cells
    wanted = row.statement.strip().partition("\n")[0]
    lines = first.source.split("\n")
    found = next((number for number, words in enumerate(lines, 1) if words.strip().startswith(wanted)), row.line)
    return ProgramText((Text(first.where, first.source, max(0, row.line - found), True), *others), program.files)
