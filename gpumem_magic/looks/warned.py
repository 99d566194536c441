"""What the program was warned of already stays so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warnings_remembered() -> Iterator[None]:
    """For work that changes warnings' filters and puts them back, as `warnings.catch_warnings` does.

    Python forgets at each change which warnings were shown already, and would show the user's again.
    """
    names = [name for name in ("_filters_mutated", "_filters_mutated_lock_held") if hasattr(warnings, name)]
    before = [getattr(warnings, name) for name in names]
    try:
        for name in names:
            setattr(warnings, name, lambda: None)
        yield
    finally:
        for name, one in zip(names, before, strict=True):
            setattr(warnings, name, one)
