"""What the pages in a notebook share: modules made one script, and the card that stands where no script runs."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from gpumem_magic.views.palette import PAPER, TEXT

CSS_WIDTH = 1060
_IMPORT = re.compile(r"^import \{[^}]*\} from \"\.{1,2}/\w+\.js\";\n", re.MULTILINE)
_CARD = (
    f"background:{PAPER};color:{TEXT};font-family:system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif;"
    f"font-size:14px;line-height:1.45;max-width:{CSS_WIDTH}px;padding:12px 16px;border-radius:8px;color-scheme:light"
)


def one_script(folder: Path, names: Sequence[str]) -> str:
    """The modules as one, without their imports of one another. Each needs only those before it."""
    return "\n".join(_IMPORT.sub("", (folder / name).read_text("utf-8")) for name in names)


def image(png: bytes, alt: str, width: int, dark: bytes = b"") -> str:
    """A picture with its data. width: in CSS pixels, at most; it shrinks with the page. dark: what the style sheet of reports
    puts in its place on a dark page."""
    data = base64.b64encode(png).decode("ascii")
    style = f"width:{width}px;max-width:100%;height:auto"
    if dark:
        style += f";--gpumem-dark:url(data:image/png;base64,{base64.b64encode(dark).decode('ascii')})"
    return f'<img alt="{escape(alt, quote=True)}" src="data:image/png;base64,{data}" width="{width}" style="{style}"/>'


def vector_image(svg: str, alt: str, width: int) -> str:
    """The same for a drawing in SVG."""
    data = base64.b64encode(svg.encode("utf-8")).decode("ascii")
    style = f"width:{width}px;max-width:100%;height:auto"
    return (
        f'<img alt="{escape(alt, quote=True)}" src="data:image/svg+xml;base64,{data}" width="{width}" style="{style}"/>'
    )


def card(head: str, body: Sequence[str]) -> str:
    """A heading, and elements below it, on a ground of their own, so that it reads on a dark page too."""
    first = f'<p style="font-weight:600;margin:0 0 6px 0;color:{TEXT}">{escape(head)}</p>'
    return f'<div style="{_CARD}">{"".join([first, *body])}</div>'
