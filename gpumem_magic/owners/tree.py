"""What each layer keeps: parameters, gradients, optimizer state and saved activations, as a tree by the modules' names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from gpumem_magic.owners.model import Held, Holdings

COLUMNS = ("parameters", "gradients", "optimizer_state", "activations")
_STATE = re.compile(r"\.state\[(?P<parameter>.+?)\](?:\[|$)")
_KINDS = {
    "parameter": "parameters",
    "buffer": "parameters",
    "gradient": "gradients",
    "optimizer_state": "optimizer_state",
    "graph": "activations",
}


@dataclass
class Layer:
    """One module. bytes: by column, its inner layers included. name: its own, without those around it."""

    name: str
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))
    inner: dict[str, Layer] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def add(self, path: Iterable[str], column: str, size: int) -> None:
        """Bytes of an inner layer; its path is from this one."""
        spot = self
        spot.bytes[column] += size
        for part in path:
            spot = spot.inner.setdefault(part, Layer(part))
            spot.bytes[column] += size


def by_layer(holdings: Holdings) -> Layer:
    """The tree of all layers; the nameless top holds everything that belongs to one. Parameters and buffers are one column."""
    top = Layer("")
    for one in holdings.held:
        column = _KINDS.get(one.kind)
        if column is not None and (layer := layer_of(one)):
            top.add(layer.split("."), column, one.size)
    return top


def layer_of(held: Held) -> str:
    """The layer of an allocation (``model.encoder.0``), "" where it belongs to none."""
    if held.kind == "graph":
        return held.layer
    place = held.place.removesuffix(".grad")
    if held.kind == "optimizer_state":
        found = _STATE.search(place)
        place = found["parameter"] if found else ""
    return place.rpartition(".")[0]


def inner_layer(top: Layer, name: str) -> Layer | None:
    """The tree of one layer (``model.encoder``) and what is in it, with a nameless top again; None where it holds nothing."""
    spot = top
    for part in name.split("."):
        if part not in spot.inner:
            return None
        spot = spot.inner[part]
    return Layer("", spot.bytes, {name: Layer(name, spot.bytes, spot.inner)})


@dataclass(frozen=True)
class Branch:
    """A line of the tree. name: ``layer``, or ``0 to 23`` for `times` alike siblings; bytes are those of one of them."""

    name: str
    depth: int
    times: int
    bytes: tuple[int, ...]


def branches(top: Layer, depth: int) -> list[Branch]:
    """The lines down to a depth, siblings that are alike in one. A module that holds one other and nothing else joins it."""
    found: list[Branch] = []
    _grow(top, 0, depth, found)
    return found


def _grow(layer: Layer, level: int, depth: int, found: list[Branch]) -> None:
    if level >= depth:
        return
    for name, times, one in alike(layer.inner.values(), _same):
        spot, words = one, name
        while times == 1 and len(spot.inner) == 1 and (only := next(iter(spot.inner.values()))).bytes == spot.bytes:
            spot, words = only, f"{words}.{only.name}"
        found.append(Branch(words, level, times, tuple(one.bytes[column] for column in COLUMNS)))
        _grow(spot, level + 1, depth, found)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=_Named)


def alike(siblings: Iterable[N], same: Callable[[N, N], bool]) -> list[tuple[str, int, N]]:
    """Numbered neighbours that are the same as one: (name, how many, the first)."""
    groups: list[list[N]] = []
    for one in siblings:
        before = groups[-1][0] if groups else None
        if before is not None and before.name.isdecimal() and one.name.isdecimal() and same(before, one):
            groups[-1].append(one)
        else:
            groups.append([one])
    return [
        (group[0].name if len(group) == 1 else f"{group[0].name} to {group[-1].name}", len(group), group[0])
        for group in groups
    ]


def _same(one: Layer, other: Layer) -> bool:
    """Whether two have the same figures, all the way down."""
    return (
        one.bytes == other.bytes
        and one.inner.keys() == other.inner.keys()
        and all(_same(one.inner[name], other.inner[name]) for name in one.inner)
    )
