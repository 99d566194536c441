"""Memory that CUDA's kernels take only while they run, and that no other module here counts: embeddings' gradients, powers.

An embedding's dense gradient (``Embedding.cu`` and ``EmbeddingBackwardKernel.cu`` in ATen/native/cuda): up to 3072 indices are
added up in place. More are sorted first, which takes two lists of indices, four lists of where their runs begin, and a row of
the accumulation type (float32 for half precision) for each index: often more than the gradient itself. (Early versions had
rows only for the runs, whose number depends on values.) The sort's own storage, CUB's, is gone before the rows come.

A number to the power of a tensor comes to the device in a tensor of its own (``Pow.cpp`` in ATen/native).

What other kernels that sort take is in `sorting`, copies into another layout are in `copies`, convolutions in `convolutions`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.engine import BESIDE, Engine, special
from gpumem_magic.virtual.engine.half_precision import accumulator

# The most indices that the kernel without a sort is used for.
MOST_UNSORTED = 3072
_COUNTER_BYTES = 8


def embedding_scratch(indices: int, index_bytes: int, width: int, dtype: torch.dtype, by_frequency: bool) -> list[int]:
    """Bytes of each temporary of an embedding's gradient, in the order of the allocations; [] for the kernel without a sort.

    indices: how many; index_bytes: of each; width: of the embedding's rows; dtype: of the gradient; by_frequency:
    `scale_grad_by_freq`.
    """
    if indices <= MOST_UNSORTED and not by_frequency:
        return []
    listed = indices * index_bytes
    runs = [listed, _COUNTER_BYTES, listed, listed, _COUNTER_BYTES, listed]
    return [listed] * (3 if by_frequency else 2) + runs + [indices * width * accumulator(dtype).itemsize]


@special(_aten.embedding_dense_backward.default)
def _embedding_backward(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    gradient, indices, *rest = args
    by_frequency = bool(rest[2]) if len(rest) > 2 else bool(kwargs.get("scale_grad_by_freq", False))
    width = int(gradient.shape[-1]) if gradient.dim() else 1
    sizes = embedding_scratch(indices.numel(), indices.element_size(), width, gradient.dtype, by_frequency)
    if not gradient.is_contiguous():
        sizes.insert(0, gradient.numel() * gradient.element_size())
    with ExitStack() as held:
        for size in sizes:
            held.enter_context(engine.scratch(device, size))
        return engine.run(func, args, kwargs, device)


@special(_aten.pow.Scalar, table=BESIDE)
def _power(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    return [] if args[0] == 1 else [16 if isinstance(args[0], complex) else 8]
