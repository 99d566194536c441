"""``%gpumem_watch``: carries out its arguments on the watch."""

# IPython's errors carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import argparse
import shlex
from typing import Any

from IPython.core.error import UsageError

from gpumem_magic.notebook.engines import chosen


def watch(shell: Any, options: argparse.Namespace) -> None:
    """Does what is asked for. Raises UsageError, in one line, or ipyparallel's error."""
    from gpumem_magic.widgets import watch as watches
    from gpumem_magic.widgets.engines import EnginesObserver, usual_hz

    try:
        if options.command is None:
            hz, observer = options.hz, None
            if options.engines is not None:
                client, engines = chosen(shell, options.engines, "%gpumem_watch")
                hz = usual_hz(engines) if hz is None else hz
                observer = EnginesObserver(client, engines, hz)
            watches.start(shell, watches.DEFAULT_HZ if hz is None else hz, static=options.static, observer=observer)
        elif options.command == "mark":
            watches.running().mark(options.text or "mark")
        else:
            getattr(watches.running(), options.command)()
            watches.show_what_was_lost()
    except watches.WatchError as error:
        raise UsageError(str(error)) from None


def watch_words(line: str) -> list[str]:
    """A mark's text is one word, whatever is in it. Raises ValueError."""
    command, _, rest = line.strip().partition(" ")
    return [command, "--", rest.strip().strip("\"'")] if command == "mark" else shlex.split(line)
