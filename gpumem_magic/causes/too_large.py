"""A model whose weights alone are more than the card has room for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from gpumem_magic.causes.alike import bytes_of
from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import quoted
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD, OPTIMIZER
from gpumem_magic.report.failure import failed_row
from gpumem_magic.report.model import OUTSIDE_CATEGORIES, Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human

# Bytes of a number in bfloat16, and bits of one in four bits.
_HALF, _FOUR = 2, 4
_NAME = re.compile(r"[^\W\d]\w*")
# A type in which several numbers are packed: nobody knows how narrow they are.
_PACKED = frozenset({"uint8"})
_PARTS = {2: "half of that", 4: "a quarter of that", 8: "an eighth of that", 16: "a sixteenth of that"}


def weights_too_large(scene: Scene) -> Iterator[Cause]:
    """``model.cuda()`` that fails on its way, or a model that is built there, since all of its weights can't be there."""
    error, row = scene.report.error, failed_row(scene.report)
    capacity = scene.report.device.total_bytes
    if error is None or not error.wanted or row is None or not capacity:
        return
    computing = (*scene.spans(FORWARD), *scene.spans(BACKWARD, OPTIMIZER))
    if any(scene.start_of(one) < scene.moment <= scene.end_of(one) for one in computing):
        return
    moved = scene.living_in(scene.moment, "parameters", "buffers")
    if 4 * size_of(moved) < 3 * scene.timeline.allocated_at(scene.moment):
        return
    room = capacity - sum(row.categories.get(name) or 0 for name in OUTSIDE_CATEGORIES)
    known = scene.weights.items()
    name, sizes = max(known, key=lambda each: sum(each[1].values()), default=("", dict[str, int]()))
    if (total := sum(sizes.values())) > room:
        dtype = max(sizes, key=lambda each: sizes[each])
        yield Cause(
            "weights_too_large",
            f"The weights of {quoted(name)} take {human(total)} in {dtype}, and this card has room for {human(room)}.",
            _narrower(name, sizes, room),
            total,
        )
    else:
        yield from _being_built(scene, moved, room, row.statement)


def _being_built(scene: Scene, made: Sequence[Allocation], room: int, statement: str) -> Iterator[Cause]:
    """The request that failed was for a weight, as those before it: nobody knows yet how much they will be. statement: the one
    that failed."""
    births, failed = scene.recording.logs[scene.device].births, scene.failed
    finished = _of_others(scene, statement)
    fresh = [one for one in made if one.born >= scene.points[0][2] and one.address not in finished]
    known = [(one.size, births[one.born]) for one in fresh if one.born in births]
    if failed is None or failed.place is None or failed.place not in [one.place for _, one in known]:
        return
    if 2 * size_of(fresh) < size_of(made):
        # (Most is another model's, which may go.)
        return
    sizes = Counter[str]()
    for size, birth in known:
        sizes[birth.dtype] += size
    ((dtype, _),) = sizes.most_common(1)
    yield Cause(
        "weights_too_large",
        f"This card has no room for all weights: memory ran out while they were made, {human(size_of(made))} of them in "
        f"{dtype}, where there is room for {human(room)}.",
        _narrower_from_the_start(dtype),
        size_of(made),
    )


def _narrower_from_the_start(dtype: str) -> str:
    """What those that nobody has counted yet would take in fewer bits."""
    width = bytes_of((), dtype)
    if dtype in _PACKED:
        return "They need several cards."
    four_bits = f"four bits (bitsandbytes) about {_PARTS[width * 8 // _FOUR]}. Else they need several cards."
    if width <= _HALF:
        return f"In {four_bits}"
    how = "`dtype=torch.bfloat16`, or `torch.set_default_dtype` while it is built"
    return f"In bfloat16 ({how}) they take {_PARTS[width // _HALF]}; in {four_bits}"


def _of_others(scene: Scene, statement: str) -> set[int]:
    """The addresses of weights that variables lead to, of which a statement speaks of none."""
    roots, spoken = scene.holdings.roots, set(_NAME.findall(statement))
    return {
        one.address
        for one in scene.held
        if one.kind == "parameter"
        and all(roots[number].kind == "variable" and roots[number].name not in spoken for number in one.roots)
    }


def _narrower(name: str, sizes: Mapping[str, int], room: int) -> str:
    """What they take in fewer bits."""
    half = sum(size * _HALF // max(_HALF, bytes_of((), dtype)) for dtype, size in sizes.items())
    packed = sum(sizes[dtype] for dtype in _PACKED & sizes.keys())
    numbers = sum(size // bytes_of((), dtype) for dtype, size in sizes.items() if dtype not in _PACKED)
    four_bits = packed + numbers * _FOUR // 8
    if half == sum(sizes.values()):
        if four_bits == half:
            return "They need several cards."
        return f"In four bits (bitsandbytes) they take about {human(four_bits)}; else they need several cards."
    words = f"In bfloat16 (`{name}.to(torch.bfloat16)`, before they are moved) they take {human(half)}"
    if half < room:
        return f"{words}."
    return (
        f"{words}, still too much; in four bits (bitsandbytes) about {human(four_bits)}. Else they need several cards."
    )
