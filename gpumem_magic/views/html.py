"""The report as HTML for a notebook or a page: the picture as an image, the rest as text. No script, no link, no style sheet.

Inline SVG and style sheets are removed where a notebook is shown by somebody else (GitHub, a notebook that is not trusted); an
image given as data is what stays everywhere. Styles here are attributes, and where those are removed too, plain headings,
paragraphs and tables are left, in the colours of the page around them.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from html import escape

from gpumem_magic.report.model import LABELS, ReportData
from gpumem_magic.units import counted, mib
from gpumem_magic.views import explain
from gpumem_magic.views.inside import MAX_TREE_ROWS, is_informative, sentence_of, tree
from gpumem_magic.views.lines import PEAK, Line, SizeFormat, lines, present
from gpumem_magic.views.palette import ALARM, PAPER, QUIET, TEXT

MAX_TABLE_ROWS = 500
_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
# A white card with dark text of its own, so that it reads on a dark page too.
_CARD = (
    f"background:{PAPER};color:{TEXT};font-family:{_FONT};font-size:14px;line-height:1.45;"
    "max-width:1100px;padding:16px 20px;border-radius:8px;color-scheme:light;box-sizing:border-box"
)
# What a cell needs is inherited from its row where it can be: thousands of cells, each with a style, would swell a notebook.
_ROW = f"background:{PAPER};color:{TEXT};border-bottom:1px solid #E6E6E6;vertical-align:top"
_CODE = f"text-align:left;white-space:pre-wrap;font-family:{_MONO};font-size:12px"
# A theme's own colours of code would not go with the card's.
_INLINE = f"background:#F2F2F2;color:inherit;font-family:{_MONO};font-size:.92em;padding:0 3px"
_BACKTICKS = re.compile(r"`([^`]+)`")
_WORDS = "text-align:left;white-space:normal"


@dataclass(frozen=True)
class Picture:
    """A PNG, and the size at which it is to be shown, in CSS pixels."""

    data: bytes
    width: int
    height: int


def card(
    report: ReportData, picture: Picture | None, *, table: bool = True, others: Sequence[Picture | None] = ()
) -> str:
    """The report in one element. picture: without title and words, which stand around it as text; None shows none.

    table: the rows and categories, folded up under a picture and open without one. others: the other devices' pictures.
    """
    body = [
        f'<p style="font-size:18px;font-weight:600;margin:0 0 8px 0;color:{TEXT}">{escape(explain.headline(report))}</p>'
    ]
    if picture:
        body.append(_image(report, picture))
    if verdict := explain.verdict(report):
        body.append(
            f'<p style="color:{ALARM};font-size:16px;font-weight:600;margin:8px 0 4px 0"><strong>{_words(verdict)}</strong></p>'
        )
    body += [f'<p style="color:{QUIET};margin:4px 0">{_words(sentence)}</p>' for sentence in explain.remarks(report)]
    if table:
        body.append(_details("Table (MiB)", _table(report), opened=picture is None))
        if is_informative(report.inside):
            body.append(_details("Activations by module and operator (MiB)", _inside(report), opened=False))
    for place, other in enumerate(report.devices):
        shown = others[place] if place < len(others) else None
        body.append(
            f'<hr style="border:0;border-top:1px solid #E6E6E6;margin:14px 0">{_inner(card(other, shown, table=table))}'
        )
    label = escape(f"GPU memory report. {explain.headline(report)}", quote=True)
    return f'<div role="group" aria-label="{label}" style="{_CARD}">{"".join(body)}</div>'


def _inner(element: str) -> str:
    return element.replace(_CARD, f"color:{TEXT}", 1)


def _image(report: ReportData, picture: Picture) -> str:
    data = base64.b64encode(picture.data).decode("ascii")
    # The height follows from the width, so that a narrow page shrinks the picture and does not squeeze it.
    return (
        f'<img alt="{escape(explain.alt_text(report), quote=True)}" width="{picture.width}" '
        f'style="max-width:100%;height:auto;display:block;background:{PAPER}" src="data:image/png;base64,{data}">'
    )


def _details(summary: str, inner: str, *, opened: bool) -> str:
    return (
        f'<details{" open" if opened else ""} style="margin-top:10px">'
        f'<summary style="cursor:pointer;color:{QUIET}">{escape(summary)}</summary>'
        f'<div style="overflow-x:auto">{inner}</div></details>'
    )


def _table(report: ReportData) -> str:
    figures = SizeFormat(report)
    shown = lines(report)
    sentence = explain.evidence(report)
    body = [_row_table(shown[:MAX_TABLE_ROWS], report, figures), _category_table(shown, report, figures)]
    if len(shown) > MAX_TABLE_ROWS:
        rest = f"The saved report (save, to_dict) has {counted(len(shown) - MAX_TABLE_ROWS, 'more row')}."
        body.insert(1, f'<p style="color:{QUIET};margin:4px 0">{rest}</p>')
    if sentence:
        body.append(f'<p style="color:{QUIET};margin:4px 0">{_words(sentence)}</p>')
    return "".join(body)


def _grid(heads: Sequence[str], rows: Sequence[str], words: Container[int]) -> str:
    """words: the numbers of the columns that hold words and not figures."""
    cells = "".join(
        f'<th style="text-align:{"left" if place in words else "right"};color:{QUIET}">{escape(text)}</th>'
        for place, text in enumerate(heads)
    )
    style = (
        f"border-collapse:collapse;margin:10px 0;font-size:13px;background:{PAPER};color:{TEXT};"
        "white-space:nowrap;font-variant-numeric:tabular-nums"
    )
    head = f'<thead><tr style="{_ROW}">{cells}</tr></thead>'
    return f'<table cellpadding="5" style="{style}">{head}<tbody>{"".join(rows)}</tbody></table>'


def _words(sentence: str) -> str:
    """A sentence, with what stands between backticks as code."""
    return _BACKTICKS.sub(rf'<code style="{_INLINE}">\1</code>', escape(sentence))


def _number(text: str) -> str:
    return f'<td align="right">{escape(text)}</td>'


def _name(line: Line, text: str) -> str:
    # Non-breaking spaces indent the parts where styles are removed.
    text = "\u00a0" * (4 * line.depth) + (f"{line.iteration} " if line.iteration else "") + text
    style = _CODE if line.is_statement and line.row.kind != "part" else _WORDS
    colour = f";color:{ALARM}" if line.row.kind == "error" else f";color:{QUIET}" if line.depth else ""
    return f'<td style="{style}{colour}">{escape(text)}</td>'


def _row_table(shown: Sequence[Line], report: ReportData, figures: SizeFormat) -> str:
    names = ("line", "statement", "allocated", "reserved", "nvidia-smi", "change", "peak inside", "what changed")
    return _grid(names, [_row(line, report, figures) for line in shown], (1, len(names) - 1))


def _row(line: Line, report: ReportData, figures: SizeFormat) -> str:
    row = line.row
    text = line.text if row.kind == "part" else row.statement.strip() or line.text
    if row.kind == "error" and not line.depth:
        text += f"  {explain.failure_word(report)}"
    inside = row.kind != PEAK and row.peak_allocated > row.allocated
    cells = [
        _number(str(row.line) if row.line > 0 and not line.depth else ""),
        _name(line, text),
        _number(figures.size(row.allocated)),
        _number(figures.size(row.reserved)),
        _number(figures.size(row.device_used)),
        _number(figures.change(line.change) if row.kind != PEAK else ""),
        _number(figures.size(row.peak_allocated) if inside else ""),
        f'<td style="{_WORDS}">{escape(explain.moves(line))}</td>',
    ]
    return f'<tr style="{_ROW}">{"".join(cells)}</tr>'


def _inside(report: ReportData) -> str:
    """The activations as a tree of modules, and by operator."""
    if report.inside is None:
        return ""
    branches = [
        f'<tr style="{_ROW}"><td style="{_WORDS}">{escape(chr(0xA0) * 4 * one.depth + one.name)}</td>'
        f'<td style="{_WORDS}">{escape(one.type)}</td>{"".join(_number(mib(size)) for size in one.bytes)}</tr>'
        for one in tree(report.inside.layers, MAX_TREE_ROWS)
    ]
    operators = [
        f'<tr style="{_ROW}"><td style="{_WORDS}">{escape(one.name)}</td>{_number(mib(one.bytes))}{_number(mib(one.shared))}'
        f'<td style="{_WORDS}">{escape(", ".join(f"{name} {mib(size)}" for name, size in one.operations.items()))}</td></tr>'
        for one in report.inside.operators
    ]
    body = f'<p style="color:{QUIET};margin:4px 0">{escape(sentence_of(report.inside))}</p>'
    body += _grid(("module", "class", "activations", "parameters", "gradients"), branches, (0, 1))
    if operators:
        body += _grid(("kept by operators", "activations", "shared with above", "operations"), operators, (0, 3))
    return body


def _category_table(shown: Sequence[Line], report: ReportData, figures: SizeFormat) -> str:
    """One column a category, one row a line: the numbers behind the picture."""
    names = present(report)
    if not names:
        return ""
    rows = [
        f'<tr style="{_ROW}">{_name(line, line.text)}'
        f"{''.join(_number(figures.size(line.row.categories.get(name))) for name in names)}</tr>"
        for line in shown[:MAX_TABLE_ROWS]
    ]
    return _grid(["by category", *(LABELS[name] for name in names)], rows, (0,))
