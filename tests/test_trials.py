"""What fits: trials in processes of their own, the largest value in few of them, and nothing changed around them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from causes_cells import Notebook, notebook
from IPython.core.inputtransformer2 import TransformerManager
from left_behind import left_behind
from small_card import SMALL, own_temporaries, small_notebook

import gpumem_magic
from gpumem_magic.devices.base import DeviceError
from gpumem_magic.trials import cards
from gpumem_magic.trials.before_values import untouched
from gpumem_magic.trials.counting import goes_by_its_count
from gpumem_magic.trials.foresight import through
from gpumem_magic.trials.programs import ScriptProgram
from gpumem_magic.trials.search import MOST_TRIALS, search
from gpumem_magic.trials.tried import ERROR, FITS, MEMORY, Tried
from gpumem_magic.trials.values import VaryError, varied, with_values
from gpumem_magic.virtual import gpu

_warm = pytest.fixture(autouse=True)(warm.in_place_of_python)

# 32 MiB of weights, gradients and one moment each; then 3 MiB a row, about.
CELL = """
batch_size = 4
model = nn.Linear(1024, 1024, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(12):
    optimizer.zero_grad()
    loss = model(torch.randn(batch_size, 256, 1024, device="cuda")).relu().sum()
    loss.backward()
    optimizer.step()
"""


_own_temporaries = pytest.fixture(autouse=True)(own_temporaries)
shared = pytest.fixture(scope="module")(small_notebook)


@pytest.fixture
def book(shared: Notebook) -> Notebook:
    """With an empty card."""
    shared.cell(f"%gpumem_device {SMALL}")
    return shared


def fits_alone(book: Notebook, cell: str, device: str = SMALL, flags: str = "--until-repeat") -> bool:
    """Whether the cell runs to its end, on a card of its own, as a user would run it."""
    with notebook(device) as other:
        other.cell(f"%%gpumem -q {flags}\n{cell}")
        report = gpumem_magic.last_report()
        assert report is not None
    book.cell(f"%gpumem_device {SMALL}")
    return report.error is None


def fake(values: dict[int, bool], tried: list[int], wrong: Callable[[int], bool] = lambda value: False) -> Any:
    def one(value: int) -> Tried:
        ending = ERROR if wrong(value) else FITS if values[value] else MEMORY
        return Tried("T4", {"n": value}, ending, 1, 1, value, 1, {})

    def run(wanted: Sequence[int]) -> list[Tried]:
        tried.extend(wanted)
        return [one(value) for value in wanted]

    return run


# ---- what is typed


def test_values_are_read() -> None:
    assert varied("batch_size=1..1024").values == range(1, 1025)
    assert varied("--batch-size=8..64..8").values == range(8, 65, 8)
    assert varied("seq_len=2048,512, 1024").values == [512, 1024, 2048]
    for wrong in ("batch_size", "=1..2", "n=1..x", "n=5..1", "n=", "n=1..2..3..4", "n=1.5", "n=1..9..0"):
        with pytest.raises(VaryError) as caught:
            varied(wrong)
        assert "\n" not in str(caught.value)


def test_cards_keep_their_options() -> None:
    assert cards.names_of("T4,context=400MiB, A100-40GB") == ["T4,context=400MiB", "A100-40GB"]
    with pytest.raises(DeviceError, match="real device"):
        cards.names_of("cuda:0")
    with pytest.raises(DeviceError, match="unknown device"):
        cards.names_of("T5000")


def test_how_a_program_runs_holds_for_other_cards_too(book: Notebook) -> None:
    book.cell("%gpumem_device T4,context=300MiB,values=auto,torch=2.9")
    assert cards.names_of("A100-40GB, RTX4090,values=real") == [
        "A100-40GB,values=auto,torch=2.9",
        "RTX4090,values=real,torch=2.9",
    ], "the context is the card's"


@pytest.mark.parametrize(
    ("cell", "changed"),
    [
        ("n = 32", "n = 7"),
        ("n: int = 32", "n: int = 7"),
        ("a = n = 32", "a = n = 32\nn = 7"),
        ("n, m = 32, 64", "n, m = (32, 64)\nn = 7"),
        ("if True:\n    n = 1\nelse:\n    n = 2", "if True:\n    n = 7\nelse:\n    n = 7"),
        ("n = 32\nn = n // 2\nn += 1", "n = 7\nn = n // 2\nn += 1"),
        ("def f(n=3):\n    n = 4", "def f(n=3):\n    n = 4"),
        ("print((n := 5))", "print((n := 7))"),
        ("x[n] = 3\nx.n = 4", "x[n] = 3\nx.n = 4"),
    ],
)
def test_what_a_cell_assigns_is_replaced(cell: str, changed: str) -> None:
    tree = ast.parse(cell)
    before = ast.dump(tree)
    assert ast.unparse(with_values(tree, {"n": 7})[0]) == changed
    assert ast.dump(tree) == before


@pytest.mark.parametrize("cell", ["for n in (1, 2): pass", "import n", "def n(): pass", "with open(x) as n: pass"])
def test_a_name_that_gets_its_values_elsewhere_is_refused(cell: str) -> None:
    with pytest.raises(VaryError, match="line 1"):
        with_values(ast.parse(cell), {"n": 7})


# ---- the search


def test_powers_and_curves_are_known_from_few_points() -> None:
    assert through([(2, 40), (8, 160)], 100) == 2000
    assert through([(2, 4), (8, 64)], 100) == 10000
    assert through([(2, 30), (8, 30)], 100) == 30
    assert through([(2, 14), (8, 26)], 100) == 210
    assert through([(2, 2 * 2 + 5), (4, 4 * 4 + 5), (8, 8 * 8 + 5)], 100) == 10005


@pytest.mark.parametrize("wall", [0, 1, 2, 3, 17, 100, 511, 512])
def test_without_any_foresight_the_answer_is_never_above_the_truth(wall: int) -> None:
    tried: list[int] = []
    found = search("n", range(1, 513), fake({n: n <= wall for n in range(1, 513)}, tried))
    assert len(tried) == len(set(tried)) <= MOST_TRIALS
    best = 0 if found.best is None else found.best.values["n"]
    assert best <= wall
    if found.is_proven:
        assert best == wall
    if found.above is not None:
        assert found.above.values["n"] > wall


def test_values_that_fit_beyond_one_that_does_not_are_not_claimed_as_proven() -> None:
    tried: list[int] = []
    found = search("n", [1, 2, 3, 4, 5], fake({1: True, 2: True, 3: False, 4: True, 5: False}, tried))
    assert found.best is not None
    assert found.best.values["n"] in (2, 4)
    assert found.above is not None
    assert found.above.values["n"] == found.best.values["n"] + 1


@pytest.mark.parametrize(
    ("wrong", "wall", "usual", "best"),
    [
        (lambda n: n % 8, 31, None, 24),
        (lambda n: n % 8, 40, None, 40),
        (lambda n: n % 6, 25, 12, 24),
        (lambda n: n % 4, 7, None, 4),
        (lambda n: n % 8, 7, None, None),
        (lambda n: n % 8, 31, 1, 24),
        (lambda n: 65 % n == 1, 33, None, 33),
        (lambda n: n > 25, 40, None, 25),
        (lambda n: True, 40, 8, None),
    ],
)
def test_values_that_raise_errors_of_the_programs_own_are_stepped_over(
    wrong: Any, wall: int, usual: int | None, best: int | None
) -> None:
    tried: list[int] = []
    found = search("n", range(1, 41), fake({n: n <= wall for n in range(1, 41)}, tried, wrong), usual)
    assert len(tried) == len(set(tried)) <= MOST_TRIALS
    assert (None if found.best is None else found.best.values["n"]) == best


# ---- what trials share


def _reads_n() -> int:
    return n  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize(
    ("cell", "count"),
    [
        ("n = 4\nx = build(8)\nfor i in range(n): pass\nn", 2),
        ("n, m = 4, 8\nx = build(m)\nx.eval()\nfor i in range(n): pass", 4),
        ("import os\nn: int = 4\ny = helper()\nprint(n)", 2),
        ("import os\ny = f'{n}'\nn = 4\nprint(n)", 0),  # assigned later
        ("x = 1\nx[n] = 2\nprint(n)", 1),
        ("x = 1\ndef f(): return n\nf()", 1),
        ("x = 1\ny = globals()['n']\nprint(n)", 1),
        ("x = 1\ny = frame.query('a > @n')\nprint(n)", 1),
        ("x = 1\nfrom somewhere import *\nprint(n)", 1),
        ("x = 1\n%time y = 2\nprint(n)", 1),
        ("x = 1\ntrainer.train()", 0),  # who reads it is not seen
    ],
)
def test_what_comes_before_the_first_look_at_a_name_is_known(cell: str, count: int) -> None:
    source = TransformerManager().transform_cell(cell)
    assert untouched(with_values(ast.parse(source), {"n": 0})[0], ["n"], {"helper": _reads_n, "build": len}) == count


@pytest.mark.parametrize(
    ("line", "is_shared"),
    [
        ("pass", True),
        ("kept = open(__file__)", False),  # copies would read on from where another is
        ("told = Reader().told()", False),  # it reads the name, and finds none
    ],
)
def test_what_comes_before_the_values_matter_runs_once(
    book: Notebook, tmp_path: Path, line: str, is_shared: bool
) -> None:
    book.shell.user_ns.update(__file__=__file__)
    book.cell("class Reader:\n    def told(self):\n        return batch_size")
    note = tmp_path / "ran"
    ran = f"with open({str(note)!r}, 'a') as file: print(file=file, end='x')"
    book.cell(
        f"%%gpumem --fit batch_size=1..8 -q -o found\nbatch_size = 4\n{ran}\n{line}\n{CELL.replace('batch_size = 4', '')}"
    )
    found = book.shell.user_ns["found"]
    assert found.largest == 8
    assert len(note.read_text()) == (1 if is_shared else 1 + len(found.trials))


# ---- cells


def test_the_largest_value_is_that_of_an_exhaustive_search(book: Notebook) -> None:
    book.cell("%%gpumem --fit batch_size=1..200 -q -o found\n" + CELL)
    found = book.shell.user_ns["found"]
    best = found.largest
    assert fits_alone(book, CELL.replace("batch_size = 4", f"batch_size = {best}"))
    assert not fits_alone(book, CELL.replace("batch_size = 4", f"batch_size = {best + 1}"))
    assert len(found.trials) <= 5
    assert all(one.repeats for one in found.trials if one.fits)
    answer = str(found).splitlines()
    assert answer[0].startswith(f"batch_size={best} fits on a card of 256MiB (")
    assert f"; {best + 1} fails at line " in answer[0]
    # The sentence adds up to the answer above it. 1 MiB of inputs, of the product, of what relu keeps, and its gradient.
    tensors, constant, each, *rest = (float(size) for size in re.findall(r"([\d.]+) MiB", answer[1]))
    assert f"MiB whatever batch_size is, and {each} MiB for each." in answer[1]
    assert tensors == pytest.approx(constant + best * each, abs=0.05 * best)
    used = float(re.findall(r"\(([\d.]+) of|\(([\d.]+) MiB of", answer[0])[0][1])
    assert tensors + sum(rest) == pytest.approx(used, abs=0.6)


def test_what_fits_in_one_iteration_and_not_in_the_next_does_not_fit(book: Notebook) -> None:
    cell = "kept = []\nfor step in range(10):\n    kept.append(torch.zeros(n, 1024, 1024, device='cuda'))"
    book.cell("%%gpumem --fit n=1..40 -q -o found\n" + cell)
    found = book.shell.user_ns["found"]
    assert found.largest == 6  # 10 x 6 x 4 MiB of 256
    failing = next(one for one in found.trials if one.values["n"] == 7)
    assert failing.iteration == (10,)
    assert "7 fails at line 4, `kept.append(torch.zeros(n, 1024, 1024, device='cuda'))`, in iteration 10." in str(found)


def test_what_a_loop_does_later_by_its_number_is_seen(book: Notebook) -> None:
    later = CELL.replace("batch_size, 256", "batch_size * (1 + step // 8), 256")
    book.cell("%%gpumem --fit batch_size=1..40 -q -o found\n" + later)
    largest = book.shell.user_ns["found"].largest
    assert fits_alone(book, later.replace("batch_size = 4", f"batch_size = {largest}"), flags="")
    assert not fits_alone(book, later.replace("batch_size = 4", f"batch_size = {largest + 1}"), flags="")


def test_what_a_function_of_another_cell_does_late_is_seen(book: Notebook) -> None:
    book.cell(
        "def train(n):\n    w = torch.zeros(64, device='cuda', requires_grad=True)\n"
        "    optimizer = torch.optim.SGD([w], lr=0.1)\n    for step in range(60):\n        w.sum().backward()\n"
        "        optimizer.step()\n        if step % 50 == 49:\n            torch.zeros(n, 1 << 22, device='cuda')"
    )
    book.cell("%%gpumem --fit n=1..40 -q -o found\ntrain(n)")
    found = book.shell.user_ns["found"]
    assert found.largest == 15  # x 16 MiB of 256, beside small ones
    assert not any(one.assumes for one in found.trials)


def test_what_is_assumed_of_a_loop_that_goes_by_its_number_is_said(book: Notebook, monkeypatch: Any) -> None:
    monkeypatch.setattr("gpumem_magic.trials.further_turns.CHEAP_EVENTS", 100)
    book.cell("%%gpumem --fit batch_size=1..2 -q -o found\n" + CELL.replace("12):", "90):\n    x = step"))
    assert "A loop goes by its own number: that it asks for nothing else after " in str(book.shell.user_ns["found"])


@pytest.mark.parametrize(
    ("loop", "reads"),
    [
        ("for i in range(9):\n    f(i)", True),
        ("for i in tqdm(range(9)):\n    if i == 7: evaluate()", True),
        ("for i, x in enumerate(loader):\n    f(x)\n    if i % 2: print(i)", False),
        ("for i, x in enumerate(loader):\n    f(x[i])", True),
        ("for i, length in enumerate([256] * 8 + [1024] * 4):\n    f(length)", True),
        ("while n < 9:\n    f(x)\n    n += 1", False),
        ("while n < 9:\n    f(x[:n])\n    n += 1", True),
        ("for x in loader:\n    total += f(x)\n    print(f'{total}')", False),
        ("for x in loader:\n    total += f(x)\n    g(total)", False),
        ("for i in range(9):\n    print(f'{i}')", False),
        ("for", False),
    ],
)
def test_loops_that_read_their_number_are_known(loop: str, reads: bool) -> None:
    assert goes_by_its_count(loop) is reads


def test_the_notebook_is_as_before(book: Notebook, tmp_path: Path) -> None:
    from gpumem_magic.virtual.gpu import current

    book.cell("kept = torch.ones(1024, 1024, device='cuda')\nbatch_size = 'mine'")
    book.shell.user_ns.pop("found", None)
    namespace = dict(book.shell.user_ns)
    machine = current()
    assert machine is not None
    device = machine.devices[0]
    events, counters = device.segments(), device.counters()
    smi = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True).stdout
    state = torch.get_rng_state(), os.getcwd(), list(sys.path), dict(os.environ), tempfile.gettempdir()
    shown = book.cell(
        "%%gpumem --fit batch_size=1..64 -q -o found\n"
        + CELL
        + "import os\nos.chdir('/')\nkept = None\nprint('heard')\n"
    )
    assert "heard" not in shown
    found = book.shell.user_ns.pop("found")
    assert found.largest
    book.shell.user_ns.pop("_i", None)
    changed = {name for name, value in namespace.items() if book.shell.user_ns.get(name) is not value}
    assert not {name for name in changed if not name.startswith("_")} - {"In", "Out"}
    assert "model" not in book.shell.user_ns
    assert (device.segments(), device.counters()) == (events, counters)
    assert subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True).stdout[30:] == smi[30:]
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1:] == (os.getcwd(), list(sys.path), dict(os.environ), tempfile.gettempdir())
    assert not left_behind()


def test_names_that_a_cell_only_reads_and_live_tensors_are_there(book: Notebook) -> None:
    book.cell("rows = 3\nweights = torch.ones(1024, 1024, device='cuda')")
    book.cell("%%gpumem --fit rows=1..100 -q -o found\nout = torch.ones(rows, 1024, 1024, device='cuda') @ weights")
    with_weights = book.shell.user_ns["found"].largest
    # 20 MiB for the segment of the weights and the workspace, and 8 for each row and its product.
    assert with_weights == (256 - 20) // 8
    assert book.shell.user_ns["rows"] == 3
    book.cell("%%gpumem --fit rows=1..100 -q -o found --on virtual:512MiB,context=0MiB\n"
              "out = torch.ones(rows, 1024, 1024, device='cuda') @ weights")  # fmt: skip
    assert book.shell.user_ns["found"].largest > with_weights
    book.cell("del weights")


def test_where_nothing_fits_what_earlier_cells_hold_is_said(book: Notebook) -> None:
    book.cell("big = torch.ones(100, 512, 512, device='cuda')")
    book.cell("%%gpumem --fit rows=1..8 -q -o found\nout = torch.ones(rows, 160, 1024, 256, device='cuda')")
    said = repr(book.shell.user_ns["found"])
    assert "Not even rows=1 fits" in said
    assert "100 MiB were in use before the cell began: `%gpumem_who` says by what." in said
    book.cell("del big")
    book.cell("%%gpumem --fit rows=1..8 -q -o found\nout = torch.ones(rows, 300, 1024, 256, device='cuda')")
    assert "in use before" not in repr(book.shell.user_ns["found"])


def test_what_a_cell_saves_is_not_written_and_loaded_again(book: Notebook, tmp_path: Path) -> None:
    old, new = tmp_path / "old.pt", tmp_path / "new.pt"
    torch.save({"best": 7}, old)
    before = old.read_bytes()
    cell = f"""
first = torch.load({str(old)!r})["best"]
x = torch.ones(n * first, 1 << 18, device="cuda")
for path in ({str(old)!r}, {str(new)!r}):
    torch.save({{"x": x}}, path)
    y = torch.load(path)["x"]
    assert y.is_cuda and y.shape == x.shape
"""
    book.cell("%%gpumem --fit n=1..40 -q -o found\n" + cell)
    found = book.shell.user_ns["found"]
    assert found.largest == 12, found  # x and two copies of 7 MiB each of 256
    assert old.read_bytes() == before
    assert not new.exists()
    safetensors = pytest.importorskip("safetensors.torch")
    kept = tmp_path / "kept.safetensors"
    safetensors.save_file({"x": torch.ones(3)}, kept)
    before = kept.read_bytes()
    book.cell(
        "%%gpumem --fit n=1..40 -q -o found\nfrom safetensors.torch import load_file, save_file\n"
        f"save_file({{'x': torch.ones(n, device='cuda')}}, {str(kept)!r})\n"
        f"assert load_file({str(kept)!r})['x'].numel() == n"
    )
    assert book.shell.user_ns["found"].largest == 40
    assert kept.read_bytes() == before


def test_a_table_of_two_names_and_of_cards(book: Notebook) -> None:
    cell = "x = torch.zeros(rows, columns, 1 << 18, device='cuda')"
    wide, narrow = (f"virtual:{size}MiB,idle=0MiB,context=0MiB" for size in (256, 128))
    book.cell(f"%%gpumem --fit rows=1..400 --fit columns=1,2 -q -o found --on {wide},{narrow}\n{cell}")
    found = book.shell.user_ns["found"]
    assert found.largest == {(wide, 1): 256, (wide, 2): 128, (narrow, 1): 128, (narrow, 2): 64}
    text = str(found)
    assert text.startswith("The largest rows that fits: ")
    assert "largest rows" in text
    panels = found.plot().axes
    assert [panel.get_title(loc="left") for panel in panels] == ["columns=1", "columns=2"]
    walls = [[text.get_text() for text in panel.texts if text.get_text().startswith("virtual")] for panel in panels]
    assert walls == [
        [f"{narrow}: up to 128", f"{wide}: up to 256"],
        [f"{narrow}: up to 64", f"{wide}: up to 128"],
    ]
    data = found._repr_mimebundle_(include={"text/html", "text/plain"})
    assert data["text/plain"] == text


def test_where_nothing_grows_it_says_so(book: Notebook) -> None:
    book.cell("batch_size = 8")
    book.cell("%%gpumem --fit batch_size=1..64 -q -o found\nx = torch.ones(1024, 1024, device='cuda')\nbatch_size")
    found = book.shell.user_ns["found"]
    assert found.largest == 64
    assert "the memory does not depend on batch_size" in str(found)


def test_an_error_that_is_not_about_memory_is_said_and_no_limit_is_claimed(book: Notebook) -> None:
    book.cell("%%gpumem --fit n=1..64 -q -o found\nn = 3\nx = torch.ones(n, device='cuda')\nraise KeyError('no $n$')")
    found = book.shell.user_ns["found"]
    assert found.largest is None
    assert str(found).startswith("Nothing can be said of n: n=3 raises KeyError")
    assert [one.values["n"] for one in found.trials] == [2, 1, 3]
    # So it is on several cards.
    book.cell("%%gpumem --fit n=1..64 --on T4,L4 -q -o found\nn = 3\nraise KeyError('no $n$')")
    both = book.shell.user_ns["found"]
    assert (both.largest, str(both).count("none on")) == ({"T4": None, "L4": None}, 0)
    assert str(both).startswith("Nothing can be said of n: n=3 raises KeyError")
    # An error from some value on is a wall, too, of another kind.
    book.cell("%%gpumem --fit n=1..64 -q -o found\nn = 3\nx = torch.ones(n, device='cuda')\nassert n < 20, 'too many'")
    assert book.shell.user_ns["found"].largest == 19
    assert "20 raises AssertionError: too many (at line 4" in str(book.shell.user_ns["found"])


def test_a_program_that_takes_only_multiples_says_so_and_its_largest(book: Notebook) -> None:
    cell = "if n % 8:\n    raise ValueError('multiples of 8')\nx = torch.ones(n, 1 << 21, device='cuda')"
    book.cell("%%gpumem --fit n=1..64 -q -o found\n" + cell)
    assert book.shell.user_ns["found"].largest == 32  # x 8 MiB of 256
    assert "32 fits on a card of 256MiB" in str(book.shell.user_ns["found"])
    assert "33 raises ValueError: multiples of 8" in str(book.shell.user_ns["found"])
    assert "40 fails at line 4" in str(book.shell.user_ns["found"])


def test_hostile_lines_get_one_clear_line(book: Notebook) -> None:
    for line, answer in {
        "--fit n": "write a name and its values",
        "--fit nowhere=1..3": "neither assigns nor reads `nowhere`",
        "--fit i=1..3": "gets its values from line 2",
        "--fit n=1..3 --fit m=1..3": "list its values",
        "--fit n=1..3 --on cuda": "real device",
        "--fit n=1..3 --on T5000": "unknown device",
        "--on T4": "names the cards for --fit",
    }.items():
        said = book.cell(f"%%gpumem {line}\nfor i in range(2): n = m = 3")
        assert answer in said, (line, said)
    assert "for i in range(2): pass" not in book.shell.user_ns


def test_what_cannot_be_shown_or_read_is_not(book: Notebook) -> None:
    cell = "n = 1\ntry:\n    input('who?')\nexcept EOFError:\n    x = torch.zeros(n, 1 << 20, device='cuda')"
    book.cell("%%gpumem --fit n=1..16 -q -o found\n" + cell)
    assert book.shell.user_ns["found"].largest == 16


def test_the_picture_says_the_value_and_the_wall(book: Notebook) -> None:
    book.cell("%%gpumem --fit batch_size=1..200 -q -o found\n" + CELL)
    found = book.shell.user_ns["found"]
    words = [text.get_text() for text in found.plot().axes[0].texts]
    assert any(f"{found.largest + 1} fails at line" in word for word in words)
    assert any("256" in word for word in words)
    assert "activations" in words
    html = found._repr_mimebundle_(include={"text/html"})
    assert "text/html" in html or book.shell is not None


def test_after_memory_ran_out_one_line_offers_it_and_nothing_runs(
    book: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = "batch_size = 400\nfor i in range(3):\n    x = torch.zeros(batch_size, 1 << 20, device='cuda')"
    said = book.cell("%%gpumem\n" + cell)
    assert "`%%gpumem --fit batch_size=1..400` above this cell" in said
    assert "`%%gpumem --advise` what would make it fit" in said
    book.cell("%%gpumem --fit batch_size=1..400 -q -o found\n" + cell)
    assert 0 < book.shell.user_ns["found"].largest < 400
    assert "--fit" not in book.cell("%%gpumem -q\n" + cell)
    assert "--fit" not in book.cell("%%gpumem\n" + cell.replace("400", "4"))
    said = book.cell("%%gpumem\nx = torch.zeros(400, 1 << 20, device='cuda')")
    assert "--fit" not in said
    assert "`%%gpumem --advise` above this cell" in said
    assert "--advise" not in book.cell("%%gpumem\nx = torch.zeros(4, 1 << 20, device='cuda')")
    # What it could not do is not offered.
    monkeypatch.delattr(os, "fork")
    said = book.cell("%%gpumem\n" + cell)
    assert "--fit" not in said
    assert "--advise" not in said


# ---- functions and scripts


def test_a_function_is_called_until_its_calls_repeat() -> None:
    gpu.turn_off()
    calls: list[int] = []

    def step(batch_size: int) -> None:
        calls.append(batch_size)
        torch.zeros(batch_size, 1024, 1024, device="cuda").relu()

    found = gpumem_magic.what_fits(step, batch_size=range(1, 200), device=SMALL)
    assert found.largest == 32
    assert calls == []
    assert gpu.current() is None
    assert all(one.repeats and one.iterations < 20 for one in found.trials if one.fits)
    with pytest.raises(DeviceError, match="no values"):
        gpumem_magic.what_fits(step, batch_size=[])


def test_what_is_asked_for_again_and_again_need_not_lie_in_the_same_places() -> None:
    gpu.turn_off()
    kept: deque[torch.Tensor] = deque(maxlen=9)

    def step(n: int) -> None:
        # In ten places, one after another.
        kept.append(torch.zeros(n, 1 << 20, device="cuda"))

    found = gpumem_magic.what_fits(step, n=range(3, 40), device=SMALL)
    assert found.largest == 6  # 10 x 6 x 4 MiB of 256
    assert all(one.repeats and one.iterations < 20 for one in found.trials if one.fits)
    assert all(one.iterations == 9 for one in found.trials if one.values["n"] == 7)


def test_a_scripts_arguments_are_varied(tmp_path: Path) -> None:
    assert ScriptProgram("x.py", ["--n", "3", "--m=4"]).arguments({"--n": 8, "--m": 9, "k": 1}) == [
        "--n", "8", "--m=9", "k=1",
    ]  # fmt: skip
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\nn = int(sys.argv[-1].rpartition('=')[2])\nprint('loud')\n"
        "for i in range(9):\n    x = torch.zeros(n, 1 << 20, device='cuda')\nsys.exit(0)\n"
    )
    command = [sys.executable, "-m", "gpumem_magic.cli", "fit", str(script), "--vary=--rows=1..100"]
    done = subprocess.run([*command, "--on", "virtual:256MiB"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--rows="), done.stdout
    assert "fails at line 5" in done.stdout
    assert "loud" not in done.stdout + done.stderr
    # One that reads `--rows 5`, in two words, has not seen it: also a table of cards says so, and what to do.
    script.write_text(
        "import sys, torch\nn = int(sys.argv[-1]) if '--rows' in sys.argv else 7\nx = torch.zeros(n, 1 << 20, device='cuda')\n"
    )
    done = subprocess.run([*command, "--on", "virtual:256MiB,T4"], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[1].startswith("No request of the script grows with --rows. "), done.stdout
    assert done.stdout.splitlines()[1].endswith("give it once behind ` -- `: `-- --rows 100`.")
    done = subprocess.run(
        [*command, "--on", "virtual:256MiB", "--", "--rows", "8"], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("--rows=48 fits on a card of 256MiB"), done.stdout
    assert "At the peak tensors take 192 MiB: 4.0 MiB for each." in done.stdout
    assert "Run on a virtual card of 256MiB, in " in done.stdout
    done = subprocess.run([*command, "--on", "T5000"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
