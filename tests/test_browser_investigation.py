"""The stepper in JupyterLab, in a headless Chromium: keys, slider and play, what is drawn, and the picture after reopening.

Skipped where Chromium, Playwright or JupyterLab is missing. Nothing here asserts a time.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from notebook_browser import Notebook, browsing, check_accessible, chromium, eventually, serving, write_notebook

if any(find_spec(name) is None for name in ("playwright", "nbformat", "jupyterlab", "anywidget", "ipykernel")):
    pytest.skip("playwright, jupyterlab, anywidget and ipykernel are needed", allow_module_level=True)
CHROMIUM = chromium()
if CHROMIUM is None:
    pytest.skip("no Chromium is installed", allow_module_level=True)

START, FAILS, SHOW, WHERE = range(4)
CELLS = [
    "%load_ext gpumem_magic\n%gpumem_device virtual:5GiB\nimport torch, gpumem_magic",
    """%%gpumem -q
def work():
    whole = torch.empty(512, 1024, 1024, device="cuda")
try:
    work()
    for turn in range(2):
        part = torch.empty(64 * (turn + 1), 1024, 1024, device="cuda")
        print("read")
    wall = torch.empty(768, 1024, 1024, device="cuda")
except torch.OutOfMemoryError as error:
    print(error)
wall = torch.empty(900, 1024, 1024, device="cuda")
""",
    "stepper = gpumem_magic.investigate(gpumem_magic.last_report(), published={'print(\"read\")': [2500]})\nstepper",
    "print(stepper.step)",
]
STEPPER = ".gpumem-stepper"
FACTS = """() => {
  const root = document.querySelector('.gpumem-stepper'), current = root.querySelector('[aria-current]');
  const line = current?.getBoundingClientRect(), frame = root.querySelector('.gpumem-listing').getBoundingClientRect();
  const figure = (name) => root.querySelector(`[data-figure="${name}"]`)?.textContent ?? null;
  return {
    step: Number(root.dataset.step), kind: root.dataset.kind, title: root.querySelector('strong').textContent,
    line: current ? Number(current.dataset.line) : null, seen: line ? line.top >= frame.top && line.bottom <= frame.bottom : null,
    words: root.querySelector('.gpumem-words').textContent, said: root.querySelector('input').getAttribute('aria-valuetext'),
    smi: figure('nvidia-smi'), published: figure('published'), playing: root.dataset.playing,
    bar: [...root.querySelectorAll('.gpumem-bar rect')].map((one) => [one.dataset.kind, one.getBoundingClientRect().width]),
    strip: [...root.querySelectorAll('.gpumem-strip rect[data-bytes]')]
      .map((one) => [one.dataset.kind, Number(one.dataset.bytes)]),
    wanted: root.querySelectorAll('.gpumem-wanted').length, active: document.activeElement.tagName,
    wide: root.querySelector('.gpumem-strip').getBoundingClientRect().right <= root.getBoundingClientRect().right + 1,
    paper: getComputedStyle(root).backgroundColor, ink: getComputedStyle(root).color,
  };
}"""
GIB = 1 << 30


def look(page: Any) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate(FACTS)
    return found


def press(page: Any, key: str, step: int) -> dict[str, Any]:
    # With the focus there, wherever the page has put it.
    page.locator(f"{STEPPER} input").press(key)
    page.wait_for_function(f"() => document.querySelector('{STEPPER}').dataset.step === '{step}'")
    return look(page)


def slide(page: Any, step: int) -> dict[str, Any]:
    page.locator(f"{STEPPER} input").fill(str(step))
    page.wait_for_function(f"() => document.querySelector('{STEPPER}').dataset.step === '{step}'")
    return look(page)


def shoot(page: Any, name: str) -> None:
    """Pictures for whoever looks at them, where the environment names a folder."""
    folder = os.environ.get("GPUMEM_SCREENSHOTS")
    if folder:
        page.locator(STEPPER).screenshot(path=str(Path(folder) / f"investigation-{name}.png"))


def luminance(colour: str) -> float:
    parts = [float(part) / 255 for part in colour.split("(")[1].rstrip(")").split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_stepper_answers_to_keys_slider_and_play_and_leaves_a_picture(tmp_path: Path) -> None:
    folder, own = tmp_path / "notebooks", tmp_path / "own"
    folder.mkdir()
    own.mkdir()
    write_notebook(folder / "steps.ipynb", CELLS)
    assert CHROMIUM is not None
    with serving("lab", folder, own) as server, browsing(CHROMIUM, tmp_path / "profile") as (context, strays):
        notebook = Notebook(context.new_page(), server, strays, folder)
        page = notebook.page
        notebook.open("steps.ipynb")
        notebook.run(START)
        notebook.wait_for(START)
        notebook.run(FAILS)
        with pytest.raises(AssertionError, match="CUDA out of memory"):
            notebook.wait_for(FAILS)
        notebook.run(SHOW)
        notebook.wait_for(SHOW)
        # It begins at the failure.
        page.wait_for_selector(f"{STEPPER}[data-kind=error]")
        last = int(page.get_attribute(f"{STEPPER} input", "max"))
        assert last >= 8
        assert look(page)["step"] == last - 1

        # Keys. The notebook's own shortcuts do not see them, and arrows pass over what moved nothing.
        assert press(page, "Home", 0)["bar"] == []
        assert slide(page, 1)["words"] == "No memory moved."
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        page.wait_for_function(f"() => Number(document.querySelector('{STEPPER}').dataset.step) > 1")
        one = look(page)
        assert one["words"] != "No memory moved."
        assert one["said"].startswith(f"step {one['step'] + 1} of {last + 1}: line ")
        assert press(page, "End", last)["kind"] == "after"
        failed = press(page, "ArrowLeft", last - 1)
        shoot(page, "failed")
        assert failed["kind"] == "error"
        assert failed["line"] == 12
        assert failed["seen"]
        assert failed["wanted"] == 1
        assert failed["words"].startswith("Out of memory at line 12: 3,600 MiB wanted.")
        held = {kind: sum(size for of, size in failed["strip"] if of == kind) for kind, _ in failed["strip"]}
        assert held["free"] == 2 * GIB - GIB // 2
        assert failed["wide"]
        assert press(page, "Home", 0)["step"] == 0
        assert page.evaluate("() => document.activeElement.closest('.gpumem-stepper') !== null")

        # Every step by itself: a line in sight, a bar whose widths follow the figures.
        for step in range(1, last + 1):
            now = slide(page, step)
            assert now["title"].startswith(f"{step + 1} of {last + 1}: ")
            assert now["words"]
            if now["line"] is not None:
                assert now["seen"], now["title"]
            used = float(now["smi"].split()[0].replace(",", ""))
            width = sum(size for _, size in now["bar"])
            room = page.locator(f"{STEPPER} .gpumem-bar").bounding_box()["width"]
            assert abs(width - room * used / 5120) < 3 + len(now["bar"])
        told = slide(page, 0)
        while told["published"] == "–":
            told = slide(page, told["step"] + 1)
        assert 'print("read")' in told["title"]
        assert told["published"].startswith("2,500 MiB (ours is ")

        # The kernel follows the page, which may still have steps to send when the cell is run.
        def followed() -> None:
            notebook.run(WHERE)
            assert notebook.wait_for(WHERE).strip() == str(told["step"])

        eventually(page, followed)

        # The slider, and the mouse on the buttons.
        page.locator(f"{STEPPER} input").fill("3")
        page.wait_for_function(f"() => document.querySelector('{STEPPER}').dataset.step === '3'")
        page.locator(f"{STEPPER} button").nth(2).click()
        page.wait_for_function(f"() => document.querySelector('{STEPPER}').dataset.step === '4'")
        page.locator(f"{STEPPER} button").nth(0).click()
        page.wait_for_function(f"() => document.querySelector('{STEPPER}').dataset.step === '3'")

        # Play goes to the end and stops there; a key stops it at once.
        page.locator(f"{STEPPER} input").fill(str(last - 2))
        page.locator(f"{STEPPER} button").nth(1).click()
        page.wait_for_function(
            f"() => {{ const {{step, playing}} = document.querySelector('{STEPPER}').dataset;"
            f" return step === '{last}' && playing === 'false'; }}"
        )
        page.locator(f"{STEPPER} button").nth(1).click()
        page.wait_for_function(f"() => document.querySelector('{STEPPER}').dataset.playing === 'true'")
        page.locator(f"{STEPPER} input").press("End")
        page.wait_for_function(f"() => document.querySelector('{STEPPER}').dataset.playing === 'false'")

        # Readable on light and on dark.
        light = look(page)
        assert contrast(light["paper"], light["ink"]) > 7
        check_accessible(page, STEPPER)
        notebook.turn_dark()
        press(page, "ArrowLeft", last - 1)
        dark = look(page)
        assert contrast(dark["paper"], dark["ink"]) > 7
        check_accessible(page, STEPPER)
        shoot(page, "dark")
        # Narrow: nothing runs out of its frame.
        page.set_viewport_size({"width": 560, "height": 900})
        page.wait_for_function(f"() => document.querySelector('{STEPPER}').clientWidth < 520")
        page.wait_for_function(f"() => ({FACTS})().wide")
        shoot(page, "narrow")
        page.set_viewport_size({"width": 1100, "height": 1000})

        # What is saved has the picture, and it is there when the notebook is opened again.
        notebook.save()
        assert not notebook.errors
        again = Notebook(context.new_page(), server, strays, folder)
        again.open("steps.ipynb")
        again.page.wait_for_function(
            "() => [...document.querySelectorAll('.jp-OutputArea img')].some((image) => image.naturalWidth > 1000)"
        )
        words = again.page.evaluate("() => document.querySelector('.jp-OutputArea img').alt")
        assert "3,600 MiB wanted" in words
        assert not again.errors
        assert not strays
