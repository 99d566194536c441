"""Keeping the identity of parameters: `model.to("cuda")` changes the objects that optimizers already hold, never replaces
them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from gpumem_magic.looks.objects import attribute, is_a
from gpumem_magic.looks.tensors import PARAMETERS
from gpumem_magic.looks.tensors import device as device_of
from gpumem_magic.patching import Patches
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.modes import aside
from gpumem_magic.virtual.engine.tensors import VirtualTensor, our_attributes, own_attributes, own_class, put_attributes
from gpumem_magic.virtual.torch_face.wrappers import joined

_LAZY: Any = (UninitializedParameter, UninitializedBuffer)
# Under this name a parameter without a size keeps the device and the type that it is to have.
_DTYPE: Any = torch.Tensor.dtype
_LATER = "_gpumem_later"

(_SET,) = overloads("set_.source_Storage_storage_offset")

_Convert = Callable[[torch.Tensor], torch.Tensor]
_Apply = Callable[..., torch.nn.Module]


def _holding_it() -> str:
    """What in C++ has weak references to a tensor that runs, in words: they would be to the other one."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return "PyTorch's profiler is active: move the model before the profiler starts"
    # (`_slow_forward` of a module has it in a variable, and an error's traceback has its frame.)
    return "a trace of TorchScript is not over, or the error that ended it is kept: move the model before, or let go of the error"


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """`_become`, of which the program's modes see nothing."""
    aside(_become, tensor, other)


def _become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Makes `tensor` (the same Python object, with its own attributes and hooks) have the contents and device of `other`.

    `other` must not be used afterwards. One of the two is virtual. `torch._C._swap_tensor_impl` is what
    `torch.utils.swap_tensors` ends in; that function refuses objects with weak references, which
    optimizers' parameters often have.
    """
    requires_grad = tensor.requires_grad
    hooks = tensor._backward_hooks
    accumulate_hooks = getattr(tensor, "_post_accumulate_grad_hooks", None)
    own = own_attributes(tensor)
    host_class = own_class(type(tensor)) if isinstance(tensor, VirtualTensor) else type(tensor)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    other = other.detach()
    ours = our_attributes(other) if isinstance(other, VirtualTensor) else {}
    was_virtual = isinstance(tensor, VirtualTensor)
    try:
        torch._C._swap_tensor_impl(tensor, other)
    except RuntimeError as error:
        if "weakrefs" not in str(error):
            raise
        raise RuntimeError(f"a parameter can't move to or from the virtual GPU while {_holding_it()}") from None
    tensor.__class__ = joined(host_class) if ours else host_class
    put_attributes(tensor, own, ours)
    if is_parameter and not issubclass(host_class, torch.nn.Parameter):
        tensor._is_param = True
    with torch._C.DisableTorchFunctionSubclass():
        tensor.requires_grad_(requires_grad)
        if hooks is not None:
            tensor._backward_hooks = hooks
        if accumulate_hooks is not None:
            tensor._post_accumulate_grad_hooks = accumulate_hooks
    if was_virtual and other.layout is torch.strided:
        _let_go(other)


def _let_go(left: torch.Tensor) -> None:
    """Takes its memory from the tensor that the swap leaves.

    A backward pass that is still to come holds that one, the leaf. On a card the leaf is the parameter itself, whose memory goes
    as ``.data =`` gives it other memory; only what was saved of it, as the transposed weight of a product, keeps the old.
    """
    # (A tensor of inference mode counts no versions.)
    kept = nullcontext() if left.is_inference() else torch.autograd.grad_mode._unsafe_preserve_version_counter(left)
    with kept:
        size, stride, offset = left.size(), left.stride(), left.storage_offset()
        none = torch.UntypedStorage(left.untyped_storage().nbytes(), device="meta")
        _SET._op_dk(torch._C.DispatchKey.Meta, left, none, offset, size, stride)


def install(patches: Patches) -> None:
    """Teaches `Module.to` and the ``.data =`` setter about virtual tensors."""
    original_apply: _Apply = torch.nn.Module._apply
    original_data = torch.Tensor.data

    def apply(self: torch.nn.Module, fn: _Convert, recurse: bool = True) -> torch.nn.Module:
        if recurse:
            for child in self.children():
                child._apply(fn)
        return _apply_to_own(self, fn, original_apply)

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(self, VirtualTensor) == isinstance(value, VirtualTensor):
            original_data.__set__(self, value)  # type: ignore[attr-defined]
        else:
            _exchange(self, value)

    original_swap: Callable[..., None] = torch.utils.swap_tensors

    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        owns = [own_attributes(one) for one in (t1, t2)]
        ours = [our_attributes(one) for one in (t1, t2)]
        original_swap(t1, t2)
        # What lies there of ours is of the tensors in C++, which are exchanged by now.
        if any(ours):
            put_attributes(t1, owns[1], ours[1])
            put_attributes(t2, owns[0], ours[0])

    patches.set(torch.utils, "swap_tensors", swap_tensors)
    patches.set(torch.nn.Module, "_apply", apply)
    for kind in _LAZY:
        patches.set(kind, "__new__", staticmethod(_made_lazily(kind.__new__)))
        patches.set(kind, "materialize", _materialized(kind.materialize))
        patches.set(kind, "device", property(_device_later))
        patches.set(kind, "is_cuda", property(lambda self: _device_later(self).type == "cuda"))
        patches.set(kind, "dtype", property(_dtype_later))
    copied: Any = UninitializedParameter.__deepcopy__

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        copy = copied(self, memo)
        if _LATER in self.__dict__:
            copy.__dict__[_LATER] = self.__dict__[_LATER]
        return copy

    patches.set(UninitializedParameter, "__deepcopy__", deepcopy)
    patches.set(torch.Tensor, "data", property(original_data.__get__, set_data))  # type: ignore[attr-defined]


def _but_lazily(fn: _Convert) -> _Convert:
    """The conversion for parameters whose size is not known yet: they stay, and remember where they are to be."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if not is_a(tensor, _LAZY):
            return fn(tensor)
        later = tensor.__dict__.get(_LATER)
        applied: torch.Tensor = fn(tensor if later is None else torch.empty(0, device=later[0], dtype=later[1]))
        if later is not None and not isinstance(applied, VirtualTensor):
            applied = fn(tensor.to(later[1]))
        if not isinstance(applied, VirtualTensor):
            tensor.__dict__.pop(_LATER, None)
            return applied
        tensor.__dict__[_LATER] = applied.device, applied.dtype
        return tensor

    return convert


def _made_lazily(original: Callable[..., Any]) -> Callable[..., Any]:
    """A parameter without a size lies on the host until it has one, also where the program names the device at once."""

    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        named = args[1] if len(args) > 1 else kwargs.get("device")
        place = torch.get_default_device() if named is None else torch.device(named)
        if place.type != "cuda":
            return original(cls, *args, **kwargs)
        if len(args) > 1:
            args = (args[0], "cpu", *args[2:])
        else:
            kwargs = {**kwargs, "device": "cpu"}
        made = original(cls, *args, **kwargs)
        index = torch.cuda.current_device() if place.index is None else place.index
        made.__dict__[_LATER] = torch.device("cuda", index), made.dtype
        return made

    return make


def _device_later(tensor: torch.Tensor) -> torch.device:
    """Where a parameter without a size is to be, as it says itself."""
    later = tensor.__dict__.get(_LATER)
    place: torch.device = device_of(tensor) if later is None else later[0]
    return place


def _dtype_later(tensor: torch.Tensor) -> torch.dtype:
    """The type that it is to have."""
    later = tensor.__dict__.get(_LATER)
    # (Its own property would be asked for its class's, which is this one.)
    with torch._C.DisableTorchFunctionSubclass():
        kind: torch.dtype = _DTYPE.__get__(tensor) if later is None else later[1]
    return kind


def _materialized(original: Callable[..., None]) -> Callable[..., None]:
    def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        later = self.__dict__.pop(_LATER, None)
        if later is None and device is None:
            original(self, shape, device, dtype)
            return
        place, kind = later or (device, self.dtype)
        # First, since a tensor's class changes with its device.
        self.__class__ = self.cls_to_become
        self.data = torch.empty(shape, device=place if device is None else device, dtype=dtype or kind)

    return materialize


def _apply_to_own(module: torch.nn.Module, fn: _Convert, original_apply: _Apply) -> torch.nn.Module:
    """`Module._apply` for one module: each parameter and its gradient in turn, so that one is converted while all others are
    held, as PyTorch does it."""
    fn = _but_lazily(fn)
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    ours = False
    scripted = is_a(module, torch.jit.ScriptModule)
    # Of a scripted module the table is made by a property of PyTorch's own.
    parameters = module._parameters if scripted else attribute(module, PARAMETERS)
    for key, parameter in list(parameters.items()):
        if parameter is None or id(parameter) in made:
            continue
        with torch.no_grad():
            applied = fn(parameter)
        made[id(parameter)] = (parameter, applied)
        if isinstance(parameter, VirtualTensor) or isinstance(applied, VirtualTensor):
            ours = True
            if not scripted and _makes_another(parameter, applied):
                parameters[key] = another = _another(parameter, applied, fn)
                made[id(another)] = (another, another)
                # (A weight under two names becomes two.)
                del made[id(parameter)]
                continue
            _convert_parameter(parameter, applied, fn)
            # Not the converted tensor: it is the parameter now, and nothing else may hold it.
            made[id(parameter)] = (parameter, parameter)
            if scripted:
                # Such a module's tensors are kept in C++, which does not see that the object has changed.
                parameters[key] = parameter
        del applied
    if not ours:
        # The original does the work, with what was already made (its buffers and gradients are new to it).
        def once(tensor: torch.Tensor) -> torch.Tensor:
            known = made.get(id(tensor))
            return known[1] if known is not None and known[0] is tensor else fn(tensor)

        return original_apply(module, once, recurse=False)
    # What is not ours beside what is (a class of the program's own that wraps tensors, a host parameter) is PyTorch's to convert.
    others = {key: one for key, one in parameters.items() if one is not None and made[id(one)][1] is not one}
    if others:
        beside = torch.nn.Module()
        beside._parameters = others
        original_apply(beside, lambda tensor: made[id(tensor)][1] if id(tensor) in made else fn(tensor), recurse=False)
        for key, one in others.items():
            parameters[key] = one
    for key, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[key] = fn(buffer)
    return module


def _makes_another(parameter: torch.Tensor, applied: torch.Tensor) -> bool:
    """Whether the module has another parameter afterwards (`Module._apply`): to and from meta, or where a program wants that."""
    if torch.__future__.get_swap_module_params_on_conversion() or applied is parameter:
        return False
    on_meta = {parameter.device.type, applied.device.type} == {"cuda", "meta"}
    return on_meta or torch.__future__.get_overwrite_module_params_on_conversion()


def _another(parameter: torch.Tensor, applied: torch.Tensor, fn: _Convert) -> torch.nn.Parameter:
    made = torch.nn.Parameter(applied, parameter.requires_grad)
    if parameter.grad is not None:
        with torch.no_grad():
            made.grad = fn(parameter.grad).requires_grad_(parameter.grad.requires_grad)
    return made


def _convert_parameter(parameter: torch.Tensor, applied: torch.Tensor, fn: _Convert) -> None:
    gradient = parameter.grad
    if applied is not parameter:
        aside(setattr, parameter, "grad", None)
        become(parameter, applied)
    if gradient is None:
        return
    with torch.no_grad():
        converted = fn(gradient)
    if converted is not gradient:
        become(gradient, converted)
    if parameter.grad is not gradient:
        parameter.grad = gradient


def _exchange(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """``tensor.data = value`` from or to a virtual device."""
    gradient = tensor.grad
    if gradient is not None:
        tensor.grad = None
    become(tensor, value.detach().view(value.shape))
    if gradient is not None and gradient.device == tensor.device:
        tensor.grad = gradient
