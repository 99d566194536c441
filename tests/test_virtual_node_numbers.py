"""The order in which the gradient of a gradient runs: each thread of autograd's counts its own nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    gpu.turn_on("A100-80GB")
    yield
    gpu.turn_off()


def in_a_thread_of_its_own(run: Callable[[], None]) -> None:
    """Its count of nodes begins at 0."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def order(device: str, *, before: int) -> list[str]:
    """Which runs first: the node of a product made before a gradient with a graph, or that gradient's. before: so many nodes that
    the program makes first."""
    x = torch.ones(3, device=device, requires_grad=True)
    for _ in range(before):
        x.neg()
    product = x * 2
    (gradient,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
    ran: list[str] = []
    product.grad_fn.register_prehook(lambda _: ran.append("product"))
    gradient.grad_fn.register_prehook(lambda _: ran.append("gradient"))
    (product + gradient).sum().backward()
    return ran


def test_what_a_backward_pass_makes_comes_after_what_the_program_made_before() -> None:
    # On the host the pass makes its nodes in the program's thread, and the youngest runs first.
    def run() -> None:
        assert order("cpu", before=10_000) == ["gradient", "product"]
        assert order("cuda", before=10_000) == ["product", "gradient"]

    in_a_thread_of_its_own(run)


def test_it_comes_first_where_the_devices_thread_has_made_more_nodes_than_the_program() -> None:
    # The thread of the device goes on from what earlier passes made, the program's begins at 0.
    x = torch.ones(3, device="cuda", requires_grad=True)
    for _ in range(5):
        torch.autograd.grad((x**3).sum(), x, create_graph=True)
    in_a_thread_of_its_own(
        lambda: [order("cuda", before=0)] == [["gradient", "product"]] or pytest.fail("the product ran first")
    )


def test_among_the_programs_nodes_it_lies_where_its_number_is() -> None:
    # The first pass makes a few nodes, and the program 1,000 before it; the program's go on where they were, so that the second
    # pass's are still before all of these.
    def run() -> None:
        x = torch.ones(3, device="cuda", requires_grad=True)
        old = [x.neg() for _ in range(1000)][-1]
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        later = x.neg()
        (second,) = torch.autograd.grad((first * first).sum(), x, create_graph=True)
        torch.autograd.grad((first + second + old + later).sum(), x, retain_graph=True)
        numbers = [one.grad_fn._sequence_nr() for one in (first, second, old, later)]
        assert numbers == sorted(numbers)
        assert numbers[1] < 1000 <= numbers[3]

    in_a_thread_of_its_own(run)


def test_the_gradients_that_leaves_keep_have_them_too() -> None:
    def run() -> None:
        x = torch.ones(3, device="cuda", requires_grad=True)
        for _ in range(10_000):
            x.neg()
        product = (x * x).sum()
        with pytest.warns(UserWarning, match="create_graph=True"):
            product.backward(create_graph=True)
        torch.autograd.grad(x.grad.sum() + product, x, retain_graph=True)
        assert x.grad.grad_fn._sequence_nr() < product.grad_fn._sequence_nr()
        x.grad = None

    in_a_thread_of_its_own(run)


def test_a_pass_without_a_graph_changes_no_number() -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    product = (x * x).sum()
    number = product.grad_fn._sequence_nr()
    product.backward(retain_graph=True)
    assert product.grad_fn._sequence_nr() == number


def test_a_device_has_made_none_of_the_nodes_that_trying_it_makes() -> None:
    # The program's first node and the first one of the device's thread have the number 0, as on a device.
    def run() -> None:
        gpu.turn_on("A100-80GB")
        x = torch.ones(3, device="cuda", requires_grad=True)
        square = x * x
        (gradient,) = torch.autograd.grad(square.sum(), x, create_graph=True)
        (gradient + square).sum().backward(retain_graph=True)
        numbers = [square.grad_fn._sequence_nr(), *(node._sequence_nr() for node, _ in gradient.grad_fn.next_functions)]
        assert numbers[0] == 0
        assert min(numbers[1:]) == 0

    in_a_thread_of_its_own(run)


def test_what_passes_of_torch_func_make_is_the_devices_too() -> None:
    def run() -> None:
        x = torch.ones(3, device="cuda", requires_grad=True)
        old = [x.neg() for _ in range(1000)][-1]
        gradient = torch.func.grad(lambda x: (x**3).sum())(x)
        torch.autograd.grad((gradient + old).sum(), x, retain_graph=True)
        assert gradient.grad_fn._sequence_nr() < old.grad_fn._sequence_nr()

    in_a_thread_of_its_own(run)
