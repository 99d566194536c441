"""What a cell's text, and the user's functions that it names, say about gradients and names. None of it is run."""

from __future__ import annotations

import linecache
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from gpumem_magic.looks.code import is_library_file
from gpumem_magic.looks.fresh import made_anew
from gpumem_magic.looks.objects import (
    attributes,
    entries_of_class,
    entry,
    is_a,
    is_exactly,
    items,
    module_of_class,
    mro,
)
from gpumem_magic.owners.traversal import is_users_module

_COMMENT = re.compile(r"#[^\n]*")
_BACKWARD = re.compile(r"\bbackward\s*\(")
_STEP = re.compile(r"\.step\s*\(")
# Any look at `.grad` counts: whoever handles gradients by hand knows that they are there.
_CLEARS = re.compile(r"zero_grad|set_to_none|\.grad\b")
_LAST_POSITION = re.compile(r"\[\s*:\s*,\s*-1\s*(?::\s*)?[,\]]")
_WORD = re.compile(r"[A-Za-z_]\w*")
_CLEARING_NAMES = frozenset({"zero_grad", "grad"})
# Functions that call functions, so far down.
_DEPTH = 3
_MOST = 2000
# So many of what is in a container, or of an object's attributes.
_MANY = 200
# What leads from a layer of PyTorch's, or of another library's, to the user's: those in it, hooks, and a method put in its place.
_OF_LAYERS = ("_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward")


def never_clears_gradients(source: str, namespace: Mapping[str, Any]) -> bool:
    """Whether a cell runs backward and an optimizer's step itself, and neither it nor a function of the user's that it names
    touches gradients otherwise."""
    text = _COMMENT.sub("", source)
    if not (_BACKWARD.search(text) and _STEP.search(text)) or _CLEARS.search(text):
        return False
    seen: set[int] = set()
    named = (one for word in set(_WORD.findall(text)) for one in _functions_of(entry(namespace, word)))
    return not any(_clears(function, _DEPTH, seen) for function in named)


def reads_last_position(source: str, namespace: Mapping[str, Any]) -> bool:
    """Whether a cell, or a function of the user's that it names, takes the last of the positions of something: ``[:, -1]``."""
    text = _COMMENT.sub("", source)
    if _LAST_POSITION.search(text):
        return True
    functions = [one for word in set(_WORD.findall(text)) for one in _functions_of(entry(namespace, word))]
    return any(_LAST_POSITION.search(_text_of(one.__code__)) for one in functions[:_MOST])


def _text_of(code: CodeType) -> str:
    numbers = [line for *_, line in code.co_lines() if line is not None] or [code.co_firstlineno]
    return "".join(linecache.getline(code.co_filename, number) for number in range(min(numbers), max(numbers) + 1))


def mentioned_and_unread(source: str, namespace: Mapping[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    """The names that a cell uses: those in its text, those in the functions of the user's that these lead to, and those of what
    such a function holds (in its closure, or in the object that it belongs to).

    And of those the ones that it gives a value before anything reads what they had, itself or such a function.
    """
    words = frozenset(_WORD.findall(source))
    behind = _of_functions(words, namespace)
    # (Lines of IPython's can't be read.)
    made = set[str]()
    with suppress(SyntaxError):
        made = made_anew(source)
    return words | behind, frozenset(made) - behind


def _of_functions(words: frozenset[str], namespace: Mapping[str, Any]) -> frozenset[str]:
    """The names in the functions of the user's that words of a program lead to, and those of the variables whose very objects
    these lead to."""
    found = set[str]()
    todo = deque(entry(namespace, word) for word in words)
    seen: dict[int, Any] = {}
    led_to: set[int] = set()
    kinds: dict[int, tuple[type, bool]] = {}
    walked = 0
    while todo and walked < _MOST:
        thing = todo.popleft()
        if thing is None or id(thing) in seen:
            continue
        # (Kept until the end: an object that was made here must not leave its number to another.)
        seen[id(thing)] = thing
        if _leads_nowhere(thing):
            continue
        walked += 1
        if is_a(thing, FunctionType) and not is_library_file(thing.__code__.co_filename):
            fresh = set(_names_in(thing.__code__)) - found
            found |= fresh
            todo.extend(entry(thing.__globals__, name) for name in fresh)
        further = [one for one in _led_to(thing, kinds) if one is not None]
        led_to.update(map(id, further))
        todo.extend(further)
    led_to &= seen.keys()
    return frozenset(found) | {name for name, value in items(namespace) if id(value) in led_to}


def _leads_nowhere(thing: Any) -> bool:
    """A tensor, a plain value, an empty table: a module of PyTorch's has a dozen of these."""
    if is_a(thing, torch.Tensor):
        return True
    return not dict.__len__(thing) if is_a(thing, dict) else is_a(thing, (int, float, complex, str, bytes))


def _led_to(thing: Any, kinds: dict[int, tuple[type, bool]]) -> Iterator[Any]:
    """What a function holds, what is in a container, the functions of a class and what its objects keep. kinds: by their ids, the
    classes whose functions were given already, and whether they are layers that are none of the user's."""
    if is_a(thing, FunctionType):
        yield from _held_by(thing)
    elif is_a(thing, MethodType):
        yield from (thing.__func__, thing.__self__)
    elif type(thing) is partial:
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif is_a(thing, dict):
        yield from (value for _, value in items(thing)[:_MANY])
    elif is_exactly(thing, (list, tuple, set, frozenset)):
        yield from list(thing)[:_MANY]
    elif is_a(thing, (type, ModuleType)):
        yield from _functions_of(thing)
    else:
        kind, kept = type(thing), attributes(thing)
        if id(kind) not in kinds:
            functions = list(_functions_of(thing))
            kinds[id(kind)] = kind, is_a(thing, torch.nn.Module) and not functions
            yield from functions
        if kinds[id(kind)][1]:
            yield from (entry(kept, name) for name in _OF_LAYERS)
        else:
            yield from (value for _, value in items(kept)[:_MANY])


def _held_by(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        # (One that has no value yet.)
        with suppress(ValueError):
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from (value for _, value in items(function.__dict__))


def _functions_of(thing: Any) -> Iterator[FunctionType]:
    """The functions of the user's that a variable stands for: itself, a class's methods, a module's functions."""
    if is_a(thing, FunctionType):
        yield thing
    elif is_a(thing, MethodType):
        yield from _functions_of(thing.__func__)
    elif is_a(thing, ModuleType):
        if is_users_module(thing):
            yield from (value for _, value in items(attributes(thing)) if is_a(value, FunctionType))
    else:
        for kind in mro(thing if is_a(thing, type) else type(thing)):
            if is_users_module(sys.modules.get(module_of_class(kind))):
                yield from (value for value in list(entries_of_class(kind).values()) if is_a(value, FunctionType))


def _clears(function: FunctionType, depth: int, seen: set[int]) -> bool:
    if id(function) in seen or len(seen) > _MOST:
        return False
    seen.add(id(function))
    names = frozenset(_names_in(function.__code__))
    if names & _CLEARING_NAMES:
        return True
    if not depth:
        return False
    called = (entry(function.__globals__, name) for name in names)
    return any(_clears(one, depth - 1, seen) for one in called if is_a(one, FunctionType))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
