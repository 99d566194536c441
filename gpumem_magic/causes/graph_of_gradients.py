"""Gradients with graphs of their own that nothing goes through: ``create_graph=True``, left on where nothing is trained."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from gpumem_magic.causes.model import WORTH, Scene
from gpumem_magic.causes.statements import last_name
from gpumem_magic.causes.written import Written
from gpumem_magic.looks.parsing import parsed
from gpumem_magic.owners.model import size_of
from gpumem_magic.recording.model import BACKWARD, OPTIMIZER
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human

_GOES_ON = re.compile(r"\.backward\(")
_SHARE = 2


def graph_of_gradients(scene: Scene) -> Iterator[Cause]:
    """``torch.autograd.grad(energy, positions, create_graph=True)`` in an evaluation."""
    calls = scene.program.calls("grad")
    asked = [one for one in calls if _makes_a_graph(one)]
    trains = bool(scene.spans(OPTIMIZER)) or bool(scene.living_in(scene.end, "gradients"))
    # (A second gradient may go through the first one's graph.)
    if len(calls) != 1 or not asked or trains or not scene.spans(BACKWARD) or scene.program.matches_any(_GOES_ON):
        return
    there = scene.living_in(scene.moment, "activations", "activation_gradients")
    if size_of(there) < max(WORTH, scene.part_of_peak(_SHARE)):
        return
    yield Cause(
        "graph_of_gradients",
        f"`{asked[0].shown}` ({asked[0].words}) makes a graph of the gradient's own computation, which no backward goes through: "
        f"{human(size_of(there))} at the peak with the graph before it.",
        "Without `create_graph=True`, which training alone needs (`create_graph=self.training`), each layer's part goes as it is "
        "used.",
        size_of(there),
    )


def _makes_a_graph(call: Written) -> bool:
    return any(
        isinstance(node, ast.Call)
        and last_name(node.func) == "grad"
        and any(one.arg == "create_graph" and ast.unparse(one.value) == "True" for one in node.keywords)
        for node in ast.walk(parsed(call.statement.strip()))
    )
