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
_MODULES = ("../units.js", "model.js", "machine.js", "draw.js", "page.js")
_START = '\nstart(document, JSON.parse(document.getElementById("data").textContent));\n'
_KEYS = (
    ("\u2190 \u2192", "one event back or forward; with Shift, a tenth of the view"),
    ("Home End", "the first and the last event"),
    ("P", "the peak"),
    ("\u2191 \u2193", "the allocation above or below in the stack; with Shift, pans"),
    ("[ ]", "where the selected allocation begins and ends"),
    ("+ \u2212 0", "zoom in, zoom out, show all; { } zoom the sizes"),
    ("Esc", "clears the selection"),
)


def document(title: str, sources: Sequence[TimelineSource]) -> str:
    """The page. Raises ValueError where there is no source."""
    if not sources:
        raise ValueError("a timeline needs at least one device")
    script, style = _script(), (_FOLDER / "page.css").read_text("utf-8")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(plain(title))}</title><style>{style}</style></head>\n<body>{_body()}\n"
        f'<script type="application/json" id="data">{script_json(page_data(title, sources))}</script>\n'
        f'<script type="module">{script}</script>\n</body></html>\n'
    )


@lru_cache(maxsize=1)
def _script() -> str:
    """Our modules as one, and its start."""
    return one_script(_FOLDER, _MODULES).replace("\nexport ", "\n") + _START


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _body() -> str:
    keys = "".join(
        f"<dt>{' '.join(f'<kbd>{escape(key)}</kbd>' for key in keys.split())}</dt><dd>{escape(what)}</dd>"
        for keys, what in _KEYS
    )
    return f"""
<header><h1 id="title"></h1>
<label>Device <select id="device"></select></label>
<span class="bar"><button id="zoom-in" type="button" aria-label="zoom in">+</button>
<button id="zoom-out" type="button" aria-label="zoom out">\u2212</button>
<button id="whole" type="button">All</button><button id="peak" type="button">Peak</button>
<button id="theme" type="button">Dark</button></span></header>
<main>
<p class="summary" id="moment"></p>
<ul class="legend" id="legend" aria-label="categories: press to hide or show">
<li id="extra"><span class="key" id="rounding"></span></li>
<li><span class="key" id="cached"><span class="swatch"></span><span></span></span></li></ul>
<div class="plot"><canvas id="stack" aria-hidden="true"></canvas>
<canvas id="over" tabindex="0" role="application" aria-roledescription="timeline" aria-describedby="keys"
aria-label="Allocations stacked over time, by category"></canvas><div class="tip" id="tip"></div></div>
<div class="overview"><canvas id="overview" aria-hidden="true"></canvas></div>
<div id="live" class="hidden-text" role="status" aria-live="polite"></div>
<div class="panels">
<section class="panel" aria-labelledby="of-selected"><h2 id="of-selected">Selected allocation</h2>
<div id="selected" class="scroll"></div></section>
<section class="panel" aria-labelledby="of-largest"><h2 id="of-largest">Largest at this moment</h2>
<ol id="largest" class="largest scroll"></ol></section></div>
<section class="panel" aria-labelledby="of-segments"><div class="bar"><h2 id="of-segments">Segments at this moment</h2>
<label class="quiet">sorted by <select id="order"><option value="address">address</option>
<option value="free">most free</option></select></label>
<span id="fragmentation" class="quiet"></span></div>
<div class="segments"><canvas id="segments" role="img"></canvas></div></section>
<section id="ranks"><h2>At each one's peak</h2><div class="scroll"><table></table></div></section>
<section><h2>What the recording lacks</h2><ul class="notes" id="notes"></ul></section>
<details id="keys"><summary>Keys, once the picture has the focus</summary><dl>{keys}</dl>
<p class="quiet">Drag moves the picture, the wheel zooms (with Shift the sizes), a double click zooms in.</p></details>
</main>"""
