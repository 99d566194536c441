"""Every kind of change, in the order in which they are tried: what grows first, then what costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpumem_magic.advice.changes.adapters import lora
from gpumem_magic.advice.changes.attention import fused_attention
from gpumem_magic.advice.changes.batches import accumulation
from gpumem_magic.advice.changes.compiled import compilation
from gpumem_magic.advice.changes.gradients import dropped, earlier
from gpumem_magic.advice.changes.graph import no_graph
from gpumem_magic.advice.changes.keeping import kept_results
from gpumem_magic.advice.changes.losses import chunked_cross_entropy
from gpumem_magic.advice.changes.offload import states_on_the_host
from gpumem_magic.advice.changes.optimizers import eight_bit, ways
from gpumem_magic.advice.changes.precision import autocast
from gpumem_magic.advice.changes.recompute import recomputation
from gpumem_magic.advice.changes.settings import allocator_settings
from gpumem_magic.advice.draft import CellDraft, Unchangeable
from gpumem_magic.advice.evidence import Evidence
from gpumem_magic.advice.proposal import Proposal

IDEAS: tuple[Callable[[Evidence, CellDraft], Iterator[Proposal]], ...] = (
    kept_results,
    allocator_settings,
    dropped,
    earlier,
    ways,
    no_graph,
    fused_attention,
    chunked_cross_entropy,
    recomputation,
    accumulation,
    compilation,
    autocast,
    eight_bit,
    states_on_the_host,
    lora,
)


def proposals(seen: Evidence, code: str) -> list[Proposal]:
    """Those that the evidence is for, and that the text allows."""
    found = []
    for idea in IDEAS:
        for one in idea(seen, CellDraft(code)):
            try:
                one.made(code)
            except Unchangeable:
                continue
            found.append(one)
    return found
