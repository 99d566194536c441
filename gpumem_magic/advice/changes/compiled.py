"""torch.compile: fewer and smaller intermediate results, where PyTorch's compiler finds them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from gpumem_magic.advice.draft import CellDraft
from gpumem_magic.advice.evidence import Evidence
from gpumem_magic.advice.proposal import ROUNDING, Proposal

_LEAST = 0.1


def compilation(seen: Evidence, draft: CellDraft) -> Iterator[Proposal]:
    if max(seen.share("activations"), seen.share("temporaries")) < _LEAST:
        return
    # (A loss alone is a few operators: what it could save is in the model before it.)
    for module in (one for one in seen.modules if one.has_parameters):
        yield Proposal(
            f"{module.name}.compile()", ROUNDING, partial(_compile_in_place, module.name), costs="time to compile"
        )


def _compile_in_place(name: str, draft: CellDraft) -> None:
    draft.behind(name, f"{name}.compile()")
