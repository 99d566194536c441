"""Rows inside named functions: the statements are told, the results are the same, and the functions are as before afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from causes_cells import Notebook, notebook

from gpumem_magic.recording.inside import MOST, FunctionRewriter, InsideError, find_function
from gpumem_magic.report.model import Row
from gpumem_magic.user_report import Report

MIB = 1 << 20


@pytest.fixture
def book() -> Iterator[Notebook]:
    with notebook() as book:
        yield book


def measured(book: Notebook, into: str, code: str) -> Report:
    import gpumem_magic

    assert book.cell(f"%%gpumem -q --into {into}\n{code}") == ""
    report = gpumem_magic.last_report()
    assert report is not None
    return report


def parts(report: Report) -> list[tuple[str, int]]:
    """(label, MiB added) of every part, in the order in which they began."""
    found: list[tuple[str, int]] = []

    def walk(row: Row) -> None:
        for part in row.parts:
            found.append((part.label, part.allocated // MIB))
            walk(part)

    for row in report.checkpoints:
        walk(row)
    return found


FUNCTION = '''
def train_step(n):
    """Its docstring."""
    a = mib(n)
    for i in range(2):
        b = mib(2 * n)
    if n > 3:
        del b
    return a
'''


def test_statements_of_a_function_are_parts_of_its_row(book: Notebook) -> None:
    book.cell(FUNCTION)
    function = book.shell.user_ns["train_step"]
    before = function.__code__
    report = measured(book, "train_step", "x = train_step(8)")
    assert parts(report) == [
        ("train_step: a = mib(n)", 8),
        ("train_step: b = mib(2 * n)", 24),
        ("train_step: b = mib(2 * n)", 24),
        ("train_step: del b", 8),
    ]
    assert function.__code__ is before
    assert function.__doc__ == "Its docstring."
    assert book.shell.user_ns["x"].numel() == 8 << 18


def test_phases_are_inside_the_statement_that_ran_them(book: Notebook) -> None:
    book.cell(
        "model = net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def step(x):\n    loss = model(x).mean()\n    loss.backward()\n    optimizer.step()\n    return loss.detach()"
    )
    report = measured(book, "step", "out = step(torch.randn(64, 512, device='cuda'))")
    labels = [label for label, _ in parts(report)]
    assert labels.index("step: loss = model(x).mean()") < labels.index("step: loss.backward()")
    assert any(label.startswith("backward") for label in labels)


CLASS = """
class Base:
    def go(self, n): return mib(n)
class Trainer(Base):
    __slots__ = ("__kept",)
    def go(self, n):
        self.__kept = super().go(n)
        return self.__kept
"""


def test_methods_with_super_and_private_names(book: Notebook) -> None:
    book.cell(CLASS)
    report = measured(book, "Trainer.go", "x = Trainer().go(8)")
    assert [label for label, _ in parts(report)] == ["go: self.__kept = super().go(n)"]
    assert book.shell.user_ns["x"].numel() == 8 << 18


def test_closures_defaults_generators_and_decorated_functions(book: Notebook) -> None:
    book.cell(
        "import functools\n"
        "def outer(k):\n    def inner(n, m=1):\n        total = n + m + k\n        return total\n    return inner\n"
        "closure = outer(100)\n"
        "def decorate(f):\n    @functools.wraps(f)\n    def wrapper(*a): return f(*a)\n    return wrapper\n"
        "@decorate\ndef wrapped(n):\n    kept = mib(n)\n    return kept\n"
        "def numbers():\n    a = 1\n    got = yield a\n    yield got\n"
    )
    report = measured(
        book,
        "closure,wrapped,numbers",
        "one = closure(1)\ntwo = wrapped(4)\nit = numbers()\nthree = [next(it), it.send(5)]",
    )
    ns = book.shell.user_ns
    assert (ns["one"], ns["two"].numel(), ns["three"]) == (102, 4 << 18, [1, 5])
    assert ("wrapped: kept = mib(n)", 4) in parts(report)
    assert ns["closure"](2) == 103
    assert list(ns["numbers"]()) == [1, None]


def test_an_error_inside_is_the_users_and_the_function_is_put_back(book: Notebook) -> None:
    book.cell("def bad(n):\n    a = mib(n)\n    return 1 / 0")
    function = book.shell.user_ns["bad"]
    before = function.__code__
    result = book.shell.run_cell("%%gpumem -q --into bad\nbad(4)")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert function.__code__ is before
    traceback = result.error_in_exec.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert traceback.tb_lineno == 3


def test_a_loop_of_many_turns_is_bounded(book: Notebook) -> None:
    book.cell("def many():\n    for _ in range(1000):\n        x = 1\n    return x")
    words = book.cell("%%gpumem -q -o report --into many\nlast = many()")
    assert words == f"gpumem: --into many: of 1,000 runs of a statement the first {MOST} are shown\n"
    assert len(parts(book.shell.user_ns["report"])) <= MOST


@pytest.mark.parametrize(
    ("into", "words"),
    [
        ("nobody", "there is no 'nobody'"),
        ("torch.nobody", "torch has no 'nobody'"),
        ("torch.empty", "is no Python function"),
        ("made", "its source is not there"),
        ("torch", "is no Python function"),
    ],
)
def test_what_cannot_be_looked_into_is_one_clear_line(book: Notebook, into: str, words: str) -> None:
    book.cell("exec('def made(): return 1', globals())")
    (text,) = book.cell(f"%%gpumem -q --into {into}\nran = True").strip().splitlines()
    assert text.startswith("UsageError: --into ")
    assert words in text
    assert "ran" not in book.shell.user_ns


def test_one_bad_name_leaves_the_others_as_they_were() -> None:
    def good() -> int:
        return len([1])

    namespace: dict[str, Any] = {"good": good}
    exec("def bad(): return 1", namespace)
    code = good.__code__
    inside = FunctionRewriter(
        [find_function("good", namespace), find_function("bad", namespace)], lambda label: lambda failed: None
    )
    with pytest.raises(InsideError):
        inside.install()
    assert good.__code__ is code


def test_a_model_stands_for_its_forward() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    net = Net()
    assert find_function("net", {"net": net}) is Net.forward
    assert find_function("Net.forward", {"Net": Net}) is Net.forward
    net.forward = lambda x: x  # type: ignore[method-assign]
    assert find_function("net", {"net": net}) is net.forward


def test_a_class_is_told_to_name_its_function() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.steps = 0

    with pytest.raises(InsideError, match=r"--into Trainer: Trainer is a class: name one of its functions"):
        find_function("Trainer", {"Trainer": Trainer})
    assert find_function("Trainer.__init__", {"Trainer": Trainer}) is Trainer.__init__
