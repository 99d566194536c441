"""Which allocations are the 16-bit copies that autocast keeps of float32 weights, until its block ends.

A virtual device is told. On a real one they are those of a forward that are gone the moment that autocast lets go of what it
keeps; and those that backward keeps longer, by their sizes: one for a weight, half as large, if there are several.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from gpumem_magic.attribution.owners import Roles, lives_at
from gpumem_magic.attribution.phase_map import PhaseMap
from gpumem_magic.devices.base import DeviceLog, Label
from gpumem_magic.recording.model import AUTOCAST_ENDS, FORWARD, NO_WIDE_WEIGHTS, Span
from gpumem_magic.snapshot.timeline import Allocation

# Fewer of a weight's size may be chance.
_PROOF = 4


def copies_of_weights(
    log: DeviceLog,
    allocations: Sequence[Allocation],
    held: Mapping[int, Roles],
    phases: PhaseMap,
    spans: Iterable[Span],
) -> dict[int, Label]:
    """Index of an allocation -> its label."""
    if log.facts.kind == "virtual":
        known = Label("autocast_copies", "stack")
        return {one.index: known for one in allocations if log.origins.get(one.born) == "autocast"}
    device = log.facts.index
    ends = sorted(
        (one.start.positions[device], one.end.positions.get(device, one.start.positions[device]))
        for one in spans
        if one.kind == AUTOCAST_ENDS and one.label != NO_WIDE_WEIGHTS and device in one.start.positions
    )
    if not ends:
        return {}
    weights = Counter(one.requested // 2 for one in allocations if "parameter" in held.get(one.index, {}))
    blocks = _by_block([one for one in allocations if not held.get(one.index)], phases, ends)
    found: dict[int, Label] = {}
    for (start, end), its in zip(ends, blocks, strict=True):
        gone = [one for one in its if one.freed is not None and start <= one.freed < end]
        left = weights - Counter(one.requested for one in gone)
        kept = []
        for one in its:
            if (one.freed is None or one.freed >= end) and left[one.requested] > 0:
                left[one.requested] -= 1
                kept.append(one)
        found |= {one.index: Label("autocast_copies", "lifetime") for one in gone}
        if len(gone) + len(kept) >= _PROOF:
            found |= {one.index: Label("autocast_copies", "inferred") for one in kept}
    return found


def _by_block(
    allocations: Iterable[Allocation], phases: PhaseMap, ends: Sequence[tuple[int, int]]
) -> list[list[Allocation]]:
    """For each end of a block, what forwards in it asked for and was still there."""
    found: dict[int, list[Allocation]] = defaultdict(list)
    number = 0
    for one in sorted(allocations, key=lambda one: one.born):
        while number < len(ends) and ends[number][0] <= one.born:
            number += 1
        if one.born < 0 or number == len(ends) or not lives_at(one, ends[number][0]):
            continue
        phase = phases.at_event(one.born)
        if phase is not None and phase.kind == FORWARD:
            found[number].append(one)
    return [found[number] for number in range(len(ends))]
