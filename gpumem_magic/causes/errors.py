"""What a caught error keeps: the local variables of the functions that it left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from gpumem_magic.causes.alike import made_at
from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import Spot, added, quoted
from gpumem_magic.causes.turns import turns_of_lines
from gpumem_magic.owners.model import ERROR, TRACEBACK, Held, Station, size_of
from gpumem_magic.report.failure import caught_requests, peak_is_of_a_failed_attempt
from gpumem_magic.report.model import Cause
from gpumem_magic.report.notes import times
from gpumem_magic.units import counted, human, listed

# More lines than a sentence tells.
_MANY = 4


def caught_shortage(scene: Scene) -> Iterator[Cause]:
    """Memory ran out, the program went on, and the peak is of an attempt that failed: what there was is not all it wanted."""
    if not peak_is_of_a_failed_attempt(scene.recording, scene.device, scene.timeline):
        return
    caught = caught_requests(scene.recording, scene.device)
    lines = list(dict.fromkeys(str(point.line) for point, *_ in caught if point.line))
    at = f" at line {listed(lines)}" if 0 < len(lines) < _MANY else ""
    if (piled_up := _piled_up(scene, f"Memory ran out{times(caught)}{at}")) is not None:
        yield piled_up
        return
    yield Cause(
        "caught_shortage",
        f"Memory ran out{times(caught)}{at}, and the program caught the error and went on: the peak is of an attempt that "
        "failed.",
        "",
        scene.report.peak.allocated,
        describes=True,
    )


def _piled_up(scene: Scene, failed: str) -> Cause | None:
    """What the iterations left, one like the other, up to the request that failed, where it is most of what was there. failed:
    where that was, in words."""
    for whole in map(scene.finished, (scene.iterations, *scene.loops, *turns_of_lines(scene))):
        last = scene.left_evenly(whole)
        if not last:
            continue
        made = [one for one in scene.timeline.live_at(scene.peak) if whole[0].start <= one.born < whole[-1].end]
        if 2 * size_of(made) < scene.report.peak.allocated:
            continue
        places = Counter[str]()
        for one in made:
            places[made_at(scene, one)] += one.size
        ((largest, _),) = places.most_common(1)
        return Cause(
            "growth",
            f"{failed}, as each iteration had left {human(sum(last) // len(last))} more{scene.how_many(whole)}"
            f"{f', made by {largest}' if largest else ''}; the program caught the error and went on.",
            "Keep only what is used later, on the host (`.detach().cpu()`).",
            size_of(made),
        )
    return None


def kept_errors(scene: Scene) -> Iterator[Cause]:
    """A variable, or what it holds, that keeps an error with its traceback, or a traceback."""
    held: dict[str, list[Held]] = {}
    for one in scene.held:
        root = scene.holdings.roots[one.roots[0]]
        if root.kind == "variable" and one.in_traceback:
            held.setdefault(root.name, []).append(one)
    for name, its in sorted(held.items(), key=lambda pair: -size_of(pair[1]))[:1]:
        outermost = list({(first := _outermost(one)).node: first for one in its}.values())
        number = scene.holdings.number(name)
        gone = scene.freed([number]) if number is not None else []
        freed = size_of(gone)
        # (A function that keeps in a variable what it caught is on a cycle with its own frame.)
        frees = "and `gc.collect()` free" if any(one.cyclic for one in gone) else "frees"
        let_go = f"`del {name}` {frees} {human(freed)}."
        if 2 * freed < size_of(its):
            # (Another name leads there, too, as a logger does to its handlers.)
            freed, let_go = size_of(its), f"let go of {'them' if len(outermost) > 1 else 'it'} there."
        shown = outermost[0].place if len(outermost) == 1 else name
        place = added(scene, Spot(shown, tuple(its), None))
        at = f" ({place.words}, `{place.shown}`)" if place is not None else ""
        yield Cause(
            "kept_errors",
            f"{quoted(shown)}{at} {_what(outermost)} the local variables of the functions that failed: {human(freed)}"
            f"{_chiefly(its, freed)}.",
            f"{_without(scene, its, freed)}{let_go}",
            freed,
        )


def _outermost(one: Held) -> Station:
    return next(at for at in one.trail if _is(at, ERROR, TRACEBACK))


def _is(station: Station, *kinds: str) -> bool:
    return any(kind in station.bases for kind in kinds)


def _what(outermost: Sequence[Station]) -> str:
    errors = any(_is(one, ERROR) for one in outermost)
    if len(outermost) > 1:
        told = (
            f"{counted(len(outermost), 'caught error')}: their tracebacks hold" if errors else "tracebacks, which hold"
        )
        return f"keeps {told}"
    return f"is {'a caught error: its traceback holds' if errors else 'a traceback, which holds'}"


def _chiefly(held: Sequence[Held], freed: int) -> str:
    """The local variable that has most of it, if that is at least half."""
    sizes = Counter[str]()
    for one in held:
        place = next((after.place for frame, after in pairwise(one.trail) if "builtins.frame" in frame.bases), "")
        sizes[place.partition(", in ")[0].removeprefix("local ")] += one.size
    place, size = sizes.most_common(1)[0]
    if not place or 2 * size < freed:
        return ""
    return f", in {place}" if size == freed else f", {human(size)} of it in {place}"


def _without(scene: Scene, held: Sequence[Held], freed: int) -> str:
    """What to keep in place of an error, as far as that frees the memory: what caused it has a traceback of its own."""
    if not any(_is(station, ERROR) for one in held for station in one.trail):
        return "Keep the text (`traceback.format_exc()`) in its place; "
    own = {
        after.node
        for one in held
        for error, after in pairwise(one.trail)
        if error is _outermost(one) and _is(after, TRACEBACK)
    }
    enough = size_of(scene.holdings.freed_by_emptying(own)) >= freed
    return f"Keep the text (`str(error)`){', or `error.with_traceback(None)`' if enough else ' in its place'}; "
