"""LoRA: small matrices are trained beside weights that stay as they are."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from functools import partial

from gpumem_magic.advice.draft import CellDraft, Unchangeable
from gpumem_magic.advice.evidence import Evidence
from gpumem_magic.advice.proposal import DIFFERENT, Proposal
from gpumem_magic.looks.fresh import names_given

_LEAST = 0.1
_RANK, _MOST = 8, 8


def lora(seen: Evidence, draft: CellDraft) -> Iterator[Proposal]:
    trained = seen.share("gradients") + seen.share("optimizer_state")
    if not seen.ran_backward or trained < _LEAST or importlib.util.find_spec("peft") is None:
        return
    for module in seen.modules:
        layers = _targets(module.linears)
        if layers:
            yield Proposal(
                f"LoRA for {module.name} (peft)", DIFFERENT, partial(_adapt, module.name, layers, seen.optimizers),
                but="only the adapters are trained",
            )  # fmt: skip


def _adapt(name: str, layers: list[str], optimizers: Sequence[str], draft: CellDraft) -> None:
    given = {found for one in draft.tree.body for found in names_given(one)}
    for optimizer in optimizers:
        if optimizer not in given:
            raise Unchangeable(f"`{optimizer}` was made before this cell, of weights that LoRA would no longer train")
    targets = ", ".join(f'"{layer}"' for layer in layers)
    draft.behind(name, f"{name} = get_peft_model({name}, LoraConfig(r={_RANK}, target_modules=[{targets}]))")
    draft.at_top("from peft import LoraConfig, get_peft_model")


def _targets(linears: tuple[str, ...]) -> list[str]:
    """Their last names, which are alike in all blocks; of those that have numbers, few enough paths."""
    last = sorted({path.rpartition(".")[2] for path in linears})
    if any(name.isdigit() for name in last):
        return list(linears) if len(linears) <= _MOST else []
    return last
