"""An answer that is a table with words around it: as text for a terminal, and as HTML for a notebook."""

# IPython's display carries no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from gpumem_magic.failures import swallows
from gpumem_magic.views.display import HTML, PLAIN, in_terminal
from gpumem_magic.views.elements import grid, paragraph, style
from gpumem_magic.views.lines import table, text_width

# Parts of a bar: what is there, what came, what went, and the highest in between.
THERE, CAME, WENT, HIGHEST = "there", "came", "went", "highest"


@dataclass(frozen=True)
class Sheet:
    """head: sentences above the table, after: below it, both of whole lines. rows: the first has the columns' heads.

    figures: the numbers of the columns that go to the right, None for all but the first. code: of those that are somebody's
    code. bars: for each row but the first (or for none) the parts of a bar, in bytes; `whole` bytes fill it. text: where it is
    more than these, all of it for a terminal.
    """

    head: str
    rows: Sequence[Sequence[str]] = ()
    figures: Container[int] | None = None
    after: str = ""
    code: Container[int] = ()
    bars: Sequence[Sequence[tuple[str, int]]] = ()
    whole: int = 0
    text: str = ""

    def __str__(self) -> str:
        blocks = [self.head, table(self.rows, self.figures, text_width()) if self.rows else "", self.after]
        return self.text or "\n\n".join(block for block in blocks if block)

    def html(self, between: str = "") -> str:
        """One element, which reads without its style sheet too. between: HTML that stands behind the head."""
        body = [
            paragraph(line, "" if number else "gpumem-answer") for number, line in enumerate(self.head.splitlines())
        ]
        body.append(between)
        if self.rows:
            body.append(self._table())
        body += [paragraph(line, "gpumem-quiet") for line in self.after.splitlines()]
        return f'<div class="gpumem-report">{style()}{"".join(body)}</div>'

    def _table(self) -> str:
        count = len(self.rows[0])
        figures = range(1, count) if self.figures is None else self.figures
        right = [place for place in range(count) if place in figures]
        rows = [[self._cell(text, place) for place, text in enumerate(row)] for row in self.rows[1:]]
        heads = list(self.rows[0])
        if self.bars:
            # The bar stands behind the figures.
            place = max(right, default=-1) + 1
            heads.insert(place, "")
            for row, parts in zip(rows, [*self.bars, *[()] * len(rows)], strict=False):
                row.insert(place, self._bar(parts))
            right = [one + (one >= place) for one in right]
        return grid(heads, rows, right)

    def _cell(self, text: str, place: int) -> str:
        indent = len(text) - len(text.lstrip(" "))
        words = "\u00a0" * 2 * indent + escape(text.lstrip(" "))
        return f"<code>{words}</code>" if place in self.code and words else words

    def _bar(self, parts: Sequence[tuple[str, int]]) -> str:
        drawn = (
            f'<i class="gpumem-{kind}" style="width:{100 * size / max(self.whole, 1):.4g}%"></i>'
            for kind, size in parts
        )
        return f'<div class="gpumem-share">{"".join(drawn)}</div>'


def show(sheet: Sheet) -> None:
    """In a terminal the text; in a notebook both, of which the front end shows the richer. A failure costs only the HTML."""
    page = "" if in_terminal() else _made(sheet.html)
    if not page:
        print(sheet)
        return
    from IPython.display import display

    bundle: dict[str, Any] = {PLAIN: str(sheet), HTML: page}
    display(bundle, raw=True)


def _made(page: Callable[[], str]) -> str:
    try:
        return page()
    except Exception as error:
        if not swallows(error):
            raise
        return ""
