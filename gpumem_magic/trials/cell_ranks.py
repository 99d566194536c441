"""A notebook's cell as ranks of many: each that runs does so alone, in a process of its own, and one report has all of them.

They run one after another. Where one asks for an object that another rank sends, that one runs first, and then it once more.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpumem_magic.files.rank_files import RankFile
from gpumem_magic.own_folders import own_folder
from gpumem_magic.recording import under_way
from gpumem_magic.recording.cell import CellRun, PreparedCell
from gpumem_magic.recording.progress import StopRun
from gpumem_magic.report.schema import report_from_dict, report_to_dict
from gpumem_magic.report.side_by_side import state_of, together
from gpumem_magic.session import device as choosing
from gpumem_magic.session import recording
from gpumem_magic.trials import cards
from gpumem_magic.trials.process import NoTrial, in_a_fork
from gpumem_magic.trials.roles import MOST_RANKS, PER_HOST, named_ranks, run_those_that_differ
from gpumem_magic.units import counted
from gpumem_magic.user_report import Report
from gpumem_magic.virtual.card import catalog
from gpumem_magic.virtual.torch_face import letters
from gpumem_magic.virtual.torch_face.alone import environment, one_of_many


@dataclass(frozen=True)
class CellFlags:
    """How the cell is recorded, as the flags of the same names say."""

    lines: bool = True
    max_iterations: int | None = None
    until_repeat: bool = False


def report_of_ranks(
    shell: Any, cell: PreparedCell, world: int, named: str | None, device: str | None, how: CellFlags
) -> tuple[Report, str]:
    """The one report, and what the first rank that ran printed. named: ``0,7``; None for those that may differ.

    Raises ValueError or DeviceError, in one line.
    """
    if cell.needs_await:
        raise NoTrial("a cell that awaits at its top level cannot run so: only the notebook's event loop runs it")
    if world > MOST_RANKS:
        raise ValueError(f"at most {MOST_RANKS:,} ranks can be emulated")
    wanted = None if named is None else named_ranks(named, world)
    with own_folder("gpumem-letters-") as folder:
        crew = _CellRanks(shell, cell, world, _device(world, device), folder, how)
        taken: Mapping[int, int] = {}
        if wanted is None:
            taken = run_those_that_differ(crew)
        else:
            crew.run(wanted)
    found = [one.known for one in crew.known().values()]
    report = together(found, world, virtual=True, taken=taken)
    return Report.of(
        replace(report, remarks=(*_too_few(world, *_device(world, device)), *report.remarks))
    ), crew.printed


def _too_few(world: int, name: str, count: int) -> list[str]:
    """Why `torch.cuda.set_device(rank)` fails where the ranks share what the notebook has."""
    machine, wanted = choosing.virtual(), min(PER_HOST, world)
    if machine is None or not machine.live_storages() or count >= wanted:
        return []
    one = name.partition("x")[2] if catalog.says_how_many(name) else name
    return [
        f"The ranks of a computer share its {counted(count, 'card')}, as tensors of the notebook are there: "
        f"`%gpumem_device {wanted}x{one}` before the first of them gives each rank its own."
    ]


def _device(world: int, name: str | None) -> tuple[str, int]:
    """The card's name, with how many a computer has, and this number. Tensors that are there keep their devices."""
    [name] = [cards.usual()] if name is None else cards.names_of(name)
    machine = choosing.virtual()
    if machine is not None and machine.live_storages():
        return name, len(machine.devices)
    spec = catalog.parse(name)
    if catalog.says_how_many(name) and isinstance(spec, catalog.DeviceSpec):
        return name, len(spec.models)
    count = min(PER_HOST, world)
    return f"{count}x{name}", count


class _CellRanks:
    def __init__(
        self, shell: Any, cell: PreparedCell, world: int, device: tuple[str, int], folder: Path, how: CellFlags
    ) -> None:
        self.world = world
        self.status = 0
        self.printed = ""
        self._shell, self._cell, self._how, self._folder = shell, cell, how, folder
        self._device, self._per_host = device
        self._known: dict[int, RankFile] = {}

    def known(self) -> Mapping[int, RankFile]:
        return self._known

    def run(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank not in self._known:
                self._run(rank)

    def _run(self, rank: int, waiting: frozenset[int] = frozenset()) -> None:
        """waiting: ranks that asked for what this one sends."""
        while True:
            told, groups, printed = in_a_fork(lambda: self._in_its_process(rank))
            senders = [
                other
                for other in letters.wanted(self._folder)
                if other < self.world and other not in self._known and other != rank and other not in waiting
            ]
            if not senders:
                break
            for other in senders:
                if other not in self._known:
                    self._run(other, waiting | {rank})
        if not self._known:
            self.printed = printed
        report = report_from_dict(told)
        self._known[rank] = RankFile(rank, self.world, state_of(report), groups=groups, report=report)
        self.status = self.status or int(report.error is not None)

    def _in_its_process(self, rank: int) -> tuple[dict[str, Any], tuple[tuple[str, tuple[int, ...]], ...], str]:
        """Its report as a dictionary, the groups that it made, and what it printed."""
        under_way.abandon()
        os.environ.update(environment(rank, self.world, self._per_host))
        choosing.put_on(self._device)
        printed = io.StringIO()
        sys.stdout = printed
        run = CellRun(self._shell, self._cell)
        namespace = self._shell.user_ns
        with one_of_many(rank, self.world, self._folder, patience=0.0) as alone:
            found = recording.open_recording(names=run.names, user_ns=namespace, own_file=run.filename)
            how = self._how
            run.observe(found.observer(how.max_iterations, how.lines, until_repeat=how.until_repeat, source=run.source))
            error, place = None, None
            try:
                with suppress(StopRun):
                    run.run()
            except BaseException as raised:
                error, place = raised, run.failed(raised.__traceback__)
            report = found.close(error, place, namespace)
        report = replace(report, remarks=(*alone.notes(), *report.remarks))
        return report_to_dict(report), tuple(alone.groups), printed.getvalue()
