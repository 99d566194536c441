"""Making and moving tensors: `torch.zeros(..., device="cuda")`, `tensor.to("cuda")` and their relatives.

Each function is replaced by one that asks whether a virtual device is meant, and otherwise calls the original.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.utils._device
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from gpumem_magic.looks.tensors import SPARSE_PARTS, is_tracing, untraced
from gpumem_magic.looks.warned import warnings_remembered
from gpumem_magic.patching import Patches, behind_relays
from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.host_calls import FactoryCall
from gpumem_magic.virtual.engine.mismatch import check_generator, scalar_name
from gpumem_magic.virtual.engine.modes import (
    META,
    STATE,
    aside,
    cuda,
    has_others,
    is_ours,
    made_plainly,
    numbered,
    origin,
    pushed,
    with_dispatch_of_its_own,
)
from gpumem_magic.virtual.engine.pinned import Pinned
from gpumem_magic.virtual.engine.refusals import refuse_device, refuse_fork, refuse_to_hold
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.engine.tensors import VirtualTensor, plain_meta
from gpumem_magic.virtual.operators import growing, jagged, nested_tensors
from gpumem_magic.virtual.operators.sorting import hold_for_shuffle

# Their result begins with no element.
_GROWN = ("arange", "range", "eye")
_FILLED = ("zeros", "ones", "full")
# Windows of two elements and more are worked out from a range (``TensorFactories.cpp``): in its place, or with so many tensors of
# its size beside the result. A periodic one is all of a window but its last element.
_WINDOWS = {"hann_window": 0, "hamming_window": 0, "bartlett_window": 0, "blackman_window": 4, "kaiser_window": 1}
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
# It asks for no default device, and compares the device that it is told with that of its `out`.
_OF_NO_DEFAULT = ("normal",)
# Factories that must see values: made on the host, then copied, as the real ones are.
_FROM_VALUES = ("tensor", "as_tensor", "asarray", "scalar_tensor")
# What these are told of the result, and not of how its values come to the host.
_OF_THE_RESULT = ("device", "requires_grad", "copy", "pin_memory")
# Those that put a sparse tensor together.
_SPARSE = ("sparse_coo_tensor", *(f"sparse_{layout}_tensor" for layout in ("csr", "csc", "bsr", "bsc", "compressed")))
_QUANTISED = ("_empty_affine_quantized", "_empty_per_channel_affine_quantized")
# Factories with no meta version, or whose result needs no device.
_LEFT_ALONE = ("from_file", "from_numpy", "frombuffer", *_SPARSE)


# Tensors of other classes may have a word in what is done with them. (That of parameters without a size is kept elsewhere.)
_PLAIN = (torch.Tensor, torch.nn.Parameter, UninitializedParameter, UninitializedBuffer, VirtualTensor)
# Where PyTorch keeps the fake mode that is active, if one is; ours never is.
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_transforms = torch._C._are_functorch_transforms_active

# While a virtual device is on, the name `torch.device` stands for something slower.
_DEVICE = torch.device
_CPU = torch.device("cpu")


_NUMBERS_AND_KINDS = {
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.Size,
    _DEVICE,
}
_MOST_LOOKS = 10_000
# (The name is one of those that are replaced.)
_empty_strided = torch.empty_strided


# Whether what `torch.asarray` makes of a tensor is tracked where that is, unless the program says (newer than 2.9).
_TRACKS_AS_GIVEN = "requires_grad: Optional[bool]" in (torch.asarray.__doc__ or "")


def _as_array(data: torch.Tensor, target: torch.device, given: dict[str, Any]) -> torch.Tensor:
    """`torch.asarray` of a tensor (``asarray`` in ``tensor_new.cpp``): itself, unless a copy is asked for or needed."""
    copy, dtype = given.get("copy"), given.get("dtype") or data.dtype
    moves, casts = target != data.device, dtype != data.dtype
    if copy is False and moves:
        raise ValueError(f"can't alias tensor from device '{data.device}' to '{target}'.")
    if copy is False and casts:
        names = scalar_name(data.dtype), scalar_name(dtype)
        raise ValueError(f"can't alias tensor with dtype '{names[0]}' into dtype '{names[1]}'.")
    made = data.to(target, dtype, copy=bool(copy)) if moves or casts else data.clone() if copy else data
    tracked = given.get("requires_grad")
    if tracked is None:
        tracked = _TRACKS_AS_GIVEN and data.requires_grad
    return made.requires_grad_(tracked) if made.is_leaf or tracked else made.detach()


def _is_plainly_given(arg: Any) -> bool:
    """Whether an argument is a number, a size of numbers or a kind."""
    return type(arg) in _NUMBERS_AND_KINDS or (type(arg) is tuple and all(type(one) is int for one in arg))


def _means_meta(device: Any) -> bool:
    """Whether the program asks for the meta device itself (virtual devices are meta:i to C++, and must not be meant)."""
    return device == "meta" or (type(device) is _DEVICE and device.type == "meta" and not is_ours(device))


def _check_generator(given: Any, generator: Any) -> None:
    """For a factory that is given no device, and no tensor that says it: another to make one like it, or `out`."""
    kind = torch.get_default_device().type
    if kind in ("cpu", "cuda") and not any(isinstance(one, torch.Tensor) for one in given):
        check_generator(generator, kind)


def _wraps_others(arg: Any) -> bool:
    """Whether it is a tensor of a class that unwraps itself (distributed ones), and makes such tensors."""
    return isinstance(arg, torch.Tensor) and with_dispatch_of_its_own((type(arg),))


def _on_host(original: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """An ordinary tensor like one that may be virtual, of which only the shape and the type are looked at."""
    if args and isinstance(args[0], VirtualTensor):
        args = (plain_meta(args[0]), *args[1:])
    elif isinstance(kwargs.get("input"), VirtualTensor):
        kwargs["input"] = plain_meta(kwargs["input"])
    return original(*args, **kwargs)


def _unchecked(original: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A sparse tensor on the device, whose indices have no values that could be checked; 2.11 warns although it is told."""
    if original.__name__ != "sparse_coo_tensor" and len(args) < 4 and kwargs.get("size") is None:
        compressed, plain, values = _parts(args, kwargs)
        kwargs = {**kwargs, "size": _compressed_size(original, compressed, plain, values, kwargs.get("layout"))}
    with warnings_remembered(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
        return original(*args, **{**kwargs, "check_invariants": False})


# Each in the order in which it is given.
_PARTS = (
    "crow_indices", "ccol_indices", "compressed_indices", "col_indices", "row_indices", "plain_indices", "values",
)  # fmt: skip


def _parts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Of a compressed sparse tensor: its compressed indices, plain ones and values, by place or name."""
    named = (kwargs[name] for name in _PARTS if name in kwargs)
    return [torch.as_tensor(one) for one in (*args, *named)]


def _compressed_size(
    original: Callable[..., Any], compressed: torch.Tensor, plain: torch.Tensor, values: torch.Tensor, layout: Any
) -> list[int]:
    """That of a compressed sparse tensor whose size is not said (``_estimate_sparse_compressed_tensor_size`` in
    ``SparseCsrTensor.cpp``): the plain indices are asked for the largest."""
    kind = str(layout).removeprefix("torch.") if layout is not None else original.__name__.removesuffix("_tensor")
    batch = compressed.dim() - 1
    sizes = (
        compressed.shape[-1] - 1 if plain.shape[-1] else 0,
        int(plain.max().item()) + 1 if plain.numel() else 0,
    )
    rows, columns = sizes if kind in ("sparse_csr", "sparse_bsr") else sizes[::-1]
    block = list(values.shape[batch + 1 : batch + 3]) if kind in ("sparse_bsr", "sparse_bsc") else []
    height, width = block or (1, 1)
    return [*plain.shape[:batch], rows * height, columns * width, *values.shape[batch + 1 + len(block) :]]


def _is_whole(meta: torch.Tensor) -> bool:
    """Whether nothing lies in its storage that it does not show, as a periodic window's last element does."""
    return meta.untyped_storage().nbytes() == meta.nbytes


def _all_but_the_last(meta: torch.Tensor) -> torch.Tensor:
    """A vector that lies in a storage for one element more."""
    count = meta.numel()
    longer = made_plainly(_empty_strided, (count + 1,), (1,), dtype=meta.dtype, device=META)
    return made_plainly(torch.as_strided, longer, (count,), (1,))


@special(
    *overloads(
        "quantize_per_tensor quantize_per_tensor.tensor_qparams quantize_per_tensor.tensors quantize_per_tensor_dynamic"
        f" quantize_per_channel {' '.join(_QUANTISED)}"
    )
)
def _quantised(engine: Engine, func: Any, *_: Any) -> NoReturn:
    """The rules of fake tensors would make them of four bytes an element, without a word."""
    _refuse_quantised(f"what `{func}` makes, a quantised tensor")


def _refuse_quantised(what: str) -> NoReturn:
    refuse_to_hold(
        what,
        "torchao's or bitsandbytes' tensors, `torch.fake_quantize_per_tensor_affine`, or integers with a scale beside them",
    )


@special(*overloads("_nested_tensor_from_tensor_list _nested_tensor_from_mask _nested_from_padded"))
def _nested(engine: Engine, func: Any, *_: Any) -> NoReturn:
    """From below Python, where none of ours can be made."""
    refuse_to_hold(f"what `{func}` makes, a nested tensor in the strided layout", nested_tensors.INSTEAD)


def made_as_of_old(args: tuple[Any, ...], dtype: torch.dtype, device: Any) -> torch.Tensor:
    """What PyTorch's old constructors make: of numbers and a `torch.Size` a tensor of that size, of all else its values."""
    if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
        return torch.tensor(args[0], dtype=dtype, device=device)
    return torch.empty(*args or (0,), dtype=dtype, device=device)


def _check_kind(tensor: torch.Tensor) -> None:
    """Refuses what fake tensors cannot stand for, before C++ does in words that say nothing to the reader."""
    if tensor.is_quantized:
        _refuse_quantised("a quantised tensor")
    if tensor.layout not in (torch.strided, torch.jagged, *SPARSE_PARTS):
        refuse_to_hold(f"a tensor with layout {tensor.layout}")


def _shares(original: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor on a virtual device is its own capsule: only PyTorch itself can take it."""

    def with_the_same_memory(tensor: Any, *, device: Any = None, copy: bool | None = None, **kwargs: Any) -> Any:
        if not isinstance(tensor, VirtualTensor):
            given = {name: value for name, value in (("device", device), ("copy", copy)) if value is not None}
            return original(tensor, **given, **kwargs)
        if tensor.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        found = tensor.detach() if device is None else tensor.detach().to(device)
        return found.clone() if copy else found

    return with_the_same_memory


def _by_our_name(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a class that is no tensor (a dictionary of tensors) makes of a function of PyTorch's that was replaced.

    PyTorch hands it the function that was there before; the class may know the one that it has read from PyTorch's module. To be
    called while a TypeError is handled, which goes on where there is no such class.
    """
    if not _speaks_though_no_tensor(args):
        raise
    return torch.overrides.handle_torch_function(getattr(torch, original.__name__), args[:1], *args, **kwargs)


def _speaks_though_no_tensor(args: Any) -> bool:
    return bool(args) and not isinstance(args[0], torch.Tensor) and hasattr(type(args[0]), "__torch_function__")


def _cuda(
    self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
) -> Any:
    format_option = {} if memory_format is torch.preserve_format else {"memory_format": memory_format}
    return self.to(torch.device("cuda") if device is None else device, non_blocking=non_blocking, **format_option)


class Factories:
    """The replaced functions, for one engine. `current_device` gives the index that a bare "cuda" means."""

    def __init__(self, engine: Engine, current_device: Callable[[], int], pinned: Pinned) -> None:
        self._engine = engine
        self._current_device = current_device
        self._pinned = pinned
        # Whether fake tensors of somebody else's may be on our devices: a compiler traces a program.
        self.traces = False
        # Size, stride and type of what a factory gave for numbers.
        self._looks: dict[tuple[Any, ...], tuple[Any, Any, torch.dtype]] = {}

    def install(self, patches: Patches) -> None:
        plain = torch.utils._device._device_constructors()
        # Function modes see them by the names under which they are, those of a program that it took before by what they were.
        makers = set(plain)
        for function in plain:
            name = getattr(function, "__name__", "")
            # Not the function itself: what a library has put in its place is wrapped as well.
            owner = next((place for place in (torch, torch.fft) if name in vars(place)), None)
            if owner is None or name in _LEFT_ALONE:
                continue
            make = self._from_values if name in _FROM_VALUES else self._maker
            patches.set(owner, name, make(getattr(owner, name)))
            makers.add(getattr(owner, name))
        for name in _SPARSE:
            patches.set(torch, name, self._sparse(getattr(torch, name)))
            makers.add(getattr(torch, name))
        for name in (*_LIKE, *_QUANTISED, *_OF_NO_DEFAULT):
            patches.set(torch, name, self._maker(getattr(torch, name)))
        for name in _NEW:
            patches.set(torch.Tensor, name, self._maker(getattr(torch.Tensor, name)))
        new_tensor = self._from_values(torch.Tensor.new_tensor)
        patches.set(torch.Tensor, "new_tensor", self._beside(new_tensor))
        patches.set(torch.Tensor, "new", self._new(torch.Tensor.new))
        for name in ("from_dlpack", "to_dlpack"):
            shares = _shares(getattr(torch, name))
            for place in (torch, torch.utils.dlpack):
                patches.set(place, name, shares)
        patches.set(torch.Tensor, "to", self._to(torch.Tensor.to))
        patches.set(torch.Tensor, "cuda", _cuda)
        patches.set(torch.Tensor, "type_as", self._type_as(torch.Tensor.type_as))
        self._pinned.install(patches)
        patches.set(torch.Tensor, "resize_", self._resized(torch.Tensor.resize_))
        patches.set(torch.UntypedStorage, "resize_", self._storage_resized(torch.UntypedStorage.resize_))
        context, asked = torch.utils._device.DeviceContext, torch.utils._device._device_constructors
        answer = context.__torch_function__
        patches.set(context, "__torch_function__", self._device_context(answer, makers))
        patches.set(torch.utils._device, "_device_constructors", lambda: makers)
        # What Dynamo takes in their place: it knows PyTorch's own, and reads into them.
        for changed, called, read in (
            (context, "__torch_function__", answer),
            (torch.utils._device, "_device_constructors", asked),
        ):
            getattr(changed, called)._torchdynamo_inline = read

    @property
    def engine(self) -> Engine:
        return self._engine

    # ---- which device

    def index_of(self, device: Any) -> int | None:
        """Index of the virtual device that a device argument means; None for any other device, or none."""
        # Fake tensors of somebody else's (DTensor asks them for shapes) are none of ours.
        return None if torch._C._get_dispatch_mode(_FAKE) is not None else self._index(device)

    def _traced(self, device: Any) -> torch.device | None:
        """What C++ is told where a compiler traces a device argument that means one of ours; else None."""
        if not self.traces or torch._C._get_dispatch_mode(_FAKE) is None:
            return None
        index = self._index(device)
        return None if index is None else numbered(index)

    def _index(self, device: Any) -> int | None:
        if device is None:
            return None
        if isinstance(device, str):
            if not device.startswith("cuda"):
                return None
            device = torch.device(device)
        elif isinstance(device, bool):
            return None
        elif isinstance(device, int):
            device = torch.device("cuda", device)
        if type(device) is not _DEVICE or device.type != "cuda":
            return None
        index = self._current_device() if device.index is None else device.index
        if index >= self._engine.device_count:
            refuse_device(index, self._engine.device_count)
        if os.getpid() != self._engine.process:
            refuse_fork()
        return index

    # ---- making

    def _maker(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make_one(*args: Any, **kwargs: Any) -> Any:
            try:
                if "device" not in kwargs and "pin_memory" not in kwargs:
                    if "generator" in kwargs:
                        _check_generator((*args, *kwargs.values()), kwargs["generator"])
                    return original(*args, **kwargs)
                return make_there(args, kwargs)
            except TypeError:
                return _by_our_name(original, args, kwargs)

        def make_there(args: Any, kwargs: dict[str, Any]) -> Any:
            device = kwargs.get("device")
            if kwargs.pop("pin_memory", False):
                return self._pinned_one(original, args, kwargs)
            if device is None or STATE.depth:
                return original(*args, **kwargs)
            index = self.index_of(device)
            if index is not None and getattr(original, "__name__", "") in _QUANTISED:
                _refuse_quantised(f"what `torch.{original.__name__}` makes, a quantised tensor")
            if index is None:
                traced = self._traced(device)
                if traced is not None:
                    kwargs["device"] = traced
                elif _means_meta(device):
                    args = tuple(plain_meta(arg) if isinstance(arg, VirtualTensor) else arg for arg in args)
                elif original.__name__ in (*_LIKE, *_NEW) and torch._C._get_dispatch_mode(_FAKE) is None:
                    return _on_host(original, args, kwargs)
                return original(*args, **kwargs)
            if original.__name__ in _LIKE and _speaks_though_no_tensor(args):
                return original(*args, **kwargs)
            check_generator(kwargs.get("generator"), "cuda")
            return self.make(original, index, args, kwargs)

        return make_one

    def _pinned_one(self, original: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        made = self._maker(original)(*args, **kwargs)
        if isinstance(made, torch.Tensor) and made.device.type == "cuda":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return self._noted(made)

    def _noted(self, made: Any) -> Any:
        """From now on it counts as pinned, if it lies on the host."""
        if type(made) is torch.Tensor and made.is_cpu and made.layout is torch.strided:
            self._pinned.note(made.untyped_storage())
        return made

    def make(self, original: Callable[..., Any], index: int, args: Any, kwargs: dict[str, Any]) -> Any:
        """The factory's result on virtual device `index`."""
        given = (*args, *kwargs.values())
        # (`torch.func`'s `grad` and `jvp` wrap what is made inside them, and TorchScript's trace writes down what C++ is asked.)
        through = _transforms() or is_tracing() or (_len_torch_dispatch_stack() and has_others(self._engine.mode))
        if through or any(isinstance(arg, VirtualTensor) or _wraps_others(arg) for arg in given):
            with origin(self._origin()), pushed(self._engine.mode):
                return original(*args, **{**kwargs, "device": numbered(index)})
        return self._make(original, index, args, kwargs)

    def make_by(self, way: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
        """What no operator makes is made by what `way` makes of our own function, until the answer is called."""
        self.__dict__["_make"] = way(self._make)

        def end() -> None:
            del self.__dict__["_make"]

        return end

    def _make(self, original: Callable[..., Any], index: int, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs.pop("pin_memory", None)
        on_host = {**kwargs, "device": _CPU, "requires_grad": False}
        kwargs = {**kwargs, "device": META}
        kwargs.pop("generator", None)  # a meta tensor draws nothing, and the device's generator is not the host's
        meta = self._meta(original, args, kwargs)
        name = getattr(original, "__name__", "")
        if name == "rand" and not (meta.is_floating_point() or meta.is_complex()):
            # (``DistributionTemplates.h``. Of `randn` the rule says so.)
            raise NotImplementedError(f"\"check_uniform_bounds\" not implemented for '{scalar_name(meta.dtype)}'")
        is_worked_out = name in _WINDOWS and meta.numel() > 1
        if is_worked_out and name == "kaiser_window" and (args[1] if len(args) > 1 else kwargs.get("periodic", True)):
            meta = _all_but_the_last(meta)  # (The meta device makes no more than is seen, of this alone.)
        with self._engine.uninterrupted, self._engine.lock, origin(self._origin()):
            beside = _WINDOWS[name] if is_worked_out else 0
            made = self._window(meta, index, name, beside) if beside else self._engine.wrap(meta, index, name)
            if name == "randperm":
                hold_for_shuffle(self._engine, index, made)
            elif (name in _GROWN and meta.numel()) or (is_worked_out and not beside):
                growing.fill(self._engine, index, made.element_size())
            elif name in _FILLED:
                self._engine.memory.after_operator(_aten.fill_.Scalar, (made,), index)
        if "empty" in name:
            self._engine.blank(made)
        else:
            with untraced():
                self._engine.fill(made, FactoryCall(original, args, on_host), index)
        return made

    def _window(self, meta: torch.Tensor, index: int, name: str, beside: int) -> Any:
        nbytes = meta.untyped_storage().nbytes()
        with self._engine.scratch(index, nbytes):
            growing.fill(self._engine, index, meta.element_size())
            with self._engine.scratch(index, *[nbytes] * (beside - 1)):
                return self._engine.wrap(meta, index, name)

    def _origin(self) -> str:
        """What an operator's rule makes for itself is that operator's, and no data of the program's."""
        return STATE.origin if self._engine.is_under_way else "factory"

    def _meta(self, original: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """The factory's result on the meta device: by what it gave before, as PyTorch has some of these in Python."""
        given = (*args, *kwargs.values())
        # (TorchScript's trace holds what was called, and a mode sees it.)
        seen = is_tracing() or _len_torch_function_stack() or _len_torch_dispatch_stack()
        if seen or not all(map(_is_plainly_given, given)):
            return made_plainly(original, *args, **kwargs)
        # (1, 1.0 and True are the same key.)
        asked = (original, torch.get_default_dtype(), *kwargs, *given, *map(type, given))
        looks = self._looks.get(asked)
        if looks is not None:
            return made_plainly(_empty_strided, *looks[:2], dtype=looks[2], device=META)
        meta = made_plainly(original, *args, **kwargs)
        if type(meta) is torch.Tensor and meta.layout is torch.strided and not meta.requires_grad and _is_whole(meta):
            if len(self._looks) >= _MOST_LOOKS:
                self._looks.clear()
            self._looks[asked] = meta.size(), meta.stride(), meta.dtype
        return meta

    def _from_values(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make_from_values(*args: Any, **kwargs: Any) -> Any:
            if kwargs.pop("pin_memory", False):
                # What goes to a device passes through pinned memory (`internal_new_from_data`, torch/csrc/utils/tensor_new.cpp).
                return self._noted(make_from_values(*args, **kwargs))
            if STATE.depth:
                return original(*args, **kwargs)
            index = self.index_of(kwargs.get("device"))
            source = next((arg for arg in args[-1:] if isinstance(arg, VirtualTensor)), None)
            if index is None and source is None:
                traced = self._traced(kwargs.get("device"))
                if traced is None:
                    return original(*args, **kwargs)
                requires_grad = kwargs.pop("requires_grad", False)
                made = original(*args, **{**kwargs, "device": _CPU}).to(traced)
                return made.requires_grad_() if requires_grad else made
            return self.from_values(original, index, args, kwargs)

        return make_from_values

    def _beside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def new_tensor(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            """On the tensor's device and with its type, unless the program says otherwise."""
            if isinstance(self, VirtualTensor) and not STATE.depth:
                kwargs["device"] = self.device if kwargs.get("device") is None else kwargs["device"]
                kwargs["dtype"] = self.dtype if kwargs.get("dtype") is None else kwargs["dtype"]
            return original(self, *args, **kwargs)

        return new_tensor

    def _new(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def new(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, VirtualTensor) and not STATE.depth:
                if self.layout is torch.sparse_coo and len(args) > 1:
                    # `torch.optim.SparseAdam` makes its updates so: indices, values, size.
                    return torch.sparse_coo_tensor(*args, check_invariants=False)
                return made_as_of_old(args, self.dtype, kwargs.get("device") or self.device)
            return original(self, *args, **kwargs)

        return new

    def _sparse(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # The place of the last argument that is a tensor's.
        most = 1 if original.__name__ == "sparse_coo_tensor" else 2

        def make_sparse(*args: Any, **kwargs: Any) -> Any:
            index = None if STATE.depth else self.index_of(kwargs.get("device"))
            if index is None:
                if any(isinstance(arg, VirtualTensor) for arg in (*args, *kwargs.values())):
                    return _unchecked(original, args, kwargs)
                return original(*args, **kwargs)
            del kwargs["device"]
            target = cuda(index)
            if not any(isinstance(arg, VirtualTensor) for arg in (*args, *kwargs.values())):
                tracked = kwargs.pop("requires_grad", False)
                made = original(*args, **kwargs).to(target)
                return made.requires_grad_() if tracked else made
            # (Numbers in lists are put on the host first.)
            parts = [arg if place > most else torch.as_tensor(arg).to(target) for place, arg in enumerate(args)]
            named = {name: arg.to(target) if isinstance(arg, torch.Tensor) else arg for name, arg in kwargs.items()}
            return _unchecked(original, parts, named)

        return make_sparse

    def from_values(self, original: Callable[..., Any], index: int | None, args: Any, kwargs: dict[str, Any]) -> Any:
        """`torch.tensor` and its like: the values are gathered on the host, then copied to the device."""
        data = args[-1] if args else kwargs.get("data")
        dtype = kwargs.get("dtype")
        requires_grad = kwargs.get("requires_grad", False)
        name = getattr(original, "__name__", "")
        if name == "asarray" and isinstance(data, torch.Tensor):
            asked = data.device if kwargs.get("device") is None else kwargs["device"]
            return _as_array(data, torch.device(asked) if index is None else cuda(index), kwargs)
        if isinstance(data, VirtualTensor):
            if kwargs.get("device") is not None and index is None:
                return data.detach().to(kwargs["device"], dtype or data.dtype).requires_grad_(requires_grad)
            target = data.device if index is None else cuda(index)
            if name == "as_tensor":
                return data.to(target, dtype or data.dtype)
            return data.detach().to(target, dtype or data.dtype, copy=True).requires_grad_(requires_grad)
        host_kwargs = {name: value for name, value in kwargs.items() if name not in _OF_THE_RESULT}
        host = original(*args, **host_kwargs, device=_CPU)
        if index is None:
            return host.requires_grad_(requires_grad) if requires_grad else host
        made = host.to(cuda(index))
        return aside(lambda: made.detach().requires_grad_(True)) if requires_grad else made

    def _device_context(self, original: Callable[..., Any], makers: set[Any]) -> Callable[..., Any]:
        """`with torch.device("cuda")` and `torch.set_default_device("cuda")`."""
        plain = {behind_relays(maker) for maker in makers}

        def answer(context: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            index = self.index_of(context.device) if func in makers and not STATE.depth else None
            if index is None or (kwargs or {}).get("device") is not None:
                return original(context, func, types, args, kwargs)
            if func not in plain:
                return func(*args, **{**(kwargs or {}), "device": context.device})
            name = getattr(func, "__name__", "")
            maker = self.from_values if name in _FROM_VALUES else self.make
            return maker(func, index, args, dict(kwargs or {}))

        return answer

    # ---- moving

    def _to(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if STATE.depth or (args and type(args[0]) is torch.dtype):
                return original(self, *args, **kwargs)
            first = args[0] if args else kwargs.get("device", kwargs.get("other"))
            if isinstance(first, VirtualTensor):
                args = (first.device, first.dtype, *args[1:])
                kwargs.pop("other", None)
                first = first.device
            elif type(first) is int and not args:
                kwargs["device"] = first = torch.device("cuda", first)
            index = factories.index_of(first)
            if index is None:
                traced = factories._traced(first)
                if traced is not None:
                    args, kwargs = ((traced, *args[1:]), kwargs) if args else (args, {**kwargs, "device": traced})
                elif isinstance(self, VirtualTensor) and _means_meta(first):
                    self = plain_meta(self)
                return original(self, *args, **kwargs)
            if type(self) not in _PLAIN and torch.overrides.has_torch_function((self,)):
                # The class has its word first, and comes back without it.
                return torch.overrides.handle_torch_function(torch.Tensor.to, (self,), self, *args, **kwargs)
            _check_kind(self)
            if self.layout is torch.jagged:
                return jagged.moved(self, index, args, kwargs)
            if self.is_nested:
                return nested_tensors.from_host(self, cuda(index), args, kwargs)
            if not kwargs and len(args) == 1:
                made = factories._engine.sent(self, index)
                if made is not NotImplemented:
                    return made
            # Not cuda:i: C++ would initialise CUDA, and remember for good that it has.
            device = numbered(index)
            if args:
                args = (device, *args[1:])
            else:
                kwargs["device"] = device
            with factories._engine.uninterrupted, pushed(factories._engine.mode):
                return original(self, *args, **kwargs)

        factories = self
        return to

    def _type_as(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def type_as(self: torch.Tensor, other: torch.Tensor) -> Any:
            if STATE.depth or not isinstance(other, VirtualTensor):
                return original(self, other)
            return self.to(other.device, other.dtype)

        return type_as

    # ---- changing size: dispatch does not see that

    def _resized(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def resize_tensor(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            out = original(self, *args, **kwargs)
            if isinstance(self, VirtualTensor) and not STATE.depth:
                with engine.uninterrupted, engine.lock, torch._C.DisableTorchFunctionSubclass(), origin("factory"):
                    engine.resized(self.untyped_storage(), self.element_size())
            return out

        engine = self._engine
        return resize_tensor

    def _storage_resized(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def resize_storage(self: torch.UntypedStorage, size: int) -> Any:
            out = original(self, size)
            if not STATE.depth:
                with engine.uninterrupted, engine.lock, origin("factory"):
                    engine.resized(self)
            return out

        engine = self._engine
        return resize_storage
