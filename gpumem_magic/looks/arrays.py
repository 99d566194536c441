"""NumPy's arrays of objects, and pandas' columns, which are such arrays: Python's garbage collector does not look into them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from itertools import product, repeat
from operator import is_
from typing import Any

from gpumem_magic.looks.objects import is_a, module_of_class


def kind() -> Any:
    """The class of NumPy's arrays; None where nobody has imported it."""
    return getattr(sys.modules.get("numpy"), "ndarray", None)


def some_in(things: Iterable[Any], array: Any) -> bool:
    """Whether there are arrays among them. array: `kind()`. (By identity: a class may have an `__eq__` of its metaclass's.)"""
    return array is not None and any(map(is_, map(type, things), repeat(array)))


def of_objects(things: Iterable[Any], array: Any) -> Iterator[Any]:
    return (one for one in things if type(one) is array and array.dtype.__get__(one).kind == "O")


def is_of_objects(thing: Any) -> bool:
    array = kind()
    return array is not None and is_a(thing, array) and array.dtype.__get__(thing).kind == "O"


def members(thing: Any) -> Iterator[Any]:
    """What is in an array of objects, in order."""
    found: Iterator[Any] = iter(kind().flat.__get__(thing))
    return found


def places(thing: Any) -> Iterator[str]:
    """Where that is, as a user may write it: ``[2]``, ``[0][1]``."""
    shape: tuple[int, ...] = kind().shape.__get__(thing)
    return ("".join(f"[{one}]" for one in place) for place in product(*map(range, shape)))


def held_by(thing: Any) -> list[Any]:
    """What is in an array of objects, and the array of which it is a view."""
    base = kind().base.__get__(thing)
    return [*members(thing), *([] if base is None else [base])]


def labels(thing: Any) -> dict[int, str]:
    """id of what is in it -> how a user reaches it."""
    return {id(one): place for place, one in zip(places(thing), members(thing), strict=True)}


def is_of_pandas(thing: Any) -> bool:
    """Whether pandas made its class: how it keeps its columns is nothing that a program says."""
    return module_of_class(type(thing)).partition(".")[0] == "pandas"


def columns(thing: Any) -> Iterator[Any]:
    """The arrays of objects in which a frame or a column of pandas' keeps what is in it."""
    left = [thing]
    for _ in range(5):  # its attributes, its manager, that one's tuple of blocks, and they
        left = [inner for one in left for inner in gc.get_referents(one)]
        yield from filter(is_of_objects, left)
        left = [one for one in left if is_of_pandas(one) or is_a(one, (tuple, dict))]
