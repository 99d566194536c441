"""Functions that PyTorch writes in Python, as its older versions have them.

Before 2.12 `multi_head_attention_forward` (torch/nn/functional.py) kept its projections, the scaled query among them, until it
returned; since then it lets them go where they were read last. With gradients most of them are kept anyway. It also laid the
heads' results out plainly, where it only reshapes them now: with heads of one number that is no copy.

Before 2.6 `clip_grad_norm_` (torch/nn/utils/clip_grad.py) was one function, which kept the norm of each gradient to its end.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch.nn.functional as F
from torch.nn.utils import clip_grad

from gpumem_magic.patching import Patches

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
    return _made(tree, function, function.__globals__)


def _made(tree: ast.AST, function: Any, names: dict[str, Any]) -> Callable[..., Any]:
    """What a tree of a function's source is, on the lines of its file."""
    code = function.__code__
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    made: dict[str, Any] = {}
    exec(compile(cast(ast.Module, tree), code.co_filename, "exec", dont_inherit=True), names, made)
    return made[function.__name__]  # type: ignore[no-any-return]


# Since when the norms go before the gradients are clipped. (The builds of 2.2 to 2.4 keep them; of 2.5 its source.)
_NORMS_GO_FROM = (2, 6)


class _Norms(threading.local):
    kept: Any = None

    def keep(self, norms: Any) -> None:
        self.kept = norms

    def give(self) -> Any:
        norms, self.kept = self.kept, None
        return norms


def keep_norms(patches: Patches, versions: Sequence[tuple[int, int]]) -> None:
    """Until the patches are undone, `clip_grad_norm_` holds the single norms as it did, where the devices are older."""
    if not versions or max(versions) >= _NORMS_GO_FROM:
        return
    norms = _Norms()
    names = {**vars(clip_grad), "_gpumem_keep": norms.keep, "_gpumem_norms": norms.give}
    kept = "_gpumem_keep(norms)", -1, clip_grad._get_total_norm
    held = "norms = _gpumem_norms()", 1, clip_grad._clip_grads_with_norm_
    try:
        made = [_with_statement(function, text, place, names) for text, place, function in (kept, held)]
    except (OSError, SyntaxError):
        return
    for (_, _, function), older in zip((kept, held), made, strict=True):
        patches.set(clip_grad, function.__name__, older)


def _with_statement(function: Callable[..., Any], text: str, place: int, names: dict[str, Any]) -> Callable[..., Any]:
    """A function with one statement more, at a place of its body."""
    plain = inspect.unwrap(function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    body = cast(ast.FunctionDef, tree.body[0]).body
    (added,) = ast.parse(text).body
    beside = body[place]
    for node in ast.walk(added):
        ast.copy_location(node, beside)
    body.insert(place if place > 0 else len(body) + place, added)
    return _made(ast.fix_missing_locations(tree), plain, names)
