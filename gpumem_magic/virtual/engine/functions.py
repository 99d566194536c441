"""Calls of PyTorch's functions that come down to one operator: the next one like it goes to that at once.

Between a function and its operator lie C++'s dispatcher and its way back to Python, with autograd on top. Where nothing is
tracked, and no mode or transform is on, they add nothing but time. What is kept here holds no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gpumem_magic.looks.tensors import is_view
from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.alike import AlikeCalls, Answer
from gpumem_magic.virtual.engine.host_calls import is_always_replaced, is_plain
from gpumem_magic.virtual.engine.modes import STATE, seen_by_others, undisturbed
from gpumem_magic.virtual.engine.sequences import OperatorSequence
from gpumem_magic.virtual.engine.tensors import VirtualTensor, is_ordinary

_MOST = 20_000
# After so many calls that came down to something else a function is not looked at any more; after one that did not, so many with
# other looks. (What an operator takes may be known only after the first of those that look alike.)
_ENOUGH, _ENOUGH_OF_SOME = 4, 100
_COPY = _aten._to_copy.default
# Of a call with two arguments that are one tensor.
_TWO, _SAME = 2, "same"


class Heard(NamedTuple):
    """An operator that ran while somebody listened (`ThreadState.heard`), and its result if that is one tensor, or several: these
    by weak references until the function is over, as C++ lets go of those that it does not return in an order of its own."""

    func: Any
    args: Any
    kwargs: Any
    out: Any

    def over(self) -> Heard:
        """The same once the function has returned; without results where it let go of one."""
        if not isinstance(self.out, (tuple, list)):
            return self
        tensors = [one() for one in self.out]
        return self._replace(out=None if any(one is None for one in tensors) else tensors)


class _Fixed(NamedTuple):
    """An argument of the operator that is always this."""

    value: Any


class Shortcut(NamedTuple):
    """The operator that a function comes down to. places: for each of its arguments the number of the function's (of those in
    lists, too), several for a list, or what is given. nested: whether the function has lists. writes: its first argument;
    silently: and returns nothing.

    on_host: whether the function itself may be called with the host's tensors in the place of the device's. kind: the class of
    what it returns where that is several tensors.
    """

    func: Any
    places: tuple[Any, ...]
    names: tuple[str, ...]
    nested: bool
    writes: bool
    silently: bool
    answer: Answer
    on_host: bool
    kind: Any

    def operator(self, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """(operator, its arguments, its named ones) for a call of the function."""
        flat = (*args, *kwargs.values()) if kwargs else args
        if self.nested:
            flat = spread(flat)
        made = [
            flat[place]
            if type(place) is int
            else place.value
            if type(place) is _Fixed
            else [flat[one] for one in place]
            for place in self.places
        ]
        named = {}
        if self.names:
            count = len(made) - len(self.names)
            named = dict(zip(self.names, made[count:], strict=True))
            del made[count:]
        return self.func, tuple(made), named


class HostCopy(NamedTuple):
    """A function that copies a tensor to the host, which takes nothing on the device. source: the number of its argument; size,
    stride, dtype: of what it returns."""

    func: Any
    source: int
    device: int
    size: Any
    stride: Any
    dtype: torch.dtype


class ViewCall(NamedTuple):
    """A function that looks at a tensor in another way, which C++ has to know of. func: the operator; made: how its result is
    made of the function's arguments (`alike._Made`)."""

    func: Any
    device: int
    made: Any


class FunctionCalls:
    """The functions that were met, by their arguments' looks and numbers. Inside `no_functions`."""

    def __init__(self, alike: AlikeCalls) -> None:
        self._alike = alike
        # An integer: how often it came down to something else.
        self._found: dict[tuple[Any, ...], Shortcut | HostCopy | ViewCall | OperatorSequence | int] = {}
        # By a function's `id`: how many calls came down to something else (after one that did not: with how many other looks),
        # and the function.
        self._others: dict[int, tuple[int, Any]] = {}
        # By a function's `id`, those of which the last call that was met came down to one operator.
        self._single: set[int] = set()
        # By a function's `id`, those that only read a number from the device.
        self.reading: dict[int, Any] = {}

    def looks(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """All that it depends on which operator a function comes down to; None where more may count."""
        other = self._others.get(id(func))
        if (other is not None and other[0] >= _ENOUGH) or STATE.depth:
            return None
        if not undisturbed() or seen_by_others():
            return None
        key: list[Any] = [id(func), torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        untracked = torch.is_grad_enabled()
        if not self._alike.describe(key, args, True, untracked, hosts=True):
            return None
        if kwargs:
            key.extend(kwargs)
            if not self._alike.describe(key, kwargs.values(), True, untracked, hosts=True):
                return None
        return tuple(key)

    def found(self, looks: tuple[Any, ...], args: Any) -> Any:
        """What is known of a call that looks so; NotImplemented if there is nothing to be found out."""
        found = self._found.get(looks)
        if found is None and len(args) == _TWO and args[0] is args[1]:
            found = self._found.get((*looks, _SAME))
        if type(found) is int:
            return None if found < _ENOUGH else NotImplemented
        return found

    def is_single(self, func: Any) -> bool:
        """Whether a function with other arguments came down to one operator: it is likely to do so again."""
        return id(func) in self._single

    def learn(
        self,
        looks: tuple[Any, ...],
        func: Any,
        args: Any,
        kwargs: Any,
        heard: Sequence[Heard],
        plain: bool,
        views: bool,
        out: Any,
        several: OperatorSequence | None,
    ) -> None:
        """A function has run these operators, and returned that. plain: whether the first may be run anew past C++; views:
        whether it does nothing but look at a tensor. several: all of them, where they may be run so."""
        way: Shortcut | HostCopy | ViewCall | OperatorSequence | None = None
        if len(args) == _TWO and args[0] is args[1]:
            # (``x * x``: which of the two is which is not known, and is of no matter while they are one.)
            looks = (*looks, _SAME)
        if len(heard) == 1:
            way = self._copy(args, heard[0], out)
            if way is None and plain:
                way = self._way(args, kwargs, heard[0], out)
            if way is None and views:
                way = self._view(args, kwargs, heard[0], out)
        if way is None:
            way = several
            self._single.discard(id(func))
        else:
            self._single.add(id(func))
        if len(self._found) >= _MOST:
            self._found.clear()
        if way is None:
            tried = self._found.get(looks)
            self._found[looks] = tried + 1 if isinstance(tried, int) else 1
            count, _ = self._others.get(id(func), (0, func))
            if tried is None or count >= 0:
                self._others[id(func)] = count + 1, func
            return
        self._found[looks] = way
        # (Which keeps the function: no other has its `id`.)
        self._others[id(func)] = _ENOUGH - _ENOUGH_OF_SOME, func

    def _copy(self, args: Any, heard: Heard, out: Any) -> HostCopy | None:
        if heard.func is not _COPY or type(out) is not torch.Tensor or not out.is_cpu or out.is_pinned():
            return None
        given = heard.args[0]
        source = next((number for number, arg in enumerate(args) if arg is given), None)
        # (`Copy.cu` takes plain tensors: others are made so first, on the device.)
        if source is None or not is_ordinary(given) or not given.is_contiguous() or given.dtype != out.dtype:
            return None
        return HostCopy(_COPY, source, given.fake_device.index, out.size(), out.stride(), out.dtype)

    def _view(self, args: Any, kwargs: Any, heard: Heard, out: Any) -> ViewCall | None:
        if type(out) is not VirtualTensor or heard.out is not out:
            return None
        answer = self._alike.found(self._alike.looks(heard.func, heard.args, heard.kwargs))
        made = None if answer is None or answer.kind is not None else answer.made[0]
        if type(made) is not tuple or made[3] is None:
            return None
        seen = (*heard.args, *heard.kwargs.values())[made[3]]
        source = next((number for number, arg in enumerate((*args, *kwargs.values())) if arg is seen), None)
        return None if source is None else ViewCall(heard.func, made[5].index, (*made[:3], source, *made[4:]))

    def _way(self, args: Any, kwargs: Any, heard: Heard, out: Any) -> Shortcut | None:
        # (An assignment.)
        silently = out is None and is_ordinary(heard.out) and args and heard.out is args[0]
        several = not silently and not is_ordinary(out)
        if not silently and not _is_the_same(out, heard.out):
            return None
        answer = self._alike.found(self._alike.looks(heard.func, heard.args, heard.kwargs))
        if answer is None or (answer.kind is not None) != several:
            return None
        writes = answer.made[0] == 0 and heard.func._schema.is_mutable and not several
        if silently and not writes:
            return None
        if not writes and not answer.is_new:
            # Autograd has to know of a view.
            return None
        given = (*args, *kwargs.values())
        flat = spread(given)
        places: dict[int, int] = {}
        same = len(args) == _TWO and args[0] is args[1]
        for number, one in enumerate(flat):
            if isinstance(one, torch.Tensor):
                if id(one) in places and not (same and number == 1):
                    # (Which of the two an operator's argument was is not known.)
                    return None
                places[id(one)] = number
        found = tuple(_place(places, one) for one in (*heard.args, *heard.kwargs.values()))
        if None in found:
            return None
        nested = any(type(one) in (list, tuple) for one in given)
        # (A device that is named is not the host's.)
        named = (*heard.args, *heard.kwargs.values())
        kind = type(out) if several else None
        on_host = (
            not any(isinstance(one, torch.device) for one in named)
            and (kind is None or is_plain(heard.func))
            and not is_always_replaced(heard.func)
        )
        names = tuple(heard.kwargs)
        return Shortcut(heard.func, found, names, nested, writes, bool(silently), answer, on_host, kind)


def _is_the_same(out: Any, heard: Any) -> bool:
    """Whether a function returns what its operator gave: one tensor, or several."""
    if is_ordinary(out):
        return heard is out
    if not (isinstance(out, (tuple, list)) and isinstance(heard, (tuple, list)) and 0 < len(out) == len(heard)):
        return False
    return all(type(one) is VirtualTensor and one is other for one, other in zip(out, heard, strict=True))


def spread(items: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    for item in items:
        if type(item) in (list, tuple):
            found += item
        else:
            found.append(item)
    return tuple(found)


def _place(places: dict[int, int], one: Any) -> Any:
    """The number of a function's argument, or what is given; None where it is neither."""
    if isinstance(one, torch.Tensor):
        return places.get(id(one))
    if isinstance(one, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in one):
        found = tuple(places.get(id(item)) for item in one)
        return None if None in found else found
    return _Fixed(one)


def may_write(tensor: Any) -> bool:
    """Whether only the version counter has to know of it: views have a say where gradients are on, and PyTorch refuses to write
    to tensors of inference mode outside of it."""
    if torch.is_grad_enabled() and is_view(tensor):
        return False
    return torch.is_inference_mode_enabled() or not tensor.is_inference()
