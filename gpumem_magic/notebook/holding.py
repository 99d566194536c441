"""The lines of ``%gpumem_who`` and ``%gpumem_free``: parsed here, done by `search` and `free`."""

# IPython's decorators and errors carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import shlex
from typing import Any

from IPython.core.error import TryNext, UsageError

from gpumem_magic.notebook.devices import machine_in_use

WHO_FLAGS = ("--all", "--cycles", "--modules", "--depth")
FREE_WORDS = ("traceback", "out", "cycles", "cache")
_WHO_USAGE = "%gpumem_who [NAME] [--all] [--cycles] [--modules [--depth N]]"
_FREE_USAGE = "%gpumem_free [--dry-run] [traceback] [out] [cycles] [cache]"
_DEPTH = 3


def who_line(shell: Any, line: str) -> None:
    """Does what a line says. Raises UsageError, in one line."""
    name, flags, depth = _who_words(line)
    machine = machine_in_use()
    from gpumem_magic.owners import text
    from gpumem_magic.owners.search import find_owners
    from gpumem_magic.owners.tree import branches, by_layer, inner_layer

    holdings = find_owners(machine, shell.user_ns, shell, cycles="--cycles" in flags)
    limit = None if "--all" in flags else text.SHOWN
    if "--modules" in flags:
        top = by_layer(holdings) if name is None else inner_layer(by_layer(holdings), name)
        if top is None:
            raise UsageError(f"no layer {name!r} holds memory on the device; %gpumem_who --modules lists those that do")
        print(text.tree_text(branches(top, depth)))
    elif name is None:
        print(text.summary(holdings, limit))
    else:
        found = text.details(holdings, name, limit)
        if found is None:
            raise UsageError(text.unknown_name(holdings, name))
        print(found)


def free_line(shell: Any, line: str) -> None:
    """Does what a line says. Raises UsageError, in one line."""
    words = line.split()
    dry = "--dry-run" in words
    words = [word for word in words if word != "--dry-run"]
    for word in words:
        if word not in FREE_WORDS:
            raise UsageError(f"unexpected {word!r}: {_FREE_USAGE}; a variable is freed with `del NAME`")
    machine = machine_in_use()
    from gpumem_magic.owners import free

    chosen = words or free.DEFAULT
    act = free.would_free if dry else free.free
    print(free.words_of(act(machine, shell, shell.user_ns, chosen), dry=dry))


def complete_who(event: Any) -> list[str]:
    """The flags; names are completed as everywhere."""
    if not str(event.symbol).startswith("-"):
        raise TryNext
    return list(WHO_FLAGS)


def complete_free(event: Any) -> list[str]:
    """The words that may follow ``%gpumem_free``."""
    return ["--dry-run"] if str(event.symbol).startswith("-") else ["--dry-run", *FREE_WORDS]


def _who_words(line: str) -> tuple[str | None, set[str], int]:
    try:
        words = shlex.split(line, posix=False)
    except ValueError as error:
        raise UsageError(f"%gpumem_who: {error}") from None
    names: list[str] = []
    flags: set[str] = set()
    depth = _DEPTH
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag == "--depth":
            value = value if equals else words.pop(0) if words else ""
            if not value.isdecimal() or int(value) < 1:
                raise UsageError(f"--depth wants a whole number of at least 1, not {value!r}")
            depth = int(value)
            flags.add("--modules")
        elif word in WHO_FLAGS:
            flags.add(word)
        elif word.startswith("-") or names:
            raise UsageError(f"unexpected {word!r}: {_WHO_USAGE}")
        else:
            names.append(word)
    return (names[0] if names else None), flags, depth
