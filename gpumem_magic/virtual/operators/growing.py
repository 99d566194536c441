"""What grows where algorithms are deterministic: PyTorch fills it, by a tensor of one element that comes and goes.

After ``Resize.h`` in ATen/native, for results that kernels begin with no element and then make as large as they have to be. The
CUDA builds of 2.1, 2.6 and 2.13 do so, and a recording with 2.1.
"""

from __future__ import annotations

from gpumem_magic.virtual.engine import deterministic
from gpumem_magic.virtual.engine.engine import Engine


def fill(engine: Engine, device: int, element: int) -> None:
    """The element comes, and goes. element: its bytes."""
    if deterministic.fills_what_grows(engine.memory.torch_version(device)):
        with engine.scratch(device, element):
            pass
