"""How a reference cycle runs, in the words of the program: ``Node.me -> Node``."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from types import CellType, FrameType, FunctionType
from typing import Any

import torch

from gpumem_magic.looks import tensors
from gpumem_magic.looks.objects import is_a, locals_of, members, module_of_class, name_of_class, shown, text
from gpumem_magic.owners.naming import attribute_labels, is_id

_PLAIN = (dict, list, tuple, set, torch.Tensor, type)
# Beyond so many members the search for the way would take longer than the answer is worth.
_MOST = 5000
_LONGEST = 24
_MOST_STATIONS = 4
_TABLES = {"._modules", "._parameters", "._buffers"}
# What stands between a function and the variable outside it that it uses.
OF_CLOSURE = "'s "
# The namespace in which a function was defined.
OF_NAMESPACE = "'s globals"
# What an error's traceback refers to: the frames of the functions that it went through.
OF_AN_ERROR = "traceback.tb_frame"


def ring_words(things: Sequence[Any]) -> str:
    """A way from one of the things back to itself, past attributes and keys; "" without objects of a class of their own."""
    if len(things) > _MOST:
        return ""
    number_of = {id(thing): number for number, thing in enumerate(things)}
    referents: dict[int, list[int]] = {}
    # An object of the program's before one of PyTorch's and a function, so that cycles alike have the same words.
    starts = [number for number, one in enumerate(things) if not is_a(one, _PLAIN) and type(one) is not CellType]
    for start in sorted(starts, key=lambda number: _is_tool(things[number])):
        way = _way_back(start, things, number_of, referents)
        if way:
            return _told([things[number] for number in way])
    return ""


def _is_tool(thing: Any) -> bool:
    return is_a(thing, FunctionType) or module_of_class(type(thing)).startswith("torch.")


def _way_back(
    start: int, things: Sequence[Any], number_of: dict[int, int], referents: dict[int, list[int]]
) -> list[int]:
    """The numbers on the shortest way from a thing to itself, both ends included; empty where there is none."""
    came_from: dict[int, int] = {}
    todo = deque([start])
    while todo:
        number = todo.popleft()
        if number not in referents:
            found = (number_of.get(id(one)) for one in gc.get_referents(things[number]))
            referents[number] = [one for one in found if one is not None]
        for child in referents[number]:
            if child == start:
                way = [number]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return [*reversed(way), start]
            if child not in came_from:
                came_from[child] = number
                todo.append(child)
    return []


def _told(way: Sequence[Any]) -> str:
    stations = [_station(way[0])]
    owner = way[0]
    for holder, held in pairwise(way):
        label = _closed_over(owner, held) if is_a(owner, FunctionType) else _label(holder, held)
        # Attributes and hooks of a module read as the program wrote them, not as PyTorch's dictionaries.
        is_inner = tensors.is_module(owner) and (label in _TABLES or stations[-1].endswith("_hooks"))
        stations[-1] += "" if is_inner else label
        if not is_a(held, _PLAIN) and type(held) is not CellType:
            stations.append(_station(held))
            owner = held
    if len(stations) > _MOST_STATIONS:
        stations[_MOST_STATIONS - 1 : -1] = ["..."]
    return " -> ".join(stations)


def _station(thing: Any) -> str:
    if is_a(thing, FrameType):
        return f"{thing.f_code.co_name}()"
    return text(thing.__name__) if is_a(thing, FunctionType) else name_of_class(type(thing))


def _closed_over(function: FunctionType, held: Any) -> str:
    """How a function has one of its cells, past the tuple of them, or its namespace."""
    if held is function.__globals__:
        return OF_NAMESPACE
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    return next((f"{OF_CLOSURE}{name}" for name, cell in cells if cell is held), "")


def _label(holder: Any, held: Any) -> str:
    """What the program writes to come from the one to the other."""
    if is_a(holder, dict):
        for key, value in dict.items(holder):
            if value is held:
                # An object's own dictionary reads as its attributes: their names are strings that could stand behind a dot.
                return f".{text(key)}" if text(key).isidentifier() else f"[{_short(key)}]"
        return ""
    if is_a(holder, (list, tuple)):
        return next((f"[{place}]" for place, one in enumerate(members(holder)) if one is held), "")
    if is_a(holder, FrameType):
        return next((f"{OF_CLOSURE}{name}" for name, one in locals_of(holder).items() if one is held), "")
    return attribute_labels(holder).get(id(held), "")


def _short(key: Any) -> str:
    if is_id(key):
        return "id"
    words = shown(key)
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."
