"""``gpumem run SCRIPT``: a script measured as a cell is.

The script's standard output and exit status are its own; everything of ours goes to standard error.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from gpumem_magic.commands import virtual_ranks
from gpumem_magic.commands.children import measured_children
from gpumem_magic.commands.common import INTERRUPTED, program_of
from gpumem_magic.commands.ending import TERMINATED, Terminated, ending_as_after_ctrl_c
from gpumem_magic.commands.launch import device_of_a_rank, run_processes
from gpumem_magic.commands.shown_ranks import show
from gpumem_magic.commands.written import hand_over, say, targets
from gpumem_magic.devices.base import DeviceError
from gpumem_magic.failures import swallowed
from gpumem_magic.recording.progress import StopRun
from gpumem_magic.recording.script import ScriptRun, as_main, main_of
from gpumem_magic.report.script_words import told_of_a_script
from gpumem_magic.session import device as chosen_device
from gpumem_magic.session import recording
from gpumem_magic.session.rank_process import ALONE, RankProcess, from_environment, place_of
from gpumem_magic.tracebacks import leave_out_ours, traceback_of

if TYPE_CHECKING:
    from gpumem_magic.user_report import Report

# What starts a program's processes, each as a command of its own: by their modules, and by the names of their commands.
_LAUNCHERS = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "python -m torch.distributed.launch",
    "accelerate.commands.launch": "accelerate launch",
    "torchrun": "torchrun",
    "accelerate": "accelerate launch",
}


def run(options: argparse.Namespace) -> int:
    """Runs the script and prints its report. The script's exit status; `options.arguments`: the script's."""
    parser: argparse.ArgumentParser = options.parser
    try:
        written_to = targets(options)
        stand_ins = [_stand_in(text) for text in options.stand_in]
        start = _launcher_of(options)
    except ValueError as error:
        parser.error(str(error))
    _refuse_launchers(parser, options)
    try:
        path, spec = program_of(options)
    except ValueError as error:
        parser.error(str(error))
    if start is not None:
        return start(options)
    try:
        script = ScriptRun(path)
    except SyntaxError as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        return 1
    except OSError as error:
        parser.error(str(error))
    alone = bool(os.environ.pop(ALONE, None))
    rank = from_environment()
    options.device = device_of_a_rank(options.device, rank)
    main_module = main_of(path, spec)
    measured = _MeasuredScript(script, _open(parser, options, script, main_module), rank)
    if rank is not None:
        rank.begin(measured.so_far, lambda: show(rank.folder, written_to, elsewhere=True))
    with ExitStack() as until_told:
        with as_main(main_module, options.arguments), ExitStack() as around:
            machine = chosen_device.virtual()
            children = around.enter_context(measured_children(None if machine is None else machine.spec.text))
            if alone and rank is not None:
                from gpumem_magic.virtual.torch_face.alone import one_of_many

                measured.alone = around.enter_context(one_of_many(rank.file.rank, rank.file.world, rank.folder))
            if stand_ins:
                from gpumem_magic.virtual.engine.supplied import stand_in

                for value, line in stand_ins:
                    around.enter_context(stand_in(value, line=line))
            measured.run(main_module, until_told)
        try:
            measured.tell(written_to, has_children=bool(children))
        except KeyboardInterrupt:
            say("interrupted before the report was complete")
    return measured.status


@dataclass
class _MeasuredScript:
    """A script that is run and measured. found: its recording; None where it cannot be measured. alone: what stands for the other
    ranks, where one is emulated by itself. status: its exit status. left_early: by an error or by ``sys.exit``. where: the place
    of its error."""

    script: ScriptRun
    found: Any
    rank: RankProcess | None
    alone: Any = None
    report: Any = None
    status: int = 0
    left_early: bool = True
    where: str = ""

    def so_far(self) -> Any:
        """The report up to here, of a script that has to be left behind; None where it is not measured."""
        return None if self.found is None else self.found.close()

    def run(self, main_module: ModuleType, until_told: ExitStack) -> None:
        """Runs the script to its end, and makes the report. An error of its own is shown as Python shows it. until_told: left
        when the report was shown."""
        ending = None if self.rank is not None else until_told.enter_context(ending_as_after_ctrl_c(once=True))
        try:
            with suppress(StopRun):
                try:
                    self.script.run(main_module)
                finally:
                    if ending is not None:
                        ending.program_ended()
                    elif self.rank is not None:
                        self.rank.leaves()
        except SystemExit as error:
            # Leaving by sys.exit is no failure, except of a rank that others wait for.
            fails = self.rank is not None and error.code not in (None, 0)
            self._close(error if fails else None, main_module, left=error)
            self.status = _exit_status(error.code)
        except BaseException as error:
            if ending is not None and ending.came and isinstance(error, KeyboardInterrupt):
                error = Terminated().with_traceback(error.__traceback__)
            self.where = place_of(error)
            traceback = self.script.own_frames(error.__traceback__)
            self._close(error, main_module)
            _flush()
            if not isinstance(error, Terminated):
                leave_out_ours(error.with_traceback(traceback))
                sys.excepthook(type(error), error, traceback_of(error))
            self.status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        else:
            self._close(None, main_module)
            self.left_early = False
        if ending is not None and ending.came:
            # (It had no word of its own to say why it left.)
            self.left_early, self.status = False, TERMINATED

    def _close(self, failure: BaseException | None, main_module: ModuleType, left: SystemExit | None = None) -> None:
        if self.found is None:
            return
        traceback: TracebackType | None = None if failure is None else failure.__traceback__
        try:
            place = None if failure is None else self.script.failed(traceback)
            self.report = self.found.close(failure, place, main_module.__dict__, left=left)
        except KeyboardInterrupt:
            say("interrupted while the report was made: there is none")
        except Exception as own:
            say(f"the report could not be made ({swallowed(own).splitlines()[0]}); the script itself ran normally")

    def tell(self, written_to: Mapping[str, Path], *, has_children: bool) -> None:
        """Shows the report and writes it. written_to: the files for all ranks, by flag."""
        _flush()
        if self.script.hook_failure is not None:
            say(f"measuring stopped partway ({self.script.hook_failure}); the script itself ran on")
        report = self.report
        if report is not None and self.alone is not None:
            report = _with_notes(report, self.alone.notes())
        # A script that left before it touched a device has said why itself; its processes speak for themselves.
        silent = (self.left_early or has_children) and (report is None or not _touched_a_device(report))
        if report is not None:
            # The processes of one job write a file each.
            own = {flag: _of_rank(path, self.rank) for flag, path in written_to.items()}
            hand_over(report, own, line="" if silent else _of_one_rank(self.rank, report))
        if self.rank is not None:
            _answer(self.rank, report, self.alone, written_to, self.where)


def _refuse_launchers(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    launcher = _LAUNCHERS.get(options.script if options.is_module else os.path.basename(options.script))
    if launcher is not None:
        flag = f" --device {options.device}" if options.device else ""
        parser.error(
            f"{launcher} starts processes that would not be measured. Let it start the command in each of them: "
            f"`{launcher} ARGUMENTS -m gpumem_magic.cli run{flag} SCRIPT -- ARGUMENTS`"
        )


def _of_rank(path: Path, rank: RankProcess | None) -> Path:
    return path if rank is None else path.with_name(f"{path.stem}.rank{rank.file.rank}{path.suffix}")


def _launcher_of(options: argparse.Namespace) -> Callable[[argparse.Namespace], int] | None:
    """What starts the ranks; None where none were asked for. Raises ValueError, in one line."""
    if options.nproc and options.ranks:
        raise ValueError("--nproc starts processes, --ranks emulates them: give one of the two")
    if options.as_ranks is not None and not options.ranks:
        raise ValueError("--as names ranks of --ranks N")
    if options.ranks:
        virtual_ranks.asked(options)
        return virtual_ranks.run
    if options.time_limit is not None and not options.nproc:
        raise ValueError("--time-limit is for --nproc and --ranks")
    return run_processes if options.nproc else None


def _stand_in(text: str) -> tuple[Any, str | None]:
    """``VALUE`` or ``VALUE@PLACE`` as a number (or a list of them) and a place. Raises ValueError."""
    number, _, place = text.partition("@")
    try:
        return ast.literal_eval(number), place or None
    except (ValueError, SyntaxError):
        raise ValueError(
            f"--stand-in takes a number, True, False or a list, and a place behind @, not {text!r}"
        ) from None


def _answer(rank: RankProcess, report: Any, one: Any, written_to: Mapping[str, Path], where: str) -> None:
    """Writes a rank's report, and shows all ranks' where it is the last to end."""
    try:
        rank.end(report, () if one is None else one.groups, where=where)
        if rank.is_last():
            show(rank.folder, written_to, elsewhere=True)
    except Exception as error:
        say(f"rank {rank.file.rank}'s report could not be written ({swallowed(error).splitlines()[0]})")


def _with_notes(report: Any, notes: Sequence[str]) -> Any:
    return type(report).of(replace(report, remarks=(*notes, *report.remarks)))


def _touched_a_device(report: Report) -> bool:
    return any(row.peak_allocated for one in (report, *report.devices) for row in one.checkpoints)


def _open(parser: argparse.ArgumentParser, options: argparse.Namespace, run: ScriptRun, main_module: ModuleType) -> Any:
    """The recording, with the script told of it; None, with a word about why, where it cannot be."""
    found: Any = None
    try:
        found = recording.open_recording(
            options.device,
            names=run.names,
            user_ns=main_module.__dict__,
            own_file=run.path,
            words=told_of_a_script,
        )
        observer = found.observer(options.max_iterations, until_repeat=options.until_repeat, source=run.source)
        run.observe(observer, opens=True)
    except DeviceError as error:
        parser.error(str(error))
    except Exception as error:
        say(f"measuring is not possible here ({swallowed(error).splitlines()[0]}); the script runs unmeasured")
    return found


def _of_one_rank(rank: RankProcess | None, report: Report) -> str | None:
    """What a rank says itself: all ranks' report follows. None, for the whole report, where the script is no rank."""
    if rank is None:
        return None
    return f"gpumem: rank {rank.file.rank}: {report.answer}\n" if rank.shows else ""


def _exit_status(code: Any) -> int:
    """What Python makes of ``sys.exit(code)``."""
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code)
    _flush()
    print(code, file=sys.stderr)
    return 1


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()
