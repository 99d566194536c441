"""`first.diff(second)`: two reports side by side, in words, figures and a picture."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from causes_cells import Notebook, notebook

from gpumem_magic import Report, cli

MIB = 1 << 20
MODEL = """
from torch.utils.checkpoint import checkpoint
layers = nn.ModuleList([nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)]).cuda()
"""
STEP = """
x = torch.randn(4096, 512).cuda()
for layer in layers:
    x = x + {call}
loss = x.square().mean()
loss.backward()
"""
PLAIN = STEP.format(call="layer(x)")
CHECKPOINTED = STEP.format(call="checkpoint(layer, x, use_reentrant=False)")


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    with notebook("T4") as found:
        found.cell(MODEL)
        found.cell(f"%%gpumem -q -o plain\n{PLAIN}")
        found.cell("loss = x = None; layers.zero_grad()")
        found.cell(f"%%gpumem -q -o checkpointed\n{CHECKPOINTED}")
        yield found


def reports(book: Notebook) -> tuple[Report, Report]:
    return book.shell.user_ns["plain"], book.shell.user_ns["checkpointed"]


def figures(text: str) -> dict[str, list[float]]:
    """Each line's sizes, in MiB."""
    sizes = re.compile(r"([-+]?[\d,.]+) (B|KiB|MiB|GiB)|(?<= )0$")
    units = {"B": 1 / MIB, "KiB": 1 / 1024, "MiB": 1, "GiB": 1024, "": 1}
    return {
        re.split(r" {2,}", line.strip())[0]: [
            float((one[1] or "0").replace(",", "")) * units[one[2] or ""] for one in sizes.finditer(line)
        ]
        for line in text.splitlines()
        if len(re.split(r" {2,}", line.strip())) == 4 and sizes.search(line)
    }


def test_the_figures_are_those_of_both_reports(book: Notebook) -> None:
    plain, checkpointed = reports(book)
    found = figures(str(plain.diff(checkpointed)))
    assert len(found) > 8, found
    for name, label in (("activations", "activations"), ("parameters", "parameters"), ("cached", "cached, free")):
        expected = [(one.peak.categories[name] or 0) / MIB for one in (plain, checkpointed)]
        assert found[label] == pytest.approx([*expected, expected[1] - expected[0]], abs=0.51), label
    assert found["allocated"][:2] == pytest.approx(
        [plain.peak.allocated / MIB, checkpointed.peak.allocated / MIB], abs=0.51
    )
    # The categories that are allocated add up in each column.
    for column in (0, 1):
        below = list(found)[: list(found).index("allocated")]
        total = sum(found[name][column] for name in below if name not in ("cached, free", "CUDA context"))
        assert total == pytest.approx(found["allocated"][column], abs=2)


def test_the_first_sentence_says_what_was_saved_and_of_what(book: Notebook) -> None:
    plain, checkpointed = reports(book)
    first, second = plain.peak.allocated, checkpointed.peak.allocated
    said = str(plain.diff(checkpointed)).partition("\n")[0]
    share = f"{(first - second) / first:.0%}"
    assert said.startswith(
        f"The second peaks at {round(second / MIB)} MiB, {round((first - second) / MIB)} MiB ({share}) less"
    )
    assert re.search(r"than the first: activations \d+ MiB -> [\d.]+ MiB", said), said
    back = str(checkpointed.diff(plain)).partition("\n")[0]
    assert f"{first / second:.1f} times as much as the first" in back, back
    assert str(plain.diff(plain)).startswith(f"Both peak at {round(first / MIB)} MiB.\n")


def test_lines_that_made_the_difference_are_named(book: Notebook) -> None:
    plain, checkpointed = reports(book)
    found = figures(str(plain.diff(checkpointed)))
    kept = sum(one.bytes for one in plain.tensors() if one.expression == "layer(x)" and one.category == "activations")
    assert kept
    assert found["activations: layer(x)"] == pytest.approx([kept / MIB, 0, -kept / MIB], abs=0.51)
    assert found["loss.backward()"][2] < 0


def test_cells_that_begin_with_more_are_told_of(book: Notebook) -> None:
    plain, checkpointed = reports(book)
    # What the first left in the cache, and cuBLAS's workspaces.
    said = str(plain.diff(checkpointed))
    assert "They did not begin alike" in said
    assert "were cached before the second began" in said
    assert "begin" not in str(plain.diff(plain))


def test_one_that_fails_is_told_first(book: Notebook) -> None:
    book.cell(f"%%gpumem -q -o failed\n{PLAIN.replace('4096', '4096 * 100')}")
    plain, failed = reports(book)[0], book.shell.user_ns["failed"]
    assert str(plain.diff(failed)).startswith("The first passes, the second runs out of memory at line ")


def test_a_notebook_shows_a_picture_of_both(book: Notebook) -> None:
    plain, checkpointed = reports(book)
    data = plain.diff(checkpointed)._repr_mimebundle_(include=["text/html", "text/plain"])
    assert 'src="data:image/png;base64,' in data["text/html"]
    assert "first, at the peak" not in data["text/plain"]
    figure = plain.diff(checkpointed).plot()
    drawn = [text.get_text() for text in figure.axes[0].texts]
    assert f"{round(plain.peak.allocated / MIB):,}" in drawn
    assert "second, at the end" in drawn


def test_saved_reports_compare_in_a_terminal(
    book: Notebook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for name, report in zip("ab", reports(book), strict=True):
        paths.append(str(tmp_path / f"{name}.json"))
        report.save(paths[-1])
    # A file has the largest groups, and one for what is left, which may be of any category.
    data = json.loads(Path(paths[1]).read_text("utf-8"))
    data["peak"]["tensors"][-1]["category"] = ""
    Path(paths[1]).write_text(json.dumps(data), "utf-8")
    assert cli.main(["diff", *paths]) == 0
    live, saved = str(reports(book)[0].diff(reports(book)[1])), capsys.readouterr().out
    assert f"First: {paths[0]}\nSecond: {paths[1]}\n\n" in saved
    assert live.partition("\n")[0] in saved
    # What is missing among them is not called nothing.
    assert not re.search(r"^  activations.* 0 B ", saved, re.MULTILINE)
