"""Several ranks' reports as one: the worst first, alike ones together, what differs and why."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from gpumem_magic.report.failure import error_in_words
from gpumem_magic.report.filling import in_words
from gpumem_magic.report.model import LABELS, Peak, ReportData, Row, TensorGroup
from gpumem_magic.report.ranks import DONE, ENDED, FAILED, GONE, OUT_OF_MEMORY, RUNNING, STATES, RankRow, Ranks
from gpumem_magic.units import amount, counted, spans

# How many lines are named at which ranks were.
_PLACES = 4
# Ranks are alike within one part in so many of the peak.
ALIKE = 200
_STATE_WORDS = {
    FAILED: "failed",
    GONE: "ended without a word (killed, as by `kill -9` or for memory of the host)",
    ENDED: "was ended",
    RUNNING: "has not answered",
}
# What a cache holds is the allocator's business, and a context differs with a rank's neighbours: NCCL's buffers are in it.
_COMPARED = [name for name in LABELS if name not in ("cached", "context")]
# What ends a program from outside is raised in it.
_OF_AN_END = frozenset({"SystemExit", "KeyboardInterrupt"})


@dataclass(frozen=True)
class OfRank:
    """What is known of one rank. report: None where it never made one. where: the line that it was in when it was ended.
    after: the ranks whose end came before it failed or was ended, and may be why."""

    rank: int
    state: str
    report: ReportData | None
    where: str = ""
    after: tuple[int, ...] = ()

    @property
    def peak(self) -> int:
        return -1 if self.report is None else self.report.peak.allocated


def state_of(report: ReportData) -> str:
    """What became of a rank that made this report."""
    if report.error is None:
        return DONE
    return FAILED if report.error.requested is None else OUT_OF_MEMORY


def alike(one: OfRank, other: OfRank) -> bool:
    """Whether two ranks have the same memory, category for category, and came to the same end."""
    if (one.state, one.where, one.after) != (other.state, other.where, other.after):
        return False
    if one.report is None or other.report is None:
        return one.report is other.report
    first, second = one.report.peak, other.report.peak
    limit = max(first.allocated, second.allocated) / ALIKE
    sizes = [(first.allocated, second.allocated), (_reserved(one.report), _reserved(other.report))]
    sizes += [(first.categories.get(name) or 0, second.categories.get(name) or 0) for name in _COMPARED]
    return all(abs(a - b) <= limit for a, b in sizes)


def together(
    found: Sequence[OfRank],
    world: int,
    *,
    virtual: bool = False,
    taken: Mapping[int, int] | None = None,
    elsewhere: bool = False,
) -> ReportData:
    """The worst rank's report, with all ranks in `ranks`. taken: ranks that did not run -> the one that each is taken to be
    alike. elsewhere: others are on other computers. Raises ValueError where no rank made a report."""
    taken = taken or {}
    if virtual:
        # Each ran alone: none ended for another.
        found = [replace(one, after=()) for one in found]
    known = [one for one in found if one.report is not None]
    if not known:
        raise ValueError("no rank made a report")
    likes = _likes(sorted(found, key=lambda one: one.rank))
    by_rank = {one.rank: one for one in found}
    order = sorted(found, key=lambda one: (STATES.index(one.state), -one.peak, one.rank))
    first = next(one for one in order if one.report is not None)
    rows = [_row(one, likes[one.rank], first) for one in order]
    for rank, other in sorted(taken.items()):
        row = next(row for row in rows if row.rank == other)
        rows.append(replace(row, rank=rank, like=other if row.like is None else row.like, measured=False, differs=""))
    # Nobody waits for those that were not to run.
    others = [] if virtual else sorted(set(range(world)) - set(by_rank) - set(taken))
    rows += [_row(OfRank(rank, RUNNING, None), None, first) for rank in others if not elsewhere]
    rows.sort(key=lambda row: (STATES.index(row.state), -_peak(row), row.rank))
    peaks = [row.peak_allocated for row in rows if row.peak_allocated is not None]
    mean = sum(peaks) / len(peaks)
    ranks = Ranks(
        world, virtual, "", tuple(rows), min(peaks), round(mean), max(peaks), max(peaks) / mean - 1 if mean else None
    )
    assert first.report is not None
    followers = frozenset(one.rank for one in found if one.after)
    answer = _answer(ranks, followers, _places(found))
    if elsewhere and others:
        answer += f" {ranks_in_words(others)} ran on other computers, which show theirs."
    whole = replace(ranks, answer=answer)
    return replace(first.report, answer=_own_answer(first), ranks=whole)


def _likes(found: Sequence[OfRank]) -> dict[int, int | None]:
    """Rank -> the lowest that it is alike; None for that one."""
    lowest: list[OfRank] = []
    likes: dict[int, int | None] = {}
    for one in found:
        other = next((other for other in lowest if alike(one, other)), None)
        likes[one.rank] = None if other is None else other.rank
        if other is None:
            lowest.append(one)
    return likes


def _peak(row: RankRow) -> int:
    return -1 if row.peak_allocated is None else row.peak_allocated


def _row(one: OfRank, like: int | None, first: OfRank) -> RankRow:
    report = one.report
    if report is None:
        said = f"Rank {one.rank} {_STATE_WORDS.get(one.state, one.state)}{f' at {one.where}' if one.where else ''}."
        return RankRow(one.rank, one.state, like, True, None, None, None, {}, one.where, said, "")
    said = _own_answer(one)
    if one.state == ENDED:
        why = f" by the launcher after {ranks_in_words(one.after).lower()}" if one.after else ""
        said = f"Rank {one.rank} was ended{why}{f' while it was at {one.where}' if one.where else ''}. {said}"
    states: list[Row | Peak] = [*report.checkpoints, report.peak]
    used = [state.device_used for state in states if state.device_used is not None]
    differs = "" if like is not None or one is first else _differs(one, first)
    return RankRow(
        one.rank,
        one.state,
        like,
        True,
        report.peak.allocated,
        _reserved(report),
        max(used, default=None),
        {name: size for name, size in report.peak.categories.items() if size},
        one.where or report.peak.where,
        said,
        differs,
    )


def _own_answer(one: OfRank) -> str:
    """Without what was raised to end it."""
    assert one.report is not None
    error, said = one.report.error, one.report.answer
    if one.state == ENDED and error is not None and error.type in _OF_AN_END:
        return said.removeprefix(f"{error_in_words(error)} ")
    return said


def _reserved(report: ReportData) -> int:
    return max([report.peak.reserved, report.peak.peak_reserved, *(row.peak_reserved for row in report.checkpoints)])


def _differs(one: OfRank, first: OfRank) -> str:
    """What a rank has more and less at its peak than the first that is listed, and which tensors that is."""
    if one.report is None or first.report is None:
        return ""
    mine, theirs = one.report.peak, first.report.peak
    limit = max(mine.allocated, theirs.allocated) / ALIKE
    moved = {name: (mine.categories.get(name) or 0) - (theirs.categories.get(name) or 0) for name in _COMPARED}
    told = sorted(((size, name) for name, size in moved.items() if abs(size) > limit), key=lambda entry: -abs(entry[0]))
    if not told:
        return ""
    words = [f"{amount(abs(size))} {'more' if size > 0 else 'less'} {LABELS[name]}" for size, name in told[:3]]
    sentence = f"At its peak it has {', '.join(words)} than rank {first.rank}"
    whose, groups = (one, _only(mine.tensors, theirs.tensors)), (first, _only(theirs.tensors, mine.tensors))
    owner, own = max((whose, groups), key=lambda pair: sum(group.bytes for group in pair[1]))
    named = in_words(own, {})
    return f"{sentence}. What only rank {owner.rank} holds: {named}." if named else f"{sentence}."


def _only(groups: Sequence[TensorGroup], others: Sequence[TensorGroup]) -> list[TensorGroup]:
    """Groups of tensors that the other rank has none of, where they are worth a word."""
    there = {(one.shape, one.dtype, one.operator, one.category) for one in others}
    total = sum(one.bytes for one in groups)
    return [
        one
        for one in groups
        if one.category and 50 * one.bytes >= total and (one.shape, one.dtype, one.operator, one.category) not in there
    ]


def _answer(ranks: Ranks, followers: Set[int], places: str) -> str:
    """followers: ranks whose end came after that of others."""
    rows = ranks.rows
    troubles: list[str] = []
    for follow, state in itertools.product((False, True), STATES):
        members = [row.rank for row in rows if row.state == state and (row.rank in followers) == follow]
        if not members or state == DONE:
            continue
        words = "ran out of memory" if state == OUT_OF_MEMORY else _STATE_WORDS[state]
        if len(members) > 1:
            words = words.replace("was ", "were ").replace("has ", "have ")
        named = ranks_in_words(members)
        named = named.lower() if troubles else named
        if not follow:
            troubles.append(f"{named} {words}")
        else:
            troubles.append(f"the launcher then ended {named}" if state == ENDED else f"{named} then {words}")
    lead = f"{'; '.join(troubles)}. " if troubles else ""
    lead += places
    answered = [row for row in rows if row.peak_allocated is not None]
    highest = max(answered, key=_peak)
    if ranks.imbalance is not None and len(answered) > 1 and ranks.lowest is not None and ranks.highest is not None:
        if ranks.highest - ranks.lowest <= ranks.highest / ALIKE:
            whole = f"All {ranks.world} ranks" if ranks.world > 2 else "Both ranks"
            whole = whole if len(answered) == ranks.world else counted(len(answered), "rank")
            lead += f"{whole} peak at {amount(ranks.highest)}, within 0.5 %."
        else:
            lead += (
                f"Rank {highest.rank} peaks highest, at {amount(ranks.highest)}: {100 * ranks.imbalance:.1f} % above the mean of "
                f"{amount(ranks.mean or 0)}; the lowest is {amount(ranks.lowest)}."
            )
    else:
        lead += f"Rank {highest.rank} of {ranks.world} peaks at {amount(_peak(highest))}."
    return lead


def _places(found: Sequence[OfRank]) -> str:
    """Where ranks were that did not end by themselves, if not all at the same line: some wait for the others."""
    lines: dict[str, list[int]] = {}
    for one in found:
        if one.state == ENDED and one.where:
            lines.setdefault(one.where, []).append(one.rank)
    if len(lines) < 2:
        return ""
    order = sorted(lines.items(), key=lambda entry: (-len(entry[1]), entry[1]))
    words = [f"{ranks_in_words(ranks).lower()} at {where}" for where, ranks in order[:_PLACES]]
    words += [f"others at {counted(len(order) - _PLACES, 'more line')}"] if len(order) > _PLACES else []
    return f"They were at different lines: {'; '.join(words)}. "


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``Rank 3``, ``Ranks 0, 2-7``."""
    words = spans(ranks)
    shown = words if len(words) <= 8 else [*words[:7], "..."]
    return f"{'Rank' if len(ranks) == 1 else 'Ranks'} {', '.join(shown)}"
