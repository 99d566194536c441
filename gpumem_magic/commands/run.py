"""``gpumem run SCRIPT``: a script measured as a cell is.

The script's standard output and exit status are its own; everything of ours goes to standard error.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpumem_magic.commands.children import measured_children
from gpumem_magic.commands.common import INTERRUPTED
from gpumem_magic.commands.words import told_of_a_script
from gpumem_magic.devices.base import DeviceError
from gpumem_magic.failures import swallowed
from gpumem_magic.recording.progress import StopRun
from gpumem_magic.recording.script import ScriptRun, as_main, find_module
from gpumem_magic.session import device as chosen_device
from gpumem_magic.session import recording
from gpumem_magic.snapshot.whole_file import check_target

if TYPE_CHECKING:
    from gpumem_magic.user_report import Report


def run(options: argparse.Namespace) -> int:
    """Runs the script and prints its report. The script's exit status; `options.arguments`: the script's."""
    parser: argparse.ArgumentParser = options.parser
    try:
        check_target("--json", options.json, ())
        stand_ins = [_stand_in(text) for text in options.stand_in]
    except ValueError as error:
        parser.error(str(error))
    spec = None
    if options.is_module:
        try:
            spec = find_module(options.script)
        except ImportError as error:
            parser.error(str(error))
    path = options.script if spec is None else str(spec.origin)
    if not os.path.isfile(path):
        parser.error(f"there is no file {path!r}")
    try:
        script = ScriptRun(path)
    except SyntaxError as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        return 1
    except OSError as error:
        parser.error(str(error))
    target = None if options.json is None else Path(options.json).absolute()  # the script may change the folder
    found = _open(parser, options, script)
    status = 0
    early = True
    with as_main(path, options.arguments, spec) as main_module, ExitStack() as around:
        machine = chosen_device.virtual()
        children = around.enter_context(measured_children(None if machine is None else machine.spec.text))
        if stand_ins:
            from gpumem_magic.virtual.engine.supplied import stand_in

            for value, line in stand_ins:
                around.enter_context(stand_in(value, line=line))
        try:
            with suppress(StopRun):
                script.run(main_module)
        except SystemExit as error:
            report = _close(found, script, error, main_module.__dict__)
            status = _exit_status(error.code)
        except BaseException as error:
            traceback = script.own_frames(error.__traceback__)
            report = _close(found, script, error, main_module.__dict__)
            _flush()
            sys.excepthook(type(error), error.with_traceback(traceback), traceback)
            status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        else:
            report = _close(found, script, None, main_module.__dict__)
            early = False
    _flush()
    if script.hook_failure is not None:
        _say(f"measuring stopped partway ({script.hook_failure}); the script itself ran on")
    if report is not None:
        # A script that left before it touched a device has said why itself; its processes speak for themselves.
        silent = (early or bool(children)) and not _touched_a_device(report)
        _hand_over(report, target, shown=not silent)
    return status


def _stand_in(text: str) -> tuple[Any, str | None]:
    """``VALUE`` or ``VALUE@PLACE`` as a number (or a list of them) and a place. Raises ValueError."""
    number, _, place = text.partition("@")
    try:
        return ast.literal_eval(number), place or None
    except (ValueError, SyntaxError):
        raise ValueError(
            f"--stand-in takes a number, True, False or a list, and a place behind @, not {text!r}"
        ) from None


def _touched_a_device(report: Report) -> bool:
    return any(row.peak_allocated for one in (report, *report.devices) for row in one.checkpoints)


def _open(parser: argparse.ArgumentParser, options: argparse.Namespace, run: ScriptRun) -> Any:
    """The recording, with the script told of it; None, with a word about why, where it cannot be."""
    found: Any = None
    try:
        found = recording.open_recording(options.device, names=run.names, own_file=run.path, words=told_of_a_script)
        run.observe(found.observer(options.max_iterations, until_repeat=options.until_repeat, source=run.source))
    except DeviceError as error:
        parser.error(str(error))
    except Exception as error:
        _say(f"measuring is not possible here ({swallowed(error).splitlines()[0]}); the script runs unmeasured")
    return found


def _close(found: Any, run: ScriptRun, error: BaseException | None, namespace: dict[str, Any]) -> Any:
    if found is None:
        return None
    traceback: TracebackType | None = None if error is None else error.__traceback__
    # Leaving by sys.exit is no failure.
    failure = None if isinstance(error, SystemExit) else error
    try:
        return found.close(failure, None if failure is None else run.failed(traceback), namespace)
    except Exception as own:
        _say(f"the report could not be made ({swallowed(own).splitlines()[0]}); the script itself ran normally")
        return None


def _hand_over(report: Any, target: Path | None, *, shown: bool) -> None:
    try:
        if target is not None:
            report.save(target)
    except Exception as error:
        _say(f"the report could not be written to {str(target)!r} ({swallowed(error).splitlines()[0]})")
    try:
        if shown:
            print(report, file=sys.stderr)
    except Exception as error:
        _say(f"the report could not be shown ({swallowed(error).splitlines()[0]})")


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


def _say(text: str) -> None:
    print(f"gpumem: {text}", file=sys.stderr)
