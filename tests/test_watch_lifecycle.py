"""One thread or none, whatever happens: restarts, failures, pauses, reloads, two ends at once."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from watch_fakes import MIB, PATIENCE, FakeDevice, FakeFront, observer_of, wait_until

import gpumem_magic
from gpumem_magic.notebook.magics import GpuMemMagics
from gpumem_magic.notebook.watching import watch as obey
from gpumem_magic.widgets import fronts, watch
from gpumem_magic.widgets.fronts import LineFront
from gpumem_magic.widgets.sampler import THREAD_NAME, Sampler
from gpumem_magic.widgets.watch import Watch


def threads() -> int:
    return sum(thread.name == THREAD_NAME for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    watch.stop_if_running()
    watch._current = None
    assert threads() == 0


@pytest.fixture
def shell() -> Iterator[Any]:
    made = InteractiveShell()
    yield made
    watch.stop_if_running()


def started(front: FakeFront, device: FakeDevice | None = None, hz: float = 50.0, shell: Any = None) -> Watch:
    made = Watch(hz, lambda _: front, observer_of(device if device is not None else FakeDevice())[0])
    made.start(shell)
    watch._current = made
    return made


def test_samples_come_until_the_end_and_then_the_picture_once() -> None:
    front = FakeFront()
    made = started(front)
    wait_until(lambda: len(front.shown) >= 3)
    assert threads() == 1
    made.stop()
    assert threads() == 0
    count = len(front.shown)
    made.stop()
    assert (front.opened, len(front.closed), len(front.shown)) == (1, 1, count)
    assert made.state == "stopped"
    assert front.closed[0].running is False
    # The last sample is taken at the end, so that nothing is missing.
    assert front.closed[0].devices[0].taken == count + 1


def test_a_pause_takes_no_samples_but_shows_marks() -> None:
    front = FakeFront()
    made = started(front)
    wait_until(lambda: bool(front.shown))
    made.request("pause")
    wait_until(lambda: front.shown[-1][1] == "paused")
    taken = made.samples().devices[0].taken
    made.request("mark", "in the pause")
    wait_until(lambda: any(sample.marks for sample, _ in front.shown))
    assert made.samples().devices[0].taken == taken
    made.request("resume")
    wait_until(lambda: made.samples().devices[0].taken > taken)
    made.request("stop")
    wait_until(lambda: bool(front.closed))
    assert [mark.label for mark in front.closed[0].marks] == ["in the pause"]


def test_a_mark_of_the_page_keeps_its_time_if_that_can_be() -> None:
    made = started(FakeFront())
    middle = made._started
    made.request("mark", "then", middle)
    made.request("mark", "from another clock", middle + 1e6)
    made.request("nonsense")
    assert [mark.time for mark in made.samples().marks] == [middle, 1000.0]


def test_a_device_that_fails_ends_the_watch_with_a_note_and_no_exception() -> None:
    device, front = FakeDevice(), FakeFront()
    device.broken = RuntimeError("the driver is gone")
    made = started(front, device)
    wait_until(lambda: bool(front.closed))
    assert made.samples().notes == ("RuntimeError: the driver is gone",)
    made.stop()


def test_a_front_that_fails_loses_no_samples() -> None:
    front = FakeFront(broken=OSError("closed"))
    made = started(front)
    wait_until(lambda: made.state == "stopped")
    assert made.samples().devices[0].taken >= 10
    assert made.samples().notes == ("OSError: closed",)


def test_what_is_late_is_dropped_and_not_queued() -> None:
    release, took = threading.Event(), []

    def take() -> None:
        took.append(1)
        if len(took) == 1:
            threading.Timer(0.3, release.set).start()
            release.wait(PATIENCE)

    sampler = Sampler(take, 0.01)
    sampler.start()
    wait_until(lambda: len(took) >= 2)
    sampler.stop()
    assert sampler.join(PATIENCE)
    # Thirty were due meanwhile; a slow machine only makes it more.
    assert sampler.pace.dropped >= 25


def test_stopping_from_the_samplers_own_thread_does_not_wait_for_itself() -> None:
    front = FakeFront()
    made = started(front)
    front.show = lambda sample, state: made.stop()  # type: ignore[method-assign]
    wait_until(lambda: bool(front.closed))
    assert len(front.closed) == 1


def test_two_ends_at_once_make_one_picture() -> None:
    front = FakeFront()
    made = started(front)
    ends = [threading.Thread(target=made.stop) for _ in range(4)]
    for end in ends:
        end.start()
    for end in ends:
        end.join(PATIENCE)
    assert len(front.closed) == 1


def watch_line(shell: Any, line: str) -> None:
    obey(shell, GpuMemMagics.gpumem_watch.parser.read(line))


# ---- the magic, in a terminal


def test_the_magic_from_beginning_to_end(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_line_magic("load_ext", "gpumem_magic")
    for again in range(3):
        shell.run_line_magic("gpumem_watch", "--hz 50")
        assert threads() == 1, again
    shell.run_line_magic("gpumem_watch", "pause")
    assert watch.running().state == "paused"
    shell.run_line_magic("gpumem_watch", "resume")
    shell.run_line_magic("gpumem_watch", "mark it's {warm}")
    shell.run_line_magic("gpumem_watch", "stop")
    assert "watched" in capsys.readouterr().out
    last = gpumem_magic.last_watch()
    assert last is not None
    assert [mark.label for mark in last.marks] == ["it's {warm}"]
    with pytest.raises(UsageError, match="no watch is running"):
        shell.run_line_magic("gpumem_watch", "stop")


def test_loading_twice_and_reloading_leave_one_thread_or_none(shell: Any) -> None:
    shell.run_line_magic("load_ext", "gpumem_magic")
    shell.run_line_magic("gpumem_watch", "")
    shell.run_line_magic("load_ext", "gpumem_magic")
    assert threads() == 1
    shell.run_line_magic("reload_ext", "gpumem_magic")
    assert threads() == 0
    assert [name for name in ("pre_run_cell", "post_run_cell") if _ours(shell, name)] == []
    shell.run_line_magic("gpumem_watch", "")
    assert threads() == 1
    shell.run_line_magic("unload_ext", "gpumem_magic")
    assert threads() == 0


def _ours(shell: Any, name: str) -> list[Any]:
    return [each for each in shell.events.callbacks[name] if "gpumem_magic" in getattr(each, "__module__", "")]


def test_cells_are_marked_by_their_number(shell: Any) -> None:
    front = FakeFront()
    made = started(front, shell=shell)
    shell.run_cell("a = 1", store_history=True)
    shell.run_cell("a = 2", store_history=True)
    shell.run_cell("silent = 1", store_history=False)
    made.stop()
    assert [mark.label for mark in made.samples().marks] == ["In [1]", "In [2]"]
    shell.run_cell("a = 3", store_history=True)
    assert len(made.samples().marks) == 2


def test_a_front_that_fails_after_a_cell_is_a_note(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class Front(FakeFront):
        def cell_ended(self) -> None:
            raise OSError("closed")

    made = started(Front(), shell=shell)
    assert shell.run_cell("a = 1", store_history=True).success
    assert made.samples().notes == ("The picture could not be shown: OSError: closed",)
    assert capsys.readouterr().out == ""


def test_an_interrupted_cell_leaves_the_watch_running(shell: Any) -> None:
    made = started(FakeFront(), shell=shell)
    shell.run_cell("raise KeyboardInterrupt", store_history=True)
    assert made.state == "running"
    assert threads() == 1


@pytest.mark.parametrize("place", ["open", "_listen", "start", "started"])
def test_an_interrupt_while_it_starts_leaves_nothing(shell: Any, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    front = FakeFront()
    before = {name: list(callbacks) for name, callbacks in shell.events.callbacks.items()}
    owner, name = {"open": (front, "open"), "_listen": (Watch, "_listen")}.get(place, (Sampler, "start"))
    original = getattr(owner, name)

    def interrupted(*args: Any) -> None:
        if place != "open":
            original(*args) if place != "start" else None
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    monkeypatch.setattr(watch, "choose_front", lambda *_: front)
    with pytest.raises(KeyboardInterrupt):
        watch.start(shell)
    assert threads() == 0
    assert {name: list(callbacks) for name, callbacks in shell.events.callbacks.items()} == before
    with pytest.raises(watch.WatchError, match="no watch is running"):
        watch.running()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--hz", "argument --hz: expected one argument"),
        ("--hz quick", "invalid float value: 'quick'"),
        ("--hz 0", "between 0.01 and 50"),
        ("--hz nan", "between 0.01 and 50"),
        ("--hz=1000", "between 0.01 and 50"),
        ("faster", "invalid choice: 'faster'"),
        ("pause now", "unrecognized arguments: now"),
        ("mark x", "no watch is running"),
        ("'", "No closing quotation"),
    ],
)
def test_mistakes_are_one_line(shell: Any, line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        watch_line(shell, line)
    assert "\n" not in str(caught.value)
    assert threads() == 0


def test_completion_offers_the_words() -> None:
    complete = GpuMemMagics.gpumem_watch.parser.complete
    assert complete(SimpleNamespace(line="%gpumem_watch --", symbol="--")) == ["--engines", "--hz", "--static"]
    assert "stop" in complete(SimpleNamespace(line="%gpumem_watch s", symbol="s"))


# ---- which face


def kernel(allow_stdin: bool) -> Any:
    return SimpleNamespace(kernel=SimpleNamespace(get_parent=lambda: {"content": {"allow_stdin": allow_stdin}}))


def test_the_face_suits_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def face(shell: Any, static: bool = False) -> str:
        made = Watch(10, lambda made: watch.choose_front(made, shell, static), observer_of()[0])
        return type(made.front).__name__

    assert face(SimpleNamespace()) == "LineFront"
    assert face(kernel(allow_stdin=False)) == "SummaryFront"
    assert face(kernel(allow_stdin=True), static=True) == "StaticFront"
    assert face(SimpleNamespace(kernel=SimpleNamespace()), static=True) == "StaticFront"

    def missing(*arguments: Any) -> Any:
        raise ImportError("No module named 'anywidget'")

    monkeypatch.setattr(watch, "WidgetFront", missing)
    made = Watch(10, lambda made: watch.choose_front(made, kernel(True), False), observer_of()[0])
    assert type(made.front) is fronts.StaticFront
    assert "anywidget" in made.observer.notes[0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_rewritten_while_a_cell_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LineFront, "SECONDS", 0.0)
    device = FakeDevice(name="H100")
    device.now = (100 * MIB, 200 * MIB, 100 * MIB)
    observer, _ = observer_of(device)
    terminal = Terminal()
    width = 120
    front = LineFront(observer, terminal, lambda: width)
    front.open()
    at_prompt = terminal.getvalue()
    front.show(observer.observe(), "running")
    assert terminal.getvalue() == at_prompt, "the prompt's line is the user's"
    front.cell_begins()
    front.show(observer.observe(), "running")
    width = 60
    front.show(observer.observe(), "running")
    width = 20
    device.now = (120 * MIB, 200 * MIB, 120 * MIB)
    observer.observe()
    front.cell_ended()
    written = terminal.getvalue()[len(at_prompt) :]
    assert written.count("\n") == 1
    assert written.endswith("\n")
    lines = [line.removeprefix("\x1b[2K").rstrip("\n") for line in written.split("\r")[1:]]
    # What does not fit is said in fewer words, and the last word is of the cell's end.
    assert lines == [
        "cuda:0 H100  allocated 100 MiB  reserved 200 MiB  peak 100 MiB  nvidia-smi 500 MiB of 1,024 MiB",
        "cuda:0 100 MiB (peak 100 MiB)",
        "cuda:0 120 MiB (pea",
    ]


def test_a_pipe_gets_only_the_summary() -> None:
    observer, _ = observer_of(FakeDevice())
    made = Watch(10, lambda made: LineFront(observer, io.StringIO()), observer)
    made.front.cell_begins()
    made.front.show(observer.observe(), "running")
    made.front.close(made.samples())
    made.front.close(made.samples())
    text = made.front._stream.getvalue()  # type: ignore[attr-defined]
    assert "\r" not in text
    assert text.count("GPU memory so far") == 1


def test_a_forked_child_has_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = started(FakeFront())
    monkeypatch.setattr(made, "process", os.getpid() + 1)
    with pytest.raises(watch.WatchError, match="no watch is running"):
        watch.running()
    watch.stop_if_running()
    assert made.state == "running"
    monkeypatch.undo()
    made.stop()
