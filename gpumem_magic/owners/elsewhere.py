"""What no name of the program leads to and a library's module holds: `weakref.finalize`'s registry, a library's own cache."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from gpumem_magic.looks.objects import attributes, entries_of_class, is_a, items, module_of_class, qualified_name, text
from gpumem_magic.owners.model import Root
from gpumem_magic.owners.roots import class_name
from gpumem_magic.owners.traversal import MACHINERY, is_users_module

# So many objects on the way up from the tensors are looked at, and so many holders are told.
_MOST_OBJECTS, _MOST = 50_000, 8
_UNTOLD = MACHINERY | {"__main__", "builtins", "sys"}
_CLOSED = (type, types.ModuleType)


def held_elsewhere(
    unseen: Sequence[Any], candidates: Mapping[int, Sequence[int]], first: Collection[int]
) -> Iterator[tuple[Root, list[Any]]]:
    """What a library's module, or class, has under a name of its own that leads to memory which no root leads to: the nearest
    to that. candidates: the objects that lead there -> those of them that refer to each. first: the ones with the memory."""
    names, met, told = _named() if first else {}, set(first), 0
    namespaces = {id(attributes(one)) for _, one in items(sys.modules) if is_a(one, types.ModuleType)}
    level = list(first)
    while level and len(met) < _MOST_OBJECTS and told < _MOST:
        above = []
        for number in level:
            if name := names.get(id(unseen[number])):
                told += 1
                yield Root(name, "module", None, class_name(unseen[number])), [unseen[number]]
                continue
            for holder in candidates[number]:
                thing = unseen[holder]
                if holder not in met and not is_a(thing, _CLOSED) and id(thing) not in namespaces:
                    met.add(holder)
                    above.append(holder)
        level = above


def _named() -> dict[int, str]:
    """The `id` of what libraries' modules, and their classes, have under a name -> the name. (Whether or not Python's collector
    goes through them: `gc.freeze` hides them from it.)"""
    found: dict[int, str] = {}
    for key, module in items(sys.modules):
        name = text(key)
        if not is_a(module, types.ModuleType) or name.partition(".")[0] in _UNTOLD or is_users_module(module):
            continue
        for word, value in items(attributes(module)):
            if is_a(value, type):
                if module_of_class(value) == name:
                    for inner, one in entries_of_class(value).items():
                        _note(found, one, f"{name}.{qualified_name(value)}.{text(inner)}")
            else:
                _note(found, value, f"{name}.{text(word)}")
    return found


def _note(found: dict[int, str], value: Any, name: str) -> None:
    if gc.is_tracked(value) and not is_a(value, (*_CLOSED, types.FunctionType)):
        found.setdefault(id(value), name)
