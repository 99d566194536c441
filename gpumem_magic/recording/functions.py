"""Which of a script's own functions are opened: their statements are told as those at module level are.

A function may be opened only where nobody could see that its code is another: wherever its name stands, it is called, by code
that is told itself. What is handed on as a value (to torch.compile, to a pool, as a hook) stays as it is, and so does what such
functions call.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpumem_magic.looks.parsing import nodes_outside

Opened = Mapping[ast.FunctionDef, str]
"""The functions to open -> their names for a reader (``Trainer.fit``)."""

# What these return calls the function, and does nothing else with it. By the last word, as they are imported in many ways.
_CALLS_IT = frozenset(
    {"no_grad", "inference_mode", "enable_grad", "staticmethod", "classmethod", "record", "main", "command", "option"}
)
_LOOPS = (ast.For, ast.While, ast.AsyncFor, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@dataclass(frozen=True)
class _Mention:
    """A function's name in the text. inside: the candidate in whose own statements it stands; None: at module level."""

    name: str
    inside: str | None
    is_told: bool
    is_call: bool
    in_loop: bool


def opened_functions(tree: ast.Module) -> Opened:
    """Those that module-level code calls, and those that they call; of what is called in a loop, only what has one itself."""
    candidates = dict(_candidates(tree))
    by_name: dict[str, list[ast.FunctionDef]] = defaultdict(list)
    for function in candidates:
        by_name[function.name].append(function)
    mentions: dict[str, list[_Mention]] = defaultdict(list)
    for one in _Mentions(tree, candidates).found:
        if one.name in by_name:
            mentions[one.name].append(one)
    names = set(by_name)
    while True:
        kept = {name for name in names if _is_safe(mentions[name], names) and _is_worth(by_name[name], mentions[name])}
        kept &= _reached(mentions, kept)
        if kept == names:
            return {function: words for function, words in candidates.items() if function.name in names}
        names = kept


def _candidates(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    todo: list[tuple[ast.AST, str]] = [(tree, "")]
    while todo:
        node, prefix = todo.pop(0)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef) and not prefix:
                todo.append((child, f"{child.name}."))
            elif isinstance(child, ast.FunctionDef) and _is_plain(child):
                yield child, f"{prefix}{child.name}"
            elif not isinstance(child, _SCOPES) and isinstance(child, ast.stmt | ast.ExceptHandler):
                todo.append((child, prefix))


def _is_plain(function: ast.FunctionDef) -> bool:
    """Whether a call runs its statements, from the first to the last, before it returns."""
    decorators = [one.func if isinstance(one, ast.Call) else one for one in function.decorator_list]
    words = [one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in decorators]
    suspends = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own(function))
    return _CALLS_IT.issuperset(words) and not suspends


def _is_safe(mentions: list[_Mention], names: set[str]) -> bool:
    return bool(mentions) and all(
        one.is_call and one.is_told and (one.inside is None or one.inside in names) for one in mentions
    )


def _is_worth(functions: list[ast.FunctionDef], mentions: list[_Mention]) -> bool:
    return not any(one.in_loop for one in mentions) or all(
        any(isinstance(node, ast.For | ast.While) for node in _own(function)) for function in functions
    )


def _reached(mentions: Mapping[str, list[_Mention]], names: set[str]) -> set[str]:
    """The functions that are called from module level, or by one of those."""
    reached: set[str] = set()
    while True:
        more = {
            name for name in names for one in mentions[name] if one.inside is None or one.inside in reached
        } - reached
        if not more:
            return reached
        reached |= more


def _own(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """What is in a function, and not in one inside it."""
    return nodes_outside(_SCOPES, function.body)


class _Mentions(ast.NodeVisitor):
    """Every name and attribute of a program's, with where it stands."""

    def __init__(self, tree: ast.Module, candidates: Opened) -> None:
        self.found: list[_Mention] = []
        self._candidates = candidates
        self._inside: str | None = None
        self._is_told = True
        self._in_loop = False
        self._calls: set[ast.AST] = set()
        self.visit(tree)

    def visit(self, node: ast.AST) -> None:
        before = self._inside, self._is_told, self._in_loop
        if isinstance(node, ast.FunctionDef) and node in self._candidates:
            for outside in (*node.decorator_list, node.args):
                self.visit(outside)
            self._inside, self._in_loop = node.name, False
            for inside in node.body:
                self.visit(inside)
            self._inside, self._is_told, self._in_loop = before
            return
        if isinstance(node, _SCOPES):
            # (A class's body runs where it stands; its functions are candidates, or not told.)
            self._is_told = self._is_told and isinstance(node, ast.ClassDef)
        if isinstance(node, _LOOPS):
            self._in_loop = True
        if isinstance(node, ast.Call):
            self._calls.add(node.func)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and self._inside is None:
            # ``fire.Fire(main)``: it calls what it is given.
            self._calls.update(node.value.args)
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name:
            self.found.append(_Mention(name, self._inside, self._is_told, node in self._calls, self._in_loop))
        self.generic_visit(node)
        self._inside, self._is_told, self._in_loop = before
