"""Operators on the host's side of a virtual GPU that computes, below autograd and unseen by anybody's modes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch._decomp import decomposition_table

from gpumem_magic.virtual.engine.calls import sparse_layout, views_resolved, without_excluding
from gpumem_magic.virtual.engine.half_precision import HALF
from gpumem_magic.virtual.engine.random import DeviceRandom
from gpumem_magic.virtual.engine.refusals import CannotRun
from gpumem_magic.virtual.engine.storage import Placement
from gpumem_magic.virtual.engine.twins import mapped

_Function = Callable[..., Any]


class Equivalent(NamedTuple):
    """What the host does in place of an operator.

    gives: the number of the result with which something is kept for the gradient; the function returns (results, that). takes:
    the number of the argument with which it was kept; the function gets it as its first argument. always: whether the host must
    not even run what the program called, and that came down to the operator.
    """

    function: _Function
    gives: int | None
    takes: int | None
    always: bool


EQUIVALENT: dict[Any, Equivalent] = {}
# Of operators that were run, by their `id`: whether they have no equivalent, and draw no random numbers; and the operator.
_PLAIN: dict[int, tuple[bool, Any]] = {}


def equivalent(
    *functions: Any, gives: int | None = None, takes: int | None = None, always: bool = False
) -> Callable[[_Function], _Function]:
    """Registers what the host does in place of an operator: a function with its arguments and results, on host tensors."""

    def register(function: _Function) -> _Function:
        for one in functions:
            EQUIVALENT[one] = Equivalent(function, gives, takes, always)
        return function

    return register


# What it does in place of an operator of two sparse tensors, which dense ones don't share.
OF_SPARSE: dict[Any, _Function] = {}


def of_sparse(*functions: Any) -> Callable[[_Function], _Function]:
    """Registers what the host does in place of an operator where both arguments are sparse (coordinate format)."""

    def register(function: _Function) -> _Function:
        OF_SPARSE.update(dict.fromkeys(functions, function))
        return function

    return register


def is_plain(func: Any) -> bool:
    """Whether the host does as the operator says, and draws no random numbers."""
    known = _PLAIN.get(id(func))
    if known is not None:
        return known[0]
    draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    plain = not draws and func not in EQUIVALENT
    if isinstance(func, torch._ops.OpOverload):
        _PLAIN[id(func)] = plain, func
    return plain


def is_always_replaced(func: Any) -> bool:
    found = EQUIVALENT.get(func)
    return found is not None and found.always


def plain_function(func: Any) -> _Function | None:
    """What the host calls for an operator that draws no random numbers, and leaves nothing for its gradient; None for others."""
    if is_plain(func):
        return _as_called(func)
    found = EQUIVALENT.get(func)
    draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    return None if found is None or draws or found.gives is not None or found.takes is not None else found.function


class HostCall(NamedTuple):
    """An operator with its arguments on the host, which may be run again. taken: where something was kept for it."""

    func: Any
    args: list[Any]
    kwargs: dict[str, Any]
    device: int
    taken: Placement | None

    def run(self, random: DeviceRandom) -> tuple[Any, Any]:
        """The results, and what is kept for a gradient. To be called inside `host_keys`."""
        if is_plain(self.func):
            return computed(self.func, self.args, self.kwargs), None
        found = EQUIVALENT.get(self.func)
        if found is None and random.is_shared(self.device):
            return computed(self.func, self.args, self.kwargs), None
        with random.drawing(self.device):
            if found is None:
                return computed(self.func, self.args, self.kwargs), None
            kept = () if self.taken is None else (self.taken.kept,)
            result = found.function(*kept, *self.args, **self.kwargs)
        return (result, None) if found.gives is None else result


_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.ADInplaceOrView
)


def _keys_above_host() -> torch._C.DispatchKeySet:
    """Those of modes, of autograd and of autocast."""
    before = torch._C._dispatch_tls_local_exclude_set()
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        own = torch._C._dispatch_tls_local_exclude_set() - before
    return own | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


_ABOVE_HOST = _keys_above_host()


def host_keys() -> Any:
    """``with no_functions(), host_keys():`` - inside, operators run on the host's tensors, and nobody's modes see them. Two of
    C++'s, and no class of ours that enters both: a Ctrl-C between the two would leave the first for good."""
    return torch._C._ExcludeDispatchKeyGuard(_ABOVE_HOST)


@contextmanager
def with_gradients() -> Iterator[None]:
    """Inside `host_keys`: PyTorch's autograd sees what the host computes."""
    with torch.inference_mode(False), torch.enable_grad(), without_excluding(_AUTOGRAD):
        yield


# Their functions for the host call others, with adjoints of what they are given.
_LINEAR_ALGEBRA = re.compile(r"aten::_?(linalg|lu_|cholesky|triangular|ormqr|orgqr|geqrf|inverse|pinverse)")


def _as_called(func: Any) -> _Function:
    """An operator's function for the host, as where a program calls it: what it calls with conjugated views sees them so."""
    if not isinstance(func, torch._ops.OpOverload):
        # (What makes one new tensor is not to be kept.)
        return func  # type: ignore[no-any-return]
    return _of_operator(func)


@functools.cache
def _of_operator(func: Any) -> _Function:
    if _LINEAR_ALGEBRA.match(func.name()) is None:
        return func  # type: ignore[no-any-return]

    def run(*args: Any, **kwargs: Any) -> Any:
        with views_resolved():
            return func(*args, **kwargs)

    return run


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """A plain operator's results. To be called inside `host_keys`."""
    try:
        return _as_called(func)(*args, **kwargs)
    except NotImplementedError as error:
        decomposed = decomposition_table.get(func)
        # (Those are of dense tensors.)
        if decomposed is not None and func._schema.name not in _OTHERS_IN and sparse_layout(args, torch.Tensor) is None:
            return decomposed(*args, **kwargs)
        if not _lacks_type(error):
            refuse_to_compute(func, "the host has no kernel for it")
    except RuntimeError as error:
        if not _lacks_type(error):
            raise
    return _in_wider_type(func, args, kwargs)


_LACKS_TYPE = re.compile(
    "not implemented for|doesn't support tensors of type|expected scalar type (?:Half|BFloat16) but found Float"
)


def lacks_kernel(error: RuntimeError) -> bool:
    """Whether the host has no kernel for a call, which `computed` may make up for."""
    return isinstance(error, NotImplementedError) or _lacks_type(error)


def _lacks_type(error: RuntimeError) -> bool:
    """Whether the host has a kernel, but for other types.

    Norms on CUDA keep float32 beside half precision, the host has one type for both. What CUDA refuses was refused before.
    """
    return _LACKS_TYPE.search(str(error)) is not None


def refuse_to_compute(func: Any, reason: str) -> NoReturn:
    raise CannotRun(
        f"values=real cannot compute {func}: {reason}. Run this line on the host (tensor.cpu()), take the virtual GPU without "
        "values=real if only memory matters, or a real GPU."
    ) from None


_HALF_IN: dict[Any, torch.dtype] = {**dict.fromkeys(HALF, torch.float32), torch.complex32: torch.complex64}
# Real numbers may have complex results, and the other way around.
_OF_HALF_IN = {torch.float32: torch.float16, torch.complex64: torch.complex32}
# Other types that CUDA's kernels take and the host's do not, by operator. (PyTorch's tests say what each takes; what neither
# takes stays an error.)
_BOOL_IN = {torch.bool: torch.uint8}
_INTEGERS_IN = dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), torch.float64)
_OTHERS_IN: dict[str, dict[Any, torch.dtype]] = {
    "aten::abs": _BOOL_IN,
    "aten::abs_": _BOOL_IN,
    "aten::histc": _INTEGERS_IN,
}


def _in_wider_type(func: Any, args: Any, kwargs: Any) -> Any:
    """For an operator whose kernel on the host takes fewer types than CUDA's: in a wider one, and rounded."""
    wider = _HALF_IN | _OTHERS_IN.get(func._schema.name, {})
    widened: list[tuple[torch.Tensor, torch.Tensor]] = []
    narrower: dict[torch.dtype, torch.dtype] = {}

    def widen(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor) and arg.dtype in wider:
            wide = arg.to(wider[arg.dtype])
            narrower.setdefault(wide.dtype, arg.dtype)
            widened.append((arg, wide))
            return wide
        return wider.get(arg, arg) if isinstance(arg, torch.dtype) else arg

    def narrow(result: Any) -> Any:
        if isinstance(result, torch.Tensor) and result.dtype in narrower:
            same = next((arg for arg, wide in widened if wide is result), None)
            return result.to(narrower[result.dtype]) if same is None else same
        return result

    wide_args = mapped(widen, args)
    wide_kwargs = {name: mapped(widen, value) for name, value in kwargs.items()}
    if not widened:
        return func(*args, **kwargs)
    if not _OF_HALF_IN.keys().isdisjoint(narrower):
        narrower = _OF_HALF_IN | narrower
    out = func(*wide_args, **wide_kwargs)
    if func._schema.is_mutable:
        for arg, wide in widened:
            arg.copy_(wide)
    return mapped(narrow, out)


class FactoryCall:
    """What makes a new tensor on the host, as an operator without arguments that may draw random numbers."""

    tags = (torch.Tag.nondeterministic_seeded,)

    def __init__(self, original: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._original, self._args, self._kwargs = original, args, kwargs
        self.name: str = getattr(original, "__name__", "")

    def __call__(self) -> torch.Tensor:
        return self._original(*self._args, **self._kwargs)

    def bounds(self) -> tuple[int, int | None]:
        """The smallest number that `randint` may draw, and the first that is too large; None where that is not an integer."""
        bounds = [arg for arg in self._args if isinstance(arg, int)]
        has_both = len(bounds) + ("high" in self._kwargs) > 1
        high = self._kwargs.get("high", bounds[-1] if bounds else None)
        return int(self._kwargs.get("low", bounds[0] if has_both else 0)), high

    def one(self) -> torch.Tensor | None:
        """What `torch.zeros`, `ones` and `full` fill a tensor with, without the tensor. None for other factories."""
        if self.name not in ("zeros", "ones", "full"):
            return None
        named = {key: value for key, value in self._kwargs.items() if key not in ("size", "names", "out", "layout")}
        return self._original((), *(self._args[1:] if self.name == "full" else ()), **named)
