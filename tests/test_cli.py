"""The command: a script runs as under `python`, and everything of ours goes to standard error."""

from __future__ import annotations

import builtins
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import warm
from shell_fakes import FakeRecording, FakeSession, install_session

from gpumem_magic import cli
from gpumem_magic.session import device as chosen_device

_warm = pytest.fixture(autouse=True)(warm.in_place_of_python)

Write = Callable[..., Path]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    return install_session(monkeypatch)


@pytest.fixture
def script(tmp_path: Path) -> Write:
    def write(text: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_rows_of_a_script(session: FakeSession, script: Write, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        '"""What it does."""\nfrom __future__ import annotations\nimport sys\n\n'
        "def main(n: nothing):\n    x = n\n    return x\n\n"
        'for i in range(2):\n    y = i\nif __name__ == "__main__":\n    main(3)\n    print(__doc__)\n'
    )
    assert cli.main(["run", str(script(text)), "--device", "T4"]) == 0
    assert [row[:3] for row in session.observer.rows] == [
        (3, "import sys", ()),
        (5, "def main(n: nothing):", ()),
        (10, "y = i", (1,)),
        (10, "y = i", (2,)),
        (6, "x = n", ()),
        (7, "return x", ()),
        (13, "print(__doc__)", ()),
    ]
    ((device, names),) = session.opened
    assert device == "T4"
    assert {"main", "y", "i", "sys"} <= names
    captured = capsys.readouterr()
    assert captured.out == "What it does.\n"
    assert captured.err.strip() == "<<report>>"
    assert session.asked is not None
    assert session.asked[3] == text


def test_a_script_sees_what_python_would_show_it(
    session: FakeSession, script: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import os, sys, pickle, helper\nclass A: pass\n"
        "print(__name__, __file__ == sys.argv[0], sys.argv[1:], os.path.realpath(sys.path[0]), __spec__, __package__)\n"
        "print(sys.modules['__main__'].A is A, type(pickle.loads(pickle.dumps(A()))) is A, type(__loader__).__name__)\n"
        "print(helper.x, sorted(k for k in globals() if 'gpumem' in k))\n"
    )
    path = script(program)
    script("x = 5\n", "helper.py")
    before = list(sys.argv), list(sys.path), sys.modules["__main__"], set(vars(builtins))
    assert cli.main(["run", str(path), "--", "--device", "-x", "--", "y z"]) == 0
    assert (list(sys.argv), list(sys.path), sys.modules["__main__"], set(vars(builtins))) == before
    ours = capsys.readouterr().out
    sys.modules.pop("helper", None)
    plain = subprocess.run(
        [sys.executable, str(path), "--device", "-x", "--", "y z"], capture_output=True, text=True, check=True
    )
    assert ours == plain.stdout


@pytest.mark.parametrize(
    ("text", "status", "word"),
    [
        ("import sys\nsys.exit()\n", 0, ""),
        ("import sys\nsys.exit(7)\n", 7, ""),
        ("import sys\nsys.exit('a word')\n", 1, "a word"),
        ("raise SystemExit(True)\n", 1, ""),
        ("raise KeyboardInterrupt\n", 130, "KeyboardInterrupt"),
        # SIGTERM, as `timeout` and job schedulers send it: a loop that catches everything hears it, too, as it hears Ctrl-C.
        ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nwhile True: pass\n", 143, "<<report>>"),
        (
            "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGTERM)\n    while True: pass\n"
            "except BaseException: pass\n",
            143,
            "<<report>>",
        ),
        (
            "import os, signal\nbefore = signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            "try:\n    os.kill(os.getpid(), signal.SIGTERM)\n    while True: pass\n"
            "finally: signal.signal(signal.SIGINT, before)\n",
            143,
            "<<report>>",
        ),
        # It comes where Python lets nothing out: a destructor, a weak reference's callback, a callback from C.
        *[
            (f"import os, signal\n{way}\nwhile True: pass\n", 143, "<<report>>")
            for way in (
                "class A:\n    def __del__(self): os.kill(os.getpid(), signal.SIGTERM); [0 for _ in range(99)]\na = A(); del a",
                "import weakref\nclass A: pass\na = A()\n"
                "w = weakref.ref(a, lambda _: os.kill(os.getpid(), signal.SIGTERM)); del a",
                "import ctypes\nctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGTERM))()",
            )
        ],
        (
            "import os, signal\nclass A:\n    def __del__(self): os.kill(os.getpid(), signal.SIGINT); [0 for _ in range(99)]\n"
            "a = A(); del a\nwhile True: pass\n",
            130,
            "KeyboardInterrupt",
        ),
        # What a destructor fails with otherwise is ignored, as ever.
        ("class A:\n    def __del__(self): 1 / 0\na = A(); del a\nprint('on')\n", 0, "ZeroDivisionError"),
        # The program's own handler, and what it does.
        (
            "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
            "try:\n    os.kill(os.getpid(), signal.SIGTERM)\n    while True: pass\n"
            "finally: signal.signal(signal.SIGTERM, signal.SIG_DFL)\n",
            5,
            "",
        ),
        # A process that was forked ends as it always does.
        (
            "import os, signal, time\nchild = os.fork()\nif not child:\n    time.sleep(20)\n    os._exit(0)\n"
            "os.kill(child, signal.SIGTERM)\n"
            "raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]) + 20)\n",
            20 - signal.SIGTERM,
            "",
        ),
        ("{}['missing']\n", 1, "KeyError: 'missing'"),
    ],
)
def test_exit_status(
    session: FakeSession,
    script: Write,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    status: int,
    word: str,
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    assert cli.main(["run", str(script(text))]) == status
    assert sys.unraisablehook is sys.__unraisablehook__
    err = capsys.readouterr().err
    assert word in err
    assert err.count("<<report>>") == 1
    assert not session.open


@pytest.mark.parametrize(
    ("own", "status"), [("", 0), ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))", 0), ("sys.exit(3)", 3)]
)
def test_what_is_terminated_while_its_report_is_made_has_one(
    session: FakeSession,
    script: Write,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    own: str,
    status: int,
) -> None:
    """The program has ended by itself, also where it leaves a handler of its own behind. The status is its own."""
    close, before = FakeRecording.close, signal.getsignal(signal.SIGTERM)

    def terminated(self: FakeRecording, *arguments: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return close(self, *arguments, **named)

    monkeypatch.setattr(FakeRecording, "close", terminated)
    try:
        assert cli.main(["run", str(script(f"import signal, sys\n{own}\n"))]) == status
        assert (signal.getsignal(signal.SIGTERM) is before) == ("lambda" not in own)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err.count("<<report>>") == 1


def test_a_report_that_takes_too_long_after_sigterm_is_left(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, time\nfrom gpumem_magic.commands import ending\nending._TO_FINISH = 0.1\n"
        "with ending.ending_as_after_ctrl_c(once=True) as one:\n    one.program_ended()\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(100)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (143, "gpumem: terminated before the report was complete\n")


def test_an_error_is_shown_once_as_python_shows_it(
    session: FakeSession, script: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("def f(n):\n    return 1 / n\n\nfor i in range(2):\n    f(1 - i)\n")
    assert cli.main(["run", str(path)]) == 1
    ours = capsys.readouterr().err
    plain = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert ours == plain.stderr + "<<report>>\n"
    ((error, failed),) = session.closed
    assert error == "ZeroDivisionError('division by zero')"
    assert (failed[0], failed[2:]) == ("f(1 - i)", ((2,), (4,)))


def test_sys_exit_is_no_failure_of_the_script(session: FakeSession, script: Write) -> None:
    cli.main(["run", str(script("raise SystemExit(3)\n"))])
    assert session.closed == [(None, None)]


def test_a_script_that_is_no_python(session: FakeSession, script: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = script("x = 1\ny = = 2\n")
    assert cli.main(["run", str(path)]) == 1
    plain = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert capsys.readouterr().err == plain.stderr
    assert session.opened == []


def test_an_excepthook_of_the_script_is_used(
    session: FakeSession, script: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    text = "import sys\nsys.excepthook = lambda kind, error, tb: print('mine', kind.__name__, tb.tb_lineno)\n1 / 0\n"
    assert cli.main(["run", str(script(text))]) == 1
    assert capsys.readouterr().out == "mine ZeroDivisionError 3\n"


def test_encodings(session: FakeSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "latin.py"
    path.write_bytes("# coding: latin-1\nx = 'é'; y = 'ü'\nprint(x + y)\n".encode("latin-1"))
    assert cli.main(["run", str(path)]) == 0
    assert capsys.readouterr().out == "éü\n"
    assert [row[1] for row in session.observer.rows] == ["x = 'é'", "y = 'ü'", "print(x + y)"]


# ---- the JSON file


def test_json(session: FakeSession, script: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    path = script("import os\nos.chdir('elsewhere')\n")
    assert cli.main(["run", str(path), "--json", "out.json"]) == 0
    assert (tmp_path / "out.json").read_text() == "{}"


@pytest.mark.parametrize("target", ["missing/out.json", "."])
def test_a_json_file_that_cannot_be_written_is_refused_before_the_script_runs(
    session: FakeSession, script: Write, tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", str(script("print('ran')\n")), "--json", str(tmp_path / target)])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert "--json" in captured.err
    assert captured.out == ""
    assert session.opened == []


# ---- bad input and our own failures


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["run"], "SCRIPT"),
        (["run", "no_such_file.py"], "no_such_file.py"),
        (["run", os.curdir], "there is no file"),
        (["devices", "--", "x"], "no arguments"),
    ],
)
def test_bad_input(session: FakeSession, capsys: pytest.CaptureFixture[str], argv: list[str], word: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert word in capsys.readouterr().err


def test_an_unknown_device_is_refused_before_the_script_runs(
    session: FakeSession, script: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", str(script("print('ran')\n")), "--device", "nonsense"])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert "known are T4, L4" in captured.err
    assert captured.out == ""


def test_where_measuring_fails_the_script_runs_plainly(
    session: FakeSession, script: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(script("import sys\nprint('ran')\nsys.exit(4)\n"))
    session.open_error = RuntimeError("broken")
    assert cli.main(["run", path]) == 4
    assert "measuring is not possible here (RuntimeError: broken)" in capsys.readouterr().err
    session.open_error, session.close_error = None, RuntimeError("broken")
    assert cli.main(["run", path]) == 4
    assert "the report could not be made (RuntimeError: broken)" in capsys.readouterr().err
    session.close_error, session.observer.broken = None, RuntimeError("broken")
    assert cli.main(["run", path]) == 4
    captured = capsys.readouterr()
    assert captured.out == "ran\n"
    assert "measuring stopped partway (RuntimeError: broken)" in captured.err


def test_functions_that_ran_out_of_memory_are_told_by_their_variables(script: Write) -> None:
    path = script(
        "import torch\n"
        "def step(model, optimizer, log):\n"
        "    out = model(torch.randn(1024, 512, device='cuda'))\n"
        "    out.mean().backward()\n"
        "    optimizer.step()\n"
        "    log['outs'].append(out)\n"
        "def main():\n"
        "    model = torch.nn.Linear(512, 8192).cuda()\n"
        "    optimizer = torch.optim.Adam(model.parameters())\n"
        "    log = {'outs': []}\n"
        "    for _ in range(100):\n"
        "        step(model, optimizer, log)\n"
        "main()\n"
    )
    command = [sys.executable, "-m", "gpumem_magic", "run", str(path), "--device", "virtual:1GiB"]
    done = subprocess.run(command, capture_output=True, text=True)
    said = " ".join(done.stdout.split()) + " ".join(done.stderr.split())
    assert done.returncode == 1, said
    assert "held by `log['outs']` of main(), put there at line 6 (`log['outs'].append(out)`)" in said
    (held,) = said.split("Held when memory ran out")[1:]
    for variable in ("`log` of main()", "`optimizer` of main() 32", "`model` of main() 32"):
        assert variable in held, held
    assert "traceback pins" not in said
    assert "unknown" not in said.lower(), said


def test_devices_prints_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    from gpumem_magic.virtual.card.catalog import CATALOG

    assert cli.main(["devices"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in CATALOG)


def test_a_list_that_nobody_reads_to_its_end_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    unread, written = os.pipe()
    os.close(unread)
    with os.fdopen(written, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        assert cli.main(["devices"]) == 1


def test_a_real_measurement_in_a_process_of_its_own(script: Write, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from gpumem_magic import Report

    text = (
        "import sys, torch\nmodel = torch.nn.Linear(1024, 1024).cuda()\n"
        "out = model(torch.randn(8, 1024, device='cuda'))\nout.sum().backward()\nprint('done')\nsys.exit(5)\n"
    )
    command = [
        sys.executable,
        "-m",
        "gpumem_magic.cli",
        "run",
        str(script(text)),
        "--device",
        "T4",
        "--json",
        "out.json",
    ]
    folder = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": folder}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert (ran.returncode, ran.stdout) == (5, "done\n"), ran.stderr
    report: Any = Report.load(tmp_path / "out.json")
    assert [row.line for row in report.checkpoints if row.kind == "statement"] == [1, 2, 3, 4, 5]
    assert report.peak.categories["parameters"] == 4 * (1024 * 1024 + 1024)
    assert str(report).splitlines()[0] in ran.stderr


def test_a_module_runs_as_under_python_m(
    session: FakeSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    program = "import os, sys\nfrom . import __name__ as above\nprint(__name__, __package__, __spec__.name)\n"
    program += "print(above, sys.argv[1:])\n"
    program += "print(os.path.realpath(sys.path[0]), os.path.basename(__file__))\n"
    (package / "__main__.py").write_text(program, encoding="utf-8")
    (package / "part.py").write_text(program, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("a_package", "a_package.part"):
        assert cli.main(["run", "-m", name, "--", "--lr", "3"]) == 0
        told = capsys.readouterr().out
        python = subprocess.run([sys.executable, "-m", name, "--lr", "3"], capture_output=True, text=True, check=True)
        assert told == python.stdout
    monkeypatch.delitem(sys.modules, "a_package")


@pytest.mark.parametrize("name", ["no_such_module", "json.tool.nothing", "math"])
def test_a_module_that_cannot_be_run(session: FakeSession, capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["run", "-m", name])
    assert left.value.code == 2
    assert "gpumem run: error: " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["x", "", "1@", "[1, 2]@train.py:3"])
def test_stand_ins_of_the_command(
    session: FakeSession, script: Write, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    argv = ["run", str(script("print(1)")), "--stand-in", text]
    if text in ("x", ""):
        with pytest.raises(SystemExit) as left:
            cli.main(argv)
        assert left.value.code == 2
        assert "--stand-in takes a number" in capsys.readouterr().err
    else:
        assert cli.main(argv) == 0


def test_limits_on_iterations_are_handed_on(session: FakeSession, script: Write) -> None:
    assert cli.main(["run", str(script("print(1)")), "--max-iterations", "3", "--until-repeat"]) == 0
    assert session.asked is not None
    assert session.asked[:3] == (3, True, True)


def run_on_t4(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpumem_magic.cli", "run", "--device", "T4", *options, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_a_variable_held_for_a_turn_is_called_by_it(script: Write, capsys: pytest.CaptureFixture[str]) -> None:
    train = (
        "import copy, torch\n"
        "model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(4)]).cuda()\n"
        "for _ in range(3):\n"
        "    model(torch.zeros(64, 2048).cuda()).sum().backward()\n"
        "    model.zero_grad()\n"
        "    best = copy.deepcopy(model.state_dict())\n"
    )
    said = said_on_t4(capsys, script(train)).replace("\n  ", " ")
    assert "64.0 MiB are parameters of `best`" in said
    assert "made in an earlier iteration (line 6, `best = copy.deepcopy(model.state_dict())`)" in said


def ran_on(device: str, capture: pytest.CaptureFixture[str], path: Path, *options: str, status: int = 0) -> Any:
    """What is said where the command runs in this process. capture: `capfd`, for what other processes say, too."""
    try:
        assert cli.main(["run", "--device", device, *options, str(path)]) == status
    finally:
        chosen_device.off()
    return capture.readouterr()


def said_on_t4(capture: pytest.CaptureFixture[str], path: Path, *options: str, status: int = 0) -> str:
    return ran_on("T4", capture, path, *options, status=status).err


def test_a_script_that_leaves_before_it_touches_a_device_has_the_last_word(
    script: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = script("import argparse\nargparse.ArgumentParser(prog='it').parse_args(['--wrong'])\n")
    assert said_on_t4(capsys, wrong, status=2).splitlines()[-1] == "it: error: unrecognized arguments: --wrong"
    missing = script("import torch\nopen('no such file')\n")
    assert said_on_t4(capsys, missing, status=1).splitlines()[-1].startswith("FileNotFoundError")


def test_a_script_is_told_of_the_commands_flags(script: Write, capsys: pytest.CaptureFixture[str]) -> None:
    train = (
        "import torch\nm = torch.nn.Linear(9, 9).cuda()\no = torch.optim.SGD(m.parameters(), 0.1)\n"
        "for i in range(12):\n    m(torch.ones(2, 9, device='cuda')).sum().backward()\n    o.step()\n"
        "    o.zero_grad()\nprint(i)\n"
    )
    said = said_on_t4(capsys, script(train))
    assert "%gpumem" not in said
    assert "gpumem run --until-repeat" in said.replace("\n  ", " ")
    assert "Stopped as asked, after 3 training iterations." in said_on_t4(
        capsys, script(train), "--max-iterations", "3"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="forks its workers")
def test_a_limit_on_iterations_ends_no_worker_that_prepares_data_with_modules(script: Write) -> None:
    """As torchvision's transforms are: the workers of the second loop are forked when the limit is reached."""
    path = script("import trainer\ntrainer.fit()\n")
    path.with_name("trainer.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "class Pictures(torch.utils.data.Dataset):\n    resize = torch.nn.Upsample(4)\n    def __len__(self): return 2\n"
        "    def __getitem__(self, place): return self.resize(torch.ones(1, 1, 2, 2)).flatten()\n"
        "def fit():\n    m = torch.nn.Linear(16, 9).cuda()\n    o = torch.optim.SGD(m.parameters(), 0.1)\n"
        "    for _ in range(2):\n        for x in DataLoader(Pictures(), num_workers=1, multiprocessing_context='fork'):\n"
        "            m(x.cuda()).sum().backward()\n            o.step()\n"
    )
    ran = run_on_t4(path, "--max-iterations", "2")
    assert ran.returncode == 0, ran.stderr
    assert "Stopped as asked, after 2 training iterations." in ran.stderr


def test_ranks_that_a_script_starts_have_the_device_and_are_one_report(
    script: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import torch\nimport torch.multiprocessing as mp\n"
        "def work(rank, n):\n    x = torch.zeros(2**20, device=rank)\n    print('child', x.device, flush=True)\n"
        "if __name__ == '__main__':\n    mp.spawn(work, args=(2,), nprocs=2)\n"
    )
    ran = ran_on("2xT4", capfd, script(program))
    assert sorted(ran.out.splitlines()) == ["child cuda:0", "child cuda:1"]
    assert ran.err.startswith("Both ranks peak at 4.0 MiB")
    assert "Nothing was put on a device" not in ran.err


def test_where_the_device_is_real_processes_start_as_ever() -> None:
    from multiprocessing import spawn

    from gpumem_magic.commands.children import measured_children

    plain = spawn.get_command_line(tracker_fd=1, pipe_handle=2)
    with measured_children(None) as started:
        assert spawn.get_command_line(tracker_fd=1, pipe_handle=2) == plain
    with measured_children("T4") as started:
        changed = spawn.get_command_line(tracker_fd=1, pipe_handle=2)
    assert changed[0] == plain[0]
    assert "main('T4', tracker_fd=1, pipe_handle=2)" in str(changed)
    assert started == ["T4"]
    assert spawn.get_command_line(tracker_fd=1, pipe_handle=2) == plain


def test_an_interrupt_while_the_report_is_made_keeps_the_scripts_last_word(
    session: FakeSession, script: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    session.close_error = KeyboardInterrupt()
    assert cli.main(["run", str(script("import sys\nprint('ran')\nsys.exit(4)\n"))]) == 4
    captured = capsys.readouterr()
    assert captured.out == "ran\n"
    assert captured.err == "gpumem: interrupted while the report was made: there is none\n"
    assert cli.main(["run", str(script("1 / 0\n"))]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_an_interrupt_while_the_report_is_written_keeps_the_scripts_status(
    session: FakeSession, script: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpumem_magic.views import text

    def interrupted(*args: Any, **kwargs: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(text, "render", interrupted)
    assert cli.main(["run", str(script("import sys\nsys.exit(5)\n"))]) == 5
    assert capsys.readouterr().err == "gpumem: interrupted before the report was complete\n"


def test_a_launcher_of_processes_is_told_how_to_start_the_command(
    session: FakeSession, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "--device", "2xT4", "-m", "torch.distributed.run", "--", "--nproc-per-node", "2", "train.py"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "`torchrun ARGUMENTS -m gpumem_magic.cli run --device 2xT4 SCRIPT -- ARGUMENTS`" in said
    assert not session.opened


def test_processes_of_one_job_report_by_their_ranks(
    script: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    path = script("import torch\nx = torch.zeros(2**20, device='cuda')\n")
    ended = run_on_t4(path, "--json", str(tmp_path / "r.json"))
    assert ended.returncode == 0
    assert ended.stderr.startswith("gpumem: rank 1: Of 4.0 MiB at the peak, ")
    assert (tmp_path / "r.rank1.json").exists()
    assert not (tmp_path / "r.json").exists()


def test_a_report_of_a_script_names_nothing_that_is_only_in_a_notebook(
    script: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    said = said_on_t4(capsys, script("import torch\nx = torch.zeros(2**20, device='cuda')\n"))
    assert "report." not in said
    assert "More:" not in said, "it has all that there is"
    loop = "import torch\nfor _ in range(200):\n    x = torch.zeros(2**20, device='cuda')\n"
    assert "More: `--html PATH` writes a page with" in said_on_t4(capsys, script(loop)).replace("\n  ", " ")


@pytest.mark.parametrize("device", ["T4", "T4,values=real"])
def test_tensors_that_go_to_another_process_stay_the_senders_memory(
    script: Write, device: str, capfd: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import torch\nimport torch.multiprocessing as mp\n"
        "def work(model, part, whole):\n"
        "    took = torch.cuda.memory_allocated()\n"
        "    shared = part.untyped_storage()._cdata == whole.untyped_storage()._cdata\n"
        "    print(took, shared, part.tolist(), type(model).__name__, next(model.parameters()).is_leaf, flush=True)\n"
        "    whole.add_(1)\n"
        "if __name__ == '__main__':\n"
        "    whole = torch.arange(2**18, device='cuda')\n    model = torch.nn.Linear(9, 9).cuda().share_memory()\n"
        "    process = mp.get_context('spawn').Process(target=work, args=(model, whole[3:5], whole))\n"
        "    process.start(); process.join()\n    print(process.exitcode, whole[3:5].tolist())\n"
    )
    said = ran_on(device, capfd, script(program)).out.splitlines()
    if "real" in device:
        assert said == ["0 True [3, 4] Linear True", "0 [4, 5]"]
    else:
        assert said[0].startswith("0 True [")
        assert said[1].startswith("0 [")


def test_a_page_of_several_processes_is_written(script: Write, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    cli.main(["run", "--nproc", "2", "--html", str(page), str(script("pass\n"))])
    assert "Rank 0 of 2" in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["shwo", "f"], "show"),
        (["show", "--serach", "x", "f"], "--search"),
        (["run", "--devise", "T4", "s"], "--device"),
    ],
)
def test_a_mistyped_word_is_told_from_one_that_is_there(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")


def test_who_forgets_what_tells_the_scripts_arguments_apart_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for command, hint in (
        ("run", "; what the script is to get goes after --, as in: SCRIPT -- --epochs 3"),
        ("show", ""),
    ):
        with pytest.raises(SystemExit):
            cli.main([command, "train.py", "--epochs", "3"])
        assert capsys.readouterr().err.endswith(f"error: unrecognized arguments: --epochs 3{hint}\n")
