"""``%%gpumem --fit`` and ``--compare``: trials of a cell. The cell itself does not run in the notebook."""

# IPython's errors carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from IPython.core.error import UsageError

from gpumem_magic.devices.base import DeviceError
from gpumem_magic.notebook.giving import give
from gpumem_magic.notebook.stopping import stopped_in_a_line
from gpumem_magic.recording.cell import PreparedCell
from gpumem_magic.views.progress_line import ProgressLine

# What is worth varying, by its name and value.
_LIKELY = re.compile(r"batch|^bs$|^b$|^n$|len|rows|size|tokens", re.IGNORECASE)
_LEAST = 2


def fit(shell: Any, cell: PreparedCell, options: argparse.Namespace) -> None:
    """Shows the answer, and binds it where ``-o`` says so. Raises UsageError, in one line."""
    from gpumem_magic.trials import cards
    from gpumem_magic.trials.programs import CellProgram
    from gpumem_magic.trials.what_fits import largest

    line = ProgressLine(quiet=options.quiet)
    try:
        devices = options.on or options.device
        chosen = None if devices is None else cards.names_of(devices)
        with stopped_in_a_line():
            found = largest(CellProgram(shell, cell), options.fit, chosen, subject="cell", say=line)
        give(shell, found, options, line)
    except DeviceError as error:
        raise UsageError(f"%%gpumem --fit: {error}") from None
    finally:
        line.end()


def compare_compiled(shell: Any, cell: PreparedCell, options: argparse.Namespace) -> None:
    """``%%gpumem --compare compile``, as `fit`."""
    from gpumem_magic.trials.compiling import compare
    from gpumem_magic.trials.programs import CellProgram

    try:
        with stopped_in_a_line():
            found = compare(CellProgram(shell, cell), options.device)
    except DeviceError as error:
        raise UsageError(f"%%gpumem --compare: {error}") from None
    give(shell, found, options)


def offer(cell: PreparedCell, namespace: Mapping[str, Any]) -> str:
    """After a cell ran out of memory: what to type to learn what would make it fit, and how large its batch may be; "" where no
    trial could run.

    Nothing of the user's is asked: only names whose values are plain whole numbers count.
    """
    from gpumem_magic.trials.process import refuse_where_impossible

    try:
        refuse_where_impossible()
    except DeviceError:
        return ""
    if cell.needs_await:
        return ""
    name, value = _worth_varying(cell, namespace)
    if not name:
        return "gpumem: `%%gpumem --advise` above this cell says what would make it fit, by trials in processes of their own."
    return (
        f"gpumem: `%%gpumem --fit {name}=1..{value}` above this cell says how large {name} may be, "
        "`%%gpumem --advise` what would make it fit, by trials in processes of their own."
    )


def _worth_varying(cell: PreparedCell, namespace: Mapping[str, Any]) -> tuple[str, int]:
    """The name of a number that is likely the size of something, and the number; "" for none.

    A variable, or else an argument or the like that the cell gives a batch's size: what models are made of are sizes, too.
    """
    from gpumem_magic.recording.cell import names_in
    from gpumem_magic.trials.given_numbers import given_numbers
    from gpumem_magic.trials.values import VaryError, with_values

    names = names_in(cell.python)
    found = []
    for name in names:
        value = namespace.get(name)
        if type(value) is not int or value < _LEAST or name.startswith("_") or not _LIKELY.search(name):
            continue
        with suppress(VaryError):
            with_values(cell.tree, {name: value})
            found.append((name, value))
    for one in given_numbers(cell.tree):
        if "batch" in one.name.lower() and one.name.isidentifier() and one.name not in names and one.value >= _LEAST:
            found.append((one.name, one.value))
            break
    return min(found, key=lambda one: ("batch" not in one[0].lower(), one[0]), default=("", 0))
