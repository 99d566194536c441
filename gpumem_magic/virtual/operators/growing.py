"""What grows where algorithms are deterministic: PyTorch fills it, by a tensor of one element that comes and goes.

After ``Resize.h`` in ATen/native, for results that kernels begin with no element and then make as large as they have to be. The
CUDA builds of 2.1, 2.6 and 2.13 do so, and a recording with 2.1.
"""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.virtual.engine.engine import Engine

_FILLED_FROM = (2, 1)


def fills(engine: Engine, device: int) -> bool:
    settings: Any = torch.utils.deterministic
    if not (torch.are_deterministic_algorithms_enabled() and settings.fill_uninitialized_memory):
        return False
    return engine.memory.torch_version(device) >= _FILLED_FROM


def fill(engine: Engine, device: int, element: int) -> None:
    """The element comes, and goes. element: its bytes."""
    if fills(engine, device):
        with engine.scratch(device, element):
            pass
