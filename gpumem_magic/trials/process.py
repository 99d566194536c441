"""One function's run in a process of its own: a fork, which has everything that this process has and can change none of it.

Several that begin alike may share their beginning (`shared_start`).

What the function prints goes nowhere, what it puts into the folder for temporary files goes with it, and no process stays
behind: neither after an error nor after Ctrl-C. Files that it writes elsewhere are written.
"""

from __future__ import annotations

import builtins
import os
import pickle
import select
import signal
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from gpumem_magic.devices import machines
from gpumem_magic.devices.base import DeviceError
from gpumem_magic.looks.shell import running_shell
from gpumem_magic.own_folders import own_folder
from gpumem_magic.trials.ending import end_all, end_what_it_started, keep_below
from gpumem_magic.trials.loaders import leave_workers

_LENGTH = 8
# What is read where nobody writes any more.
_NOTHING_MORE = 0
_PIECE = 1 << 20
# In the folder of a trial: what went to its standard error, and what a copy of a beginning came to.
_WORDS, _ANSWER = "gpumem-words", "gpumem-answer"
# What the child keeps of the process that it came from: an object that Python throws away there may write or close.
_KEPT: list[object] = []


class NoTrial(DeviceError):
    """A process of its own is not to be had, or came to nothing. The text is one line."""


class TookTooLong(NoTrial):
    """It was ended, as it took longer than it was given."""


def in_a_fork(work: Callable[[], Any], seconds: float | None = None) -> Any:
    """What ``work()`` returns in a forked process, which has to be something that can be pickled.

    seconds: it is ended after these. Raises NoTrial where there is no fork, or where the process ended without an answer; what
    `work` raises is its own to catch.
    """
    refuse_where_impossible()
    until = _until(seconds)
    with own_folder("gpumem-trial-") as folder:
        receiving, sending = os.pipe()
        child = status = 0
        try:
            with _no_interrupt():
                child = _fork()
                if not child:
                    _be_the_child(work, sending, folder)
            os.close(sending)
            answer = _received(receiving, until)
        finally:
            if child:
                status = end_all(child)
            for end in (receiving, sending):
                with suppress(OSError):
                    os.close(end)
        if answer is None:
            raise NoTrial(f"the trial's process {_how_it_ended(status)}")
        return pickle.loads(answer)


class SharedStart:
    """A process that stands where its copies go on. answer: what it came to where it ended before; then it has no copies."""

    def __init__(self, orders: int, replies: int) -> None:
        self._orders, self._replies = orders, replies
        # The processes that run now.
        self._copies: list[int] = []
        head = _read(replies, _LENGTH)
        self.has_copies = head == bytes(_LENGTH)
        data = None if head is None or self.has_copies else _read(replies, int.from_bytes(head, "little"))
        self.answer: Any = None if data is None else pickle.loads(data)

    def of(self, wanted: Sequence[Any], seconds: float | None = None) -> list[Any]:
        """What copies come to in which ``pause()`` returns one of these each, at the same time.

        seconds: they are ended after these. Raises NoTrial where one ends without an answer.
        """
        until = _until(seconds)
        with ExitStack() as stack:
            folders = [stack.enter_context(own_folder("gpumem-trial-")) for _ in wanted]
            statuses: list[int] = []
            try:
                with suppress(BrokenPipeError):
                    _send(self._orders, pickle.dumps(list(zip(folders, wanted, strict=True))))
                self._follow(statuses, len(folders), until)
            except TookTooLong:
                self._end_copies()
                # What is told of them is told before anything of the next.
                self._follow(statuses, len(folders))
                raise
            finally:
                self._end_copies()
            statuses += [0] * (len(folders) - len(statuses))
            return list(map(_answer_in, folders, statuses))

    def _follow(self, statuses: list[int], count: int, until: float | None = None) -> None:
        """Hears of copies until so many have ended."""
        while len(statuses) < count and (number := self._number(until)) != _NOTHING_MORE:
            if number > 0:
                self._copies.append(number)
            else:
                statuses.append(-1 - number)

    def ended(self) -> None:
        """After the process has ended: its copies end, too, also those of which only the number was told."""
        os.set_blocking(self._replies, False)
        while (number := self._number()) != _NOTHING_MORE:
            self._copies.extend([number] * (number > 0))
        self._end_copies()

    def _end_copies(self) -> None:
        """And everything that they started."""
        for copy in self._copies:
            end_all(copy)
        self._copies.clear()

    def _number(self, until: float | None = None) -> int:
        """A copy's number, or below 0 how the first ended of those that have not been told of."""
        with suppress(BlockingIOError):
            return int.from_bytes(_read(self._replies, _LENGTH, until) or b"", "little", signed=True)
        return _NOTHING_MORE


def _answer_in(folder: Path, status: int) -> Any:
    with suppress(OSError), open(folder / _ANSWER, "rb") as file:
        answer = _received(file.fileno())
        if answer is not None:
            return pickle.loads(answer)
    raise NoTrial(f"the trial's process {_how_it_ended(status)}")


@contextmanager
def shared_start(work: Callable[[Pause], Any]) -> Iterator[SharedStart]:
    """``work(pause)`` in a forked process, which is copied where it calls ``pause``, as often as is asked for.

    There are no copies where the work has by then what they would lack or share: threads, processes, open or temporary files.
    Raises NoTrial where there is no fork.
    """
    refuse_where_impossible()
    with own_folder("gpumem-trial-") as folder, ExitStack() as ends:
        orders, ordering = _pipe(ends)
        replies, replying = _pipe(ends)
        child, start = 0, None
        try:
            with _no_interrupt():
                child = _fork()
                if not child:
                    ordering.close()
                    ends_here = orders.fileno(), replying.fileno()
                    _be_the_child(lambda: work(Pause(*ends_here, folder)), replying.fileno(), folder)
            orders.close()
            replying.close()
            start = SharedStart(ordering.fileno(), replies.fileno())
            yield start
        finally:
            if child:
                end_all(child)
            if start is not None:
                start.ended()


def _pipe(ends: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    receiving, sending = os.pipe()
    return ends.enter_context(open(receiving, "rb", 0)), ends.enter_context(open(sending, "wb", 0))


def refuse_where_impossible() -> None:
    """Raises NoTrial, in one line, where this process could not be copied."""
    import torch

    if not hasattr(os, "fork"):
        raise NoTrial("a trial needs os.fork, which this system lacks: `gpumem fit` on Linux, or WSL, has it")
    if torch.cuda.is_initialized() and machines.virtual() is None:
        raise NoTrial(
            "CUDA is in use in this process, and no copy of it could go on without the GPU: "
            "restart the kernel, choose a virtual device (`%gpumem_device`), and run the cells above again"
        )


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of other threads. None is in the middle of work on the virtual device (`virtual.gpu`).
        warnings.simplefilter("ignore")
        return os.fork()


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Ctrl-C waits until the child is known."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _until(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds


def _received(pipe: int, until: float | None = None) -> bytes | None:
    """The answer; None where the process ended without one. Not to the end of the file: a grandchild may hold the other end."""
    head = _read(pipe, _LENGTH, until)
    return None if head is None else _read(pipe, int.from_bytes(head, "little"))


def _read(pipe: int, count: int, until: float | None = None) -> bytes | None:
    """until: by when it has to begin."""
    if until is not None and not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
        raise TookTooLong("the trial took too long")
    pieces = []
    while count:
        piece = os.read(pipe, min(count, _PIECE))
        if not piece:
            return None
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _send(pipe: int, data: bytes) -> None:
    with open(pipe, "wb", closefd=False) as file:
        file.write(len(data).to_bytes(_LENGTH, "little") + data)


def _how_it_ended(status: int) -> str:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return "ended without an answer (was the host's memory used up?)"


# ---- in the child


def _be_the_child(work: Callable[[], Any], pipe: int, folder: Path) -> NoReturn:
    status = 1
    try:
        os.setsid()
        keep_below()
        leave_workers()
        _be_alone(folder)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            answer = pickle.dumps(work(), pickle.HIGHEST_PROTOCOL)
        finally:
            end_what_it_started()
        _send(pipe, answer)
        status = 0
    finally:
        # Whatever happened: what called us is the parent's, and never goes on here.
        os._exit(status)


class Pause:
    """In the process that copies share: its call returns in each of them, in a process and a folder of its own."""

    def __init__(self, orders: int, replies: int, folder: Path) -> None:
        self._orders, self._replies, self._folder = orders, replies, folder
        self._before: set[str] = set()

    def begin(self) -> None:
        """What is open and written so far is none of the work's."""
        self._before = self._files()

    def __call__(self) -> Any:
        if not self._is_alone():
            end_what_it_started()
            os._exit(1)
        os.write(self._replies, bytes(_LENGTH))
        while (order := _received(self._orders)) is not None:
            copies = []
            for folder, wanted in pickle.loads(order):
                copy = _fork()
                if not copy:
                    self._be_a_copy(folder)
                    return wanted
                copies.append(copy)
            for copy in copies:
                self._tell(-1 - os.waitpid(copy, 0)[1])
        os._exit(0)

    def _is_alone(self) -> bool:
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
            return False
        return threading.active_count() == 1 and _threads() == 1 and self._files() <= self._before

    def _files(self) -> set[str]:
        """Temporary ones, and the numbers of those that are open, pipes and the like among them. Devices have no state."""
        found = {os.path.join(place, name) for place, _, names in os.walk(self._folder) for name in names}
        for number in os.listdir("/dev/fd"):
            with suppress(OSError):
                if not stat.S_ISCHR(os.fstat(int(number)).st_mode):
                    found.add(number)
        return found

    def _be_a_copy(self, folder: Path) -> None:
        self._tell(os.getpid())
        os.setsid()
        keep_below()
        os.close(self._orders)
        answer = os.open(folder / _ANSWER, os.O_WRONLY | os.O_CREAT)
        # Where `_be_the_child` puts it.
        os.dup2(answer, self._replies)
        os.close(answer)
        _be_alone(folder)

    def _tell(self, number: int) -> None:
        os.write(self._replies, number.to_bytes(_LENGTH, "little", signed=True))


def _threads() -> int:
    """The system's, which libraries start, too; 1 where it does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _be_alone(folder: Path) -> None:
    """Nothing is read from the user and nothing shown; PyTorch computes in this thread alone."""
    import torch

    nothing = os.open(os.devnull, os.O_RDWR)
    words = os.open(folder / _WORDS, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    for number, kept in ((0, nothing), (1, nothing), (2, words)):
        os.dup2(kept, number)
    _KEPT.extend((sys.stdin, sys.stdout, sys.stderr, builtins.input, *threading.enumerate()))
    before = sys.stdout, sys.stderr
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - they end with the process
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "a", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    for stream, now in zip(before, (sys.stdout, sys.stderr), strict=True):
        # A logger keeps the stream that it found; a notebook's sends to the page from a fork, too.
        with suppress(AttributeError, TypeError):
            object.__setattr__(stream, "write", now.write)
    builtins.input = _nobody_answers
    # Nor does what is displayed reach the page: a kernel's log would have each message in full.
    session = getattr(getattr(running_shell(), "kernel", None), "session", None)
    if session is not None:
        session.send = _nobody_hears
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    # The threads of OpenMP and MKL did not come along.
    torch.set_num_threads(1)
    machine: Any = machines.virtual()
    if machine is not None:
        machine.forked()


def last_words() -> str:
    """In a trial: the last line that the program wrote to its standard error, or ""."""
    with (
        suppress(OSError),
        open(os.path.join(tempfile.gettempdir(), _WORDS), encoding="utf-8", errors="replace") as file,
    ):
        return next((line.strip() for line in reversed(file.readlines()) if line.strip()), "")
    return ""


def _nobody_hears(*message: object, **more: object) -> None:
    pass


def _nobody_answers(prompt: object = "") -> str:
    raise EOFError("nobody answers in a trial")
