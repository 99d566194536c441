"""The report as HTML for a notebook or a page: the answer, then the report that opens, and a still picture in its place.

Style sheets are removed where a notebook is shown by somebody else (GitHub, a notebook that is not trusted). There the answer is
left, with the picture as an image given as data, and under it, folded up, what a notebook that runs shows in the picture's place.
No script, no link, nothing from elsewhere.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from gpumem_magic.report.inside import ActivationBreakdown
from gpumem_magic.report.model import ALLOCATED_CATEGORIES, ReportData
from gpumem_magic.report.ranks import DONE, RankRow, Ranks
from gpumem_magic.units import mib
from gpumem_magic.views import explain, ranks
from gpumem_magic.views.elements import details, grid, legend, paragraph, quoted, stack, style, words
from gpumem_magic.views.inside import MAX_TREE_ROWS, is_informative, sentence_of, tree
from gpumem_magic.views.opened import opened
from gpumem_magic.views.palette import PAPER
from gpumem_magic.views.story import lead_of, story_of


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

    table: the report that opens, in the picture's place where style sheets work. others: the other devices' pictures.
    """
    label = quoted(f"GPU memory report. {explain.answer(report)}")
    body = [] if report.ranks is None else [_ranks(report.ranks)]
    body.append(_device(report, picture, table))
    for place, other in enumerate(report.devices):
        body.append(f"<hr>{_device(other, others[place] if place < len(others) else None, table)}")
    # The notebook's own shortcuts stay out: Enter opens a row, and does not begin to edit the cell.
    return (
        f'<div class="gpumem-report" role="group" aria-label="{label}" data-lm-suppress-shortcuts="true">'
        f"{style()}{''.join(body)}</div>"
    )


def page(body: str) -> str:
    """A report on a page of its own."""
    head = '<meta charset="utf-8"><meta name="color-scheme" content="light dark"><title>GPU memory</title>'
    return f'<!doctype html>\n<html lang="en">{head}\n<body>{body}</body></html>\n'


def _ranks(found: Ranks) -> str:
    """All ranks' answer, a table with alike ranks in one line, and what differs; the report of the first of them follows."""
    heads, *rows = ranks.table(found)
    right = tuple(place + 1 for place, head in enumerate(heads) if head and place not in (0, len(heads) - 1))
    lines, whole = [], found.highest or 0
    for row, (first, _) in zip(rows, ranks.families(found), strict=False):
        kind = "gpumem-named" if first.state == DONE else "gpumem-named gpumem-alarm"
        name, state, *cells = (
            f'<span class="{kind}">{quoted(cell)}</span>' if place < 2 and cell else quoted(cell)
            for place, cell in enumerate(row)
        )
        lines.append((name, _rank_bar(first, whole), state, *cells))
    body = [
        _answer(found.answer),
        grid((heads[0], "", *heads[1:]), lines, right),
        legend(
            name
            for name in ALLOCATED_CATEGORIES
            if any(500 * row.categories.get(name, 0) > whole for row in found.rows)
        ),
    ]
    body += map(paragraph, ranks.sentences(found))
    return f"{''.join(body)}<hr>{paragraph(ranks.heading(found), 'gpumem-head')}"


def _rank_bar(row: RankRow, whole: int) -> str:
    """What a rank has at its peak: `whole` bytes fill the bar."""
    sizes = [(name, row.categories.get(name, 0)) for name in ALLOCATED_CATEGORIES]
    return f'<div class="gpumem-share gpumem-rank">{stack(sizes, whole)}</div>'


def _device(report: ReportData, picture: Picture | None, table: bool) -> str:
    story = story_of(report)
    body = [_answer(story.answer)]
    if story.obstacle:
        body.append(paragraph(story.obstacle, "gpumem-alarm"))
    if picture:
        body.append(_image(report, picture, hidden=table))
    if table and explain.used_device(report):
        summary = "Rows, each with what is in it (MiB)"
        body.append(details(summary, opened(report), opened=picture is None, name="gpumem-live"))
    body += map(paragraph, story.others)
    folded = [*story.folded, *filter(None, [explain.headline(report), explain.evidence(report)])]
    body.append(details("More about this report", "".join(map(paragraph, folded))))
    if table and report.inside is not None and is_informative(report.inside):
        body.append(details("Activations by module and operator (MiB)", _inside(report.inside)))
    return "".join(body)


def _answer(text: str) -> str:
    """Its first sentence stands out."""
    first, rest = lead_of(text)
    return f'<p class="gpumem-answer"><strong>{words(first)}</strong></p>{paragraph(rest) if rest else ""}'


def _image(report: ReportData, picture: Picture, *, hidden: bool) -> str:
    data = base64.b64encode(picture.data).decode("ascii")
    # The height follows from the width, so that a narrow page shrinks the picture and does not squeeze it.
    name = ' class="gpumem-still"' if hidden else ""
    return (
        f'<img{name} alt="{quoted(explain.alt_text(report))}" width="{picture.width}" '
        f'style="max-width:100%;height:auto;background:{PAPER}" src="data:image/png;base64,{data}">'
    )


def _inside(inside: ActivationBreakdown) -> str:
    """The activations as a tree of modules, and by operator."""
    branches = [
        (quoted("\u00a0" * 4 * one.depth + one.name), quoted(one.type), *map(mib, one.bytes))
        for one in tree(inside.layers, MAX_TREE_ROWS)
    ]
    operators = [
        (
            quoted(one.name),
            mib(one.bytes),
            mib(one.shared),
            quoted(", ".join(f"{name} {mib(size)}" for name, size in one.operations.items())),
        )
        for one in inside.operators
    ]
    body = paragraph(sentence_of(inside), "gpumem-quiet")
    body += grid(("module", "class", "activations", "parameters", "gradients"), branches, (2, 3, 4))
    if operators:
        body += grid(("kept by operators", "activations", "shared with above", "operations"), operators, (1, 2))
    return body
