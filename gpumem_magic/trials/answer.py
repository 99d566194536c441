"""What fits, as somebody reads it: the answer first, then how memory grows, and what was run."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gpumem_magic.report.model import LABELS, OUTSIDE_CATEGORIES
from gpumem_magic.trials.growth import FitCase
from gpumem_magic.trials.search import SearchResult
from gpumem_magic.trials.tried import ERROR, Tried
from gpumem_magic.units import GIB, amount, counted, human, listed
from gpumem_magic.views.display import HTML, PLAIN, asked_for, in_terminal
from gpumem_magic.views.quiet import quiet
from gpumem_magic.views.sheet import Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# So many values are named.
_FEW = 3
# What is less than this part of a card is no reason why nothing fits there.
_FEW_OF_IT = 20
_NOWHERE: Mapping[str, Sequence[int]] = MappingProxyType({})


class Fits:
    """What fits: shown in a notebook as words, a picture and a table, and by `print` as text.

    ``fits.largest`` is the largest value, or a dictionary of them by card, by the second name's value, or by both.
    """

    def __init__(
        self,
        name: str,
        across: str | None,
        cases: Sequence[FitCase],
        subject: str = "cell",
        places: Mapping[str, Sequence[int]] = _NOWHERE,
    ) -> None:
        self.name = name
        self.across = across
        self.cases = tuple(cases)
        self._subject = subject
        # The lines at which a name that is no variable is given its values.
        self._places = places

    @property
    def largest(self) -> Any:
        """The largest value that fits, None where none does; a dictionary where there are several cases."""
        found = {(case.device, case.across): self._best(case) for case in self.cases}
        if len(found) == 1:
            return next(iter(found.values()))
        if self.across is None:
            return {device: best for (device, _), best in found.items()}
        if len({device for device, _ in found}) == 1:
            return {across: best for (_, across), best in found.items()}
        return found

    @property
    def trials(self) -> tuple[Tried, ...]:
        """Every run, in order."""
        return tuple(one for case in self.cases for one in case.found.tried)

    @quiet()
    def plot(self, *, dark: bool = False) -> Figure:
        """Memory over the value as a matplotlib Figure, made without pyplot: all cards in one, a panel for each value of a second
        name."""
        from gpumem_magic.trials.picture import draw

        return draw(self.name, self.across, self.cases, dark=dark)

    def __repr__(self) -> str:
        return str(self._sheet())

    @quiet()
    def _repr_mimebundle_(
        self, include: Container[str] | None = None, exclude: Container[str] | None = None
    ) -> dict[str, Any]:
        wanted = asked_for(include, exclude)
        data: dict[str, Any] = {PLAIN: repr(self)}
        if HTML in wanted and not in_terminal():
            from gpumem_magic.trials.picture import element

            data[HTML] = self._sheet().html(between=element(self.name, self.across, self.cases))
        return data

    def _best(self, case: FitCase) -> int | None:
        best = case.found.best
        return None if best is None else best.values[self.name]

    # ---- words

    def _sheet(self) -> Sheet:
        if len(self.cases) == 1:
            (case,) = self.cases
            return Sheet("\n".join([self._answer(case), *self._growth(case), *self._run(case), *self._given()]))
        rows = [self._heads(), *(self._row(case) for case in self.cases)]
        figures = range(self._cards > 1, len(rows[0]) - 1)
        bent = next((case for case in reversed(self.cases) if case.growth is not None and case.growth.bent), None)
        head = [self._summary(), *(() if bent is None else self._bent(bent, f"{self._place(bent).capitalize()}, the "))]
        if all(case.found.is_constant for case in self.cases):
            head.append(self._nothing_grows())
        return Sheet("\n".join(head), rows, figures=figures, after="\n".join([*self._run_of_all(), *self._given()]))

    @property
    def _cards(self) -> int:
        return len({case.device for case in self.cases})

    def _answer(self, case: FitCase) -> str:
        found, best, above = case.found, case.found.best, case.found.above
        card = card_in_words(case.device)
        if best is None:
            lowest = _lowest(found)
            if lowest.ending == ERROR:
                return self._nothing_known(found)
            words = f"Not even {self._told(lowest)} fits on {card}: it {failure_in_words(lowest)}."
            if self._subject == "cell" and lowest.before * _FEW_OF_IT >= lowest.capacity:
                return f"{words} {human(lowest.before)} were in use before the cell began: `%gpumem_who` says by what."
            return words
        words = f"{self._told(best)} fits on {card} ({of_the_card(best)})"
        if found.is_constant and above is None:
            return f"{words}, the last value that was asked for: the memory does not depend on {self.name}."
        if above is None:
            at_end = best.values[self.name] == found.values[-1]
            return f"{words}, {'the last value that was asked for' if at_end else 'and no larger one was run'}."
        gap = self._not_run(found)
        return f"{words}; {self._failing(found)}.{f' {gap}.' if gap else ''}"

    def _nothing_known(self, found: SearchResult) -> str:
        return f"Nothing can be said of {self.name}: {self._errors(found)}."

    def _not_run(self, found: SearchResult) -> str:
        """Which values between the largest that fits and the wall were left out; "" for none."""
        best, wall = found.best, found.wall or found.above
        if found.is_proven or best is None or wall is None:
            return ""
        low, high = best.values[self.name], wall.values[self.name]
        run = {one.values[self.name] for one in found.tried}
        left = [value for value in found.values if low < value < high and value not in run]
        if len(left) > _FEW:
            return f"{len(left):,} values between {low:,} and {high:,} were not run"
        return (
            f"{listed([f'{value:,}' for value in left])} {'was' if len(left) == 1 else 'were'} not run" if left else ""
        )

    def _errors(self, found: SearchResult) -> str:
        """What each place that raises said of the last value tried there: the place that was come to last first."""
        last = {one.line: one for one in found.tried}
        return ", and ".join(
            f"{self._told(one)} {failure_in_words(one)}" for _, one in sorted(last.items(), reverse=True)
        )

    def _failing(self, found: SearchResult, *, briefly: bool = False) -> str:
        """What fails above the best: the next that was run, and the wall where that is another."""
        failing = [one for one in (found.above, found.wall) if one is not None]
        words = [f"{one.values[self.name]:,} {failure_in_words(one, briefly=briefly)}" for one in failing]
        return ", and ".join(dict.fromkeys(words))

    def _told(self, one: Tried) -> str:
        return ", ".join(f"{name}={value}" for name, value in one.values.items())

    def _growth(self, case: FitCase) -> Iterator[str]:
        growth, best = case.growth, case.found.best
        if case.found.is_constant:
            yield self._nothing_grows()
        elif growth is not None and best is not None and growth.per_unit > 0:
            tensors = f"At the peak tensors take {human(best.allocated)}"
            one_more = human(round(growth.per_unit))
            if growth.is_line(best.values[self.name], best.allocated):
                always = f"{human(growth.constant)} whatever {self.name} is, and " if growth.constant else ""
                yield f"{tensors}: {always}{one_more} for each. {_besides(best)}"
            else:
                yield f"{tensors}; one more {self.name} takes {one_more}. {_besides(best)}"
            yield from self._bent(case)

    def _nothing_grows(self) -> str:
        """That the value changes nothing, and how it may have missed its reader."""
        said = f"No request of the {self._subject} grows with {self.name}."
        if self._subject == "cell":
            return (
                f"{said} What was made before it with another value, as a DataLoader, does not follow: make it in the same "
                "cell."
            )
        if self._subject == "script" and self.name.startswith("-"):
            given = f"{self.name} {self.trials[-1].values[self.name]}"
            return (
                f"{said} Its trials got it in one word, as `{given.replace(' ', '=')}`. A script that reads `{given}`, in two, "
                f"gets it so where you give it once behind ` -- `: `-- {given}`."
            )
        return said

    def _given(self) -> Iterator[str]:
        """Where one value went to several places, of which perhaps not all were meant."""
        for name, lines in self._places.items():
            if len(lines) > 1:
                at = [f"{line}" for line in dict.fromkeys(lines)]
                where = f"line{'s' * (len(at) > 1)} {listed(at)}"
                yield f"`{name}` is given a number in {len(lines)} places ({where}): all of them had the same value."

    def _bent(self, case: FitCase, lead: str = "The ") -> Iterator[str]:
        for bent in () if case.growth is None else case.growth.bent:
            share = bent.share
            of = f" of `{share.text}`" if share.text else ""
            line = f" (line {share.line})" if share.line else ""
            yield (
                f"{lead}{LABELS[share.category]}{of}{line} grow faster than linearly: "
                f"{amount(share.bytes)}, and {amount(bent.at_half)} with half of it."
            )

    def _run(self, case: FitCase) -> Iterator[str]:
        tried = case.found.tried
        fitting, failing = (
            [f"{value:,}" for value in sorted(one.values[self.name] for one in tried if one.fits is fits)]
            for fits in (True, False)
        )
        words = [f"{listed(fitting)} fit{'s' * (len(fitting) == 1)}"] if fitting else []
        words += [f"{listed(failing)} fail{'s' * (len(failing) == 1)}"] if failing else []
        count = counted(len(tried), "trial")
        card = card_in_words(case.device).partition(" ")[2] or case.device
        yield f"Run on a virtual {card}, in {count}: {', '.join(words)}. {self._ends(tried)}".rstrip()

    def _ends(self, tried: Sequence[Tried]) -> str:
        fitting = [one for one in tried if one.fits]
        if not any(one.repeats for one in fitting):
            return "Those that fit went on to the end." if fitting else ""
        said = "In those that fit, loops that repeat exactly were cut short, and what follows them was run."
        if any(one.cut for one in fitting):
            said = "In those that fit, a library's loop was cut short once it repeated exactly; what follows it was not run."
        if any(one.assumes for one in fitting):
            count = min(one.iterations for one in fitting if one.assumes)
            said += (
                f" A loop goes by its own number: that it asks for nothing else after {count} iterations is assumed."
            )
        return said

    def _summary(self) -> str:
        if all(one.ending == ERROR for one in self.trials):
            return self._nothing_known(self.cases[0].found)
        parts = []
        for case in self.cases:
            best = self._best(case)
            parts.append(f"{'none' if best is None else f'{best:,}'} {self._place(case)}")
        where = "" if self._cards > 1 else f" on {card_in_words(self.cases[0].device)}"
        return f"The largest {self.name} that fits{where}: {', '.join(parts)}."

    def _place(self, case: FitCase) -> str:
        """``on a T4 with seq_len=512``, of these what differs."""
        card = f"on {card_in_words(case.device)}" if self._cards > 1 else ""
        across = f"with {self.across}={case.across}" if self.across is not None else ""
        return " ".join(part for part in (card, across) if part)

    def _heads(self) -> list[str]:
        heads = ["card"] * (self._cards > 1) + ([self.across] if self.across is not None else [])
        return [*heads, f"largest {self.name}", "in use at most", "tensors", "one more takes", "the next"]

    def _row(self, case: FitCase) -> list[str]:
        found = case.found
        first = [case.device] * (self._cards > 1) + ([f"{case.across:,}"] if case.across is not None else [])
        if found.best is None:
            one = _lowest(found)
            return [*first, "none", "", "", "", f"{one.values[self.name]:,} {failure_in_words(one, briefly=True)}"]
        above = found.above
        following = "the last asked for" if above is None else self._failing(found, briefly=True)
        if gap := self._not_run(found):
            following += f"; {gap[:1].lower()}{gap[1:]}"
        growth = case.growth
        one_more = "" if growth is None else human(round(growth.per_unit))
        sizes = [of_the_card(found.best), human(found.best.allocated), one_more]
        return [*first, f"{found.best.values[self.name]:,}", *sizes, following]

    def _run_of_all(self) -> Iterator[str]:
        tried = self.trials
        if any(one.fits for one in tried):
            yield "In use is what nvidia-smi would show at its highest; tensors and one more are at the peak."
        yield f"Run on virtual cards, in {counted(len(tried), 'trial')}. {self._ends(tried)}".rstrip()


def _lowest(found: SearchResult) -> Tried:
    """Where nothing fits: the lowest value that ran out of memory, or else raised another error."""
    return min(found.tried, key=lambda one: (one.ending == ERROR, *one.values.values()))


def _besides(best: Tried) -> str:
    """What is in use besides tensors: with them it is what `of_the_card` says."""
    beneath = {name: best.categories[name] for name in OUTSIDE_CATEGORIES if best.categories.get(name)}
    cached = best.used - best.allocated - sum(beneath.values())
    words = [f"{human(cached)} cached in free pieces"] * (cached > 0)
    words += [f"{human(size)} {LABELS[name]}" for name, size in beneath.items()]
    return f"The rest in use is {listed(words)}." if words else ""


def failure_in_words(one: Tried, *, briefly: bool = False) -> str:
    """``fails at line 12, `loss.backward()`, in iteration 2``. briefly: for a table."""
    place = f" at line {one.line}" if one.line else ""
    if briefly:
        return f"raises {one.error.partition(':')[0]}{place}" if one.ending == ERROR else f"fails{place}"
    raises_itself = one.ending == ERROR and one.statement.startswith("raise ")
    place += f", `{one.statement}`" if one.statement and not raises_itself else ""
    place += f", in iteration {one.iteration[-1]}" if one.iteration and one.iteration[-1] > 1 else ""
    if one.ending == ERROR:
        return f"raises {one.error}{f' ({place.strip()})' if place else ''}"
    return f"fails{place}"


def of_the_card(one: Tried) -> str:
    """``14.6 of 14.7 GiB``."""
    if one.capacity >= GIB:
        return f"{one.used / GIB:.1f} of {one.capacity / GIB:.1f} GiB"
    return f"{human(one.used)} of {human(one.capacity)}"


def card_in_words(name: str) -> str:
    head = name.split(",")[0]
    if head[:1].isdigit():
        return head
    if head.startswith("virtual:"):
        return f"a card of {head.removeprefix('virtual:')}"
    vowel = (head[:1] in "AFHLMNRSX" and (head[1:2].isdigit() or head[1:2].isupper())) or head[:1].lower() in "aeiou"
    return f"{'an' if vowel else 'a'} {head}"
