"""How what a line reads flows through a program: names, attributes, functions' results and arguments, asked of source text alone.

A file becomes flows (from an expression to what it sets) and tests (where a value decides). Functions and attributes are known
by their names alone, so that they are found in every file that is asked.
"""

from __future__ import annotations

import ast
import linecache
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from gpumem_magic.looks.expressions import (
    LEAVES,
    LOGGING,
    QUIET,
    anywhere_in,
    arguments,
    as_long_as,
    attribute_named,
    called,
    called_for,
    calls,
    checks,
    depth_of,
    dotted,
    drops_a_gradient,
    fails_by,
    functions_asked,
    handling_logs,
    inside,
    is_mask,
    is_number,
    keyed_names,
    keys_given,
    keys_set,
    left_as_long,
    left_out,
    makes_of_contents,
    ordered_names,
    parts_of,
    placements,
    put_in_order,
    seeded,
    selections,
    spelled,
    streams,
    switches,
    targets,
    whole_numbers,
    written_into,
)
from gpumem_magic.looks.flow_keys import (
    FUNCTIONS,
    KeyReader,
    Scope,
    mask_of,
    nothing_of,
    own_names,
    result_of,
)
from gpumem_magic.looks.flow_records import FileFlows, Flow, Key, StatementUses, Test, Through, Uses, length
from gpumem_magic.looks.parsing import parsed
from gpumem_magic.looks.raises import (
    Raises,
    caught_by,
    is_swallowed,
    raised_by,
    raised_or_warned,
    swallowing,
    warnings_are_errors,
)
from gpumem_magic.looks.sizes import sizes_given
from gpumem_magic.looks.wording import Own, Wording

_ASSIGNMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)
_LOOPS = (ast.While, ast.For, ast.AsyncFor)
_Loop = ast.While | ast.For | ast.AsyncFor
# Where only the truth of a name counts, or its length.
_OF_TRUTH = ("loop", "each", "branch", "check", "if", "prints")
# What takes factors that sizes are multiplied with.
_SCALING = ("interpolate", "upsample", "resize")
# What shows something to somebody, or writes it.
_PRINTS = frozenset((
    "print", "pprint", "write", "writelines", "writerow", "writerows", "display", "secho", "log", "debug", "info", "warning",
))  # fmt: skip
# Of these, what is nothing else by another's name (as `math.log` is), and what a program's readers see.
_SHOWS = frozenset(("print", "pprint", "display", "secho", "info"))


def of_file(file: str) -> FileFlows:
    """Empty where the source is not to be had."""
    linecache.checkcache(file)  # (It may have been written anew since it ran before.)
    return _of_text("".join(linecache.getlines(file)))


# A line is asked about again and again, and so are its neighbours.
@lru_cache(maxsize=16)
def _of_text(source: str) -> FileFlows:
    try:
        return _FlowReader(parsed(source)).found()
    except (SyntaxError, ValueError, RecursionError):
        return FileFlows((), (), (), {})


# What makes letters of numbers.
_SPELLS = frozenset(("chr", "decode", "id_to_token", "id_to_piece", "convert_ids_to_tokens", "batch_decode"))
# Which parameter a list or a dictionary of arguments is for (``build(*sizes, **settings)``).
_ANY = "*"
# What gives the object of a name, or of a key.
_GIVES = frozenset(("getattr", "get", "get_submodule", "attrgetter", "itemgetter", "methodcaller"))
# What says by an error that there is no more of an object.
_ENDING = {"__next__": "StopIteration", "__anext__": "StopAsyncIteration", "__getitem__": "IndexError"}
# What operators raise, and what that is a kind of.
_OF_OPERATORS = frozenset(("RuntimeError", "LinAlgError", "Exception", "BaseException"))


def _catches_operators(handler: ast.ExceptHandler) -> bool:
    caught = handler.type
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(one is None or dotted(one).rpartition(".")[2] in _OF_OPERATORS for one in kinds)


class _FlowReader(KeyReader):
    def __init__(self, tree: ast.Module) -> None:
        super().__init__(tree)
        self._tree = tree
        self._flows: list[Flow] = []
        self._tests: list[Test] = []
        self._statements: list[StatementUses] = []
        self._keyed = keyed_names(tree)
        self._ordered = ordered_names(tree)
        self._wording = Wording(tree, self._keyed)
        self._swallowing = swallowing(tree)
        self._raised_by = raised_by if not warnings_are_errors(tree) else raised_or_warned
        handling = list(handling_logs(tree))
        self._noted = [
            one.func.value
            for function in handling
            for one in calls(function)
            if called(one) == "append" and isinstance(one.func, ast.Attribute)
        ]
        self._told_of_logs = any(self._wording.works(one.body) is None for one in handling)
        self._streams = streams(tree)

    def found(self) -> FileFlows:
        self._scope(self._tree, None)
        by_key: dict[Key, list[Flow]] = defaultdict(list)
        for flow in self._flows:
            for key in flow.source.keys:
                by_key[key].append(flow)
        nodes = [node for node in ast.walk(self._tree) if isinstance(node, ast.stmt)]
        spans = tuple(
            ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)) for node in nodes
        )
        return FileFlows(
            tuple(self._flows),
            tuple(self._tests),
            tuple(self._statements),
            dict(by_key),
            spans,
            raises=tuple((one.lineno, one.end_lineno or 0) for one in nodes if isinstance(one, ast.Raise)),
            tries=tuple(
                (one.body[0].lineno, one.body[-1].end_lineno or 0)
                for one in nodes
                if isinstance(one, (ast.Try, ast.With, ast.AsyncWith))
                and (
                    is_swallowed(one, self._swallowing, _OF_OPERATORS)
                    or (isinstance(one, ast.Try) and any(map(_catches_operators, one.handlers)))
                )
            ),
            caught=Raises.of(self._tree),
            functions=tuple((one.lineno, one.end_lineno or 0, one.name) for one in nodes if isinstance(one, FUNCTIONS)),
        )

    # ---- scopes and names

    def _scope(self, scope: Scope, owner: ast.ClassDef | None) -> None:
        at = 0 if isinstance(scope, ast.Module) else scope.lineno
        self._scopes.append((at, frozenset(own_names(scope))))
        if isinstance(scope, FUNCTIONS):
            self._enter(scope, owner)
        self._block(scope.body, scope, None, None)
        self._scopes.pop()

    def _enter(self, function: ast.FunctionDef | ast.AsyncFunctionDef, owner: ast.ClassDef | None) -> None:
        name = owner.name if owner is not None and function.name == "__init__" else function.name
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        named = names + [one.arg for one in function.args.kwonlyargs]
        # (A decorator's function may take more, and what makes an object of a class.)
        fixed = not (function.args.kwarg or function.decorator_list or function.name == "__init__")
        takes = frozenset(named) if fixed else None
        for one in self._known_as(name, function, owner):
            for position, parameter in enumerate(names[1:] if owner is not None else names):
                self._link((0, f"{one}({position}"), (function.lineno, parameter), takes)
            for parameter in named:
                self._link((0, f"{one}({parameter}"), (function.lineno, parameter), takes)
                self._link((0, f"{one}({_ANY}"), (function.lineno, parameter), takes)
        if owner is None:
            self._link((0, f"{name}()"), (0, f"::{name}()"))
        if any(isinstance(one, ast.Name) and "property" in one.id for one in function.decorator_list):
            self._link((0, f"{name}()"), (0, f".{name}"))

    @staticmethod
    def _known_as(
        name: str, function: ast.FunctionDef | ast.AsyncFunctionDef, owner: ast.ClassDef | None
    ) -> Sequence[str]:
        """A method is none of a module's functions."""
        return (name,) if owner is not None and function.name != "__init__" else (name, f"::{name}")

    def _link(self, source: Key, target: Key, takes: frozenset[str] | None = None) -> None:
        for what, whats in (("", ("",)), ("[]", ("[]", "[*]")), ("!", ("!",)), ("()", ("()",))):
            before, after = (source[0], f"{source[1]}{what}"), tuple((target[0], f"{target[1]}{one}") for one in whats)
            self._flows.append(Flow(Uses(0, -1, frozenset((before,)), False), after, "value", takes=takes))

    # ---- statements

    def _block(self, body: Iterable[ast.AST], scope: Scope, owner: ast.ClassDef | None, loop: _Loop | None) -> None:
        around = self._statement
        for node in body:
            self._statement = (node.lineno, node.col_offset) if isinstance(node, ast.stmt) else around
            if isinstance(node, FUNCTIONS):
                self._scope(node, owner)
            elif isinstance(node, ast.ClassDef):
                self._block(node.body, scope, node, None)
            elif not isinstance(node, ast.Lambda):
                self._once = -1 if loop is not None or isinstance(node, ast.While) else self._scopes[-1][0]
                self._node(node, scope, loop)
                self._block(ast.iter_child_nodes(node), scope, None, node if isinstance(node, _LOOPS) else loop)
        self._statement = around

    def _node(self, node: ast.AST, scope: Scope, loop: _Loop | None) -> None:
        if isinstance(node, (ast.If, ast.While)):
            self._statements.append(
                StatementUses(node.lineno, node.end_lineno or node.lineno, self._uses(node.test), True)
            )
        elif isinstance(node, ast.stmt) and not hasattr(node, "body"):
            source = self._uses(node)
            self._statements.append(StatementUses(source.first, source.last, source, False))
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)):
            divisor = self._uses(node.right if isinstance(node, ast.BinOp) else node.value)
            whole = divisor._replace(first=node.lineno, last=node.end_lineno or node.lineno)
            self._tests.append(Test(whole, "divisor", frozenset()))
        if isinstance(node, _ASSIGNMENTS):
            if node.value is not None:
                names = tuple(self._targets(node))
                if isinstance(node.value, ast.Subscript) and self._lists_tensors(node.value.value):
                    self._flow(node.value.slice, names, "way")
                if not (self._place_by_place(node) or self._handed_through(node, node.value, names)):
                    self._flow(node.value, names)
                    self._may_be_none(node.value, names)
                    self._hands_on(node.value, names)
                for one in selections(node.value):
                    self._flow(one, (*names, *map(length, names)), "count")
                for one in spelled(node.value):
                    self._flow(one, tuple(map(length, names)), "count")
                if is_mask(node.value):
                    self._flow(node.value, tuple(map(mask_of, names)), "count")
                for one in as_long_as(node.value):
                    self._flows.append(Flow(self._lengths(one), tuple(map(length, names)), "value"))
                if any(map(functions_asked, calls(node.value))):
                    self._flow(node.value, names, "way")
                for target in keys_set(node, self._keyed):
                    self._holds(target.slice, target.value)
                for one in switches(node):
                    self._test(one, "switch")
        elif isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)):
            if node.value is not None and isinstance(scope, FUNCTIONS):
                self._flow(node.value, ((0, f"{scope.name}()"),))
                if isinstance(node.value, ast.Name) and node.value.id in self._defined:
                    # (What is asked for by a function is what that gives.)
                    result = self._uses(node.value)._replace(keys=frozenset([(0, f"{node.value.id}()")]))
                    self._flows.append(Flow(result, ((0, f"{scope.name}()"),), "value"))
                self._may_be_none(node.value, ((0, f"{scope.name}()"),))
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            given = tuple(map(self._key, targets(node.target)))
            self._flow(node.iter, (*given, *map(nothing_of, given)))
            self._test(node.iter, "each")
            for call in calls(node.iter):
                if called(call) == "range":
                    for argument in call.args:
                        self._test(argument, "loop")
                elif called(call) == "iter" and len(call.args) == 2:
                    # (Called until it gives the second.)
                    self._test(called_for(call.args[0]), "loop")
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            self._test(node.slice, "held", but=node.value)
            self._test(node.slice, "looked up")
            for one in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
                if is_mask(one):
                    self._test(one, "selected", but=node.value)
                elif name := dotted(one):
                    mask = self._uses(one)._replace(keys=frozenset([mask_of(self._key(name))]))
                    self._tests.append(Test(mask, "selected", self._uses(node.value).keys))
        elif isinstance(node, ast.Slice):
            for bound in (node.lower, node.upper):
                if bound is not None:
                    self._size(bound)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.BoolOp):
            # What stands behind an ``and`` or ``or`` runs by what stands before.
            for before, behind in pairwise(node.value.values):
                way = ast.copy_location(ast.IfExp(before, behind, ast.Constant(None)), node)
                self._branches(way, before, [[behind], []], scope, loop)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self._told(node.value)
            if functions_asked(node.value) and isinstance(node.value.func, ast.Attribute):
                # (`models.sort(key=loss)`)
                own = tuple(map(self._key, (*targets(node.value.func.value), *inside(node.value.func.value))))
                self._flow(node.value, own, "way")
            if called(node.value) == "pop":
                for argument in node.value.args[:1]:
                    self._test(argument, "removed")
        elif isinstance(node, ast.IfExp):
            self._branches(node, node.test, [[node.body], [node.orelse]], scope, loop)
        elif isinstance(node, (ast.If, ast.While)):
            self._branches(node, node.test, [node.body, node.orelse], scope, loop)
        elif isinstance(node, ast.Match):
            self._branches(node, node.subject, [case.body for case in node.cases], scope, loop)
        elif isinstance(node, ast.Assert):
            self._raised(node.test, "AssertionError", scope)
        elif isinstance(node, ast.Delete):
            for one in node.targets:
                if isinstance(one, ast.Subscript) and not isinstance(one.slice, ast.Slice):
                    self._test(one.slice, "removed")
        elif (isinstance(node, ast.Try) and node.handlers) or is_swallowed(node, self._swallowing):
            around = self._statement
            for tried in (one for part in node.body for one in ast.walk(part)):  # type: ignore[attr-defined]
                if isinstance(tried, ast.Assert) or (
                    isinstance(tried, ast.If)
                    and (isinstance(tried.body[0], ast.Raise) or self._raised_by(tried.body[0]))
                ):
                    self._statement = (tried.lineno, tried.col_offset)
                    self._test(tried.test, "branch")
            self._statement = around
            if isinstance(node, ast.Try):
                self._tried(node)
                for handler in node.handlers:
                    for error in caught_by(handler) if handler.name else ():
                        self._link((0, f"{error}(raised"), self._key(handler.name or ""))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in arguments(node.exc):
                self._flow(argument, ((0, f"{called(node.exc)}(raised"),))

    def _tried(self, node: ast.Try) -> None:
        """What Python finds wrong of a value, where more than numbers go by whether it does."""
        others = [*node.orelse, *(part for one in node.handlers for part in one.body)]
        for statement in node.body:
            behind = [*others, *(one for one in node.body if one.lineno > statement.lineno)]
            if self._wording.works(behind) is None:
                around, self._statement = self._statement, (statement.lineno, statement.col_offset)
                for one in fails_by(statement, node.handlers):
                    self._test(one, "branch")
                self._statement = around

    def _raised(self, test: ast.expr, error: str, scope: Scope) -> None:
        if isinstance(scope, FUNCTIONS) and _ENDING.get(scope.name) == error:
            self._test(test, "loop")
        elif isinstance(scope, FUNCTIONS):
            uses = self._uses(test, True)
            self._tests.append(Test(uses, "raised", frozenset(), raises=(scope.name, error)))

    def _branches(
        self,
        node: ast.If | ast.IfExp | ast.While | ast.Match,
        test: ast.expr,
        branches: Sequence[Sequence[ast.AST]],
        scope: Scope,
        loop: _Loop | None,
    ) -> None:
        inner = [one for branch in branches for part in branch for one in ast.walk(part)]
        ends = isinstance(node, ast.While) or (loop is not None and any(isinstance(one, LEAVES) for one in inner))
        behind = left_out(node, inner, scope.body if loop is None else loop.body, loop is not None)
        found = [self._wording.works(one) for one in (behind, *branches)]
        skips, works = (
            found[0] is None,
            None in found or any(drops_a_gradient(one) or self._takes(one) for one in inner),
        )
        around = node if isinstance(node, ast.While) else loop
        if ends and isinstance(around, ast.While) and (around is node) is not isinstance(around.test, ast.Constant):
            self._test(test, f"wait {around.lineno}")
        elif ends and isinstance(around, ast.While) and around is not node:
            self._test(test, f"leave {around.lineno}")
        if checks(test):
            if works or any(isinstance(one, ast.Break) for one in inner):
                self._test(test, "check")
            return
        if ends:
            self._test(test, "loop")
        for error in dict.fromkeys(map(self._raised_by, inner)):
            if error:
                self._raised(test, error, scope)
        if isinstance(node, (ast.If, ast.Match)):
            self._test(test, "if")
        unless = frozenset().union(*(one for one in found if one is not None))
        if skips or (not isinstance(node, ast.While) and (works or unless)):
            self._test(test, "branch", unless=frozenset() if works else unless)
        elif isinstance(node, ast.If) and any(isinstance(one, ast.Call) and called(one) in _SHOWS for one in inner):
            self._test(test, "prints")
        for one in inner:
            if isinstance(one, ast.Assign) and left_as_long(one):
                self._flow(test, tuple(self._targets(one)), "altered")
            elif isinstance(one, _ASSIGNMENTS):
                counts = isinstance(one, ast.AugAssign) or (one.value is not None and is_number(one.value))
                given = tuple(self._targets(one))
                self._flow(test, (*given, *map(nothing_of, given)), "count" if counts else "way")
                if counts and isinstance(one.value, ast.BinOp):
                    # (Of numbers, or of tensors.)
                    self._flow(test, tuple(self._targets(one)), "way")
            elif isinstance(one, ast.Return) and isinstance(scope, FUNCTIONS):
                result = (0, f"{scope.name}()")
                self._flow(
                    test,
                    (result, nothing_of(result)) if isinstance(one.value, ast.Constant) else (nothing_of(result),),
                    "way",
                )
            elif (
                isinstance(one, ast.Call)
                and isinstance(one.func, ast.Attribute)
                and one.func.attr in ("append", "extend")
            ):
                self._holds(test, one.func.value)
            elif isinstance(one, ast.Call) and called(one) in LOGGING:
                for noted in self._noted:
                    self._holds(test, noted)

    def _takes(self, node: ast.AST) -> bool:
        """Whether it reckons with a tensor that the program has made, or appends one to a list, which keeps it."""
        if isinstance(node, ast.BinOp):
            parts = [node.left, node.right]
        elif isinstance(node, ast.Call) and called(node) == "append":
            parts = [part for one in node.args for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
        else:
            return False
        return any(isinstance(one, ast.Name) and self._given.may_be_made(self._key(one.id)) for one in parts)

    def _lists_tensors(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and self._given.lists_made(self._key(node.id))

    def _call(self, call: ast.Call) -> None:
        name = called(call)
        keywords = ",".join(sorted(one.arg for one in call.keywords if one.arg))
        known_as = f"{self._name_called(call)}({keywords}|" if keywords else f"{self._name_called(call)}("
        for position, argument in enumerate(call.args):
            several = isinstance(argument, ast.Starred)
            self._argument(argument, (0, f"{known_as}{_ANY if several else position}"))
        for one in call.keywords:
            self._argument(one.value, (0, f"{known_as}{one.arg or _ANY}"))
        if isinstance(call.func, ast.Attribute) and name in ("append", "extend", "add"):
            for argument in call.args:
                names = (*inside(call.func.value), *anywhere_in(call.func.value))
                self._flow(argument, tuple(map(self._key, names)))
        for item, queue in put_in_order(call, self._ordered):
            # (Which comes out first goes by all that is in it.)
            names = (*inside(queue), *anywhere_in(queue))
            self._flow(
                item, tuple((at, f"{one}{mark}") for at, one in map(self._key, names) for mark in ("", "^")), "way"
            )
        if self._told_of_logs and name in LOGGING:
            # (What a handler of the program's own does may be anything.)
            for argument in arguments(call):
                self._test(argument, "branch")
                self._flow(argument, ((0, "emit(0"),), "argument")
        if name == "log" and call.args:
            for noted in self._noted:
                self._holds(call.args[0], noted)
        if name == "exit":
            for argument in call.args:
                self._flow(argument, ((0, "SystemExit(raised"),))
        if name == "exec" and isinstance(call.func, ast.Name):
            self._test(call, "branch")
            for argument in call.args:
                self._flow(argument, tuple(map(self._key, targets(call.args[-1]))))
        if (into := written_into(call, self._streams)) is not None or (into := seeded(call)) is not None:
            self._flow(call.args[0], tuple(map(self._key, targets(into))))
        if isinstance(call.func, ast.Attribute) and name == "copy_" and call.args:
            self._flow(call.args[0], tuple(map(self._key, targets(call.func.value))))
        for key in keys_given(call, self._keyed):
            self._holds(key, call.func.value)  # type: ignore[attr-defined]
        if isinstance(call.func, (ast.Name, ast.Subscript)) and name not in QUIET:
            self._test(call.func if isinstance(call.func, ast.Name) else call.func.slice, "called")
            if isinstance(call.func, ast.Subscript):
                self._test(call.func.value, "asked")
        elif isinstance(call.func, ast.Call) and called(call.func) in _GIVES:
            for argument in call.func.args:
                self._test(argument, "called")
        elif isinstance(call.func, ast.Attribute) and name not in QUIET and not functions_asked(call):
            self._test(call.func.value, "asked")
            if isinstance(call.func.value, ast.Subscript) and self._lists_tensors(call.func.value.value):
                self._test(call.func.value.slice, "called")
        for placed in placements(call):
            self._test(placed, "placed")
        for switch in switches(call):
            self._test(switch, "switch")
        if name == "setattr" and (attribute := attribute_named(call)):
            self._flow(call.args[2], ((0, f".{attribute}"),))
        if name in _PRINTS:
            for argument in arguments(call):
                self._test(argument, "printed")
        if name in _SPELLS:
            for argument in call.args:
                self._test(argument, "looked up")
        if makes_of_contents(call):
            for argument in call.args:
                self._test(argument, "held")
        if name == "one_hot":
            self._test(call, "sized")
        for argument in sizes_given(call):
            self._size(argument, made=name if name[:1].isupper() else "")
        if name in _SCALING:
            for argument in arguments(call)[1:]:
                self._test(argument, "rounded")

    def _argument(self, given: ast.expr, key: Key) -> None:
        self._flow(given, (key,), "argument")
        self._may_be_none(given, (key,))
        self._hands_on(given, (key,))

    def _hands_on(self, function: ast.expr, names: Sequence[Key]) -> None:
        """What a function gives that has other names now."""
        if isinstance(function, ast.Call) and called(function) == "partial" and function.args:
            function = function.args[0]
        if isinstance(function, ast.Lambda):
            given = self._uses(function.body)
        elif name := dotted(function):
            own = {(0, f"{name}()")} if name in self._defined else set()
            given = Uses(0, -1, frozenset((result_of(self._key(name)), *own)), False)
        else:
            return
        self._flows.append(Flow(given, tuple(map(result_of, names)), "value"))

    def _size(self, of: ast.expr, made: str = "") -> None:
        self._test(of, "size", made=made)
        for one in whole_numbers(of):
            self._test(one, "rounded", made=made)

    def _holds(self, source: ast.expr, into: ast.expr) -> None:
        """How much `into` holds goes by an expression."""
        names = tuple(map(self._key, targets(into)))
        if dotted(source):
            # (A key that is a name alone is no value that its own line reads.)
            uses = self._uses(source)._replace(first=0, last=-1, once=-1)
            self._flows.append(Flow(uses, (*names, *map(length, names)), "count"))
            return
        self._flow(source, (*names, *map(length, names)), "count")

    def _place_by_place(self, node: ast.stmt | ast.NamedExpr) -> bool:
        """``seen[key] = (tensor, True)``, ``tensor, known = seen[key]``, and ``a, b = b, a``: each place has what is there."""
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            return False
        parts, names = parts_of(node.value), parts_of(node.targets[0])
        if parts and names:
            if len(parts) != len(names):
                return False
            for part, name in zip(parts, names, strict=True):
                keys = tuple(map(self._key, targets(name)))
                self._flow(part, keys)
                self._may_be_none(part, keys)
                self._hands_on(part, keys)
            return True
        # (A list may be put in another order.)
        if parts and isinstance(node.value, ast.Tuple) and depth_of(node.targets[0]) <= 1:
            keys = tuple(map(self._key, targets(node.targets[0])))
            for place, part in enumerate(parts):
                self._flow(part, tuple((at, f"{name}@{place}") for at, name in keys))
            return True
        if not names or depth_of(node.value) > 1:
            return False
        uses = self._uses(node.value)
        whole = self._key(dotted(node.value))
        held = {key for key in uses.keys if (key[1].endswith("]") if depth_of(node.value) else key == whole)}
        for place, name in enumerate(names):
            keys = tuple(map(self._key, targets(name)))
            own = {(at, f"{one}{mark}") for at, one in held for mark in ("^", f"@{place}")}
            self._flows.append(Flow(uses._replace(keys=uses.keys - held | own), keys, "value"))
            self._may_be_none(node.value, keys)
        return True

    def _handed_through(self, node: ast.stmt | ast.NamedExpr, value: ast.expr, names: tuple[Key, ...]) -> bool:
        """``control = handler.on_log(control, logs)``: the logs may be in it, `Through` what has this name."""
        if not (isinstance(node, ast.Assign) and isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)):
            return False
        given = list(map(dotted, value.args))
        own = [dotted(one) for one in node.targets]
        if len(own) != 1 or not own[0] or own[0] not in given:
            return False
        position = given.index(own[0])
        back = self._uses(value.args[position])
        name = self._name_called(value)
        back = back._replace(keys=back.keys | {(0, f"{name}()"), (0, f"{name}()[]")})
        self._flows.append(Flow(back, names, "value"))
        self._flows.append(Flow(self._uses(value), names, "value", Through(called(value), position)))
        return True

    def _told(self, call: ast.Call) -> None:
        """An object whose method is called, or a function, is told of the arguments."""
        told = dotted(call.func.value if isinstance(call.func, ast.Attribute) else call.func)
        # (What its own method does with them is followed there.)
        if isinstance(call.func, ast.Attribute) and self._given.follows(self._key(told), call.func.attr):
            return
        if told not in ("", "self") and called(call) not in QUIET and called(call) != "copy_":
            for argument in arguments(call):
                self._flow(argument, (self._key(told),), "told")

    def _flow(self, source: ast.expr, sets: tuple[Key, ...], kind: str = "value") -> None:
        if sets:
            self._flows += self._apart(Flow(self._uses(source), sets, kind), source)
            if kind in ("value", "argument"):
                self._flows += [Flow(self._uses(one), sets, "whole") for one in whole_numbers(source)]

    @staticmethod
    def _apart(flow: Flow, source: ast.expr) -> Sequence[Flow]:
        """What is in a list, and the list itself, which is there whatever is in it: where it gets another name, and is made."""
        inside = tuple((at, f"{name}{mark}") for at, name in flow.sets for mark in ("[]", "[*]"))
        if flow.kind not in ("value", "argument") or any(name.endswith("]") or "@" in name for _, name in flow.sets):
            return [flow]
        if isinstance(source, (ast.List, ast.ListComp)):
            return [flow._replace(sets=inside)]
        if not dotted(source):
            return [flow]
        held = frozenset(key for key in flow.source.keys if key[1].endswith("[]"))
        whole = flow.source._replace(keys=flow.source.keys - held)
        return [flow._replace(source=whole), flow._replace(source=flow.source._replace(keys=held), sets=inside)]

    def _may_be_none(self, value: ast.expr, names: Sequence[Key]) -> None:
        """By what these names are None, or not."""
        own, others = self._asked_of_none(value)
        for source in (Uses(0, -1, own, False), *others):
            if source.keys or source.reads:
                self._flows.append(Flow(source, tuple(map(nothing_of, names)), "value"))

    def _test(
        self,
        source: ast.expr,
        decides: str,
        but: ast.expr | None = None,
        unless: frozenset[Own] = frozenset(),
        made: str = "",
    ) -> None:
        but_keys = frozenset() if but is None else self._uses(but).keys
        self._tests.append(Test(self._uses(source, decides in _OF_TRUTH), decides, but_keys, unless, made))
