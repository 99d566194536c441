"""What the Tab key offers behind the magics. Each answer imports what it needs when it is asked for."""

from __future__ import annotations

from typing import Any

_FLAGS = (
    "--budget",
    "--device",
    "--into",
    "--max-delta",
    "--max-iterations",
    "--no-lines",
    "--output",
    "--plot",
    "--quiet",
    "--table",
    "--until-repeat",
    "--warn",
)


def flags(event: Any) -> list[str]:
    """The flags, and the devices' names behind ``--device``."""
    words = event.line.split()
    before = words[:-1] if event.symbol and words and words[-1] == event.symbol else words
    if before and before[-1] == "--device":
        return _device_names()
    return list(_FLAGS) if event.symbol.startswith("-") or not event.symbol else []


def devices(_event: Any) -> list[str]:
    """The names that ``%gpumem_device`` takes."""
    return [*_device_names(), "off"]


def watch(event: Any) -> list[str]:
    """For ``%gpumem_watch``."""
    from gpumem_magic.notebook.watching import complete

    return complete(event)


def load(event: Any) -> list[str]:
    """For ``%gpumem_load``: files."""
    from gpumem_magic.notebook.load import complete

    return complete(event)


def who(event: Any) -> list[str]:
    """For ``%gpumem_who``."""
    from gpumem_magic.notebook.holding import complete_who

    return complete_who(event)


def free(event: Any) -> list[str]:
    """For ``%gpumem_free``."""
    from gpumem_magic.notebook.holding import complete_free

    return complete_free(event)


def _device_names() -> list[str]:
    from gpumem_magic.virtual.card.models import CATALOG

    return ["cuda", *CATALOG]
