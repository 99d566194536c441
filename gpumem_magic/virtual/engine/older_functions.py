"""Functions that PyTorch writes in Python, as its older versions have them.

Before 2.12 `multi_head_attention_forward` (torch/nn/functional.py) kept its projections, the scaled query among them, until it
returned; since then it lets them go where they were read last. With gradients most of them are kept anyway. It also laid the
heads' results out plainly, where it only reshapes them now: with heads of one number that is no copy.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

# The first PyTorch that lets go of what these functions hold.
LETTING_GO_FROM = {F.multi_head_attention_forward: (2, 12)}


class _AsBefore(ast.NodeTransformer):
    def visit_Delete(self, node: ast.Delete) -> ast.Pass:
        return ast.copy_location(ast.Pass(), node)

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """``transpose(...).reshape(...)`` as ``transpose(...).contiguous().view(...)``; likewise ``permute``."""
        self.generic_visit(node)
        reshape = node.func
        if isinstance(reshape, ast.Attribute) and reshape.attr == "reshape" and _turns(reshape.value):
            plain = ast.Call(ast.Attribute(reshape.value, "contiguous", ast.Load()), [], [])
            node.func = ast.Attribute(plain, "view", ast.Load())
            ast.fix_missing_locations(node)
        return node


def _turns(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("transpose", "permute")
    )


@functools.cache
def holding(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it was, on its lines: without its ``del`` statements. Itself where its source is not there."""
    try:
        tree = _AsBefore().visit(ast.parse(textwrap.dedent(inspect.getsource(function))))
    except (OSError, SyntaxError):
        return function
    code = function.__code__
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    made: dict[str, Any] = {}
    exec(compile(tree, code.co_filename, "exec", dont_inherit=True), function.__globals__, made)
    return made[function.__name__]  # type: ignore[no-any-return]
