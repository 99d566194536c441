"""What a program makes of a value that a line reads: asked of the source text alone.

A loop ends by it, where it stands in the test of a ``while``, in a ``range``, or in the test of an ``if`` that leaves a loop; a
size is made of it, where it stands among the arguments of what makes tensors and modules; a way is chosen by it, where it stands
in the test of any other ``if`` with work in it. So does every name that is assigned from it in the same function, and for loops
what such an ``if`` sets. Checks for numbers that are none (``isnan``) are no such tests: their answer is known.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence
from functools import lru_cache

_Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
_Assignment = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr
_ASSIGNMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)
_LEAVES = (ast.Break, ast.Return, ast.Raise)
_CHECKS = ("isnan", "isinf", "isfinite")
# Errors that a wrong value brings about, as a wrong name does not.
OF_VALUES = (
    "AssertionError", "ValueError", "ZeroDivisionError", "OverflowError", "FloatingPointError", "IndexError", "KeyError",
    "RuntimeError", "StopIteration", "LinAlgError",
)  # fmt: skip
# What takes sizes, beside modules and their like, whose names begin with a capital.
_OF_SIZES = (
    "zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "eye", "one_hot", "view",
    "reshape", "expand", "repeat", "new_zeros", "new_ones", "new_empty", "new_full", "resize_", "unflatten", "narrow", "split",
    "tile", "broadcast_to",
)  # fmt: skip
# What makes a number of a tensor, or a tensor of one number.
_READS = ("item", "int", "tolist", "max", "min", "sum", "amax", "amin", "argmax", "prod", "count_nonzero")
# What only tells or keeps: an ``if`` with no more in it takes the same memory either way.
_QUIET = frozenset((
    "print", "log", "debug", "info", "warning", "warn", "error", "exception", "write", "format", "flush", "append", "extend",
    "add_scalar", "add_scalars", "set_description", "set_postfix", "save", "save_model", "save_pretrained", "state_dict", "dump",
    "item", "float", "int", "str", "bool", "len", "abs", "min", "max", "round", "sum", "range", "isinstance", "time",
    "perf_counter", "join", "exit",
))  # fmt: skip


def ends_a_loop(file: str, line: int) -> bool:
    """Whether a loop in that file may go on or end by what this line reads. False where the source is not to be had."""
    scope = _scope_of(file, line)
    if scope is None:
        return False
    names = _assigned_from(scope, line, by_way_of_branches=True)
    if any(_uses(test, line, names) for test in _tests(scope, False) if not _checks(test)):
        return True
    return any(_uses(call, line, names) for call in _ranges(scope))


def makes_a_size(file: str, line: int) -> bool:
    """Whether a size may be made of the whole number that this line reads."""
    scope = _scope_of(file, line)
    if scope is None:
        return False
    names = _assigned_from(scope, line)
    for call in ast.walk(scope):
        if isinstance(call, ast.Call) and _takes_sizes(call):
            if _called(call) == "one_hot" and _covers(call, line):
                return True
            for argument in (*call.args, *(one.value for one in call.keywords)):
                if names & _names(argument) or (_covers(argument, line) and _reads(argument)):
                    return True
    return False


def chooses_a_way(file: str, line: int) -> bool:
    """Whether an ``if`` that does some work, or leaves it, may go by what this line reads."""
    scope = _scope_of(file, line)
    if scope is None:
        return False
    names = _assigned_from(scope, line)
    return any(
        _uses(node.test, line, names) and not _checks(node.test) and any(map(_works, _branches(node)))
        for node in ast.walk(scope)
        if isinstance(node, (ast.If, ast.IfExp))
    )


def leads_to(file: str, read: int, raised: int) -> bool:
    """Whether the statement at the line `raised`, or an ``if`` around it, goes by what the line `read` reads."""
    if read == raised:
        return True
    scope = _scope_of(file, read)
    if scope is None or not (isinstance(scope, ast.Module) or _covers(scope, raised)):
        return False
    names = _assigned_from(scope, read)
    for node in ast.walk(scope):
        if isinstance(node, (ast.If, ast.While)) and _covers(node, raised) and _uses(node.test, read, names):
            return True
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and _covers(node, raised) and names & _names(node):
            return True
    return False


def waits(file: str, line: int) -> bool:
    """Whether the line is the test of a ``while``."""
    return linecache.getline(file, line).lstrip().startswith("while ")


def _scope_of(file: str, line: int) -> _Scope | None:
    """The innermost function, or the whole file; None where the source is not to be had."""
    tree = _tree("".join(linecache.getlines(file)))
    if tree is None:
        return None
    found: _Scope = tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _covers(node, line):
            # (Walked from the outside in.)
            found = node
    return found


# A line is asked about again and again, and so are its neighbours.
@lru_cache(maxsize=4)
def _tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _covers(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _uses(node: ast.expr, line: int, names: set[str]) -> bool:
    return _covers(node, line) or bool(names & _names(node))


def _names(node: ast.AST) -> set[str]:
    """The names that are used: of ``self.best.value`` that, and ``self.best`` and ``self``."""
    return {found for one in ast.walk(node) if (found := _dotted(one))}


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _targets(node: ast.expr) -> Iterator[str]:
    """The names that an assignment gives a value: of ``self.best`` not ``self``."""
    if isinstance(node, (ast.Tuple, ast.List)):
        for one in node.elts:
            yield from _targets(one)
    elif isinstance(node, (ast.Starred, ast.Subscript)):
        yield from _targets(node.value)
    elif found := _dotted(node):
        yield found


def _checks(test: ast.expr) -> bool:
    asked = {one.attr for one in ast.walk(test) if isinstance(one, ast.Attribute)} | _names(test)
    return any(name in asked for name in _CHECKS)


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else _dotted(function)


def _takes_sizes(call: ast.Call) -> bool:
    name = _called(call)
    return name in _OF_SIZES or (name[:1].isupper() and not name.endswith(("Error", "Exception", "Warning")))


def _reads(node: ast.expr) -> bool:
    return any(isinstance(one, ast.Call) and _called(one) in _READS for one in ast.walk(node))


def _assigned_from(scope: _Scope, line: int, by_way_of_branches: bool = False) -> set[str]:
    """The names that hold what the line reads, or what is made of that.

    by_way_of_branches: also what an ``if`` that goes by it sets, and objects that are told of it (``stopper(loss)``).
    """
    found: set[str] = set()
    nodes = list(ast.walk(scope))
    while True:
        before = len(found)
        for node in nodes:
            if isinstance(node, _ASSIGNMENTS):
                if node.value is not None and _uses(node.value, line, found):
                    found.update(_set_by(node))
            elif by_way_of_branches and isinstance(node, ast.If):
                if _uses(node.test, line, found) and not _checks(node.test):
                    inner = (one for branch in _branches(node) for part in branch for one in ast.walk(part))
                    found.update(name for one in inner if isinstance(one, _ASSIGNMENTS) for name in _set_by(one))
            elif by_way_of_branches and isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                call = node.value
                arguments = (*call.args, *(one.value for one in call.keywords))
                told = _dotted(call.func.value if isinstance(call.func, ast.Attribute) else call.func)
                if told not in ("", "self") and _called(call) not in _QUIET:
                    found.update([told] if any(_uses(one, line, found) for one in arguments) else ())
        if len(found) == before:
            return found


def _set_by(node: _Assignment) -> Iterator[str]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from _targets(target)


def _branches(node: ast.If | ast.IfExp) -> tuple[Sequence[ast.AST], Sequence[ast.AST]]:
    return (node.body, node.orelse) if isinstance(node, ast.If) else ([node.body], [node.orelse])


def _works(branch: Sequence[ast.AST]) -> bool:
    """Whether something is called that may take memory. What is raised takes none."""
    for part in branch:
        if not isinstance(part, ast.Raise):
            if isinstance(part, ast.Call) and _called(part) not in _QUIET:
                return True
            if _works(list(ast.iter_child_nodes(part))):
                return True
    return False


def _ranges(scope: _Scope) -> Iterator[ast.expr]:
    """What ``range`` counts to where a loop, or a comprehension, goes through it."""
    for node in ast.walk(scope):
        if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            for call in ast.walk(node.iter):
                if isinstance(call, ast.Call) and _called(call) == "range":
                    yield from call.args


def _tests(node: ast.AST, in_loop: bool) -> Iterator[ast.expr]:
    """The tests by which loops end."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        inside = in_loop or isinstance(child, (ast.While, ast.For, ast.AsyncFor))
        if isinstance(child, ast.While) or (
            isinstance(child, ast.If) and in_loop and any(isinstance(one, _LEAVES) for one in ast.walk(child))
        ):
            yield child.test
        yield from _tests(child, inside)
