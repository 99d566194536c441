"""Kernels for nested tensors that work tensor by tensor, and what autograd asks of them; padding, on and off.

After ``aten/src/ATen/native/nested``: each makes one buffer for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.operators.nested_tensors import Laid, NestedOnDevice


def padded_to(tensor: torch.Tensor, size: Sequence[int], padding: Any) -> torch.Tensor:
    behind = [
        number
        for wanted, is_ in zip(reversed(size), reversed(tensor.shape), strict=True)
        for number in (0, wanted - is_)
    ]
    return torch.constant_pad_nd(tensor, behind, padding).reshape(size)


def from_padded(padded: torch.Tensor, sizes: Any) -> NestedOnDevice:
    """(`nested_from_padded_generic`: what is no padding is picked by a mask.)"""
    largest = [max(is_, *found) for is_, found in zip(padded.shape[1:], zip(*sizes, strict=True), strict=True)]
    masks = [padded_to(padded.new_full(size, True, dtype=torch.bool), largest, False) for size in sizes]
    mask = torch.stack(masks)
    del masks
    buffer = torch.masked_select(padded, mask)
    return NestedOnDevice(buffer, sizes)


def unpadded(padded: torch.Tensor, sizes: Any) -> torch.Tensor:
    """(`nested_from_padded_cuda`: the buffer, and a list of sizes and places of 32 bits each, copied in 64 bits.)"""
    if padded.dtype not in (torch.float, torch.half):
        return from_padded(padded, sizes).buffer
    if padded.dim() != 3:
        raise RuntimeError("padded tensor size error")
    out = NestedOnDevice(padded.new_empty(sum(map(prod, sizes))), sizes)
    listed = torch.zeros(len(sizes) * 3 + 4, dtype=torch.int64, device="cpu")
    about = listed.to(padded.device, torch.int32, non_blocking=True, copy=True)
    plain = padded.contiguous()
    for part, row in zip(out.parts(), plain, strict=False):
        part.copy_(row[tuple(slice(length) for length in part.shape)])
    del plain, about
    return out.buffer


class _TensorByTensor(ABC):
    """One that reads buffers and makes one. What it keeps for its gradient: what it read, what it made, or nothing."""

    keeps = ""

    @abstractmethod
    def made(self, *buffers: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def gradients(self, grad: torch.Tensor, *kept: torch.Tensor) -> tuple[torch.Tensor | None, ...]: ...


class _ByTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: _TensorByTensor, *buffers: torch.Tensor) -> torch.Tensor:
        made = kernel.made(*buffers)
        ctx.kernel = kernel
        ctx.save_for_backward(*{"": (), "read": buffers, "made": (made,)}[kernel.keeps])
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *ctx.kernel.gradients(grads[0], *ctx.saved_tensors)


def made_by(kernel: _TensorByTensor, *buffers: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _ByTensor.apply(kernel, *buffers)  # type: ignore[no-untyped-call]
    return made


class Copying(_TensorByTensor):
    """Into a buffer in which they lie plainly."""

    def __init__(self, nested: NestedOnDevice) -> None:
        self.size, self.laid = nested.buffer.numel(), nested.laid

    def made(self, *buffers: torch.Tensor) -> torch.Tensor:
        sizes = self.laid.sizes
        out = NestedOnDevice(buffers[0].new_empty(sum(map(prod, sizes))), sizes)
        _copied(NestedOnDevice(buffers[0], *self.laid), out)
        return out.buffer

    def gradients(self, grad: torch.Tensor, *kept: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out = NestedOnDevice(grad.new_zeros(self.size), *self.laid)
        _copied(NestedOnDevice(grad, self.laid.sizes), out)
        return (out.buffer,)


class PaddingOut(_TensorByTensor):
    """``add_padding_kernelLauncher``: the result, then where everything begins and its sizes, of 32 bits each."""

    # (`_nested_from_padded_and_nested_example` asks it for its sizes.)
    keeps = "read"

    def __init__(self, nested: NestedOnDevice, padding: float, size: Sequence[int], as_rows: bool) -> None:
        self.sizes, self.padding, self.size = nested.sizes, padding, size
        # (Of three dimensions, the last of which is alike, it sees rows of numbers.)
        self.columns = 1 if as_rows and nested.rank == 3 and nested.common(2) else nested.rank - 1

    def made(self, *buffers: torch.Tensor) -> torch.Tensor:
        out = buffers[0].new_full(self.size, self.padding)
        about = out.new_empty(len(self.sizes) * (1 + self.columns) + 1, dtype=torch.int32)
        for part, row in zip(NestedOnDevice(buffers[0], self.sizes).parts(), out, strict=False):
            row[tuple(slice(length) for length in part.shape)].copy_(part)
        del about
        return out

    def gradients(self, grad: torch.Tensor, *kept: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (unpadded(grad, self.sizes),)


class Softmax(_TensorByTensor):
    """(`softmax_nested`, `softmax_backward_nested`)"""

    keeps = "made"

    def __init__(self, nested: NestedOnDevice, dim: int) -> None:
        # (Not the tensor: what is read for a softmax is not kept for its gradient.)
        self.laid, self.dim = nested.laid, dim

    def made(self, *buffers: torch.Tensor) -> torch.Tensor:
        out = NestedOnDevice(torch.empty_like(buffers[0]), self.laid.sizes)
        for part, to in zip(NestedOnDevice(buffers[0], *self.laid).parts(), out.parts(), strict=True):
            _aten._softmax.out(part, self.dim, False, out=to)
        return out.buffer

    def gradients(self, grad: torch.Tensor, *kept: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        buffers = torch.empty_like(grad), grad, kept[0]
        out, grads, made = (NestedOnDevice(one, self.laid.sizes) for one in buffers)
        for part, result, to in zip(grads.parts(), made.parts(), out.parts(), strict=True):
            _aten._softmax_backward_data.out(part, result, self.dim, result.dtype, grad_input=to)
        return (_placed(out, self.laid),)


class Product(_TensorByTensor):
    """(`bmm_nested_cuda`; its gradients are two more.)"""

    keeps = "read"

    def __init__(self, one: NestedOnDevice, other: NestedOnDevice) -> None:
        if len(one.sizes) != len(other.sizes):
            raise RuntimeError(
                f"Expected size for the 1st dimension of batch2 tensor to be: {len(one.sizes)} but got: {len(other.sizes)}."
            )
        for place, (a, b) in enumerate(zip(one.sizes, other.sizes, strict=True)):
            if a[1] != b[0]:
                raise RuntimeError(
                    f"{place}-th nested matrices in batch cannot be multiplied ({a[0]}x{a[1]} and {b[0]}x{b[1]})"
                )
        self.laid = one.laid, other.laid
        self.sizes = [(a[0], b[1]) for a, b in zip(one.sizes, other.sizes, strict=True)]

    def made(self, *buffers: torch.Tensor) -> torch.Tensor:
        first, second = (NestedOnDevice(one, *laid) for one, laid in zip(buffers, self.laid, strict=True))
        return _multiplied(first.parts(), second.parts(), self.sizes)

    def gradients(self, grad: torch.Tensor, *kept: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = NestedOnDevice(grad, self.sizes).parts()
        first, second = (NestedOnDevice(one, *laid) for one, laid in zip(kept, self.laid, strict=True))
        before = _multiplied(grads, [part.t() for part in second.parts()], first.sizes)
        after = _multiplied([part.t() for part in first.parts()], grads, second.sizes)
        return tuple(
            _placed(NestedOnDevice(buffer, laid.sizes), laid, one).reshape(one.shape)
            for buffer, laid, one in zip((before, after), self.laid, kept, strict=True)
        )


def _multiplied(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], sizes: Any) -> torch.Tensor:
    out = NestedOnDevice(first[0].new_empty(sum(map(prod, sizes))), sizes)
    for one, other, to in zip(first, second, out.parts(), strict=True):
        torch.mm(one, other, out=to)
    return out.buffer


def _placed(plain: NestedOnDevice, laid: Laid, like: torch.Tensor | None = None) -> torch.Tensor:
    """A gradient that lies plainly, as that lies in its buffer which it is the gradient of."""
    if laid.is_plain:
        return plain.buffer
    target = NestedOnDevice(torch.zeros_like(plain.buffer if like is None else like), *laid)
    _copied(plain, target)
    return target.buffer


def _copied(source: NestedOnDevice, target: NestedOnDevice) -> None:
    for part, to in zip(source.parts(), target.parts(), strict=True):
        to.copy_(part)
