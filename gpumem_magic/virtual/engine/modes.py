"""The fake-tensor mode under the virtual GPU, and the dispatch mode that carries operators to it.

C++ asks a tensor for its device through the operator `prim.device`, Python through the property. C++ is answered ``meta:i`` for
``cuda:i``: every build of PyTorch has a device guard for meta, and the index survives, so that a factory call which comes
back from C++ with ``device=meta:i`` is known to be meant for ``cuda:i``.

Nothing here stays switched on: the dispatch mode is pushed for one operator (or one backward pass) and popped after it, so
host code runs at its own speed, a user's meta tensors stay meta, and every thread works.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.autograd.forward_ad
from torch._C import _get_dispatch_stack_at, _len_torch_dispatch_stack  # the active dispatch modes
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpumem_magic.devices.base import CodePlace
from gpumem_magic.looks.tensors import is_tracing, no_dispatch, no_functions
from gpumem_magic.private import aten
from gpumem_magic.tracebacks import cut_below_operator

_Made = TypeVar("_Made")

META = torch.device("meta")
_NUMBERED: dict[int, torch.device] = {}
_CUDA: dict[int, torch.device] = {}
DEVICE_QUERY = torch.ops.prim.device.default
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_DETACH = aten.detach.default
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_autocast, _transforms = torch._C._is_any_autocast_enabled, torch._C._are_functorch_transforms_active
# As it is without what the compiler's traces add to it (`compiler.tracing`), which each operator would pass.
_plain_dispatch = FakeTensorMode.dispatch


class ThreadState(threading.local):
    """What each thread is doing: inside a fake kernel, how deep in fake dispatch, in a backward pass, on which device last,

    how the memory that it asks for next came to be wanted (`DeviceLog.origins`), how far autograd had counted its nodes when
    one was last noted, a list for the operators that run, where somebody listens, and who does so for all of them, (operator,
    what it gives) where that is known before C++ asks, a list for the words of errors, where C++ would lose them, of the
    generated code that runs, line -> the program's place that it is for, and why an operator goes the way that it goes.
    """

    in_kernel = False
    depth = 0
    backward = 0
    sequence = -1
    last_device = 0
    origin = "compute"
    heard: list[Any] | None = None
    listener: Any = None
    given: tuple[Any, Any] | None = None
    words: list[str] | None = None
    generated_lines: Mapping[int, CodePlace] = MappingProxyType({})
    why = ""

    def note_error(self, error: Exception) -> None:
        if self.words is not None:
            self.words.append(str(error))


STATE = ThreadState()


def cuda(index: int) -> torch.device:
    """``cuda:index``. (While a virtual device is on, `torch.device` is something slower.)"""
    found = _CUDA.get(index)
    if found is None:
        found = _CUDA[index] = torch.device("cuda", index)
    return found


def numbered(index: int) -> torch.device:
    """``meta:index``, which is what C++ is told of ``cuda:index``."""
    found = _NUMBERED.get(index)
    if found is None:
        found = _NUMBERED[index] = torch.device("meta", index)
    return found


def is_ours(device: Any) -> bool:
    """Whether a device as C++ names it (a meta device with a number) is one of the virtual ones."""
    return device is not None and device.type == "meta" and device.index is not None


def cuda_for_meta(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keyword arguments with ``device=meta:i`` turned into ``cuda:i`` (an unnumbered one: the thread's last device)."""
    kwargs = dict(kwargs or {})
    device = kwargs.get("device")
    if device is not None and device.type == "meta":
        index = STATE.last_device if device.index is None else device.index
        kwargs["device"] = cuda(index)
    return kwargs


def with_dispatch_of_its_own(types: Any) -> bool:
    """Whether a tensor class of the program's own, which wraps others, is among the types of an operator's arguments.

    Not PyTorch's nested tensors, which are refused in words of our own.
    """
    for kind in types:
        if (
            not issubclass(kind, FakeTensor)
            and kind is not torch.Tensor
            and kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
        ):
            return True
    return False


def answer_device(tensor: Any) -> torch.device:
    """What C++ is told when it asks for the device of a virtual tensor."""
    if STATE.in_kernel:
        return META
    return numbered(tensor.fake_device.index)


class HostlessFakeMode(FakeTensorMode):
    """FakeTensorMode whose tensors say meta to C++ and cuda to Python, usable from several threads.

    `dispatch` and `in_kernel_invocation` are FakeTensorMode's own names.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _remember_none(self)

    @property
    def in_kernel_invocation(self) -> bool:
        return STATE.in_kernel

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        STATE.in_kernel = value

    def __deepcopy__(self, memo: Any) -> HostlessFakeMode:
        """Tensors hold it among their attributes, which programs copy that hand metadata on."""
        return self

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_QUERY:
            device = args[0].fake_device
            return answer_device(args[0]) if device.type == "cuda" else device
        if not STATE.in_kernel:
            kwargs = cuda_for_meta(kwargs)
        return _plain_dispatch(self, func, types, args, kwargs or {})


def _remember_none(mode: FakeTensorMode) -> None:
    """Lets a mode make tensors without keeping weak references to them, for which `torch.utils.swap_tensors` would refuse them.

    It makes each of a meta tensor of its own, which it will not see again. (Tried with PyTorch 2.13.)
    """
    mode.fake_tensor_converter.set_tensor_memo = lambda *of_which: None  # type: ignore[method-assign]


def _step_by_step(func: HigherOrderOperator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A higher-order operator by PyTorch's own rule for where no mode is on."""
    rule = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    if rule is None:
        raise NotImplementedError(
            f"the virtual GPU cannot run {func.__name__}, which only PyTorch's compiler understands. "
            "Use ordinary operators and Python's own if and for, or a real GPU."
        )
    return rule(*args, **kwargs)


class OperatorMode(TorchDispatchMode):
    """Hands every operator of the code that it is pushed around to `handle`.

    Modes of the program's own that lie below (counters, selective activation checkpointing) get their turn first: they hand on
    what they have seen, and the virtual tensors among the arguments bring it back here. A higher-order operator (`torch.cond`),
    for which PyTorch asks each mode, runs step by step, by its own rule.
    """

    supports_higher_order_operators = True

    def __init__(self, handle: Callable[..., Any], kind: type) -> None:
        """kind: the class of virtual tensors."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.handle = handle
        self._kind = kind

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper that keeps torch.compile away from this mode: it would cost more than the mode."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What was compiled stays compiled under this mode: in a backward pass that computes it anew, too."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            if func is DEVICE_QUERY and isinstance(args[0], self._kind):
                return answer_device(args[0])
            given = STATE.given
            if given is not None and given[0] is func:
                STATE.given = None
                return given[1]
            # A fake mode of PyTorch's own lies below all others: what is made under it has no memory.
            if _len_torch_dispatch_stack() and (types or torch._C._get_dispatch_mode(_FAKE) is not None):
                if func is _DETACH:
                    # (Where C++ copies a tensor that it saves, it asks past autograd, and PyTorch 2.9's would ask once more.)
                    with torch._C._ExcludeDispatchKeyGuard(_VIEWS):
                        return func(*args)
                return func(*args, **_as_python_says(kwargs))
            if not types and isinstance(func, HigherOrderOperator):
                return _step_by_step(func, args, kwargs or {})
            if has_others(self):
                # No tensor of the device is there that would bring it back.
                with _below_all(self):
                    return func(*args, **_as_python_says(kwargs))
            if types and with_dispatch_of_its_own(types):
                # It unwraps its tensors, and brings them here.
                return NotImplemented
            return self.handle(func, types, args, kwargs or {})
        except Exception as error:
            STATE.note_error(error)
            __tracebackhide__, args, kwargs = True, (), {}
            raise cut_below_operator(error)  # noqa: B904


def _as_python_says(kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The keyword arguments as a program's own mode is to see them: with the device that Python knows."""
    return cuda_for_meta(kwargs) if kwargs and is_ours(kwargs.get("device")) else kwargs or {}


@contextmanager
def _below_all(mode: TorchDispatchMode) -> Iterator[None]:
    """The mode below all dispatch modes that are on: it gets what they hand on."""
    above = _taken_off()
    _put_on([*above, mode])
    try:
        yield
    finally:
        for _ in (mode, *above):
            torch._C._pop_torch_dispatch_stack(None)
        _put_on(above)


def _taken_off() -> list[TorchDispatchMode]:
    """The dispatch modes that were on, from the top."""
    return [torch._C._pop_torch_dispatch_stack(None) for _ in range(_len_torch_dispatch_stack())]


def _put_on(modes: list[TorchDispatchMode]) -> None:
    for mode in reversed(modes):
        torch._C._push_on_torch_dispatch_stack(mode)


def aside(call: Callable[..., _Made], /, *args: Any, **kwargs: Any) -> _Made:
    """What `call` returns where no mode of the program's own sees what it calls. Modes of PyTorch's, which trace programs, stay.

    A function, as `made_plainly` is.
    """
    with no_functions():
        modes: list[TorchDispatchMode] = []
        try:
            if has_others(None):
                modes = _taken_off()
            return call(*args, **kwargs)
        finally:
            _put_on(modes)


def made_plainly(make: Callable[..., _Made], /, *args: Any, **kwargs: Any) -> _Made:
    """What `make` returns where this thread makes no virtual tensors: plain ones, on the meta device.

    A function, not a context manager: no Ctrl-C comes between the number and the block that counts it back.
    """
    STATE.depth += 1
    try:
        return make(*args, **kwargs)
    finally:
        STATE.depth -= 1


class ThreadFlag(threading.local):
    """Whether something is under way in this thread."""

    is_up = False

    @contextmanager
    def raised(self) -> Iterator[None]:
        before, self.is_up = self.is_up, True
        try:
            yield
        finally:
            self.is_up = before


@contextmanager
def because(why: str) -> Iterator[None]:
    """Why this thread goes the way that it goes inside, where there are others: noted with what it allocates (`Birth.why`)."""
    before, STATE.why = STATE.why, why
    try:
        yield
    finally:
        STATE.why = before


# What a compiler tries kernels with.
TRIAL = "trial"


@contextmanager
def origin(kind: str) -> Iterator[None]:
    """What this thread allocates inside is noted as `kind`; tensors that a trial makes as the trial's."""
    before = STATE.origin
    if (before, kind) != (TRIAL, "factory"):
        STATE.origin = kind
    try:
        yield
    finally:
        STATE.origin = before


def unseen() -> Any:
    """``with no_functions(), unseen():`` - inside, plain tensors are made and looked at, and nobody's modes see it. Where no mode
    is on, that takes a tenth of the time: C++'s guard of dispatch is one of pybind11's."""
    return no_dispatch() if _len_torch_dispatch_stack() else no_functions()


def undisturbed() -> bool:
    """Whether neither modes nor autocast nor transforms of this thread would see an operator on plain tensors."""
    return not (_len_torch_dispatch_stack() or _autocast() or _transforms())


def seen_by_others() -> bool:
    """Whether a trace, the compiler or a pass of tangents would see an operator on plain tensors."""
    return is_tracing() or get_eval_frame_callback() is not None or torch.autograd.forward_ad._current_level >= 0


def has_others(mode: TorchDispatchMode | None) -> bool:
    """Whether a dispatch mode of the program's is on beside ours, and none of PyTorch's own, which trace programs."""
    modes = [_get_dispatch_stack_at(place) for place in range(_len_torch_dispatch_stack())]
    return any(one is not mode for one in modes) and all(getattr(one, "_mode_key", None) is None for one in modes)


class pushed:
    """The mode on top of this thread's dispatch modes, with tensor subclasses' own function overrides off.

    `torch._C._push_on_torch_dispatch_stack` is what `TorchDispatchMode.__enter__` ends in; entering the slow way, or a generator,
    would cost more than the operator. Twice would hand each operator to the mode again from inside its own handling.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        self._mode = mode
        self._off = torch._C.DisableTorchFunctionSubclass()

    def __enter__(self) -> None:
        on_top = _len_torch_dispatch_stack()
        self._is_new = not on_top or _get_dispatch_stack_at(on_top - 1) is not self._mode
        try:
            self._off.__enter__()
            if self._is_new:
                torch._C._push_on_torch_dispatch_stack(self._mode)
        except BaseException:  # a Ctrl-C behind one of the calls
            self._is_new = _len_torch_dispatch_stack() > on_top
            self.__exit__()
            raise

    def __exit__(self, *_: Any) -> None:
        try:
            if self._is_new:
                torch._C._pop_torch_dispatch_stack(None)
        finally:
            self._off.__exit__(None, None, None)
