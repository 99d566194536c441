"""Older ways to say where tensors are and of what type: `torch.cuda.FloatTensor`, `set_default_tensor_type`, `Tensor.type`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.tensors import TYPE_NAMES, VirtualTensor
from gpumem_magic.virtual.operators.factories import made_as_of_old


def install(patches: Patches) -> None:
    for dtype, full_name in TYPE_NAMES.items():
        name = full_name.rpartition(".")[2]
        if hasattr(torch.cuda, name):
            patches.set(torch.cuda, name, _LegacyKind(name, (), {"dtype": dtype, "__module__": "torch.cuda"}))
    _default_type(patches)
    _conversions(patches)


class _LegacyKind(type):
    """Stands for the type of `torch.cuda.FloatTensor` and its relatives."""

    dtype: torch.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return made_as_of_old(args, cls.dtype, kwargs.get("device") or torch.device("cuda"))

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, VirtualTensor) and instance.dtype == cls.dtype


_BY_NAME = {name: dtype for dtype, name in TYPE_NAMES.items()}


def _cuda_dtype(kind: Any) -> torch.dtype | None:
    """The element type that a type on CUDA stands for; None for types of the host and everything else."""
    if isinstance(kind, _LegacyKind):
        return kind.dtype
    return _BY_NAME.get(kind) if isinstance(kind, str) else None


def _default_type(patches: Patches) -> None:
    """A default type on CUDA is a default element type and a default device, for `torch.Tensor(...)` too."""
    original = torch.set_default_tensor_type
    moved = False
    plain = Patches()

    def move(device: str | None) -> None:
        nonlocal moved
        if device is not None or moved:
            torch.set_default_device(device)
        plain.undo()
        if device is not None:
            plain.set(torch.Tensor, "__new__", staticmethod(_new_on_device(torch.Tensor.__new__)))
        if moved and device is None:
            # In 2.9, `torch.get_default_device` fails after that. The name is the same in 2.9, 2.11, 2.13 and 2.15.
            vars(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", threading.local())).pop("device_context", None)
        moved = device is not None

    def set_default_tensor_type(t: Any) -> None:
        dtype = _cuda_dtype(t)
        if dtype is None:
            original(t)
            move(None)
        else:
            original(getattr(torch, TYPE_NAMES[dtype].rpartition(".")[2]))
            move("cuda")

    patches.set(torch, "set_default_tensor_type", set_default_tensor_type)
    patches.also_undo(lambda: move(None))


def _new_on_device(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.Tensor(...)`` while a type on CUDA is the default. Kinds of tensors that others derive are made as ever."""

    def make_new(cls: type[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if cls is torch.Tensor and not kwargs:
            return made_as_of_old(args, torch.get_default_dtype(), torch.device("cuda"))
        return otherwise(cls, *args, **kwargs)

    return make_new


def _conversions(patches: Patches) -> None:
    """``tensor.type(torch.cuda.FloatTensor)``, and the host's types for tensors of the device."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        wanted = _cuda_dtype(dtype)
        if wanted is not None:
            return self.to(torch.device("cuda"), wanted, non_blocking=non_blocking)
        if isinstance(self, VirtualTensor):
            if dtype is None:
                return self.type()
            named: Any = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
            if type(named) is type(torch.FloatTensor):
                return self.to("cpu", named.dtype)
        return original(self, dtype, non_blocking, **kwargs) if dtype is not None else original(self)

    patches.set(torch.Tensor, "type", type_)
