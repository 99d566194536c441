"""A rewritten function stays as it was written for `torch.compile`.

Dynamo reads a function's code, and can make nothing of an object of ours among its constants. So a rewritten function holds both
bodies, and asks, as it begins, which is wanted: while Dynamo traces it, `torch.compiler.is_compiling` is true.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence


class InCode:
    """An object of ours among the constants of a program's code. Dynamo copies a function's instructions with their constants
    where its graph breaks, and the copy has to tell the same object."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> InCode:
        return self


# No name of a program's; it is gone before the first statement, so that `locals()` does not have it.
_ASKED = "_gpumem_is_compiling"
Definition = ast.FunctionDef | ast.AsyncFunctionDef


def keep_for_compiler(node: Definition, written: Sequence[ast.stmt]) -> None:
    """Gives the rewritten function `written`, its body before, for the compiler. The two must not share nodes."""
    documented = 1 if ast.get_docstring(node, clean=False) is not None else 0
    rewritten = [_Undeclared().visit(one) for one in node.body[documented:]]
    first = written[0]
    asked: list[ast.stmt] = [
        ast.ImportFrom("torch.compiler", [ast.alias("is_compiling", _ASKED)], 0),
        ast.If(
            ast.Call(ast.Name(_ASKED, ast.Load()), [], []),
            [ast.Delete([ast.Name(_ASKED, ast.Del())]), *written],
            [ast.Delete([ast.Name(_ASKED, ast.Del())]), *rewritten],
        ),
    ]
    node.body = [*node.body[:documented], *(ast.copy_location(one, first) for one in asked)]


class _Undeclared(ast.NodeTransformer):
    """Without what the other body declares already: a second time it would come after the names were used."""

    def visit_Global(self, node: ast.Global) -> ast.AST:
        return ast.copy_location(ast.Pass(), node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        return ast.copy_location(ast.Pass(), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node
