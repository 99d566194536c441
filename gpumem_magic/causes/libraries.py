"""What libraries keep, and how each lets go of it in its own words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from gpumem_magic.owners.model import Station

# A class, or one that is made of it -> what to do; {} is the place of the object.
_ADVICE = {
    "torchmetrics.metric.Metric": (
        "`{0}.reset()` after each epoch lets go of them; `compute_on_cpu=True` keeps them on the host, and `thresholds=` "
        "(of curves) keeps counts instead"
    ),
    f"functools.{type(lru_cache(len)).__name__}": "`{0}.cache_clear()` lets go of it",
}


def advice(trail: Sequence[Station]) -> str | None:
    """What to do about memory on this trail, in the words of the library that keeps it; None where no library is known."""
    for station in reversed(trail):
        for kind in station.bases:
            if kind in _ADVICE:
                return _ADVICE[kind].format(station.place)
    return None
