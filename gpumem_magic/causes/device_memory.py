"""The device itself: other processes on it, and free memory in pieces."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from math import prod

from gpumem_magic.allocator.verdict import FRAGMENTATION, LIMIT, FailedRequest
from gpumem_magic.causes.model import Scene
from gpumem_magic.devices.base import Birth
from gpumem_magic.recording.model import FORWARD
from gpumem_magic.report.failure import failed_request
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.model import INACTIVE
from gpumem_magic.units import MIB, human

_WORTH = 256 * MIB
_PIECES = 5
_CAPTURES = re.compile(r"cuda\.graph\s*\(|CUDAGraph|accelerator\.Graph|make_graphed_callables")
_LIMITS = re.compile(r"\bset_per_process_memory_fraction\(")
# The pool that everybody shares.
_COMMON = (0, 0)
# A place whose tensors had so many different sizes.
_SIZES = 4


# So many streams are more than one for copies and one for work.
_STREAMS = 3

# More of them are told nobody: one is enough.
_MOST_SETTINGS = 2


def fragmentation(scene: Scene) -> Iterator[Cause]:
    """An allocation failed that packed perfectly would have fitted; or much is cached in pieces between live blocks."""
    found, error = failed_request(scene.report), scene.report.error
    if found is not None and error is not None:
        if found.cause != FRAGMENTATION:
            return
        largest = f" (largest piece {human(error.largest_free)})" if error.largest_free is not None else ""
        there = f" and {human(found.free)} free on the device" if found.free else ""
        yield Cause(
            "fragmentation",
            f"Fragmentation: {human(found.cached or 0)} were cached and free{largest}{there}, and {human(error.wanted or 0)} "
            "were wanted in one piece.",
            "PyTorch had already emptied its cache before it gave up, so calling `empty_cache()` there changes "
            f"nothing.{_settings(found, error.wanted or 0)}",
            found.cached or 0,
            describes=is_in_a_first_forward(scene) and (found.spare or 0) < (error.wanted or 0),
        )
        return
    if error is not None and error.requested is None:
        # It failed for another reason.
        return
    stuck = pieces = 0
    for segment in scene.timeline.segments_at(scene.end):
        if segment.segment_pool_id != _COMMON:
            # A graph's own, which no other request may have.
            continue
        free = sum(block.size for block in segment.blocks if block.state == INACTIVE)
        if 0 < free < segment.total_size:
            stuck += free
            pieces += 1
    reserved = scene.timeline.reserved_at(scene.end)
    # A large block, of which something small now uses a part, is no habit.
    if pieces < _PIECES or stuck < max(_WORTH, reserved // 4) or not _is_pressed(scene, reserved):
        return
    yield Cause(
        "fragmentation",
        f"{human(stuck)} of the {human(reserved)} reserved lies in free pieces between live tensors: emptying the "
        "cache does not release them.",
        "Delete the tensors in between, or set `expandable_segments:True` in PYTORCH_CUDA_ALLOC_CONF.",
        stuck,
    )


def is_in_a_first_forward(scene: Scene) -> bool:
    """Whether the request that failed was of the first forward that a model ran here: the next layer's will be as large."""
    forwards = scene.spans(FORWARD)
    last = next((one for one in reversed(forwards) if one.failed), None)
    return last is not None and sum(one.label == last.label for one in forwards) == 1


def limited(scene: Scene) -> Iterator[Cause]:
    """A request failed at a limit that the program has set for itself (`set_per_process_memory_fraction`)."""
    found = failed_request(scene.report)
    if found is None or found.cause != LIMIT or not found.free:
        return
    call = scene.program.stating(_LIMITS)
    by = f"`{call.shown}` ({call.words}) lets this process" if call is not None else "this process may"
    room = f"reserve only {human(found.limit)}" if found.limit is not None else "reserve no more"
    yield Cause(
        LIMIT,
        f"A limit was reached, not the device's end, which has {human(found.free)} free: {by} {room}.",
        "`torch.cuda.set_per_process_memory_fraction(1.0)` lifts it.",
        found.free,
    )


def _is_pressed(scene: Scene, reserved: int) -> bool:
    """Whether the device came, or may come, to its end: else room that lies in pieces costs nobody anything."""
    failed = bool(scene.report.retries) or scene.report.error is not None
    return failed or 2 * reserved >= (scene.report.device.capacity or 0)


def _settings(found: FailedRequest, wanted: int) -> str:
    """The settings with which a replay of the recording passes, and whether later iterations are known to pass, too."""
    if not found.helpful:
        return ""
    confs = " or ".join(f"`PYTORCH_CUDA_ALLOC_CONF={conf}`" for conf in found.helpful[:_MOST_SETTINGS])
    passes = f"{confs} passes when the recording is replayed"
    if not found.lasting:
        one_more = "; a second one of its size does not fit beside it" if (found.spare or 0) < wanted else ""
        passes = f"With {confs} this request passes{one_more}"
    return f" {passes}; `%gpumem_try {found.helpful[0]}` runs the cell again with it."


def varying_sizes(scene: Scene) -> Iterator[Cause]:
    """Each iteration's tensors are of another size, so that what is cached for one does not fit the next."""
    reserved = max((row.peak_reserved for row in scene.report.checkpoints), default=0)
    wasted = reserved - scene.report.peak.allocated
    if not _is_pressed(scene, reserved) or wasted < max(_WORTH, scene.report.peak.allocated // 2):
        return
    ends = [one.end for one in scene.iterations]
    largest: dict[object, dict[int, tuple[int, Birth]]] = {}
    for event, birth in scene.recording.logs[scene.device].births.items():
        if birth.place is None or birth.node or not birth.shape:
            continue
        its, size = largest.setdefault((birth.place, birth.kernel), {}), prod(birth.shape)
        number = bisect_right(ends, event)
        if number not in its or its[number][0] < size:
            its[number] = size, birth
    made = [list(its.values()) for its in largest.values() if len({size for size, _ in its.values()}) >= _SIZES]
    if not made:
        return
    most = max(made, key=lambda its: max(size for size, _ in its))
    sizes = [size for size, _ in most]
    births = [min(most, key=lambda pair: pair[0])[1], max(most, key=lambda pair: pair[0])[1]]
    place = births[0].place
    own = place is not None and place.own_file == scene.recording.own_file
    at = f" (line {place.own_line})" if own and place is not None else ""
    what = f"`{place.expression or place.text}`" if place is not None else "One line"
    shapes = " to ".join(f"({', '.join(map(str, one.shape or ()))})" for one in births)
    grows = "longer" if sizes == sorted(sizes) else "different"
    yield Cause(
        "varying_sizes",
        f"{what}{at} makes tensors of {grows} lengths in each iteration ({shapes}), and the blocks cached for one don't fit the "
        f"next: {human(reserved)} were reserved for at most {human(scene.report.peak.allocated)} allocated (fragmentation).",
        "The longest batch first, lengths padded to a few sizes, or `expandable_segments:True` in PYTORCH_CUDA_ALLOC_CONF.",
        wasted,
    )


def private_pools(scene: Scene) -> Iterator[Cause]:
    """Several CUDA graphs, each with a memory pool of its own, from which nobody else gets anything."""
    pools: Counter[tuple[int, int]] = Counter()
    free = 0
    for segment in scene.timeline.segments_at(scene.end):
        if segment.segment_pool_id != _COMMON:
            pools[segment.segment_pool_id] += segment.total_size
            free += sum(block.size for block in segment.blocks if block.state == INACTIVE)
    saved = sum(pools.values()) - max(pools.values(), default=0)
    if len(pools) < 2 or saved < scene.part_of_peak(5):
        return
    if not _CAPTURES.search(scene.typed):
        # Pools of another kind.
        return
    yield Cause(
        "private_pools",
        f"{len(pools)} CUDA graphs have a private memory pool each, {human(sum(pools.values()))} in all, of "
        f"which {human(free)} are free pieces that no other tensor may use.",
        "`torch.cuda.graph(graph, pool=first.pool())` shares the first one's pool, largest capture first, where the graphs are "
        "replayed in the order of their capture.",
        saved,
    )


def other_streams(scene: Scene) -> Iterator[Cause]:
    """Blocks that were cached for streams of the program's own, of which each has another: no other stream gets them."""
    cached: Counter[int] = Counter()
    for segment in scene.timeline.segments_at(scene.end):
        if segment.segment_pool_id == _COMMON and segment.stream:
            cached[segment.stream] += sum(block.size for block in segment.blocks if block.state == INACTIVE)
    cached = +cached
    saved = sum(cached.values()) - max(cached.values(), default=0)
    made = next((one for name in ("Stream", "ExternalStream") for one in scene.program.calls(name)), None)
    if made is None or len(cached) < _STREAMS or saved < max(_WORTH, scene.timeline.reserved_at(scene.end) // 4):
        return
    yield Cause(
        "other_streams",
        f"{human(sum(cached.values()))} of the {human(scene.timeline.reserved_at(scene.end))} reserved are cached for "
        f"{len(cached)} streams of the program's own (`{made.shown}`, {made.words}): a cached block is only used again on the "
        "stream that it was made on.",
        "One stream that is made before the loop uses its own blocks again.",
        saved,
    )


def another_process(scene: Scene) -> Iterator[Cause]:
    """Somebody else holds a third of the device, or less where it came to its end: the report has the figure in any case."""
    report = scene.report
    others, capacity = report.peak.categories.get("other_processes"), report.device.capacity
    if others is None or not capacity or others < max(_WORTH, capacity // 20):
        return
    came_to_its_end = failed_request(report) is not None or bool(report.retries)
    nearly = (report.peak.device_used or 0) >= capacity - capacity // 10
    if 3 * others < capacity and not came_to_its_end and not nearly:
        return
    yield Cause(
        "another_process",
        f"Other processes hold {human(others)} of the device's {human(capacity)} ({100 * others // capacity} %).",
        "`nvidia-smi` names them; another notebook's kernel keeps its memory until it is shut down.",
        others,
    )
