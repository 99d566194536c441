"""The faces' common way: which cards, which values, and what fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpumem_magic.trials import cards
from gpumem_magic.trials.answer import Fits
from gpumem_magic.trials.foresight import Foresight
from gpumem_magic.trials.growth import FitCase, growth_of
from gpumem_magic.trials.one_run import trials
from gpumem_magic.trials.programs import StepProgram, Variable
from gpumem_magic.trials.search import search
from gpumem_magic.trials.tried import Tried
from gpumem_magic.trials.values import Varied, along_and_across, checked
from gpumem_magic.units import listed

Say = Callable[[str], None]
"""Hears in a few words what is run next."""


def what_fits(step: Callable[..., Any], *, device: str | Sequence[str] | None = None, **values: Iterable[int]) -> Fits:
    """The largest value with which ``step(NAME=value)`` fits on a virtual card; nothing is computed on a real one.

    values: one name with its values (``batch_size=range(1, 1025)``), or two, of which one is a list. step makes one training
    step, or all of it: it is called until its calls repeat exactly, at most 20 times. device: a card's name, or several; None is
    the virtual card that is on, one like this computer's GPU, or a T4. Each trial is a process of its own. Raises DeviceError.
    """
    names = [
        Varied(name, checked(name, _as_sequence(given)), not isinstance(given, range)) for name, given in values.items()
    ]
    chosen = [device] if isinstance(device, str) else device
    return largest(StepProgram(step), names, chosen, subject="function")


def _as_sequence(given: Iterable[int]) -> Sequence[int]:
    return given if isinstance(given, range) else list(given)


def largest(
    program: Variable,
    names: Sequence[Varied],
    devices: Sequence[str] | None = None,
    *,
    subject: str,
    say: Say = lambda words: None,
) -> Fits:
    """Raises DeviceError (VaryError, NoTrial among them), in one line."""
    along, across = along_and_across(names)
    program.check([one.name for one in names])
    found = []
    count = 0
    for device in devices or [cards.usual()]:
        with trials(program, device, [one.name for one in names]) as tried:
            for row in across.values if across is not None else [None]:
                other = {} if across is None or row is None else {across.name: row}

                def run(values: Sequence[int], device: str = device, other: dict[str, int] = other) -> list[Tried]:
                    nonlocal count
                    numbers = [f"{count + place:,}" for place in range(1, len(values) + 1)]
                    told = [f"{along.name}={listed([f'{value:,}' for value in values])}"]
                    told += [f"{name}={value:,}" for name, value in other.items()]
                    say(f"Trial{'s' * (len(numbers) > 1)} {listed(numbers)} on a virtual {device}: {', '.join(told)} …")
                    count += len(values)
                    return tried([{along.name: value, **other} for value in values])

                case = search(along.name, along.values, run, program.usual(along.name))
                growth = None
                if case.best is not None:
                    courses = {one.values[along.name]: one.course for one in case.tried if one.course is not None}
                    growth = growth_of(along.name, case.best, case.tried, Foresight(courses))
                found.append(FitCase(device, row, case, growth))
    places = {one.name: program.places(one.name) for one in names}
    return Fits(along.name, None if across is None else across.name, found, subject, places)
