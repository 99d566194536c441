"""Products that the host's PyTorch puts together in another way than the device's.

`torch.einsum` of two tensors before 2.9: the matrix product keeps the order in which they are given.

Later versions swap them where the result then lies plainly (``sumproduct_pair`` in ATen/native/Linear.cpp, pull request
161755). The older result lies transposed, as do the gradients that meet it, and so other tensors are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import torch

# The first PyTorch that swaps.
SWAPPED_FROM = (2, 9)


def in_given_order(equation: Any, operands: Sequence[Any]) -> Any:
    """The older result; None where it is today's."""
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    shapes = [tuple(operand.shape) for operand in operands]
    order = unswapped(equation, *shapes)
    if order is None:
        return None
    inputs, wanted, made = order
    result = torch.einsum(f"{inputs}->{made}", *operands)
    return result.permute([made.index(label) for label in wanted])


def unswapped(equation: str, left: Sequence[int], right: Sequence[int]) -> tuple[str, str, str] | None:
    """Where today's PyTorch swaps: the labels of the operands, those of the result, and these in the older product's order."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if len(names) != 2 or any(name.count("...") > 1 for name in (*names, output)):
        return None
    dots = [len(shape) - len(name.replace("...", "")) for name, shape in zip(names, (left, right), strict=True)]
    if any(count < 0 or (count and "..." not in name) for count, name in zip(dots, names, strict=True)):
        return None
    if not arrow:
        labels = "".join(names).replace(".", "")
        output = "..." + "".join(sorted(label for label in labels if labels.count(label) == 1))
    free = "".join(label for label in ascii_letters if label not in equation)
    most = max((count for count, name in zip(dots, names, strict=True) if "..." in name), default=0)
    if most > len(free):
        return None
    # Dimensions that an ellipsis stands for are counted from the last.
    names = [name.replace("...", free[most - count : most]) for name, count in zip(names, dots, strict=True)]
    output = output.replace("...", free[:most])
    sizes = []
    for name, shape in zip(names, (left, right), strict=True):
        sizes.append({label: size for label, size in zip(name, shape, strict=True) if size != 1})
    in_left, in_right = sizes
    both = [label for label in output if label in in_left and label in in_right]
    from_left = [label for label in output if label in in_left and label not in in_right]
    from_right = [label for label in output if label not in in_left]
    summed = any(label in in_right and label not in output for label in in_left)
    swaps = summed and from_left and from_right and output.index(from_right[-1]) < output.index(from_left[0])
    return (",".join(names), output, "".join(both + from_left + from_right)) if swaps else None
