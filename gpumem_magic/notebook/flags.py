"""The flags of ``%%gpumem``: what their values may be, and where they end and the user's statement begins."""

from __future__ import annotations

import argparse
import keyword
import re
from typing import Any

from IPython.core.error import UsageError

_WORD = re.compile(r"""\s*("[^"]*"|'[^']*'|\S+)""")


def identifier(text: str) -> str:
    """A name for a variable. Raises argparse.ArgumentTypeError, as the others do."""
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name for a variable")
    return text


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def size(text: str) -> int:
    """Bytes, from 10GiB or 500MiB."""
    from gpumem_magic.virtual.card.catalog import UnknownDevice, parse_size

    try:
        return parse_size(text)
    except UnknownDevice as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse(parser: Any, line: str) -> tuple[argparse.Namespace, str]:
    """The flags at the front of a line, and the rest of it untouched. parser: the magic's. Raises UsageError, in one line."""
    flags: list[str] = []
    rest = line
    while (found := _WORD.match(rest)) and found[1].startswith("-"):
        flag, rest = found[1], rest[found.end() :]
        if flag == "--":
            break
        flags.append(flag)
        try:
            parser.parse_args([flag])
        except UsageError as error:
            # It wants a value, or it is wrong.
            value = _WORD.match(rest)
            if value is None or not str(error).endswith("expected one argument"):
                raise UsageError(f"%gpumem: {error}") from None
            flags.append(value[1].strip("\"'"))
            rest = rest[value.end() :]
    try:
        options = parser.parse_args(flags)
    except UsageError as error:
        raise UsageError(f"%gpumem: {error}") from None
    if options.plot and options.table:
        raise UsageError("%gpumem: choose one of --plot and --table")
    rest = rest.strip()
    return options, "" if rest.startswith("#") else rest
