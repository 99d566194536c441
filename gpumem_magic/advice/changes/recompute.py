"""Activation checkpointing: what a block's forward leaves for its backward is made again when the backward comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from gpumem_magic.advice.draft import CellDraft
from gpumem_magic.advice.evidence import Evidence, ModuleClass
from gpumem_magic.advice.proposal import DIFFERENT, SAME, Proposal

_LEAST, _MOST = 0.05, 2
_IMPORT = "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing"


def recomputation(seen: Evidence, draft: CellDraft) -> Iterator[Proposal]:
    """By the model's own switch, else of the classes of modules that hold most."""
    if not seen.ran_backward or seen.share("activations") < _LEAST:
        return
    for module in seen.modules:
        if module.recomputes:
            yield Proposal(
                f"gradient checkpointing of {module.name}", SAME, partial(_enable, module.name, module.recomputes)
            )
            return
    for one in _chosen([one for one in seen.classes if one.activations > _LEAST * seen.allocated]):
        yield Proposal(
            f"recomputing the activations of {one.name} ({one.count} in {one.root})",
            DIFFERENT if one.normalizes_batches else SAME,
            partial(_wrap, one.root, one.name),
            but="BatchNorm takes each batch's statistics twice" if one.normalizes_batches else "",
        )


def _chosen(heavy: Sequence[ModuleClass]) -> list[ModuleClass]:
    """Those of modules that follow each other rather than of what is around them all, as a wrapper is, which would have the
    activations of all again at once."""
    names = {one.name for one in heavy}
    return sorted((one for one in heavy if not one.around & names), key=lambda one: -one.activations)[:_MOST]


def _enable(name: str, switch: str, draft: CellDraft) -> None:
    # (A model that was loaded is not in training, and recomputes nothing then.)
    trains = f"{name}.train()"
    does = any(draft.text(call) == trains for call in draft.calls({"train"}))
    draft.behind(name, f"{name}.{switch}", *(() if does else (trains,)))


def _wrap(root: str, kind: str, draft: CellDraft) -> None:
    """All modules of this class inside `root`."""
    test = f'lambda module: type(module).__name__ == "{kind}"'
    draft.behind(root, f"apply_activation_checkpointing({root}, check_fn={test})")
    draft.at_top(_IMPORT)
