"""Stand-in values that the user supplies: what a program reads from a virtual device, which has no values of its own.

What was supplied for a tensor goes first, then what was supplied for the line that reads, then what is for all lines; of two
for the same, the newer. Everything that was read is listed in the report as before, and said to be supplied.
"""

from __future__ import annotations

import linecache
import math
import os
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.tensors import VirtualTensor, engine_of

_PLACE = re.compile(r"(?P<file>[^:]+):(?P<line>\d+)")


class Supplied:
    """One thing that was supplied, until `remove()` or the end of ``with``."""

    def __init__(self, value: Any, count: int | float | None, line: str | None, tensor: VirtualTensor | None) -> None:
        self.value = value
        self.count = count
        self.line = line
        self._tensor = None if tensor is None else weakref.ref(tensor)

    def remove(self) -> None:
        """From now on the value is not known again. May be called twice."""
        if self in _supplied:
            _supplied.remove(self)
        tensor = self._tensor() if self._tensor is not None else None
        if tensor is not None:
            values.forget(tensor)
        self._tensor = None

    def __enter__(self) -> Supplied:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        words = [f"value={self.value!r}" if self.value is not None else "", f"count={self.count}" if self.count else ""]
        words.append(f"line={self.line!r}" if self.line else "")
        return f"<stand-in {', '.join(word for word in words if word) or 'for a tensor'}>"

    def applies(self, file: str, line: int) -> bool:
        """Whether this is for a line of a file."""
        if self.line is None:
            return True
        place = _PLACE.fullmatch(self.line)
        if place is not None:
            return int(place["line"]) == line and os.path.basename(file) == place["file"]
        return self.line in linecache.getline(file, line)

    def is_of_kind(self, dtype: torch.dtype) -> bool:
        """What is for all lines is for values of its own kind: a loss of 2.5 shall not make every comparison true."""
        if self.line is not None:
            return True
        given = torch.float32 if callable(self.value) else torch.as_tensor(self.value, device="cpu").dtype
        return _kind(given) == _kind(dtype)


_supplied: list[Supplied] = []


def stand_in(
    value: Any = None, *, count: int | float | None = None, line: str | None = None, tensor: Any = None
) -> Supplied:
    """Supplies what a program reads from a virtual GPU, in place of zero.

    value: a number, a (nested) list or host tensor of the shape that is read, or a function without arguments that is called for
    every read and returns one of these. count: how many elements there are where a size depends on values (``nonzero``, boolean
    masks, ``unique``): a number, or a share of the largest possible from 0.0 to 1.0; never more than the largest possible.

    line: part of a line's source (``"loss.item()"``) or a place (``"train.py:12"``); the value is what that line reads, which
    for ``if loss > 3`` is True or False. tensor: a tensor on the virtual GPU, which has these values until it is written to;
    small results that are made from it have theirs. Without line and tensor: every read, of values of the same kind (a float for
    floating numbers, an int for integers, a bool for truth values; a function is taken to return floating numbers).

    Returns an object with ``remove()``, which can be used in ``with``; what is for lines holds for every device that is turned on
    later. Raises TypeError and ValueError with one line for what makes no sense.
    """
    if value is None and count is None:
        raise TypeError("a stand-in needs a value or a count")
    if line is not None and (not isinstance(line, str) or not line.strip()):
        raise TypeError(f'line is part of a line\'s source, or a place such as "train.py:12", not {line!r}')
    if count is not None:
        _check_count(count)
    if isinstance(value, VirtualTensor):
        raise TypeError("a stand-in must be on the host: a tensor on the virtual GPU has no values")
    if isinstance(value, (list, tuple)):
        value = torch.tensor(value, device="cpu")
    if not (value is None or callable(value) or isinstance(value, (int, float, complex, torch.Tensor))):
        raise TypeError(f"a stand-in is a number, a list, a host tensor or a function, not {type(value).__name__}")
    if tensor is None:
        made = Supplied(value, count, line, None)
        _supplied.append(made)
        return made
    if line is not None or count is not None or value is None or callable(value):
        raise TypeError("a tensor's stand-in is a value, without line and count")
    if not isinstance(tensor, VirtualTensor):
        raise TypeError(f"the tensor must be on a virtual GPU, not a {type(tensor).__name__} elsewhere")
    if engine_of(tensor).computes:
        raise TypeError("this tensor has values of its own: the virtual GPU computes them (values=real)")
    host = _fitted(value, torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device="cpu"))
    engine_of(tensor).supply(tensor, host)
    return Supplied(value, None, None, tensor)


def value_for(dtype: torch.dtype, where: Callable[[], tuple[str, int]]) -> Supplied | None:
    """What was supplied for a value of this type that is read now. where: tells the user's line."""
    return _find(where, lambda one: one.value is not None and one.is_of_kind(dtype))


def count_for(largest: int, where: Callable[[], tuple[str, int]]) -> int | None:
    """How many elements were said to be selected of `largest`; None where nothing was said."""
    found = _find(where, lambda one: one.count is not None)
    if found is None or found.count is None:
        return None
    share = found.count
    return min(share, largest) if isinstance(share, int) else math.ceil(share * largest)


def scalar(found: Supplied, dtype: torch.dtype) -> Any:
    """The supplied value as a Python number of the type that the program expects."""
    return _fitted(_now(found), torch.zeros((), dtype=dtype, device="cpu")).item()


def fill(found: Supplied, host: torch.Tensor) -> torch.Tensor:
    """Writes the supplied value into a host tensor."""
    return host.copy_(_fitted(_now(found), host))


def _now(found: Supplied) -> Any:
    return found.value() if callable(found.value) else found.value


def _fitted(value: Any, like: torch.Tensor) -> torch.Tensor:
    """The value in the shape and type of a host tensor. Raises ValueError where it has another shape."""
    given = value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")
    try:
        return given.detach().to(like.dtype).expand(like.shape).clone()
    except RuntimeError:
        raise ValueError(
            f"the stand-in has the shape {tuple(given.shape)}, and what is read has {tuple(like.shape)}"
        ) from None


def _find(where: Callable[[], tuple[str, int]], fits: Callable[[Supplied], bool]) -> Supplied | None:
    if not _supplied:
        return None
    file, line = where()
    for for_a_line in (True, False):
        for one in reversed(_supplied):
            if (one.line is not None) == for_a_line and fits(one) and one.applies(file, line):
                return one
    return None


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "float"
    return "complex" if dtype.is_complex else "bool" if dtype == torch.bool else "integer"


def _check_count(count: Any) -> None:
    if isinstance(count, bool) or not isinstance(count, (int, float)):
        raise TypeError(f"count is a number of elements or a share from 0.0 to 1.0, not {count!r}")
    if count < 0 or (isinstance(count, float) and not count <= 1):
        raise ValueError(f"count is a number of elements or a share from 0.0 to 1.0, not {count!r}")
