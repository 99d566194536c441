"""Answers that are tables, in a browser as narrow as half a screen beside a file list: nothing is out of sight, or a letter wide.

No notebook and no kernel: the tables' own style sheet on a bare page, light and dark.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="the browser tests need playwright")

from notebook_browser import browsing, check_accessible, chromium

from gpumem_magic.notebook.help import card
from gpumem_magic.views.sheet import THERE, Sheet

BROWSER = chromium()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed: the browser tests did not run")

_MIB = 1 << 20
WHO = Sheet(
    "3,093 MiB in 103 allocations: what holds it, and what deleting would free.",
    [
        ["MiB", "frees", "held by", ""],
        ["1,536.5", "1,536.5", "optimizer (AdamW)", "del optimizer"],
        ["1,536.5", "0.0", "model (Sequential)", "del model, optimizer, losses, loss (frees 3,072.9)"],
        ["16.2", "16.2", "cuBLAS", "torch._C._cuda_clearCublasWorkspaces()"],
    ],
    range(2),
    code=(2, 3),
    bars=[[(THERE, size * _MIB)] for size in (1536, 1536, 16)],
    whole=1536 * _MIB,
)
FIT = Sheet(
    "The largest batch_size that fits: none on a T4, 3,108 on an A100-40GB.",
    [
        ["card", "largest batch_size", "in use at most", "tensors", "one more takes", "the next"],
        ["T4", "none", "", "", "", "1 fails at line 2"],
        ["A100-40GB", "3,108", "39.5 of 39.5 GiB", "37.6 GiB", "6.9 MiB", "3,109 fails at line 6"],
    ],
    range(1, 5),
)
HISTORY = Sheet(
    "What each cell did to the allocated memory (MiB).",
    [
        ["cell", "change", "after", "peak", ""],
        [
            "[17]",
            "+14,677",
            "14,677",
            "15,100",
            "more = [torch.zeros(16, 1024, 1024, device='cuda') for _ in range(3)]",
        ],
    ],
    range(1, 4),
    code=(4,),
    bars=[[(THERE, _MIB)]],
    whole=_MIB,
)
# Of each table: its room, what it takes, and the lines of its tallest row.
TABLES = """() => [...document.querySelectorAll('.gpumem-wide')].map((one) => [one.clientWidth, one.scrollWidth,
  Math.max(...[...one.querySelectorAll('tr')].map((row) => row.offsetHeight)) / 19])"""


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    assert BROWSER is not None
    with browsing(BROWSER, tmp_path_factory.mktemp("profile")) as (opened, _):
        yield opened


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [440, 900])
def test_a_table_is_whole_and_its_words_too(context: Any, tmp_path: Path, width: int, theme: str) -> None:
    body = "".join(one.html() for one in (card(), WHO, FIT, HISTORY))
    path = tmp_path / "sheets.html"
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Answers</title>'
    path.write_text(f'{head}<body style="margin:0"><main><h1>Answers</h1>{body}</main></body></html>', "utf-8")
    page = context.new_page()
    page.emulate_media(color_scheme=theme)
    page.route("file://**", lambda route: route.continue_())
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(path.as_uri())
    found = page.evaluate(TABLES)
    assert len(found) == 4
    for room, taken, lines in found:
        assert taken <= room
        assert lines <= (5 if width == 440 else 2)
    check_accessible(page, "main")
    page.close()
