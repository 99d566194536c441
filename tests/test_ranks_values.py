"""What a rank receives: alone, what the others would send if they held what it holds; among others, what they send."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.torch_face.alone import one_of_many

dist: Any = torch.distributed
if not dist.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)
functional: Any = importlib.import_module("torch.distributed._functional_collectives")

WORLD, RANK = 4, 1
pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated. Please use:FutureWarning")


@pytest.fixture(params=["A100-40GB", "A100-40GB,values=real"])
def alone(request: pytest.FixtureRequest) -> Iterator[None]:
    gpu.turn_on(request.param)
    with one_of_many(RANK, WORLD):
        dist.init_process_group("nccl")
        yield
        dist.destroy_process_group()
    gpu.turn_off()


def mine() -> torch.Tensor:
    return torch.tensor([3, 5, 7, 11], device="cuda")


def blank(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes or (WORLD,), dtype=torch.int64, device="cuda")


def reduced(**how: Any) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        x = mine()
        dist.all_reduce(x, **how)
        return x

    return call


def reduced_at(root: int) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        x = mine()
        dist.reduce(x, root)
        return x

    return call


def gathered() -> list[torch.Tensor]:
    into = [blank() for _ in range(WORLD)]
    dist.all_gather(into, mine())
    return into


def gathered_at_this() -> list[torch.Tensor]:
    into = [blank() for _ in range(WORLD)]
    dist.gather(mine(), into, RANK)
    return into


def gathered_into() -> torch.Tensor:
    into = blank(2 * WORLD)
    dist.all_gather_into_tensor(into, mine()[:2].clone())
    return into


def scattered_sums() -> torch.Tensor:
    into = blank(1)
    dist.reduce_scatter_tensor(into, mine())
    return into


def scattered_largest() -> torch.Tensor:
    into = blank(2)
    dist.reduce_scatter(into, [mine()[:2] + place for place in range(WORLD)], op=dist.ReduceOp.MAX)
    return into


def scattered() -> torch.Tensor:
    into = blank(1)
    dist.scatter(into, [mine()[place : place + 1].clone() for place in range(WORLD)], RANK)
    return into


def exchanged() -> torch.Tensor:
    into = blank()
    dist.all_to_all_single(into, mine())
    return into


def exchanged_unevenly() -> torch.Tensor:
    """The others send two each, as this one does to its own place."""
    into = blank(8)
    dist.all_to_all_single(into, mine(), [2] * WORLD, [1, 2, 1, 0])
    return into


def exchanged_in_lists() -> list[torch.Tensor]:
    into = [blank(1) for _ in range(WORLD)]
    dist.all_to_all(into, [mine()[place : place + 1].clone() for place in range(WORLD)])
    return into


def received() -> torch.Tensor:
    into = blank(2)
    dist.recv(into, 0)
    return into


def through(name: str, *others: Any) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        made: torch.Tensor = getattr(functional, name)(mine(), *others, dist.group.WORLD)
        return made

    return call


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (reduced(), [12, 20, 28, 44]),
        (reduced(op=dist.ReduceOp.PRODUCT), [81, 625, 2401, 14641]),
        (reduced(op=dist.ReduceOp.MAX), [3, 5, 7, 11]),
        (reduced(op=dist.ReduceOp.BXOR), [0, 0, 0, 0]),
        (reduced_at(RANK), [12, 20, 28, 44]),
        (reduced_at(0), [3, 5, 7, 11]),
        (gathered, [[3, 5, 7, 11]] * WORLD),
        (gathered_at_this, [[3, 5, 7, 11]] * WORLD),
        (gathered_into, [3, 5] * WORLD),
        (scattered_sums, [20]),
        (scattered_largest, [4, 6]),
        (scattered, [5]),
        (exchanged, [5] * WORLD),
        (exchanged_unevenly, [5, 7] * WORLD),
        (exchanged_in_lists, [[5]] * WORLD),
        (received, [0, 0]),
        (through("all_reduce", "sum"), [12, 20, 28, 44]),
        (through("all_reduce", "max"), [3, 5, 7, 11]),
        (through("all_gather_tensor", 0), [3, 5, 7, 11] * WORLD),
        (through("reduce_scatter_tensor", "sum", 0), [20]),
        (through("all_to_all_single", None, None), [5] * WORLD),
        (through("broadcast", 0), [3, 5, 7, 11]),
    ],
)
def test_a_rank_alone_has_what_others_like_it_would_send(alone: None, call: Callable[[], Any], wanted: Any) -> None:
    made = call()
    assert (made.tolist() if isinstance(made, torch.Tensor) else [one.tolist() for one in made]) == wanted


def test_numbers_on_the_host_are_summed_up_as_well(alone: None) -> None:
    samples, elsewhere = torch.tensor([3, 5]), torch.tensor([3, 5])
    dist.all_reduce(samples)
    dist.reduce(elsewhere, 0)
    assert (samples.tolist(), elsewhere.tolist()) == ([12, 20], [3, 5])
    dist.reduce(elsewhere, RANK, op=dist.ReduceOp.MAX)
    dist.all_reduce(samples, op=dist.ReduceOp.AVG)
    assert (samples.tolist(), elsewhere.tolist()) == ([12, 20], [3, 5])


def test_experts_on_other_ranks_get_as_many_rows_as_they_are_told(alone: None) -> None:
    """How many rows go where is exchanged first, and read."""
    x = torch.ones(64, 4, device="cuda")
    experts = torch.rand(64, WORLD, device="cuda").argmax(-1)
    sent = torch.bincount(experts, minlength=WORLD)
    told = torch.empty_like(sent)
    dist.all_to_all_single(told, sent)
    given, taken = sent.tolist(), told.tolist()
    assert sum(given) == 64
    assert taken == [given[RANK]] * WORLD
    rows = x.new_empty(sum(taken), 4)
    dist.all_to_all_single(rows, x[experts.argsort()], taken, given)
    assert rows.shape == (sum(taken), 4)
    back = torch.empty_like(x)
    dist.all_to_all_single(back, rows, given, taken)
    assert back.shape == x.shape


def test_with_real_values_everything_that_is_sent_arrives() -> None:
    """Also by operators that give nothing but a handle to wait for."""
    gpu.turn_on("A100-40GB,values=real")
    with pytest.warns(UserWarning, match="a virtual GPU has no NCCL: gloo is used instead"):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.randn(6, device="cuda")
        into = [torch.zeros_like(x) for _ in range(2)]
        dist.all_to_all_single(into[0], x)
        dist.gather(x, into[1:], 0)
        for one in into:
            assert one.cpu().equal(x.cpu())
    finally:
        dist.destroy_process_group()
        gpu.turn_off()


def test_a_part_that_is_summed_up_leaves_what_lies_around_it(alone: None) -> None:
    numbers = torch.arange(8, device="cuda")
    dist.all_reduce(numbers[:4])
    assert numbers.tolist() == [0, 4, 8, 12, 4, 5, 6, 7]
