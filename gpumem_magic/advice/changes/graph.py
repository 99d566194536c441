"""No graph where nothing goes backward."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gpumem_magic.advice.draft import CellDraft, Unchangeable
from gpumem_magic.advice.evidence import Evidence
from gpumem_magic.advice.proposal import SAME, Proposal

_FIXED = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def no_graph(seen: Evidence, draft: CellDraft) -> Iterator[Proposal]:
    if not seen.ran_backward and seen.modules:
        yield Proposal("torch.no_grad()", SAME, _edit, but="as long as no later cell goes backward from them")


def _edit(draft: CellDraft) -> None:
    body = [one for one in draft.tree.body if not isinstance(one, _FIXED)]
    draft.with_torch()
    loops = [one for one in body if isinstance(one, (ast.For, ast.While))]
    if loops:
        for loop in loops:
            draft.wrap([loop], "with torch.no_grad():")
        return
    # The longest run of statements at the end.
    last: list[ast.stmt] = []
    for one in reversed(draft.tree.body):
        if isinstance(one, _FIXED):
            break
        last.insert(0, one)
    if not last:
        raise Unchangeable("there is nothing to wrap")
    draft.wrap(last, "with torch.no_grad():")
