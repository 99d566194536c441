"""``gpumem run SCRIPT``: a script measured as a cell is.

The script's standard output and exit status are its own; everything of ours goes to standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from gpumem_magic.commands.common import INTERRUPTED
from gpumem_magic.devices.base import DeviceError
from gpumem_magic.failures import swallowed
from gpumem_magic.recording.script import ScriptRun, as_main
from gpumem_magic.session import recording
from gpumem_magic.snapshot.whole_file import check_target


def run(options: argparse.Namespace) -> int:
    """Runs the script and prints its report. The script's exit status; `options.arguments`: the script's."""
    parser: argparse.ArgumentParser = options.parser
    try:
        check_target("--json", options.json, ())
    except ValueError as error:
        parser.error(str(error))
    if not os.path.isfile(options.script):
        parser.error(f"there is no file {options.script!r}")
    try:
        script = ScriptRun(options.script)
    except SyntaxError as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        return 1
    except OSError as error:
        parser.error(str(error))
    target = None if options.json is None else Path(options.json).absolute()  # the script may change the folder
    found = _open(parser, options.device, script)
    status = 0
    report = None
    with as_main(options.script, options.arguments) as main_module:
        try:
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
    _flush()
    if script.hook_failure is not None:
        _say(f"measuring stopped partway ({script.hook_failure}); the script itself ran on")
    if report is not None:
        _hand_over(report, target)
    return status


def _open(parser: argparse.ArgumentParser, device: str | None, run: ScriptRun) -> Any:
    """The recording, with the script told of it; None, with a word about why, where it cannot be."""
    found: Any = None
    try:
        found = recording.open_recording(device, names=run.names, own_file=run.path)
        run.observe(found.observer(None, True, source=run.source))
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


def _hand_over(report: Any, target: Path | None) -> None:
    try:
        if target is not None:
            report.save(target)
    except Exception as error:
        _say(f"the report could not be written to {str(target)!r} ({swallowed(error).splitlines()[0]})")
    try:
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
