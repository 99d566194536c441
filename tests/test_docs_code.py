"""Every block of code in README and in the documentation runs: each page in a shell of its own, on a virtual card."""

from __future__ import annotations

import gc
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from IPython.utils.capture import capture_output
from shell_fakes import clean_shell

from gpumem_magic import cli
from gpumem_magic.notebook.help import CARD
from gpumem_magic.virtual.engine import supplied

ROOT = Path(__file__).parents[1]
# gallery.md and magics.md are written when the documentation is built.
PAGES = [
    ROOT / "README.md",
    *sorted(path for path in (ROOT / "docs").glob("*.md") if path.stem not in ("gallery", "magics")),
]
BLOCK = re.compile(r"^```(ipython|python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIRST = """
%load_ext gpumem_magic
%gpumem_device T4
import torch
import gpumem_magic
"""
# What a reader has already: a model, data, and functions of a program's own, made after the device was chosen.
BEFORE = """
class MyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    def forward(self, images):
        return self.layers(images)

class Loader(list):
    def __call__(self, batch_size):
        return [torch.zeros(batch_size, 256) for _ in range(4)]

def train_step(model, images, optimizer):
    optimizer.zero_grad()
    model(images.cuda()).square().mean().backward()
    optimizer.step()

def train(*arguments):
    for images in loader:
        train_step(model, images, optimizer)

def next_loss():
    return 0.5

torch.cuda.memory._record_memory_history()
lengths = torch.ones(3, device="cuda")
batch = torch.zeros(32, 256)
loader = Loader([batch, batch])
model = MyModel().cuda()
optimizer = torch.optim.AdamW(model.parameters())
train()
for name in ("before", "snapshot", "after"):
    torch.cuda.memory._dump_snapshot(f"{name}.pickle")
torch.cuda.memory._record_memory_history(None)
"""


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, code) of each block."""
    return [(found[1], found[2]) for found in BLOCK.finditer(page.read_text("utf-8"))]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.chdir(tmp_path)
    # What a page says of a value is said for that page.
    monkeypatch.setattr(supplied, "_supplied", [])
    with clean_shell() as shell:
        yield shell
        with suppress(Exception), capture_output():
            shell.run_line_magic("gpumem_watch", "stop")
        shell.user_ns.clear()
        gc.collect()
        with capture_output():
            shell.run_line_magic("gpumem_device", "off")


def lines_of(code: str) -> list[list[str]]:
    """The commands of a block, as words; all are ours."""
    found = [shlex.split(line) for line in code.splitlines() if line.strip()]
    assert all(words[0] == "gpumem" for words in found)
    return [words[1:] for words in found]


def ran(shell: Any, code: str) -> None:
    with capture_output() as captured:
        result = shell.run_cell(code, store_history=True)
    assert result.success, f"{code}\n{captured.stdout[-2000:]}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.is_file() and blocks(page)], ids=lambda page: page.stem
)
def test_the_code_of_a_page_runs(shell: Any, page: Path) -> None:
    ran(shell, FIRST + BEFORE)
    for language, code in blocks(page):
        if language == "bash":
            for words in lines_of(code):
                # What it asks of the small recording here may be beyond its end (2): the words are understood.
                with capture_output() as captured:
                    assert cli.main(words) in (0, 2), words
                assert "usage:" not in captured.stderr
        else:
            if "report.json" in code:
                ran(shell, "gpumem_magic.load('snapshot.pickle').save('report.json')")
            ran(shell, code)
            if re.search(r"^%gpumem_device \w", code, re.MULTILINE):
                ran(shell, BEFORE)


def test_the_first_page_has_every_question_of_help() -> None:
    page = ROOT / "docs" / "index.md"
    if not page.is_file():
        pytest.skip("the documentation is only in the repository")
    text = page.read_text("utf-8")
    assert [line for _, line, _ in CARD if f"`{line}`" not in text and line != "%gpumem_free"] == []
