"""Gradients that come to one node from several sides are added in place, as autograd's engine does on a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._C._dynamo.eval_frame import set_eval_frame

from gpumem_magic.virtual import gpu

COUNT = 1 << 16
BYTES = 4 * COUNT


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    gpu.turn_on("A100-40GB")
    yield
    gpu.turn_off()


def made(program: Callable[[], Any]) -> int:
    """How many tensors of COUNT values the program makes."""
    memory: Any = torch.cuda.memory
    memory._record_memory_history()
    program()
    trace = memory._snapshot()["device_traces"][0]
    memory._record_memory_history(enabled=None)
    return sum(event["action"] == "alloc" and event["size"] == BYTES for event in trace)


def leaf() -> torch.Tensor:
    return torch.randn(COUNT, device="cuda", requires_grad=True)


def seed() -> torch.Tensor:
    return torch.ones(COUNT, device="cuda")


def test_turning_on_takes_no_memory() -> None:
    assert torch.cuda.memory_reserved() == 0


@pytest.mark.parametrize("sides", [2, 3, 5])
def test_each_further_side_makes_only_its_own_gradient(sides: int) -> None:
    x, gradient = leaf(), seed()
    middle = x.neg()
    total = middle.neg()
    for _ in range(sides - 1):
        total = total + middle.neg()
    # One gradient from each side; the sums go into the first. And the leaf's.
    assert made(lambda: torch.autograd.grad(total, x, gradient)) == sides + 1


def test_a_product_with_itself() -> None:
    x, gradient = leaf(), seed()
    middle = x.neg()
    square = middle * middle
    assert made(lambda: torch.autograd.grad(square, x, gradient)) == 2 + 1


def test_a_sum_of_a_nodes_own_is_no_such_gradient() -> None:
    def of(x: torch.Tensor, y: torch.Tensor) -> int:
        angle, gradient = torch.atan2(x, y), seed()
        return made(lambda: angle.backward(gradient))

    # Of one tensor in both places there is one gradient less: the second is added to the first.
    x, y = leaf(), leaf()
    both, alike = of(x, y), of(leaf().neg(), y)
    middle = leaf().neg()
    assert both == 9
    assert alike == both + 1
    assert of(middle, middle) == both + 1


def test_several_sums_of_a_nodes_own_are_none_either() -> None:
    """`linalg_lstsq_backward` adds up two before the gradients of both sides meet."""

    def more(solve: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> int:
        matrix, other = (torch.eye(256, device="cuda").requires_grad_() for _ in range(2))
        apart, alike = solve(matrix, other), solve(matrix, matrix)
        both = made(lambda: torch.autograd.grad(apart, (matrix, other), torch.ones_like(apart)))
        return made(lambda: torch.autograd.grad(alike, matrix, torch.ones_like(alike))) - both

    # What meets is added in place.
    assert more(lambda a, b: torch.linalg.lstsq(a, b)[0]) == 0


def test_a_kept_graphs_next_backward_has_the_same_sums() -> None:
    x, gradient = leaf(), seed()
    angle = torch.atan2(x, x)
    counts = [made(lambda: torch.autograd.grad(angle, x, gradient, retain_graph=True)) for _ in range(3)]
    assert len(set(counts)) == 1


def test_a_gradient_that_somebody_holds_is_left_alone() -> None:
    x, gradient = leaf(), seed()
    middle = x.neg()
    one, other = middle.neg(), middle.neg()
    held: list[torch.Tensor] = []
    one.grad_fn.register_hook(lambda inputs, outputs: held.append(inputs[0]))  # type: ignore[union-attr]
    other.grad_fn.register_hook(lambda inputs, outputs: held.append(inputs[0]))  # type: ignore[union-attr]
    total = one + other
    assert made(lambda: torch.autograd.grad(total, x, gradient)) == 2 + 1 + 1
    assert held[0] is not held[1]


def test_a_gradient_that_lies_in_no_memory_of_its_own_is_not_written_to() -> None:
    x = leaf()
    middle = x.neg()
    # The gradient of a sum is one number, seen COUNT times.
    total = middle.sum() + middle.sum()
    assert made(lambda: torch.autograd.grad(total, x)) == 1 + 1


def test_a_gradient_of_the_gradient_keeps_every_part() -> None:
    x, gradient = leaf(), seed()
    middle = x.neg()
    total = middle.neg() + middle.neg()
    assert made(lambda: torch.autograd.grad(total, x, gradient, create_graph=True)) == 2 + 1 + 1


class Doubled(torch.autograd.Function):
    """A gradient whose formula adds on its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + gradient.neg()


def test_a_formulas_own_sum_is_none_of_the_engines() -> None:
    x, gradient = leaf(), seed()
    doubled = Doubled.apply(x.neg())
    # neg, their sum, and the leaf's.
    assert made(lambda: torch.autograd.grad(doubled, x, gradient)) == 3


@pytest.mark.parametrize(
    ("index", "count"),
    [
        (lambda x: x[:, :50], 1),
        (lambda x: x[:, : x.shape[1], :], 2),
        (lambda x: x[:4, 0:50:1, :64], 0),
        (lambda x: x[:, :60], 2),
        (lambda x: x[:4], 1),
        (lambda x: x[..., :64], 0),
    ],
)
def test_up_to_2_8_a_slice_that_names_all_of_a_dimension_is_none(index: Callable[[Any], Any], count: int) -> None:
    """As PyTorch's builds of 2.4 and 2.8 do: each slice's gradient is a tensor of the full size, but not that of one which names
    the dimension's length beside other indices."""
    gpu.turn_on("A100-40GB,torch=2.8")
    x = torch.zeros(4, 50, 64, device="cuda", requires_grad=True)
    out = index(x)
    gradient = torch.zeros_like(out)
    memory: Any = torch.cuda.memory
    memory._record_memory_history()
    torch.autograd.grad(out, x, gradient)
    trace = memory._snapshot()["device_traces"][0]
    assert [event["size"] for event in trace if event["action"] == "alloc"] == [4 * 50 * 64 * 4] * count


@pytest.mark.parametrize(("version", "count"), [("2.8", 2), ("2.9", 0)])
def test_a_full_slice_is_an_operator_up_to_2_8(version: str, count: int) -> None:
    gpu.turn_on(f"A100-40GB,torch={version}")
    x = torch.randn(8, 16, 32, device="cuda", requires_grad=True)
    memory: Any = torch.cuda.memory
    y = x[:, -1, :]
    assert y.shape == (8, 32)
    gradient = torch.ones(8, 32, device="cuda")
    memory._record_memory_history()
    torch.autograd.grad(y, x, gradient)
    trace = memory._snapshot()["device_traces"][0]
    sizes = [event["size"] for event in trace if event["action"] == "alloc"]
    # Of the rows that were selected, and of the whole; the select's own gradient is there in every version.
    assert len(sizes) == 1 + count
    assert sizes.count(8 * 16 * 32 * 4) == 1 + count // 2


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), -1), (slice(None),), (..., slice(None), 2), (None, slice(None), 1, ...), (slice(1, None, 2), slice(None)),
        (slice(None), torch.tensor([0, 2])), (slice(None), [1, 0], slice(None), 3), 2, (slice(None), True, 1), (slice(-2, None),),
    ],
)  # fmt: skip
def test_an_older_index_gives_the_same_shape(index: Any) -> None:
    plain = torch.zeros(4, 5, 6, 7)[index]
    gpu.turn_on("A100-40GB,torch=2.6")
    x = torch.zeros(4, 5, 6, 7, device="cuda", requires_grad=True)
    found = x[index]
    assert (found.shape, found.stride()) == (plain.shape, plain.stride())
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_they_meet_in_place_while_the_compiler_watches_another_threads_frames() -> None:
    """Python's calls hold their arguments once more then, in all threads."""
    watched, over = threading.Event(), threading.Event()

    def watch() -> None:
        before = set_eval_frame(False)
        watched.set()
        over.wait()
        set_eval_frame(before)

    x, gradient = leaf(), seed()
    out = x.neg() + x.neg()
    thread = threading.Thread(target=watch)
    thread.start()
    watched.wait()
    try:
        assert made(lambda: torch.autograd.grad(out, x, gradient)) == 2
    finally:
        over.set()
        thread.join()
