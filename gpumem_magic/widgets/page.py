"""What stands in the notebook when a watch is over: a picture as an image, the summary as text. No script, no widget, no link.

An image given as data stays where a notebook is shown by somebody else (GitHub, an export, a notebook that is not trusted).
"""

from __future__ import annotations

import base64
from html import escape
from typing import Any

from gpumem_magic.views.palette import PAPER, TEXT
from gpumem_magic.widgets.samples import WatchSamples, summary

_CSS_WIDTH = 860
_CARD = (
    f"background:{PAPER};color:{TEXT};font-family:system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif;"
    "font-size:14px;line-height:1.45;max-width:1060px;padding:12px 16px;border-radius:8px;color-scheme:light"
)


def left_behind(samples: WatchSamples) -> dict[str, Any]:
    """A display bundle: HTML with the picture, and plain text. The text alone where the picture can't be drawn."""
    words = summary(samples)
    head, _, rest = words.partition("\n")
    body = [f'<p style="font-weight:600;margin:0 0 6px 0;color:{TEXT}">{escape(head)}</p>']
    if any(device.rows for device in samples.devices):
        try:
            from gpumem_magic.widgets.watch_figure import png

            data, _width, _height = png(samples)
            image = base64.b64encode(data).decode("ascii")
            body.append(
                f'<img alt="{escape(words, quote=True)}" src="data:image/png;base64,{image}" '
                f'style="width:{_CSS_WIDTH}px;max-width:100%;height:auto"/>'
            )
        except Exception as error:
            rest += f"\nnote: the picture could not be drawn ({type(error).__name__}: {error})"
    body += [f'<p style="margin:2px 0;color:{TEXT}">{escape(line.strip())}</p>' for line in rest.splitlines()]
    return {"text/html": f'<div style="{_CARD}">{"".join(body)}</div>', "text/plain": words}
