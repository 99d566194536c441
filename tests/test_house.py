"""The house's floors: a file imports from its own room and from rooms below, and no files import each other in a circle.

Imports for type checking and imports inside functions count like all others.
"""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from project_scripts import load

from gpumem_magic.virtual import operators

HOUSE = load(Path(__file__).parents[1] / "docs" / "house.py")
modules, imports, room_and_floor = HOUSE.modules, HOUSE.imports, HOUSE.room_and_floor
FLOORS = HOUSE.FLOORS


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


def test_every_operators_rule_is_loaded_with_the_machine() -> None:
    edges = imports()
    seen, ahead = set[str](), ["virtual.machine"]
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            ahead += edges[name]
    assert {name for name in edges if name.startswith("virtual.operators.")} <= seen


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


def test_the_picture_of_the_house_is_todays() -> None:
    assert HOUSE.PICTURE.read_text("utf-8") == HOUSE.picture(), "`python docs/house.py` draws it again"


def test_every_arrow_of_the_picture_leads_down() -> None:
    arrows = HOUSE.arrows()
    floors = {room: number for number, rooms in enumerate([*FLOORS, ("top",)]) for room in rooms}
    assert ("recording", "virtual") in arrows or ("recording", "devices") in arrows
    assert all(floors[room] > floors[target] for room, target in arrows)


def test_the_contributors_page_names_files_that_exist() -> None:
    page = (HOUSE.HERE / "contributing.md").read_text("utf-8")
    named = set(re.findall(r"`((?:\w+/)+\w+\.(?:py|js|json))`", page))
    root = HOUSE.PACKAGE.parent
    assert len(named) > 20
    assert [name for name in sorted(named) if not any((base / name).is_file() for base in (HOUSE.PACKAGE, root))] == []


def test_the_operators_page_names_every_module() -> None:
    """Who adds a rule looks there for the module that fits."""
    modules = {one.name for one in pkgutil.iter_modules(operators.__path__)}
    named = set(re.findall(r"`(\w+)`", operators.__doc__ or ""))
    assert not modules - named


def test_no_block_that_puts_the_programs_functions_aside_holds_a_comprehension_that_jumps_back() -> None:
    """In Python 3.12 and 3.13 a Ctrl-C comes through there without ending the block; `unheard` holds a call alone."""
    found = []
    for file in sorted(HOUSE.PACKAGE.rglob("*.py")):
        for block in (one for one in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(one, ast.With)):
            entered = ", ".join(ast.unparse(item.context_expr) for item in block.items)
            if re.search(r"no_functions|no_dispatch|DisableTorchFunction", entered) and "uninterrupted" not in entered:
                found += [f"{file.name}:{one.lineno}" for one in _within(block.body) if _jumps_back(one)]
    assert found == []


def _jumps_back(node: ast.AST) -> bool:
    return isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp)) and any(one.ifs for one in node.generators)


def _within(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All of these, but for what functions in them hold."""
    for node in nodes:
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            yield node
            yield from _within(ast.iter_child_nodes(node))
