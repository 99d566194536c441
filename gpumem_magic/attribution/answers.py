"""What is known so far of each allocation of a recording without live objects, and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from gpumem_magic.attribution import sites
from gpumem_magic.attribution.categories import UNKNOWN, workspace_sizes
from gpumem_magic.devices.base import Label
from gpumem_magic.snapshot.model import Frame, Segment, TraceEvent
from gpumem_magic.snapshot.timeline import Allocation, Timeline


class Answers:
    """frames and sites: what asked for each allocation. labels, grounds (how known) and reasons (why not): by its index."""

    def __init__(self, timeline: Timeline, events: Sequence[TraceEvent], final: Iterable[Segment]) -> None:
        self.allocations = timeline.allocations
        self.events = events
        at_end = {block.address: block.frames for segment in final for block in segment.blocks if block.frames}
        # By identity: a file's equal stacks are one tuple, and hashing long ones for each allocation would take long.
        known: dict[int, str] = {}
        self.frames: list[tuple[Frame, ...]] = []
        self.sites: list[str] = []
        for one in self.allocations:
            left = at_end.get(one.address, ()) if one.freed is None else ()
            frames = events[one.born].frames if one.born >= 0 else left
            if id(frames) not in known:
                known[id(frames)] = sites.site_of(frames)
            self.frames.append(frames)
            self.sites.append(known[id(frames)])
        self._ends: dict[int, str] = {}
        self.has_stacks = any(site != sites.NO_STACK for site in self.sites)
        self._workspace_sizes = workspace_sizes(
            "cuda", ((one.requested, one.stream) for one in self.allocations if one.freed is None)
        )
        self.labels: dict[int, Label] = {}
        self.reasons: dict[int, str] = {}
        self.grounds: dict[int, str] = {}

    def is_known(self, one: Allocation, category: str, evidence: str, why: str, name: str | None = None) -> None:
        self.labels[one.index] = Label(category, evidence, name)
        self.grounds[one.index] = why
        self.reasons.pop(one.index, None)

    def is_unknown(self, one: Allocation, why: str) -> None:
        self.reasons[one.index] = why

    def is_open(self, one: Allocation) -> bool:
        return one.index not in self.labels

    def let_go_by(self, one: Allocation) -> str:
        """Who gave it back, as the stack of the free says; "" where that has none of its own."""
        if one.freed is None:
            return ""
        frames = self.events[one.freed].frames
        if not frames or frames is self.frames[one.index]:
            # PyTorch records the allocation's stack for the free, too, unless asked for all.
            return ""
        if id(frames) not in self._ends:
            self._ends[id(frames)] = sites.letting_go(frames)
        return self._ends[id(frames)]

    def labelled(self, category: str) -> list[Allocation]:
        return [one for one in self.allocations if self.labels.get(one.index, UNKNOWN).category == category]

    def has(self, category: str) -> bool:
        return any(label.category == category for label in self.labels.values())

    def hand_out(self, roles: Sequence[str], parameters: Counter[int], tenants: Sequence[Allocation], why: str) -> None:
        left = [(role, Counter(parameters)) for role in roles]
        for one in tenants:
            for role, sizes in left:
                if sizes[one.requested] > 0:
                    sizes[one.requested] -= 1
                    self.is_known(one, role, "inferred", why)
                    break

    def is_workspace(self, one: Allocation) -> bool:
        """By its size, where few of it stay."""
        return one.requested in self._workspace_sizes and one.freed is None

    def is_a_workspace(self, one: Allocation) -> None:
        self.is_known(one, "workspace", "inferred", "has the size of a workspace of cuBLAS, and stays")
