"""Activation checkpointing: what a block's forward leaves for its backward is made again when the backward comes."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem_magic.advice.draft import CellDraft
from gpumem_magic.advice.evidence import Evidence
from gpumem_magic.advice.proposal import DIFFERENT, SAME, Proposal

_LEAST, _MOST = 0.05, 2
_IMPORT = "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing"


def recomputation(seen: Evidence, draft: CellDraft) -> Iterator[Proposal]:
    """Of the classes of modules that hold most."""
    if not seen.ran_backward or seen.share("activations") < _LEAST:
        return
    for module in seen.modules:
        if module.recomputes:
            yield Proposal(
                f"{module.name}.gradient_checkpointing_enable()", SAME, _Enabled(module.name),
            )  # fmt: skip
            return
    heavy = [one for one in seen.classes if one.activations > _LEAST * seen.allocated]
    for one in sorted(heavy, key=lambda one: -one.activations)[:_MOST]:
        yield Proposal(
            f"recomputing the activations of {one.name} ({one.count} in {one.root})",
            DIFFERENT if one.normalizes_batches else SAME,
            _Wrapped(one.root, one.name),
            but="BatchNorm takes each batch's statistics twice" if one.normalizes_batches else "",
        )


class _Enabled:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, draft: CellDraft) -> None:
        draft.behind(self.name, f"{self.name}.gradient_checkpointing_enable()", f"{self.name}.train()")


class _Wrapped:
    def __init__(self, root: str, kind: str) -> None:
        self.root, self.kind = root, kind

    def __call__(self, draft: CellDraft) -> None:
        test = f'lambda module: type(module).__name__ == "{self.kind}"'
        draft.behind(self.root, f"apply_activation_checkpointing({self.root}, check_fn={test})")
        draft.at_top(_IMPORT)
