"""`ZeroRedundancyOptimizer`: states that are brought together on one rank travel as other objects do, the host's bytes.

PyTorch sends them as a card's bytes, which hold nothing here; what those take on the cards of both sides is taken all the same.
"""

from __future__ import annotations

import io
from types import ModuleType
from typing import Any

import torch

from gpumem_magic.patching import Patches

_HOST = torch.device("cpu")


def prepare(module: ModuleType, patches: Patches) -> None:
    original = module._broadcast_object
    distributed: Any = torch.distributed

    def broadcast_object(obj: Any, src_rank: int, group: Any = None, device: torch.device = _HOST) -> Any:
        if device.type != "cuda":
            return original(obj, src_rank, group, device)
        objects = [module._recursive_copy_to_device(obj, non_blocking=False, device=_HOST)]
        distributed.broadcast_object_list(objects, src_rank, group)
        data = io.BytesIO()
        torch.save(objects[0], data)
        lengths = torch.empty(1, dtype=torch.int64, device=device)
        sent = torch.empty(data.tell(), dtype=torch.uint8, device=device)
        data.seek(0)
        received = (
            obj if distributed.get_rank() == src_rank else torch.load(data, map_location=device, weights_only=False)
        )
        del lengths, sent
        return received

    patches.set(module, "_broadcast_object", broadcast_object)
