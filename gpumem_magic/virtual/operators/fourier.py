"""What Fourier transforms take beside their results: copies of the input, and results of transforms along fewer dimensions.

After ``SpectralOps.cpp`` and ``CuFFTPlanCache.h`` in ATen/native/cuda, as in 2.13. cuFFT transforms up to three dimensions at
once, of matrices that lie at equal distances; what lies otherwise is copied first. More dimensions, and real tensors along their
first two, take a result for each step, in two buffers by turns. From complex to real the input is always copied, since cuFFT may
write over it. What cuFFT works in comes from PyTorch's allocator, too, and how much is cuFFT's own affair: of 2,219 answers of
its own on an H100 (CUDA 13.0, driver 580.159, November 2026) `work_area` meets 1,990 to the byte; which lengths one kernel does
is a fit to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import cache
from itertools import pairwise
from math import ceil, prod
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.units import round_up
from gpumem_magic.virtual.engine.calls import bytes_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import special

_MOST_AT_ONCE = 3

# Of a transform along up to three dimensions: bytes of the copy that it begins with, and of what it works in.
_Step = tuple[int, int]


# The longest transforms that one kernel does: of any length, and of a power of two or three; of real numbers, even and odd.
_ONE_KERNEL, _ONE_KERNEL_OF_POWERS = 10_000, 20_000
_ONE_EVEN_KERNEL, _ONE_REAL_KERNEL_OF_TWO = 1080, 16_384
_ONE_ODD_KERNEL, _ONE_ODD_KERNEL_OF_ELEVEN, _ONE_ODD_KERNEL_OF_POWERS = 640, 300, 4096
# The largest prime factors: with a kernel of their own, and those that are a kernel apart from the other factors'.
_LARGEST_PRIME, _LARGEST_AMONG_OTHERS, _LARGEST_OF_REAL = 127, 31, 11
# Where numbers lie apart, as along a first dimension: the longest transform that one kernel does, and up to which length one to
# real numbers goes through a buffer. On an H100 129 took none and 2,000 did; to real numbers 6, 12 and 14 did, and 50 took none.
_ONE_KERNEL_APART, _FEW_APART = 1024, 32
# The longest transforms of larger primes that one kernel does, by the bytes of a complex number.
_LONGEST_OF_LARGE_PRIMES = {8: 4096, 16: 2048}
# The parts of a convolution begin at multiples of so many bytes.
_PART = 1024


def work_area(lengths: Sequence[int], batch: int, size: int, is_real: bool) -> int:
    """Bytes that cuFFT works in, where so many transforms of those lengths are done. size: of a complex number.

    One that two kernels share goes through a buffer; one of a large prime is a convolution (Bluestein's way), in two. Real ones
    are complex ones of half the length or, of an odd one, two at a time. Along several dimensions each has its own kernels, and
    they share one buffer.
    """
    numbers = batch * prod(lengths)
    if not numbers:
        return 0
    if not is_real:
        return max(_of_complex(length, numbers // length, size) for length in lengths)
    *others, last = lengths
    halves = numbers // last * (last // 2 + 1)
    beside = max((_of_complex(length, halves // length, size) for length in others), default=0)
    if last % 2:
        return max(beside, _of_odd(last, ceil(batch / 2) * prod(others), size))
    return max(beside, _of_even(last, numbers // last, size))


def _of_complex(length: int, batch: int, size: int) -> int:
    if convolved := _convolution(length, size):
        return 2 * round_up(convolved * batch * size, _PART)
    return length * batch * size if _is_shared(length) else 0


def _of_even(length: int, batch: int, size: int) -> int:
    half, prime = length // 2, _largest_prime(length)
    numbers = half * batch * size
    if prime <= _LARGEST_OF_REAL and length <= (_ONE_REAL_KERNEL_OF_TWO if prime == 2 else _ONE_EVEN_KERNEL):
        return 0
    if convolved := _convolution(half, size):
        return numbers + 2 * _beyond(convolved * batch * size)
    if prime > _LARGEST_PRIME:
        return numbers + (_beyond(numbers) if 2 * half > _LONGEST_OF_LARGE_PRIMES[size] else 0)
    return numbers + (batch * size if _is_shared(half) else 0)


def _of_odd(length: int, pairs: int, size: int) -> int:
    prime, numbers = _largest_prime(length), length * pairs * size
    limit = _ONE_ODD_KERNEL_OF_ELEVEN if prime == _LARGEST_OF_REAL else _ONE_ODD_KERNEL
    if _is_power(length, prime):
        limit = _LARGEST_PRIME if prime > _LARGEST_OF_REAL else _ONE_ODD_KERNEL_OF_POWERS
    elif prime > _LARGEST_OF_REAL:
        limit = 0
    if length <= limit:
        return 0
    convolved = _convolution(length, size)
    return numbers + (2 * _beyond(convolved * pairs * size) if convolved else _beyond(numbers))


def _convolution(length: int, size: int) -> int:
    """How long the convolution is that a transform is done by; 0 where it is none."""
    longest = _LONGEST_OF_LARGE_PRIMES.get(size, _LONGEST_OF_LARGE_PRIMES[8])
    if length <= longest or _largest_prime(length) <= _LARGEST_PRIME:
        return 0
    least = 2 * length - 1
    return _next_smooth(least) if length > max(_LONGEST_OF_LARGE_PRIMES.values()) else 1 << (least - 1).bit_length()


def _next_smooth(least: int) -> int:
    """The next number that has no other primes than 2, 3 and 5."""
    best = 1 << (least - 1).bit_length()
    of_five = 1
    while of_five < best:
        odd = of_five
        while odd < best:
            best = min(best, odd << max(0, -(-least // odd) - 1).bit_length())
            odd *= 3
        of_five *= 5
    return best


def _is_shared(length: int) -> bool:
    """Whether two kernels do a transform of that length, for each part of its factors one."""
    prime = _largest_prime(length)
    if _LARGEST_AMONG_OTHERS < prime <= _LARGEST_PRIME and prime != length:
        return True
    return length > (_ONE_KERNEL_OF_POWERS if prime <= 3 and _is_power(length, prime) else _ONE_KERNEL)


def _is_power(number: int, prime: int) -> bool:
    while number > 1 and number % prime == 0:
        number //= prime
    return number == 1


def _beyond(nbytes: int) -> int:
    """The next part's beginning behind so many bytes."""
    return (nbytes // _PART + 1) * _PART


def _room(lengths: Sequence[int], numbers: int, size: int, is_real: bool) -> int:
    """The work area of as many transforms of those lengths as a tensor of so many numbers has."""
    return work_area(lengths, numbers // max(1, prod(lengths)), size, is_real)


def _room_apart(lengths: Sequence[int], numbers: int, size: int, to_real: bool) -> int:
    """The same, of numbers that lie apart from each other; to_real: from half of as many complex ones."""
    if len(lengths) == 1 and numbers:
        length = lengths[0]
        if to_real and length <= _FEW_APART and length % 2 == 0 and not _is_power(length, 2):
            return numbers // 2 * size
        if not to_real and length > _ONE_KERNEL_APART and not _convolution(length, size):
            return numbers * size
    return _room(lengths, numbers, size, to_real)


@cache
def _largest_prime(number: int) -> int:
    largest, factor = 1, 2
    while factor * factor <= number:
        while number % factor == 0:
            largest, number = factor, number // factor
        factor += 1
    return max(largest, number)


def _check_half(dtype: torch.dtype, lengths: Sequence[int]) -> None:
    if dtype in _HALF and any(length & (length - 1) for length in lengths):
        raise RuntimeError(
            "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, but got a "
            f"signal size of{list(lengths)}"
        )


_HALF = (torch.float16, torch.complex32)


class _Offered(Enum):
    """How cuFFT is given what it transforms: copied first, or as it is, in one piece or with numbers that lie apart."""

    FROM_A_COPY = auto()
    AS_IT_LIES = auto()
    APART = auto()


class _Lying:
    """How a tensor lies that is transformed step by step."""

    def __init__(self, shape: Sequence[int], stride: Sequence[int], is_half: bool) -> None:
        self.shape, self.stride = list(shape), list(stride)
        self._is_half = is_half

    def offered(self, dims: Sequence[int], last: int | None = None) -> _Offered:
        """To transforms along up to three dimensions, the last of which becomes `last` long. Their result lies plainly."""
        batch = self._others(dims)
        fits = self._fits(dims, [dim for dim in batch if self.shape[dim] != 1])
        lies_apart = self.stride[dims[-1]] != 1
        if last is not None:
            self.shape[dims[-1]] = last
        distance = 1
        for dim in reversed([*batch, *dims]):
            self.stride[dim] = distance
            distance *= self.shape[dim]
        if not fits:
            return _Offered.FROM_A_COPY
        return _Offered.APART if lies_apart else _Offered.AS_IT_LIES

    def _others(self, dims: Sequence[int]) -> list[int]:
        return sorted((dim for dim in range(len(self.shape)) if dim not in dims), key=lambda dim: -self.stride[dim])

    def is_simple(self, dims: Sequence[int]) -> bool:
        """Whether one transform follows the other without gaps, as cuFFT takes it where nothing else is said."""
        expected = 1
        for dim in reversed([*self._others(dims), *dims]):
            if self.shape[dim] != 1 and self.stride[dim] != expected:
                return False
            expected *= self.shape[dim]
        return True

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

    def steps(self, dims: Sequence[int], size: int) -> list[_Step]:
        """Each step from complex to complex; size: of the tensor."""
        left, found = list(dims), []
        while left:
            left.sort(key=lambda dim: -self.stride[dim])
            along = left[-_MOST_AT_ONCE:]
            lengths = [self.shape[dim] for dim in along]
            numbers = prod(self.shape)
            offered = self.offered(along)
            room = _room_apart if offered is _Offered.APART else _room
            copied = size if offered is _Offered.FROM_A_COPY else 0
            found.append((copied, room(lengths, numbers, size // max(1, numbers), False)))
            del left[-_MOST_AT_ONCE:]
        return found


def _lying(tensor: Any, stride: Sequence[int] | None = None) -> _Lying:
    return _Lying(tensor.shape, stride or tensor.stride(), tensor.dtype in _HALF)


def _at_once(dims: Sequence[int]) -> bool:
    """Whether a transform from or to real numbers is one step."""
    return len(dims) <= _MOST_AT_ONCE and list(dims[:2]) != [0, 1]


def _by_turns(
    engine: Engine, device: int, run: Callable[[], Any], steps: Sequence[_Step], buffer: int, into_second: bool
) -> Any:
    """The result, beside what each step takes, and beside a second buffer where there are several steps."""
    first, *others = steps
    if not others:
        out = run()
        with engine.scratch(device, *first):
            return out
    if into_second:
        with engine.scratch(device, buffer):
            with engine.scratch(device, *first):
                pass
            out = run()
            for step in others:
                with engine.scratch(device, *step):
                    pass
        return out
    out = run()
    with engine.scratch(device, *first):
        pass
    with engine.scratch(device, buffer):
        for step in others:
            with engine.scratch(device, *step):
                pass
    return out


@special(_aten._fft_c2c.default)
def _complex(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source, dims = args[:2]
    _check_half(source.dtype, [source.shape[dim] for dim in dims])
    steps = _lying(source).steps(dims, bytes_of(source))

    def run() -> Any:
        return engine.run(func, args, kwargs, device)

    return _by_turns(engine, device, run, steps, bytes_of(source), len(steps) % 2 == 0) if steps else run()


@special(_aten._fft_r2c.default)
def _from_real(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source, dims, _, onesided = args[:4]
    whole = source.shape[dims[-1]]
    half = whole // 2 + 1
    lying = _lying(source)
    at_once = _at_once(dims)
    _check_half(source.dtype, [source.shape[dim] for dim in dims])
    along = dims if at_once else dims[-1:]
    lengths, complex_size = [source.shape[dim] for dim in along], 2 * source.element_size()
    is_simple = lying.is_simple(along)
    first = lying.offered(along, half if onesided or not at_once else whole) is _Offered.FROM_A_COPY
    room = _room(lengths, source.numel(), complex_size, is_real=True)
    # (A result of both sides has room behind each half.)
    if source.dtype in _HALF and (not (is_simple or first) or (at_once and not onesided and half < whole)):
        room = max(room, _room_of_halves(source))
    steps = [(bytes_of(source) if first else 0, room)]
    numbers = source.numel() // max(1, whole)
    if not at_once:
        steps += lying.steps(dims[:-1], numbers * half * complex_size)
    # A result of both sides is written out from the other buffer at the end.
    into_second = (len(steps) % 2 == 0) == (onesided or half == whole)
    buffer = numbers * (half if onesided else whole) * complex_size
    return _by_turns(engine, device, lambda: engine.run(func, args, kwargs, device), steps, buffer, into_second)


@special(_aten._fft_r2c.out)
def _from_real_into(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """By the half that is not known from the other, which is copied."""
    with pushed(engine.mode):
        result, out = _aten._fft_r2c.default(*args[:3], True), kwargs["out"]
        out.resize_(_into(args))
        out.narrow(args[1][-1], 0, result.shape[args[1][-1]]).copy_(result)
        return out


def _into(args: Any) -> list[int]:
    """The shape of a transform of real numbers."""
    shape = list(args[0].shape)
    if args[3]:
        shape[args[1][-1]] = shape[args[1][-1]] // 2 + 1
    return shape


@special(_aten._fft_c2r.default)
def _to_real(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    source, dims = args[:2]
    size = bytes_of(source)
    out = engine.run(func, args, kwargs, device)
    _check_half(source.dtype, [out.shape[dim] for dim in dims])
    at_once = _at_once(dims)
    plain = torch.empty(source.shape, device="meta").stride() if at_once else None
    lying = _lying(source, plain)
    steps = [] if at_once else lying.steps(dims[:-1], size)
    along = dims if at_once else dims[-1:]
    lengths = [out.shape[dim] for dim in along]
    with engine.scratch(device, size):
        with engine.scratch(device, size if len(steps) > 1 else 0):
            for step in steps:
                with engine.scratch(device, *step):
                    pass
        is_simple = lying.is_simple(along)
        offered = lying.offered(along)
        copied = size if offered is _Offered.FROM_A_COPY else 0
        room = (_room_apart if offered is _Offered.APART else _room)(lengths, out.numel(), source.element_size(), True)
        if source.dtype in _HALF and not (is_simple or copied):
            room = max(room, _room_of_halves(out))
        with engine.scratch(device, copied, room):
            return out


def _room_of_halves(real: Any) -> int:
    """Of real numbers in half precision cuFFT works in as much as they take, unless it is given what is simple on both sides (on
    an H100 with 2.11)."""
    return bytes_of(real)
