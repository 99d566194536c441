"""The recorder: cheap checkpoints while the user's program runs, and one `Recording` of numbers and strings at the end.

A checkpoint reads, per device, the length of a log and the counters. Everything that takes thought happens after the program.
Whatever goes wrong in here becomes a note of the recording; the user's program never meets it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from gpumem_magic.devices.base import DeviceLog, Log, Machine
from gpumem_magic.looks.code import cell_of
from gpumem_magic.recording.compiled import CompilerTables
from gpumem_magic.recording.failing_place import failing_place
from gpumem_magic.recording.failure import (
    failing_request,
    failure_of,
    is_out_of_memory,
    moment_of_failure,
    with_event,
)
from gpumem_magic.recording.guard import Guard
from gpumem_magic.recording.identity import Witness
from gpumem_magic.recording.log_positions import PositionTranslator
from gpumem_magic.recording.model import (
    Checkpoint,
    CompiledCode,
    Failed,
    Failure,
    ModuleTrace,
    Moment,
    Recording,
    Sighting,
    Span,
    StandIn,
)
from gpumem_magic.recording.modules import ModuleWatch
from gpumem_magic.recording.phases import Phases
from gpumem_magic.recording.reads import ReadsWithin
from gpumem_magic.recording.repetition import Iterations, alike_at_end
from gpumem_magic.recording.thinning import MOST, Seen, thin
from gpumem_magic.snapshot.timeline import Timeline

if TYPE_CHECKING:
    from gpumem_magic.recording.instrument import Statement


class Recorder:
    """Records one run: `start`, then a `checkpoint` after each statement, then `finish`, once.

    primary: index of the device that the report will be about. names: the variables that the cell mentions. own_file: the
    file name under which the cell's code is compiled, so that its lines are called lines. most: how many moments are kept of a
    run on a real device, before it is thinned.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        primary: int = 0,
        names: Iterable[str] = (),
        own_file: str | None = None,
        most: int = MOST,
    ) -> None:
        self._machine = machine
        self._primary = primary
        self._names = frozenset(names)
        self._own_file = own_file
        self._guard = Guard()
        self._logs: dict[int, Log] = {}
        self._iterations: Iterations | None = None
        self._checkpoints: list[Checkpoint] = []
        self._ticks = 0
        self._reads: ReadsWithin | None = None
        self._machine_notes_before: list[str] = []
        self._compiler = CompilerTables()
        self._witness: Witness | None = None
        self._phases: Phases | None = None
        self._modules: ModuleWatch | None = None
        self._most = most
        # The lists that grow, for a look at their weight.
        self._seen: Seen | None = None
        self._left_out: Counter[int] = Counter()
        self._untold: Counter[int] = Counter()
        self.moves = 0
        self._told: Callable[[bool], None] | None = None
        self._noted: Moment | None = None
        # What `finish` made, for who reads along (the watch).
        self.recorded: Recording | None = None

    # What the watch reads of a recording under way. The lists are our own, and go on growing.

    @property
    def checkpoints(self) -> Sequence[Checkpoint]:
        return self._checkpoints

    @property
    def sightings(self) -> Sequence[Sighting]:
        return self._witness.sightings if self._witness is not None else ()

    def spans_after(self, device: int, position: int) -> Sequence[Span]:
        """Those that end after a device's position, and those under way."""
        return self._phases.after(device, position) if self._phases is not None else ()

    @property
    def logs(self) -> Mapping[int, Log]:
        """Device -> its log, until the recording ends."""
        return self._logs

    @property
    def alike(self) -> int:
        """How many equal turns the last iterations made (see `repetition`), 1 if none repeats; 0 on a real device."""
        return alike_at_end(self.iterations)

    @property
    def iterations(self) -> Sequence[bytes]:
        """What each iteration did on virtual devices, as a digest (see `repetition`)."""
        return self._iterations.signatures if self._iterations is not None else ()

    @property
    def iteration_ends(self) -> Sequence[Mapping[int, int]]:
        """By virtual device, where the first iteration began in its log, and where each ended."""
        return self._iterations.ends if self._iterations is not None else ()

    def iteration_ended(self) -> None:
        """Says that an iteration ends here, of a program that steps no optimizer."""
        with self._guard("an iteration's end"):
            self._step_ended()

    def start(self, namespace: Mapping[str, Any] | None = None) -> None:
        """Begins to record and takes the first checkpoint. namespace: where the values of `names` are found.

        Raises what the devices raise where they can't record, with everything put back.
        """
        try:
            with self._guard("starting"):
                reads = self._machine.reads
                self._reads = None if reads is None else ReadsWithin(reads)
                self._machine_notes_before = self._machine.notes()
            self._machine.settle()
            for device in self._machine.devices:
                index = device.facts.index
                self._logs[index] = device.start_log()
            self._iterations = Iterations(self._logs)
            self._witness = Witness(self._machine, lambda device: self._logs[device].position(), self._names, namespace)
            self._modules = ModuleWatch(self._cheap_positions(), self._machine.locate, self._machine.compiled_results)
            self._phases = Phases(
                lambda: self._moment(exact=False),
                self._witness,
                self._guard,
                self._step_ended,
                self._grown,
                self._modules,
                self._phase_began,
            )
            self._seen = Seen(self._checkpoints, self._phases.spans, self._witness.sightings, self._left_out)
            self._phases.start()
            self.checkpoint("before", "before")
        except BaseException:
            self.put_back()
            raise

    def checkpoint(
        self,
        kind: str,
        label: str,
        statement: str = "",
        line: int = 0,
        iteration: tuple[int, ...] = (),
        loops: tuple[int, ...] = (),
        *,
        header: bool = False,
    ) -> None:
        """The state after a statement. A `header` row (a loop's own line) is kept only if a device's memory moved in it."""
        moment: Moment | None = None
        with self._guard("a checkpoint"):
            if self._phases is not None:
                self._phases.statement_ended()
            if header and self._machine.reads is not None:
                # (It may be an `except`.)
                self._machine.reads.note_caught()
            moment = self._moment()
            if self._checkpoints and moment.positions != self._checkpoints[-1].moment.positions:
                self.moves += 1
            elif header and self._checkpoints:
                return
            if kind == "before" and self._checkpoints and self._checkpoints[-1].kind == "before":
                self._checkpoints.pop()
            self._checkpoints.append(Checkpoint(kind, label, statement, line, moment, iteration, loops))
            self._grown()
        # A look at the variables comes when the figures are kept.
        with self._guard("looking at the variables"):
            if self._witness is not None and kind == "before":
                self._witness.cell_begins(moment)
            elif self._witness is not None:
                self._witness.statement_ended(statement if kind == "statement" else None, moment)

    # Loops that rest: see `hook.Devices`

    def tell(self, moved: Callable[[bool], None] | None) -> None:
        self._told = moved
        for log in self._logs.values():
            log.tell(moved)

    def left_out(self, line: int, count: int) -> None:
        self._untold[line] += count

    def note_moment(self) -> None:
        self._noted = self._moment_as_it_is()

    def moved_until_now(self, statement: Statement, iteration: tuple[int, ...], loops: tuple[int, ...]) -> None:
        if self._noted is not None:
            self._checkpoints.append(
                Checkpoint("statement", statement.label, statement.text, statement.line, self._noted, iteration, loops)
            )

    def _phase_began(self) -> None:
        self.moves += 1
        if self._told is not None:
            self._told(False)

    def position(self, device: int) -> int:
        """Where a device's log stands now."""
        self._machine.settle()
        return self._logs[device].position()

    def mark(self, label: str) -> None:
        """A named moment inside a statement."""
        with self._guard("a mark"):
            if self._phases is not None:
                self._phases.mark(label)

    def begin_range(self, label: str) -> Callable[[bool], None]:
        """Begins a range with a name; the answer ends it, and is told whether an exception left it."""
        return self._phases.begin_range(label) if self._phases is not None else lambda failed: None

    def finish(
        self,
        error: BaseException | None = None,
        failed: Failed | None = None,
        namespace: Mapping[str, Any] | None = None,
        left: BaseException | None = None,
    ) -> Recording:
        """Ends the recording and puts everything back. error: the user's, which is read and not kept; left: what ended the
        program and is none (`sys.exit`), likewise.

        Raises RuntimeError where the recording never started.
        """
        failure: Failure | None = None
        reached: Moment | None = None
        logs: dict[int, DeviceLog] = {}
        if not self._logs or self._witness is None or self._phases is None:
            self.put_back()
            raise RuntimeError("a recording that did not start can't be finished")
        try:
            self._phases.stop()
            if self._modules is not None:
                self._modules.stop()
            with self._guard("reading the error"):
                if error is not None:
                    reached = self._moment()
                    failure = failure_of(error, failed[1] if failed else None)
            with self._guard("finding the module that failed"):
                if error is not None and failure is not None:
                    module, kind, operator = failing_place(error)
                    failure = replace(failure, module=module or kind, operator=operator)
            if not self._checkpoints or self._checkpoints[-1].kind != "after":
                with self._guard("the last checkpoint"):
                    self._checkpoints.append(Checkpoint("after", "after", "", 0, self._moment()))
            with self._guard("looking at the variables at the end"):
                self._witness.cell_ended(namespace, error)
            with self._guard("stopping the logs"):
                logs = _stopped(self._logs)
            translator = PositionTranslator(logs)
            self._checkpoints = [translator.checkpoint(point) for point in self._checkpoints]
            reached = translator.moment(reached) if reached is not None else None
            if error is not None and failure is not None and reached is not None:
                with self._guard("placing the error"):
                    failure = self._place_error(failure, is_out_of_memory(error), reached, failed, logs)
            stand_ins: tuple[StandIn, ...] = ()
            with self._guard("counting stand-ins"):
                stand_ins = self._reads.stand_ins(self._place, error, left) if self._reads is not None else ()
            compiled = CompiledCode()
            with self._guard("reading what was compiled"):
                compiled = self._compiler.read(self._place)
            with self._guard("the device's notes"):
                for note in self._machine.notes():
                    if note not in self._machine_notes_before:
                        self._guard.add_note(note)
            self._add_note_of_thinning(self._phases.spans)
            with self._guard("looking for what is hidden"):
                for seen in self._witness.modules():
                    self._phases.hidden.exists(seen)
                for note in self._phases.hidden.notes(compiled):
                    self._guard.add_note(note)
        finally:
            self.put_back()
        self.recorded = Recording(
            torch=str(torch.__version__),
            primary=self._primary,
            logs=logs,
            checkpoints=tuple(self._checkpoints),
            spans=tuple(
                translator.span(span)
                for span in sorted(self._phases.spans, key=lambda span: (span.start.tick, -span.end.tick))
            ),
            sightings=tuple(translator.sighting(look) for look in self._witness.sightings),
            error=failure,
            stand_ins=stand_ins,
            notes=tuple(self._guard.notes),
            overhead_seconds=self._guard.seconds,
            left_out=dict(self._left_out + self._untold),
            modules=self._modules.trace() if self._modules is not None else ModuleTrace(),
            own_file=self._own_file or "",
            compiled=compiled,
            eager=self._phases.hidden.eager(compiled.graphs) if self._phases is not None else None,
        )
        return self.recorded

    def _place_error(
        self,
        failure: Failure,
        out_of_memory: bool,
        reached: Moment,
        failed: Failed | None,
        logs: Mapping[int, DeviceLog],
    ) -> Failure:
        """Puts the error's row before the row "after"."""
        moment = reached
        rows = [point for point in self._checkpoints if point.kind != "after"]
        if out_of_memory:
            found = failing_request(logs, failure.device, rows[-1].moment.positions, reached.positions)
            if found is not None:
                device, event = found
                timeline = Timeline(logs[device].start, logs[device].events, logs[device].settings)
                moment = moment_of_failure(reached, logs[device], event, timeline)
                failure = with_event(failure, logs[device], event, timeline)
        statement, line, iteration, loops = failed if failed is not None else ("", 0, (), ())
        label = statement.strip().partition("\n")[0] or "error"
        self._checkpoints.insert(len(rows), Checkpoint("error", label, statement, line, moment, iteration, loops))
        return failure

    # Moments

    def _moment(self, *, exact: bool = True) -> Moment:
        self._machine.settle()
        return self._moment_as_it_is(exact=exact)

    def _moment_as_it_is(self, *, exact: bool = True) -> Moment:
        self._ticks += 1
        positions, counters = {}, {}
        for index, log in self._logs.items():
            positions[index], counters[index] = log.moment(exact)
        return Moment(positions, counters, self._ticks)

    def _cheap_positions(self) -> Callable[[], Mapping[int, int]] | None:
        """Where the logs stand, to be asked for each module's forward; None on a real device, which takes its time to answer."""
        if any(log.growing is None for log in self._logs.values()):
            return None
        return lambda: {index: log.position() for index, log in self._logs.items()}

    def _step_ended(self) -> None:
        if self._iterations is not None and self._iterations.ends[0]:
            self._machine.settle()
            self._iterations.ended()

    # Long runs

    def _grown(self) -> None:
        """Thins what is kept, once it is too much."""
        seen = self._seen
        if seen is None or self._phases is None or seen.weight <= self._most:
            return
        thin(seen, self._primary, self._most)
        # Where iterations are huge, little can be left out: not to try again at once.
        self._most = max(self._most, seen.weight * 3 // 2)
        needed = seen.positions(self._phases.begun())
        for index, log in self._logs.items():
            log.forget(needed.get(index, set()))

    # The end

    def put_back(self) -> None:
        """Undoes whatever `start` did, as far as it came. May be called twice, also where an interrupt ended the first call."""
        with self._guard("putting PyTorch back"):
            if self._phases is not None:
                self._phases.stop()
        with self._guard("ending the logs"):
            _stopped(self._logs)
        if self._witness is not None:
            self._witness.forget()

    def _add_note_of_thinning(self, spans: Iterable[Span]) -> None:
        count = sum(self._left_out.values()) + sum(span.skipped for span in spans)
        if count:
            self._guard.add_note(
                f"The run was long: {count:,} iterations in its middle were measured and not kept; those with the highest peak "
                "and the largest growth were. The peak of the whole is exact."
            )

    def _place(self, file: str, line: int) -> str:
        """``14`` in the cell itself, ``trainer.py:210`` elsewhere. Only a file's name: paths are nobody's business."""
        if file == self._own_file:
            return str(line)
        if cell := cell_of(file):
            return f"{cell}, line {line}"
        name = os.path.basename(file.replace("\\", "/"))
        return f"{name}:{line}"


def _stopped(logs: dict[int, Log]) -> dict[int, DeviceLog]:
    """Stops these logs, one by one: what an interrupt leaves is stopped the next time."""
    stopped = {}
    for index in list(logs):
        stopped[index] = logs[index].stop()
        del logs[index]
    return stopped
