"""Out of memory, with names: who held it when the request failed, what merely pins it, and what releasing each would save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

from gpumem_magic.allocator.verdict import CAPACITY
from gpumem_magic.causes.model import LEAST, Scene
from gpumem_magic.causes.places import variable_of
from gpumem_magic.owners.holders import joined
from gpumem_magic.owners.model import COMPILED_CODE, THIS_ERROR, Held, size_of
from gpumem_magic.owners.ring import OF_AN_ERROR
from gpumem_magic.report.failure import failed_request
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human, listed

NAME = "memory_ran_out"
_NAMED = 4
# What earlier cells left is worth the first word from one part in so many of the peak on.
_WORTH = 8
_OFFERED = 5
_NEARLY_ALL = 0.9
# What one statement frees, of what nobody in this cell needs.
_STATEMENTS = {
    "out": "`%gpumem_free out`",
    "traceback": "`%gpumem_free traceback`",
    "cycle": "`%gpumem_free cycles`",
}
_WHAT = {"out": "results in Out", "traceback": "an earlier error's traceback", "cycle": "reference cycles"}
_UNDER_WAY = "the call under way"
# Of one variable, and of several.
_UNREAD = "the cell does not read what it holds", "the cell does not read what they hold"


class _Suggestion(NamedTuple):
    """What one thing to type would have saved, in bytes."""

    what: str
    statement: str
    bytes: int


def memory_ran_out(scene: Scene) -> Iterator[Cause]:
    """Who held the memory when a request failed, and what could go, the largest first."""
    found, failing = failed_request(scene.report), _failing(scene)
    if found is None or failing is None:
        return
    begun, position = failing
    held = _held_at(scene, position)
    if size_of(held) < LEAST:
        return
    savings = sorted(_savings(scene, held), key=lambda one: -one.bytes)[:_OFFERED]
    missing = -found.spare if found.cause == CAPACITY and found.spare is not None and found.spare < 0 else None
    yield Cause(NAME, _holders_in_words(scene, held, begun, position), _what_to_do(savings, missing), size_of(held))


def left_from_before(scene: Scene) -> Iterator[Cause]:
    """Variables of earlier cells that the cell does not use, and that held enough for the request that failed."""
    found, failing = failed_request(scene.report), _failing(scene)
    if found is None or failing is None or found.cause != CAPACITY or found.spare is None:
        return
    held = _held_at(scene, failing[1])
    begun = scene.points[0][2]
    idle = [
        number
        for number in _idle(scene, held)
        if scene.holdings.roots[number].name not in scene.mentioned
        and any(number in one.roots and one.kind != "tensor" for one in held)
        and all(scene.alive[one.address].born < begun for one in held if one.roots[0] == number)
    ]
    idle = _needed(held, [number for number in idle if _freed(held, [number]) >= LEAST])
    freed = _freed(held, idle)
    if not idle or freed < max(-found.spare, scene.part_of_peak(_WORTH)):
        return
    names = [scene.holdings.roots[number].name for number in idle]
    are, them = ("is", "it") if len(names) == 1 else ("are", "them")
    yield Cause(
        "left_from_before",
        f"{listed([f'`{name}`' for name in names])} {are} there from earlier cells, and this one does not use {them}: "
        f"{human(freed)} of the {human(scene.timeline.allocated_at(failing[1]))} that were allocated when memory ran out.",
        f"`del {', '.join(names)}` before it would have been enough for this request.",
        freed,
    )


def earlier_error(scene: Scene) -> Iterator[Cause]:
    """What only the tracebacks of earlier errors, or reference cycles from before the cell, still held when a request failed."""
    failing = _failing(scene)
    if failed_request(scene.report) is None or failing is None:
        return
    freed = _left_behind(scene, _held_at(scene, failing[1]))
    if size_of(freed) < LEAST:
        return
    roots = {number: scene.holdings.roots[number] for one in freed for number in one.roots}.values()
    kinds = [f" ({root.type})" if root.type else "" for root in roots if root.kind == "traceback"]
    cycles = [root for root in roots if root.kind == "cycle"]
    if not cycles:
        who = f"The traceback of an earlier error{kinds[0]}"
    elif all(OF_AN_ERROR in root.name for root in cycles):
        who = "Tracebacks of earlier errors"
    else:
        who = "Reference cycles from before this cell"
        who = f"The traceback of an earlier error{kinds[0]} and r{who[1:]}" if kinds else who
    yield Cause(
        "pinned_by_earlier_error",
        f"{who} still held {human(size_of(freed))} that nothing else did.",
        "`%gpumem_free` frees it, before the cell is run again.",
        size_of(freed),
    )


def _left_behind(scene: Scene, held: list[Held]) -> list[Held]:
    """What was there before the cell, and only an earlier error or a reference cycle reaches."""
    roots, begun = scene.holdings.roots, scene.points[0][2]
    gone = {number for number in scene.holdings.of_kind("traceback") if roots[number].name != THIS_ERROR}
    gone.update(scene.holdings.of_kind("cycle"))
    return [one for one in held if gone.issuperset(one.roots) and scene.alive[one.address].born < begun]


def _failing(scene: Scene) -> tuple[int, int] | None:
    """Where the statement that failed began, and ended."""
    return next(((start, end) for point, start, end in reversed(scene.points) if point.kind == "error"), None)


def _held_at(scene: Scene, position: int) -> list[Held]:
    living = {one.address for one in scene.timeline.live_at(position)}
    return [one for one in scene.held if _was_there(scene, one, position) and one.address in living]


def _holders_in_words(scene: Scene, held: list[Held], begun: int, position: int) -> str:
    words = []
    rest = size_of(held)
    sizes = Counter[str]()
    for one in held:
        sizes[_holder(scene, one)] += one.size
    for holder, size in sizes.most_common(_NAMED):
        words.append(f"{holder} {human(size)}")
        rest -= size
    if rest:
        words.append(f"others {human(rest)}")
    total = scene.timeline.allocated_at(position)
    known = {one.address for one in held}
    # What only C++ holds, such as the buckets in which DistributedDataParallel sends gradients.
    elsewhere = size_of(
        one
        for one in scene.timeline.live_at(position)
        if one.address not in known and one.born < begun and scene.alive.get(one.address) == one
    )
    own = total - size_of(held) - elsewhere
    text = f"Held when memory ran out ({human(total)} in tensors): {', '.join(words)}"
    text += f"; {human(own)} by the failing statement alone" if own >= LEAST else ""
    return f"{text}; {human(elsewhere)} by no Python object." if elsewhere >= LEAST else f"{text}."


def _holder(scene: Scene, one: Held) -> str:
    """The variable that it goes by, the notebook's or the failing function's, or what else keeps it."""
    root = scene.holdings.roots[one.roots[0]]
    if root.name == THIS_ERROR and one.place.startswith(COMPILED_CODE):
        return _UNDER_WAY
    if root.name == THIS_ERROR and (found := variable_of(one)) is not None:
        variable, function = found
        # What a library calls its own says nothing to the program's author.
        return f"`{variable}` of {function}()" if function in scene.left.functions else _UNDER_WAY
    return f"`{root.name}`" if root.kind == "variable" else root.name


def _what_to_do(savings: list[_Suggestion], missing: int | None) -> str:
    if not savings:
        return ""
    told = []
    for one in savings:
        enough = ", enough for this request" if missing is not None and one.bytes >= missing else ""
        told.append(f"{one.statement} would have saved {human(one.bytes)} ({one.what}{enough})")
    return f"By the amount saved: {'; '.join(told)}."


def _savings(scene: Scene, held: list[Held]) -> list[_Suggestion]:
    """What IPython and Python keep by themselves, and variables whose values the cell does not read."""
    roots = scene.holdings.roots
    found = []
    left = _left_behind(scene, held)
    # (Where it is much, it is told first of all.)
    told = set(map(id, left)) if scene.is_large(size_of(left)) else set()
    others = [one for one in held if id(one) not in told]
    for kind, statement in _STATEMENTS.items():
        numbers = {number for number in scene.holdings.of_kind(kind) if roots[number].name != THIS_ERROR}
        freed = _freed(others, numbers)
        if freed >= LEAST:
            found.append(_Suggestion(_WHAT[kind], statement, freed))
    for group in _sharing(held, _idle(scene, held)):
        alone = [(number, _freed(held, [number])) for number in group]
        if _freed(held, group) >= LEAST + sum(freed for _, freed in alone):
            needed = _needed(held, group)
            statements = [f"`{one}`" for one in joined(f"{roots[number].statement}" for number in needed)]
            found.append(_Suggestion(_UNREAD[len(needed) > 1], listed(statements), _freed(held, needed)))
            continue
        for number, freed in alone:
            if freed >= LEAST:
                is_mentioned = roots[number].name in scene.mentioned
                why = _UNREAD[False] if is_mentioned else "the cell does not mention it"
                found.append(_Suggestion(why, f"`{roots[number].statement}`", freed))
    return found


def _idle(scene: Scene, held: list[Held]) -> list[int]:
    """The variables that the cell does not mention, and those that still have what the cell itself never reads: it gives them
    another value first."""
    roots = scene.holdings.roots
    if not scene.mentioned:
        return []
    used = {number for number, root in enumerate(roots) if root.kind == "variable" and root.name in scene.mentioned}
    in_use = {(one.device, one.address) for one in held if not used.isdisjoint(one.roots)}
    begun = scene.points[0][2]
    of_this_cell = {number for one in held if scene.alive[one.address].born >= begun for number in one.roots}
    found = []
    for number, root in enumerate(roots):
        if root.kind != "variable" or root.statement is None:
            continue
        if root.name in scene.mentioned and (root.name not in scene.unread or number in of_this_cell):
            continue
        # The optimizer of what the cell trains: a later cell steps it.
        if in_use.isdisjoint(scene.holdings.optimizers.get(root.name, ())):
            found.append(number)
    return found


def _sharing(held: list[Held], numbers: list[int]) -> list[list[int]]:
    """These in groups that hold something which nobody outside the group holds; one that shares nothing is a group by itself."""
    groups = {number: [number] for number in numbers}
    for one in held:
        if len(one.roots) > 1 and groups.keys() >= set(one.roots):
            joint = sorted({number for root in one.roots for number in groups[root]})
            groups.update(dict.fromkeys(joint, joint))
    return [group for number, group in groups.items() if number == group[0]]


def _freed(held: list[Held], roots: Collection[int]) -> int:
    """Bytes of this device's that only these roots hold."""
    gone = frozenset(roots)
    return size_of(one for one in held if gone.issuperset(one.roots))


def _needed(held: list[Held], group: list[int]) -> list[int]:
    """Without those that add little to what the others free: data that a graph has saved, say."""
    needed = list(group)
    whole = _freed(held, group)
    for number in group:
        others = [one for one in needed if one != number]
        if others and _freed(held, others) >= _NEARLY_ALL * whole:
            needed = others
    return needed


def _was_there(scene: Scene, one: Held, position: int) -> bool:
    """Whether what lives there now is what lived there when the request failed."""
    allocation = scene.alive.get(one.address)
    return allocation is not None and allocation.born < position
