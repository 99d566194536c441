"""What CUB takes while it scans, selects, counts runs, adds up and sorts: its "temporary storage", in bytes.

Every algorithm asks for its parts as one block, each rounded up to 256 bytes, with 255 bytes more to align the first. How many
tiles the work is cut into follows from threads and items of the policy for the card's generation (``tuning_*.cuh`` and
``dispatch_*.cuh`` in cub/device/dispatch); a tile that others look back at has a state of so many bytes
(``single_pass_scan_operators.cuh``). A policy of its own is for compute capability 8.0 and for 9.0 and newer, since CUB 2.2; 8.6
and 8.9 have the default. CUB is that of the CUDA toolkit which PyPI's wheels of a PyTorch are built with.

Checked with PyTorch's own CUDA builds of 2.1, 2.4, 2.6 to 2.9, 2.11 and 2.13 by what they ask the allocator for, as cards of
capability 7.5, 8.0, 8.6, 9.0 and 10.0, over a CUDA runtime in which no kernel runs. What a kernel's registers and shared memory
allow to run at once is not the runtime's answer there: it is read from the compiled kernels (2.6, for 8.0 and 8.6).
"""

from __future__ import annotations

from typing import NamedTuple

from gpumem_magic.units import round_up
from gpumem_magic.virtual.engine.engine import Engine

# Of CUB: tile states of one word are aligned twice from here on, and policies for cards newer than 9.0 came.
_THREE = (3, 0)
# Policies of generations, and wider words for values of one byte.
_TUNED = (2, 3)
# What is selected by key may be more than 31 bits count. (The build of 2.7, whose toolkit is 12.6, has it; that of 2.6 does not.)
_LONG_OFFSETS_BY_KEY = (2, 5)
# The CUB of a PyTorch and of those that follow it.
_OF_PYTORCH = (((2, 11), (3, 0)), ((2, 8), (2, 7)), ((2, 7), (2, 5)), ((2, 5), (2, 3)))
_OLDEST = (2, 0)
# States before the first tile's, for a warp to look at.
_PADDING = 32
_SUBSCRIPTIONS = 5
_OFFSET, _PAIR = 8, 16
_ALIGNED_BY_THRUST = 128

# Threads and items of a tile, by the element's size. Selecting by flags, and those that differ from the one before.
_FLAGGED = {
    80: {1: (224, 20), 2: (256, 20), 4: (320, 10), 8: (384, 6)},
    90: {1: (448, 20), 2: (448, 20), 4: (384, 15), 8: (384, 11)},
    100: {1: (896, 20), 2: (256, 22), 4: (512, 14), 8: (320, 11)},
}
_DIFFERING = {
    80: {1: (992, 20), 2: (576, 14), 4: (256, 18), 8: (192, 10)},
    90: {1: (256, 22), 2: (256, 22), 4: (384, 17), 8: (384, 11)},
    100: {1: (384, 22), 2: (256, 22), 4: (384, 15), 8: (384, 11)},
}
# Scans with a sum of CUB's own, and the first of each key with a value of so many bytes.
_SUMS = {80: {4: (320, 12), 8: (288, 22)}, 90: {4: (128, 24), 8: (224, 24)}}
_BY_KEY = {
    80: {(4, 4): (256, 11), (8, 4): (256, 7), (8, 8): (192, 7)},
    90: {(4, 4): (512, 14), (8, 4): (640, 7), (8, 8): (448, 11)},
}
# Scans that begin anew with each key, of the same size as its value.
_BY_RUN = {
    80: {4: (256, 15), 8: (224, 10)},
    90: {4: (288, 14), 8: (224, 11)},
    100: {4: (224, 20), 8: (256, 23)},
}
# Radix sorts on 9.0 and newer, of keys of one or two bytes, with values of eight and without.
_SMALL_KEYS = {(1, 8): (384, 18), (2, 8): (512, 23), (1, 0): (512, 19), (2, 0): (512, 19)}
_ONE_TILE, _NOMINAL_ONE = 256, 19
_DIGITS_AT_ONCE = 8


def blob(*parts: int) -> int:
    """One block for parts that each start at a multiple of 256."""
    return 255 + sum(round_up(part, 256) for part in parts)


class Cub(NamedTuple):
    """CUB as a version of PyTorch has it, on a card with so many multiprocessors, and so many threads of each."""

    version: tuple[int, int]
    capability: tuple[int, int]
    processors: tuple[int, int]

    @property
    def _tuned_for(self) -> int:
        """The generation whose policies count: 80, 90 or 100; 0 for the default."""
        if self.version < _TUNED:
            return 0
        if self.capability >= (10, 0) and self.version >= _THREE:
            return 100
        return 90 if self.capability >= (9, 0) else 80 if self.capability == (8, 0) else 0

    def _states(self, tiles: int, item: int, is_one_word: bool = True) -> int:
        """What tiles take that look back at each other's sum of `item` bytes."""
        count = tiles + _PADDING
        old = self.version < _TUNED
        if not is_one_word:
            status = 1 if old else 4
            return blob(status * count, item * count, item * count)
        words = {1: 2 if old else 4, 2: 4, 4: 8, 8: 16}[item]
        return blob(words * count) if self.version >= _THREE else words * count

    def scan(self, count: int, item: int, is_number: bool = True, by_sum: bool = False) -> int:
        """Running results of `item` bytes each.

        is_number: whether C++ itself knows the type; of half precision and complex numbers it is a class. by_sum: whether CUB's
        own sum is taken, for which there are policies.
        """
        tuned = _SUMS.get(min(self._tuned_for, 90), {}).get(item) if by_sum and is_number else None
        threads, items = tuned or (128, 15)
        tiles = _parts(count, threads * _memory_bound(items, item))
        return blob(self._states(tiles, item, is_number))

    def flagged(self, count: int, item: int) -> int:
        """Those of `count` elements whose flag is set."""
        return self._selected(count, item, _FLAGGED)

    def differing(self, count: int, item: int, is_number: bool = True) -> int:
        """Those of `count` elements that differ from the one before. For classes, as half precision is, none is tuned."""
        return self._selected(count, item, _DIFFERING if is_number else {})

    def _selected(self, count: int, item: int, policies: dict[int, dict[int, tuple[int, int]]]) -> int:
        threads, items = policies.get(self._tuned_for, {}).get(item) or (128, min(10, max(1, 40 // item)))
        return blob(self._states(_parts(count, threads * items), 4))

    def runs(self, count: int) -> int:
        """The runs of equal elements, with their lengths in eight bytes."""
        return blob(16 * (_parts(count, 128 * 6) + _PADDING))

    def first_of_each(self, count: int, key: int, value: int) -> int:
        """The first of each run of equal keys, with its value."""
        threads, items = self._run_policy(key, value)
        offset = 8 if self.version >= _LONG_OFFSETS_BY_KEY else 4
        return blob(self._states(_parts(count, threads * items), offset))

    def _run_policy(self, key: int, value: int) -> tuple[int, int]:
        return _BY_KEY.get(min(self._tuned_for, 90), {}).get((key, value)) or (64, max(1, 44 // key))

    def differences(self) -> int:
        """Whether each element differs from the one before: nothing."""
        return blob()

    def merge_sort(self, count: int, key: int, value: int = 0) -> int:
        """Keys of up to eight bytes by a comparison of the program's own, in tiles of 256 x 17 x 4 bytes: all again, and where
        tiles meet."""
        offset = 4 if self.version >= _THREE else 8
        return blob(count * key, count * value, (_parts(count, 256 * min(17, 17 * 4 // key)) + 1) * offset)

    def unique(self, count: int) -> int:
        """Those of eight bytes that differ from the one before by a comparison of the program's own: Thrust's kernel."""
        return self._of_thrust(_parts(count, 64 * 5))

    def unique_by_key(self, count: int) -> int:
        """The same with a value of eight bytes each; since CUB 2.5 by its kernel, with Thrust's storage around it."""
        if self.version < _LONG_OFFSETS_BY_KEY:
            return self.unique(count)
        threads, items = self._run_policy(8, 8)
        return self._of_thrust(_parts(count, threads * items))

    def sums_by_key(self, count: int) -> int:
        """The runs of equal elements, with sums of eight bytes: Thrust's storage."""
        return blob(_OFFSET, blob(16 * (_parts(count, 256 * 9) + _PADDING)))

    def largest_of(self, count: int) -> int:
        """Where the largest of so many is, as Thrust has it: pairs of value and place."""
        return blob(_PAIR, _PAIR, 0 if count <= 256 * 16 else self._sums_of_blocks(_PAIR))

    def first_found(self) -> int:
        """Where the first that a condition holds for is: Thrust's storage, and the place."""
        return self._sums_of_blocks(_PAIR) + _PAIR

    def true_ones(self) -> int:
        """How many of more than 2,048 flags are up, as Thrust counts them: sums of eight bytes, and the result."""
        return self._sums_of_blocks(_OFFSET) + _OFFSET

    def _of_thrust(self, tiles: int) -> int:
        """How many there are, beside the tiles' states, which are a block of their own."""
        return blob(_OFFSET, blob(self._states(tiles, 4)))

    def scan_by_key(self, count: int, item: int) -> int:
        """Running results of `item` bytes that begin anew with each key of as many."""
        threads, items = _BY_RUN.get(self._tuned_for, {}).get(item) or (256, 9)
        tiles = _parts(count, threads * items)
        return blob(16 * (tiles + _PADDING), item * (tiles + 1))

    def sum(self, count: int) -> int:
        """One sum of four bytes, of a block's sums each. Eight blocks of 256 threads run at a time where there is room."""
        return 1 if count <= 256 * 16 else self._sums_of_blocks(4)

    def _sums_of_blocks(self, item: int) -> int:
        processors, threads = self.processors
        return blob(item * processors * (threads // 256) * _SUBSCRIPTIONS)

    def radix_sort_of_thrust(self, count: int, key: int, value: int) -> int:
        """The same with copies of Thrust's own, which begin at multiples of 128."""
        copies = sum(round_up(count * item, _ALIGNED_BY_THRUST) for item in (key, value))
        return copies + self.radix_sort(count, key, value, copied=False)

    def radix_sort(
        self, count: int, key: int, value: int, bits: int | None = None, copied: bool = True, floats: bool = False
    ) -> int:
        """Keys with a value of `value` bytes each (0: without), by their lowest `bits`.

        Few are sorted in one tile, for which PyTorch asks for one byte. More take a histogram of eight-byte numbers for each pass
        over eight bits, one of four-byte numbers for each tile, a counter for each pass, and with several passes a second copy of
        all. Small keys are counted by passes over fewer bits before 9.0, in a table for each block that runs at a time. floats:
        whether the keys are `float`, which alone take an item less on 9.0 (`FLOAT_KEYS` in ``dispatch_radix_sort.cuh``).
        """
        widest = max(key, value)
        if count <= _ONE_TILE * max(1, _NOMINAL_ONE * 4 // max(4, widest)):
            return 1
        copies = (count * key, count * value) if copied else ()
        newest = self._tuned_for >= 90
        if key < 4 and not newest:
            return blob(self._table_of_counts(key), *copies)
        passes = _parts(8 * key if bits is None else bits, _DIGITS_AT_ONCE)
        threads, items = self._sorting(key, value, newest, floats)
        items = max(1, items * 4 // max(4, widest))
        # What is sorted lies in 48 KiB of shared memory.
        threads = min(threads, (49152 // (max(4, widest) * items) + 31) // 32 * 32)
        tiles = _parts(count, threads * items)
        return blob(passes * 256 * _OFFSET, tiles * 1024, *(copies if passes > 1 else ()), passes * 4)

    def _sorting(self, key: int, value: int, newest: bool, floats: bool) -> tuple[int, int]:
        """Threads, and items of four bytes."""
        if newest:
            if key < 4:
                return _SMALL_KEYS[key, 8 if value else 0]
            if key == 4:
                return 384, 19 - floats if not value else 17 if value < 8 else 29
            return 384, 24 if value == 8 else 30
        if self.capability >= (8, 0):
            return 384, 17 if key == 4 and value else 21
        return 256, 46 if key == value == 4 else 23

    def _table_of_counts(self, key: int) -> int:
        """One block of 512 threads runs at a time, or of 256; of 128 for keys of one byte there are two."""
        digits, blocks = (128, 1) if key > 1 else (32, 2)
        return _OFFSET * (self.processors[0] * blocks * _SUBSCRIPTIONS * digits + 512 * 11)

    def segmented_sort(self, count: int, key: int, value: int) -> int:
        """Many rows, each for itself: a second copy of all."""
        return blob(count * key, count * value)


def cub_of(engine: Engine, device: int) -> Cub:
    memory = engine.memory
    of_torch = memory.torch_version(device)
    version = next((cub for since, cub in _OF_PYTORCH if of_torch >= since), _OLDEST)
    return Cub(version, memory.capability(device), memory.processors(device))


def _memory_bound(items: int, item: int) -> int:
    """Items of a thread, where a policy counts those of four bytes."""
    return max(1, min(items * 4 // item, items * 2))


def _parts(number: int, size: int) -> int:
    return -(-number // size)
