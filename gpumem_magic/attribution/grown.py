"""A cache of keys and values that nothing names, by how it grows.

In each forward two tensors of one shape are joined, in the same function, to what the forward before had left there, along one
dimension that is not the batch's; and stay when it ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpumem_magic.attribution.owners import lives_at
from gpumem_magic.attribution.phase_map import PhaseMap
from gpumem_magic.devices.base import Birth, Label
from gpumem_magic.recording.model import FORWARD
from gpumem_magic.snapshot.timeline import Allocation

_JOINS = frozenset({"cat", "concat", "concatenate"})
_FEWEST_DIMENSIONS = 3
_LABEL = Label("kv_cache", "inferred")


class _Join(NamedTuple):
    one: Allocation
    birth: Birth
    shape: tuple[int, ...]
    before: tuple[int, ...]
    axis: int


def grown_keys_and_values(
    births: Mapping[int, Birth], allocations: Sequence[Allocation], phases: PhaseMap
) -> dict[int, Label]:
    """Index of an allocation -> its label."""
    groups: dict[tuple[object, ...], dict[tuple[int, int], list[_Join]]] = defaultdict(lambda: defaultdict(list))
    for one in allocations:
        join = _join(one, births.get(one.born))
        phase = None if join is None else phases.at_event(one.born)
        if join is None or phase is None or phase.kind != FORWARD or not (lives_at(one, phase.end) or phase.failed):
            continue
        place = join.birth.place
        where = () if place is None else (place.file, place.function)
        key = (where, join.axis, join.birth.dtype, join.shape[: join.axis], join.shape[join.axis + 1 :])
        groups[key][phase.start, join.shape[join.axis]].append(join)
    found: dict[int, Label] = {}
    for joins in groups.values():
        for (start, _), its in joins.items():
            # Within one forward, layers join their results to those before them. Once is no loop.
            earlier = [
                joins[other]
                for other in joins
                if other[0] < start and other[1] == its[0].before[its[0].axis] and (start, other[1]) not in joins
            ]
            if earlier and len(its) % 2 == 0:
                found |= {join.one.index: _LABEL for some in (its, earlier[-1]) for join in some}
    return found


def _join(one: Allocation, birth: Birth | None) -> _Join | None:
    if birth is None or birth.node or birth.kernel not in _JOINS or birth.shape is None or len(birth.inputs) != 2:
        return None
    shape, before = birth.shape, birth.inputs[0][0]
    if len(shape) < _FEWEST_DIMENSIONS or len(before) != len(shape) or "float" not in birth.dtype:
        return None
    differs = [axis for axis, (now, then) in enumerate(zip(shape, before, strict=True)) if now != then]
    # Along the first dimension a batch grows, or a bank of samples.
    if len(differs) != 1 or differs[0] == 0 or 2 * before[differs[0]] < shape[differs[0]]:
        return None
    return _Join(one, birth, shape, before, differs[0])
