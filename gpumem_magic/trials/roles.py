"""Which ranks of many run, each alone: those that somebody names, or those that may differ, by the groups that a program makes
of them. The others are taken to be alike."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

from gpumem_magic.files.rank_files import RankFile
from gpumem_magic.report.side_by_side import alike

Group = tuple[int, ...]
MOST_RANKS = 1 << 20
# GPUs in one computer, where the device does not say.
PER_HOST = 8
# So many ranks run at most that nobody named.
_MOST_RUN = 16


class Crew(Protocol):
    """What runs ranks of a program. status: not 0 once one has failed."""

    world: int
    status: int

    def run(self, ranks: Sequence[int]) -> None: ...

    def known(self) -> Mapping[int, RankFile]:
        """Those that have run."""


def named_ranks(text: str, world: int) -> list[int]:
    """The ranks of ``0,7`` or ``0-3``. Raises ValueError, in one line."""
    found: set[int] = set()
    for part in text.split(","):
        span = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", part)
        if span is None:
            raise ValueError(f"--as takes ranks, such as 0,7 or 0-3, not {text!r}")
        first, last = int(span[1]), int(span[2] or span[1])
        if not first <= last < world:
            raise ValueError(f"--as {part.strip()}: the ranks of --ranks {world} are 0-{world - 1}")
        found.update(range(first, last + 1))
    return sorted(found)


def run_those_that_differ(crew: Crew) -> Mapping[int, int]:
    """Runs rank 0, the last, and those between that may differ. Ranks that did not run -> the one that each is like."""
    crew.run([0])
    known = crew.known()
    if 0 not in known or crew.status:
        return {}
    roles = Roles(crew.world, known[0].groups)
    while (rank := roles.next(_alike(crew), _MOST_RUN)) is not None:
        crew.run([rank])
        if rank not in crew.known() or crew.status:
            return {}
    return roles.taken(_alike(crew))


def _alike(crew: Crew) -> dict[int, int]:
    """Rank that ran -> the lowest that ran and is alike."""
    known = {rank: one.known for rank, one in crew.known().items()}
    return {
        rank: next(lower for lower in sorted(known) if lower == rank or alike(known[lower], one))
        for rank, one in known.items()
    }


class Roles:
    """Ranks by their places along the dimensions of the program's meshes. groups: all that a rank made, its own or not.

    Families of groups that have every rank once are dimensions; without any, the ranks themselves are the only one.
    """

    def __init__(self, world: int, groups: Sequence[tuple[str, Group]]) -> None:
        self._world = world
        self._dimensions = _dimensions(world, groups) or [(tuple(range(world)),)]

    def next(self, alike: Mapping[int, int], most: int) -> int | None:
        """The next rank to run; None where no other is needed, or `most` have run. alike: rank that ran -> the lowest that it is
        alike."""
        if len(alike) >= most:
            return None
        for dimension in self._dimensions:
            own = next(group for group in dimension if 0 in group)
            wanted = _between(own, alike)
            if wanted is not None:
                return wanted
        return None if self._world - 1 in alike else self._world - 1

    def taken(self, alike: Mapping[int, int]) -> dict[int, int]:
        """Ranks that did not run -> the rank that has their place in all dimensions that matter."""
        places: list[dict[int, int]] = []
        for dimension in self._dimensions:
            own = next(group for group in dimension if 0 in group)
            roles = _roles_along(own, alike)
            if len(set(roles)) > 1:
                places.append({rank: roles[place] for group in dimension for place, rank in enumerate(group)})
        by_place: dict[tuple[int, ...], int] = {}
        for rank in sorted(alike):
            by_place.setdefault(tuple(place[rank] for place in places), rank)
        found = {}
        for rank in range(self._world):
            if rank not in alike:
                place = tuple(place[rank] for place in places)
                near = min(by_place, key=lambda other: sum(a != b for a, b in zip(place, other, strict=True)))
                found[rank] = by_place.get(place, by_place[near])
        return found


def _dimensions(world: int, groups: Sequence[tuple[str, Group]]) -> list[tuple[Group, ...]]:
    """Families of groups of one size and name that have every rank once."""
    families: dict[tuple[str, int], list[list[Group]]] = defaultdict(list)
    for name, group in dict.fromkeys(groups):
        if 1 < len(group) < world and max(group) < world:
            kept = families[name, len(group)]
            family = next((one for one in kept if not any(set(group) & set(other) for other in one)), None)
            if family is None:
                kept.append([group])
            else:
                family.append(group)
    whole = [tuple(family) for kept in families.values() for family in kept if sum(map(len, family)) == world]
    return list(dict.fromkeys(whole))


def _between(group: Group, alike: Mapping[int, int]) -> int | None:
    """The next of a group's ranks to run: its last, then the middle of two that ran and differ."""
    for rank in (group[0], group[-1]):
        if rank not in alike:
            return rank
    ran = [place for place, rank in enumerate(group) if rank in alike]
    for low, high in pairwise(ran):
        if high - low > 1 and alike[group[low]] != alike[group[high]]:
            return group[(low + high) // 2]
    return None


def _roles_along(group: Group, alike: Mapping[int, int]) -> list[int]:
    """For each place in a group the rank that stands for it: the nearest that ran at or before it."""
    roles = []
    last = alike.get(group[0], group[0])
    for rank in group:
        last = alike.get(rank, last)
        roles.append(last)
    return roles
