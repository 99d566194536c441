"""Futures of what a device does, whose callbacks run on streams of their own, as the ones that NCCL's handles give.

``ivalue_inl.h`` (`invokeCallback`, read in 2.13): before a callback a stream of PyTorch's pool becomes the current one on
each of the future's devices, and a callback's own future has the same devices. What is multiplied there takes cuBLAS's
workspace of that stream (an H100 with 2.11: 32 MiB for each of PowerSGD's callbacks that multiplies).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.virtual.torch_face.streams import Stream, StreamContext


class DeviceFuture(torch.futures.Future[Any]):
    """A future of one virtual device."""

    def __init__(self, device: int) -> None:
        super().__init__()
        self._device = device

    def then(self, callback: Callable[[Any], Any]) -> Any:
        after = DeviceFuture(self._device)

        def run(done: Any) -> None:
            try:
                after.set_result(callback(done))
            except Exception as error:
                after.set_exception(error)

        self.add_done_callback(run)
        return after

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        def run(_: object) -> None:
            with StreamContext(Stream(self._device)):
                callback(self)

        super().add_done_callback(run)


def finished(device: int, result: Any) -> DeviceFuture:
    """A future that has its result."""
    done = DeviceFuture(device)
    done.set_result(result)
    return done
