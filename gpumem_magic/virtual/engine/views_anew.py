"""Views of what was written to in place, with the node that autograd gives them on a device.

A view whose memory was written to gets its node anew (`grad_fn` in torch/csrc/autograd/variable.cpp): on a device one
`AsStridedBackward0` from the tensor that it is a view of, however many views lie between them. Its gradient is written into zeros
as large as that tensor. For subclasses of tensors, which virtual tensors are, C++ keeps the views' own functions (`setup_view` in
VariableTypeUtils.h, `is_python_dispatch`), and runs them again, so that each has its node.

So the view's content becomes that of ``base.as_strided``, of which C++ knows the node for good. What was written to is noted
where the operator runs, below autograd; the content is changed once the function has returned. All other views of that tensor get
theirs when they are next used, as on a device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import _swap_tensor_impl
from torch._C._autograd import _get_sequence_nr

from gpumem_magic.looks.tensors import grad_fn, is_view, no_functions, requires_grad
from gpumem_magic.virtual.engine.modes import seen_by_others, undisturbed

_BASE: Any = torch._C.TensorBase
_AS_STRIDED = "AsStridedBackward0"
# A tensor that is only Python's is held once; one with a view that was just written to by that, too.
_ONCE, _BY_A_VIEW = 1, 2


class _WrittenTensors(threading.local):
    """now: what the function that runs has written to; before: tensors that may have views which want their node anew."""

    def __init__(self) -> None:
        self.now: list[Callable[[], Any]] = []
        self.before: dict[int, weakref.ref[Any]] = {}


WRITTEN = _WrittenTensors()


def note(tensor: Any) -> None:
    """An operator writes to a virtual tensor in place."""
    if not torch.is_grad_enabled():
        with no_functions():
            if not (is_view(tensor) and requires_grad(tensor)):
                return
    WRITTEN.now.append(weakref.ref(tensor))


def after_function() -> None:
    """Once a function has returned that has written to tensors."""
    noted, WRITTEN.now = WRITTEN.now, []
    with no_functions():
        for one in noted:
            tensor = one()
            if tensor is None or not requires_grad(tensor):
                continue
            base = tensor
            if is_view(tensor):
                base = _BASE._base.__get__(tensor)
                _make_anew(tensor, base)
            if _BASE._use_count(base) > (_ONCE if base is tensor else _BY_A_VIEW) and not _BASE.is_leaf.__get__(base):
                _remember(base)


def before_function(arguments: Iterable[Any]) -> None:
    """Before a function takes these, where something was written to that may have views."""
    with no_functions():
        for one in arguments:
            if isinstance(one, (list, tuple)):
                before_function(one)
            elif isinstance(one, torch.Tensor) and is_view(one):
                base = _BASE._base.__get__(one)
                if id(base) in WRITTEN.before:
                    first = _get_sequence_nr()
                    node = grad_fn(one)
                    if node is not None and node._sequence_nr() >= first:
                        _make_anew(one, base)


def _remember(base: Any) -> None:
    number, before = id(base), WRITTEN.before
    if number not in before:
        before[number] = weakref.ref(base, lambda _: before.pop(number, None))


def _make_anew(view: Any, base: Any) -> None:
    node = grad_fn(view)
    if node is None or node.name() == _AS_STRIDED or type(view) is not type(base) or not _has_only_a_place(view, base):
        return
    if not undisturbed() or seen_by_others() or _BASE._use_count(view) > _ONCE:
        return
    with torch.enable_grad():
        _swap_tensor_impl(view, base.as_strided(view.size(), view.stride(), view.storage_offset()))


def _has_only_a_place(view: Any, base: Any) -> bool:
    """Whether nothing but a place in memory makes the view: neither another type, nor hooks that autograd keeps with it."""
    return (
        view.dtype == base.dtype
        and torch.strided is view.layout is base.layout
        and view.is_conj() == base.is_conj()
        and view.is_neg() == base.is_neg()
        and not view._backward_hooks
        and not view.retains_grad
    )
