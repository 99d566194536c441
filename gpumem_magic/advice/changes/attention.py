"""Attention that writes out its scores: PyTorch's own function holds none of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gpumem_magic.advice.draft import CellDraft, Unchangeable, called
from gpumem_magic.advice.evidence import Evidence
from gpumem_magic.advice.proposal import ROUNDING, Proposal


def fused_attention(seen: Evidence, draft: CellDraft) -> Iterator[Proposal]:
    """The library's eager attention, ``softmax(q @ k.transpose(-2, -1) / c) @ v``, and weights that nobody asked for."""
    if _eager(draft):
        yield Proposal('attn_implementation="sdpa"', ROUNDING, _as_sdpa)
    if _written_out(draft):
        yield Proposal("scaled_dot_product_attention", ROUNDING, _as_a_function)
    if _weights_unused(draft):
        yield Proposal("MultiheadAttention without its weights", ROUNDING, _without_weights)


# ---- a library's


def _eager(draft: CellDraft) -> list[ast.keyword]:
    return [
        node
        for node in ast.walk(draft.tree)
        if isinstance(node, ast.keyword)
        and (node.arg or "").lstrip("_") == "attn_implementation"
        and isinstance(node.value, ast.Constant)
        and node.value.value == "eager"
    ]


def _as_sdpa(draft: CellDraft) -> None:
    found = _eager(draft)
    for word in found:
        draft.replace(word.value, '"sdpa"')
    if not found:
        raise Unchangeable("no attention is chosen here")


# ---- written out


def _as_a_function(draft: CellDraft) -> None:
    found = _written_out(draft)
    for product, text in found:
        draft.replace(product, text)
    draft.with_torch()
    if not found:
        raise Unchangeable("no attention is written out here")


def _written_out(draft: CellDraft) -> list[tuple[ast.BinOp, str]]:
    """Products ``softmax(q @ kT) @ v``, and what is to stand in their place."""
    found: list[tuple[ast.BinOp, str]] = []
    for suite in draft.suites():
        given = _once_given(suite)
        for statement in suite:
            for node in ast.walk(statement) if not isinstance(statement, (ast.ClassDef, ast.FunctionDef)) else ():
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                    text = _attention(draft, node, given)
                    if text and not any(node is other for other, _ in found):
                        found.append((node, text))
    return found


def _once_given(suite: list[ast.stmt]) -> dict[str, ast.expr]:
    """Names that a suite's own statements give a value once, with it."""
    values: dict[str, list[ast.expr]] = {}
    for one in suite:
        if isinstance(one, ast.Assign) and len(one.targets) == 1 and isinstance(one.targets[0], ast.Name):
            values.setdefault(one.targets[0].id, []).append(one.value)
    return {name: found[0] for name, found in values.items() if len(found) == 1}


def _attention(draft: CellDraft, product: ast.BinOp, given: dict[str, ast.expr]) -> str:
    scores = _softmax_of(_behind(product.left, given))
    if scores is None:
        return ""
    scores, scale = _scaled(draft, _behind(scores, given))
    scores = _behind(scores, given)
    if not (isinstance(scores, ast.BinOp) and isinstance(scores.op, ast.MatMult)):
        return ""
    key = _transposed(_behind(scores.right, given))
    query, inner = _scaled(draft, scores.left)
    if key is None or (scale and inner):
        return ""
    scale = scale or inner or "1.0"
    parts = ", ".join(draft.text(one) for one in (query, key, product.right))
    return f"torch.nn.functional.scaled_dot_product_attention({parts}, scale={scale})"


def _behind(node: ast.expr, given: dict[str, ast.expr]) -> ast.expr:
    return given.get(node.id, node) if isinstance(node, ast.Name) else node


def _softmax_of(node: ast.expr) -> ast.expr | None:
    """What the softmax over the last dimension is of."""
    if not isinstance(node, ast.Call) or called(node) != "softmax" or not isinstance(node.func, ast.Attribute):
        return None
    is_function = isinstance(node.func.value, (ast.Name, ast.Attribute)) and ast.unparse(node.func.value) in (
        "F", "torch", "nn.functional", "torch.nn.functional",
    )  # fmt: skip
    rest = [*node.args, *(word.value for word in node.keywords)]
    if is_function:
        if not rest:
            return None
        scores, rest = rest[0], rest[1:]
    else:
        scores = node.func.value
    return scores if [ast.unparse(one) for one in rest] == ["-1"] else None


def _scaled(draft: CellDraft, node: ast.expr) -> tuple[ast.expr, str]:
    """``x / c`` and ``x * c`` as x and the factor."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Mult)):
        factor = draft.text(node.right)
        return node.left, factor if isinstance(node.op, ast.Mult) else f"1 / ({factor})"
    return node, ""


def _transposed(node: ast.expr) -> ast.expr | None:
    """What has its last two dimensions exchanged there."""
    if isinstance(node, ast.Attribute) and node.attr == "mT":
        return node.value
    if isinstance(node, ast.Call) and called(node) == "transpose" and isinstance(node.func, ast.Attribute):
        if sorted(ast.unparse(one) for one in node.args) in (["-1", "-2"],):
            return node.func.value
        # Of three dimensions these are the last two; of four they are not, and the run would fail or differ.
        return None
    return None


# ---- nn.MultiheadAttention


def _without_weights(draft: CellDraft) -> None:
    found = _weights_unused(draft)
    for call in found:
        draft.argument(call, "need_weights", "False")
    if not found:
        raise Unchangeable("no attention is called here whose weights are thrown away")


def _weights_unused(draft: CellDraft) -> list[ast.Call]:
    """Calls with query, key and value of which only the output is kept: ``attention(x, x, x)[0]`` or ``out, _ = ...``."""
    if "MultiheadAttention" not in {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(draft.tree)}:
        return []
    found = []
    for node in ast.walk(draft.tree):
        call: ast.expr | None = None
        if isinstance(node, ast.Subscript) and ast.unparse(node.slice) == "0":
            call = node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            names = [ast.unparse(one) for one in node.targets[0].elts]
            call = node.value if len(names) == 2 and names[1] == "_" else None
        if (
            isinstance(call, ast.Call)
            and len(call.args) == 3
            and not any(word.arg in ("need_weights", None) for word in call.keywords)
        ):
            found.append(call)
    return found
