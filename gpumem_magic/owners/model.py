"""Who holds what: numbers and strings only, so that nothing of the user's is kept alive by an answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from gpumem_magic.owners.graph import HoldGraph
from gpumem_magic.snapshot.timeline import Allocation

# What can be let go of without touching a variable, in this order.
# Where no name holds one part in so many of the memory, reference cycles are looked for unasked.
NAMELESS = 20
FREEABLE = ("traceback", "out", "cycles", "cache")
FREE_TRACEBACK = "%gpumem_free traceback"
# The root of the error that is on its way out now: it goes by itself, once nobody looks at it.
THIS_ERROR = "this error's traceback"
# The place of what a function calls its own: ``local `outs[0]` of run(), in this error's traceback``.
DEFAULT_ARGUMENT, CLOSURE_VARIABLE = "default argument", "closure variable"
_OWN = rf"(?:local|{CLOSURE_VARIABLE}|{DEFAULT_ARGUMENT}) `(?P<variable>[^`]*)`"
OF_FUNCTION = re.compile(rf"{_OWN}(?P<function> of (?P<called>\w*).*)", re.DOTALL)
_HERE = re.compile(rf"{_OWN} of (?P<called>\w+)\(\), in {THIS_ERROR}")
# The place of what the code works with that PyTorch's compiler wrote: ``compiled code, in this error's traceback``.
COMPILED_CODE = "compiled code"
# What goes where a model goes, by the kinds of `Held`.
KINDS_OF_A_MODEL = frozenset({"parameter", "buffer", "gradient", "optimizer_state"})
# In a graph, what a custom function keeps itself: ``graph of loss: ctx.extra of swish``.
ON_CTX = ": ctx"
# In a graph, a leaf that has no name any more, and its gradient.
A_LEAF = ": a parameter"
# Among a station's bases.
ERROR, TRACEBACK, GENERATOR = "builtins.BaseException", "builtins.traceback", "builtins.generator"


@dataclass(frozen=True)
class Root:
    """Something that keeps objects alive by itself.

    kind: variable | out | traceback | module | thread | cycle | library. name: as the notebook writes it. statement: what lets go
    of it, or None where no single statement does. type: the class of what it holds (``Linear``), "" where that means nothing.
    """

    name: str
    kind: str
    statement: str | None
    type: str = ""


@dataclass(frozen=True)
class Station:
    """An object on the way from a root to memory. node: its number in the graph; place: how the program reaches it; type: its
    class; bases: that and all above it, with their modules."""

    node: int
    place: str
    type: str
    bases: tuple[str, ...]


@dataclass(frozen=True)
class Held:
    """A live allocation and who holds it. Sizes in bytes: the block's, and what the program asked for.

    place: the best name for it (``model.fc.weight``, ``graph of loss: self saved by gelu``). kind: parameter | buffer |
    gradient | optimizer_state | graph | tensor | workspace. roots: the numbers of all roots that reach it, the place's first.
    cyclic: whether a reference cycle is among its holders, so that letting go is not enough without a garbage collection.
    node: its number in the graph, -1 for memory that no object holds. dtype and shape: of the largest tensor that was seen on it.
    layer: of a graph's, the layer that saved it, or whose output the saving operation works on; "" where that is not known.
    seen: bytes of it that the tensors on it cover, counted once where two are the same view; 0 where no tensor was seen.
    viewed: whether all tensors that were seen on it are known to be views (of what `detach()` gives that is not known).
    trail: the objects on the way to it, from the root's own on; of a graph's, up to the tensor that keeps the graph.
    """

    device: int
    address: int
    size: int
    requested: int
    place: str
    kind: str
    roots: tuple[int, ...]
    cyclic: bool
    node: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    layer: str = ""
    seen: int = 0
    viewed: bool = False
    trail: tuple[Station, ...] = ()

    @property
    def in_traceback(self) -> bool:
        """Whether it lies in a function that an error left, whose local variables nobody can assign to any more."""
        return self.goes_through(TRACEBACK)

    def goes_through(self, kind: str) -> bool:
        """Whether an object of this class, or of one below it, is on the way to it."""
        return any(kind in station.bases for station in self.trail)


@dataclass(frozen=True)
class Lost:
    """A live allocation that no name was found for. Sizes in bytes."""

    device: int
    address: int
    size: int
    requested: int


@dataclass(frozen=True)
class Holdings:
    """The answer of one search. held: largest first. optimizers: an optimizer's name -> the addresses, by device, of the
    parameters that it knows. frozen: those of them that require no gradient. learned: the parameters' own numbers in the graph
    (several may share an address). seconds: what the search took."""

    roots: tuple[Root, ...] = ()
    held: tuple[Held, ...] = ()
    lost: tuple[Lost, ...] = ()
    graph: HoldGraph = field(default_factory=lambda: HoldGraph([], {}, {}))
    optimizers: Mapping[str, frozenset[tuple[int, int]]] = field(default_factory=dict)
    frozen: frozenset[tuple[int, int]] = frozenset()
    learned: frozenset[int] = frozenset()
    seconds: float = 0.0
    objects: int = 0

    @cached_property
    def optimized(self) -> frozenset[tuple[int, int]]:
        """The addresses, by device, of all parameters that optimizers know."""
        return frozenset().union(*self.optimizers.values())

    @property
    def allocated(self) -> int:
        """Bytes of all live allocations, found or not."""
        return self.found + sum(one.size for one in self.lost)

    @property
    def found(self) -> int:
        """Bytes of the allocations that have an owner."""
        return sum(one.size for one in self.held)

    def number(self, name: str) -> int | None:
        """The number of the root of this name, or None."""
        return next((number for number, root in enumerate(self.roots) if root.name == name), None)

    def reached(self, root: int) -> list[Held]:
        """What a root keeps, alone or with others."""
        return [one for one in self.held if root in one.roots]

    def freed(self, roots: Iterable[int]) -> list[Held]:
        """What would be freed if all these roots let go, and no other: what nothing else holds."""
        gone = frozenset(roots)
        return [one for one in self.held if gone.issuperset(one.roots)]

    def freed_without(self, *kinds: str) -> list[Held]:
        """What would be freed if all links of these kinds were cut: "grad" (zero_grad), "graph" (detach)."""
        still_reachable = self.graph.reachable(without=kinds)
        return [one for one in self.held if one.node >= 0 and one.node not in still_reachable]

    def freed_by_zero_grad(self) -> list[Held]:
        """The gradients that would be freed if all optimizers let go of those of their parameters."""
        gradients = [
            one
            for one in self.held
            if one.kind == "gradient" and any(station.node in self.learned for station in one.trail)
        ]
        still_reachable = self.graph.reachable(without=("grad",), of=self.learned)
        return [one for one in gradients if one.node not in still_reachable]

    def freed_by_emptying(self, nodes: Iterable[int]) -> list[Held]:
        """What would be freed if these objects let go of all that they hold (``outputs.clear()``)."""
        still_reachable = self.graph.reachable(closed=frozenset(nodes))
        return [one for one in self.held if one.node >= 0 and one.node not in still_reachable]

    def freed_by_replacing(self, nodes: Iterable[int]) -> list[Held]:
        """What would be freed if the place that holds each of these objects got another value (``self.cache = None``)."""
        return self.freed_by_emptying(self.graph.held_once(nodes))

    def freed_by_detaching(self, nodes: Iterable[int]) -> list[Held]:
        """What would be freed if these tensors let go of their graphs (``loss.detach()``)."""
        still_reachable = self.graph.reachable(without=("graph",), of=frozenset(nodes))
        return [one for one in self.held if one.node >= 0 and one.node not in still_reachable]

    def of_kind(self, kind: str) -> list[int]:
        """The numbers of the roots of a kind."""
        return [number for number, root in enumerate(self.roots) if root.kind == kind]


def size_of(allocations: Iterable[Held | Allocation]) -> int:
    """Bytes of the allocations' blocks."""
    return sum(one.size for one in allocations)


def where_it_failed(place: str) -> str:
    """A place's short form, ``outs[0] of run()``, where it is a variable's of a function that has just failed."""
    return _HERE.sub(r"\g<variable> of \g<called>()", place)


def by_root(held: Iterable[Held]) -> Counter[int]:
    """Number of a root -> bytes of what is named after it."""
    sizes = Counter[int]()
    for one in held:
        sizes[one.roots[0]] += one.size
    return sizes
