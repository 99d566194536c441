"""One line that says what is run now, for work that takes long; the answer takes its place."""

# IPython's display carries no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import shutil
import sys
from typing import Any

from gpumem_magic.looks.shell import running_shell
from gpumem_magic.views.display import PLAIN, in_terminal

_CLEARED = "\r\x1b[K"


class ProgressLine:
    """An output of a notebook; in a terminal a line of its own that is written over. Nothing where nobody reads it."""

    def __init__(self, *, quiet: bool = False) -> None:
        in_notebook = running_shell() is not None and not in_terminal()
        self._is_output = in_notebook and not quiet
        self._is_line = not in_notebook and not quiet and sys.stderr is not None and sys.stderr.isatty()
        self._output: Any = None
        self._was_written = False

    def __call__(self, words: str) -> None:
        if self._is_line:
            self._was_written = True
            room = shutil.get_terminal_size().columns - 1
            print(_CLEARED + words[:room], end="", file=sys.stderr, flush=True)
        elif self._is_output and self._output is None:
            from IPython.display import display

            self._output = display({PLAIN: words}, raw=True, display_id=True)
        elif self._is_output:
            self._output.update({PLAIN: words}, raw=True)

    def become(self, answer: object) -> bool:
        """Shows the answer in the output where the line was; False where there was none."""
        if self._output is None:
            return False
        self._output.update(answer)
        self._output = None
        return True

    def end(self) -> None:
        """It is gone."""
        if self._output is not None:
            self._output.update({PLAIN: ""}, raw=True)
            self._output = None
        if self._was_written:
            self._was_written = False
            print(_CLEARED, end="", file=sys.stderr, flush=True)
