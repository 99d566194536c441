"""What every allocation is, how that is known, and that no byte is lost or counted twice."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
from causes_cells import notebook
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_fakes import FakeDevice, Tape

from gpumem_magic.attribution.categories import attribute, labels_to_carry
from gpumem_magic.attribution.ledger import (
    TENANT_CATEGORIES,
    Ledger,
    Outside,
    gaps,
)
from gpumem_magic.attribution.owners import lives_at, owners
from gpumem_magic.attribution.phase_map import PhaseMap, phases_on
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.devices.base import Counters, Label
from gpumem_magic.recording.model import KEPT_BY_GRAPH, Hold, Recording
from gpumem_magic.report.model import ALLOCATED_CATEGORIES, CATEGORIES
from gpumem_magic.snapshot.model import Frame
from gpumem_magic.snapshot.timeline import Timeline
from gpumem_magic.units import MIB


def labelled(recording: Recording) -> tuple[Timeline, list[Label]]:
    log = recording.logs[recording.primary]
    timeline = Timeline(log.start, log.events, log.settings)
    seen = recording.spans, recording.sightings, recording.checkpoints, recording.holds
    return timeline, attribute(log, timeline, *seen)


def label_of(recording: Recording, address: int) -> Label:
    """The label of the last allocation at an address."""
    timeline, labels = labelled(recording)
    return next(
        label
        for allocation, label in zip(reversed(timeline.allocations), reversed(labels), strict=True)
        if allocation.address == address
    )


# ---- identity


@pytest.mark.parametrize(
    ("role", "category"),
    [
        ("parameter", "parameters"),
        ("buffer", "buffers"),
        ("optimizer_state", "optimizer_state"),
        ("gradient", "gradients"),
    ],
)
def test_what_a_live_object_held_is_known_by_identity(role: str, category: str) -> None:
    tape = Tape()
    address = tape.device.alloc(5 * MIB, "host_copy")
    tape.see(address, role, "fc.weight")
    assert label_of(tape.finish(), address) == Label(category, "identity", "fc.weight")


def test_the_first_rule_wins() -> None:
    tape = Tape()
    with tape.span("backward"):
        address = tape.device.alloc(5 * MIB)
    for role in ("named", "gradient", "optimizer_state", "parameter"):
        tape.see(address, role, role)
    assert label_of(tape.finish(), address) == Label("parameters", "identity", "parameter")


def test_an_address_used_again_is_another_allocation() -> None:
    tape = Tape()
    first = tape.device.alloc(5 * MIB)
    tape.see(first, "parameter", "old.weight")
    tape.device.free(first)
    with tape.span("forward"):
        second = tape.device.alloc(5 * MIB)
    assert second == first
    _, labels = labelled(tape.finish())
    assert [label.category for label in labels] == ["parameters", "activations"]


def test_a_label_holds_for_the_whole_life() -> None:
    tape = Tape()
    address = tape.device.alloc(5 * MIB, "host_copy")
    tape.row("model.cuda()")
    before = tape.position
    tape.device.alloc(1024)
    tape.see(address, "parameter", "weight")
    timeline, labels = labelled(tape.finish())
    assert Ledger(timeline, labels).at([before])[before].requested["parameters"] == 5 * MIB


def test_a_look_at_freed_memory_names_nothing() -> None:
    tape = Tape()
    address = tape.device.alloc(5 * MIB)
    tape.device.free(address)
    tape.see(address, "parameter", "gone")
    _, labels = labelled(tape.finish())
    assert [label.category for label in labels] == ["temporaries"]


# ---- phases


def test_activations_outlive_their_forward_and_temporaries_do_not() -> None:
    tape = Tape()
    with tape.span("forward"):
        kept = tape.device.alloc(3 * MIB)
        gone = tape.device.alloc(7 * MIB)
        tape.device.free(gone)
    recording = tape.finish()
    assert label_of(recording, kept) == Label("activations", "lifetime", None)
    assert label_of(recording, gone) == Label("temporaries", "lifetime", None)


def test_what_is_born_in_backward_and_is_no_gradient() -> None:
    tape = Tape()
    with tape.span("backward"):
        inner = tape.device.alloc(3 * MIB)
        gradient = tape.device.alloc(7 * MIB)
        with tape.span("recomputation"):
            again = tape.device.alloc(11 * MIB)
            scratch = tape.device.alloc(13 * MIB)
            tape.device.free(scratch)
        tape.device.free(again)
        tape.device.free(inner)
    tape.see(gradient, "gradient", "weight")
    recording = tape.finish()
    assert label_of(recording, inner).category == "activation_gradients"
    assert label_of(recording, gradient).category == "gradients"
    assert label_of(recording, again).category == "activations"
    assert label_of(recording, scratch).category == "temporaries"


def test_what_backward_brings_back_from_the_host_are_activations() -> None:
    tape = Tape()
    with tape.span("backward"):
        saved = tape.device.alloc(3 * MIB, "host_copy")
        tape.device.free(saved)
    assert label_of(tape.finish(), saved) == Label("activations", "lifetime", None)


@pytest.mark.parametrize(
    ("forward", "category"),
    [
        ("with torch.autograd.graph.save_on_cpu():\n    loss = weight.sin().sum()", "activations"),
        # Here it is the gradient of what forward moved.
        ("loss = (weight * 2).cpu().sum()", "activation_gradients"),
    ],
)
def test_only_what_forward_saved_on_the_host_comes_back_as_activations(forward: str, category: str) -> None:
    with notebook("T4") as book:
        book.cell("weight = torch.ones(1 << 20, device='cuda', requires_grad=True)")
        report = book.measured(f"{forward}\nloss.backward()")
        assert [one.category for one in report.tensors() if one.operator == "to"] == [category]


def test_the_innermost_phase_counts() -> None:
    """LBFGS calls forward and backward inside its step."""
    tape = Tape()
    with tape.span("optimizer"):
        with tape.span("forward"):
            activation = tape.device.alloc(3 * MIB)
        with tape.span("backward"):
            inner = tape.device.alloc(5 * MIB)
        scratch = tape.device.alloc(7 * MIB)
        for address in (activation, inner, scratch):
            tape.device.free(address)
    recording = tape.finish()
    assert label_of(recording, activation).category == "activations"
    assert label_of(recording, inner).category == "activation_gradients"
    assert label_of(recording, scratch).category == "temporaries"


def test_a_failed_step_had_temporaries_in_hand() -> None:
    tape = Tape()
    tape.row(kind="before")
    with suppress(MemoryError), tape.span("optimizer"):
        scratch = tape.device.alloc(3 * MIB)
        failure = tape.moment()
        tape.device.free(scratch)
        raise MemoryError
    tape.row("step()", kind="error", at=failure)
    timeline, labels = labelled(tape.finish())
    assert labels == [Label("temporaries", "inferred")]
    assert lives_at(timeline.allocations[0], failure.positions[0])


def test_a_failed_forward_ends_at_the_failing_request() -> None:
    tape = Tape()
    with suppress(MemoryError), tape.span("forward"):
        activation = tape.device.alloc(3 * MIB)
        failure = tape.moment()
        tape.device.free(activation)
        raise MemoryError
    tape.row("model(x)", kind="error", at=failure)
    assert label_of(tape.finish(), activation).category == "activations"


# ---- between phases


def test_inputs() -> None:
    tape = Tape()
    argument = tape.device.alloc(3 * MIB, "compute")
    tape.see(argument, "input")
    named = tape.device.alloc(5 * MIB, "host_copy")
    zeros = tape.device.alloc(7 * MIB, "factory")
    tape.see(named, "named", "target")
    tape.see(zeros, "named", "hidden")
    local = tape.device.alloc(11 * MIB, "host_copy")
    with tape.span("forward"):
        pass
    tape.device.free(local)
    recording = tape.finish()
    assert label_of(recording, argument) == Label("inputs", "identity", None)
    assert label_of(recording, named) == Label("inputs", "identity", "target")
    assert label_of(recording, zeros) == Label("inputs", "identity", "hidden")
    assert label_of(recording, local) == Label("inputs", "lifetime", None)


def test_an_output_that_goes_into_another_module_is_no_input() -> None:
    tape = Tape()
    with tape.span("forward"):
        output = tape.device.alloc(3 * MIB)
    probabilities = tape.device.alloc(5 * MIB)
    for address in (output, probabilities):
        tape.see(address, "input")
    tape.see(probabilities, "named", "probabilities")
    recording = tape.finish()
    assert label_of(recording, output).category == "activations"
    assert label_of(recording, probabilities).category == "activations"


def test_what_is_computed_between_forward_and_backward() -> None:
    tape = Tape()
    with tape.span("forward"):
        pass
    loss = tape.device.alloc(512)
    scratch = tape.device.alloc(3 * MIB)
    tape.device.free(scratch)
    with tape.span("backward"):
        pass
    tape.device.free(loss)
    metric = tape.device.alloc(1024)
    tape.see(metric, "named", "accuracy")
    recording = tape.finish()
    assert label_of(recording, loss).category == "activations"
    assert label_of(recording, scratch) == Label("temporaries", "lifetime", None)
    assert label_of(recording, metric) == Label("activations", "identity", "accuracy")


def test_workspaces() -> None:
    tape = Tape()
    with tape.span("forward"):
        address = tape.device.alloc(8_519_680, "workspace")
    assert label_of(tape.finish(), address) == Label("workspace", "stack")


def test_a_real_devices_workspace_is_inferred_from_its_size() -> None:
    tape = Tape(FakeDevice(kind="cuda"))
    with tape.span("forward"):
        address = tape.device.alloc(8_519_680)
    assert label_of(tape.finish(), address) == Label("workspace", "inferred")


def test_weights_of_a_workspaces_size_hide_none() -> None:
    """VGG in 16 bits on an H100: weight, gradient and state of 4096 x 4096 are 32 MiB each, as cuBLAS's workspaces are."""
    tape = Tape(FakeDevice(kind="cuda"))
    for number in range(3):
        for role in ("parameter", "gradient", "optimizer_state"):
            tape.see(tape.device.alloc(32 * MIB), role, f"classifier.{number}.weight")
    with tape.span("forward"):
        workspace = tape.device.alloc(32 * MIB)
    assert label_of(tape.finish(), workspace) == Label("workspace", "inferred")


def test_each_stream_has_workspaces_of_its_own() -> None:
    device = FakeDevice(kind="cuda")
    workspaces = [device.alloc(32 * MIB, stream=stream) for stream in (0, 7, 8) for _ in range(2)]
    recording = Tape(device).finish()
    assert {label_of(recording, one) for one in workspaces} == {Label("workspace", "inferred")}


def test_what_a_graph_keeps_is_no_workspace_whatever_its_size() -> None:
    tape = Tape(FakeDevice(kind="cuda"))
    workspace, saved = tape.device.alloc(32 * MIB), tape.device.alloc(32 * MIB)
    held = Hold(0, tape.position, saved, KEPT_BY_GRAPH, "loss", "float32", (8 << 20,))
    recording = tape.finish(holds=(held,))
    assert label_of(recording, workspace) == Label("workspace", "inferred")
    assert label_of(recording, saved) == Label("activations", "identity")


def test_a_workspace_that_is_cleared_is_one_still() -> None:
    """Lightning has PyTorch give them back at the end of a training."""
    tape = Tape(FakeDevice(kind="cuda"))
    with tape.span("forward"):
        workspace, kept = tape.device.alloc(32 * MIB), tape.device.alloc(32 * MIB)
    with tape.span("workspaces go"):
        tape.device.free(workspace)
    tape.device.free(kept)
    recording = tape.finish()
    _, labels = labelled(recording)
    assert labels[:2] == [Label("workspace", "stack"), Label("activations", "lifetime")]


@pytest.mark.parametrize(
    ("size", "between", "category"),
    [
        (7 * MIB, False, "workspace"),
        # As large as what it is the gradient of: it was added to another in place.
        (5 * MIB, False, "activation_gradients"),
        # What is made of a gradient is asked for while that is there.
        (7 * MIB, True, "activation_gradients"),
    ],
)
def test_what_backwards_kernels_work_in_is_gone_before_anything_else_is_asked_for(
    size: int, between: bool, category: str
) -> None:
    tape = Tape(FakeDevice(kind="cuda"))
    with tape.span("forward"):
        tape.device.alloc(5 * MIB)
    with tape.span("backward"):
        scratch = tape.device.alloc(size)
        if between:
            tape.device.alloc(3 * MIB)
        tape.device.free(scratch)
    _, labels = labelled(tape.finish())
    assert labels[1].category == category


def test_what_a_convolution_works_in_is_known_by_the_place_that_asked() -> None:
    tape = Tape(FakeDevice(kind="cuda"))
    with tape.span("forward"):
        for file in ("/x/torch/nn/modules/conv.py", "/x/torch/nn/functional.py"):
            tape.device.allocator.stacks = lambda file=file: (Frame(file, "_conv_forward", 1),)
            tape.device.free(tape.device.alloc(7 * MIB))
    _, labels = labelled(tape.finish())
    assert labels == [Label("workspace", "stack"), Label("temporaries", "lifetime")]


def test_what_one_place_asks_for_in_one_size_is_of_one_kind() -> None:
    """The first backward's graph tells what it saved; later iterations have no such look."""
    tape = Tape(FakeDevice(kind="cuda"))
    tape.device.allocator.stacks = lambda: (Frame("/x/model.py", "forward", 7),)
    first = tape.device.alloc(4 * MIB)
    hold = Hold(0, tape.position, first, KEPT_BY_GRAPH, "backward of sin", "float32", (1024, 1024))
    tape.device.free(first)
    tape.device.alloc(4 * MIB)
    tape.device.alloc(2 * MIB)
    view = DeviceView(tape.finish(holds=(hold,)), 0)
    facts = [view.tensors.facts(one) for one in view.timeline.allocations]
    assert [(one.shape, one.dtype) for one in facts] == [*[((1024, 1024), "float32")] * 2, (None, "")]


def test_a_workspace_is_no_lines_own() -> None:
    tape = Tape(FakeDevice(kind="cuda"))
    tape.device.allocator.stacks = lambda: (Frame("/x/model.py", "forward", 7),)
    tape.device.alloc(32 * MIB)
    tape.device.alloc(4 * MIB)
    view = DeviceView(tape.finish(), 0)
    assert [view.tensors.facts(one).inner for one in view.timeline.allocations] == ["", "model.py:7 forward"]


def test_a_real_device_has_no_origins_so_phases_must_do() -> None:
    tape = Tape(FakeDevice(kind="cuda"))
    batch = tape.device.alloc(3 * MIB)
    tape.see(batch, "named", "batch")
    with tape.span("forward"):
        pass
    loss = tape.device.alloc(512)
    tape.see(loss, "output", "loss")
    recording = tape.finish()
    assert label_of(recording, batch) == Label("inputs", "inferred", "batch")
    assert label_of(recording, loss) == Label("activations", "identity", "loss")


# ---- what was there at the start


def test_what_was_there_is_unknown_unless_carried_or_seen() -> None:
    device = FakeDevice()
    unknown, carried, seen, named = (device.alloc(size * MIB) for size in (3, 5, 7, 11))
    device.remember({carried: Label("activations", "lifetime", "out"), seen: Label("inputs", "identity")})
    tape = Tape(device)
    tape.see(seen, "parameter", "weight")
    tape.see(named, "named", "x")
    recording = tape.finish()
    assert label_of(recording, unknown) == Label("unknown", "unknown")
    assert label_of(recording, carried) == Label("activations", "lifetime", "out")
    assert label_of(recording, seen) == Label("parameters", "identity", "weight")
    assert label_of(recording, named) == Label("inputs", "inferred", "x")


def test_a_workspace_from_before_is_inferred_from_its_size() -> None:
    device = FakeDevice(kind="cuda")
    workspace, held = device.alloc(8_519_680), device.alloc(8_519_680)
    tape = Tape(device)
    tape.see(held, "named", "x")
    recording = tape.finish()
    assert label_of(recording, workspace) == Label("workspace", "inferred")
    assert label_of(recording, held) == Label("inputs", "inferred", "x")


def test_cublaslts_workspace_is_what_stays_beside_cublass_and_nobody_holds() -> None:
    """PyTorch 2.11 on an H100: 32 MiB and 1 MiB at the first product with a bias, 32 MiB more for backward's thread."""
    tape = Tape(FakeDevice(kind="cuda"))
    with tape.span("forward"):
        cublas, cublaslt = tape.device.alloc(32 * MIB), tape.device.alloc(MIB)
        saved, gone = tape.device.alloc(MIB), tape.device.alloc(MIB)
    held = Hold(0, tape.position, saved, KEPT_BY_GRAPH, "loss", "float32", (1 << 18,))
    tape.device.free(gone)
    tape.device.alloc(32 * MIB)
    recording = tape.finish(holds=(held,))
    assert label_of(recording, cublas) == label_of(recording, cublaslt) == Label("workspace", "inferred")
    assert label_of(recording, saved).category == "activations"


def test_more_of_its_size_than_of_cublass_are_tensors() -> None:
    tape = Tape(FakeDevice(kind="cuda"))
    with tape.span("forward"):
        tape.device.alloc(32 * MIB)
        tensors = [tape.device.alloc(MIB) for _ in range(2)]
    recording = tape.finish()
    assert {label_of(recording, one).category for one in tensors} == {"activations"}


@pytest.mark.parametrize(("kind", "count"), [("cuda", 5), ("virtual", 1)])
def test_tensors_of_a_workspaces_size_are_none(kind: str, count: int) -> None:
    """There are few workspaces, and a virtual device knows its own."""
    device = FakeDevice(kind=kind)
    tensors = [device.alloc(32 << 20) for _ in range(count)]
    recording = Tape(device).finish()
    assert {label_of(recording, one) for one in tensors} == {Label("unknown", "unknown")}


def test_labels_go_from_one_recording_to_the_next() -> None:
    device = FakeDevice()
    tape = Tape(device)
    with tape.span("forward"):
        kept, gone = device.alloc(3 * MIB), device.alloc(5 * MIB)
    device.free(gone)
    nobody = device.alloc(7 * MIB)
    timeline, labels = labelled(tape.finish())
    carried = labels_to_carry(timeline, labels)
    assert set(carried) == {kept}, nobody
    device.remember(carried)
    assert label_of(Tape(device).finish(), kept).category == "activations"


# ---- conservation


def test_a_gap_is_named() -> None:
    tape = Tape()
    tape.device.alloc(3 * MIB)
    timeline, labels = labelled(tape.finish())
    counters = tape.device.counters()
    (balance,) = Ledger(timeline, labels).at([len(timeline)]).values()
    categories = balance.categories(Outside.of(counters))
    assert gaps(categories, counters) == []
    short = {**categories, "unknown": (categories["unknown"] or 0) - 512}
    allocated, _reserved, _device = gaps(short, counters)
    assert re.match(r"allocated: .*-512 bytes", allocated)


def test_the_categories_are_those_of_the_report() -> None:
    assert (*TENANT_CATEGORIES, "rounding") == ALLOCATED_CATEGORIES
    tape = Tape()
    timeline, labels = labelled(tape.finish())
    assert tuple(Ledger(timeline, labels).at([0])[0].categories(Outside())) == CATEGORIES


def test_what_is_unavailable_stays_unavailable() -> None:
    assert Outside().device_used(5) is None
    assert Outside(context=1).device_used(5) is None
    assert Outside(context_or_others=2).device_used(5) == 7
    assert Outside(context=1, other_processes=0).device_used(5) == 6


def test_a_ledger_refuses_a_label_that_it_does_not_know() -> None:
    tape = Tape()
    tape.device.alloc(512)
    timeline, _ = labelled(tape.finish())
    with pytest.raises(ValueError, match="not a label"):
        Ledger(timeline, [Label("magic", "identity")])


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("alloc"),
            st.integers(1, 30 * MIB),
            st.sampled_from([None, "host_copy", "factory", "workspace", "compute"]),
        ),
        st.tuples(st.just("free"), st.integers(0, 50), st.none()),
        st.tuples(st.just("open"), st.integers(0, 3), st.none()),
        st.tuples(st.just("close"), st.booleans(), st.none()),
        st.tuples(
            st.just("see"),
            st.integers(0, 50),
            st.sampled_from(["parameter", "buffer", "gradient", "optimizer_state", "input", "named", "output"]),
        ),
        st.tuples(st.just("empty_cache"), st.none(), st.none()),
    ),
    max_size=40,
)
KINDS = ("forward", "backward", "optimizer", "recomputation")


def play(tape: Tape, steps: list, live: dict[int, int]) -> list[tuple[int, Counters, int]]:
    """Plays a program; returns after each step (position, counters, live requested bytes). `live`: address -> bytes."""
    open_spans = []
    truth = []
    for action, amount, word in steps:
        addresses = list(live)
        if action == "alloc":
            live[tape.device.alloc(amount, word)] = amount
        elif action == "free" and live:
            address = addresses[amount % len(live)]
            del live[address]
            tape.device.free(address)
        elif action == "open":
            span = tape.span(KINDS[amount])
            span.__enter__()
            open_spans.append(span)
        elif action == "close" and open_spans:
            open_spans.pop().__exit__(MemoryError if amount else None, None, None)
        elif action == "see" and live:
            tape.see(addresses[amount % len(live)], word, f"name {amount}")
        elif action == "empty_cache":
            tape.device.allocator.empty_cache()
        truth.append((tape.position, tape.device.counters(), sum(live.values())))
    while open_spans:
        open_spans.pop().__exit__(None, None, None)
    return truth


@settings(max_examples=60, deadline=None)
@given(STEPS, st.lists(st.integers(1, 30 * MIB), max_size=3))
def test_every_byte_is_accounted_for_at_every_position(steps: list, old: list[int]) -> None:
    device = FakeDevice()
    live = {device.alloc(size): size for size in old}
    tape = Tape(device)
    truth = play(tape, steps, live)
    timeline, labels = labelled(tape.finish())
    balances = Ledger(timeline, labels).at(range(len(timeline) + 1))
    for position, counters, requested in truth:
        assert gaps(balances[position].categories(Outside.of(counters)), counters) == []
        assert sum(balances[position].requested.values()) == requested
    for position, balance in balances.items():
        assert balance.allocated == timeline.allocated_at(position)
        assert sum(balance.requested.values()) == timeline.requested_at(position)
        assert sum(balance.evidence.values()) == balance.allocated - balance.rounding
        assert min(balance.requested.values()) >= 0
        assert balance.rounding >= 0


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_labels_keep_the_rules_whatever_happens(steps: list) -> None:
    tape = Tape()
    play(tape, steps, {})
    recording = tape.finish()
    timeline, labels = labelled(recording)
    held = owners(timeline.allocations, recording.sightings)
    phases = PhaseMap(phases_on(0, recording.spans))
    for allocation, label in zip(timeline.allocations, labels, strict=True):
        roles = held.get(allocation.index, {})
        if "parameter" in roles:
            assert label.category == "parameters"
        if label.category in ("parameters", "buffers", "gradients", "optimizer_state"):
            assert label.evidence == "identity"
            assert roles
        phase = phases.at_event(allocation.born)
        if label.category == "activation_gradients":
            assert phase is not None
            assert phase.kind == "backward"
        if label.category == "unknown":
            assert label.evidence == "unknown"
            assert allocation.freed is None or phase is not None


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_the_innermost_phase_is_the_one_that_a_plain_search_finds(steps: list) -> None:
    tape = Tape()
    play(tape, steps, {})
    spans = tape.finish().spans
    phases = phases_on(0, spans)
    map_ = PhaseMap(phases)
    for event in range(tape.position):
        around = [phase for phase in phases if phase.start <= event < phase.end]
        assert map_.at_event(event) == max(around, key=lambda phase: phase.order, default=None)
        later = [phase.start for phase in phases if phase.start > event]
        assert map_.next_start(event) == min(later, default=None)


def test_what_a_loss_keeps_of_its_shares_is_no_input() -> None:
    """`mse_loss` makes its result in the input's size and shrinks it: the memory stays (``Loss.cpp``). The first loss of all, of
    which no backward is known yet, too, as on a real GPU."""
    with notebook("H100,torch=2.11") as book:
        book.cell("model = torch.nn.Linear(1024, 1024).cuda()\nx = torch.randn(2048, 1024, device='cuda')")
        report = book.measured("loss = torch.nn.functional.mse_loss(model(x), x)\nloss.backward()")
    rows = {row.line: row.categories for row in report.checkpoints if row.kind == "statement"}
    # The model's output goes with the backward.
    assert [(rows[line]["inputs"], rows[line]["activations"]) for line in (2, 3)] == [
        (8 * MIB, 16 * MIB),
        (8 * MIB, 8 * MIB),
    ]


def test_what_a_module_makes_of_its_tensors_are_parameters_though_no_look_saw_it() -> None:
    """Of a function's own model, which is gone when the function ends. What a program calls `_apply` itself is something else."""
    tape = Tape(FakeDevice(kind="cuda"))
    for file in ("/x/torch/nn/modules/module.py", "/x/model.py"):
        tape.device.allocator.stacks = lambda file=file: (Frame(file, "_apply", 1), Frame("/x/model.py", "load", 7))
        tape.device.free(tape.device.alloc(7 * MIB))
    _, labels = labelled(tape.finish())
    assert labels == [Label("parameters", "stack"), Label("temporaries", "lifetime")]
    with notebook("H100,torch=2.11") as book:
        book.cell(
            "def load():\n"
            "    layers = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024)).to('cuda')\n"
            "    return torch.randn(1024, 1024, device='cuda').mul(2).sum()"
        )
        report = book.measured("load()")
    # (How the small biases came to be is not kept.)
    assert report.peak.categories["parameters"] == 2 * 4 * MIB
    assert report.peak.categories["temporaries"] == 2 * (4 * MIB + 4096)
