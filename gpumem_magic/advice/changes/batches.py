"""Gradient accumulation: half the batch, twice, before each step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gpumem_magic.advice.changes.suites import forwards
from gpumem_magic.advice.draft import CellDraft, Unchangeable, has_call
from gpumem_magic.advice.evidence import Evidence
from gpumem_magic.advice.proposal import DIFFERENT, ROUNDING, Proposal
from gpumem_magic.looks.fresh import names_given, names_read

_LEAST = 0.05


def accumulation(seen: Evidence, draft: CellDraft) -> Iterator[Proposal]:
    if not seen.batches or seen.batch_size < 2 or seen.share("activations") < _LEAST:
        return

    def edit(draft: CellDraft) -> None:
        found = forwards(draft, seen)
        for forward in found:
            inside = {name for one in forward.statements for name in names_read(one)}
            names = [name for name in seen.batches if name in inside]
            if any(has_call(one, "zero_grad") or has_call(one, "step") for one in forward.statements):
                raise Unchangeable("a step or its preparation stands between forward and backward")
            if not names or any(names_given(one) & set(names) for one in forward.statements):
                raise Unchangeable("its batch has no name that it keeps")
            whole = [*forward.statements, forward.statement]
            if forward.suite.index(forward.statement) - forward.suite.index(whole[0]) + 1 != len(whole):
                raise Unchangeable("something else stands between forward and backward")
            # Names of their own: a batch that was made before the loop is whole again in the next turn.
            halves = ", ".join(f"{name}.chunk(2)" for name in names)
            parts = ", ".join(f"half_of_{name}" for name in names)
            draft.wrap(whole, f"for {parts} in {f'zip({halves})' if len(names) > 1 else halves}:")
            for node in (node for one in whole for node in ast.walk(one)):
                if isinstance(node, ast.Name) and node.id in names:
                    draft.replace(node, f"half_of_{node.id}")
            assert isinstance(forward.backward.func, ast.Attribute)
            loss = forward.backward.func.value
            if names_read(loss) & set(names):
                raise Unchangeable("the loss is computed where it goes backward")
            draft.replace(loss, f"({draft.text(loss)} / 2)")
        if not found:
            raise Unchangeable("no forward followed by a backward is written here")

    yield Proposal(
        "half the batch, twice (gradient accumulation)",
        DIFFERENT if seen.normalizes_batches else ROUNDING,
        edit,
        but="BatchNorm sees half the batch" if seen.normalizes_batches else "for a loss that is a mean over the batch",
    )
