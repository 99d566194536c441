"""The magics: flags, what is shown, what stays, and errors as IPython shows them. The session is a fake: nothing is measured."""

from __future__ import annotations

import builtins
import gc
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.utils.capture import capture_output
from shell_fakes import FakeReport, FakeSession, clean_shell, install_session

from gpumem_magic.notebook.help import CARD
from gpumem_magic.notebook.magics import GpuMemMagics
from gpumem_magic.recording.progress import StopRun


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    return install_session(monkeypatch)


@pytest.fixture
def shell(session: FakeSession) -> Iterator[Any]:
    with clean_shell() as shell:
        shell.run_line_magic("load_ext", "gpumem_magic")
        yield shell


class Ran:
    """A cell's result and everything that it printed."""

    def __init__(self, shell: Any, cell: str) -> None:
        with capture_output(display=False) as captured:
            self.result = shell.run_cell(cell, store_history=True)
        self.out, self.err = captured.stdout, captured.stderr
        self.value = self.result.result
        self.error = self.result.error_before_exec or self.result.error_in_exec


# ---- running


def test_the_cells_value_is_the_value_and_the_report_is_shown_once(shell: Any, session: FakeSession) -> None:
    ran = Ran(shell, "%%gpumem\nx = 20\nx + 1\n")
    assert ran.value == 21
    assert ran.out.count("<<report>>") == 1
    assert shell.user_ns["_"] == 21
    assert session.observer.lines() == [2, 3]
    assert session.closed == [(None, None)]
    assert not session.open


def test_what_the_session_is_told(shell: Any, session: FakeSession) -> None:
    Ran(shell, "%%gpumem --device T4,context=400MiB --max-iterations 3 --no-lines --until-repeat\nx = model\n")
    assert session.opened == [("T4,context=400MiB", frozenset({"x", "model"}))]
    assert session.asked == (3, False, True, "\nx = model\n")


@pytest.mark.parametrize(
    ("flags", "shown"), [("", ["report"]), ("-q", []), ("--quiet", []), ("--plot", ["plot"]), ("--table", ["table"])]
)
def test_what_is_shown(shell: Any, flags: str, shown: list[str]) -> None:
    ran = Ran(shell, f"%%gpumem {flags}\nx = 1\n")
    assert [word for word in ("report", "plot", "table") if f"<<{word}>>" in ran.out] == shown


@pytest.mark.parametrize("flags", ["-o kept", "-okept", "--output kept", "--output=kept"])
def test_the_report_is_bound_to_a_name(shell: Any, flags: str) -> None:
    Ran(shell, f"%%gpumem -q {flags}\nx = 1\n")
    assert isinstance(shell.user_ns["kept"], FakeReport)


def test_the_report_is_bound_and_shown_after_an_error_too(shell: Any, session: FakeSession) -> None:
    ran = Ran(shell, "%%gpumem -o kept\nfor i in range(3):\n    1 / (1 - i)\n")
    assert isinstance(ran.error, ZeroDivisionError)
    assert isinstance(shell.user_ns["kept"], FakeReport)
    assert ran.out.index("<<report>>") < ran.out.index("ZeroDivisionError")
    ((error, failed),) = session.closed
    assert error == "ZeroDivisionError('division by zero')"
    assert failed == ("1 / (1 - i)", 3, (2,), (2,))


def test_nothing_but_the_cells_own_names_are_left_in_the_notebook(shell: Any) -> None:
    before = set(shell.user_ns)
    Ran(shell, "%%gpumem\nx = 1\n")
    new = {name for name in set(shell.user_ns) - before if not name.startswith("_i")}
    assert new == {"x"}


@pytest.mark.parametrize("body", ["\n", "# words\n", "\n\n  # words\n"])
def test_an_empty_cell_says_that_nothing_ran(shell: Any, session: FakeSession, body: str) -> None:
    with capture_output() as captured:
        value = shell.run_cell_magic("gpumem", "-o kept", body)
    assert value is None
    assert captured.stdout.strip() == "gpumem: nothing ran: the cell has no statement"
    assert session.opened == []
    assert "kept" not in shell.user_ns
    with capture_output() as captured:
        shell.run_cell_magic("gpumem", "-q", body)
    assert captured.stdout == ""


def test_a_semicolon_silences_the_value_and_not_the_report(shell: Any) -> None:
    ran = Ran(shell, "%%gpumem\nx = 5\nx;\n")
    assert ran.value is None
    assert "Out[" not in ran.out
    assert "<<report>>" in ran.out


def test_called_from_code(shell: Any, session: FakeSession) -> None:
    with capture_output(display=False) as captured:
        assert shell.run_cell_magic("gpumem", "", "y = 3\ny * 2\n") == 6
    assert "<<report>>" in captured.stdout
    with pytest.raises(ZeroDivisionError):
        shell.run_cell_magic("gpumem", "-q", "1 / 0\n")
    assert session.observer.rows[-1][0] == 3


def test_magics_and_commands_inside(shell: Any, session: FakeSession) -> None:
    ran = Ran(shell, "%%gpumem\n!echo from the shell\nx = %time 4\n%time x\n")
    assert "from the shell" in ran.out
    assert ran.value == 4
    assert [row[1] for row in session.observer.rows] == ["!echo from the shell", "x = %time 4", "%time x"]


def test_under_and_over_other_cell_magics(shell: Any, session: FakeSession) -> None:
    ran = Ran(shell, "%%time\n%%gpumem\n6 * 7\n")
    assert ran.value == 42
    assert "Wall time" in ran.out
    assert "<<report>>" in ran.out
    ran = Ran(shell, "%%gpumem\n%%time\n6 * 7\n")
    assert ran.value == 42
    assert session.observer.rows[-1][:2] == (2, "%%time\n6 * 7")
    ran = Ran(shell, "%%capture kept\n%%gpumem\nprint('inside')\n")
    assert "<<report>>" not in ran.out
    assert "inside" in shell.user_ns["kept"].stdout
    ran = Ran(shell, "%%gpumem\n%%bash\necho from bash\n")
    assert ran.error is None
    assert session.closed[-1] == (None, None)


# ---- the line form


def test_a_statement_on_the_line_is_not_touched(shell: Any, session: FakeSession) -> None:
    shell.user_ns.update(kind="int", name="wrong")
    ran = Ran(shell, "%gpumem -q -o kept  {'a b': f'{kind}  $name -o \"x\"'}['a b'] + '--plot'")
    assert ran.value == 'int  $name -o "x"--plot'
    assert session.observer.rows[0][:2] == (1, "{'a b': f'{kind}  $name -o \"x\"'}['a b'] + '--plot'")
    assert isinstance(shell.user_ns["kept"], FakeReport)


def test_two_minus_signs_end_the_flags(shell: Any) -> None:
    assert Ran(shell, "x = 4\n%gpumem -q -- -x").value == -4


def test_the_value_can_be_assigned(shell: Any) -> None:
    Ran(shell, "for i in range(2):\n    y = %gpumem -q i + 1\n")
    assert shell.user_ns["y"] == 2


def test_bare_it_prints_the_state(shell: Any, session: FakeSession) -> None:
    assert Ran(shell, "%gpumem").out.strip() == "state of all devices"
    assert session.opened == []


# ---- bad input


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("%%gpumem --bad\nx = 1\n", "unrecognized arguments: --bad"),
        ("%%gpumem -o 3x\nx = 1\n", "'3x' is not a name for a variable"),
        ("%%gpumem -o class\nx = 1\n", "'class' is not a name for a variable"),
        ("%%gpumem -o\nx = 1\n", "expected one argument"),
        ("%%gpumem --max-iterations 0\nx = 1\n", "'0' is not a whole number of at least 1"),
        ("%%gpumem --max-iterations two\nx = 1\n", "'two' is not a whole number of at least 1"),
        ("%%gpumem --plot --table\nx = 1\n", "argument --table: not allowed with argument --plot"),
        ("%%gpumem x = 2\nx = 1\n", "put the code on the lines below"),
        ("%%gpumem --device nonsense\nx = 1\n", "known are T4, L4"),
        ("%gpumem -q", "the flags need a statement"),
        ("%gpumem_device nonsense", "known are T4, L4"),
        ("%gpumem_smi all", "%gpumem_smi: unrecognized arguments: all"),
        ("%%gpumem --plto\nx = 1\n", "unrecognized arguments: --plto; did you mean --plot?"),
        ("%gpumem_auto onn", "; did you mean on?"),
    ],
)
def test_bad_input_is_one_line_and_runs_nothing(shell: Any, session: FakeSession, cell: str, words: str) -> None:
    ran = Ran(shell, cell)
    assert type(ran.error).__name__ == "UsageError"
    assert words in str(ran.error)
    assert len((ran.out + ran.err).strip().splitlines()) == 1
    assert "x" not in shell.user_ns
    assert session.opened == []
    # The next cell is measured as ever.
    assert Ran(shell, "%%gpumem -q\n5\n").value == 5
    assert session.observer.rows


# ---- our own failures


def test_where_measuring_is_impossible_the_cell_runs_plainly(shell: Any, session: FakeSession) -> None:
    session.open_error = ImportError("no torch here\nat all")
    ran = Ran(shell, "%%gpumem\nx = 2\nx\n")
    assert ran.value == 2
    assert ran.error is None
    assert ran.err.strip().splitlines() == [
        "gpumem: measuring is not possible here (ImportError: no torch here); the cell runs unmeasured"
    ]


def test_a_report_that_fails_is_a_warning_beside_the_value(shell: Any, session: FakeSession) -> None:
    session.close_error = RuntimeError("broken")
    ran = Ran(shell, "%%gpumem\n2\n")
    assert (ran.value, ran.error) == (2, None)
    assert "the report could not be made (RuntimeError: broken)" in ran.err
    ran = Ran(shell, "%%gpumem\n1 / 0\n")
    assert isinstance(ran.error, ZeroDivisionError)
    assert "During handling" not in ran.out
    assert ran.error.__context__ is None


def test_an_observer_that_fails_is_a_warning_beside_the_value(shell: Any, session: FakeSession) -> None:
    session.observer.broken = ValueError("lost count")
    ran = Ran(shell, "%%gpumem\nx = 1\nx\n")
    assert (ran.value, ran.error) == (1, None)
    assert ran.err.count("measuring stopped partway (ValueError: lost count)") == 1


def test_one_inside_another_runs_plainly_with_a_word(shell: Any, session: FakeSession) -> None:
    ran = Ran(shell, "%%gpumem\nx = %gpumem 3\nfor i in range(2):\n    %gpumem -o inner i\nx\n")
    assert ran.value == 3
    assert ran.err.count("nested %gpumem does not measure") == 3
    assert len(session.opened) == len(session.closed) == 1
    assert "inner" not in shell.user_ns
    Ran(shell, "%%gpumem\n1\n")
    assert len(session.opened) == 2


# ---- errors, as they are shown


def _traceback(ran: Ran) -> str:
    return ran.out[ran.out.index("---") :] if "---" in ran.out else ran.out


def test_a_traceback_is_the_users_alone_and_once(shell: Any) -> None:
    loaded = vars(shell)["showtraceback"]
    text = _traceback(Ran(shell, "%%gpumem\ndef f(n):\n    return 1 / n\n\nfor i in range(3):\n    f(1 - i)\n"))
    assert text.count("Traceback (most recent call last)") == 1
    assert "----> 6     f(1 - i)" in text
    assert "----> 3     return 1 / n" in text
    for word in ("run_cell_magic", "gpumem", "skipping hidden", "IPython"):
        assert word not in text.replace("ipython-input", "")
    assert vars(shell)["showtraceback"] is loaded


def test_the_next_error_is_shown_whole(shell: Any) -> None:
    Ran(shell, "%%gpumem\n1 / 0\n")
    text = _traceback(Ran(shell, "x = 1\n{}['missing']\n"))
    assert "----> 2 {}['missing']" in text
    # Inside another cell the error may still be caught, and is not touched.
    ran = Ran(
        shell,
        "try:\n    get_ipython().run_cell_magic('gpumem', '-q', '1 / 0')\nexcept ZeroDivisionError:\n    pass\n{}['m']\n",
    )
    assert isinstance(ran.error, KeyError)
    assert "----> 5 {}['m']" in ran.out


def test_a_chain_of_errors_keeps_its_parts(shell: Any) -> None:
    body = "%%gpumem\ntry:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('why') from e\n"
    text = _traceback(Ran(shell, body))
    assert "----> 3     1 / 0" in text
    assert "----> 5     raise KeyError('why') from e" in text
    assert "direct cause" in text


@pytest.mark.parametrize(
    ("body", "line", "source"),
    [
        ("x = 1\ny = = 2\n", 3, "y = = 2"),
        ("x = (\n", 2, "x = ("),
        ("x = 1\nif x:\nreturn\n", 4, "return"),
        ("return 5\n", 2, "return 5"),
    ],
)
def test_a_syntax_error_is_shown_as_without_us(
    shell: Any, session: FakeSession, body: str, line: int, source: str
) -> None:
    ran = Ran(shell, "%%gpumem\n" + body)
    plain = Ran(shell, "\n# for the line\n"[1:] + body)
    assert isinstance(ran.error, SyntaxError)
    assert ran.error.lineno == line
    assert source in ran.out
    assert ran.out.splitlines()[1:] == plain.out.splitlines()[1:]
    assert session.opened == []


def test_statements_before_one_that_does_not_compile_run_as_without_us(shell: Any) -> None:
    Ran(shell, "%%gpumem\nx = 6\nbreak\n")
    assert shell.user_ns["x"] == 6


def test_an_interrupt_and_an_exit_pass_and_are_reported(shell: Any, session: FakeSession) -> None:
    ran = Ran(shell, "%%gpumem\nx = 1\nraise KeyboardInterrupt\n")
    assert isinstance(ran.error, KeyboardInterrupt)
    assert "<<report>>" in ran.out
    with pytest.warns(UserWarning, match="To exit"):
        ran = Ran(shell, "%%gpumem\nraise SystemExit(3)\n")
    assert isinstance(ran.error, SystemExit)
    assert "<<report>>" in ran.out
    assert not session.open


def test_the_error_is_not_kept(shell: Any) -> None:
    class Big:
        pass

    seen: list[weakref.ref[Any]] = []
    shell.user_ns.update(Big=Big, seen=seen, weakref=weakref)
    ran = Ran(shell, "%%gpumem\ndef f():\n    big = Big()\n    seen.append(weakref.ref(big))\n    1 / 0\nf()\n")
    assert isinstance(ran.error, ZeroDivisionError)
    del ran
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    shell.last_execution_result = None
    shell.InteractiveTB.clear_highlights() if hasattr(shell.InteractiveTB, "clear_highlights") else None
    shell.InteractiveTB.tb = None
    shell.SyntaxTB.tb = None
    if hasattr(shell.history_manager, "exceptions"):
        shell.history_manager.exceptions.clear()
    gc.collect()
    assert seen[0]() is None


# ---- a limit on iterations


def test_a_call_that_a_limit_left_has_its_row_and_ends_the_cell_quietly(
    shell: Any, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.user_ns["StopRun"] = StopRun
    ran = Ran(shell, "%%gpumem\ndef train():\n    raise StopRun\ntrain()\nx = 1\n")
    assert ran.error is None
    assert "x" not in shell.user_ns
    assert [row[:2] for row in session.observer.rows] == [(2, "def train():"), (4, "train()")]
    assert session.closed == [(None, None)]
    assert "<<report>>" in ran.out


# ---- await


def test_top_level_await(shell: Any, session: FakeSession) -> None:
    ran = Ran(
        shell,
        "%%gpumem\nimport asyncio, contextlib\nasync def two():\n    yield 1\n    yield 2\nout = []\n"
        "async for n in two():\n    out.append(n)\nasync with contextlib.AsyncExitStack() as s:\n"
        "    await asyncio.sleep(0)\n[x async for x in two()] + out\n",
    )
    assert ran.error is None
    assert ran.value == [1, 2, 1, 2]
    assert (8, "out.append(n)", (2,), (7,)) in session.observer.rows
    assert (10, "await asyncio.sleep(0)", (), ()) in session.observer.rows
    assert session.closed == [(None, None)]


def test_an_error_behind_await(shell: Any, session: FakeSession) -> None:
    ran = Ran(shell, "%%gpumem\nasync def f():\n    1 / 0\nawait f()\nx = 1\n")
    assert isinstance(ran.error, ZeroDivisionError)
    text = _traceback(ran)
    assert "----> 4 await f()" in text
    assert "run_cell_magic" not in text
    assert session.closed[0][1][1] == 4


def test_await_on_the_line_and_from_code(shell: Any) -> None:
    Ran(shell, "import asyncio\n")
    assert Ran(shell, "%gpumem -q await asyncio.sleep(0, 7)").value == 7
    Ran(shell, "if True:\n    y = %gpumem -q await asyncio.sleep(0, 8)\n")
    assert shell.user_ns["y"] == 8
    assert shell.run_cell_magic("gpumem", "-q", "await asyncio.sleep(0, 9)") == 9


def test_await_with_a_semicolon(shell: Any) -> None:
    ran = Ran(shell, "%%gpumem\nimport asyncio\nawait asyncio.sleep(0, 7);\n")
    assert (ran.value, ran.error) == (None, None)


# ---- devices


def test_choosing_devices(shell: Any, session: FakeSession) -> None:
    assert Ran(shell, "%gpumem_device").out.strip() == "on: None; known are T4, L4"
    assert Ran(shell, "%gpumem_device T4,context=400MiB").out.strip() == "T4,context=400MiB is on"
    assert session.on == "T4,context=400MiB"
    assert Ran(shell, "%gpumem_device off").out.strip() == "off now"
    assert session.on is None
    assert Ran(shell, "%gpumem_smi").out.splitlines() == ["3769MiB / 16160MiB", "2MiB / 16160MiB"]


# ---- the extension


def _state(shell: Any) -> dict[str, Any]:
    """Everything of a shell that an extension could change."""
    return {
        "line": set(shell.magics_manager.magics["line"]),
        "cell": set(shell.magics_manager.magics["cell"]),
        "registry": set(shell.magics_manager.registry),
        "configurables": [type(each) for each in shell.configurables],
        "events": {name: list(callbacks) for name, callbacks in shell.events.callbacks.items()},
        "cleanup": list(shell.input_transformer_manager.cleanup_transforms),
        "lines": list(shell.input_transformer_manager.line_transforms),
        "post": list(shell.input_transformers_post),
        "ast": list(shell.ast_transformers),
        "completions": set(shell.strdispatchers["complete_command"].strs),
        "names": set(shell.user_ns) - {name for name in shell.user_ns if name.startswith("_i")},
        "builtins": set(vars(builtins)),
        "shell": set(vars(shell)),
    }


def _use_everything(shell: Any) -> None:
    """IPython makes some of its parts only when they are first used."""
    for cell in ("1\n", "1 / 0\n", "%reload_ext json\n", "%unload_ext json\n"):
        Ran(shell, cell)


def test_unloading_leaves_the_shell_as_it_was(session: FakeSession) -> None:
    with clean_shell() as shell:
        _use_everything(shell)
        before = _state(shell)
        Ran(shell, "%load_ext gpumem_magic")
        assert _state(shell) != before
        Ran(shell, "%%gpumem\n1 / 0\n")
        Ran(shell, "%gpumem_device T4")
        Ran(shell, "%unload_ext gpumem_magic")
        assert _state(shell) == before
        assert session.on is None
        assert type(Ran(shell, "%gpumem").error).__name__ == "UsageError"


def test_reloading_leaves_one_of_everything(shell: Any) -> None:
    _use_everything(shell)
    before = _state(shell)
    Ran(shell, "%load_ext gpumem_magic")
    Ran(shell, "%reload_ext gpumem_magic")
    after = _state(shell)
    # The one transformer is the new object's.
    assert len(after.pop("post")) == len(before.pop("post"))
    assert after == before
    assert sum(isinstance(each, GpuMemMagics) for each in shell.configurables) == 1
    assert Ran(shell, "%%gpumem\n4\n").value == 4


def test_loading_imports_nothing_heavy() -> None:
    program = (
        "import sys; from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance(); shell.run_line_magic('load_ext', 'gpumem_magic')\n"
        "print(sorted({'torch', 'matplotlib', 'pynvml', 'numpy', 'anywidget'} & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_help_names_the_flags_and_has_an_example(shell: Any) -> None:
    text = shell.find_cell_magic("gpumem").__doc__
    for flag in (
        "--output",
        "--quiet",
        "--no-lines",
        "--plot",
        "--table",
        "--max-iterations",
        "--device",
        "--until-repeat",
    ):
        assert flag in text
    assert "%%gpumem --device T4" in text
    assert "%gpumem_device T4" in shell.find_line_magic("gpumem_device").__doc__


@pytest.mark.parametrize(
    ("line", "there", "missing"),
    [
        ("%%gpumem --d", "--device", "--plot"),
        ("%gpumem --max", "--max-iterations", "--device"),
        ("%%gpumem --device T", "T4", "--device"),
        ("%gpumem_device H1", "H100", "T4"),
        ("%gpumem_device o", "off", "T4"),
    ],
)
def test_completion(shell: Any, line: str, there: str, missing: str) -> None:
    shell.Completer.use_jedi = False
    _, found = shell.complete(None, line, len(line))
    assert there in found
    assert missing not in found


def test_what_is_behind_a_sign_of_comment_is_for_the_reader(shell: Any, session: FakeSession) -> None:
    assert Ran(shell, "%gpumem_auto  # is it on?").error is None
    assert Ran(shell, "%gpumem_smi# now").error is not None
    assert GpuMemMagics.__dict__["gpumem_device"].parser.read("2xT4,context=1MiB  # two, of them").name == [
        "2xT4,context=1MiB"
    ]
    assert GpuMemMagics.__dict__["gpumem_load"].parser.read("run#1.pickle --at end # the last").files == [
        "run#1.pickle"
    ]


def test_a_magic_that_is_not_there_is_told_from_one_that_is(shell: Any) -> None:
    assert Ran(shell, "%gpumem_devcie T4").err.strip().endswith("not found; did you mean %gpumem_device?")
    assert Ran(shell, "%%gpumm\n1\n").err.strip().endswith("not found; did you mean %%gpumem?")
    assert "did you mean" not in Ran(shell, "%quite_another 3").err


def test_the_card_of_help_names_lines_that_their_magics_take(shell: Any) -> None:
    printed = Ran(shell, "%gpumem_help").out
    for question, line, _ in CARD:
        assert re.search(rf"^{re.escape(question)} +{re.escape(line)} ", printed, re.MULTILINE)
        name, _, rest = line.lstrip("%").partition(" ")
        shell.find_line_magic(name).parser.read(rest)
    for _, _, words in CARD:
        for name in re.findall(r"%(gpumem_\w+)", words):
            assert shell.find_line_magic(name) is not None


def test_help_completion_and_errors_of_every_magic_come_from_its_parser(shell: Any) -> None:
    lines = sorted(name for name in shell.magics_manager.magics["line"] if name.startswith("gpumem"))
    assert len(lines) == 12
    for name in lines:
        offered = GpuMemMagics.__dict__[name].parser.complete(SimpleNamespace(line=f"%{name} -", symbol="-"))
        text = shell.find_line_magic(name).__doc__
        assert all(f"{flag} " in text or f"{flag}\n" in text for flag in offered), name
        assert set(re.findall(r"(?<![\w`-])--[a-z][a-z-]+", text.partition("options:")[2])) >= set(offered)
        ran = Ran(shell, f"%{name} --not-a-flag")
        said, _, listed = str(ran.error).partition("; there are ")
        assert said == f"%{name}: unrecognized arguments: --not-a-flag" or "required" in said, name
        assert "required" in said or listed == ", ".join(offered), name
        helped = Ran(shell, f"%{name} --help")
        assert helped.error is None
        assert helped.out == f"{text}\n".replace("::\n\n", "").replace("``", "`")
        _, found = shell.complete(None, f"%{name} -", len(f"%{name} -"))
        assert set(offered) <= set(found)


@pytest.mark.parametrize(
    ("line", "output", "quiet", "rest"),
    [
        ("-q -o kept f(x)  # why", "kept", True, "f(x)  # why"),
        ("--output=kept f(x)", "kept", False, "f(x)"),
        ("-okept -q -- -x", "kept", True, "-x"),
        ("--quiet # nothing", None, True, ""),
        ("--out kept --qui f('-q')", "kept", True, "f('-q')"),
    ],
)
def test_flags_end_where_the_statement_begins(line: str, output: str | None, quiet: bool, rest: str) -> None:
    options, statement = GpuMemMagics.gpumem.parser.read_front(line)
    assert (options.output, options.quiet, statement) == (output, quiet, rest)
