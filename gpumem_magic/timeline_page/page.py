"""The timeline as one HTML document that needs nothing else: no network, no other file.

A policy in the document's head allows exactly our script and style, by their hashes, and nothing from anywhere: even if a text of
a hostile recording came to be markup, it could neither run nor load.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from pathlib import Path

from gpumem_magic.timeline_page.data import page_data, plain, script_json
from gpumem_magic.timeline_page.source import TimelineSource
from gpumem_magic.views.pages import one_script

_FOLDER = Path(__file__).parent
_MODULES = ("../units.js", "model.js", "machine.js", "draw.js", "lists.js", "panels.js", "page.js")
_START = '\nstart(document, JSON.parse(document.getElementById("data").textContent));\n'


def document(title: str, sources: Sequence[TimelineSource]) -> str:
    """The page. Raises ValueError where there is no source."""
    if not sources:
        raise ValueError("a timeline needs at least one device")
    script, style, body = _script(), *((_FOLDER / name).read_text("utf-8") for name in ("page.css", "body.html"))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(plain(title))}</title><style>{style}</style></head>\n<body>\n{body}"
        f'<script type="application/json" id="data">{script_json(page_data(title, sources))}</script>\n'
        f'<script type="module">{script}</script>\n</body></html>\n'
    )


@lru_cache(maxsize=1)
def _script() -> str:
    """Our modules as one, and its start."""
    return one_script(_FOLDER, _MODULES).replace("\nexport ", "\n") + _START


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"
