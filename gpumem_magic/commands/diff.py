"""``gpumem diff A B``: what changed between two snapshot files, by category and by the code that requested memory."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from gpumem_magic.commands.common import guarded
from gpumem_magic.commands.same_code import together
from gpumem_magic.snapshot.whole_file import printable
from gpumem_magic.units import human, mib
from gpumem_magic.views.lines import table

if TYPE_CHECKING:
    from gpumem_magic.attribution.view import DeviceView


@guarded
def run(options: argparse.Namespace) -> int:
    """Prints the comparison. 0; 2 where a file can't be read."""
    if options.events:
        from gpumem_magic.commands.diff_events import print_comparison

        return print_comparison(options.a, options.b, options.device, options.top)
    from gpumem_magic.files.loaded import position_of

    before, a = _view(options.a, options.device)
    after, b = _view(options.b, options.device)
    first, second = position_of(before, options.at), position_of(after, options.at)
    one, other = before.sizes(first), after.sizes(second)
    rows = [[f"MiB at the {options.at}", "A", "B", "change"]]
    rows += [
        [name.replace("_", " "), mib(one[name]), mib(other[name]), mib(other[name] - one[name], signed=True)]
        for name in one
        if one[name] or other[name]
    ]
    print(f"A: {a}\nB: {b}\n\n{table(rows)}")
    places = together(_places(before, first), _places(after, second))
    changes = {place: later - earlier for place, (earlier, later) in places.items() if later != earlier}
    ranked = sorted(changes, key=lambda place: (-abs(changes[place]), place))
    if ranked and options.top > 0:
        print("\nWhere the most changed:")
    for place in ranked[: max(options.top, 0)]:
        change = f"{'+' if changes[place] > 0 else '-'}{human(abs(changes[place]))}"
        sizes = " -> ".join(map(human, places[place]))
        print(f"  {change:>10}  {printable(place)}  ({sizes})")
    return 0


def _view(path: str, device: int | None) -> tuple[DeviceView, str]:
    """The device that is compared, and its file and number in words."""
    from gpumem_magic.files.loaded import views_of
    from gpumem_magic.snapshot.files import read

    loaded = read(path)
    view = views_of(loaded, device)[0]
    others = [str(one.device) for one in loaded.devices if one.device != view.device]
    there = f" (it has GPU {', '.join(others)} too)" if others else ""
    return view, f"{printable(path)}, GPU {view.device}{there}"


def _places(view: DeviceView, position: int) -> Counter[str]:
    """Requested bytes by the user's innermost line, or by category where no stack tells."""
    sizes: Counter[str] = Counter()
    for one in view.largest(position, len(view.timeline.allocations)):
        own = [line for line in one.stack if not line.startswith("(")]
        sizes[own[0] if own else f"{one.category.replace('_', ' ')} without a stack"] += one.requested
    return sizes
