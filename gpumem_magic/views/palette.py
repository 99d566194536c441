"""The colours and letters of the categories: one place for the picture, the page, the text and the widgets.

The colours are Paul Tol's "bright" scheme with tints of his "light" one, which readers with any of the common kinds of colour
blindness can tell apart; neighbours in a bar also differ in lightness, and a white hairline parts them.
"""

from __future__ import annotations

COLOURS = {
    "parameters": "#4477AA",
    "buffers": "#99DDFF",
    "gradients": "#EE6677",
    "optimizer_state": "#228833",
    "inputs": "#66CCEE",
    "activations": "#CCBB44",
    "activation_gradients": "#FFAABB",
    "temporaries": "#AA3377",
    "workspace": "#44BB99",
    "unknown": "#222222",
    "rounding": "#EEDD88",
    "cached": "#DDDDDD",
    "context": "#999999",
    "other_processes": "#666666",
    "context_or_others": "#808080",
}

# What stands for a category in a bar of text: letters for what tensors hold, shades for what they do not.
LETTERS = {
    "parameters": "P",
    "buffers": "B",
    "gradients": "G",
    "optimizer_state": "O",
    "inputs": "I",
    "activations": "A",
    "activation_gradients": "g",
    "temporaries": "T",
    "workspace": "W",
    "unknown": "?",
    "rounding": "r",
    "cached": "░",
    "context": "▓",
    "other_processes": "▒",
    "context_or_others": "▒",
}
ASCII_LETTERS = LETTERS | {"cached": ".", "context": "#", "other_processes": "%", "context_or_others": "%"}

TEXT = "#222222"
QUIET = "#6B6B6B"
ALARM = "#B3001B"
PAPER = "#FFFFFF"
