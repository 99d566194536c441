"""The watch of several engines of ipyparallel: on each a watch of its own, whose samples come to the notebook while cells run.

They come as outputs of the request that began the watch, which ipyparallel's client takes in by a thread of its own: no file,
no port, and an engine on another computer is like one on this. What the engines mark themselves is left out.
"""

# IPython's functions carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from IPython.core.getipython import get_ipython

from gpumem_magic.devices.base import DeviceFacts
from gpumem_magic.failures import swallowed, swallows
from gpumem_magic.widgets import watch
from gpumem_magic.widgets.columns import ALLOCATED, SENT, TIME
from gpumem_magic.widgets.fronts import Front
from gpumem_magic.widgets.marks import CELL
from gpumem_magic.widgets.observer import Observer, Rows, Sample, Series
from gpumem_magic.widgets.ring import Ring
from gpumem_magic.widgets.samples import Samples, plain

MIME = "application/x-gpumem-samples"
# Samples a second that the notebook takes from all engines together, unless it is told a rate.
_TOGETHER = 40.0
# Seconds for engines to begin, and to end: one may be busy with a cell.
_PATIENCE = 5.0
# On an engine: the watch for a notebook.
_watch: watch.Watch | None = None


def usual_hz(engines: Sequence[int]) -> float:
    """Samples a second of each engine."""
    return min(watch.DEFAULT_HZ, max(_TOGETHER / len(engines), watch.MIN_HZ))


# ---- on an engine


class _Sender(Front):
    """Sends what is new to who asked for this watch; at the end all rows, so that none is lost."""

    def __init__(self, made: watch.Watch) -> None:
        shell: Any = get_ipython()
        self._kernel = shell.kernel
        self._request = shell.get_parent()
        self._series = made.observer.series

    def show(self, sample: Sample, state: str) -> None:
        if rows := [*sample.relabelled, *sample.rows]:
            self._send(rows)

    def _end(self, samples: Samples) -> None:
        rows = [(number, list(row)) for number, device in enumerate(samples.devices) for row in device.rows]
        self._send(rows, notes=samples.notes)

    def _send(self, rows: Rows, **more: Any) -> None:
        content = {
            "devices": [asdict(series.facts) for series in self._series],
            "rows": [(number, plain(row)) for number, row in rows],
            **more,
        }
        session, socket = self._kernel.session, self._kernel.iopub_socket
        session.send(socket, "display_data", {"data": {MIME: content}, "metadata": {}}, self._request, b"gpumem")


def begin(hz: float) -> None:
    """On an engine."""
    global _watch
    _watch = watch.start(get_ipython(), hz, front_of=_Sender)


def end() -> None:
    """On an engine. Does nothing if its watch has ended."""
    global _watch
    if _watch is not None:
        _watch.stop()
    _watch = None


# ---- in the notebook


@dataclass
class _OfEngine:
    """begun: the answer to `begin`. shift: seconds from its clock to ours. lanes, seen: of its devices' numbers; seen: the time
    of the newest row, which in a pause is not kept."""

    number: int
    begun: Any = None
    shift: float | None = None
    lanes: dict[int, Series] = field(default_factory=dict)
    seen: dict[int, float] = field(default_factory=dict)
    over: bool = False


class EnginesObserver(Observer):
    """Takes in what the engines' watches send. client: ipyparallel's."""

    def __init__(self, client: Any, engines: Sequence[int], hz: float) -> None:
        super().__init__()
        self._client = client
        self._hz = hz
        self._engines = [_OfEngine(number) for number in engines]

    def follow(self, shell: Any, undo: list[Callable[[], None]]) -> None:
        """Begins on the engines. Raises an engine's error as ipyparallel gives it, where it comes soon."""
        undo.append(self._end)
        for engine in self._engines:
            engine.begun = self._client[engine.number].apply_async(begin, self._hz)
        last = time.monotonic() + _PATIENCE
        for engine in self._engines:
            engine.begun.wait(max(0.0, last - time.monotonic()))
            if engine.begun.ready():
                engine.begun.get()

    def observe(self, *, resting: bool = False) -> Sample:
        with self.lock:
            fresh: Rows = []
            relabelled: Rows = []
            for engine in self._engines:
                for message in self._messages(engine):
                    self._take(engine, message, fresh, relabelled, resting)
            marks, self._new_marks = self._new_marks, []
            return Sample(self._clock(), fresh, marks, relabelled, len(self.series))

    def _messages(self, engine: _OfEngine) -> Iterator[dict[str, Any]]:
        gone = engine.number not in self._client.ids
        if engine.over or engine.begun is None or not (gone or engine.begun.ready()):
            return
        if engine.shift is None and not gone:
            try:
                engine.begun.get()
            except Exception as error:
                engine.over = True
                self.note(f"Engine {engine.number} is not watched: {swallowed(error)}")
                return
        if engine.shift is None:
            engine.shift = _shift(engine.begun.metadata)
        outputs = self._client.metadata[engine.begun.msg_ids[0]]["outputs"]
        while outputs:
            message = outputs.pop(0)["data"].get(MIME)
            if message is not None:
                yield message
        if gone and not engine.over:
            engine.over = True
            self.mark(f"engine {engine.number} is gone", CELL)
            self.note(f"Engine {engine.number} is gone: its last figures are from before that.")

    def _take(self, engine: _OfEngine, message: dict[str, Any], fresh: Rows, relabelled: Rows, resting: bool) -> None:
        if "notes" in message:
            engine.over = True
            for note in message["notes"]:
                self.note(f"engine {engine.number}: {note}")
        for number, given in message["rows"]:
            series = engine.lanes.get(number)
            if series is None:
                facts = DeviceFacts(**message["devices"][number])
                ring = Ring(self._capacity, len(SENT), ALLOCATED)
                series = engine.lanes[number] = Series(len(self.series), facts, ring, engine.number)
                self.series.append(series)
            row = [float("nan") if figure is None else float(figure) for figure in given]
            row[TIME] += engine.shift or 0.0
            ring = series.ring
            if row[TIME] > engine.seen.get(number, 0.0):
                engine.seen[number] = row[TIME]
                if not resting:
                    ring.push(row)
                    fresh.append((series.number, row))
            elif (place := _place(ring, row[TIME])) is not None:
                ring.replace(place, row)
                relabelled.append((series.number, row))

    def _end(self) -> None:
        """Ends the engines' watches; one that is busy ends its own behind its cell."""
        living = [engine for engine in self._engines if engine.begun is not None and not engine.over]
        for engine in living:
            try:
                self._client[engine.number].apply_async(end)
            except Exception as error:
                # It is gone, or the client is closed.
                if not swallows(error):
                    raise
        last = time.monotonic() + _PATIENCE
        while any(not engine.over for engine in living) and time.monotonic() < last:
            time.sleep(0.02)
            self.observe()
        for engine in living:
            if not engine.over:
                self.note(f"Engine {engine.number} is busy: its watch ends with what it does.")


def _place(ring: Ring, moment: float) -> int | None:
    place = bisect_left(range(len(ring)), moment, key=lambda at: ring.row(at)[TIME])
    return place if place < len(ring) and ring.row(place)[TIME] == moment else None


def _shift(answer: Any) -> float:
    """Seconds from an engine's clock to ours: none where its answer was made after the request and before it came."""
    sent, made, came = (answer[name] for name in ("submitted", "completed", "received"))
    if sent is None or made is None or came is None or sent <= made <= came:
        return 0.0
    return float((came - made).total_seconds())
