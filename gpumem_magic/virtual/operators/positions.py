"""Finding what is not zero: `nonzero`, and each boolean mask that chooses or is written through.

After ``Nonzero.cu`` in ATen/native/cuda. The elements are counted, the result is made, and CUB writes the positions into it. A
mask is laid out plainly first. Up to 2.5 the count's storage is given back only when that for the positions is there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.calls import bytes_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.rules import BESIDE, special
from gpumem_magic.virtual.operators import growing
from gpumem_magic.virtual.operators.cub import cub_of

_INDEX = 8
_COUNT = 4
_MOST_AT_ONCE = 2**31 - 1
_CHUNK = 2**30
_GIVEN_BACK_FROM = (2, 6)
# Of `nonzero_static`.
_THREADS, _ITEMS = 512, 16


def hold_while_found(engine: Engine, device: int, mask: Any, make: Callable[[], Any]) -> Any:
    """Holds what the search for a tensor's positions takes. make: makes the list of them, when its time comes."""
    count, cub = mask.numel(), cub_of(engine, device)
    chunks = [count]
    if count >= _MOST_AT_ONCE:
        chunks = [min(_CHUNK, count - start) for start in range(0, count, _CHUNK)]
    with engine.scratch(device, 0 if mask.is_contiguous() else bytes_of(mask), _COUNT * len(chunks)):
        counting = ExitStack()
        for chunk in chunks:
            counting.close()
            counting.enter_context(engine.scratch(device, cub.sum(chunk)))
        if engine.memory.torch_version(device) >= _GIVEN_BACK_FROM:
            counting.close()
        found = make()
        with counting:
            growing.fill(engine, device, _INDEX)
            for chunk in chunks if mask.dim() else ():
                with engine.scratch(device, cub.flagged(chunk, _INDEX)):
                    counting.close()
        return found


@special(_aten.nonzero_static.default, table=BESIDE)
def _static(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """Each block counts its part; the counts, and their sums."""
    source = args[0]
    if not out.numel():
        return []
    copied = [] if source.is_contiguous() else [bytes_of(source)]
    at_a_time = engine.memory.processors(device)[0] * (2 if source.element_size() == 1 else 1)
    blocks = blocks_in_turn(source.numel(), at_a_time)
    return [*copied, blocks * _COUNT, blocks * _INDEX]


def blocks_in_turn(count: int, at_a_time: int) -> int:
    """How many blocks work on tiles of 8192 elements, several in turn where there are more tiles than blocks at a time."""
    tile = _THREADS * _ITEMS
    tiles = -(-count // tile)
    turns = max(1, -(-tiles // at_a_time))
    return -(-count // (turns * tile))
