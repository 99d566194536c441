"""One change that may save memory: what it is, and how it is made to a program's text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gpumem_magic.advice.draft import CellDraft

SAME, ROUNDING, DIFFERENT = "the same", "the same but for rounding", "different"
"""What a change does to the results."""
RESULTS = (SAME, ROUNDING, DIFFERENT)


@dataclass(frozen=True)
class Proposal:
    """name: in a few words. results: one of the words above; but: under which condition, or what else changes. costs: what
    neither FLOPs nor what is moved tell.

    edit: makes the change, and raises `Unchangeable` where the text does not allow it; None where the allocator's settings
    (`conf`) are the change.
    """

    name: str
    results: str
    edit: Callable[[CellDraft], None] | None = field(default=None, compare=False)
    conf: str = ""
    but: str = ""
    costs: str = ""

    def made(self, code: str) -> str:
        """A program's text with the change. Raises Unchangeable."""
        if self.edit is None:
            return code
        draft = CellDraft(code)
        self.edit(draft)
        return draft.finished()
