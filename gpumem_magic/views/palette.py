"""The colours, patterns and letters of the categories: one place for the picture, the page, the text and the widgets.

The colours are Paul Tol's "bright" scheme with tints of his "light" one. Two of them that a colour-blind reader may take for
each other differ in pattern, and a hairline of paper parts neighbours in a bar.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_CATEGORIES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))

COLOURS = {name: look["colour"] for name, look in _CATEGORIES.items()}
# Lines on a category's colour; plain where nothing is said.
PATTERNS = {name: look["pattern"] for name, look in _CATEGORIES.items() if "pattern" in look}
# Colours that would drown on a dark page, or glare.
DARK = {
    "unknown": "#C4CAD0",
    "cached": "#3F444B",
    "optimizer_state": "#35A04A",
    "parameters": "#5B8FC7",
    "autocast_copies": "#4A66D9",
}
# What stands for a category in a bar of text: letters for what tensors hold, shades for what they do not.
LETTERS = {name: look["letter"] for name, look in _CATEGORIES.items()}
ASCII_LETTERS = {name: look.get("ascii", look["letter"]) for name, look in _CATEGORIES.items()}

TEXT = "#222222"
QUIET = "#6B6B6B"
ALARM = "#B3001B"
PAPER = "#FFFFFF"


@dataclass(frozen=True)
class Inks:
    """What a picture is drawn with besides the categories' colours."""

    paper: str
    text: str
    quiet: str
    alarm: str
    grid: str
    is_dark: bool = False

    def colour(self, category: str) -> str:
        """A category's, on this paper."""
        return DARK.get(category, COLOURS[category]) if self.is_dark else COLOURS[category]


def line_on(colour: str) -> str:
    """The colour of a pattern's lines on another: lighter, or darker where that is light."""
    parts = bytes.fromhex(colour[1:])
    is_light = 0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2] > 160
    end, share = (0, 0.3) if is_light else (255, 0.5)
    return "#" + bytes(round(part + (end - part) * share) for part in parts).hex().upper()


ON_LIGHT = Inks(PAPER, TEXT, QUIET, ALARM, "#EEEEEE")
ON_DARK = Inks("#161616", "#E8E8E8", "#A6A6A6", "#FF8A80", "#2E2E2E", is_dark=True)
