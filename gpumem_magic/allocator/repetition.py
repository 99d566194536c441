"""Where a program that ran out of memory was in the iteration before, so that its last iteration can be run again.

Requests are compared backwards from the failed one with those backwards from an earlier one of the same size. What a first
iteration makes and keeps (an optimizer's states, a library's workspace) has no counterpart later and is stepped over.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from gpumem_magic.allocator.program import ALLOC, FAILED, Program, RepeatedPart, ReplayStep
from gpumem_magic.snapshot.model import Frame, TraceEvent
from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS, AllocatorSettings, round_size

# Of the earlier requests of that size so many are tried, the latest first.
_CANDIDATES = 200
# So many comparisons in all: a second's work at most.
_EFFORT = 1_000_000
# Where they differ, so many requests of both are laid side by side at once.
_WINDOW = 48
# What a pair is worth: less where both were kept (what is in use at the failure need not stay), still less where the earlier one
# was and the later was not. And a request without a partner, where one that the earlier iteration kept costs nothing: a first
# iteration makes what later ones find.
_SAME = 6
_BOTH_LEFT = 3
_LEFT_ONE = 1
_LEFT_OUT = -4
_IMPOSSIBLE = -(1 << 30)
# An iteration has at least this many requests, and half of them agree with the one before. Fewer repeat by chance, as where an
# optimizer goes through weights of the same size.
_FEWEST = 8
# What iterations leave is seen on so many before the last one, at most and at least.
_MOST_BEFORE, _LEAST_BEFORE = 5, 2


@dataclass(frozen=True)
class _Match:
    """score: how well two intervals agree, and how few requests had to be stepped over for that; pairs: earlier block -> later
    block."""

    score: tuple[int, int]
    pairs: dict[int, int]


def last_iteration(
    program: Program,
    events: Sequence[TraceEvent],
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    among: Sequence[range] | None = None,
) -> RepeatedPart | None:
    """The interval from the earlier counterpart of the program's last failed request up to that request, its last step.

    Run again behind the program, it begins with the request that failed and ends where that is asked again. None where the
    program does not end with a failed request, or no earlier iteration is recognised. among: the events of which the earlier
    counterpart is one, where that is known (the same statement, in earlier iterations); None where it is not.
    """
    if not program.steps or program.steps[-1].action != FAILED:
        return None
    failed = program.steps[-1]
    requests = [step for step in program.steps if step.action == ALLOC]
    keys = _keys(requests, failed, events, settings)
    search = _Search(program, requests, keys[:-1])
    best: tuple[int, _Match] | None = None
    tried = 0
    for place in range(len(requests) - 1, -1, -1):
        if keys[place] != keys[-1] or (among is not None and not any(requests[place].event in part for part in among)):
            continue
        found = search.backwards(place)
        # The latest wins where several agree as far.
        if best is None or found.score > best[1].score:
            best = place, found
        tried += 1
        if tried == _CANDIDATES or search.effort >= _EFFORT:
            break
    if best is None:
        return None
    place, match = best
    # What a first iteration makes and keeps is not expected to have a counterpart.
    paired = set(match.pairs.values())
    length = sum(step.block in program.freed or step.block in paired for step in requests[place:])
    if length < _FEWEST or len(match.pairs) < max(_FEWEST, length // 2):
        return None
    return _repetition(program, requests[place].event, failed.event, match.pairs, search.keys_by_block())


def growth_of(program: Program, repetition: RepeatedPart) -> int:
    """The least that one of the last iterations kept for good, in bytes, of whatever sizes."""
    requests = [step for step in program.steps if step.action == ALLOC]
    place = sum(step.event < repetition.first for step in requests)
    length = len(requests) - place
    ends = range(place, length - 1, -length)[:_MOST_BEFORE]
    left = [sum(step.size for step in requests[end - length : end] if step.block not in program.freed) for end in ends]
    if len(left) >= _LEAST_BEFORE:
        return min(left)
    # Too few to see: what was kept in both of the last two.
    part = repetition
    gone = {*part.handed.values(), *part.once, *part.replaced, *part.passing, *program.freed}
    return sum(step.size for step in requests[place:] if step.block not in gone)


def _keys(
    requests: Sequence[ReplayStep], failed: ReplayStep, events: Sequence[TraceEvent], settings: AllocatorSettings
) -> list[int]:
    """A number for each request, the failed one last; the same where size, stream and stack are."""
    numbers: dict[tuple[int, int, tuple[Frame, ...]], int] = {}
    has_stack = bool(events[failed.event].frames)
    keys = []
    for step in (*requests, failed):
        size = step.size if step is failed else round_size(step.size, settings)
        # Without the failed request's stack the others' tell nothing about it.
        frames = events[step.event].frames if has_stack else ()
        keys.append(numbers.setdefault((size, step.stream, frames), len(numbers)))
    return keys


class _Search:
    """Walks back along both iterations at once, as long as they agree."""

    def __init__(self, program: Program, requests: Sequence[ReplayStep], keys: Sequence[int]) -> None:
        self._blocks = [step.block for step in requests]
        self._keys = keys
        self._is_left = [block not in program.freed for block in self._blocks]
        self.effort = 0

    def keys_by_block(self) -> dict[int, int]:
        return dict(zip(self._blocks, self._keys, strict=True))

    def backwards(self, place: int) -> _Match:
        """How far what comes before a request agrees with what comes before the failed one."""
        keys, is_left, blocks = self._keys, self._is_left, self._blocks
        pairs: dict[int, int] = {}
        score = stepped_over = 0
        early, late = place - 1, len(keys) - 1
        # What is stepped over must not bring the two together.
        apart = max(1, (late - early) // 2)
        while early >= 0:
            self.effort += 1
            if keys[early] == keys[late] and (is_left[late] or not is_left[early]):
                pairs[blocks[early]] = blocks[late]
                score += self._worth(early, late, 1, 1)
                early -= 1
                late -= 1
                continue
            path = self._aligned(early, late, apart)
            if path is None:
                break
            for step_early, step_late in path:
                if step_early and step_late:
                    pairs[blocks[early]] = blocks[late]
                score += self._worth(early, late, step_early, step_late)
                stepped_over += not (step_early and step_late)
                early -= step_early
                late -= step_late
        return _Match((score, -stepped_over), pairs)

    def _worth(self, early: int, late: int, step_early: int, step_late: int) -> int:
        is_left = self._is_left
        if step_early and step_late:
            if not is_left[early]:
                return _SAME
            return _BOTH_LEFT if is_left[late] else _LEFT_ONE
        if step_early and is_left[early]:
            return 0
        return _LEFT_OUT

    def _aligned(self, early: int, late: int, apart: int) -> list[tuple[int, int]] | None:
        """How an interval of both fits best: for each step whether it goes on in the earlier, the later or both. None where most
        of it does not fit."""
        keys = self._keys
        height, width = min(_WINDOW, early + 1), min(_WINDOW, late + 1)
        self.effort += height * width
        best = [[0] * (width + 1) for _ in range(height + 1)]
        came: list[list[tuple[int, int]]] = [[(0, 0)] * (width + 1) for _ in range(height + 1)]
        top = (0, 0, 0)
        for row in range(height + 1):
            for column in range(width + 1):
                ways = []
                if late - column - early + row < apart:
                    best[row][column] = _IMPOSSIBLE
                    continue
                if row and column and keys[early - row + 1] == keys[late - column + 1]:
                    ways.append((1, 1))
                if row:
                    ways.append((1, 0))
                if column:
                    ways.append((0, 1))
                if not ways:
                    continue
                scored = [
                    (
                        best[row - down][column - right]
                        + self._worth(early - row + down, late - column + right, down, right),
                        (down, right),
                    )
                    for down, right in ways
                ]
                best[row][column], came[row][column] = max(scored)
                top = max(top, (best[row][column], row, column))
        score, row, column = top
        if not score:
            return None
        at_the_edge = (row == height and early >= height) or (column == width and late >= width)
        path = []
        while row or column:
            down, right = came[row][column]
            path.append((down, right))
            row -= down
            column -= right
        path.reverse()
        if 2 * sum(down and right for down, right in path) < sum(right for _, right in path):
            return None
        # What lies at the edge of the window might fit better with what lies beyond it.
        return path[: -(-len(path) // 2)] if at_the_edge else path


def _repetition(program: Program, first: int, stop: int, pairs: dict[int, int], keys: dict[int, int]) -> RepeatedPart:
    """What becomes of each block of the interval in a further round."""
    left = [block for block in keys if first <= block < stop and block not in program.freed]
    wanted = sorted(
        (block for block, freed in program.freed.items() if block < first <= freed < stop),
        key=lambda block: program.freed[block],
    )
    handed: dict[int, int] = {}
    free = set(left)
    for block in wanted:
        partner = pairs.get(block)
        if partner in free:
            handed[block] = partner
            free.discard(partner)
    # Without a counterpart of its own: what is left of the same size and stack, in order.
    others: defaultdict[int, deque[int]] = defaultdict(deque)
    for block in left:
        if block in free:
            others[keys[block]].append(block)
    for block in wanted:
        if block not in handed and block in keys and block not in pairs and others[keys[block]]:
            handed[block] = others[keys[block]].popleft()
            free.discard(handed[block])
    earlier = {late: early for early, late in pairs.items()}
    # The counterpart of the failed request: whether that would be kept is not known.
    passing = frozenset(free & {first})
    free -= passing
    # Kept in both iterations: it really grows. Kept in one that has no counterpart: made once.
    once = frozenset(block for block in free if block not in earlier)
    replaced = frozenset(block for block in free if block in earlier and earlier[block] in program.freed)
    return RepeatedPart(first, stop, handed, once, replaced, passing)
