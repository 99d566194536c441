"""In which layouts cuDNN's convolutions run: what is copied for them, and how what they make lies.

After ``ConvUtils.h``, ``cudnn/ConvShared.cpp`` and ``Convolution.cpp`` of PyTorch 2.1 to 2.13. It is decided by strides alone,
and those of dimensions of one count: an image of one channel, or of one point, may lie so that its channels are said to be last,
and what is made of it does so, too. FakeTensor leaves what is contiguous either way as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gpumem_magic.virtual.engine import strides
from gpumem_magic.virtual.engine.layouts import with_strides
from gpumem_magic.virtual.engine.strides import Lengths

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_SEQUENCE, _IMAGE = 3, 4


class Look(NamedTuple):
    """How a tensor lies."""

    shape: Lengths
    strides: Lengths
    dtype: torch.dtype

    @property
    def is_like_last(self) -> bool:
        """`suggest_memory_format`."""
        return strides.like_channels_last(self.shape, self.strides)

    def is_in(self, last: bool) -> bool:
        """Whether it is contiguous so."""
        return strides.lies_in_order(self.shape, self.strides, _order(len(self.shape), last))

    def put_in(self, last: bool) -> Look:
        """`contiguous`."""
        return self if self.is_in(last) else self.made_in(last)

    def made_in(self, last: bool) -> Look:
        """A new one."""
        return self._replace(strides=strides.in_order(self.shape, _order(len(self.shape), last)))


def look_of(tensor: torch.Tensor) -> Look:
    """A sequence's is that of an image of one row (`view4d`)."""
    look = Look(tuple(tensor.shape), tensor.stride(), tensor.dtype)
    if tensor.dim() != _SEQUENCE:
        return look
    (images, channels, length), (first, second, third) = look.shape, look.strides
    return look._replace(shape=(images, channels, 1, length), strides=(first, second, length * third, third))


def runs_with_last(one: Look, other: Look) -> bool:
    """Whether cuDNN runs with the channels last what is made of the two (`cudnn_conv_suggest_memory_format`)."""
    if torch.float64 in (one.dtype, other.dtype) or not torch.backends.cudnn.enabled:
        return False
    return one.is_like_last or other.is_like_last


def forward_runs_with_last(input: torch.Tensor, weight: torch.Tensor) -> bool:
    return runs_with_last(look_of_input(input), look_of(weight))


def look_of_input(input: torch.Tensor) -> Look:
    """Sequences are made plain before anything else."""
    return look_of(input).put_in(False) if input.dim() == _SEQUENCE else look_of(input)


def layout_of(input: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Of what a convolution makes of the two."""
    last = _CHANNELS_LAST.get(input.dim())
    return last if last is not None and forward_runs_with_last(input, weight) else torch.contiguous_format


class Backward(NamedTuple):
    """How what the gradients are made of lies when it comes to them, and whether each runs with the channels last."""

    input: Look
    gradient: Look
    for_input: bool
    for_weight: bool
    # Whether the result's gradient is copied for both of them at once.
    is_gradient_copied: bool


def of_backward(
    gradient: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, transposed: bool, wants_weight: bool
) -> Backward:
    """(`cudnn_convolution_backward`, `cudnn_convolution_transpose_backward`.)"""
    its, its_weight, its_input = look_of(gradient), look_of(weight), look_of_input(input)
    if wants_weight:
        its_input = its_input.put_in(runs_with_last(its_input, its_weight))
    last = its_input.is_like_last
    # `to` copies what is like another layout, `contiguous` what is not in one piece in this.
    is_copied = not its.is_in(last) if transposed else its.is_like_last != last
    if is_copied:
        its = its.made_in(last)
    return Backward(its_input, its, runs_with_last(its, its_weight), runs_with_last(its_input, its), is_copied)


def result_lies(args: Any, result: torch.Tensor) -> torch.Tensor:
    """`aten.convolution`'s result."""
    if len(args) < 2 or not result.numel():
        return result
    return _lying(result, forward_runs_with_last(*args[:2]))


def gradient_of_input_lies(args: Any, result: torch.Tensor) -> torch.Tensor:
    """The first result of `aten.convolution_backward`."""
    found = _backward_of(args, result)
    return result if found is None else _lying(result, found.for_input)


def gradient_of_weight_lies(args: Any, result: torch.Tensor) -> torch.Tensor:
    """The second one."""
    found = _backward_of(args, result)
    return result if found is None else _lying(result, found.for_weight)


def _backward_of(args: Any, result: torch.Tensor) -> Backward | None:
    if len(args) < 11 or not result.numel():
        return None
    gradient, input, weight = args[:3]
    transposed, wanted = args[7], args[10]
    return of_backward(gradient, input, weight, transposed, wanted[1])


def _lying(result: torch.Tensor, last: bool) -> torch.Tensor:
    its = look_of(result).made_in(last).strides
    if result.dim() == _SEQUENCE:
        its = (*its[:2], *its[3:])
    return with_strides(its, result)


def _order(dimensions: int, last: bool) -> Lengths:
    """Its dimensions, innermost first."""
    plain = range(dimensions - 1, -1, -1)
    return (1, *plain[:-2], 0) if last and dimensions >= _IMAGE else plain
