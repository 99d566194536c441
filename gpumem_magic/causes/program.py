"""The program's texts together: where something is put into a list, under a key or in an attribute. Nothing of them is run."""

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
from typing import Any

from gpumem_magic.causes.statements import (
    ADDING,
    FUNCTIONS,
    LOOPS,
    adds,
    appends,
    detached_in,
    each_target,
    empties,
    fills,
    gives,
    gives_key,
    going_in,
    is_on,
    is_sum_of,
    last_name,
    mentions_key,
    own_attributes,
    plain_targets,
    takes_gradients,
    uses,
)
from gpumem_magic.causes.written import Text, Written, nodes_in, statements_in
from gpumem_magic.devices.base import CodePlace
from gpumem_magic.looks.code import cell_of
from gpumem_magic.looks.objects import attribute, attributes, entry, is_a, text
from gpumem_magic.looks.parsing import parsed
from gpumem_magic.recording.model import Checkpoint

# So many cells before this one are read, so many files, and of each so many lines.
_CELLS = 50
_FILES = 40
_LINES = 5000
_HOOKS = re.compile(r"register_\w*hook$")
_TRAINS = re.compile(r"backward|step|fit|train(?!ing)")
_NAMING = frozenset(
    {"setattr", "__setattr__", "register_buffer", "register_parameter", "add_module", "register_module"}
)
_BACKWARD = re.compile(r"backward\(")


@dataclass(frozen=True)
class ProgramText:
    """cells: this one first. files: the paths of the user's modules, which are read when something is looked for in them."""

    cells: tuple[Text, ...] = field(default=())
    files: tuple[str, ...] = field(default=())

    def mentioning(self, *names: str) -> Iterator[Text]:
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

    def defines(self, name: str) -> bool:
        """Whether one of the texts has a function of this name."""
        found = re.compile(rf"\bdef\s+{re.escape(name)}\b")
        return any(found.search(one.source) for one in self.mentioning(name))

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
            nodes = nodes_in(one, ast.AST)
            sums = [node for node in nodes if isinstance(node, ast.Call) and is_sum_of(node, name)]
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

    def adding(
        self, name: str, attribute: str = "", key: str = "", function: str = "", *, earlier: bool = False
    ) -> Written | None:
        """Where the program puts something into what a variable, or its attribute, holds: the last place in the cell, else in
        a function. `lit` and ``outs`` find ``self.outs.append(...)``; with a key, first what puts it under that one. function:
        whose own variable it is, where it is one's. earlier: what stands outside of functions in other cells has run, too."""
        wanted = attribute or name
        for certain in (True, False):
            for one in self.mentioning(wanted):
                running = [(node, node) for node in one.everywhere] if earlier else one.running
                own = [node for node, part in running if adds(part, wanted, certain, of_object=bool(attribute))]
                # A variable of the same name in somebody else's function is another one.
                if function and not attribute:
                    own = [node for node in own if one.belongs(node, name, function)] if certain else []
                else:
                    own = [
                        node for node in own if one.whole or attribute or (not one.is_file and _is_global(one, name))
                    ]
                keyed = [node for node in own if key and mentions_key(node, wanted, key)]
                keyed = [node for node in keyed if gives_key(node, wanted, key)] or keyed
                if own:
                    # (``pool[i] = new`` of a list takes the place of another, where an ``append`` fills it.)
                    more = [node for node in own if appends(node, wanted)]
                    return one.place((keyed or more or own)[-1])
        for one in self.mentioning(attribute, "cached_property") if attribute else ():
            if (result := one.cached(attribute)) is not None:
                return one.place(result)
        return None

    def linking(self, kind: str, attribute: str) -> Written | None:
        """The statement of a class's own methods that gives one of its objects' attributes a value that is given to it."""
        for one in self.mentioning(kind, attribute):
            for node in one.everywhere:
                targets = (part for target in getattr(node, "targets", ()) for part in each_target(target))
                if kind in one.around(node.lineno, (ast.ClassDef,)) and any(
                    isinstance(part, ast.Attribute) and part.attr == attribute for part in targets
                ):
                    return one.place(node)
        return None

    def decorated(self, name: str) -> Written | None:
        """The first decorator of a function."""
        for one in self.mentioning(f"def {name}"):
            for node in nodes_in(one, ast.FunctionDef):
                if node.name == name and node.decorator_list:
                    first = node.decorator_list[0]
                    return Written(one.where, first.lineno + one.ahead, f"@{ast.unparse(first)}")
        return None

    def giving(self, name: str, function: str) -> Written | None:
        """The first statement of a function that gives a variable of its own its value."""
        for one in self.mentioning(name, function):
            own = [node for node in one.everywhere if gives(node, name) and function in one.around(node.lineno)]
            if own:
                return one.place(own[0])
        return None

    def naming(self, stem: str) -> Written | None:
        """The statement that gives attributes numbered names (``self.register_buffer(f"mean_{step}", mean)``), or keys in an
        object's own dictionary. stem: what all the names begin with."""
        for one in self.mentioning(stem):
            for node in one.statements:
                for call in (part for part in ast.walk(node) if isinstance(part, ast.Call)):
                    given = [part for part in call.args[:2] if isinstance(part, ast.JoinedStr) and part.values]
                    starts = (part.values[0] for part in given)
                    if last_name(call.func) in _NAMING and any(
                        isinstance(start, ast.Constant) and start.value == stem for start in starts
                    ):
                        return one.place(node)
        return None

    def emptying(self, kinds: Sequence[str], emptied: str) -> str:
        """The method, to be called without arguments, by which a class empties an attribute of its objects
        (``self.items.clear()``, ``self._models = []``); "" where it has none. kinds: the class and those above it, each with its
        module; of a library's, the text is read that Python has of it."""
        for kind in kinds:
            module, _, name = kind.rpartition(".")
            lines = linecache.getlines(text(attribute(sys.modules.get(module), "__file__")))
            ours = self.mentioning("class ", emptied)
            theirs = [Text("", "".join(lines))] if 0 < len(lines) <= _LINES else []
            for node in (node for one in chain(ours, theirs) for node in nodes_in(one, ast.ClassDef)):
                for method in node.body if node.name == name else ():
                    if isinstance(method, ast.FunctionDef) and empties(method, emptied):
                        return method.name
        return ""

    def putting(self, name: str, place: CodePlace, own_file: str = "") -> tuple[str, Written] | None:
        """What a function, or a cell, puts a variable of its own into, alone or in another object (as ``steps.append(Step(x))``
        does), and where; None where it puts it nowhere, or into several. place: of the line that gave it its value."""
        one = self.text_of(place.own_file, own_file)
        if one is None:
            return None
        line = place.own_line - one.ahead
        if (own := one.adding_at(line)) is not None:
            return own
        function = one.function_at(line, place.own_function) if one.nodes_around(line, FUNCTIONS) else one.tree
        found: dict[str, Written] = {}
        if function is None or not name:
            return None
        for node in (node for node in ast.walk(function) if isinstance(node, ast.Expr)):
            call = node.value
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            into, given = call.func.value, (part for part in call.args if name in going_in(part))
            if call.func.attr in ADDING and isinstance(into, ast.Name) and any(given):
                found[into.id] = one.place(node)
        return next(iter(found.items())) if len(found) == 1 else None

    def added_within(self, place: Written, key: str) -> Written | None:
        """Where a function whose result a statement assigns (``out = sample(32)``) puts something into the list that it returns,
        alone or under a key."""
        made = next(iter(statements_in(textwrap.dedent(place.statement))), None)
        called = last_name(made.value.func) if isinstance(made, ast.Assign) and isinstance(made.value, ast.Call) else ""
        for one in self.mentioning(called, "return") if called else ():
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
        for one in self.mentioning(name):
            for loop in (node for top in one.tree.body for node in ast.walk(top) if isinstance(node, LOOPS)):
                inside = list(ast.walk(loop))
                writes = [node for node in inside if isinstance(node, ast.stmt) and fills(node, name)]
                named = sum(isinstance(node, ast.Name) and node.id == name for node in inside)
                if writes and named == len(writes):
                    return one.place(writes[-1])
        return None

    def using(self, name: str) -> Written | None:
        """The last statement of the cell that calls a variable's method, or hands it to a function; else one in a function of
        another cell."""
        for place, one in enumerate(self.cells):
            own = [node for node in one.statements if uses(node, name) and (not place or one.around(node.lineno))]
            if own:
                return one.place(own[-1])
        return None

    def mentioned(self, name: str) -> list[Written]:
        """The simple statements in which a name, or an attribute of this name, stands."""
        word = re.compile(rf"\b{re.escape(name)}\b")
        written = (one.place(node) for one in self.mentioning(name) for node in one.statements)
        return [one for one in written if word.search(one.statement)]

    def calls(self, called: str, keyword: str = "") -> list[Written]:
        """The statements with a call of a method or function, with this keyword where one is given."""
        return [
            one.place(node)
            for one in self.mentioning(called, keyword)
            for node in one.statements
            if any(
                last_name(call.func) == called
                and (not keyword or any(is_on(given, keyword) for given in call.keywords))
                for call in ast.walk(node)
                if isinstance(call, ast.Call)
            )
        ]

    def asking(self) -> list[Written]:
        """The statements with an ``output_...=True`` in a call."""
        return [
            one.place(node)
            for one in self.mentioning("output_")
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

    def carried(self, kind: str) -> tuple[str, Written] | None:
        """An attribute of a class's objects that is made from itself (``out, self.h = self.lstm(x, self.h)``), and where."""
        for one in self.mentioning("self"):
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

    def carried_in_parts(self, kind: str) -> tuple[str, Written] | None:
        """The same of an attribute whose parts are written (``self.memory[rows] = new``) by a method that reads others of it."""
        for one in self.mentioning("self"):
            for node in one.everywhere:
                if not isinstance(node, ast.Assign) or kind not in one.around(node.lineno, (ast.ClassDef,)):
                    continue
                methods = one.nodes_around(node.lineno, FUNCTIONS)
                for target in each_target(node.targets[0]) if methods else ():
                    into = target.value if isinstance(target, ast.Subscript) else None
                    if isinstance(into, ast.Attribute) and any(
                        isinstance(part, ast.Attribute)
                        and part is not into
                        and part.attr == into.attr
                        and ast.dump(part.value) == ast.dump(into.value)
                        for part in ast.walk(methods[-1])
                    ):
                        return into.attr, one.place(node)
        return None

    def carried_on(self, names: Collection[str]) -> list[tuple[str, Written]]:
        """Those of these variables that a loop makes from themselves (``out, h = lstm(x, h)``), each with where; not sums, nor
        what is detached there."""
        found: dict[str, Written] = {}
        for one in self.cells:
            for loop in (node for top in one.tree.body for node in ast.walk(top) if isinstance(node, LOOPS)):
                ended = detached_in(loop)
                for node in ast.walk(loop):
                    if isinstance(node, ast.Assign) and not isinstance(node.value, ast.BinOp):
                        made = {part.id for target in node.targets for part in plain_targets(target)}
                        for name in made.intersection(names, going_in(node.value)) - ended:
                            found.setdefault(name, one.place(node))
        return list(found.items())

    def does_nothing(self, called: Collection[str]) -> Written | None:
        """A statement that only calls one of these context managers, and so has no effect: ``torch.no_grad()``."""
        for one in self.texts:
            for node in one.statements:
                call = node.value if isinstance(node, ast.Expr) else None
                if isinstance(call, ast.Call) and last_name(call.func) in called:
                    return one.place(node)
        return None

    def inside_with(self, line: int, called: Collection[str]) -> Written | None:
        """The innermost ``with`` around a line of the cell that enters one of these context managers."""
        found = None
        for one in self.cells[:1]:
            for node in one.nodes_around(line - one.ahead, (ast.With,)):
                calls = (item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call))
                if any(last_name(call.func) in called for call in calls):
                    found = one.place(node)
        return found

    def entering(self, called: str) -> Written | None:
        """The first ``with`` of the cells that enters this context manager."""
        for one in self.mentioning(called):
            for node in nodes_in(one, ast.With):
                calls = (item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call))
                if any(last_name(call.func) == called for call in calls):
                    return one.place(node)
        return None

    def sums_up(self, name: str) -> bool:
        """Whether the cell adds tensors to a variable (``total += loss``), not their numbers."""
        return any(
            isinstance(node, ast.AugAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == name
            and bool(going_in(node.value))
            for node in (self.cells[0].everywhere if self.cells else ())
        )

    def hook_of(self, place: Written) -> Written | None:
        """The statement that registers, as a hook, the function in which a statement stands."""
        if _registers_lambda(place.statement):
            return place
        theirs = (one for one in self.mentioning("def ") if one.where == place.where)
        names = {name for one in theirs for name in one.around(place.line - one.ahead)}
        for one in self.mentioning("register", "hook") if names else ():
            for node in one.everywhere:
                for call in ast.walk(node):
                    if isinstance(call, ast.Call) and _HOOKS.match(last_name(call.func)):
                        given = {
                            last_name(part) for part in ast.walk(call) if isinstance(part, (ast.Name, ast.Attribute))
                        }
                        if given & names:
                            return one.place(node)
        return None

    def removes_hooks(self) -> bool:
        """Whether the program takes off hooks: ``handle.remove()``, which has no arguments, unlike a list's."""
        calls = (node for one in self.mentioning(".remove()") for node in nodes_in(one, ast.Call))
        return any(last_name(node.func) == "remove" and not node.args for node in calls)

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
            for one in self.mentioning("backward")
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
        for one in self.mentioning("class ", "self."):
            for kind in nodes_in(one, ast.ClassDef):
                functions = [node for node in kind.body if isinstance(node, FUNCTIONS)]
                # (What is decorated may be no method.)
                methods = {node.name for node in functions if not node.decorator_list}
                for node in (part for function in functions for part in ast.walk(function)):
                    if isinstance(node, ast.Assign) and methods.intersection(own_attributes(node.value)):
                        for target in node.targets:
                            if isinstance(target, ast.Attribute) and last_name(target.value) == "self":
                                yield kind.name, target.attr, one.place(node)

    def takes_gradients(self, name: str) -> bool:
        """Whether the cell goes through the parameters of what a variable has and takes their gradients for something, as one
        does that steps copies of them; or a function does, of what it is given."""
        return any(
            takes_gradients(node, name if one.whole and not isinstance(node, FUNCTIONS) else "")
            for one in self.mentioning("parameters", ".grad")
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


def _is_global(one: Text, name: str) -> bool:
    return re.search(rf"\bglobal\b[^\n]*\b{re.escape(name)}\b", one.source) is not None or not re.search(
        rf"(?m)^[ \t]+{re.escape(name)}\s*=[^=]", one.source
    )


def _registers_lambda(statement: str) -> bool:
    calls = (
        node
        for top in statements_in(textwrap.dedent(statement))
        for node in ast.walk(top)
        if isinstance(node, ast.Call)
    )
    return any(
        _HOOKS.match(last_name(one.func)) and any(isinstance(arg, ast.Lambda) for arg in one.args) for one in calls
    )


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
