"""``gpumem run --ranks N``: some of N ranks, each alone in a process of its own, and one report of all.

Rank 0 runs first, and says which groups the program made. Along each of them (a dimension of a mesh) the last rank runs too, and
where it differs from the first, those between: all others are taken to be alike.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpumem_magic.commands.common import INTERRUPTED
from gpumem_magic.commands.launch import TIMED_OUT, arguments_of, end, folder_of_ranks, for_ranks
from gpumem_magic.commands.rank_process import ALONE, FOLDER
from gpumem_magic.commands.roles import Roles
from gpumem_magic.commands.shown_ranks import show
from gpumem_magic.commands.written import targets
from gpumem_magic.files import rank_files
from gpumem_magic.report.side_by_side import alike, ranks_in_words
from gpumem_magic.session.device import DEFAULT_DEVICE

MOST_RANKS = 1 << 20
# So many ranks run at most that nobody named.
_MOST_RUN = 16
# GPUs in one computer, where the device does not say.
_PER_HOST = 8
_STEP = 0.02


def asked(options: argparse.Namespace) -> list[int] | None:
    """The ranks that ``--as`` names. Raises ValueError, in one line."""
    world: int = options.ranks
    if world > MOST_RANKS:
        raise ValueError(f"--ranks {world}: at most {MOST_RANKS:,} can be emulated")
    from gpumem_magic.virtual.card import catalog

    if options.device is not None and isinstance(catalog.parse(options.device), catalog.RealDevice):
        raise ValueError("--ranks runs on virtual devices: name one with --device, such as H100")
    if options.as_ranks is None:
        return None
    found: set[int] = set()
    for part in options.as_ranks.split(","):
        span = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", part)
        if span is None:
            raise ValueError(f"--as takes ranks, such as 0,7 or 0-3, not {options.as_ranks!r}")
        first, last = int(span[1]), int(span[2] or span[1])
        if not first <= last < world:
            raise ValueError(f"--as {part.strip()}: the ranks of --ranks {world} are 0-{world - 1}")
        found.update(range(first, last + 1))
    return sorted(found)


def run(options: argparse.Namespace) -> int:
    """The first status of a rank that is not 0; 124 where time ran out."""
    written_to = targets(options)
    named = asked(options)
    with folder_of_ranks() as folder:
        crew = _Crew(options, folder)
        taken: Mapping[int, int] = {}
        try:
            if named is not None:
                crew.run(named)
            else:
                taken = _those_that_differ(crew)
        except TimeoutError:
            print(f"gpumem: the time limit of {options.time_limit:g} s is over: the ranks are ended", file=sys.stderr)
            crew.status = TIMED_OUT
        except KeyboardInterrupt:
            crew.status = INTERRUPTED
        finally:
            end(list(crew.started.values()))
        if crew.started:
            print(f"gpumem: {_what_ran(sorted(crew.started), taken, options.ranks)}", file=sys.stderr)
            show(folder, written_to, virtual=True, taken=taken)
    return crew.status


def _what_ran(ran: Sequence[int], taken: Mapping[int, int], world: int) -> str:
    words = f"{ranks_in_words(ran)} of {world} ran{', each alone' if len(ran) > 1 else ''}"
    return f"{words}; {ranks_in_words(list(taken)).lower()} taken to be like them." if taken else f"{words}."


def _those_that_differ(crew: _Crew) -> Mapping[int, int]:
    """Runs rank 0, the last, and those between that may differ. Ranks that did not run -> the one that each is like."""
    crew.run([0])
    known = crew.known()
    if 0 not in known or crew.status:
        return {}
    roles = Roles(crew.world, known[0].groups)
    while (rank := roles.next(_alike(crew), _MOST_RUN)) is not None:
        crew.run([rank])
        if rank not in crew.known() or crew.status:
            return {}
    return roles.taken(_alike(crew))


def _alike(crew: _Crew) -> dict[int, int]:
    """Rank that ran -> the lowest that ran and is alike."""
    known = {rank: one.known for rank, one in crew.known().items()}
    return {
        rank: next(lower for lower in sorted(known) if lower == rank or alike(known[lower], one))
        for rank, one in known.items()
    }


class _Crew:
    """The ranks' processes. One whose objects another waits for is started, too."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        from gpumem_magic.virtual.card import catalog

        self.world: int = options.ranks
        self.status = 0
        self.started: dict[int, subprocess.Popen[bytes]] = {}
        self._folder = folder
        device = options.device or DEFAULT_DEVICE
        named = catalog.parse(device) if catalog.says_how_many(device) else None
        self._per_host = len(named.models) if isinstance(named, catalog.DeviceSpec) else min(_PER_HOST, self.world)
        self._command = arguments_of(options, for_ranks(device, self._per_host))
        self._over = None if options.time_limit is None else time.monotonic() + options.time_limit

    def run(self, ranks: Sequence[int]) -> None:
        """One after the other, until all that were started have ended. Raises TimeoutError."""
        for rank in ranks:
            self._start(rank)
            while self._running():
                if self._over is not None and time.monotonic() > self._over:
                    raise TimeoutError
                time.sleep(_STEP)

    def known(self) -> dict[int, rank_files.RankFile]:
        return {one.rank: one for one in rank_files.read(self._folder)}

    def _start(self, rank: int) -> None:
        from gpumem_magic.virtual.torch_face.alone import environment

        if rank in self.started:
            return
        around = {**os.environ, **environment(rank, self.world, self._per_host), FOLDER: str(self._folder), ALONE: "1"}
        # What the program prints, one rank says for all.
        quiet = subprocess.DEVNULL if self.started else None
        self.started[rank] = subprocess.Popen(self._command, env=around, stdout=quiet)

    def _running(self) -> bool:
        from gpumem_magic.virtual.torch_face import letters

        for rank in letters.wanted(self._folder):
            if rank < self.world:
                self._start(rank)
        running = False
        for rank, process in self.started.items():
            if process.poll() is None:
                running = True
                continue
            letters.ended(self._folder, rank)
            self.status = self.status or abs(process.returncode)
        return running
