"""``gpumem diff A B``: what changed between two snapshot files, by category and by the code that requested memory; or between
two reports."""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from gpumem_magic.attribution.groups import groups_of
from gpumem_magic.commands.common import guarded
from gpumem_magic.commands.same_code import called, same_files, together
from gpumem_magic.report.model import LABELS
from gpumem_magic.snapshot.whole_file import printable
from gpumem_magic.units import amount, counted, mib
from gpumem_magic.views.lines import table

if TYPE_CHECKING:
    from gpumem_magic.attribution.view import DeviceView
    from gpumem_magic.report.model import ReportData

_Lines = tuple[str, ...]
# Of a line whose bytes changed, so many ways in which it was called, with so many of their lines.
_MOST_WAYS = 3
_MOST_CALLERS = 3
_STACKLESS = " without a stack"
# What stands before a file's name in a line of code.
_FOLDERS = re.compile(r"^.*[/\\](?=[^/\\]*:\d+ )")
_PACKAGES = re.compile(r"^.*[/\\](?:site|dist)-packages[/\\]")


@dataclass
class _OfStack:
    bytes: int = 0
    count: int = 0


@guarded
def run(options: argparse.Namespace) -> int:
    """Prints the comparison. 0; 2 where a file can't be read."""
    if options.events:
        from gpumem_magic.commands.diff_events import print_comparison

        return print_comparison(options.a, options.b, options.device, options.top)
    from gpumem_magic.files.loaded import position_of

    first = _report(options.a)
    second = None if first is None else _report(options.b)
    if first is not None and second is not None:
        from gpumem_magic.views.compared import Comparison

        print(f"First: {printable(options.a)}\nSecond: {printable(options.b)}\n\n{Comparison(first, second)}")
        return 0
    before, a = _view(options.a, options.device)
    after, b = _view(options.b, options.device)
    positions = position_of(before, options.at), position_of(after, options.at)
    one, other = before.sizes(positions[0]), after.sizes(positions[1])
    rows = [[f"MiB at the {options.at}", "A", "B", "change"]]
    rows += [
        [LABELS.get(name, name), mib(one[name]), mib(other[name]), _changed(other[name] - one[name])]
        for name in one
        if one[name] or other[name]
    ]
    print(f"A: {a}\nB: {b}\n\n{table(rows)}")
    for line in _where(_stacks(before, positions[0]), _stacks(after, positions[1]), options.top):
        print(line)
    return 0


def _report(path: str) -> ReportData | None:
    """The report that a file holds, as `Report.save` and ``--json`` write it; None for another file."""
    from gpumem_magic.files.report_file import load

    try:
        return load(path)
    except (OSError, ValueError):
        return None


def _view(path: str, device: int | None) -> tuple[DeviceView, str]:
    """The device that is compared, and its file and number in words."""
    from gpumem_magic.files.loaded import views_of
    from gpumem_magic.snapshot.files import read

    loaded = read(path)
    view = views_of(loaded, device)[0]
    others = [str(one.device) for one in loaded.devices if one.device != view.device]
    there = f" (it has GPU {', '.join(others)} too)" if others else ""
    return view, f"{printable(path)}, GPU {view.device}{there}"


def _stacks(view: DeviceView, position: int) -> dict[_Lines, _OfStack]:
    """What is live by the program's own lines, innermost first, or by category where no stack tells."""
    found: dict[_Lines, _OfStack] = defaultdict(_OfStack)
    for group in groups_of(view, position):
        own = tuple(line for line in group.stack if not line.startswith("("))
        held = found[own or (LABELS[group.category] + _STACKLESS,)]
        held.bytes += group.requested
        held.count += group.count
    return found


def _where(a: dict[_Lines, _OfStack], b: dict[_Lines, _OfStack], most: int) -> Iterator[str]:
    """The lines whose bytes changed the most, and under each the ways in which it was called that did."""
    names = same_files(chain.from_iterable(a), chain.from_iterable(b))
    sizes = [Counter[str](), Counter[str]()]
    ways: dict[str, dict[_Lines, tuple[_OfStack, _OfStack]]] = defaultdict(
        lambda: defaultdict(lambda: (_OfStack(), _OfStack()))
    )
    for side, stacks in enumerate((a, b)):
        for lines, held in stacks.items():
            place, callers = lines[0], lines[1:]
            sizes[side][place] += held.bytes
            one = ways[called(place, names)][tuple(called(line, names) for line in callers)][side]
            one.bytes += held.bytes
            one.count += held.count
    places = together(sizes[0], sizes[1], names)
    changes = {place: later - earlier for place, (earlier, later) in places.items() if later != earlier}
    ranked = sorted(changes, key=lambda place: (-abs(changes[place]), place))[: max(most, 0)]
    if ranked:
        yield ""
        yield "Where the most changed:"
    if all(sizes) and not any(all(pair) for place, pair in places.items() if not place.endswith(_STACKLESS)):
        yield "  (No line of code is in both: these are two programs, or their files have other names.)"
    for place in ranked:
        shown = printable(_PACKAGES.sub("", place))
        yield f"  {_signed(changes[place]):>11}  {shown}  ({' -> '.join(map(amount, places[place]))})"
        by_change = sorted(ways[called(place, names)].items(), key=lambda one: -abs(one[1][1].bytes - one[1][0].bytes))
        for way, (earlier, later) in by_change[:_MOST_WAYS]:
            if way and later.bytes != earlier.bytes:
                yield (
                    f"      {_signed(later.bytes - earlier.bytes):>11}  "
                    f"{earlier.count:,} -> {counted(later.count, 'allocation')}, called from "
                    + ", ".join(printable(_FOLDERS.sub("", line)) for line in way[:_MOST_CALLERS])
                )


def _signed(change: int) -> str:
    return f"{'+' if change > 0 else '-'}{amount(abs(change))}"


def _changed(change: int) -> str:
    return mib(change, signed=True) if change else "0"
