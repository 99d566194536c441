"""A program as its texts: the cell, and functions of its own that stand elsewhere, each as it is or changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpumem_magic.advice.draft import CellDraft
from gpumem_magic.advice.written_functions import WrittenFunction

Place = WrittenFunction | None
"""A function's, or the cell's."""


@dataclass(frozen=True)
class ProgramTexts:
    """changed: the functions that are not as they were, with their texts."""

    cell: str
    changed: Mapping[WrittenFunction, str] = field(default_factory=dict)

    def draft(self, place: Place) -> CellDraft:
        if place is None:
            return CellDraft(self.cell)
        return CellDraft(self.changed.get(place, place.text), of=place.own_name, has=place.imports)

    def with_text(self, place: Place, text: str) -> ProgramTexts:
        if place is None:
            return replace(self, cell=text)
        return replace(self, changed={**self.changed, place: text})
