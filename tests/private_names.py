"""Which private names of other packages the package's source uses: read from its syntax trees."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Set
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "gpumem_magic"
# A name, or a dotted path, with a part that begins with one underscore.
_PRIVATE = re.compile(r"(?:[A-Za-z]\w*\.)*_(?!_)\w*[A-Za-z]\w*(?:\.\w+)*")
# Documented in spite of their underscore.
_DOCUMENTED = frozenset(
    {
        "_pytest",
        "_replace",
        "_fields",
        "_fields_",
        "_repr_mimebundle_",
        "_extra_files",
        "_exit",
        "_getframe",
        "_current_frames",
        "_i",
        "_ih",
        "_oh",
        "_dh",
    }
)
# Calls whose strings are names of other people's things, whatever this package calls its own.
_ASKING = frozenset({"getattr", "hasattr", "setattr", "delattr", "set", "insert", "import_module"})


def is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def uses(package: Path = PACKAGE) -> dict[str, set[str]]:
    """By file: what is used of others, as ``torch._C._x`` where the source says so, else as the bare ``_x``."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(package.rglob("*.py"))}
    own = {name for tree in trees.values() for name in _defined(tree)} | _DOCUMENTED
    found: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        place = path.relative_to(package).as_posix()
        # The table itself uses nothing.
        if place != "private.py":
            found[place] = set(_uses(tree, own))
    return {place: names for place, names in found.items() if names}


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (one.name for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)))
            stored = [
                one for part in node.body if isinstance(part, (ast.Assign, ast.AnnAssign)) for one in ast.walk(part)
            ]
            yield from (one.id for one in stored if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "TypeVar":
            yield from (str(one.value) for one in node.args[:1] if isinstance(one, ast.Constant))


def _uses(tree: ast.AST, own: set[str]) -> Iterator[str]:
    roots = {"torch": "torch", "aten": "torch.ops.aten", "_aten": "torch.ops.aten"}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not _is_ours(node.module or ""):
            roots.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        elif isinstance(node, ast.Import):
            roots.update({alias.asname: alias.name for alias in node.names if alias.asname})
            roots.update(
                {name: name for alias in node.names if not alias.asname for name in [alias.name.partition(".")[0]]}
            )
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    asked = {id(argument) for node in nodes for argument in _asked(node, _ASKING)}
    operators = {id(argument) for node in nodes for argument in _asked(node, {"overloads"})}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not _is_ours(node.module or ""):
            yield from (
                f"{node.module}.{alias.name}" for alias in node.names if is_private(f"{node.module}.{alias.name}")
            )
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_private(alias.name) and not _is_ours(alias.name))
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            yield from _chain(node, roots, own)
        elif id(node) in operators and isinstance(node, ast.Constant) and isinstance(node.value, str):
            # Their names in a text, some with an overload's.
            yield from (f"torch.ops.aten.{name.partition('.')[0]}" for name in node.value.split() if is_private(name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _PRIVATE.fullmatch(node.value):
            named = node.value.rpartition(".")[2] not in own or id(node) in asked
            if named and node.value not in _DOCUMENTED and not node.value.startswith("_gpumem"):
                yield node.value


def _chain(node: ast.Attribute, roots: dict[str, str], own: set[str]) -> Iterator[str]:
    parts: list[str] = []
    base: ast.expr = node
    while isinstance(base, ast.Attribute):
        parts.insert(0, base.attr)
        base = base.value
    home = roots.get(base.id) if isinstance(base, ast.Name) else None
    if home is not None and not _is_ours(home):
        path = ".".join([home, *parts])
        if home == "torch.ops.aten" or path.startswith("torch.ops.aten."):
            # Overloads of an operator are as private as itself.
            path = ".".join(path.split(".")[:4])
        if is_private(path) and parts[-1] not in _DOCUMENTED:
            yield path
    elif not (isinstance(base, ast.Name) and base.id in ("self", "cls") and parts[0] in own):
        yield from (part for part in parts if is_private(part) and part not in own)
    else:
        yield from (part for part in parts[1:] if is_private(part) and part not in own)


def _asked(node: ast.AST, asking: Set[str]) -> list[ast.expr]:
    called = node.func if isinstance(node, ast.Call) else None
    name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
    return node.args if isinstance(node, ast.Call) and name in asking else []


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "gpumem_magic"
