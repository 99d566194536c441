"""Which of a program's tensors are a cache of keys and values, told by where it has them.

By its name (``past_key_values``, ``kv_cache``, ``layer.cache_k``); or as the keys and values, in pairs, of what is called a
cache or a past, itself or by its class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

import torch

from gpumem_magic.looks import objects, tensors
from gpumem_magic.looks.tensors import Named

_WORDS = r"(?:kvs?|key_?values?|ks?|vs?|keys?|values?)"
_NAMED = re.compile(
    rf"(?i)(?:^|[^a-z])(?:past_?(?:kvs?|key_?values?)|{_WORDS}_?caches?|caches?_?{_WORDS})(?:_states)?(?![a-z])"
)
_LIKELY = re.compile(r"(?i)(?:^|[^a-z])(?:past|presents?|caches?)(?![a-z])")
_PAST = re.compile(r"(?i)(?:^|[^a-z])(?:past|presents?)(?![a-z])")
_LAYER = re.compile(r"\[\d+\]$")
_KEYS = re.compile(r"(?i)(?:^|_)(?:k|keys?)(?:_|$)")
_VALUES = re.compile(r"(?i)(?:^|_)(?:v|values?)(?:_|$)")
_CLASS = re.compile(r"Cache|_cache\b|^cache")
# A batch, positions and what a head has of each, at least.
_FEWEST_DIMENSIONS = 3
_DIMENSIONS_WITH_HEADS = 4
# A cache may be a list of layers in an object that is in another one.
_DEPTH = 6
# So much is looked at of what is called a cache, and of what is not.
_MOST, _GLANCE = 256, 4


@lru_cache(4096)
def is_named(place: str) -> bool:
    """Whether a place says that keys and values of earlier tokens are kept there."""
    return _NAMED.search(place) is not None


@lru_cache(4096)
def _is_likely(place: str) -> bool:
    return _LIKELY.search(place) is not None


def keys_and_values(value: Any, place: str, limit: int) -> list[Named]:
    """Those of a cache in `value`, at most `limit`, each with its place. Inside `no_dispatch`; nothing of the program's runs."""
    return list(islice(_walk(value, place, is_named(place), _is_likely(place), _DEPTH), limit))


def in_module(root: torch.nn.Module, limit: int) -> Iterator[Named]:
    """What modules keep as caches in attributes of theirs that are no buffers."""
    for path, module in tensors.modules_in(root):
        for name, value in objects.items(objects.attributes(module)):
            word = objects.text(name)
            if not word.startswith("_") or is_named(word):
                yield from keys_and_values(value, f"{path}.{word}" if path else word, limit)


def _walk(value: Any, place: str, sure: bool, likely: bool, depth: int) -> Iterator[Named]:
    if tensors.is_tensor(value):
        if sure and len(tensors.shape(value)) >= _FEWEST_DIMENSIONS:
            yield place, value
    elif depth and objects.is_sequence(value):
        known = sure or likely
        inside = list(islice(objects.members(value), _MOST if known else _GLANCE))
        sure = sure or (likely and _is_pair(inside, place))
        for number, one in enumerate(inside):
            yield from _walk(one, f"{place}[{number}]", sure, likely, depth - 1)
    elif depth:
        is_table = objects.is_a(value, dict)
        likely = likely or (not is_table and _is_cache(type(value)))
        if not is_table and not likely:
            return
        entries = objects.items(value if is_table else objects.attributes(value))
        most = _MOST if sure or likely else 4 * _GLANCE
        words = [(objects.text(key) or objects.shown(key), one) for key, one in entries[:most]]
        paired = likely and all(any(kind.search(word) for word, _ in words) for kind in (_KEYS, _VALUES))
        for word, one in words:
            its = sure or is_named(word) or (paired and bool(_KEYS.search(word) or _VALUES.search(word)))
            where = f"{place}[{word!r}]" if is_table and place else f"{place}.{word}" if place else word
            yield from _walk(one, where, its, likely or _is_likely(word), depth - 1)


def _is_pair(inside: list[Any], place: str) -> bool:
    """Keys and values of one layer: two tensors of the same shape and type.

    Anything may be kept as pairs in what is only called a cache: there they need heads, and layers, each with its own.
    """
    if len(inside) != 2 or not all(tensors.is_tensor(one) for one in inside):
        return False
    shapes = {(tensors.shape(one), tensors.dtype_name(one)) for one in inside}
    if len(shapes) != 1:
        return False
    ((shape, kind),) = shapes
    return _PAST.search(place) is not None or (
        len(shape) == _DIMENSIONS_WITH_HEADS and "float" in kind and _LAYER.search(place) is not None
    )


def _is_cache(kind: type) -> bool:
    return any(_CLASS.search(objects.name_of_class(one)) for one in objects.mro(kind))
