"""The IPython that the program runs in, if it runs in one. Nothing is imported for the question."""

from __future__ import annotations

import sys
from typing import Any


def running_shell() -> Any:
    """The shell, or None."""
    core = sys.modules.get("IPython.core.interactiveshell")
    return core.InteractiveShell.instance() if core is not None and core.InteractiveShell.initialized() else None
