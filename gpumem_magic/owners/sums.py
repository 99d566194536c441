"""Parts of a graph that only a sum joins: losses of several batches that are added before one backward."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

# What adds, averages and scales numbers: a gradient goes through it to each part alone.
_JOINING = re.compile(
    r"(?:Add|Sub|RSub|Neg|Sum|Mean|Div|Mul|Stack|Cat|ToCopy|Unsqueeze|Squeeze|View|Expand|Nansum)Backward\d*$"
)


def equal_parts(
    tops: Iterable[int], following: Mapping[int, Sequence[int]], names: Mapping[int, str], leaves: Mapping[int, object]
) -> list[set[int]]:
    """The nodes of the parts, if several of one make are joined by sums alone; else nothing.

    Nodes are numbers; names: their classes. leaves: node that collects a gradient -> its parameter, which all parts may share.
    """
    group: dict[int, int] = {}
    merged: dict[int, int] = {}
    for head in _heads(tops, following, names):
        merged[head] = head
        todo = [head]
        while todo:
            node = todo.pop()
            if node in leaves or not names[node]:
                continue
            known = group.get(node)
            if known is None:
                group[node] = head
                todo += following[node]
            elif known != head:
                merged[_first(merged, head)] = _first(merged, known)
    parts: dict[int, set[int]] = {}
    for node, head in group.items():
        parts.setdefault(_first(merged, head), set()).add(node)
    alike: dict[tuple[object, ...], list[set[int]]] = {}
    for its in parts.values():
        alike.setdefault(_make(its, following, names, leaves), []).append(its)
    return max(alike.values(), key=len, default=[])


def _heads(tops: Iterable[int], following: Mapping[int, Sequence[int]], names: Mapping[int, str]) -> list[int]:
    """The first nodes below the sums."""
    todo, seen, found = list(tops), set(), []
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if _JOINING.match(names[node]):
            todo += following[node]
        else:
            found.append(node)
    return found


def _first(merged: dict[int, int], head: int) -> int:
    while merged[head] != head:
        head = merged[head]
    return head


def _make(
    part: set[int], following: Mapping[int, Sequence[int]], names: Mapping[int, str], leaves: Mapping[int, object]
) -> tuple[object, ...]:
    """What two parts of one make have in common: operations and parameters."""
    used = frozenset(leaves[child] for node in part for child in following[node] if child in leaves)
    return frozenset(Counter(names[node] for node in part).items()), used
