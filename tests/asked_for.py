"""What a program asks a virtual device for, and gives back, in bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def events(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """Each allocation and free while it runs, as PyTorch's history has it."""
    memory: Any = torch.cuda.memory
    memory._record_memory_history()
    kept = run()
    trace = memory._snapshot()["device_traces"][0]
    memory._record_memory_history(None)
    del kept
    return [one for one in trace if one["action"] in ("alloc", "free_requested")]


def steps(run: Callable[[], Any]) -> list[tuple[str, int]]:
    """(action, bytes) of each allocation and free while it runs."""
    return [(one["action"], one["size"]) for one in events(run)]


def made(run: Callable[[], Any]) -> list[int]:
    """Bytes of each allocation while it runs."""
    return [size for action, size in steps(run) if action == "alloc"]
