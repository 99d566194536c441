"""A batch that is padding for a good part: its rows are as long as the longest, or longer.

What is padding is said by the program's own mask, or by the number that a model takes for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch

from gpumem_magic.causes.batches import Batch
from gpumem_magic.causes.model import Scene
from gpumem_magic.devices.base import Padded
from gpumem_magic.looks import tensors
from gpumem_magic.looks.objects import attribute
from gpumem_magic.owners.model import size_of
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human

# Where they are, in a layer that looks rows up and in a model's settings.
_OF_A_LAYER, _OF_A_MODEL = "padding_idx", "pad_token_id"
# Less than one part in so many is not worth sorting for; what is made of a batch is a part of the peak.
_SHARE = 4


def numbers_for_padding(modules: Mapping[str, torch.nn.Module]) -> frozenset[int]:
    """What the notebook's modules take for padding."""
    found: set[int] = set()
    for root in modules.values():
        for _, module in tensors.modules_in(root):
            both = attribute(module, _OF_A_LAYER), attribute(attribute(module, "config"), _OF_A_MODEL)
            # (Other values may have a hash of the program's, or none.)
            found.update(number for number in both if type(number) is int)
    return frozenset(found)


def padded_batch(scene: Scene) -> Iterator[Cause]:
    """Much of the peak (or of what there was when a request failed) was made of a batch, of which much is padding."""
    found = _largest(scene)
    if found is None or _SHARE * found[1].padded < prod(found[1].shape):
        return
    matrix, known = found
    rows, positions = known.shape
    batch = Batch(scene)
    if not batch.items or rows % batch.items:
        return
    made = [one for one in batch.parts_of(scene.timeline.live_at(scene.moment)) if _has(scene, one, known)]
    if _SHARE * size_of(made) < size_of(scene.timeline.live_at(scene.moment)):
        return
    facts = scene.tensors.facts(matrix) if scene.tensors is not None else None
    place = f" (line {facts.line})" if facts is not None and facts.line else ""
    if known.longest < positions:
        part = f"[:, :{known.longest}]" if known.at_end else f"[:, -{known.longest}:]"
        way = (
            f'Padded to the longest of them (`padding="longest"`, or `{part}`), the batch would have {rows * known.longest:,} '
            "positions."
        )
    else:
        way = "Batches of sequences of similar length (sorted or bucketed by length) need less padding."
    total = prod(known.shape)
    yield Cause(
        "padding",
        f"{100 * known.padded // total} % of the batch's {total:,} positions are padding{place}: its {rows:,} sequences have "
        f"{known.shortest:,} to {known.longest:,}, and all are padded to {positions:,}. What is made of them takes "
        f"{human(size_of(made))}, padding and all.",
        way,
        size_of(made) * known.padded // total,
        describes=True,
    )


def _largest(scene: Scene) -> tuple[Allocation, Padded] | None:
    """Of the matrices that are there, with padding for certain, the largest; of those, a mask."""
    padded = scene.recording.logs[scene.device].padded
    there = [(one, padded[one.born]) for one in scene.timeline.live_at(scene.moment) if one.born in padded]
    certain = [pair for pair in there if pair[1].is_mask or pair[1].number in scene.numbers_for_padding]
    return max(certain, key=lambda pair: (prod(pair[1].shape), pair[1].is_mask, pair[0].born), default=None)


def _has(scene: Scene, one: Allocation, known: Padded) -> bool:
    """Whether a tensor has something for each position."""
    birth: Any = scene.recording.logs[scene.device].births.get(one.born)
    if birth is None or not birth.shape:
        return False
    rows, positions = known.shape
    return positions in birth.shape or birth.shape[0] % (rows * positions) == 0
