"""Whether iterations repeat exactly: the same requests and frees, at the same addresses, again and again.

On a virtual device, whose memory depends on nothing but the program, more iterations can then show nothing new.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from gpumem_magic.devices.base import Log
from gpumem_magic.snapshot.model import TraceEvent

ENOUGH = 3
"""So many equal periods in a row are called a repetition."""

LONGEST_PERIOD = 8
"""In iterations. A loop that rebinds its batch alternates between places in memory; a Trainer of bert-large goes round in six."""


class Repetition(NamedTuple):
    """Iterations `first` to `last` (0-based) repeat with a period of `period` iterations."""

    first: int
    last: int
    period: int


def signature(events: Iterable[TraceEvent]) -> bytes:
    """A digest of what the allocator did: actions, addresses, sizes and streams in order, without times and stacks."""
    digest = hashlib.blake2b(digest_size=16)
    for event in events:
        digest.update(b"%s %d %d %d;" % (event.action.encode(), event.address, event.size, event.stream))
    return digest.digest()


class Iterations:
    """Those of a program. `ends`: where the first began in the logs of virtual devices, and where each ended."""

    def __init__(self, logs: Mapping[int, Log]) -> None:
        self._logs = logs
        self.ends: list[dict[int, int]] = [{index: 0 for index, log in logs.items() if log.growing is not None}]
        self.signatures: list[bytes] = []

    def ended(self) -> None:
        """Says that one ends here."""
        begun = self.ends[-1]
        self.ends.append({index: self._logs[index].position() for index in begun})
        self.signatures.append(
            b"".join(
                signature(log.growing.events[begun[index] :])
                for index, log in sorted(self._logs.items())
                if log.growing is not None
            )
        )


def alike_at_end(signatures: Sequence[Hashable]) -> int:
    """How many equal periods are at the end, for the length that gives most; 1 where none repeats, 0 for no iterations."""
    return max(_equal_at_end(signatures, period) for period in range(1, LONGEST_PERIOD + 1))


def period_at_end(signatures: Sequence[Hashable]) -> int:
    """The shortest period, in iterations, of a repetition at the end; 0 where there is none."""
    periods = range(1, LONGEST_PERIOD + 1)
    return next((period for period in periods if _equal_at_end(signatures, period) >= ENOUGH), 0)


def _equal_at_end(signatures: Sequence[Hashable], period: int) -> int:
    if len(signatures) < period:
        return 0
    same = 0
    while same + period < len(signatures) and signatures[-1 - same] == signatures[-1 - same - period]:
        same += 1
    return same // period + 1


def longest_repetition(signatures: Sequence[bytes]) -> Repetition | None:
    """The longest run of at least `ENOUGH` equal periods; the earliest and the shortest period among equals."""
    best: Repetition | None = None
    for period in range(1, LONGEST_PERIOD + 1):
        first = 0
        for number in range(period, len(signatures) + 1):
            if number < len(signatures) and signatures[number] == signatures[number - period]:
                continue
            found = Repetition(first, number - 1, period)
            length = found.last - found.first + 1
            if length >= ENOUGH * period and (best is None or length > best.last - best.first + 1):
                best = found
            first = number - period + 1
    return best
