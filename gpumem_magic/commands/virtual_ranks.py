"""``gpumem run --ranks N``: some of N ranks, each alone in a process of its own, and one report of all.

Rank 0 runs first, and says which groups the program made. Along each of them (a dimension of a mesh) the last rank runs too, and
where it differs from the first, those between: all others are taken to be alike.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpumem_magic.commands.common import INTERRUPTED
from gpumem_magic.commands.ending import ending_as_after_ctrl_c
from gpumem_magic.commands.launch import TIMED_OUT, arguments_of, end, folder_of_ranks
from gpumem_magic.commands.shown_ranks import show
from gpumem_magic.commands.written import targets
from gpumem_magic.files import rank_files
from gpumem_magic.report.side_by_side import ranks_in_words
from gpumem_magic.session.device import DEFAULT_DEVICE, for_ranks
from gpumem_magic.session.rank_process import ALONE, FOLDER
from gpumem_magic.trials.roles import MOST_RANKS, PER_HOST, named_ranks, run_those_that_differ

_STEP = 0.02


def asked(options: argparse.Namespace) -> list[int] | None:
    """The ranks that ``--as`` names. Raises ValueError, in one line."""
    world: int = options.ranks
    if world > MOST_RANKS:
        raise ValueError(f"--ranks {world}: at most {MOST_RANKS:,} can be emulated")
    from gpumem_magic.virtual.card import catalog

    if options.device is not None and isinstance(catalog.parse(options.device), catalog.RealDevice):
        raise ValueError("--ranks runs on virtual devices: name one with --device, such as H100")
    return None if options.as_ranks is None else named_ranks(options.as_ranks, world)


def run(options: argparse.Namespace) -> int:
    """The first status of a rank that is not 0; 124 where time ran out."""
    written_to = targets(options)
    named = asked(options)
    with folder_of_ranks() as folder, ending_as_after_ctrl_c():
        crew = _RankProcesses(options, folder)
        taken: Mapping[int, int] = {}
        try:
            if named is not None:
                crew.run(named)
            else:
                taken = run_those_that_differ(crew)
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


class _RankProcesses:
    """The ranks' processes. One whose objects another waits for is started, too."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        from gpumem_magic.virtual.card import catalog

        self.world: int = options.ranks
        self.status = 0
        self.started: dict[int, subprocess.Popen[bytes]] = {}
        self._folder = folder
        device = options.device or DEFAULT_DEVICE
        named = catalog.parse(device) if catalog.says_how_many(device) else None
        self._per_host = len(named.models) if isinstance(named, catalog.DeviceSpec) else min(PER_HOST, self.world)
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
