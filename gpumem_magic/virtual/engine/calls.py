"""What an operator's call says of itself before it runs: the device that it is for, what it may allocate, and who calls."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._decomp import decomposition_table

from gpumem_magic.looks.code import whose
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.modes import STATE
from gpumem_magic.virtual.engine.node_numbers import number_of
from gpumem_magic.virtual.engine.tensors import VirtualTensor

_NUMBERS = frozenset((bool, int, float))


def device_among(args: Any, kwargs: Any) -> int | None:
    """Index of the virtual device that the operator runs on: the first virtual tensor's, else the device argument's."""
    for arg in args:
        if isinstance(arg, VirtualTensor):
            return int(arg.fake_device.index)
        if isinstance(arg, (list, tuple)):
            found = device_among(arg, None)
            if found is not None:
                return found
        elif isinstance(arg, torch.device) and _means_virtual(arg):
            # (`Tensor.to` as inference mode hands it over.)
            return STATE.last_device if arg.index is None else arg.index
    if kwargs:
        for arg in kwargs.values():
            if isinstance(arg, VirtualTensor):
                return int(arg.fake_device.index)
            if isinstance(arg, torch.device) and _means_virtual(arg):
                return STATE.last_device if arg.index is None else arg.index
            if isinstance(arg, (list, tuple)):
                found = device_among(arg, None)
                if found is not None:
                    return found
    return None


def _means_virtual(device: torch.device) -> bool:
    return device.type in ("cuda", "meta") and not STATE.depth


def bytes_of(tensor: torch.Tensor) -> int:
    """What its elements take, however they lie."""
    return int(tensor.numel() * tensor.element_size())


def copies_of(*tensors: Any) -> list[int]:
    """The bytes of those that do not lie in one piece: a kernel that wants them so has each copied."""
    return [bytes_of(one) for one in tensors if not one.is_contiguous()]


def sparse_layout(args: Any, kind: type = VirtualTensor) -> torch.layout | None:
    """The layout of the first sparse tensor of that kind among an operator's arguments; None where there is none."""
    for arg in args:
        if isinstance(arg, kind):
            if arg.layout is not torch.strided:  # type: ignore[attr-defined]
                return arg.layout  # type: ignore[attr-defined,no-any-return]
        elif isinstance(arg, (list, tuple)):
            found = sparse_layout(arg, kind)
            if found is not None:
                return found
    return None


def sparse_of(parts: Sequence[Any], shape: Any, layout: torch.layout) -> Any:
    """A sparse tensor of its indices and values, which are not looked at."""
    if layout is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(indices, values, tuple(shape), check_invariants=False)
    join: Any = torch.sparse_compressed_tensor
    return join(*parts, tuple(shape), layout=layout, check_invariants=False)


def is_made_of_others(func: Any) -> bool:
    """Whether C++ puts the operator together from others, on every device. What PyTorch has in Python besides, also for operators
    with a kernel, is for its compilers."""
    return isinstance(func, torch._ops.OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )


_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
# Views that stand for values that nobody has worked out yet: conjugated, negated, and zeros without memory.
_LAZY = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.Negative)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.ZeroTensor)
)
_VIEWS_AND_LAZY = _VIEWS | _LAZY


def without_excluding(keys: torch._C.DispatchKeySet) -> AbstractContextManager[Any]:
    """Inside, PyTorch's dispatcher heeds these keys again."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded - keys)


def views_resolved() -> AbstractContextManager[Any]:
    """For what calls other operators where one has come to Python by the dispatcher, which leaves out by then what lies before
    Python (``after_Python_keyset`` in ``PythonFallbackKernel.cpp``): kernels would read adjoints as if nobody had conjugated."""
    return without_excluding(_LAZY)


def run_in_parts(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs such an operator as C++ does. In inference mode it comes whole, and its parts' views are still to be followed."""
    if _follows_views(func.name()):
        return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    with without_excluding(_VIEWS_AND_LAZY) if torch.is_inference_mode_enabled() else views_resolved():
        return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@functools.cache
def _follows_views(name: str) -> bool:
    """Whether C++ follows the views of an operator as a whole (``chunk``, ``narrow``)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "ADInplaceOrView")


_NOTHING_ELSE: AbstractContextManager[Any] = nullcontext()
# What C++ makes anew outside of inference mode (2.11 and 2.13 were tried).
_COUNTED = frozenset(overloads("detach view.dtype"))


def inference_of(func: Any, args: Any) -> AbstractContextManager[Any]:
    """For what makes a view: one of a tensor of inference mode has no count of what is written to it outside of that mode either
    (`TensorImpl.cpp`), but a fake tensor has, since it is made by `detach`."""
    if (
        func.is_view
        and func not in _COUNTED
        and isinstance(args[0], torch.Tensor)
        and args[0].is_inference()
        and not torch.is_inference_mode_enabled()
    ):
        return torch.inference_mode()
    return _NOTHING_ELSE


# Those with a kernel of CUDA's own, though the host has none.
_WRITTEN_BY_CUDA = frozenset(("aten::split_with_sizes_copy", "aten::_chunk_cat", "aten::mode"))


def writes_by_others(func: Any) -> bool:
    """Whether an operator writes into ``out=`` what others give, on every device: most make a result and copy it, as nobody wrote
    a kernel for them (``autogen`` in ``native_functions.yaml``)."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name in _WRITTEN_BY_CUDA or not any(argument.is_out for argument in schema.arguments):
        return False
    if "calar" in schema.overload_name:
        # One for tensors, which is given the number as a tensor on the host: that would come here as a number again.
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), "CompositeExplicitAutograd") and not has_kernel(func.name(), "CPU")


def write_by_others(func: Any, args: Any, kwargs: Any) -> Any:
    with views_resolved(), torch._C._AutoDispatchBelowAutograd():
        return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def giving(func: Any) -> Any:
    """The operator that returns what this one writes into ``out=``; None where there is none."""
    schema = getattr(func, "_schema", None)
    if schema is None or not any(argument.is_out for argument in schema.arguments):
        return None
    wanted = [(argument.name, str(argument.type)) for argument in schema.arguments if not argument.is_out]
    packet = func.overloadpacket
    for overload in packet.overloads():
        other = getattr(packet, overload)
        arguments = other._schema.arguments
        if other is not func and [(argument.name, str(argument.type)) for argument in arguments] == wanted:
            return other
    return None


def shaped_like(func: Any) -> Any:
    """Of an operator with ``out=`` whose shapes PyTorch does not know without its kernel the one that returns them; else None.

    It knows them by a kernel for meta tensors, or where an operator is made of others."""
    has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    keys = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    known = func in decomposition_table or any(has_kernel(name, key) for key in keys)
    if known and func._schema.name not in _WRITTEN_BY_CUDA:
        return None
    lists = any(argument.is_out and str(argument.type) != "Tensor" for argument in func._schema.arguments)
    return None if lists else giving(func)


def with_constants(func: Any, args: Any) -> Any:
    """The arguments of an operator on the host, with tensors for the constants that TorchScript reads and compares: they come as
    the numbers that they are, which only some operators take for tensors."""
    if _NUMBERS.isdisjoint(map(type, args)) or not hasattr(func, "_schema"):
        return args
    wanted = [type(argument.type) is torch.TensorType for argument in func._schema.arguments]
    return tuple(
        torch.tensor(arg, dtype=torch.float64 if type(arg) is float else None)
        if type(arg) in _NUMBERS and is_tensor
        else arg
        for arg, is_tensor in zip(args, wanted, strict=False)
    )


def may_allocate(func: Any) -> bool:
    """False where every tensor in the result is an argument of the call, or a view of one, by the operator's schema."""
    schema = getattr(func, "_schema", None)
    return schema is None or any(value.alias_info is None for value in schema.returns)


def may_resize(func: Any) -> bool:
    """Whether the operator gives tensors that it writes to another size: ``out=`` and `resize_`."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    return "resize" in schema.name or any(argument.is_out for argument in schema.arguments)


def writes_first(func: Any) -> bool:
    """Whether the operator writes to its first argument in place."""
    schema = getattr(func, "_schema", None)
    return schema is not None and bool(schema.arguments) and schema.arguments[0].is_write


def node_now() -> int:
    """A number for the node of the backward pass that this thread is in; 0 outside of one."""
    if not STATE.backward:
        return 0
    node = torch._C._current_autograd_node()
    return 0 if node is None else hash((node.name(), number_of(node)))


def users_line() -> tuple[str, int]:
    """(file name, line) of the innermost frame outside of torch and of this package."""
    return _line_outside(("torch.", "gpumem_magic.", "contextlib."))


def line_below_ours() -> tuple[str, int]:
    """(file name, line) of the innermost frame that runs neither this package's code nor that of warnings."""
    return _line_outside(("gpumem_magic.", "warnings."))


def _line_outside(modules: tuple[str, ...]) -> tuple[str, int]:
    """modules: with a full stop behind each."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        # (What PyTorch's compiler generated may have no module; its file says whose it is.)
        name = frame.f_globals.get("__name__") or whose(frame.f_code.co_filename)
        if not f"{name}.".startswith(modules):
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno or 0


class Counted(int):
    """The size of a result that the engine knows, where the program gave none."""


def with_size(kwargs: Any, size: int) -> dict[str, Any]:
    """What `repeat_interleave` is told where its counts are known."""
    return {**kwargs, "output_size": size if kwargs.get("output_size") is not None else Counted(size)}
