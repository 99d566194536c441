"""The part of the object graph that leads to device memory, as numbers: which roots reach what, and what is on a cycle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

Edge = tuple[int, int]


class HoldGraph:
    """Nodes are numbers, edges lead from a holder to what it holds. `roots` are the nodes that live by themselves.

    kinds: edge -> "grad", "graph", "saved", "next" or "variable", for the edges that autograd knows; others have none.
    """

    def __init__(self, roots: Sequence[int], children: Mapping[int, Sequence[int]], kinds: Mapping[Edge, str]) -> None:
        self._roots = tuple(roots)
        self._children = {node: tuple(held) for node, held in children.items()}
        self._kinds = dict(kinds)
        self._groups = _strong_components(self._roots, self._children)

    def reachable(
        self,
        roots: Iterable[int] | None = None,
        *,
        without: Collection[str] = (),
        of: Collection[int] | None = None,
        beside: Collection[int] = (),
        closed: Collection[int] = (),
    ) -> set[int]:
        """The nodes that these roots (all of them by default) reach over edges that are not of the kinds in `without`.

        of: only the edges that lead from these nodes are left out. beside: what is reached anyhow, and not gone into. closed:
        what is not gone into where it is reached.
        """
        todo = list(self._roots if roots is None else roots)
        found = {*beside, *todo}
        while todo:
            node = todo.pop()
            if node in closed:
                continue
            left_out = without if of is None or node in of else ()
            for child in self._children.get(node, ()):
                if child not in found and (not left_out or self._kinds.get((node, child)) not in left_out):
                    found.add(child)
                    todo.append(child)
        return found

    def reachable_but(self, root: int, kind: str) -> set[int]:
        """The nodes that would be reached if what this root reaches let go of its links of one kind; other roots keep theirs.

        root: a place in the order of `roots`. What another root reaches too keeps all that it holds.
        """
        number = self._roots[root]
        held_by_others = self.reachable(other for other in self._roots if other != number)
        return self.reachable([number], without=(kind,), beside=held_by_others)

    def holders(self) -> dict[int, int]:
        """Node -> the set of roots that reach it, as bits in the order of `roots`."""
        bits = {root: 1 << number for number, root in enumerate(self._roots)}
        reached: dict[int, int] = {}
        # Components come with holders behind what they hold: backwards, a component is complete when it is looked at.
        for group in reversed(self._groups):
            of_group = 0
            for node in group:
                of_group |= reached.get(node, 0) | bits.get(node, 0)
            for node in group:
                reached[node] = of_group
                for child in self._children.get(node, ()):
                    reached[child] = reached.get(child, 0) | of_group
        return reached

    def held_once(self, nodes: Iterable[int]) -> frozenset[int]:
        """Those of the nodes that one other node holds, and no root."""
        times = Counter(child for held in self._children.values() for child in held)
        return frozenset(one for one in nodes if times[one] == 1 and one not in self._roots)

    def behind_cycles(self) -> set[int]:
        """The nodes that are on a reference cycle, or held by one."""
        cyclic = {
            node
            for group in self._groups
            if len(group) > 1 or group[0] in self._children.get(group[0], ())
            for node in group
        }
        return self.reachable(cyclic) if cyclic else set()


def _strong_components(roots: Sequence[int], children: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Tarjan's strongly connected components, without recursion; what is held comes before its holders."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    waiting: list[int] = []
    is_waiting: set[int] = set()
    components: list[list[int]] = []
    for root in roots:
        if root in order:
            continue
        order[root] = low[root] = len(order)
        waiting.append(root)
        is_waiting.add(root)
        path = [(root, iter(children.get(root, ())))]
        while path:
            node, rest = path[-1]
            for child in rest:
                if child not in order:
                    order[child] = low[child] = len(order)
                    waiting.append(child)
                    is_waiting.add(child)
                    path.append((child, iter(children.get(child, ()))))
                    break
                if child in is_waiting:
                    low[node] = min(low[node], order[child])
            else:
                path.pop()
                if path:
                    parent = path[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == order[node]:
                    component = []
                    while True:
                        member = waiting.pop()
                        is_waiting.discard(member)
                        component.append(member)
                        if member == node:
                            break
                    components.append(component)
    return components
