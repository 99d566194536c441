"""NCCL's collectives over several virtual devices in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.cuda import nccl

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    gpu.turn_off()


def each(*numbers: float, size: int = 1) -> list[torch.Tensor]:
    """On each device a tensor whose elements are one of the numbers."""
    return [torch.full((size,), float(number), device=f"cuda:{place}") for place, number in enumerate(numbers)]


def told(tensors: list[torch.Tensor]) -> list[list[float]]:
    return [one.tolist() for one in tensors]


@pytest.mark.parametrize(("op", "result"), [(0, 5.0), (1, 6.0), (2, 3.0), (3, 2.0), (4, 2.5)])
def test_what_devices_have_comes_together(op: int, result: float) -> None:
    gpu.turn_on("2xT4,values=real")
    tensors = each(2, 3)
    nccl.all_reduce(tensors, op=op)
    assert told(tensors) == [[result], [result]]
    tensors = each(2, 3)
    nccl.reduce(tensors, root=1, op=op)
    assert told(tensors) == [[2.0], [result]]
    into = torch.zeros(1, device="cuda:1")
    nccl.reduce(each(2, 3), into, root=1, op=op)
    assert into.item() == result
    parts = each(0, 0)
    nccl.reduce_scatter(each(2, 3, size=2), parts, op=op)
    assert told(parts) == [[result], [result]]


def test_what_a_device_has_goes_to_all() -> None:
    gpu.turn_on("2xT4,values=real")
    tensors = each(2, 3)
    nccl.broadcast(tensors, root=1)
    assert told(tensors) == [[3.0], [3.0]]
    wholes = [torch.zeros(2, 1, device=f"cuda:{place}") for place in range(2)]
    nccl.all_gather(each(2, 3), wholes)
    assert wholes[0].tolist() == wholes[1].tolist() == [[2.0], [3.0]]


def test_it_takes_none_of_the_allocators_memory_and_leaves_no_value_known() -> None:
    gpu.turn_on("2xT4")
    tensors, wholes = each(2, 3), each(0, 0, size=2)
    before = [torch.cuda.memory_allocated(place) for place in range(2)]
    nccl.all_gather(tensors, wholes)
    nccl.all_reduce(tensors)
    assert [torch.cuda.memory_allocated(place) for place in range(2)] == before
    assert tensors[0].item() == 0
    assert wholes[1].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: nccl.all_reduce([]), "can't be empty"),
        (lambda: nccl.all_reduce([torch.ones(1)]), "cuda dense Tensors"),
        (lambda: nccl.all_reduce([torch.ones(1, device="cuda")] * 2), "on unique devices"),
        (lambda: nccl.all_reduce(each(1, 2), each(1)), "of length 2 and output of length 1"),
        (lambda: nccl.all_gather(each(1, 2), each(1, 2)), "input_size \\* size_multiplier"),
        (lambda: nccl.reduce_scatter(each(1, 2), each(1, 2)), "input_size \\* size_multiplier"),
        (lambda: nccl.all_reduce(each(1, 2), each(1, 2)[::-1]), "on the same device"),
        (lambda: nccl.all_reduce([each(1)[0], torch.ones(2, device="cuda:1")]), "same number of elements"),
        (lambda: nccl.all_reduce([each(1)[0], torch.ones(1, device="cuda:1").half()]), "same Tensor dtype"),
        (
            lambda: nccl.all_reduce([torch.ones(2, 2, device="cuda").t(), torch.ones(2, 2, device="cuda:1")]),
            "all inputs and outputs have to be contiguous",
        ),
        (lambda: nccl.broadcast(each(1, 2), root=2), "invalid root"),
        (lambda: nccl.reduce(each(1, 2), root=-1), "invalid root"),
    ],
)
def test_what_nccl_does_not_take_is_refused_as_it_refuses_it(call: Callable[[], None], words: str) -> None:
    gpu.turn_on("2xT4")
    with pytest.raises(RuntimeError, match=words):
        call()
