"""Why memory was what it was, told from a snapshot file: the parts of a training step by its stacks and annotations."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from gpumem_magic.files.loaded import load
from gpumem_magic.report.model import ReportData

MIB = 1 << 20
OWN = ("/home/me/train.py", "main")
FORWARD = (("/env/site-packages/torch/nn/modules/module.py", "_call_impl"), OWN)
BACKWARD = (
    ("??", "torch::autograd::generated::MmBackward0::apply"),
    ("??", "torch::autograd::Engine::evaluate_function"),
)
ZEROED = (("/env/site-packages/torch/optim/optimizer.py", "zero_grad"), OWN)
INIT = (("/env/site-packages/torch/nn/modules/linear.py", "__init__"), OWN)


def step_of(function: str, file: str = "/env/site-packages/torch/optim/adam.py") -> tuple[tuple[str, str], ...]:
    return ((file, function), (file, "step"), OWN)


class Trace:
    """Events of a device that was empty, each allocation in a segment of its own."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.live: dict[str, tuple[int, int]] = {}

    def _event(self, action: str, place: tuple[int, int], stack: Any) -> None:
        frames = [{"filename": file, "name": name, "line": 1} for file, name in stack]
        self.events.append({"action": action, "addr": place[0], "size": place[1], "stream": 0, "frames": frames})

    def make(self, name: str, size: int, stack: Any) -> None:
        self.live[name] = (len(self.events) + 1) << 32, size * MIB
        self._event("segment_alloc", self.live[name], stack)
        self._event("alloc", self.live[name], stack)

    def drop(self, name: str, stack: Any) -> None:
        place = self.live.pop(name)
        for action in ("free_requested", "free_completed"):
            self._event(action, place, stack)

    def report(self, folder: Path) -> ReportData:
        path = folder / "run.pickle"
        data = {"segments": [], "device_traces": [self.events], "external_annotations": []}
        path.write_bytes(pickle.dumps(data, 4))
        return load(path)


def trained(step: Any, clears: str) -> Trace:
    """Two steps of training; `clears`: when gradients are let go of in the second, "early" or "late"."""
    trace = Trace()
    for number in range(2):
        trace.make(f"weight{number}", 40, INIT)
    for turn in range(2):
        if turn and clears == "early":
            for number in range(2):
                trace.drop(f"grad{number}", ZEROED)
        trace.make("activation", 200, FORWARD)
        trace.make("moment", 2, FORWARD)
        trace.drop("moment", FORWARD)
        if turn and clears == "late":
            for number in range(2):
                trace.drop(f"grad{number}", ZEROED)
        for number in range(2):
            trace.make(f"grad{number}", 40, BACKWARD)
            if not number:
                trace.drop("activation", (("??", "torch::autograd::SavedVariable::reset_data"),))
        if not turn:
            for number in range(4):
                trace.make(f"state{number}", 40, step)
        if step:
            trace.make("scratch", 300 if clears == "early" else 2, step)
            trace.drop("scratch", step)
    return trace


def names(report: ReportData) -> list[str]:
    return [one.name for one in report.causes]


def test_a_late_zero_grad_is_told_from_a_file(tmp_path: Path) -> None:
    report = trained(step_of("_multi_tensor_adam"), "late").report(tmp_path)
    assert "late_zero_grad" in names(report)
    assert "80.0 MiB" in report.causes[0].text
    assert "`zero_grad` was called late" in report.answer
    assert "optimizer_states" in names(report)


def test_gradients_that_are_let_go_of_before_forward_are_no_cause(tmp_path: Path) -> None:
    assert "late_zero_grad" not in names(trained(step_of("_multi_tensor_adam"), "early").report(tmp_path))


@pytest.mark.parametrize(
    ("function", "fused", "one_by_one"),
    [("_multi_tensor_adam", True, True), ("_multi_tensor_rmsprop", False, True), ("_single_tensor_adam", False, False)],
)
def test_a_steps_temporaries_have_the_remedies_that_this_optimizer_has(
    tmp_path: Path, function: str, fused: bool, one_by_one: bool
) -> None:
    report = trained(step_of(function), "early").report(tmp_path)
    found = next(one for one in report.causes if one.name == "optimizer_temporaries")
    assert "300 MiB" in found.text
    assert found.describes
    assert ("fused=True" in found.remedy, "foreach=False" in found.remedy) == (fused, one_by_one)


def test_a_file_without_training_has_no_cause(tmp_path: Path) -> None:
    trace = Trace()
    trace.make("weight", 40, INIT)
    trace.make("activation", 400, FORWARD)
    trace.drop("activation", FORWARD)
    assert names(trace.report(tmp_path)) == []
