"""What PyTorch before 2.0 did otherwise, on devices that name such a version. Worked out by hand from its sources and builds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpumem_magic.units import MIB
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.engine.device import VirtualDevice


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    gpu.turn_off()


def on(version: str) -> VirtualDevice:
    return gpu.turn_on(f"V100-16GB,torch={version}").devices[0]


def events(program: Callable[[], Any]) -> list[tuple[str, int]]:
    """("+", bytes) of each allocation, ("-", its number) of each that is given back."""
    memory: Any = torch.cuda.memory
    memory._record_memory_history()
    kept = program()
    trace = memory._snapshot()["device_traces"][0]
    memory._record_memory_history(enabled=None)
    del kept
    found: list[tuple[str, int]] = []
    numbers: dict[int, int] = {}
    for event in trace:
        if event["action"] == "alloc":
            numbers[event["addr"]] = sum(what == "+" for what, _ in found)
            found.append(("+", event["size"]))
        elif event["action"] == "free_requested" and event["addr"] in numbers:
            found.append(("-", numbers.pop(event["addr"])))
    return found


def sizes(program: Callable[[], Any]) -> list[int]:
    return [size for what, size in events(program) if what == "+"]


@pytest.mark.parametrize(("version", "is_one_call"), [("1.11", False), ("1.12", True)])
def test_a_linear_layer_of_three_dimensions_adds_its_bias_in_place(version: str, is_one_call: bool) -> None:
    on(version)
    x = torch.zeros(2, 8, 64, device="cuda", requires_grad=True)
    layer = torch.nn.Linear(64, 32, device="cuda")
    result, of_x, of_weight, of_bias = (4 * count for count in (2 * 8 * 32, 2 * 8 * 64, 32 * 64, 32))
    assert sizes(lambda: layer(x)) == [result]
    out = layer(x)
    gradient = torch.zeros_like(out)
    backward = sizes(lambda: torch.autograd.grad(out, (x, *layer.parameters()), gradient))
    # The sum and the product are nodes of their own, of which the sum's comes first; a product's gives its second factor's first.
    assert backward == ([of_x, of_weight, of_bias] if is_one_call else [of_bias, of_weight, of_x])


@pytest.mark.parametrize(("version", "mask_first"), [("1.10", False), ("1.11", True)])
def test_dropout_makes_its_result_before_its_mask(version: str, mask_first: bool) -> None:
    on(version)
    x = torch.zeros(1000, device="cuda")
    assert sizes(lambda: F.dropout(x, 0.1)) == ([1000, 4000] if mask_first else [4000, 1000])


@pytest.mark.parametrize(("version", "by_row"), [("1.10", [256] * 4), ("1.11", [])])
def test_the_gradient_of_a_layer_norm_takes_four_numbers_for_each_row(version: str, by_row: list[int]) -> None:
    on(version)
    x = torch.zeros(64, 128, device="cuda", requires_grad=True)
    norm = torch.nn.LayerNorm(128, device="cuda")
    out = norm(x)
    gradient = torch.zeros_like(out)
    inputs = (x, *norm.parameters())
    assert sizes(lambda: torch.autograd.grad(out, inputs, gradient)) == [32768, 512, 512, *by_row]


@pytest.mark.parametrize(("version", "let_go"), [("1.9", 0), ("1.10", 1)])
def test_the_gradient_of_softmax_comes_after_the_product(version: str, let_go: int) -> None:
    on(version)
    x = torch.zeros(64, 128, device="cuda", requires_grad=True)
    out = x.softmax(1)
    gradient = torch.zeros_like(out)
    found = events(lambda: torch.autograd.grad(out, x, gradient))
    # (What ends with the recording has no part in it.)
    assert found == [("+", 32768), ("+", 32768), ("-", let_go)]


@pytest.mark.parametrize(("version", "tensors"), [("1.12", 4), ("2.0", 3)])
def test_gradients_that_meet_make_a_third(version: str, tensors: int) -> None:
    on(version)
    x = torch.zeros(1000, device="cuda", requires_grad=True)
    middle = x.neg()
    total = middle.neg() + middle.neg()
    gradient = torch.zeros_like(total)
    # Of two sides one each, and their sum; and that of the first step.
    assert sizes(lambda: torch.autograd.grad(total, x, gradient)) == [4000] * tensors


def test_autocast_casts_as_the_version_does() -> None:
    half = torch.float16
    for version, gelu, joined in (("1.9", torch.float32, [8, 8, 16]), ("1.10", half, [8])):
        on(version)
        x = torch.zeros(2, dtype=half, device="cuda")
        wide = torch.zeros(2, device="cuda")
        with torch.autocast("cuda"):
            assert F.gelu(x).dtype == gelu
            assert torch.cat((x, x)).dtype == half
            # The narrow ones are copied first.
            assert sizes(lambda x=x, wide=wide: torch.cat((x, x, wide)))[:-1] == joined[:-1]  # type: ignore[misc]
        gpu.turn_off()
    for version, normed in (("2.11", half), ("2.12", torch.float32)):
        on(version)
        x = torch.zeros(2, 8, dtype=half, device="cuda")
        with torch.autocast("cuda"):
            assert F.rms_norm(x, (8,)).dtype == normed
        gpu.turn_off()


@pytest.mark.parametrize(("version", "first", "second"), [("1.9", 10, 8), ("1.4", 0, 0), ("2.0", 0, 0)])
def test_cublas_takes_its_workspaces_from_the_driver(version: str, first: int, second: int) -> None:
    device = on(version)
    x = torch.zeros(8, 8, device="cuda", requires_grad=True)
    before = device.context_bytes()
    out = x @ x
    assert device.context_bytes() - before == first * MIB
    x @ x
    assert device.context_bytes() - before == first * MIB
    # The engine's thread has a handle of its own, and small buffers share a page.
    out.sum().backward()
    assert device.context_bytes() - before == (first + second) * MIB


def test_a_library_that_finds_no_memory_says_so() -> None:
    gpu.turn_on("V100-16GB,torch=1.9,total=1400MiB")
    x = torch.zeros(8, 8, device="cuda")
    taken = torch.zeros(48 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match="CUBLAS_STATUS_ALLOC_FAILED"):
        x @ x
    del taken
    torch.cuda.empty_cache()
    assert (x @ x).shape == (8, 8)


def test_addresses_fall() -> None:
    x, y = None, None
    for device, falls in (("V100-16GB,torch=1.9", True), ("T4", False), ("T4,addresses=falling", True)):
        gpu.turn_on(device)
        x, y = (torch.zeros(8 * MIB, device="cuda") for _ in range(2))
        assert (y.data_ptr() < x.data_ptr()) is falls
        x = y = None
        gpu.turn_off()
