"""A recording holds what happened, costs the user's program nothing but time, and leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recording_fakes import FakeDevice, FakeMachine
from test_phases import state_of_torch
from torch import nn

from gpumem_magic.allocator.failure import DeviceOutOfMemory
from gpumem_magic.looks.code import cell_of
from gpumem_magic.recording.model import Failure, Recording
from gpumem_magic.recording.recorder import Recorder
from gpumem_magic.recording.repetition import ENOUGH, LONGEST_PERIOD, alike_at_end, longest_repetition, signature
from gpumem_magic.snapshot.model import TraceEvent
from gpumem_magic.units import GIB, MIB


@pytest.fixture(autouse=True)
def _leaves_torch_alone():
    before = state_of_torch()
    yield
    assert state_of_torch() == before


def started(*devices: FakeDevice, names: tuple[str, ...] = (), **namespace: object) -> tuple[Recorder, FakeMachine]:
    machine = FakeMachine(*devices)
    recorder = Recorder(machine, primary=0, names=names)
    recorder.start(namespace)
    return recorder, machine


def kinds(recording: Recording) -> list[str]:
    return [point.kind for point in recording.checkpoints]


def test_rows_are_moments_in_order() -> None:
    recorder, machine = started()
    machine.devices[0].alloc(5 * MIB)
    recorder.checkpoint("statement", "a", "a = 1", 3, (2,), (2,))
    recording = recorder.finish()
    assert kinds(recording) == ["before", "statement", "after"]
    before, row, after = recording.checkpoints
    assert (row.statement, row.line, row.iteration, row.loops) == ("a = 1", 3, (2,), (2,))
    assert before.moment.positions[0] == 0 < row.moment.positions[0] == after.moment.positions[0]
    assert row.moment.counters[0].allocated == 5 * MIB
    assert before.moment.tick < row.moment.tick < after.moment.tick
    assert recording.error is None
    assert recording.overhead_seconds > 0
    assert recording.notes == ()


def test_header_rows_stay_only_where_memory_moved() -> None:
    recorder, machine = started()
    recorder.checkpoint("statement", "for", "for x in y:", 2, header=True)
    machine.devices[0].alloc(512)
    recorder.checkpoint("statement", "for", "for x in y:", 2, header=True)
    recorder.checkpoint("statement", "pass", "pass", 3)
    assert [point.statement for point in recorder.finish().checkpoints] == ["", "for x in y:", "pass", ""]


def test_every_device_has_its_own_log() -> None:
    recorder, machine = started(FakeDevice(0), FakeDevice(1))
    machine.devices[1].alloc(5 * MIB)
    recording = recorder.finish()
    assert set(recording.logs) == {0, 1}
    assert not recording.logs[0].events
    assert len(recording.logs[1].events) == 2
    assert recording.checkpoints[-1].moment.positions == {0: 0, 1: 2}


def test_before_and_after_may_be_given_and_are_not_doubled() -> None:
    recorder, _ = started()
    recorder.checkpoint("before", "before")
    recorder.checkpoint("after", "after")
    assert kinds(recorder.finish()) == ["before", "after"]


def test_all_logs_end() -> None:
    recorder, machine = started(FakeDevice(0), FakeDevice(1))
    assert all(device.logs for device in machine.devices)
    recorder.finish()
    assert not any(device.logs for device in machine.devices)
    assert not any(device.allocator.sinks for device in machine.devices)


def test_a_start_that_fails_half_way_is_undone() -> None:
    class Bad(FakeDevice):
        def start_log(self):
            raise OSError("no log today")

    good = FakeDevice(0)
    recorder = Recorder(FakeMachine(good, Bad(1)), primary=0)
    with pytest.raises(OSError, match="no log today"):
        recorder.start()
    assert not good.logs
    with pytest.raises(RuntimeError, match="did not start"):
        recorder.finish()


def test_our_failures_are_notes() -> None:
    recorder, machine = started(names=("x",), x=torch.ones(1))
    machine.locate = lambda tensor: 1 / 0  # type: ignore[method-assign]
    recorder.checkpoint("statement", "a")
    recording = recorder.finish(namespace={"x": torch.ones(1)})
    assert any("ZeroDivisionError" in note for note in recording.notes)
    assert kinds(recording)[0] == "before"
    assert kinds(recording)[-1] == "after"


# ---- errors


def test_an_error_is_strings_and_numbers() -> None:
    recorder, machine = started()
    machine.devices[0].alloc(512)
    error = ValueError("no such thing")
    recording = recorder.finish(error, ("f(\n x)", 7, (3,), (2,)))
    assert recording.error == Failure("ValueError", "no such thing", 7)
    assert kinds(recording) == ["before", "error", "after"]
    row = recording.checkpoints[1]
    assert (row.label, row.statement, row.line, row.iteration, row.loops) == ("f(", "f(\n x)", 7, (3,), (2,))
    assert row.moment.positions == {0: 2}


def test_the_row_of_an_out_of_memory_error_is_the_failing_request() -> None:
    device = FakeDevice(total=1 * GIB)
    recorder, _ = started(device)
    kept = device.alloc(300 * MIB)
    recorder.checkpoint("statement", "x = ...", "x = ...", 2)
    scratch = device.alloc(400 * MIB)
    with pytest.raises(DeviceOutOfMemory) as caught:
        device.alloc(600 * MIB + 1)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried ...")
    error.gpumem_failure = caught.value
    device.free(scratch)  # the stack unwinds
    device.free(kept)
    recording = recorder.finish(error, ("y = ...", 3, (), ()))
    assert kinds(recording) == ["before", "statement", "error", "after"]
    row = recording.checkpoints[2]
    events = recording.logs[0].events
    assert events[row.moment.positions[0] - 1].action == "oom"
    counters = row.moment.counters[0]
    assert counters.allocated == 700 * MIB
    assert counters.device_used == counters.reserved + counters.context + counters.other_processes
    assert recording.checkpoints[-1].moment.counters[0].allocated == 0
    assert recording.error is not None
    assert recording.error.type == "torch.OutOfMemoryError"
    assert recording.error.requested == 600 * MIB + 1
    assert recording.error.rounded == 600 * MIB + 512
    assert recording.error.segment == 602 * MIB
    assert recording.error.device == 0


def test_without_the_devices_own_facts_the_trace_tells() -> None:
    device = FakeDevice(total=1 * GIB)
    recorder, _ = started(device)
    device.alloc(300 * MIB)
    device.free(device.alloc(8 * MIB))
    with pytest.raises(DeviceOutOfMemory):
        device.alloc(5 * GIB)
    error = recorder.finish(RuntimeError("CUDA out of memory. Tried to allocate 5.00 GiB"), None).error
    assert error is not None
    assert (error.type, error.requested, error.rounded, error.segment) == ("RuntimeError", 5 * GIB, 5 * GIB, 5 * GIB)
    assert error.largest_free == 0  # the cache was given back before the request failed


def test_a_failure_that_the_user_caught_is_not_this_error() -> None:
    device = FakeDevice(total=1 * GIB)
    recorder, _ = started(device)
    with pytest.raises(DeviceOutOfMemory):
        device.alloc(5 * GIB)
    recorder.checkpoint("statement", "try: ...", "try: ...", 2)
    device.alloc(512)
    recording = recorder.finish(RuntimeError("CUDA out of memory (an old one, raised again)"))
    assert recording.error is not None
    assert recording.error.requested is None
    assert recording.checkpoints[-2].moment.positions == recording.checkpoints[-1].moment.positions


def test_no_reference_to_the_users_things_is_kept() -> None:
    class Holder(Exception):
        pass

    net = nn.Linear(4, 4)
    x = torch.ones(1, 4)
    recorder, machine = started(names=("net", "x"), net=net, x=x)
    try:
        machine.put(x)
        net(x).sum().backward()
        recorder.checkpoint("statement", "net(x)")
        raise Holder("held")
    except Holder as error:
        held = weakref.ref(error)
        recording = recorder.finish(error, None, {"net": net, "x": x})
    gone = [weakref.ref(net), weakref.ref(x)]
    machine.places.clear()
    del net, x
    gc.collect()
    assert [reference() for reference in (*gone, held)] == [None] * 3
    assert recording.error == Failure(f"{__name__}.{Holder.__qualname__}", "held", None)


def test_an_error_of_the_cells_own_class_has_a_plain_name() -> None:
    own = type("Mine", (Exception,), {"__module__": "__main__", "__qualname__": "Mine"})
    recorder, _ = started()
    error = recorder.finish(own("x")).error
    assert error is not None
    assert error.type == "Mine"


# ---- the rest of a recording


def test_spans_are_in_the_order_in_which_they_began() -> None:
    recorder, _ = started()
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters())
    with torch.autograd.profiler.record_function("whole"):
        net(torch.ones(1, 2)).sum().backward()
        recorder.mark("middle")
        optimizer.step()
    spans = recorder.finish().spans
    assert [span.kind for span in spans] == ["range", "forward", "backward", "mark", "optimizer"]
    assert spans[0].end.tick > spans[-1].end.tick


def test_stand_ins_are_those_of_this_recording() -> None:
    machine = FakeMachine()
    machine.reads.counts["/home/me/trainer.py", 9] += 5
    recorder = Recorder(machine, primary=0, own_file="<cell 3>")
    recorder.start()
    machine.reads.counts["/home/me/trainer.py", 9] += 2
    machine.reads.counts["<cell 3>", 4] += 1
    machine.reads.counts["C:\\Temp\\ipykernel_7\\88.py", 6] += 1
    machine.reads.counts["<ipython-input-12-0b1c>", 33] += 1
    stand_ins = {stand_in.line: stand_in.count for stand_in in recorder.finish().stand_ins}
    assert stand_ins == {"trainer.py:9": 2, "4": 1, "another cell, line 6": 1, "In [12], line 33": 1}


def test_a_cell_has_the_number_that_ipython_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    names = {"/tmp/ipykernel_7/88.py": ("Cell", "In[4]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=names.get))
    monkeypatch.setattr(InteractiveShell, "initialized", lambda: True)
    monkeypatch.setattr(InteractiveShell, "instance", lambda: shell)
    assert cell_of("/tmp/ipykernel_7/88.py") == "In [4]"
    assert cell_of("/tmp/ipykernel_7/99.py") == "another cell"
    assert cell_of("<ipython-input-3-abc>") == "In [3]"
    assert cell_of("/home/me/train.py") == ""
    # IPython 7 keeps no numbers.
    shell.compile = SimpleNamespace()
    assert cell_of("/tmp/ipykernel_7/88.py") == "another cell"


def test_the_machines_notes_of_this_run() -> None:
    machine = FakeMachine()
    machine.said = ["old"]
    machine.notes = lambda: machine.said
    recorder = Recorder(machine, primary=0)
    recorder.start()
    machine.said = ["old", "new"]
    assert recorder.finish().notes == ("new",)


def test_late_frees_are_done_before_a_moment_is_read() -> None:
    machine = FakeMachine()
    address = machine.devices[0].alloc(5 * MIB)
    waiting = [address]
    machine.settle = lambda: [machine.devices[0].free(waiting.pop()) for _ in list(waiting)]
    recorder = Recorder(machine, primary=0)
    recorder.start()
    recording = recorder.finish()
    assert recording.checkpoints[0].moment.counters[0].allocated == 0
    assert not recording.logs[0].events


@pytest.mark.parametrize(("kind", "alike"), [("virtual", 4), ("cuda", 0)])
def test_iterations_that_repeat_are_noticed_on_virtual_devices(kind: str, alike: int) -> None:
    device = FakeDevice(kind=kind)
    recorder, _ = started(device)
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters())
    for size in (1, 3, 3, 3, 3, 3):
        device.free(device.alloc(size * MIB))
        optimizer.step()
    # The first of the 3 MiB iterations opens a segment; the four after it find it.
    assert recorder.alike == alike
    device.alloc(40 * MIB)
    optimizer.step()
    assert recorder.alike == min(alike, 1)
    recorder.finish()
    assert not device.logs


def test_signatures_see_places_and_not_times() -> None:
    event = TraceEvent("alloc", 4096, 512, 0, 17)
    assert signature([event]) == signature([event._replace(time_us=99)])
    others = [event._replace(address=8192), event._replace(size=1024), event._replace(stream=1)]
    assert len({signature([one]) for one in [event, *others]}) == 4
    assert signature([]) != signature([event])


@given(st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=16))
def test_repetition(signatures: list[bytes]) -> None:
    def turns(first: int, last: int, period: int) -> bool:
        return all(signatures[at] == signatures[at - period] for at in range(first + period, last + 1))

    count = len(signatures)
    possible = [
        (first, last, period)
        for period in range(1, LONGEST_PERIOD + 1)
        for first in range(count)
        for last in range(first + ENOUGH * period - 1, count)
        if turns(first, last, period)
    ]
    found = longest_repetition(signatures)
    assert (found is None) == (not possible)
    if found is not None:
        assert tuple(found) in possible
        assert found.last - found.first == max(last - first for first, last, _ in possible)
    expected = max(
        (
            repeats
            for period in range(1, LONGEST_PERIOD + 1)
            for repeats in range(1, count // period + 1)
            if turns(count - repeats * period, count - 1, period)
        ),
        default=0,
    )
    assert alike_at_end(signatures) == expected


def test_a_loop_that_alternates_between_two_places_repeats() -> None:
    assert alike_at_end([b"first", *[b"a", b"b"] * 3]) == 3
    assert longest_repetition([b"first", *[b"a", b"b"] * 3]) == (1, 6, 2)


def test_a_failures_facts_may_come_from_anything_with_the_names() -> None:
    recorder, _ = started()
    error = torch.OutOfMemoryError("CUDA out of memory")
    error.gpumem_failure = SimpleNamespace(requested=1, rounded=512, segment_size=2 * MIB, largest_free=3, device=0)
    found = recorder.finish(error).error
    assert found is not None
    assert (found.requested, found.rounded, found.segment, found.largest_free) == (1, 512, 2 * MIB, 3)
