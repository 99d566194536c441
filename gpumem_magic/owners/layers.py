"""Which layer saved an activation: read from autograd's graph, where operations follow the parameters that they use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Generic, TypeVar

from gpumem_magic.owners.naming import Namer
from gpumem_magic.owners.traversal import Traversal

# So many nodes with one input may stand between an operation and its weight (transposed, converted).
_MOST_BETWEEN = 8
_Parameter = TypeVar("_Parameter")


class NearestParameter(Generic[_Parameter]):
    """For each node of autograd's graph, by number, the parameter whose layer it belongs to.

    An operation without parameters belongs to the layer whose output it works on. following: a node's inputs; parameters: those
    of the nodes that collect gradients.
    """

    def __init__(self, following: Mapping[int, Sequence[int]], parameters: Mapping[int, _Parameter]) -> None:
        self._following = following
        self._parameters = parameters
        self._known: dict[int, _Parameter | None] = {}

    def of(self, node: int) -> _Parameter | None:
        passed = []
        found = None
        while node not in self._known:
            passed.append(node)
            self._known[node] = None
            following = self._following.get(node, ())
            own = [self._parameters[end] for end in map(self._end, following) if end in self._parameters]
            if own or not following:
                found = own[-1] if own else None
                break
            node = following[0]
        else:
            found = self._known[node]
        self._known.update(dict.fromkeys(passed, found))
        return found

    def is_used_by(self, node: int, keeping: Collection[int]) -> bool:
        """Whether an operation uses a parameter itself. keeping: nodes that keep tensors, none of which only turns a weight."""
        for one in self._following.get(node, ()):
            for _ in range(_MOST_BETWEEN):
                if one in self._parameters:
                    return True
                if one in keeping or len(self._following.get(one, ())) != 1:
                    break
                one = self._following[one][0]
        return False

    def _end(self, node: int) -> int:
        """Behind the nodes with one input."""
        for _ in range(_MOST_BETWEEN):
            if node in self._parameters or len(self._following.get(node, ())) != 1:
                break
            node = self._following[node][0]
        return node


class Layers:
    """Layers for the nodes of a walk."""

    def __init__(self, walk: Traversal, namer: Namer) -> None:
        self._namer = namer
        self._next: dict[int, list[int]] = {}
        self._saved: set[int] = set()
        variables: dict[int, int] = {}
        for (holder, held), kind in walk.kinds.items():
            if kind == "next":
                self._next.setdefault(holder, []).append(held)
            elif kind == "variable":
                variables[holder] = held
            elif kind == "saved":
                self._saved.add(held)
        self._nearest = NearestParameter(self._next, variables)

    def of(self, path: list[int]) -> str:
        """The layer (``model.encoder.layer.3.output``) of what lies at the end of a path from a root; "" where there is none."""
        for holder, held in zip(path[-2::-1], path[:0:-1], strict=True):
            if held in self._saved and holder in self._next:
                parameter = self._nearest.of(holder)
                place = "" if parameter is None else self._namer.place(parameter)
                # A tensor that is in no module is its own layer.
                return place.rpartition(".")[0] or place
        return ""
