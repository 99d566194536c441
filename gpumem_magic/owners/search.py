"""Who holds each live allocation: one walk through the user's objects, joined with the allocators' blocks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch

from gpumem_magic.attribution.categories import sizes_of_libraries
from gpumem_magic.devices.base import Machine
from gpumem_magic.looks import tensors
from gpumem_magic.looks.objects import attribute, attributes, slots
from gpumem_magic.owners.cycles import garbage_holding
from gpumem_magic.owners.graph import HoldGraph
from gpumem_magic.owners.layers import Layers
from gpumem_magic.owners.model import Held, Holdings, Lost, Root
from gpumem_magic.owners.naming import Namer
from gpumem_magic.owners.roots import closed_to, roots_of
from gpumem_magic.owners.stations import Stations
from gpumem_magic.owners.traversal import Place, Traversal, located
from gpumem_magic.recording.quiet import no_automatic_collection
from gpumem_magic.snapshot.model import ACTIVE

_NUMBER = re.compile(r"(\D*)(\d{0,18})")
CLEAR_WORKSPACES = "torch._C._cuda_clearCublasWorkspaces()"


def find_owners(
    machine: Machine,
    namespace: Mapping[str, Any],
    shell: Any = None,
    *,
    cycles: bool | Callable[[Mapping[Place, int], int], bool] = False,
    error: BaseException | None = None,
) -> Holdings:
    """Who holds what is live on the machine now.

    namespace: the program's variables; shell: the notebook's IPython shell, or None in a script. cycles: also look through all of
    Python's objects for reference cycles that only a garbage collection would free (slower); or who decides that, when told the
    bytes that no name was found for, by place, and all bytes. error: one that is on its way out of the program now. Nothing is
    collected, and nothing of the user's is kept.
    """
    began = time.perf_counter()
    machine.settle()
    blocks = _blocks(machine)
    if not blocks:
        return Holdings(seconds=time.perf_counter() - began)
    # The walk makes many objects: Python would collect the user's garbage in the middle of it.
    with no_automatic_collection(), closing(Traversal(machine.locate, closed_to(shell, namespace))) as walk:
        for root, values in roots_of(shell, namespace, error):
            walk.add_root(root, values)
        walk.walk()
        unnamed = {place: sizes for place, sizes in blocks.items() if place not in walk.storages}
        workspaces = _workspaces(machine, unnamed)
        if _looks_for_cycles(cycles, walk, blocks, workspaces):
            for root, values in garbage_holding(machine.locate, walk, blocks):
                walk.add_root(root, values)
            walk.walk()
        with tensors.no_functions(), tensors.no_dispatch():
            roots, held, graph, learned = _read(walk, blocks)
        objects = len(walk.objects)
    known = {(one.device, one.address) for one in held}
    workspace = Root("cuBLAS", "library", CLEAR_WORKSPACES)
    lost = []
    for (device, address), (size, requested) in blocks.items():
        if (device, address) in known:
            continue
        if (device, address) in workspaces:
            if roots[-1:] != [workspace]:
                roots.append(workspace)
            held.append(
                Held(device, address, size, requested, "cuBLAS workspace", "workspace", (len(roots) - 1,), False, -1)
            )
        else:
            lost.append(Lost(device, address, size, requested))
    held.sort(key=lambda one: (-one.size, _in_order(one.place)))
    lost.sort(key=lambda one: -one.size)
    seconds = time.perf_counter() - began
    return Holdings(tuple(roots), tuple(held), tuple(lost), graph, *learned, seconds, objects)


def _looks_for_cycles(
    cycles: bool | Callable[[Mapping[Place, int], int], bool],
    walk: Traversal,
    blocks: Mapping[Place, tuple[int, int]],
    workspaces: set[Place],
) -> bool:
    missing = {
        place: size for place, (size, _) in blocks.items() if place not in walk.storages and place not in workspaces
    }
    if not missing or isinstance(cycles, bool):
        return bool(missing) and cycles is True
    return cycles(missing, sum(size for size, _ in blocks.values()))


def _workspaces(machine: Machine, blocks: Mapping[Place, tuple[int, int]]) -> set[Place]:
    """What cuBLAS keeps of what has no name: a virtual device knows it, a real one's is known by its size and stream."""
    found: set[Place] = set()
    for device in machine.devices:
        index = device.facts.index
        asked = {
            (index, block.address): (block.requested_size, segment.stream)
            for segment in device.segments()
            for block in segment.blocks
            if (index, block.address) in blocks
        }
        sizes = sizes_of_libraries(device.facts.kind, [*asked.values()])
        found |= {place for place, (requested, _) in asked.items() if requested in sizes}
        found |= {(index, address) for address, label in device.labels.items() if label.category == "workspace"}
    return found


def _blocks(machine: Machine) -> dict[Place, tuple[int, int]]:
    """(device, address) -> (size, requested) of every live block."""
    return {
        (device.facts.index, block.address): (block.size, block.requested_size)
        for device in machine.devices
        for segment in device.segments()
        for block in segment.blocks
        if block.state == ACTIVE
    }


def _read(
    walk: Traversal, blocks: Mapping[Place, tuple[int, int]]
) -> tuple[list[Root], list[Held], HoldGraph, _Learned]:
    """The walk as numbers and strings."""
    live = {place: number for place, number in walk.storages.items() if place in blocks}
    children, is_root = _leading_to(walk, list(live.values()))
    numbers = [number for number in is_root if children.get(number)]
    graph = HoldGraph(
        numbers,
        children,
        {pair: kind for pair, kind in walk.kinds.items() if pair[0] in children and pair[1] in children},
    )
    namer = Namer(walk, numbers, children)
    layers = Layers(walk, namer)
    holders = graph.holders()
    cyclic = graph.behind_cycles()
    rank = {number: place for place, number in enumerate(numbers)}
    # An error in a notebook is always on a cycle: IPython's frames, which the walk does not enter, refer to it.
    errors = sum(1 << place for number, place in rank.items() if walk.objects[number].kind == "traceback")
    stations = Stations(walk, namer)
    held = []
    for (device, address), node in live.items():
        size, requested = blocks[device, address]
        best = rank[namer.root_of(node)]
        others = tuple(place for place in _bits(holders.get(node, 0)) if place != best)
        tensor = max((walk.objects[number] for number in walk.tensors[node]), key=tensors.numel)
        kind = _kind(walk, namer, node)
        held.append(
            Held(
                device,
                address,
                size,
                requested,
                namer.place(node),
                kind,
                (best, *others),
                node in cyclic or bool(holders.get(node, 0) & errors),
                node,
                tensors.dtype_name(tensor),
                tensors.shape(tensor),
                layers.of(namer.path(node)) if kind == "graph" else "",
                _seen(walk.objects[number] for number in walk.tensors[node]),
                all(tensors.is_view(walk.objects[number]) for number in walk.tensors[node]),
                stations.to(namer.path(node)),
            )
        )
    return [walk.objects[number] for number in numbers], held, graph, _optimizers(walk, namer, children)


def _leading_to(walk: Traversal, storages: list[int]) -> tuple[dict[int, list[int]], list[int]]:
    """Number -> those of what it holds that lead to the storages; and the roots among them."""
    parents = walk.parents()
    children: dict[int, list[int]] = {number: [] for number in storages}
    todo = list(storages)
    roots = []
    while todo:
        number = todo.pop()
        if type(walk.objects[number]) is Root:
            roots.append(number)
        for parent in parents[number]:
            if parent not in children:
                children[parent] = []
                todo.append(parent)
            children[parent].append(number)
    return children, sorted(roots)


class _Learned(NamedTuple):
    """What the optimizers know, as in `Holdings`."""

    optimizers: dict[str, frozenset[Place]]
    frozen: frozenset[Place]
    learned: frozenset[int]


def _optimizers(walk: Traversal, namer: Namer, numbers: Iterable[int]) -> _Learned:
    """numbers: the objects among which optimizers are looked for."""
    found: dict[str, frozenset[Place]] = {}
    frozen: set[Place] = set()
    learned: set[int | None] = set()
    for number in numbers:
        thing = walk.objects[number]
        if tensors.is_optimizer(thing):
            parameters = tensors.parameters_of(tensors.working_optimizer(thing))
            places = {one: tuple(_places(walk, one)) for one in parameters}
            found[namer.place(number)] = frozenset(chain.from_iterable(places.values()))
            frozen.update(chain.from_iterable(its for one, its in places.items() if not tensors.requires_grad(one)))
            learned.update(map(walk.number_of, places))
    return _Learned(found, frozenset(frozen), frozenset(one for one in learned if one is not None))


def _places(walk: Traversal, tensor: torch.Tensor) -> Iterator[Place]:
    """Where a tensor's memory lies. One without memory of its own (`DTensor`) is where the tensors inside it lie."""
    place = located(walk.locate, tensor)
    if place is not None:
        yield place
        return
    for inside in (*attributes(tensor).values(), *slots(tensor)):
        if tensors.is_tensor(inside):
            yield from _places(walk, inside)


def _seen(views: Iterable[Any]) -> int:
    """Bytes that these tensors on one storage cover; those with the same beginning and shape are one."""
    distinct = {(tensors.offset(one), tensors.shape(one)): tensors.nbytes(one) for one in views}
    return sum(distinct.values())


def _in_order(place: str) -> list[tuple[str, int]]:
    """`x[2]` before `x[10]`."""
    return [(words, int(number or -1)) for words, number in _NUMBER.findall(place)]


def _bits(bits: int) -> list[int]:
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found


def _kind(walk: Traversal, namer: Namer, node: int) -> str:
    if namer.is_in_graph(node):
        return "graph"
    path = namer.path(node)
    if any(walk.kinds.get(pair) == "grad" for pair in pairwise(path)):
        return "gradient"
    things = [walk.objects[number] for number in path]
    holders = [thing for thing in things if tensors.is_optimizer(thing) or tensors.is_module(thing)]
    if tensors.is_parameter(things[-2]):
        return "parameter"
    if not holders:
        return "tensor"
    table, kind = ("state", "optimizer_state") if tensors.is_optimizer(holders[-1]) else (tensors.BUFFERS, "buffer")
    held_in = attribute(holders[-1], table)
    return kind if any(thing is held_in for thing in things) else "tensor"
