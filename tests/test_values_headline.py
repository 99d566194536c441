"""What values that nobody knows may have done to a program is said first."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import warm
from IPython.utils.capture import capture_output
from shell_fakes import clean_shell

import gpumem_magic
from gpumem_magic import cli
from gpumem_magic.devices.reads import Reads
from gpumem_magic.looks.decisions import (
    checks_for_none,
    chooses_a_way,
    chooses_an_object,
    chooses_what_is_printed,
    ends_a_loop,
    is_printed,
    keeps_gradients,
    leads_to,
    looks_up,
    makes_a_size,
    only_waits,
    selects,
    waits,
)
from gpumem_magic.report.script_words import for_a_script
from gpumem_magic.session import device as chosen_device
from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    gpu.turn_off()


def read_in(folder: Path, code: str) -> tuple[str, int]:
    """A program's file, and the first of its lines that reads `x`."""
    place = folder / "program.py"
    place.write_text(code, "utf-8")
    return str(place), next(number for number, text in enumerate(code.splitlines(), 1) if "x." in text)


def unknown(*shape: int) -> torch.Tensor:
    return torch.rand(*(shape or (300, 300)), device="cuda")


def test_an_error_behind_a_stand_in_names_it_and_the_way_out() -> None:
    with pytest.raises(AssertionError), gpumem_magic.measure(device="T4,values=auto") as measured:  # noqa: PT012
        largest = unknown().max().item()
        assert largest > 5
    first = measured.report.answer
    assert first.startswith("This may have failed because of a value that the virtual GPU does not know, read at ")
    assert '`measure(device="NAME,values=real")` computes values.' in first
    assert for_a_script("`%gpumem_device NAME,values=real` computes") == "`--device NAME,values=real` computes"


def test_an_error_is_put_down_to_the_value_that_was_read_last(tmp_path: Path) -> None:
    # Of the files by their names the other would be the last one.
    (tmp_path / "a_solver.py").write_text("def step(error):\n    value = error.max().item()\n    return 1 / value\n")
    (tmp_path / "train.py").write_text(
        "import torch, a_solver\nx = torch.rand(300, 300, device='cuda')\nprint(x.sum().item())\na_solver.step(x)\n"
    )
    done = subprocess.run(
        [warm.executable(), "-m", "gpumem_magic", "run", "--device", "T4", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "ZeroDivisionError" in done.stderr
    assert "does not know, read at `a_solver.py:2`" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("quotient", "named"),
    [
        ("loss / turn", False),  # of one batch
        ("(loss / turn, 100.0 * loss / 4)", False),
        ("4 / (0 * loss)", True),
        ("4 / (0 * x.sum().item())", True),
        ("x.sum().item() / turn", False),
    ],
)
def test_a_division_by_zero_is_put_down_to_what_divides(tmp_path: Path, quotient: str, named: bool) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nx = torch.rand(300, 300, device='cuda')\ndef mean(parts):\n    loss = 0\n"
        "    for turn, part in enumerate(parts):\n        loss += (x * part).sum().item()\n"
        f"    return {quotient}\nmean([1])\n"
    )
    done = subprocess.run(
        [warm.executable(), "-m", "gpumem_magic", "run", "--device", "T4", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = " ".join(done.stderr.split())
    assert "ZeroDivisionError at line 7" in told
    assert ("does not know" in told) is named


def test_where_a_library_read_the_programs_own_line_is_told(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "python3.12" / "site-packages"
    library.mkdir(parents=True)
    (library / "meter.py").write_text("def update(x):\n    if x.mean().item() > 0.5:\n        return x.clone()\n")
    (tmp_path / "train.py").write_text("import torch, meter\n\nmeter.update(torch.rand(300, 300, device='cuda'))\n")
    package = Path(gpumem_magic.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [library, package]))}
    done = subprocess.run(
        [warm.executable(), "-m", "gpumem_magic", "run", "--device", "T4", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert "does not know, read at line 3 (in `meter.py:2`)" in " ".join((done.stdout + done.stderr).split())


def test_an_error_of_another_kind_is_not_put_down_to_values() -> None:
    with pytest.raises(NameError), gpumem_magic.measure(device="T4,values=auto") as measured:  # noqa: PT012
        unknown().max().item()
        nobody_has_this_name  # type: ignore[name-defined]  # noqa: B018, F821
    assert "does not know" not in measured.report.answer


def test_what_autograd_says_of_a_graph_is_not_put_down_to_values() -> None:
    weight = torch.ones(300, requires_grad=True)
    with pytest.raises(RuntimeError, match="second time"), gpumem_magic.measure(device="T4,values=auto") as measured:  # noqa: PT012
        loss = (weight.cuda() * unknown(300)).square().sum()
        loss.item()
        loss.backward()
        loss.backward()
    assert "does not know" not in measured.report.answer


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x: x + torch.ones(300, 300), "on the same device"),
        (lambda x: torch.nn.functional.conv1d(x, torch.ones(1, 300, 1, device="cuda").half()), "weight type"),
        (lambda x: x @ torch.ones(300, 300, device="cuda").half(), "same dtype"),
        (lambda x: x.T.view(-1), "size and stride"),
        (lambda x: torch.nn.Linear(300, 2).load_state_dict({"weight": x}), "loading state_dict"),
    ],
)
def test_what_is_on_another_device_or_of_another_type_or_form_is_not_put_down_to_values(
    wrong: Callable[[torch.Tensor], object], says: str
) -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError(x)
        return x * 2

    with pytest.raises(RuntimeError, match=says), gpumem_magic.measure(device="T4,values=auto") as measured:  # noqa: PT012
        x = checked(unknown())
        wrong(x)
    assert "does not know" not in measured.report.answer


# Programs that fail as nothing was found, no name was given a value, or a `raise` of their own was reached; and the same errors
# in programs that read a value beside.
_WAYS = {
    "nothing was found": (
        """
        def first(numbers):
            for place, number in enumerate(numbers):
                if number > 5:
                    return place
        names = ["a", "b"]
        names[first(x.mean(0).tolist())]
        """,
        TypeError,
        True,
    ),
    "nothing was looked up": ("a, b = {5: (1, 2)}.get(int(x.sum()))", TypeError, True),
    "nothing has a method": (
        """
        found = next((word for word in ["a"] if x.max().item() > 5), None)
        found.upper()
        """,
        AttributeError,
        True,
    ),
    "no name yet": (
        """
        def best():
            for turn in range(2):
                if (x.sum() * turn).item() < -1:
                    found = turn
            return found
        best()
        """,
        NameError,
        True,
    ),
    "a raise": (
        """
        class Diverged(Exception): pass
        def check(loss):
            if not loss > 7:
                raise Diverged
        check(x.mean().item())
        """,
        Exception,
        True,
    ),
    "a kind of ValueError": (
        """
        class Small(ValueError): pass
        def check(loss):
            if loss < 7:
                raise Small(loss)
        check(x.mean().item())
        """,
        ValueError,
        True,
    ),
    "no such method": ("y = x.mean().item()\ny.upper()", AttributeError, False),
    "no such name": ("y = x.mean().item()\nprint(yy)", NameError, False),
    "no such name in one line": ("print(x.mean().item(), yy)", NameError, False),
    "nothing of its own": ("y = x.mean().item()\nNone.upper()", AttributeError, False),
    "a raise beside": ("y = x.mean().item()\nif len(x) == 300:\n    raise Exception(y)", Exception, False),
}


@pytest.mark.parametrize("name", _WAYS)
def test_an_error_of_where_values_led_to_is_put_down_to_them(tmp_path: Path, name: str) -> None:
    code, kind, said = _WAYS[name]
    place = tmp_path / "program.py"
    place.write_text(textwrap.dedent(code), "utf-8")
    with pytest.raises(kind), gpumem_magic.measure(device="T4,values=auto") as measured:
        exec(compile(place.read_text("utf-8"), str(place), "exec"), {"x": unknown(), "__name__": "program"})
    assert measured.report.answer.startswith("This may have failed because of a value") is said


_LEAVING = """
import sys
import torch

x = torch.rand(300, 300, device="cuda")
y = x @ x

def main():
    loss = y.norm().item()
    print("loss", loss)
    return 0
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("if y.norm() < 5:\n    sys.exit('diverged')", True),
        ("if y.norm() < 5:\n    quit()", True),
        ("def check(loss):\n    if loss < 5:\n        sys.exit(1)\ncheck(y.norm().item())", True),
        ("sys.exit(main())", False),
        ("main()\nsys.exit(3)", False),
    ],
)
def test_an_end_that_goes_by_a_stand_in_is_said_first(tmp_path: Path, end: str, said: bool) -> None:
    (tmp_path / "train.py").write_text(_LEAVING + end, "utf-8")
    done = subprocess.run(
        [warm.executable(), "-m", "gpumem_magic", "run", "--device", "T4", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = " ".join((done.stdout + done.stderr).split())
    assert ("On a real GPU the program may not end where it did: this depends on a value that" in told) is said
    assert "MiB at the peak" in told


@pytest.mark.parametrize(
    ("handler", "said"), [("RuntimeError", True), ("(ValueError, torch.linalg.LinAlgError)", True), ("KeyError", False)]
)
def test_a_matrix_that_may_not_be_definite_within_a_try_is_said_first(tmp_path: Path, handler: str, said: bool) -> None:
    code = f"""
        def root(matrix):
            return torch.linalg.cholesky(matrix)
        for jitter in range(3):
            try:
                made = root(x @ x.T)
                break
            except {handler}:
                x += jitter
    """
    assert run(tmp_path, code).startswith("On a real GPU an error may come that the program catches") is said
    assert "error" not in run(tmp_path, "made = torch.linalg.inv(x)\ntry:\n    x + 1\nexcept RuntimeError:\n    pass")


def test_an_error_of_the_programs_own_that_was_caught_is_said_first(tmp_path: Path) -> None:
    code = """
        class Enough(Exception): pass
        def step(limit):
            if x.max().item() < limit:
                raise Enough
            return x + 1
        try:
            step({limit})
        except Enough:
            x + 1
    """
    assert run(tmp_path, code.format(limit=9)).startswith(
        "On a real GPU the error that the program caught may not come"
    )
    assert "error" not in run(tmp_path, code.format(limit=-9))


def test_an_error_without_a_stand_in_is_the_programs_own() -> None:
    with pytest.raises(AssertionError), gpumem_magic.measure(device="T4,values=auto") as measured:
        assert torch.ones(3, device="cuda").sum() > 5
    assert "does not know" not in measured.report.answer


def test_a_loop_that_goes_by_a_stand_in_is_said_first() -> None:
    with gpumem_magic.measure(device="T4,values=auto") as measured:
        for _ in range(9):
            loss = unknown().square().mean()
            if loss.item() < 0.97:
                break
    assert measured.report.answer.startswith("On a real GPU a loop may end earlier or later: this depends on a value")


def test_where_all_iterations_are_alike_how_many_there_are_is_said_behind_the_answer() -> None:
    net = torch.nn.Linear(1024, 1024)
    with gpumem_magic.measure(device="T4,values=auto") as measured:
        net.cuda()
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(9):
            loss = net(unknown(64, 1024)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if loss.item() < 0.01:
                break
    first, _, doubt = measured.report.answer.partition(" On a real GPU a loop may end earlier or later: ")
    assert first.startswith("Nothing piles up: ")
    assert doubt.startswith("this depends on a value")


def test_where_memory_ran_out_in_a_loop_how_often_it_goes_round_is_said_behind_the_answer() -> None:
    kept = []

    def fill() -> None:
        while unknown().mean().item() < 0.97:
            kept.append(torch.empty(2**30, device="cuda"))

    with pytest.raises(torch.OutOfMemoryError), gpumem_magic.measure(device="T4,values=auto") as measured:
        fill()
    first, _, doubt = measured.report.answer.partition(" On a real GPU a loop may end earlier or later: ")
    assert first.startswith("Out of memory")
    assert "kept" in first
    assert doubt.startswith("this depends on a value")


def test_a_number_that_is_only_printed_decides_nothing() -> None:
    with gpumem_magic.measure(device="T4,values=auto") as measured:
        for _ in range(3):
            loss = unknown().square().mean().item()
            if torch.isnan(unknown().sum()):
                break
        print(loss)
    assert len(measured.report.stand_ins) == 2
    assert "A loop" not in measured.report.answer


@pytest.mark.parametrize(
    ("code", "line", "decides"),
    [
        ("while x.item() > 1:\n    step()", 1, True),
        ("while True:\n    y = x.item()\n    z = y * 2\n    if z < 3:\n        break", 2, True),
        ("for _ in range(9):\n    y = x.item()\n    if y < 3:\n        print(y)", 2, False),
        ("for _ in range(9):\n    if x.isnan().any():\n        break", 2, False),
        ("def run():\n    for _ in range(9):\n        if x < 1: return\nwhile y > 1: pass", 3, True),
        ("y = x.item()\ndef run(y):\n    while y: pass", 1, False),
        ("if x.item():\n    y = 1", 1, False),
        ("while (", 1, False),
        ("for _ in range(int(x.max())):\n    step()", 1, True),
        ("n = x.item() + 1\ny = [step(i) for i in range(n)]", 1, True),
        ("for y in x.tolist():\n    print(y)", 1, False),
        ("self.best = x.item()\nwhile self.step < 3: pass", 1, False),
        ("while t < 1:\n    if x.item() < 3:\n        t += h", 2, True),
        ("for _ in range(9):\n    if x.item() < 3:\n        bad += 1\n    if bad > 2:\n        break", 2, True),
        ("for _ in range(9):\n    y = x.item()\n    stop(y)\n    if stop.early:\n        break", 2, True),
        ("for _ in range(9):\n    seen.append(x.item())\n    if seen:\n        break", 2, False),
        ("for _ in range(9):\n    if x.isnan():\n        bad += 1\n    if bad > 2:\n        break", 2, False),
        ("def loss():\n    return x.item()\nwhile loss() > 1: pass", 2, True),
        (
            "def steps():\n    while True:\n        yield x.item()\nfor y in steps():\n    if y < 3:\n        break",
            3,
            True,
        ),
        (
            "y = x.item()\ndef late(y):\n    return y > best\nfor _ in range(9):\n    if late(y):\n        break",
            1,
            True,
        ),
        (
            "def late(z):\n    return z > best\nfor _ in range(9):\n    if late(2):\n        print(x.item())\n        break",
            5,
            False,
        ),
        ("def tell(self):\n    self.seen.append(x.item())\ndef fit(self):\n    while self.seen[-1] > 1: pass", 2, True),
        (
            "def tell(self):\n    self.seen.append(x.item())\ndef fit(self):\n    while len(self.seen) < 3: pass",
            2,
            False,
        ),
        (
            "def tell(run):\n    if x.item() > 1: run.late = True\ndef fit(self):\n    while not self.late: pass",
            2,
            True,
        ),
        ("seen.setdefault('y', []).append(x.item())\nwhile seen['y'][-1] > 1: pass", 1, True),
        ("good = [y for y in x.tolist() if y > 1]\nfor y in good: pass", 1, True),
        (
            "at = kept['at']\nwhile at < 9:\n    if x.item() > 1:\n        kept = {'at': at, 'net': net.state_dict()}",
            3,
            False,
        ),
        ("y = x.cpu()\nwhile y.dim() > 1: y = y[0]", 1, False),
        ("if sum(found_inf(x.item())):\n    n = 1\nwhile n > 3: pass", 1, False),
        # What is under another key of a dictionary.
        ("run = {'at': 0}\nrun['loss'] = x.item()\nwhile run['at'] < 9: run['at'] += 1", 2, False),
        ("run = {}\nrun['loss'] = x.item()\nwhile run['loss'] > 1: pass", 2, True),
        ("run = {}\nrun['of']['loss'] = x.item()\nwhile run['of']['best'] > 1: pass", 2, True),
        ("self.run['loss'] += x.item()\nwhile self.run['at'] < 9: pass", 1, False),
        ("run[name] = x.item()\nwhile run['at'] < 9: pass", 1, True),
        ("run['loss'] = x.item()\nwhile run[name] < 9: pass", 1, True),
        ("run['loss'] = x.item()\nwhile any(run.values()): pass", 1, True),
        ("run['loss'] = x.item()\nother = run\nwhile other['loss'] < 9: pass", 1, True),
        ("def late(run):\n    while run['loss'] > 1: pass\nown['loss'] = x.item()\nlate(own)", 3, True),
        ("run['a.b(c'] = x.item()\nwhile run['a.b(d'] > 1: pass", 1, False),
        ("run['loss'].append(x.item())\nwhile run['loss'][-1] > 1: pass", 1, True),
        # A library's function is no method of that name, but one of the program's own modules may be.
        (
            "import torch\ny = x.item()\ntorch.save(y)\nclass Keeper:\n    def save(self, z):\n        while z > 1: pass",
            2,
            False,
        ),
        ("import steps\ny = x.item()\nsteps.save(y)\ndef save(z):\n    while z > 1: pass", 2, True),
        ("import steps\ndef late():\n    return x.item()\nwhile steps.late(): pass", 3, True),
        ("import steps\nclass Way:\n    def late(self):\n        return x.item()\nwhile steps.late(): pass", 4, False),
        ("def step():\n    return int(x.item() > 0)\nfor _ in iter(step, 0): pass", 2, True),
        ("for _ in iter(lambda: x.item(), 0): pass", 1, True),
        ("class Until:\n    def __next__(self):\n        if x.item() < 1: raise StopIteration", 3, True),
        ("class Until:\n    def __next__(self):\n        if x.item() < 1: raise ValueError", 3, False),
        ("class Until:\n    def next(self):\n        if x.item() < 1: raise StopIteration", 3, False),
        ("def step():\n    return int(x.item() > 0)\nfor _ in iter(other, 0): pass", 2, False),
        (
            "import steps\nclass Way:\n    def late(self):\n        return x.item()\nwhile steps.way.late(): pass",
            4,
            True,
        ),
        # Arguments that a list or a dictionary has.
        ("given = dict(turns=x.item())\ndef run(turns):\n    for _ in range(turns): step()\nrun(**given)", 1, True),
        ("given = [3, x.item()]\ndef run(first, turns):\n    for _ in range(turns): step()\nrun(*given)", 1, True),
        ("given = [3, x.item()]\ndef run(first, turns):\n    for _ in range(turns): step()\nwalk(*given)", 1, False),
    ],
)
def test_which_lines_end_a_loop(tmp_path: Path, code: str, line: int, decides: bool) -> None:
    place = tmp_path / "program.py"
    place.write_text(code, "utf-8")
    assert ends_a_loop(str(place), line) is decides


_RAISED = """y = x.item()
class Ready(Exception): pass
class Done(Ready): pass
def check():
    if y > 1: raise Done
def run():
    check()
    train(z)
try:
    run()
CAUGHT
"""
_OWN_EXIT = """y = x.item()
class Guard:
    def __exit__(self, kind, error, traceback):
        return GIVES
with Guard():
    if y > 1: raise ValueError
    train(z)
"""
_OWN_MANAGER = """y = x.item()
@contextlib.contextmanager
def guarded():
    try: yield
    HANDLER
with guarded():
    if y > 1: raise ValueError
    train(z)
"""
_OWN_CLASS = """y = x.item()
class Meter:
    def update(self, value): self.value = value
    def __bool__(self, other=0): return self.value > 1
meter = Meter()
meter.update(y)
if TEST:
    train(z)
"""
_GIVEN_BACK = _OWN_CLASS.replace("meter =", "    def read(self): return GIVES\nmeter =")
_TRIED = """y = x.item()
try:
    DOES
except ERROR:
    THEN
"""
_OWN_LENGTH = """y = x.item()
class Buffer:
    def __init__(self): self.rows = []
    def add(self, row, score):
        if score > 0: self.rows.append(row)
    def __len__(self): return len(self.rows)
buffer = Buffer()
buffer.add(z, y)
if TEST:
    train(z)
"""
_HANDED = """y = x.item()
def loss(): return y
def count(): return 3
def run(f):
    if f() > 1: train(z)
run(GIVEN)
"""
_WORDED = """y = x.item()
import numpy as np
if y > 2:
    word = name(y)
def name(v):
    BODY
"""


_NOTED = """y = x.item()
class Mine(logging.Handler):
    def emit(self, record): kept.append(record)
LOGS
z = torch.tensor(kept)"""
_LISTED = """losses.append(x.item())
def go(them):
    if TEST: train(z)
go(losses)"""
_SENT = """y = x.item()
def watch():
    while True:
        got = yield 1
        if got > 2: train(z)
w = watch()
w.send(y)"""
_BECOMING = """y = x.item()
def check():
    if y > 2: raise ValueError
try:
    try: check()
    except ValueError as e: raise RuntimeError from e
except RuntimeError: train(z)"""
_WARNED = """y = x.item()
warnings.simplefilter("HOW")
def check():
    if y > 2: warnings.warn("large")
try: check()
except UserWarning: train(z)"""
_LOGGED = """y = x.item()
class Mine(BASE):
    def emit(self, record): train(z)
log.info('%s', y)"""


@pytest.mark.parametrize(
    ("code", "chooses"),
    [
        ("if x.item() > 2:\n    y = net(z)", True),
        ("y = x.item()\nif y > best:\n    best = y\n    kept.append(deepcopy(net.state_dict()))", True),
        ("y = net(z) if x.item() > 2 else z", True),
        ("if x.item() > 2:\n    print('large')\nelse:\n    train(z)", True),
        ("y = x.item()\nif y > best:\n    best = y\n    torch.save(net.state_dict(), 'best.pt')", False),
        ("if x.item() > 2:\n    y = y @ z", True),
        ("if x.item() > 2:\n    y = y * 2", False),
        ("if x.item() > 2:\n    raise ValueError(text(x))", False),
        ("if x.isfinite().all():\n    train(z)", False),
        ("y = x.item()\nif step % 10 == 0:\n    evaluate(net)", False),
        ("if x.item() > 2:\n    bad += 1\nif bad > 3:\n    train(z)", True),
        ("for y in x.tolist():\n    if y < 3:\n        bad += 1\n        continue\n    train(y)", True),
        ("for y in x.tolist():\n    train(y)\n    if y < 3:\n        bad += 1\n        continue\n    print(y)", False),
        ("y = x.item()\ndef run():\n    if y < 3:\n        return\n    train(y)", True),
        ("match x.item():\n    case 0: train(z)\n    case _: print(z)", True),
        ("match x.item():\n    case 0: print(z)\n    case _: y = 1", False),
        ("y = x.item()\ntry:\n    assert y < 1\n    train(z)\nexcept AssertionError: evaluate(z)", True),
        ("y = x.item()\ntry:\n    if y > 1: raise ValueError\n    train(z)\nexcept ValueError: evaluate(z)", True),
        ("assert x.item() < 1\ntrain(z)", False),
        ("y = x.item()\ndef run():\n    if y < 3:\n        return\n    print(y)", False),
        # What only words a value, or counts with it on the host.
        ("y = x.item()\nif y > 2:\n    word = name(y)\ndef name(v): return 'small' if v < 3 else f'{v:.3f}'", False),
        ("y = x.item()\nif y > 2:\n    word = name(3)\ndef name(v): return ' ' * (v - 1) + 'large'", False),
        (
            "y = x.item()\nimport numpy as np\nif y > 7:\n    digits = 1\nelse:\n    digits = np.clip(7 - y, 1, 6)",
            False,
        ),
        (_WORDED.replace("BODY", "return '-' * 8"), False),
        (_WORDED.replace("BODY", "return shape.format(v=np.log10(mean / (1 - power[key])))"), False),
        (_WORDED.replace("BODY", "return mean / (1 - power[key])"), True),
        (_WORDED.replace("BODY", "return v"), True),
        (_WORDED.replace("BODY", "return str(net(v))"), True),
        (_WORDED.replace("BODY", "other = v * mean\n    return 'done'"), True),
        (_WORDED.replace("BODY", "v.best = mean\n    return 'done'"), True),
        (_WORDED.replace("BODY", "seen.append(mean)\n    return 'done'"), True),
        (_WORDED.replace("BODY", "global best\n    best = v\n    return 'done'"), True),
        (_WORDED.replace("BODY", "del seen[v]\n    return 'done'"), True),
        (_WORDED.replace("BODY", "return f'{(v + mean).sum()}'"), True),
        (_WORDED.replace("BODY", "return 'done' if mean[v > 1] is None else ''"), True),
        (_WORDED.replace("BODY", "return str([one + 1 for one in v])"), True),
        ("y = x.item()\nimport numpy as np\nif y > 7:\n    table = np.zeros(9)", True),
        # No value of a tensor's makes a number None.
        ("y = x.item()\nif y is not None:\n    train(z)", False),
        ("y = x.item()\ndef tell(v):\n    if v is None: return\n    train(z)\ntell(float(y))", False),
        ("y = x.item()\ndef mean(v): return float(v)\nfound = mean(y)\nif found is not None:\n    train(z)", False),
        ("y = x.item()\nparts = []\nif y > 1: parts.append('many')\nif parts is not None:\n    train(z)", False),
        ("y = z if x.item() > 1 else None\nif y is not None:\n    train(z)", True),
        ("y = x.item()\nbest = None\nif y > 1: best = z\nif best is not None:\n    train(best)", True),
        ("y = x.item()\nfound = names.get(y)\nif found is None:\n    train(z)", True),
        ("y = x.item()\nfound = names[y]\nif found is None:\n    train(z)", True),
        ("y = x.item()\ndef pick(v):\n    if v > 1: return z\nfound = pick(y)\nif found is None:\n    train(z)", True),
        ("y = x.item()\nfound = y > 1 and z or None\nif found is None:\n    train(z)", True),
        ("y = x.item()\nif y is None or y > 1:\n    train(z)", True),
        ("y = x.item()\nif y > 1: extra = net(z)", True),
        ("y = x.item()\ny > 1 and train(z)", True),
        ("x.item() > 1 or train(z)", True),
        ("any(v > 1 for v in x.tolist()) and train(z)", True),
        ("x.item() > 1 and print(z)", False),
        ("train(z) and x.item() > 1", False),
        # What is under a dictionary's key says nothing of its keys.
        ("y = x.item()\nseen = {}\nseen[name] = y\nif name not in seen:\n    train(z)", False),
        ("y = x.item()\nseen = {}\nseen[name] = y\nif seen[name]:\n    train(z)", True),
        ("y = x.item()\nseen = {}\nseen[y] = z\nif name not in seen:\n    train(z)", True),
        ("y = x.item()\nseen = {}\nseen[name] = z\nif y in seen:\n    train(z)", True),
        ("y = x.item()\nseen = []\nseen.append(y)\nif name not in seen:\n    train(z)", True),
        ("seen[name] = x.tolist()\nseen = {}\nif name not in seen:\n    train(z)", False),
        ("seen[x.item()] = z\nseen = {}\nif name not in seen:\n    train(z)", True),
        ("y = x.item()\nseen = {}\nseen = [y]\nif name not in seen:\n    train(z)", True),
        ("y = x.item()\ndef f():\n    with no_grad():\n        if y > 1: return\n        train(z)", True),
        (
            "y = x.item()\ndef f():\n    try:\n        if y > 1: return\n        train(z)\n    finally:\n        pass",
            True,
        ),
        ("y = x.item()\ndef f():\n    if late:\n        if y > 1: return\n    else:\n        train(z)", False),
        ("y = x.item()\ndef f():\n    try:\n        if y > 1: return\n    except E:\n        train(z)", False),
        ("y = x.item()\nfor w in z:\n    with no_grad():\n        if y > 1: continue\n        train(w)", True),
        ("y = x.item()\nwith suppress(E):\n    if y > 1: raise E\n    train(z)", True),
        ("y = x.item()\nwith watch(E):\n    if y > 1: raise E\n    train(z)", False),
        # An error that a function raises, caught by its name around a call.
        (_RAISED.replace("CAUGHT", "except Done: pass"), True),
        (_RAISED.replace("CAUGHT", "except Ready: pass"), True),
        (_RAISED.replace("CAUGHT", "except KeyError: pass"), False),
        (_RAISED.replace("CAUGHT", "except Exception: report()"), False),
        (_RAISED.replace("CAUGHT", "except Done: raise"), False),
        (_RAISED.replace("CAUGHT", "finally: pass"), False),
        (_RAISED.replace("    run()", "    other()").replace("CAUGHT", "except Done: pass"), False),
        (
            _RAISED.replace("if y > 1: raise Done", "assert y > 1").replace("CAUGHT", "except AssertionError: pass"),
            True,
        ),
        # Context managers of the program's own that keep an error to themselves, and that do not.
        (_OWN_EXIT.replace("GIVES", "kind is ValueError"), True),
        (_OWN_EXIT.replace("GIVES", "True"), True),
        (_OWN_EXIT.replace("GIVES", "False"), False),
        (_OWN_EXIT.replace("return GIVES", "self.close()"), False),
        (_OWN_MANAGER.replace("HANDLER", "except ValueError: pass"), True),
        (_OWN_MANAGER.replace("HANDLER", "except ValueError: raise"), False),
        (_OWN_MANAGER.replace("HANDLER", "finally: pass"), False),
        # What an object says of itself, and how it compares.
        (_OWN_CLASS.replace("TEST", "meter"), True),
        (_OWN_CLASS.replace("TEST", "not meter"), True),
        (_OWN_CLASS.replace("TEST", "meter is None"), False),
        # What its methods give is the object itself, or is not.
        (_GIVEN_BACK.replace("GIVES", "self").replace("TEST", "not meter.read()"), True),
        (_GIVEN_BACK.replace("GIVES", "self").replace("TEST", "meter.read() is None"), False),
        (_GIVEN_BACK.replace("GIVES", "self").replace("read", "__call__").replace("TEST", "meter()"), True),
        (_GIVEN_BACK.replace("GIVES", "3").replace("TEST", "meter.read()"), False),
        (_OWN_CLASS.replace("__bool__", "__lt__").replace("TEST", "meter < 3"), True),
        (_OWN_CLASS.replace("__bool__", "__lt__").replace("TEST", "meter"), False),
        (_OWN_CLASS.replace("TEST", "other"), False),
        ("y = x.item()\nsetattr(state, 'stop', y > 1)\nif state.stop:\n    train(z)", True),
        ("y = x.item()\nstate.stop = y > 1\nif getattr(state, 'stop', False):\n    train(z)", True),
        ("y = x.item()\nsetattr(state, 'best', y)\nif getattr(state, 'stop'):\n    train(z)", False),
        # What Python finds wrong of a value, where more than a number goes by it.
        (_TRIED.replace("DOES", "w = names[y]").replace("ERROR", "KeyError").replace("THEN", "train(z)"), True),
        (_TRIED.replace("DOES", "w = names[y]").replace("ERROR", "KeyError").replace("THEN", "w = 1"), False),
        (_TRIED.replace("DOES", "w = names[y]").replace("ERROR", "TypeError").replace("THEN", "train(z)"), False),
        (_TRIED.replace("DOES", "w = names[k]").replace("ERROR", "KeyError").replace("THEN", "train(z)"), False),
        (_TRIED.replace("DOES", "w = 1 / y").replace("ERROR", "ZeroDivisionError").replace("THEN", "train(z)"), True),
        (_TRIED.replace("DOES", "w = y / 2").replace("ERROR", "ZeroDivisionError").replace("THEN", "train(z)"), False),
        (_TRIED.replace("DOES", "w = math.exp(y)").replace("ERROR", "OverflowError").replace("THEN", "train(z)"), True),
        (
            _TRIED.replace("DOES", "w = math.exp(y)").replace("ERROR", "OverflowError").replace("THEN", "w = math.inf"),
            False,
        ),
        ("y = x.item()\nif y < 1:\n    p.grad = None", True),
        ("y = x.item()\nif y < 1:\n    p.best = None", False),
        # How much an object of the file's own holds.
        (_OWN_LENGTH.replace("TEST", "len(buffer) > 3"), True),
        (_OWN_LENGTH.replace("TEST", "buffer"), True),
        (_OWN_LENGTH.replace("if score > 0: ", "").replace("TEST", "len(buffer) > 3"), False),
        # What a function gives that was handed on, or has another name.
        (_HANDED.replace("GIVEN", "loss"), True),
        (_HANDED.replace("GIVEN", "lambda: loss()"), True),
        (_HANDED.replace("GIVEN", "partial(loss)"), True),
        (_HANDED.replace("GIVEN", "count"), False),
        (_HANDED.replace("run(GIVEN)", "other = loss\nif other() > 1: train(z)"), True),
        (_HANDED.replace("run(GIVEN)", "kept.best = loss\nif kept.best() > 1: train(z)"), True),
        (_HANDED.replace("run(GIVEN)", "kept.best, n = loss, 0\nif kept.best() > 1: train(z)"), True),
        (_HANDED.replace("run(GIVEN)", "kept.best = loss\nif kept.last() > 1: train(z)"), False),
        # A list is there whatever is in it, also under another name.
        ("losses = [x.item()]\nif losses: train(z)", False),
        ("losses = [x.item()]\nif losses[0] > 2: train(z)", True),
        ("losses = [x.item()]\nworst = max(losses)\nif worst > 2: train(z)", True),
        ("losses = [x.item()]\nall_of_them = losses\nif all_of_them: train(z)", False),
        ("losses = [x.item()]\nall_of_them = losses\nif all_of_them[-1] > 2: train(z)", True),
        ("losses = [x.item()]\nmean = np.mean(losses) if losses else 0.0", False),
        ("losses = [v for v in x.tolist()]\nif losses: train(z)", False),
        ("losses = [v for v in x.tolist() if v > 2]\nif losses: train(z)", True),
        (_LISTED.replace("TEST", "them"), False),
        (_LISTED.replace("TEST", "them[-1] > 2"), True),
        (_LISTED.replace("TEST", "sum(them) > 2"), True),
        ("y = x.item()\nif y < 2:\n    file = io.BytesIO()\n    torch.save(net.state_dict(), file)", False),
        # What a generator is handed, and what an error says.
        (_SENT, True),
        (_SENT.replace(".send(y)", ".send(2)"), False),
        ("y = x.item()\ntry: raise ValueError(y)\nexcept ValueError as e:\n    if e.args[0] > 1: train(z)", True),
        ("y = x.item()\ntry: sys.exit(y)\nexcept SystemExit as e:\n    if e.code: train(z)", True),
        ("y = x.item()\ntry: raise ValueError(y)\nexcept KeyError as e:\n    if e.args[0] > 1: train(z)", False),
        # Errors that others are raised behind.
        (_BECOMING, True),
        (_BECOMING.replace("raise RuntimeError from e", "raise OSError from e"), False),
        # Warnings that are errors.
        (_WARNED.replace("HOW", "error"), True),
        (_WARNED.replace("HOW", "ignore"), False),
        (_WARNED.replace("HOW", "error").replace("except UserWarning", "except Warning"), True),
        (_WARNED.replace("HOW", "error").replace("except UserWarning", "except KeyError"), False),
        # What a logger's own handler does.
        (_LOGGED.replace("BASE", "logging.Handler"), True),
        (_LOGGED.replace("BASE", "Recorder"), False),
        (_LOGGED.replace("BASE", "logging.Handler").replace("train(z)", "print(self.format(record))"), False),
        (_LOGGED.replace("BASE", "logging.Handler").replace("'%s', y", "'step'"), False),
        # What a text of the program's does.
        ("y = x.item()\nexec(f'n = {y}', {}, found)", True),
        ("y = x.item()\nexec(text, {'y': y})", True),
        ("y = x.item()\ndef go():\n    exec(text)", False),
        ("loss = x.item()\nif eval(rule): train(z)", True),
        ("loss = x.item()\ndef go(n):\n    if eval(rule): train(z)", False),
        # What lies in a file in memory.
        ("y = x.cpu()\nf = io.BytesIO()\ntorch.save(y, f)\nif torch.load(f).sum() > 2: train(z)", True),
        ("y = x.cpu()\nf = 'y.pt'\ntorch.save(y, f)\nif f in kept: train(z)", False),
        ("y = x.item()\nglobals()['COUNT'] = y\nif COUNT > 2: train(z)", True),
        ("y = x.item()\nglobals()['COUNT'] = y\nif COUNTS > 2: train(z)", False),
        # What is kept is a tensor that was made, or is not known to be one.
        ("y = x.item()\nz = 2 * torch.randn_like(x)\nif y < 0: kept.append(z)", True),
        ("y = x.item()\nz = 2 * torch.randn_like(x)\nif y < 0: kept.append((step, z))", True),
        ("y = x.item()\nz = torch.zeros(3).cuda().detach()\nif y < 0: kept.append(z)", True),
        ("y = x.item()\nz = torch.randn(3)\nw = 2 * z if y < 0 else z", True),
        ("y = x.item()\nz = torch.randn(3)\nw = 2 * y if y < 0 else y", False),
        ("y = x.item()\nz = torch.randn(3).mean().item()\nif y < 0: kept.append(z)", False),
        ("y = x.item()\nz = step + 1\nif y < 0: kept.append(z)", False),
        ("y = x.item()\nz = torch.zeros(3)\nif y < 0: kept.append(y)", False),
    ],
)
def test_which_lines_choose_a_way(tmp_path: Path, code: str, chooses: bool) -> None:
    place = tmp_path / "program.py"
    place.write_text(code, "utf-8")
    assert chooses_a_way(str(place), 1) is chooses


@pytest.mark.parametrize(("tried", "chooses"), [("assert x.item() < 1", True), ("y = x.item() < 1", False)])
def test_what_is_asserted_within_a_try_is_looked_for_where_it_was_read(
    tmp_path: Path, tried: str, chooses: bool
) -> None:
    place = tmp_path / "program.py"
    place.write_text(f"try:\n    {tried}\n    train(z)\nexcept AssertionError: evaluate(z)", "utf-8")
    assert chooses_a_way(str(place), 2, places=[(2, 4)]) is chooses


_LOGGER = """
import numpy as np

class Screen:
    def __init__(self):
        self._means = {}

    @property
    def width(self):
        return 8

    def empty(self, digits):
        return " " * (self.width - digits) + "-" * digits

    def worded(self, key, value):
        if key not in self._means:
            assert value is None
            return self.empty(2)
        mean = self._means[key] / (1 - 0.9)
        if abs(mean) < 1e-9 or not np.isfinite(mean):
            large = 0
        else:
            large = int(np.ceil(np.log10(abs(mean)))) + 1
        if large >= 7:
            shape = "{v:9.3e}"
        else:
            digits = np.clip(7 - large, 1, 6)
            shape = "{v:8,." + str(digits) + "f}"
        return self.empty(2) if value is None else shape.format(v=value)

    def tell(self, x):
        self._means["loss"] = x.item()
        print(self.worded("loss", self._means["loss"]))
"""
_OVERRIDDEN = """
class Drawn(Screen):
    def empty(self, digits):
        return draw(net(picture))
"""


@pytest.mark.parametrize(("further", "chooses"), [("", False), (_OVERRIDDEN, True)])
def test_an_if_that_only_words_a_value_is_none_unless_a_subclass_does_more(
    tmp_path: Path, further: str, chooses: bool
) -> None:
    place = tmp_path / "screen.py"
    place.write_text(_LOGGER, "utf-8")
    names: dict[str, Any] = {"__name__": "screen"}
    exec(compile(_LOGGER, str(place), "exec"), names)
    exec(further, names)
    with gpumem_magic.measure(device="T4") as measured:
        names["Screen"]().tell(unknown().sum())
    assert ("an `if` may go the other way" in measured.report.answer) is chooses


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before Python 3.11 a frame knows its line only")
@pytest.mark.parametrize(
    ("line", "chooses"),
    [
        ("if turn % 2: total += (batch * loss.item()).sum()", False),
        ("if loss.item() > -1: total = train(batch)", True),
        ("if loss > -1: total = train(batch)", True),
        ("seen = loss.item(); total = train(batch) if turn else batch", False),
        ("seen = loss.item(); total = train(batch) if seen > -1 else batch", True),
        ("a, b = loss, turn; total = train(batch) if a > -1 else batch", True),
        ("log(loss.item()) if turn else train(batch)", True),  # (one statement: which of the two reads is not told)
    ],
)
def test_of_a_line_with_several_statements_the_one_that_reads_counts(tmp_path: Path, line: str, chooses: bool) -> None:
    (tmp_path / "program.py").write_text(
        "import torch\nlog = print\ntrain = torch.relu\nbatch = torch.rand(300, 300, device='cuda')\n"
        f"loss = batch.sum()\ntotal = 0\nfor turn in range(3):\n    {line}\n"
    )
    done = subprocess.run(
        [warm.executable(), "-m", "gpumem_magic", "run", "--device", "T4", "program.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ("an `if` may go the other way" in done.stderr) is chooses, done.stderr


@pytest.mark.parametrize(
    ("code", "chooses"),
    [
        ("def loss(net): return x.item()\nbest = min(nets, key=loss)\nbest(batch)", True),
        ("def loss(net): return x.item()\nbest = sorted(nets, key=loss)[0]\nbest.train(batch)", True),
        ("def loss(net): return x.item()\nprint(min(nets, key=loss))", False),
        ("def loss(net): return x.item()\nbest = min(nets, key=size)\nbest(batch)", False),
        ("y = x.item()\nif y < least:\n    least, best = y, net\nbest(batch)", True),
        ("y = x.item()\nif y > 2:\n    loss += margin - other\nloss.backward()", True),
        ("y = x.item()\nif y > 2:\n    right += 1\nright.backward()", False),
        ("y = x.item()\nnets[y](batch)", True),
        ("nets[x.argmax().item()](batch)", True),
        (
            "v = x.item()\ndef make():\n    def late(): return v > 3\n    return late\nf = make()\nif f(): train(z)",
            True,
        ),
        (
            "v = x.item()\ndef make():\n    def late(): return 3\n    return late\nf = make()\nif f(): train(z)",
            False,
        ),
        ("(small, large)[int(x.sum() > 1)](batch)", True),
        ("{True: large, False: small}[bool(x.sum() > 1)](batch)", True),
        ("nets[str(x.int().item() % 4)](batch)", True),
        ("getattr(self, f'layer{x.item()}')(batch)", True),
        ("y = x.item()\ntable.get(y)(batch)", True),
        ("nets[0](x.item())", False),
        ("y = x.item()\nattrgetter(y)(nets)(batch)", True),
        ("y = x.item()\noperator.itemgetter(y)(nets)(batch)", True),
        ("y = x.item()\noperator.itemgetter(0)(nets)(batch)", False),
        ("y = x.item()\ndel cache[y]", True),
        ("y = x.item()\ncache.pop(y)", True),
        ("y = x.item()\nworst = min(scores, key=lambda name: y)\ndel cache[worst]", True),
        ("y = x.item()\ndel cache[name]", False),
        ("y = x.item()\nqueue = PriorityQueue()\nqueue.put((y, n, net))\nqueue.get()[2](batch)", True),
        (
            "y = x.item()\nqueue = PriorityQueue()\nqueue.put((y, n, net))\nscore, n, best = queue.get()\nbest(batch)",
            True,
        ),
        ("y = x.item()\nheap = []\nheappush(heap, (y, net))\nscore, best = heappop(heap)\nbest(batch)", True),
        ("y = x.item()\nqueue: Q = PriorityQueue()\nqueue.put((y, net))\nscore, best = queue.get()\nbest(batch)", True),
        ("y = x.item()\nqueue = Queue()\nqueue.put((y, n, net))\nscore, n, best = queue.get()\nbest(batch)", False),
        ("y = x.item()\nz = z.to('cuda' if y > 2 else 'cpu')", True),
        ("y = x.item()\nkind = half if y > 2 else single\nz = z.to(dtype=kind)", True),
        ("y = x.item()\nz = z.to(device)", False),
        ("y = x.item()\nwith torch.autocast('cuda', enabled=y > 2): net(z)", True),
        ("y = x.item()\nwith torch.autocast('cuda', enabled=half): net(z)", False),
        ("def loss(net): return x.item()\nnets.sort(key=loss)\nnets[0](batch)", True),
        ("def loss(net): return x.item()\nnets.sort(key=size)\nnets[0](batch)", False),
        ("def loss(net): return x.item()\nnets.sort(key=loss)\nothers[0](batch)", False),
        ("y = x.cpu()\nz = z.to(y.device, dtype=y.dtype)", False),
        ("y = x.item()\ndel y, cache[:3]", False),
        ("y = x.item()\nword = words.pop(y)", False),
        ("getattr(self, name)(x.item())", False),
        ("y = x.item()\nprint(names[y])", False),
        ("y = x.cpu()\nz = y.mean()\nloss(y)", False),
        # One of a list of tensors, which may have another size, and one of a tensor's rows, which has not.
        ("y = x.item()\nz = [torch.zeros(n) for n in sizes]\nz[y].clone()", True),
        ("y = x.item()\nz = [torch.zeros(3), torch.zeros(9)]\nw = z[int(y)]\nw.sin()", True),
        ("y = x.item()\nz = torch.zeros(3, 9)\nz[y].clone()", False),
        ("y = x.item()\nz = [torch.zeros(3).item() for n in sizes]\nz[y].clone()", False),
        ("y = x.item()\nz = [torch.zeros(3), torch.zeros(9)]\nw = z[k]\nw.sin()", False),
    ],
)
def test_which_lines_choose_an_object(tmp_path: Path, code: str, chooses: bool) -> None:
    place = tmp_path / "program.py"
    place.write_text(code, "utf-8")
    assert chooses_an_object(str(place), 1) is chooses


@pytest.mark.parametrize(
    ("code", "keeps"),
    [
        ("p.requires_grad = bool(x.mean() > 2)", True),
        ("y = x.item()\np.requires_grad_(y > 2)", True),
        ("y = x.item()\nkept = {name: y > 2}\np.requires_grad_(kept[name])", True),
        ("y = x.item()\nwith torch.set_grad_enabled(y > 2): net(z)", True),
        ("y = x.item()\nloss.backward(retain_graph=y > 2)", True),
        ("y = x.item()\nfreeze = False\nif y > 2: freeze = True\np.requires_grad = not freeze", True),
        ("y = x.item()\nnet.train(y > 2)", True),
        ("y = x.item()\nnet.train(mode=not y)", True),
        ("y = x.item()\nnet.train(y)", False),
        ("y = x.item()\np.requires_grad_(True)", False),
        ("y = x.item()\nwith torch.set_grad_enabled(phase == 'train'): net(z)", False),
        ("y = torch.tensor([x.item()], requires_grad=True)", False),
    ],
)
def test_which_lines_keep_gradients(tmp_path: Path, code: str, keeps: bool) -> None:
    place = tmp_path / "program.py"
    place.write_text(code, "utf-8")
    assert keeps_gradients(str(place), 1) is keeps


@pytest.mark.parametrize(
    ("code", "chooses"),
    [
        ("y = x.numpy()\nkept = np.where(y > 2)[0]\nz = rows[kept]", True),
        ("y = x.numpy()\nkept = np.where(y > 2, y, 0)\nz = rows[kept]", False),
        ("y = x.numpy()\nkept = y[y > 2]\nz = torch.from_numpy(kept).cuda()", True),
        ("y = x.numpy()\nkept = y[y > 2]\nz = np.stack(kept)", False),
        ("y = x.numpy()\nkept = np.where(y > 2)[0]\nz = y[kept]", False),
        ("y = x.cpu()\nkept = (y > 2).nonzero().squeeze(1)\nz = rows[kept]", True),
        ("y = (x.cpu() > 2) & other\nz = rows[y]", True),
        ("y = (x.cpu() > 2) & other\nz = torch.tensor(y)", False),
        ("y = x.cpu() * 2\nz = rows[y]", False),
        ("y = x.numpy()\nz = torch.from_numpy(rows[y > 2])", True),
        ("y = x.numpy()\nz = y[y > 2].mean()", False),
        ("y = x.numpy()\norder = np.argsort(-y)\nz = torch.tensor(order)", False),
        ("y = x.tolist()\nkept = [one for one in y if one > 2]\nz = torch.tensor(kept)", True),
        ("y = x.tolist()\nkept = [one + 2 for one in y]\nz = torch.tensor(kept)", False),
        ("y = [one for one in x.tolist() if one not in kept]\nkept += y[:20]\nz = rows[kept]", True),
        ("y = [one for one in x.tolist() if one not in kept]\nkept = y[0] + 2\nz = rows[kept]", False),
        ("y = x.item()\nif y > 2:\n    kept.append(z)\nz = torch.stack(kept)", True),
        (_NOTED.replace("LOGS", "if y > 2: log.warning('large')"), True),
        (_NOTED.replace("LOGS", "log.log(30 if y > 2 else 10, 'large')"), True),
        (_NOTED.replace("LOGS", "log.warning('%s', y)"), False),
        ("y = x.item()\nif y > 2:\n    right += 1\nkept.append(right)\nz = torch.tensor(kept)", False),
        ("seen = set()\nseen.update(x.tolist())\nz = torch.tensor(sorted(seen))", True),
        ("seen = Meter()\nseen.update(x.item())\nz = torch.tensor(seen)", False),
        ("y = list(takewhile(lambda v: v < 3, x.tolist()))\nz = torch.tensor(y)", True),
    ],
)
def test_which_lines_select_on_the_host(tmp_path: Path, code: str, chooses: bool) -> None:
    place = tmp_path / "program.py"
    place.write_text(code, "utf-8")
    assert selects(str(place), 1 + code.startswith("seen")) is chooses


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(decode(x.tolist()))", True),
        ("text = ''.join(letters[one] for one in x.tolist())\nprint(text)", True),
        ("def told(text):\n    out.write(text)\ntold(decode(x.tolist()))", True),
        ("def text():\n    return decode(x.tolist())\nprint(f'{text()}!')", True),
        ("names = x.tolist()\nlogger.info('%s', names)", True),
        ("names = x.tolist()\nother = len(rows)\nprint(other)", False),
        ("names = x.tolist()\nscore(names)", False),
        ("print(len(rows))\nrows = x.tolist()", False),
    ],
)
def test_which_lines_are_printed(tmp_path: Path, code: str, printed: bool) -> None:
    assert is_printed(*read_in(tmp_path, code)) is printed


@pytest.mark.parametrize(
    ("code", "chosen"),
    [
        ("if not (y == x.cpu()).all():\n    print('they differ')", True),
        (
            "def same(a, b):\n    return (a == x.item())\nif same(1, 2):\n    print('same')\nelse:\n    print('other')",
            True,
        ),
        ("loss = x.item()\nif loss < best:\n    best = loss\n    logger.info('better')", True),
        # A value; a check for what is none; work, which is said as such; nothing that shows; and what goes by something else.
        ("loss = x.item()\nif step % 9 == 0:\n    print(loss)", False),
        ("if x.isnan().any():\n    print('none')", False),
        ("if x.item() > 2:\n    print(train(z))", False),
        ("import math\nif x.item() > 2:\n    y = math.log(2)", False),
        ("if x.item() > 2:\n    raise ValueError(print)", False),
    ],
)
def test_which_lines_choose_what_is_printed(tmp_path: Path, code: str, chosen: bool) -> None:
    assert chooses_what_is_printed(*read_in(tmp_path, code)) is chosen


def test_other_lines_that_are_printed_are_said_behind_the_answer(tmp_path: Path) -> None:
    """As in a program that says which weights a step changed."""
    code = "before = x.clone()\nx.add_(1)\nif not (before == x).all():\n    print('changed')\n"
    first = run(tmp_path, code)
    assert (
        "On a real GPU the program may print something else: this depends on a value that the virtual GPU does not know"
        in first
    )
    assert "read at `program.py:3`" in first
    assert not first.startswith("On a real GPU")
    assert "may print" not in run(tmp_path, "y = x.sum().item()\nif len(x) > 1:\n    print(y)\n")


def test_a_text_of_drawn_tokens_is_said_behind_the_answer(tmp_path: Path) -> None:
    letters = "abc"
    code = "print(''.join(letters[one % 3] for one in torch.multinomial(x[0].softmax(0), 9, True).tolist()))\n"
    first = run(tmp_path, code, letters=letters)
    assert first.startswith("Of ")
    assert (
        "On a real GPU the program may print something else: this depends on a value that the virtual GPU does not know"
        in first
    )
    assert "read at `program.py:1`" in first
    # One number is a number; tokens from the host are known.
    for known in ("print(x.argmax().item())\n", "print(torch.tensor([1, 2]).to(x.device).tolist())\n"):
        assert "prints" not in run(tmp_path, known)


@pytest.mark.parametrize(
    ("code", "waited"),
    [
        ("while not x.all():\n    step()", True),
        ("seen = set()\nwhile len(seen) < 9:\n    seen.update(x.tolist())", True),
        ("while True:\n    step()\n    if x.item() > 2:\n        break", True),
        ("while True:\n    step()\n    if x.item() > 2:\n        break\n    if t > 2:\n        break", False),
        ("while t < 9:\n    t += 1\n    if x.item() > 2:\n        break", False),
        ("for _ in range(9):\n    if x.item() > 2:\n        break", False),
    ],
)
def test_which_lines_are_waited_for(tmp_path: Path, code: str, waited: bool) -> None:
    assert waits(*read_in(tmp_path, code)) is waited


@pytest.mark.parametrize(
    ("code", "only"),
    [
        ("while not x.all():\n    step()", True),
        ("while True:\n    step()\n    if x.item() > 2:\n        break", True),
        ("i = 0\nwhile not x.all():\n    i += 1\n    if i > 50:\n        break", False),
        ("while True:\n    if x.item() > 2:\n        break\n    if t > 2:\n        break", False),
        ("while t < 9:\n    t += 1\n    if x.item() > 2:\n        break", False),
    ],
)
def test_which_lines_alone_end_a_loop(tmp_path: Path, code: str, only: bool) -> None:
    assert only_waits(*read_in(tmp_path, code)) is only


LOOPS = """
def solve(until):
    at, state, turns = torch.zeros((), device="cuda"), unknown(), 0
    while at < until:
        at = at + 0.001 / state.norm()
        turns += 1
    return turns


def drawn():
    turns = 0
    while True:
        found = unknown().argmax()
        turns += 1
        if found == 7:
            break
    return turns


def limited():
    turns = 0
    while not (unknown() == 3).all():
        turns += 1
        if turns > 50:
            break
    return turns
"""


@pytest.mark.parametrize(
    ("call", "turns"),
    [
        ("[solve(one) for one in (1, 2, 3)]", [300, 10, 10]),
        ("[drawn(), drawn()]", [300, 10]),
        ("[limited() for _ in range(25)]", [51] * 25),
    ],
)
def test_a_loop_that_only_waits_is_let_go(tmp_path: Path, call: str, turns: list[int]) -> None:
    gpu.turn_on("T4")
    place = tmp_path / "loops.py"
    place.write_text(LOOPS, "utf-8")
    names: dict[str, Any] = {"torch": torch, "unknown": unknown, "__name__": "program"}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        exec(compile(LOOPS, str(place), "exec"), names)
        assert eval(call, names) == turns
    assert sum("its loop is ended here" in str(one.message) for one in seen) == (max(turns) == 300)


def test_a_number_that_ends_a_loop_is_no_flag(tmp_path: Path) -> None:
    """What is compared on the host is read as a number; a line whose loop ends by itself starts anew."""
    reads = Reads()
    place = str(tmp_path / "ends.py")
    Path(place).write_text("while not x.all():\n    step()\n", "utf-8")
    for _ in range(40):
        assert [reads.flag((place, 1), flag) for flag in [False] * 50 + [True]] == [False] * 50 + [True]


def test_a_check_is_said_behind_the_answer(tmp_path: Path) -> None:
    place = tmp_path / "program.py"
    code = "bad = 0\nfor _ in range(9):\n    if not torch.isfinite(x.norm()):\n        bad += 1\n        continue\n    step(x)\n"
    place.write_text(code, "utf-8")
    assert checks_for_none(str(place), 3)
    assert not ends_a_loop(str(place), 3)
    assert not chooses_a_way(str(place), 3)
    first = run(tmp_path, code, step=torch.exp)
    assert first.startswith("Of ")
    assert "On a real GPU a check may find numbers that are not finite: this depends on a value that the" in first
    assert "read at `program.py:3`" in first
    place.write_text("if torch.isnan(norm):\n    raise ValueError\n", "utf-8")
    assert not checks_for_none(str(place), 1)


def test_a_way_that_goes_by_a_stand_in_is_said_first() -> None:
    with gpumem_magic.measure(device="T4") as measured:
        if unknown().sum() > 2.0:
            unknown(1 << 20)
    assert measured.report.answer.startswith(
        "On a real GPU an `if` may go the other way: this depends on a value that the virtual GPU"
    )


@pytest.mark.parametrize(
    ("code", "makes"),
    [
        ("n = int(x.max()) + 1\nhead = nn.Linear(4, n)", True),
        ("self.n = x.max().item()\nself.head = Model(classes=self.n)", True),
        ("y = torch.zeros(3, x.max())", True),
        ("y = F.one_hot(x)", True),
        ("parts = rows.split(x.tolist())", True),
        ("if x.item() > 2:\n    length *= 2\ny = torch.randn(length, 9)", True),
        ("if x.item() > best:\n    kept = copy(net)\nnet = Model(kept)", False),
        ("y = rows[: x.max()]", True),
        ("y = torch.chunk(z, int(x.max()))", True),
        ("y = z.tensor_split(int(x.max()))", True),
        ("y = torch.randint(0, max(1, 9 - x.max()), (4, 1), device=z.device)", False),
        ("y = torch.randint(int(x.max()), (4, 1))", False),
        ("y = torch.randint(9, (int(x.max()), 1))", True),
        ("y = torch.randint(0, 9, (int(x.max()), 1))", True),
        ("y = torch.randint(low=0, high=int(x.max()), size=(4,))", False),
        ("y = torch.randint(0, int(x.max()), size=(4,))", False),
        ("y = np.random.randint(0, int(x.max()))", False),
        ("y = torch.full((4,), int(x.max()))", False),
        ("y = torch.full((int(x.max()),), 4)", True),
        ("y = torch.linspace(0, int(x.max()), 9)", False),
        ("y = torch.linspace(0, 1, int(x.max()))", True),
        ("y = z.narrow(0, int(x.max()), 4)", False),
        ("y = z.narrow(0, 4, int(x.max()))", True),
        ("y = F.pad(z, (0, int(x.max())))", True),
        ("y = F.pad(z, (0, 4), value=int(x.max()))", False),
        ("right += out.view(out.size(0), -1).argmax(1).eq(y).sum().item()", False),
        ("right = x.sum().item()\nprint(100 * right / total)\nraise ValueError(right)", False),
        ("self.n = x.max().item()\nself.head = Model(self.other)", False),
    ],
)
def test_which_lines_make_a_size(tmp_path: Path, code: str, makes: bool) -> None:
    place = tmp_path / "program.py"
    place.write_text(code, "utf-8")
    assert makes_a_size(str(place), 1) is makes


@pytest.mark.parametrize(
    ("code", "makes"),
    [
        ("y = x.item()\nz = torch.zeros(int(y * 100))", True),
        ("z = torch.zeros(2 ** int(math.log2(x.item() + 4)))", True),
        ("def make(n):\n    return torch.zeros(n)\ny = x.item()\nmake(500 if y > 1 else 5)", True),
        ("y = x.item()\nn = 500 if y > 1 and z else 5\nz = torch.zeros(n)", True),
        ("y = x.tolist()\nplace = bisect.bisect(y, 3.0)\nz = rows[:place]", True),
        ("y = x.numpy()\nfor place in np.argsort(-y)[:3]:\n    z = torch.zeros(widths[place])", True),
        ("y = json.loads(json.dumps(x.tolist()))\nz = torch.zeros(9 if max(y) > 1 else 3)", True),
        ("y = x.item()\nz = F.interpolate(rows, scale_factor=y)", True),
        ("y = x.item()\nbar = '#' * int(y)\nz = torch.zeros(len(bar))", True),
        ("y = x.item()\ndigits = list(str(y))\nz = torch.zeros(len(digits))", True),
        ("y = x.item()\ntext = f'{y:.3f}'\nz = torch.zeros(len(text))", True),
        ("y = x.item()\ntext = f'{y:.3f}'\nz = torch.zeros(len(texts))\nprint(text)", False),
        ("y = x.item()\ncaption = f'{y:.3f}'\nshow(Image(rows, caption))", False),
        ("y = x.item()\nrandom.seed(int(y))\nz = torch.zeros(random.randint(1, 9))", True),
        ("y = x.item()\nrandom.seed(4)\nz = torch.zeros(random.randint(1, 9))", False),
        ("y = x.item()\nz = torch.full((9,), y)", False),
        ("y = x.item()\nz = torch.zeros(int(rows.shape[0]))\nprint(y)", False),
        ("y, n = x.item(), int(rows.size(0))\nprint(round(y, 2))\nz = torch.zeros(k)", False),
    ],
)
def test_which_lines_make_a_size_of_numbers_that_are_not_whole(tmp_path: Path, code: str, makes: bool) -> None:
    assert makes_a_size(*read_in(tmp_path, code), whole=False) is makes


def test_which_errors_come_of_a_read(tmp_path: Path) -> None:
    place = tmp_path / "program.py"
    place.write_text("y = x.item()\nz = y * 2\nassert z < 3\nif y:\n    raise ValueError\nother()\n", "utf-8")
    assert [raised for raised in range(1, 7) if leads_to(str(place), 1, raised)] == [1, 2, 3, 4, 5]


def run(tmp_path: Path, code: str, **names: Any) -> str:
    """The report's first line, of a program with a file of its own."""
    place = tmp_path / "program.py"
    place.write_text(textwrap.dedent(code), "utf-8")
    names |= {"torch": torch, "__name__": "program"}
    with gpumem_magic.measure(device="T4,values=auto") as measured:
        exec(compile(place.read_text("utf-8"), str(place), "exec"), names | {"x": unknown()})
    return str(measured.report.answer)


def test_an_error_that_was_caught_is_said_first(tmp_path: Path) -> None:
    code = """
        def step(limit):
            try:
                if x.max().item() < limit:
                    raise ValueError("too small")
            except ValueError:
                return x + 1
        y = step({limit})
    """
    first = run(tmp_path, code.format(limit=9))
    assert first.startswith(
        "On a real GPU the error that the program caught may not come: this depends on a value that"
    )
    assert "read at `program.py:4`" in first
    assert "error" not in run(tmp_path, code.format(limit=-9))


def test_what_a_library_compares_decides_nothing_but_an_error(tmp_path: Path) -> None:
    # `torch.jit.trace` runs what it traced once more, and compares.
    made = "net, other = torch.nn.Linear(8, 8).cuda(), torch.nn.ReLU()\nx = torch.randn(4, 8, device='cuda')\n"
    assert "does not know" not in run(tmp_path, made + "traced = torch.jit.trace(net, x)\nout = traced(x)")
    # What the program does with a comparison of its own is another matter.
    code = "same = torch.allclose(x, net(x))\nchosen = net if same else other\nout = chosen(x)"
    assert "another object" in run(tmp_path, made + code)


def test_a_module_that_was_on_the_device_is_no_value_that_nobody_knows(tmp_path: Path) -> None:
    code = "net = torch.nn.Linear(512, 512).cuda()\nnet = torch.nn.Sequential(net.{}).cuda()\nout = net(x)"
    made = "x = torch.randn(4, 512, device='cuda')\n"
    for moved in ("cpu()", "to('cpu')"):
        assert "does not know" not in run(tmp_path, made + code.format(moved))
    # Its values are another matter.
    read = "net = torch.nn.Linear(512, 512).cuda().cpu()\nif net.weight.sum() > 0:\n    x = x.repeat(2, 1)"
    assert "does not know" in run(tmp_path, made + read)


def test_an_if_that_gives_a_name_one_of_two_objects_is_an_if(tmp_path: Path) -> None:
    made = "net, other = torch.nn.Linear(8, 8).cuda(), torch.nn.ReLU()\nx = torch.randn(4, 8, device='cuda')\n"
    code = "same = torch.allclose(x, net(x))\nif same:\n    chosen = net\nelse:\n    chosen = other\nout = chosen(x)"
    assert "an `if` may go the other way" in run(tmp_path, made + code)


def test_in_a_cell_no_operator_is_needed_for_that() -> None:
    cell = """%%gpumem
        try:
            1 / int(x.max() - 100)
            assert y.max().item() > 9
        except AssertionError:
            y = None
    """
    with clean_shell() as shell, capture_output():
        shell.run_line_magic("load_ext", "gpumem_magic")
        shell.run_line_magic("gpumem_device", "T4,values=auto")
        shell.user_ns.update(x=unknown(), y=unknown())
        shell.run_cell(textwrap.dedent(cell.replace("%%", " " * 8 + "%%")))
        first = gpumem_magic.last_report().answer
        shell.run_line_magic("unload_ext", "gpumem_magic")
        assert shell.user_ns["y"] is None
    assert first.startswith("On a real GPU the error that the program caught may not come")
    assert "read at line 4" in first


def test_a_size_of_a_stand_in_is_said_first(tmp_path: Path) -> None:
    code = """
        classes = int((x * 7).long().max()) + 1
        head = torch.zeros(9, classes, device="cuda")
        while x.mean().item() > 0.9:
            pass
    """
    first = run(tmp_path, code)
    assert first.startswith(
        "On a real GPU a loop may end earlier or later and a size may be different: this depends on values"
    )
    assert "read at `program.py:4` and at 1 other line;" in first
    first = run(tmp_path, code.partition("while")[0])
    assert first.startswith(
        "On a real GPU a size may be different: this depends on a value that the virtual GPU does not know"
    )


def test_sizes_without_a_largest_one_are_not_called_the_largest() -> None:
    machine = gpu.turn_on("T4,values=stand-in")
    torch.bincount(unknown().long().flatten(), minlength=4)
    assert [note for note in machine.notes() if "largest possible" in note] == []
    assert any("of `bincount` minlength, or 1 (1 time)" in note for note in machine.notes())


def test_what_a_value_decides_is_looked_for_in_the_callers_files(tmp_path: Path) -> None:
    (tmp_path / "loss_of.py").write_text("def loss(x):\n    return x.mean().item()\n", "utf-8")
    library: dict[str, Any] = {"__name__": "loss_of"}
    exec(compile((tmp_path / "loss_of.py").read_text("utf-8"), str(tmp_path / "loss_of.py"), "exec"), library)
    place = tmp_path / "fit.py"
    place.write_text("for _ in range(9):\n    if loss(x) > 5:\n        break\n", "utf-8")
    with gpumem_magic.measure(device="T4") as measured:
        names = {"loss": library["loss"], "x": unknown(), "__name__": "fit"}
        exec(compile(place.read_text("utf-8"), str(place), "exec"), names)
    assert measured.report.answer.startswith("On a real GPU a loop may end earlier or later")
    assert "read at `loss_of.py:2`" in measured.report.answer


# What a loop asks for an end, and no name in its line leads there.
_ENDINGS = {
    "an object that is called": (
        "class Stop:\n    def __call__(self, x):\n        return bool((x > 0.5).all())\nstop = Stop()\n",
        "stop(x)",
    ),
    "one of a table": (
        "known = {}\ndef register(f):\n    known[f.__name__] = f\n    return f\n"
        "@register\ndef small(x):\n    return float(x.abs().max()) < 1e-2\n",
        "known['small'](x)",
    ),
    "its own length": (
        "class Pool:\n    def __init__(self):\n        self.rows = []\n    def __len__(self):\n        return len(self.rows)\n"
        "    def add(self, x):\n        if x.mean() > 0.2:\n            self.rows.append(x)\n"
        "    @property\n    def full(self):\n        return len(self) >= 5\npool = Pool()\n",
        "pool.add(x) or pool.full",
    ),
}


@pytest.mark.parametrize("ending", _ENDINGS)
def test_what_a_loop_ends_by_is_followed_back_through_the_calls(ending: str, tmp_path: Path) -> None:
    made, test = _ENDINGS[ending]
    place = tmp_path / "until.py"
    place.write_text(f"{made}for _ in range(9):\n    x = x * 1.1\n    if {test}:\n        break\n", "utf-8")
    with gpumem_magic.measure(device="T4") as measured:
        exec(compile(place.read_text("utf-8"), str(place), "exec"), {"x": unknown(), "__name__": "until"})
    assert measured.report.answer.startswith("On a real GPU a loop may end earlier or later")


def test_what_a_called_object_reads_for_itself_decides_nothing_of_its_callers(tmp_path: Path) -> None:
    place = tmp_path / "log.py"
    place.write_text(
        "class Log:\n    rows = []\n    def __call__(self, x):\n        self.rows.append(x.mean().item())\n        return 3\n"
        "log = Log()\nfor n in range(9):\n    if log(x) + n > 8:\n        break\n",
        "utf-8",
    )
    with gpumem_magic.measure(device="T4") as measured:
        exec(compile(place.read_text("utf-8"), str(place), "exec"), {"x": unknown(), "__name__": "log"})
    assert "On a real GPU" not in measured.report.answer


def test_a_schedule_that_goes_by_a_loss_is_said_first() -> None:
    with gpumem_magic.measure(device="T4") as measured:
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([unknown()]))
        schedule.step(unknown().sum())
    assert measured.report.answer.startswith("On a real GPU an `if` may go the other way")


@pytest.mark.parametrize("points", [1000, 40000])
def test_what_rests_on_all_pairs_that_a_mask_may_select_is_said_first(points: int) -> None:
    """As neighbours are found: of what most of the memory is made, or what fails, a card may select a few."""
    with contextlib.suppress(torch.OutOfMemoryError), gpumem_magic.measure(device="T4") as measured:
        where = unknown(points, 2)
        first, second = (where @ where.T < 0.1).nonzero(as_tuple=True)
        edges = where[first] - where[second]
        del edges
    assert (measured.report.error is not None) is (points == 40000)
    assert measured.report.answer.startswith(
        "On a real GPU a selection may be far smaller than the most that was taken"
    )


def test_a_size_that_a_mask_decides_is_said_behind_the_answer() -> None:
    with gpumem_magic.measure(device="T4") as measured:
        rows = unknown()
        some = rows[rows[:, 0] > 0.5]
    assert len(some) == 150
    before, doubt, place = measured.report.answer.partition("On a real GPU a selection may have another size: ")
    assert before.startswith("Of 5")
    assert doubt
    assert re.search(r"read at `test_values_headline\.py:\d+`", place)
    with gpumem_magic.measure(device="T4") as measured:
        rows = unknown()
        while len(rows) > 9:
            rows = rows[rows[:, 0] > 0.5][:-30]
    assert measured.report.answer.startswith("On a real GPU a loop may end earlier or later")


def test_memory_that_an_operator_takes_by_its_values_is_said_behind_the_answer() -> None:
    # The exponential of a matrix takes as many products as its norm asks for.
    with gpumem_magic.measure(device="T4") as measured:
        known, made = torch.eye(30, device="cuda"), unknown(30, 30)
        torch.linalg.matrix_exp(known)
    assert "does not know" not in measured.report.answer
    with gpumem_magic.measure(device="T4") as measured:
        print(torch.linalg.matrix_exp(made @ made.mT).trace())
    assert [one.decides for one in measured.report.stand_ins] == ["operator"]
    before, doubt, _ = measured.report.answer.partition(
        "On a real GPU an operator may take other memory for its work: "
    )
    assert before.startswith("Of ")
    assert doubt


def _scaled(steps: int) -> tuple[int, str, list[str]]:
    """Adam's states after some steps with a scale too large for the first three, what the report says, and of which lines."""
    with gpumem_magic.measure() as measured:
        model = torch.nn.Linear(64, 64).cuda()
        adam = torch.optim.Adam(model.parameters())
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
        for _ in range(steps):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.ones(64, 64, device="cuda")).sum()
            scaler.scale(loss).backward()
            scaler.step(adam)
            scaler.update()
            adam.zero_grad()
    return len(adam.state), measured.report.answer, [one.decides for one in measured.report.stand_ins]


def test_steps_that_a_scaler_may_skip_are_said_behind_the_answer() -> None:
    # A weight's gradient is the scale times 64: from 2 ** 10 on it is no number of half precision.
    gpu.turn_on("T4,values=real")
    taken = [_scaled(steps) for steps in (3, 4)]
    assert [(states, "skipped" in answer) for states, answer, _ in taken] == [(0, False), (2, False)]
    gpu.turn_on("T4,values=stand-in")
    states, answer, decides = _scaled(3)
    assert (states, decides) == (2, ["step"])
    before, doubt, place = answer.partition(
        "On a real GPU `GradScaler` may skip a step of the optimizer, whose state then comes later: this depends on a value "
        "that the virtual GPU does not know, read at "
    )
    assert before
    assert doubt
    assert re.match(r"`test_values_headline\.py:\d+`", place)


@pytest.mark.parametrize(("library", "said"), [("wandb.plots", False), ("waves.plots", True)])
def test_what_a_library_writes_down_decides_nothing(tmp_path: Path, library: str, said: bool) -> None:
    code = f"""
        import types

        {library.partition(".")[0]} = types.ModuleType({library!r})
        exec(compile(logging, logged_in, "exec"), vars({library.partition(".")[0]}))
        {library.partition(".")[0]}.add(x)
    """
    place = tmp_path / "plots.py"
    place.write_text(
        "def add(x):\n    n = int(x.sum().item())\n    return [0] * n, range(n), np_slice[:n]\nnp_slice = [1, 2]\n"
    )
    answer = run(tmp_path, code, logging=place.read_text("utf-8"), logged_in=str(place))
    assert ("a size may be different" in answer or "selection" in answer) is said


def test_no_loop_ends_by_the_seed_that_a_loader_draws(tmp_path: Path) -> None:
    code = """
        from torch.utils.data import DataLoader, TensorDataset

        net = torch.nn.Linear(4, 4, device="cuda")
        with torch.device("cuda"):
            loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)
            for number, (batch,) in enumerate(loader):
                net(batch).sum().backward()
                if number % 500 == 499: break
    """
    assert "loop" not in run(tmp_path, code)
    assert "a loop may end" in run(tmp_path, f"{code.rstrip()}\n                if x.sum() > 3: break")


def test_a_wait_that_never_ends_is_said_once(tmp_path: Path) -> None:
    gpu.turn_on("T4,values=auto")
    code = textwrap.dedent("""
        count = 0
        while not done.all():
            count += 1
            if count == 1500:
                break
    """)
    place = tmp_path / "waits.py"
    place.write_text(code, "utf-8")
    names: dict[str, Any] = {"done": unknown() == 3, "__name__": "program"}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        exec(compile(code, str(place), "exec"), names)
    told = [str(one.message) for one in seen if "may never end" in str(one.message)]
    assert len(told) == 1
    assert told[0].startswith("line 3 of waits.py has read values 1,000 times")


@pytest.mark.parametrize("values", ["auto", "real", "stand-in"])
def test_suppressed_boxes_of_torchvision(values: str) -> None:
    if hasattr(torch.ops.torchvision, "nms"):
        pytest.skip("torchvision's own is there")
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", lambda boxes, scores, threshold: scores.argsort(descending=True)[:2], "CPU")
    try:
        gpu.turn_on(f"T4,values={values}")
        boxes, scores = torch.rand(5, 4).to("cuda"), torch.tensor([0.1, 0.5, 0.3, 0.9, 0.2], device="cuda")
        kept = torch.ops.torchvision.nms(boxes, scores, 0.5)
        assert kept.is_cuda
        assert kept.tolist() == [3, 1]
        assert torch.ops.torchvision.nms(unknown(70, 4), unknown(70), 0.5).shape == (
            (2,) if values == "real" else (70,)
        )
    finally:
        library._destroy()


@pytest.mark.parametrize(("values", "told"), [("", 1), (",values=real", 0)])
def test_what_numpy_warns_of_behind_a_stand_in_is_put_down_to_it_once(values: str, told: int) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gpu.turn_on(f"T4{values}")
        zero, one = np.zeros(2), np.ones(2)
        # Nothing was read yet: these are the program's own.
        _ = one / zero
        before = len(said)
        features = (unknown() @ unknown()).cpu().numpy()
        # By so much NumPy divides only where nobody computed.
        _ = (features - features.mean(0)) / features.std(0)
        _ = one / zero
        _ = one + zero
    assert before == 1
    assert ["does not know" in str(one.message) for one in said[before:]].count(True) == told
    assert [one.category for one in said[before:]] == [*[RuntimeWarning, UserWarning] * told, RuntimeWarning]


def _counted(x: torch.Tensor, times: int) -> torch.Tensor:
    out = torch.zeros_like(x)
    for number in range(times):
        if bool(out.sum() < 5):
            out = out + x * (number + 1)
    return out


class _Halves(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 3.0):
            x = x / 2
        return x


class _Adds(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_way_that_torchscript_goes_by_a_stand_in_is_said_first() -> None:
    scripted = torch.jit.script(_counted), torch.jit.script(_Halves()), torch.nn.Sequential(torch.jit.script(_Halves()))
    for one in (lambda x: scripted[0](x, 3), scripted[1], scripted[2]):
        with gpumem_magic.measure(device="T4") as measured:
            one(unknown())
        assert measured.report.answer.startswith("On a real GPU an `if` may go the other way: this depends on a value")
    # What decides nothing, and what the program reads of the result.
    adds = torch.jit.script(_Adds())
    with gpumem_magic.measure(device="T4") as measured:
        print(adds(unknown()).sum().item())
    assert "does not know" not in measured.report.answer


@pytest.mark.parametrize(
    ("code", "sized"),
    [
        ("n = max(x.max(), 20)\ny = torch.zeros(n)\n", True),
        ("most = x.max()\ndef f(most):\n    n = min(20, most + 1)\n    return one_hot(i, n)[..., :20]\n", False),
        ("n = min([x.max(), 20], key=len)\ny = torch.zeros(4)\n", False),
        ("best = max(best, x.max())\nprint(best)\ny = torch.zeros(20)\n", False),
    ],
)
def test_of_two_sizes_the_larger_is_chosen_by_a_comparison(tmp_path: Path, code: str, sized: bool) -> None:
    """What is read is a flag, whether the one is larger; the size is one of the two."""
    file, line = read_in(tmp_path, code)
    assert makes_a_size(file, line, whole=False) is sized


def test_the_larger_of_a_stand_in_and_a_number_is_said_to_make_a_size() -> None:
    with gpumem_magic.measure(device="T4") as measured:
        most = unknown().long().max()
        made = torch.zeros(max(most, 20), 4, device="cuda")
        del made
    assert measured.report.answer.startswith("On a real GPU a size may be different: this depends on a value")


@pytest.mark.parametrize(
    ("solver", "said"), [("scipy.integrate", True), ("scipy.optimize", True), ("framework", False)]
)
def test_a_solver_goes_by_what_the_programs_function_gives(
    monkeypatch: pytest.MonkeyPatch, solver: str, said: bool
) -> None:
    """``solve_ivp(right_side, ...)``: how many steps it takes follows from numbers that nobody knows."""
    library = types.ModuleType(f"{solver}._own")
    exec("def solve(function, start):\n    return [function(start) for _ in range(3)]", library.__dict__)
    monkeypatch.setitem(sys.modules, solver, library)

    def right_side(x: Any) -> Any:
        return (torch.as_tensor(x).cuda() * unknown(4)).cpu().numpy()

    with gpumem_magic.measure(device="T4") as measured:
        ends = library.solve(right_side, np.ones(4, np.float32))
    assert len(ends) == 3
    words = "On a real GPU a loop may end earlier or later: this depends on a value that the virtual GPU does not know"
    assert measured.report.answer.startswith(words) is said


@pytest.mark.parametrize(
    "prints",
    [
        "print(names[scores.argmax()])",
        "name = names[scores.argmax(-1)]\n    print(f'it is {name}')",
        "place = scores.argmax().item()\n    first, second = names[place], names[1]\n    print(first, second)",
        "_, places = scores[None].max(1)\n    print(' '.join(f'{names[places[number]]:5s}' for number in range(1)))",
    ],
)
def test_a_name_that_is_looked_up_by_a_stand_in_and_printed_is_another_on_a_gpu(prints: str, tmp_path: Path) -> None:
    """As in tutorials that end with `classes[prediction.argmax(0)]`."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import torch\n\n\ndef predict(names):\n    scores = torch.rand(3000, device='cuda')[:3].softmax(0)\n    {prints}\n\n\n"
        "predict(['cat', 'dog', 'bird'])\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [warm.executable(), "-m", "gpumem_magic", "run", "--device", "T4,values=stand-in", program.name],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = " ".join(done.stderr.split())
    assert done.returncode == 0, done.stderr
    assert (
        "On a real GPU the program may print something else: this depends on a value that the virtual GPU does not know"
        in said
    )
    assert "a loop may" not in said


def test_what_is_only_looked_up_says_nothing(tmp_path: Path) -> None:
    place, line = read_in(tmp_path, "def f(x, names):\n    name = names[x.argmax()]\n    return 1\n")
    assert looks_up(place, line)
    assert not is_printed(place, line)
    place, line = read_in(tmp_path, "def f(x, names):\n    print(x.max().item())\n    return names[0]\n")
    assert not looks_up(place, line)


# A client of checkpoints as trainers have it: the method that it calls has the name of its own.
SAVES = """
class Client:
    def write(self):
        self.saver().save(self.state, epoch=0, whole=True)

    def gather(self, model, progress):
        self.state = {name: one.cpu() for name, one in model.state_dict().items()}
        self.write()

    def save(self, model, epoch, progress=None):
        model.wait()
        self.gather(model, progress)


class Recipe:
    def keep(self, epoch):
        self.client.save(self.model, epoch, progress=self.done)

    def train(self):
        for epoch in range(self.done, self.epochs):
            self.model(epoch)
            self.model.step(self.done)
"""


@pytest.mark.parametrize(
    ("before", "after", "ends"),
    [
        ("", "", False),
        # The method that takes such a keyword may be the one that is called, and any may where none is given.
        ("progress=None):", "progress=None, whole=False):", True),
        ("progress=None):", "progress=None, *, whole=False):", True),
        ("progress=None):", "progress=None, **others):", True),
        ("    def save(", "    @rank_zero\n    def save(", True),
        (", whole=True)", ")", True),
        (", whole=True)", ", **self.options)", True),
    ],
)
def test_a_call_with_a_keyword_that_a_function_does_not_take_is_of_another(
    tmp_path: Path, before: str, after: str, ends: bool
) -> None:
    # (The model that a client waits for says how often the loop runs.)
    source = SAVES.replace("model.wait()", "self.epochs = model")
    place = tmp_path / "client.py"
    place.write_text(source.replace(before, after) if before else source)
    line = next(number for number, one in enumerate(place.read_text().splitlines(), 1) if ".cpu()" in one)
    assert ends_a_loop(str(place), line) is ends


OFFLOADS = """
class Offload:
    def pack(self, activation):
        number = self.next()
        for old in [one for one in self.stash.keys()]:
            if old <= number - self.most:
                del self.stash[old]
            else:
                break
        kept = empty_like(activation)
        kept.copy_(activation)
        self.tracker[number] = (kept, True)
        self.stash[number] = (activation, 1)
        return number

    def unpack(self, number):
        tensor, moved = self.tracker[number]
        if moved:
            count = use_count(tensor.untyped_storage()._cdata)
            tensor = tensor.cuda()
            self.back[number] = tensor
            if use_count(tensor.untyped_storage()._cdata) == count:
                self.done(number)
        for old in [one for one in self.back.keys()]:
            self.wait(old)
        return tensor
"""


@pytest.mark.parametrize(
    ("before", "after", "goes"),
    [
        ("", "", False),
        ("(kept, True)", "(True, kept)", True),
        ("(kept, True)", "(kept, kept.max() > 3)", True),
        ("tensor, moved = ", "moved, tensor = ", True),
        ("tensor, moved = self.tracker[number]", "pair = self.tracker[number]; tensor, moved = pair", True),
        ("tensor, moved = self.tracker[number]", "moved = self.tracker[number]", True),
        ("(kept, True)", "kept", True),
        # (What is at a key's own first place may be anywhere.)
        ("self.tracker[number] = (kept, True)", "self.tracker[number][0] = (kept, True)", True),
        ("if moved", "if tensor.max() > 3", True),
    ],
)
def test_each_place_of_a_tuple_has_what_was_put_there(tmp_path: Path, before: str, after: str, goes: bool) -> None:
    place = tmp_path / "offload.py"
    place.write_text(OFFLOADS.replace(before, after) if before else OFFLOADS)
    line = next(number for number, one in enumerate(place.read_text().splitlines(), 1) if ".copy_(" in one)
    assert (ends_a_loop(str(place), line) or chooses_a_way(str(place), line)) is goes


@pytest.mark.parametrize(
    ("code", "chooses"),
    [
        ("host.copy_(x.mean())\nif host > 3:\n    work()\n", True),
        ("host[0].copy_(x.mean())\nif host.max() > 3:\n    work()\n", True),
        ("self.host.copy_(x.mean())\nif self.host > 3:\n    work()\n", True),
        ("host.copy_(x.mean())\nif other > 3:\n    work()\n", False),
        ("a, b = 1, x.mean()\nif a:\n    work()\n", False),
        ("a, b = 1, x.mean()\nif b:\n    work()\n", True),
        ("pair = 1, x.mean()\na, b = pair\nif a:\n    work()\n", False),
        ("pair = 1, x.mean()\na, b = pair\nif b:\n    work()\n", True),
        ("pair = 1, x.mean()\npair = pair[::-1]\na, b = pair\nif a:\n    work()\n", True),
        ("pair = 1, x.mean()\nfor one in pair:\n    if one:\n        work()\n", True),
        ("pair = [1, x.mean()]\npair.reverse()\na, b = pair\nif a:\n    work()\n", True),
        ("rows['a@0'] = 1, x.mean()\na, b = rows['a@0']\nif b:\n    work()\n", True),
        ("rows['a@0'] = 1, x.mean()\na, *b = rows['a@0']\nif b:\n    work()\n", True),
        ("x.mean()\n", False),
    ],
)
def test_what_is_copied_into_a_tensor_and_put_into_a_tuple_is_there(tmp_path: Path, code: str, chooses: bool) -> None:
    assert chooses_a_way(*read_in(tmp_path, code)) is chooses


GENES = """
def genes(x):
    def parse(weights):
        found = []
        rows = weights[0:4].copy()
        for edge in sorted(range(4), key=lambda one: -max(rows[one][k] for k in range(len(rows[one]))))[:2]:
            best = None
            for k in range(len(rows[edge])):
                if best is None or rows[edge][k] > rows[edge][best]:
                    best = k
            found.append((best, edge))
        return found

    return Genes(parse(x.data.cpu().numpy()))
"""


@pytest.mark.parametrize(
    ("before", "after", "ends"),
    [
        ("", "", False),
        ("    def parse(weights):", "    def parse(weights):\n        weights = weights[0] / 2", True),
        # Rows of a list may be as long as values say, and so may what nobody sees.
        ("rows = weights[0:4].copy()", "rows = [one[one > 3] for one in weights]", True),
        ("rows = weights[0:4].copy()", "rows = weights[weights > 3].copy()", True),
        ("parse(x.data.cpu().numpy())", "parse(x.data.cpu().tolist())", True),
        ("parse(x.data.cpu().numpy())", "(parse(x.data.cpu().numpy()), parse([[1], [2, 3]]))", True),
        ("parse(x.data.cpu().numpy())", "Later(parse, x.data.cpu().numpy(), parse(x.numpy()))", True),
        ("len(rows[edge])", "int(rows[edge][0])", True),
    ],
)
def test_the_rows_of_an_array_are_as_long_as_one_another(tmp_path: Path, before: str, after: str, ends: bool) -> None:
    file, line = read_in(tmp_path, GENES.replace(before, after) if before else GENES)
    assert ends_a_loop(file, line) is ends


CLIPS = """
def spread(of):
    for place in range(of.shape[-1]):
        yield of[..., place]

def grid(y, box):
    if not all(x.max() <= box):
        y = torch.clamp(y, max=box)
    return spread(torch.floor(y / 3).int())
"""


@pytest.mark.parametrize(
    ("clips", "ends"),
    [
        ("y = torch.clamp(y, max=box)", False),
        ("y = y.detach().clamp(0, 1)", False),
        ("y = F.relu(y.clone())", False),
        ("y = torch.clamp(z, max=box)", True),
        ("y = z.clamp(0, 1)", True),
        ("y = y[:3].clamp(0, 1)", True),
        ("y = torch.unique(y)", True),
        ("y = z", True),
        # As many as there are of what was clipped.
        ("y = torch.clamp(y, max=box)\n    y = y[y > 0]", True),
    ],
)
def test_what_an_if_clips_has_the_length_that_it_had(tmp_path: Path, clips: str, ends: bool) -> None:
    file, line = read_in(tmp_path, CLIPS.replace("y = torch.clamp(y, max=box)", clips))
    assert ends_a_loop(file, line) is ends


def test_an_if_that_clips_does_some_work(tmp_path: Path) -> None:
    assert chooses_a_way(*read_in(tmp_path, CLIPS))


BUFFER = """
class Buffer:
    def __init__(self):
        self.kept = []

    def push(self, images):
        images = x.cpu() + images
        for image in images:
            self.kept.append((image, 3))

    def get(self, many):
        images, numbers = zip(*random.choices(self.kept, k=many))
        numbers = torch.tensor(numbers)
        every = torch.tensor(self.kept)
        return torch.stack(images), numbers

def sample(buffer):
    images, numbers = buffer.get(4)
    return torch.cat([images, images])

def train():
    buffer = Buffer()
    for step in range(3):
        images = sample(buffer)
        buffer.push(images)
"""


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("", "", False),
        # Nobody sees what somebody else's does.
        ("buffer = Buffer()", "buffer = libraries.Buffer()", True),
        ("            self.kept", "            if image.max() > 3: self.kept", True),
    ],
)
def test_what_an_own_object_does_with_what_it_is_told_is_followed(
    tmp_path: Path, before: str, after: str, said: bool
) -> None:
    file, line = read_in(tmp_path, BUFFER.replace(before, after) if before else BUFFER)
    assert selects(file, line) is said


class Genes(NamedTuple):
    found: Any


class NoGenes(torch.nn.Module):
    """Takes sizes."""


# Alive as pandas' tables are, which the tests do not have.
GeneTable = type("GeneTable", (), {"__module__": "pandas.core.frame"})


@pytest.mark.parametrize(
    ("made", "said"), [("Genes", False), ("NoGenes", True), ("NobodysGenes", True), ("GeneTable", False)]
)
def test_a_tuple_with_a_name_and_a_table_take_no_sizes(tmp_path: Path, made: str, said: bool) -> None:
    file, line = read_in(tmp_path, f"best = x.argmax()\nfound = [best]\nmade = {made}(found)\n")
    assert makes_a_size(file, line) is said


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("print(chr(x.argmax()))", True),
        ("print(tokenizer.decode([x.argmax().item()]))", True),
        ("print(chr(max(32, x.argmax())))", True),
        ("print(('no', 'yes')[bool(x.sum() > 0)])", True),
        ("print(max(32, x.argmax()))", False),
        ("print(x.argmax())", False),
        ("chr(x.argmax())", False),
    ],
)
def test_a_letter_that_is_made_of_a_stand_in_and_printed_is_said(tmp_path: Path, line: str, told: bool) -> None:
    class Tokenizer:
        def decode(self, numbers: list[int]) -> str:
            return "the" * len(numbers)

    said = "the program may print something else" in run(tmp_path, line, tokenizer=Tokenizer(), max=max)
    assert said is told


def test_who_runs_a_script_is_no_part_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = "import torch\nx = torch.rand(300, 300, device='cuda')\n"
    place = tmp_path / "program.py"
    said = {}
    for after in (
        "made = torch.linalg.cholesky(x @ x.T)",
        "try:\n    made = torch.linalg.cholesky(x @ x.T)\nexcept RuntimeError: pass",
    ):
        place.write_text(program + after, "utf-8")
        # What catches errors here is not the program's.
        try:
            cli.main(["run", "--device", "T4", str(place)])
        except RuntimeError:
            raise AssertionError from None
        finally:
            chosen_device.off()
        said[after[:3]] = "an error may come that the program catches" in " ".join(capsys.readouterr().err.split())
    assert said == {"mad": False, "try": True}
