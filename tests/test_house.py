"""The house's floors: a file imports from its own room and from rooms below, and no files import each other in a circle.

Imports for type checking and imports inside functions count like all others.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "gpumem_magic"
# From the bottom to the top. Rooms on one floor do not import each other. What is named nowhere is on the top floor.
FLOORS = (
    ("units", "private", "looks", "tracebacks", "failures"),
    ("patching",),
    ("snapshot",),
    ("allocator",),
    ("devices",),
    ("virtual.card",),
    ("virtual.engine",),
    ("virtual.operators",),
    ("virtual.torch_face", "virtual.libraries"),
    ("virtual",),
    ("recording",),
    ("attribution",),
    ("owners",),
    ("report",),
    ("causes",),
    ("views",),
    ("files", "timeline_page", "investigation", "widgets"),
    ("user_report",),
    ("session",),
    ("notebook", "commands"),
)
TOP = len(FLOORS)


def modules() -> dict[str, Path]:
    """Every module of the package by its name without the package's, "" for the package itself."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports() -> dict[str, set[str]]:
    """Which modules of the package each of them imports, anywhere in its text."""
    known = modules()
    edges: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno}: imports are written out in full"
                wanted = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for text in wanted:
                head, _, inner = text.partition(".")
                if head == PACKAGE.name:
                    edges[name].add(inner if inner in known else inner.rpartition(".")[0])
    assert all(target in known for targets in edges.values() for target in targets)
    return {name: targets - {name} for name, targets in edges.items()}


def room_and_floor(module: str) -> tuple[str, int]:
    """The room that a module is in, and the number of its floor."""
    rooms = [(room, floor) for floor, names in enumerate(FLOORS) for room in names]
    inside = [(room, floor) for room, floor in rooms if module == room or module.startswith(f"{room}.")]
    return max(inside, key=lambda one: len(one[0]), default=("top", TOP))


def arrows_up(edges: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Imports of a room above, or of another room on the same floor."""
    found = set()
    for name, targets in edges.items():
        room, floor = room_and_floor(name)
        for target in targets:
            other, there = room_and_floor(target)
            if there > floor or (there == floor and other != room):
                found.add((name, target))
    return found


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, the first again at its end; [] where there is no circle."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return [str(one) for one in error.args[1]]
    return []


def test_every_room_on_a_floor_exists() -> None:
    rooms = {room_and_floor(name)[0] for name in modules()}
    # Named before they are there: others build them.
    assert {room for names in FLOORS for room in names} - rooms <= {"private"}


def test_no_import_leads_up() -> None:
    assert arrows_up(imports()) == set()


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(imports()) == []


def test_an_arrow_up_and_a_circle_are_seen() -> None:
    assert arrows_up({"snapshot.model": {"views.text", "units"}, "views.text": {"widgets.watch"}}) == {
        ("snapshot.model", "views.text"),
        ("views.text", "widgets.watch"),
    }
    assert arrows_up({"files.saved": {"timeline_page.view", "files.kept"}}) == {("files.saved", "timeline_page.view")}
    assert sorted(set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}))) == ["a", "b", "c"]


def test_one_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.strip("_"), []).append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
