"""Each change that a cell's run gives reason for is run by itself; then the cheapest set that fits, or leaves most room."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpumem_magic.advice.changes.catalog import proposals
from gpumem_magic.advice.draft import Unchangeable
from gpumem_magic.advice.evidence import Evidence
from gpumem_magic.advice.program_texts import ProgramTexts
from gpumem_magic.advice.proposal import DIFFERENT, RESULTS, Proposal
from gpumem_magic.advice.trial import MOST_ITERATIONS, CellTrials
from gpumem_magic.trials.process import TookTooLong
from gpumem_magic.trials.tried import ERROR, MEMORY, Tried
from gpumem_magic.units import listed

Say = Callable[[str], None]
"""Hears in a few words what is run next."""
# A set that fits is looked for in so many runs.
_MOST_SETS = 6
# Of the peak, in bytes: less is nothing saved.
_LEAST = 1 / 200
MINUTES = 5
"""When trials have taken so much of the processor, no further change is begun."""
# A changed cell may take longer than the cell as it is: so many times, and a minute in any case.
_TIMES_LONGER, _SECONDS = 5, 60


@dataclass(frozen=True)
class ChangeOutcome:
    """What a set of changes came to. run: on the card; need: what it would hold at its peak if nothing failed (the same run where
    it fits). program: with them."""

    proposals: tuple[Proposal, ...]
    program: ProgramTexts
    run: Tried
    need: Tried

    @property
    def results(self) -> str:
        """What becomes of the results: the worst of the changes' words."""
        return max((one.results for one in self.proposals), key=RESULTS.index, default=RESULTS[0])

    @property
    def conf(self) -> str:
        return ",".join(one.conf for one in self.proposals if one.conf)

    @property
    def name(self) -> str:
        return listed([one.name for one in self.proposals]) if self.proposals else ""

    def saves(self, base: ChangeOutcome) -> bool:
        """Whether it makes anything better than the cell as it is: the memory needed, what the allocator takes from the card for
        it, or that it fits."""
        least = _LEAST * base.need.allocated
        return self.need.ending != ERROR and (
            self.need.allocated <= base.need.allocated - least
            or (self.run.fits and (not base.run.fits or self.run.used <= (1 - _LEAST) * base.run.used))
        )


@dataclass(frozen=True)
class Advised:
    """base: the cell as it is. outcomes: each change by itself, in the order in which they ran. best: the set that is advised,
    None where nothing helps. too_long: changes that were ended after `seconds`. left_out: those that were not begun any more, or,
    where it was stopped by Ctrl-C, not run to their ends."""

    device: str
    base: ChangeOutcome
    outcomes: tuple[ChangeOutcome, ...]
    best: ChangeOutcome | None
    tried: tuple[Tried, ...]
    too_long: tuple[str, ...] = ()
    seconds: float = 0
    left_out: tuple[str, ...] = ()
    stopped: bool = False


class CellFails(ValueError):
    """The cell raises something other than out of memory. The text is one line."""


def advised(trials: CellTrials, code: str, say: Say, minutes: float = MINUTES) -> Advised:
    """code: the cell as Python. minutes: `MINUTES`, or others. Raises DeviceError, and CellFails."""
    with trials.begun(code) as begun:
        return _AdviceSearch(begun, ProgramTexts(code), say, minutes).found()


class _AdviceSearch:
    def __init__(self, trials: CellTrials, program: ProgramTexts, say: Say, minutes: float) -> None:
        self.trials, self.program, self.say = trials, program, say
        self.tried: list[Tried] = []
        self._left = 60 * minutes
        # What bounds a changed cell's run, once the cell as it is has been run: `CellTrials.run` says which.
        self._last: int | None = None
        self._seconds: float | None = None
        self._place = ""
        self._too_long: list[str] = []

    def found(self) -> Advised:
        base, seen = self._base()
        self.base = base
        wanted = proposals(seen, self.program)
        outcomes: list[ChangeOutcome] = []
        left_out = [one.name for one in wanted]
        stopped = False
        try:
            for place, one in enumerate(wanted, 1):
                self._place = f" (change {place} of {len(wanted)})"
                if self._left < 0:
                    break
                outcome = self._outcome([one])
                left_out.remove(one.name)
                if outcome is not None:
                    outcomes.append(outcome)
            self._place = " (together)"
            best = self._best(outcomes)
        except KeyboardInterrupt:
            if not outcomes:
                raise
            # What was run by then says something, and nothing more is run for it.
            stopped, self._left = True, -1
            best = self._best(outcomes)
        return Advised(
            self.trials.device, base, tuple(outcomes), best, tuple(self.tried), tuple(self._too_long), self._seconds or 0,
            tuple(left_out), stopped,
        )  # fmt: skip

    def _run(
        self, name: str, program: ProgramTexts, conf: str = "", *, wide: bool = False, watched: bool = False
    ) -> tuple[Tried, Evidence]:
        self.say(f"Trial {len(self.tried) + 1} on a virtual {self.trials.device}: {name}{self._place} …")
        found, seen = self.trials.run(program, conf, wide=wide, watched=watched, last=self._last, seconds=self._seconds)
        self.tried.append(found)
        self._left -= found.seconds
        return found, seen

    def _base(self) -> tuple[ChangeOutcome, Evidence]:
        name = "the cell as it is"
        begun = time.monotonic()
        run, seen = self._run(name, self.program, watched=True)
        need = run
        if run.ending == MEMORY:
            need, seen = self._run(name, self.program, wide=True, watched=True)
        if ERROR in (run.ending, need.ending):
            failed = run if run.ending == ERROR else need
            at = f" (line {failed.line})" if failed.line else ""
            raise CellFails(f"the cell raises {failed.error}{at}")
        self._seconds = max(_SECONDS, _TIMES_LONGER * (time.monotonic() - begun))
        self._last = need.left_after or None
        if run.fits and run.left_after > MOST_ITERATIONS:
            # It goes on so: all are compared after fewer.
            self._last = MOST_ITERATIONS
            run = need = self._run(f"{name}, for fewer iterations", self.program)[0]
        return ChangeOutcome((), self.program, run, need), seen

    def _outcome(self, chosen: Sequence[Proposal]) -> ChangeOutcome | None:
        """What the changes come to, together; None where they cannot be made together, or take too long."""
        program = self.program
        try:
            for one in chosen:
                program = one.made_in(program)
        except Unchangeable:
            return None
        conf = ",".join(one.conf for one in chosen if one.conf)
        name = ", ".join(one.name for one in chosen)
        try:
            run, _ = self._run(name, program, conf)
            need = run
            if run.ending == MEMORY:
                # Settings of the allocator change no tensor, but what its blocks have beside them.
                need = self._run(name, program, conf, wide=True)[0]
        except TookTooLong:
            self._too_long.append(name)
            self._left -= self._seconds or 0
            return None
        return ChangeOutcome(tuple(chosen), program, run, need)

    # ---- sets

    def _best(self, outcomes: Sequence[ChangeOutcome]) -> ChangeOutcome | None:
        if self.base.run.fits:
            return self._most_room(outcomes)
        fitting = [one for one in outcomes if one.run.fits]
        if fitting:
            return min(fitting, key=self._price)
        return self._set_that_fits(outcomes)

    def _growth(self, one: ChangeOutcome) -> int:
        """How much of the growth it leaves, in twentieths: what goes on growing fits for so many iterations only."""
        growing = self.base.need.growing
        return round(20 * one.need.growing / growing) if growing else 0

    def _price(self, one: ChangeOutcome) -> tuple[int, int, int, int, int, int]:
        """What a set costs: first whether it still grows, what becomes of the results, then what is computed and moved besides,
        then lines."""
        base = self.base.need
        flops, moved = max(0, one.need.flops - base.flops), max(0, one.need.moved - base.moved)
        percent = round(100 * flops / base.flops) if base.flops else 0
        return (
            self._growth(one), RESULTS.index(one.results), percent, moved, len(one.proposals), one.run.used,
        )  # fmt: skip

    def _most_room(self, outcomes: Sequence[ChangeOutcome]) -> ChangeOutcome | None:
        """All that keep the results and save something, one after the other, while each saves more."""
        useful = [one for one in outcomes if one.run.fits and one.saves(self.base) and one.results != DIFFERENT]
        useful.sort(key=lambda one: (self._growth(one), one.run.used, self._price(one)))
        if not useful:
            return None
        best = useful[0]
        for one in useful[1:_MOST_SETS]:
            if (one.conf and best.conf) or self._left < 0:
                continue
            both = self._outcome([*best.proposals, *one.proposals])
            if both is not None and both.run.fits and both.run.used < best.run.used:
                best = both
        return best

    def _set_that_fits(self, outcomes: Sequence[ChangeOutcome]) -> ChangeOutcome | None:
        """The cheap ones that save something first, together, until they fit; then without each that is not needed. Where none
        fits: the set that comes nearest."""
        useful = sorted((one for one in outcomes if one.need.ending != ERROR), key=lambda one: self._price(one)[:5])
        useful = [one for one in useful if one.saves(self.base)] + [one for one in useful if not one.saves(self.base)]
        if not useful:
            return None
        found = min(useful, key=lambda one: one.need.allocated)
        chosen = list(useful[0].proposals)
        left = _MOST_SETS
        for one in useful[1:]:
            (more,) = one.proposals
            if not left or found.run.fits or self._left < 0:
                break
            if any(_exclude(more, other) for other in chosen):
                continue
            left -= 1
            outcome = self._outcome([*chosen, more])
            if outcome is not None and outcome.need.ending != ERROR:
                chosen.append(more)
                # What saves next to nothing more is no part of what comes nearest.
                if (
                    outcome.run.fits
                    or outcome.need.allocated <= found.need.allocated - _LEAST * self.base.need.allocated
                ):
                    found = outcome
        if found.run.fits:
            for more in found.proposals[:-1]:
                if self._left < 0:
                    break
                fewer = self._outcome([other for other in found.proposals if other is not more])
                if fewer is not None and fewer.run.fits:
                    found = fewer
        return found if found.run.fits or found.saves(self.base) else None


def _exclude(one: Proposal, other: Proposal) -> bool:
    """Two of a kind: settings of the allocator, ways of an optimizer."""
    return one.name.partition("=")[0] in ("fused", "foreach") and other.name.partition("=")[0] in ("fused", "foreach")
