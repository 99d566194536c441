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
        frames = [{"filename": file, "name": name, "line": (*line, 1)[0]} for file, name, *line in stack]
        where = "device_free" if action == "oom" else "addr"
        self.events.append({"action": action, where: place[0], "size": place[1], "stream": 0, "frames": frames})

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


LOOP = "/home/me/loop.py"
LAYER = ("/env/site-packages/torch/nn/modules/module.py", "_call_impl", 1)


def turned(count: int, at: Any, kept: int, temporary: int = 4, blocks: int = 1) -> Trace:
    """A loop of a program's over lines 5 to 9; what line 7 makes stays (`blocks` in each turn), or goes where `kept` is 0.
    at: the frames inside of the loop's, of that line."""
    trace = Trace()
    main = (LOOP, "<module>", 30)
    for turn in range(count):
        trace.make("batch", temporary, ((LOOP, "run", 5), main))
        for block in range(blocks):
            trace.make(f"made{turn}.{block}", kept or 1, (*at, (LOOP, "run", 7), main))
        trace.make("sum", 1, ((LOOP, "run", 9), main))
        for name in ("sum", "batch"):
            trace.drop(name, ((LOOP, "run", 9), main))
        if not kept:
            for block in range(blocks):
                trace.drop(f"made{turn}.{block}", ((LOOP, "run", 9), main))
    return trace


def test_what_each_turn_of_a_loop_leaves_is_told_with_its_lines(tmp_path: Path) -> None:
    report = turned(12, (), 8).report(tmp_path)
    assert names(report) == ["growth"]
    said = report.answer
    assert said.startswith(
        "Each turn of the loop at loop.py:5-9 run leaves 8.0 MiB more allocated than the one before (12 turns): "
    )
    assert "made by loop.py:7 run. Something keeps it" in said
    assert names(turned(12, (), 0).report(tmp_path)) == []
    assert names(turned(4, (), 8).report(tmp_path)) == []


def test_a_graph_that_each_turn_leaves_is_to_be_detached(tmp_path: Path) -> None:
    layers = (("/home/me/net.py", "forward", 3), LAYER)
    report = turned(8, layers, 6, blocks=5).report(tmp_path)
    assert names(report) == ["growth"]
    assert "leaves 30.0 MiB more" in report.answer
    assert "`.detach()` it before it is kept" in report.answer


def test_layers_of_one_forward_are_no_turns_of_the_programs_loop(tmp_path: Path) -> None:
    trace = Trace()
    for layer in range(12):
        for line in (3, 5):
            stack = (("/home/me/net.py", "forward", line), LAYER, (LOOP, "<module>", 30))
            trace.make(f"{layer}.{line}", 8, stack)
    assert names(trace.report(tmp_path)) == []


def test_a_model_that_is_built_layer_by_layer_does_not_grow(tmp_path: Path) -> None:
    trace = Trace()
    for layer in range(12):
        for line in (3, 5):
            init = ("/env/site-packages/torch/nn/modules/linear.py", "__init__", 9)
            trace.make(f"{layer}.{line}", 8, (init, (LOOP, "net", line), (LOOP, "<module>", 30)))
    assert names(trace.report(tmp_path)) == []


def forwarded(error: bool = False, backward: bool = False) -> Trace:
    """A step of training, and then a forward through eight layers of which the program reads the end alone."""
    trace = trained((), "early")
    for layer in range(8):
        stack = (("/home/me/net.py", "forward", layer + 1), LAYER, (LOOP, "validate", 30))
        trace.make(f"layer{layer}", 200, stack)
    if backward:
        trace.make("of weights", 2, BACKWARD)
    if error:
        trace._event("oom", (1 << 20, 200 * MIB), (LAYER, (LOOP, "validate", 30)))
    for layer in range(8):
        trace.drop(f"layer{layer}", ((LOOP, "validate", 31),))
    trace.make("after", 2, ((LOOP, "validate", 40),))
    return trace


def test_what_a_forward_saves_for_nothing_is_told_from_a_file(tmp_path: Path) -> None:
    report = forwarded().report(tmp_path)
    assert names(report) == ["missing_no_grad"]
    assert report.answer.startswith(
        "1,600 MiB of the peak are activations that are let go together, and no backward comes"
    )
    assert names(forwarded(backward=True).report(tmp_path)) == []
    assert "missing_no_grad" not in names(forwarded(error=True).report(tmp_path))


def test_states_of_an_image_are_not_compared_with_the_models_parameters(tmp_path: Path) -> None:
    trace = trained(step_of("_multi_tensor_adam"), "early")
    assert "4 x" not in trace.report(tmp_path).answer
    other = Trace()
    other.make("weight", 2, INIT)
    other.make("activation", 20, FORWARD)
    other.make("grad", 2, BACKWARD)
    other.drop("activation", (("??", "torch::autograd::SavedVariable::reset_data"),))
    for number in range(2):
        other.make(f"state{number}", 60, step_of("_init_group"))
    (found,) = [one for one in other.report(tmp_path).causes if one.name == "optimizer_states"]
    assert found.text.endswith("allocated its states, which stay: 120 MiB.")


def of_loss(backward: bool = True) -> Trace:
    """A loss whose log-softmax, logits and their gradient are as large as each other."""
    trace = Trace()
    trace.make("weight", 40, INIT)
    trace.make("logits", 300, FORWARD)
    trace.make("logs", 300, (("/env/site-packages/torch/nn/functional.py", "cross_entropy", 3), (LOOP, "main", 8)))
    if backward:
        trace.make("slope", 300, BACKWARD)
        trace.make("weights", 40, BACKWARD)
    for name in ("logs", "logits", *(["slope"] if backward else [])):
        trace.drop(name, (("??", "torch::autograd::SavedVariable::reset_data"),))
    return trace


def test_a_loss_over_many_classes_is_told_by_its_function(tmp_path: Path) -> None:
    report = of_loss().report(tmp_path)
    assert names(report) == ["wide_loss"]
    assert (
        "The loss at loop.py:8 main makes a block of 300 MiB, and 3 blocks of that size are there at once, 900 MiB."
        in report.answer
    )
    assert names(of_loss(backward=False).report(tmp_path)) == []


def test_softmax_over_large_blocks_may_be_attentions(tmp_path: Path) -> None:
    trace = Trace()
    for layer in range(3):
        for step in range(2):
            stack = (
                ("??", "at::_ops::_softmax::call(at::Tensor const&)"),
                ("/home/me/net.py", "softmax", 7),
                LAYER,
                (LOOP, "main", 8),
            )
            trace.make(f"{layer}.{step}", 200, stack)
    (found,) = [one for one in trace.report(tmp_path).causes if one.name == "attention_scores"]
    assert found.text.endswith("makes blocks of 200 MiB, and 6 blocks of that size are there at once, 1,200 MiB.")
    assert found.remedy.startswith("Where these are attention's scores, ")


def layered(layers: int, checkpoints: bool = False) -> Trace:
    trace = Trace()
    trace.make("weight", 40, INIT)
    inner = (("/env/site-packages/torch/utils/checkpoint.py", "forward"),) if checkpoints else ()
    for layer in range(layers):
        for line, blocks in ((3, 2), (5, 1)):
            for block in range(blocks):
                stack = (("/home/me/net.py", "forward", line), LAYER, *inner, (LOOP, "main", 8))
                trace.make(f"{layer}.{line}.{block}", 20, stack)
    trace.make("weights", 40, BACKWARD)
    for name in [one for one in trace.live if one[0].isdigit()]:
        trace.drop(name, (("??", "torch::autograd::SavedVariable::reset_data"),))
    return trace


def test_layers_that_keep_much_for_backward_are_counted(tmp_path: Path) -> None:
    report = layered(8).report(tmp_path)
    assert names(report) == ["repeated_modules"]
    assert "8 layers that are alike keep 480 MiB for backward, 60.0 MiB each. Activation checkpointing" in report.answer
    assert names(layered(8, checkpoints=True).report(tmp_path)) == []
    assert names(layered(3).report(tmp_path)) == []


def test_an_outer_loop_that_begins_where_its_inner_one_does_is_told(tmp_path: Path) -> None:
    trace = Trace()
    for epoch in range(8):
        for _ in range(3):
            trace.make("batch", 4, ((LOOP, "fit", 8),))
            trace.make("loss", 1, ((LOOP, "fit", 9),))
            trace.drop("loss", ((LOOP, "fit", 9),))
            trace.drop("batch", ((LOOP, "fit", 9),))
        trace.make(f"copy{epoch}", 40, ((LOOP, "fit", 10),))
    said = trace.report(tmp_path).answer
    assert said.startswith(
        "Each turn of the loop at loop.py:8-10 fit leaves 40.0 MiB more allocated than the one before (8 turns)"
    )


def test_a_function_that_is_called_again_and_again_on_one_line_is_told(tmp_path: Path) -> None:
    trace = Trace()
    for turn in range(9):
        trace.make("batch", 4, ((LOOP, "<module>", 20),))
        trace.make(f"fake{turn}", 30, ((LOOP, "step", 7), (LOOP, "<module>", 20)))
        trace.make("sum", 1, ((LOOP, "step", 8), (LOOP, "<module>", 20)))
        trace.drop("sum", ((LOOP, "step", 8), (LOOP, "<module>", 20)))
        trace.drop("batch", ((LOOP, "<module>", 20),))
    said = trace.report(tmp_path).answer
    assert said.startswith(
        "Each call of step() at loop.py:20 leaves 30.0 MiB more allocated than the one before (9 calls): "
    )
    assert "such as a list that each call appends to" in said


def ahead(backward_in_each: bool = False) -> Trace:
    """Micro-batches of a step whose layers save for one backward behind them, or for one each."""
    trace = Trace()
    trace.make("weight", 8, INIT)
    for turn in range(8):
        trace.make(f"x{turn}", 2, ((LOOP, "train", 5),))
        for layer in range(4):
            trace.make(f"h{turn}.{layer}", 20, (("/home/me/net.py", "forward", layer), LAYER, (LOOP, "train", 6)))
        if backward_in_each or turn == 7:
            trace.make("slope", 2, BACKWARD)
            for name in [one for one in trace.live if one[0] == "h"]:
                trace.drop(name, (("??", "torch::autograd::SavedVariable::reset_data"),))
            trace.drop("slope", BACKWARD)
    return trace


def test_graphs_of_several_turns_before_one_backward_are_told(tmp_path: Path) -> None:
    report = ahead().report(tmp_path)
    assert "waiting_graphs" in names(report)
    assert "repeated_modules" not in names(report)
    assert "8 turns of the loop at loop.py:5-6 train come before one backward" in report.answer
    assert "waiting_graphs" not in names(ahead(backward_in_each=True).report(tmp_path))


def test_keys_and_values_that_a_result_keeps_are_no_graphs(tmp_path: Path) -> None:
    trace = Trace()
    for turn in range(8):
        trace.make("ids", 1, ((LOOP, "evaluate", 5),))
        for line in range(12):
            place = (("/home/me/net.py", "forward", line), LAYER, (LOOP, "evaluate", 6))
            trace.make(f"out{turn}.{line}", 20, place)
            if line > 2:
                trace.drop(f"out{turn}.{line}", place)
        trace.drop("ids", ((LOOP, "evaluate", 6),))
    said = trace.report(tmp_path).answer
    assert "leaves 60.0 MiB more" in said
    assert "`.detach()` it before" not in said


def test_a_models_copy_is_parameters(tmp_path: Path) -> None:
    trace = Trace()
    copied = (
        ("/env/site-packages/torch/nn/parameter.py", "__deepcopy__", 60),
        ("/usr/lib/python3.11/copy.py", "deepcopy", 153),
    )
    for number in range(3):
        trace.make(f"weight{number}", 40, INIT)
        trace.make(f"copy{number}", 40, (*copied, (LOOP, "main", 8)))
    assert trace.report(tmp_path).peak.categories["parameters"] == 240 * MIB


def test_what_backward_runs_beside_is_none_of_a_forwards_share(tmp_path: Path) -> None:
    """Each turn trains, and then keeps the graph of another forward."""
    trace = Trace()
    trace.make("weight", 8, INIT)
    for turn in range(8):
        trace.make("x", 2, ((LOOP, "run", 5),))
        for layer in range(4):
            trace.make(f"h{layer}", 6, (("/home/me/net.py", "forward", layer), LAYER, (LOOP, "run", 6)))
        for line in range(9):
            slope = ("/env/site-packages/torch/autograd/graph.py", "_engine_run_backward", line)
            trace.make("slope", 2, (slope, (LOOP, "run", 7)))
            trace.drop("slope", (slope, (LOOP, "run", 7)))
        for layer in range(4):
            trace.drop(f"h{layer}", (("??", "torch::autograd::SavedVariable::reset_data"),))
            trace.make(f"kept{turn}.{layer}", 6, (("/home/me/net.py", "forward", layer), LAYER, (LOOP, "run", 8)))
        trace.drop("x", ((LOOP, "run", 8),))
    said = trace.report(tmp_path).answer
    assert "leaves 24.0 MiB more" in said
    assert "`.detach()` it before it is kept" in said
