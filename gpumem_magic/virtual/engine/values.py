"""Small values that are known although the device is not there: counters, flags, lengths, labels.

Virtual tensors hold no data, but a few small ones steer programs: `generate` ends when a flag of the batch says so, a loss scale
is read back. So a small tensor that was made from constants, or copied from the host, keeps a host copy beside it, and small
operators are done on these copies too. Where an unknown small value takes part, it counts as zero, and the result is *inexact*:
reading it is still listed as reading a stand-in. Nothing is drawn from the host's random generator for this.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpumem_magic.failures import is_own_failure
from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.tensors import KNOWN, VirtualTensor, engine_of

# The largest tensor that is learnt, in elements. Small biases and the like would be followed for nothing.
MOST_INTEGERS = 1024
MOST_FLOATS = 1
# The largest that is made of values that are known already: scores that are compared, where flags decide.
MOST_FLOATS_MADE = 1024


# They make known values without being given any.
_CONSTANT = {
    *overloads("zeros_like ones_like full_like new_zeros new_ones new_full zero_ fill_.Scalar"),
    # Numbers that C++ makes tensors of, beside tensors: `torch.where(flag, x, -1e9)`.
    *overloads("scalar_tensor"),
}


class Known(NamedTuple):
    """The values of a virtual tensor. exact: no unknown value took part in them. supplied: one that the user gave did."""

    host: torch.Tensor
    exact: bool
    supplied: bool = False


class _Unknown(Exception):
    """An operator needs a value that is neither known nor small."""


def known(tensor: Any) -> Known | None:
    engine = engine_of(tensor)
    if engine.computes:
        host = engine.host_of(tensor)
        return None if host is None else Known(host, True)
    found: Known | None = tensor.__dict__.get(KNOWN)
    return found


def exact(tensor: Any) -> torch.Tensor | None:
    """The tensor's values if they are exactly known."""
    found = known(tensor) if isinstance(tensor, VirtualTensor) else None
    return found.host if found is not None and found.exact else None


class _Limit(threading.local):
    integers = MOST_INTEGERS


_LIMIT = _Limit()


@contextmanager
def every_integer() -> Iterator[None]:
    """Inside, integers are followed in tensors of any size: for code of PyTorch's own that would crash on stand-ins."""
    before = _LIMIT.integers
    _LIMIT.integers = 1 << 40
    try:
        yield
    finally:
        _LIMIT.integers = before


def small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (MOST_FLOATS if tensor.is_floating_point() else _LIMIT.integers)


def _small_enough(tensor: torch.Tensor) -> bool:
    """For the arguments and results of an operator that is done on known values as well."""
    return tensor.numel() <= MOST_FLOATS_MADE if tensor.is_floating_point() else small(tensor)


def learn(tensor: VirtualTensor, host: torch.Tensor) -> None:
    """Remembers exact values for a new tensor, if it is small."""
    if tensor.layout is torch.strided and small(tensor):
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            tensor.__dict__[KNOWN] = Known(host.detach().clone(), True)


def overwritten(tensor: VirtualTensor, source: torch.Tensor) -> None:
    """After a copy from a host tensor into all of `tensor`, whose values were not known before (`follow` sees to others)."""
    if KNOWN not in tensor.__dict__ and small(tensor) and tensor.layout is torch.strided and _owns_storage(tensor):
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            tensor.__dict__[KNOWN] = Known(source.detach().to(tensor.dtype).expand(tensor.shape).clone(), True)


def forget(tensor: Any) -> None:
    tensor.__dict__.pop(KNOWN, None)


def follow(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """After an operator on virtual tensors: does it on the known values as well, where that is cheap and possible."""
    if not _any_known(args) and func not in _CONSTANT:
        return
    if func.namespace == "c10d":
        # Other processes, if there are any, are taken to hold the same values; and nothing is sent to them.
        return
    results = [leaf for leaf in _leaves((out,)) if isinstance(leaf, VirtualTensor)]
    writes = func._schema.is_mutable
    try:
        if torch.Tag.nondeterministic_seeded in func.tags or not all(_small_enough(leaf) for leaf in results):
            raise _Unknown
        sure = [True, False]
        host_args = [_on_host(arg, sure) for arg in args]
        host_kwargs = {name: _on_host(value, sure) for name, value in kwargs.items()}
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            host_out = func(*host_args, **host_kwargs)
        values = [leaf for leaf in _leaves((host_out,)) if isinstance(leaf, torch.Tensor)]
        if len(values) != len(results):
            raise _Unknown
    except Exception as error:  # no value is worth an error of the program's
        if writes:
            for leaf in _leaves((*args, *kwargs.values())):
                if isinstance(leaf, VirtualTensor):
                    forget(leaf)
        if not is_own_failure(error):
            raise
        return
    for leaf, value in zip(results, values, strict=True):
        # A small view of a large tensor is not followed: what is written to the rest would not be seen.
        if KNOWN in leaf.__dict__ or not writes or _owns_storage(leaf):
            leaf.__dict__[KNOWN] = Known(value, sure[0] or func in _CONSTANT, sure[1])


def _any_known(args: Any) -> bool:
    for arg in args:
        if isinstance(arg, FakeTensor):
            if KNOWN in arg.__dict__:
                return True
        elif isinstance(arg, (list, tuple)) and _any_known(arg):
            return True
    return False


def _on_host(arg: Any, sure: list[bool]) -> Any:
    if isinstance(arg, VirtualTensor):
        found = known(arg)
        if found is None:
            if not _small_enough(arg):
                raise _Unknown
            sure[0] = False
            with torch._C._DisableTorchDispatch():
                return _aten.zeros.default(arg.shape, dtype=arg.dtype)
        sure[0] = sure[0] and found.exact
        sure[1] = sure[1] or found.supplied
        return found.host
    if isinstance(arg, FakeTensor):
        raise _Unknown
    if isinstance(arg, torch.device):
        return torch.device("cpu")
    if isinstance(arg, (list, tuple)):
        return type(arg)([_on_host(item, sure) for item in arg]) if type(arg) in (list, tuple) else arg
    return arg


def _leaves(items: Any) -> Iterator[Any]:
    for item in items:
        if isinstance(item, (list, tuple)):
            yield from _leaves(item)
        else:
            yield item


def _owns_storage(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
