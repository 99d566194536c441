"""What matplotlib and Pillow tell a program that logs everything is about the program's own pictures, not about ours."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARIES = ("matplotlib", "PIL")


@contextmanager
def quiet() -> Iterator[None]:
    """Around imports of theirs and what they draw: their warnings are logged, and nothing below."""
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(max(logging.WARNING, logger.level))
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
