"""What is allocated at a moment, opened up: alike tensors as groups, the largest first, which add up to `allocated`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from gpumem_magic.attribution.sites import is_library, is_python, words_of
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.recording.model import Checkpoint
from gpumem_magic.report.model import TensorGroup
from gpumem_magic.snapshot.timeline import Allocation

MOST_GROUPS = 12
"""Groups of a moment; what is left out is one more, the last."""


def groups_at(view: DeviceView, position: int, most: int = MOST_GROUPS) -> tuple[TensorGroup, ...]:
    """The groups of what is live at a position."""
    lives = view.timeline.live_at(position)
    alike: dict[TensorGroup, list[Allocation]] = defaultdict(list)
    for one in lives:
        alike[_described(view, one, position)].append(one)
    groups = [
        replace(kind, bytes=sum(one.size for one in members), count=len(members)) for kind, members in alike.items()
    ]
    groups.sort(key=lambda group: -group.bytes)
    return (*groups[:most], *_rest(groups[most:]))


def _rest(groups: Iterable[TensorGroup]) -> list[TensorGroup]:
    left = list(groups)
    if not left:
        return []
    return [TensorGroup(sum(one.bytes for one in left), sum(one.count for one in left), "")]


def _described(view: DeviceView, one: Allocation, position: int) -> TensorGroup:
    """What is known of an allocation, as a group without its size."""
    label = view.labels[one.index]
    point = _statement_of(view, one)
    kept_by = label.name or ""
    keeper = "unknown"
    if kept_by:
        keeper = "list" if "[" in kept_by else "name"
    elif label.category == "temporaries":
        keeper = "temporary"
    return TensorGroup(
        0,
        0,
        label.category,
        statement="" if point is None else (point.statement or point.label).strip().partition("\n")[0],
        line=0 if point is None else point.line,
        inner=_innermost(view, one),
        keeper=keeper,
        kept_by=kept_by,
    )


def _statement_of(view: DeviceView, one: Allocation) -> Checkpoint | None:
    """The statement that asked for it, where statements were seen."""
    if one.born < 0 or not view.recording.was_watched:
        return None
    before = 0
    for point in view.recording.checkpoints:
        now = point.moment.positions.get(view.device, before)
        if before <= one.born < now and point.kind in ("statement", "error"):
            return point
        before = now
    return None


def _innermost(view: DeviceView, one: Allocation) -> str:
    """The program's innermost frame, where stacks were recorded."""
    python = [frame for frame in view.frames_of(one) if is_python(frame)]
    own = next((frame for frame in python if not is_library(frame)), None)
    return words_of(own) if own is not None else ""
