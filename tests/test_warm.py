"""What is run by `warm.executable()` is what Python would run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import warm
from left_behind import is_running

SAID = (
    "import os, sys\nprint(__name__, type(__loader__), sys.argv, sys.path[:2], sep='\\n')\n"
    "print(os.getcwd(), os.environ['A'], input(), sep='\\n')\n"
)


@pytest.mark.parametrize(
    "arguments",
    [
        ("said.py", "-x", "y"),
        ("folder", "-x"),
        ("-c", "print(__loader__.__name__)"),
        ("-m", "said", "-x"),
        ("-c", SAID, "--", "z"),
        ("-c", "raise SystemExit('a word')"),
        ("-c", "import sys; sys.exit(7)"),
        ("-c", "import sys; sys.exit(-1)"),
        ("-c", "raise KeyboardInterrupt"),
        ("-c", "kept = open('kept', 'w'); kept.write('x')"),
        ("-c", "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()"),
        ("-c", "def f(n):\n    return 1 / n\nf(0)"),
        ("fails.py",),
        ("-m", "nowhere_to_be_found"),
        ("-c", "import os; os.kill(os.getpid(), 9)"),
        ("-c", "import atexit; atexit.register(print, 'at the end')"),
        ("-O", "-c", "assert False"),
    ],
)
def test_it_is_run_as_python_runs_it(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "said.py").write_text(SAID)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(f"print(type(__loader__).__name__, __package__)\n{SAID}")
    (tmp_path / "fails.py").write_text("x = 1\n{}[x]\n")
    around = {**os.environ, "A": "of the test", "PYTHONPATH": str(tmp_path / "elsewhere")}
    options: dict[str, Any] = {"cwd": tmp_path, "env": around, "input": "heard\n", "capture_output": True, "text": True}
    kept = tmp_path / "kept"
    written = []
    ran = []
    for python in (warm.executable(), sys.executable):
        ran.append(subprocess.run([python, *arguments], check=False, **options))
        written.append(kept.exists() and kept.read_text())
        kept.unlink(missing_ok=True)
    warm_one, new_one = ran
    assert written[0] == written[1]
    assert warm_one.returncode == new_one.returncode
    assert warm_one.stdout == new_one.stdout
    assert warm_one.stderr.replace(warm.executable(), sys.executable) == new_one.stderr


def test_signals_reach_it_and_it_goes_with_whoever_asked_for_it(tmp_path: Path) -> None:
    waits = (
        "import os, time\ntry:\n    print(os.getpid(), flush=True)\n    time.sleep(600)\nexcept KeyboardInterrupt:\n"
        "    os._exit(5)\n"
    )
    for number, status in ((signal.SIGINT, 5), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen([warm.executable(), "-c", waits], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            run = int(process.stdout.readline())
            process.send_signal(number)
            # (Its output is read to its end: nobody holds that any more.)
            assert process.stdout.read() == b""
        assert process.returncode == status
        deadline = time.monotonic() + 300
        while is_running(run):
            assert time.monotonic() < deadline, "what was run is still there"
            time.sleep(0.01)


@pytest.mark.parametrize("said", [0, 1, 2])
def test_one_that_is_killed_while_it_asks_ends_nobody_else(said: int) -> None:
    python = warm.executable()
    name = next(word for word in Path(python).read_text().split() if word.startswith("gpumem-tests-"))
    request = json.dumps({"argv": ["-c", "pass"], "cwd": os.getcwd(), "env": dict(os.environ)}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(f"\0{name}")
        if said:
            socket.send_fds(connection, [b"%10d" % len(request)], [0, 1, 2])
            connection.sendall(request if said == 2 else request[:9])
    assert subprocess.run([python, "-c", "print(7)"], capture_output=True, check=True).stdout == b"7\n"
