"""Memory that was not freed: pinned by a result or an error, held by another name, or only cached."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from gpumem_magic.causes.model import LEAST, Scene
from gpumem_magic.causes.places import base, variable_of
from gpumem_magic.looks.code import cell_of
from gpumem_magic.owners.holders import joined
from gpumem_magic.owners.model import THIS_ERROR, Held, size_of
from gpumem_magic.owners.ring import OF_AN_ERROR, OF_CLOSURE, OF_NAMESPACE
from gpumem_magic.recording.model import FORWARD, KEPT_BY_LIST, OF_A_CYCLE, OF_A_TRACE, Sighting
from gpumem_magic.report.failure import failed_request
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import MIB, human

_DELETED = re.compile(r"^del\s+(?P<names>[\w\s,.\[\]'\"]+)$")
# An error in a variable of a function that its traceback leads to.
_OF_FRAME = re.compile(r"(?P<function>\w+)\(\)'s (?P<variable>\w+)")
_LINK = re.compile(r"make `(?P<kind>\w+)\.(?P<attribute>\w+)` a")
_CYCLE = re.compile(rf"{OF_A_CYCLE} \((?P<way>.*)\)$")
# What nvidia-smi goes on showing is worth a word only where someone would wonder.
_WONDER = 64 * MIB


def pinned(scene: Scene) -> Iterator[Cause]:
    """What only a result in Out, or an error's traceback, keeps."""
    for kind, words in (("out", "Results that IPython keeps"), ("traceback", "The last error's traceback")):
        numbers = scene.holdings.of_kind(kind)
        if kind == "traceback" and failed_request(scene.report) is not None:
            # (What an earlier error's held is told by itself.)
            numbers = [number for number in numbers if scene.holdings.roots[number].name == THIS_ERROR]
        freed = scene.freed(numbers)
        if size_of(freed) < LEAST:
            continue
        if kind == "traceback" and _is_script(scene):
            # It goes with the script, and what its functions held has been said.
            continue
        roots = [scene.holdings.roots[number] for number in sorted({number for one in freed for number in one.roots})]
        names = [root.name for root in roots]
        which = f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if kind == "out" else ""
        if kind == "traceback" and names[0] != THIS_ERROR and roots[0].type:
            which = f" ({roots[0].type})"
        # Whose traceback it is in has been said.
        largest = base(freed[0]).replace(f", in {names[0]}", "")
        if freed[0].kind == "graph":
            largest = f"the graph of {largest}"
        if scene.report.error is not None and scene.left.told and kind == "traceback":
            largest = f"what {scene.left.told} {'hold' if ' and ' in scene.left.told else 'holds'}"
        elif (variable := variable_of(freed[0])) is not None and not scene.program.defines(variable[1]):
            # (What a library calls its own says nothing to the program's author.)
            largest = ""
        # (One result that is all of it has been named.)
        chiefly = "" if not largest or (len(names) == 1 and largest == names[0]) else f", chiefly {largest}"
        remedy = "`%gpumem_free out`" if kind == "out" else "`%gpumem_free`"
        yield Cause(
            f"pinned_by_{kind}",
            f"{words}{which} pin{'' if kind == 'out' else 's'} {human(size_of(freed))} that nothing else holds"
            f"{chiefly}.",
            f"{remedy} frees {human(size_of(freed))}.",
            size_of(freed),
        )


def reference_cycle(scene: Scene) -> Iterator[Cause]:
    """What the cell made and only a reference cycle keeps: Python's garbage collector has not come by yet."""
    held: dict[str, list[Held]] = {}
    for one in scene.held:
        root = scene.holdings.roots[one.roots[0]]
        allocation = scene.alive.get(one.address)
        if root.kind != "cycle" or allocation is None or allocation.born < 0 or _costs_nothing(scene, allocation):
            continue
        held.setdefault(root.name, []).append(one)
    everything = [one for its in held.values() for one in its]
    if size_of(everything) < max(LEAST, scene.timeline.allocated_at(scene.end) // 20):
        return
    names = sorted(held, key=lambda name: -size_of(held[name]))
    if all(name == f"{OF_A_CYCLE} ({OF_A_TRACE})" for name in names):
        yield Cause(
            "reference_cycle",
            f"{human(size_of(everything))} is held only by reference cycles that `torch.compile` left behind when it traced. "
            "Python's garbage collector runs on its own schedule, not when the device is full.",
            "`%gpumem_free cycles` frees it; a program can call `gc.collect()` once, behind its first step.",
            size_of(everything),
        )
        return
    ways = [found["way"] for name in names if (found := _CYCLE.match(name))]
    if ways and len(ways) == len(names) and all(OF_NAMESPACE in way for way in ways):
        yield Cause(
            "reference_cycle",
            f"{human(size_of(everything))} is held only by a namespace that nothing uses any more, which its own functions "
            f"refer to ({ways[0]}), as `runpy.run_path` and `exec` leave them. Python's garbage collector runs on its own "
            "schedule, not when the device is full.",
            "`%gpumem_free cycles` frees it, best right behind the program that was run.",
            size_of(everything),
        )
        return
    cycles = len({one.roots[0] for one in everything})
    alike = f" ({cycles} alike)" if cycles > 1 and len(names) == len(ways) == 1 else ""
    told = f": {', '.join(ways[:2])}{', ...' if len(ways) > 2 else alike}" if ways else ""
    breaks = next(filter(None, map(_breaking, ways)), "a `weakref.ref` in place of one link")
    if (linked := _LINK.match(breaks)) and (put := scene.program.linking(linked["kind"], linked["attribute"])):
        breaks = f"{breaks}; {put.words}, `{put.shown}`"
    yield Cause(
        "reference_cycle",
        f"{human(size_of(everything))} is held only by reference cycles{told}. No name refers to it, and Python's "
        "garbage collector runs on its own schedule, not when the device is full.",
        f"`%gpumem_free cycles` frees it; without the cycle ({breaks}), it would be freed at once.",
        size_of(everything),
    )


def collected_late(scene: Scene) -> Iterator[Cause]:
    """Objects of earlier iterations that hold a method of their own, at the peak: Python's garbage collector came by later."""
    now = scene.turn_of(scene.moment - 1)
    if scene.tensors is None or now is None:
        return
    late: dict[str, list[Allocation]] = defaultdict(list)
    turns: dict[str, set[object]] = defaultdict(set)
    for one in scene.timeline.live_at(scene.moment):
        turn = scene.turn_of(one.born)
        # (What a name lets go of goes in the turn's own course, and a list keeps what is in it.)
        listed_there = scene.tensors.keeper(one, scene.moment)[0] == KEPT_BY_LIST
        if turn is not None and turn != now and turn[0] == now[0] and one.freed is not None and not listed_there:
            statement = scene.tensors.facts(one).statement
            late[statement].append(one)
            turns[statement].add(turn)
    for kind, name, place in scene.program.own_methods_kept():
        made = re.compile(rf"\b{re.escape(kind)}\(")
        statement = next((one for one in late if made.search(one) and len(turns[one]) > 1), "")
        size = size_of(late[statement]) if statement else 0
        first, last = (min(ends), max(ends)) if (ends := [one.freed or 0 for one in late[statement]]) else (0, 0)
        if size < scene.part_of_peak(10) or scene.allocates_between(first, last):
            continue
        yield Cause(
            "collected_late",
            f"`{kind}.{name}` ({place.words}, `{place.shown}`) is a method of the object that holds it: a reference cycle. Those "
            f"of {len(turns[statement])} earlier iterations are still there at the peak, {human(size)}, until Python's garbage "
            "collector comes by.",
            "Keep the method's name, and look it up when it is called (`getattr(self, name)`): each object then goes with its "
            "last name.",
            size,
        )
        return


def _is_script(scene: Scene) -> bool:
    file = scene.recording.own_file
    return bool(file) and not cell_of(file)


def _costs_nothing(scene: Scene, one: Allocation) -> bool:
    """Whether a script still worked with it at its peak, and has ended since. (After a cell others follow.)"""
    return _is_script(scene) and scene.tensors is not None and scene.tensors.is_newest(one, scene.peak)


def _breaking(way: str) -> str:
    """How the last link of a cycle would not be there; "" where it is not told. A long way is cut in its middle."""
    *before, back, _ = ["", *way.split(" -> ")]
    if OF_AN_ERROR in way and (own := _OF_FRAME.search(way)) is not None:
        return f"`{own['variable']} = None` at the end of {own['function']}(), or the text of the error in its place"
    function, of_closure, variable = back.partition(OF_CLOSURE)
    if of_closure and function == variable:
        return f"define `{function}` on its own, with what it reads as arguments"
    if of_closure:
        return f"let `{function}` use a `weakref.ref` of `{variable}`"
    if "." not in back or back == "...":
        return ""
    kind, _, name = back.rpartition(".")
    if kind == "method" and "." in before[-1]:
        return (
            f"`{before[-1]}` is a method of the object that holds it: keep its name, and look it up when it is called"
        )
    if kind.endswith("Backward"):
        return f"`ctx.save_for_backward` in `forward`, `ctx.saved_tensors` in `backward`, in place of `ctx.{name}`"
    return f"make `{back}` a `weakref.ref`, or set it to None when done"


def freed_nothing(scene: Scene) -> Iterator[Cause]:
    """A `del` after which the memory was all still there, as somebody else holds it."""
    for point, begin, end in scene.statements:
        for name in _deleted(point.statement):
            yield from _held_after(scene, name, begin, end)


def _held_after(scene: Scene, name: str, begin: int, end: int) -> Iterator[Cause]:
    """The answer for one name that a statement deleted."""
    if _freed_under(scene, name, begin, end):
        return
    addresses = _seen_as(scene, name, begin)
    left = [one for one in scene.held if one.address in addresses and scene.alive[one.address].born < begin]
    if any(look.name == name for look in scene.recording.sightings):
        # (A tensor's graph refers to the parameters of a model, which are no part of what it was.)
        left = [one for one in left if one.kind != "parameter"]
    if size_of(left) < LEAST:
        return
    numbers = sorted({number for one in left for number in one.roots})
    roots = [scene.holdings.roots[number] for number in numbers]
    # Made again later in the cell, or renamed.
    if any(root.name == name for root in roots) or all(_was_renamed(scene, name, root.name) for root in roots):
        return
    # Of cycles that the cell made `reference_cycle` tells all.
    if all(root.kind == "cycle" for root in roots) and all(scene.alive[one.address].born >= 0 for one in left):
        return
    statements = [root.statement for root in roots if root.statement is not None]
    names = list(dict.fromkeys(root.name if root.kind == "cycle" else f"`{root.name}`" for root in roots))
    keepers = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
    freed = size_of(scene.freed(numbers))
    word = "still hold" if len(names) > 1 else "still holds"
    yield Cause(
        "del_freed_nothing",
        f"`del {name}` freed nothing: {keepers} {word} {human(size_of(left))} of it.",
        f"`{'; '.join(joined(statements))}` frees {human(freed)}." if len(statements) == len(roots) else "",
        size_of(left),
    )


def _was_renamed(scene: Scene, old: str, new: str) -> bool:
    """Whether the cell itself gave a variable a new name (``data = filled``), and then let go of the old one."""
    plain = re.compile(rf"\s*{re.escape(new)}\s*=\s*{re.escape(old)}\s*")
    return any(plain.fullmatch(point.statement) is not None for point, _, _ in scene.points)


def only_cached(scene: Scene) -> Iterator[Cause]:
    """Tensors went, and nvidia-smi did not fall: what is cached is free for PyTorch."""
    used_again: set[int] = set()
    for point, begin, end in scene.statements:
        if not (_deleted(point.statement) or ".cpu(" in point.statement) or point.line in used_again:
            continue
        fell = scene.timeline.allocated_at(begin) - scene.timeline.allocated_at(end)
        if fell < _WONDER or scene.timeline.reserved_at(end) < scene.timeline.reserved_at(begin):
            continue
        # Somebody who empties the cache, or uses it again, knows.
        left = scene.timeline.reserved_at(end)
        if any(stop > end and scene.timeline.reserved_at(stop) < left for _, _, stop in scene.points):
            continue
        if scene.timeline.peak(end, scene.end)[0] - scene.timeline.allocated_at(end) >= fell // 2:
            # (A loop's next turn does, and so would another one behind the last.)
            used_again.add(point.line)
            continue
        yield Cause(
            "only_cached",
            f"`{point.statement.strip().partition(chr(10))[0]}` freed {human(fell)} of tensors, but nvidia-smi's "
            "figure did not fall: PyTorch keeps the memory cached for its next tensors.",
            "This process need not do anything; `torch.cuda.empty_cache()` makes it available to other processes.",
            fell,
        )
        return


def _deleted(statement: str) -> list[str]:
    found = _DELETED.match(statement.strip())
    return [name.strip() for name in found["names"].split(",")] if found else []


def _is_of(look: Sighting, name: str) -> bool:
    return look.name is not None and (look.name == name or look.name.startswith((f"{name}[", f"{name}.")))


def _freed_under(scene: Scene, name: str, begin: int, end: int) -> bool:
    """Whether anything that was seen under a name was freed in an interval."""
    seen = {
        look.address: look.position
        for look in scene.recording.sightings
        if look.position <= begin and _is_of(look, name)
    }
    before = scene.deleted.get(name, frozenset())
    return any(
        (one.address in before or one.born < seen.get(one.address, -1))
        and one.freed is not None
        and begin <= one.freed < end
        and one.born < begin
        for one in scene.timeline.allocations
    )


def _seen_as(scene: Scene, name: str, position: int) -> set[int]:
    """The addresses of what is still there and was seen under a name before a position."""
    found = {
        look.address
        for look in scene.recording.sightings
        if look.device == scene.device
        and look.position <= position
        # (Another may have been at its address.)
        and look.address in scene.alive
        and scene.alive[look.address].born < look.position
        and _is_of(look, name)
    }
    before = scene.modules.get(name, frozenset()) | scene.deleted.get(name, frozenset())
    found |= {address for address in before if address in scene.alive}
    if name not in scene.modules and any(span.label in (name, f"{name}.forward") for span in scene.spans(FORWARD)):
        # A model of this very cell: parameters that only an optimizer still knows.
        found |= {one.address for one in scene.held if one.kind == "parameter" and ".param_groups" in one.place}
    return found
