"""The causes whose evidence is in a snapshot file: no object and no text of the program is needed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.causes import forwards_by_stacks, growth_by_stacks, layers_by_stacks, softmax_by_stacks, training
from gpumem_magic.causes.model import Detector, Scene, answers_of
from gpumem_magic.recording.model import BACKWARD, OPTIMIZER, Moment, Span
from gpumem_magic.report.answer import answer_of
from gpumem_magic.report.model import ReportData

DETECTORS: tuple[Detector, ...] = (
    growth_by_stacks.growth,
    growth_by_stacks.graphs_ahead,
    forwards_by_stacks.without_backward,
    softmax_by_stacks.loss_by_stacks,
    softmax_by_stacks.scores_by_stacks,
    layers_by_stacks.layers_by_stacks,
    training.late_zero_grad,
    training.optimizer_states,
    training.optimizer_temporaries,
)
# What `torch.optim.Optimizer` calls its steps in a profiler's annotations.
_STEP = re.compile(r"Optimizer\.step#(.+)\.step")


def explained(report: ReportData, view: DeviceView, annotated: Iterable[tuple[str, int, int]]) -> ReportData:
    """The report with its causes, before its notes. annotated: names and positions of the program's ranges."""
    recording = replace(view.recording, spans=tuple(_phases(view, annotated)))
    scene = Scene(recording, view.device, view.timeline, view.labels, report)
    causes, failures = answers_of(DETECTORS, scene)
    causes = [one for one in causes if one.describes or scene.is_large(one.bytes)]
    causes.sort(key=lambda one: (one.describes, -one.bytes))
    report = replace(report, remarks=(*causes, *report.remarks, *failures))
    return replace(report, answer=answer_of(report))


def _phases(view: DeviceView, annotated: Iterable[tuple[str, int, int]]) -> Iterator[Span]:
    """Forwards, backwards and steps of optimizers: by annotations, or else by stacks."""

    def span(kind: str, label: str, begin: int, end: int) -> Span:
        return Span(kind, label, Moment({view.device: begin}, {}), Moment({view.device: end}, {}))

    if any(one.born < 0 and view.labels[one.index].category == "gradients" for one in view.timeline.allocations):
        yield span(BACKWARD, "before the recording", 0, 0)
    steps = sorted((begin, end, found[1]) for name, begin, end in annotated if (found := _STEP.fullmatch(name)))
    for begin, end, name in steps:
        yield span(OPTIMIZER, name, begin, end)
    for kind, begin, end in view.attribution.stretches:
        if kind != OPTIMIZER or not any(start <= begin and end <= stop for start, stop, _ in steps):
            yield span(kind, "the optimizer" if kind == OPTIMIZER else kind, begin, end)
