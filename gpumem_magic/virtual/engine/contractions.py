"""Products that the host's PyTorch puts together in another way than the device's.

`torch.einsum` before 2.9: the matrix product of two tensors keeps the order in which they are given. (Of several the first two
are multiplied, their product with the third, and so on.)

Later versions swap them where the result then lies plainly (``sumproduct_pair`` in ATen/native/Linear.cpp, pull request
161755). The older result lies transposed, as do the gradients that meet it, and so other tensors are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any, NamedTuple

import torch

# The first PyTorch that swaps.
SWAPPED_FROM = (2, 9)


def in_given_order(equation: Any, operands: Sequence[Any]) -> Any:
    """The older result; None where it is today's."""
    if not isinstance(equation, str) or len(operands) < 2:
        return None
    shapes = [tuple(operand.shape) for operand in operands]
    if len(operands) > 2:
        # (Where opt_einsum is installed, PyTorch asks it for an order.)
        steps = None if torch.backends.opt_einsum.is_available() else pairwise(equation, shapes)
        if steps is None or not any(step.swaps for step in steps):
            return None
        made, *others = operands
        for step, other in zip(steps, others, strict=True):
            found = in_given_order(step.equation, (made, other))
            made = torch.einsum(step.equation, made, other) if found is None else found
        return made
    order = unswapped(equation, *shapes)
    if order is None:
        return None
    inputs, wanted, made = order
    result = torch.einsum(f"{inputs}->{made}", *operands)
    return result.permute([made.index(label) for label in wanted])


class ProductOfTwo(NamedTuple):
    """A product of two among several: its equation, and whether today's PyTorch swaps them."""

    equation: str
    swaps: bool


def pairwise(equation: str, shapes: Sequence[Sequence[int]]) -> list[ProductOfTwo] | None:
    """The products of an equation of several, from left to right; None for what is left to PyTorch."""
    named = _spelled_out(equation, shapes)
    if named is None:
        return None
    names, output = named
    order = _all_labels(names, output)
    sizes = [_larger_than_one(name, shape) for name, shape in zip(names, shapes, strict=True)]
    steps: list[ProductOfTwo] = []
    left, its_sizes = names[0], sizes[0]
    for place, right in enumerate(names[1:], 1):
        wanted = "".join((output, *names[place + 1 :]))
        made = "".join(label for label in order if label in wanted and label in left + right)
        made = output if place == len(names) - 1 else made
        swaps = _groups(order, its_sizes, sizes[place], wanted) is not None
        steps.append(ProductOfTwo(f"{left},{right}->{made}", swaps))
        left, its_sizes = made, (its_sizes | sizes[place]) & set(made)
    return steps


def unswapped(equation: str, left: Sequence[int], right: Sequence[int]) -> tuple[str, str, str] | None:
    """Where today's PyTorch swaps: the labels of the operands, those of the result, and these in the older product's order."""
    named = _spelled_out(equation, (left, right))
    if named is None:
        return None
    names, output = named
    in_left, in_right = (_larger_than_one(name, shape) for name, shape in zip(names, (left, right), strict=True))
    made = _groups(_all_labels(names, output), in_left, in_right, output)
    return None if made is None else (",".join(names), output, made)


def _all_labels(names: Sequence[str], output: str) -> str:
    """In the order that PyTorch gives them: what is summed comes after the result's, capitals first."""
    return output + "".join(sorted(set("".join(names)) - set(output)))


def _larger_than_one(name: str, shape: Sequence[int]) -> set[str]:
    return {label for label, size in zip(name, shape, strict=True) if size != 1}


def _groups(order: str, left: set[str], right: set[str], wanted: str) -> str | None:
    """Where today's PyTorch swaps two: the labels of their product as the older one has them. left, right: those of more than
    one element; wanted: those that are not summed yet. (What was summed, and what only comes later, counts among the right's.)
    """
    summed = {label for label in left & right if label not in wanted}
    left, right = left & set(wanted), right & set(wanted)
    rest = [label for label in order if label not in summed]
    both = [label for label in rest if label in left and label in right]
    from_left = [label for label in rest if label in left and label not in right]
    from_right = [label for label in rest if label not in left]
    if not (summed and from_left and from_right) or order.index(from_right[-1]) > order.index(from_left[0]):
        return None
    return "".join(both + from_left + from_right)


def _spelled_out(equation: str, shapes: Sequence[Sequence[int]]) -> tuple[list[str], str] | None:
    """The labels of the operands and of the result, with some for what an ellipsis stands for; None for what is left alone."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if len(names) != len(shapes) or any(name.count("...") > 1 for name in (*names, output)):
        return None
    dots = [len(shape) - len(name.replace("...", "")) for name, shape in zip(names, shapes, strict=True)]
    if any(count < 0 or (count and "..." not in name) for count, name in zip(dots, names, strict=True)):
        return None
    if not arrow:
        labels = "".join(names).replace(".", "")
        output = "..." + "".join(sorted(label for label in labels if labels.count(label) == 1))
    free = "".join(label for label in ascii_letters if label not in equation)
    most = max((count for count, name in zip(dots, names, strict=True) if "..." in name), default=0)
    if most > len(free) or (most and "..." not in output):
        return None
    # Dimensions that an ellipsis stands for are counted from the last.
    return (
        [name.replace("...", free[most - count : most]) for name, count in zip(names, dots, strict=True)],
        output.replace("...", free[:most]),
    )
