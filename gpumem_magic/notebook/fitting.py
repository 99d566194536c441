"""``%%gpumem --fit`` and ``--compare``: trials of a cell. The cell itself does not run in the notebook."""

# IPython's display and errors carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from gpumem_magic.devices.base import DeviceError
from gpumem_magic.patching import warnings_remembered
from gpumem_magic.recording.cell import PreparedCell
from gpumem_magic.views.display import in_terminal

if TYPE_CHECKING:
    from gpumem_magic.trials.tried import Tried


# What is worth varying, by its name and value.
_LIKELY = re.compile(r"batch|^bs$|^b$|^n$|len|rows|size|tokens", re.IGNORECASE)
_LEAST = 2


def fit(shell: Any, cell: PreparedCell, options: argparse.Namespace) -> None:
    """Shows the answer, and binds it where ``-o`` says so. Raises UsageError, in one line."""
    from gpumem_magic.trials import cards
    from gpumem_magic.trials.programs import CellProgram
    from gpumem_magic.trials.what_fits import largest

    progress = _TrialLine(quiet=options.quiet)
    try:
        devices = options.on or options.device
        chosen = None if devices is None else cards.names_of(devices)
        found = largest(CellProgram(shell, cell), options.fit, chosen, subject="cell", told=progress.told)
    except DeviceError as error:
        raise UsageError(f"%%gpumem --fit: {error}") from None
    finally:
        progress.end()
    _give(shell, found, options)


def compare_compiled(shell: Any, cell: PreparedCell, options: argparse.Namespace) -> None:
    """``%%gpumem --compare compile``, as `fit`."""
    from gpumem_magic.trials.compiling import compare
    from gpumem_magic.trials.programs import CellProgram

    try:
        found = compare(CellProgram(shell, cell), options.device)
    except DeviceError as error:
        raise UsageError(f"%%gpumem --compare: {error}") from None
    _give(shell, found, options)


def _give(shell: Any, found: object, options: argparse.Namespace) -> None:
    from IPython.display import display

    if options.output is not None:
        shell.user_ns[options.output] = found
    if not options.quiet:
        with warnings_remembered():  # matplotlib changes them
            display(found)


def offer(cell: PreparedCell, namespace: Mapping[str, Any]) -> str:
    """After a cell ran out of memory: what to type to learn how large its batch may be; "" where it has no number to vary.

    Nothing of the user's is asked: only names whose values are plain whole numbers count.
    """
    from gpumem_magic.recording.cell import names_in
    from gpumem_magic.trials.process import refuse_where_impossible
    from gpumem_magic.trials.values import VaryError, with_values

    try:
        refuse_where_impossible()
    except DeviceError:
        return ""
    if cell.needs_await:
        return ""
    found = []
    for name in names_in(cell.python):
        value = namespace.get(name)
        if type(value) is not int or value < _LEAST or name.startswith("_"):
            continue
        with suppress(VaryError):
            with_values(cell.tree, {name: value})
            found.append(name)
    likely = [name for name in found if _LIKELY.search(name)]
    if not likely:
        return ""
    name = min(likely, key=lambda one: ("batch" not in one.lower(), one))
    return (
        f"gpumem: `%%gpumem --fit {name}=1..{namespace[name]}` above this cell says how large {name} may be, by trials in "
        "processes of their own."
    )


class _TrialLine:
    """One line that says what was run last; it goes when the answer comes."""

    def __init__(self, *, quiet: bool) -> None:
        self._shown: Any = None
        self._quiet = quiet or in_terminal() or not sys.stdout
        self._count = 0

    def told(self, device: str, one: Tried) -> None:
        self._count += 1
        if self._quiet:
            return
        from IPython.display import display

        values = ", ".join(f"{name}={value}" for name, value in one.values.items())
        text = f"Trial {self._count}, on {device}: {values} {'fits' if one.fits else 'fails'}"
        bundle = {"text/plain": text}
        if self._shown is None:
            self._shown = display(bundle, raw=True, display_id=True)
        else:
            self._shown.update(bundle, raw=True)

    def end(self) -> None:
        if self._shown is not None:
            self._shown.update({"text/plain": ""}, raw=True)
