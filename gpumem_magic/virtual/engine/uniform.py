"""Values that are all equal: masks of ones, zeros, what was filled. They are known whatever their size, by one element.

A storage's twin is then a `Uniform`. All views of the storage have that element; what is written into it must leave all of it
equal, or nothing is known any more.
"""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.private import overloads

# The largest host tensor that is looked through, in elements that have a place of their own; how many tell most others at once.
_MOST_COMPARED = 1 << 23
_FIRST = 16
# Elements are compared bit by bit: zeros have signs, and what is no number is not equal to itself.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Operators whose results, beside those that work element by element, are made of equal elements where all arguments are, and of
# the same ones if each argument had a single element: they copy, or choose among elements.
_CHOOSING = set(
    overloads(
        "_to_copy clone copy_ fill_.Scalar fill_.Tensor masked_fill_.Scalar masked_fill_.Tensor zero_ repeat flip roll cat stack "
        "amax amin max min all all.dim all.dims any any.dim any.dims zeros_like ones_like full_like tril tril_ triu triu_"
    )
)
# They make equal elements, as many as are asked for.
_MAKING = set(overloads("zeros ones full new_zeros new_ones new_full"))


class Uniform:
    """The twin of a storage of `nbytes` that holds one element (a host tensor without dimensions) all over."""

    def __init__(self, element: torch.Tensor, nbytes: int) -> None:
        self.element = element
        self.nbytes = nbytes

    def fits(self, tensor: Any) -> bool:
        """Whether a tensor on the storage looks at it as such elements."""
        return (
            tensor.dtype is self.element.dtype
            and tensor.untyped_storage().nbytes() == self.nbytes
            and not (tensor.is_conj() or tensor.is_neg())
        )

    def seen_as(self, tensor: Any) -> torch.Tensor:
        """The tensor's values, in memory for one."""
        return self.element.expand(tensor.size())

    def holds(self, element: torch.Tensor) -> bool:
        return element_of(torch.stack([self.element, element])) is not None


def element_of(host: torch.Tensor) -> torch.Tensor | None:
    """A copy of the element that all elements of a host tensor are equal to; None where they differ, or are too many to see."""
    if host.layout is not torch.strided or host.is_meta or host.is_conj() or host.is_neg() or not host.numel():
        return None
    bits = BITS.get(host.element_size())
    if bits is None or host.is_quantized:
        return None
    places = host
    for dim, stride in enumerate(host.stride()):
        if stride == 0:
            places = places.narrow(dim, 0, 1)
    if places.numel() > _MOST_COMPARED:
        return None
    compared = places.view(bits)
    if compared.is_contiguous():
        compared = compared.reshape(-1)
        if not bool((compared[:_FIRST] == compared[0]).all()):
            return None
    if not bool((compared == compared[(0,) * compared.dim()]).all()):
        return None
    return places[(0,) * places.dim()].clone()


def follows(func: Any) -> bool:
    """Whether an operator makes equal elements of equal elements, whatever their number and places."""
    return torch.Tag.pointwise in func.tags or func in _CHOOSING or func in _MAKING


def for_one(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with which an operator makes one element in place of many."""
    if func not in _MAKING:
        return args, kwargs
    place = next(number for number, argument in enumerate(func._schema.arguments) if argument.name == "size")
    if place < len(args):
        return (*args[:place], [], *args[place + 1 :]), kwargs
    return args, {**kwargs, "size": []}


def is_whole(tensor: Any) -> bool:
    """Whether a tensor looks at each element of its storage once."""
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size() or not tensor.numel():
        return False
    dense = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != dense:
                return False
            dense *= size
    return True
