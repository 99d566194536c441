"""What compiled code keeps for backward, beside the eager run of the same program before it in this session."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.looks.parsing import parsed
from gpumem_magic.report.kept import KeptForBackward, kept_of, side_by_side
from gpumem_magic.units import amount
from gpumem_magic.views.inside import tree

# Programs whose last eager run is known, and modules that a sentence names.
_MOST, _MOST_MODULES = 50, 3
_MOST_LINES = 60
# Less than one part in so many is no saving worth a word.
_SHARE = 50


@dataclass(frozen=True)
class _EagerRun:
    """gpu: its name and size. given: as in `KeptForBackward`."""

    gpu: tuple[str, int]
    kept: KeptForBackward


_runs: dict[str, _EagerRun] = {}


def remark(source: str, view: DeviceView) -> str | None:
    """A sentence on a compiled run, where the same text ran eagerly before: on the same card, with a model and inputs of the same
    sizes. An eager run is remembered for it."""
    is_eager = view.recording.eager
    kept = None if is_eager is None or not source or view.recording.error is not None else kept_of(view)
    program = None if kept is None else _eager_text(source)
    if kept is None or program is None:
        return None
    text, names = program
    kept = KeptForBackward(
        _renamed(kept.activations, names), {(one, _path(path, names)): size for (one, path), size in kept.given.items()}
    )
    facts = view.log.facts
    run = _EagerRun((facts.name, facts.capacity), kept)
    before = _runs.get(text)
    if is_eager:
        _runs.pop(text, None)
        _runs[text] = run
        if len(_runs) > _MOST:
            del _runs[next(iter(_runs))]
        return None
    same = before is not None and (before.gpu, before.kept.given) == (run.gpu, kept.given)
    return _sentence(before.kept.activations, kept.activations) if before is not None and same else None


def _eager_text(source: str) -> tuple[str, Mapping[str, str]] | None:
    """The program without what it says of `torch.compile`, and names of compiled things with those of what they were made of."""
    undone = _Undone()
    try:
        return ast.dump(undone.visit(parsed(source))), undone.names
    except (SyntaxError, ValueError, RecursionError):
        return None


class _Undone(ast.NodeTransformer):
    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        inner = _compiled(node)
        return self.generic_visit(node) if inner is None else self.visit(inner)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Without `model.compile()`."""
        call = node.value
        in_place = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "compile"
        return None if in_place else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        target, inner = node.targets[0], _compiled(node.value)
        if len(node.targets) == 1 and isinstance(target, ast.Name) and isinstance(inner, ast.Name):
            old = self.names.get(inner.id, inner.id)
            if target.id != old:
                self.names[target.id] = old
            return None
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [one for one in node.decorator_list if not _is_compile(one)]
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.names.get(node.id, node.id)
        return node


def _is_compile(node: ast.expr) -> bool:
    """`torch.compile`, or a call of it that decorates."""
    node = node.func if isinstance(node, ast.Call) and not node.args else node
    return isinstance(node, ast.Attribute) and node.attr == "compile" and ast.unparse(node.value) == "torch"


def _compiled(node: ast.expr) -> ast.expr | None:
    """What `torch.compile(...)` compiles."""
    return node.args[0] if isinstance(node, ast.Call) and node.args and _is_compile(node.func) else None


def _path(path: str, names: Mapping[str, str]) -> str:
    root, dot, rest = path.partition(".")
    return f"{names.get(root, root)}{dot}{rest}"


def _renamed(sizes: Mapping[str, int], names: Mapping[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for path, size in sizes.items():
        found[_path(path, names)] = found.get(_path(path, names), 0) + size
    return found


def _sentence(eager: Mapping[str, int], compiled: Mapping[str, int]) -> str | None:
    before, now = sum(eager.values()), sum(compiled.values())
    if abs(before - now) * _SHARE < max(before, now):
        return f"This code ran eagerly before, and kept as much for backward: {amount(now)}." if now else None
    modules = sorted(_modules(eager, compiled), key=lambda one: -abs(one[2] - one[3]) * one[1])
    words = [
        f"{name} {amount(size)} -> {amount(other)}{' each' if times > 1 else ''}"
        for name, times, size, other in modules[:_MOST_MODULES]
        if abs(size - other) * times * _SHARE >= max(before, now)
    ]
    where = f" ({'; '.join(words)})" if words else ""
    change = f"activations {amount(before)} -> {amount(now)}"
    return f"This code ran eagerly before: {change} at the start of the first backward{where}."


def _modules(eager: Mapping[str, int], compiled: Mapping[str, int]) -> Iterator[tuple[str, int, int, int]]:
    """The innermost modules, alike ones together: path, how many of them, and the bytes of one, eagerly and compiled."""
    lines = tree(side_by_side(eager, compiled), _MOST_LINES)
    path: list[tuple[str, int]] = []
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        path[line.depth :] = [(line.name, line.times)]
        if following is None or following.depth <= line.depth:
            times = 1
            for _, count in path:
                times *= count
            yield ".".join(name for name, _ in path), times, line.bytes[0], line.bytes[2]
