"""Whether iterations repeat exactly: the same requests and frees, at the same addresses, again and again.

On a virtual device, whose memory depends on nothing but the program, more iterations can then show nothing new.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from gpumem_magic.snapshot.model import TraceEvent

ENOUGH = 3
"""So many equal iterations in a row are called a repetition."""


def signature(events: Iterable[TraceEvent]) -> bytes:
    """A digest of what the allocator did: actions, addresses, sizes and streams in order, without times and stacks."""
    digest = hashlib.blake2b(digest_size=16)
    for event in events:
        digest.update(b"%s %d %d %d;" % (event.action.encode(), event.address, event.size, event.stream))
    return digest.digest()


def alike_at_end(signatures: Sequence[bytes]) -> int:
    """How many of the last signatures are equal; 1 where the last differs from the one before, 0 for none."""
    count = 0
    for one in reversed(signatures):
        if one != signatures[-1]:
            break
        count += 1
    return count


def repeats_exactly(signatures: Sequence[bytes], times: int = ENOUGH) -> bool:
    """Whether the last `times` iterations did exactly the same. Raises ValueError for fewer than two times."""
    if times < 2:
        raise ValueError("a repetition needs at least two iterations")
    return alike_at_end(signatures) >= times


def longest_repetition(signatures: Sequence[bytes]) -> tuple[int, int] | None:
    """The longest run of equal signatures of at least `ENOUGH`, as (first, last) 0-based; the earliest among equals."""
    best: tuple[int, int] | None = None
    first = 0
    for number in range(1, len(signatures) + 1):
        if number < len(signatures) and signatures[number] == signatures[first]:
            continue
        if number - first >= ENOUGH and (best is None or number - first > best[1] - best[0] + 1):
            best = first, number - 1
        first = number
    return best
