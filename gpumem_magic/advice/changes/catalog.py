"""Every kind of change, in the order in which they are tried: what grows first, then what costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

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
from gpumem_magic.advice.program_texts import Place, ProgramTexts
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


# What is no matter of one function.
_OF_THE_CELL = (allocator_settings, no_graph)


def proposals(seen: Evidence, program: ProgramTexts) -> list[Proposal]:
    """Those that the evidence is for, and that the texts allow; one for all texts in which it can be made."""
    found: dict[str, Proposal] = {}
    places: list[tuple[Place, Evidence]] = [(None, seen), *seen.inside.items()]
    for idea in IDEAS:
        for place, its in places:
            if place is not None and idea in _OF_THE_CELL:
                continue
            for one in idea(its, program.draft(place)):
                if one.edit is None:
                    found.setdefault(one.name, one)
                    continue
                try:
                    one.made(program.draft(place))
                except Unchangeable:
                    continue
                before = found.setdefault(one.name, one)
                found[one.name] = replace(before, edits={**before.edits, place: one.edit})
    return list(found.values())
