"""Functions that PyTorch writes in Python, as its older versions have them.

Before 2.12 `multi_head_attention_forward` (torch/nn/functional.py) kept its projections, the scaled query among them, until it
returned; since then it lets them go where they were read last. With gradients most of them are kept anyway.
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


class _WithoutDeletes(ast.NodeTransformer):
    def visit_Delete(self, node: ast.Delete) -> ast.Pass:
        return ast.copy_location(ast.Pass(), node)


@functools.cache
def holding(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without its ``del`` statements, on its lines. Itself where its source is not there."""
    try:
        tree = _WithoutDeletes().visit(ast.parse(textwrap.dedent(inspect.getsource(function))))
    except (OSError, SyntaxError):
        return function
    code = function.__code__
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    made: dict[str, Any] = {}
    exec(compile(tree, code.co_filename, "exec", dont_inherit=True), function.__globals__, made)
    return made[function.__name__]  # type: ignore[no-any-return]
