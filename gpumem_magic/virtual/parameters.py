"""Keeping the identity of parameters: `model.to("cuda")` changes the objects that optimizers already hold, never replaces
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.tensors import HOST_CLASS, VirtualTensor, own_attributes


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Makes `tensor` (the same Python object, with its own attributes and hooks) have the contents and device of `other`.

    `other` must not be used afterwards. One of the two is virtual. `torch._C._swap_tensor_impl` is what
    `torch.utils.swap_tensors` ends in (torch 2.9 to 2.13); that function refuses objects with weak references, which
    optimizers' parameters often have.
    """
    swap = getattr(torch._C, "_swap_tensor_impl", None)
    if swap is None:
        raise RuntimeError(
            f"gpumem_magic does not know how to keep a parameter's identity in torch {torch.__version__}"
        )
    requires_grad = tensor.requires_grad
    hooks = tensor._backward_hooks
    accumulate_hooks = getattr(tensor, "_post_accumulate_grad_hooks", None)
    own = own_attributes(tensor)
    host_class = type(tensor) if not isinstance(tensor, VirtualTensor) else tensor.__dict__.get(HOST_CLASS)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    other = other.detach()
    fake = dict(other.__dict__) if isinstance(other, VirtualTensor) else {}
    swap(tensor, other)
    if fake:
        tensor.__class__ = VirtualTensor
        tensor.__dict__.clear()
        tensor.__dict__.update(own, **fake, **{HOST_CLASS: host_class})
        if is_parameter:
            tensor._is_param = True
    else:
        tensor.__class__ = host_class or (torch.nn.Parameter if is_parameter else torch.Tensor)
        tensor.__dict__.clear()
        tensor.__dict__.update(own)
    with torch._C.DisableTorchFunctionSubclass():
        tensor.requires_grad_(requires_grad)
        if hooks is not None:
            tensor._backward_hooks = hooks
        if accumulate_hooks is not None:
            tensor._post_accumulate_grad_hooks = accumulate_hooks


def install(patches: Patches) -> None:
    """Teaches `Module.to` and the ``.data =`` setter about virtual tensors."""
    original_apply: Callable[..., Any] = torch.nn.Module._apply
    original_data = torch.Tensor.data

    def apply(
        self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> torch.nn.Module:
        if recurse:
            for child in self.children():
                child._apply(fn)
        made: dict[int, tuple[torch.nn.Parameter, torch.Tensor]] = {}
        for own in self._parameters.values():
            if own is not None and id(own) not in made:
                with torch.no_grad():
                    made[id(own)] = (own, fn(own))
        if not any(isinstance(tensor, VirtualTensor) for pair in made.values() for tensor in pair):
            # Nothing of ours: the original does the work, with what was already made (its buffers and gradients are new to it).
            def once(tensor: torch.Tensor) -> torch.Tensor:
                known = made.get(id(tensor))
                return known[1] if known is not None and known[0] is tensor else fn(tensor)

            whole: torch.nn.Module = original_apply(self, once, recurse=False)
            return whole
        for parameter, applied in made.values():
            gradient = parameter.grad
            with torch.no_grad():
                new_gradient = fn(gradient) if gradient is not None else None
            if applied is not parameter:
                parameter.grad = None
                become(parameter, applied)
            if gradient is not None and new_gradient is not None and parameter.grad is not new_gradient:
                if new_gradient is not gradient:
                    become(gradient, new_gradient)
                parameter.grad = gradient
        for key, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[key] = fn(buffer)
        return self

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(self, VirtualTensor) != isinstance(value, VirtualTensor):
            gradient = self.grad
            if gradient is not None:
                self.grad = None
            become(self, value.detach().view(value.shape))
            if gradient is not None and gradient.device == self.device:
                self.grad = gradient
            return
        original_data.__set__(self, value)  # type: ignore[attr-defined]

    patches.set(torch.nn.Module, "_apply", apply)
    patches.set(torch.Tensor, "data", property(original_data.__get__, set_data))  # type: ignore[attr-defined]
