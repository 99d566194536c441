"""Who held an allocation: joins sightings of live objects (address and position) to the allocations of a timeline.

An address is used again and again, so an address alone says nothing: the position of the look says which tenant it was.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from gpumem_magic.recording.model import Sighting
from gpumem_magic.snapshot.timeline import Allocation

Roles = Mapping[str, str | None]
"""Role -> the first name under which the allocation was seen in that role (None where it had none)."""

_born = attrgetter("born")


def lives_at(allocation: Allocation, position: int) -> bool:
    """Whether the allocation counts as allocated after the first `position` events (born at event i: from i + 1 on)."""
    return allocation.born < position and (allocation.freed is None or allocation.freed >= position)


def owners(allocations: Sequence[Allocation], sightings: Iterable[Sighting]) -> dict[int, Roles]:
    """Index of an allocation -> the roles in which live objects held it.

    All sightings must be of the device whose allocations these are; one that fits no allocation is ignored (its tensor
    was freed before the log had the look).
    """
    looks = list(sightings)
    found: dict[int, dict[str, str | None]] = defaultdict(dict)
    for sighting, tenant in zip(
        looks, tenants(allocations, ((one.address, one.position) for one in looks)), strict=True
    ):
        if tenant is not None:
            roles = found[tenant.index]
            if roles.get(sighting.role) is None:
                roles[sighting.role] = sighting.name
    return dict(found)


def tenants(allocations: Sequence[Allocation], looks: Iterable[tuple[int, int]]) -> list[Allocation | None]:
    """For each (address, position) the allocation that lived there then."""
    by_address: dict[int, list[Allocation]] = defaultdict(list)
    for allocation in sorted(allocations, key=_born):
        by_address[allocation.address].append(allocation)
    found: list[Allocation | None] = []
    for address, position in looks:
        there = by_address.get(address, [])
        rank = bisect_left(there, position, key=_born) - 1
        found.append(there[rank] if rank >= 0 and lives_at(there[rank], position) else None)
    return found
