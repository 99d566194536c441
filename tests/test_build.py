"""From a recording to a report: rows, parts, peaks, folding, notes; and the figures always add up."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_fakes import CONTEXT, IDLE, FakeDevice, Tape
from test_attribution import STEPS, play

from gpumem_magic.devices.base import Counters, Label
from gpumem_magic.recording.model import Failure, StandIn
from gpumem_magic.report.build import build, build_with_labels
from gpumem_magic.report.folding import LoopIteration, LoopRow, fold_rows, shown_iterations
from gpumem_magic.report.model import ALLOCATED_CATEGORIES, Folded, ReportData, Row, Skipped
from gpumem_magic.units import GIB, MIB
from gpumem_magic.user_report import Report


def adds_up(row: Row) -> None:
    sizes = {name: size or 0 for name, size in row.categories.items()}
    assert sum(sizes[name] for name in ALLOCATED_CATEGORIES) == row.allocated
    assert row.allocated + sizes["cached"] == row.reserved
    if row.device_used is not None:
        outside = sizes["context"] + sizes["other_processes"] + sizes["context_or_others"]
        assert row.reserved + outside == row.device_used
    assert row.peak_allocated >= row.allocated
    assert row.peak_reserved >= row.reserved
    for part in row.parts:
        adds_up(part)
        assert part.peak_allocated <= row.peak_allocated


def labels(row: Row) -> list:
    """The parts as nested lists: a label, followed by the list of its parts where it has any."""
    found: list = []
    for part in row.parts:
        found.append(part.label)
        if part.parts:
            found.append(labels(part))
    return found


def step(tape: Tape, size: int = 3 * MIB) -> None:
    """Forward, backward and optimizer step, each with something passing in it."""
    with tape.span("forward", "model"):
        kept = tape.device.alloc(size)
    with tape.span("backward", "backward"):
        tape.device.free(tape.device.alloc(2 * size))
        tape.device.free(kept)
    with tape.span("optimizer", "Adam"):
        tape.device.free(tape.device.alloc(512))


def test_rows_show_the_state_after_and_the_peak_inside() -> None:
    tape = Tape()
    tape.row(kind="before")
    kept = tape.device.alloc(5 * MIB)
    tape.device.free(tape.device.alloc(30 * MIB))
    tape.see(kept, "parameter", "weight")
    tape.row("model.cuda()", 2)
    tape.row("pass", 3)
    tape.row(kind="after")
    report = build(tape.finish())
    before, first, second, after = report.checkpoints
    assert (before.allocated, first.allocated, after.allocated) == (0, 5 * MIB, 5 * MIB)
    assert first.peak_allocated == 35 * MIB
    assert second.peak_allocated == 5 * MIB
    assert first.categories["parameters"] == 5 * MIB
    assert before.device_used == IDLE
    assert first.device_used == first.reserved + CONTEXT + IDLE
    assert report.peak.allocated == report.peak.peak_allocated == 35 * MIB
    assert report.peak.where == "`model.cuda()`, line 2"
    assert report.peak.categories["temporaries"] == 30 * MIB
    assert report.evidence["identity"] == 5 * MIB
    assert sum(report.evidence.values()) == 35 * MIB
    assert report.notes == ()
    assert report.overhead_seconds == 0.0


def test_the_context_is_there_from_the_first_use_even_inside_a_row() -> None:
    tape = Tape()
    tape.row(kind="before")
    tape.device.free(tape.device.alloc(30 * MIB))
    tape.row("f()", 2)
    report = build(tape.finish())
    assert report.peak.device_used == report.peak.reserved + CONTEXT + IDLE


def test_the_peak_is_the_first_moment_of_maximum() -> None:
    tape = Tape()
    tape.row(kind="before")
    for number in (1, 2, 3):
        tape.device.free(tape.device.alloc(30 * MIB))
        tape.row("loss.backward()", 14, (number,), (3,))
    tape.row(kind="after")
    assert build(tape.finish()).peak.where == "`loss.backward()` in iteration 1, line 14"


def test_a_peak_that_was_there_before() -> None:
    device = FakeDevice()
    address = device.alloc(30 * MIB)
    tape = Tape(device)
    tape.row(kind="before")
    device.free(address)
    tape.row("del x", 2)
    report = build(tape.finish())
    assert report.peak.where == "the start"
    assert report.peak.allocated == 30 * MIB


def test_a_peak_between_the_ends_is_named_by_its_part_alone() -> None:
    tape = Tape()
    tape.row(kind="before")
    for number in range(3):
        step(tape, (5 if number == 1 else 3) * MIB)
    tape.row(kind="after")
    assert build(tape.finish(), lines=False).peak.where == "iteration 2, backward"


# ---- parts


def test_a_call_that_trains_shows_iterations_and_phases() -> None:
    tape = Tape()
    tape.row(kind="before")
    for number in range(3):
        step(tape, (5 if number == 1 else 3) * MIB)
    tape.row("trainer.train()", 5)
    report = build(tape.finish())
    row = report.checkpoints[1]
    phases = ["forward", "backward", "optimizer step"]
    assert labels(row) == ["iteration 1", phases, "iteration 2", phases, "iteration 3", phases]
    assert report.peak.where == "`trainer.train()`, iteration 2, backward"
    assert {part.kind for part in row.parts} == {"part"}
    assert row.parts[0].parts[0].categories["activations"] == 3 * MIB
    assert row.parts[0].parts[0].allocated == 3 * MIB
    assert row.parts[1].peak_allocated == 15 * MIB
    adds_up(row)


def test_one_iteration_needs_no_word_for_it() -> None:
    tape = Tape()
    tape.row(kind="before")
    step(tape)
    tape.row("train_step()", 5)
    assert labels(build(tape.finish()).checkpoints[1]) == ["forward", "backward", "optimizer step"]


def test_a_statement_that_is_one_phase_has_no_part() -> None:
    tape = Tape()
    tape.row(kind="before")
    with tape.span("backward"):
        tape.device.alloc(512)
    tape.row("loss.backward()", 5)
    with tape.span("forward"), tape.span("range", "attention"):
        tape.device.alloc(512)
    tape.row("model(x)", 6)
    _, backward, forward = build(tape.finish()).checkpoints
    assert backward.parts == ()
    assert labels(forward) == ["attention"]


def test_the_iteration_that_fails_is_shown_to_where_it_came() -> None:
    tape = Tape()
    tape.row(kind="before")
    step(tape)
    with tape.span("forward", "model"):
        tape.device.alloc(3 * MIB)
    span = tape.span("backward", "backward")
    span.__enter__()
    leaving = tape.device.alloc(4 * MIB)
    failure = tape.moment()
    tape.device.free(leaving)
    span.__exit__(MemoryError, None, None)
    tape.row("train()", 5, kind="error", at=failure._replace(tick=tape.ticks + 1))
    tape.ticks += 1
    tape.row(kind="after")
    error = Failure("torch.OutOfMemoryError", "CUDA out of memory", 5, 1 * GIB, 1 * GIB, 1 * GIB, 0, 0)
    report = build(tape.finish(error=error))
    row = report.checkpoints[1]
    assert row.kind == "error"
    assert labels(row) == [
        "iteration 1",
        ["forward", "backward", "optimizer step"],
        "iteration 2",
        ["forward", "backward"],
    ]
    assert row.parts[1].parts[1].allocated == row.allocated == 7 * MIB
    assert report.error is not None
    assert report.error.requested == 1 * GIB
    adds_up(row)


def test_a_lone_failing_phase_says_where() -> None:
    tape = Tape()
    tape.row(kind="before")
    with tape.span("forward"):
        tape.device.alloc(512)
    tape.row("evaluate()", 5, kind="error")
    assert labels(build(tape.finish()).checkpoints[1]) == ["forward"]


def test_epochs_are_ranges_with_iterations_inside() -> None:
    tape = Tape()
    tape.row(kind="before")
    with tape.span("range", "epoch"):
        step(tape)
        step(tape)
    tape.row("train()", 5)
    epoch, parts = labels(build(tape.finish()).checkpoints[1])
    assert epoch == "epoch"
    assert parts[::2] == ["iteration 1", "iteration 2"]


def test_two_optimizers_make_one_iteration() -> None:
    tape = Tape()
    tape.row(kind="before")
    for _ in range(2):
        for name in ("opt_d", "opt_g"):
            with tape.span("optimizer", name):
                tape.device.free(tape.device.alloc(512))
    tape.row("train()", 5)
    parts = build(tape.finish()).checkpoints[1].parts
    assert [part.label for part in parts] == ["iteration 1", "iteration 2"]
    assert [inner.label for inner in parts[1].parts] == ["optimizer step of opt_d", "optimizer step of opt_g"]


def test_an_optimizer_that_steps_now_and_then_does_so_at_an_iterations_end() -> None:
    tape = Tape()
    tape.row(kind="before")
    for turn in range(4):
        for name in ("critic", "generator")[: 1 + turn % 2]:
            with tape.span("backward"):
                tape.device.free(tape.device.alloc(512))
            with tape.span("optimizer", name):
                tape.device.free(tape.device.alloc(512))
    tape.row("train()", 5)
    parts = build(tape.finish()).checkpoints[1].parts
    assert [part.label for part in parts] == [f"iteration {number}" for number in range(1, 5)]
    critic, generator = (f"optimizer step of {name}" for name in ("critic", "generator"))
    assert [[inner.label for inner in part.parts][1::2] for part in parts] == [[critic], [critic, generator]] * 2


def test_steps_of_several_optimizers_that_come_once_are_no_iterations() -> None:
    tape = Tape()
    tape.row(kind="before")
    for name in ("critic", "policy", "temperature"):
        with tape.span("backward"):
            tape.device.free(tape.device.alloc(512))
        with tape.span("optimizer", name):
            tape.device.free(tape.device.alloc(512))
    tape.row("agent.update()", 5)
    told = labels(build(tape.finish()).checkpoints[1])
    assert told[1::2] == [f"optimizer step of {name}" for name in ("critic", "policy", "temperature")]


def test_marks_are_states_of_their_moment() -> None:
    tape = Tape()
    tape.row(kind="before")
    address = tape.device.alloc(5 * MIB)
    with tape.span("mark", "loaded"):
        pass
    tape.device.free(address)
    tape.row("f()", 5)
    row = build(tape.finish()).checkpoints[1]
    assert [(part.label, part.allocated, row.allocated) for part in row.parts] == [("loaded", 5 * MIB, 0)]


def test_parts_belong_to_their_statement_even_where_no_memory_moved() -> None:
    tape = Tape()
    tape.row(kind="before")
    tape.row("a()", 1)
    with tape.span("range", "inner"):
        pass
    tape.row("b()", 2)
    tape.row("c()", 3)
    assert [labels(row) for row in build(tape.finish()).checkpoints] == [[], [], ["inner"], []]


# ---- folding


def loop(count: int, peak_at: int = 0) -> ReportData:
    tape = Tape()
    tape.row(kind="before")
    for number in range(1, count + 1):
        tape.device.free(tape.device.alloc((30 if number == peak_at else 3) * MIB))
        tape.row("loss = f(x)", 4, (number,), (3,))
        tape.row("pass", 5, (number,), (3,))
    tape.row(kind="after")
    return build(tape.finish())


def test_long_loops_are_folded_by_whole_iterations() -> None:
    report = loop(20, peak_at=9)
    shown = [row.iteration for row in report.checkpoints if row.line == 4]
    assert shown == [(1,), (2,), (3,), (9,), (18,), (19,), (20,)]
    assert [row.iteration for row in report.checkpoints if row.line == 5] == shown
    assert [(fold.line, fold.total, fold.kept) for fold in report.folded] == [(3, 20, 7)]
    assert report.peak.where == "`loss = f(x)` in iteration 9, line 4"


def test_what_skipped_iterations_took_is_a_row_of_their_own() -> None:
    tape = Tape()
    tape.row(kind="before")
    for number in range(1, 21):
        tape.row("a = 1", 4, (number,), (3,))
        tape.device.free(tape.device.alloc(8 * MIB))
        tape.device.alloc((2 if number < 12 else 4) * MIB)
        tape.row("kept.append(f(x))", 5, (number,), (3,))
    tape.row(kind="after")
    rows = build(tape.finish()).checkpoints
    befores = {(*row.iteration, row.line): before for before, row in pairwise(rows)}
    first = next(row for row in rows if row.iteration == (18,))
    assert first.line == 4
    # Nothing moved in it: what the skipped iterations kept stands above it.
    assert first.allocated == befores[18, 4].allocated
    (gap,) = [row for row in rows if row.kind == "skipped" and row.skipped.last == 17]
    assert gap is befores[18, 4]
    first_gap = next(row for row in rows if row.kind == "skipped")
    assert first_gap.skipped == Skipped(4, 11, 3)
    assert (first_gap.line, first_gap.iteration, first_gap.loops) == (3, (4,), (3,))
    assert first_gap.allocated - befores[4, 3].allocated == 8 * 2 * MIB
    assert first_gap.peak_allocated == first_gap.allocated + 6 * MIB
    assert gap.skipped == Skipped(13, 17, 12)
    for before, row in pairwise(rows):
        assert row.peak_allocated >= max(row.allocated, 0 if row.kind != "skipped" else before.allocated)


def test_iterations_that_differ_are_not_called_alike() -> None:
    gap = next(row for row in loop(20, peak_at=9).checkpoints if row.kind == "skipped" and row.skipped.first == 10)
    assert gap.skipped == Skipped(10, 17, None)


def test_short_loops_are_not() -> None:
    assert loop(7).folded == ()
    assert len(loop(7).checkpoints) == 16


def test_iterations_inside_a_call_are_folded_too() -> None:
    tape = Tape()
    tape.row(kind="before")
    for number in range(20):
        step(tape, (9 if number == 11 else 3) * MIB)
    tape.row("train()", 5)
    report = build(tape.finish())
    parts = report.checkpoints[1].parts
    assert [part.label for part in parts if part.kind == "part"] == [
        f"iteration {n}" for n in (1, 2, 3, 12, 18, 19, 20)
    ]
    gaps = [(part.label, part.skipped) for part in parts if part.kind == "skipped"]
    # The seventeenth moved as the twelfth did not.
    assert gaps == [("iterations 4-11", Skipped(4, 11, 3)), ("iterations 13-17", Skipped(13, 17, None))]
    assert [(fold.line, fold.total, fold.kept) for fold in report.folded] == [(5, 20, 7)]


@given(st.lists(st.builds(LoopIteration, st.integers(0, 9), st.integers(-9, 9)), max_size=30))
def test_what_must_stay_stays(turns: list[LoopIteration]) -> None:
    kept = shown_iterations(turns)
    assert kept == sorted(set(kept))
    assert {*range(min(3, len(turns))), *range(max(0, len(turns) - 3), len(turns))} <= set(kept)
    assert len(kept) <= 8 or len(kept) == len(turns)
    if turns:
        assert max(turns[number].peak for number in kept) == max(turn.peak for turn in turns)
        assert max(turns[number].growth for number in kept) == max(turn.growth for turn in turns)


@given(st.integers(1, 12), st.integers(0, 12), st.integers(1, 3))
def test_nested_loops_fold_inside_and_out(outer: int, inner: int, per: int) -> None:
    rows: list[LoopRow] = [LoopRow(0, (), (), 0, 0, 0)]
    for first in range(1, outer + 1):
        rows.append(LoopRow(len(rows), (2,), (first,), 1, 0, 0))
        for second in range(1, inner + 1):
            rows += [LoopRow(len(rows) + k, (2, 3), (first, second), 1, 0, 0) for k in range(per)]
    kept, folds = fold_rows(rows)
    assert kept == sorted(set(kept))
    assert kept[0] == 0
    chosen = [rows[key] for key in kept]
    outer_kept = len({row.iteration[0] for row in chosen if row.iteration})
    expected = {}
    if outer_kept < outer:
        expected[2] = Folded(2, outer, outer_kept)
    inner_kept = len({row.iteration for row in chosen if len(row.iteration) == 2})
    if inner_kept < inner * outer_kept:
        expected[3] = Folded(3, inner * outer_kept, inner_kept)
    assert {fold.line: fold for fold in folds} == expected
    # Whole iterations stay or go.
    for row in rows:
        if row.iteration and row.iteration in {one.iteration for one in chosen}:
            assert row.key in kept


# ---- notes and the rest


def test_an_emptied_cache_is_said_with_its_row() -> None:
    device = FakeDevice(total=1 * GIB)
    tape = Tape(device)
    tape.row(kind="before")
    device.free(device.alloc(600 * MIB))
    tape.row("a()", 2)
    device.alloc(700 * MIB)
    tape.row("b()", 3)
    report = build(tape.finish())
    assert report.retries == 1
    assert report.notes == ("The allocator emptied its cache to make room in: `b()`, line 3.",)


def test_a_growing_context_is_said() -> None:
    tape = Tape()
    tape.device.alloc(512)
    tape.row(kind="before")
    tape.row("conv(x)", 2)
    recording = tape.finish()
    point = recording.checkpoints[1]
    now = point.moment.counters[0]
    grown = now._replace(context=CONTEXT + 64 * MIB, device_used=(now.device_used or 0) + 64 * MIB)
    moment = point.moment._replace(counters={0: grown})
    report = build(replace(recording, checkpoints=(recording.checkpoints[0], replace(point, moment=moment))))
    assert report.notes == ("The CUDA context grew by 64.0 MiB in `conv(x)`, line 2.",)


def test_a_context_that_grows_again_and_again_is_said_once() -> None:
    tape = Tape()
    tape.device.alloc(512)
    for line, name in enumerate(("import it", "x = ones()", "y = x @ x", "y.sum()"), 1):
        tape.row(name, line)
    recording = tape.finish()
    rows = []
    for point, more in zip(recording.checkpoints, (0, 2, 158, 160), strict=True):
        now = point.moment.counters[0]
        grown = now._replace(context=CONTEXT + more * MIB, device_used=(now.device_used or 0) + more * MIB)
        rows.append(replace(point, moment=point.moment._replace(counters={0: grown})))
    report = build(replace(recording, checkpoints=tuple(rows)))
    said = "The CUDA context grew by 160 MiB, most of it (156 MiB) in `y = x @ x`, line 3."
    assert said in report.notes


def test_repeating_iterations_are_said() -> None:
    tape = Tape()
    tape.row(kind="before")
    for number in range(1, 7):
        step(tape)
        tape.row("step()", 4, (number,), (3,))
    assert build(tape.finish()).notes == ("Iterations 2-6 of 6 repeat exactly.",)


def test_nothing_on_a_device() -> None:
    tape = Tape()
    tape.row(kind="before")
    tape.row("model = Model()", 2)
    (note,) = build(tape.finish()).notes
    assert note.startswith("Nothing was put on a device")
    # Not where the program ended before it could have done so.
    assert build(replace(tape.finish(), error=Failure("NameError", "name 'model' is not defined", 2))).notes == ()


def test_a_gap_is_named_and_not_spread() -> None:
    tape = Tape()
    tape.row(kind="before")
    tape.device.alloc(5 * MIB)
    tape.row("f()", 2)
    recording = tape.finish()
    point = recording.checkpoints[1]
    wrong = Counters(6 * MIB, point.moment.counters[0].reserved, None, None, None, None)
    recording = replace(
        recording,
        checkpoints=(recording.checkpoints[0], replace(point, moment=point.moment._replace(counters={0: wrong}))),
    )
    report = build(recording)
    assert report.checkpoints[1].allocated == 5 * MIB
    assert [note for note in report.notes if "do not add up after `f()`, line 2" in note]


def test_without_lines_only_the_ends_are_there() -> None:
    tape = Tape()
    tape.row(kind="before")
    tape.device.free(tape.device.alloc(30 * MIB))
    tape.row("f()", 2)
    step(tape)
    tape.row(kind="after")
    recording = tape.finish()
    report = build(recording, lines=False)
    assert [row.kind for row in report.checkpoints] == ["before", "after"]
    assert report.checkpoints[1].peak_allocated == 30 * MIB
    assert report.checkpoints[1].parts == ()
    assert report.peak == build(recording).peak


def test_other_devices_are_there_where_they_were_used() -> None:
    tape = Tape(FakeDevice(0))
    tape.row(kind="before")
    tape.device.alloc(5 * MIB)
    tape.row(kind="after")
    first = tape.finish(stand_ins=(StandIn("4", 2),))
    used, idle = FakeDevice(1), FakeDevice(2)
    logs, positions, counters = {}, {}, {}
    for device in (used, idle):
        log = device.start_log()
        if device is used:
            device.alloc(7 * MIB)
        index = device.facts.index
        logs[index] = log.stop()
        positions[index], counters[index] = len(logs[index].events), device.counters()
    points = [first.checkpoints[0]]
    moment = first.checkpoints[1].moment
    points[0] = replace(points[0], moment=points[0].moment._replace(positions={0: 0, 1: 0, 2: 0}))
    moment = moment._replace(positions={**moment.positions, **positions}, counters={**moment.counters, **counters})
    points.append(replace(first.checkpoints[1], moment=moment))
    report = build(replace(first, logs={**first.logs, **logs}, checkpoints=tuple(points)))
    assert report.device.index == 0
    assert report.stand_ins == (StandIn("4", 2),)
    assert [other.device.index for other in report.devices] == [1]
    assert report.devices[0].peak.allocated == 7 * MIB
    assert report.devices[0].stand_ins == ()


def test_labels_go_back_to_the_device() -> None:
    tape = Tape()
    tape.row(kind="before")
    address = tape.device.alloc(5 * MIB, "host_copy")
    tape.see(address, "parameter", "weight")
    assert build_with_labels(tape.finish())[1][0] == {address: Label("parameters", "identity", "weight")}


def test_an_incomplete_recording_is_refused() -> None:
    tape = Tape()
    recording = tape.finish()
    with pytest.raises(ValueError, match="no checkpoint"):
        build(recording)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(STEPS, st.booleans()), max_size=4), st.booleans())
def test_every_row_of_every_report_adds_up(statements: list, lines: bool) -> None:
    tape = Tape()
    tape.row(kind="before")
    live: dict[int, int] = {}
    highest = 0
    for number, (steps, looped) in enumerate(statements, start=1):
        for _, counters, _ in play(tape, steps, live):
            highest = max(highest, counters.allocated)
        tape.row(f"statement {number}", number, (number,) if looped else (), (1,) if looped else ())
    tape.row(kind="after")
    report = Report.of(build(tape.finish(), lines=lines))
    for row in report.checkpoints:
        adds_up(row)
        assert row.peak_allocated <= report.peak.allocated
    assert report.peak.allocated == highest
    assert sum(report.evidence.values()) == report.peak.allocated - (report.peak.categories["rounding"] or 0)
    assert not [note for note in report.notes if "add up" in note]
    assert Report.from_dict(report.to_dict()) == report
