"""What a training step itself costs: gradients that stay too long, the optimizer's states and its temporaries."""

from __future__ import annotations

from gpumem_magic.causes.model import LEAST, Cause, Scene, size
from gpumem_magic.recording.model import Span
from gpumem_magic.units import human


def late_zero_grad(scene: Scene) -> list[Cause]:
    """Gradients of one iteration that are there during the next one's forward, and are dropped before its backward."""
    backwards = [(scene.start_of(span), scene.end_of(span)) for span in scene.spans("backward")]
    worst: tuple[int, Span] | None = None
    for forward in scene.spans("forward"):
        begin, end = scene.start_of(forward), scene.end_of(forward)
        following = next((start for start, _ in backwards if start >= end), None)
        if following is None or not any(stop <= begin for _, stop in backwards):
            continue
        late = [
            one
            for one in scene.living_in(begin, "gradients")
            if one.freed is not None and end <= one.freed < following and one.born < begin
        ]
        if worst is None or size(late) > worst[0]:
            worst = size(late), forward
    if worst is None or worst[0] < max(LEAST, scene.report.peak.allocated // 20):
        return []
    return [
        Cause(
            "late_zero_grad",
            f"Gradients of the iteration before ({human(worst[0])}) were still there during forward: `zero_grad` came late.",
            "Call `optimizer.zero_grad()` before forward, or right after `optimizer.step()`.",
            worst[0],
        )
    ]


def optimizer_states(scene: Scene) -> list[Cause]:
    """The first step brings the optimizer's states, which stay."""
    for step in scene.spans("optimizer"):
        begin, end = scene.start_of(step), scene.end_of(step)
        new = [one for one in scene.living_in(end, "optimizer_state") if begin <= one.born < end]
        parameters = size(scene.living_in(end, "parameters"))
        if size(new) < max(LEAST, scene.report.peak.allocated // 10) or not parameters:
            continue
        times = round(size(new) / parameters)
        near = times >= 1 and _is_near(size(new), times * parameters)
        whole = f", {times} x the {human(parameters)} of the parameters" if near else ""
        return [
            Cause(
                "optimizer_states",
                f"The first step of {step.label} brought its states, which stay: {human(size(new))}{whole}.",
                "",
                size(new),
            )
        ]
    return []


def optimizer_temporaries(scene: Scene) -> list[Cause]:
    """The peak lies inside an optimizer's step, and a good part of it is what the step works with."""
    step = next(
        (one for one in scene.spans("optimizer") if scene.start_of(one) < scene.peak <= scene.end_of(one)), None
    )
    if step is None:
        return []
    used = [one for one in scene.living_in(scene.peak, "temporaries") if one.born >= scene.start_of(step)]
    if size(used) < max(LEAST, scene.report.peak.allocated // 10):
        return []
    one_by_one = "`foreach=False` works on one parameter at a time, and "
    if "foreach=False" in scene.typed:
        one_by_one = ""
    return [
        Cause(
            "optimizer_temporaries",
            f"The peak is inside the step of {step.label}: its temporaries take {human(size(used))} there, and are cached "
            "afterwards.",
            f"{one_by_one}`fused=True` works without temporaries.",
            size(used),
        )
    ]


def _is_near(one: int, other: int) -> bool:
    return abs(one - other) <= 0.02 * other
