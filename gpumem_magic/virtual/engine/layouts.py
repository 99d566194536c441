"""How results lie on a device where PyTorch's shape rules have them lie otherwise.

A shape rule may be the operator's formula in Python, whose result lies as its arguments do; a kernel often makes its result in
one piece, whatever lies in them. What is done with such a result later is copied, or is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpumem_magic.virtual.engine.modes import META, made_plainly

# A plain meta tensor that lies as a result does, of the operator's arguments and that result.
Lies = Callable[[Any, torch.Tensor], torch.Tensor]
# An operator -> how so many of its results lie, from the first on; None: as the rule says.
LAYOUTS: dict[Any, Sequence[Lies | None]] = {}
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def in_one_piece(args: Any, result: torch.Tensor) -> torch.Tensor:
    """Dimension after dimension."""
    return made_plainly(torch.empty, result.shape, dtype=result.dtype, device=META)


def as_an_image(place: int) -> Lies:
    """With channels last where they are so in that argument, else in one piece (`suggest_memory_format`)."""

    def lies(args: Any, result: torch.Tensor) -> torch.Tensor:
        last, source = _LAST.get(result.dim()), args[place]
        if last is None or source.is_contiguous() or not source.is_contiguous(memory_format=last):
            return in_one_piece(args, result)
        return made_plainly(torch.empty, result.shape, dtype=result.dtype, device=META, memory_format=last)

    return lies


def number_by_number(*places: int) -> Lies:
    """As a sum of these arguments would (`TensorIterator`): where they differ, the first decides."""

    def lies(args: Any, result: torch.Tensor) -> torch.Tensor:
        first, *others = (
            made_plainly(torch.empty_strided, args[place].shape, args[place].stride(), dtype=result.dtype, device=META)
            for place in places
        )
        for other in others:
            first = made_plainly(torch.add, first, other)
        return first

    return lies


def as_a_view(args: Any, result: torch.Tensor) -> torch.Tensor:
    """As C++ views the first argument (`computeStride` in ``TensorUtils.cpp``): a dimension of one has the stride that it would
    have in one piece with those behind it. PyTorch's shape rule leaves it the one that it had."""
    if 1 not in result.shape:
        return result
    source = args[0]
    lying = made_plainly(torch.empty_strided, source.shape, source.stride(), dtype=result.dtype, device=META)
    strides = lying.view(result.shape).stride()
    if strides == result.stride():
        return result
    # (What was made outside of inference mode has views that are none of its own, and the other way round: `TensorImpl.cpp`.)
    with torch.inference_mode(source.is_inference()):
        meta = made_plainly(torch.empty, (0,), dtype=result.dtype, device=META)
        meta.set_(source.untyped_storage(), source.storage_offset(), result.shape, strides)
    return meta


def as_kernels_lay(func: Any, args: Any, out: Any, around: Callable[[torch.Tensor, torch.device], Any]) -> Any:
    """An operator's results as `LAYOUTS` says. around: makes a virtual tensor of a plain meta tensor."""
    several = isinstance(out, (tuple, list))
    results = list(out) if several else [out]
    for place, lies in enumerate(LAYOUTS[func]):
        result = results[place]
        if lies is not None and result is not None:
            plain = lies(args, result)
            if plain.stride() != result.stride():
                results[place] = around(plain, result.fake_device)
    return tuple(results) if several else results[0]
