"""Each situation in a process of its own, split off from one that has imported what takes long."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import io
import json
import os
import sys
import time
import traceback
from typing import Any

from situations.reading import Situation

_SECONDS = 240
_WARM = ("torch", "transformers", "matplotlib")


def warm_up() -> None:
    """Imports what most situations use."""
    for name in _WARM:
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    from IPython.core.interactiveshell import InteractiveShell  # noqa: F401

    import gpumem_magic.session.recording  # noqa: F401


def run(situation: Situation) -> dict[str, Any]:
    """{"text", "causes", "blamed", "notes", "seconds"}, or {"skipped": why}."""
    if not situation.cells:
        return {"skipped": "its cells are not here"}
    began = time.monotonic()
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        # Says where it stands, to the standard error, and ends the process.
        faulthandler.dump_traceback_later(_SECONDS, exit=True)
        try:
            answer = _answer(situation)
        except BaseException:
            answer = {"skipped": f"it failed: {traceback.format_exc()}"}
        with os.fdopen(sending, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    answer = json.loads(text) if text else {"skipped": f"no answer within {_SECONDS} seconds"}
    return {**answer, "seconds": round(time.monotonic() - began, 1)}


def _answer(situation: Situation) -> dict[str, Any]:
    from IPython.core.interactiveshell import InteractiveShell

    import gpumem_magic
    from gpumem_magic.views.text import render

    shell = InteractiveShell.instance()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(sys.stdout):
        shell.run_line_magic("load_ext", "gpumem_magic")
        shell.run_line_magic("gpumem_device", situation.device)
        *before, cell = situation.cells
        for code in before:
            result = shell.run_cell(code, store_history=True)
            error = result.error_before_exec or result.error_in_exec
            if isinstance(error, ImportError):
                return {"skipped": str(error)}
            if error is not None and not isinstance(error, Exception):
                return {"skipped": f"a cell before failed: {error!r}"}
        shell.run_cell("%%gpumem -q\n" + cell, store_history=True)
    report = gpumem_magic.last_report()
    if report is None:
        return {"skipped": f"no report:\n{printed.getvalue()[-2000:]}"}
    return {
        "text": render(report, width=160),
        "causes": [one.name for one in report.causes],
        "blamed": [one.name for one in report.causes if not one.describes],
        "notes": "\n".join(report.notes),
        "error": "" if report.error is None else f"{report.error.type}: {report.error.message}",
    }
