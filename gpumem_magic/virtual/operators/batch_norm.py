"""The gradient of a batch norm that cuDNN ran: it makes those of weight and bias also where nobody wants them.

After ``_select_batch_norm_backend`` in ATen/native/Normalization.cpp and ``cudnn/BatchNorm.cpp``. Recorded on a GPU: a frozen
layer makes both and drops them.
"""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.engine import BESIDE, Engine, special


def by_cudnn(input: Any, weight: Any, mean: Any, training: bool) -> bool:
    """Whether a batch norm with these goes to cuDNN."""
    if weight is None or input.dim() < 3 or not torch.backends.cudnn.enabled or (mean is None and not training):
        return False
    if torch.bfloat16 in (input.dtype, weight.dtype):
        return False
    return bool(input.dtype != torch.float16 or weight.dtype == torch.float32)


@special(_aten.native_batch_norm_backward.default, table=BESIDE)
def _backward(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    _, input, weight, mean, _, _, _, training, _, wanted = args
    if not training or not by_cudnn(input, weight, mean, training):
        return []
    parts = [input if wanted[0] else None, *[weight if is_wanted else None for is_wanted in wanted[1:]]]
    dropped = [tensor for tensor, made in zip((input, weight, weight), parts, strict=True) if made is None]
    return [tensor.numel() * tensor.element_size() for tensor in dropped]
