"""Multisets of sizes: how often one is contained in another, and of how many equal sets one may consist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import gcd

from gpumem_magic.snapshot.timeline import Allocation

# Tensors of one block or less are too alike to tell sets apart: counts of steps, biases, norms of one value.
_TINY = 512
# Fewer different sizes than this may occur equally often by chance.
_DIFFERENT = 3


def whole_copies(sizes: Counter[int], tenants: Iterable[Allocation]) -> int:
    """How often all of the sizes are among the tenants'."""
    there = Counter(one.requested for one in tenants)
    return min((there[size] // count for size, count in sizes.items()), default=0)


def equal_sets(sizes: Iterable[int]) -> int:
    """The number of equal sets of which these sizes may consist; 1 where they prove none.

    A model has tensors of which there is one (an embedding, a head): the rarest size occurs once in each set.
    """
    counts = Counter(size for size in sizes if size > _TINY)
    if len(counts) < _DIFFERENT:
        return 1
    shared = gcd(*counts.values())
    return shared if shared == min(counts.values()) else 1
