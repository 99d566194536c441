"""``%gpumem_try REMEDY``: runs the last failed cell again with one thing changed, and says whether it then passes.

It says first what it will run and what it lets go of. Nothing is tried on a real device unless asked for twice.
"""

# IPython's decorators and errors carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from IPython.core.error import UsageError

from gpumem_magic.looks.fresh import made_anew
from gpumem_magic.notebook.devices import machine_in_use
from gpumem_magic.notebook.remedy import Remedy, RemedyError, edited, remedy_of
from gpumem_magic.session import recording
from gpumem_magic.units import counted, human

_SHOWN = 3


def try_remedy(shell: Any, text: str, *, sure: bool) -> None:
    """sure: also on a real device. Raises UsageError, in one line, and what the cell itself raises but for out of memory."""
    try:
        remedy = remedy_of(text)
        failed = _failed_cell(shell)
        code = shell.transform_cell(failed)
        # The transformed code is what runs, so that `!` and `%` lines stay what they are.
        code, lines = edited(code, remedy) if remedy.argument else (code, [])
    except RemedyError as error:
        raise UsageError(str(error)) from None
    except SyntaxError as error:
        raise UsageError(f"the failed cell can't be read ({error.msg}, line {error.lineno})") from None
    machine = machine_in_use()
    is_virtual = all(device.facts.kind == "virtual" for device in machine.devices)
    if not is_virtual and remedy.conf:
        raise UsageError(
            f"a real device takes its settings when CUDA starts: set PYTORCH_CUDA_ALLOC_CONF={remedy.conf} and restart the kernel"
        )
    if not is_virtual and not sure:
        raise UsageError("on a real device this runs the cell for real, with whatever it writes: add --yes to do so")
    _announce(failed, remedy, lines)
    _let_go(shell, machine, code)
    with _settings(machine, remedy):
        _run(shell, code, remedy)


def _failed_cell(shell: Any) -> str:
    """The text of the last cell that failed: the one before this, else the last measured one. Raises RemedyError for none."""
    result = getattr(shell, "last_execution_result", None)
    if result is not None and result.error_in_exec is not None:
        text = str(getattr(result.info, "raw_cell", "") or "")
        if text and not text.lstrip().startswith("%gpumem"):
            return _body(text)
    report = recording.last_report()
    if report is not None and report.error is not None:
        for text in reversed(shell.history_manager.input_hist_raw):
            if text.lstrip().startswith("%%gpumem"):
                return _body(text)
    raise RemedyError("no cell has failed: run the cell with %%gpumem first, and after its error try a remedy")


def _body(text: str) -> str:
    """Without the magic's own line, which would be a cell in a cell."""
    first, _, rest = text.lstrip().partition("\n")
    return rest if first.startswith("%%gpumem") else text


def _announce(failed: str, remedy: Remedy, lines: list[int]) -> None:
    body = [line for line in failed.strip().splitlines() if line.strip()]
    where = f", in line {', '.join(map(str, lines))} of the cell" if lines else ", as in PYTORCH_CUDA_ALLOC_CONF"
    print(f"Runs the cell that failed again, with {remedy.text}{where}:")
    for line in body[:_SHOWN]:
        print(f"    {line}")
    if len(body) > _SHOWN:
        print(f"    ... ({counted(len(body) - _SHOWN, 'more line')})")


def _let_go(shell: Any, machine: Any, code: str) -> None:
    """What the failed run left: a run that begins with it would be another program."""
    from gpumem_magic.owners.free import DEFAULT, free
    from gpumem_magic.owners.search import find_owners

    own = made_anew(code)
    holdings = find_owners(machine, shell.user_ns, shell)
    holding = {root.name for root in holdings.roots if root.kind == "variable"} & own
    for name in holding:
        shell.user_ns.pop(name, None)
    freed = free(machine, shell, shell.user_ns, DEFAULT)
    names = (
        f", and {', '.join(f'`{name}`' for name in sorted(holding))}, which the cell creates again" if holding else ""
    )
    print(
        f"First it releases the last traceback, reference cycles and cached memory{names}: "
        f"{human(freed.left_allocated)} stays allocated."
    )


@contextmanager
def _settings(machine: Any, remedy: Remedy) -> Iterator[None]:
    """The remedy's options beside those that are set, on every virtual device, for a while."""
    from gpumem_magic.allocator.settings import parse

    if not remedy.conf:
        yield
        return
    allocators = [device.allocator for device in machine.devices]
    before = [(one.settings, one.settings_text) for one in allocators]
    try:
        for one in allocators:
            text = ",".join(part for part in (one.settings_text, remedy.conf) if part)
            one.settings, one.settings_text = parse(text), text
        yield
    finally:
        for one, (settings, text) in zip(allocators, before, strict=True):
            one.settings, one.settings_text = settings, text


def _run(shell: Any, code: str, remedy: Remedy) -> None:
    import torch

    try:
        shell.run_cell_magic("gpumem", "", code)
        failed = False
    except torch.OutOfMemoryError:
        # The answer is a sentence; the report above has the rest.
        failed = True
    report = recording.last_report()
    if report is None:
        return
    peak = human(report.peak.allocated)
    if failed:
        line = None if report.error is None else report.error.line
        # The magic's own line counts as the first, in the report as here.
        at = "" if line is None else f" at line {line}"
        print(f"With {remedy.text} the cell still runs out of memory{at}; the peak was {peak}.")
    else:
        print(
            f"With {remedy.text} the cell runs to its end; the peak was {peak}, of {human(report.peak.peak_reserved)} reserved."
        )
