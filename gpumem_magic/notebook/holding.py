"""``%gpumem_who`` and ``%gpumem_free``: who holds the memory, and freeing what no variable holds."""

# IPython's errors carry no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from IPython.core.error import UsageError

from gpumem_magic.notebook.devices import machine_in_use
from gpumem_magic.notebook.holding_text import SHOWN, details, freed_text, summary, tree, unknown_name
from gpumem_magic.owners.model import FREEABLE, NAMELESS
from gpumem_magic.views.sheet import show

_DEPTH = 3


def who(shell: Any, options: argparse.Namespace) -> None:
    """Shows who holds it. Raises UsageError, in one line."""
    machine = machine_in_use()
    from gpumem_magic.owners.search import find_owners
    from gpumem_magic.owners.tree import branches, by_layer, inner_layer

    looked = options.cycles

    def look_for_cycles(missing: Mapping[tuple[int, int], int], allocated: int) -> bool:
        nonlocal looked
        looked |= NAMELESS * sum(missing.values()) >= allocated
        return bool(looked)

    holdings = find_owners(machine, shell.user_ns, shell, cycles=look_for_cycles)
    name, limit = options.name, None if options.all else SHOWN
    if options.modules or options.depth is not None:
        top = by_layer(holdings) if name is None else inner_layer(by_layer(holdings), name)
        if top is None:
            raise UsageError(f"no layer {name!r} holds memory on the device; %gpumem_who --modules lists those that do")
        show(tree(branches(top, options.depth or _DEPTH)))
    elif name is None:
        show(summary(holdings, limit, looked=looked))
    else:
        found = details(holdings, name, limit)
        if found is None:
            raise UsageError(unknown_name(holdings, name, shell.user_ns))
        show(found)


def freeable(text: str) -> str:
    """A word that says what to let go of. Raises argparse.ArgumentTypeError."""
    if text not in FREEABLE:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(FREEABLE)}; a variable is freed with `del NAME`"
        )
    return text


def free(shell: Any, options: argparse.Namespace) -> None:
    """Lets go of it, and prints what came back. Raises UsageError, in one line."""
    machine = machine_in_use()
    from gpumem_magic.owners import free as freeing

    act = freeing.would_free if options.dry_run else freeing.free
    freed = act(machine, shell, shell.user_ns, options.words or freeing.DEFAULT)
    print(freed_text(freed, dry=options.dry_run))
