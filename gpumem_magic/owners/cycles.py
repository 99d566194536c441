"""Reference cycles that nothing refers to any more, but that hold device memory until Python's garbage collector runs.

Looks at every object that Python's collector knows, so it runs only when asked. It collects nothing: it counts, as the collector
would, which objects are referred to only by each other.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch

from gpumem_magic.looks import tensors
from gpumem_magic.looks.objects import is_a, name_of_class
from gpumem_magic.owners.autograd import graph_behind, is_node_type, saved_by
from gpumem_magic.owners.elsewhere import held_elsewhere
from gpumem_magic.owners.model import Root
from gpumem_magic.owners.ring import ring_words
from gpumem_magic.owners.roots import FREE_CYCLES
from gpumem_magic.owners.traversal import Locate, Place, Traversal, located
from gpumem_magic.recording.model import OF_A_CYCLE, OF_A_TRACE

_MEMBERS = 4


def garbage_holding(locate: Locate, walk: Traversal, blocks: Mapping[Place, Any]) -> Iterable[tuple[Root, list[Any]]]:
    """Roots of kind "cycle" for the live blocks that the walk did not reach: each cycle by the classes of its members; and of
    kind "module" for what a library's own module holds."""
    # In no comprehension: Python's objects have its cell among them, so that a cycle would hold all of them when this is over.
    unseen = walk.not_met(gc.get_objects())
    starts = _starting_points(unseen, locate, walk, blocks)
    candidates = _closure(unseen, starts)
    garbage = _only_held_by_each_other(unseen, candidates)
    found = []
    for group in _groups(candidates, garbage):
        things = list(map(unseen.__getitem__, group))
        found.append((Root(_words(things), "cycle", FREE_CYCLES), things))
    return [*found, *held_elsewhere(unseen, candidates, [one for one in starts if one not in garbage])]


def _starting_points(unseen: list[Any], locate: Locate, walk: Traversal, blocks: Mapping[Place, Any]) -> list[int]:
    """The tensors on blocks that the walk did not reach, and the graph nodes that save such tensors."""
    found = []
    # By the class's id: a class may have a `__hash__` of its metaclass's.
    is_tensor: dict[int, bool] = {}
    is_node: dict[int, bool] = {}
    missing = blocks.keys() - walk.storages.keys()
    with tensors.no_functions(), tensors.no_dispatch():
        for number, thing in enumerate(unseen):
            kind = id(type(thing))
            if kind not in is_tensor:
                is_tensor[kind] = tensors.is_tensor(thing)
                is_node[kind] = not is_tensor[kind] and is_node_type(type(thing))
            if is_tensor[kind]:
                held = [thing, tensors.grad(thing)] if tensors.is_leaf(thing) else [thing]
                node = tensors.grad_fn(thing)
                nodes: Iterable[Any] = () if node is None else graph_behind([node])
            elif is_node[kind]:
                held, nodes = [], (thing,)
            else:
                continue
            saved = (value for one in nodes for _, value in saved_by(one))
            if any(tensors.is_tensor(one) and located(locate, one) in missing for one in chain(held, saved)):
                found.append(number)
    return found


def _closure(unseen: list[Any], starts: list[int]) -> dict[int, list[int]]:
    """The starting points and everything unseen that leads to them: number -> the numbers that refer to it."""
    if not starts:
        return {}
    number_of = {id(thing): number for number, thing in enumerate(unseen)}
    holders: dict[int, list[int]] = {}
    for number, thing in enumerate(unseen):
        for held in gc.get_referents(thing):
            target = number_of.get(id(held))
            if target is not None:
                holders.setdefault(target, []).append(number)
    found: dict[int, list[int]] = {}
    todo = list(starts)
    while todo:
        number = todo.pop()
        if number not in found:
            found[number] = holders.get(number, [])
            todo += found[number]
    return found


def _only_held_by_each_other(unseen: list[Any], candidates: Mapping[int, list[int]]) -> set[int]:
    """Those of the candidates that no object outside them refers to, as Python's collector decides it."""
    # Each is referred to by `unseen`, by the loop's variable and by the call besides.
    outside = set()
    for number, holders in candidates.items():
        thing = unseen[number]
        if sys.getrefcount(thing) - 3 > len(holders):
            outside.add(number)
    held: dict[int, list[int]] = {}
    for number, holders in candidates.items():
        for holder in holders:
            held.setdefault(holder, []).append(number)
    todo = list(outside)
    while todo:
        for number in held.get(todo.pop(), ()):
            if number not in outside:
                outside.add(number)
                todo.append(number)
    return candidates.keys() - outside


def _groups(candidates: Mapping[int, list[int]], garbage: set[int]) -> list[list[int]]:
    """The garbage in connected groups."""
    near: dict[int, set[int]] = {number: set() for number in garbage}
    for number in garbage:
        for holder in candidates[number]:
            if holder in garbage:
                near[number].add(holder)
                near[holder].add(number)
    groups = []
    left = set(garbage)
    while left:
        todo = [left.pop()]
        group = []
        while todo:
            number = todo.pop()
            group.append(number)
            fresh = near[number] & left
            left -= fresh
            todo += fresh
        groups.append(sorted(group))
    return groups


def _are_of_a_trace(things: list[Any]) -> bool:
    """Whether Dynamo's notes of a function are among them, which keep the real objects that it was traced with."""
    notes = vars(sys.modules.get("torch._dynamo.side_effects", sys)).get("SideEffects")
    return notes is not None and any(is_a(one, notes) for one in things)


def _words(things: list[Any]) -> str:
    """``a reference cycle (Node.me -> Node)``; where that way is not known its classes, plain containers only where there is
    nothing else."""
    if _are_of_a_trace(things):
        return f"{OF_A_CYCLE} ({OF_A_TRACE})"
    ring = ring_words(things)
    if ring:
        return f"{OF_A_CYCLE} ({ring})"
    kinds = list(dict.fromkeys(name_of_class(type(one)) for one in things if not is_a(one, (torch.Tensor, type))))
    telling = [kind for kind in kinds if kind not in ("dict", "list", "tuple", "cell", "set")] or kinds
    more = ", ..." if len(telling) > _MEMBERS else ""
    return f"{OF_A_CYCLE} ({', '.join(telling[:_MEMBERS])}{more})" if telling else OF_A_CYCLE
