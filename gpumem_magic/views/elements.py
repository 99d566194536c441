"""Pieces of HTML that every page in a notebook is made of: escaped words, tables, what opens, and the one style sheet.

What is stored has to read without style sheets too, as GitHub and a notebook that is not trusted take them away: then headings,
paragraphs, tables and `details` are left, in the colours of the page around them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path

from gpumem_magic.report.model import LABELS
from gpumem_magic.units import mib
from gpumem_magic.views.palette import COLOURS, DARK, PATTERNS, line_on

_FOLDER = Path(__file__).parent
_BACKTICKS = re.compile(r"`([^`]+)`")
_SPACE = re.compile(r"/\*.*?\*/|\s+", re.DOTALL)
_NUMBERS = {name: number for number, name in enumerate(COLOURS)}
# A gradient's direction is across its lines.
_DIRECTIONS = {"/": "135deg", "\\": "45deg", "|": "90deg", "-": "0deg"}
# The pages that say what their theme is: JupyterLab's and Notebook's, VS Code's, Colab's.
LIGHT_PAGES = ('[data-jp-theme-light="true"]', ".vscode-light", "[theme=light]")
DARK_PAGES = ('[data-jp-theme-light="false"]', ".vscode-dark", "[theme=dark]")


def words(sentence: str) -> str:
    """A sentence, with what stands between backticks as code."""
    return _BACKTICKS.sub(r"<code>\1</code>", escape(sentence))


def quoted(text: str) -> str:
    """For an attribute's value."""
    return escape(text, quote=True)


def paragraph(sentence: str, name: str = "") -> str:
    return f"<p{_class(name)}>{words(sentence)}</p>"


def details(summary: str, inner: str, *, opened: bool = False, name: str = "") -> str:
    """What opens by mouse and keyboard without a script."""
    return f"<details{_class(name)}{' open' if opened else ''}><summary>{words(summary)}</summary>{inner}</details>"


def colour(category: str) -> str:
    """The class of a category's colour."""
    return f"gk{_NUMBERS[category]}"


def swatch(category: str) -> str:
    return f'<i class="gpumem-swatch {colour(category)}"></i>'


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]], figures: Iterable[int]) -> str:
    """A table. rows: cells that are HTML already. figures: the numbers of the columns that go to the right."""
    right = set(figures)

    def cells(tag: str, texts: Sequence[str]) -> str:
        sides = (' align="right"' if place in right else "" for place in range(len(texts)))
        return "".join(f"<{tag}{side}>{text}</{tag}>" for side, text in zip(sides, texts, strict=True))

    # A column without a name has no heading cell: a reader that speaks would stop at nothing.
    head = f"<thead><tr>{cells('th', list(map(escape, heads)))}</tr></thead>".replace("<th></th>", "<td></td>")
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="gpumem-wide" tabindex="0"><table>{head}<tbody>{body}</tbody></table></div>'


def stack(sizes: Sequence[tuple[str, int]], whole: int, tip: str = "title") -> str:
    """A stacked bar: (category, bytes), of which `whole` bytes fill it. tip: the attribute with the figures for a pointer."""
    spans = []
    for name, size in sizes:
        share = 100 * size / max(whole, 1)
        if share >= 0.05:
            said = quoted(f"{LABELS[name]} {mib(size)} MiB")
            spans.append(f'<i class="{colour(name)}" style="width:{share:.4g}%" {tip}="{said}"></i>')
    return "".join(spans)


def legend(sizes: Mapping[str, str] | Iterable[str]) -> str:
    """The colours of categories, in this order; their figures behind them where they are given."""
    figures = sizes if isinstance(sizes, Mapping) else {}
    items = (
        f"<li>{swatch(name)}{LABELS[name]}{f' <b>{figures[name]}</b>' if name in figures else ''}</li>"
        for name in sizes
    )
    return f'<ul class="gpumem-legend">{"".join(items)}</ul>'


@cache
def style() -> str:
    """The style sheet, which follows the theme of the notebook around it."""
    sheet = "".join((_FOLDER / name).read_text("utf-8") for name in ("notebook.css", "report.css"))
    light = "".join(f".gk{_NUMBERS[name]}{_filled(name, shade)}" for name, shade in COLOURS.items())
    dark = "".join(
        f"{','.join(f'{page} .gk{_NUMBERS[name]}' for page in DARK_PAGES)}{_filled(name, shade)}"
        for name, shade in DARK.items()
    )
    system = "".join(f".gk{_NUMBERS[name]}{_filled(name, shade)}" for name, shade in DARK.items())
    # A notebook that says that it is light is light, whatever the system prefers.
    kept = "".join(f'[data-jp-theme-light="true"] .gk{_NUMBERS[name]}{_filled(name, COLOURS[name])}' for name in DARK)
    sheet += f"{light}@media (prefers-color-scheme: dark){{{system}}}{kept}{dark}"
    return f"<style>{_SPACE.sub(' ', sheet).strip()}</style>"


def _filled(category: str, shade: str) -> str:
    """The declaration of a category's colour, with the lines of its pattern."""
    lines = ""
    if category in PATTERNS:
        ink = line_on(shade)
        lines = f"repeating-linear-gradient({_DIRECTIONS[PATTERNS[category]]},{ink} 0 1px,transparent 1px 5px) "
    return f"{{background:{lines}{shade}}}"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
