"""A large batch: what is made of it, for each item, and how many would fit at most."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from math import prod

from gpumem_magic.causes.alike import births_alive
from gpumem_magic.causes.device_memory import is_in_a_first_forward
from gpumem_magic.causes.model import WORTH, Scene
from gpumem_magic.causes.pairs import PRODUCTS
from gpumem_magic.causes.places import module_of, quoted
from gpumem_magic.devices.base import Birth
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD, FORWARD, Checkpoint, Span
from gpumem_magic.report.failure import failed_row, peak_is_of_a_failed_attempt
from gpumem_magic.report.model import OUTSIDE_CATEGORIES, Cause
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import human

_LEAST = 4
# More items than anybody trains with at once: points, pixels, rows of a table.
_VERY_MANY = 100_000
# The dimensions of several signals, of images and of volumes.
_IMAGES = (3, 4, 5)
# Those of sequences: steps, items, numbers.
_OF_SEQUENCES = 3
_OF_AN_IMAGE = 2
# Rows and columns, and the two factors of a product of matrices.
_FACTORS = 2
# What is made of a batch.
_OF_THE_BATCH = frozenset({"inputs", "activations", "activation_gradients", "temporaries"})
# Beside the iteration that computes, one more may have left its last result.
_ITERATIONS_AT_ONCE = 2
# A discriminator has a real batch and a generated one twice.
_FORWARDS_AT_ONCE = 3
_RNN = "cudnn_rnn"
# What earlier batches left is one part in so many of what has a batch's shape.
_EARLIER = 3


def whole_batch(scene: Scene) -> Iterator[Cause]:
    """Much of what was there when a request failed, with it, or most at a training's peak, was made of one batch: its items are
    the first dimension."""
    error = scene.report.error
    if error is not None and error.wanted is not None:
        yield from _too_many(scene, error.wanted)
    elif error is None and not scene.spans(BACKWARD):
        yield from _in_a_forward(scene)
    elif (
        error is None
        # What an attempt took that failed is not all that its batch takes.
        and not peak_is_of_a_failed_attempt(scene.recording, scene.device, scene.timeline)
    ):
        yield from _at_the_peak(scene)


def _too_many(scene: Scene, wanted: int) -> Iterator[Cause]:
    if scene.moment == scene.peak == 0:
        return
    batch = Batch(scene)
    parts = batch.parts_of(scene.timeline.live_at(scene.moment))
    failed = scene.failed
    size = size_of(parts) + (wanted if batch.has(failed) and not _is_a_gradient(scene, failed) else 0)
    total = size_of(scene.timeline.live_at(scene.moment)) + wanted
    row = failed_row(scene.report)
    capacity = scene.report.device.total_bytes
    if 4 * size < total or row is None or not capacity or _gathers(scene, parts):
        return
    outside = sum(row.categories.get(name) or 0 for name in OUTSIDE_CATEGORIES)
    fits = int((capacity - outside - (total - size)) * batch.items // size)
    if fits >= batch.items and is_in_a_first_forward(scene):
        # Only packed perfectly this request would pass, and the next layer's will be as large.
        yield Cause(
            "whole_batch",
            f"The batch of {batch.items:,} items{_where(failed)} takes {human(size)} up to here, "
            f"{human(size // batch.items)} an item.",
            "Half as many at a time take half of that.",
            size,
        )
        return
    if not 0 < fits < batch.items:
        return
    yield Cause(
        "whole_batch",
        f"The batch of {batch.items:,} items{_where(failed)} takes {human(size)} up to here, "
        f"{human(size // batch.items)} an item.",
        f"A smaller batch helps: {fits:,} items would get past this request, though later ones may need more room.",
        size,
    )


def _at_the_peak(scene: Scene) -> Iterator[Cause]:
    batch = Batch(scene)
    living = scene.timeline.live_at(scene.moment)
    parts = batch.parts_of(living)
    size = size_of(parts)
    if 2 * size < size_of(living) or size < WORTH or _gathers(scene, parts):
        return
    everything = batch.parts_of(scene.timeline.allocations)
    # (Half the batch has a quarter of the pairs.)
    pairs = [replace(one, size=one.size // 2) for one in everything if batch.is_of_pairs(one)]
    highest, at = scene.highest_without([*everything, *pairs], share=2)
    saved = scene.report.peak.allocated - highest
    if saved < WORTH // 2:
        return
    yield Cause(
        "whole_batch",
        f"The batch of {batch.items:,} items takes {human(size)} of it, {human(size // batch.items)} an item.",
        f"Half the batch would take about {human(saved)} less{_why_no_more(scene, saved, size, at)}.",
        size,
    )


def _in_a_forward(scene: Scene) -> Iterator[Cause]:
    """The same where nothing is trained, and the peak is in a forward that has very many items at once, or much of them."""
    forward = next(iter(_forwards_at_work(scene)), None)
    if forward is None or forward.failed or forward.graph:
        return
    others = [one for one in scene.spans(FORWARD) if one.label == forward.label and one is not forward]
    if any(2 * _growth_in(scene, one) > _growth_in(scene, forward) for one in others):
        # They come in parts as it is.
        return
    batch = Batch(scene)
    living = scene.timeline.live_at(scene.moment)
    parts = batch.parts_of(living)
    size = size_of(parts)
    many = batch.items >= _VERY_MANY or (batch.items >= _LEAST and size >= _LEAST * WORTH)
    if not many or 2 * size < size_of(living) or size < WORTH:
        return
    # What the program itself keeps of all items is there either way: its results, and what it names.
    end = scene.end_of(forward)
    during = [one for one in batch.parts_of(scene.timeline.allocations) if _goes_after(scene, one, end)]
    highest, at = scene.highest_without(during, share=2)
    saved = scene.report.peak.allocated - highest
    if saved < max(WORTH // 2, scene.part_of_peak(4)):
        return
    yield Cause(
        "whole_batch",
        f"All {batch.items:,} items go through {quoted(forward.label)} at once: {human(size)}, {human(size // batch.items)} an "
        "item.",
        f"Half of them at a time would take about {human(saved)} less{_why_no_more(scene, saved, size, at)}.",
        size,
    )


def _growth_in(scene: Scene, forward: Span) -> int:
    """How much more is there within it than at its start, at most."""
    begin, end = scene.start_of(forward), scene.end_of(forward)
    return scene.timeline.peak(begin, end)[0] - scene.timeline.allocated_at(begin)


def _why_no_more(scene: Scene, saved: int, size: int, at: int) -> str:
    """Where half of what the batch takes would not all be saved, and the peak would lie at another line then (at: where)."""
    before, behind = (_line_of(scene, position) for position in (scene.moment, at))
    if 5 * saved >= 2 * size or not behind or behind == before:
        return ""
    return f", as the peak would then be at line {behind}"


def _line_of(scene: Scene, position: int) -> int:
    """The line of the row that this is in; 0: of none."""
    row = _row_at(scene, position)
    return row[0].line or 0 if row is not None else 0


def _goes_after(scene: Scene, one: Allocation, end: int) -> bool:
    """Whether it is of a forward's own work or was made for it alone: it has no name, and goes before the forward's end or as
    soon as that has its result."""
    return one.freed is not None and not scene.labels[one.index].name and one.freed <= _end_of_row(scene, end)


def _end_of_row(scene: Scene, position: int) -> int:
    row = _row_at(scene, position)
    return position if row is None else row[2]


def _row_at(scene: Scene, position: int) -> tuple[Checkpoint, int, int] | None:
    return next((row for row in scene.points if row[1] <= position <= row[2]), None)


def large_images(scene: Scene) -> Iterator[Cause]:
    """Where a request failed, or at the peak of a forward or a training of few images, most is of one height and width, that of a
    convolution's result (or length, too): fewer items may not do."""
    error = scene.report.error
    wanted = error.wanted if error is not None else None
    if wanted is None and (error is not None or not _is_of_few(scene)):
        return
    births = scene.recording.logs[scene.device].births
    weights = _shapes_of_weights(scene)
    sizes: Counter[tuple[int, ...]] = Counter()
    for _, size, birth in births_alive(scene):
        if birth.shape is not None and len(birth.shape) in _IMAGES and birth.shape not in weights:
            sizes[birth.shape[2:]] += size
    convolved = {birth.shape[2:] for birth in births.values() if birth.shape is not None and "conv" in birth.kernel}
    found = next(((area, size) for area, size in sizes.most_common(1) if area in convolved), None)
    if found is None or 2 * found[1] < size_of(scene.timeline.live_at(scene.moment)) + (wanted or 0):
        return
    area, size = found
    here = "" if wanted is None else " up to here"
    dots, what, part, parts = "pixels", "Images of half the height and width", "a quarter", "crops, tiles"
    if len(area) < _OF_AN_IMAGE:
        dots, what, part, parts = "positions", "Signals of half the length", "half", "windows"
    if len(area) > _OF_AN_IMAGE:
        dots, what, part = "voxels", "Volumes of half the length in each direction", "an eighth"
    yield Cause(
        "large_images",
        f"Tensors of {' x '.join(f'{side:,}' for side in area)} {dots} take {human(size)}{here}.",
        f"{what} take {part} of that; or give it parts of them ({parts}), one at a time.",
        size,
        describes=True,
    )


def _forwards_at_work(scene: Scene) -> list[Span]:
    """Those that the moment is in, in their order."""
    return [one for one in scene.spans(FORWARD) if scene.start_of(one) <= scene.moment <= scene.end_of(one)]


def _is_of_few(scene: Scene) -> bool:
    """Whether the peak is large, and in a forward without a graph, or a training, of few images."""
    spans = _forwards_at_work(scene)
    trains = bool(scene.spans(BACKWARD))
    if scene.report.peak.allocated < _LEAST * WORTH or (not trains and not spans):
        return False
    if not trains and any(one.graph for one in spans):
        return False
    begin = scene.start_of(spans[0]) if spans and not trains else 0
    weights = _shapes_of_weights(scene)
    made = (birth.shape for event, _, birth in births_alive(scene) if event >= begin)
    shapes = [shape for shape in made if shape and shape not in weights]
    return bool(shapes) and all(len(shape) not in _IMAGES or shape[0] < _LEAST for shape in shapes)


def _is_a_gradient(scene: Scene, birth: Birth | None) -> bool:
    """Whether a backward makes it in the shape of a weight."""
    return birth is not None and bool(birth.node) and birth.shape in _shapes_of_weights(scene)


def _shapes_of_weights(scene: Scene) -> set[tuple[int, ...]]:
    return {one.shape for one in scene.held if one.kind == "parameter"}


class Batch:
    """How many items a batch has: the first dimension of an input, of which first dimensions of most of the rest are multiples
    (items and steps in one); where no input is known, of most that is there. 0: unknown."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.births = scene.recording.logs[scene.device].births
        # (Images have their channels behind.)
        images = any("conv" in birth.kernel for birth in self.births.values())
        self._steps_first = scene.steps_first and not images
        # Weights that a program computes (one step of a step of training) are no batch, nor are those that it steps by hand, of
        # which the gradients are known.
        known = any(self._is(one, "parameters") for one in scene.timeline.allocations)
        self._weights = self._shapes("parameters" if known else "gradients")
        # (Of models from before the recording: what is computed in the shape of a buffer is a weight, unpacked from it.)
        self._weights |= {one.shape for one in scene.held if one.kind == "buffer"}
        # All of a model's may be joined to one piece.
        numbers: Counter[str] = Counter()
        for weight in scene.held:
            numbers[module_of(weight)] += prod(weight.shape) if weight.kind == "parameter" else 0
        self._weights |= {(count,) for count in numbers.values()}
        sizes: Counter[int] = Counter()
        inputs: Counter[int] = Counter()
        seconds: dict[int, int] = {}
        # What was there before the recording has no birth.
        seen = {one.address: one.shape for one in scene.held if one.kind == "tensor"}
        for one in scene.timeline.live_at(scene.moment):
            birth = self.births.get(one.born)
            shape = seen.get(one.address, ()) if one.born < 0 else ()
            rows = self._items_of(shape) if shape else self._rows(birth)
            rows = rows if self._may_be(one) else 0
            if rows < _LEAST or _are_scores(birth):
                continue
            if not self._is(one, "inputs"):
                sizes[rows] += one.size
                continue
            inputs[rows] += one.size
            shape = shape or (birth.shape if birth is not None else None) or ()
            seconds[rows] = shape[1] if len(shape) > 1 else 0
        for rows, second in seconds.items():
            # What steps are taken from, one after the other, has their number first, and then the items'.
            if (rows not in sizes or (self._steps_first and sizes[second] > sizes[rows])) and second in sizes:
                inputs[second] += inputs.pop(rows)
        made = {items: sum(size for rows, size in sizes.items() if rows % items == 0) for items in inputs or sizes}
        likely = [items for items, size in made.items() if 20 * size >= 19 * max(made.values())]
        self.items = max(likely, key=lambda items: (inputs or sizes)[items], default=0)

    def parts_of(self, allocations: Iterable[Allocation]) -> list[Allocation]:
        known, shapeless = [], []
        for one in allocations:
            birth = self.births.get(one.born)
            if birth is not None and birth.operator == _RNN and self._is(one, "workspace"):
                # (What cuDNN works in grows with steps and items, too.)
                known.append(one)
            elif not self._may_be(one):
                continue
            elif birth is not None and birth.shape is None:
                shapeless.append(one)
            elif self.has(birth) and not self._is_set_of_data(one):
                known.append(one)
        # What an operator takes for itself has no shape that anybody sees: as large as a batch's, it is one's.
        sizes = {one.size for one in known}
        return known + [one for one in shapeless if one.size in sizes]

    def is_of_pairs(self, one: Allocation) -> bool:
        """Whether it has a number for each pair of the batch's items."""
        birth = self.births.get(one.born)
        return birth is not None and birth.shape in self._of_pairs

    @cached_property
    def _of_pairs(self) -> set[tuple[int, ...]]:
        """The shapes of products, or distances, of the batch's items with the batch's items. (Of a layer as wide as a batch has
        items, the second factor is a weight.)"""
        weights = self._weights | _shapes_of_weights(self._scene)
        weights |= {shape[::-1] for shape in weights if shape is not None}
        found = set()
        for birth in self.births.values():
            shape, inputs = birth.shape or (), [shape for shape, _ in birth.inputs[-_FACTORS:]]
            square = len(shape) == _FACTORS and shape[0] == shape[1] and self.items and not shape[0] % self.items
            made = birth.kernel in PRODUCTS or "cdist" in birth.kernel
            if square and made and not birth.node and len(inputs) == _FACTORS and not weights.intersection(inputs):
                found.add(shape)
        return found

    def has(self, birth: Birth | None) -> bool:
        """Whether what was made so has the batch's items in its first dimension, or multiples of them; of sequences with steps in
        front, in one of the first."""
        rows = self._rows(birth)
        if self.items and birth is not None and _is_kept_by_an_rnn(birth):
            return any(side % self.items == 0 for side in birth.inputs[0][0][:_FACTORS])
        if rows <= 0 or self.items <= 0 or birth is None or birth.shape is None:
            return False
        # (Behind steps, or queries, keys and values in one; in front of heads.)
        sides = birth.shape[:_OF_SEQUENCES] if self._steps_first else (rows,)
        return any(side % self.items == 0 for side in sides)

    def _is_set_of_data(self, one: Allocation) -> bool:
        """Whether it is what batches are taken from, of which there is as much whatever their size: it came as it is, with more
        items than one of them has."""
        came = self._scene.recording.logs[self._scene.device].origins.get(one.born) in ("host_copy", "factory")
        return came and self._is(one, "inputs") and self._rows(self.births.get(one.born)) != self.items

    def _shapes(self, category: str) -> set[tuple[int, ...] | None]:
        births = (self.births.get(one.born) for one in self._scene.timeline.allocations if self._is(one, category))
        return {birth.shape for birth in births if birth is not None}

    def _is(self, one: Allocation, category: str) -> bool:
        return self._scene.labels[one.index].category == category

    def _may_be(self, one: Allocation) -> bool:
        return self._scene.labels[one.index].category in _OF_THE_BATCH

    def _rows(self, birth: Birth | None) -> int:
        """How many items what may be of a batch has by its shape; 0 of all else."""
        if birth is None or not birth.shape or birth.operator in _NOT_OF_A_BATCH or birth.shape in self._weights:
            return 0
        if birth.operator == _RNN and len(birth.shape) == _OF_SEQUENCES:
            # (Whichever way it is given, cuDNN has steps in front.)
            return birth.shape[1]
        return 0 if _is_kept_by_an_rnn(birth) else self._items_of(birth.shape)

    def _items_of(self, shape: tuple[int, ...]) -> int:
        # (Scores of attention have a number for each two steps, and the heads in front.)
        return shape[1] if self._steps_first and len(shape) >= _OF_SEQUENCES and shape[-1] != shape[-2] else shape[0]


def _is_kept_by_an_rnn(birth: Birth) -> bool:
    """Whether it is the bytes that cuDNN keeps of all steps and items for a backward."""
    return birth.operator == _RNN and birth.dtype == "uint8" and bool(birth.inputs)


def _are_scores(birth: Birth | None) -> bool:
    """Whether it is a product with a number for each two steps of a sequence, as attention has: in front are heads."""
    shape = birth.shape if birth is not None and birth.kernel in PRODUCTS else None
    return shape is not None and len(shape) == _OF_SEQUENCES and shape[-1] == shape[-2]


_NOT_OF_A_BATCH = frozenset({"empty", "zeros", "ones", "full", "clone", "zeros_like", "empty_like"})


def _gathers(scene: Scene, parts: list[Allocation]) -> bool:
    """Whether several iterations' batches are there at once, or several forwards' of one model without a backward: of smaller
    ones there would be more."""
    if _is_all_data(scene, parts):
        return True
    ends = [one.end for one in scene.iterations]
    iterations: Counter[int] = Counter()
    for one in parts:
        iterations[bisect_right(ends, one.born)] += one.size
    most = sum(size for _, size in iterations.most_common(_ITERATIONS_AT_ONCE))
    last = max(map(scene.end_of, scene.spans(BACKWARD)), default=0)
    if _EARLIER * size_of(_before_the_last_backward(scene, parts)) > size_of(parts):
        return True
    forwards = sorted((scene.start_of(one), scene.end_of(one), one.label) for one in scene.spans(FORWARD))
    forwards = forwards[bisect_right(forwards, (last, 0, "")) :]
    of_models: dict[str, set[int]] = {}
    for one in parts:
        place = bisect_right(forwards, (one.born, scene.end + 1, "")) - 1
        if place >= 0 and one.born < forwards[place][1]:
            of_models.setdefault(forwards[place][2], set()).add(place)
    return 10 * most < 9 * size_of(parts) or any(len(places) > _FORWARDS_AT_ONCE for places in of_models.values())


def _is_all_data(scene: Scene, parts: Iterable[Allocation]) -> bool:
    """Whether most are batches that lie ready, made or moved one by one before they are used: of all of them there is as much,
    however small one is."""
    births, origins = scene.recording.logs[scene.device].births, scene.recording.logs[scene.device].origins
    ready: dict[object, list[Allocation]] = {}
    for one in parts:
        if scene.labels[one.index].category == "inputs" and origins.get(one.born) in ("host_copy", "factory"):
            ready.setdefault(births[one.born].shape if one.born in births else None, []).append(one)
    most = max(ready.values(), key=size_of, default=[])
    return len(most) > _FORWARDS_AT_ONCE and 2 * size_of(most) > size_of(parts)


def _before_the_last_backward(scene: Scene, parts: Iterable[Allocation]) -> list[Allocation]:
    """What was computed before the last backward that had ended by then: no part of the batch that is at work."""
    ended = [scene.start_of(one) for one in scene.spans(BACKWARD) if scene.end_of(one) <= scene.moment]
    start = max(ended, default=-1)
    return [one for one in parts if one.born < start and scene.labels[one.index].category != "inputs"]


def _where(birth: Birth | None) -> str:
    place = birth.place if birth is not None else None
    return f" in `{place.expression}`" if place is not None and place.expression else ""
