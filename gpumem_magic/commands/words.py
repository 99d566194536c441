"""Texts of a file in a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """A hostile file's strings must not move the cursor, change colours or turn the direction of writing."""
    return "".join(character if character.isprintable() else "?" for character in text)
