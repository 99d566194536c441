"""What stands in Python and in the pages' JavaScript: the same answers for the same cases, the same colours, the same columns."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpumem_magic.units import GIB, KIB, MIB, counted, human, mib
from gpumem_magic.views.layout import ticks
from gpumem_magic.views.pages import CSS_WIDTH
from gpumem_magic.views.palette import ALARM, PAPER, QUIET, TEXT
from gpumem_magic.widgets.columns import ALLOCATED, SENT
from gpumem_magic.widgets.marks import LIMIT, USER
from gpumem_magic.widgets.ring import Ring
from gpumem_magic.widgets.samples import duration
from gpumem_magic.widgets.thin import longest_gap, thin, top_of_scale, without_gaps

PACKAGE = Path(__file__).parents[1] / "gpumem_magic"


def in_page(folder: Path, program: str, given: Any) -> Any:
    """What a program that knows the pages' functions makes of `given`."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    for name in ("units.js", "widgets/watch_store.js"):
        # An older node takes .js files for another kind of module.
        target = folder / name.replace(".js", ".mjs")
        target.parent.mkdir(exist_ok=True)
        target.write_text((PACKAGE / name).read_text("utf-8").replace("units.js", "units.mjs"), "utf-8")
    lines = [
        f"import * as units from {json.dumps((folder / 'units.mjs').as_uri())};",
        f"import * as store from {json.dumps((folder / 'widgets/watch_store.mjs').as_uri())};",
        f"const given = {json.dumps(given)};",
        f"console.log(JSON.stringify({program}));",
    ]
    done = subprocess.run(
        [node, "--input-type=module", "--eval", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def rows_of(seed: int, count: int, width: int = len(SENT)) -> list[list[float]]:
    """Samples at about 10 Hz with pauses, and what they hold."""
    chance = random.Random(seed)
    rows, time = [], 100.0
    for _ in range(count):
        time += chance.choice((0.1, 0.1, 0.1, 0.125, 7.0))
        rows.append([time, *(float(chance.randrange(0, 9 * MIB)) for _ in range(width - 1))])
    return rows


def test_sizes_and_numbers(tmp_path: Path) -> None:
    near = (KIB, MIB, 100 * MIB, 10 * GIB, 5 * MIB // 2, 3 * MIB // 2, 401 * MIB // 4, 2000 * GIB)
    sizes = [0, 512, *(size + more for size in near for more in (-1, 0, 1))]
    chance = random.Random(7)
    sizes += [512 * chance.randrange(1, 1 << 27) for _ in range(200)]
    changes = [sign * size for size in sizes for sign in (1, -1)]
    found = in_page(
        tmp_path,
        "[given[0].map(units.human), given[1].map((size) => units.mib(size, true)), given[0].map((size) => units.mib(size)), "
        "[0, 1, 2, 1234].map((number) => units.counted(number, 'segment'))]",
        [sizes, changes],
    )
    assert found[0] == [human(size) for size in sizes]
    assert found[1] == [mib(size, signed=True) for size in changes]
    assert found[2] == [mib(size) for size in sizes]
    assert found[3] == [counted(number, "segment") for number in (0, 1, 2, 1234)]


def test_times(tmp_path: Path) -> None:
    seconds = [0, 0.04, 4.2, 59.94, 60, 61.4, 3599, 3600, 7623, 90000]
    assert in_page(tmp_path, "given.map(store.duration)", seconds) == [duration(one) for one in seconds]


def test_scales_and_their_ticks(tmp_path: Path) -> None:
    pairs = [(h * MIB, c * GIB) for h in (0, 1, 900, 5600, 5800, 20000) for c in (0, 1, 16)]
    tops = [int(top_of_scale(*pair)) for pair in pairs]
    found = in_page(
        tmp_path, "[given[0].map((pair) => store.scaleTop(...pair)), given[1].map(store.ticks)]", [pairs, tops]
    )
    assert found[0] == [top_of_scale(*pair) for pair in pairs]
    assert found[1] == [[list(tick) for tick in ticks(top)] for top in tops]


@pytest.mark.parametrize("points", [2, 7, 40])
def test_which_rows_are_drawn(tmp_path: Path, points: int) -> None:
    rows = rows_of(points, 150)
    gaps = [longest_gap(rows, period, per_row) for period, per_row in ((0.1, 1), (0.1, 64), (1.0, 2))]
    found = in_page(
        tmp_path,
        f"[store.thin(given, {points}, {ALLOCATED}), store.withoutGaps(given, 3),"
        " [[0.1, 1], [0.1, 64], [1, 2]].map((pair) => store.longestGap(given, ...pair))]",
        rows,
    )
    assert found == [thin(rows, points), without_gaps(rows, 3), gaps]
    assert len(found[1]) > 2


def test_a_ring_keeps_the_same_rows(tmp_path: Path) -> None:
    rows = rows_of(3, 100)
    ring = Ring(8, len(SENT), ALLOCATED)
    for row in rows:
        ring.push(row)
    found = in_page(
        tmp_path,
        f"(() => {{ const ring = new store.Ring(8, {ALLOCATED}); given.forEach((row) => ring.push(row));"
        " return [ring.rows, ring.perRow, ring.taken, ring.latest]; })()",
        rows,
    )
    assert found == [list(ring), ring.per_row, ring.taken, ring.latest]


def test_the_page_finds_its_columns_by_their_names(tmp_path: Path) -> None:
    made = "new store.Store({ columns: given, capacity: 8, period: 0.1, started: 0 })"
    found = in_page(tmp_path, f"(({made})) && [({made}).allocated, ({made}).layers, ({made}).width]", list(SENT))
    assert found == [ALLOCATED, ALLOCATED - 1, len(SENT)]


def test_the_page_keeps_at_least_the_marks_that_the_kernel_keeps(tmp_path: Path) -> None:
    marks = [{"time": float(number), "kind": USER, "label": str(number)} for number in range(LIMIT)]
    made = "new store.Store({ columns: ['time', 'allocated'], capacity: 8, period: 0.1, started: 0 })"
    program = f"(() => {{ const one = {made}; one.receive({{ k: 'history', m: given }}); return one.marks.length; }})()"
    assert in_page(tmp_path, program, marks) == LIMIT


def test_the_colours_around_a_drawing() -> None:
    style = (PACKAGE / "views" / "notebook.css").read_text("utf-8")
    light = style[: style.index("@media")]
    for name, colour in (("--gpumem-paper", PAPER), ("--gpumem-quiet", QUIET), ("--gpumem-alarm", ALARM)):
        (found,) = re.findall(rf"{name}: .*?(#[0-9a-f]{{6}})", light)
        assert found == colour.lower()
    assert f"var(--vscode-foreground, {TEXT.lower()})" in light
    assert f"max-width: {CSS_WIDTH}px" in light
