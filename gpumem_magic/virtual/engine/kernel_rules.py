"""`register_kernel`, for kernels that PyTorch knows nothing of: what a library's own kernel returns and allocates.

A rule is a Python function with the kernel's arguments. It returns what the kernel returns, made with ordinary tensor operations;
all that it allocates is allocated on the virtual device, as the kernel's result or, where it lets go of it, in passing::

    @gpumem_magic.register_kernel("mylib::fused_mlp")
    def fused_mlp(x, weight):
        workspace = x.new_empty(1024, dtype=torch.uint8)
        return x.new_empty(x.shape[0], weight.shape[0])

Rules are asked only for calls with tensors on a virtual device.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch.utils._pytree import tree_leaves

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.refusals import is_foreign
from gpumem_magic.virtual.engine.tensors import VirtualTensor

_Rule = TypeVar("_Rule", bound=Callable[..., Any])

# "mylib::fused_mlp" or "mylib::fused_mlp.overload" -> rule; ("mylib.layers", "fused_mlp") -> rule.
rules_of_users: dict[str, Callable[..., Any]] = {}
_functions: dict[tuple[str, str], Callable[..., Any]] = {}
# The same for operators of well-known libraries, from `libraries`: a user's rule goes first.
_built_in: dict[str, Callable[..., Any]] = {}
_built_in_for: dict[int, tuple[Any, Callable[..., Any] | None]] = {}
# Where a kernel for a card may have been registered.
_ON_A_CARD = "CUDA", "CompositeExplicitAutograd"
# Where rules for functions are in force: the machine that is on registers its patches here.
_active: list[Patches] = []


@overload
def register_kernel(target: Any, rule: None = None) -> Callable[[_Rule], _Rule]: ...


@overload
def register_kernel(target: Any, rule: _Rule) -> _Rule: ...


def register_kernel(target: Any, rule: Any = None) -> Any:
    """Registers what a kernel returns and allocates on a virtual GPU; can be used as a decorator.

    target: an operator (``"mylib::op"``, ``"mylib::op.overload"`` or ``torch.ops.mylib.op``), or a Python function by its
    place (``"mylib.layers.fused_mlp"``), for kernels that do not go through PyTorch's dispatcher. rule: called with the same
    arguments; for an operator it has no say in gradients (the operator that computes them needs a rule of its own), in place of
    a function it is an ordinary part of the program. A rule for the same target replaces the one before.

    A function's place is looked up when the virtual GPU is turned on (at once where it is on); where other modules have already
    imported the function by its name, give their names for it too. Raises TypeError for anything that is no target or no
    function, ImportError for a place that there is not.
    """
    if rule is None:
        return lambda rule: register_kernel(target, rule)
    if not callable(rule):
        raise TypeError(f"a rule is a function with the kernel's arguments, not {type(rule).__name__}")
    name = _operator_name(target)
    if name is not None:
        rules_of_users[name] = rule
        return rule
    place = _place(target)
    new = place not in _functions
    _functions[place] = rule
    if new:
        for patches in _active:
            _replace(patches, place)
    return rule


def for_operator(func: Any) -> Callable[..., Any] | None:
    """The rule for an operator's overload, or for all overloads of it; None where there is none."""
    if rules_of_users:
        name = str(func._schema.name) if hasattr(func, "_schema") else ""
        overload_name = func._schema.overload_name if name else ""
        rule = rules_of_users.get(f"{name}.{overload_name or 'default'}") or rules_of_users.get(name)
        if rule is not None:
            return rule
    try:
        return _built_in_for[id(func)][1]
    except KeyError:
        schema: Any = getattr(func, "_schema", None)
        # The overloads that write into a given tensor allocate nothing.
        plain = schema is not None and not schema.overload_name
        found = _built_in.get(schema.name) if plain else None
        _built_in_for[id(func)] = func, found
        return found


def body_of(func: Any) -> Callable[..., Any] | None:
    """What an operator runs on a card where that is written in Python (`torch.library.custom_op` and `impl`); None for others.
    PyTorch's own such operators for its compilers go as they are."""
    if not hasattr(func, "_schema") or not is_foreign(func):
        return None
    namespace, name = func.name().split("::")
    for key in _ON_A_CARD:
        if f"{namespace}/{name}/{key}" in torch.library._impls:
            return functools.partial(func._op_dk, getattr(torch._C.DispatchKey, key))
    return None


def built_in(name: str) -> Callable[[_Rule], _Rule]:
    """Registers a rule of this package's own for a library's operator."""

    def register(rule: _Rule) -> _Rule:
        _built_in[name] = rule
        return rule

    return register


def install(patches: Patches) -> None:
    """Puts the rules for functions in force, until the patches are undone."""
    _active[:] = [patches]
    for place in _functions:
        _replace(patches, place)


def _operator_name(target: Any) -> str | None:
    if isinstance(target, torch._ops.OpOverload):
        return f"{target._schema.name}.{target._schema.overload_name or 'default'}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    if isinstance(target, torch._library.custom_ops.CustomOpDef):
        return str(target._qualname)
    return target if isinstance(target, str) and "::" in target else None


def _place(target: Any) -> tuple[str, str]:
    if not isinstance(target, str) or "." not in target:
        kinds = 'an operator ("mylib::op", torch.ops.mylib.op) or a function\'s place ("mylib.module.function")'
        raise TypeError(f"expected {kinds}, not {target!r}")
    module, _, name = target.rpartition(".")
    if not hasattr(importlib.import_module(module), name):
        raise ImportError(f"there is no {name} in {module}")
    return module, name


def _replace(patches: Patches, place: tuple[str, str]) -> None:
    module = importlib.import_module(place[0])
    original = getattr(module, place[1])

    def instead(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, VirtualTensor) for leaf in tree_leaves((args, kwargs))):
            return values.unknown(_functions[place](*args, **kwargs), args, kwargs)
        return original(*args, **kwargs)

    patches.set(module, place[1], instead)
