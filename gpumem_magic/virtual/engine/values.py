"""The values of tensors on a virtual GPU, as far as they are known: what operators' rules and PyTorch's face ask.

How they are known is the engine's affair: `known.KnownEngine` follows small ones, `real.RealEngine` computes all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from gpumem_magic.virtual.engine.tensors import CHECKED, COUNT, GUESS, TALLY, VirtualTensor, all_attributes, engine_of


class Known(NamedTuple):
    """The values of a virtual tensor. exact: no unknown value took part in them. supplied: one that the user gave did."""

    host: torch.Tensor
    exact: bool
    supplied: bool = False


class Tally:
    """How many elements of a mask are true: as many as were selected by it; None where nothing was. version: of the mask."""

    __slots__ = ("count", "version")

    def __init__(self, version: int) -> None:
        self.count: int | None = None
        self.version = version


class Given(NamedTuple):
    """What the user supplied for a part of a storage, and how often that had been written to by then."""

    host: torch.Tensor
    version: int


class _Blank:
    """Stands for the twin of a storage into which nothing was written yet."""


BLANK = _Blank()


# The largest tensors that are worked out although some values are not known: of flags and counters; of numbers, where what is
# not known reads as zero, so that scores beside known ones still compare; and where it is guessed, which a sum with it spoils.
MOST_GUESSED = 1024
_MOST_GUESSED_FLOATS = {False: 128, True: 1}


class _Limit(threading.local):
    every_integer = False
    guesses: bool | None = None


_LIMIT = _Limit()


class Bounds(NamedTuple):
    """The largest tensors whose values are kept, in elements. Programs read integers and flags: those may be larger."""

    floats: int
    integers: int
    # Whether unknown values are guessed by what made them, outside `guessing`.
    guess: bool = True

    @property
    def guesses(self) -> bool:
        return self.guess if _LIMIT.guesses is None else _LIMIT.guesses

    @property
    def follows(self) -> bool:
        """Whether anything follows from unknown values."""
        return _LIMIT.guesses is not False

    def most_guessed(self, tensor: torch.Tensor) -> int:
        return _MOST_GUESSED_FLOATS[self.guesses] if tensor.is_floating_point() else MOST_GUESSED

    def of(self, tensor: torch.Tensor) -> int:
        if tensor.is_floating_point() or tensor.is_complex():
            return self.floats
        if tensor.dtype == torch.uint8:
            # As many bytes as the largest floating numbers have: images, and the state of a generator (5,056).
            return self.floats * torch.float64.itemsize
        return 1 << 40 if _LIMIT.every_integer else self.integers

    def hold(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() <= self.of(tensor)


# What ``values=auto`` follows, and ``values=stand-in``: the flags, counters, times and boxes without which libraries go astray.
# Integers of both: the tokens and positions of a batch, by which they tell packed and padded sequences.
AUTO = Bounds(floats=1 << 16, integers=1 << 18)
FEW = Bounds(floats=1024, integers=1 << 18, guess=False)


def known(tensor: Any) -> Known | None:
    found: Known | None = engine_of(tensor).known(tensor)
    return found


def exact(tensor: Any) -> torch.Tensor | None:
    """The tensor's values if they are exactly known."""
    found = known(tensor) if isinstance(tensor, VirtualTensor) else None
    return found.host if found is not None and found.exact else None


@contextmanager
def every_integer() -> Iterator[None]:
    """Inside, integers are followed in tensors of any size: for code of PyTorch's own that would crash on stand-ins."""
    before = _LIMIT.every_integer
    _LIMIT.every_integer = True
    try:
        yield
    finally:
        _LIMIT.every_integer = before


@contextmanager
def guessing(whether: bool) -> Iterator[None]:
    """Inside, unknown values are guessed, or nothing follows from them: for code of PyTorch's own that divides by what reads as
    zero, or refuses it."""
    before = _LIMIT.guesses
    _LIMIT.guesses = whether
    try:
        yield
    finally:
        _LIMIT.guesses = before


def version(tensor: torch.Tensor) -> int:
    """How often the tensor has been written to; tensors of inference mode do not know."""
    return 0 if tensor.is_inference() else tensor._version


def forget(tensor: Any) -> None:
    engine_of(tensor).forget(tensor)


def selects(mask: Any, count: int) -> None:
    """By a mask of unknown values so many were selected: who counts it is told as many, and one that was taken to select all says
    so from now on to whoever reads it."""
    if mask.dtype != torch.bool:
        return
    tally_of(mask).count = count
    if count == mask.numel():
        all_attributes(mask)[GUESS] = 1.0
        all_attributes(mask).pop(CHECKED, None)


def tally_of(mask: Any) -> Tally:
    """What is known of a mask's count, for as long as nothing is written to it."""
    found = all_attributes(mask).get(TALLY)
    if not isinstance(found, Tally) or found.version != version(mask):
        found = all_attributes(mask)[TALLY] = Tally(version(mask))
    return found


def counted(number: Any) -> int | None:
    """How many were selected by the mask whose count a tensor is; None where it is none, or nothing was selected."""
    tally, written = all_attributes(number).get(COUNT, (None, 0))
    return tally.count if tally is not None and written == version(number) else None


def unknown(result: Any, *arguments: Any) -> Any:
    """The result of a rule that stands for a kernel: neither its values are known, nor those of what the kernel may write to."""
    for leaf in tree_leaves((result, arguments)):
        if isinstance(leaf, VirtualTensor) and not engine_of(leaf).computes:
            forget(leaf)
    return result
