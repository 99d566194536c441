"""The bar in a notebook's page: a model without a view, so that no output is made. ``progress.js`` draws it."""

# traitlets and anywidget carry types that a strict check does not accept as base classes.
# mypy: disallow-any-unimported=False, disallow-subclassing-any=False, disallow-untyped-calls=False

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets


class ProgressWidget(anywidget.AnyWidget):
    """It is in the page as long as the model is."""

    _esm = Path(__file__).with_name("progress.js").read_text("utf-8")

    facts = traitlets.Dict().tag(sync=True)
    over = traitlets.Bool(False).tag(sync=True)

    def show(self, words: str, shares: tuple[float, float]) -> None:
        self.facts = {"words": words, "now": shares[0], "most": shares[1]}

    def leave(self) -> None:
        """Takes the bar out of the page, and closes every comm that it opened."""
        layout = self.layout
        self.over = True
        self.close()
        if layout is not None:
            layout.close()
