"""What is alive in one shape, and the operator that made it: what causes about operators look at, and their words for it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch

from gpumem_magic.causes.model import Scene
from gpumem_magic.devices.base import Birth, CodePlace
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human, listed

# What has a tensor's shape and is none of its copies.
_OF_TRAINING = frozenset({"parameters", "buffers", "gradients", "optimizer_state"})

HALVES = frozenset({"float16", "bfloat16"})
"""Types of 16 bits."""


@dataclass(frozen=True)
class Alike:
    """What is alive in one shape: how many, bytes, and the types where they are known; and the operator that made the first of
    them, at an event."""

    shape: tuple[int, ...]
    count: int
    bytes: int
    birth: Birth
    event: int
    types: tuple[str, ...] = ()


# (A mask is broadcast by whatever reads it: `sdp_utils` of ATen/native/transformers; what converts it makes one of its own.)
_BY_STRIDES = re.compile(r"^(?:cat|to|_to_copy)$|scaled_dot_product|_attention")


def alive_in_shapes(scene: Scene, fits: Callable[[Birth], bool]) -> list[list[Alike]]:
    """The shapes in which a good part of the memory is alive, largest first, each with the forward operators that fit: of a
    kernel the last; what made most first, then the last."""
    counts: dict[tuple[int, ...], list[tuple[int, str]]] = defaultdict(list)
    trained = _trained(scene)
    for event, size, birth in births_alive(scene):
        if event not in trained:
            counts[_any_view(birth.shape or ())].append((size, birth.dtype))
    least = scene.part_of_peak(10)
    sizes = {shape: sum(size for size, _ in its) for shape, its in counts.items()}
    large = {shape: tuple(dtype for _, dtype in counts[shape]) for shape, size in sizes.items() if size >= least}
    found: dict[tuple[int, ...], dict[str, Alike]] = defaultdict(dict)
    for event, birth in reversed(scene.births) if large else ():
        if event >= scene.moment or birth.shape is None or birth.node or event in trained:
            continue
        key = _any_view(birth.shape)
        if key in large and birth.kernel not in found[key] and fits(birth):
            found[key][birth.kernel] = Alike(birth.shape, len(large[key]), sizes[key], birth, event, large[key])
    ordered = (
        sorted(its.values(), key=lambda one: -bytes_of(one.shape, one.birth.dtype)) for its in found.values() if its
    )
    return sorted(ordered, key=lambda its: -its[0].bytes)


def behind(scene: Scene, alike: Alike, fits: Callable[[Birth], bool]) -> Alike | None:
    """Of what is alive in the shape, and in the type of the operator's result, that in which a forward operator that fits had a
    part: it made it, or ran before it in the same statement. Of those at several places, the place's that has most; the last at
    it. None where none had a part in anything."""
    shape, dtype = _any_view(alike.shape), alike.birth.dtype
    trained = _trained(scene)
    events = [
        event
        for event, birth in scene.births
        if birth.shape is not None and _any_view(birth.shape) == shape and not birth.node and fits(birth)
    ]
    births = scene.recording.logs[scene.device].births
    found: dict[CodePlace | None, list[tuple[int, int]]] = defaultdict(list)
    for event, size, birth in births_alive(scene):
        if event in trained or birth.dtype != dtype or _any_view(birth.shape or ()) != shape:
            continue
        before = bisect_right(events, event)
        if before and events[before - 1] >= scene.start_of_row(event):
            maker = events[before - 1]
            found[births[maker].place].append((maker, size))
    if not found:
        return None
    most = max(found.values(), key=lambda its: (sum(size for _, size in its), max(its)))
    last = max(maker for maker, _ in most)
    birth = births[last]
    return Alike(birth.shape or (), len(most), sum(size for _, size in most), birth, last)


def alone(scene: Scene, alike: Alike) -> Alike:
    """The same with those alone that were made at the same place by the same operator."""
    made = alike.birth.kernel, alike.birth.place
    sizes = [size for _, size, birth in births_alive(scene) if (birth.kernel, birth.place) == made]
    return replace(alike, count=len(sizes), bytes=sum(sizes), types=(alike.birth.dtype,) * len(sizes))


def made_of_it(scene: Scene, alike: Alike) -> list[Birth]:
    """What is alive and has been made of nothing but an operator's result by the rest of the same statement, number by number."""
    row, shape = scene.start_of_row(alike.event), _any_view(alike.shape)
    return [
        birth
        for event, _, birth in births_alive(scene)
        if event > alike.event
        and scene.start_of_row(event) == row
        and not birth.node
        and [_any_view(its) for its, _ in birth.inputs] == [shape] == [_any_view(birth.shape or ())]
    ]


def statement_of(scene: Scene, alike: Alike) -> str:
    """The statement that made it, as it is written; "" where that is not known."""
    one = next((each for each in scene.timeline.allocations if each.born == alike.event), None)
    facts = scene.tensors.facts(one) if scene.tensors is not None and one is not None else None
    return facts.statement if facts is not None else ""


def numbers_alive(scene: Scene, count: int) -> int:
    """The bytes of all that is alive and has as many numbers, whatever views they are."""
    return sum(size for _, size, birth in births_alive(scene) if prod(birth.shape or ()) == count)


def births_alive(scene: Scene, at_work: bool = False) -> Iterator[tuple[int, int, Birth]]:
    """The event, the bytes and how it came to be, of each tensor that is alive, or that the request that failed was for. at_work:
    with what operators take for their own work, which has no shape."""
    births, error = scene.recording.logs[scene.device].births, scene.report.error
    living = [(one.born, one.size) for one in scene.timeline.live_at(scene.moment)]
    if error is not None and error.wanted is not None:
        living.append((scene.moment - 1, error.wanted))
    for event, size in living:
        birth = births.get(event)
        if birth is not None and (at_work or birth.shape is not None):
            yield event, size, birth


def _trained(scene: Scene) -> set[int]:
    return {one.born for one in scene.timeline.allocations if scene.labels[one.index].category in _OF_TRAINING}


def reader_of_a_view(scene: Scene, alike: Alike) -> str:
    """What reads it next, if that would take an expanded view as it is (number by number, or as a part that is joined):
    ```a + bias` (line 3)``; else ""."""
    event, birth = first_reader(scene, alike) or (0, None)
    if birth is None or alike.shape not in (shape for shape, _ in birth.inputs):
        return ""
    # (`cat` copies its parts by their strides: ATen/native/cuda/Shape.cu.)
    takes = goes_by_numbers(birth.kernel) or _BY_STRIDES.search(birth.kernel)
    return of_birth(scene, event, birth) if takes else ""


def first_reader(scene: Scene, alike: Alike) -> tuple[int, Birth] | None:
    """The first operator after it that takes in as many numbers, in whatever view, and its event."""
    size = prod(alike.shape)
    later = (one for one in scene.births if one[0] > alike.event)
    return next((one for one in later if any(prod(shape) == size for shape, _ in one[1].inputs)), None)


def taken_in_by(scene: Scene, alike: Alike, is_one: Callable[[str], object]) -> str:
    """The first operator of such a kernel after it, but for a backward's, that takes in one of its shape; "" where none does."""
    for event, birth in scene.births:
        taken = event > alike.event and not birth.node and is_one(birth.kernel)
        if taken and any(shape == alike.shape for shape, _ in birth.inputs):
            return of_birth(scene, event, birth)
    return ""


def of_birth(scene: Scene, event: int, birth: Birth) -> str:
    """As `made_by`, of one allocation's birth."""
    return made_by(scene, Alike(birth.shape or (), 1, 0, birth, event))


def goes_by_numbers(kernel: str) -> bool:
    """Whether an operator works on each number by itself, however they lie; the others may need a copy in one piece."""
    packet = getattr(torch.ops.aten, kernel, None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without dimensions of 1."""
    return tuple(length for length in shape if length != 1)


@lru_cache(maxsize=4096)
def _any_view(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape as alike ones have it, whatever their views: batch and heads in one."""
    found = squeezed(shape)
    return found if len(found) <= 3 else (prod(found[:-2]), *found[-2:])


def bytes_of(shape: tuple[int, ...], dtype: str) -> int:
    kind = getattr(torch, dtype, None)
    return prod(shape) * (kind.itemsize if isinstance(kind, torch.dtype) else 1)


def made_by(scene: Scene, alike: Alike) -> str:
    """```pred - y` (line 4)``, with the inner place where the line only leads to it."""
    one = next((each for each in scene.timeline.allocations if each.born == alike.event), None)
    if one is None or not (words := made_at(scene, one)):
        # The request that failed has no allocation.
        place = alike.birth.place
        words = (place.expression or place.text) if place is not None else alike.birth.operator
        line = scene.report.error.line if scene.report.error is not None else 0
        own = place is not None and place.own_file == scene.recording.own_file
        number = place.own_line if own and place is not None else line
        return f"`{words}` (line {number})" if number else f"`{words}`"
    return words


def made_at(scene: Scene, one: Allocation) -> str:
    """The same of one allocation; "" where nothing is known of it."""
    facts = scene.tensors.facts(one) if scene.tensors is not None else None
    if facts is None:
        return ""
    words = facts.expression or facts.statement or facts.operator
    inner = f", {facts.inner}" if facts.inner else ""
    return f"`{words}` (line {facts.line}{inner})" if facts.line else f"`{words}`{inner}"


def size_words(alike: Alike) -> str:
    """``1,526 MiB in float32, and 4 of that shape at once are 6,104 MiB``; of several types, how many of each."""
    size = bytes_of(alike.shape, alike.birth.dtype)
    each = f"{human(size)} in {alike.birth.dtype}"
    if alike.count == 1:
        return each
    # A mask of the same shape, its copy in float32.
    of_each = Counter(alike.types)
    types = (
        f" ({listed([f'{count} in {dtype}' for dtype, count in of_each.most_common()])})" if len(of_each) > 1 else ""
    )
    return f"{each}, and {alike.count} of that shape at once{types} are {human(alike.bytes)}"
