"""What the graph of a loss keeps for backward, inspected just before backward frees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpumem_magic.looks import tensors
from gpumem_magic.owners import autograd

Place = tuple[int, int]


@dataclass(frozen=True)
class Saved:
    """A tensor on a device that an operation keeps for backward.

    operations: those that keep it (``bmm``, ``softmax``). shape, dtype: the tensor's. parameter: where the parameter lies whose
    layer it belongs to: the first operation's own, or that of the layer whose output it works on; None where there is none.
    """

    device: int
    address: int
    operations: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    parameter: Place | None


def saved_in_graph(outputs: Iterable[Any], locate: Callable[[Any], Place | None]) -> list[Saved]:
    """Every tensor on a device in the graphs of these tensors, parameters left out. Runs no hook, and keeps no tensor."""
    known: dict[int, Place | None] = {}
    found: dict[Place, Saved] = {}
    with tensors.unseen():
        tops = [tensors.grad_fn(one) for one in outputs if tensors.is_tensor(one)]
        nodes = _nodes([one for one in tops if one is not None])
        parameters = _parameters(nodes, locate)
        own = set(parameters.values())
        for node in nodes.values():
            for _, value in autograd.saved_by(node):
                if not tensors.is_tensor(value) or tensors.is_parameter(value):
                    continue
                place = _located(value, locate)
                if place is None or place in own:
                    continue
                operation = autograd.operation_of(node)
                before = found.get(place)
                if before is not None:
                    if operation not in before.operations:
                        found[place] = replace(before, operations=(*before.operations, operation))
                    continue
                found[place] = Saved(
                    *place,
                    (operation,),
                    tensors.shape(value),
                    tensors.dtype_name(value),
                    _layer(node, parameters, known),
                )
    return list(found.values())


def _nodes(tops: list[Any]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    todo = list(tops)
    while todo:
        node = todo.pop()
        if id(node) not in found:
            found[id(node)] = node
            todo += autograd.next_nodes(node)
    return found


def _parameters(nodes: dict[int, Any], locate: Callable[[Any], Place | None]) -> dict[int, Place]:
    """id of a node that collects a gradient -> where its parameter lies."""
    found = {}
    for number, node in nodes.items():
        variable = autograd.variable_of(node)
        place = None if variable is None else _located(variable, locate)
        if place is not None:
            found[number] = place
    return found


def _layer(node: Any, parameters: dict[int, Place], known: dict[int, Place | None]) -> Place | None:
    passed = []
    found = None
    while id(node) not in known:
        passed.append(id(node))
        known[id(node)] = None
        following = autograd.next_nodes(node)
        own = [parameters[id(end)] for end in map(_end, following) if id(end) in parameters]
        if own or not following:
            found = own[-1] if own else None
            break
        node = following[0]
    else:
        found = known[id(node)]
    for one in passed:
        known[one] = found
    return found


def _end(node: Any) -> Any:
    """Behind the nodes with one input (a transposed or converted weight)."""
    for _ in range(8):
        following = autograd.next_nodes(node)
        if len(following) != 1:
            break
        node = following[0]
    return node


def _located(tensor: torch.Tensor, locate: Callable[[Any], Place | None]) -> Place | None:
    try:
        return locate(tensor)
    except (NotImplementedError, RuntimeError):
        return None
