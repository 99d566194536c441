"""The lines of ``%gpumem_auto`` and ``%gpumem_history``: parsed here, done by `auto` and `history`."""

# IPython's decorators and errors carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError

from gpumem_magic.notebook import auto
from gpumem_magic.notebook.history import waterfall


def auto_line(shell: Any, line: str) -> None:
    """Does what a line says. Raises UsageError, in one line."""
    word = line.strip()
    if word == "on":
        print(auto.turn_on(shell))
    elif word == "off":
        print(auto.turn_off())
    elif not word:
        print("Every cell is recorded." if auto.is_on() else "Cells are not recorded: `%gpumem_auto on` begins.")
    else:
        raise UsageError(f"unexpected {word!r}: %gpumem_auto on | off")


def history_line(line: str) -> None:
    """Prints the waterfall over the notebook's cells. Raises UsageError, in one line."""
    if line.strip():
        raise UsageError("%gpumem_history takes no arguments")
    history = auto.history()
    if not history.records and not auto.is_on():
        raise UsageError("no cell has been recorded: `%gpumem_auto on` records those that follow")
    print(waterfall(history.records, history.left_out))
