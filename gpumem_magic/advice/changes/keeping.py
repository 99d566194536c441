"""What each turn of a loop leaves in a list or a sum: without its graph, or on the host."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import partial

from gpumem_magic.advice.draft import CellDraft, Unchangeable, called
from gpumem_magic.advice.evidence import Evidence
from gpumem_magic.advice.proposal import SAME, Proposal
from gpumem_magic.looks.fresh import names_read

_LEAST = 0.05
# What these return has no graph, or is not on the device.
_GRAPHLESS = frozenset(
    {"detach", "item", "tolist", "cpu", "numpy", "float", "int", "bool", "len", "size", "numel", "argmax"}
)
_BACKWARD = frozenset({"backward", "grad"})
_SHOWN = frozenset({"print", "len"})

Given = tuple[str, ast.expr, int]
"""A name that keeps something, what it is given, and how often the statement reads the name."""


def kept_results(seen: Evidence, draft: CellDraft) -> Iterator[Proposal]:
    if seen.grown < _LEAST * seen.allocated:
        return
    of_tensors = frozenset(seen.tensors).union(module.name for module in seen.modules)
    heavy = frozenset(name for name, size in seen.lists.items() if size > _LEAST * seen.allocated)

    def with_graphs(name: str, value: ast.expr) -> bool:
        return called(value) not in _GRAPHLESS and not of_tensors.isdisjoint(names_read(value))

    def on_the_device(name: str, value: ast.expr) -> bool:
        return name in heavy and (with_graphs(name, value) or called(value) == "detach")

    def a_part(name: str, value: ast.expr) -> bool:
        return name in seen.of_parts and on_the_device(name, value)

    ways = [(".detach()", with_graphs), (".detach().clone()", a_part)]
    # In the trial it is the host's memory, too.
    ways += [(".detach().cpu()", on_the_device)] * (seen.grown < seen.host // 2)
    for how, wanted in ways:
        if names := sorted({name for name, _ in _kept(draft, wanted)}):
            told = ", ".join(names)
            but = f"as long as nothing goes backward from {told}"
            yield Proposal(f"{how} on what goes into {told}", SAME, partial(_change, wanted, how), but=but)


def _change(wanted: Callable[[str, ast.expr], bool], how: str, draft: CellDraft) -> None:
    found = _kept(draft, wanted)
    for _, value in found:
        text = draft.text(value)
        if not isinstance(value, (ast.Name, ast.Call, ast.Attribute, ast.Subscript)):
            text = f"({text})"
        draft.replace(value, text.removesuffix(".detach()") + how)
    if not found:
        raise Unchangeable("no loop here keeps what its turns make")


def _kept(draft: CellDraft, wanted: Callable[[str, ast.expr], bool]) -> list[tuple[str, ast.expr]]:
    """What loops give to names, where the text says that nothing goes backward from these."""
    found = []
    for loop in (node for node in ast.walk(draft.tree) if isinstance(node, (ast.For, ast.While))):
        given = [one for node in _own_nodes(loop) if (one := _given(node)) is not None]
        backward_elsewhere = _backwards(draft.tree) > _backwards(loop)
        for name, value, _ in given:
            own = sum(reads for other, _, reads in given if other == name)
            inside, everywhere = _reads(loop, name), _reads(draft.tree, name)
            if inside == own and not (everywhere > inside and backward_elsewhere) and wanted(name, value):
                found.append((name, value))
    return found


def _own_nodes(loop: ast.AST) -> Iterator[ast.AST]:
    """What stands in a loop and in no loop inside it."""
    for node in ast.iter_child_nodes(loop):
        if not isinstance(node, (ast.For, ast.While)):
            yield node
            yield from _own_nodes(node)


def _given(node: ast.AST) -> Given | None:
    """Of ``kept.append(value)``, ``total += value`` and ``total = total + value``."""
    match node:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "append"), [value], [])):
            return name, value, 1
        case ast.AugAssign(ast.Name(name), ast.Add(), value):
            return name, value, 0
        case ast.Assign([ast.Name(name)], ast.BinOp(ast.Name(left), ast.Add(), value)) if name == left:
            return name, value, 1
    return None


def _reads(tree: ast.AST, name: str) -> int:
    """How often something reads a name for more than to show it."""
    if isinstance(tree, ast.Call) and called(tree) in _SHOWN:
        return 0
    own = isinstance(tree, ast.Name) and tree.id == name and isinstance(tree.ctx, ast.Load)
    return own + sum(_reads(node, name) for node in ast.iter_child_nodes(tree))


def _backwards(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.Call) and called(node) in _BACKWARD for node in ast.walk(tree))
