"""What a caught error keeps: the local variables of the functions that it left."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import quoted
from gpumem_magic.owners.model import Held, size_of
from gpumem_magic.report.model import Cause
from gpumem_magic.units import counted, human

_ERROR = "builtins.BaseException"


def kept_errors(scene: Scene) -> Iterator[Cause]:
    """A variable, or a list, that holds an error with its traceback."""
    held: dict[str, list[Held]] = {}
    for one in scene.held:
        if scene.holdings.roots[one.roots[0]].kind == "variable" and any(_ERROR in at.bases for at in one.trail):
            held.setdefault(scene.holdings.roots[one.roots[0]].name, []).append(one)
    for name, its in sorted(held.items(), key=lambda pair: -size_of(pair[1]))[:1]:
        errors = {station.node: station.place for one in its for station in one.trail if _ERROR in station.bases}
        number = scene.holdings.number(name)
        freed = size_of(scene.freed([number])) if number is not None else 0
        place = scene.program.adding(name)
        at = f" ({place.words}, `{place.shown}`)" if place is not None else ""
        what = f"{counted(len(errors), 'caught error')}" if len(errors) > 1 else "a caught error"
        yield Cause(
            "kept_errors",
            f"{quoted(name)}{at} keeps {what} with {'tracebacks' if len(errors) > 1 else 'its traceback'}, which hold"
            f"{'' if len(errors) > 1 else 's'} the local variables of the functions that failed: {human(freed)}.",
            f"Keep the text (`str(error)`), or `error.with_traceback(None)`; `del {name}` frees {human(freed)}.",
            freed,
        )
