"""How what kernels make number by number lies: as their operands do (`TensorIterator`, of PyTorch 2.9 to 2.13).

PyTorch's shape rules in Python say so, too, but for dimensions of one, whose stride no element depends on: the kernels keep the
one that an operand has, and the rules give another. By that stride a convolution decides whether the channels lie last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Lengths = Sequence[int]


def of_operands(shape: Lengths, operands: Sequence[tuple[Lengths, Lengths]]) -> tuple[int, ...]:
    """The strides of a result of that shape. operands: shape and strides of each, in the kernel's order; of no dimension, for a
    number.

    (``TensorIterator.cpp``: `compute_fast_setup_type`, `compute_strides`, `reorder_dimensions`, `allocate_or_resize_outputs`.)
    """
    shape = tuple(shape)
    if all(tuple(its) == shape for its, _ in operands):
        strides = [tuple(its) for _, its in operands]
        if all(lies_in_order(shape, its) for its in strides):
            return in_one_piece(shape)
        if len(shape) == 4 and all(lies_in_order(shape, its, (1, 3, 2, 0)) for its in strides):
            return in_order(shape, (1, 3, 2, 0))
        if len(set(strides)) == 1 and is_dense(shape, strides[0]):
            return strides[0]
    return in_order(shape, _order(shape, [_broadcast(shape, *one) for one in operands]))


def of_one_like(shape: Lengths, strides: Lengths) -> tuple[int, ...]:
    """Of a new tensor like this one (`empty_like` in ``TensorFactories.cpp``, `infer_dense_strides` in ``ExpandUtils.cpp``)."""
    if is_dense(shape, strides):
        return tuple(strides)
    return in_order(shape, _order(shape, [tuple(strides)]))


def in_one_piece(shape: Lengths) -> tuple[int, ...]:
    """Dimension after dimension."""
    return in_order(shape, range(len(shape) - 1, -1, -1))


def in_order(shape: Lengths, order: Sequence[int]) -> tuple[int, ...]:
    """Without gaps, in that order of dimensions, innermost first."""
    strides, expected = [0] * len(shape), 1
    for dim in order:
        strides[dim] = expected
        expected *= max(shape[dim], 1)
    return tuple(strides)


def lies_in_order(shape: Lengths, strides: Lengths, order: Sequence[int] | None = None) -> bool:
    """Whether the dimensions lie without gaps, the last of the order outermost; whatever stride those of one have."""
    expected = 1
    for dim in range(len(shape) - 1, -1, -1) if order is None else order:
        if shape[dim] != 1 and strides[dim] != expected:
            return False
        expected *= shape[dim]
    return True


def lies_in_one_row(shape: Lengths, strides: Lengths) -> bool:
    """Whether all elements are at one distance from each other, so that `reshape(-1)` is a view."""
    steps = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    return all(outer == size * stride for (_, outer), (size, stride) in pairwise(steps))


def like_channels_last(shape: Lengths, strides: Lengths) -> bool:
    """Whether an image's or a volume's dimensions lie so that its channels are innermost (`is_channels_last_strides_2d_s4` and
    the other in ``MemoryFormat.h``), where the strides of those of one count, too."""
    if len(shape) not in (4, 5) or strides[1] == 0:
        return False
    least = 0
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * shape[dim]
    return True


def is_dense(shape: Lengths, strides: Lengths) -> bool:
    """Without gaps, in whichever order."""
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _broadcast(shape: Lengths, its_shape: Lengths, strides: Lengths) -> tuple[int, ...]:
    more = len(shape) - len(its_shape)
    held = zip(shape[more:], its_shape, strides, strict=True)
    return (0,) * more + tuple(0 if its == 1 != length else stride for length, its, stride in held)


def _order(shape: Lengths, operands: Sequence[Lengths]) -> list[int]:
    """The dimensions, innermost first: sorted by insertion, where some pairs have no order."""
    order = list(range(len(shape) - 1, -1, -1))
    for place in range(1, len(order)):
        moved = place
        for before in range(place - 1, -1, -1):
            comes = _comes_after(shape, operands, order[before], order[moved])
            if comes is None:
                continue
            if not comes:
                break
            order[before], order[moved] = order[moved], order[before]
            moved = before
    return order


def _comes_after(shape: Lengths, operands: Sequence[Lengths], one: int, other: int) -> bool | None:
    """Whether the first of two dimensions lies around the other; None where no operand says so."""
    for strides in operands:
        if strides[one] == 0 or strides[other] == 0:
            continue
        if strides[one] != strides[other]:
            return strides[one] > strides[other]
        if shape[one] > shape[other]:
            return True
    return None
