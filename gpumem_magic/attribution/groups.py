"""What is live at a moment, grouped by the stack that asked for it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from gpumem_magic.attribution.sites import folded, let_go_at
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.snapshot.model import Frame
from gpumem_magic.snapshot.timeline import Allocation


@dataclass(frozen=True)
class StackGroup:
    """Live allocations of one category that one stack asked for.

    requested: bytes in all; sizes: requested size -> how many. why: how the category is known, or why it is not.
    stack: lines for a reader. freed: where most of them were let go of, in one line; "" where no stack of its own says so.
    """

    requested: int
    sizes: Counter[int]
    category: str
    evidence: str
    why: str
    name: str | None
    stack: tuple[str, ...]
    freed: str

    @property
    def count(self) -> int:
        return self.sizes.total()


class InCommon(NamedTuple):
    """What allocations of one group have in common. stack: as whoever groups them tells stacks apart."""

    category: str
    evidence: str
    why: str
    name: str | None
    stack: tuple[object, ...]


def alike(
    view: DeviceView,
    position: int,
    stack_of: Callable[[tuple[Frame, ...]], tuple[object, ...]],
    wanted: Callable[[Allocation], bool] | None = None,
) -> dict[InCommon, list[Allocation]]:
    """What is live at a position, in groups; only wanted allocations, if that is given."""
    found: dict[InCommon, list[Allocation]] = defaultdict(list)
    for one in view.timeline.live_at(position):
        if wanted is None or wanted(one):
            label = view.labels[one.index]
            stack = stack_of(view.frames_of(one))
            found[InCommon(label.category, label.evidence, view.why(one), label.name, stack)].append(one)
    return found


def groups_of(view: DeviceView, position: int, wanted: Callable[[Allocation], bool] | None = None) -> list[StackGroup]:
    """All groups at a position, the largest first; only of wanted allocations, if that is given."""
    lines: dict[int, tuple[str, ...]] = {}

    def words(frames: tuple[Frame, ...]) -> tuple[str, ...]:
        if id(frames) not in lines:
            lines[id(frames)] = tuple(folded(frames)) if frames else ()
        return lines[id(frames)]

    found = []
    for common, members in alike(view, position, words, wanted).items():
        frees = {words(frames): frames for frames in map(view.frames_of_free, members)}
        (freed, _), *_ = Counter(words(view.frames_of_free(one)) for one in members).most_common(1)
        found.append(
            StackGroup(
                sum(one.requested for one in members),
                Counter(one.requested for one in members),
                common.category,
                common.evidence,
                common.why,
                common.name,
                words(view.frames_of(members[0])),
                let_go_at(frees[freed]) if freed != common.stack else "",
            )
        )
    return sorted(found, key=lambda group: -group.requested)


def stacks_with(fits: Callable[[str], object]) -> Callable[[tuple[Frame, ...]], bool]:
    """Whether a frame of a stack fits, as ``file:line name``. Each stack is read once, while the view that has it is held."""
    known: dict[int, bool] = {}

    def found(frames: tuple[Frame, ...]) -> bool:
        if id(frames) not in known:
            known[id(frames)] = any(fits(f"{frame.filename}:{frame.line} {frame.name}") for frame in frames)
        return known[id(frames)]

    return found


def matching(view: DeviceView, text: str) -> Callable[[Allocation], bool]:
    """Whether an allocation's name, its category or a frame of its stack has a text in it, in any case."""
    sought = text.casefold()
    in_stack = stacks_with(lambda words: sought in words.casefold())

    def wanted(one: Allocation) -> bool:
        label = view.labels[one.index]
        of_label = f"{label.category.replace('_', ' ')} {label.name or ''}".casefold()
        return sought in of_label or in_stack(view.frames_of(one))

    return wanted
