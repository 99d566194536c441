"""The live chart in a notebook: a model that carries a few settled facts, and one small binary message for each sample.

The page draws (``watch.js``); rows are sent once and never again, so a sample costs under a kilobyte whatever the run's length.
"""

# traitlets and anywidget carry types that a strict check does not accept as base classes.
# mypy: disallow-any-unimported=False, disallow-subclassing-any=False, disallow-untyped-calls=False

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import traitlets

from gpumem_magic.views.pages import card, one_script, vector_image
from gpumem_magic.views.placed import PlacedWidget
from gpumem_magic.widgets.columns import HATCH_COLOUR, LAYER_COLOURS, LAYER_LABELS, LAYERS, SENT
from gpumem_magic.widgets.marks import Mark
from gpumem_magic.widgets.observer import Rows
from gpumem_magic.widgets.picture import WIDTH, svg
from gpumem_magic.widgets.samples import Samples, summary

_FOLDER = Path(__file__).parent

_MODULES = ("../units.js", "../place.js", "watch_store.js", "watch_chart.js", "watch.js")
_STYLES = ("../views/notebook.css", "watch.css")


ROWS, HISTORY, RELABELLED, ALIVE, LEFT = "rows", "history", "relabelled", "alive", "left"


class WatchWidget(PlacedWidget):
    """The model in the kernel. on_request: called with what the page asks for ("pause", "resume",
    "mark", "stop", "hello"), a text, and the time of what was on the screen. samples: what there is so far."""

    _esm = one_script(_FOLDER, _MODULES)
    _css = "".join((_FOLDER / name).read_text("utf-8") for name in _STYLES)

    state = traitlets.Unicode("running").tag(sync=True)
    period = traitlets.Float(0.1).tag(sync=True)
    started = traitlets.Float(0.0).tag(sync=True)
    capacity = traitlets.Int(4096).tag(sync=True)
    columns = traitlets.List(traitlets.Unicode()).tag(sync=True)
    layers = traitlets.List(traitlets.Dict()).tag(sync=True)
    series = traitlets.List(traitlets.Dict()).tag(sync=True)

    def __init__(
        self, on_request: Callable[[str, str, float | None], None], samples: Callable[[], Samples], **facts: Any
    ) -> None:
        super().__init__(
            columns=list(SENT),
            layers=[
                {"name": layer, "label": LAYER_LABELS[layer], "colour": LAYER_COLOURS[layer]}
                | ({"hatch": HATCH_COLOUR} if layer not in _SOLID else {})
                for layer in LAYERS
            ],
            **facts,
        )
        self._on_request = on_request
        self._samples = samples
        self.on_msg(self._received)
        answer_while_busy(self.comm)

    def send_rows(self, kind: str, rows: Rows, marks: Sequence[Mark], number: int) -> None:
        """Rows of several series in one buffer of float64; `s` says which row belongs to which series."""
        content: dict[str, Any] = {"k": kind, "n": number}
        if kind in (ROWS, HISTORY, RELABELLED):
            content["s"] = [series for series, _ in rows]
        if marks:
            content["m"] = [mark.to_dict() for mark in marks]
        buffer = array("d")
        for _, row in rows:
            buffer.extend(row)
        self.send(content, buffers=[buffer.tobytes()] if rows else None)

    def still(self) -> dict[str, Any]:
        """The chart so far, for a page without this kernel."""
        samples = self._samples()
        words = summary(samples)
        if not any(device.rows for device in samples.devices):
            head = "The live chart of GPU memory stands here while the kernel that draws it runs."
            return {"text/html": card(head, []), "text/plain": words}
        head, _, _ = words.partition("\n")
        return {"text/html": card(head, [vector_image(svg(samples), words, WIDTH)]), "text/plain": words}

    def show_what_is_left(self, page: str) -> None:
        """Puts HTML where views of this widget are."""
        self.send({"k": LEFT, "html": page})

    def leave(self) -> None:
        """Closes every comm that this widget opened: its own and its layout's, which `close` alone leaves open."""
        layout = self.layout
        self.close()
        if layout is not None:
            layout.close()

    def _received(self, _widget: Any, content: Any, _buffers: Any) -> None:
        if isinstance(content, dict) and isinstance(content.get("k"), str):
            at = content.get("time")
            self._on_request(content["k"], str(content.get("text", "")), at if isinstance(at, float) else None)


_SOLID = frozenset(LAYERS) - {"not_yet_known"}


def answer_while_busy(comm: Any) -> None:
    """Lets the page's buttons be answered while a cell runs, where ipykernel has subshells.

    ipykernel 7.4 sends a widget's messages to the shell of the cell that made it, which is the busy one; its choice is undone for
    this comm alone, by a private name. Tried on 7.3 (which needs nothing) and 7.4; without the name nothing is done, and the
    buttons are answered after the cell.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, default: default
