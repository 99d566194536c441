"""What softmax works on, where a file's stacks are all that is known: the logits of a loss, and attention's scores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from gpumem_magic.attribution.places import operators_in, place_in_program
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

    def in_words(self) -> str:
        several = f"{counted(len(self.alike), 'block')} of that size are there at once, {human(size_of(self.alike))}"
        return f"{human(self.alike[0].size)}, and {several}"


def loss_by_stacks(scene: Scene) -> Iterator[Cause]:
    """A loss over many classes: its log-softmax, its gradient, and copies of the logits are all as large as these."""
    found = _worked_on(scene, _LOSS, ())
    if found is None or not scene.spans(BACKWARD) or len(found.alike) < 2:
        return
    if size_of(found.alike) >= max(WORTH, scene.part_of_peak(_OF_A_LOSS)):
        yield Cause(
            "wide_loss",
            f"The loss at {found.place} makes a block of {found.in_words()}.",
            f"Where it is over the words of a vocabulary: {LOSS_IN_PARTS[0].lower()}{LOSS_IN_PARTS[1:]}.",
            size_of(found.alike),
            describes=True,
        )


def scores_by_stacks(scene: Scene) -> Iterator[Cause]:
    """Softmax over large blocks, of several layers, or several at once in one layer."""
    found = _worked_on(scene, _SCORES, _LOSS)
    if found is None or len(found.alike) < 2:
        return
    if size_of(found.alike) >= max(WORTH, scene.part_of_peak(_OF_SCORES)):
        yield Cause(
            "attention_scores",
            f"Softmax ({found.place}) makes blocks of {found.in_words()}.",
            f"Where these are attention's scores, {WITHOUT_SCORES}",
            size_of(found.alike),
            describes=True,
        )


def _worked_on(scene: Scene, words: tuple[str, ...], others: tuple[str, ...]) -> _Worked | None:
    """words: what the operator's, or function's, name holds; others: what it does not."""
    events = scene.recording.logs[scene.device].events
    living = scene.timeline.live_at(scene.moment)
    by_line: dict[str, list[Allocation]] = defaultdict(list)
    for one in living:
        if one.born < 0 or scene.labels[one.index].category not in ("activations", "temporaries"):
            continue
        names = " ".join(operators_in(events[one.born].frames))
        if any(word in names for word in words) and not any(word in names for word in others):
            by_line[place_in_program(events[one.born].frames).partition(",")[0]].append(one)
    if not by_line:
        return None
    place, made = max(by_line.items(), key=lambda pair: size_of(pair[1]))
    largest = max(one.size for one in made)
    return _Worked(place, [one for one in living if one.size == largest]) if place else None
