"""What was advised, as somebody reads it: the cheapest changes that fit first, as a diff, then what each change came to."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Container, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from gpumem_magic.advice.advise import Advised, ChangeOutcome
from gpumem_magic.advice.proposal import DIFFERENT, ROUNDING, SAME
from gpumem_magic.advice.trial import MOST_ITERATIONS
from gpumem_magic.advice.written_functions import WrittenFunction
from gpumem_magic.trials.answer import card_in_words, failure_in_words, of_the_card
from gpumem_magic.trials.tried import ERROR, MEMORY, Tried
from gpumem_magic.units import counted, human
from gpumem_magic.views.display import HTML, PLAIN, asked_for, in_terminal
from gpumem_magic.views.lines import table, text_width
from gpumem_magic.views.quiet import quiet
from gpumem_magic.views.sheet import Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEADS = ["change", "tensors", "saves", "in use at most", "results", "costs"]
# Of results, in a column.
_SHORT = {SAME: "the same", ROUNDING: "rounding", DIFFERENT: "different"}
_LEAST_PERCENT = 1


class Advice:
    """What would save memory: shown in a notebook as words, a diff, a picture and a table, and by `print` as text.

    ``advice.diff`` is what changes: in the cell, and in functions of the notebook or of the program's own files that it calls.
    ``advice.code`` is the changed cell, ``advice.functions`` are the changed functions; ``advice.conf`` are settings for
    PYTORCH_CUDA_ALLOC_CONF, "" where none are needed. `to_dict` has every run, in bytes.
    """

    def __init__(self, found: Advised, shown: Callable[[str], str]) -> None:
        self.found = found
        self._shown = shown

    @property
    def code(self) -> str:
        """The cell with the changes that are advised; as it is where nothing helps."""
        return self._shown((self.found.best or self.found.base).program.cell)

    @property
    def functions(self) -> dict[str, str]:
        """The functions elsewhere with the changes that are advised, by where they stand: ``In [3]: train``."""
        program = (self.found.best or self.found.base).program
        return {one.where: text for one, text in program.changed.items()}

    @property
    def conf(self) -> str:
        """The allocator's settings that are advised."""
        return "" if self.found.best is None else self.found.best.conf

    @property
    def diff(self) -> str:
        """From the cell to `code`, and from functions elsewhere to `functions`, each below a line that says where it stands."""
        return "" if self.found.best is None else self._diff(self.found.best)

    @property
    def diffs(self) -> dict[str, str]:
        """The same for each change by itself, by its name in the table; "" for settings of the allocator."""
        return {one.name: self._diff(one) for one in self.found.outcomes}

    @property
    def fits(self) -> bool:
        """Whether the cell fits, with what is advised or as it is."""
        return (self.found.best or self.found.base).run.fits

    def to_dict(self) -> dict[str, Any]:
        """Every run, in bytes and FLOPs."""
        found = self.found
        return {
            "device": found.device,
            "capacity": found.base.run.capacity,
            "as_it_is": self._numbers(found.base),
            "changes": [self._numbers(one) for one in found.outcomes],
            "advised": None if found.best is None else self._numbers(found.best),
            "trials": len(found.tried),
        }

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=1)

    @quiet()
    def plot(self, *, dark: bool = False) -> Figure:
        """What each change leaves at the peak, by category, as a matplotlib Figure, made without pyplot."""
        from gpumem_magic.advice.picture import draw

        return draw(self._pictured(), self.found.device, self.found.base.run.capacity, dark=dark)

    def __repr__(self) -> str:
        body = table(self._rows(), range(1, 3), text_width()) if self.found.outcomes else ""
        blocks = ["\n".join(self._head()), self._how(), body, "\n".join(self._after())]
        return "\n\n".join(block for block in blocks if block)

    @quiet()
    def _repr_mimebundle_(
        self, include: Container[str] | None = None, exclude: Container[str] | None = None
    ) -> dict[str, Any]:
        wanted = asked_for(include, exclude)
        data: dict[str, Any] = {PLAIN: repr(self)}
        if HTML in wanted and not in_terminal():
            from gpumem_magic.advice.picture import element

            how = self._how()
            rows = self._rows() if self.found.outcomes else ()
            sheet = Sheet("\n".join(self._head()), rows, figures=range(1, 3), after="\n".join(self._after()))
            code = f"<pre>{escape(how)}</pre>" if how else ""
            data[HTML] = sheet.html(
                between=code + element(self._pictured(), self.found.device, self.found.base.run.capacity)
            )
        return data

    # ---- words

    def _head(self) -> Iterator[str]:
        base, best = self.found.base, self.found.best
        card = card_in_words(self.found.device)
        if best is None:
            yield f"No change that was run makes the cell {'smaller' if base.run.fits else f'fit on {card}'}."
        elif best.run.fits and not base.run.fits:
            fits = _fits(best.run, "the cell")
            yield f"With {best.name}, {fits} on {card} ({of_the_card(best.run)}){self._consequences(best)}."
        elif best.run.fits:
            yield f"With {best.name}, {self._smaller(best)}{self._consequences(best)}."
        else:
            yield (
                f"Nothing that was run makes the cell fit on {card}. Nearest comes {best.name}: "
                f"{human(best.need.allocated)} at the peak instead of {human(base.need.allocated)}{self._consequences(best)}."
            )
        if base.run.fits:
            taken = human(base.run.allocated)
            adds = f", and each still adds {human(base.run.growing)}" if base.run.growing else ""
            yield (
                f"As it is, {_fits(base.run)} on {card} ({of_the_card(base.run)}){adds}; its tensors take {taken} at the peak."
            )
        else:
            length = f" of {base.need.left_after} iterations, and more for more" if base.need.growing else ""
            taken = human(base.need.allocated)
            yield f"As it is, it {failure_in_words(base.run)}; its tensors would take {taken} at the peak{length}."

    def _smaller(self, one: ChangeOutcome) -> str:
        """What the change makes smaller: what the card shows, or only what the tensors need of it.

        The allocator takes memory from the card in segments, so a small saving may leave these as they are.
        """
        now, then = human(one.run.used), human(self.found.base.run.used)
        if now != then:
            return f"nvidia-smi's highest is {now} instead of {then}"
        taken, before = human(one.need.allocated), human(self.found.base.need.allocated)
        return f"tensors take {taken} at the peak instead of {before}, and nvidia-smi's highest stays {now}"

    def _consequences(self, one: ChangeOutcome) -> str:
        words = [f"the results are {one.results}"]
        words += [but.but for but in one.proposals if but.but]
        parts = [", ".join(words)]
        if self.found.base.need.growing:
            added = one.need.growing
            parts.append(f"each iteration still adds {human(added)}" if added else "its memory no longer grows")
        if costs := self._costs(one):
            parts.append(f"it costs {costs}")
        return "".join(f"; {part}" for part in parts)

    def _how(self) -> str:
        best = self.found.best
        if best is None:
            return ""
        parts = [self._diff(best)] if best.program != self.found.base.program else []
        if best.conf:
            parts.append(f"PYTORCH_CUDA_ALLOC_CONF={best.conf}   (set it before CUDA is first used)")
        return "\n".join(parts)

    def _diff(self, one: ChangeOutcome) -> str:
        before, after = (self._shown(outcome.program.cell).splitlines() for outcome in (self.found.base, one))
        cell = _differences(before, after)
        lines = [line for place, text in one.program.changed.items() for line in _in_a_function(place, text)]
        if cell and lines:
            lines.append("--- this cell")
        return "\n".join([*lines, *cell])

    def _rows(self) -> list[list[str]]:
        rows = [["as it is", human(self.found.base.need.allocated), "", _on_the_card(self.found.base.run), "", ""]]
        return [_HEADS, *rows, *(self._row(one) for one in self._shown_changes())]

    def _shown_changes(self) -> list[ChangeOutcome]:
        useful = [one for one in self.found.outcomes if one.saves(self.found.base)]
        useful.sort(key=lambda one: (not one.run.fits, one.need.allocated))
        best = self.found.best
        return [*useful, *([best] if best is not None and len(best.proposals) > 1 else [])]

    def _row(self, one: ChangeOutcome) -> list[str]:
        saved = self.found.base.need.allocated - one.need.allocated
        results = _SHORT[one.results] + ("*" if any(each.but for each in one.proposals) else "")
        return [
            _in_a_row(one),
            human(one.need.allocated),
            human(saved),
            "does not fit" if one.run.ending == MEMORY else _on_the_card(one.run),
            results,
            self._costs(one),
        ]

    def _costs(self, one: ChangeOutcome) -> str:
        base = self.found.base.need
        words = [each.costs for each in one.proposals if each.costs]
        if base.flops and (percent := round(100 * (one.need.flops - base.flops) / base.flops)) >= _LEAST_PERCENT:
            words.append(f"{percent} % more FLOPs")
        if (moved := one.need.moved - base.moved) > 0:
            words.append(f"{human(moved)} to and from the host in each iteration")
        return ", ".join(words)

    def _after(self) -> Iterator[str]:
        for one in self.found.outcomes:
            for each in one.proposals:
                if each.but and one.saves(self.found.base):
                    yield f"* {each.name}: {each.but}."
        without = [
            one.name for one in self.found.outcomes if one.need.ending != ERROR and not one.saves(self.found.base)
        ]
        if without:
            yield f"Run, and of no help: {', '.join(without)}."
        for one in self.found.outcomes:
            if one.need.ending == ERROR:
                yield f"Not possible here: {one.name} {failure_in_words(one.need)}."
        if self.found.outcomes:
            yield "Tensors are at the peak; in use is what nvidia-smi would show at its highest."
        count, base = counted(len(self.found.tried), "trial"), self.found.base.need
        length = f"for {MOST_ITERATIONS} of them, or to its end where its memory grew"
        if base.growing:
            longer = f", {base.left_after} where its memory grew" if base.left_after > MOST_ITERATIONS else ""
            length = f"or for {MOST_ITERATIONS} of them{longer}"
        yield (
            f"Each change was made to a copy of the cell and run on a virtual {self.found.device}, in {count}, until its "
            f"iterations repeated exactly, {length}."
        )
        if self.found.too_long:
            yield f"Ended after {self.found.seconds:.0f} s, before it could say anything: {', '.join(self.found.too_long)}."
        names = ", ".join(self.found.left_out)
        if self.found.stopped:
            yield f"Stopped by Ctrl-C before these were run to their ends: {names or 'several changes together'}."
        elif names:
            yield f"Not begun any more, for want of time (`%gpumem_advise --minutes N` gives it): {names}."

    # ---- numbers

    def _numbers(self, one: ChangeOutcome) -> dict[str, Any]:
        need = one.need
        return {
            "change": one.name,
            "fits": one.run.fits,
            "ending": need.ending if need.ending == ERROR else one.run.ending,
            "peak_allocated": need.allocated,
            "saves": self.found.base.need.allocated - need.allocated,
            "used": one.run.used if one.run.fits else None,
            "categories": dict(need.categories),
            "results": one.results,
            "but": [each.but for each in one.proposals if each.but],
            "flops": need.flops,
            "moved": need.moved,
            "conf": one.conf,
            "diff": self._diff(one),
        }

    def _pictured(self) -> list[tuple[str, Tried]]:
        changes = ((_in_a_row(one), one.need) for one in self._shown_changes())
        return [("as it is", self.found.base.need), *changes]


def _in_a_function(place: WrittenFunction, text: str) -> Iterator[str]:
    yield f"--- {place.where}"
    if place.margin:
        # What a method needs above it stands above its class.
        above, text = place.apart(text)
        if above:
            yield f"@@ above the class of {place.name} @@"
            yield from (f"+{line}" for line in above.splitlines())
    yield from _differences(place.shown(place.text), place.shown(text))


def _differences(before: Sequence[str], after: Sequence[str]) -> list[str]:
    return list(difflib.unified_diff(before, after, lineterm="", n=1))[2:]


def _fits(one: Tried, subject: str = "it") -> str:
    """What was run of it."""
    return f"its first {counted(one.left_after, 'iteration')} fit" if one.growing else f"{subject} fits"


def _in_a_row(one: ChangeOutcome) -> str:
    return one.name if len(one.proposals) == 1 else "all that is advised"


def _on_the_card(one: Tried) -> str:
    if one.ending == MEMORY:
        return f"fails at line {one.line}" if one.line else "fails"
    return of_the_card(one)
