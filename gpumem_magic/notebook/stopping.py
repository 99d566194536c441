"""Ctrl-C while trials or ranks run in processes of their own: one line says so, and still ends what would run next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Stopped(KeyboardInterrupt):
    """Ctrl-C, of which no line of the user's and none of ours is told. The text is one line."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows."""
        return [f"KeyboardInterrupt: {self}"]


@contextmanager
def stopped_in_a_line(what: str = "trials") -> Iterator[None]:
    """Raises Stopped in place of a KeyboardInterrupt. what: the processes that were ended."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(f"the {what} were ended. Nothing of the cell ran in the notebook.") from None
