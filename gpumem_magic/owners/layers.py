"""Which layer saved an activation: read from autograd's graph, where operations follow the parameters that they use."""

from __future__ import annotations

from gpumem_magic.owners.naming import Namer
from gpumem_magic.owners.traversal import Traversal


class Layers:
    """Layers for the nodes of a walk. An operation without parameters belongs to the layer whose output it works on."""

    def __init__(self, walk: Traversal, namer: Namer) -> None:
        self._namer = namer
        self._next: dict[int, list[int]] = {}
        self._variable: dict[int, int] = {}
        self._savers: dict[int, int] = {}
        for (holder, held), kind in walk.kinds.items():
            if kind == "next":
                self._next.setdefault(holder, []).append(held)
            elif kind == "variable":
                self._variable[holder] = held
            elif kind == "saved":
                self._savers.setdefault(held, holder)
        self._known: dict[int, str] = {}

    def of(self, path: list[int]) -> str:
        """The layer (``model.encoder.layer.3.output``) of what lies at the end of a path from a root; "" where there is none."""
        for holder, held in zip(path[-2::-1], path[:0:-1], strict=True):
            if self._savers.get(held) is not None and holder in self._next:
                return self._layer(holder)
        return ""

    def _layer(self, node: int) -> str:
        passed = []
        while node not in self._known:
            passed.append(node)
            self._known[node] = ""
            following = self._next.get(node, [])
            ends = [self._end(one) for one in following]
            parameters = [self._variable[end] for end in ends if end in self._variable]
            if parameters:
                self._known[node] = _owner(self._namer.place(parameters[-1]))
                break
            if not following:
                break
            node = following[0]
        found = self._known[node]
        for one in passed:
            self._known[one] = found
        return found

    def _end(self, node: int) -> int:
        """Behind the nodes with one input (a transposed or converted weight)."""
        seen = set()
        while node not in self._variable and len(self._next.get(node, ())) == 1 and node not in seen:
            seen.add(node)
            node = self._next[node][0]
        return node


def _owner(place: str) -> str:
    """``model.fc`` of ``model.fc.weight``; a tensor that is in no module is its own layer."""
    return place.rpartition(".")[0] or place
