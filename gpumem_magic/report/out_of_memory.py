"""The verdict of an out-of-memory error as a reader gets it: what stands in the way, and what settings would have done.

The allocator's verdict knows allocations by number; here they have words. Numbers and strings only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpumem_magic.allocator.verdict import Trial, Verdict
from gpumem_magic.snapshot.timeline import Allocation
from gpumem_magic.units import amount

__all__ = ["AllocationInWords", "OutOfMemory", "Trial", "out_of_memory", "place_sentence", "trial_sentences"]

_NAMED_PIECES = 3


@dataclass(frozen=True)
class AllocationInWords:
    """An allocation in words, and its bytes."""

    what: str
    bytes: int


@dataclass(frozen=True)
class OutOfMemory:
    """Sizes are bytes. cause, free, cached, spare, limit, trials, rounds, requests, tried: as in `allocator.verdict.Verdict`.

    place: how large the place is that would have held the request without `pieces`, the largest first (and `more_pieces` that
    are not listed); None where fragmentation is not the cause, or no place is mostly free. left_by: what had that place to
    itself before, in words, "" where nothing is known. kept: bytes that were reserved before the recording, which a replay
    leaves as they were.
    """

    cause: str
    free: int
    cached: int
    spare: int
    limit: int | None
    place: int | None
    left_by: str
    pieces: tuple[AllocationInWords, ...]
    more_pieces: int
    trials: tuple[Trial, ...]
    rounds: int
    requests: int
    tried: bool
    kept: int


def out_of_memory(verdict: Verdict, words: Callable[[Allocation], str], kept: int = 0) -> OutOfMemory:
    """words: an allocation for a reader. kept: bytes that were reserved when the recording began."""
    gap = verdict.gap
    shown = () if gap is None else gap.blockers[:_NAMED_PIECES]
    return OutOfMemory(
        cause=verdict.cause,
        free=verdict.free,
        cached=verdict.cached,
        spare=verdict.spare,
        limit=verdict.limit,
        place=None if gap is None else gap.size,
        left_by="" if gap is None or gap.left_by is None else words(gap.left_by),
        pieces=tuple(AllocationInWords(words(life), life.size) for life in shown),
        more_pieces=0 if gap is None else gap.blocks - len(shown),
        trials=verdict.trials,
        rounds=verdict.rounds,
        requests=verdict.requests,
        tried=verdict.tried,
        kept=kept,
    )


def place_sentence(found: OutOfMemory) -> str:
    """Which place would have done, and who splits it; empty where fragmentation is not the cause."""
    if found.place is None:
        return "In no segment is a place of that size mostly free." if found.cause == "fragmentation" else ""
    pieces = [f"{piece.what}: {amount(piece.bytes)}" for piece in found.pieces]
    if found.more_pieces:
        pieces.append(f"{found.more_pieces:,} more")
    place = (
        f"The {amount(found.place)} that {found.left_by} left are" if found.left_by else f"{amount(found.place)} are"
    )
    return f"{place} split by {_listed(pieces)}." if pieces else ""


def trial_sentences(found: OutOfMemory) -> list[str]:
    """What the settings would have done, one sentence for each kind of outcome."""
    if not found.tried:
        return []
    if not found.trials:
        return ["No setting of the allocator can make up for what was missing."]
    helped = [trial.conf for trial in found.trials if trial.passes and trial.rounds == found.rounds]
    moved = [trial for trial in found.trials if trial.passes and trial.rounds < found.rounds]
    useless = [trial.conf for trial in found.trials if not trial.passes]
    sentences = []
    if helped:
        again = (
            f", and so do {found.rounds} more iterations like the last ({found.requests:,} requests)"
            if found.rounds
            else ""
        )
        sentences.append(f"Replayed with {_listed(helped, 'or')}, the request passes{again}.")
    sentences += [f"With {trial.conf} it passes, and memory runs out {_later(trial.rounds)}." for trial in moved]
    if useless:
        sentences.append(f"{_listed(useless)} {'does' if len(useless) == 1 else 'do'} not help.")
    if found.trials and not found.rounds and helped:
        sentences.append("Whether later iterations would pass is not known: no earlier one like the last was recorded.")
    if found.kept and helped:
        sentences.append(
            f"These replays leave the {amount(found.kept)} that were reserved before the recording as they were."
        )
    return sentences


def _later(rounds: int) -> str:
    if not rounds:
        return "before the next iteration is as far"
    return "one iteration later" if rounds == 1 else f"{rounds} iterations later"


def _listed(words: Sequence[str], joint: str = "and") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {joint} {words[-1]}"
