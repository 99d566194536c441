"""`torch.einsum` on a device whose PyTorch keeps the order of its operands, and powers of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from asked_for import made
from torch.utils._python_dispatch import TorchDispatchMode

from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.engine.contractions import in_given_order, pairwise, unswapped

# Equations with shapes: of both kinds, with ellipses of different lengths, single elements, and results that are not named.
CASES = [
    ("fd,bd->bf", (4, 3), (2, 3)),
    ("bd,fd->bf", (2, 3), (4, 3)),
    ("oi, ... i -> ... o", (5, 3), (2, 4, 3)),
    ("...i,oi->...o", (2, 4, 3), (5, 3)),
    ("...i,...oi->...o", (2, 1, 3), (4, 5, 3)),
    ("...oi,...i->...o", (4, 5, 3), (2, 1, 3)),
    ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("bhkd,bhqd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("bhkd,bhqd->bhqk", (1, 3, 4, 5), (1, 3, 6, 5)),
    ("oi,bi->bo", (5, 3), (1, 3)),
    ("zi,ai", (5, 3), (2, 3)),
    ("ai,zi", (5, 3), (2, 3)),
    ("p,f->fp", (4,), (3,)),
    ("ij,ij->", (4, 3), (4, 3)),
    ("ikj,lj->lik", (2, 4, 3), (5, 3)),
    ("iij,kj->ki", (4, 4, 3), (5, 3)),
    ("...,k...->k", (2, 3), (4, 2, 3)),
    # What is summed in one of them alone keeps the other where it is.
    ("fdx,bd->bf", (4, 3, 2), (2, 3)),
    ("fd,bdx->bf", (4, 3), (2, 3, 2)),
]


class FirstProduct(TorchDispatchMode):
    """Keeps the address of the first tensor of the first matrix product."""

    address: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default and self.address is None:
            self.address = args[0].untyped_storage().data_ptr()
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    gpu.turn_off()


@pytest.mark.parametrize(("equation", "left", "right"), CASES)
def test_the_older_product_is_told_from_todays(equation: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    operands = torch.randn(left), torch.randn(right)
    with FirstProduct() as seen:
        today = torch.einsum(equation, *operands)
    swapped = seen.address == operands[1].untyped_storage().data_ptr()
    assert (unswapped(equation, left, right) is not None) == swapped
    older = in_given_order(equation, operands)
    if swapped:
        with FirstProduct() as seen:
            torch.testing.assert_close(in_given_order(equation, operands), today)
        assert seen.address == operands[0].untyped_storage().data_ptr()
    else:
        assert older is None


SEVERAL = [
    ("bclhn,bhcl,bclhp->bchpn", (2, 4, 8, 3, 5), (2, 3, 4, 8), (2, 4, 8, 3, 6)),
    ("...de,...nd,...n->...ne", (2, 3, 4, 5), (2, 3, 6, 4), (2, 3, 6)),
    ("ab,bC,Cd,de->ea", (2, 3), (3, 4), (4, 5), (5, 6)),
    ("zi,ai,bz", (5, 3), (2, 3), (4, 5)),
    ("i,j,k->kji", (2,), (3,), (4,)),
    ("ab,cb,db->dca", (2, 3), (4, 3), (5, 3)),
]


@pytest.mark.parametrize(("equation", "shapes"), [(equation, shapes) for equation, *shapes in SEVERAL])
def test_several_are_multiplied_one_after_the_other(equation: str, shapes: list[tuple[int, ...]]) -> None:
    operands = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    today = torch.einsum(equation, *operands)
    steps = pairwise(equation, shapes)
    assert steps is not None
    made, *others = operands
    for step, other in zip(steps, others, strict=True):
        made = torch.einsum(step.equation, made, other)
    torch.testing.assert_close(made, today)
    older = in_given_order(equation, operands)
    assert (older is None) != any(step.swaps for step in steps)
    if older is not None:
        torch.testing.assert_close(older, today)


def test_the_products_of_three_are_copied_in_the_order_of_an_older_device() -> None:
    """As 2.5's and 2.7's CUDA builds ask for, and 2.9's: the chunks' states of Mamba 2."""
    equation, *shapes = SEVERAL[0]
    asked = {}
    for version in ("2.7", "2.9"):
        gpu.turn_on(f"A100-40GB,torch={version}")
        operands = [torch.zeros(shape, device="cuda") for shape in shapes]
        asked[version] = made(lambda operands=operands: torch.einsum(equation, *operands))[1:3]
        gpu.turn_off()
    left, right = 2 * 4 * 8 * 3 * 5 * 4, 2 * 4 * 8 * 3 * 6 * 4
    assert asked == {"2.7": [left, right], "2.9": [right, left]}


def test_what_several_leave_out_of_an_ellipsis_is_left_to_pytorch() -> None:
    assert pairwise("...a,...b,...->ab", [(2, 3), (2, 4), (2,)]) is None


@pytest.mark.parametrize("equation", ["ab,bc,cd->da", "i...j...,j->i", "ab,cb->", "abc,cb->a", ""])
def test_what_is_no_product_of_two_or_wrong_is_left_to_pytorch(equation: str) -> None:
    assert unswapped(equation, (2, 3), (4, 3)) is None


@pytest.mark.parametrize(("version", "strides"), [("2.8", (1, 128)), ("2.9", (4096, 1))])
def test_the_devices_version_decides(version: str, strides: tuple[int, int]) -> None:
    # The strides that pull request 161755 tells of.
    gpu.turn_on(f"A100-40GB,torch={version}")
    weights = torch.nn.Parameter(torch.randn(4096, 1024, device="cuda"))
    out = torch.einsum("fd,bd->bf", weights, torch.randn(128, 1024, device="cuda"))
    assert (tuple(out.shape), out.stride()) == ((128, 4096), strides)
    out.sum().backward()
    assert weights.grad is not None
    assert weights.grad.stride() == weights.stride()


def test_a_number_to_the_power_of_a_tensor_goes_to_the_device() -> None:
    gpu.turn_on("A100-40GB")
    exponents = torch.ones(1000, device="cuda")
    memory: Any = torch.cuda.memory
    memory._record_memory_history()
    kept = 10000.0**exponents, 1.0**exponents
    trace = memory._snapshot()["device_traces"][0]
    assert [(event["action"], event["size"]) for event in trace if event["action"] != "free_completed"] == [
        ("alloc", 4000), ("alloc", 8), ("free_requested", 8), ("alloc", 4000),
    ]  # fmt: skip
    del kept
