"""What an operation takes on a virtual GPU and gives back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def scratch(work: Callable[[], Any]) -> int:
    """Bytes at the peak beside what was there and what the work returns."""
    torch.cuda.reset_peak_memory_stats()
    kept = work()
    now = torch.cuda.memory_allocated()
    del kept
    return torch.cuda.max_memory_allocated() - now
