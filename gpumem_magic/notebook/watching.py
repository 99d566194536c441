"""The line of ``%gpumem_watch``: parsed here, done by `watch`."""

# IPython's decorators and errors carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import shlex
from typing import Any

from IPython.core.error import UsageError

from gpumem_magic.widgets import watch

COMMANDS = ("stop", "pause", "resume", "mark")
FLAGS = ("--hz", "--static")
_USAGE = "%gpumem_watch [--hz N] [--static], or %gpumem_watch stop | pause | resume | mark TEXT"


def watch_line(shell: Any, line: str) -> None:
    """Does what a line says. Raises UsageError, in one line."""
    command, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    try:
        if command == "mark":
            watch.running().mark(rest.strip("\"'") or "mark")
        elif command in COMMANDS:
            if rest:
                raise UsageError(f"%gpumem_watch {command} takes nothing behind it")
            under_way = watch.running()
            {"stop": under_way.stop, "pause": under_way.pause, "resume": under_way.resume}[command]()
        else:
            hz, static = _options(line)
            watch.start(shell, hz, static=static)
    except watch.WatchError as error:
        raise UsageError(str(error)) from None


def _options(line: str) -> tuple[float, bool]:
    hz, static = watch.DEFAULT_HZ, False
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%gpumem_watch: {error}") from None
    while words:
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        if flag == "--hz":
            if not equals:
                text = words.pop(0) if words else ""
            hz = _rate(text)
        elif word == "--static":
            static = True
        else:
            raise UsageError(f"unexpected {word!r}: {_USAGE}")
    return hz, static


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--hz wants a number of samples a second, not {text!r}") from None


def complete(event: Any) -> list[str]:
    """The words that may follow ``%gpumem_watch``."""
    return list(FLAGS) if str(event.symbol).startswith("-") else [*COMMANDS, *FLAGS]
