"""What somebody may have meant who mistyped a word."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

_REFUSED = re.compile(r"unrecognized arguments: (\S+)|invalid choice: '([^']+)'")


def did_you_mean(word: str, known: Iterable[str], most: int = 1) -> str:
    """``; did you mean --plot?``, or nothing where no known word is near. most: how many are offered."""
    near = get_close_matches(word, list(known), n=most, cutoff=0.7)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def meant(message: str, known: Iterable[str]) -> str:
    """The same for the word that argparse refuses in its message."""
    refused = _REFUSED.search(message)
    return "" if refused is None else did_you_mean(refused[1] or refused[2], known)
