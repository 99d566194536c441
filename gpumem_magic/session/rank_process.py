"""This process as one rank of several: it writes its report into their folder when it ends or fails, also where a signal ends it.

Whoever ends last shows all of them, unless a launcher of ours does: so nobody waits for anybody.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from gpumem_magic.failures import swallowed
from gpumem_magic.files import rank_files
from gpumem_magic.files.rank_files import RankFile
from gpumem_magic.looks.code import is_library_file, is_our_file
from gpumem_magic.report.ranks import ENDED, FAILED, GONE, OUT_OF_MEMORY, RUNNING
from gpumem_magic.report.side_by_side import state_of

if TYPE_CHECKING:
    from gpumem_magic.user_report import Report

# What our launchers tell the processes that they start.
FOLDER, ALONE = "GPUMEM_RANKS_FOLDER", "GPUMEM_RANK_ALONE"
# What a rank may have been ended for, or have failed for: its launcher ends it after another's end, a collective fails when a
# rank is no more. Ranks that fail alike do so each for itself.
_CAUSES = {ENDED: (FAILED, OUT_OF_MEMORY, GONE), FAILED: (OUT_OF_MEMORY, GONE)}
# How long the program has to end after SIGTERM, in seconds, before its report is made beside it: a collective hears no signal.
GRACE = 3.0
# The same after Ctrl-C, which a program may well go on after. (PyTorch's launcher kills it after 30.)
DEAF = 10.0
_STATUS = 128 + signal.SIGTERM


class RankProcess:
    """number: of its file, the rank as far as it is known when the process begins. shows: how many ranks this computer has, where
    the last of them to end shows them all; else 0. forked: it has another's signal handlers."""

    def __init__(
        self, folder: Path, number: int, rank: int, world: int, *, shows: int = 0, forked: bool = False
    ) -> None:
        self.folder = folder
        self.shows = shows
        self._number = number
        self._forked = forked
        self.file = RankFile(rank, world, RUNNING, socket.gethostname(), os.getpid())
        self._making = threading.Lock()
        self._written = False
        self._watch: _SignalWatch | None = None

    def begin(self, close: Callable[[], Report | None], show: Callable[[], None] = lambda: None) -> None:
        """close: makes the report where a signal ends the process; show: that of all ranks, where this one is the last."""
        rank_files.write(self.folder, self._number, self.file)
        self._watch = _SignalWatch(lambda: self._ended_by_signal(close, show), self._forked)
        self._watch.begin()

    def leaves(self) -> None:
        """The program has ended, and its report is being made: nobody else has to make one."""
        if self._watch is not None:
            self._watch.over.set()

    @property
    def was_ended(self) -> bool:
        """Whether a signal came that ends it."""
        return self._watch is not None and self._watch.rang

    def end(
        self, report: Report | None, groups: Sequence[tuple[str, tuple[int, ...]]] = (), *, where: str = ""
    ) -> None:
        """Writes the report; a rank that a signal ended, Ctrl-C too, says so. where: it failed, as far as that is known."""
        with self._making:
            if self._written:
                return
            self._written = True
            ended = self.was_ended or report is None or _was_interrupted(report)
            state = ENDED if ended or report is None else state_of(report)
            where = self._watch.where or where if self._watch is not None and ended else where
            after = self._ranks_that_went(_CAUSES[state]) if state in _CAUSES else ()
            self.file = replace(self.file, state=state, report=report, where=where, groups=tuple(groups), after=after)
            rank_files.write(self.folder, self._number, self.file)
        if self._watch is not None:
            self._watch.end()

    def is_last(self) -> bool:
        """Whether every other rank has answered or is gone, and nobody has shown their reports yet."""
        found = rank_files.read(self.folder)
        others = [one.known for one in found if one.process != os.getpid()]
        if not self.shows or len(found) < self.shows or any(one.state == RUNNING for one in others):
            return False
        try:
            os.close(os.open(self.folder / "shown", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def _ranks_that_went(self, states: Sequence[str]) -> tuple[int, ...]:
        """Those among the others that came to one of these ends by now."""
        with suppress(OSError, ValueError):
            return tuple(one.rank for one in rank_files.read(self.folder) if one.known.state in states)
        return ()

    def _ended_by_signal(self, close: Callable[[], Report | None], show: Callable[[], None]) -> None:
        report = None
        try:
            report = close()
        except Exception as error:
            print(f"gpumem: rank {self.file.rank}'s report is not whole ({swallowed(error)})", file=sys.stderr)
        try:
            self.end(report)
            if self.is_last():
                show()
        except Exception as error:
            swallowed(error)


def from_environment() -> RankProcess | None:
    """The rank that a launcher made of this process; None for a process on its own."""
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    if not 0 <= rank < world or world < 2:
        return None
    given = os.environ.pop(FOLDER, None)
    folder = Path(given) if given else _common_folder()
    if folder is None:
        return None
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    here_of = min(int(here), world) if here.isdigit() else world
    return RankProcess(folder, rank, rank, world, shows=0 if given else here_of)


def _common_folder() -> Path | None:
    """One for all ranks that a launcher started together on this computer, and nobody else's; None where there is none."""
    if not hasattr(os, "getuid"):
        return None
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"gpumem-{os.getuid()}-{os.getppid()}-{os.environ.get('MASTER_PORT', '0')}-{restart}"
    folder = Path(tempfile.gettempdir()) / name
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    return folder if about.st_uid == os.getuid() and not about.st_mode & 0o077 and not folder.is_symlink() else None


class _SignalWatch:
    """SIGTERM, as launchers end ranks with it: the program has a moment to leave, then its report is made beside it.

    rang: whether it came before the program had ended. where: what the program did then. A program's own handler stays what it
    is; one that came with the fork, where `inherited`, is called. There Ctrl-C, which reaches all processes of a notebook, is
    noted, too. Elsewhere it is where the program does not hear it: in a collective that waits for ever, say.
    """

    def __init__(self, give_up: Callable[[], None], inherited: bool) -> None:
        self.rang = False
        self.where = ""
        self._give_up = give_up
        self._inherited = inherited
        self._main = threading.main_thread().ident
        self.over = threading.Event()
        self._ends: tuple[int, int] | None = None
        self._before: Any = None

    def begin(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        now = signal.getsignal(signal.SIGTERM)
        if now is signal.SIG_IGN or (now is not signal.SIG_DFL and not self._inherited):
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if before != -1 and not self._inherited:
            signal.set_wakeup_fd(before)
            os.close(reading)
            os.close(writing)
            return
        self._ends = reading, writing
        self._before = signal.signal(signal.SIGTERM, self._leave)
        threading.Thread(target=self._listen, args=(reading,), name="gpumem-sigterm", daemon=True).start()

    def end(self) -> None:
        self.over.set()
        if self._ends is None or threading.current_thread() is not threading.main_thread():
            return
        _, writing = self._ends
        self._ends = None
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._leave:
            signal.signal(signal.SIGTERM, self._before)
        os.close(writing)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        if self.over.is_set():
            return  # the report is being made, and the process ends then
        if not self.rang:
            self.rang, self.where = True, line_of(frame)
        if callable(self._before):
            self._before(number, frame)
        raise SystemExit(_STATUS)

    def _listen(self, reading: int) -> None:
        """Beside the program: Python's own handler runs only between two of its lines."""
        told = False
        try:
            while rung := os.read(reading, 64):
                asked = signal.SIGTERM in rung and signal.getsignal(signal.SIGTERM) == self._leave
                if signal.SIGINT in rung:
                    self.where = self._line()
                if asked or (signal.SIGINT in rung and (self._inherited or self._is_deaf())):
                    if not self.rang and not self.over.is_set():
                        self.rang, self.where = True, self._line()
                    if not asked and not self._inherited:
                        told = True
                        self._give_up()
                if asked:
                    if told or not self.over.wait(GRACE):
                        self._give_up()
                        os._exit(_STATUS)
                    return
        finally:
            with suppress(OSError):
                os.close(reading)

    def _line(self) -> str:
        return line_of(sys._current_frames().get(self._main or 0))

    def _is_deaf(self) -> bool:
        """Whether the program stays in one and the same call, so that Python could not tell it of a signal."""

        def place() -> tuple[int, int] | None:
            frame = sys._current_frames().get(self._main or 0)
            return None if frame is None else (id(frame), frame.f_lasti)

        before = place()
        return not self.over.wait(DEAF) and place() == before


def _is_command(file: str) -> bool:
    """Whether it is the file of the command ``gpumem``, which installers write."""
    return file in sys.orig_argv[:2] and os.path.basename(file) == "gpumem"


def _was_interrupted(report: Report) -> bool:
    return report.error is not None and report.error.type == "KeyboardInterrupt"


def place_of(failure: BaseException | None) -> str:
    """The program's line that it comes from."""
    trace = None if failure is None else failure.__traceback__
    if trace is None:
        return ""
    # A frame goes on after an exception that it handles: where it was is in the trace.
    return _place([*reversed([*traceback.walk_tb(trace)]), *_lines(trace.tb_frame.f_back)])


def line_of(frame: FrameType | None) -> str:
    """``all_reduce (train.py:12)``: what of PyTorch's the program called, and where; "" outside of the program."""
    return _place(_lines(frame))


def _lines(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    return traceback.walk_stack(frame) if frame is not None else iter(())


def _place(lines: Iterable[tuple[FrameType, int]]) -> str:
    """Of frames and their lines, from the innermost out."""
    called = ""
    for frame, line in lines:
        module, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        if file.startswith("<frozen runpy"):
            break
        is_ours = module.startswith("gpumem_magic.") or is_our_file(file) or _is_command(file)
        if not is_ours and not module.startswith("torch.") and not is_library_file(file):
            place = f"{os.path.basename(file)}:{line}"
            return f"{called} ({place})" if called else place
        if module.startswith("torch.") and frame.f_code.co_name != "wrapper":
            called = frame.f_code.co_name
    return ""
