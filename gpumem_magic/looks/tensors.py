"""Looks at tensors, modules and optimizers in which nothing of the program's runs, nor any mode of PyTorch's that it has set.

A module and an optimizer are read from their own dictionaries, as `torch.nn.Module` and `torch.optim.Optimizer` fill them: one
that was never initialised holds nothing. A tensor is read past its class, inside `no_functions` and `no_dispatch`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import chain
from typing import Any, TypeVar

import torch

from gpumem_magic.looks.objects import (
    attribute,
    attributes,
    entry,
    is_a,
    is_sequence,
    items,
    members,
    module_of_class,
    slots,
    text,
)

Named = tuple[str, torch.Tensor]
_Answer = TypeVar("_Answer")

_BASE: Any = torch._C.TensorBase
# (Looked up once: they are asked for each parameter at each step.)
_Tensor, _Parameter, _Module = torch.Tensor, torch.nn.Parameter, torch.nn.Module
_is_leaf, _grad_of, _layout_of = (vars(_BASE)[name].__get__ for name in ("is_leaf", "grad", "layout"))
_is_cuda, _device_of = vars(_BASE)["is_cuda"].__get__, _BASE.get_device
# What a module's own dictionary is read by, whatever its class calls by that name.
_own_of_module = vars(torch.nn.Module)["__dict__"].__get__
_keys_of, _PYTHON = torch._C._dispatch_keys, torch._C.DispatchKey.Python
_aten = torch.ops.aten
_BY_ROWS = _aten.crow_indices.default, _aten.col_indices.default, _aten.values.default
_BY_COLUMNS = _aten.ccol_indices.default, _aten.row_indices.default, _aten.values.default
# By a sparse tensor's layout, what gives the tensors that hold its memory: indices first, its values last.
SPARSE_PARTS = {
    torch.sparse_coo: (_aten._indices.default, _aten._values.default),
    torch.sparse_csr: _BY_ROWS, torch.sparse_bsr: _BY_ROWS, torch.sparse_csc: _BY_COLUMNS, torch.sparse_bsc: _BY_COLUMNS,
}  # fmt: skip
# The backends' keys for sparse tensors: of fake ones first, then of a device's and the host's.
_OF_FAKE = {True: torch._C.DispatchKey.SparseMeta, False: torch._C.DispatchKey.SparseCsrMeta}
_OF_REAL = {
    True: (torch._C.DispatchKey.SparseCUDA, torch._C.DispatchKey.SparseCPU),
    False: (torch._C.DispatchKey.SparseCsrCUDA, torch._C.DispatchKey.SparseCsrCPU),
}
PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
# Where a compiled module has the one that it was made of.
COMPILED = "_orig_mod"


# Inside both, reading a tensor calls no ``__torch_function__`` and no mode; the thread's state is as it was
# afterwards. They are C++'s own, as a Ctrl-C may come in one that is written in Python before it has put that back.
no_functions, no_dispatch = torch._C.DisableTorchFunction, torch._C._DisableTorchDispatch

_tracing, _trace = torch._C._get_tracing_state, torch._C._set_tracing_state  # type: ignore[attr-defined]
_TRACER = torch._C._dispatch_key_parse("Tracer")
_NOTHING = nullcontext()


def unheard(call: Callable[..., _Answer], /, *args: Any) -> _Answer:
    """What `call` returns where no function and no dispatch of the program's own hears what tensors are asked.

    The block holds a call alone: a comprehension with an ``if`` that stands in one itself jumps back, in Python 3.12 and
    3.13, from where the table of handlers has a gap, and a Ctrl-C there would leave the block open.
    """
    with no_functions(), no_dispatch():
        return call(*args)


def is_tracing() -> bool:
    """Whether TorchScript writes down what this thread calls."""
    return _tracing() is not None


def untraced() -> AbstractContextManager[None]:
    """Inside, a trace of TorchScript rests. While it runs, a size that is asked for is a tensor, to be written down."""
    tracing = _tracing()
    return _NOTHING if tracing is None else _resting(tracing)


@contextmanager
def _resting(tracing: Any) -> Iterator[None]:
    # (C++ wants the trace's key among those that operators may meet before the trace ends or goes on.)
    kept_out = torch._C._dispatch_tls_is_dispatch_key_excluded(_TRACER)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_TRACER, False)
    _trace(None)
    try:
        yield
    finally:
        _trace(tracing)
        torch._C._dispatch_tls_set_dispatch_key_excluded(_TRACER, kept_out)


def is_tensor(thing: object) -> bool:
    return issubclass(type(thing), _Tensor)


def is_parameter(thing: object) -> bool:
    """As PyTorch has it: a tensor of another class may be one too."""
    kind = type(thing)
    return issubclass(kind, _Parameter) or (issubclass(kind, _Tensor) and attribute(thing, "_is_param") is True)


def is_module(thing: object) -> bool:
    return issubclass(type(thing), _Module)


def is_optimizer(thing: object) -> bool:
    return is_a(thing, torch.optim.Optimizer)


# Tensors. Inside `no_functions` and `no_dispatch`.


def grad(tensor: torch.Tensor) -> torch.Tensor | None:
    """A leaf's, or a kept one: asking other tensors makes PyTorch warn."""
    if not (is_leaf(tensor) or _BASE.retains_grad.__get__(tensor)):
        return None
    found: torch.Tensor | None = _grad_of(tensor)
    return found


def grads_of_leaves(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradient of each, None also of one that is no leaf."""
    with suppress(RuntimeError):
        if all(map(_is_leaf, parameters)):
            return [*map(_grad_of, parameters)]
    return [_grad_of(one) if is_leaf(one) else None for one in parameters]


def _flag(name: str) -> Callable[[torch.Tensor], bool]:
    read = getattr(_BASE, name).__get__
    return lambda tensor: bool(read(tensor))


requires_grad = _flag("requires_grad")


def is_leaf(tensor: torch.Tensor) -> bool:
    """A view of what was written to since is none: PyTorch would make its node anew, and run the view for that; or it refuses to,
    of a view that was made under `no_grad`."""
    try:
        return bool(_is_leaf(tensor))
    except RuntimeError:
        return False


def is_view(tensor: torch.Tensor) -> bool:
    return bool(_BASE._is_view(tensor))


# Of a tensor without a Python key.
is_cuda, is_meta = _flag("is_cuda"), _flag("is_meta")


def grad_fn(tensor: torch.Tensor) -> Any:
    """None of a view of what was written to since, as for `is_leaf`."""
    try:
        return _BASE.grad_fn.__get__(tensor)
    except RuntimeError:
        return None


def is_sparse(tensor: torch.Tensor) -> bool:
    """Of a layout that keeps indices and values."""
    return _layout_of(tensor) in SPARSE_PARTS


def has_python_key(tensor: torch.Tensor) -> bool:
    """Whether PyTorch asks Python for this tensor's operators, and for some of its facts."""
    return bool(_keys_of(tensor).has(_PYTHON))


def plain_place(tensor: torch.Tensor) -> tuple[int, int] | None:
    """(Device, address of the storage's memory) of a tensor of PyTorch's own classes on a real GPU; None for any other."""
    kind = type(tensor)
    if (kind is not torch.Tensor and kind is not torch.nn.Parameter) or not _is_cuda(tensor):
        return None
    if _layout_of(tensor) is not torch.strided:
        return None
    try:
        address = _BASE.untyped_storage(tensor).data_ptr()
    except (RuntimeError, NotImplementedError):
        # (One that stands for another within a transform of `torch.func`.)
        return None
    return (_device_of(tensor), address) if address else None


def is_fake(tensor: torch.Tensor) -> bool:
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and is_a(tensor, fakes.FakeTensor)


def pieces(tensor: torch.Tensor, depth: int = 3) -> list[torch.Tensor]:
    """The tensor, or those that it wraps: of a distributed one this process's piece, of a quantised one numbers and scales."""
    if depth == 0 or not has_python_key(tensor) or is_fake(tensor):
        return [tensor]
    held = chain(dict.values(attributes(tensor)), slots(tensor))
    return [piece for one in held if is_tensor(one) for piece in pieces(one, depth - 1)] or [tensor]


def storage(tensor: torch.Tensor) -> Any:
    """Its storage, shared by all views; RuntimeError where it has none."""
    return _BASE.untyped_storage(tensor)


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The indices and (last) the values of a sparse tensor, as plain ones; nothing where a class only looks like one."""
    keys, layout = torch._C._dispatch_keys(tensor), _BASE.layout.__get__(tensor)
    coordinates = layout is torch.sparse_coo
    if is_fake(tensor):
        key = _OF_FAKE[coordinates]
    elif has_python_key(tensor):
        return ()
    else:
        key = next(one for one in _OF_REAL[coordinates] if keys.has(one))
    # The backend's own function, past every key above it.
    backend = torch._C.DispatchKeySet(key)
    return tuple(operator.redispatch(backend, tensor) for operator in SPARSE_PARTS[layout])


def dtype_name(tensor: torch.Tensor) -> str:
    return str(_BASE.dtype.__get__(tensor)).removeprefix("torch.")


def shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(length) for length in _BASE.shape.__get__(tensor))


def size(tensor: torch.Tensor) -> torch.Size:
    """As PyTorch's own class says it. (A parameter whose size is not known yet has a `shape` that is an error.)"""
    found: torch.Size = _BASE.shape.__get__(tensor)
    return found


def device(tensor: torch.Tensor) -> torch.device:
    found: torch.device = _BASE.device.__get__(tensor)
    return found


def numel(tensor: torch.Tensor) -> int:
    return int(_BASE.numel(tensor))


def nbytes(tensor: torch.Tensor) -> int:
    return numel(tensor) * int(_BASE.dtype.__get__(tensor).itemsize)


def offset(tensor: torch.Tensor) -> int:
    """Where in its storage it begins, in elements."""
    return int(_BASE.storage_offset(tensor))


# Modules


def table(module: torch.nn.Module, name: str) -> list[tuple[str, Any]]:
    """What is in a module's `_parameters`, `_buffers` or `_modules`, in order."""
    own = attribute(module, name)
    if own is not None and not is_a(own, dict) and module_of_class(type(own)).startswith("torch.jit."):
        own = dict(own.items())
    return [(key if type(key) is str else text(key), value) for key, value in items(own) if value is not None]


def as_written(thing: Any) -> Any:
    """The program's own module, where this one is what `torch.compile` made of it; anything else as it is."""
    inner = table(thing, MODULES) if is_module(thing) else ()
    return next((module for name, module in inner if name == COMPILED), thing)


def modules_in(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """As ``named_modules`` gives them: the module itself under "", then each that is in it, once."""
    seen: set[int] = set()
    todo = [("", root)]
    while todo:
        path, module = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        inner = [(f"{path}.{name}" if path else name, one) for name, one in table(module, MODULES) if is_module(one)]
        todo += reversed(inner)


def tensors_of(root: torch.nn.Module, kind: str) -> Iterator[Named]:
    """As ``named_parameters`` or ``named_buffers`` give them. kind: `PARAMETERS` or `BUFFERS`."""
    seen: set[int] = set()
    for path, module in modules_in(root):
        for name, tensor in table(module, kind):
            if is_tensor(tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                yield (f"{path}.{name}" if path else name), tensor


def nameless_parameters(root: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Those of `tensors_of`, in its order: for who knows their names from an earlier look. (There may be thousands of modules, at
    each step.)"""
    seen: set[int] = set()
    todo: list[Iterator[Any]] = [iter((root,))]
    while todo:
        for module in todo[-1]:
            if not issubclass(type(module), _Module) or id(module) in seen:
                continue
            seen.add(id(module))
            own = _own_of_module(module)
            if type(own) is not dict:
                own = dict(items(own))
            parameters, inner = own.get(PARAMETERS), own.get(MODULES)
            # (What a compiled or scripted module has in their place answers by itself.)
            if type(parameters) is not dict or type(inner) is not dict:
                parameters, inner = dict(table(module, PARAMETERS)), dict(table(module, MODULES))
            for tensor in [*parameters.values()] if parameters else ():
                if id(tensor) not in seen and (type(tensor) is _Parameter or is_tensor(tensor)):
                    seen.add(id(tensor))
                    yield tensor
            if inner:
                todo.append(iter([*inner.values()]))
                break
        else:
            todo.pop()


# Optimizers


def working_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer itself, or the one that it wraps: libraries have some that only pass everything on."""
    own = attributes(optimizer)
    if "param_groups" not in own:
        return next((one for one in dict.values(own) if is_optimizer(one)), optimizer)
    return optimizer


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Those of all its groups, in order."""
    groups = attribute(optimizer, "param_groups")
    found = [entry(group, "params") for group in (members(groups) if is_sequence(groups) else ())]
    return [one for each in found if is_sequence(each) for one in members(each) if is_tensor(one)]


def states_of(optimizer: torch.optim.Optimizer) -> list[tuple[Any, Any]]:
    """What it keeps for each parameter, as (parameter, the dictionary of its states)."""
    return items(attribute(optimizer, "state"))
