"""What is live at a moment, grouped by the stack that asked for it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from gpumem_magic.attribution.sites import folded
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.snapshot.model import Frame
from gpumem_magic.snapshot.timeline import Allocation


@dataclass(frozen=True)
class StackGroup:
    """Live allocations of one category that one stack asked for.

    requested: bytes in all; sizes: requested size -> how many. why: how the category is known, or why it is not.
    stack, freed: lines for a reader, of the request and of the free that most of them met (() where it has no stack of its own).
    """

    requested: int
    sizes: Counter[int]
    category: str
    evidence: str
    why: str
    name: str | None
    stack: tuple[str, ...]
    freed: tuple[str, ...]

    @property
    def count(self) -> int:
        return self.sizes.total()


def groups_of(view: DeviceView, position: int, wanted: Callable[[Allocation], bool] | None = None) -> list[StackGroup]:
    """All groups at a position, the largest first; only of wanted allocations, if that is given."""
    lines: dict[int, tuple[str, ...]] = {}

    def words(frames: tuple[Frame, ...]) -> tuple[str, ...]:
        if id(frames) not in lines:
            lines[id(frames)] = tuple(folded(frames)) if frames else ()
        return lines[id(frames)]

    alike: dict[tuple[object, ...], list[Allocation]] = defaultdict(list)
    for one in view.timeline.live_at(position):
        if wanted is None or wanted(one):
            label = view.labels[one.index]
            alike[label.category, label.evidence, view.why(one), label.name, words(view.frames_of(one))].append(one)
    found = []
    for members in alike.values():
        first = members[0]
        label = view.labels[first.index]
        ends = Counter(words(view.frames_of_free(one)) for one in members)
        found.append(
            StackGroup(
                sum(one.requested for one in members),
                Counter(one.requested for one in members),
                label.category,
                label.evidence,
                view.why(first),
                label.name,
                words(view.frames_of(first)),
                ends.most_common(1)[0][0],
            )
        )
    return sorted(found, key=lambda group: -group.requested)


def matching(view: DeviceView, text: str) -> Callable[[Allocation], bool]:
    """Whether an allocation's name, its category or a frame of its stack has a text in it, in any case."""
    sought = text.casefold()
    known: dict[int, bool] = {}

    def in_stack(frames: tuple[Frame, ...]) -> bool:
        if id(frames) not in known:
            known[id(frames)] = any(
                sought in f"{frame.filename}:{frame.line} {frame.name}".casefold() for frame in frames
            )
        return known[id(frames)]

    def wanted(one: Allocation) -> bool:
        label = view.labels[one.index]
        of_label = f"{label.category.replace('_', ' ')} {label.name or ''}".casefold()
        return sought in of_label or in_stack(view.frames_of(one))

    return wanted
