"""Several ranks side by side: their answer, a table with alike ranks in one line, and what differs."""

from __future__ import annotations

from collections.abc import Sequence

from gpumem_magic.report.model import ALLOCATED_CATEGORIES, LABELS
from gpumem_magic.report.ranks import DONE, ENDED, FAILED, GONE, OUT_OF_MEMORY, RUNNING, RankRow, Ranks
from gpumem_magic.report.side_by_side import ALIKE, ranks_in_words
from gpumem_magic.units import mib

STATE_WORDS = {
    DONE: "",
    FAILED: "failed",
    OUT_OF_MEMORY: "out of memory",
    ENDED: "ended",
    GONE: "gone",
    RUNNING: "no answer",
}
MOST = 12
_CATEGORIES = 4


def families(ranks: Ranks) -> list[tuple[RankRow, list[RankRow]]]:
    """The lines, the worst first: a rank that ran, and all that are alike, with those that are taken to be."""
    found: dict[int, tuple[RankRow, list[RankRow]]] = {}
    order: list[int] = []
    for row in ranks.rows:
        first = row.rank if row.like is None else row.like
        if first not in found:
            found[first] = next((one for one in ranks.rows if one.rank == first), row), []
            order.append(first)
        found[first][1].append(row)
    return [found[first] for first in order]


def names(first: RankRow, members: Sequence[RankRow]) -> str:
    """``rank 0``, or ``ranks 1-7 as rank 0``'s line: all of them, and which one is shown."""
    words = ranks_in_words([one.rank for one in members]).lower()
    return words if len(members) == 1 else f"{words} (shown: {first.rank})"


def table(ranks: Ranks) -> list[list[str]]:
    """Heads and lines: the ranks, what became of them, MiB at the peak, reserved, in the categories that differ most (beside
    them the largest), and the statement of the peak."""
    lines = families(ranks)[:MOST]
    shown = [first for first, _ in lines]
    sizes = {name: [one.categories.get(name, 0) for one in shown] for name in ALLOCATED_CATEGORIES}
    spread = {name: max(each) - min(each) for name, each in sizes.items() if any(each)}
    alike = max(one.peak_allocated or 0 for one in shown) / ALIKE
    order = sorted(spread, key=lambda name: (-spread[name] if spread[name] > alike else 0, -max(sizes[name])))
    chosen = [name for name in ALLOCATED_CATEGORIES if name in order[:_CATEGORIES]]
    heads = ["MiB", "", "peak", "reserved", *(LABELS[name] for name in chosen), "at"]
    rows = [
        [
            names(first, members),
            STATE_WORDS[first.state],
            _size(first.peak_allocated),
            _size(first.peak_reserved),
            *(_size(first.categories.get(name, 0) if first.peak_allocated is not None else None) for name in chosen),
            " ".join(first.where.replace("`", "").split()),
        ]
        for first, members in lines
    ]
    table = [heads, *rows]
    return [[cell for place, cell in enumerate(row) if place == 0 or any(one[place] for one in rows)] for row in table]


def sentences(ranks: Ranks) -> list[str]:
    """What differs and why, and what the ranks that had no happy end say themselves."""
    lines = families(ranks)
    whole = _shown(ranks)
    # One without a report has said so in the answer; the one whose report follows says it there.
    told = [
        first.said if first.said.startswith("Rank ") else f"{ranks_in_words([first.rank])}: {first.said}"
        for first, members in lines[1:]
        if first.state != DONE
        and first.said
        and (first.where or first.peak_allocated is not None)
        and whole not in members
    ]
    told += [f"{ranks_in_words([first.rank])}: {first.differs}" for first, _ in lines if first.differs]
    if len(lines) > MOST:
        told.append(f"{len(lines) - MOST} more kinds of ranks are in `to_dict()['ranks']`.")
    taken = [one.rank for one in ranks.rows if not one.measured]
    if taken:
        told.append(f"{ranks_in_words(taken)} did not run: each is taken to be like the rank of its line that did.")
    return told


def heading(ranks: Ranks) -> str:
    """Over the report of the first that made one."""
    return f"Rank {_shown(ranks).rank} of {ranks.world}:"


def _shown(ranks: Ranks) -> RankRow:
    return next(row for row in ranks.rows if row.peak_allocated is not None)


def _size(size: int | None) -> str:
    return "" if size is None else mib(size)
