"""Quotients of integers that end a process on the host, or raise there, and do neither on a card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

LEAST = -(2**31)
DIVISIONS: dict[str, Callable[[Any, Any], Any]] = {
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
    "fmod": torch.fmod,
    "div_": lambda x, y: x.clone().div_(y, rounding_mode="trunc"),
    "floor_divide_": lambda x, y: x.clone().floor_divide_(y),
    "remainder_": lambda x, y: x.clone().remainder_(y),
    "fmod_": lambda x, y: x.clone().fmod_(y),
    "out": lambda x, y: torch.remainder(x, y, out=torch.zeros_like(x)),
}
REMAINDERS = {"%", "fmod", "remainder_", "fmod_", "out"}


@pytest.mark.parametrize("name", DIVISIONS)
def test_the_least_integer_has_a_quotient(card_with_values: str, name: str) -> None:
    """By -1 the process ended (`SIGFPE`); on a card it stays the least."""
    divide = DIVISIONS[name]
    expected = [0, 0] if name in REMAINDERS else [LEAST, -5]
    numbers = torch.tensor([LEAST, 5], dtype=torch.int32, device="cuda")
    for by in (-1, torch.full((2,), -1, dtype=torch.int32, device="cuda"), torch.tensor(-1, device="cuda")):
        # (The second call of one that looks alike goes another way.)
        assert divide(numbers, 1).shape == divide(numbers, 1).shape == (2,)
        for _ in range(3):
            assert divide(numbers, by).tolist() in (expected, [0, 0])
    if "real" in card_with_values:
        assert divide(numbers, -1).tolist() == expected
        longer = numbers.long() * 2**32
        assert divide(longer, -1).tolist()[0] == expected[0] * 2**32


@pytest.mark.parametrize("name", DIVISIONS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
def test_by_zero_nothing_is_raised(card_with_values: str, name: str, dtype: torch.dtype) -> None:
    numbers, zeros = torch.ones(3, dtype=dtype, device="cuda"), torch.zeros(3, dtype=dtype, device="cuda")
    for by in (zeros, zeros[0], 0):
        assert DIVISIONS[name](numbers, by).shape == (3,)
    assert (4 % zeros).dtype == dtype
    if "real" in card_with_values:
        mixed = torch.arange(3, device="cuda").to(dtype)
        assert (torch.full_like(mixed, 5) // mixed).tolist()[1:] == [5, 2]
        assert (torch.full_like(mixed, 5) % mixed).tolist()[1:] == [0, 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
@pytest.mark.parametrize("rounding", ["trunc", "floor"])
def test_nothing_grows_in_place(card_with_values: str, dtype: torch.dtype, rounding: str) -> None:
    """A quotient of known numbers was worked out in memory that nobody had filled, which ended the process."""
    small = torch.ones(10, 1, 5, dtype=dtype, device="cuda")
    with pytest.raises(
        RuntimeError, match=r"output with shape \[10, 1, 5\] doesn't match the broadcast shape \[10, 10, 5\]"
    ):
        small.div_(torch.ones(10, 5, dtype=dtype, device="cuda"), rounding_mode=rounding)
    assert small.shape == (10, 1, 5)
    small.add_(small[:, :, :1]), small.div_(small[0].clone(), rounding_mode=rounding), small.mul_(2)


def test_comparisons_do_not_grow_in_place_either(card_with_values: str) -> None:
    """Their rules are written in Python, and they are not tagged as what works element by element."""
    small, large = torch.ones(3, device="cuda"), torch.ones(2, 3, device="cuda")
    for compare in (small.eq_, small.lt_, small.copysign_, small.heaviside_, small.floor_divide_, small.ldexp_):
        with pytest.raises(RuntimeError, match=r"output with shape \[3\] doesn't match the broadcast shape \[2, 3\]"):
            compare(large)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="broadcast shape"):
        small.masked_fill_(large > 0, 1)
    with pytest.raises(RuntimeError, match="broadcast shape"):
        torch.mul(small, large, out=small)
    assert small.shape == (3,)
    assert torch.mul(large, large, out=small.clone().resize_(0)).shape == (2, 3)
    # (Another name than `out`, which is not read.)
    given = torch.ones(1, device="cuda"), torch.ones(2, 3, device="cuda")
    result = torch.ops.aten.sigmoid_backward.grad_input(*given, grad_input=torch.empty(0, device="cuda"))
    assert result.shape == (2, 3)
    assert large.eq_(small).shape == (2, 3)
