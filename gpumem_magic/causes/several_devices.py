"""Several devices at work: what one of them has to hold for all."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import quoted
from gpumem_magic.owners.model import size_of
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Timeline
from gpumem_magic.units import human

_PARALLEL = "torch.nn.parallel.data_parallel.DataParallel"
_LASTING = ("parameters", "buffers", "gradients", "optimizer_state")


def gathered(scene: Scene) -> Iterator[Cause]:
    """`DataParallel` gathers every device's results on one of them, where the loss is computed for all."""
    trails = (station for one in scene.held for station in one.trail)
    model = next((one.place for one in trails if _PARALLEL in one.bases), None)
    others = {
        index: Timeline(log.start, log.events, log.settings)
        for index, log in scene.recording.logs.items()
        if index != scene.device and log.events
    }
    if model is None or not others:
        return
    index, most = max(((index, one.peak(0, len(one))[0]) for index, one in others.items()), key=lambda pair: pair[1])
    lasting = size_of(scene.living_in(scene.peak, *_LASTING))
    more = scene.report.peak.allocated - lasting - most
    if more < scene.part_of_peak(5):
        return
    call = scene.program.using(model.partition(".")[0])
    at = f" ({call.words}, `{call.shown}`)" if call is not None else ""
    yield Cause(
        "gathered",
        f"{quoted(model)}, a `DataParallel`, gathers the outputs of all {len(others) + 1} devices on cuda:{scene.device}{at}, "
        f"where the loss is computed for the whole batch: at most {human(scene.report.peak.allocated)} there, {human(most)} on "
        f"cuda:{index}.",
        "Compute the loss inside `forward`, so that one number per device is gathered, or use `DistributedDataParallel`, "
        "which gathers nothing.",
        more,
    )
