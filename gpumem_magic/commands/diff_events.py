"""``gpumem diff --events A B``: two recordings of one program, a real and a virtual one say, allocation by allocation."""

from __future__ import annotations

import re
from bisect import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Iterator

from gpumem_magic.allocator.replayable import replayables
from gpumem_magic.attribution.sites import is_library, is_python, words_of
from gpumem_magic.snapshot.files import read
from gpumem_magic.snapshot.model import TraceEvent
from gpumem_magic.snapshot.pairing import Grown, Pairing, Recorded, growths, pair
from gpumem_magic.snapshot.timeline import Timeline
from gpumem_magic.snapshot.whole_file import printable
from gpumem_magic.units import counted, human

# Below this share of partners two recordings are told to be of different programs.
_HARDLY = 0.5
# Within so many allocations a request on both sides is told to be one that comes at another time.
_NEAR = 8
_OPERATOR = re.compile(r"at::_ops::(?!empty)(\w+)::")


def recorded(path: str, device: int | None = None) -> Recorded:
    """The recording of that device, or of the one with the most events. Raises ValueError where there is none."""
    found = [one for one in replayables(read(path)) if device in (None, one.device) and one.events]
    if not found:
        raise ValueError(
            f"{printable(path)}: it has no events{'' if device is None else f' of device {device}'} to compare"
        )
    one = max(found, key=lambda one: len(one.events))
    return Recorded(one.seed.start, one.events, Timeline(one.seed.start, one.events, one.settings), one.seed.uncertain)


def print_comparison(a: str, b: str, device: int | None, most: int) -> int:
    one, other = recorded(a, device), recorded(b, device)
    print(f"A: {printable(a)}\nB: {printable(b)}\n")
    print("\n".join(words(one, other, pair(one, other), most)))
    return 0


def words(a: Recorded, b: Recorded, pairing: Pairing, most: int) -> Iterator[str]:
    """The comparison for a reader: the answer, the figures, where they first part, and up to `most` kinds of difference each."""
    share = 100 * pairing.bytes_paired / max(1, pairing.bytes_a)
    one, other = growths(a, b)
    yield _answer(one, other, pairing)
    yield f"{100 * pairing.matched:.2f} % of the allocations match, and {share:.2f} % of A's bytes."
    yield f"allocations     A {len(pairing.a):,}  B {len(pairing.b):,}  pairs {len(pairing.pairs):,}"
    places = "" if pairing.same_place is None else f"  at the same place {pairing.same_place:,}"
    yield f"of the pairs    same bytes {pairing.exact:,}  freed alike {pairing.freed_alike:,}{places}"
    if a.start or b.start:
        before = [human(side.timeline.allocated_at(0)) for side in (a, b)]
        yield f"at the start    A {before[0]}  B {before[1]}  allocated before the first event"
    yield f"peak, growth    A {human(one.peak)}  B {human(other.peak)}{_error(one.peak, other.peak)}"
    yield f"growth at end   A {human(one.end)}  B {human(other.end)}{_error(one.end, other.end)}"
    if a.unsettled or b.unsettled:
        unsettled = " and ".join(
            f"{counted(side.unsettled, 'block')} of {name}" for name, side in (("A", a), ("B", b)) if side.unsettled
        )
        yield f"                in bytes asked for: of {unsettled} from before, the size is known to 1 MiB only"
    elif one != other and a.growth_as_asked == b.growth_as_asked:
        more = "A" if one > other else "B"
        yield f"                the bytes asked for grow alike: blocks keep more beside them in {more}, up to 1 MiB each"
    yield f"peak reserved   A {human(a.peak_reserved)}  B {human(b.peak_reserved)}{_error(a.peak_reserved, b.peak_reserved)}"
    yield f"segments        A {a.segments:,}  B {b.segments:,}"
    first = _first(a, b, pairing)
    if first:
        yield f"\n{first}"
    moved = _moved(a, b, pairing)
    both = {index for index, _, _ in moved}, {index for _, index, _ in moved}
    for name, side, alone, events, of_both in (
        ("A", a, pairing.alone_a, pairing.a, both[0]),
        ("B", b, pairing.alone_b, pairing.b, both[1]),
    ):
        alone = [index for index in alone if index not in of_both]
        groups = Counter((side.events[events[index]].size, place(side.events[events[index]])) for index in alone)
        if groups and most > 0:
            yield f"\nOnly in {name}:"
        yield from _listed(groups, most)
    groups = Counter(
        (
            b.events[pairing.b[index]].size,
            f"{counted(abs(by), 'allocation')} {'later' if by > 0 else 'sooner'}: {place(b.events[pairing.b[index]])}",
        )
        for _, index, by in moved
    )
    if groups and most > 0:
        yield "\nBoth ask for these, B in another order:"
    yield from _listed(groups, most)
    groups = Counter(
        (
            b.events[pairing.b[pairing.pairs[number][1]]].size,
            f"{when}: {place(b.events[pairing.b[pairing.pairs[number][1]]])}",
        )
        for number, when in pairing.freed_otherwise
    )
    if groups and most > 0:
        yield "\nB frees at another time:"
    yield from _listed(groups, most)


def _moved(a: Recorded, b: Recorded, pairing: Pairing) -> list[tuple[int, int, int]]:
    """Of those without a partner, the ones of as many bytes that lie near each other: positions in `a` and `b`, and how many
    pairs later `b` asks."""
    in_a, in_b = ([both[side] for both in pairing.pairs] for side in (0, 1))
    waiting: dict[int, deque[tuple[int, int]]] = defaultdict(deque)
    for index in pairing.alone_a:
        waiting[a.events[pairing.a[index]].size].append((index, bisect(in_a, index)))
    found = []
    for index in pairing.alone_b:
        queue, at = waiting[b.events[pairing.b[index]].size], bisect(in_b, index)
        while queue and queue[0][1] < at - _NEAR:
            queue.popleft()
        if queue and queue[0][1] <= at + _NEAR:
            first, there = queue.popleft()
            found.append((first, index, at - there))
    return found


def _answer(a: Grown, b: Grown, pairing: Pairing) -> str:
    """Whether the one tells the other's peak."""
    if pairing.matched < _HARDLY:
        return f"Hardly one program's: {100 * pairing.matched:.2f} % of the allocations match. Do both begin at the same line?"
    peaks = human(a.peak), human(b.peak)
    if a.peak == b.peak:
        return f"The peak is the same: {peaks[0]} more than at the start."
    way = "higher" if b.peak > a.peak else "lower"
    by = f"{100 * abs(b.peak / a.peak - 1):.2f} % " if a.peak > 0 else ""
    return f"B's peak is {by}{way}: {peaks[1]} more than at the start, A's {peaks[0]}."


def _listed(groups: Counter[tuple[int, str]], most: int) -> Iterator[str]:
    """Kinds of difference, those with the most bytes first."""
    by_bytes = sorted(groups.items(), key=lambda group: -group[0][0] * group[1])
    for (size, where), count in by_bytes[: max(0, most)]:
        yield f"  {count:>6,} x {size:>14,} bytes  {printable(where)}"


def _first(a: Recorded, b: Recorded, pairing: Pairing) -> str:
    """Where the recordings first differ: after how many allocations, and who asked for what."""
    ends = [alone[0] for alone in (pairing.alone_a, pairing.alone_b) if alone]
    if not ends:
        return ""
    same = next((place for place, both in enumerate(pairing.pairs) if both != (place, place)), len(pairing.pairs))
    told = []
    for name, side, alone, events in (("A", a, pairing.alone_a, pairing.a), ("B", b, pairing.alone_b, pairing.b)):
        if alone and alone[0] == same:
            event = side.events[events[same]]
            told.append(f"{name} asks for {event.size:,} bytes, {printable(place(event))}")
    where = f"They first part after {counted(same, 'allocation')}" if same else "They part at the first allocation"
    return f"{where}: {'; '.join(told)}."


def place(event: TraceEvent) -> str:
    """Where memory was asked for: the operator, where the stack has C++ frames, and the program's line, or else a library's."""
    operators = [found[1] for frame in event.frames if (found := _OPERATOR.search(frame.name))]
    python = [frame for frame in event.frames if is_python(frame)]
    lines = [frame for frame in python if not is_library(frame)] or python
    return ", ".join([*operators[-1:], *map(words_of, lines[:1])]) or "no stack"


def _error(a: int, b: int) -> str:
    return f"  ({100 * (b / a - 1):+.3f} %)" if a > 0 else ""
