"""The real device's log against emulated allocators: positions from counters, rings that overflow, a user's own recording."""

from __future__ import annotations

from typing import Any

import pytest
from allocator_programs import PeaksSince
from cuda_fakes import FakeTorch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem_magic.devices import history
from gpumem_magic.devices.base import DeviceLog
from gpumem_magic.devices.cuda import CudaMachine
from gpumem_magic.devices.driver import Driver
from gpumem_magic.snapshot.rules import AllocatorSettings
from gpumem_magic.snapshot.timeline import Timeline
from gpumem_magic.units import GIB, KIB, MIB

STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("alloc"), st.sampled_from([100, 700, 300 * KIB, MIB, 3 * MIB, 7 * MIB + 5, 11 * MIB, 64 * MIB])
        ),
        st.tuples(st.just("free"), st.integers(0, 50)),
        st.tuples(st.just("other stream"), st.integers(0, 50)),
        st.tuples(st.just("complete"), st.just(0)),
        st.tuples(st.just("empty"), st.just(0)),
        st.tuples(st.just("too much"), st.just(0)),
        st.tuples(st.just("reset totals"), st.just(0)),
        st.tuples(st.just("reset peaks"), st.just(0)),
        st.tuples(st.just("snapshot"), st.just(0)),
        st.tuples(st.just("mark"), st.just(0)),
    ),
    max_size=60,
)


class Run:
    """Plays steps on one fake GPU with a log; at each mark it keeps what the counters said, and the peak since the last."""

    def __init__(self, torch: FakeTorch, ring: int) -> None:
        self.torch = torch
        self.gpu = torch.gpus[0]
        self.machine = CudaMachine(torch, Driver(None), ring)
        self.device = self.machine.devices[0]
        self.live: list[int] = []
        self.told: list[tuple[int, int, int, int, int]] = []

    def begin(self) -> None:
        self.log = self.device.start_log()
        self.peaks = PeaksSince(self.gpu.allocator)
        self.mark()

    def mark(self) -> None:
        now = self.device.counters()
        position = self.log.position()
        self.told.append((position, now.allocated, now.reserved, self.peaks.allocated, self.peaks.reserved))
        self.peaks.begin()

    def play(self, steps: list[tuple[str, int]], *, marking: bool = True) -> None:
        torch, allocator = self.torch, self.gpu.allocator
        for what, value in steps:
            if what == "alloc":
                self.live.append(torch.alloc(value))
            elif what == "free" and self.live:
                torch.free(self.live.pop(value % len(self.live)))
            elif what == "other stream" and self.live:
                allocator.record_stream(self.live[value % len(self.live)], 7)
            elif what == "complete":
                allocator.complete_pending()
            elif what == "empty":
                allocator.empty_cache()
            elif what == "too much":
                assert torch.try_alloc(100 * GIB) is None
            elif what == "reset totals" and torch.initialized:
                torch.cuda.reset_accumulated_memory_stats(0)
            elif what == "reset peaks":
                allocator.reset_peak_stats()
            elif what == "snapshot" and torch.initialized:
                torch.cuda.memory._snapshot()
            elif what == "mark" and marking:
                self.mark()

    def end(self) -> tuple[DeviceLog, Timeline]:
        self.mark()
        self.peaks.end()
        log = self.log.stop()
        return log, Timeline(log.start, log.events, log.settings)

    def positions(self, log: DeviceLog) -> list[int]:
        return [told[0] if log.places is None else log.places[told[0]] for told in self.told]


def check_totals(run: Run, log: DeviceLog, timeline: Timeline) -> None:
    positions = run.positions(log)
    assert positions == sorted(positions)
    for position, told in zip(positions, run.told, strict=True):
        assert (timeline.allocated_at(position), timeline.reserved_at(position)) == told[1:3]


@settings(max_examples=60, deadline=None)
@given(before=STEPS, during=STEPS, initialized=st.booleans(), expandable=st.booleans())
def test_positions_and_peaks_follow_from_counters_alone(
    before: list[tuple[str, int]], during: list[tuple[str, int]], initialized: bool, expandable: bool
) -> None:
    torch = FakeTorch(initialized=initialized, settings=AllocatorSettings(expandable_segments=expandable))
    run = Run(torch, ring=100_000)
    if initialized:
        run.play(before, marking=False)
    left = torch.state()
    run.begin()
    run.play(during)
    log, timeline = run.end()
    assert log.places is None
    check_totals(run, log, timeline)
    positions = run.positions(log)
    for start, end, told in zip(positions, positions[1:], run.told[1:], strict=False):
        assert (timeline.peak(start, end)[0], timeline.peak_reserved(start, end)[0]) == told[3:]
    assert timeline.unmatched == 0
    assert torch.state()["bindings"] == left["bindings"]
    assert torch.history is None
    assert torch.cuda._queued_calls == []


@settings(max_examples=60, deadline=None)
@given(before=STEPS, during=STEPS, ring=st.integers(1, 40))
def test_a_ring_that_overflows_leaves_the_totals_of_every_mark(
    before: list[tuple[str, int]], during: list[tuple[str, int]], ring: int
) -> None:
    run = Run(FakeTorch(), ring)
    run.play(before, marking=False)
    run.begin()
    run.play(during)
    log, timeline = run.end()
    check_totals(run, log, timeline)
    highest = max(told[3] for told in run.told)
    assert timeline.peak(0, len(timeline))[0] <= highest
    assert timeline.unmatched == 0
    assert all(log.events[index].action == "alloc" for index in log.origins)


def test_a_free_that_was_asked_for_in_the_dropped_stretch_is_not_allocated() -> None:
    run = Run(FakeTorch(), ring=1)
    run.begin()
    run.play([("alloc", 100), ("other stream", 0), ("free", 0), ("mark", 0), ("complete", 0)])
    log, timeline = run.end()
    check_totals(run, log, timeline)


def test_the_peak_of_a_long_run_is_exact_although_its_events_are_gone() -> None:
    run = Run(FakeTorch(), ring=30)
    run.begin()
    kept = run.torch.alloc(50 * MIB)
    for turn in range(200):
        address = run.torch.alloc((900 if turn == 100 else 20) * MIB)
        run.torch.free(address)
        run.mark()
    log, timeline = run.end()
    check_totals(run, log, timeline)
    assert timeline.peak(0, len(timeline))[0] == 950 * MIB
    assert len(log.events) < 2_000
    # What was there before the gap and after it is one allocation.
    assert [life.address for life in timeline.live_at(len(timeline))] == [kept]
    assert timeline.live_at(len(timeline))[0].born < 5
    assert any("were dropped" in note for note in run.machine.notes())


def test_a_peak_in_the_last_dropped_stretch_is_found() -> None:
    run = Run(FakeTorch(), ring=20)
    run.begin()
    run.torch.alloc(5 * MIB)
    run.mark()
    run.torch.free(run.torch.alloc(400 * MIB))
    for _ in range(100):
        run.torch.free(run.torch.alloc(MIB))
    _, timeline = run.end()
    assert timeline.peak(0, len(timeline))[0] == 405 * MIB


def test_the_beginning_of_a_long_run_is_kept() -> None:
    run = Run(FakeTorch(), ring=100)
    run.begin()
    for _ in range(400):
        run.torch.free(run.torch.alloc(3 * MIB))
        run.mark()
    log, timeline = run.end()
    check_totals(run, log, timeline)
    first = next(index for index in log.origins)
    assert first >= 50
    assert all(position < first for position in run.positions(log)[:15])


def test_the_beginning_has_stacks_which_a_long_run_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "STACKS", 20)
    torch = FakeTorch(initialized=True)
    run = Run(torch, ring=1000)
    run.begin()
    assert torch.state()["history"] == ("all", 1000, "alloc")
    for _ in range(3):
        run.play([("alloc", MIB), ("free", 0)] * 9 + [("mark", 0)])
    assert torch.state()["history"] == ("all", 1000, None)
    log, timeline = run.end()
    check_totals(run, log, timeline)
    assert sum(event.action == "alloc" for event in log.events) == 27
    assert torch.state()["history"] is None


def test_a_moment_reads_the_counters_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch()
    run = Run(torch, ring=1000)
    run.begin()
    read, asked = torch.cuda.memory_stats_as_nested_dict, []
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda index: asked.append(index) or read(index))
    run.play([("alloc", MIB), ("alloc", 3 * MIB), ("free", 0)], marking=False)
    position, counters = run.log.moment()
    assert asked == [0]
    assert position == run.log.position() == sum((2, 1, 1, 2))
    assert counters.allocated == torch.gpus[0].allocator.allocated
    run.end()


def test_a_users_recording_goes_on_with_its_own_arguments() -> None:
    torch = FakeTorch()
    torch.cuda.memory._record_memory_history(max_entries=5000)
    torch.alloc(MIB)
    before = torch.state()
    run = Run(torch, ring=100)
    run.begin()
    address = torch.alloc(30 * MIB)
    run.mark()
    torch.free(address)
    log, timeline = run.end()
    check_totals(run, log, timeline)
    assert torch.state() == before
    # theirs holds what happened before, during, and whatever comes.
    assert sum(event.action == "alloc" for event in torch.gpus[0].trace) == 2
    assert not run.machine.notes()[1:]


def test_a_recording_that_the_user_keeps_without_a_trace_leaves_totals() -> None:
    torch = FakeTorch()
    torch.cuda.memory._record_memory_history(enabled="state")
    run = Run(torch, ring=100)
    run.begin()
    run.torch.free(run.torch.alloc(30 * MIB))
    run.mark()
    run.torch.alloc(8 * MIB)
    log, timeline = run.end()
    check_totals(run, log, timeline)
    assert timeline.peak(0, len(timeline))[0] == 30 * MIB
    assert torch.history == "state"


@pytest.mark.parametrize("clear", [False, True])
def test_a_user_who_begins_and_ends_a_recording_in_the_cell_does_not_take_ours(clear: bool) -> None:
    run = Run(FakeTorch(), ring=100)
    run.begin()
    first = run.torch.alloc(30 * MIB)
    run.mark()
    run.torch.cuda.memory._record_memory_history(max_entries=50, clear_history=clear)
    run.torch.free(first)
    run.torch.alloc(5 * MIB)
    run.mark()
    run.torch.cuda.memory._record_memory_history(None)
    run.torch.alloc(MIB)
    log, timeline = run.end()
    check_totals(run, log, timeline)
    assert log.places is None
    assert len(timeline.allocations) == 3
    assert run.torch.history is None


def test_a_recording_that_the_user_begins_in_the_cell_outlives_it() -> None:
    run = Run(FakeTorch(), ring=100)
    run.begin()
    run.torch.alloc(MIB)
    run.torch.cuda.memory._record_memory_history(max_entries=50)
    run.torch.alloc(MIB)
    log, timeline = run.end()
    check_totals(run, log, timeline)
    assert (run.torch.history, run.torch.entries) == ("all", 50)
    assert any("history of its own" in note for note in run.machine.notes())


@pytest.mark.parametrize("skipped", ["free_requested", "free_completed", "alloc", "segment_alloc"])
def test_a_filtered_trace_is_not_believed(skipped: str) -> None:
    torch = FakeTorch()
    torch.cuda.memory._record_memory_history()
    torch.skipped = frozenset({skipped})
    run = Run(torch, ring=100)
    run.begin()
    for size in (3 * MIB, 20 * MIB, 5 * MIB):
        run.torch.free(run.torch.alloc(size))
        run.live.append(run.torch.alloc(size // 2))
        run.mark()
    log, timeline = run.end()
    check_totals(run, log, timeline)


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_an_allocator_without_history_gives_totals_and_says_so(backend: str) -> None:
    torch = FakeTorch(backend=backend)
    torch.alloc(5 * MIB)
    run = Run(torch, ring=100)
    run.begin()
    run.torch.free(run.torch.alloc(100 * MIB))
    run.mark()
    run.torch.alloc(777)
    log, timeline = run.end()
    check_totals(run, log, timeline)
    assert timeline.peak(0, len(timeline))[0] == 105 * MIB
    assert "history all" not in torch.calls
    assert any("keeps no history" in note for note in run.machine.notes())


@given(sizes=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_totals_need_not_be_multiples_of_anything(sizes: list[tuple[int, int]]) -> None:
    from gpumem_magic.devices.history import CountersMark
    from gpumem_magic.devices.weaving import weave
    from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS

    # Below 512 bytes no block is smaller.
    totals = [(allocated + 512, allocated + 512 + more) for allocated, more in sizes]
    marks = [CountersMark(number, (0,) * 6, *pair, 0, 0) for number, pair in enumerate(totals)]
    woven = weave(0, (), marks, [], DEFAULT_SETTINGS)
    timeline = Timeline(woven.start, woven.events)
    places: Any = woven.places or {0: 0}
    assert [(timeline.allocated_at(places[m.raw]), timeline.reserved_at(places[m.raw])) for m in marks] == totals


def test_labels_live_as_long_as_their_blocks() -> None:
    from gpumem_magic.devices.base import Label

    torch = FakeTorch()
    run = Run(torch, ring=100)
    run.begin()
    weight, passing = torch.alloc(30 * MIB), torch.alloc(2 * MIB)
    run.end()
    label = Label("parameters", "identity", "weight")
    run.device.remember({weight: label, passing: Label("inputs", "identity", "x")})
    log = run.device.start_log().stop()
    assert log.carried[weight] == label
    torch.free(passing)
    log = run.device.start_log().stop()
    assert log.carried == {weight: Label("parameters", "inferred", "weight")}


def test_several_devices_share_one_snapshot_at_the_end() -> None:
    torch = FakeTorch(count=3)
    machine = CudaMachine(torch, Driver(None), 100)
    logs = [device.start_log() for device in machine.devices]
    torch.alloc(MIB, gpu=2)
    torch.calls.clear()
    ended = [log.stop() for log in logs]
    assert [len(log.events) for log in ended] == [0, 0, 2]
    assert torch.calls.count("snapshot") == 1


def test_a_fraction_that_the_program_set_is_among_the_settings() -> None:
    torch = FakeTorch()
    (device,) = CudaMachine(torch, Driver(None), 100).devices
    log = device.start_log()
    assert log.stop().settings.memory_fraction == 1.0, "CUDA is not in use: nothing is asked"
    torch.use()
    log = device.start_log()
    torch.gpus[0].allocator.set_memory_fraction(0.25)
    torch.alloc(MIB)
    assert log.stop().settings.memory_fraction == 0.25
