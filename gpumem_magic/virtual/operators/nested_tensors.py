"""Nested tensors in the strided layout: one buffer, and for each tensor in it a size, strides and where it begins.

PyTorch has them as a class of C++'s (`NestedTensorImpl`), which no fake tensor can stand for. Here one is an object of Python's
over a buffer that is an ordinary virtual tensor: what is asked of the allocator, gradients and values are the buffer's. Whatever
only looks at the buffer in another way (`transpose`, `view`, `chunk`, ...) is asked of PyTorch's own on the host, over memory
that nobody touches: sizes, and the words of its errors, are PyTorch's. What computes is in `nested_operators`,
`nested_kernels` and `nested_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch

from gpumem_magic.virtual.engine.modes import META
from gpumem_magic.virtual.engine.refusals import refuse_to_hold

Sizes = tuple[tuple[int, ...], ...]

INSTEAD = "layout=torch.jagged or dense (padded) tensors"

# By its name, what a function or method of PyTorch's does with nested tensors (`nested_operators`).
RULES: dict[str, Callable[..., Any]] = {}
# While devices are on: by a device's number, how it chooses attention's kernel.
DEVICES: Any = SimpleNamespace(gpu_of=None)
# Another look at the same buffer, and questions that the sizes answer.
_VIEWS = {
    "transpose", "view", "reshape", "chunk", "split", "split_with_sizes", "narrow", "squeeze", "unsqueeze", "flatten",
    "unflatten", "swapaxes", "swapdims",
}  # fmt: skip
_QUESTIONS = {
    "size", "stride", "dim", "ndimension", "numel", "nelement", "is_contiguous", "is_same_size", "storage_offset",
}  # fmt: skip
# What the buffer answers for it.
_OF_THE_BUFFER = {
    "device", "is_cuda", "is_cpu", "is_meta", "requires_grad", "grad_fn", "is_leaf", "retains_grad", "output_nr",
}  # fmt: skip
_PARTS = ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets")


class Laid(NamedTuple):
    """How tensors lie in a buffer: the size and strides of each, in elements, and where it begins there."""

    sizes: Sizes
    strides: Sizes
    offsets: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Whether all of it lies one behind the other from the buffer's start."""
        return self.strides == tuple(map(_plain_strides, self.sizes)) and self.offsets == tuple(
            accumulate((prod(size) for size in self.sizes[:-1]), initial=0)
        )


class NestedOnDevice(torch.Tensor):
    """A nested tensor on a virtual device.

    buffer: of one dimension, all that the tensors in it lie in. sizes, strides, offsets: see `Laid`.
    """

    buffer: torch.Tensor
    sizes: Sizes
    strides: Sizes
    offsets: tuple[int, ...]

    @staticmethod
    def __new__(cls: Any, buffer: torch.Tensor, sizes: Any, strides: Any = None, offsets: Any = None) -> NestedOnDevice:
        make: Any = torch.Tensor._make_wrapper_subclass
        made: NestedOnDevice = make(cls, (len(sizes),), dtype=buffer.dtype, device=META)
        made.buffer = buffer
        made.sizes = tuple(map(tuple, sizes))
        made.strides = tuple(map(_plain_strides, sizes)) if strides is None else tuple(map(tuple, strides))
        if offsets is None:
            offsets = list(accumulate((prod(size) for size in sizes), initial=0))[:-1]
        made.offsets = tuple(offsets)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("__get__", "__set__"):
            return _attribute(func, name, args)
        name = name.partition(".")[0]  # (`torch.ops.aten.relu.default` is `relu`, too)
        name = _ALIASES.get(name, name)
        rule = RULES.get(name)
        if rule is not None:
            return rule(*args, **kwargs)
        if name in _QUESTIONS or name in _PARTS:
            return func(*map(_on_host, args), **kwargs)
        if name in _VIEWS:
            return _view(func, args, kwargs)
        return _refuse_as_a_card(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What C++ would run on it without having asked."""
        refuse(f"`{func}`")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = ",\n".join("  " + repr(part).replace("\n", "\n  ") for part in self.unbind())
        more = f", device='{self.device}'" + (", requires_grad=True" if self.buffer.requires_grad else "")
        return f"nested_tensor([\n{parts}\n]{more})"

    __str__ = __repr__
    __hash__ = object.__hash__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __len__(self) -> int:
        return len(self.on_host())  # (which says that there are no sizes)

    def __iter__(self) -> Any:
        return iter(self.unbind())

    def __deepcopy__(self, memo: Any) -> Any:
        made = self.alike(self.buffer.detach().clone().requires_grad_(self.buffer.requires_grad))
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_to_hold("a nested tensor in the strided layout in a file", f"its tensors ({INSTEAD})")

    # ---- what it is

    @property
    def laid(self) -> Laid:
        """What says how it lies, without the buffer and its memory."""
        return Laid(self.sizes, self.strides, self.offsets)

    def alike(self, buffer: torch.Tensor) -> NestedOnDevice:
        """The same sizes, strides and places in another buffer."""
        return NestedOnDevice(buffer, *self.laid)

    def plainly(self, buffer: torch.Tensor, last: int | None = None) -> NestedOnDevice:
        """One tensor behind the other in a buffer. last: another size of their last dimension."""
        return NestedOnDevice(buffer, self.sizes if last is None else [(*size[:-1], last) for size in self.sizes])

    @property
    def lies_plainly(self) -> bool:
        return self.laid.is_plain

    def parts(self) -> list[torch.Tensor]:
        """Its tensors, as views of the buffer."""
        begins = self.buffer.storage_offset()
        return [
            self.buffer.as_strided(size, strides, offset + begins)
            for size, strides, offset in zip(self.sizes, self.strides, self.offsets, strict=True)
        ]

    def common(self, dimension: int) -> int | None:
        """The size that all have in a dimension of the whole (0: how many there are); None where they differ."""
        if dimension == 0:
            return len(self.sizes)
        found = {size[dimension - 1 if dimension > 0 else dimension] for size in self.sizes}
        return found.pop() if len(found) == 1 else None

    @property
    def rank(self) -> int:
        return len(self.sizes[0]) + 1 if self.sizes else 1

    def _where(self) -> list[torch.Tensor]:
        """Sizes, strides and offsets as PyTorch's own keep them."""
        return [torch.tensor(one, device="cpu") for one in self.laid]

    def on_host(self) -> torch.Tensor:
        """PyTorch's own with these sizes, over memory that is never touched: for what asks no value."""
        if not self.sizes:
            return torch.nested.nested_tensor([], device="cpu")
        # (A byte an element: the system gives memory when it is written to.)
        memory = torch.empty(self.buffer.numel(), dtype=torch.uint8, device="cpu")
        return torch._nested_view_from_buffer(memory, *self._where())


def rule_for(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What these functions of PyTorch's do with nested tensors."""

    def add(rule: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def is_nested(value: Any) -> bool:
    return isinstance(value, NestedOnDevice)


def _plain_strides(size: Sequence[int]) -> tuple[int, ...]:
    """(A size of none makes strides of none, which it does not for dense tensors.)"""
    return tuple(prod(size[place + 1 :]) for place in range(len(size)))


def look(at: NestedOnDevice, host: torch.Tensor) -> NestedOnDevice:
    """The device's buffer as a nested tensor of the host's lies in its own."""
    sizes, strides, offsets = (getattr(host, part)().tolist() for part in _PARTS)
    return NestedOnDevice(at.buffer, sizes, strides, offsets)


def contiguous(nested: NestedOnDevice) -> NestedOnDevice:
    """(`clone_nested`, ``NestedTensorMath.cpp``.)"""
    return nested if nested.lies_plainly else RULES["clone"](nested, memory_format=torch.contiguous_format)


def made_of(
    tensors: Sequence[Any], dtype: torch.dtype | None, device: torch.device, requires_grad: bool = False
) -> NestedOnDevice:
    """`torch.nested.nested_tensor` (``utils/nested.cpp``, `wrap_tensor_node` of ``NestedTensorUtils.h``): from the host one
    copy of all; tensors of the device are put together there."""
    held = [one if isinstance(one, torch.Tensor) else torch.tensor(one, dtype=dtype, device=device) for one in tensors]
    sizes = [tuple(one.shape) for one in held]
    ranks = {len(size) for size in sizes}
    if len(ranks) > 1:
        torch.nested.nested_tensor([torch.empty(size, device="meta") for size in sizes])  # raises
    if not held:
        return NestedOnDevice(torch.ones(0, dtype=dtype, device=device), [])
    kind = held[0].dtype if dtype is None else dtype
    buffer = torch.cat([one.reshape(-1) for one in held]).to(device, kind)
    if requires_grad:
        buffer = buffer.detach().requires_grad_()
    return NestedOnDevice(buffer, sizes)


def from_host(nested: torch.Tensor, device: torch.device, args: Any = (), kwargs: Any = None) -> NestedOnDevice:
    """One of the host's on the device: its buffer is copied as it lies. args, kwargs: `Tensor.to`'s, the device first."""
    further = {name: value for name, value in (kwargs or {}).items() if name != "device"}
    buffer = nested.values().to(device, *args[1:], **further)
    return NestedOnDevice(buffer, *(getattr(nested, part)().tolist() for part in _PARTS))


def to_host(nested: NestedOnDevice, dtype: torch.dtype | None = None) -> torch.Tensor:
    buffer = nested.buffer.to("cpu", dtype or nested.dtype)
    return torch._nested_view_from_buffer(buffer, *nested._where())


def _on_host(value: Any) -> Any:
    return value.on_host() if isinstance(value, NestedOnDevice) else value


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """Another look at the same buffer; what cannot be one is copied to lie plainly first, as PyTorch does."""
    nested = args[0]
    host = nested.on_host()
    found = func(host, *args[1:], **kwargs)
    if isinstance(found, (tuple, list)):
        return type(found)(look(nested, one) for one in found)
    if found.values().data_ptr() != host.values().data_ptr():
        nested = RULES["clone"](nested, memory_format=torch.contiguous_format)
    return look(nested, found)


def _name_of(attribute: Any) -> str:
    """An attribute of PyTorch's, or what stands in its place."""
    name: str | None = getattr(attribute, "__name__", None)
    return name or next(
        (name for kind in torch.Tensor.__mro__ for name, one in vars(kind).items() if one is attribute), ""
    )


def _attribute(func: Any, name: str, args: Any) -> Any:
    nested, attribute = args[0], _name_of(func.__self__)
    if name == "__set__":
        if attribute in ("grad", "data"):
            value = args[1]
            setattr(nested.buffer, attribute, value.buffer if isinstance(value, NestedOnDevice) else value)
            return None
        if attribute == "requires_grad":
            nested.buffer.requires_grad = args[1]
            return None
        refuse(f"setting `{attribute}`")
    if attribute in _OF_THE_BUFFER:
        return getattr(nested.buffer, attribute)
    if attribute == "is_nested":
        return True
    if attribute == "layout":
        return torch.strided
    if attribute == "grad":
        grad = nested.buffer.grad
        return None if grad is None else nested.alike(grad)
    if attribute == "data":
        return nested.alike(nested.buffer.detach())
    if attribute in ("shape", "ndim", "nbytes", "itemsize"):
        return (
            nested.numel() * nested.buffer.itemsize if attribute == "nbytes" else getattr(nested.on_host(), attribute)
        )
    if attribute == "mT":
        return nested.transpose(-2, -1)
    with torch._C.DisableTorchFunctionSubclass():
        return func(nested)


def refuse(what: str) -> NoReturn:
    refuse_to_hold(f"the result of {what} of a nested tensor in the strided layout", INSTEAD)


def _refuse_as_a_card(func: Any, name: str, args: Any, kwargs: Any) -> NoReturn:
    """In PyTorch's words where it has no such operator, or not for these sizes; else in ours."""
    try:
        with torch.no_grad():
            func(*map(_on_host, args), **{key: _on_host(value) for key, value in kwargs.items()})
    except (NotImplementedError, RuntimeError, IndexError) as error:
        words = str(error).partition("\n")[0].partition(". This could be")[0]
        if "nested" in words.lower():
            raise type(error)(words.replace("NestedTensorCPU", "NestedTensorCUDA")) from None
    refuse(f"`{name}`")


_ALIASES = {
    "__add__": "add", "__radd__": "add", "__sub__": "sub", "__mul__": "mul", "__rmul__": "mul", "__truediv__": "div",
    "__iadd__": "add_", "__isub__": "sub_", "__imul__": "mul_", "__matmul__": "matmul", "__neg__": "neg", "__abs__": "abs",
    "__eq__": "eq", "__gt__": "gt", "__ge__": "ge", "__getitem__": "select_of", "subtract": "sub", "multiply": "mul",
    "divide": "div", "true_divide": "div", "absolute": "abs", "negative": "neg",
    "nested_to_padded_tensor": "to_padded_tensor",
}  # fmt: skip
