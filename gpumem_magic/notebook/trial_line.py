"""One line that says what was run last; it goes when the answer comes."""

# IPython's display carries no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import sys
from typing import Any

from gpumem_magic.views.display import in_terminal


class TrialLine:
    """Shown in a notebook only."""

    def __init__(self, *, quiet: bool) -> None:
        self._shown: Any = None
        self._quiet = quiet or in_terminal() or not sys.stdout
        self._count = 0

    def told(self, words: str) -> None:
        self._count += 1
        if self._quiet:
            return
        from IPython.display import display

        bundle = {"text/plain": f"Trial {self._count}, {words}"}
        if self._shown is None:
            self._shown = display(bundle, raw=True, display_id=True)
        else:
            self._shown.update(bundle, raw=True)

    def end(self) -> None:
        if self._shown is not None:
            self._shown.update({"text/plain": ""}, raw=True)
