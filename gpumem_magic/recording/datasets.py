"""The tensors of a data set, of those that a data loader or another data set takes theirs from, too.

Nothing of the program's runs: a data set is asked for no item, only for what it has as attributes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset

from gpumem_magic.looks import objects, tensors
from gpumem_magic.looks.tensors import Named

# Of a data set in a data set, in a loader; and a table of lists of tensors in one.
_DEPTH = 5


def tensors_of_data(value: Any, name: str, limit: int) -> list[Named]:
    """Those among the first `limit` things of each level, with their places; none where the value is neither a data set nor a
    loader. Inside `no_dispatch`."""
    return list(_walk(value, name, limit)) if _is_of_data(value) else []


def _is_of_data(value: Any) -> bool:
    return objects.is_a(value, (Dataset, DataLoader)) and not tensors.is_module(value)


def _walk(value: Any, name: str, limit: int) -> Iterator[Named]:
    # (Level by level, and each has its share: a million words in a table hide nothing beside it.)
    level = [(name, value)]
    for _ in range(_DEPTH):
        below: list[tuple[str, Any]] = []
        for whole, one in level:
            for place, part in islice(_parts(one), max(1, limit // len(level))):
                if tensors.is_tensor(part):
                    yield f"{whole}{place}", part
                elif objects.is_a(part, (list, tuple, dict)) or _is_of_data(part):
                    below.append((f"{whole}{place}", part))
        level = below[:limit]


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if objects.is_a(value, DataLoader):
        yield ".dataset", objects.attribute(value, "dataset")
    elif _is_of_data(value):
        for word, one in objects.items(objects.attributes(value)):
            yield f".{objects.text(word)}", one
    elif objects.is_a(value, (list, tuple)):
        for number, one in enumerate(objects.members(value)):
            yield f"[{number}]", one
    elif objects.is_a(value, dict):
        # (One that grows meanwhile is left there.)
        with suppress(RuntimeError):
            for key, one in dict.items(value):
                place = objects.shown(key)[:40] if objects.is_a(key, (str, int)) else objects.name_of_class(type(key))
                yield f"[{place}]", one
