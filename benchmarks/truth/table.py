"""The errors of all programs together, as text and as the table of the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from truth.comparing import METRICS, TOLERATED, Compared, to_explain

Skipped = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Line:
    """A metric over all programs: the median of the errors without their signs, and the worst with its sign and program."""

    name: str
    programs: int
    median: float
    worst: float
    workload: str


def lines(compared: Sequence[Compared]) -> list[Line]:
    """The metrics, then the categories."""
    categories = dict.fromkeys(name for one in compared for name in one.categories)
    tables = [(name, [(one.errors[name], one.workload) for one in compared if name in one.errors]) for name in METRICS]
    tables += [
        (f"{name} at the peak", [(one.categories[name], one.workload) for one in compared if name in one.categories])
        for name in categories
    ]
    found = []
    for name, errors in tables:
        if errors:
            worst, workload = max(errors, key=lambda pair: abs(pair[0]))
            found.append(Line(name, len(errors), statistics.median(abs(error) for error, _ in errors), worst, workload))
    return found


def about(compared: Sequence[Compared]) -> str:
    """What was compared with what."""
    machines = dict.fromkeys(_machine(one) for one in compared)
    return "\n".join(machines)


def _machine(one: Compared) -> str:
    versions = one.real["versions"]
    words = ", ".join(f"{name} {versions[name]}" for name in ("torch", "cuda", "cudnn", "driver") if versions[name])
    kind = "" if one.real["kind"] == "cuda" else "A VIRTUAL GPU IN PLACE OF A REAL ONE, a dry run: "
    return f"{kind}{one.real['gpu']}, {words}; compared with {one.device}"


def text(compared: Sequence[Compared], skipped: Skipped) -> str:
    """Everything, for a terminal."""
    found = [f"\n{about(compared)}" if compared else "\nNothing was compared."]
    found += [f"not compared: {name}, {why}" for name, why in skipped]
    found.append(f"\n{'':<30}{'programs':>9}{'median':>9}{'worst':>10}")
    found += [
        f"{line.name:<30}{line.programs:>9}{line.median:>9.2%}{line.worst:>+10.2%}  {line.workload}"
        for line in lines(compared)
    ]
    found.append(f"\n{_failures(compared)}")
    listed = to_explain(compared)
    found.append(f"\nDifferences above {TOLERATED:.0%}: {len(listed) or 'none'}")
    found += [f"  {words}" for words in listed]
    return "\n".join(found)


def markdown(compared: Sequence[Compared], skipped: Skipped) -> str:
    """The table of docs/measured.md."""
    found = [about(compared), ""]
    found += ["| figure | programs | median error | worst error | in |", "|---|---:|---:|---:|---|"]
    found += [
        f"| {line.name} | {line.programs} | {line.median:.2%} | {line.worst:+.2%} | `{line.workload}` |"
        for line in lines(compared)
    ]
    found += ["", _failures(compared)]
    if skipped:
        found += ["", "Not compared: " + "; ".join(f"`{name}` ({why})" for name, why in skipped) + "."]
    return "\n".join(found)


def _failures(compared: Sequence[Compared]) -> str:
    ended = [one for one in compared if one.failing]
    same = sum(one.same_failure for one in ended)
    return f"Programs that run out of memory: {len(ended)}; at the same statement of the same iteration: {same}."
