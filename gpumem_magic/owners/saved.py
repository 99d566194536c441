"""What the graph of a loss keeps for backward, inspected just before backward frees it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpumem_magic.looks import tensors
from gpumem_magic.looks.objects import name_of_class
from gpumem_magic.owners import autograd
from gpumem_magic.owners.layers import NearestParameter
from gpumem_magic.owners.sums import equal_parts
from gpumem_magic.owners.traversal import Locate, Place, located


@dataclass(frozen=True)
class Leaves:
    """What a node leads to that gets a gradient. places: of all leaves of the graph; bits: one for each, set for its own."""

    places: Sequence[Place] = ()
    bits: int = 0

    def others(self, addresses: Collection[int]) -> bool:
        """Whether there are any but those at these addresses."""
        return any(self.bits >> bit & 1 and address not in addresses for bit, (_, address) in enumerate(self.places))


@dataclass(frozen=True)
class Saved:
    """A tensor on a device that an operation keeps for backward.

    operations: those that keep it (``bmm``, ``softmax``). shape, dtype: the tensor's. parameter: where the parameter lies whose
    layer it belongs to: the first operation's own, or that of the layer whose output it works on; None where there is none.
    part: of a sum of alike parts, the number of the one that keeps it; -1 where the graph is none. leaves: what the gradients of
    each operation that keeps it go on to. given: whether the first operation works with that parameter itself, as a layer does
    with its input.
    """

    device: int
    address: int
    operations: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    parameter: Place | None
    part: int = -1
    leaves: tuple[Leaves, ...] = ()
    given: bool = False


def saved_in_graph(outputs: Iterable[Any], locate: Locate) -> list[Saved]:
    """Every tensor on a device in the graphs of these tensors, parameters left out. Runs no hook, and keeps no tensor."""
    return tensors.unheard(_saved_in_graph, outputs, locate)


def _saved_in_graph(outputs: Iterable[Any], locate: Locate) -> list[Saved]:
    found: dict[Place, Saved] = {}
    tops = [tensors.grad_fn(one) for one in outputs if tensors.is_tensor(one)]
    nodes = {id(node): node for node in autograd.graph_behind(one for one in tops if one is not None)}
    parameters = _parameters(nodes, locate)
    following = {number: list(map(id, autograd.next_nodes(node))) for number, node in nodes.items()}
    nearest = NearestParameter(following, parameters)
    saved = {number: [value for _, value in autograd.saved_by(node)] for number, node in nodes.items()}
    keeping = {number for number, values in saved.items() if any(map(tensors.is_tensor, values))}
    own = set(parameters.values())
    places = tuple(own)
    order = {place: number for number, place in enumerate(places)}
    behind = _leaves_behind(following, {number: order[place] for number, place in parameters.items()})
    names = {number: name_of_class(type(node)) for number, node in nodes.items()}
    parts = equal_parts([id(one) for one in tops if one is not None], following, names, parameters)
    part_of = {number: part for part, its in enumerate(parts) for number in its} if len(parts) > 1 else {}
    for number, node in nodes.items():
        for value in saved[number]:
            if not tensors.is_tensor(value) or tensors.is_parameter(value):
                continue
            place = located(locate, value)
            if place is None or place in own:
                continue
            operation = autograd.operation_of(node)
            before = found.get(place)
            if before is not None:
                operations = (
                    (*before.operations, operation) if operation not in before.operations else before.operations
                )
                leaves = (*before.leaves, Leaves(places, behind[number]))
                found[place] = replace(before, operations=operations, leaves=leaves)
                continue
            found[place] = Saved(
                *place,
                (operation,),
                tensors.shape(value),
                tensors.dtype_name(value),
                nearest.of(number),
                part_of.get(number, -1),
                (Leaves(places, behind[number]),),
                nearest.is_used_by(number, keeping),
            )
    return list(found.values())


def _parameters(nodes: dict[int, Any], locate: Locate) -> dict[int, Place]:
    """id of a node that collects a gradient -> where its parameter lies."""
    found = {}
    for number, node in nodes.items():
        variable = autograd.variable_of(node)
        place = None if variable is None else located(locate, variable)
        if place is not None:
            found[number] = place
    return found


def _leaves_behind(following: Mapping[int, Sequence[int]], leaves: Mapping[int, int]) -> dict[int, int]:
    """For each node, a bit for every leaf that its gradient reaches. leaves: node -> the number of its leaf."""
    found: dict[int, int] = {}
    todo = list(following)
    while todo:
        node = todo[-1]
        missing = [one for one in following.get(node, ()) if one not in found] if node not in found else []
        if missing:
            todo += missing
            continue
        todo.pop()
        if node not in found:
            bits = 1 << leaves[node] if node in leaves else 0
            for one in following.get(node, ()):
                bits |= found[one]
            found[node] = bits
    return found
