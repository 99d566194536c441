"""How far a preallocated tensor is filled: which of the positions of a cache are in use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import mul

from gpumem_magic.causes.model import Scene
from gpumem_magic.devices.base import FilledPart
from gpumem_magic.owners.model import Held
from gpumem_magic.units import human


def positions_used(scene: Scene, held: Iterable[Held]) -> tuple[int, int] | None:
    """How many positions tensors have that were made for the longest, and to how many of them the program assigned, in the
    fullest; None where that is not known, or where they have no one dimension that was filled in part."""
    found = []
    for one in held:
        parts = scene.filled.get((one.device, one.address), ())
        reached = _reached(parts, one.shape) if parts and len(one.shape) > 1 else None
        if reached is None:
            return None
        partly = [(room, used) for room, used in zip(one.shape, reached, strict=True) if used < room]
        if len(partly) != 1:
            return None
        found += partly
    rooms = {room for room, _ in found}
    return (rooms.pop(), max(used for _, used in found)) if len(rooms) == 1 else None


def with_less_room(nbytes: int, filled: tuple[int, int], them: str) -> str:
    """What would be taken by tensors that were made for the positions in use. filled: as `positions_used` gives it. them: their
    pronoun."""
    room, used = filled
    return f"Made for {used:,}, {them} would take {human(nbytes * used // room)}."


def _reached(parts: Sequence[FilledPart], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """How far the parts go in each dimension of a tensor that lies plainly; None where they are no parts of it."""
    steps = list(_steps(shape))
    reached = [0] * len(shape)
    for part in parts:
        spans = [0] * len(shape)
        for size, stride in zip(part.sizes, part.strides, strict=True):
            if size < 2:
                continue
            dim = next((number for number, step in enumerate(steps) if stride and not stride % step), None)
            if dim is None:
                return None
            spans[dim] += (size - 1) * (stride // steps[dim])
        for start in part.starts:
            for dim, step in enumerate(steps):
                place, start = divmod(start, step)
                reached[dim] = max(reached[dim], place + spans[dim] + 1)
    return tuple(reached) if all(far <= room for far, room in zip(reached, shape, strict=True)) else None


def _steps(shape: tuple[int, ...]) -> Iterator[int]:
    """How far its elements lie apart in each dimension, laid out plainly."""
    return reversed(list(accumulate(shape[:0:-1], mul, initial=1)))
