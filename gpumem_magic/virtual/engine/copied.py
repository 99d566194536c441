"""What was made as a copy of what: a clone, the same in another type, the storage of a deep copy. And whether it stays one.

Asked at each allocation while a device's log runs; writes are counted where there are such copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.births import Call
from gpumem_magic.virtual.engine.storage import Placement
from gpumem_magic.virtual.engine.tensors import VirtualTensor

# The operators whose result has the values of their first argument.
_COPYING = frozenset(map(id, overloads("clone _to_copy")))

Find = Callable[[Any], Placement | None]


def source_of(find: Find, call: Call) -> Placement | None:
    """Where that lies of which an operator's result is a copy, all of it or a part; None where it is none.

    find: gives a storage's placement."""
    if id(call[0]) not in _COPYING:
        return None
    source = call[1][0]
    if not isinstance(source, VirtualTensor) or source.layout is not torch.strided:
        return None
    placement = find(source.untyped_storage())
    # (What was expanded has more elements than memory: its copy is no second one of the same.)
    if placement is None or source.numel() * source.element_size() > placement.nbytes:
        return None
    return placement


def note_written(find: Find, target: Any) -> None:
    """An operator writes to a tensor in place, or to each of a list."""
    for one in target if isinstance(target, (list, tuple)) else (target,):
        if isinstance(one, VirtualTensor) and one.layout is torch.strided:
            placement = find(one.untyped_storage())
            if placement is not None and placement.rewritten is not None:
                placement.rewritten += 1
