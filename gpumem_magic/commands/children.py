"""Processes that a script starts afresh, of `multiprocessing`, while it runs on a virtual GPU; ranks are in `session.launches`.

Each of them gets the same devices, measures itself, and says at its end in a sentence or two where its memory went. They share no
memory: what one of them takes on a card is not missed by the others.
"""

from __future__ import annotations

import multiprocessing.spawn
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpumem_magic.failures import swallowed
from gpumem_magic.patching import Patches
from gpumem_magic.report.script_words import told_of_a_script

_PLAIN = "from multiprocessing.spawn import spawn_main; spawn_main("


@contextmanager
def measured_children(device: str | None) -> Iterator[list[str]]:
    """Inside, processes that are started afresh have the virtual devices of that name; None: they start as ever.

    Hands over a list in which each of these has an entry.
    """
    started: list[str] = []
    patches = Patches()
    original = multiprocessing.spawn.get_command_line

    def get_command_line(**pipe: Any) -> list[str]:
        started.append(str(device))
        own = f"from gpumem_magic.commands.children import main; main({device!r}, "
        # (The interpreter's path is bytes.)
        return [one.replace(_PLAIN, own, 1) if isinstance(one, str) else one for one in original(**pipe)]

    if device is not None:
        patches.set(multiprocessing.spawn, "get_command_line", get_command_line)
    try:
        yield started
    finally:
        patches.undo()


def main(device: str, **pipe: Any) -> None:
    """What such a process runs. Leaves as `multiprocessing.spawn.spawn_main` does, by SystemExit."""
    from gpumem_magic.session import recording

    found = None
    try:
        found = recording.open_recording(device, words=told_of_a_script)
    except Exception as error:
        _say(f"measuring is not possible here ({swallowed(error).splitlines()[0]})")
    try:
        multiprocessing.spawn.spawn_main(**pipe)
    finally:
        if found is not None:
            try:
                _say(found.close().answer)
            except Exception as error:
                _say(f"the report could not be made ({swallowed(error).splitlines()[0]})")


def _say(text: str) -> None:
    print(f"gpumem: {multiprocessing.current_process().name}: {text}", file=sys.stderr)
