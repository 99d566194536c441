"""The watch of this process: at most one, started and ended by ``%gpumem_watch``, and what it recorded.

One daemon thread while it runs, none afterwards. Its end is always the same, whoever asks for it (the magic, a button, another
watch, the end of the process): the thread takes no more samples and leaves the picture and the summary where the live view was.
"""

# IPython's functions carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpumem_magic.failures import swallowed
from gpumem_magic.uninterrupted import whole
from gpumem_magic.views.quiet import quiet
from gpumem_magic.widgets.columns import SENT
from gpumem_magic.widgets.fronts import Front, LineFront, StaticFront, SummaryFront, WidgetFront
from gpumem_magic.widgets.observer import Observer
from gpumem_magic.widgets.sampler import Sampler
from gpumem_magic.widgets.samples import DeviceSamples, Samples

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_HZ = 10.0
MIN_HZ, MAX_HZ = 0.01, 50.0
_PATIENCE = 20.0
RUNNING, PAUSED, STOPPED = "running", "paused", "stopped"

_current: Watch | None = None
_changing = threading.RLock()


class WatchSamples(Samples):
    """All that a watch kept, and its picture."""

    @quiet()
    def plot(self) -> Figure:
        """The chart as a matplotlib figure, one panel a device."""
        from gpumem_magic.widgets.watch_figure import draw

        return draw(self)


class WatchError(Exception):
    """What was asked for can't be done. The text is one line and says what to do."""


class Watch:
    """One watch. The front is made by `front_of`, which is given this watch; `start` opens it and begins to sample."""

    def __init__(self, hz: float, front_of: Callable[[Watch], Front], observer: Observer | None = None) -> None:
        self.hz = hz
        self.process = os.getpid()
        self.observer = observer if observer is not None else Observer()
        self._started = time.time()
        self._ended: float | None = None
        self._finishing = threading.Lock()
        self._undo: list[Callable[[], None]] = []
        self._sampler = Sampler(self._tick, 1.0 / hz, after=self._finish, on_failure=self._note)
        self.front = front_of(self)

    @property
    def state(self) -> str:
        """running | paused | stopped."""
        if self._ended is not None:
            return STOPPED
        return PAUSED if self._sampler.paused else RUNNING

    def start(self, shell: Any = None) -> None:
        """Opens the front and begins. shell: IPython's, whose cells are then marked."""
        try:
            self.front.open()
            if shell is not None:
                self._listen(shell)
            self._sampler.start()
        except BaseException:
            # Ctrl-C in between: no thread, and nothing that listens, is left.
            self.stop()
            self._finish()
            raise

    def pause(self) -> None:
        self._sampler.pause()

    def resume(self) -> None:
        self._sampler.resume()

    def mark(self, text: str, at: float | None = None) -> None:
        """Names a moment: now, or a time since the watch began."""
        self.observer.mark(text, at=at if at is not None and self._started <= at <= time.time() else None)

    def stop(self, patience: float = _PATIENCE) -> None:
        """Ends the watch and waits until its picture stands. Does nothing if it has ended."""
        self._sampler.stop()
        if not self._sampler.join(patience) and not self._sampler.is_current:
            self._note("The sampler did not end in time.")
            self._finish()

    def request(self, kind: str, text: str = "", at: float | None = None) -> None:
        """What a button asks for: pause, resume, mark, stop. Returns at once and touches nothing but flags.

        at: the time of the sample that the reader saw, by the kernel's clock; the kernel may have been too busy to listen.
        """
        if kind == "pause":
            self.pause()
        elif kind == "resume":
            self.resume()
        elif kind == "mark":
            self.mark(text or "mark", at)
        elif kind == "stop":
            self._sampler.stop()

    def look(self) -> None:
        """Takes a sample now, beside the sampler's, for who shows only the end of a cell. Not in a pause."""
        if self.state == RUNNING:
            self.observer.observe()

    def samples(self) -> WatchSamples:
        """What has been seen so far, as a copy."""
        observer, pace = self.observer, self._sampler.pace
        with observer.lock:
            devices = tuple(
                DeviceSamples(
                    series.title,
                    series.facts,
                    tuple(tuple(row[: len(SENT)]) for row in series.ring),
                    series.ring.per_row,
                    series.ring.taken,
                    None if series.ring.latest is None else tuple(series.ring.latest[: len(SENT)]),
                )
                for series in observer.shown
            )
            return WatchSamples(
                self._started, self._ended if self._ended is not None else time.time(), self.hz, pace.dropped,
                pace.cpu_seconds, devices, tuple(observer.marks), tuple(observer.notes), self._ended is None,
            )  # fmt: skip

    def _tick(self) -> None:
        self.front.show(self.observer.observe(resting=self._sampler.paused), self.state)

    def _finish(self) -> None:
        if not self._finishing.acquire(blocking=False):
            return
        try:
            # What happened since the last sample, and the categories of a cell that has just ended.
            self.observer.observe()
        except Exception as error:
            self._note(swallowed(error))
        while self._undo:
            self._undo.pop()()
        self._ended = time.time()
        try:
            self.front.close(self.samples())
        except Exception as error:
            self._note(f"The picture could not be shown: {swallowed(error)}")

    def _note(self, words: str) -> None:
        self.observer.note(words)

    def _listen(self, shell: Any) -> None:
        """Cells of the notebook. Not `pre_execute` and `post_execute`, which also fire for a widget's messages."""

        def begins(info: Any) -> None:
            text = str(getattr(info, "raw_cell", "")).lstrip()
            if not text.startswith("%gpumem_watch") and getattr(info, "store_history", True):
                # Not `execution_count`: some versions have counted the cell by now, some have not.
                self.observer.cell_begins(f"In [{len(shell.history_manager.input_hist_raw)}]")
            self.front.cell_begins()

        def ended(_result: Any) -> None:
            try:
                self.front.cell_ended()
            except Exception as error:
                self._note(f"The picture could not be shown: {swallowed(error)}")

        self.observer.follow(shell, self._undo)
        for name, callback in (("pre_run_cell", begins), ("post_run_cell", ended)):
            self._undo.append(lambda name=name, callback=callback: _unregister(shell, name, callback))  # type: ignore[misc]
            shell.events.register(name, callback)


def _unregister(shell: Any, name: str, callback: Any) -> None:
    if callback in shell.events.callbacks[name]:
        shell.events.unregister(name, callback)


# ---- the one of this process


def start(
    shell: Any,
    hz: float = DEFAULT_HZ,
    *,
    static: bool = False,
    observer: Observer | None = None,
    front_of: Callable[[Watch], Front] | None = None,
) -> Watch:
    """Starts a watch, which ends the one before. Raises WatchError for a rate that can't be kept."""
    global _current
    if not MIN_HZ <= hz <= MAX_HZ:
        raise WatchError(f"--hz must be between {MIN_HZ:g} and {MAX_HZ:g}, not {hz:g}")
    with _changing, whole:
        stop_if_running()
        show_what_was_lost()
        watch = Watch(hz, front_of or (lambda watch: choose_front(watch, shell, static)), observer)
        # Known before it runs: an interrupt leaves no watch that `stop` does not find.
        _current = watch
        watch.start(shell)
        return watch


def running() -> Watch:
    """The watch under way. Raises WatchError without one."""
    if _current is None or _current.state == STOPPED or _current.process != os.getpid():
        raise WatchError("no watch is running: `%gpumem_watch` starts one")
    return _current


def stop_if_running() -> None:
    """Ends the watch of this process, if there is one. A forked child leaves its parent's alone."""
    with _changing, whole:
        if _current is not None and _current.process == os.getpid() and _current.state != STOPPED:
            _current.stop()


def show_what_was_lost() -> None:
    """Shows the picture of a watch that has just ended here, where a page that was loaded anew did not take it."""
    lost = _current.front.lost() if _current is not None and _current.state == STOPPED else None
    if lost is not None:
        from IPython.display import display

        display(lost, raw=True)


def last_watch() -> WatchSamples | None:
    """What the last ``%gpumem_watch`` saw, or sees so far; None before the first."""
    return None if _current is None else _current.samples()


def choose_front(watch: Watch, shell: Any, static: bool) -> Front:
    """A line in a terminal, a summary where nobody looks on, else the widget, or a picture if asked for or without anywidget."""
    if getattr(shell, "kernel", None) is None:
        return LineFront(watch.observer)
    if not somebody_looks(shell):
        return SummaryFront(watch.look, watch.samples)
    if not static:
        try:
            return WidgetFront(watch.observer, 1.0 / watch.hz, watch.request, watch.samples)
        except ImportError as error:
            watch.observer.note(f"The live chart needs anywidget ({error}); this is the plain picture.")
    return StaticFront(watch.samples)


def somebody_looks(shell: Any) -> bool:
    """Whether a person is in front of the kernel: programs that run notebooks (nbclient, papermill) can't be asked for input.

    Reads the request that is being answered, by ``kernel.get_parent`` (ipykernel 6 to 7.4). Else a person is.
    """
    if "google.colab" in sys.modules:
        return True
    get_parent = getattr(shell.kernel, "get_parent", None)
    parent = get_parent() if get_parent is not None else {}
    content = parent.get("content", {}) if isinstance(parent, dict) else {}
    return bool(content.get("allow_stdin", True))


@atexit.register
def _at_exit() -> None:
    if _current is not None and _current.process == os.getpid() and _current.state != STOPPED:
        _current.stop()
