"""Where memory is kept, as the program writes it, and what lets go of it: ``lit.outs``, not ``lit``; ``.clear()``, not ``del``.

A remedy is offered with what the search for owners says that it frees.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from gpumem_magic.causes.libraries import CACHED, advice, advised, of_library
from gpumem_magic.causes.model import LEAST, Scene
from gpumem_magic.causes.written import Written
from gpumem_magic.owners.model import (
    CLOSURE_VARIABLE,
    DEFAULT_ARGUMENT,
    OF_FUNCTION,
    THIS_ERROR,
    Held,
    Station,
    size_of,
)
from gpumem_magic.recording.model import OF_A_GRAPH
from gpumem_magic.report.tensors import number_range
from gpumem_magic.units import counted, human

# The kinds of roots that have a name in the program.
NAMES = frozenset({"variable", "module"})
_INDEX = re.compile(r"\[[^\[\]]*\d[^\[\]]*\]")
_KEY = re.compile(r"\[[^\[\]]*\]")
_KEYS = re.compile(r"\[('[^']*'|\"[^\"]*\")\]")
_OF_A_KIND = re.compile(r"(?:\[[A-Za-z_]\w*\])+$")
_NUMBERED = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*?)(\d+)")
# How the place of a variable ends that is a function's which has just failed.
_HERE = f", in {THIS_ERROR}"
# An attribute that leads from an object to one that has it, too, again and again.
_CHAIN = re.compile(
    r"(?P<start>[A-Za-z_]\w*(?:\.\w+|\[[^\]]*\])*?)\.(?P<link>[A-Za-z_]\w*)(?:\.(?P=link))+(?![A-Za-z_0-9])"
)
_NUMBERS = re.compile(r"(?:\[\d+\])+$")
_WRITTEN = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[(?:'[^']*'|\"[^\"]*\"|-?[\d.]+)\])*$")
# Of one module: what is made for several is a list.
_REGISTERED = re.compile(r"(?P<handle>\w+)\s*=\s*\w[^=]*\.register_\w*hook\(")
# A view of one part in so many of what it keeps, or of less.
_PART = 4
# More places than a sentence tells.
_MANY = 3
_SEVERAL = 2
MODULE = "torch.nn.modules.module.Module"
_OPTIMIZER = "torch.optim.optimizer.Optimizer"
_FUNCTION = "function"
_CONTAINERS = ("builtins.list", "builtins.dict", "collections.deque", "builtins.set")


@dataclass(frozen=True)
class Spot:
    """Memory that one place of the program keeps. place: in the program's words, of the first of several. container: the list or
    dictionary that holds all of it, None where there is none. of: the module whose gradients all of it are, "" for what else
    there is. names: of variables that differ by a number, all."""

    place: str
    held: tuple[Held, ...]
    container: Station | None
    of: str = ""
    names: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return size_of(self.held)

    @property
    def root(self) -> str:
        return _root(self.place)

    @property
    def holds_directly(self) -> bool:
        """Whether what keeps the memory are the container's own elements."""
        within = self.container.place if self.container is not None else None
        return within is not None and all(_KEY.fullmatch(base(one).removeprefix(within)) for one in self.held)

    @property
    def tensors(self) -> frozenset[int]:
        """The numbers of the tensors that keep the memory, or the graphs."""
        return frozenset(one.trail[-1].node for one in self.held if one.trail)


def spots(held: Iterable[Held]) -> list[Spot]:
    """The places of these, those with most first. What differs by an index or a key is one place."""
    groups: dict[str, list[Held]] = {}
    for one in held:
        groups.setdefault(general(one), []).append(one)
    found = [_spot(group) for group in groups.values()]
    # What has many keys in one dictionary goes by the dictionary's name.
    named: dict[str, list[Held]] = {}
    for spot in found:
        named.setdefault(spot.place, []).extend(spot.held)
    if len(named) < len(found):
        found = [_spot(group) for group in named.values()]
    return sorted(found, key=lambda one: -one.size)


def general(one: Held) -> str:
    """A place without the indices and keys in it; a gradient's is its module's."""
    return _INDEX.sub("[]", f"{module_of(one)}.grad" if one.kind == "gradient" else base(one))


def chain_of(held: Iterable[Held]) -> tuple[str, str] | None:
    """``root.parent`` and ``parent`` where all, or nearly all, is reached by that attribute from each object to the next; None
    where it is not."""
    found: dict[tuple[str, str], int] = {}
    total = 0
    for one in held:
        total += one.size
        if (match := _CHAIN.match(base(one))) is not None:
            key = f"{match['start']}.{match['link']}", match["link"]
            found[key] = found.get(key, 0) + one.size
    best = max(found, key=lambda key: found[key], default=None)
    return best if best is not None and 2 * found[best] >= total else None


def module_of(one: Held) -> str:
    """The variable, or the attribute of one that is no module itself, under which a module is known."""
    modules = [station.place for station in one.trail if MODULE in station.bases]
    if len(modules) > 1 and one.trail and MODULE in one.trail[0].bases:
        return modules[0]
    return modules[0] if modules else one.place.partition(".")[0]


def base(one: Held) -> str:
    """The place of what keeps an allocation; of a graph's, of the tensor that keeps the graph."""
    return one.place.removeprefix(OF_A_GRAPH).partition(": ")[0]


def variable_of(one: Held) -> tuple[str, str] | None:
    """``outs`` and ``run`` for what a variable of a function keeps, in a traceback; None elsewhere."""
    found = OF_FUNCTION.fullmatch(base(one))
    return None if found is None else (_root(found["variable"]), found["called"])


def _root(place: str) -> str:
    return re.split(r"[.\[]", place, maxsplit=1)[0]


def _spot(group: Sequence[Held]) -> Spot:
    places = {base(one) for one in group}
    first = min(places, key=lambda words: (len(words), words))
    if group[0].kind == "gradient" and len(places) > 1 and len(of := {module_of(one) for one in group}) == 1:
        (module,) = of
        return Spot(module, tuple(group), None, of=module)
    trails = [one.trail for one in group if one.trail]
    common: list[Station] = []
    for stations in zip(*trails, strict=False):
        if any(one.node != stations[0].node for one in stations):
            break
        common.append(stations[0])
    container = next((one for one in reversed(common) if _is_container(one)), None)
    if container is not None and next(one for one in common if one.place == container.place) is not container:
        # It is within the object that the place is of.
        container = None
    if any(_OPTIMIZER in one.bases for one in common):
        # Nobody clears an optimizer's own.
        container = None
    if container is not None and (rest := within(first, container.place)) is not None:
        if len(places) > 1:
            # All of `avg_p.preds` and of `history`, with many keys, but `outs[0]['pred']`.
            keys = {re.sub(r"\[\d+\]", "", within(place, container.place) or "") for place in places}
            whole = len(keys) > 1 or _NUMBERS.fullmatch(rest)
            first = container.place if whole else first.replace(rest, _NUMBERS.sub("", rest), 1)
        elif "builtins.set" in container.bases:
            # (Its elements have no names.)
            first = container.place
        elif not _INDEX.fullmatch(rest):
            container = None
    return Spot(first, tuple(group), container)


def within(place: str, container: str) -> str | None:
    """How a place goes on after a container's: ``[0]`` of ``outs[0]``; of a function's own variable, within its name. None where
    it is another place."""
    own, theirs = OF_FUNCTION.fullmatch(place), OF_FUNCTION.fullmatch(container)
    if own is not None and theirs is not None and own["function"] == theirs["function"]:
        place, container = own["variable"], theirs["variable"]
    return place[len(container) :] if place.startswith(container) else None


def _is_container(station: Station) -> bool:
    return any(base in _CONTAINERS for base in station.bases)


def together(found: Sequence[Spot]) -> list[Spot]:
    """Many places in one list or dictionary, such as the weights of the models in it, as that list; and variables that differ by
    a number as one place."""
    if len(found) >= _MANY and (stem := common_stem([one.place for one in found])):
        names = tuple(sorted((one.place for one in found), key=lambda name: int(name.removeprefix(stem))))
        return [Spot(names[0], tuple(each for one in found for each in one.held), None, names=names)]
    if len(found) < _MANY and all(_WRITTEN.match(one.place) for one in found):
        return list(found)
    whole = _spot([one for spot in found for one in spot.held])
    if whole.container is None or not _WRITTEN.match(whole.container.place):
        return list(found)
    return [replace(whole, place=whole.container.place)]


def in_common(ways: Iterable[Sequence[str]]) -> list[str]:
    """The names with which all of several ways begin (``trainer``, ``snapshot``), up to what is no name: `model.0`."""
    same = takewhile(lambda names: len(set(names)) == 1 and names[0].isidentifier(), zip(*ways, strict=False))
    return [names[0] for names in same]


def common_stem(names: Iterable[str]) -> str:
    """What variables that differ by a number have in common, such as ``part_``; "" for others."""
    matches = [_NUMBERED.fullmatch(name) for name in names]
    stems = {"" if match is None else match[1] for match in matches}
    return stems.pop() if len(stems) == 1 else ""


def told(found: Sequence[Spot], most: int = 2) -> str:
    """```avg_p.target` (256 MiB) and `avg_p.preds` (128 MiB)``; one alone without its size."""
    if len(found) == 1:
        return _named(found[0])
    words = [f"{_named(one)} ({human(one.size)})" for one in found[:most]]
    more = f" and {counted(len(found) - most, 'other place')}" if len(found) > most else ""
    return (" and ".join(words) if not more else ", ".join(words)) + more


def _named(spot: Spot) -> str:
    if spot.names:
        what = "attributes" if "." in spot.names[0] else "variables"
        return f"{len(spot.names)} {what}, `{spot.names[0]}` to `{spot.names[-1]}` ({human(spot.size)})"
    if spot.of:
        return f"the gradients of {quoted(spot.of)}"
    if known := of_library(spot.place):
        return f"`{known}`"
    if not _WRITTEN.match(spot.place) and (keeper := advised(_trail(spot))):
        # (What it is given as a key, say.)
        return quoted(keeper)
    # Not the first one's place, where the next one's has another number: ``outs[0…7]['pred']``.
    places = {base(one) for one in spot.held}
    several = len(places) > 1 and _INDEX.search(spot.place)
    whole = number_range(sorted({_NUMBERS.sub("", place) for place in places}), _SEVERAL) if several else ""
    return quoted(spot.place) if not whole else whole if "`" in whole else f"`{whole}`"


def quoted(place: str) -> str:
    """A place in code's marks where it is something to type, else in words: ```outs` of run()`` where that has just failed."""
    if place.endswith(_HERE):
        return place.removesuffix(_HERE).removeprefix("local ")
    # (Of a key that nobody types, a tuple say, only the class is known.)
    whole = _OF_A_KIND.sub("", place)
    return f"`{whole}`" if _WRITTEN.match(whole) else place


def added(scene: Scene, spot: Spot) -> Written | None:
    """The statement that put this memory where it is kept."""
    if advice(_trail(spot)) is not None:
        # A library's own code adds it.
        cached = next((one.place for one in _trail(spot) if CACHED in one.bases), "")
        found = scene.program.decorated(cached.rpartition(".")[2]) if cached else None
        if found is not None or (found := scene.program.using(spot.root)) is not None:
            return found
    own = OF_FUNCTION.fullmatch(spot.place)
    place, function = (spot.place, "") if own is None else (own["variable"], own["called"])
    if own is not None and spot.place.startswith(DEFAULT_ARGUMENT):
        # What was put somewhere is the function.
        place, function = own["function"].removeprefix(" of "), ""
    names = [name for name in re.split(r"[.\[\]'\" ]+", _KEY.sub("", place)) if name.isidentifier()]
    if not names:
        return None
    keys = _KEYS.findall(place)
    for attribute in reversed(names[1:]):
        if spot.names and (found := scene.program.naming(common_stem([attribute]))) is not None:
            return found
        if (found := scene.program.adding(names[0], attribute, keys[-1] if keys else "")) is not None:
            return found
    if len(names) == 1 and (found := scene.program.adding(names[0], key=keys[-1] if keys else "", function=function)):
        return scene.program.added_within(found, keys[0] if keys else "") or found
    if not spot.place.startswith(names[0]):
        return None
    if all((one := scene.alive.get(held.address)) is not None and one.born < 0 for held in spot.held) and (
        found := scene.program.adding(names[0], key=keys[-1] if keys else "", earlier=True)
    ):
        return found
    if (found := _made_with(scene, spot, names[0]) or scene.program.using(names[0])) is not None:
        return found
    # (An attribute that a library's object has goes by the object's name.)
    return scene.program.adding(names[0]) if len(names) > 1 and own is None else None


def _made_with(scene: Scene, spot: Spot, name: str) -> Written | None:
    """The statement of the cell that made most of it, where it names what keeps it: an object's own method put it there."""
    made = [one for held in spot.held if (one := scene.alive.get(held.address)) is not None and one.born >= 0]
    if scene.tensors is None or not made:
        return None
    facts = scene.tensors.facts(max(made, key=lambda one: one.size))
    if not facts.line or not re.search(rf"\b{re.escape(name)}\b", facts.statement):
        return None
    return Written("", facts.line, facts.statement)


def release(scene: Scene, spot: Spot) -> str:
    """What to type to let go of what a spot keeps, with what that frees; "" where nothing is known that frees it."""
    if (known := advice(_trail(spot))) is not None:
        return known
    root = scene.holdings.roots[spot.held[0].roots[0]]
    if root.kind == "module" and root.statement is None:
        # (A library's own: nobody empties that.)
        return ""
    if spot.of and _WRITTEN.match(spot.of):
        its = (one for one in scene.held if one.kind == "gradient" and one.trail and module_of(one) == spot.of)
        freed = _here(scene, scene.holdings.freed_by_replacing(one.trail[-1].node for one in its))
        if freed >= LEAST:
            return f"`{spot.of}.zero_grad()` frees {human(freed)}"
    # (Inputs have gradients, too: who lets go of those keeps the inputs.)
    places = {at.node for one in spot.held for at in one.trail if at.place == spot.place}
    within = spot.container is not None and spot.container.place != spot.place
    if within and len(places) == 1 and _WRITTEN.match(spot.place) and len(spot.tensors) > 1:
        # One key of many, with a tuple, say: the dictionary's others are not cleared.
        freed = _here(scene, scene.holdings.freed_by_replacing(places))
        if freed >= max(LEAST, spot.size // 2):
            return f"`{spot.place} = None` frees {human(freed)}"
    in_list = spot.container is not None and any(one.kind != "gradient" for one in spot.held)
    if in_list and spot.container is not None and _WRITTEN.match(spot.container.place):
        freed = _here(scene, scene.holdings.freed_by_emptying([spot.container.node]))
        if freed >= max(LEAST, spot.size // 2):
            return f"`{spot.container.place}.clear()` frees {human(freed)}"
    if _WRITTEN.match(spot.place) and len(spot.tensors) == 1 and spot.place != spot.root:
        freed = _here(scene, scene.holdings.freed_by_replacing(spot.tensors))
        if freed >= LEAST:
            return f"`{spot.place} = None` frees {human(freed)}"
    whole = scene.holdings.number(spot.place)
    if whole is not None and len({one.roots for one in spot.held}) > 1 and scene.holdings.roots[whole].statement:
        # Some of it others reach as well.
        freed = size_of(scene.freed([whole]))
        if freed >= max(LEAST, spot.size // 2):
            return f"`{scene.holdings.roots[whole].statement}` frees {human(freed)}"
    if spot.names and "." in spot.names[0]:
        return ""
    if spot.names:
        numbers = [number for name in spot.names if (number := scene.holdings.number(name)) is not None]
        return f"`del {', '.join(spot.names)}` frees {human(size_of(scene.freed(numbers)))}"
    roots = {one.roots for one in spot.held}
    number, *others = roots.pop()
    if scene.holdings.roots[number].type == _FUNCTION and spot.place.startswith(CLOSURE_VARIABLE):
        # Nobody lets go of a decorated function for what its decorator keeps.
        return ""
    if not roots and not others and (statement := scene.holdings.roots[number].statement):
        freed = size_of(scene.freed([number]))
        return f"`{statement}` frees {human(freed)}"
    return ""


def release_all(scene: Scene, found: Sequence[Spot]) -> str:
    """The same of the first of these, or of all together where each is a list that is cleared."""
    containers = [one.container for one in found]
    lists = [one for one, spot in zip(containers, found, strict=True) if one is not None and one.place == spot.place]
    first = release(scene, found[0])
    if len(found) < _SEVERAL or len(lists) < len(found) or f"{found[0].place}.clear()" not in first:
        return first
    freed = _here(scene, scene.holdings.freed_by_emptying([one.node for one in lists]))
    return f"`{'; '.join(f'{one.place}.clear()' for one in lists)}` frees {human(freed)}"


def emptied_by(scene: Scene, held: Iterable[Held], place: str) -> str:
    """``accelerator.free_memory``: how the object in which a list or dictionary is empties that by a method of its own; "" where
    it has none. place: of what is held, as `Held` has it."""
    trail = max((one.trail for one in held), key=len, default=())
    for owner in reversed(trail):
        rest = place.removeprefix(f"{owner.place}.") if place.startswith(f"{owner.place}.") else ""
        attribute = re.match(r"\w+", rest)
        if (
            attribute is not None
            and MODULE not in owner.bases
            and (method := scene.program.emptying(owner.bases, attribute[0]))
        ):
            return f"{owner.place}.{method}"
    return ""


def taking_off(registered: Written) -> str:
    """What to type to take a hook off, by the statement that registered it."""
    found = _REGISTERED.match(registered.statement.strip())
    if found is not None:
        return f"`{found['handle']}.remove()`"
    return "`.remove()` of the handle that registering it returned"


def is_part(one: Held) -> bool:
    """Whether the tensors on it are views of a small part: what they were taken from has no name any more."""
    return one.kind in ("tensor", "optimizer_state") and 0 < _PART * one.seen <= one.requested


def advice_known(spot: Spot) -> bool:
    """Whether a library keeps it, which has words of its own for letting go."""
    return advice(_trail(spot)) is not None


def detach(scene: Scene, found: Sequence[Spot]) -> int:
    """Bytes that come back if all tensors of these spots let go of their graphs."""
    nodes = frozenset().union(*(one.tensors for one in found))
    return _here(scene, scene.holdings.freed_by_detaching(nodes))


def _trail(spot: Spot) -> tuple[Station, ...]:
    return max((one.trail for one in spot.held), key=len, default=())


def _here(scene: Scene, freed: Iterable[Held]) -> int:
    return size_of(one for one in freed if one.device == scene.device)
