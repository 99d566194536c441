"""One walk forward through the user's objects, from the roots to the device memory that they keep.

Nothing of the user's runs: objects are asked for what they refer to as the garbage collector asks them. Functions are not
followed into their globals, nor anything into Python's modules and into the notebook's own machinery: everything would lead
everywhere.
"""

from __future__ import annotations

import gc
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, repeat
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpumem_magic.looks import arrays, tensors
from gpumem_magic.looks.modules import Remembered
from gpumem_magic.looks.objects import (
    attribute,
    attributes,
    entries_of_class,
    entry,
    is_a,
    items,
    locals_of,
    module_of_class,
    text,
)
from gpumem_magic.owners import autograd
from gpumem_magic.owners.model import Root

MACHINERY = frozenset(
    {
        "IPython",
        "_pytest",
        "asyncio",
        "comm",
        "debugpy",
        "gpumem_magic",
        "importlib",
        "ipykernel",
        "jupyter_client",
        "logging",
        "pluggy",
        "prompt_toolkit",
        "pydevd",
        "tornado",
        "traitlets",
        "zmq",
    }
)
_LEAF = -1
_CLOSED = (
    types.ModuleType,
    types.CodeType,
    types.MappingProxyType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
)
# Of `logging`, what a program hands on to it is kept in these; a logger (`_logger`) leads to all others.
_LOGGED = (logging.LogRecord, logging.Handler, logging.LoggerAdapter)
_PACKAGES = ("site-packages", "dist-packages")

Locate = Callable[[Any], "tuple[int, int] | None"]
Expand = Callable[[int, Any], Sequence[Any]]
Place = tuple[int, int]


class Traversal:
    """The objects that were met, by number, and which object met them first (`first`) and again (`more`).

    It holds the user's objects: whoever made it calls `close` as soon as the names are read.
    """

    def __init__(self, locate: Locate, closed: Iterable[Any] = ()) -> None:
        self.objects: list[Any] = []
        self.first: list[int] = []
        self.more: list[tuple[int, int]] = []
        self.kinds: dict[tuple[int, int], str] = {}
        self.arguments: dict[tuple[int, int], str] = {}
        self.storages: dict[Place, int] = {}
        self.tensors: dict[int, list[int]] = {}
        self.locate = locate
        self._closed = list(closed)
        self._array = arrays.kind()
        self._index: dict[int, int] = {id(thing): _LEAF for thing in self._closed}
        # By the class's id, which its objects keep: a class may have a `__hash__` of its metaclass's.
        # By id, what is known to lead to no memory.
        self._barren: dict[int, Any] = {}
        self._expanders: dict[int, Expand | None] = {id(Root): None}
        self._expand: list[Expand | None] = []
        self._done = 0

    def add_root(self, root: Root, values: Iterable[Any]) -> int | None:
        """A root and what it holds; its number, or None if nothing in it can hold memory."""
        values = list(values)
        # (Python's collector does not know of frames that run.)
        running = [value for value in values if is_a(value, types.FrameType) and not gc.is_tracked(value)]
        values = [*self._leading(values), *running]
        if tensors.unheard(self._is_barren, values):
            return None
        number = self._add(root, _LEAF, None)
        for value in values:
            self._meet(number, value)
        return number

    def _is_barren(self, values: list[Any]) -> bool:
        """Whether no memory lies behind these objects. They are looked through level by level, in C, since a notebook's data may
        be millions of them, which a walk object by object would take seconds for. It ends at the first that holds memory.

        What only one other refers to is met once; of the rest it is kept what was met. Every cycle has one of those.
        """
        met: dict[int, Any] = {}
        level = list(values)
        once = _referred_to_once()
        while level:
            counts = list(map(sys.getrefcount, level))
            shared = list(compress(level, map(once.__lt__, counts)))
            if shared:
                fresh = dict(zip(map(id, shared), shared, strict=True))
                if any(self._index[number] >= 0 for number in fresh.keys() & self._index.keys()):
                    # Another root's own value, which holds memory.
                    return False
                for known in (met, self._barren, self._index):
                    for number in fresh.keys() & known.keys():
                        del fresh[number]
                met |= fresh
                level = [*compress(level, map(once.__ge__, counts)), *fresh.values()]
            found: list[Any] = []
            its: list[Any] = []
            classes = list(map(type, level))
            kinds = dict(zip(map(id, classes), classes, strict=True))
            for number, kind in kinds.items():
                expand = self._expanders[number] if number in self._expanders else self._choose(kind)
                if expand is None:
                    continue
                its = level if len(kinds) == 1 else [one for one in level if type(one) is kind]
                if expand is _generic:
                    found += gc.get_referents(*its)
                elif any(self._may_hold(one, expand) for one in its):
                    return False
                else:
                    found += [inner for one in its for inner in self._behind(one, expand)]
            level = list(self._leading(found))
            del found, its  # a second list would be a second reference

        self._barren |= met
        return True

    def _may_hold(self, thing: Any, expand: Expand) -> bool:
        """Whether a tensor or a node of autograd's graph holds memory, or leads to more than its own attributes."""
        if expand == self._node:
            return True
        if expand != self._tensor:
            return False
        holds = located(self.locate, thing) is not None
        return holds or is_a(thing, FakeTensor) or tensors.grad_fn(thing) is not None or tensors.grad(thing) is not None

    def _behind(self, thing: Any, expand: Expand) -> Sequence[Any]:
        if expand is _class and not _is_users(thing):
            return ()
        return gc.get_referents(thing) if expand == self._tensor else expand(_LEAF, thing)

    def walk(self) -> None:
        """Goes on until everything that was met has been looked into."""
        objects, expanders = self.objects, self._expand
        index, referents, is_tracked = self._index, gc.get_referents, gc.is_tracked
        known, kinds = index.get, self._expanders
        first, more = self.first, self.more
        array, some_in, leading_of = self._array, arrays.some_in, self._leading
        with tensors.no_functions(), tensors.no_dispatch():
            while self._done < len(objects):
                source = self._done
                self._done += 1
                expand = expanders[source]
                if expand is None:
                    continue
                thing = objects[source]
                found = referents(thing) if expand is _generic else expand(source, thing)
                # The body is `_meet`, written out: it runs for each of the user's objects.
                leading = leading_of(found) if some_in(found, array) else filter(is_tracked, found)
                for child in leading:
                    target = known(id(child))
                    if target is None:
                        kind = id(type(child))
                        its = kinds[kind] if kind in kinds else self._choose(type(child))
                        if its is None or (its is _class and not _is_users(child)):
                            index[id(child)] = _LEAF
                            self._closed.append(child)
                            continue
                        index[id(child)] = len(objects)
                        objects.append(child)
                        first.append(source)
                        expanders.append(its)
                    elif target >= 0:
                        more.append((source, target))

    def close(self) -> None:
        """Lets go of everything now. (It refers to itself, so that Python would do it only at the next garbage collection.)"""
        for collection in (self.objects, self._closed, self._expand):
            collection.clear()
        self._barren.clear()
        self._expanders.clear()

    def number_of(self, thing: Any) -> int | None:
        """The number of an object, or None for one that was not met or not looked into."""
        number = self._index.get(id(thing), _LEAF)
        return None if number < 0 else number

    def not_met(self, things: list[Any]) -> list[Any]:
        """Those without a number."""
        return list(compress(things, map((0).__gt__, map(self._index.get, map(id, things), repeat(_LEAF)))))

    def parents(self) -> list[list[int]]:
        """For each number, who holds it."""
        found = [[] if source < 0 else [source] for source in self.first]
        for source, target in self.more:
            found[target].append(source)
        return found

    # Meeting things

    def _leading(self, found: Sequence[Any]) -> Iterable[Any]:
        """Those that may lead to others."""
        tracked = filter(gc.is_tracked, found)
        if not arrays.some_in(found, self._array):
            return tracked
        return [*tracked, *arrays.of_objects(found, self._array)]

    def _add(self, thing: Any, source: int, expand: Expand | None) -> int:
        number = len(self.objects)
        self.objects.append(thing)
        self.first.append(source)
        self._expand.append(expand)
        return number

    def _meet(self, source: int, thing: Any) -> int | None:
        target = self._index.get(id(thing))
        if target is None:
            kind = id(type(thing))
            expand = self._expanders[kind] if kind in self._expanders else self._choose(type(thing))
            if expand is None or (expand is _class and not _is_users(thing)):
                self._index[id(thing)] = _LEAF
                self._closed.append(thing)
                return None
            target = self._index[id(thing)] = self._add(thing, source, expand)
        elif target >= 0:
            self.more.append((source, target))
        return target if target >= 0 else None

    def _link(self, source: int, thing: Any, kind: str, argument: str = "") -> None:
        target = self._meet(source, thing)
        if target is not None:
            self.kinds[source, target] = kind
            if argument:
                self.arguments[source, target] = argument

    def _choose(self, kind: type) -> Expand | None:
        expand: Expand | None = _generic
        if issubclass(kind, torch.Tensor):
            expand = self._tensor
        elif issubclass(kind, types.FunctionType):
            expand = _function
        elif issubclass(kind, types.FrameType):
            expand = _frame
        elif issubclass(kind, type):
            expand = _class
        elif issubclass(kind, logging.Logger):
            expand = _logger
        elif issubclass(kind, _CLOSED) or (_package(kind) in MACHINERY and not issubclass(kind, _LOGGED)):
            expand = None
        elif autograd.is_node_type(kind):
            expand = self._node
        elif kind is self._array:
            expand = _array
        self._expanders[id(kind)] = expand
        return expand

    # What things hold

    def _tensor(self, number: int, tensor: torch.Tensor) -> Sequence[Any]:
        place = located(self.locate, tensor)
        if place is not None:
            target = self.storages.get(place)
            if target is None:
                target = self.storages[place] = self._add(None, number, None)
            else:
                self.more.append((number, target))
            self.tensors.setdefault(target, []).append(number)
        node = tensors.grad_fn(tensor)
        if node is not None:
            self._link(number, node, "graph")
        gradient = tensors.grad(tensor)
        if gradient is not None:
            self._link(number, gradient, "grad")
        found = gc.get_referents(tensor)
        if is_a(tensor, FakeTensor):
            own = attributes(tensor)
            found = [one for one in found if one is not own]
            found += [value for name, value in dict.items(own) if name not in _fake_names(own)]
        return found

    def _node(self, number: int, node: Any) -> Sequence[Any]:
        for argument, value in autograd.saved_by(node):
            self._link(number, value, "saved", argument)
        for following in autograd.next_nodes(node):
            self._link(number, following, "next")
        variable = autograd.variable_of(node)
        if variable is not None:
            self._link(number, variable, "variable")
        return gc.get_referents(node)


def _referred_to_once() -> int:
    """What Python counts for an object in a list that one other object refers to."""
    holder: list[Any] = [[]]
    return next(map(sys.getrefcount, gc.get_referents(holder)))


def _generic(_number: int, thing: Any) -> Sequence[Any]:
    return gc.get_referents(thing)


def _array(_number: int, thing: Any) -> Sequence[Any]:
    return arrays.held_by(thing)


def _class(_number: int, kind: type) -> Sequence[Any]:
    return list(entries_of_class(kind).values())


def _function(_number: int, function: types.FunctionType) -> Sequence[Any]:
    return [*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__, function.__dict__]


def _logger(_number: int, logger: logging.Logger) -> Sequence[Any]:
    own = attributes(logger)
    return [one for name in ("handlers", "filters") if (one := own.get(name)) is not None]


def _frame(_number: int, frame: types.FrameType) -> Sequence[Any]:
    if text(entry(frame.f_globals, "__name__")).partition(".")[0] in MACHINERY:
        return ()
    held_by_all = frame.f_globals
    # Since Python 3.11 a frame that still runs tells the collector nothing.
    inside = locals_of(frame).values() if frame.f_code.co_flags & inspect.CO_OPTIMIZED else ()
    things = {id(thing): thing for thing in (*gc.get_referents(frame), *inside)}
    return [thing for thing in things.values() if thing is not held_by_all]


def located(locate: Locate, tensor: torch.Tensor) -> Place | None:
    """Where a tensor's memory lies, by device and address; None for one on the host."""
    try:
        return locate(tensor)
    except (NotImplementedError, RuntimeError):
        # A tensor without one storage (sparse, a wrapper): the tensors inside it are met on their own.
        return None


_fake_attributes: frozenset[str] = frozenset()


def _fake_names(own: dict[str, Any]) -> frozenset[str]:
    """The attributes that PyTorch, and the virtual GPU, gave a fake tensor: they hold the mode, not memory."""
    global _fake_attributes
    if not _fake_attributes:
        _fake_attributes = frozenset(
            name
            for name in own
            if name.endswith(("_memo", "_memo_vc", "_memo_epoch"))
            or name
            in ("_fake_device", "fake_device", "fake_mode", "constant", "pytype", "dispatch_keys", "real_tensor")
        ) | {"_is_param"}
    return _fake_attributes


def _package(kind: type) -> str:
    return module_of_class(kind).partition(".")[0]


def _is_users(kind: type) -> bool:
    """Whether a class was written by the user: only those are looked into (class attributes that cache tensors)."""
    module = module_of_class(kind)
    return module == "__main__" or is_users_module(sys.modules.get(module))


def is_users_module(module: Any) -> bool:
    """Whether a module is the notebook's, a file of the user's or made by hand, and not of Python or of an installed package."""
    full = text(attribute(module, "__name__")) if is_a(module, types.ModuleType) else ""
    name = full.partition(".")[0]
    if name == "__main__":
        return True
    if not name or name in sys.stdlib_module_names or name in MACHINERY or name == "torch":
        return False
    file = text(attribute(module, "__file__"))
    if file:
        return not any(part in file for part in _PACKAGES)
    return (
        type(module) is types.ModuleType
        and _is_made_by_hand(module)
        and (full == name or is_users_module(sys.modules.get(name)))
    )


def _is_made_by_hand(module: types.ModuleType) -> bool:
    """Whether no loader made it: ``types.ModuleType(...)``, whose names ``exec`` fills. Its lines are of no file."""
    return attribute(module, "__spec__") is None and attribute(module, "__loader__") is None


# Thousands of modules are not the user's; looked at for each cell, they would cost more than all else. So each is looked at once:
# the identities of all that were loaded, in order, the names of the user's among them, and those that were not.
_loaded: list[int] = []
_users: list[str] = []
_others: Remembered[bool] = Remembered()


def users_modules() -> Iterator[tuple[str, types.ModuleType]]:
    """Those of `is_users_module` that are loaded now, under their names in `sys.modules`."""
    global _loaded, _users
    loaded = list(map(id, sys.modules.values()))
    if loaded != _loaded:
        found = []
        for key, module in items(sys.modules):
            if type(key) is not str or _others.of(module):
                continue
            if is_users_module(module):
                found.append(key)
            elif is_a(module, types.ModuleType):
                _others.note(module, True)
        _loaded, _users = loaded, found
    for name in _users:
        module = sys.modules.get(name)
        if module is not None:
            yield name, module
