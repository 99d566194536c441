"""What a notebook displays: one bundle of text, picture and page, of which each front end shows the richest form it can.

A notebook takes the HTML; what has no HTML (a PDF, some hosts' previews) takes the PNG; a terminal the text.
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Container
from typing import Any

from gpumem_magic.failures import swallowed
from gpumem_magic.looks.shell import running_shell
from gpumem_magic.report.model import ReportData
from gpumem_magic.report.rows import MOST
from gpumem_magic.views import explain
from gpumem_magic.views.html import Picture, card
from gpumem_magic.views.pages import CSS_WIDTH
from gpumem_magic.views.quiet import quiet
from gpumem_magic.views.text import render

PLAIN, HTML, PNG = "text/plain", "text/html", "image/png"


def asked_for(include: Container[str] | None, exclude: Container[str] | None) -> set[str]:
    """Those of the text, the page and the picture that a front end asks for, by what IPython hands on to `_repr_mimebundle_`."""
    return {
        kind
        for kind in (PLAIN, HTML, PNG)
        if (include is None or kind in include) and (exclude is None or kind not in exclude)
    }


def mimebundle(
    report: ReportData,
    *,
    kind: str | None = None,
    most: int | None = MOST,
    name: str = "report",
    include: Container[str] | None = None,
    exclude: Container[str] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(data, metadata) for IPython. kind: "table", "plot", or None for all of it. name: the report's variable, "" for none.
    Draws nothing that nobody asked for."""
    wanted = asked_for(include, exclude)
    if include is None and in_terminal():
        wanted &= {PLAIN}
    data: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    if PLAIN in wanted:
        data[PLAIN] = render(report, bars=kind != "table", table=kind != "plot", most=most, name=name)
    if HTML in wanted:
        pictures = [
            None if kind == "table" else picture(each, bare=True, most=most) for each in (report, *report.devices)
        ]
        data[HTML] = card(report, pictures[0], table=kind != "plot" or pictures[0] is None, others=pictures[1:])
    if PNG in wanted and kind != "table" and (whole := picture(report, most=most)):
        data[PNG] = base64.b64encode(whole.data).decode("ascii")
        metadata[PNG] = {"width": whole.width, "height": whole.height, "alt": explain.alt_text(report)}
    return data, metadata


@quiet()
def picture(report: ReportData, *, bare: bool = False, most: int | None = MOST) -> Picture | None:
    """The picture, without title and words if bare. None where nothing was on the device, or, with a warning, if it cannot be
    drawn: the text still can."""
    if not explain.used_device(report):
        return None
    try:
        from gpumem_magic.views.figure import png

        data, width, height = png(report, title=not bare, words=not bare, most=most)
    except Exception as error:
        warnings.warn(f"gpumem_magic could not draw the picture: {swallowed(error)}", stacklevel=2)
        return None
    return Picture(data, CSS_WIDTH, round(height * CSS_WIDTH / width))


def in_terminal() -> bool:
    """IPython in a terminal asks for everything and shows the text; the picture would cost a second for nothing."""
    formatter = getattr(running_shell(), "display_formatter", None)
    return formatter is not None and HTML not in formatter.active_types
