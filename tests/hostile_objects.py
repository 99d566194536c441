"""Objects that count every call of their own code, one of each kind that a program may have in its variables."""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CALLS: list[str] = []
_watching = False

METHODS = (
    "__getattribute__", "__len__", "__bool__", "__eq__", "__ne__", "__hash__", "__repr__", "__str__", "__format__", "__iter__",
    "__contains__", "__getitem__", "__setattr__", "__delattr__", "__dir__", "__sizeof__", "__reduce_ex__", "__index__", "__int__",
    "__float__", "__call__", "__enter__", "__get__", "__instancecheck__", "__subclasscheck__", "__missing__", "keys", "values",
    "items", "get", "copy", "parameters", "named_parameters", "named_buffers", "named_modules", "modules", "state_dict",
    "untyped_storage", "numel", "detach", "size", "data_ptr", "_indices", "_values", "cpu", "__torch_function__",
)  # fmt: skip
PROPERTIES = (
    "__class__", "grad", "grad_fn", "is_leaf", "requires_grad", "retains_grad", "device", "layout", "shape", "dtype", "data",
    "param_groups", "state", "training", "args", "gpumem_failure", "_is_param", "__name__", "_fields",
)  # fmt: skip


@contextmanager
def counted() -> Iterator[list[str]]:
    """The calls of the objects' code inside the block."""
    global _watching
    CALLS.clear()
    _watching = True
    try:
        yield CALLS
    finally:
        _watching = False


def _count(owner: str, name: str) -> None:
    if _watching:
        CALLS.append(f"{owner}.{name}")


def _method(owner: str, base: type, name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _count(owner, name)
        usual = getattr(base, name, None)
        if usual is None:
            return {"__len__": 1, "__bool__": True}.get(name, iter(()))
        return usual(self, *args, **kwargs)

    return method


def _property(owner: str, base: type, name: str) -> Any:
    usual = getattr(base, name, None)

    def read(self: Any) -> Any:
        _count(owner, name)
        if hasattr(usual, "__get__") and not isinstance(usual, type):
            return usual.__get__(self)
        if name == "__class__":
            return type(self)
        return object.__getattribute__(self, "__dict__").get(name, usual)

    def write(self: Any, value: Any) -> None:
        if hasattr(usual, "__set__"):
            usual.__set__(self, value)
        else:
            object.__getattribute__(self, "__dict__")[name] = value

    return property(read, write)


def spied(base: type, name: str, properties: tuple[str, ...] = PROPERTIES) -> type:
    """A subclass whose every method and property counts, of a metaclass whose do too."""
    own = type(base)
    meta = type("Meta", (own,), {})
    asked: tuple[str, ...] = ("__eq__", "__hash__", "__repr__", "__dir__")
    # Python itself asks the classes of errors that pass, and those below an abstract one when it is asked of anything.
    if base not in (BaseException, UserDict):
        asked += ("__getattribute__", "__instancecheck__", "__subclasscheck__")
    for each in asked:
        setattr(meta, each, _method(f"class {name}", own, each))
    body: dict[str, Any] = {"__module__": "__main__"}
    for each in METHODS:
        own_too = hasattr(base, each) or each in ("__len__", "__bool__", "__iter__")
        if own_too and each not in ("__torch_function__", "__get__", "__enter__", "__call__", "__missing__"):
            body[each] = _method(name, base, each)
    body |= {each: _property(name, base, each) for each in properties}
    return meta(name, (base,), body)


class RaisingClass:
    """`isinstance` raises."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        _count("RaisingClass", "__class__")
        raise RuntimeError("never ask me")


class Uninitialised(torch.nn.Module):
    """A module that forgot ``super().__init__()``."""

    def __init__(self) -> None:
        pass


class Loud(torch.Tensor):
    """A tensor subclass that sees every function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _count("Loud", str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(torch.Tensor):
    """A tensor subclass that sees every operator."""

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _count("Wrapped", str(func))
        return func(*[one.inner if isinstance(one, Wrapped) else one for one in args], **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _count("FunctionMode", str(func))
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _count("DispatchMode", str(func))
        return func(*args, **(kwargs or {}))


class Text(str):
    __slots__ = ()


class _Gone:
    pass


def hostile() -> dict[str, Any]:
    """By the name of a variable. Tensors are on the device that is on."""
    found: dict[str, Any] = {}
    for base, value in (
        (object, None),
        (dict, {"a": torch.ones(3, device="cuda")}),
        (list, [torch.ones(3, device="cuda")]),
        (tuple, (torch.ones(3, device="cuda"),)),
        (set, {1}),
        (str, "words"),
        (int, 3),
        (float, 1.5),
        (OrderedDict, {"a": 1}),
        (UserDict, {"a": torch.ones(3, device="cuda")}),
        (BaseException, "an argument"),
        (types.ModuleType, "a_module"),
        (torch.nn.Linear, 4),
    ):
        name = f"Spied{base.__name__}"
        arguments: tuple[Any, ...] = () if value is None else (value,)
        arguments += (4,) if base is torch.nn.Linear else ()
        found[name.lower()] = spied(base, name)(*arguments)
    default = defaultdict(list, {"a": found["spiedobject"]})
    spied_sgd = spied(
        torch.optim.SGD, "SpiedSGD", tuple(one for one in PROPERTIES if one not in ("param_groups", "state"))
    )
    key = spied(Text, "SpiedKey")("key")
    gone = _Gone()
    found |= {
        "default": default,
        "optimizer": spied_sgd([torch.nn.Parameter(torch.ones(5, device="cuda"))], lr=0.1),
        "keyed": {key: torch.ones(3, device="cuda"), 1: key},
        "nested": [[found["spieddict"], found["spiedlist"]], {"x": found["spiedtuple"]}],
        "proxy": weakref.proxy(gone),
        "living_proxy": weakref.proxy(found["spiedlinear"]),
        "raising": RaisingClass(),
        "uninitialised": Uninitialised(),
        "mock": Mock(spec=torch.nn.Module),
        "mock_class": Mock(spec=torch.Tensor),
        "the_class": spied(dict, "SpiedClass"),
        "loud": torch.ones(7).as_subclass(Loud),
        "spied_tensor": torch.ones(7).as_subclass(spied(torch.Tensor, "SpiedTensor")),
        "wrapped": Wrapped(torch.ones(9, device="cuda")),
        "parameter": torch.nn.Parameter(torch.ones(11, device="cuda")),
    }
    del gone
    return found
