"""What trials have left: processes, folders, and memory that processes share."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import threading
from pathlib import Path


def left_behind() -> list[str]:
    """Processes and folders of trials that are still there."""
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    found = children.read_text().split() if children.exists() else []
    own = {str(one.pid) for one in multiprocessing.active_children()}
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    own.add(str(getattr(tracker, "_pid", None)))
    return [one for one in found if one not in own] + [*map(str, Path(tempfile.gettempdir()).glob("gpumem-trial-*"))]


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[:1]
    except OSError:
        return False
