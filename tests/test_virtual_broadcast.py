"""What sending a module's parameters to other devices takes on each, worked out by hand from ``comm.cpp``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import comm, replicate

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


@pytest.mark.parametrize("values", ["real", "stand-in"])
def test_copies_go_into_tensors_that_are_there(values: str) -> None:
    gpu.turn_off()
    gpu.turn_on(f"2xT4,values={values}")
    source = torch.arange(12.0, device="cuda:0").view(4, 3)
    both = [torch.empty(2, 3, device=f"cuda:{index}") for index in range(2)]
    whole, other = torch.empty(4, 3, device="cuda:0"), torch.empty(4, 3, device="cuda:1")
    before = [torch.cuda.memory_allocated(index) for index in range(2)]
    assert comm.scatter(source, out=both)[1] is both[1]
    assert comm.gather(both, out=whole) is whole
    assert comm.broadcast(source, out=[other])[0] is other
    assert [torch.cuda.memory_allocated(index) for index in range(2)] == before
    if values == "real":
        assert torch.equal(whole.cpu(), source.cpu())
        assert torch.equal(other.cpu(), source.cpu())
    with pytest.raises(RuntimeError, match="3 instead of 4"):
        comm.scatter(source, out=[both[0], both[1][:1]])
    with pytest.raises(RuntimeError, match="at least one output tensor"):
        comm.scatter(source, out=[])
    with pytest.raises(RuntimeError, match="same shape as the source"):
        comm.broadcast(source, out=[both[1]])
    with pytest.raises(RuntimeError, match="to be CUDA tensors"):
        comm.broadcast(source, out=[source.cpu()])
