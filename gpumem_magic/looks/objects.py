"""Inspects the program's objects without running any of its code: no property, ``__getattr__``, ``__class__`` or ``__eq__``.

A class is asked as `type` itself answers, an object for its own dictionary, a container as its built-in class reads it. So an
object is what its type says, whatever it claims to be: a dead weak proxy is a proxy, and a mock of a module is a mock.
"""

from __future__ import annotations

import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from inspect import CO_OPTIMIZED
from types import (
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    ModuleType,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any

_MRO: Any = vars(type)["__mro__"]
_ENTRIES: Any = vars(type)["__dict__"]
_NAME: Any = vars(type)["__name__"]
_QUALIFIED: Any = vars(type)["__qualname__"]
_MODULE: Any = vars(type)["__module__"]
_OF_MODULE: Any = vars(ModuleType)["__dict__"]
_TRACEBACK: Any = vars(BaseException)["__traceback__"]
_ARGUMENTS: Any = vars(BaseException)["args"]
_SEQUENCES: tuple[Any, ...] = (list, tuple, deque)
_INSTALLED = tuple({path for name in ("stdlib", "platlib", "purelib") if (path := sysconfig.get_path(name))})
_PLAIN = (str, int, float, bool, bytes, type(None))


def is_a(thing: object, kind: type | tuple[type, ...]) -> bool:
    """`isinstance` by the object's type alone. kind: built-in or PyTorch's, whose metaclasses answer for no one else."""
    return issubclass(type(thing), kind)


def is_exactly(thing: object, kinds: tuple[type, ...]) -> bool:
    """Never ``in``: a class may have an ``__eq__`` of its metaclass's, and a ``__hash__``, so that it is no key either."""
    return any(type(thing) is kind for kind in kinds)


def inherits(thing: object, kind: type) -> bool:
    """The same for a class whose metaclass has words of its own, such as one of `collections`."""
    return any(one is kind for one in mro(type(thing)))


def mro(kind: type) -> tuple[type, ...]:
    """A class and those that it inherits from, in order."""
    found: tuple[type, ...] = _MRO.__get__(kind)
    return found


def entries_of_class(kind: type) -> MappingProxyType[str, Any]:
    """What `vars` gives for a class."""
    found: MappingProxyType[str, Any] = _ENTRIES.__get__(kind)
    return found


def name_of_class(kind: type) -> str:
    return text(_NAME.__get__(kind))


def kinds_of(thing: object) -> frozenset[str]:
    """The names of its class and of those that this inherits from."""
    return frozenset(map(name_of_class, mro(type(thing))))


def qualified_name(kind: type) -> str:
    return text(_QUALIFIED.__get__(kind))


def module_of_class(kind: type) -> str:
    """The name of the module that a class says it comes from; "" where that is no name."""
    return text(_MODULE.__get__(kind))


def from_class(kind: type, name: str) -> Any:
    """What a class has under a name, itself or from those above it, as it stands there; None for nothing."""
    return next((own[name] for one in mro(kind) if name in (own := entries_of_class(one))), None)


def text(value: Any) -> str:
    """A string as an exact one, also of a class that has words of its own; "" for anything else."""
    return str.__str__(value) if is_a(value, str) else ""


def shown(value: Any) -> str:
    """`repr` of a plain value, and of what is derived from one as if it were plain; the class's name for anything else."""
    if is_exactly(value, _PLAIN):
        return repr(value)
    plain: Any = next((kind for kind in (str, int, float) if is_a(value, kind)), None)
    return name_of_class(type(value)) if plain is None else str(plain.__repr__(value))


def attributes(thing: object) -> dict[str, Any]:
    """An object's own dictionary, empty where it has none. Its class's properties and slots are not in it."""
    kind = type(thing)
    known = _readers.get(id(kind))
    if known is not None and known[0]() is kind:
        found = known[1].__get__(thing)
        return found if type(found) is dict or is_a(found, dict) else {}
    if is_a(thing, ModuleType):
        found = _OF_MODULE.__get__(thing)
        return found if found is not None else {}
    for one in mro(kind):
        own = entries_of_class(one).get("__dict__")
        if type(own) is GetSetDescriptorType:
            try:
                found = own.__get__(thing)
            except (TypeError, AttributeError):
                continue
            if len(_readers) >= _MOST_READERS:
                _readers.clear()
            _readers[id(kind)] = weakref.ref(kind), own
            return found if is_a(found, dict) else {}
    return {}


# By a class's id, the class and what reads its objects' dictionaries. (A class may have a hash of its metaclass's.)
_readers: dict[int, tuple[weakref.ref[type], Any]] = {}
_MOST_READERS = 4096


def slots(thing: object) -> list[Any]:
    """What an object has in its classes' slots, as far as they are filled."""
    found = []
    for slot in (one for kind in mro(type(thing)) for one in entries_of_class(kind).values()):
        if type(slot) is MemberDescriptorType:
            with suppress(AttributeError):
                found.append(slot.__get__(thing))
    return found


def attribute(thing: object, name: str) -> Any:
    """What an object's own dictionary has under a name; None for nothing."""
    return dict.get(attributes(thing), name)


def items(table: Any) -> list[tuple[Any, Any]]:
    """The entries of a dictionary, or of names that we collected ourselves; none for anything else."""
    if is_a(table, dict):
        while True:
            try:
                return list(dict.items(table))
            except RuntimeError:
                # Python collected as it made the pairs, and what it collected has left the dictionary, or come into it.
                continue
    return list(table.items()) if _is_ours(table) else []


def entry(table: Any, name: str) -> Any:
    """What such a table has under a name; None for nothing."""
    if is_a(table, dict):
        return dict.get(table, name)
    return table.get(name) if _is_ours(table) else None


def _is_ours(table: object) -> bool:
    return module_of_class(type(table)).startswith("gpumem_magic.")


def is_sequence(thing: object) -> bool:
    """Whether it is a list, a tuple, a deque, or of a class made of one."""
    return is_a(thing, _SEQUENCES)


def members(sequence: Any) -> Iterator[Any]:
    """What `is_sequence` holds, in order."""
    kind = next(kind for kind in _SEQUENCES if is_a(sequence, kind))
    found: Iterator[Any] = kind.__iter__(sequence)
    return found


def locals_of(frame: FrameType) -> dict[str, Any]:
    """A frame's variables. Before Python 3.13 asking leaves a copy of them in the frame, which would keep them: it is emptied."""
    held = frame.f_locals
    is_copy = bool(frame.f_code.co_flags & CO_OPTIMIZED)
    # A class's body may have a table of the program's own.
    found = dict(held) if is_copy else dict(items(held))
    # Held by the frame, by `held` and by the call: somebody else's `locals()` would be a fourth.
    if sys.version_info < (3, 13) and is_copy and sys.getrefcount(held) <= 3:
        held.clear()
    return found


def traceback_of(error: BaseException) -> TracebackType | None:
    found: TracebackType | None = _TRACEBACK.__get__(error)
    return found


def arguments_of(error: BaseException) -> tuple[Any, ...]:
    found: tuple[Any, ...] = _ARGUMENTS.__get__(error)
    return found


def message_of(error: BaseException) -> str:
    """What `str` says of an error, where that runs nothing of the program's; else its arguments, as far as they are plain."""
    own = from_class(type(error), "__str__")
    given = arguments_of(error)
    if all(is_plain(one) for one in given) and (
        type(own) is WrapperDescriptorType
        or (_is_installed(own) and all(is_plain(one) for one in dict.values(attributes(error))))
    ):
        return str(own(error))
    return ", ".join(text(one) or shown(one) for one in given)


def is_plain(value: Any) -> bool:
    """A value of Python's own, or a tuple of such: its `repr` runs nothing of the user's."""
    return is_exactly(value, _PLAIN) or (type(value) is tuple and all(is_plain(one) for one in value))


def _is_installed(function: Any) -> bool:
    """Whether a function is of Python's library or of an installed package, and not the program's own."""
    return type(function) is FunctionType and function.__code__.co_filename.startswith(_INSTALLED)
