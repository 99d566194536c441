"""The forward in bfloat16, by autocast; parameters, gradients and the optimizer's states stay as they are."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gpumem_magic.advice.changes.suites import forwards
from gpumem_magic.advice.draft import CellDraft, Unchangeable
from gpumem_magic.advice.evidence import Evidence
from gpumem_magic.advice.proposal import DIFFERENT, Proposal

_LEAST = 0.05


def autocast(seen: Evidence, draft: CellDraft) -> Iterator[Proposal]:
    if not seen.bfloat16 or max(seen.share("activations"), seen.share("temporaries")) < _LEAST:
        return

    def edit(draft: CellDraft) -> None:
        found = forwards(draft, seen)
        for forward in found:
            if any(_is_autocast(one) for one in forward.statements):
                raise Unchangeable("autocast is there already")
            draft.wrap(forward.statements, 'with torch.autocast("cuda", torch.bfloat16):')
        draft.with_torch()
        if not found:
            raise Unchangeable("no forward followed by a backward is written here")

    yield Proposal("autocast to bfloat16", DIFFERENT, edit)


def _is_autocast(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "autocast" for node in ast.walk(statement))
