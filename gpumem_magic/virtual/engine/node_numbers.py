"""The numbers of nodes that a backward pass makes, as a device has them.

Autograd runs the node with the highest number first, and each thread counts its own nodes (torch/csrc/autograd/engine.cpp,
`CompareNodeTaskTime`, and aten/src/ATen/SequenceNumber.cpp). A device's nodes run in a thread of their own, so that what a pass
with ``create_graph=True`` makes there has lower numbers than what the program made before, as a rule; here all run in the
program's thread, whose count goes on. The gradient of a gradient runs in the device's order once they have its numbers.

One count stands for the threads of all devices, as though no node of such a pass were the host's.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._autograd import _get_sequence_nr

_GIVEN = "gpumem_magic: number"
_LEAF = "AccumulateGrad"
# So many passes are remembered: what a graph is made of is not older.
_MOST = 10_000


class _DevicesThread:
    """The count of its thread, and whether any node has another number than it came with."""

    made = 0
    changed = False


class _PassesBegun(threading.local):
    """Those that this thread began and that made nodes, the latest last: its count of the program's own nodes when each began,
    and how many they had made together before it and after it: this thread counts together what is counted apart on a device."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.made = [0]


_PASSES = _PassesBegun()


def number_of(node: Any) -> int:
    """The number that a node came with, which no other of its thread has."""
    number = node._sequence_nr()
    return int(node.metadata.get(_GIVEN, number)) if _DevicesThread.changed else int(number)


def count_pass(first: int, outputs: Iterable[Any], arguments: tuple[Any, ...], gradients: Any) -> None:
    """After a pass of the program's. first: the count of this thread at its start. arguments: those of the engine's call behind
    the outputs."""
    made = _get_sequence_nr() - first
    if made <= 0:
        return
    _count_apart(first, made)
    for node in _nodes(_with_graph(outputs, gradients), first) if arguments[2] else ():
        if type(node).__name__ != _LEAF:
            number = node._sequence_nr()
            node.metadata[_GIVEN] = number
            node._set_sequence_nr(_among_the_programs(number - first + _DevicesThread.made))
            _DevicesThread.changed = True
    _DevicesThread.made += made
    del _PASSES.begun[:-_MOST], _PASSES.made[: -_MOST - 1]


@contextmanager
def none_of_the_programs() -> Iterator[None]:
    """What is made meanwhile are nodes that a device's program does not have."""
    first = _get_sequence_nr()
    yield
    made = _get_sequence_nr() - first
    if made > 0:
        _count_apart(first, made)


def _count_apart(first: int, made: int) -> None:
    """So many nodes, from a count of this thread on, are not among the program's own in its thread."""
    _PASSES.begun.append(first - _PASSES.made[-1])
    _PASSES.made.append(_PASSES.made[-1] + made)


def _among_the_programs(number: int) -> int:
    """The number here of a node that comes before the program's own with this number, and after those with a lower one."""
    return number + _PASSES.made[bisect_right(_PASSES.begun, number)]


def _with_graph(outputs: Iterable[Any], gradients: Any) -> Iterator[Any]:
    """The nodes that gave the gradients: those that came back, or those that leaves keep."""
    for gradient in gradients or ():
        yield None if gradient is None else gradient.grad_fn
    if not gradients:
        for node in _nodes(getattr(output, "grad_fn", None) for output in outputs):
            if type(node).__name__ == _LEAF and node.variable.grad is not None:
                yield node.variable.grad.grad_fn


def _nodes(starts: Iterable[Any], first: int = 0) -> list[Any]:
    """These and those before them, as far as they have this number or a later one. (What leads to a node is older than it.)"""
    waiting = list(starts)
    seen: dict[Any, None] = {}
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen and number_of(node) >= first:
            seen[node] = None
            waiting += [following for following, _ in node.next_functions]
    return list(seen)
