"""Python's collector knows every tensor; who counts tensors by it is to find those of the program, as on a card."""

from __future__ import annotations

import gc
from typing import Any

import torch

from gpumem_magic.looks.objects import is_a
from gpumem_magic.looks.tensors import is_tensor
from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.storage import Placement


def install(patches: Patches) -> None:
    """`gc.get_objects` leaves out the host's tensors that stand for those on devices."""
    original = gc.get_objects

    def get_objects(generation: int | None = None) -> list[Any]:
        found = original(generation=generation)
        if not any(map(is_tensor, found)):
            return found
        # (All generations: a tensor may be younger than what has it.)
        ours = {id(one) for place in original() if type(place) is Placement for one in _tensors(place.host, place.kept)}
        found[:] = [one for one in found if id(one) not in ours or not is_tensor(one)]
        return found

    patches.set(gc, "get_objects", get_objects)


def _tensors(*things: Any) -> list[torch.Tensor]:
    """The tensors among things, and in lists and tuples of them."""
    found: list[torch.Tensor] = []
    for one in things:
        if is_tensor(one):
            found.append(one)
        elif is_a(one, (list, tuple)):
            found += _tensors(*one)
    return found
