"""The same code in two runs: a file in another folder, or run by somebody else, is recognised by the end of its path."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

_LINE_OF_CODE = re.compile(r"(.+):(\d+) (.+)", re.DOTALL)
_SEPARATOR = re.compile(r"[/\\]")


def together(
    a: Mapping[str, int], b: Mapping[str, int], names: Mapping[str, str] | None = None
) -> dict[str, tuple[int, int]]:
    """Place -> its bytes in A and in B. Places are ``file:line function``, or other words, which match as they are.
    names: the answer of `same_files`, where it was asked about more places than these.

    A file that only one of the two has stands for the one of the other that shares the longest end of its path with it and with
    no other. Such a place is called ``.../tail:line function``, where both runs have the line and the function. A file that was
    renamed is known by its lines and functions, most of which are in one file of the other; it is called ``old.py -> new.py``.
    """
    if names is None:
        names = same_files(a, b)
    renamed = [Counter[str](), Counter[str]()]
    given: dict[str, str] = {}
    for number, side in enumerate((a, b)):
        for place, size in side.items():
            name = called(place, names)
            renamed[number][name] += size
            given.setdefault(name, place)
    found = {}
    for name, place in given.items():
        is_both = all(name in side for side in renamed)
        found[name if is_both else place] = renamed[0][name], renamed[1][name]
    return found


def same_files(a: Iterable[str], b: Iterable[str]) -> dict[str, str]:
    """Path -> what both are called, for files that are the same code in two runs. a, b: their places."""
    sides = _lines(a), _lines(b)
    names = _tails(*sides)
    return names | _renamed(*({path: lines for path, lines in side.items() if path not in names} for side in sides))


def called(line: str, names: Mapping[str, str]) -> str:
    """A line of code, with the name of its file that both runs have."""
    path = _path(line)
    return f"{names[path]}{line[len(path) :]}" if path in names else line


def _lines(side: Iterable[str]) -> dict[str, set[str]]:
    """Path -> its places, without the path."""
    found: dict[str, set[str]] = {}
    for place in side:
        if path := _path(place):
            found.setdefault(path, set()).add(place[len(path) :])
    return found


def _renamed(a: Mapping[str, set[str]], b: Mapping[str, set[str]]) -> dict[str, str]:
    """Path -> what both are called, for files of only one side that share more than half of their places, and with no other as
    many. One place alone says nothing: many a script has something in its first line."""
    shared: Counter[tuple[str, str]] = Counter()
    for path in a.keys() - b.keys():
        for other in b.keys() - a.keys():
            count = len(a[path] & b[other])
            if count > 1 and 2 * count > min(len(a[path]), len(b[other])):
                shared[path, other] = count
    names: dict[str, str] = {}
    for (path, other), count in shared.items():
        rivals = [one for one, found in shared.items() if found >= count and (one[0] == path or one[1] == other)]
        if rivals == [(path, other)]:
            old, new = _SEPARATOR.split(path)[-1], _SEPARATOR.split(other)[-1]
            names[path] = names[other] = f"{old} -> {new}" if old != new else new
    return names


def _path(place: str) -> str:
    """The file's path; "" for words that are no line of code."""
    match = _LINE_OF_CODE.fullmatch(place)
    return "" if match is None else match[1]


def _tails(a: Iterable[str], b: Iterable[str]) -> dict[str, str]:
    """Path -> what it is called, for those that stand for one of the other side."""
    ours, theirs = set(a), set(b)
    left = [
        {path: _SEPARATOR.split(path) for path in one - other if path}
        for one, other in ((ours, theirs), (theirs, ours))
    ]
    longest = min((max(map(len, side.values()), default=0) for side in left), default=0)
    names: dict[str, str] = {}
    for length in range(longest, 0, -1):
        by_tail = [_by_tail(side, length) for side in left]
        for tail, paths in by_tail[0].items():
            others = by_tail[1].get(tail, [])
            if len(paths) == len(others) == 1:
                for side, path in zip(left, (paths[0], others[0]), strict=True):
                    names[path] = f".../{'/'.join(tail)}"
                    del side[path]
    return names


def _by_tail(paths: Mapping[str, list[str]], length: int) -> dict[tuple[str, ...], list[str]]:
    found: dict[tuple[str, ...], list[str]] = {}
    for path, parts in paths.items():
        if len(parts) >= length:
            found.setdefault(tuple(parts[-length:]), []).append(path)
    return found
