"""Who held an allocation: joins sightings of live objects (address and position) to the allocations of a timeline.

An address is used again and again, so an address alone says nothing: the position of the look says which tenant it was.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from gpumem_magic.recording.model import Sighting
from gpumem_magic.snapshot.timeline import Allocation

Roles = Mapping[str, str | None]
"""Role -> the first name under which the allocation was seen in that role (None where it had none)."""


class Tenants:
    """Finds the allocation that lived at an address at a position."""

    def __init__(self, allocations: Iterable[Allocation]) -> None:
        self._by_address: dict[int, list[Allocation]] = defaultdict(list)
        for allocation in sorted(allocations, key=lambda one: one.born):
            self._by_address[allocation.address].append(allocation)
        self._births = {address: [tenant.born for tenant in tenants] for address, tenants in self._by_address.items()}

    def at(self, address: int, position: int) -> Allocation | None:
        """The allocation at exactly this address that is live after the first `position` events."""
        births = self._births.get(address)
        if births is None:
            return None
        rank = bisect_left(births, position) - 1
        if rank < 0:
            return None
        tenant = self._by_address[address][rank]
        return tenant if lives_at(tenant, position) else None


def lives_at(allocation: Allocation, position: int) -> bool:
    """Whether the allocation counts as allocated after the first `position` events (born at event i: from i + 1 on)."""
    return allocation.born < position and (allocation.freed is None or allocation.freed >= position)


def owners(allocations: Sequence[Allocation], sightings: Iterable[Sighting]) -> dict[int, Roles]:
    """Index of an allocation -> the roles in which live objects held it.

    All sightings must be of the device whose allocations these are; one that fits no allocation is ignored (its tensor
    was freed before the log had the look).
    """
    tenants = Tenants(allocations)
    found: dict[int, dict[str, str | None]] = defaultdict(dict)
    for sighting in sightings:
        tenant = tenants.at(sighting.address, sighting.position)
        if tenant is None:
            continue
        roles = found[tenant.index]
        if roles.get(sighting.role) is None:
            roles[sighting.role] = sighting.name
    return dict(found)
