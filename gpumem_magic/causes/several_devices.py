"""Several devices at work: what one of them has to hold for all, and what each holds to share it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpumem_magic.allocator.verdict import CAPACITY, FRAGMENTATION
from gpumem_magic.attribution import sites
from gpumem_magic.attribution.categories import sharing_functions
from gpumem_magic.causes.model import Scene
from gpumem_magic.causes.places import quoted
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD
from gpumem_magic.report.failure import failed_request
from gpumem_magic.report.model import Cause
from gpumem_magic.snapshot.timeline import Allocation, Timeline
from gpumem_magic.units import counted, human

_PARALLEL = "torch.nn.parallel.data_parallel.DataParallel"
# Gradients beside buckets are told from one part in so many of theirs.
_SHARE = 2
# A program with this knows of the other devices.
_ELSEWHERE = re.compile(r"cuda:\d|device_ids|device_map|DataParallel|\.cuda\(\w|device_count|set_device")
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


def room_elsewhere(scene: Scene) -> Iterator[Cause]:
    """Memory ran out on one device, and another that the program could use has nothing on it."""
    found = failed_request(scene.report)
    if found is None or found.cause not in (CAPACITY, FRAGMENTATION) or scene.program.matches_any(_ELSEWHERE):
        return
    idle = [
        (index, log.facts.total_bytes)
        for index, log in scene.recording.logs.items()
        if index != scene.device and not log.events and not log.start and log.facts.total_bytes
    ]
    if not idle:
        return
    (index, room), more = idle[0], f" (and {counted(len(idle) - 1, 'other')})" if len(idle) > 1 else ""
    yield Cause(
        "room_elsewhere",
        f"cuda:{index}{more} is free, {human(room)}: `cuda` alone means cuda:{scene.device}.",
        f'A model and what goes into it can be there as a whole (`.to("cuda:{index}")`), or a part of its layers.',
        room,
        describes=True,
    )


def gradients_in_buckets(scene: Scene) -> Iterator[Cause]:
    """`DistributedDataParallel` sends gradients in buckets, made at its beginning, and again before the second iteration."""
    # (Those that an earlier cell made are known only once they have been made anew.)
    for moment in (scene.moment, *(scene.end_of(one) for one in scene.spans(BACKWARD))):
        near = 10 * scene.timeline.allocated_at(moment) >= 9 * scene.report.peak.allocated
        if moment == scene.moment or near:
            causes = list(_in_buckets(scene, moment))
            if causes:
                yield from causes
                return


def _in_buckets(scene: Scene, moment: int) -> Iterator[Cause]:
    gradients = scene.living_in(moment, "gradients")
    remade, first = [], []
    for one in gradients:
        maker = _maker(scene, one)
        if maker == sites.REMAKES_BUCKETS:
            remade.append(one)
        elif maker == sites.MAKES_BUCKETS or scene.labels[one.index].name == sites.OF_BUCKETS:
            # (What an earlier cell made is told by the name that it was given there.)
            first.append(one)
    of_one_set = size_of(remade or first)
    apart = size_of(gradients) - size_of(remade) - size_of(first)
    # Some are there without a bucket: those of another model, or of parameters that are in no bucket yet.
    if _SHARE * apart > of_one_set > 0:
        yield Cause(
            "gradients_in_buckets",
            f"`DistributedDataParallel` holds gradients twice: {human(of_one_set)} in the buckets that ranks exchange, and "
            f"{human(apart)} as the parameters' `.grad`.",
            "With `gradient_as_bucket_view=True` each `.grad` is a view of its bucket.",
            min(apart, of_one_set),
        )
    if remade and scene.is_large(size_of(first)):
        over = all(one.freed is not None for one in first)
        yield Cause(
            "buckets_made_anew",
            "Before the second iteration `DistributedDataParallel` makes its buckets of gradients anew "
            f"({human(size_of(remade))}), in the order in which gradients came, and NCCL keeps the first ones "
            f"({human(size_of(first))}) until one of the new is sent{': later iterations have one set' if over else ''}.",
            "",
            size_of(first),
            describes=True,
        )


def _maker(scene: Scene, one: Allocation) -> str:
    return next(iter(sharing_functions(scene.recording.logs[scene.device], one)), "")
