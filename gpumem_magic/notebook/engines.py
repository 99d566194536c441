"""``%%gpumem --engines [0,3]``: the cell on engines of ipyparallel, as its ``%%px`` runs it, and one report of all of them.

ipyparallel itself is not imported: its magic, which the user's client brought, carries everything.
"""

# IPython's errors carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from typing import Any

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython

from gpumem_magic.failures import swallowed, swallows
from gpumem_magic.notebook.giving import give_report
from gpumem_magic.report.ranks import GONE, RUNNING
from gpumem_magic.report.schema import report_from_dict, report_to_dict
from gpumem_magic.report.side_by_side import OfRank, state_of, together
from gpumem_magic.session import recording
from gpumem_magic.trials.roles import named_ranks
from gpumem_magic.user_report import Report

# What is about copies of the cell, which run here.
_NOT_WITH = ("fit", "on", "ranks", "as_ranks", "advise", "compare")
# How long engines have to hand over their reports, in seconds: one may hang in the cell.
_PATIENCE = 10.0
# On an engine: the report before the cell.
_before: Report | None = None


def on_engines(shell: Any, code: str, options: argparse.Namespace) -> None:
    """Shows the one report, and binds it where ``-o`` says so. Raises UsageError, in one line, or ipyparallel's error."""
    __tracebackhide__ = True
    for name in _NOT_WITH:
        if getattr(options, name):
            flag = "as" if name == "as_ranks" else name
            raise UsageError(f"%%gpumem: --engines and --{flag} do not go together")
    client, engines = chosen(shell, options.engines, "%%gpumem")
    client[engines].apply_sync(begin)
    try:
        _px(shell).cell_px(f"--block --targets {str(engines).replace(' ', '')}", f"%%gpumem {_flags(options)}\n{code}")
    finally:
        try:
            _show(shell, client, engines, options)
        except Exception as own:
            if not swallows(own):
                raise
            print(f"gpumem: the engines' reports could not be shown ({own})".splitlines()[0], file=sys.stderr)


def _px(shell: Any) -> Any:
    """ipyparallel's magics; None without a cluster."""
    return getattr(shell.magics_manager.magics["cell"].get("px"), "__self__", None)


def chosen(shell: Any, text: str, magic: str) -> tuple[Any, list[int]]:
    """The user's client, and the engines of ``[0,3]``, ``0-3`` or ``all``. Raises UsageError."""
    if _px(shell) is None:
        raise UsageError(
            f"{magic} --engines: there is no %%px. It comes with engines, as by "
            "`ipyparallel.Cluster(n=4).start_and_connect_sync()` (pip install 'gpumem-magic[engines]')"
        )
    client = _px(shell).view.client
    there = list(client.ids)
    try:
        found = there if text == "all" else named_ranks(text.strip("[]"), max(there, default=-1) + 1)
    except ValueError:
        found = []
    if not found or not set(found) <= set(there):
        raise UsageError(f"{magic}: --engines takes engines, as [0,3], 0-3 or all, of {there}, not {text!r}")
    return client, found


def _flags(options: argparse.Namespace) -> str:
    """The flags that are about the cell's run, on each engine."""
    words = [
        "-q",
        *(f"--{name.replace('_', '-')}" for name in ("no_lines", "until_repeat", "warn") if getattr(options, name)),
    ]
    for name, unit in (("device", ""), ("into", ""), ("max_iterations", ""), ("budget", "B"), ("max_delta", "B")):
        value = getattr(options, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}", f"{value}{unit}"]
    return " ".join(words)


def _show(shell: Any, client: Any, engines: list[int], options: argparse.Namespace) -> None:
    answers = {engine: client[engine].apply_async(end) for engine in engines if engine in client.ids}
    last = time.monotonic() + _PATIENCE
    found = []
    for rank, engine in enumerate(engines):
        answer = answers.get(engine)
        if answer is None:
            found.append(OfRank(rank, GONE, None))
            continue
        answer.wait(max(0.0, last - time.monotonic()))
        try:
            report = report_from_dict(answer.get()) if answer.ready() else None
        except Exception as error:  # the engine died, or made no report
            swallowed(error)
            found.append(OfRank(rank, GONE, None))
        else:
            found.append(OfRank(rank, RUNNING if report is None else state_of(report), report))
    merged = together(found, len(engines))
    if engines != list(range(len(engines))):
        named = ", ".join(f"rank {rank} is engine {engine}" for rank, engine in enumerate(engines))
        merged = replace(merged, remarks=(f"{named[0].upper()}{named[1:]}.", *merged.remarks))
    report = Report.of(merged)
    recording.remember(report)
    give_report(shell, report, options)


def begin() -> None:
    """On an engine, before the cell."""
    global _before
    shell: Any = get_ipython()
    if "gpumem" not in shell.magics_manager.magics["cell"]:
        shell.extension_manager.load_extension("gpumem_magic")
    _before = recording.last_report()


def end() -> dict[str, Any]:
    """On an engine, after the cell: its report. Raises LookupError where it made none."""
    found = recording.last_report()
    if found is None or found is _before:
        raise LookupError("the cell made no report here")
    return report_to_dict(found)
