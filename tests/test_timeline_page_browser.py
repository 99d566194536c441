"""The timeline page in a real browser: down to the pixels, by keyboard alone, and with a hostile file."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_snapshots import MARKUP, recording, with_markup

pytest.importorskip("playwright", reason="the browser tests need playwright")

from notebook_browser import browsing, check_accessible, chromium, eventually

from gpumem_magic.attribution.groups import groups_of, matching
from gpumem_magic.attribution.ledger import TENANT_CATEGORIES
from gpumem_magic.attribution.sites import folded
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.files.loaded import report_of, views_of
from gpumem_magic.snapshot.files import read
from gpumem_magic.timeline_page.view import timeline_of_reports
from gpumem_magic.units import counted, human
from gpumem_magic.views.explain import answer
from gpumem_magic.views.palette import COLOURS

BROWSER = chromium()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed: the browser tests did not run")

# How many pixels of a column of the stack have each colour, from the bottom: [["r,g,b", rows], ...].
_COLUMN = """(share) => {
  const canvas = document.getElementById("stack");
  const column = canvas.getContext("2d").getImageData(Math.floor(share * canvas.width), 0, 1, canvas.height).data;
  const runs = [];
  for (let row = canvas.height - 1; row >= 0; row--) {
    const colour = [...column.slice(4 * row, 4 * row + 3)].join(",");
    const last = runs[runs.length - 1];
    if (last && last[0] === colour) last[1] += 1;
    else runs.push([colour, 1]);
  }
  return runs;
}"""


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, list[str]]]:
    assert BROWSER is not None
    with browsing(BROWSER, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


class Page:
    """A page from a file, and what went wrong in it."""

    def __init__(self, context: Any, path: Path, scheme: str = "light") -> None:
        self.errors: list[str] = []
        self.page = context.new_page()
        self.page.emulate_media(color_scheme=scheme)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.route("file://**", lambda route: route.continue_())
        self.page.goto(path.as_uri())
        self.page.wait_for_function("() => document.getElementById('moment').textContent")

    def text(self, element: str) -> str:
        found: str = self.page.locator(element).inner_text()
        return found

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.locator("#over").press(key)

    def wait_for_moment(self, words: str) -> None:
        self.page.wait_for_function(
            "(words) => document.getElementById('moment').textContent.includes(words)", arg=words
        )


def page_of(folder: Path, data: Any) -> tuple[Path, list[DeviceView]]:
    source, target = folder / "run.pickle", folder / "run.html"
    source.write_bytes(pickle.dumps(data, 4))
    views = views_of(read(source))
    timeline_of_reports([report_of(read(source), views=views)]).save(target)
    return target, views


def rgb(colour: str) -> list[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]


def tint(colour: str) -> set[str]:
    """The shades of a category on white, one for each of three neighbours, and the edge."""
    return {
        ",".join(str(int(value * (1 - share) + 255 * share + 0.5)) for value in rgb(colour))
        for share in (0, 0.1, 0.2, 0.55)
    }


def test_the_peak_is_drawn_to_scale(context: Any, tmp_path: Path) -> None:
    path, views = page_of(tmp_path, recording(random.Random(3), 90))
    page = Page(context[0], path)
    view = views[0]
    end, (_, peak) = len(view.timeline), view.peak
    sizes = view.sizes(peak)

    def drawn() -> None:
        runs = page.page.evaluate(_COLUMN, (peak + 0.5) / (end + 1))
        rows = sum(count for _, count in runs)
        scale = rows / (view.timeline.peak_reserved(0, end)[0] * 1.04)
        for name in TENANT_CATEGORIES:
            tall = sum(count for colour, count in runs if colour in tint(COLOURS[name]))
            assert abs(tall - sizes[name] * scale) <= 3, name
        cached = ",".join(map(str, rgb(COLOURS["cached"])))
        assert abs(dict(reversed(runs)).get(cached, 0) - sizes["cached"] * scale) <= 3

    eventually(page.page, drawn)
    assert page.errors == []
    assert page.text("#moment").startswith(
        f"Peak, after event {peak - 1} of {end}: {human(sizes['allocated'])} allocated"
    )


def test_everything_by_keyboard(context: Any, tmp_path: Path) -> None:
    path, views = page_of(tmp_path, recording(random.Random(3), 90))
    view, page = views[0], Page(context[0], path)
    for _ in range(9):
        page.page.keyboard.press("Tab")
        if page.page.evaluate("document.activeElement.id") == "over":
            break
    else:
        page.page.locator("#over").focus()
        assert page.page.evaluate("document.activeElement.id") == "over"
    check_accessible(page.page, "body")
    end = len(view.timeline)
    page.press("End")
    page.wait_for_moment(f"after event {end - 1} of {end}: {human(view.sizes(end)['allocated'])} allocated")
    page.press("ArrowLeft", "ArrowLeft", "ArrowUp")
    position = end - 2
    page.wait_for_moment(f"after event {position - 1} of")
    live = view.timeline.live_at(position)
    order = {one.index: (TENANT_CATEGORIES.index(view.labels[one.index].category), one.index) for one in live}
    bottom = min(live, key=lambda one: order[one.index])
    page.page.wait_for_function("() => document.getElementById('selected').textContent.includes('asked for')")
    assert f"{human(bottom.requested)} asked for, {human(bottom.size)} with rounding" in page.text("#selected")
    assert f"from event {bottom.born} " in page.text("#selected")
    told = page.text("#live")
    assert f"after event {position - 1}" in told
    assert "Selected: " in told
    page.press("[")
    page.wait_for_moment(f"after event {bottom.born} of")
    page.press("Escape")
    page.page.wait_for_function("() => document.getElementById('selected').textContent.includes('Nothing is selected')")
    # The list is another way to the same allocations.
    page.page.locator("#groups button").first.press("Enter")
    page.page.wait_for_function("() => document.getElementById('selected').textContent.includes('asked for')")
    assert page.errors == []


def test_what_a_screen_reader_meets(context: Any, tmp_path: Path) -> None:
    path, _ = page_of(tmp_path, recording(random.Random(3), 60))
    page = Page(context[0], path)
    named = page.page.evaluate(
        "() => [...document.querySelectorAll('button, select, canvas:not([aria-hidden])')].filter(one => one.offsetParent)"
        ".map(one => (one.getAttribute('aria-label') || one.labels?.[0]?.textContent || one.textContent).trim())"
    )
    assert all(named), named
    assert any("Allocations stacked over time" in name for name in named)
    assert any(name.startswith("Segments ") for name in named)
    assert page.page.evaluate("document.documentElement.lang") == "en"


def test_hiding_a_category_takes_it_out_of_the_picture(context: Any, tmp_path: Path) -> None:
    path, views = page_of(tmp_path, recording(random.Random(3), 90))
    page = Page(context[0], path)
    position = views[0].peak[1]
    sizes = views[0].sizes(position)
    number = max(range(len(TENANT_CATEGORIES)), key=lambda place: sizes[TENANT_CATEGORIES[place]])
    button = page.page.locator(f"#category-{number}")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    page.page.wait_for_function(f"() => document.getElementById('category-{number}').ariaPressed === 'false'")
    share = (position + 0.5) / (len(views[0].timeline) + 1)
    others = {name for name in TENANT_CATEGORIES if sizes[name] and name != TENANT_CATEGORIES[number]}

    def drawn() -> None:
        colours = {colour for colour, _ in page.page.evaluate(_COLUMN, share)}
        assert not colours & tint(COLOURS[TENANT_CATEGORIES[number]])
        assert not others or any(colours & tint(COLOURS[name]) for name in others)

    eventually(page.page, drawn)


def test_dark_and_light(context: Any, tmp_path: Path) -> None:
    path, _ = page_of(tmp_path, recording(random.Random(3), 60))
    page = Page(context[0], path, "dark")
    check_accessible(page.page, "body")
    paper = "() => getComputedStyle(document.body).backgroundColor"
    ink = "() => getComputedStyle(document.body).color"

    def brightness(script: str) -> int:
        words = page.page.evaluate(script)
        return sum(int(part) for part in words[words.index("(") + 1 : -1].split(",")[:3])

    assert brightness(paper) < 120 < 600 < brightness(ink)
    page.page.locator("#theme").click()

    def light() -> None:
        assert brightness(ink) < 120 < 700 < brightness(paper)

    eventually(page.page, light)


def test_zooming_with_the_pointer_and_the_whole_again(context: Any, tmp_path: Path) -> None:
    path, _ = page_of(tmp_path, recording(random.Random(3), 90))
    page = Page(context[0], path)

    def columns() -> list[Any]:
        return [page.page.evaluate(_COLUMN, share) for share in (0.2, 0.6, 0.9)]

    def zoomed() -> None:
        assert columns() != before

    def whole() -> None:
        assert columns() == before

    before = columns()
    page.page.locator("#over").dblclick(position={"x": 400, "y": 200})
    eventually(page.page, zoomed)
    page.page.locator("#whole").click()
    eventually(page.page, whole)
    assert page.errors == []


def test_what_is_beneath_the_picture_answers(context: Any, tmp_path: Path) -> None:
    """Groups by stack, a search, call paths, events and a segment's stack: each leads to the others."""
    path, views = page_of(tmp_path, recording(random.Random(3), 90))
    view, page = views[0], Page(context[0], path)
    groups = groups_of(view, view.peak[1])
    rows = page.page.locator("#groups tbody tr")
    assert rows.count() == min(len(groups), 10)
    assert page.page.locator("#groups tbody button").first.inner_text() == human(groups[0].requested)
    rows.first.locator("button").click()
    page.page.wait_for_function("() => document.querySelector('#groups tbody tr').ariaCurrent === 'true'")
    assert "Asked for by" in page.text("#segment")
    search = page.page.locator("#search")
    search.fill("_init_group")
    found = groups_of(view, view.peak[1], matching(view, "_init_group"))
    count, size = sum(one.count for one in found), sum(one.requested for one in found)
    assert page.text("#found") == f"{counted(count, 'allocation')}, {human(size)}"
    flame = page.page.locator("#flame button")
    assert flame.first.get_attribute("aria-label") == f"all: {human(size)}, {counted(count, 'allocation')}"
    last = flame.last.get_attribute("aria-label")
    flame.last.click()
    assert page.page.evaluate("document.activeElement.ariaLabel") == last
    page.page.keyboard.press("ArrowUp")
    assert page.page.evaluate("document.activeElement.ariaLabel") != last
    page.page.locator("#flame button[aria-current]").focus()
    for _ in range(9):
        page.page.keyboard.press("Escape")
    assert page.page.locator("#flame button[aria-current]").get_attribute("aria-label").startswith("all: ")
    search.fill("")
    events = page.page.locator("#events button")
    before = events.locator("nth=0").inner_text().split()[0]
    events.first.click()
    page.wait_for_moment(f"after event {before} of")
    assert page.page.locator("#events button[aria-current='step']").inner_text().split()[0] == before
    # An allocation's event has what asked for it, a free's what let go.
    freed = {one.freed: one for one in view.timeline.allocations if one.freed is not None}
    titles = page.page.evaluate(
        "() => [...document.querySelectorAll('#events button')].map("
        "(one) => [Number(one.children[0].textContent.replace(',', '')), one.children[1].textContent, "
        "one.querySelector('.what').title])"
    )
    frees = [(event, title) for event, action, title in titles if action == "free_requested"]
    assert frees
    for event, title in frees:
        told = [line for line in folded(view.frames_of_free(freed[event])) if not line.startswith("(")]
        assert title == (told[0] if told else "no stack")
    assert page.text("#answer") == answer(report_of(read(tmp_path / "run.pickle")))
    assert page.errors == []


def test_a_file_without_events_is_its_state(context: Any, tmp_path: Path) -> None:
    data = recording(random.Random(3), 30)
    path, views = page_of(tmp_path, {**data, "device_traces": []})
    page = Page(context[0], path)
    assert page.text("#moment").startswith(
        f"The state in the file: {human(views[0].sizes(0)['allocated'])} allocated, "
    )
    assert page.text("#events") == "The recording has no events."
    assert page.errors == []


@pytest.mark.parametrize("width", [1280, 900, 420])
def test_nothing_is_wider_than_the_page(context: Any, tmp_path: Path, width: int) -> None:
    path, _ = page_of(tmp_path, recording(random.Random(3), 90))
    page = Page(context[0], path)
    page.page.set_viewport_size({"width": width, "height": 800})
    page.page.locator("#groups button").first.click()
    page.page.wait_for_function("() => document.getElementById('selected').textContent.includes('asked for')")
    clipped = (
        "() => [...document.querySelectorAll('td, dd, li, h1, h2, p, #moment')].filter(one => one.offsetParent"
        " && one.scrollWidth > one.clientWidth + 1).map(one => one.textContent)"
    )

    def fits() -> None:
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.page.evaluate(clipped) == []

    eventually(page.page, fits)


def test_a_hostile_file_runs_nothing_and_loads_nothing(context: Any, tmp_path: Path) -> None:
    data = with_markup(recording(random.Random(4), 80))
    for one in data["device_traces"][0][::2]:
        one["frames"] = [{"filename": f"{MARKUP}.py", "name": MARKUP, "line": 1}]
    path, views = page_of(tmp_path, data)
    page = Page(context[0], path)
    assert views[0].timeline.live_at(views[0].peak[1])
    page.press("Home", *["ArrowRight", "ArrowUp"] * 8)
    page.page.wait_for_function("() => !document.getElementById('moment').textContent.startsWith('Peak')")
    page.press("p")
    page.wait_for_moment("Peak")
    page.page.locator("#groups tbody tr").filter(has_text="onerror").first.click()
    page.page.wait_for_function("() => document.getElementById('selected').textContent.includes('onerror')")
    assert MARKUP in page.text("#selected"), "it is there to be read, as text"
    assert page.page.evaluate("window.broken") is None
    assert page.page.locator("img").count() == 0
    assert context[1] == []
    assert page.errors == []
