"""What softmax works on, where a file's stacks are all that is known: the logits of a loss, and attention's scores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from gpumem_magic.attribution.places import line_in_program, operators_in
from gpumem_magic.causes.model import WORTH, Scene
from gpumem_magic.causes.remedies import LOSS_IN_PARTS, WITHOUT_SCORES
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import counted, human

_LOSS = "log_softmax", "cross_entropy", "nll_loss"
_SCORES = ("softmax",)
# They are a part of the peak, at least one in so many.
_OF_A_LOSS, _OF_SCORES = 3, 4


class _Worked(NamedTuple):
    """The line whose softmax made most of what is there, and all blocks that are as large as the largest of these."""

    place: str
    alike: list[Allocation]

    @property
    def size(self) -> int:
        return size_of(self.alike)

    def in_words(self) -> str:
        several = f"{counted(len(self.alike), 'block')} of that size are there at once, {human(self.size)}"
        return f"{human(self.alike[0].size)}, and {several}"


def loss_by_stacks(scene: Scene) -> Iterator[Cause]:
    """A loss over many classes: its log-softmax, its gradient, and copies of the logits are all as large as these."""
    if not scene.spans(BACKWARD) or (found := _worked_on(scene, _OF_A_LOSS, _LOSS)) is None:
        return
    yield Cause(
        "wide_loss",
        f"The loss at {found.place} makes a block of {found.in_words()}.",
        f"Where it is over the words of a vocabulary: {LOSS_IN_PARTS[0].lower()}{LOSS_IN_PARTS[1:]}.",
        found.size,
        describes=True,
    )


def scores_by_stacks(scene: Scene) -> Iterator[Cause]:
    """Softmax over large blocks, of several layers, or several at once in one layer."""
    if (found := _worked_on(scene, _OF_SCORES, _SCORES, _LOSS)) is None:
        return
    yield Cause(
        "attention_scores",
        f"Softmax ({found.place}) makes blocks of {found.in_words()}.",
        f"Where these are attention's scores, {WITHOUT_SCORES}",
        found.size,
        describes=True,
    )


def _worked_on(scene: Scene, part: int, words: tuple[str, ...], others: tuple[str, ...] = ()) -> _Worked | None:
    """Several blocks that are one part in so many of the peak. words: what the operator's, or function's, name holds; others:
    what it does not."""
    events = scene.recording.logs[scene.device].events
    living = scene.timeline.live_at(scene.moment)
    by_line: dict[str, list[Allocation]] = defaultdict(list)
    for one in living:
        if one.born < 0 or scene.labels[one.index].category not in ("activations", "temporaries"):
            continue
        names = " ".join(operators_in(events[one.born].frames))
        if any(word in names for word in words) and not any(word in names for word in others):
            by_line[line_in_program(events[one.born].frames)].append(one)
    place, made = max(by_line.items(), key=lambda pair: size_of(pair[1]), default=("", []))
    largest = max((one.size for one in made), default=0)
    found = _Worked(place, [one for one in living if one.size == largest])
    worth = len(found.alike) > 1 and found.size >= max(WORTH, scene.part_of_peak(part))
    return found if place and worth else None
