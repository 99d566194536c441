"""The gradients of a layer norm's weight and bias, where there are many more rows than columns.

``layer_norm_kernel.cu`` in ATen/native/cuda, `LaunchGammaBetaBackwardCUDAKernel`: above 65,536 rows, and with few enough columns
for the card, the rows are added up in parts, and then the parts: a row of each gradient for up to 32 rows of the input, and a
second tensor for each gradient in place of the first. The first stages of Swin and ConvNeXt are such, most language models are
not. Read in the newest version; taken to be there from 2.8 on.
"""

from __future__ import annotations

from math import prod
from typing import Any

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.engine import Engine, special
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.operators.copies import laid_out

_FROM = (2, 8)
_FEW_ROWS = 64 * 1024
_COLUMNS_OF_A_BLOCK, _ROWS_OF_A_BLOCK, _MOST_BLOCKS = 32, 32, 32 * 1024


@special(_aten.native_layer_norm_backward.default)
def _backward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    out = laid_out(engine, func, args, kwargs, device, (0, 1))
    input, columns = args[1], prod(args[2])
    rows = input.numel() // max(1, columns)
    processors = engine.memory.processors(device)[0]
    few_columns = columns // _COLUMNS_OF_A_BLOCK < processors // 2
    if rows <= _FEW_ROWS or not few_columns or engine.memory.torch_version(device) < _FROM:
        return out
    across = -(-columns // _COLUMNS_OF_A_BLOCK)
    down = min(_MOST_BLOCKS // across, -(-rows // _ROWS_OF_A_BLOCK))
    gradients = list(out)
    del out
    with pushed(engine.mode):
        parts = [None if one is None else one.new_empty(down, columns) for one in gradients[1:]]
        for place, part in enumerate(parts, 1):
            if part is not None:
                gradients[place] = part.sum(0).view(gradients[place].shape)
    return tuple(gradients)
