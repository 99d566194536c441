"""What a caught error keeps is said as the program knows it, and what is said to free it does."""

from __future__ import annotations

import re

import pytest
from causes_cells import notebook

from gpumem_magic.units import human

SETUP = """
import sys
class Log: pass
log = Log()
def train(model):
    activations = [torch.empty(64 << 18, device="cuda")]
    loss = model(torch.ones(4096, 512, device="cuda")).sum()
    raise RuntimeError("no")
def attempt(model):
    try:
        train(model)
    except RuntimeError as error:
        caught = error
    return caught
model = net()
"""
_TRY = "try:\n    train(model)\nexcept RuntimeError as error:\n    "
_LOCAL = "`activations` of train()"
_PLAINLY = "error.with_traceback(None)"
# The cell, what keeps it, and what lets go of the traceback alone; "" where that is not offered.
CELLS = [
    (_TRY + "saved = error", "`saved` (line 5, `saved = error`) is a caught error", "saved.with_traceback(None)"),
    (
        _TRY + "log.last = error",
        "`log.last` (line 5, `log.last = error`) is a caught",
        "log.last.with_traceback(None)",
    ),
    (
        "errors = []\nfor _ in range(3):\n    " + _TRY.replace("\n", "\n    ") + "errors.append(error)",
        "keeps 3 caught errors: their tracebacks hold",
        "for one in errors: one.with_traceback(None)",
    ),
    (_TRY + "info = sys.exc_info()", "`info[2]`", ""),
    (
        _TRY + "told = error.__traceback__",
        "`told` (line 5, `told = error.__traceback__`) is a traceback, which holds",
        "",
    ),
    (
        "saved = attempt(model)",
        "`saved` (line 2, `saved = attempt(model)`) is a caught error",
        "saved.with_traceback(None)",
    ),
    # What caused it has a traceback of its own.
    (
        "try:\n    try:\n        train(model)\n    except RuntimeError as error:\n        raise ValueError() from error\n"
        "except ValueError as error:\n    saved = error",
        "`saved` (line 8, `saved = error`) is a caught error",
        "",
    ),
]


@pytest.mark.parametrize(("cell", "says", "alone"), CELLS)
def test_a_caught_error_is_named_and_its_remedy_frees_what_it_says(cell: str, says: str, alone: str) -> None:
    with notebook("A100-40GB,torch=2.13") as book:
        book.cell(SETUP)
        report = book.measured(cell)
        (cause,) = (one for one in report.causes if not one.describes)
        assert cause.name == "kept_errors"
        assert says in cause.text
        assert _LOCAL in cause.text
        assert (_PLAINLY in cause.remedy) == bool(alone)
        before = book.allocated()
        statements = re.search(r"`(del \w+)`(?: and `(gc.collect\(\))`)? frees? (.+)\.$", cause.remedy)
        assert statements is not None, cause.remedy
        if alone:
            book.cell(alone)
        else:
            book.cell(statements[1])
            if statements[2]:
                book.cell(f"import gc; {statements[2]}")
        assert human(before - book.allocated()) == statements[3]


def test_nobody_is_told_to_detach_what_a_function_that_failed_called_its_own() -> None:
    with notebook("A100-40GB,torch=2.13") as book:
        book.cell(SETUP)
        book.cell(CELLS[2][0])
        assert "etach" not in book.cell("%gpumem_who errors")


def test_a_retry_in_a_functions_except_block_is_told_with_its_line_and_retrying_afterwards_helps() -> None:
    attempt = (
        "def step(size):\n    h = torch.empty(size, device='cuda', dtype=torch.uint8)\n"
        "    return h, torch.empty(size, device='cuda', dtype=torch.uint8)\n"
    )
    inside = (
        "def find(size):\n    while True:\n        try:\n            return step(size)\n"
        "        except RuntimeError as error:\n            step(size // 2)\n            size //= 2"
    )
    afterwards = (
        "def find(size):\n    while True:\n        failed = False\n        try:\n            return step(size)\n"
        "        except RuntimeError as error:\n            failed = True\n        step(size // 2)\n        size //= 2"
    )
    with notebook("T4") as book:
        book.cell(attempt)
        report = book.measured(f"{inside}\nbest = find(8 << 30)")
        [cause] = [one for one in report.causes if one.name == "retry_in_except"]
        assert cause.text.startswith("Line 7 (`step(size // 2)`) runs inside the `except` block")
        assert "8.0 GiB" in cause.text.replace("8,192 MiB", "8.0 GiB")
        book.cell(inside)
        report = book.measured("best = find(8 << 30)")
        [cause] = [one for one in report.causes if one.name == "retry_in_except"]
        assert re.match(r"In \[\d+\], line 6 \(`step\(size // 2\)`\) runs inside", cause.text)
        report = book.measured(f"{afterwards}\nbest = find(8 << 30)")
        assert not [one for one in report.causes if one.name == "retry_in_except"]


def test_a_retry_after_the_block_is_none_in_it_however_often_memory_runs_out_and_each_time_is_said() -> None:
    search = (
        "size = 32 << 30\nwhile True:\n    try:\n        best = step(size)\n        break\n"
        "    except torch.cuda.OutOfMemoryError:\n        size //= 2\n        torch.cuda.empty_cache()"
    )
    with notebook("T4") as book:
        book.cell(
            "def step(size):\n    h = torch.empty(size // 4, device='cuda', dtype=torch.uint8)\n"
            "    return h, torch.empty(size, device='cuda', dtype=torch.uint8)"
        )
        report = book.measured(search)
    assert not [one for one in report.causes if one.name == "retry_in_except"]
    # (In the third, the rest of what the first had is cached beside what is in use.)
    times = "Memory ran out 3 times at line 5, and the program caught the error and went on"
    said = f"{times}: the peak is of an attempt that failed."
    assert report.answer.startswith(said)
    assert not [one for one in report.notes if "ran out" in one and one != said]
    assert not [one for one in report.notes if "emptied its cache" in one]


def test_the_error_that_ends_a_program_is_none_that_it_caught() -> None:
    with notebook("T4") as book:
        book.cell("def step():\n    return torch.empty(32 << 30, device='cuda', dtype=torch.uint8)")
        report = book.measured("try:\n    step()\nexcept torch.cuda.OutOfMemoryError:\n    pass\nstep()")
    said = [one for one in report.notes if "Memory ran out" in one]
    assert said == ["Memory ran out in: `step()`, line 3. The program caught the error and went on."]


def test_what_an_error_keeps_that_a_variable_keeps_is_of_the_category_that_it_is_in_an_error_of_the_cell() -> None:
    attempt = (
        "def forward(x):\n    h = [x]\n    for layer in model:\n        h.append(layer(h[-1]).relu())\n"
        "    raise RuntimeError('no')"
    )
    with notebook() as book:
        book.cell(f"model = net()\nx = torch.ones(4096, 512, device='cuda')\n{attempt}")
        report = book.measured("try:\n    forward(x)\nexcept RuntimeError as error:\n    errors = {'last': error}")
        assert report.peak.categories["unknown"] == 0
        assert report.peak.categories["activations"] > 0


def test_what_an_attempt_gave_back_before_it_failed_is_no_retry_in_its_except_block() -> None:
    attempt = (
        "def step(size):\n    h = torch.empty(size, device='cuda', dtype=torch.uint8)\n"
        "    torch.empty(size // 4, device='cuda', dtype=torch.uint8)\n"
        "    return h, torch.empty(size, device='cuda', dtype=torch.uint8)\n"
    )
    search = (
        "size, failed = 1 << 30, False\nwhile not failed:\n    try:\n        step(size)\n        size *= 2\n"
        "    except RuntimeError as error:\n        print(size)\n        {}failed = True"
    )
    with notebook("T4") as book:
        book.cell(attempt)
        for beside, is_told in (("", False), ("step(size // 4); ", True)):
            report = book.measured(search.format(beside))
            assert any(one.name == "retry_in_except" for one in report.causes) is is_told


def test_a_list_of_tuples_is_not_offered_what_a_list_of_tensors_is() -> None:
    with notebook("T4") as book:
        book.cell("model = net()\nx = torch.ones(4096, 512, device='cuda')")
        report = book.measured("kept = []\nfor turn in range(4):\n    kept.append((turn, model(x).mean()))")
        text = str(report)
        assert "kept.append((turn" in text
        assert "one.detach() for one in kept" not in text


def test_iterations_that_pile_up_until_memory_runs_out_are_told_also_where_the_error_is_caught() -> None:
    code = (
        "def gather(turns):\n    kept = []\n    for _ in range(turns):\n        x = torch.rand(1 << 26, device='cuda')\n"
        "        kept.append(x * 2)\n    return kept\ntry:\n    gather({turns})\nexcept torch.OutOfMemoryError:\n    pass"
    )
    with notebook("virtual:8GiB") as book:
        report = book.measured(code.format(turns=90))
        assert report.answer.startswith("Memory ran out at line 9, as each iteration had left 256 MiB more (")
        assert "made by `x * 2` (line 6" in report.answer
        assert "ran out" not in book.measured(code.format(turns=9)).answer
