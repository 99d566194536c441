"""What is drawn by chance, into memory of its own first.

After ``Distributions.cpp``, ``DistributionTemplates.h``, ``MultinomialKernel.cu`` and ``RreluWithNoise.cu`` of ATen/native.
"""

from __future__ import annotations

from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.calls import bytes_of, copies_of
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.half_precision import HALF, accumulator
from gpumem_magic.virtual.engine.modes import pushed
from gpumem_magic.virtual.engine.rules import BESIDE, special
from gpumem_magic.virtual.operators.scans import of_one_row
from gpumem_magic.virtual.operators.sorting import hold_for_selection

# `multinomial`: since when the device checks the weights, and looks for the lowest and the highest together.
_CHECKED_ON_DEVICE_FROM, _ENDS_AT_ONCE_FROM = (2, 5), (2, 12)


@special(*overloads("rrelu_with_noise rrelu_with_noise_"), table=BESIDE)
def _leaky_by_chance(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """In training, plain copies of input, noise and result (``RreluWithNoise.cu``)."""
    training = args[4] if len(args) > 4 else kwargs.get("training", False)
    return copies_of(args[0], args[1], out) if training and out.numel() else []


@special(_aten.multinomial.default, _aten.multinomial.out)
def _multinomial(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    weights, count, *rest = args
    again = rest[0] if rest else kwargs.get("replacement", False)
    out = engine.run(func, args, kwargs, device)
    if not out.numel():
        return out
    if again and count > 1:
        # The weights, in shares, and their sums from the first on.
        scan = of_one_row(engine, device, _aten.cumsum.default, (weights, -1), {}, weights)
        with engine.scratch(device, *[bytes_of(weights)] * 3, *scan):
            return out
    with pushed(engine.mode):
        checks = _checks(engine.memory.torch_version(device), weights)
    engine.table.drain()
    # Exponential draws for each weight, and the highest quotients where there are several.
    with engine.scratch(device, bytes_of(weights), out.numel() * weights.element_size() if count > 1 else 0):
        if count > 1:
            hold_for_selection(engine, device, weights, -1)
    del checks
    return out


def _checks(version: tuple[int, int], weights: Any) -> Any:
    """That all weights are finite, none is negative, and each row has one (``Distributions.cpp``): what is held to the end.

    Up to 2.4 the host read both answers; since 2.5 the device looks at them itself.
    """
    is_at_once = version >= _ENDS_AT_ONCE_FROM
    lowest, highest = weights.aminmax() if is_at_once else (None, weights.max())
    finite = highest < float("inf")
    lowest = weights.min() if lowest is None else lowest
    positive = lowest >= 0
    valid = finite & positive
    del positive
    if not is_at_once:
        del lowest, finite, highest
        lowest = highest = None
    finite = None
    if version < _CHECKED_ON_DEVICE_FROM:
        valid = None
    sums = weights.sum() if weights.dim() == 1 else weights.sum(1)
    is_none = sums == 0
    empty = is_none.any() if weights.dim() > 1 else is_none
    del is_none, sums
    if version < _CHECKED_ON_DEVICE_FROM:
        return None
    empty.bitwise_not()
    return highest, lowest, valid, empty


@special(*overloads("bernoulli bernoulli_.Tensor"), table=BESIDE)
def _drawn_by(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """Chances of half precision are made float32 (``DistributionTemplates.h``)."""
    chances = args[0] if func is _aten.bernoulli.default else args[1]
    return [chances.numel() * accumulator(chances.dtype).itemsize] if chances.dtype in HALF else []


@special(_aten.normal.Tensor_float, table=BESIDE)
def _drawn_around(engine: Engine, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> list[int]:
    """What is drawn is in a tensor of its own first (`normal_out_impl` in ``DistributionTemplates.h``)."""
    return [bytes_of(out)]


_MAKE_THEIR_RESULT = (_aten.normal.Tensor_Tensor, _aten.normal.float_Tensor)


@special(*overloads("normal.Tensor_Tensor normal.Tensor_Tensor_out normal.float_Tensor normal.float_Tensor_out"))
def _drawn_by_deviations(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The lowest deviation is looked at (`CHECK_NORMAL_TENSOR_STD` in ``DistributionTemplates.h``), again after the result is
    made; then a mean that is a number becomes a tensor (`normal_out_impl`)."""
    _check_deviation(engine, args[1])
    out = engine.run(func, args, kwargs, device)
    if func in _MAKE_THEIR_RESULT:
        _check_deviation(engine, args[1])
    if not isinstance(args[0], torch.Tensor):
        with engine.scratch(device, out.element_size()):
            pass
    return out


def _check_deviation(engine: Engine, deviation: Any) -> None:
    if deviation.numel():
        with pushed(engine.mode):
            lowest = deviation.min()
            lowest.ge(0)
        del lowest
        engine.table.drain()
