"""DeepSpeed's ZeRO of stage 3 has each rank compare numbers with the first rank's, which come through the device.

There they are not known: the first rank is taken to have this one's, and what is sent takes its memory all the same.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.tensors import VirtualTensor, engine_of


def prepare(module: ModuleType, patches: Patches) -> None:
    """For `deepspeed.runtime.zero.utils`."""
    compared, listed = module.assert_lst_len_same_as_other_ranks, module.get_lst_from_rank0

    def send(numbers: Any) -> bool:
        """Whether that is all that can be done: the device holds no values."""
        sent: Any = torch.tensor(numbers, dtype=torch.int64, device="cuda")
        if not isinstance(sent, VirtualTensor) or engine_of(sent).computes:
            return False
        module.dist.broadcast(sent, src=0, async_op=False)
        return True

    def assert_lst_len_same_as_other_ranks(lst: list[int]) -> None:
        if not send(len(lst)):
            compared(lst)

    def get_lst_from_rank0(lst: list[int]) -> Any:
        return [*lst] if send(lst) else listed(lst)

    patches.set(module, "assert_lst_len_same_as_other_ranks", assert_lst_len_same_as_other_ranks)
    patches.set(module, "get_lst_from_rank0", get_lst_from_rank0)
