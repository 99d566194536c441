"""How the memory of a program grows with a value: bytes per unit, what stays, and what grows faster than linearly, and where."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from gpumem_magic.trials.foresight import Foresight
from gpumem_magic.trials.search import SearchResult
from gpumem_magic.trials.tried import Share, Tried

# Of the peak, and of what a straight line would be at half the value: less is not worth a word.
_LEAST, _BEND = 0.05, 0.1
_MOST = 2
# Of the peak: what a formula may be off.
_OFF = 0.01


@dataclass(frozen=True)
class Bent:
    """A line's memory that grows faster than linearly. at_half: with half the value, in bytes."""

    share: Share
    at_half: int


@dataclass(frozen=True)
class Growth:
    """Around the largest value that fits, in bytes. per_unit: what one more takes; constant: what stays with none. bent: the
    largest first."""

    per_unit: float
    constant: int
    bent: tuple[Bent, ...] = ()

    def is_line(self, value: int, allocated: int) -> bool:
        """Whether the two make what the largest value takes."""
        return self.constant >= 0 and abs(self.constant + self.per_unit * value - allocated) < _OFF * allocated


@dataclass(frozen=True)
class FitCase:
    """One card, and one value of the name that makes rows (None where there is no second name), with what was found."""

    device: str
    across: int | None
    found: SearchResult
    growth: Growth | None


def growth_of(name: str, best: Tried, tried: tuple[Tried, ...], sight: Foresight) -> Growth | None:
    """None where nothing tells."""
    value = best.values[name]
    fitting = {one.values[name]: one for one in tried if one.fits}
    smaller = [each for each in fitting if each < value]
    if not smaller:
        return None
    if not sight.sees:
        near = max(smaller)
        per_unit = (best.allocated - fitting[near].allocated) / (value - near)
        return Growth(per_unit, round(best.allocated - per_unit * value))
    now: defaultdict[int, int] = defaultdict(int)
    half: defaultdict[int, int] = defaultdict(int)
    none: defaultdict[int, int] = defaultdict(int)
    at_half = value // 2
    step = max(1, value // 8)
    less = 0
    for request, place in sight.live:
        now[place] += sight.size(request, value)
        half[place] += sight.size(request, at_half)
        none[place] += sight.size(request, 0)
        less += sight.size(request, value - step)
    per_unit = (sum(now.values()) - less) / step
    bent = []
    for place, size in now.items():
        straight = none[place] + (size - none[place]) * at_half / value
        if size > _LEAST * best.allocated and half[place] < (1 - _BEND) * straight:
            bent.append(Bent(best.shares[place], half[place]))
    bent.sort(key=lambda one: -one.share.bytes)
    constant = best.allocated - sum(now.values()) + sum(none.values())
    return Growth(per_unit, constant, tuple(bent[:_MOST]))
