"""cuDNN's scratch memory for convolutions: an estimate, since only cuDNN knows what it asks PyTorch's allocator for.

Two ways of cuDNN's are estimated; for all others (kernels of one point, strides, groups, float64, channels last) nothing:

* float32, kernels of 3 x 3 without stride or dilation: Winograd's transform of 4 x 4 tiles, not fused. Each tile of 6 x 6 values
  is 36 numbers for every channel of what goes in and of what comes out, and 36 for each pair of channels. Not fitted: these are
  the algorithm's own sizes. Where it is judged: `benchmarks/accuracy`.
  For one sample, before Ampere, only weights are transformed: what a recording of three layers on Turing shows, in five of six
  sizes to the byte.
* float16 and bfloat16 on tensor cores, in the plain layout: copies with the channels last of the input, the weight and the
  result. The published peak of a 3-D layer on an A100 (pytorch issue 95024) is met to the byte, those of a 2-D layer (123533) to
  the printed 0.01 GiB. Kernels of one point without stride are plain products: a trace of four such on an A100 shows
  none, and once 49,664 bytes.

As PyTorch does in ``Conv_v8.cpp``: what has no room is no error, since cuDNN then takes a way that needs less; and with
``torch.backends.cudnn.benchmark`` the first call of each kind empties the cache after its trials. How much the trials themselves
take is not estimated; there it can be all that is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, prod
from typing import Protocol

import torch

from gpumem_magic.allocator.caching import CachingAllocator
from gpumem_magic.snapshot.rules import round_size, segment_size
from gpumem_magic.virtual.card.catalog import DeviceState
from gpumem_magic.virtual.card.generations import is_rocm
from gpumem_magic.virtual.engine.memory import Convolution
from gpumem_magic.virtual.engine.modes import origin
from gpumem_magic.virtual.operators.workspaces import version_text

_TILE = 4
# A tile of 4 x 4 results needs 6 x 6 values.
_VALUES_OF_A_TILE = 36
_FEW_RESULTS = 16


def estimate(call: Convolution, capability: tuple[int, int]) -> int:
    """Bytes that cuDNN takes for the call on a GPU of that compute capability, as far as they can be estimated; else 0."""
    if call.groups != 1 or call.last:
        return 0
    if call.dtype == torch.float32:
        return _few(call) if call.fine[0] == 1 and capability < (8, 0) else _winograd(call)
    first_with_tensor_cores = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}.get(call.dtype)
    if first_with_tensor_cores is None or capability < first_with_tensor_cores or _is_product(call):
        return 0
    return sum(prod(shape) for shape in (call.fine, call.weight, call.coarse)) * call.dtype.itemsize


def _is_product(call: Convolution) -> bool:
    return set(call.kernel) == {1} and set(call.stride) == {1}


def _is_plain(call: Convolution) -> bool:
    return call.kernel == (3, 3) and set(call.stride) == {1} and set(call.dilation) == {1}


def _few(call: Convolution) -> int:
    """One sample: only the weights are transformed, to 5 x 5 for each pair of channels, or laid out anew for few results."""
    if not _is_plain(call) or call.way == "weight":
        return 0
    given, made = call.fine[1], call.coarse[1]
    if call.way == "input":
        given, made = made, given
    if made <= _FEW_RESULTS:
        return given * made * 9 * 4 + made * 4 + 65536
    return given * made * 25 * 4 + made * 4


def _winograd(call: Convolution) -> int:
    if not _is_plain(call):
        return 0
    batch, results, *points = call.coarse
    channels = call.fine[1]
    tiles = batch * prod(ceil(size / _TILE) for size in points)
    return _VALUES_OF_A_TILE * (tiles * (channels + results) + channels * results) * call.dtype.itemsize


class _DeviceWithAllocator(DeviceState, Protocol):
    @property
    def allocator(self) -> CachingAllocator: ...


class Scratch:
    """Takes scratch memory for convolutions and gives it back.

    malloc(device, nbytes), stream_of(device) and free(device, address) are the machine's.
    """

    def __init__(
        self,
        devices: Sequence[_DeviceWithAllocator],
        malloc: Callable[[int, int], int],
        stream_of: Callable[[int], int],
        free: Callable[[int, int], None],
    ) -> None:
        self._devices = devices
        self._malloc = malloc
        self._free = free
        self._stream_of = stream_of
        self._tried: set[tuple[int, Convolution]] = set()

    def size(self, device: int, call: Convolution) -> int:
        """Bytes for the call: the user's figure for the device, or the estimate."""
        model = self._devices[device].model
        if model.convolution_bytes is not None:
            return model.convolution_bytes
        if is_rocm(version_text(self._devices[device])):
            return 0
        return estimate(call, model.capability)

    def take(self, device: int, call: Convolution) -> None:
        """For the time of a call. Nothing where there is no room, since cuDNN has ways that need none."""
        size = self.size(device, call)
        if torch.backends.cudnn.benchmark and (device, call) not in self._tried:
            self._tried.add((device, call))
            self._briefly(device, size)
            self._devices[device].allocator.empty_cache()
        self._briefly(device, size)

    def _briefly(self, device: int, size: int) -> None:
        if not size or not self._fits(device, size):
            return
        estimated = self._devices[device].model.convolution_bytes is None
        with origin("estimate" if estimated else "workspace"):
            address = self._malloc(device, size)
        self._free(device, address)

    def _fits(self, device: int, size: int) -> bool:
        """Whether the memory is there without emptying the cache, which an estimate must not bring about."""
        allocator = self._devices[device].allocator
        if allocator.finds(size, self._stream_of(device)) is not None:
            return True
        settings = allocator.settings_in_force
        needed = segment_size(round_size(size, settings), settings)
        within_limit = allocator.limit is None or allocator.reserved + needed <= allocator.limit
        return within_limit and needed <= allocator.memory.free
