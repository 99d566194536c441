"""Which allocations were made as copies of which, as far as the device tells."""

from __future__ import annotations

from collections.abc import Sequence

from gpumem_magic.attribution.owners import tenants
from gpumem_magic.devices.base import DeviceLog
from gpumem_magic.snapshot.timeline import Allocation


def copied_from(log: DeviceLog, allocations: Sequence[Allocation]) -> dict[int, int]:
    """Index of an allocation -> that of what it was made as a copy of."""
    made = [one for one in allocations if one.born in log.copied]
    found = tenants(allocations, [(log.copied[one.born], one.born) for one in made])
    return {one.index: source.index for one, source in zip(made, found, strict=True) if source is not None}
