"""Functions as a tensor class knows them: a list of its own that names PyTorch's function means the one that stands in its place.

A class of tensors with a `__torch_function__` is told which function was called, and often looks it up in a list that it made
when it was imported (`Tensor.to` may be called of lazy parameters; images stay images after it). PyTorch reads the function's
name when the call is made, and finds ours. Where a list that the class reads holds what was there before, the class is told of
something that is equal to that, and does what ours does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch

from gpumem_magic.looks.objects import is_exactly
from gpumem_magic.patching import Patches, behind_relays
from gpumem_magic.tracebacks import cut
from gpumem_magic.virtual.engine.tensors import VirtualTensor

_TOLD = "__torch_function__"
_TABLES = (dict, set, frozenset, list, tuple)


def install(patches: Patches) -> None:
    """To be called after PyTorch's functions have been replaced. Classes that are made later have lists that know ours."""
    for owner in set(_with_a_word(torch.Tensor)):
        patches.set(owner, _TOLD, classmethod(_telling(owner, vars(owner)[_TOLD].__func__)))


def _with_a_word(cls: Any) -> Iterator[type]:
    """The classes that say, in Python, what functions make of the tensors of a class's subclasses."""
    for below in type.__subclasses__(cls):
        owner = next((one for one in below.__mro__ if _TOLD in vars(one)), torch.Tensor)
        said = vars(owner)[_TOLD]
        ours = issubclass(owner, VirtualTensor) or owner is torch.Tensor
        if not ours and type(said) is classmethod and type(said.__func__) is FunctionType:
            yield owner
        yield from _with_a_word(below)


def _telling(owner: type, said: Any) -> Callable[..., Any]:
    as_known = functools.cache(functools.partial(_as_known, owner, said))

    @functools.wraps(said)
    def told(cls: type, func: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return said(cls, as_known(func) if type(func) is FunctionType else func, *args, **kwargs)
        except Exception as error:
            # An error that is kept must keep no tensors that the program itself does not keep.
            args, kwargs = (), {}
            raise cut(error)  # noqa: B904

    # What Dynamo takes in its place: the class's own.
    told._torchdynamo_inline = said  # type: ignore[attr-defined]
    return told


def _as_known(owner: type, said: Any, function: Any) -> Any:
    before = behind_relays(function)
    if before is function:
        return function
    for table in _tables(owner, said):
        if any(listed is function for listed in table):
            return function
        # (A list may have been made while an earlier virtual GPU was on.)
        listed = next((one for one in table if one is before or behind_relays(one) is before), None)
        if listed is not None:
            return _AsListed(listed, function)
    return function


def _tables(owner: type, said: Any) -> Iterator[Any]:
    """What a function looks things up in: tables among its globals, what it closes over, and its class's attributes."""
    for name in said.__code__.co_names:
        for found in (said.__globals__.get(name), inspect.getattr_static(owner, name, None)):
            if is_exactly(found, _TABLES):
                yield found
    for cell in said.__closure__ or ():
        # (One that has no value yet.)
        with suppress(ValueError):
            if is_exactly(cell.cell_contents, _TABLES):
                yield cell.cell_contents


class _AsListed:
    """Equal to a function that a list holds, and calls the one that stands in its place now."""

    __slots__ = ("_listed", "_standing")

    def __init__(self, listed: Any, standing: Any) -> None:
        self._listed, self._standing = listed, standing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._standing(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self._listed or other is self._standing or other is self

    def __hash__(self) -> int:
        return hash(self._listed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._standing, name)
