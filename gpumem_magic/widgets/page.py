"""What remains in the notebook when a watch is over: a picture as an image, the summary as text. No script, no widget, no link.

An image given as data stays where a notebook is shown by somebody else (GitHub, an export, a notebook that is not trusted).
"""

from __future__ import annotations

from html import escape
from typing import Any

from gpumem_magic.failures import swallowed
from gpumem_magic.views.pages import card, image
from gpumem_magic.views.palette import TEXT
from gpumem_magic.views.quiet import quiet
from gpumem_magic.widgets.samples import Samples, summary

_CSS_WIDTH = 860


@quiet()
def left_behind(samples: Samples) -> dict[str, Any]:
    """A display bundle: HTML with the picture, and plain text. The text alone where the picture can't be drawn."""
    words = summary(samples)
    head, _, rest = words.partition("\n")
    body = []
    if any(device.rows for device in samples.devices):
        try:
            from gpumem_magic.widgets.watch_figure import png

            data, _width, _height = png(samples)
            body.append(image(data, words, _CSS_WIDTH))
        except Exception as error:
            rest += f"\nnote: the picture could not be drawn ({swallowed(error)})"
    body += [f'<p style="margin:2px 0;color:{TEXT}">{escape(line.strip())}</p>' for line in rest.splitlines()]
    return {"text/html": card(head, body), "text/plain": words}
