"""The device itself: other processes on it, and free memory in pieces."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem_magic.allocator.verdict import FRAGMENTATION, FailedRequest
from gpumem_magic.causes.model import Scene
from gpumem_magic.report.failure import failed_request
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.model import INACTIVE
from gpumem_magic.units import MIB, human

_WORTH = 256 * MIB
_PIECES = 5


def fragmentation(scene: Scene) -> Iterator[Cause]:
    """An allocation failed that packed perfectly would have fitted; or much is cached in pieces between live blocks."""
    found, error = failed_request(scene.report), scene.report.error
    if found is not None and error is not None:
        if found.cause != FRAGMENTATION:
            return
        largest = f", the largest piece {human(error.largest_free)}" if error.largest_free is not None else ""
        yield Cause(
            "fragmentation",
            f"Fragmentation: {human(found.cached or 0)} were free{largest}, and {human(error.wanted or 0)} were wanted in "
            "one piece.",
            "PyTorch had already emptied its cache before it gave up, so calling `empty_cache()` there changes "
            f"nothing.{_settings(found)}",
            found.cached or 0,
        )
        return
    stuck = pieces = 0
    for segment in scene.timeline.segments_at(scene.end):
        free = sum(block.size for block in segment.blocks if block.state == INACTIVE)
        if 0 < free < segment.total_size:
            stuck += free
            pieces += 1
    reserved = scene.timeline.reserved_at(scene.end)
    # A large block, of which something small now uses a part, is no habit.
    if pieces < _PIECES or stuck < max(_WORTH, reserved // 4):
        return
    yield Cause(
        "fragmentation",
        f"{human(stuck)} of the {human(reserved)} reserved lies in free pieces between live tensors: emptying the "
        "cache does not release them.",
        "Delete the tensors in between, or set `expandable_segments:True` in PYTORCH_CUDA_ALLOC_CONF.",
        stuck,
    )


def _settings(found: FailedRequest) -> str:
    """The settings with which a replay of the recording passes, for as many more iterations as it could try."""
    trials = [one for one in found.trials if one.passes and one.rounds == found.rounds]
    if not trials:
        return ""
    confs = " or ".join(f"`PYTORCH_CUDA_ALLOC_CONF={one.conf}`" for one in trials)
    return (
        f" {confs} passes when the recording is replayed; `%gpumem_try {trials[0].conf}` runs the cell again with it."
    )


def another_process(scene: Scene) -> Iterator[Cause]:
    """Somebody else holds a good part of the device."""
    others = scene.report.peak.categories.get("other_processes")
    capacity = scene.report.device.capacity
    if others is None or not capacity or others < max(_WORTH, capacity // 20):
        return
    yield Cause(
        "another_process",
        f"Other processes hold {human(others)} of the device's {human(capacity)} ({100 * others // capacity} %).",
        "`nvidia-smi` names them; another notebook's kernel keeps its memory until it is shut down.",
        others,
    )
