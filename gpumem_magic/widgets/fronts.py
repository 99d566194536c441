"""The faces of a watch: a widget, a picture updated in place, one line in a terminal, or only the summary.

A front is given samples by the sampler's thread, and is opened and closed once. It keeps no samples: those are the watch's.
"""

# IPython's functions carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

from gpumem_magic.units import human
from gpumem_magic.widgets.columns import ALLOCATED, DEVICE_USED, PEAK, RESERVED, value
from gpumem_magic.widgets.observer import Observer, Sample, Series
from gpumem_magic.widgets.page import left_behind
from gpumem_magic.widgets.samples import Samples, summary


class Front:
    """state: running | paused | stopped. `show` and `close` may be called from any thread; `close` more than once."""

    _closed = False

    def open(self) -> None:
        pass

    def show(self, sample: Sample, state: str) -> None:
        pass

    def cell_begins(self) -> None:
        pass

    def cell_ended(self) -> None:
        """The notebook is idle again."""

    def lost(self) -> dict[str, Any] | None:
        """What `close` left that may not have come where it belongs, to be shown elsewhere: once."""
        return None

    def close(self, samples: Samples) -> None:
        if not self._closed:
            self._closed = True
            self._end(samples)

    def _end(self, samples: Samples) -> None:
        pass


class _InNotebook(Front):
    """A display of the notebook, replaced in place: at the end by the picture and the summary."""

    def __init__(self) -> None:
        self._id = f"gpumem-watch-{uuid.uuid4().hex}"

    def open(self) -> None:
        from IPython.display import display

        first = self._first()
        display(first, raw=isinstance(first, dict), display_id=self._id)

    def _first(self) -> Any:
        """What stands there to begin with: a display bundle, or what knows how to show itself."""
        raise NotImplementedError

    def _end(self, samples: Samples) -> None:
        self._replace(left_behind(samples))

    def _replace(self, bundle: dict[str, Any]) -> None:
        from IPython.display import update_display

        update_display(bundle, raw=True, display_id=self._id)


class WidgetFront(_InNotebook):
    """The live chart. on_request: see `WatchWidget`."""

    def __init__(
        self,
        observer: Observer,
        period: float,
        on_request: Callable[[str, str, float | None], None],
        samples: Callable[[], Samples],
    ) -> None:
        from gpumem_magic.widgets.widget import WatchWidget

        super().__init__()
        self._observer = observer
        self._on_request = on_request
        self._number = 0
        self._known_series = 0
        self._beat = 0.0
        self._owes_picture = False
        self._pages = 0
        self._lost: dict[str, Any] | None = None
        self.widget = WatchWidget(self._requested, samples, period=period, started=time.time())

    def _first(self) -> Any:
        return self.widget

    def show(self, sample: Sample, state: str) -> None:
        from gpumem_magic.widgets.widget import ALIVE, RELABELLED, ROWS

        if self._closed:
            return
        if self.widget.state != state:
            self.widget.state = state
        if sample.series != self._known_series:
            self._known_series = sample.series
            self.widget.series = [_facts(series) for series in self._observer.series]
        if sample.relabelled:
            self.widget.send_rows(RELABELLED, sample.relabelled, (), self._number)
        if sample.rows or sample.marks:
            self._number += 1
            self.widget.send_rows(ROWS, sample.rows, sample.marks, self._number)
            self._beat = time.monotonic()
        elif time.monotonic() - self._beat > 1.0:
            # Nothing to show, and still alive: the page can tell a pause from a dead kernel.
            self.widget.send_rows(ALIVE, [], (), self._number)
            self._beat = time.monotonic()
        self._give_picture()

    def cell_ended(self) -> None:
        """The picture beneath the chart is today's, for a page that will have no chart."""
        self._owes_picture = True
        self._give_picture()

    def _give_picture(self) -> None:
        """Once there is something to draw: the cell that starts the watch may end before the first sample."""
        from gpumem_magic.views.placed import loads_widgets_on_sight

        if not self._owes_picture or not any(series.ring.taken for series in self._observer.shown):
            return
        self._owes_picture = False
        if not self._closed and not loads_widgets_on_sight():
            self._replace(self.widget.bundle())

    def _end(self, samples: Samples) -> None:
        self.widget.state = "stopped"
        left = left_behind(samples)
        try:
            self._replace(left)
            self.widget.show_what_is_left(left["text/html"])
            # A page that was loaded anew does not know any more which output is meant.
            self._lost = left if self._pages > 1 else None
        finally:
            self.widget.leave()

    def lost(self) -> dict[str, Any] | None:
        lost, self._lost = self._lost, None
        return lost

    def _requested(self, kind: str, text: str, at: float | None) -> None:
        if kind == "hello":
            self._pages += 1
            from gpumem_magic.widgets.widget import HISTORY

            with self._observer.lock:
                rows, marks = self._observer.history()
                if not self._closed:
                    self.widget.send_rows(HISTORY, rows, marks, self._number)
        else:
            self._on_request(kind, text, at)


class StaticFront(_InNotebook):
    """A picture in SVG, replaced in place: no script in the page, and no buttons. At most twice a second."""

    SECONDS = 0.5

    def __init__(self, samples: Callable[[], Samples]) -> None:
        super().__init__()
        self._samples = samples
        self._shown = 0.0

    def show(self, sample: Sample, state: str) -> None:
        now = time.monotonic()
        if self._closed or now - self._shown < self.SECONDS or not (sample.rows or sample.marks or sample.relabelled):
            return
        self._shown = now
        self._replace(self._first())

    def _first(self) -> dict[str, Any]:
        from gpumem_magic.widgets.picture import svg

        samples = self._samples()
        return {"image/svg+xml": svg(samples), "text/plain": summary(samples)}


class SummaryFront(_InNotebook):
    """Nothing while it runs; the picture and the summary after each cell, so that they are there however the run ends."""

    def __init__(self, look: Callable[[], None], samples: Callable[[], Samples]) -> None:
        super().__init__()
        self._look = look
        self._samples = samples

    def _first(self) -> dict[str, Any]:
        return {"text/plain": "gpumem: watching the GPU's memory"}

    def cell_ended(self) -> None:
        if self._closed:
            return
        # The last sample is from before the cell's end.
        self._look()
        if (samples := self._samples()).devices:
            self._replace(left_behind(samples))


class LineFront(Front):
    """One line in a terminal, rewritten while a cell runs; the summary at the end. In a pipe only the summary."""

    SECONDS = 0.25

    def __init__(self, observer: Observer, stream: Any = None, columns: Callable[[], int] | None = None) -> None:
        self._observer = observer
        self._stream = stream if stream is not None else sys.stdout
        self._columns = columns if columns is not None else _terminal_width
        self._live = bool(getattr(self._stream, "isatty", lambda: False)())
        self._busy = False
        self._on_line = False
        self._shown = 0.0

    def open(self) -> None:
        self._write("gpumem: watching the GPU's memory; `%gpumem_watch stop` ends it\n")

    def cell_begins(self) -> None:
        self._busy = True

    def show(self, sample: Sample, state: str) -> None:
        now = time.monotonic()
        # At the prompt nothing is written: that line is the user's.
        if not self._live or not self._busy or self._closed or not sample.rows or now - self._shown < self.SECONDS:
            return
        self._shown = now
        self._rewrite()

    def _rewrite(self) -> None:
        series, columns = self._observer.shown, self._columns() - 1
        words = " | ".join(line_of(each) for each in series)
        if len(words) > columns:
            words = " | ".join(short_line_of(each) for each in series)
        self._write(f"\r\x1b[2K{words[:columns]}")
        self._on_line = True

    def cell_ended(self) -> None:
        self._busy = False
        if self._on_line:
            self._rewrite()
            self._on_line = False
            self._write("\n")

    def _end(self, samples: Samples) -> None:
        self.cell_ended()
        self._write(summary(samples) + "\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def line_of(series: Series) -> str:
    """``cuda:0 T4  allocated 3,769 MiB  reserved 3,900 MiB  peak 4,096 MiB  nvidia-smi 5,272 MiB of 15.0 GiB``."""
    row = series.ring.latest
    if row is None:
        return series.title
    words = [f"{series.title} {_name(series)}"]
    words += [f"{name} {human(value(row, column) or 0)}" for name, column in _LINE]
    used = value(row, DEVICE_USED)
    if used is not None:
        words.append(f"nvidia-smi {human(used)} of {human(series.facts.capacity)}")
    return "  ".join(words)


def short_line_of(series: Series) -> str:
    """``cuda:0 3,769 MiB (peak 4,096 MiB)``: allocated, where there is no room for more."""
    row = series.ring.latest
    if row is None:
        return series.title
    allocated, peak = (human(value(row, column) or 0) for column in (ALLOCATED, PEAK))
    return f"{series.title} {allocated} (peak {peak})"


_LINE = (("allocated", ALLOCATED), ("reserved", RESERVED), ("peak", PEAK))


def _facts(series: Series) -> dict[str, Any]:
    return {
        "title": series.title,
        "place": series.place,
        "name": _name(series),
        "capacity": series.facts.capacity,
    }


def _name(series: Series) -> str:
    return f"{'virtual ' if series.facts.kind == 'virtual' else ''}{series.facts.name}"


def _terminal_width() -> int:
    import shutil

    return shutil.get_terminal_size().columns
