"""The numbers of nodes that a backward pass makes, as a device has them.

Autograd runs the node with the highest number first, and each thread counts its own nodes (torch/csrc/autograd/engine.cpp,
`CompareNodeTaskTime`, and aten/src/ATen/SequenceNumber.cpp). A device's nodes run in a thread of their own, so that what a pass
with ``create_graph=True`` makes there has lower numbers than what the program made before, as a rule; here all run in the
program's thread, whose count goes on. The gradient of a gradient runs in the device's order once they have its numbers: all of
a graph get them before a pass through it. (Nodes with one number run as the engine's heap has them, and so they do here.)

One count stands for the threads of all devices, as though no node of such a pass were the host's.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch._C._autograd import _get_sequence_nr

_GIVEN = "gpumem_magic: number"
_LEAF = "AccumulateGrad"
# So many stretches are remembered: what a graph is made of is not older.
_MOST = 10_000


class _DevicesThread:
    """The count of its thread, and whether it made nodes with a graph."""

    made = 0
    changed = False


class _Apart(NamedTuple):
    """A stretch of this thread's nodes that are not the program's own: its first number, the one after its last, how many nodes
    before it were not the program's, and the device's number for its first (None: a device has none of them)."""

    begin: int
    end: int
    before: int
    devices: int | None


class _Stretches(threading.local):
    """Those of this thread, the latest last, and where they begin."""

    def __init__(self) -> None:
        self.apart: list[_Apart] = []
        self.begins: list[int] = []


_STRETCHES = _Stretches()


def begin() -> None:
    """A device that is new has made nothing."""
    _DevicesThread.made, _DevicesThread.changed = 0, False


def number_of(node: Any) -> int:
    """The number that a node came with, which no other of its thread has."""
    number = node._sequence_nr()
    return int(node.metadata.get(_GIVEN, number)) if _DevicesThread.changed else int(number)


def number_as_on_a_device(outputs: Iterable[Any]) -> None:
    """Before a pass from there: its nodes get a device's numbers. Costs nothing where no pass has made a graph."""
    if _DevicesThread.changed:
        for node in _nodes(getattr(output, "grad_fn", None) for output in outputs):
            if type(node).__name__ != _LEAF and _GIVEN not in node.metadata:
                number = node.metadata[_GIVEN] = node._sequence_nr()
                node._set_sequence_nr(_devices_number(number))


def count_pass(first: int, with_graph: bool) -> None:
    """After a pass of the program's. first: the count of this thread at its start."""
    made = _count_apart(first, _DevicesThread.made)
    _DevicesThread.made += made
    _DevicesThread.changed |= with_graph and made > 0


@contextmanager
def none_of_the_programs() -> Iterator[None]:
    """What is made meanwhile are nodes that a device's program does not have, in its passes neither."""
    first, by_devices, stretches = _get_sequence_nr(), _DevicesThread.made, len(_STRETCHES.apart)
    yield
    _DevicesThread.made = by_devices
    del _STRETCHES.apart[stretches:], _STRETCHES.begins[stretches:]
    _count_apart(first, None)


def _count_apart(first: int, devices: int | None) -> int:
    """How many nodes this thread has made from there on: they are not among the program's own."""
    made = int(_get_sequence_nr()) - first
    if made > 0:
        last = _STRETCHES.apart[-1] if _STRETCHES.apart else _Apart(0, 0, 0, None)
        _STRETCHES.apart.append(_Apart(first, first + made, last.before + last.end - last.begin, devices))
        _STRETCHES.begins.append(first)
        del _STRETCHES.apart[:-_MOST], _STRETCHES.begins[:-_MOST]
    return max(0, made)


def _devices_number(number: int) -> int:
    """The number that a device's threads would have given to the node with this one."""
    place = bisect_right(_STRETCHES.begins, number)
    if not place:
        return number
    last = _STRETCHES.apart[place - 1]
    if number >= last.end:
        return number - last.before - (last.end - last.begin)
    return last.begin - last.before if last.devices is None else number - last.begin + last.devices


def _nodes(starts: Iterable[Any]) -> list[Any]:
    """These and those before them."""
    waiting = list(starts)
    seen: dict[Any, None] = {}
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen[node] = None
            waiting += [following for following, _ in node.next_functions]
    return list(seen)
