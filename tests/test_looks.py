"""Looks at the program's objects, whatever happens meanwhile."""

from __future__ import annotations

import gc
from typing import Any

import torch

from gpumem_magic.looks import tensors
from gpumem_magic.looks.objects import items


def test_a_dictionary_that_changes_as_garbage_is_collected_is_read() -> None:
    table: dict[Any, int] = {number: number for number in range(3000)}

    class Leaves:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            table[len(table)] = 0

    before = gc.get_threshold()
    gc.collect()
    for _ in range(3):
        Leaves()
    gc.set_threshold(50, 1, 1)
    try:
        found = items(table)
    finally:
        gc.set_threshold(*before)
    assert len(found) in (3000, 3003)
    assert found[:3000] == [(number, number) for number in range(3000)]


def test_a_view_that_pytorch_refuses_to_differentiate_has_no_node() -> None:
    """As FSDP's views of its flat parameter are."""
    base = torch.ones(4, requires_grad=True) * 1
    with torch.no_grad():
        view = base[:2]
    base.mul_(2)
    assert tensors.grad_fn(view) is None
    assert tensors.is_leaf(view) is False
