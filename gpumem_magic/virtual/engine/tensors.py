"""The virtual tensor: shape, dtype and storage identity on a virtual device, and no data."""

from __future__ import annotations

import functools
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from operator import attrgetter
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch._C import _len_torch_dispatch_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import handle_torch_function

from gpumem_magic.looks.objects import is_a
from gpumem_magic.patching import behind_relays
from gpumem_magic.tracebacks import cut, cut_below_c, cut_below_operator
from gpumem_magic.uninterrupted import Uninterrupted
from gpumem_magic.virtual.engine import function_modes, running_ends
from gpumem_magic.virtual.engine.attributes import Attributes
from gpumem_magic.virtual.engine.mismatch import check_generator
from gpumem_magic.virtual.engine.modes import (
    DEVICE_QUERY,
    META,
    STATE,
    HostlessFakeMode,
    OperatorMode,
    answer_device,
    made_plainly,
    pushed,
    with_dispatch_of_its_own,
)
from gpumem_magic.virtual.engine.older_functions import LETTING_GO_FROM
from gpumem_magic.virtual.engine.views_anew import WRITTEN, after_function, before_function

_NOTHING = nullcontext()
# What runs no Python of the program's, so that it is over soon.
_OF_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
# What does no more in Python than call such functions, as its arguments alone say (torch/_tensor.py, nn/functional.py and
# functional.py of 2.13): it warns of nothing, and draws nothing.
_ONLY_HANDING_ON = frozenset(
    (
        torch.Tensor.__rsub__, torch.Tensor.__rdiv__, torch.Tensor.__rpow__, torch.Tensor.__pow__, torch.Tensor.__floordiv__,
        torch.Tensor.norm, torch.functional.norm, F.layer_norm, F.rms_norm, F.group_norm, F.embedding, F.relu, F.silu, F.elu,
        F.leaky_relu, F.normalize,
    )
)  # fmt: skip


class TensorEngine(Protocol):
    """What tensors, and kernels of libraries, ask of the engine that runs operators on them."""

    mode: OperatorMode
    fake: HostlessFakeMode
    uninterrupted: Uninterrupted
    computes: bool
    # Functions of Python's that are shown to `otherwise` before they run.
    seen: Collection[Any]
    largest_sizes: Counter[str]
    other_sizes: Counter[str]
    kernels_not_run: int
    # Kernels of libraries that were not computed although the device computes; their results are zeros.
    unknown: set[str]

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any: ...

    def at_once(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function gives where that is found out at once; else NotImplemented."""

    def address_of(self, tensor: VirtualTensor) -> int: ...

    def record_stream(self, tensor: VirtualTensor, stream: Any) -> None: ...

    def refuse_overwritten(self, *arguments: Any) -> None:
        """Raises what PyTorch says of a CUDA graph's result whose memory a later run has taken."""

    def otherwise(self, func: Any, args: Any) -> Any:
        """What one of `OTHERWISE` gives where the device runs it in another way; else None."""

    def of_device(self, func: Any, args: Any) -> Any:
        """One of `OTHERWISE` as the device's PyTorch has it."""

    def host_of(self, tensor: VirtualTensor) -> torch.Tensor | None:
        """The tensor's values, as a host tensor that is not to be kept; None where they are not known for sure."""

    def known(self, tensor: VirtualTensor) -> Any:
        """What is known of its values (`values.Known`), or None."""

    def learn(self, tensor: VirtualTensor, host: torch.Tensor) -> None:
        """A new tensor has these values."""

    def guess(self, tensor: VirtualTensor, host: torch.Tensor, sure: bool = False) -> None:
        """A new tensor is taken to have these values. sure: nothing is to be said of it."""

    def supply(self, tensor: VirtualTensor, host: torch.Tensor) -> None:
        """The user says what its values are."""

    def forget(self, tensor: VirtualTensor) -> None:
        """Its values are not known any more."""


def engine_of(tensor: VirtualTensor) -> TensorEngine:
    engine: TensorEngine = tensor.fake_mode.engine  # type: ignore[attr-defined]
    return engine


# The name under which a class for virtual tensors keeps the program's own, which tensors on the host are of.
OWN = "_gpumem_own"
# The names under which a tensor's own dictionary keeps that its values may be known, that it holds the answers to a check, what
# unknown values are taken to be, how many a mask has selected, and which mask's count it is (`values.Tally`).
KNOWN = "_gpumem_known"
CHECKED = "_gpumem_checked"
GUESS = "_gpumem_guess"
TALLY = "_gpumem_tally"
COUNT = "_gpumem_count"

_NO_MEMORY = (
    "a tensor on a virtual GPU has no memory to share. Hand the library a copy on the host (tensor.cpu()), or run this line on a "
    "real GPU."
)

# Functions that run in another way than here: in older versions, or for tensors that are no subclass.
OTHERWISE: set[Any] = {
    torch.Tensor.__getitem__,
    torch.Tensor.__setitem__,
    torch.functional.einsum,
    running_ends.KEEPING,
    *LETTING_GO_FROM,
}

# What virtual tensors answer themselves, and modes of the program's own hear of.
_HEARD = (
    "device", "is_cuda", "is_meta", "is_cpu", "get_device", "data_ptr", "tolist", "numpy", "__array__", "__repr__", "__format__",
    "__deepcopy__", "__reduce_ex__", "pin_memory", "is_pinned", "record_stream", "type", "share_memory_", "is_shared",
)  # fmt: skip
_fake_device_of: Any = vars(FakeTensor)["device"].fget

# PyTorch's functions in Python, by their code: those above, and what a tool's wrapper stands for.
_BY_CODE: dict[CodeType, Any] = {one.__code__: one for one in OTHERWISE if isinstance(one, FunctionType)}

# What PyTorch's fake tensors, and we, keep in a tensor's own dictionary, apart from what users put there.
_FAKE_ATTRIBUTES = {
    "_fake_device", "fake_device", "fake_mode", "constant", "real_tensor", "pytype", "dispatch_keys", "_is_param", "_debug_trace",
    "_nonzero_memo", "_item_memo", "_unique_memo", "_unique_consecutive_memo", "_nested_int_memo", KNOWN,
    CHECKED, GUESS, TALLY, COUNT,
    "_nonzero_memo_vc", "_item_memo_vc", "_unique_memo_vc", "_unique_consecutive_memo_vc", "_nested_int_memo_vc",
    "_nonzero_memo_epoch", "_item_memo_epoch", "_unique_memo_epoch", "_unique_consecutive_memo_epoch", "_nested_int_memo_epoch",
}  # fmt: skip


def _behind_a_wrapper(func: FunctionType, caller: FrameType) -> Any:
    """The function that was called. PyTorch's functions in Python hand themselves on by their public names; where a tool that
    counts has put a wrapper under one, that was called before, and is not to be called again."""
    frame: FrameType | None = caller
    if caller.f_code is handle_torch_function.__code__:
        frame = caller.f_back
    if frame is None or frame.f_globals.get(frame.f_code.co_name) is not func or frame.f_code is func.__code__:
        return func
    code = frame.f_code
    if code not in _BY_CODE and not code.co_freevars:
        _BY_CODE[code] = FunctionType(code, frame.f_globals)
    return _BY_CODE.get(code, func)


def own_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What the program put on the tensor object. (A host tensor may have been given all that another's dictionary held.)"""
    return {name: value for name, value in all_attributes(tensor).items() if name not in _FAKE_ATTRIBUTES}


def our_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What a card's tensor would not have there."""
    return {name: value for name, value in all_attributes(tensor).items() if name in _FAKE_ATTRIBUTES}


_DICTIONARY: Any = next(vars(kind)["__dict__"] for kind in torch.Tensor.__mro__ if "__dict__" in vars(kind))
# A tensor's dictionary with all that is in it: of a virtual one ``tensor.__dict__`` is what a program sees.
all_attributes: Callable[[torch.Tensor], dict[str, Any]] = _DICTIONARY.__get__


def put_attributes(tensor: torch.Tensor, own: dict[str, Any], ours: dict[str, Any]) -> None:
    """Gives a tensor another dictionary."""
    _DICTIONARY.__set__(tensor, own | ours)


def _put_dictionary(tensor: torch.Tensor, given: dict[str, Any]) -> None:
    """``tensor.__dict__ = given``: PyTorch keeps nothing there on a card, and what is kept there here stays."""
    own = {name: value for name, value in given.items() if name not in _FAKE_ATTRIBUTES}
    put_attributes(tensor, own, our_attributes(tensor))


def _seen_dictionary(tensor: torch.Tensor) -> Attributes:
    return Attributes(all_attributes(tensor), _FAKE_ATTRIBUTES)


# What a program finds under ``tensor.__dict__`` and by `vars`, and hands on so.
_OWN_DICTIONARY = property(_seen_dictionary, _put_dictionary)


def own_class(kind: Any) -> Any:
    """The class that tensors of a virtual device's class have on the host: PyTorch's, or the program's own."""
    return getattr(kind, OWN)


def _on_a_copied_storage(tensor: VirtualTensor, memo: dict[int, Any]) -> Any:
    """Tensors that share a storage go on sharing one, whose size is that of the whole."""
    storages = memo.setdefault(id(VirtualTensor), {})
    storage = tensor.untyped_storage()
    flat = storages.get(storage._cdata)
    if flat is None:
        flat = tensor.new_empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).clone()
        storages[storage._cdata] = flat
    # As PyTorch: a tensor of one element, which the copied storage then takes the place of.
    return tensor.new_empty(()).set_(flat.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The other: of the tensor's class on the host, a parameter where the tensor is one, tracked where it is, and with what the
    program put on it."""
    own = own_class(type(tensor))
    if not is_ordinary(tensor) and not isinstance(other, VirtualTensor):
        other = other.as_subclass(own)
        with torch._C.DisableTorchFunctionSubclass():
            # (The class may ask for what the program put on it.)
            other.requires_grad_(tensor.requires_grad)
    elif isinstance(tensor, torch.nn.Parameter):
        other = torch.nn.Parameter(other, requires_grad=tensor.requires_grad)
    else:
        other.requires_grad_(tensor.requires_grad)
    all_attributes(other).update(own_attributes(tensor))
    return other


class _StoragesBeingSaved(threading.local):
    """While `torch.save` runs in a thread: the host storages that stand for device storages, and where those are."""

    twins: dict[int, torch.UntypedStorage] | None = None
    places: dict[int, str] | None = None


_saving = _StoragesBeingSaved()


@contextmanager
def saved_storages() -> Iterator[None]:
    """Inside, tensors that share a storage are pickled with one, and `place_of` knows where it was."""
    before = _saving.twins, _saving.places
    _saving.twins, _saving.places = {}, {}
    try:
        yield
    finally:
        _saving.twins, _saving.places = before


def place_of(host_storage: int) -> str | None:
    """The device (``cuda:0``) that a host storage stands for in the running `torch.save`; None for others. By `_cdata`."""
    return None if _saving.places is None else _saving.places.get(host_storage)


def _host_twin(tensor: VirtualTensor) -> torch.Tensor:
    """A host tensor of zeros (or known values), on a storage of its own or, in `torch.save`, on the shared one."""
    if _saving.twins is None or _saving.places is None:
        return tensor.detach().cpu()
    storage = tensor.untyped_storage()
    twin = _saving.twins.get(storage._cdata)
    engine = engine_of(tensor)
    known = engine.host_of(tensor)
    if known is not None and known.untyped_storage().nbytes() >= storage.nbytes():
        twin = known.untyped_storage()
        _saving.places[twin._cdata] = str(tensor.device)
    if twin is None:
        twin = torch.zeros(storage.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()
        _saving.twins[storage._cdata] = twin
        _saving.places[twin._cdata] = str(tensor.device)
    host = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
        twin, int(tensor.storage_offset()), tensor.size(), tensor.stride()
    )
    found = engine.known(tensor)
    if found is not None and found.host.untyped_storage()._cdata != twin._cdata:
        host.copy_(found.host)
    return host


class VirtualKind(type(torch.Tensor)):  # type: ignore[misc]
    """Of classes of virtual tensors: they equal those that their tensors have on the host, as programs compare types by ``==``
    and look them up in tables."""

    def __eq__(cls, other: object) -> bool:
        if other is cls or other is None or other is not vars(cls).get(OWN):
            return other is cls
        # `functools.singledispatch` merges lists of classes by ``==``, in which both are.
        return sys._getframe(1).f_globals.get("__name__") != "functools"

    def __hash__(cls) -> int:
        own = vars(cls).get(OWN)
        return type.__hash__(cls) if own is None else hash(own)


# The engines whose tensors may have to be told again what they are.
ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()
# Since when a tensor that C++ holds keeps its dictionary when Python collects what held it besides (a module that was traced).
# (2.9 lets go of it, 2.13 does not; between them it is not known.)
_KEEPS_DICTIONARY = torch.__version__ >= "2.13"


def _told_again(tensor: Any, name: str) -> Any:
    """What a virtual tensor's dictionary held of its device, put there anew by where its storage is."""
    if name in ("fake_mode", "fake_device", "_fake_device"):
        with torch._C.DisableTorchFunctionSubclass():
            storage = tensor.untyped_storage()
        for engine in list(ENGINES):
            found = engine.table.find(storage)
            if found is not None:
                all_attributes(tensor).update(engine.alike.attributes(found.device))
                return all_attributes(tensor)[name]
    raise AttributeError(f"'{type(tensor).__name__}' object has no attribute '{name}'")


class VirtualTensor(FakeTensor, metaclass=VirtualKind):
    """A tensor on ``cuda:i`` of the virtual GPU.

    A fake tensor of PyTorch's own whose class was changed after it was made: `FakeTensor` itself stays as it is, for
    torch.compile and whoever else uses it.
    """

    @staticmethod
    def __new__(cls: Any, data: torch.Tensor, requires_grad: bool = True, **kwargs: Any) -> Any:
        """``type(parameter)(tensor)`` is how libraries make a parameter like another, and a class of the program's makes one of
        its own so; all others come from `Engine`."""
        if cls is not VirtualTensor and cls is not VirtualParameter:
            return torch.Tensor.__new__(vars(cls)[OWN], data)
        return torch.nn.Parameter(data, requires_grad=requires_grad)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """All is there already."""

    _gpumem_own: type[torch.Tensor] = torch.Tensor
    __dict__ = _OWN_DICTIONARY

    _asked: Any = vars(FakeTensor).get("fake_device")
    if isinstance(_asked, property):
        # (2.13.) The same without a step of Python's: each operator asks for it several times.
        fake_device = property(attrgetter("_fake_device"), _asked.fset)
    del _asked

    if not _KEEPS_DICTIONARY:
        __getattr__ = _told_again

    # Whether results of operators on it are of its class, too: it is one of the program's own (`wrappers`).
    keeps_class = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        engine = engine_of(args[0]) if args and type(args[0]) is VirtualTensor else _engine_among(args, kwargs)
        if engine is None:
            return NotImplemented
        ordinary = _are_ordinary(types)
        if not ordinary:
            keeper = (
                cls if cls.keeps_class else next((kind for kind in types if getattr(kind, "keeps_class", False)), None)
            )
            if keeper is not None:
                # What PyTorch does for such a class: the results are of it. (Parameters have no say in functions.)
                types = tuple(kind for kind in types if kind is not VirtualParameter)
                func, args, kwargs = _plain_handler, (keeper, func, types, args, kwargs or {}), {}
            elif any(_speaks_for_itself(kind) for kind in types):
                return _spoken(
                    func,
                    [kind for kind in types if kind is not VirtualTensor and kind is not VirtualParameter],
                    args,
                    kwargs,
                )
        if type(func) is FunctionType:
            func = _behind_a_wrapper(func, sys._getframe(1))
        # (C++ sets `_backward_hooks` while it makes a view's node anew, under a lock that asking for the node would wait for.)
        is_attribute = type(func) is MethodWrapperType
        try:
            if is_attribute and func.__name__ == "__get__":
                # (An attribute: what C++ runs for one has a tensor among its arguments.)
                with pushed(engine.mode) if _len_torch_dispatch_stack() else torch._C.DisableTorchFunctionSubclass():
                    return func(*args)
            if WRITTEN.before and not is_attribute:
                before_function((*args, *kwargs.values()) if kwargs else args)
            if kwargs and "generator" in kwargs:
                # (C++ hands another object on, which does not know what it is for.)
                check_generator(kwargs["generator"], "cuda")
            if func in engine.seen:
                if func in _OWN_METHODS:
                    return _OWN_METHODS[func](*args, **(kwargs or {}))
                found = engine.otherwise(func, args)
                if found is not None:
                    return found
                func = engine.of_device(func, args)
            if (
                engine.computes
                and ordinary
                and (type(plain := behind_relays(func)) in _OF_C or plain in _ONLY_HANDING_ON)
            ):
                # (Which cannot run Python of the program's. What we put in its place was called before.)
                found = engine.at_once(plain, args, kwargs)
                if found is not NotImplemented:
                    if WRITTEN.now:
                        after_function()
                    return found
            # C++ asks Python for an operator's rule where it can't pass on an exception: a Ctrl-C there would end the process.
            waits = engine.uninterrupted if is_a(func, _OF_C) else _NOTHING
            with waits, pushed(engine.mode):
                out = func(*args, **(kwargs or {}))
            if WRITTEN.now and not is_attribute:
                after_function()
            return out
        except Exception as error:
            __tracebackhide__, args, kwargs = True, (), {}
            if isinstance(error, RuntimeError) and error.args and _META_WORDS.search(str(error.args[0])):
                # C++ names the device that it was told of.
                error.args = (_named_cuda(str(error.args[0])), *error.args[1:])
            raise (cut_below_c if is_a(func, _OF_C) else cut)(error)  # noqa: B904

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is DEVICE_QUERY:
            return answer_device(args[0])
        engine = _engine_among(args, kwargs)
        if engine is None or with_dispatch_of_its_own(types):
            return NotImplemented
        try:
            with torch._C.DisableTorchFunction():
                if STATE.depth:
                    # A part of a shape rule: its results have no memory.
                    return engine.fake.dispatch(func, types, args, kwargs)
                return engine.handle(func, types, args, kwargs or {})
        except Exception as error:
            STATE.note_error(error)
            __tracebackhide__, args, kwargs = True, (), {}
            raise cut_below_operator(error)  # noqa: B904

    @property  # type: ignore[misc]
    def device(self) -> torch.device:  # type: ignore[override]
        place: torch.device = _fake_device_of(self)
        return place

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return int(self.fake_device.index)

    def dim_order(self, *, ambiguity_check: Any = False) -> Any:
        """(PyTorch leaves that argument out where it hands a subclass the call.)"""
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.dim_order(self, ambiguity_check=ambiguity_check)

    def data_ptr(self) -> int:
        """The address that the emulated allocator gave, plus the view's offset: for comparing, never for reading."""
        engine = engine_of(self)
        engine.refuse_overwritten(self)
        return engine.address_of(self)

    def const_data_ptr(self) -> int:
        return self.data_ptr()

    def tolist(self) -> Any:
        """Stand-in values in the tensor's shape."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        __tracebackhide__ = True
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = tuple(self.shape)
        words = [f"size={shape}", f"dtype={str(self.dtype).removeprefix('torch.')}", f"device='{self.device}'"]
        if self.grad_fn is not None:
            words.append(f"grad_fn=<{type(self.grad_fn).__name__}>")
        elif self.requires_grad:
            words.append("requires_grad=True")
        engine = engine_of(self)
        engine.refuse_overwritten(self)
        # (A shape rule may put tensors into a message, where printing values would itself be shaped.)
        host = None if STATE.depth else engine.host_of(self)
        if host is None:
            text = f"tensor(..., {', '.join(words)})  # virtual GPU: no values"
        else:
            text = _with_device(repr(host), [words[2], *words[3:]])
        return f"Parameter containing:\n{text}" if isinstance(self, torch.nn.Parameter) else text

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if isinstance(self, torch.nn.Parameter):
            # As PyTorch: the values alone, without gradient and attributes.
            with torch.no_grad():
                values = self.detach().clone(memory_format=torch.preserve_format)
            copied = torch.nn.Parameter(values, requires_grad=self.requires_grad)
            memo[id(self)] = copied
            return copied
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment.  "
                "If you were attempting to deepcopy a module, this may be because of a torch.nn.utils.weight_norm usage"
            )
        with torch.no_grad():
            # (A sparse tensor in coordinates has no storage of its own: PyTorch clones it.)
            copy = self.detach().clone() if self.is_sparse else _on_a_copied_storage(self, memo)
        copy.requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        all_attributes(copy).update(deepcopy(own_attributes(self), memo))
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)
        return copy

    def __copy__(self) -> Any:
        """A tensor of its own on the same storage."""
        return _like(self, self.detach())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a host tensor (of zeros where there are no values), which goes to its device where it is read.
        `torch.save` has its own, careful way (see `saving`)."""
        host = _like(self, self.detach().cpu() if self.layout is not torch.strided else _host_twin(self))
        if _saving.twins is not None:
            return host.__reduce_ex__(protocol)
        return _read_again, (host, str(self.device))

    def pin_memory(self, *args: Any) -> Any:
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")

    def is_pinned(self, *args: Any) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:
        engine_of(self).record_stream(self, stream)

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is not None:
            return super().type(dtype, non_blocking, **kwargs)
        return TYPE_NAMES.get(self.dtype, f"torch.cuda.{self.dtype}")

    def share_memory_(self) -> Any:
        return self

    def is_shared(self) -> bool:
        """As of any device's memory."""
        return True

    @property
    def __cuda_array_interface__(self) -> Any:
        raise AttributeError(_NO_MEMORY)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise BufferError(_NO_MEMORY)


# What a virtual tensor answers in Python, by PyTorch's functions for it.
_OWN_METHODS: dict[Any, Any] = {}


def _asked_first(name: str, method: Any) -> Any:
    """The same, of which function modes are asked first. An error of what is C++'s on a card keeps no tensor alive."""
    of_c = isinstance(getattr(torch.Tensor, name), MethodDescriptorType)

    def asked(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            if function_modes.are_on():
                return function_modes.ask(getattr(torch.Tensor, name), method, (self, *args), kwargs)
            return method(self, *args, **kwargs)
        except Exception as error:
            if not of_c:
                raise
            self, args, kwargs = None, (), {}
            raise cut(error)  # noqa: B904

    def answered(self: Any) -> Any:
        if function_modes.are_on():
            return function_modes.ask(getattr(torch.Tensor, name).__get__, method.fget, (self,), {})
        return method.fget(self)

    if isinstance(method, property):
        return property(answered)
    _OWN_METHODS[getattr(torch.Tensor, name)] = method
    return functools.update_wrapper(asked, method)


for _name, _method in list(vars(VirtualTensor).items()):
    if _name in _HEARD:
        setattr(VirtualTensor, _name, _asked_first(_name, _method))
del _name, _method
OTHERWISE |= set(_OWN_METHODS)


class ParameterKind(VirtualKind, type(torch.nn.Parameter)):  # type: ignore[misc]
    """Of classes of virtual parameters."""


class VirtualParameter(VirtualTensor, torch.nn.Parameter, metaclass=ParameterKind):
    """A parameter on a virtual device: a tensor as any other, of which programs and tools print the class and ask
    ``issubclass``."""

    _gpumem_own = torch.nn.Parameter
    _is_param = True


def plain_meta(tensor: VirtualTensor) -> torch.Tensor:
    """An ordinary meta tensor with the virtual tensor's shape, strides and dtype."""
    return made_plainly(torch.empty_strided, tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)


def is_ordinary(thing: Any) -> bool:
    """Whether it is a virtual tensor or parameter, of no class of the program's own."""
    kind = type(thing)
    return kind is VirtualTensor or kind is VirtualParameter


# Libraries that know arrays of many kinds (opt_einsum, autoray) go by where a class says that it is from.
for _kind, _as in ((VirtualTensor, torch.Tensor), (VirtualParameter, torch.nn.Parameter)):
    _kind.__module__, _kind.__name__, _kind.__qualname__ = _as.__module__, _as.__name__, _as.__qualname__
del _kind, _as


def _read_again(host: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor out of a pickle, on its device."""
    with torch.no_grad():
        moved = host.to(device)
    if isinstance(host, torch.nn.Parameter):
        moved = torch.nn.Parameter(moved, requires_grad=host.requires_grad)
    else:
        moved.requires_grad_(host.requires_grad)
    all_attributes(moved).update(all_attributes(host))
    return moved


def _with_device(text: str, words: list[str]) -> str:
    """The text of a host tensor as that of one on the device: its device comes after the values, its gradient's words last.

    As PyTorch breaks lines: before the words where they do not fit beside the values.
    """
    number = text.find(",") if "," in text else len(text) - 1
    end = text.rfind("]") + 1 or number
    contents, rest = text[:end], text[end:-1].strip(", \n")
    suffixes = [words[0], *([rest] if rest else []), *words[1:]]
    width = torch._tensor_str.PRINT_OPTS.linewidth
    lines, last = [contents], len(contents.rpartition("\n")[2])
    for suffix in suffixes:
        breaks = last + len(suffix) + 2 > width
        last = len("tensor(") + len(suffix) if breaks else last + len(suffix) + 2
        lines.append(f",\n{' ' * len('tensor(')}{suffix}" if breaks else f", {suffix}")
    return "".join(lines) + ")"


class plainly:
    """Inside, virtual tensors of the program's own classes are plain: PyTorch's shape rules in Python would call such a class's
    methods. A class, as a generator takes longer."""

    def __init__(self, *arguments: Any) -> None:
        self._changed: list[tuple[Any, type]] = []
        self._look(arguments)

    def _look(self, arguments: Any) -> None:
        for one in arguments:
            kind = type(one)
            if kind is tuple or kind is list:
                self._look(one)
            elif kind is not VirtualTensor and kind is not VirtualParameter and isinstance(one, VirtualTensor):
                self._changed.append((one, kind))

    def __enter__(self) -> None:
        for one, _ in self._changed:
            one.__class__ = VirtualTensor

    def __exit__(self, *error: Any) -> None:
        for one, kind in self._changed:
            one.__class__ = kind


_META_WORDS = re.compile("meta|Meta")
_META_NAME = re.compile(r"\bmeta:(\d+)")
# As `Tensor::toString` has a tensor's type (ATen/core/Tensor.cpp).
_META_TYPE = re.compile(r"\bMeta([A-Z]\w*)Type\b")


def _named_cuda(text: str) -> str:
    """An error's text with the device's name in place of that which C++ was told."""
    text = _META_TYPE.sub(r"torch.cuda.\1Tensor", _META_NAME.sub(r"cuda:\1", text))
    return text.replace("device type 'meta'", "device type 'cuda'")


TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float64: "torch.cuda.DoubleTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.uint8: "torch.cuda.ByteTensor",
    torch.int8: "torch.cuda.CharTensor",
    torch.int16: "torch.cuda.ShortTensor",
    torch.int32: "torch.cuda.IntTensor",
    torch.int64: "torch.cuda.LongTensor",
    torch.bool: "torch.cuda.BoolTensor",
}

_plain_handler = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
# Tensor's own handler and Parameter's: anything else that overrides functions must get its turn first.
_PLAIN_HANDLERS = {_plain_handler, VirtualTensor.__torch_function__.__func__}  # type: ignore[attr-defined]


# How many classes `is_ordinary` knows. (C++ names each once.)
_OURS = 2


def _are_ordinary(types: Any) -> bool:
    """Whether nobody but PyTorch has a say in a function of such tensors."""
    first, last = types[0], types[-1]
    return (
        len(types) <= _OURS
        and (first is VirtualTensor or first is VirtualParameter)
        and (last is VirtualTensor or last is VirtualParameter)
    )


def _speaks_for_itself(kind: type) -> bool:
    handler = kind.__torch_function__  # type: ignore[attr-defined]
    return (
        getattr(handler, "__func__", None) not in _PLAIN_HANDLERS
        and handler is not torch._C._disabled_torch_function_impl
    )


def _spoken(func: Any, kinds: list[type], args: Any, kwargs: Any) -> Any:
    """What the other classes say of a function, in whose `types` a plain tensor's class would not be."""
    for kind in kinds:
        found = kind.__torch_function__(func, kinds, args, kwargs)  # type: ignore[attr-defined]
        if found is not NotImplemented:
            return found
    return NotImplemented


def _engine_among(args: Any, kwargs: Any) -> TensorEngine | None:
    """The engine of the first virtual tensor among the arguments, lists and tuples included."""
    for arg in args:
        if isinstance(arg, VirtualTensor):
            return engine_of(arg)
        if isinstance(arg, (list, tuple)):
            found = _engine_among(arg, None)
            if found is not None:
                return found
    for arg in (kwargs or {}).values():
        found = _engine_among((arg,), None)
        if found is not None:
            return found
    return None
