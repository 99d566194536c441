"""Tensor classes of the program's own: those that wrap tensors (quantised weights, pairs), and those that are tensors (images
with metadata).

PyTorch makes the former with `Tensor._make_wrapper_subclass`, on the device of what they wrap. A build for the host has nothing
to ask about ``cuda`` below Python, and its autograd ends the process where it tries. So here, too, C++ is told
``meta:i``, and Python is told ``cuda:i``. The latter are made by `Tensor.as_subclass`, `Tensor._make_subclass` and by the class
(``Mine(tensor)``): C++ gives an object a class where it has none yet, and a virtual tensor has one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.modes import aside
from gpumem_magic.virtual.engine.tensors import (
    OWN,
    ParameterKind,
    VirtualKind,
    VirtualParameter,
    VirtualTensor,
    is_ordinary,
)

# The name under which a wrapper's own dictionary keeps the number of its device.
_DEVICE = "_gpumem_device"
# The arguments of `_make_wrapper_subclass`, in their order.
PARAMETERS = (
    "size", "strides", "storage_offset", "memory_format", "dtype", "layout", "device", "pin_memory", "requires_grad",
    "dispatch_sizes_strides_policy", "dispatch_device", "dispatch_layout", "_extra_dispatch_keys", "storage_size",
)  # fmt: skip
_PLACE = PARAMETERS.index("device")
_JAGGED = "NestedTensor"


def install(patches: Patches) -> None:
    original: Any = torch.Tensor._make_wrapper_subclass
    known: set[type] = set()

    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        device = args[_PLACE] if len(args) > _PLACE else kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return original(cls, *args, **kwargs)
        given = {**dict(zip(PARAMETERS, args, strict=False)), **kwargs}
        if given.get("dispatch_device") and cls.__name__ != _JAGGED:
            return original(cls, *args, **kwargs)
        index = torch.device(device).index
        index = torch.cuda.current_device() if index is None else index
        told = {"device": torch.device("meta", index), "dispatch_device": False}
        shapes = [given.pop(name) for name in PARAMETERS[:2] if name in given]
        wrapper = original(cls, *shapes, **{**given, **told})
        wrapper.__dict__[_DEVICE] = index
        if cls not in known:
            known.add(cls)
            _teach(patches, cls)
        return wrapper

    patches.set(torch.Tensor, "_make_wrapper_subclass", staticmethod(make))
    plain: Any = torch.Tensor._make_subclass

    def make_subclass(cls: type, data: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, VirtualTensor) and not issubclass(cls, VirtualTensor) and cls is not torch.nn.Parameter:
            return _as_class(cls, data, *args, **kwargs)
        return plain(cls, data, *args, **kwargs)

    patches.set(torch.Tensor, "_make_subclass", staticmethod(make_subclass))
    made: Any = torch.nn.Parameter.__new__

    def make_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        # (PyTorch takes a virtual tensor for one of a class of its own, which it leaves as it is.)
        if not is_ordinary(data):
            return made(cls, data, requires_grad)
        if cls is not torch.nn.Parameter:
            return _as_class(cls, data, requires_grad)
        # (Of a plain tensor PyTorch makes one in C++, and calls no function.)
        return aside(_as_class, cls, data, requires_grad)

    patches.set(torch.nn.Parameter, "__new__", staticmethod(make_parameter))
    same: Any = torch.Tensor.as_subclass

    def as_subclass(self: Any, cls: Any) -> Any:
        if not isinstance(self, VirtualTensor):
            return same(self, vars(cls).get(OWN, cls))
        return _alias(cls, self)

    patches.set(torch.Tensor, "as_subclass", as_subclass)
    new: Any = torch.Tensor.__new__

    def make_new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # (``torch.Tensor(x)`` is an alias of its own accord: `legacy_tensor_generic_ctor_new`, torch/csrc/utils/tensor_new.cpp.)
        if cls is torch.Tensor or len(args) != 1 or not isinstance(args[0], VirtualTensor):
            return new(cls, *args, **kwargs)
        if cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            return _alias(cls, args[0])
        # What operators do with one of these the class says itself, by what it holds.
        data = args[0]
        places = {"storage_offset": data.storage_offset(), "dtype": data.dtype, "layout": data.layout}
        return make(cls, data.shape, data.stride(), **places, device=data.device, requires_grad=data.requires_grad)

    patches.set(torch.Tensor, "__new__", staticmethod(make_new))


@functools.lru_cache(maxsize=64)
def joined(cls: Any) -> type:
    """A class that is the program's own first, and a virtual tensor where that one says nothing."""
    if cls is torch.nn.Parameter:
        return VirtualParameter
    if issubclass(VirtualTensor, cls):
        return VirtualTensor
    if issubclass(cls, VirtualTensor):
        joined: type = cls
        return joined
    own: dict[str, Any] = {
        "__module__": cls.__module__, "__qualname__": cls.__qualname__, OWN: cls, "__dict__": vars(VirtualTensor)["__dict__"],
    }  # fmt: skip
    # What a class has from `Parameter` knows no virtual tensor.
    for name in ("__repr__", "__reduce_ex__"):
        if getattr(cls, name) is getattr(torch.nn.Parameter, name):
            own[name] = getattr(VirtualTensor, name)
    if cls.__torch_function__ is torch._C._disabled_torch_function_impl:
        # Parameters have none, and would hide the virtual tensor's.
        own["__torch_function__"] = vars(VirtualTensor)["__torch_function__"]
    else:
        own["keeps_class"] = True
    kind: Any = next((one for one in (VirtualKind, ParameterKind) if issubclass(one, type(cls))), None)
    if kind is None:
        kind = type(type(cls).__name__, (type(cls), VirtualKind), {})
    made: type = kind(cls.__name__, (cls, VirtualTensor), own)
    return made


def _alias(cls: Any, tensor: Any) -> Any:
    """The same tensor, in the program's class, for autograd too."""
    made = torch.ops.aten.alias.default(tensor)
    made.__class__ = joined(cls)
    return made


def _as_class(cls: type, data: VirtualTensor, requires_grad: bool = False, **kwargs: Any) -> Any:
    """A tensor of the program's class on the same memory; parameters of quantised layers are made so."""
    # (C++ asks no function of the class, whose own attributes are not there yet.)
    tensor: Any = data.detach().requires_grad_(requires_grad)
    tensor.__class__ = joined(cls)
    return tensor


def _teach(patches: Patches, cls: Any) -> None:
    """Tensors of the class that are on a virtual device say so; what the class says itself stays."""
    plain: Any = torch.Tensor

    def answer(name: str, virtual: Any) -> None:
        if getattr(cls, name, None) is not getattr(plain, name):
            return
        before = getattr(plain, name)

        def get(self: Any) -> Any:
            index = self.__dict__.get(_DEVICE)
            return before.__get__(self) if index is None else virtual(index)

        patches.set(cls, name, property(get))

    answer("device", lambda index: torch.device("cuda", index))
    answer("is_cuda", lambda index: True)
    answer("is_meta", lambda index: False)
    answer("is_cpu", lambda index: False)
    # A method: what the property returns is called.
    answer("get_device", lambda index: lambda: index)
