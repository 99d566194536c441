"""Memory that an operator reads and writes at once (`compute_mem_overlaps` in ``TensorIterator.cpp``, ``MemoryOverlap.cpp``).

``x[1:] += x[:-1]`` and ``x += x.t()`` are refused on a card, where threads would read what others have written, and so is what
writes to one place several times: ``x.expand(4, 4).normal_()``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine import strides
from gpumem_magic.virtual.engine.tensors import VirtualTensor, is_ordinary

# Beside what works element by element. (Filling may meet itself.)
_MORE = frozenset(
    overloads("copy_ index_put_ _index_put_impl_ masked_scatter_ scatter_.src scatter_add_ index_add_ index_copy_")
)
_FREE = frozenset(overloads("fill_.Scalar fill_.Tensor zero_ masked_fill_.Scalar masked_fill_.Tensor"))
# What has a check of its own, or copies its result into the tensor: random numbers (`borrowing_nullary_op`), ``Copy.cpp``,
# ``TensorAdvancedIndexing.cpp``, and ``cuda/Blas.cpp`` where a matrix is none that cuBLAS can write to.
# (What works by elements is refused by the host.)
_ONCE_EACH = frozenset(
    overloads(
        "normal_ uniform_ random_ random_.from random_.to bernoulli_.float bernoulli_.Tensor exponential_ cauchy_ geometric_ "
        "log_normal_ copy_ addmm_ baddbmm_ scatter_.src scatter_.value scatter_add_ scatter_reduce_.two masked_scatter_"
    )
)
# What is written by ``out=`` and has to be apart from all that is read, beside what works by elements.
_APART = frozenset(overloads("cat.out gather.out index_select.out"))
# Products, which may be written over what is read. Those of a batch may be written over each other.
_PRODUCTS = frozenset(overloads("mm.out addmm.out bmm.out baddbmm.out"))
_BATCHES = frozenset(overloads("baddbmm_ bmm.out baddbmm.out"))
_REFUSAL = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location. "
    "Please clone() the tensor before performing the operation."
)


_REFUSAL_OF_ITSELF = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location. Please "
    "clone() the tensor before performing the operation."
)


def may_not_meet(func: Any) -> bool:
    """Whether what it writes first must be apart from what it reads, or the very same."""
    return func not in _FREE and (torch.Tag.pointwise in func.tags or func in _MORE)


def writes_once(func: Any) -> bool:
    """Whether no two elements of what it writes first may lie at one place."""
    return func in _ONCE_EACH


def written_apart(func: Any) -> tuple[str, ...]:
    """The names of the ``out=`` arguments which must be apart from what it reads, or from themselves."""
    if func not in _APART and func not in _PRODUCTS and torch.Tag.pointwise not in getattr(func, "tags", ()):
        return ()
    return tuple(argument.name for argument in func._schema.arguments if argument.is_out)


def refuse_itself(func: Any, args: Any) -> None:
    """Raises PyTorch's error where several elements of what is written first lie at one place."""
    if meets_itself(func, args[0]) and not (len(args) > 1 and _are_one(args[0], args[1])):
        raise RuntimeError(_REFUSAL_OF_ITSELF)


def meets_itself(func: Any, written: VirtualTensor) -> bool:
    """`has_internal_overlap`, of what a kernel looks at."""
    first = int(func in _BATCHES)
    lengths, strides = written.shape[first:], written.stride()[first:]
    return written.numel() > 0 and any(
        length > 1 and not stride for length, stride in zip(lengths, strides, strict=True)
    )


def _are_one(written: VirtualTensor, read: Any) -> bool:
    """Whether a tensor is copied to where it lies, which does nothing (`is_same_data` in ``Copy.cpp``)."""
    return (
        is_ordinary(read)
        and _share(written, read)
        and written.storage_offset() == read.storage_offset()
        and written.shape == read.shape
        and written.stride() == read.stride()
        and written.dtype == read.dtype
    )


def _share(one: VirtualTensor, other: VirtualTensor) -> bool:
    """Whether they have one storage."""
    return torch._C._is_alias_of(one, other)  # type: ignore[attr-defined, no-any-return]


def refuse_written(func: Any, args: Any, kwargs: Any, names: tuple[str, ...]) -> None:
    """The same as `refuse_overlaps` for what is written by ``out=``."""
    read = tree_leaves((args, {name: value for name, value in kwargs.items() if name not in names}))
    for name in names:
        written = kwargs.get(name)
        if not is_ordinary(written):
            continue
        if func in _PRODUCTS or func in _APART:
            if meets_itself(func, written) and all(one.numel() for one in read if isinstance(one, torch.Tensor)):
                raise RuntimeError(_REFUSAL_OF_ITSELF)
            if func in _PRODUCTS:
                continue
        refuse_overlaps(written, read, same=func in _APART)


def refuse_overlaps(written: VirtualTensor, read: Iterable[Any], same: bool = False) -> None:
    """Raises PyTorch's error where a tensor that is read has some of the memory that is written, and is not the same. same: even
    then."""
    for one in read:
        is_other = is_ordinary(one) and (same or one is not written)
        if is_other and _share(written, one) and _meet(written, one, same):
            raise RuntimeError(_REFUSAL)


def _meet(written: VirtualTensor, read: VirtualTensor, same: bool) -> bool:
    """`get_overlap_status`, where it is "partial" (same: or "full")."""
    if not (written.numel() and read.numel() and _is_dense(written) and _is_dense(read)):
        return False
    begins = written.storage_offset() * written.itemsize, read.storage_offset() * read.itemsize
    ends = begins[0] + written.numel() * written.itemsize, begins[1] + read.numel() * read.itemsize
    if begins[0] == begins[1] and ends[0] == ends[1]:
        return same or written.stride() != read.stride()
    return begins[0] < ends[1] and begins[1] < ends[0]


def _is_dense(tensor: torch.Tensor) -> bool:
    return strides.is_dense(tensor.shape, tensor.stride())
