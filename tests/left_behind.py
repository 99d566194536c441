"""What trials have left: processes, folders, and memory that processes share."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import threading
from pathlib import Path

_others: set[str] = set()


def note_others() -> None:
    """What is there before a test is no trial's of it: a browser's driver, a server of forks that another test needed."""
    _others.clear()
    _others.update(_children())


def left_behind() -> list[str]:
    """Processes of trials since `note_others`, and folders of trials that are still there."""
    own = _others | {str(one.pid) for one in multiprocessing.active_children()}
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    own.add(str(getattr(tracker, "_pid", None)))
    folders = map(str, Path(tempfile.gettempdir()).glob("gpumem-trial-*"))
    return [one for one in _children() if one not in own] + [*folders]


def _children() -> list[str]:
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    return children.read_text().split() if children.exists() else []


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[:1]
    except OSError:
        return False
