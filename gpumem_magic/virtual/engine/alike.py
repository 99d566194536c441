"""What the fake mode gave for an operator is what it gives again for arguments alike: of the same shapes, types and numbers.

The fake mode remembers that too, but takes most of an operator's time to look at whatever a fake tensor can be. Those of a
virtual device are dense as a rule, without symbols, and of one class. What is kept here holds no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gpumem_magic.private import aten
from gpumem_magic.virtual.engine.calls import device_among
from gpumem_magic.virtual.engine.modes import META, STATE, cuda
from gpumem_magic.virtual.engine.tensors import VirtualParameter, VirtualTensor, all_attributes

_ENDS = {int, type(None)}
_PLAIN = {bool, str, type(None), type(Ellipsis), torch.dtype, torch.layout, torch.memory_format, torch.Size}
# Results that depend on values or on a storage's size, and operators whose arguments become others.
_OTHER_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_OTHERS = ("aten::lift", "aten::as_strided", "aten::resize", "aten::set_")
# Results that depend on values only where masks are in a list of indices (the second argument).
_BY_INDEX = frozenset(map(id, (aten.index.Tensor, aten._unsafe_index.Tensor)))
_OF_MASKS = {torch.bool, torch.uint8}
# No shape depends on the numbers that they are given, which are others at each step of an optimizer.
_OF_EACH_ELEMENT = ("aten::_foreach_", "aten::_fused_")
_MOST = 50_000
_STRIDED = torch.strided
# (The name is another's while a device is on.)
_DEVICE = torch.device
# C++'s own, past what calls it in Python and what is put in its place while a device is on.
_empty, _make_subclass = torch._C._VariableFunctions.empty_strided, torch._C.TensorBase._make_subclass
_set_throw = torch._C._set_throw_on_mutable_data_ptr
_transforms = torch._C._are_functorch_transforms_active
# Of a tensor: size, stride, type, the number of the argument whose storage it shares (None: its own), how far behind that it
# begins, and its device. A number alone: that argument.
_Made = tuple[Any, Any, torch.dtype, int | None, int, torch.device] | int | None


class Kernels(NamedTuple):
    """The bytes of the blocks that an operator holds until its last kernel ends, and those that each kernel has for itself."""

    held: tuple[int, ...]
    each: tuple[tuple[int, ...], ...]


@dataclass(eq=False, slots=True)
class Answer:
    """What an operator gives whenever its arguments look so. kind: list or tuple, None for a single result. device: the one that
    it runs on.

    as_on_host: the host's result, which follows from looks as well, lies in new memory as the device's does. kernels: what the
    operator's kernels take besides, where that follows from looks, too, and was asked for. is_new: whether all results have
    memory of their own.
    """

    kind: Any
    made: list[_Made]
    device: int
    as_on_host: bool = False
    kernels: Kernels | None = None
    is_new: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_new = all(type(one) is tuple and one[3] is None for one in self.made)

    def lies_as(self, host: torch.Tensor, number: int = 0) -> bool:
        """Whether a host's result, of arguments that look so, lies as the device's. (Settings may have changed its strides.)
        number: of several the how manieth."""
        made = self.made[number]
        return self.as_on_host and type(made) is tuple and host.stride() == made[1] and host.size() == made[0]


class AlikeCalls:
    """Results of operators by their arguments' looks. To be asked under the engine's lock, with overrides and modes off."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        # Whether an operator's results follow from looks, and whether numbers are among these. By its `id`, with the operator.
        self._ways: dict[int, tuple[bool, bool, Any]] = {}
        self._found: dict[tuple[Any, ...], Answer] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        # Whether there are tensors of which PyTorch knows that they are zero.
        self.zeros = False

    def looks(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """All that a result's looks depend on; None where something else may count."""
        way = self._ways.get(id(func))
        if way is None:
            way = self._ways[id(func)] = (*_way_of(func), func)
        follows, numbers, _ = way
        if not follows or STATE.in_kernel or (id(func) in _BY_INDEX and _holds_masks(args[1])):
            return None
        key: list[Any] = [id(func), torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not self.describe(key, args, numbers, hosts=True):
            return None
        if kwargs:
            key.extend(kwargs)
            if not self.describe(key, kwargs.values(), numbers, hosts=True):
                return None
        return tuple(key)

    def forget(self) -> None:
        """Another card may run other kernels."""
        for answer in self._found.values():
            answer.kernels = None

    def found(self, looks: tuple[Any, ...] | None) -> Answer | None:
        """What is known of arguments that look so."""
        return None if looks is None else self._found.get(looks)

    def given(self, answer: Answer, args: Any, kwargs: Any) -> Any:
        """What the operator gives now, of arguments that look so."""
        kind, made = answer.kind, answer.made
        if kind is not None:
            args = _all_of(args, kwargs)
            return kind([self._make(one, args) for one in made])
        if answer.is_new:
            size, stride, dtype, _, _, device = made[0]  # type: ignore[misc]
            return self.around(_empty(size, stride, dtype=dtype, device=META), device)
        return self._make(made[0], _all_of(args, kwargs))

    def given_one(self, answer: Answer, number: int) -> VirtualTensor:
        """The new result of that number."""
        found: VirtualTensor = self._make(answer.made[number], ())
        return found

    def on_memory_of(
        self, tensor: VirtualTensor, size: Any, stride: Any, dtype: torch.dtype, offset: int
    ) -> VirtualTensor:
        """A tensor on another's memory, of which C++ does not know that it is a view."""
        meta = _empty((0,), (1,), dtype=dtype, device=META)
        meta.set_(tensor.untyped_storage(), offset, size, stride)
        # (`set_` counts as writing, which `data` knows nothing of.)
        return self.around(meta.data, tensor.fake_device)

    def learn(self, looks: tuple[Any, ...], func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """That is what it gave."""
        if kwargs and self.looks(func, args, kwargs) != looks:
            # It has given a tensor that it wrote to (``out=``) another size.
            return
        device = device_among(args, kwargs)
        if device is None:
            return
        args = _all_of(args, kwargs)
        kind = type(out) if type(out) in (tuple, list) else None
        made: list[_Made] = []
        # (Results that share a storage with each other, or with a tensor in a list, are not told apart.)
        taken = {tensor.untyped_storage()._cdata for tensor in _in_lists(args)}
        for tensor in (out,) if kind is None else out:
            one = self._told(args, tensor)
            if one is False:
                return
            made.append(one)
            if type(one) is tuple and one[3] is None:
                storage = tensor.untyped_storage()._cdata
                if storage in taken:
                    return
                taken.add(storage)
        if len(self._found) >= _MOST:
            self._found.clear()
        self._found[looks] = Answer(kind, made, device)

    def describe(self, key: list[Any], args: Any, numbers: bool, untracked: bool = False, hosts: bool = False) -> bool:
        """Puts the arguments' looks into a key, with the numbers among them or without. False where something else may count;
        untracked: also where autograd follows one. hosts: tensors on the host have looks, too."""
        for arg in args:
            kind = type(arg)
            if kind is VirtualTensor or kind is VirtualParameter:
                dtype = arg.dtype
                if (
                    all_attributes(arg).get("fake_mode") is not self._fake
                    or arg.layout is not _STRIDED
                    or arg.is_neg()
                    or (dtype.is_complex and arg.is_conj())
                    or (untracked and arg.requires_grad)
                    or (self.zeros and arg._is_zerotensor())
                ):
                    return False
                key += (arg.shape, arg.stride(), dtype, arg.fake_device, arg.is_inference())
            elif kind is int or kind is float:
                key += (kind, arg if numbers else None)
            elif kind in _PLAIN:
                key += (kind, arg)
            elif kind is slice:
                start, stop, step = arg.start, arg.stop, arg.step
                if not {type(start), type(stop), type(step)} <= _ENDS:
                    return False
                key += (kind, start, stop, step)
            elif kind is list or kind is tuple:
                key += (kind, len(arg))
                if not self.describe(key, arg, numbers, untracked, hosts):
                    return False
            elif kind is _DEVICE and (arg.index is not None or arg.type == "cpu"):
                key.append(arg)
            elif hosts and (kind is torch.Tensor or kind is FakeTensor) and self.is_plain_host(arg):
                key += (kind, arg.shape, arg.stride(), arg.dtype)
            else:
                return False
        return True

    def is_plain_host(self, tensor: Any) -> bool:
        """Whether the fake mode makes of a host tensor what its shape, strides and type say; or has done so."""
        is_on_host = tensor.fake_device.type == "cpu" if type(tensor) is FakeTensor else tensor.is_cpu
        return (
            is_on_host
            and tensor.layout is _STRIDED
            and not (tensor.requires_grad or tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())
            and not _transforms()
            and (type(tensor) is torch.Tensor or (tensor.fake_mode is self._fake and tensor.constant is None))
        )

    def looking_at(self, made: Any, args: Any, kwargs: Any) -> VirtualTensor:
        """A view of one of these arguments, made so."""
        found: VirtualTensor = self._make(made, _all_of(args, kwargs))
        return found

    def _make(self, one: _Made, args: Any) -> Any:
        if one is None:
            return None
        if isinstance(one, int):
            return args[one]
        size, stride, dtype, source, further, device = one
        if source is None:
            return self.around(_empty(size, stride, dtype=dtype, device=META), device)
        base = args[source]
        meta = _empty((0,), (1,), dtype=dtype, device=META)
        meta.set_(base.untyped_storage(), base.storage_offset() + further, size, stride)
        return self.around(meta, device)

    def around(self, meta: torch.Tensor, device: torch.device) -> VirtualTensor:
        """A virtual tensor around a plain meta tensor, as `FakeTensor` makes one, in less than half of its time."""
        tensor: VirtualTensor = _make_subclass(
            VirtualTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        _set_throw(tensor)
        all_attributes(tensor).update(self._attributes.get(device) or self._of_a_fake(device))
        return tensor

    def attributes(self, device: int) -> dict[str, Any]:
        """What a tensor's dictionary holds of a device."""
        place = cuda(device)
        return self._attributes.get(place) or self._of_a_fake(place)

    def _told(self, args: Any, tensor: Any) -> Any:
        """How to make a tensor like this one (`_Made`); False where that would not be the same."""
        if tensor is None:
            return None
        for number, arg in enumerate(args):
            if arg is tensor:
                # (A host tensor was made a fake one.)
                return isinstance(arg, VirtualTensor) and number
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided or tensor.requires_grad:
            return False
        device, offset = tensor.fake_device, int(tensor.storage_offset())
        if device.type != "cuda":
            return False
        source = _source(args, tensor)
        further = offset
        if source is not None:
            further -= int(args[source].storage_offset())
            if args[source].dtype != tensor.dtype:
                return False
        one = tensor.size(), tensor.stride(), tensor.dtype, source, further, device
        copy = self._make(one, args)
        same = (
            copy.storage_offset() == offset
            and copy.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
            and torch._C._dispatch_key_set(copy) == torch._C._dispatch_key_set(tensor)
        )
        return same and one

    def _of_a_fake(self, device: torch.device) -> dict[str, Any]:
        meta = _empty((0,), (1,), dtype=torch.float32, device=META)
        fake: Any = FakeTensor.__new__(VirtualTensor, self._fake, meta, device)
        # What is None of every tensor is so by its class: a dictionary of two is made sooner, and takes less of the caches.
        for name, value in all_attributes(fake).items():
            if value is None and not hasattr(VirtualTensor, name):
                setattr(VirtualTensor, name, None)
        found = self._attributes[device] = {
            name: value for name, value in all_attributes(fake).items() if value is not None
        }
        return found


def _way_of(func: Any) -> tuple[bool, bool]:
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False, False
    name = func._schema.name
    follows = (id(func) in _BY_INDEX or _OTHER_TAGS.isdisjoint(func.tags)) and not name.startswith(_OTHERS)
    return follows, torch.Tag.pointwise not in func.tags and not name.startswith(_OF_EACH_ELEMENT)


def _holds_masks(indices: Any) -> bool:
    return any(one is not None and one.dtype in _OF_MASKS for one in indices)


def _all_of(args: Any, kwargs: Any) -> Any:
    return (*args, *kwargs.values()) if kwargs else args


def _source(args: Any, tensor: Any) -> int | None:
    """The number of the argument whose storage the tensor shares."""
    storage = tensor.untyped_storage()._cdata
    for number, arg in enumerate(args):
        if isinstance(arg, VirtualTensor) and arg.untyped_storage()._cdata == storage:
            return number
    return None


def _in_lists(args: Any) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            for one in arg:
                if isinstance(one, torch.Tensor):
                    yield one
