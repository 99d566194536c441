"""Cross-entropy over many classes in pieces: the probabilities of one piece are there at a time."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gpumem_magic.advice.draft import CellDraft, Unchangeable
from gpumem_magic.advice.evidence import Evidence
from gpumem_magic.advice.proposal import ROUNDING, Proposal

_PIECES = """def cross_entropy_in_pieces(logits, target, pieces=8):
    parts = zip(logits.chunk(pieces), target.chunk(pieces))
    sums = [checkpoint(F.cross_entropy, *part, reduction="sum", use_reentrant=False) for part in parts]
    return sum(sums) / (target != -100).sum()


"""


def chunked_cross_entropy(seen: Evidence, draft: CellDraft) -> Iterator[Proposal]:
    if seen.ran_backward and _plain(draft):
        yield Proposal("cross-entropy in pieces", ROUNDING, _edit, but="for targets that are classes")


def _edit(draft: CellDraft) -> None:
    found = _plain(draft)
    for call in found:
        draft.replace(call.func, "cross_entropy_in_pieces")
    if not found:
        raise Unchangeable("cross_entropy is not called here with logits and targets alone")
    draft.at_top(
        "import torch.nn.functional as F",
        "from torch.utils.checkpoint import checkpoint",
        "",
        "",
        *_PIECES.splitlines(),
    )


def _plain(draft: CellDraft) -> list[ast.Call]:
    return [call for call in draft.calls(["cross_entropy"]) if len(call.args) == 2 and not call.keywords]
