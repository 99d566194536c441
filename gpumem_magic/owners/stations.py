"""The objects on the way to memory, as strings: where a program would empty, reset or detach something."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gpumem_magic.looks.objects import module_of_class, mro, qualified_name
from gpumem_magic.owners.model import Root, Station
from gpumem_magic.owners.naming import Namer
from gpumem_magic.owners.roots import class_name
from gpumem_magic.owners.traversal import Traversal

_GRAPH = ("graph", "saved", "next", "variable")


class Stations:
    """The stations of a walk, each made once."""

    def __init__(self, walk: Traversal, namer: Namer) -> None:
        self._walk = walk
        self._namer = namer
        self._made: dict[int, Station] = {}
        self._bases: dict[int, tuple[str, ...]] = {}

    def to(self, path: Sequence[int]) -> tuple[Station, ...]:
        """The stations of a path to memory, whose last number is the memory's own."""
        found = []
        for number, following in pairwise(path):
            if type(self._walk.objects[number]) is not Root:
                found.append(self._station(number))
            if self._walk.kinds.get((number, following)) in _GRAPH:
                break
        return tuple(found)

    def _station(self, number: int) -> Station:
        if number not in self._made:
            thing = self._walk.objects[number]
            kind = type(thing)
            if id(kind) not in self._bases:
                self._bases[id(kind)] = tuple(f"{module_of_class(one)}.{qualified_name(one)}" for one in mro(kind))
            self._made[number] = Station(number, self._namer.place(number), class_name(thing), self._bases[id(kind)])
        return self._made[number]
