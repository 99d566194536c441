"""From a search to an answer: who holds how much, what releasing each would free, and what to type to do so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpumem_magic.owners.model import Held, Holdings, size_of

# More than so many holders of one allocation together are nobody's statement.
_MOST_TOGETHER = 6

# The stations of a trail that ends at a variable's own tensor, or at an element of the list or dictionary that it is.
# What tensors are called in code to type, and the containers around them.
_NAMES_OF_PARTS = ("one", "part")
ELEMENT = 2


@dataclass(frozen=True)
class Holder:
    """Somebody who keeps memory. Bytes are those of the blocks.

    bytes: what is named after it; over all holders these add up to what was found. frees: what comes back if it alone lets go,
    collected: the part of that which comes back only with Python's garbage collection, as a reference cycle is in the way.
    statement: what lets go of it, None where no single statement does. together: the statements that free all that is named after
    it, where others hold some of it too, and together_frees what they free. largest: the places of its largest allocations.
    """

    name: str
    kind: str
    type: str
    bytes: int
    count: int
    frees: int
    collected: int
    statement: str | None
    together: tuple[str, ...]
    together_frees: int
    largest: tuple[str, ...]


def holders(holdings: Holdings) -> list[Holder]:
    """Everybody who keeps memory, those with most first. One that only keeps what is named after another comes with 0 bytes."""
    named: dict[int, list[Held]] = {}
    reached: dict[int, list[Held]] = {}
    for one in holdings.held:
        named.setdefault(one.roots[0], []).append(one)
        for number in one.roots:
            reached.setdefault(number, []).append(one)
    found = [_holder(holdings, number, named.get(number, []), its) for number, its in reached.items()]
    return sorted(found, key=lambda one: (-one.bytes, -one.frees, one.name))


def _holder(holdings: Holdings, number: int, named: Sequence[Held], reached: Sequence[Held]) -> Holder:
    root = holdings.roots[number]
    alone = [one for one in reached if len(one.roots) == 1]
    others = {other for one in named for other in one.roots} - {number}
    together: tuple[str, ...] = ()
    together_frees = size_of(alone)
    if others and len(others) < _MOST_TOGETHER:
        numbers = [number, *sorted(others)]
        words = [holdings.roots[each].statement for each in numbers]
        if all(word is not None for word in words):
            together = joined(word for word in words if word is not None)
            together_frees = size_of(holdings.freed(numbers))
    return Holder(
        name=root.name,
        kind=root.kind,
        type=root.type,
        bytes=size_of(named),
        count=len(named),
        frees=size_of(alone),
        collected=size_of(one for one in alone if one.cyclic),
        statement=root.statement,
        together=together,
        together_frees=together_frees,
        largest=tuple(one.place for one in named[:3]),
    )


def joined(statements: Iterable[str]) -> tuple[str, ...]:
    """Statements with the same first word written as one: ``del model, optimizer``, ``%gpumem_free out traceback``."""
    names: dict[str, list[str]] = {}
    for statement in statements:
        word, _, name = statement.partition(" ")
        targets = names.setdefault(word, [])
        if name not in targets:
            targets.append(name)
    return tuple(f"{word} {(', ' if word == 'del' else ' ').join(its)}".strip() for word, its in names.items())


def freed_by_detaching(holdings: Holdings, number: int) -> list[Held]:
    """What comes back if this root's tensors let go of autograd's graph (``loss = loss.detach()``)."""
    graph = holdings.graph
    otherwise = graph.reachable_but(number, "graph")
    return [one for one in holdings.reached(number) if one.node >= 0 and one.node not in otherwise]


def matching(holdings: Holdings, name: str) -> list[Held]:
    """The allocations that a variable keeps, or a part of one (``model.fc``, ``x[3]``) with what that leads to; largest first."""
    number = holdings.number(name)
    if number is not None:
        return holdings.reached(number)
    named = [one for one in holdings.held if _begins(one.place, name)]
    nodes = {at.node for one in named for at in one.trail if _begins(at.place, name)} | {one.node for one in named}
    reached = holdings.graph.reachable(nodes - {-1})
    known = {(one.device, one.address) for one in named}
    return [one for one in holdings.held if one.node in reached or (one.device, one.address) in known]


def _begins(place: str, name: str) -> bool:
    return place == name or (place.startswith(name) and place[len(name)] in ".[:")


def detach_words(name: str, kind: str, *inner: str) -> str:
    """What to type so that a variable (of the class `kind`) lets go of autograd's graph and keeps its values. inner: the classes
    of the containers in it, the outermost first."""
    code = detached(name, [kind, *inner] if kind != "Tensor" else [])
    return f"`{name} = {code}`" if code else f"`.detach()` on the tensors in `{name}`"


def detached(name: str, kinds: Sequence[str]) -> str:
    """The same values without a graph: `tuple(one.detach() for one in state)`; "" where no short code says it. kinds: the classes
    of the containers, the outermost first."""
    if len(kinds) > len(_NAMES_OF_PARTS) or not set(kinds) <= {"list", "tuple", "dict"}:
        return ""
    return _detached(name, kinds)


def _detached(words: str, kinds: Sequence[str]) -> str:
    if not kinds:
        return f"{words}.detach()"
    kind, *inner = kinds
    part = _NAMES_OF_PARTS[len(inner)]
    each = _detached(part, inner)
    if kind == "dict":
        return f"{{key: {each} for key, {part} in {words}.items()}}"
    return f"[{each} for {part} in {words}]" if kind == "list" else f"tuple({each} for {part} in {words})"
