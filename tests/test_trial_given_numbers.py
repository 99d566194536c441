"""`--fit` of a name that is no variable of the cell: an argument, a default, a field, an entry, a function's own variable."""

from __future__ import annotations

import ast

import pytest
from causes_cells import Notebook
from small_card import own_temporaries, small_notebook

from gpumem_magic.trials.given_numbers import given_numbers, with_variables

_own_temporaries = pytest.fixture(autouse=True)(own_temporaries)
book = pytest.fixture(scope="module")(small_notebook)

FILLS = 'kept = torch.zeros({rows}, 1 << 20, device="cuda")'
# Each takes 4 MiB a row, of a card of 256.
CELLS = {
    "argument": "loader = torch.utils.data.DataLoader(range(500), batch_size=90)\n"
    + FILLS.format(rows="loader.batch_size"),
    "default": f"def fill(batch_size=90):\n    {FILLS.format(rows='batch_size')}\n    return kept\nkept = fill()",
    "keyword default": f"def fill(*, batch_size=90):\n    {FILLS.format(rows='batch_size')}\n    return kept\nkept = fill()",
    "variable of a function": f"def fill():\n    batch_size = 90\n    {FILLS.format(rows='batch_size')}\nfill()",
    "field": "class Config:\n    batch_size: int = 90\n    epochs = 3\n" + FILLS.format(rows="Config.batch_size"),
    "entry": "config = {'batch_size': 90}\n" + FILLS.format(rows="config['batch_size']"),
    "item": "config = {}\nconfig['batch_size'] = 90\n" + FILLS.format(rows="config['batch_size']"),
    "attribute": "class Config: pass\nConfig.batch_size = 90\n" + FILLS.format(rows="Config.batch_size"),
}


@pytest.mark.parametrize("name", CELLS)
def test_a_number_is_varied_where_it_is_given(name: str, book: Notebook) -> None:
    before = dict(book.shell.user_ns)
    book.cell(f"%%gpumem --fit batch_size=1..200 -q -o found\n{CELLS[name]}")
    assert book.shell.user_ns["found"].largest == 256 // 4
    assert "in 2 places" not in str(book.shell.user_ns["found"])
    changed = {name for name, value in book.shell.user_ns.items() if before.get(name, name) is not value}
    assert {name for name in changed if not name.startswith("_")} <= {"found", "In", "Out"}
    book.cell("del found")


def test_where_one_value_goes_to_several_places_it_is_said(book: Notebook) -> None:
    cell = "first = dict(batch_size=90)\nsecond = dict(batch_size=30)\n" + FILLS.format(
        rows="first['batch_size'] + second['batch_size']"
    )
    book.cell(f"%%gpumem --fit batch_size=1..200 -q -o found\n{cell}")
    found = book.shell.user_ns["found"]
    assert found.largest == 256 // 4 // 2
    assert str(found).endswith(
        "`batch_size` is given a number in 2 places (lines 2 and 3): all of them had the same value."
    )


def test_a_variable_goes_before_arguments_of_its_name(book: Notebook) -> None:
    cell = "rows = 3\nother = dict(rows=90)\n" + FILLS.format(rows="rows + other['rows']")
    book.cell(f"%%gpumem --fit rows=1..200 -q -o found\n{cell}")
    # The 90 stay, and are too many.
    assert book.shell.user_ns["found"].largest is None
    book.cell(f"%%gpumem --fit rows=1..200 -q -o found\n{cell.replace('90', '4')}")
    assert book.shell.user_ns["found"].largest == 60


def test_what_comes_before_the_first_such_number_runs_once(book: Notebook, tmp_path: object) -> None:
    note = f"{tmp_path}/note"
    cell = f"with open({note!r}, 'a') as file:\n    print('ran', file=file)\n{CELLS['argument']}"
    book.cell(f"%%gpumem --fit batch_size=1..200 -q -o found\n{cell}")
    assert len(book.shell.user_ns["found"].trials) > 1
    with open(note) as file:
        assert file.read() == "ran\n"


def test_memory_that_ran_out_offers_the_batchs_argument(book: Notebook) -> None:
    said = book.cell("%%gpumem\n" + CELLS["argument"])
    assert "`%%gpumem --fit batch_size=1..90` above this cell" in said
    # What a model is made of is a size, too.
    said = book.cell("%%gpumem\n" + CELLS["argument"].replace("batch_size=90", "batch_size=90 if 1 else 2, timeout=0"))
    assert "--fit" not in said


def test_only_whole_numbers_count_and_a_program_is_not_changed() -> None:
    tree = ast.parse("f(n=1, m=True, **{'n': 2.5})\ndef g(a, n=3, *, k, m=4): n = 'text'\nn: int = 5\nh(n='6')\n")
    assert [(one.name, one.value, one.line) for one in given_numbers(tree)] == [
        ("n", 1, 1), ("n", 3, 2), ("m", 4, 2), ("n", 5, 3),
    ]  # fmt: skip
    before = ast.dump(tree)
    changed = ast.unparse(with_variables(tree, ["n"]))
    assert ast.dump(tree) == before
    assert changed.count("_gpumem_value_of_n") == 3
    assert "m=4" in changed
    assert "True" in changed
