"""Memory that libraries take beside an operator's results.

cuBLAS: one workspace for each handle and stream, kept for good. Handles belong to host threads, and the autograd engine has
a thread of its own for each device: hence two workspaces after the first backward pass (a published table of 48 measured
rows is met exactly only so). The size is the model's (`GpuModel.cublas_workspace_bytes`); it is taken after the operator's
result, as on a device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpumem_magic.virtual.catalog import DeviceState
from gpumem_magic.virtual.modes import STATE, origin

_aten = torch.ops.aten

_BLAS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.addmv.default,
    _aten.mv.default,
    _aten.dot.default,
    _aten.vdot.default,
    _aten._addmm_activation.default,
    _aten._scaled_mm.default,
    _aten._int_mm.default,
}


class Workspaces:
    """Takes cuBLAS workspaces when they are first needed. malloc(device, nbytes) is the machine's."""

    def __init__(
        self, devices: Sequence[DeviceState], malloc: Callable[[int, int], int], stream_of: Callable[[int], int]
    ) -> None:
        self._devices = devices
        self._malloc = malloc
        self._stream_of = stream_of
        self._taken: set[tuple[int, int, int]] = set()

    def after(self, func: Any, device: int) -> None:
        """To be called when an operator has its results. Raises out of memory as the device would."""
        if func not in _BLAS:
            return
        size = self._devices[device].model.cublas_workspace_bytes
        thread = -1 if STATE.backward else threading.get_ident()
        key = (device, thread, self._stream_of(device))
        if size and key not in self._taken:
            with origin("workspace"):
                self._malloc(device, size)
            self._taken.add(key)
