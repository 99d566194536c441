"""The house in one picture: `python docs/house.py` writes ``house.svg`` from the package's imports.

Rooms are boxes on floors, and what a room imports lies on floors below it. An arrow that follows from others is left out, and so
are the arrows to the ground floor, which everybody uses.
"""

from __future__ import annotations

import ast
from functools import cache
from html import escape
from pathlib import Path
from textwrap import shorten

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "gpumem_magic"
PICTURE = HERE / "house.svg"
# From the bottom to the top. Rooms on one floor do not import each other. What is named nowhere is on the top floor.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("units", "spelling", "private", "looks", "tracebacks", "failures", "own_folders", "uninterrupted"),
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
    ("trials",),
    ("advice",),
    ("notebook", "commands"),
)
TOP = len(FLOORS)
WIDTH, HEIGHT, BOX = 1100, 62, 40
NAMES = {"top": "cli, gpumem_magic"}


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name without the package's, "" for the package itself."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
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


def arrows() -> set[tuple[str, str]]:
    """(room, room that it imports), without those that follow from others and those to the ground floor."""
    ground = set(FLOORS[0])
    below: dict[str, set[str]] = {}
    for name, targets in imports().items():
        room = room_and_floor(name)[0]
        below.setdefault(room, set()).update(room_and_floor(target)[0] for target in targets)
    below = {room: targets - {room} - ground for room, targets in below.items()}

    def reached(room: str) -> set[str]:
        return {further for target in below.get(room, ()) for further in (target, *reached(target))}

    return {
        (room, target)
        for room, targets in below.items()
        for target in targets
        if not any(target in reached(other) for other in targets - {target})
    }


def purpose(room: str) -> str:
    """The first sentence of the room's docstring."""
    paths = modules()
    text = ast.get_docstring(ast.parse(paths["cli" if room == "top" else room].read_text("utf-8"))) or ""
    return text.split("\n")[0]


def picture() -> str:
    """The house as SVG, the same for the same imports."""
    floors = [*FLOORS, ("top",)]
    height = HEIGHT * len(floors) + 20
    places: dict[str, tuple[float, float, float]] = {}
    for number, rooms in enumerate(floors):
        wide = (WIDTH - 20) / max(len(rooms), 2.5)
        left = (WIDTH - wide * len(rooms)) / 2
        for place, room in enumerate(rooms):
            places[room] = (left + place * wide + 10, height - HEIGHT * (number + 1) + 8, wide - 20)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui,sans-serif" font-size="13" text-anchor="middle" role="img" '
        'aria-label="The rooms of gpumem_magic on their floors, with arrows to the rooms that each imports">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#7A8794"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#FFFFFF"/>',
    ]
    numbers = {room: number for number, rooms in enumerate(floors) for room in rooms}
    long = 0
    for room, target in sorted(arrows()):
        x, y, wide = places[room]
        to_x, to_y, to_wide = places[target]
        span = numbers[room] - numbers[target]
        if span == 1:
            start, end = x + wide / 2, to_x + to_wide / 2
            way = f"M{start:.0f} {y + BOX}C{start:.0f} {y + HEIGHT} {end:.0f} {to_y - HEIGHT + BOX} {end:.0f} {to_y}"
        else:
            # Over several floors it goes round the boxes between, on the left and on the right by turns.
            side = x + wide / 2 - WIDTH / 2
            long += abs(side) < 1
            right = long % 2 if abs(side) < 1 else side > 0
            start, end = (x + wide, to_x + to_wide) if right else (x, to_x)
            far = (max if right else min)(start, end) + (30 + 12 * span) * (1 if right else -1)
            far = min(max(far, 4), WIDTH - 4)
            middle, to_middle = y + BOX / 2, to_y + BOX / 2
            way = (
                f"M{start:.0f} {middle:.0f}C{far:.0f} {middle:.0f} {far:.0f} {to_middle:.0f} {end:.0f} {to_middle:.0f}"
            )
        parts.append(f'<path d="{way}" fill="none" stroke="#7A8794" marker-end="url(#tip)"/>')
    for room, (x, y, wide) in places.items():
        middle = x + wide / 2
        words = shorten(purpose(room).replace("`", ""), int(wide / 5.8), placeholder=" ...")
        parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{wide:.0f}" height="{BOX}" rx="6" fill="#EAF1F8" stroke="#4477AA"/>'
            f'<text x="{middle:.0f}" y="{y + 16:.0f}" font-weight="600" fill="#222222">{escape(NAMES.get(room, room))}</text>'
            f'<text x="{middle:.0f}" y="{y + 31:.0f}" font-size="10" fill="#555555">{escape(words)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), "utf-8")
    print(f"wrote {PICTURE}")
