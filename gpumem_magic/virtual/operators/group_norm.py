"""What group normalisation takes while it runs: a number for each sample and channel, or each sample and group.

``group_norm_kernel.cu`` in ATen/native/cuda. Forward, with a weight or a bias, its kernel first works out what each channel is
multiplied by and moved by. Backward adds up the gradient, and its product with the input, over each channel. All are float32 for
half precision, and are held until the kernels are on their way. One value for each channel needs less.
"""

from __future__ import annotations

from typing import Any

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine.engine import BESIDE, Engine, special
from gpumem_magic.virtual.engine.half_precision import accumulator


@special(_aten.native_group_norm.default, table=BESIDE)
def _forward(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    input, weight, bias, samples, channels, inner = args[:6]
    if not samples or inner == 1 or (weight is None and bias is None):
        return []
    return [samples * channels * accumulator(input.dtype).itemsize] * 2


@special(_aten.native_group_norm_backward.default, table=BESIDE)
def _backward(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    input, (weight, samples, channels, inner, groups, wanted) = args[1], args[4:10]
    item = accumulator(input.dtype).itemsize
    by_channel, by_group = samples * channels * item, samples * groups * item
    sums = [] if inner == 1 else [by_channel] * 2
    if not wanted[0]:
        return sums
    factors = [] if inner == 1 or weight is None else [by_channel]
    return sums + [by_group] * 2 + factors
