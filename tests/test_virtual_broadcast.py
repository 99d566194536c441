"""What sending a module's parameters to other devices takes on each, worked out by hand from ``comm.cpp``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import replicate

from gpumem_magic.virtual import gpu

MIB = 1 << 20


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    gpu.turn_on("3xA100-80GB")
    yield
    gpu.turn_off()


def sent(*mebibytes: int, dtype: torch.dtype = torch.float32) -> list[list[tuple[str, int]]]:
    """For each device (action, bytes) of what goes on while parameters of these sizes are sent to all three."""
    module = nn.ParameterList(
        torch.zeros(size * MIB // dtype.itemsize, device="cuda", dtype=dtype) for size in mebibytes
    )
    memory: Any = torch.cuda.memory
    memory._record_memory_history()
    copies = replicate(module, [0, 1, 2])
    traces = memory._snapshot()["device_traces"]
    memory._record_memory_history(None)
    del copies
    wanted = ("alloc", "free_requested")
    return [[(one["action"], one["size"] // MIB) for one in trace if one["action"] in wanted] for trace in traces[:3]]


def test_a_buffer_is_sent_when_it_has_ten_mebibytes() -> None:
    # 4 + 20, then 16 alone, then 2 + 3, which remain.
    first, *others = sent(4, 20, 16, 2, 3)
    assert first == [("alloc", 24), ("free_requested", 24), ("alloc", 5), ("free_requested", 5)]
    assert others == [[("alloc", 24), ("alloc", 16), ("alloc", 5)]] * 2


def test_a_parameter_alone_needs_no_buffer() -> None:
    first, *others = sent(12)
    assert first == []
    assert others == [[("alloc", 12)]] * 2


def test_copies_are_views_of_their_buffer() -> None:
    module = nn.ParameterList(torch.full((MIB,), float(number), device="cuda") for number in range(3))
    copy = replicate(module, [0, 1])[1]
    assert [tuple(one.shape) for one in copy] == [(MIB,)] * 3
    assert len({one.untyped_storage().data_ptr() for one in copy}) == 1
