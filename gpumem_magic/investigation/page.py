"""What a saved notebook keeps of a stepper: every checkpoint in one picture and one table. No script, no widget, no link."""

from __future__ import annotations

import warnings
from html import escape
from typing import Any

from gpumem_magic.failures import swallowed
from gpumem_magic.investigation.steps import Investigation, Step
from gpumem_magic.views import explain
from gpumem_magic.views.lines import SizeFormat
from gpumem_magic.views.pages import CSS_WIDTH, card, image
from gpumem_magic.views.palette import ALARM, PAPER, QUIET, TEXT
from gpumem_magic.views.quiet import quiet


@quiet()
def still(investigation: Investigation) -> dict[str, Any]:
    """A display bundle: HTML with the picture and the sentences, and plain text. The text alone where nothing can be drawn."""
    text = investigation.text()
    device = explain.device_name(investigation.report.device)
    head = f"The checkpoints at which memory moved, on the {device}"
    body = []
    try:
        from gpumem_magic.investigation.figure import png

        data, _width, _height = png(investigation)
        body.append(image(data, text, CSS_WIDTH))
    except Exception as error:
        warnings.warn(f"gpumem_magic could not draw the checkpoints: {swallowed(error)}", stacklevel=2)
    body.append(_details(investigation))
    return {"text/html": card(head, body), "text/plain": text}


def _details(investigation: Investigation) -> str:
    figures = SizeFormat(investigation.report)
    rows = "".join(_row(step, figures, investigation) for step in investigation.steps)
    names = ["", "checkpoint", "nvidia-smi", *(["published"] if investigation.has_published else []), "what changed"]
    head = "".join(f'<th style="text-align:left;color:{QUIET}">{name}</th>' for name in names)
    style = f"border-collapse:collapse;font-size:13px;background:{PAPER};color:{TEXT};font-variant-numeric:tabular-nums"
    return (
        f'<details><summary style="cursor:pointer;color:{TEXT}">The {len(investigation.steps)} checkpoints in words'
        f'</summary><table cellpadding="5" style="{style}"><thead><tr style="background:{PAPER}">{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></details>"
    )


def _row(step: Step, figures: SizeFormat, investigation: Investigation) -> str:
    row = step.line.row
    colour = ALARM if row.kind == "error" else TEXT
    cells = [
        f'<td align="right">{row.line if row.line > 0 else ""}</td>',
        f'<td style="text-align:left;color:{colour};font-family:ui-monospace,Menlo,Consolas,monospace">{escape(step.title)}</td>',
        f'<td align="right">{figures.size(row.device_used)}</td>',
    ]
    if investigation.has_published:
        cells.append(f'<td align="right">{"" if step.published is None else figures.size(step.published)}</td>')
    cells.append(f'<td style="text-align:left">{escape(" ".join(step.sentences))}</td>')
    return f'<tr style="background:{PAPER}">{"".join(cells)}</tr>'
