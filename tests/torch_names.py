"""Which names of PyTorch's the package's source uses, private or not: read from its syntax trees.

Run as a program on the oldest version that is supported, it writes down those which that version has:

    python3 dev.py test --torch 2.9.1 tests/test_private.py
    .venv/torch-2.9.1/bin/python tests/torch_names.py
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "gpumem_magic"
OLDEST = Path(__file__).parent / "data" / "names_of_oldest_torch.txt"


def uses(package: Path = PACKAGE) -> dict[str, str]:
    """By dotted name (``torch.Tag.pointwise``): the first line that uses it."""
    found: dict[str, str] = {}
    for path in sorted(package.rglob("*.py")):
        for name, line in _uses(ast.parse(path.read_text("utf-8"))):
            found.setdefault(name, f"{path.relative_to(package).as_posix()}:{line}")
    return found


def _uses(tree: ast.AST) -> Iterator[tuple[str, int]]:
    nodes = list(ast.walk(tree))
    roots = {"torch": "torch"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            roots.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Import):
            roots.update({alias.asname: alias.name for alias in node.names if alias.asname})

    def dotted(node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            owner = dotted(node.value)
            return owner and f"{owner}.{node.attr}"
        name = roots.get(node.id, "") if isinstance(node, ast.Name) else ""
        return name if name.partition(".")[0] == "torch" else ""

    for node in nodes:
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            yield name, node.lineno


def of_oldest() -> set[str]:
    """What the file says that the oldest version has."""
    lines = (line.partition(": ") for line in OLDEST.read_text("utf-8").splitlines())
    return {f"{home}.{name}" for home, _, names in lines for name in names.split()}


def _write() -> None:
    import torch

    from gpumem_magic import private

    homes: dict[str, list[str]] = defaultdict(list)
    for name in sorted(uses()):
        try:
            private.resolve(name)
        except AttributeError:
            print(f"torch {torch.__version__} has no {name}")
        else:
            homes[name.rpartition(".")[0]].append(name.rpartition(".")[2])
    text = "".join(f"{home}: {' '.join(names)}\n" for home, names in homes.items())
    OLDEST.write_text(text, "utf-8")


if __name__ == "__main__":
    _write()
