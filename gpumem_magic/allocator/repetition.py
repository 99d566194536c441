"""Where a program that ran out of memory was in the iteration before, so that its last iteration can be run again.

Requests are compared backwards from the failed one with those backwards from an earlier one of the same size. What a first
iteration makes and keeps (an optimizer's states, a library's workspace) has no counterpart later and is stepped over.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from gpumem_magic.allocator.program import ALLOC, FAILED, Program, Repetition, Step
from gpumem_magic.snapshot.model import Frame, TraceEvent
from gpumem_magic.snapshot.rules import DEFAULT_SETTINGS, AllocatorSettings, round_size

# Of the earlier requests of that size so many are tried, the latest first.
_CANDIDATES = 200
# So many comparisons in all: a second's work at most.
_EFFORT = 1_000_000
# How far the two iterations may differ at one place.
_DETOUR = 6
# A match is one where at least this many requests agree, and half of an iteration's.
_FEWEST = 3


@dataclass(frozen=True)
class _Match:
    """score: pairs of requests whose earlier one was freed again; pairs: earlier block -> later block."""

    score: int
    pairs: dict[int, int]


def last_iteration(
    program: Program, events: Sequence[TraceEvent], settings: AllocatorSettings = DEFAULT_SETTINGS
) -> Repetition | None:
    """The stretch from the earlier counterpart of the program's last failed request up to that request, its last step.

    Run again behind the program, it begins with the request that failed and ends where that is asked again. None where the
    program does not end with a failed request, or no earlier iteration is recognised.
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
        if keys[place] != keys[-1]:
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
    length = len(requests) - place
    if len(match.pairs) < max(_FEWEST, length // 2):
        return None
    return _repetition(program, requests[place].event, failed.event, match.pairs, search.keys_by_block())


def _keys(
    requests: Sequence[Step], failed: Step, events: Sequence[TraceEvent], settings: AllocatorSettings
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
    def __init__(self, program: Program, requests: Sequence[Step], keys: Sequence[int]) -> None:
        self._blocks = [step.block for step in requests]
        self._keys = keys
        self._kept = [block not in program.freed for block in self._blocks]
        self.effort = 0

    def keys_by_block(self) -> dict[int, int]:
        return dict(zip(self._blocks, self._keys, strict=True))

    def backwards(self, place: int) -> _Match:
        """How far what comes before a request agrees with what comes before the failed one."""
        keys, kept, blocks = self._keys, self._kept, self._blocks
        pairs: dict[int, int] = {}
        score = int(not kept[place])
        early, late = place - 1, len(keys) - 1
        while early >= 0 and late > place:
            self.effort += 1
            if keys[early] == keys[late]:
                pairs[blocks[early]] = blocks[late]
                score += not kept[early]
                early -= 1
                late -= 1
            elif kept[early]:
                early -= 1
            else:
                detour = self._detour(early, late)
                if detour is None:
                    break
                early -= detour[0]
                late -= detour[1]
        return _Match(score, pairs)

    def _detour(self, early: int, late: int) -> tuple[int, int] | None:
        """The fewest requests to leave out on both sides before two in a row agree again."""
        keys = self._keys
        for total in range(1, _DETOUR + 1):
            for left_out in range(total + 1):
                first, second = early - left_out, late - (total - left_out)
                if first > 0 and second > 0 and keys[first] == keys[second] and keys[first - 1] == keys[second - 1]:
                    return left_out, total - left_out
        return None


def _repetition(program: Program, first: int, stop: int, pairs: dict[int, int], keys: dict[int, int]) -> Repetition:
    """What becomes of each block of the stretch in a further round."""
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
    # Kept in both iterations: it really grows. Kept in one that has no counterpart: made once.
    once = frozenset(block for block in free if block not in earlier)
    replaced = frozenset(block for block in free if block in earlier and earlier[block] in program.freed)
    return Repetition(first, stop, handed, once, replaced)
