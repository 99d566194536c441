"""What a graph keeps that could be computed again: the steps of a function, and what repeated modules make inside."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpumem_magic.causes.alike import bytes_of
from gpumem_magic.causes.model import WORTH, Scene
from gpumem_magic.causes.written import Written
from gpumem_magic.devices.base import CodePlace
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD, NOBODY, RECOMPUTATION, ModuleTrace
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import counted, human

# What these compute takes long.
_LONG = re.compile(r"conv|mm$|mv$|attention|rnn|lstm|gru|fft|linalg|cdist|einsum")
_ENDS = re.compile(r"\.backward\(|\.step\(")
_BATCH_NORM = re.compile(r"(?:Sync)?BatchNorm(?:[123]d)?")
_SAVES = "save_for_backward"
_FUNCTION = re.compile(r"\bFunction$")
# On the way to one result, so many; where some are gone by then, half of one less on average.
_STEPS = 2
# One part in so many of the peak is kept so; and would be saved.
_SHARE = 5


@dataclass(frozen=True)
class _Called:
    """A function of the program's. name: as it is told; in_graph: whether it is the forward of a function with a backward of its
    own. in_loop: whether a loop of its own makes them. steps: what it made on the way to its results, of which there is one for
    each call."""

    name: str
    place: Written
    in_graph: bool
    in_loop: bool
    steps: list[Allocation]
    results: list[Allocation]

    @property
    def calls(self) -> int:
        return len(self.results)


def kept_steps(scene: Scene) -> Iterator[Cause]:
    """A function that works number by number, of whose steps a graph keeps several for each of its results."""
    for one in sorted(_functions(scene), key=lambda each: -size_of(each.steps)):
        few = len(one.steps) < one.calls if one.in_loop else _STEPS * len(one.steps) < (_STEPS + 1) * one.calls
        if few or size_of(one.steps) < scene.part_of_peak(_SHARE):
            continue
        # (Of some, backward has let go by then.)
        each = (2 * len(one.steps) + one.calls) // (2 * one.calls)
        highest = _highest_without(scene, one)
        saved = scene.report.peak.allocated - highest
        then = f": the peak would be about {human(highest)}"
        if scene.report.error is None and saved < max(WORTH // 2, scene.part_of_peak(2 * _SHARE)):
            continue
        often = "" if one.calls == 1 else f" in each of {one.calls} {'turns' if one.in_loop else 'calls'}"
        by = "called by `torch.utils.checkpoint.checkpoint` with `use_reentrant=False`, "
        does = "keeps only what it is given, and computes the rest again in backward"
        remedy = (
            f"A function for what its loop does, {by}{does}" if one.in_loop else f"{by[0].upper()}{by[1:]}it {does}"
        )
        if one.in_graph:
            remedy = "Save in `ctx` only what it is given, and compute the rest again in its `backward`"
        yield Cause(
            "kept_steps",
            f"`{one.name}` ({one.place.words}) keeps {counted(each, 'tensor')} on the way to its result for backward{often}: "
            f"{human(size_of(one.steps))}.",
            f"{remedy}{then if scene.report.error is None else ''}.",
            size_of(one.steps),
            describes=True,
        )
        return


def _functions(scene: Scene) -> Iterator[_Called]:
    if scene.tensors is None:
        return
    places: dict[CodePlace, list[Allocation]] = defaultdict(list)
    slow: set[tuple[str, str, int]] = set()
    for one in scene.living_in(scene.moment, "activations"):
        birth = scene.tensors.birth_of(one)
        place = birth.place if birth is not None and not birth.node else None
        if birth is not None and place is not None and place.file == place.own_file:
            places[place].append(one)
            if _LONG.search(birth.kernel):
                slow.add(_function_of(scene, place))
    running = {(one.file, one.name) for one in scene.running}
    groups: dict[tuple[str, str, int], list[CodePlace]] = defaultdict(list)
    for place in places:
        key = _function_of(scene, place)
        if key[2] and key not in slow and (place.own_file, place.own_function) not in running:
            groups[key].append(place)
    for its in groups.values():
        text = scene.program.text_of(its[0].own_file, scene.recording.own_file)
        node = text.function_at(its[0].own_line - text.ahead, its[0].own_function) if text is not None else None
        if text is None or node is None or _ENDS.search(ast.unparse(node)):
            continue
        made = [one for place in its for one in places[place]]
        result = _kind(scene, max(made, key=lambda one: one.born))
        steps = [one for one in made if _kind(scene, one) != result]
        loops = text.loops_around(its[-1].own_line - text.ahead)[1]
        kinds = text.nodes_around(node.lineno, (ast.ClassDef,))
        own = bool(kinds) and node.name in ("forward", "__call__")
        name = kinds[-1].name if own else f"{node.name}()"
        in_graph = own and any(_FUNCTION.search(ast.unparse(base)) for base in kinds[-1].bases)
        most = max(its, key=lambda place: size_of(one for one in places[place] if one in steps))
        lines = (
            one for one in text.everywhere if one.lineno <= most.own_line - text.ahead <= (one.end_lineno or one.lineno)
        )
        if in_graph:
            lines = (
                one
                for one in ast.walk(node)
                if isinstance(one, ast.stmt) and _SAVES in ast.unparse(one) and one is not node
            )
        first = next(lines, node.body[0])
        yield _Called(
            name, text.place(first), in_graph, bool(loops), steps, [one for one in made if _kind(scene, one) == result]
        )


def _function_of(scene: Scene, place: CodePlace) -> tuple[str, str, int]:
    """Its text, name and line; 0: none."""
    text = scene.program.text_of(place.own_file, scene.recording.own_file)
    node = text.function_at(place.own_line - text.ahead, place.own_function) if text is not None else None
    return place.own_file, place.own_function, node.lineno if node is not None else 0


def _kind(scene: Scene, one: Allocation) -> tuple[str, str, CodePlace | None]:
    birth = scene.tensors.birth_of(one) if scene.tensors is not None else None
    return ("", "", None) if birth is None else (birth.kernel, birth.dtype, birth.place)


def _highest_without(scene: Scene, called: _Called) -> int:
    """The peak, if what was made as its steps were went, and came again for one call at a time; and if what a call is given,
    where that goes as it is, were kept instead."""
    made = {_kind(scene, one) for one in called.steps}
    gone = [
        one
        for one in scene.timeline.allocations
        if scene.labels[one.index].category == "activations" and _kind(scene, one) in made
    ]
    return scene.highest_without(gone)[0] + size_of(called.steps) // called.calls + _given(scene, called)


def _given(scene: Scene, called: _Called) -> int:
    """The bytes of what the calls were given and nothing else keeps, as far as its shape tells."""
    births = scene.recording.logs[scene.device].births
    results = sorted(one.born for one in called.results)
    firsts: dict[int, Allocation] = {}
    for one in sorted(called.steps, key=lambda each: each.born):
        firsts.setdefault(bisect_left(results, one.born), one)
    size = 0
    for one in firsts.values():
        birth = births.get(one.born)
        form = max(birth.inputs, key=lambda each: bytes_of(*each), default=None) if birth is not None else None
        before = (each for each in reversed(scene.timeline.allocations[: one.index]) if each.born < one.born)
        given = next((each for each in before if (it := births.get(each.born)) and (it.shape, it.dtype) == form), None)
        if given is not None and given.freed is not None and given.freed < scene.moment:
            size += given.size
    return size


def repeated_modules(scene: Scene) -> Iterator[Cause]:
    """Modules of one class, of which each could compute again what its graph keeps inside."""
    trace = scene.recording.modules
    kept = scene.living_in(scene.moment, "activations")
    trains = any(scene.end_of(one) >= scene.moment for one in scene.spans(BACKWARD))
    if not trains or scene.report.error is not None or size_of(kept) < max(WORTH, scene.part_of_peak(2)):
        return
    # (Which module is at work is followed up to the first backward; the others are taken to be as that.)
    until = min(map(scene.end_of, scene.spans(BACKWARD)))
    first = scene.highest_without((), until=until)[0]
    best: tuple[int, str, int, int] | None = None
    of_modules, classes = _inside(scene, trace), _classes(trace)
    for kind, paths in classes.items():
        inside = {path: its for path in paths if (its := of_modules.get(path))}
        gone = [one for path, its in inside.items() for one in _not_its_result(scene, trace, path, its)]
        if size_of(gone) < scene.part_of_peak(_SHARE) or len(inside) < _STEPS:
            continue
        again = max(map(size_of, inside.values()))
        saved = first - scene.highest_without(gone, until=until)[0] - again
        if best is None or saved > best[0]:
            best = saved, kind, len(inside), size_of(gone)
    if best is None or best[0] < max(WORTH // 2, scene.part_of_peak(_SHARE)):
        return
    saved, kind, count, size = best
    highest = scene.report.peak.allocated - saved
    twice = (
        " Their batch norms take each batch's statistics twice then."
        if _normalize_batches(trace, classes[kind])
        else ""
    )
    yield Cause(
        "repeated_modules",
        f"The {count} modules of class `{kind}` keep {human(size)} inside for backward.",
        "Called by `torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)`, each keeps only what it is given, and "
        f"computes the rest again in backward: the peak would be about {human(highest)}.{twice}",
        saved,
        describes=True,
    )


def _normalize_batches(trace: ModuleTrace, paths: Sequence[str]) -> bool:
    """Whether modules at these paths have batch norms among their parts."""
    norms = [one.path for one in trace.names if _BATCH_NORM.fullmatch(one.type)]
    return any(_is_in(norm, path) for norm in norms for path in paths)


def _classes(trace: ModuleTrace) -> dict[str, list[str]]:
    """The paths of modules, by their class."""
    found: dict[str, list[str]] = defaultdict(list)
    for one in trace.names:
        found[one.type].append(one.path)
    return found


def _inside(scene: Scene, trace: ModuleTrace) -> dict[str, list[Allocation]]:
    """By a module's path, the activations that it and the modules in it made in forwards."""
    again = [(scene.start_of(one), scene.end_of(one)) for one in scene.spans(RECOMPUTATION)]
    found: dict[str, list[Allocation]] = defaultdict(list)
    for one in scene.timeline.allocations:
        number = trace.at(scene.device, one.born) if scene.labels[one.index].category == "activations" else None
        if number is None or any(begin <= one.born < end for begin, end in again):
            continue
        path = trace.names[number].path
        while path:
            found[path].append(one)
            path = path.rpartition(".")[0]
    return found


def _not_its_result(scene: Scene, trace: ModuleTrace, path: str, its: Sequence[Allocation]) -> list[Allocation]:
    """Of each call, all but what it made last: whatever comes next works with that."""
    switches = trace.switches.get(scene.device, ())
    found: list[Allocation] = []
    for one, following in pairwise(its):
        first = bisect_left(switches, (one.born + 1, NOBODY))
        last = bisect_left(switches, (following.born + 1, NOBODY))
        numbers = {number for _, number in switches[first:last]}
        if all(number != NOBODY and _is_in(trace.names[number].path, path) for number in numbers):
            found.append(one)
    return found


def _is_in(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")
