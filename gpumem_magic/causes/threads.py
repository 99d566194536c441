"""What the program's threads keep while they wait: the variables of the functions that they are in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import variable_of
from gpumem_magic.owners.model import Held, size_of
from gpumem_magic.report.model import Cause
from gpumem_magic.units import counted, human, listed

# Such a part of the peak is worth a word.
_PART = 5


def kept_by_threads(scene: Scene) -> Iterator[Cause]:
    """Results that are no other's any more, and that a thread has under a name until it is given the next."""
    held: dict[str, list[tuple[str, Held]]] = defaultdict(list)
    for one in scene.held:
        if scene.holdings.roots[one.roots[0]].kind == "thread" and (found := variable_of(one)) is not None:
            variable, function = found
            held[function].append((variable, one))
    for function, its in sorted(held.items(), key=lambda pair: -size_of(one for _, one in pair[1])):
        size = size_of(one for _, one in its)
        threads = {one.roots[0] for _, one in its}
        names = list(dict.fromkeys(variable for variable, _ in its))
        if size < scene.part_of_peak(_PART) or not scene.program.defines(function):
            continue
        made = scene.program.giving(names[0], function)
        at = f" ({made.words}, `{made.shown}`)" if made is not None else ""
        hold = "still holds" if len(threads) == 1 else "still hold"
        which = "A thread" if len(threads) == 1 else counted(len(threads), "thread")
        yield Cause(
            "kept_by_threads",
            f"{which} in {function}() {hold} {listed([f'`{name}`' for name in names[:3]])} of the last turn{at}: {human(size)}.",
            f"`del {', '.join(names[:3])}` at the end of a turn lets go of it while the thread waits for the next.",
            size,
            describes=True,
        )
        return
