"""``%%gpumem --advise`` and ``%gpumem_advise``: what would make a cell fit, or leave room. It does not run in the notebook."""

# IPython's errors carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

from IPython.core.error import UsageError

from gpumem_magic.devices.base import DeviceError
from gpumem_magic.notebook.giving import give
from gpumem_magic.notebook.stopping import Stopped, stopped_in_a_line
from gpumem_magic.recording.cell import PreparedCell, prepare
from gpumem_magic.views.progress_line import ProgressLine


def advise_last(shell: Any, options: argparse.Namespace) -> None:
    """The last cell that ran. Raises UsageError, in one line."""
    text = _last_cell(shell)
    if text is None:
        raise UsageError("%gpumem_advise: no cell has run yet: run one, or write %%gpumem --advise above it")
    first, _, rest = text.lstrip().partition("\n")
    body, above = (rest, 1) if first.startswith("%%gpumem") else (text, 0)
    try:
        prepared = prepare(shell, body, above)
    except SyntaxError as error:
        raise UsageError(f"the last cell can't be read ({error.msg}, line {error.lineno})") from None
    advise(shell, prepared, options, above, "%gpumem_advise")


def _last_cell(shell: Any) -> str | None:
    """The text of the last cell that is more than lines of this package's magics, this one among them."""
    for text in reversed(shell.history_manager.input_hist_raw):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not all(line.startswith(("%gpumem", "%load_ext", "%reload_ext")) for line in lines):
            return str(text)
    return None


def advise(
    shell: Any, cell: PreparedCell, options: argparse.Namespace, lines_above: int = 1, magic: str = "%%gpumem --advise"
) -> None:
    """Shows the advice, and binds it where ``-o`` says so. Raises UsageError, in one line."""
    from gpumem_magic.advice.advise import MINUTES, CellFails, advised
    from gpumem_magic.advice.answer import Advice
    from gpumem_magic.advice.trial import CellTrials
    from gpumem_magic.trials import cards
    from gpumem_magic.trials.programs import AWAITS

    if cell.needs_await:
        raise UsageError(f"{magic}: {AWAITS}")
    line = ProgressLine(quiet=options.quiet)
    minutes = getattr(options, "minutes", None) or MINUTES
    python = cell.python.removeprefix("\n" * lines_above)
    try:
        devices = [cards.usual()] if options.device is None else cards.names_of(options.device)
        if len(devices) > 1:
            raise DeviceError("advice is for one card")
        with stopped_in_a_line():
            found = advised(CellTrials(shell, devices[0], lines_above), python, line, minutes)
        give(shell, Advice(found, partial(_as_typed, _lines_typed(cell))), options, line)
        if found.stopped:
            raise Stopped("the other trials were ended. Nothing of the cell ran in the notebook.")
    except (DeviceError, CellFails) as error:
        raise UsageError(f"{magic}: {error}") from None
    finally:
        line.end()


def _lines_typed(cell: PreparedCell) -> dict[str, str]:
    """IPython's own lines (``!``, ``%``): each as Python -> as somebody typed it."""
    lines = zip(cell.python.splitlines(), cell.raw.splitlines(), strict=False)
    return {python.strip(): raw.strip() for python, raw in lines if python != raw}


def _as_typed(lines: Mapping[str, str], code: str) -> str:
    """A changed cell with these lines as somebody typed them."""
    return "\n".join(
        line.replace(line.strip(), lines[line.strip()]) if line.strip() in lines else line for line in code.splitlines()
    )
