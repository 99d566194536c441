"""What is kept for backward, by module: of one run, and of an eager and a compiled one side by side. Numbers and strings only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.owners.tree import Layer
from gpumem_magic.recording.model import BACKWARD
from gpumem_magic.report.inside import OUTSIDE, LayerRow

_OWNED = ("parameters", "buffers")


@dataclass(frozen=True)
class KeptForBackward:
    """At the start of the first backward, in bytes as requested. activations: by the path of the module that made them, "" for
    none. given: by category and module, parameters and buffers of the models that ran, and inputs: what eager and compiled
    runs of one program share."""

    activations: Mapping[str, int]
    given: Mapping[tuple[str, str], int]


def kept_of(view: DeviceView) -> KeptForBackward | None:
    """None where no backward ran."""
    starts = [span.start.positions for span in view.recording.spans if span.kind == BACKWARD]
    position = min((one[view.device] for one in starts if view.device in one), default=None)
    if position is None:
        return None
    trace = view.recording.modules
    activations: Counter[str] = Counter()
    given: Counter[tuple[str, str]] = Counter()
    for one in view.timeline.live_at(position):
        category = view.labels[one.index].category
        if category == "activations":
            number = trace.of(view.device, one)
            activations["" if number is None else trace.names[number].path] += one.requested
        elif category in _OWNED:
            # (Others are not of the models that ran.)
            if (number := trace.parameters.get((view.device, one.address))) is not None:
                given[category, trace.names[number].path] += one.requested
        elif category == "inputs":
            given[category, ""] += one.requested
    return KeptForBackward(dict(activations), dict(given))


def side_by_side(eager: Mapping[str, int], compiled: Mapping[str, int]) -> LayerRow:
    """Both runs' activations by module: the eager run's as the tree's `activations`, the compiled one's as its `gradients`."""
    top = Layer("")
    for column, sizes in (("activations", eager), ("gradients", compiled)):
        for path, size in sizes.items():
            top.add(path.split(".") if path else [OUTSIDE], column, size)
    return _row(top)


def _row(layer: Layer) -> LayerRow:
    inner = tuple(map(_row, layer.inner.values()))
    return LayerRow(layer.name, "", layer.bytes["activations"], 0, layer.bytes["gradients"], inner)
