"""``%gpumem_try``: the last failed cell again, with one thing changed."""

from __future__ import annotations

import pytest
from causes_cells import notebook
from hypothesis import given
from hypothesis import strategies as st

import gpumem_magic
from gpumem_magic.looks.fresh import made_anew
from gpumem_magic.notebook.remedy import RemedyError, edited, remedy_of

# what is made in the large blocks' places splits each of them
SPLIT = "large = [mib(1000) for _ in range(14)]\ndel large\na = [mib(600) for _ in range(14)]\nbig = mib(1500)"


def ran_out() -> bool:
    report = gpumem_magic.last_report()
    return report is not None and report.error is not None and report.error.requested is not None


def test_a_setting_that_helps_and_one_that_does_not() -> None:
    with notebook("T4") as book:
        book.cell("%%gpumem -q\n" + SPLIT)
        assert ran_out()
        said = book.cell("%gpumem_try roundup_power2_divisions:8")
        assert "Runs the cell that failed again, with roundup_power2_divisions:8" in said
        assert "    a = [mib(600) for _ in range(14)]" in said
        assert "`a`, which the cell creates again: 0 B stays allocated" in said, said[:900]
        assert "still runs out of memory at line 5" in said
        said = book.cell("%gpumem_try expandable_segments:True")
        assert "With expandable_segments:True the cell runs to its end" in said
        assert "big" in book.shell.user_ns
        # The setting was for this run only.
        from gpumem_magic.virtual import gpu

        machine = gpu.current()
        assert machine is not None
        assert not machine.devices[0].allocator.settings.expandable_segments


def test_an_argument_is_put_into_the_cells_own_calls() -> None:
    with notebook("virtual:700MiB,context=0MiB") as book:
        cell = (
            "model = nn.Linear(4096, 10000, bias=False).cuda()\noptimizer = torch.optim.Adam(model.parameters())\n"
            "model(torch.ones(1, 4096, device='cuda')).sum().backward()\noptimizer.step()"
        )
        book.cell("%%gpumem -q\n" + cell)
        assert ran_out()
        said = book.cell("%gpumem_try fused=True")
        assert "fused=True, in line 2 of the cell" in said
        assert "With fused=True the cell runs to its end; the peak was 6" in said
        assert book.shell.user_ns["optimizer"].defaults["fused"] is True


def test_hostile_lines_get_one_clear_line() -> None:
    with notebook("T4") as book:
        assert "no cell has failed" in book.cell("%gpumem_try expandable_segments:True")
        book.cell("x = mib(20000)")
        for line, answer in {
            "": "%gpumem_try: the following arguments are required: REMEDY",
            "nonsense": "'nonsense' is no remedy",
            "no_such_option:1": "no_such_option",
            "max_split_size_mb:1": "max_split_size_mb",
            "foreach=False": "no line of the failed cell makes an optimizer",
        }.items():
            said = book.cell(f"%gpumem_try {line}")
            assert answer in said, (line, said)
            assert "Traceback" not in said
            book.cell("x = mib(20000)")


def test_another_error_of_the_cell_goes_through() -> None:
    with notebook("T4") as book:
        book.cell("count = 0")
        book.cell("count += 1\nif count > 1: raise KeyError('mine')\nx = mib(20000)")
        assert "KeyError" in book.cell("%gpumem_try expandable_segments:True")


@pytest.mark.parametrize(
    ("code", "typed", "after"),
    [
        ("o = torch.optim.SGD(p, lr=1)", "foreach=False", "o = torch.optim.SGD(p, lr=1, foreach=False)"),
        ("o = Adam(p, foreach=False)", "foreach=False", "o = Adam(p, foreach=False)"),
        ("o = Adam(p, foreach=True)", "foreach=False", "o = Adam(p, foreach=False)"),
        ("o = Adam(\n    p,\n    lr=1,\n)", "fused=True", "o = Adam(\n    p,\n    lr=1, fused=True\n)"),
        ("o = Adam(\n    p,\n    lr=1\n)", "fused=True", "o = Adam(\n    p,\n    lr=1, fused=True\n)"),
        ("ä = 'ü'; o.zero_grad()", "set_to_none=True", "ä = 'ü'; o.zero_grad(set_to_none=True)"),
        (
            "a.zero_grad(); b.zero_grad()",
            "set_to_none=False",
            "a.zero_grad(set_to_none=False); b.zero_grad(set_to_none=False)",
        ),
    ],
)
def test_only_the_argument_changes(code: str, typed: str, after: str) -> None:
    changed, lines = edited(code, remedy_of(typed))
    assert changed == after
    assert lines
    compile(changed, "cell", "exec")


@pytest.mark.parametrize(
    "code", ["o = Adam(p, **options)", "o = Mine(p)", "o.zero_grad(False)", "x = 1", "Adam(p, fused=True)"]
)
def test_calls_that_are_not_sure_to_take_it_are_left_alone(code: str) -> None:
    for typed in ("foreach=False", "set_to_none=True"):
        with pytest.raises(RemedyError, match="no line of the failed cell"):
            edited(code, remedy_of(typed))


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("a = 1\nb = a", {"a", "b"}),
        ("a = a + 1", set()),
        ("print(a)\na = 1", set()),
        ("for i, (x, y) in enumerate(loader):\n    z = x", {"i", "x", "y", "z"}),
        ("for x in a:\n    if loss:\n        y = 1\n    loss = f(x)", {"x"}),
        ("while c:\n    with f() as g:\n        h = g", {"g", "h"}),
        ("for x in a:\n    total += x\ntotal = 0", {"x"}),
        ("if c:\n    a = 1", set()),
        ("def f(): return a\na = 1", set()),
        ("total += 1", set()),
        ("d[k] = 1", set()),
        ("a, *b = c", {"a", "b"}),
    ],
)
def test_names_that_a_cell_makes_anew(code: str, names: set[str]) -> None:
    assert made_anew(code) == names


@given(st.text(max_size=40))
def test_whatever_is_typed_is_a_remedy_or_one_line(text: str) -> None:
    try:
        remedy = remedy_of(text)
    except RemedyError as error:
        lines = str(error).splitlines()
    else:
        lines = [remedy.conf or remedy.argument]
    assert len(lines) == 1
    assert lines[0]
