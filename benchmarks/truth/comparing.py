"""What differs between a measured program and the same on another device.

Errors are signed ratios: +0.02 says that the virtual GPU told 2 % more than the real one. A category's error is its difference
as a part of the real peak: a category of some bytes can't be 100 % wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from truth.saved import highest

TOLERATED = 0.01
"""A larger difference is listed, to be explained."""

METRICS = ("peak allocated", "peak reserved", "driver", "allocated, worst row", "reserved, worst row")
# They are the driver's, and not what was allocated at the peak.
_OUTSIDE = ("context", "other_processes", "context_or_others")


@dataclass(frozen=True)
class Compared:
    """errors: metric -> error, without those that one side does not know. categories: category -> error, at the peak.

    failing: what each side says of the statement that ran out of memory, and None where no side ran out. unpaired: rows that
    only one side has.
    """

    workload: str
    real: dict[str, Any]
    device: str
    errors: dict[str, float]
    categories: dict[str, float]
    failing: tuple[str, str] | None
    unpaired: int

    @property
    def same_failure(self) -> bool:
        """Whether both sides ended alike: at the same statement of the same iteration, or not at all."""
        return self.failing is None or self.failing[0] == self.failing[1]


def compare(real: dict[str, Any], mine: dict[str, Any], device: str) -> Compared:
    """mine: what the virtual GPU `device` said of the program that `real` is about."""
    here, there = highest(mine), highest(real)
    errors = {
        f"peak {name}" if name != "driver" else name: ratio(here[name], there[name])
        for name in ("allocated", "reserved", "driver")
        if here[name] is not None and there[name]
    }
    pairs, unpaired = _pairs(real["rows"], mine["rows"])
    for name, column in (("allocated", 3), ("reserved", 4)):
        differences = [(ours[column] - theirs[column]) / max(there[name], 1) for theirs, ours in pairs]
        errors[f"{name}, worst row"] = max(differences, key=abs, default=0.0)
    return Compared(
        real["workload"],
        real,
        device,
        errors,
        _categories(real, mine),
        None if not (real["error"] or mine["error"]) else (_failing(real), _failing(mine)),
        unpaired,
    )


def ratio(mine: int, real: int) -> float:
    return mine / real - 1


def _pairs(real: Sequence[Any], mine: Sequence[Any]) -> tuple[list[tuple[Any, Any]], int]:
    """Rows of the same kind, line and iteration, in the order in which they ran."""
    waiting: dict[tuple[Any, ...], list[Any]] = {}
    for row in mine:
        waiting.setdefault(_key(row), []).append(row)
    pairs = [(row, waiting[_key(row)].pop(0)) for row in real if waiting.get(_key(row))]
    return pairs, len(real) + len(mine) - 2 * len(pairs)


def _key(row: Sequence[Any]) -> tuple[Any, ...]:
    # The kind too: a statement that failed on one side only has no state to compare.
    return row[0], row[1], tuple(row[2])


def _categories(real: dict[str, Any], mine: dict[str, Any]) -> dict[str, float]:
    whole = highest(real)["allocated"]
    theirs, ours = real["peak"]["categories"], mine["peak"]["categories"]
    names = [*theirs, *(name for name in ours if name not in theirs)]
    return {
        name: (ours.get(name, 0) - theirs.get(name, 0)) / whole
        for name in names
        if whole and name not in (*_OUTSIDE, "cached")
    }


def _failing(found: dict[str, Any]) -> str:
    """``line 12 of iteration 3`` or ``none``."""
    if not found["error"]:
        return "none"
    row = next((row for row in found["rows"] if row[0] == "error"), None)
    turn = "" if row is None or not row[2] else f" of iteration {'.'.join(map(str, row[2]))}"
    return f"line {found['error']['line']}{turn}"


def in_a_line(compared: Compared) -> str:
    """One program's errors."""
    figures = "  ".join(f"{name} {compared.errors[name]:+.2%}" for name in METRICS if name in compared.errors)
    end = f"  out of memory: real {compared.failing[0]}, virtual {compared.failing[1]}" if compared.failing else ""
    apart = f"  {compared.unpaired} rows on one side only" if compared.unpaired else ""
    return f"{compared.workload:<26}{figures}{end}{apart}"


def to_explain(compared: Sequence[Compared]) -> list[str]:
    """Every difference above `TOLERATED`, in words, the largest first."""
    found: list[tuple[float, str]] = []
    for one in compared:
        found += [
            (abs(error), f"{one.workload}: {name} {error:+.2%}")
            for name, error in (*one.errors.items(), *((f"{key} at the peak", e) for key, e in one.categories.items()))
            if abs(error) > TOLERATED
        ]
        if not one.same_failure and one.failing:
            found.append((1.0, f"{one.workload}: runs out in {one.failing[0]}, the virtual GPU in {one.failing[1]}"))
    return [words for _, words in sorted(found, reverse=True)]
