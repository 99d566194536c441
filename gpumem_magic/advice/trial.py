"""One run of a changed cell, in a process of its own, from what a fresh run would find."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from gpumem_magic.advice.evidence import Evidence, evidence_of
from gpumem_magic.advice.program_texts import ProgramTexts
from gpumem_magic.advice.variables import VariablesWatch
from gpumem_magic.advice.written_functions import put_in_force, written_functions
from gpumem_magic.looks.fresh import made_anew
from gpumem_magic.looks.parsing import parsed
from gpumem_magic.owners.free import DEFAULT, free
from gpumem_magic.recording.cell import names_in, prepare
from gpumem_magic.session import device as choosing
from gpumem_magic.session.device import put_on
from gpumem_magic.trials.libraries import import_ahead
from gpumem_magic.trials.one_run import run_here
from gpumem_magic.trials.process import Pause, SharedStart, in_a_fork, shared_start
from gpumem_magic.trials.programs import CellProgram
from gpumem_magic.trials.tried import Tried

# More than any program here asks for, so that its need is seen.
_WIDE = "4096GiB"
# Of what does not grow: pieces may lie otherwise in every iteration, so that none repeats the one before.
MOST_ITERATIONS = 20


@dataclass(frozen=True)
class CellTrials:
    """A cell and where it runs. device: a card's name. lines_above: what stands above it in the notebook's cell. start: where
    its runs part, once its libraries are there; None where each begins by itself."""

    shell: Any
    device: str
    lines_above: int
    start: SharedStart | None = None

    @contextmanager
    def begun(self, code: str) -> Iterator[CellTrials]:
        """With one start for the runs of this cell and of its changed copies."""

        def with_libraries(pause: Pause) -> tuple[Tried, Evidence]:
            pause.begin()
            put_on(self.device)
            import_ahead(parsed(code))
            return self._in_the_child(*pause())

        with shared_start(with_libraries) as start:
            yield replace(self, start=start if start.has_copies else None)

    def run(
        self,
        program: ProgramTexts,
        conf: str = "",
        *,
        wide: bool = False,
        watched: bool = False,
        last: int | None = None,
        seconds: float | None = None,
    ) -> tuple[Tried, Evidence]:
        """wide: on a card like it with so much memory that nothing fails. watched: the evidence is also of what functions' own
        variables were. last: after so many iterations it ends also where its memory grows. Raises TookTooLong where it takes
        longer than these seconds."""
        wanted = program, conf, widened(self.device) if wide else self.device, watched, last
        if self.start is not None:
            return self.start.of([wanted], seconds)[0]  # type: ignore[no-any-return]
        found: tuple[Tried, Evidence] = in_a_fork(lambda: self._in_the_child(*wanted), seconds)
        return found

    def _in_the_child(
        self, program: ProgramTexts, conf: str, device: str, watched: bool, last: int | None
    ) -> tuple[Tried, Evidence]:
        self._let_go(program.cell)
        names, namespace = names_in(program.cell), self.shell.user_ns
        put_in_force(program.changed, names, namespace)
        watch = VariablesWatch([one for _, one in written_functions(names, namespace)] if watched else ())
        cell = CellProgram(self.shell, prepare(self.shell, program.cell, self.lines_above))
        with watch.watching() if watched else nullcontext():
            told, view, running = run_here(
                lambda: cell.prepared({}), device, conf=conf, with_costs=True, most=MOST_ITERATIONS, last=last
            )
        seen = evidence_of(view, running.names, running.namespace(), told.grown, watch.variables)
        return replace(told, seconds=sum(os.times()[:4])), seen

    def _let_go(self, code: str) -> None:
        """What an earlier run of the cell left and this one makes again, and what Python keeps of an error."""
        machine = choosing.virtual()
        if machine is None:
            return
        for name in made_anew(code):
            self.shell.user_ns.pop(name, None)
        free(machine, self.shell, self.shell.user_ns, DEFAULT)


def widened(device: str) -> str:
    parts = [part for part in device.split(",") if not part.startswith("total=")]
    return ",".join([*parts, f"total={_WIDE}"])
