"""A measured cell does what it does without us, also where that is odd."""

from __future__ import annotations

import builtins
import os
import re
import tempfile
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any

import pytest
from IPython.utils.capture import capture_output
from shell_fakes import shell_with_device

import gpumem_magic
from gpumem_magic import own_folders
from gpumem_magic.recording.inside import FunctionRewriter, rewritten
from gpumem_magic.virtual.card import smi


@pytest.fixture
def shell() -> Iterator[Any]:
    with shell_with_device() as made:
        yield made


def run(shell: Any, text: str) -> tuple[Any, Any]:
    with capture_output() as captured:
        result = shell.run_cell(text)
    return result, captured


AWAITS = """async def f():
    return 5

y = 1
from __future__ import annotations
x = await f()
"""


def test_a_statement_that_awaits_in_a_cell_that_does_not_compile_as_a_whole(shell: Any) -> None:
    plain, _ = run(shell, "# plain\n" + AWAITS)
    assert plain.success
    assert shell.user_ns.pop("x") == 5
    measured, _ = run(shell, "%%gpumem -q\n" + AWAITS)
    assert measured.success
    assert shell.user_ns.pop("x") == 5


def test_a_string_at_the_end_that_is_silenced_is_no_docstring(shell: Any) -> None:
    before = shell.user_ns.get("__doc__")
    result, _ = run(shell, "%%gpumem -q\n1\n'x';\n")
    assert result.success
    assert result.result is None
    assert shell.user_ns.get("__doc__") == before


def test_no_name_of_ours_is_among_the_builtins(shell: Any) -> None:
    body = "import builtins\nfor i in range(2):\n    seen = dir(builtins)\n"
    run(shell, f"# plain\n{body}")
    plain = shell.user_ns.pop("seen")
    run(shell, f"%%gpumem -q\n{body}")
    assert shell.user_ns["seen"] == plain


def test_a_cell_that_replaces_a_builtin_has_its_report(shell: Any) -> None:
    body = "import builtins\nkept, builtins.len = len, lambda thing: 7 / 0\n"
    try:
        result, _ = run(shell, "%%gpumem -q -o report\nx = torch.ones(1024, 1024, device='cuda')\n" + body)
        assert result.success
        assert shell.user_ns["report"].peak.allocated == 1 << 22
        assert builtins.len is not shell.user_ns["kept"]
    finally:
        builtins.len = shell.user_ns["kept"]


COUNTS = """import builtins
seen, kept = [], {}
def replaced(name):
    own = kept[name] = getattr(builtins, name)
    def counted(*given, **options):
        seen.append(name)
        return own(*given, **options)
    setattr(builtins, name, counted)
for name in ("len", "min", "max", "sum", "isinstance", "hasattr", "sorted", "iter", "next", "any", "all", "callable"):
    replaced(name)
x = len([1])
for number in range(3):
    y = number + len([2])
if x:
    z = [len("abc")]
for name in kept:
    setattr(builtins, name, kept[name])
"""


def test_what_a_program_puts_in_the_place_of_builtins_sees_the_calls_of_a_plain_cell(shell: Any) -> None:
    before = dict(vars(builtins))
    run(shell, f"# plain\n{COUNTS}")
    plain = shell.user_ns["seen"]
    run(shell, f"%%gpumem -q -o report\n{COUNTS}")
    assert shell.user_ns["seen"] == plain
    assert all(vars(builtins)[name] is own for name, own in before.items() if name != "_")
    assert not any("failed" in note for note in shell.user_ns["report"].notes)


@pytest.mark.parametrize(
    "body",
    [
        "t = " + " + ".join(["1"] * 300) + "\n",
        "n = 150\nif n == 0: m = 0\n" + "".join(f"elif n == {k}: m = {k}\n" for k in range(1, 200)),
    ],
    ids=["a sum of 300 terms", "200 branches"],
)
def test_deep_programs_are_measured(shell: Any, body: str) -> None:
    result, captured = run(shell, "%%gpumem -q -o report\n" + body)
    assert result.success
    assert captured.stderr == ""
    assert shell.user_ns["report"] is not None
    assert shell.user_ns.get("t", 300) == 300
    assert shell.user_ns.get("m", 150) == 150


@pytest.mark.parametrize("line", ["x is 1", r"'\d'"], ids=["of what it compiles", "of what it reads"])
def test_a_warning_of_the_compiler_comes_as_often_as_without_us(shell: Any, line: str) -> None:
    counts = []
    for first in ("# plain", "%%gpumem -q"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(shell, f"{first}\nx = 1\n{line}\n")
        # (An escape that is none is a DeprecationWarning before Python 3.12.)
        ours = [one for one in caught if one.category in (SyntaxWarning, DeprecationWarning)]
        counts.append([(str(one.message), one.lineno) for one in ours])
    assert counts[0]
    assert counts[1] == counts[0]


def test_hooks_of_the_program_have_the_numbers_that_they_have_without_us(shell: Any) -> None:
    body = "h = torch.nn.Linear(1, 1).register_forward_hook(print)\nh.id\n"
    numbers = [run(shell, f"{first}\n{body}")[0].result for first in ("#", "%%gpumem -q", "%%gpumem -q", "#")]
    assert numbers == list(range(numbers[0], numbers[0] + 4))


def test_a_warning_that_was_shown_is_not_shown_again_after_a_report(shell: Any) -> None:
    shell.user_ns["again"] = types.FunctionType(
        compile("warnings.warn('once')", "m.py", "exec"), {"warnings": warnings}
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for first in ("#", "%%gpumem", "%%gpumem --plot", "#"):
            run(shell, f"{first}\nagain()\n")
    assert [str(one.message) for one in caught if str(one.message) == "once"] == ["once"]


@pytest.mark.parametrize(
    "body",
    ["\n\nx = = 1\n", "\nif a:", "a = 1\n  x = 1\n", "x = (\n", "def f():\nreturn 1\n"],
    ids=["blank lines above", "no block", "an indent too many", "no bracket", "no indent"],
)
def test_a_syntax_error_is_where_it_is_without_us(shell: Any, body: str) -> None:
    found = []
    for first in ("#", "%%gpumem -q"):
        result, captured = run(shell, f"{first}\n{body}")
        error = result.error_before_exec or result.error_in_exec
        shown = [line for line in captured.stdout.splitlines() if "File" not in line and "Cell" not in line]
        found.append((type(error), error.lineno, result.error_in_exec is None, shown))
    assert found[1] == found[0]


WAITS = """import asyncio

x = 1
from __future__ import annotations
x = await asyncio.sleep(0, 2)
"""
CALLERS = {
    "the caller": "import sys\nframe = sys._getframe(1)\nframe.f_code.co_name, frame.f_code.co_filename, frame.f_lineno",
    "the caller of what awaits": "import asyncio, sys\n(await asyncio.sleep(0), sys._getframe(1).f_code.co_name)",
    "a warning for the caller": "import warnings\nwarnings.simplefilter('always')\nwarnings.warn('here', stacklevel=2)",
    "the hook for errors": "import sys\nsys.excepthook = print\nsys.excepthook is print",
    "an error": "def f():\n    1 / 0\nf()",
    "a chain of errors": "try:\n    nowhere\nexcept NameError:\n    1 / 0",
    "a program that is none": "exec('x = = 1')",
    "an error of one's own as the program is read": "raise SyntaxError('mine')",
    "two errors": "try:\n    from builtins import ExceptionGroup\nexcept ImportError:\n    ExceptionGroup = Exception\n"
    "raise ExceptionGroup('a', [ValueError(1)])",
    "the end of an iteration": "next(iter([]))",
    "the end of an iteration beside what awaits": "import asyncio\nawait asyncio.sleep(0)\nraise StopIteration(4)",
    "the end of an iteration in what awaits": "import asyncio\nawait asyncio.sleep(next(iter([])))",
    "an error beside what awaits": "import asyncio\nawait asyncio.sleep(0)\n1 / 0",
    "an error in a backward": "torch.ones(2, requires_grad=True).cpu().mul(2).backward()",
    "an error after another cell": "get_ipython().run_cell('1')\n1 / 0",
    "an error after another's": "get_ipython().run_cell('nowhere')\n1 / 0",
    "the way out": "import sys\nsys.exit(3)",
    "the way out of a debugger": "import bdb\nraise bdb.BdbQuit",
}


# IPython shows no line that is so far above the error: the first one is another without us.
BETWEEN = "pass\n"


@pytest.mark.parametrize("mode", ["Context", "Plain", "Verbose", "Minimal"])
@pytest.mark.parametrize("body", CALLERS.values(), ids=CALLERS)
def test_what_calls_a_cell_and_its_traceback_are_what_they_are_without_us(shell: Any, mode: str, body: str) -> None:
    shell.run_line_magic("xmode", mode)
    lines = []
    shell.set_custom_exc((KeyError,), lambda *_, **__: None)
    try:
        for first in ("#", "%%gpumem -q"):
            with warnings.catch_warnings():
                result, captured = run(shell, f"{first}\n{6 * BETWEEN}{body}\n")
            error = result.error_in_exec
            entries = [] if error is None else [*_entries(error.__traceback__)]
            text = re.sub(r"0x[0-9a-f]+|ipython-input-[0-9a-f-]+", "", captured.stdout + captured.stderr)
            lines.append((text, type(error), repr(error), result.success, repr(result.result), entries))
    finally:
        shell.set_custom_exc((), lambda *_, **__: None)
        shell.run_line_magic("xmode", "Context")
    assert lines[1] == lines[0]
    assert lines[0][3] == (lines[0][1] is type(None))


def test_a_cell_that_waits_where_nothing_runs_fails_as_without_us(shell: Any) -> None:
    """IPython leaves its own half run, and may show that whenever Python collects it: the text is left out."""
    found = []
    for first in ("#", "%%gpumem -q"):
        error = run(shell, f"{first}\n{WAITS}")[0].error_in_exec
        found.append((type(error), str(error), [*_entries(error.__traceback__)]))
    assert "needs a real async loop" in found[0][1]
    assert found[1] == found[0]


def test_an_error_with_a_display_of_its_own_has_the_traceback_that_it_has_without_us(shell: Any) -> None:
    seen: list[list[tuple[str, int]]] = []
    shell.set_custom_exc((KeyError,), lambda shell, kind, error, trace, tb_offset=None: seen.append([*_entries(trace)]))
    try:
        for first in ("#", "%%gpumem -q"):
            run(shell, f"{first}\n{{}}['key']\n")
    finally:
        shell.set_custom_exc((), lambda *_, **__: None)
    assert len(seen) == 2
    assert next(name for name, _ in seen[0]) == "run_code"
    assert seen[1] == seen[0]


def _entries(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_name, trace.tb_lineno
        trace = trace.tb_next


# ---- --into


def function_of(value: Any) -> FunctionType:
    assert isinstance(value, FunctionType)
    return value


def recursive(n: int) -> int:
    if n == 0:
        return 0

    def inner() -> str:
        return recursive.__name__

    assert inner() == "recursive"
    return 1 + recursive(n - 1)


def failing() -> None:
    for number in range(3):
        if number == 2:
            raise ValueError(number)


def test_a_function_that_mentions_its_own_name_is_looked_into() -> None:
    before = recursive.__code__
    code, _ = rewritten(function_of(recursive), lambda label: lambda failed: None)
    assert code.co_freevars == before.co_freevars
    assert code.co_firstlineno == before.co_firstlineno
    if hasattr(code, "co_qualname"):
        names = [one.co_qualname for one in (*code.co_consts, code) if hasattr(one, "co_qualname")]
        assert sorted(names) == ["recursive", "recursive.<locals>.inner"]
    inside = FunctionRewriter([function_of(recursive)], lambda label: lambda failed: None)
    inside.install()
    try:
        assert recursive(20) == 20
    finally:
        inside.remove()
    assert recursive.__code__ is before
    assert inside.notes() == ["--into recursive: of 20 runs of a statement the first 12 are shown"]


def test_the_lines_of_an_error_inside_are_the_functions() -> None:
    def lines() -> list[int]:
        with pytest.raises(ValueError, match="2") as caught:
            failing()
        return [entry.lineno + 1 for entry in caught.traceback]

    inside = FunctionRewriter([function_of(failing)], lambda label: lambda failed: None)
    plain = lines()
    inside.install()
    try:
        assert lines() == plain
    finally:
        inside.remove()


def test_what_fails_of_ours_inside_is_said() -> None:
    def begins(label: str) -> Any:
        raise LookupError("no recording")

    inside = FunctionRewriter([function_of(recursive)], begins)
    inside.install()
    try:
        assert recursive(2) == 2
    finally:
        inside.remove()
    assert inside.notes() == ["--into recursive stopped partway (LookupError: no recording)"]


# ---- what a hard exit leaves


@pytest.mark.skipif(os.name == "nt", reason="the locks are POSIX's")
def test_the_next_start_removes_what_dead_processes_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    old = time.time() - 1000
    for name in ("gpumem-magic-dead", "gpumem-magic-alive", "gpumem-magic-young", "others"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state").touch()
        if not name.endswith("young"):
            os.utime(tmp_path / name, (old, old))
    held = os.open(tmp_path / "gpumem-magic-alive" / "state", os.O_WRONLY)
    try:
        assert own_folders.lock(held)
        made = Path(smi._private_directory())
    finally:
        os.close(held)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"gpumem-magic-alive", "gpumem-magic-young", "others", made.name}


def test_the_programs_text_is_read_again_in_one_way() -> None:
    """`looks.parsing` says nothing; what else uses `ast.parse` reads the program the first time, in a trial's own process, or a
    text of ours or PyTorch's."""
    package = Path(gpumem_magic.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "ast.parse(" in path.read_text("utf-8")
    }
    assert found - {"looks/parsing.py"} <= {
        "recording/script.py",
        "recording/inside.py",
        "trials/loops.py",
        "trials/programs.py",
        "virtual/compiler/tuning.py",
        "virtual/engine/older_functions.py",
    }
