"""One change that may save memory: what it is, and how it is made to a program's text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpumem_magic.advice.draft import CellDraft
from gpumem_magic.advice.program_texts import Place, ProgramTexts

SAME, ROUNDING, DIFFERENT = "the same", "the same but for rounding", "different"
"""What a change does to the results."""
RESULTS = (SAME, ROUNDING, DIFFERENT)
Edit = Callable[[CellDraft], None]


@dataclass(frozen=True)
class Proposal:
    """name: in a few words. results: one of the words above; but: under which condition, or what else changes. costs: what
    neither FLOPs nor what is moved tell.

    edit: makes the change, and raises `Unchangeable` where the text does not allow it; None where the allocator's settings
    (`conf`) are the change. edits: how it is made in each of the program's texts, once it is known in which.
    """

    name: str
    results: str
    edit: Edit | None = field(default=None, compare=False)
    conf: str = ""
    but: str = ""
    costs: str = ""
    edits: Mapping[Place, Edit] = field(default_factory=dict, compare=False)

    def made(self, draft: CellDraft) -> str:
        """A text with the change, made to its draft. Raises Unchangeable."""
        assert self.edit is not None
        self.edit(draft)
        return draft.finished()

    def made_in(self, program: ProgramTexts) -> ProgramTexts:
        """A program with the change, in all of its texts. Raises Unchangeable."""
        for place, edit in self.edits.items():
            draft = program.draft(place)
            edit(draft)
            program = program.with_text(place, draft.finished())
        return program
