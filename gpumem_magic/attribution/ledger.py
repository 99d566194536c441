"""The ledger: every byte of a device at a moment, by category, recounted from the allocations and compared with the counters.

    requested bytes by category + rounding = allocated;  + cached = reserved;  + context + others = device_used

Nothing here closes a gap: what does not add up is reported as a gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpumem_magic.devices.base import Counters, Label
from gpumem_magic.snapshot.timeline import Timeline
from gpumem_magic.units import human

TENANT_CATEGORIES = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "inputs",
    "activations",
    "kv_cache",
    "autocast_copies",
    "activation_gradients",
    "temporaries",
    "workspace",
    "unknown",
)
KINDS_OF_EVIDENCE = ("identity", "lifetime", "stack", "inferred", "unknown")


@dataclass(frozen=True)
class Outside:
    """What the device holds beside PyTorch's allocator. None is unavailable; see `Counters` for what excludes what."""

    context: int | None = None
    other_processes: int | None = None
    context_or_others: int | None = None

    @classmethod
    def of(cls, counters: Counters) -> Outside:
        return cls(counters.context, counters.other_processes, counters.context_or_others)

    def device_used(self, reserved: int) -> int | None:
        if self.context_or_others is not None:
            return reserved + self.context_or_others
        if self.context is not None and self.other_processes is not None:
            return reserved + self.context + self.other_processes
        return None


@dataclass(frozen=True)
class Balance:
    """What is allocated at a position. `requested` has every category of a tenant, zeros included.

    allocated: the sum of the live blocks' sizes, counted from the allocations; reserved: of the segments' sizes.
    evidence: kind of evidence -> requested bytes that rest on it.
    """

    requested: Mapping[str, int]
    evidence: Mapping[str, int]
    allocated: int
    reserved: int

    @property
    def rounding(self) -> int:
        return self.allocated - sum(self.requested.values())

    def categories(self, outside: Outside) -> dict[str, int | None]:
        """All categories of a report's row, in the order of a bar."""
        return {
            **{category: self.requested[category] for category in TENANT_CATEGORIES},
            "rounding": self.rounding,
            "cached": self.reserved - self.allocated,
            "context": outside.context,
            "other_processes": outside.other_processes,
            "context_or_others": outside.context_or_others,
        }


class Ledger:
    """Balances of one device. `labels` are those of the timeline's allocations, in order."""

    def __init__(self, timeline: Timeline, labels: Sequence[Label]) -> None:
        self._timeline = timeline
        changes: list[tuple[int, int, int, int, int]] = []
        for allocation, label in zip(timeline.allocations, labels, strict=True):
            if label.category not in TENANT_CATEGORIES or label.evidence not in KINDS_OF_EVIDENCE:
                raise ValueError(f"not a label of the ledger: {label}")
            category = TENANT_CATEGORIES.index(label.category)
            evidence = KINDS_OF_EVIDENCE.index(label.evidence)
            requested, size = allocation.requested, allocation.size
            changes.append((allocation.born + 1, category, evidence, requested, size))
            if allocation.freed is not None:
                changes.append((allocation.freed + 1, category, evidence, -requested, -size))
        changes.sort(key=lambda change: change[0])
        self._changes = changes

    def at(self, positions: Iterable[int]) -> dict[int, Balance]:
        """The balance at each position, in one sweep over the events."""
        balances: dict[int, Balance] = {}
        requested = [0] * len(TENANT_CATEGORIES)
        evidence = [0] * len(KINDS_OF_EVIDENCE)
        allocated = 0
        upcoming = 0
        for position in sorted(set(positions)):
            while upcoming < len(self._changes) and self._changes[upcoming][0] <= position:
                _, category, kind, bytes_requested, size = self._changes[upcoming]
                requested[category] += bytes_requested
                evidence[kind] += bytes_requested
                allocated += size
                upcoming += 1
            balances[position] = Balance(
                dict(zip(TENANT_CATEGORIES, requested, strict=True)),
                dict(zip(KINDS_OF_EVIDENCE, evidence, strict=True)),
                allocated,
                self._timeline.reserved_at(position),
            )
        return balances


def gaps(categories: Mapping[str, int | None], counters: Counters) -> list[str]:
    """Where the recount differs from the device's own counters, in words; empty where every byte is accounted for."""
    tenants = sum(categories[name] or 0 for name in (*TENANT_CATEGORIES, "rounding"))
    reserved = tenants + (categories["cached"] or 0)
    outside = Outside(categories["context"], categories["other_processes"], categories["context_or_others"])
    found = [
        f"{what}: recounted {human(counted)}, the device says {human(told)} ({counted - told:+,} bytes)"
        for what, counted, told in (
            ("allocated", tenants, counters.allocated),
            ("reserved", reserved, counters.reserved),
        )
        if counted != told
    ]
    used = outside.device_used(reserved)
    if used is not None and counters.device_used is not None and used != counters.device_used:
        found.append(
            f"used on the device: recounted {human(used)}, the driver says {human(counters.device_used)} "
            f"({used - counters.device_used:+,} bytes)"
        )
    negative = [name for name, size in categories.items() if size is not None and size < 0]
    if negative:
        found.append(f"less than nothing in {', '.join(negative)}")
    return found
