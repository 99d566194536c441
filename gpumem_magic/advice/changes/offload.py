"""The optimizer's states on the host between its steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from gpumem_magic.advice.draft import CellDraft
from gpumem_magic.advice.evidence import Evidence
from gpumem_magic.advice.proposal import SAME, Proposal

_LEAST = 0.05
_MOVE = """def state_to(device):
    def move(optimizer, args, kwargs):
        for state in optimizer.state.values():
            state.update({name: one.to(device) for name, one in state.items() if torch.is_tensor(one) and one.dim()})

    return move

"""


def states_on_the_host(seen: Evidence, draft: CellDraft) -> Iterator[Proposal]:
    # In the trial it is the host's memory, too.
    if seen.share("optimizer_state") < _LEAST or not 0 < seen.state < seen.host // 2:
        return
    for name in seen.optimizers:
        yield Proposal(f"states of {name} on the host between its steps", SAME, partial(_move, name))


def _move(name: str, draft: CellDraft) -> None:
    draft.behind(
        name,
        *_MOVE.splitlines(),
        "",
        f'{name}.register_step_pre_hook(state_to("cuda"))',
        f'{name}.register_step_post_hook(state_to("cpu"))',
    )
    draft.with_torch()
