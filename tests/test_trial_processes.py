"""The processes that trials run in: what happens to them, what they start, and what of the notebook's they find."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.resource_tracker import ResourceTracker
from pathlib import Path
from typing import Any

import pytest
import torch
from causes_cells import Notebook
from left_behind import is_running, left_behind
from small_card import own_temporaries, small_notebook
from torch.utils.data import DataLoader
from torch.utils.data._utils.signal_handling import _set_worker_pids

from gpumem_magic.own_folders import own_folder
from gpumem_magic.trials import process
from gpumem_magic.trials.ending import _clears
from gpumem_magic.trials.process import NoTrial, in_a_fork
from gpumem_magic.virtual import gpu

_own_temporaries = pytest.fixture(autouse=True)(own_temporaries)
book = pytest.fixture(scope="module")(small_notebook)


def test_what_a_logger_says_in_a_trial_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Page(io.StringIO):
        def write(self, text: str) -> int:
            with open(tmp_path / "page", "a") as file:
                return file.write(text)

    page = Page()
    monkeypatch.setattr(sys, "stderr", page)
    logger = logging.Logger("a library's")
    logger.addHandler(logging.StreamHandler(page))
    in_a_fork(lambda: logger.warning("in the trial"))
    logger.warning("in the notebook")
    assert (tmp_path / "page").read_text() == "in the notebook\n"


def test_what_is_displayed_in_a_trial_reaches_no_page_and_no_log(
    book: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Session:
        sent = 0

        def send(self, *message: object) -> int:
            self.sent += 1
            return self.sent

    kernel = type("Kernel", (), {"session": Session()})()
    monkeypatch.setattr(type(book.shell), "kernel", kernel, raising=False)
    assert in_a_fork(lambda: [kernel.session.send("a picture"), kernel.session.sent]) == [None, 0]
    assert kernel.session.send("a picture") == 1


def test_a_process_that_dies_is_one_line_and_leaves_nothing() -> None:
    with pytest.raises(NoTrial, match="was ended by SIGSEGV"):
        in_a_fork(lambda: os.kill(os.getpid(), signal.SIGSEGV))
    with pytest.raises(NoTrial, match="without an answer"):
        in_a_fork(lambda: os._exit(3))
    assert in_a_fork(lambda: tempfile.gettempdir()) != tempfile.gettempdir()
    assert not left_behind()


def test_a_folder_goes_with_its_process_however_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def killed() -> None:
        with own_folder("gpumem-test-") as folder:
            folder.joinpath("note").write_text("left")
            os.kill(os.getpid(), signal.SIGTERM)

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    (left,) = tmp_path.iterdir()
    with own_folder("gpumem-test-") as living:
        assert left.exists(), "too young: it may be just being made"
        for folder in (left, living):
            os.utime(folder, (0, 0))
        with own_folder("gpumem-test-") as other:
            assert set(tmp_path.iterdir()) == {living, other}
    assert not list(tmp_path.iterdir())


@contextmanager
def interrupted_once(note: Path) -> Iterator[None]:
    """Ctrl-C once a trial has written its note."""

    def interrupt() -> None:
        while not (note.exists() and note.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("flags", ["--fit n=1..64", "--advise"])
def test_after_an_interrupt_in_a_trial_the_notebook_is_as_before(flags: str, book: Notebook, tmp_path: Path) -> None:
    """With a file of its own, and a process that it started."""
    book.cell("kept = torch.ones(1024, 1024, device='cuda')\nn = 'mine'")
    machine = gpu.current()
    assert machine is not None
    namespace, segments = dict(book.shell.user_ns), machine.devices[0].segments()
    note = tmp_path / "note"
    cell = f"""
import multiprocessing, pathlib, time
n = 4
kept = torch.ones(n, 1 << 20, device="cuda")
torch.save(n, {str(tmp_path / "saved.pt")!r})
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
child.start()
pathlib.Path({str(note)!r}).write_text(str(child.pid))
time.sleep(1000)
"""
    with interrupted_once(note):
        said = book.cell(f"%%gpumem {flags} -q -o answer\n{cell}")
    assert said.strip().endswith("KeyboardInterrupt: the trials were ended. Nothing of the cell ran in the notebook.")
    assert "Traceback" not in said
    assert "gpumem_magic" not in said
    deadline = time.monotonic() + 300
    while is_running(int(note.read_text())):
        assert time.monotonic() < deadline, "the trial's own process still runs"
        time.sleep(0.01)
    assert not (tmp_path / "saved.pt").exists()
    changed = {name for name, value in book.shell.user_ns.items() if namespace.get(name) is not value}
    assert not {name for name in changed if not name.startswith("_")} - {"In", "Out"}
    assert machine.devices[0].segments() == segments
    assert not left_behind()
    book.cell("del kept, n")


def test_an_interrupt_ends_the_trial_and_what_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    def work() -> None:
        started = subprocess.Popen(["sleep", "1000"])
        note.write_text(str(started.pid))
        started.wait()

    with interrupted_once(note), pytest.raises(KeyboardInterrupt):
        in_a_fork(work)
    deadline = time.monotonic() + 300
    while is_running(int(note.read_text())):
        assert time.monotonic() < deadline, "the grandchild still runs"
        time.sleep(0.01)
    assert not left_behind()


# What a cell leaves behind where nothing ends it: a process with a session of its own, one without a parent, and what is shared
# with processes that start anew. It notes their numbers and names.
LEAVING = """
import multiprocessing, os, pathlib, subprocess, time
from multiprocessing import shared_memory
detached = subprocess.Popen(["sleep", "1000"], start_new_session=True)
orphan = subprocess.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True)
common = shared_memory.SharedMemory(create=True, size=1000)
lock = multiprocessing.get_context("spawn").Lock()
with open(NOTE + ".left", "a") as file:
    print(detached.pid, orphan.stdout.strip(), common.name, lock._semlock.name, file=file)
n = 4
kept = torch.ones(n, 1 << 20, device="cuda")
pathlib.Path(NOTE).write_text("here")
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not say who started whom")
@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.parametrize("flags", ["--fit n=1..1", "--advise"])
def test_what_a_trial_starts_and_shares_goes_with_it(
    flags: str, is_interrupted: bool, book: Notebook, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    cell = LEAVING.replace("NOTE", repr(str(note))) + "time.sleep(1000)\n" * is_interrupted
    with interrupted_once(note) if is_interrupted else nullcontext():
        said = book.cell(f"%%gpumem {flags} -q\n{cell}")
    assert ("KeyboardInterrupt" in said) is is_interrupted
    left = [line.split() for line in note.with_suffix(".left").read_text().splitlines()]
    # With `--fit` also before the name matters, in the process that would have been copied.
    assert len(left) == (2 if "fit" in flags else 1)
    for first, second, *shared in left:
        deadline = time.monotonic() + 60
        while is_running(int(first)) or is_running(int(second)):
            assert time.monotonic() < deadline, "a process that the trial started still runs"
            time.sleep(0.01)
        assert len(shared) == 2
        assert not [name for name in shared if Path("/dev/shm", name.strip("/")).exists()]
    assert not left_behind()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not say who started whom")
def test_who_clears_away_what_is_shared_is_known_while_its_program_is_loaded() -> None:
    """The system has not said by then what it runs: a trial that ends just after it shared something would end it, too."""
    for _ in range(20):
        tracker: Any = ResourceTracker()
        tracker.ensure_running()
        assert _clears(tracker._pid)
        tracker._stop()
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    began = time.monotonic()
    assert not _clears(ended.pid), "it has no command line any more"
    assert time.monotonic() - began < 10, "nobody waits for one"
    ended.wait()


# Where the words of a place stand, Ctrl-C is pressed: before the name matters, among a loader's workers, while a file is written.
PLACES = """
import pathlib, tempfile, time
from torch.utils.data import DataLoader
model = nn.Linear(8, 8).cuda()
BEFORE
n = 4
for x in DataLoader([torch.ones(8)] * 40, batch_size=n, num_workers=2):
    y = model(x.cuda()).sum()
    WORKERS
y.backward()
with tempfile.NamedTemporaryFile("w", delete=False) as file:
    file.write("half")
    torch.save(model.state_dict(), SAVED)
    WRITING
"""


@pytest.mark.parametrize("flags", ["--fit n=1..40", "--advise"])
@pytest.mark.parametrize("place", ["BEFORE", "WORKERS", "WRITING"])
def test_ctrl_c_anywhere_leaves_the_notebook_as_it_was(place: str, flags: str, book: Notebook, tmp_path: Path) -> None:
    note, saved = tmp_path / "note", tmp_path / "saved.pt"
    saved.write_text("mine")
    book.cell("from torch.utils.data import DataLoader\nunderway = iter(DataLoader(list(range(40)), num_workers=1))")
    machine, names = gpu.current(), book.shell.user_ns
    assert machine is not None
    before = dict(names), machine.devices[0].segments(), threads_and_files()
    cell = PLACES.replace("SAVED", repr(str(saved)))
    for word in ("BEFORE", "WORKERS", "WRITING"):
        stays = f"pathlib.Path({str(note)!r}).write_text('here'); time.sleep(1000)"
        cell = cell.replace(word, stays if word == place else "pass")
    with interrupted_once(note):
        said = book.cell(f"%%gpumem {flags} -q -o answer\n{cell}")
    assert "KeyboardInterrupt" in said
    assert {name for name in names if names[name] is not before[0].get(name)} - {"In", "Out"} <= {
        name for name in names if name.startswith("_")
    }
    assert (machine.devices[0].segments(), threads_and_files()) == before[1:]
    assert saved.read_text() == "mine"
    assert set(left_behind()) <= set(map(str, loader_workers(names["underway"])))
    assert next(names["underway"]) == 0
    book.cell("del underway")


def threads_and_files() -> tuple[int, list[str]]:
    return threading.active_count(), sorted(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("flags", ["--fit n=1..2", "--advise"])
def test_workers_of_the_notebooks_loaders_go_on(flags: str, book: Notebook) -> None:
    """A trial begins a persistent loader anew, and lets go of an iterator that the notebook is in the middle of."""
    book.cell(
        "from torch.utils.data import DataLoader\nrows = [torch.ones(8) * i for i in range(60)]\n"
        "loader = DataLoader(rows, batch_size=4, num_workers=2, persistent_workers=True)\nfirst = len(list(loader))\n"
        "underway = iter(DataLoader(rows, num_workers=1))\nbefore = next(underway)"
    )
    names = book.shell.user_ns
    workers = [*loader_workers(names["loader"]._iterator), *loader_workers(names["underway"])]
    assert len(workers) == 3
    said = book.cell(
        f"%%gpumem {flags} -o answer\nn = 4\nunderway = None\nkept = torch.ones(n, 1 << 20, device='cuda')\n"
        "for x in loader:\n    y = x.cuda()"
    )
    assert "Error" not in said, said
    assert workers == [*loader_workers(names["loader"]._iterator), *loader_workers(names["underway"])]
    assert all(map(is_running, workers))
    assert next(names["underway"])[0, 0] == 1
    assert len(list(names["loader"])) == names["first"] == 15
    said = book.cell(f"%%gpumem {flags} -o answer\nn = 4\nx = torch.ones(n, device='cuda')\nnext(underway)")
    assert "has no workers for a DataLoader's iterator that an earlier cell began" in said
    assert next(names["underway"])[0, 0] == 2
    book.cell("del loader, underway")
    assert not any(map(is_running, workers))


def test_an_iterator_may_begin_where_one_of_the_notebooks_lay() -> None:
    """PyTorch notes an iterator's workers by its address."""
    underway = [iter(DataLoader([torch.ones(8)] * 9, num_workers=1))]
    next(underway[0])

    def at_its_address() -> None:
        address = id(underway.pop())
        _set_worker_pids(address, (os.getpid(),))

    in_a_fork(at_its_address)
    next(underway[0])


def loader_workers(iterator: Any) -> list[int]:
    return [worker.pid for worker in iterator._workers]


def test_where_there_is_no_fork_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    with pytest.raises(NoTrial, match=r"needs os\.fork"):
        in_a_fork(lambda: None)


def test_a_gpu_in_use_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(process.machines, "virtual", lambda: None)
    with pytest.raises(NoTrial, match="CUDA is in use"):
        in_a_fork(lambda: None)
