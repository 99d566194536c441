"""What Fourier transforms take beside their results: copies of the input, and results of transforms along fewer dimensions.

After ``SpectralOps.cpp`` and ``CuFFTPlanCache.h`` in ATen/native/cuda, as in 2.13. cuFFT transforms up to three dimensions at
once, of matrices that lie at equal distances; what lies otherwise is copied first. More dimensions, and real tensors along their
first two, take a result for each step, in two buffers by turns. From complex to real the input is always copied, since cuFFT may
write over it. What cuFFT itself takes while it runs only cuFFT knows: nothing is counted for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.calls import bytes_of
from gpumem_magic.virtual.engine.engine import Engine, special

_MOST_AT_ONCE = 3


class _Lying:
    """How a tensor lies that is transformed step by step."""

    def __init__(self, shape: Sequence[int], stride: Sequence[int], is_half: bool) -> None:
        self.shape, self.stride = list(shape), list(stride)
        self._is_half = is_half

    def is_copied(self, dims: Sequence[int], last: int | None = None) -> bool:
        """Transforms along up to three dimensions, the last of which becomes `last` long: whether cuFFT needs a copy first."""
        batch = sorted((dim for dim in range(len(self.shape)) if dim not in dims), key=lambda dim: -self.stride[dim])
        needed = not self._fits(dims, [dim for dim in batch if self.shape[dim] != 1])
        if last is not None:
            self.shape[dims[-1]] = last
        distance = 1
        for dim in reversed([*batch, *dims]):
            self.stride[dim] = distance
            distance *= self.shape[dim]
        return needed

    def _fits(self, dims: Sequence[int], batch: Sequence[int]) -> bool:
        if any(self.stride[outer] != self.shape[inner] * self.stride[inner] for outer, inner in pairwise(batch)):
            return False
        distance = self.stride[dims[-1]]
        if distance <= 0 or (batch and self.stride[batch[-1]] == 0) or (self._is_half and distance != 1):
            return False
        for dim in reversed(dims[:-1]):
            if self.shape[dim] != 1:
                if self.stride[dim] <= 0 or self.stride[dim] % distance:
                    return False
                distance = self.stride[dim]
        return True

    def copies(self, dims: Sequence[int], size: int) -> list[int]:
        """Bytes of the copy before each step from complex to complex; size: of the tensor."""
        left, found = list(dims), []
        while left:
            left.sort(key=lambda dim: -self.stride[dim])
            found.append(size if self.is_copied(left[-_MOST_AT_ONCE:]) else 0)
            del left[-_MOST_AT_ONCE:]
        return found


def _lying(tensor: Any, stride: Sequence[int] | None = None) -> _Lying:
    return _Lying(tensor.shape, stride or tensor.stride(), tensor.dtype in (torch.float16, torch.complex32))


def _at_once(dims: Sequence[int]) -> bool:
    """Whether a transform from or to real numbers is one step."""
    return len(dims) <= _MOST_AT_ONCE and list(dims[:2]) != [0, 1]


def _by_turns(
    engine: Engine, device: int, run: Callable[[], Any], copies: Sequence[int], buffer: int, into_second: bool
) -> Any:
    """The result, beside what each step copies first, and beside a second buffer where there are several steps."""
    if len(copies) == 1:
        out = run()
        with engine.scratch(device, *copies):
            return out
    if into_second:
        with engine.scratch(device, buffer):
            with engine.scratch(device, *copies[:1]):
                pass
            out = run()
            for copied in copies[1:]:
                with engine.scratch(device, copied):
                    pass
        return out
    out = run()
    with engine.scratch(device, *copies[:1]):
        pass
    with engine.scratch(device, buffer):
        for copied in copies[1:]:
            with engine.scratch(device, copied):
                pass
    return out


@special(_aten._fft_c2c.default)
def _complex(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source, dims = args[:2]
    copies = _lying(source).copies(dims, bytes_of(source))

    def run() -> Any:
        return engine.run(func, args, kwargs, device)

    return _by_turns(engine, device, run, copies, bytes_of(source), len(copies) % 2 == 0) if copies else run()


@special(_aten._fft_r2c.default)
def _from_real(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source, dims, _, onesided = args[:4]
    whole = source.shape[dims[-1]]
    half = whole // 2 + 1
    lying = _lying(source)
    at_once = _at_once(dims)
    first = lying.is_copied(dims if at_once else dims[-1:], half if onesided or not at_once else whole)
    copies = [bytes_of(source) if first else 0]
    numbers = source.numel() // max(1, whole)
    if not at_once:
        copies += lying.copies(dims[:-1], numbers * half * 2 * source.element_size())
    # A result of both sides is written out from the other buffer at the end.
    into_second = (len(copies) % 2 == 0) == (onesided or half == whole)
    buffer = numbers * (half if onesided else whole) * 2 * source.element_size()
    return _by_turns(engine, device, lambda: engine.run(func, args, kwargs, device), copies, buffer, into_second)


@special(_aten._fft_c2r.default)
def _to_real(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source, dims = args[:2]
    size = bytes_of(source)
    out = engine.run(func, args, kwargs, device)
    at_once = _at_once(dims)
    plain = torch.empty(source.shape, device="meta").stride() if at_once else None
    lying = _lying(source, plain)
    copies = [] if at_once else lying.copies(dims[:-1], size)
    with engine.scratch(device, size):
        with engine.scratch(device, size if len(copies) > 1 else 0):
            for copied in copies:
                with engine.scratch(device, copied):
                    pass
        with engine.scratch(device, size if lying.is_copied(dims if at_once else dims[-1:]) else 0):
            return out
