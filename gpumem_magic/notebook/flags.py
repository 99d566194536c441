"""The arguments of a magic: one parser for each, from which its help, its completions and its error lines follow.

What each magic takes stands in ``magics.json``: the names of an argument, what argparse's `add_argument` takes besides (its type
by a name from `_TYPES`), and under "offers" what the word that is being typed may become, where these are not its choices.
"""

# IPython's parser carries no types.
# mypy: disallow-any-unimported=False, disallow-subclassing-any=False, disallow-untyped-calls=False

from __future__ import annotations

import argparse
import functools
import json
import keyword
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from IPython.core.error import TryNext, UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from gpumem_magic.notebook.holding import freeable
from gpumem_magic.notebook.load import files_here
from gpumem_magic.owners.model import FREEABLE
from gpumem_magic.spelling import meant

Offers = Callable[[str], list[str]]
"""What a word may become, by its beginning."""
# A line that says that what follows is code.
_MARKUP = re.compile(r"^::\n\n", re.MULTILINE)
_WORD = re.compile(r"""\s*("[^"]*"|'[^']*'|\S+)""")


class Words(MagicArgumentParser):
    """The parser of one magic. split: how its line becomes words."""

    def __init__(self, prog: str, *, split: Callable[[str], list[str]] = shlex.split, **options: Any) -> None:
        super().__init__(prog=prog, **options)
        # From Python 3.14 on, help for a terminal is coloured, and documentation would be too.
        self.color = False
        self._split = split
        self._taken: list[tuple[argparse.Action, Offers | None]] = []

    def take(self, wanted: Sequence[Any]) -> None:
        """Adds arguments; those in a list of their own exclude each other."""
        for one in wanted:
            if isinstance(one, list):
                group = self.add_mutually_exclusive_group()
                self._taken += [_added(group, **each) for each in one]
            elif "commands" in one:
                # A word that may stand first, each with arguments of its own.
                added = self.add_subparsers(dest="command")
                for name, arguments in one["commands"].items():
                    added.add_parser(name).take(arguments)
                self._taken.append((added, None))
            else:
                self._taken.append(_added(self, **one))

    def error(self, message: str) -> NoReturn:
        flags = [name for action, _ in self._taken for name in action.option_strings]
        hint = meant(message, [*flags, *(word for action, _ in self._taken for word in action.choices or ())])
        if not hint and flags and "unrecognized arguments: -" in message:
            hint = f"; there are {', '.join(self._flags())}"
        raise UsageError(f"%{self.prog}: {message}{hint}")

    def _flags(self) -> list[str]:
        return sorted(max(action.option_strings, key=len) for action, _ in self._taken if action.option_strings)

    def read(self, line: str) -> argparse.Namespace:
        """The words of a line. Raises UsageError, in one line."""
        try:
            words = self._split(line)
        except ValueError as error:  # an open quotation mark
            self.error(str(error))
        # As in Python, what is behind a # is for the reader; behind a -- there are no flags and no comments.
        signs = (place for place, word in enumerate(words) if word.startswith("#") and "--" not in words[:place])
        comment = next(signs, None)
        options: argparse.Namespace = self.parse_args(words[:comment])
        return options

    def read_front(self, line: str) -> tuple[argparse.Namespace, str]:
        """The flags at the front of a line, and the rest of it untouched. Raises UsageError, in one line."""
        flags: list[str] = []
        rest = line
        while (found := _WORD.match(rest)) and found[1].startswith("-"):
            flag, rest = found[1], rest[found.end() :]
            if flag == "--":
                break
            flags.append(flag)
            try:
                self.parse_known_args([flag])
            except UsageError:
                # It wants a value, or it is wrong, which the last look at all flags will say.
                if (value := _WORD.match(rest)) is not None:
                    flags.append(value[1].strip("\"'"))
                    rest = rest[value.end() :]
        rest = rest.strip()
        return self.parse_args(flags), "" if rest.startswith("#") else rest

    def complete(self, event: Any) -> list[str]:
        """What the Tab key offers. Raises TryNext where IPython is to complete names and files as everywhere."""
        symbol = str(event.symbol)
        words = str(event.line).split()
        before = words[:-1] if symbol and words and words[-1] == symbol else words
        for action, offers in self._taken:
            if before and before[-1] in action.option_strings and action.nargs != 0:
                return _offered(action, offers, symbol)
        flags = self._flags()
        places = [(action, offers) for action, offers in self._taken if not action.option_strings]
        if symbol.startswith("-") or not (symbol or places):
            return flags
        found = [word for action, offers in places for word in _offered(action, offers, symbol)]
        # Files are many: among them flags would only be in the way.
        return found if any(action.nargs == "+" for action, _ in places) else [*found, *flags]


def _added(owner: Any, names: list[str], offers: str = "", **options: Any) -> tuple[argparse.Action, Offers | None]:
    if "type" in options:
        options["type"] = _TYPES[options["type"]]
    return owner.add_argument(*names, **options), _OFFERS.get(offers)


def _offered(action: argparse.Action, offers: Offers | None, symbol: str) -> list[str]:
    if offers is not None:
        return offers(symbol)
    if action.choices is None:
        raise TryNext
    return list(action.choices)


def words(split: Callable[[str], list[str]] = shlex.split) -> Callable[[Any], Any]:
    """Gives a magic its parser, as `parser`, and the whole help as its documentation, which ``--help`` alone prints."""

    def give(magic: Any) -> Any:
        parser = Words(magic.__name__, split=split, description=magic.__doc__)
        parser.take(_MAGICS[magic.__name__])

        @functools.wraps(magic)
        def or_help(self: Any, line: str, *cell: str) -> Any:
            __tracebackhide__ = True
            if line.strip() == "--help":
                # Beside IPython's `?`, which shows this documentation as it is: without its markup.
                print(_MARKUP.sub("", or_help.__doc__ or "").replace("``", "`"))
                return None
            return magic(self, line, *cell)

        or_help.parser = parser  # type: ignore[attr-defined]
        or_help.__doc__ = parser.format_help()
        return or_help

    return give


# ---- what a value may be; each raises argparse.ArgumentTypeError


def identifier(text: str) -> str:
    """A name for a variable."""
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


def varied(text: str) -> Any:
    """A name and its values, from batch_size=1..1024."""
    from gpumem_magic.trials import values

    try:
        return values.varied(text)
    except values.VaryError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def device_names(_symbol: str) -> list[str]:
    """What the Tab key offers for a device."""
    from gpumem_magic.virtual.card.models import CATALOG

    return ["cuda", *CATALOG]


_TYPES: Mapping[str, Callable[[str], Any]] = {
    one.__name__: one for one in (int, float, identifier, count, size, varied, freeable)
}
_OFFERS: Mapping[str, Offers] = {
    "device": device_names,
    "device or off": lambda symbol: [*device_names(symbol), "off"],
    "file": files_here,
    "freeable": lambda _: [*FREEABLE],
}
_MAGICS = json.loads(
    Path(__file__).with_name("magics.json").read_text("utf-8").replace("{FREEABLE}", ", ".join(FREEABLE))
)
