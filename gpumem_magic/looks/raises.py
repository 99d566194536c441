"""Which errors a program raises by itself, and where it catches them: asked of source text alone, by names."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gpumem_magic.looks.expressions import called, calls, dotted

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_WITH = (ast.With, ast.AsyncWith)


@dataclass(frozen=True)
class Raises:
    """callers: by a function's name, what is called within it. catching: what is called within each ``try`` (or ``suppress``),
    and the errors that it names and goes on behind. becoming: the same of those behind which another is raised, with that.
    bases: by a class's name, what it inherits from."""

    callers: dict[str, frozenset[str]] = field(default_factory=dict)
    catching: tuple[tuple[frozenset[str], frozenset[str]], ...] = ()
    becoming: tuple[tuple[frozenset[str], frozenset[str], str], ...] = ()
    bases: dict[str, frozenset[str]] = field(default_factory=dict)

    @staticmethod
    def of(tree: ast.Module) -> Raises:
        return Raises(_callers(tree), tuple(_catching(tree)), tuple(_becoming(tree)), _bases(tree))


NO_RAISES = Raises()


def are_caught(function: str, error: str, files: Iterable[Raises]) -> bool:
    """Whether what a function raises is caught, by its name, around a call of it, or of what calls it."""
    files = tuple(files)
    if not any(one.catching for one in files):
        return False
    errors = _with_bases(error, files)
    names = {function}
    while more := {
        name
        for one in files
        for name, inside in one.callers.items()
        if name not in names and not inside.isdisjoint(names)
    }:
        names |= more
    while others := {
        other
        for one in files
        for inside, caught, other in one.becoming
        if other not in errors and not inside.isdisjoint(names) and not caught.isdisjoint(errors)
    }:
        errors |= others
    return any(
        not inside.isdisjoint(names) and not caught.isdisjoint(errors)
        for one in files
        for inside, caught in one.catching
    )


def raised_by(node: ast.AST) -> str:
    """The name of what a ``raise`` raises; "" where it is none, or raises something again."""
    if not isinstance(node, ast.Raise) or node.exc is None:
        return ""
    return (called(node.exc) if isinstance(node.exc, ast.Call) else dotted(node.exc)).rpartition(".")[2]


def raised_or_warned(node: ast.AST) -> str:
    """The same where warnings are errors."""
    call = node.value if isinstance(node, ast.Expr) else node
    if not isinstance(call, ast.Call) or called(call) != "warn":
        return raised_by(node)
    kind = (
        call.args[1]
        if len(call.args) > 1
        else next((one.value for one in call.keywords if one.arg == "category"), None)
    )
    return "UserWarning" if kind is None else _last(kind)


def warnings_are_errors(tree: ast.AST) -> bool:
    """Whether a file has some warnings be errors."""
    return any(
        called(call) in ("simplefilter", "filterwarnings")
        and bool(call.args)
        and isinstance(call.args[0], ast.Constant)
        and call.args[0].value == "error"
        for call in calls(tree)
    )


def caught_by(handler: ast.ExceptHandler) -> Sequence[str]:
    """The names of the errors that it catches."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type] if handler.type else []
    return [_last(kind) for kind in kinds]


def swallowing(tree: ast.Module) -> frozenset[str]:
    """The file's own context managers that may keep an error to themselves: classes whose ``__exit__`` may give something true,
    and generators with a ``try`` around their ``yield``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            exits = (one for one in node.body if isinstance(one, _FUNCTIONS) and one.name in ("__exit__", "__aexit__"))
            if any(_may_give_truth(part) for one in exits for part in ast.walk(one)):
                found.add(node.name)
        elif isinstance(node, _FUNCTIONS) and any("contextmanager" in dotted(one) for one in node.decorator_list):
            tries = (one for one in ast.walk(node) if isinstance(one, ast.Try))
            if any(
                not _raises_again(handler)
                and any(isinstance(part, ast.Yield) for body in one.body for part in ast.walk(body))
                for one in tries
                for handler in one.handlers
            ):
                found.add(node.name)
    return frozenset(found)


def is_swallowed(node: ast.AST, own: Collection[str], errors: Collection[str] = ()) -> bool:
    """Whether errors within a ``with`` are kept from what is around it. errors: one of these, where it says which."""
    if not isinstance(node, _WITH):
        return False
    for one in node.items:
        call = one.context_expr
        if isinstance(call, ast.Call) and (
            called(call) in own
            or (called(call) == "suppress" and (not errors or any(_last(kind) in errors for kind in call.args)))
        ):
            return True
    return False


def _may_give_truth(node: ast.AST) -> bool:
    if not isinstance(node, ast.Return) or node.value is None:
        return False
    return not isinstance(node.value, ast.Constant) or bool(node.value.value)


def _catching(tree: ast.Module) -> Iterator[tuple[frozenset[str], frozenset[str]]]:
    for node in ast.walk(tree):
        caught: set[str] = set()
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                if not _raises_again(handler):
                    caught.update(caught_by(handler))
        elif isinstance(node, _WITH):
            for one in node.items:
                if isinstance(one.context_expr, ast.Call) and called(one.context_expr) == "suppress":
                    caught.update(map(_last, one.context_expr.args))
        # (What catches everything is for whatever goes wrong.)
        caught -= {"", "Exception", "BaseException"}
        if caught:
            yield frozenset(called(call) for part in node.body for call in calls(part)), frozenset(caught)  # type: ignore[attr-defined]


def _becoming(tree: ast.Module) -> Iterator[tuple[frozenset[str], frozenset[str], str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Try):
            continue
        inside = frozenset(called(call) for part in node.body for call in calls(part))
        for handler in node.handlers:
            for other in filter(None, map(raised_by, ast.walk(handler))):
                yield inside, frozenset(caught_by(handler)), other


def _raises_again(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(one, ast.Raise) for one in handler.body)


def _last(node: ast.expr) -> str:
    return dotted(node).rpartition(".")[2]


def _callers(tree: ast.Module) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            found[node.name] = found.get(node.name, frozenset()) | {called(one) for one in calls(node)}
    return found


def _bases(tree: ast.Module) -> dict[str, frozenset[str]]:
    return {
        node.name: frozenset(map(_last, node.bases))
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.bases
    }


def _with_bases(error: str, files: Iterable[Raises]) -> frozenset[str]:
    found, left = set(), [error]
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            if one != "Warning" and one.endswith("Warning"):
                left.append("Warning")
            left += [base for file in files for base in file.bases.get(one, ())]
    return frozenset(found)
