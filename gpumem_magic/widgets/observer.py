"""One sample: every device's row of now, put into its ring, and the marks that fell since the last one. No thread, no display."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpumem_magic.devices import machines
from gpumem_magic.devices.base import Counters, Device, DeviceFacts, Log, Machine
from gpumem_magic.failures import swallowed
from gpumem_magic.recording import under_way
from gpumem_magic.recording.model import Checkpoint, Recording
from gpumem_magic.widgets import live
from gpumem_magic.widgets.columns import (
    ALLOCATED,
    COLUMNS,
    FIRST_LAYER,
    LAYERS,
    NOT_YET_KNOWN,
    POSITION,
    RECORDING,
    SENT,
)
from gpumem_magic.widgets.marks import CELL, CHECKPOINT, USER, Mark, Marks, short
from gpumem_magic.widgets.plain_cells import PlainCells, held_by_namespace
from gpumem_magic.widgets.ring import Ring

if TYPE_CHECKING:
    from gpumem_magic.recording.recorder import Recorder

CAPACITY = 4096
# A look at all blocks may take one fiftieth of the time, no more.
_REST = 50.0
# Seconds between the end of a recording's logs and the recording.
_PATIENCE = 10.0
_NOTHING = float("nan")

Rows = list[tuple[int, list[float]]]
"""(number of the series, its row of `SENT` columns)."""


@dataclass
class Series:
    """The samples of one device. number: of how many that came before it. engine: whose it is, where not this process's."""

    number: int
    facts: DeviceFacts
    ring: Ring
    engine: int | None = None
    peak: int = 0
    counted_peak: int | None = None
    tracker: live.LiveLabels | None = None
    at_end: dict[int, tuple[int, str]] = field(default_factory=dict)
    end_position: int = -1
    idle: dict[str, int] | None = None
    idle_key: tuple[int, int, int] | None = None
    idle_not_before: float = 0.0

    @property
    def title(self) -> str:
        return f"{'' if self.engine is None else f'engine {self.engine} '}cuda:{self.facts.index}"

    @property
    def place(self) -> tuple[int, int]:
        """Where readers look for it, whoever came first."""
        return self.engine or 0, self.facts.index

    def reached(self, counters: Counters) -> int:
        """The highest allocated since the watch began, also between two samples where the device counts that."""
        if self.counted_peak is not None and counters.peak_allocated > self.counted_peak:
            self.peak = max(self.peak, counters.peak_allocated)
        self.counted_peak = counters.peak_allocated
        self.peak = max(self.peak, counters.allocated)
        return self.peak


class Followed:
    """A recording under way, read from beside it. `serial` tells one from the next.

    It keeps the recorder's own lists, which go on growing, and adds nothing to them.
    """

    def __init__(self, recorder: Recorder, serial: int) -> None:
        self.recorder = recorder
        self.serial = serial
        self.checkpoints = recorder.checkpoints
        self.sightings = recorder.sightings
        self.logs: dict[int, Log] = dict(recorder.logs)

    @property
    def has_ended(self) -> bool:
        """Whether the logs are closed. What became of them may be there a little later."""
        return not self.recorder.logs


@dataclass(frozen=True)
class Sample:
    """What is new. relabelled: rows of before whose categories have become known."""

    time: float
    rows: Rows
    marks: list[Mark]
    relabelled: Rows
    series: int


class Observer:
    """Takes samples. `lock` is held while rings and marks change; who reads them from another thread holds it too."""

    def __init__(
        self,
        machine: Callable[[], Machine | None] = machines.in_use,
        clock: Callable[[], float] = time.time,
        capacity: int = CAPACITY,
    ) -> None:
        self.lock = threading.RLock()
        self.series: list[Series] = []
        self.marks = Marks()
        self.notes: list[str] = []
        self._machine = machine
        self._clock = clock
        self._capacity = capacity
        self._new_marks: list[Mark] = []
        self._serial = 0
        self._followed: Followed | None = None
        self._checkpoints = 0
        self._ended_at: float | None = None
        self._plain: PlainCells | None = None
        self._namespace: Mapping[str, Any] = {}

    def follow(self, shell: Any, undo: list[Callable[[], None]]) -> None:
        """Also looks at cells that nobody measures, from now until what it adds to `undo` is called: first of all, so that an
        interrupt leaves nothing."""
        plain = self._plain = PlainCells(shell, self._machine)
        self._namespace = shell.user_ns

        def end() -> None:
            self._namespace = {}
            plain.stop()

        undo.append(end)
        plain.start()

    @property
    def shown(self) -> list[Series]:
        """The series as a reader expects them."""
        return sorted(self.series, key=lambda series: series.place)

    def mark(self, text: str, kind: str = USER, at: float | None = None) -> Mark:
        """Names this moment, or the one at a time by this observer's clock."""
        with self.lock:
            mark = Mark(self._clock() if at is None else at, kind, short(text) or "mark")
            self._add(mark)
            return mark

    def cell_begins(self, label: str) -> None:
        self.mark(label, CELL)

    def observe(self, *, resting: bool = False) -> Sample:
        """Reads every device once. Raises what a device raises.

        resting: no device is read, as in a pause: marks are new, and what a recording that has ended found out.
        """
        with self.lock:
            now = self._clock()
            machine = self._machine()
            devices = machine.in_use() if machine is not None else ()
            relabelled = self._follow_recording(now, devices)
            rows = []
            if machine is not None and not resting:
                # A recording decides by itself when the frees that wait are done.
                if self._followed is None:
                    machine.settle()
                rows = [self._row(machine, device, now) for device in devices]
            marks, self._new_marks = self._new_marks, []
            return Sample(now, rows, marks, relabelled, len(self.series))

    def history(self) -> tuple[Rows, list[Mark]]:
        """All rows and marks, for a page that comes late."""
        with self.lock:
            rows = [(series.number, row[: len(SENT)]) for series in self.series for row in series.ring]
            return rows, list(self.marks)

    # The recording under way

    def _follow_recording(self, now: float, devices: Sequence[Device]) -> Rows:
        """Begins with a new recording and ends with one that is over; the rows whose categories are known thereby."""
        changed: Rows = []
        self._take_checkpoints(now)
        recorder = under_way.current()
        if self._followed is not None and self._followed.has_ended:
            changed = self._end_recording(now, devices, recorder is not None)
        if recorder is not None and self._followed is None:
            self._serial += 1
            self._followed = Followed(recorder, self._serial)
            self._ended_at = None
            self._checkpoints = 0
            for device in devices:
                index = device.facts.index
                log = self._followed.logs.get(index)
                if log is not None and (growing := log.growing) is not None:
                    self._series_of(device).tracker = live.LiveLabels(index, growing.start, growing.carried)
            self._take_checkpoints(now)
        return changed

    def _end_recording(self, now: float, devices: Sequence[Device], is_replaced: bool) -> Rows:
        """Takes over what a recording found out. It may need a moment more, or never come."""
        followed = self._followed
        assert followed is not None
        recording = followed.recorder.recorded
        changed: Rows = []
        if recording is None:
            self._ended_at = now if self._ended_at is None else self._ended_at
            if not is_replaced and now - self._ended_at < _PATIENCE:
                return []
            self.note("The samples of a cell keep their first categories: its recording did not finish.")
        else:
            errors = [point for point in recording.checkpoints if point.kind == "error"]
            self._add_checkpoints(now, errors)
            for device in devices:
                if device.facts.index in recording.logs:
                    changed += self._relabel(recording, followed, device)
        for series in self.series:
            series.tracker = None
            series.idle_key = None
        self._followed = None
        return changed

    def _take_checkpoints(self, now: float) -> None:
        if self._followed is not None:
            points = self._followed.checkpoints
            self._add_checkpoints(now, [point for point in points[self._checkpoints :] if point.kind == "statement"])
            self._checkpoints = len(points)

    def _add_checkpoints(self, now: float, new: Sequence[Checkpoint]) -> None:
        """A mark for the statements that ended since the last sample: one, which names the last of them."""
        if new:
            self._add(Mark(now, CHECKPOINT, short(new[-1].label), new[-1].line, len(new)))

    def _relabel(self, recording: Recording, followed: Followed, device: Device) -> Rows:
        series = self._series_of(device)
        log = followed.logs.get(device.facts.index)
        first = log.first if log is not None else 0
        places = [(place, row) for place, row in enumerate(series.ring) if row[RECORDING] == followed.serial]
        try:
            positions = {int(row[POSITION]) - first for _, row in places}
            found, series.at_end = live.relabel(recording, device.facts.index, positions)
        except Exception as error:
            # Whatever it is, the samples stand as they were taken, and the program that is watched goes on.
            swallowed(error)
            self.note(f"The samples of a cell keep their first categories: {error}")
            return []
        if self._plain is not None:
            self._plain.learn(device, series.at_end)
        series.end_position = first + len(recording.logs[device.facts.index].events)
        changed: Rows = []
        for place, row in places:
            balance = found.get(int(row[POSITION]) - first)
            # Read while memory moved: the position and the counters are not of one moment.
            if balance is None or balance.allocated != row[ALLOCATED]:
                continue
            for category in LAYERS[: LAYERS.index("rounding")]:
                row[FIRST_LAYER + LAYERS.index(category)] = balance.requested.get(category, 0)
            row[FIRST_LAYER + LAYERS.index("rounding")] = balance.rounding
            series.ring.replace(place, row)
            changed.append((series.number, row[: len(SENT)]))
        return changed

    # One device

    def _series_of(self, device: Device) -> Series:
        facts = device.facts
        for series in self.series:
            if series.facts == facts:
                return series
        series = Series(len(self.series), facts, Ring(self._capacity, len(COLUMNS), ALLOCATED))
        self.series.append(series)
        return series

    def _row(self, machine: Machine, device: Device, now: float) -> tuple[int, list[float]]:
        series = self._series_of(device)
        followed = self._followed
        log = followed.logs.get(device.facts.index) if followed is not None and series.tracker is not None else None
        growing = log.growing if log is not None else None
        counters, position = device.glance(log)
        requested: dict[str, int] | None
        if series.tracker is not None and followed is not None and growing is not None and not followed.has_ended:
            series.tracker.advance(growing, followed.sightings, position, followed.recorder.spans_after)
            requested = series.tracker.requested()
        else:
            requested = self._idle(machine, device, series, counters, position)
        if requested is not None and sum(requested.values()) > counters.allocated:
            # A sample in the middle of an operation; what the counters say stands.
            requested = None
        layers = live.layers(requested, counters)
        row = [
            now,
            *(_number(layers[layer]) for layer in LAYERS),
            float(counters.allocated),
            float(counters.reserved),
            _number(counters.device_used),
            float(series.reached(counters)),
            float(followed.serial) if followed is not None else 0.0,
            float(position),
        ]
        series.ring.push(row)
        return series.number, row[: len(SENT)]

    def _idle(
        self, machine: Machine, device: Device, series: Series, counters: Counters, position: int
    ) -> dict[str, int] | None:
        """Categories without a recording. As often as it is cheap."""
        if device.facts.kind != "virtual":
            # Where nothing has moved since the end of a recording, all is still what it was.
            if series.at_end and position == series.end_position:
                return live.sums_of(series.at_end)
            return self._held(machine, device, series, counters, position)
        told = self._plain.requested(device) if self._plain is not None else None
        if told is not None:
            return told
        key = (counters.allocated, counters.reserved, len(device.labels))
        if key == series.idle_key:
            return series.idle
        began = time.perf_counter()
        if began < series.idle_not_before and series.idle is not None and series.idle_key is not None:
            guess = dict(series.idle)
            guess[NOT_YET_KNOWN] += counters.allocated - series.idle_key[0]
            if guess[NOT_YET_KNOWN] >= 0:
                return guess
        segments, labels = machine.look(device)
        series.idle, series.at_end = live.requested_now(segments, labels, series.at_end)
        series.idle_key = key
        now = time.perf_counter()
        series.idle_not_before = now + _REST * (now - began)
        return series.idle

    def _held(
        self, machine: Machine, device: Device, series: Series, counters: Counters, position: int
    ) -> dict[str, int] | None:
        """On a real device: what the notebook's modules and optimizers hold; the rest is not yet known."""
        began = time.perf_counter()
        key = (position, 0, 0)
        if series.idle is None or (key != series.idle_key and began >= series.idle_not_before):
            index = device.facts.index
            series.idle, series.idle_key = held_by_namespace(machine, index, self._namespace), key
            now = time.perf_counter()
            series.idle_not_before = now + _REST * (now - began)
        rest = counters.allocated - sum(series.idle.values())
        if not series.idle or rest < 0:
            return None
        return {**dict.fromkeys(LAYERS, 0), **series.idle, NOT_YET_KNOWN: rest}

    def _add(self, mark: Mark) -> None:
        self.marks.add(mark)
        self._new_marks.append(mark)

    def note(self, text: str) -> None:
        """Keeps a sentence for the summary, once."""
        if text not in self.notes and len(self.notes) < 20:
            self.notes.append(text)


def _number(size: int | None) -> float:
    return _NOTHING if size is None else float(size)
