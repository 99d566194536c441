"""Calls of PyTorch's functions that come down to one operator: the next one like it goes to that at once.

Between a function and its operator lie C++'s dispatcher and its way back to Python, with autograd on top. Where nothing is
tracked, and no mode or transform is on, they add nothing but time. What is kept here holds no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from gpumem_magic.looks.tensors import is_view, no_dispatch, no_functions
from gpumem_magic.virtual.engine.alike import AlikeCalls, Answer
from gpumem_magic.virtual.engine.calls import device_among
from gpumem_magic.virtual.engine.modes import STATE
from gpumem_magic.virtual.engine.tensors import VirtualTensor

_MOST = 20_000
# So many calls that came down to something else, and a function is not looked at any more.
_ENOUGH = 4
_included, _excluded = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set


class Heard(NamedTuple):
    """An operator that ran while somebody listened (`ThreadState.heard`), and its result if that is one tensor."""

    func: Any
    args: Any
    kwargs: Any
    out: Any


class _Fixed(NamedTuple):
    """An argument of the operator that is always this."""

    value: Any


class _Shortcut(NamedTuple):
    """The operator that a function comes down to. places: for each of its arguments the number of the function's (of those in
    lists, too), several for a list, or what is given. nested: whether the function has lists. writes: its first argument."""

    func: Any
    places: tuple[Any, ...]
    names: tuple[str, ...]
    nested: bool
    writes: bool
    device: int
    answer: Answer


class FunctionCalls:
    """The functions that were met, by their arguments' looks and numbers."""

    def __init__(self, alike: AlikeCalls) -> None:
        self._alike = alike
        self._found: dict[tuple[Any, ...], _Shortcut] = {}
        # By a function's `id`: how often it came down to something else, and the function.
        self._others: dict[int, tuple[int, Any]] = {}
        self._usual = _usual_states()

    def looks(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """All that it depends on which operator a function comes down to; None where more may count."""
        other = self._others.get(id(func))
        if (other is not None and other[0] >= _ENOUGH) or STATE.depth:
            return None
        inference = self._usual.get((_included().raw_repr(), _excluded().raw_repr()))
        if inference is None or get_eval_frame_callback() is not None or torch.autograd.forward_ad._current_level >= 0:
            return None
        key: list[Any] = [id(func), torch.get_default_dtype(), inference]
        untracked = torch.is_grad_enabled()
        with no_functions():
            if not self._alike.describe(key, args, True, untracked):
                return None
            if kwargs:
                key.extend(kwargs)
                if not self._alike.describe(key, kwargs.values(), True, untracked):
                    return None
        return tuple(key)

    def found(self, looks: tuple[Any, ...], args: Any, kwargs: Any) -> tuple[Any, Any, Any, _Shortcut] | None:
        """(operator, its arguments, its named ones, what is known of it), where a call that looks so was met."""
        way = self._found.get(looks)
        if way is None or (way.writes and not _may_be_written(args[0])):
            return None
        flat = (*args, *kwargs.values()) if kwargs else args
        if way.nested:
            flat = _flat(flat)
        made = [
            flat[place]
            if type(place) is int
            else place.value
            if type(place) is _Fixed
            else [flat[one] for one in place]
            for place in way.places
        ]
        named = {}
        if way.names:
            count = len(made) - len(way.names)
            named = dict(zip(way.names, made[count:], strict=True))
            del made[count:]
        return way.func, tuple(made), named, way

    def learn(
        self, looks: tuple[Any, ...], func: Any, args: Any, kwargs: Any, heard: Sequence[Heard], plain: bool, out: Any
    ) -> None:
        """A function has run these operators, and returned that. plain: whether `Engine.again` may run the first anew."""
        way = self._way(args, kwargs, heard[0], out) if plain and len(heard) == 1 else None
        if way is None:
            count, _ = self._others.get(id(func), (0, func))
            self._others[id(func)] = count + 1, func
            return
        if len(self._found) >= _MOST:
            self._found.clear()
        self._found[looks] = way
        # (Which keeps the function: no other has its `id`.)
        self._others[id(func)] = 0, func

    def _way(self, args: Any, kwargs: Any, heard: Heard, out: Any) -> _Shortcut | None:
        if type(out) is not VirtualTensor or heard.out is not out:
            return None
        with no_functions(), no_dispatch():
            answer = self._alike.found(self._alike.looks(heard.func, heard.args, heard.kwargs))
        if answer is None or answer.kind is not None:
            return None
        made = answer.made[0]
        writes = made == 0 and heard.func._schema.is_mutable
        if not writes and not (type(made) is tuple and made[3] is None):
            # Autograd has to know of a view.
            return None
        given = (*args, *kwargs.values())
        flat = _flat(given)
        places: dict[int, int] = {}
        for number, one in enumerate(flat):
            if isinstance(one, torch.Tensor):
                if id(one) in places:
                    # (Which of the two an operator's argument was is not known.)
                    return None
                places[id(one)] = number
        found = tuple(_place(places, one) for one in (*heard.args, *heard.kwargs.values()))
        if None in found:
            return None
        nested = any(type(one) in (list, tuple) for one in given)
        device = device_among(heard.args, heard.kwargs)
        if device is None:
            return None
        return _Shortcut(heard.func, found, tuple(heard.kwargs), nested, writes, device, answer)


def _may_be_written(tensor: Any) -> bool:
    """Whether only the version counter has to know of it: views have a say where gradients are on."""
    with no_functions():
        return not (torch.is_grad_enabled() and is_view(tensor))


def _usual_states() -> dict[tuple[int, int], bool]:
    """The dispatcher's settings for a thread in which nothing is on, by whether it is in inference mode; none where something is
    on now, or where this version cannot say."""
    found = {}
    try:
        if (
            torch._C._len_torch_dispatch_stack()
            or torch._C._is_any_autocast_enabled()
            or torch._C._are_functorch_transforms_active()
            or torch._C._get_tracing_state() is not None
            or torch.autograd.forward_ad._current_level >= 0
        ):
            return {}
    except AttributeError:
        return {}
    for inference in (False, True):
        with torch.inference_mode(inference):
            found[_included().raw_repr(), _excluded().raw_repr()] = inference
    return found


def _flat(items: Any) -> tuple[Any, ...]:
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
