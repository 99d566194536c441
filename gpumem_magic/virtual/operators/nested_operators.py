"""What operators do with nested tensors in the strided layout, on the device, as ATen's do (``aten/src/ATen/native/nested``).

Element by element they run on the whole buffer; products of matrices and softmax tensor by tensor, into one buffer for all;
attention hands the buffers to the kernels that take sequences of any length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from gpumem_magic.patching import Patches
from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.refusals import refuse_to_hold
from gpumem_magic.virtual.engine.tensors import VirtualTensor
from gpumem_magic.virtual.operators import nested_tensors
from gpumem_magic.virtual.operators.attention import Chooser
from gpumem_magic.virtual.operators.nested_kernels import (
    Copying,
    PaddingOut,
    Product,
    Softmax,
    from_padded,
    made_by,
    padded_to,
    unpadded,
)
from gpumem_magic.virtual.operators.nested_tensors import DEVICES, NestedOnDevice, contiguous, is_nested, rule_for

_BY_ELEMENT = (
    "abs cos sin sqrt neg sgn relu gelu silu tanh logical_not isinf isnan isneginf isposinf native_dropout "
    "empty_like zeros_like ones_like full_like rand_like randn_like"
)
_IN_PLACE = "abs_ neg_ relu_ gelu_ silu_ tanh_ sgn_ logical_not_ zero_ fill_ normal_ requires_grad_ retain_grad"
_OF_THE_BUFFER = (
    "backward register_hook untyped_storage data_ptr record_stream is_floating_point is_complex is_signed element_size"
)


def install(patches: Patches, index_of: Callable[[Any], int | None], gpu_of: Callable[[int], Chooser]) -> None:
    """While the device is on, these make nested tensors there of what is there, or is to be."""
    patches.set(DEVICES, "gpu_of", gpu_of)

    def target(device: Any, tensors: Any) -> torch.device | None:
        index = index_of(device)
        if index is not None:
            return torch.device("cuda", index)
        found = next((one for one in tensors if isinstance(one, VirtualTensor)), None) if device is None else None
        return None if found is None else found.device

    def nested_tensor(original: Any) -> Any:
        def nested_tensor(
            tensor_list: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, **more: Any
        ) -> Any:
            listed = tensor_list if isinstance(tensor_list, (list, tuple)) else ()
            there = None if layout is torch.jagged else target(device, listed)
            if there is None:
                return original(tensor_list, dtype=dtype, layout=layout, device=device, **more)
            tensors = [one.detach() if isinstance(one, torch.Tensor) else one for one in listed]
            return nested_tensors.made_of(tensors, dtype, there, more.get("requires_grad", False))

        return nested_tensor

    def from_list(original: Any) -> Any:
        def _nested_tensor_from_tensor_list(
            tensors: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
        ) -> Any:
            there = target(device, tensors)
            if there is None:
                return original(tensors, dtype, layout, device, pin_memory)
            return nested_tensors.made_of(tensors, dtype, there)

        return _nested_tensor_from_tensor_list

    def from_buffer(original: Any) -> Any:
        def _nested_view_from_buffer(buffer: Any, sizes: Any, strides: Any, offsets: Any) -> Any:
            if not isinstance(buffer, VirtualTensor):
                return original(buffer, sizes, strides, offsets)
            return NestedOnDevice(buffer, sizes.tolist(), strides.tolist(), offsets.tolist())

        return _nested_view_from_buffer

    def from_mask(original: Any) -> Any:
        def _nested_tensor_from_mask(padded: Any, mask: Any, mask_check: bool = True) -> Any:
            return (
                _of_a_mask(padded, mask, mask_check)
                if isinstance(padded, VirtualTensor)
                else original(padded, mask, mask_check)
            )

        return _nested_tensor_from_mask

    patches.set(torch, "_nested_tensor_from_mask", from_mask(torch._nested_tensor_from_mask))
    patches.set(torch.nested, "nested_tensor", nested_tensor(torch.nested.nested_tensor))
    patches.set(torch, "_nested_tensor_from_tensor_list", from_list(torch._nested_tensor_from_tensor_list))
    patches.set(torch, "_nested_view_from_buffer", from_buffer(torch._nested_view_from_buffer))


def _of_a_mask(padded: torch.Tensor, mask: torch.Tensor, check: bool) -> NestedOnDevice:
    """(`NestedTensor_nested_tensor_from_mask`: sizes are counted on the device and read on the host.)"""
    known = values.exact(mask) if isinstance(mask, VirtualTensor) else None
    if known is None:
        refuse_to_hold(
            "a nested tensor of a mask whose values are not known", "values=real, or a mask made on the host,"
        )
    padding = mask.new_zeros(mask.shape[0], 1)
    padded_mask = torch.cat([mask, padding], 1)
    numbers = padded_mask.to(torch.int32)
    ends = numbers.argmin(1)
    del numbers, padded_mask
    counts = mask.cumsum(1).select(1, -1)
    lengths = known.sum(1).tolist()
    if check and lengths != torch.cat([known, known.new_zeros(len(known), 1)], 1).int().argmin(1).tolist():
        raise RuntimeError("Mask must be left-aligned without gaps")
    widths = torch.full_like(counts.reshape(-1, 1), padded.shape[2])
    sizes = torch.cat([counts.reshape(-1, 1), widths], 1)
    # (What is left is there until the buffer is.)
    del sizes, counts
    found = [(length, padded.shape[2]) for length in lengths]
    buffer = unpadded(padded, found)
    del widths, ends, padding
    return NestedOnDevice(buffer, found)


def _on_buffers(name: str) -> Callable[..., Any]:
    def rule(nested: NestedOnDevice, *args: Any, **kwargs: Any) -> Any:
        # (`torch.relu` knows nothing of `inplace`.)
        run = getattr(torch, name, None) if "inplace" not in kwargs else None
        found = (run or getattr(F, name))(nested.buffer, *args, **kwargs)
        return nested.alike(found) if isinstance(found, torch.Tensor) else tuple(map(nested.alike, found))

    return rule


def _in_place(name: str) -> Callable[..., Any]:
    def rule(nested: NestedOnDevice, *args: Any, **kwargs: Any) -> Any:
        # (`gelu_` is no method.)
        act: Any = getattr(torch.Tensor, name, None) or getattr(_aten, name)
        act(nested.buffer, *args, **kwargs)
        return nested

    return rule


def _with_another(name: str) -> Callable[..., Any]:
    """Two nested tensors that lie alike, or one and a number (``NestedTensorBinaryOps.cpp``)."""

    def rule(one: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        run = getattr(torch, name)
        first: NestedOnDevice = one if is_nested(one) else other
        if not all(is_nested(each) for each in (one, other)):
            dense = other if first is one else one
            if isinstance(dense, torch.Tensor) and dense.dim():
                return _with_a_dense(name, first, dense, first is one)
            buffers = [each.buffer if is_nested(each) else each for each in (one, other)]
            return first.alike(run(*buffers, *args, **kwargs))
        if name in ("add", "sub"):
            one, other = contiguous(one), contiguous(other)
        _check_alike(one, other, name)
        return one.alike(run(one.buffer, other.buffer, *args, **kwargs))

    return rule


def _compared(name: str) -> Callable[..., Any]:
    def rule(nested: Any, other: Any) -> NestedOnDevice:
        if isinstance(other, torch.Tensor) and other.is_nested:
            raise RuntimeError(f"{name} does not support nested tensor as other value.")
        found: NestedOnDevice = nested.alike(getattr(torch, name)(nested.buffer, other))
        return found

    return rule


def _check_alike(one: NestedOnDevice, other: NestedOnDevice, name: str) -> None:
    if one.sizes != other.sizes:
        raise RuntimeError(f"{name} does not support broadcasting when given a NestedTensor")
    for what in ("strides", "offsets"):
        if getattr(one, what) != getattr(other, what):
            raise RuntimeError(f"{name} requires {what} to match when given NestedTensors")


def _with_a_dense(name: str, nested: NestedOnDevice, dense: torch.Tensor, nested_first: bool) -> NestedOnDevice:
    """[B, *, D] with [B, 1, D], and [B, *] with [B, 1]: one kernel, with nothing for autograd."""
    rank = nested.rank
    fits = dense.dim() == rank and dense.shape[0] == len(nested.sizes) and dense.shape[1] == 1
    fits = fits and (rank == 2 or (rank == 3 and nested.common(2) == dense.shape[2]))
    if not (nested_first and fits):
        first = "nested self and non-nested" if nested_first else "non-nested self and nested"
        raise RuntimeError(f"Expected both self and other to be nested, but got a {first} other for op: {name}.")
    if name not in ("add", "mul"):
        raise RuntimeError(f"Unsupported nested dense elementwise op: {name}.")
    nested = contiguous(nested)
    found = nested.alike(torch.empty_like(nested.buffer))
    for part, row, out in zip(nested.parts(), dense, found.parts(), strict=True):
        getattr(torch, name)(part, row, out=out)
    return found


def _writing(name: str) -> Callable[..., Any]:
    def rule(nested: NestedOnDevice, other: Any, *args: Any, **kwargs: Any) -> NestedOnDevice:
        if isinstance(other, torch.Tensor) and other.is_nested:
            if not is_nested(other):
                other = nested_tensors.from_host(other, nested.device)
            _check_alike(nested, other, name)
            other = other.buffer
        getattr(nested.buffer, name)(other, *args, **kwargs)
        return nested

    return rule


for _name in _BY_ELEMENT.split():
    rule_for(_name)(_on_buffers(_name))
for _name in _IN_PLACE.split():
    rule_for(_name)(_in_place(_name))
for _name in ("add", "sub", "mul", "div", "masked_fill"):
    rule_for(_name)(_with_another(_name))
for _name in ("eq", "ge", "gt"):
    rule_for(_name)(_compared(_name))
for _name in ("add_", "mul_", "copy_"):
    rule_for(_name)(_writing(_name))


@rule_for("where")
def _where(condition: Any, one: Any, other: Any) -> NestedOnDevice:
    """A number in the place of some (`NestedTensor_where`, ``NestedTensorUnaryOps.cpp``)."""
    for name, each, wanted in (("condition", condition, True), ("self", one, False), ("other", other, True)):
        if is_nested(each) is not wanted:
            raise RuntimeError(f"{name} must {'' if wanted else 'not '}be nested")
    _check_alike(condition, other, "where")
    found: NestedOnDevice = other.alike(torch.where(condition.buffer, one, other.buffer))
    return found


@rule_for("dropout")
def _dropout(nested: NestedOnDevice, p: float = 0.5, training: bool = True, inplace: bool = False) -> NestedOnDevice:
    return nested.alike(F.dropout(nested.buffer, p, training, inplace)) if training and p else nested


@rule_for("clone")
def _clone(nested: NestedOnDevice, *, memory_format: Any = torch.preserve_format) -> NestedOnDevice:
    if memory_format is torch.preserve_format or nested.lies_plainly:
        return nested.alike(nested.buffer.clone())
    return nested.plainly(made_by(Copying(nested), nested.buffer))


@rule_for("contiguous")
def _contiguous(nested: NestedOnDevice, memory_format: Any = torch.contiguous_format) -> NestedOnDevice:
    return contiguous(nested)


@rule_for("detach", "alias", "detach_")
def _detach(nested: NestedOnDevice) -> NestedOnDevice:
    return nested.alike(nested.buffer.detach())


@rule_for("to")
def to_kind(nested: NestedOnDevice, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("copy", None)
    asked = [*args, *kwargs.values()]
    dtype = next((one for one in asked if isinstance(one, torch.dtype)), None)
    device = next(
        (one for one in asked if isinstance(one, (str, torch.device, int)) and not isinstance(one, bool)), None
    )
    if device is not None and torch.device(device).type == "cpu":
        return nested_tensors.to_host(nested, dtype)
    moved = nested.buffer.to(device or nested.device, dtype or nested.dtype)
    return nested if moved is nested.buffer else nested.alike(moved)


@rule_for("cpu")
def _cpu(nested: NestedOnDevice, *_: Any, **__: Any) -> torch.Tensor:
    return nested_tensors.to_host(nested)


@rule_for("cuda")
def _cuda(nested: NestedOnDevice, *_: Any, **__: Any) -> NestedOnDevice:
    return nested


for _name, _dtype in {
    "half": torch.half, "float": torch.float, "double": torch.double, "bfloat16": torch.bfloat16, "bool": torch.bool,
    "int": torch.int, "long": torch.long,
}.items():  # fmt: skip
    rule_for(_name)(lambda nested, _dtype=_dtype: to_kind(nested, _dtype))


@rule_for("type_as")
def _type_as(nested: NestedOnDevice, other: Any) -> Any:
    return to_kind(nested, other.device, other.dtype)


@rule_for("unbind")
def _unbind(nested: NestedOnDevice, dim: int = 0) -> tuple[torch.Tensor, ...]:
    if dim:
        raise RuntimeError(f"NestedTensor can only be unbound along dimension 0 got dimension {dim} instead.")
    return tuple(nested.parts())


@rule_for("select")
def _select(nested: NestedOnDevice, dim: int, index: int) -> torch.Tensor:
    if dim % nested.rank == 0:
        return nested.parts()[index]
    found: torch.Tensor = nested_tensors.look(
        nested, torch.select(nested.on_host(), dim, index)
    )  # (its errors are PyTorch's)
    return found


@rule_for("select_of")
def _item(nested: NestedOnDevice, asked: Any) -> torch.Tensor:
    first, *rest = asked if isinstance(asked, tuple) else (asked,)
    if not isinstance(first, int):
        nested.on_host()[asked]  # raises
    part = nested.parts()[first]
    return part[tuple(rest)] if rest else part


@rule_for("values")
def _values(nested: NestedOnDevice) -> torch.Tensor:
    return nested.buffer


def _of_the_buffer(name: str) -> Callable[..., Any]:
    def rule(nested: NestedOnDevice, *args: Any, **kwargs: Any) -> Any:
        named = {key: one.buffer if is_nested(one) else one for key, one in kwargs.items()}
        return getattr(nested.buffer, name)(*(one.buffer if is_nested(one) else one for one in args), **named)

    return rule


for _name in _OF_THE_BUFFER.split():
    rule_for(_name)(_of_the_buffer(_name))


@rule_for("cat")
def _cat(tensors: Sequence[Any], dim: int = 0) -> NestedOnDevice:
    held = [contiguous(one) for one in tensors]
    if dim % held[0].rank == 0:
        sizes = [size for one in held for size in one.sizes]
        return NestedOnDevice(torch.cat([one.buffer for one in held]), sizes)
    parts = [
        torch.cat(parts, dim - 1 if dim > 0 else dim) for parts in zip(*(one.parts() for one in held), strict=True)
    ]
    return NestedOnDevice(torch.cat([part.reshape(-1) for part in parts]), [tuple(part.shape) for part in parts])


@rule_for("to_padded_tensor")
def to_padded(nested: NestedOnDevice, padding: float, output_size: Any = None, out: Any = None) -> torch.Tensor:
    """(`NestedTensor_to_padded_tensor_cuda`; other types than its kernel's are padded one by one and stacked.)"""
    if not nested.lies_plainly:
        raise RuntimeError("for now to_padded_tensor only supports contiguous nested tensor")
    largest = [len(nested.sizes), *(max(sizes) for sizes in zip(*nested.sizes, strict=True))]
    size = largest if output_size is None else list(output_size)
    if len(size) != len(largest):
        raise RuntimeError("Length of output_size does not match NestedTensor dims. Broadcasting is not supported.")
    if any(asked < needed for asked, needed in zip(size, largest, strict=True)):
        raise RuntimeError("Value in output_size is less than NestedTensor padded size. Truncation is not supported.")
    if 2 <= nested.rank <= 4 and nested.dtype in (torch.float, torch.double, torch.half):
        found: torch.Tensor = made_by(PaddingOut(nested, padding, tuple(size), output_size is None), nested.buffer)
        return found
    parts = [padded_to(part, largest[1:], padding) for part in nested.parts()]
    stacked = torch.stack(parts)
    return stacked if output_size is None else padded_to(stacked, size, padding)


@rule_for("linear")
def linear(nested: NestedOnDevice, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NestedOnDevice:
    """(`nested_linear`, ``NestedTensorTransformerFunctions.cpp``)"""
    if not nested.lies_plainly:
        raise RuntimeError("for now linear only supports contiguous nested tensor")
    if nested.rank != 3 or weight.dim() != 2:
        raise RuntimeError(
            "Linear requires nested_tensor.dim == 3 and dense_matrix.dim == 2. Nested tensor dim: "
            f"{nested.rank}. Dense tensor dim: {weight.dim()}"
        )
    last = nested.common(-1)
    if last != weight.shape[1]:
        raise RuntimeError(
            "Shape mismatch for NestedTensor Linear: Expected input's (a nested tensor) 'last_dim' to equal 'weight.size(1),"
            f" but got: last_dim = {last}, and weight.size(1) = {weight.shape[1]}"
        )
    found = F.linear(nested.buffer.reshape(-1, weight.shape[1]), weight, bias)
    return nested.plainly(found.reshape(-1), weight.shape[0])


@rule_for("layer_norm")
def _layer_norm(
    nested: NestedOnDevice,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> NestedOnDevice:
    if weight is None or bias is None:
        raise RuntimeError("NestedTensor layer_norm requires weight and bias")
    for place, wanted in enumerate(normalized_shape):
        found = nested.common(place - len(normalized_shape))
        if found is None:
            raise RuntimeError("normalized_shape extends into irregular dimensions for the nested tensor")
        if found != wanted:
            raise RuntimeError(f"The shape at dimension {place}of normalized_shape doesn't match the input")
    shape = (-1, prod(normalized_shape))
    normal = F.layer_norm(nested.buffer.view(shape), shape[1:], weight.reshape(-1), bias.reshape(-1), eps)
    return nested.alike(normal.view(-1))


@rule_for("embedding")
def _embedding(
    indices: Any, weight: torch.Tensor, padding_idx: Any = None, *args: Any, **kwargs: Any
) -> NestedOnDevice:
    if is_nested(weight):  # (`torch.embedding` has them the other way round.)
        indices, weight = weight, indices
        padding_idx = None if padding_idx == -1 else padding_idx
    found = F.embedding(indices.buffer, weight, padding_idx)
    return NestedOnDevice(found.reshape(-1), [(*size, weight.shape[1]) for size in indices.sizes])


@rule_for("softmax")
def _softmax(nested: NestedOnDevice, dim: int, *_: Any, dtype: Any = None, **__: Any) -> NestedOnDevice:
    place = dim % nested.rank
    if not place:
        raise RuntimeError("Cannot apply softmax across nested dimension 0")
    if dtype is not None:
        nested = to_kind(nested, dtype)
    return nested.plainly(made_by(Softmax(nested, place - 1), nested.buffer))


@rule_for("bmm")
def _bmm(one: Any, other: Any) -> NestedOnDevice:
    """(`bmm_nested_cuda`: into one buffer, each by itself.)"""
    first, second = (each if is_nested(each) else _apart(each) for each in (one, other))
    kernel = Product(first, second)
    return NestedOnDevice(made_by(kernel, first.buffer, second.buffer), kernel.sizes)


def _apart(dense: torch.Tensor) -> NestedOnDevice:
    """The matrices of a dense batch, where they lie."""
    count, *size = dense.shape
    offsets = [place * dense.stride(0) for place in range(count)]
    return NestedOnDevice(dense, [size] * count, [dense.stride()[1:]] * count, offsets)


@rule_for("matmul")
def _matmul(one: Any, other: Any) -> NestedOnDevice:
    if not (is_nested(one) and is_nested(other)):
        broadcast = is_nested(one) and one.lies_plainly and one.rank == 4 and other.dim() == 2
        if broadcast and one.common(2) is not None and one.common(3) == other.shape[0]:
            found = torch.matmul(one.buffer.view(-1, one.common(2), one.common(3)), other)
            plain: NestedOnDevice = one.plainly(found.view(-1), other.shape[1])
            return plain
        which = "nested self and non-nested" if is_nested(one) else "non-nested self and nested"
        raise RuntimeError(f"Expected both to be nested, but got a {which} other")
    if one.rank != other.rank or one.rank < 3:
        torch.matmul(one.on_host(), other.on_host())  # raises
    plain, plain_other = contiguous(one), contiguous(other)
    batches = all(a[:-2] == b[:-2] and a[-1] == b[-2] for a, b in zip(one.sizes, other.sizes, strict=True))
    if len(one.sizes) != len(other.sizes) or not batches:
        torch.matmul(one.on_host(), other.on_host())  # raises
    follows = torch.is_grad_enabled() and (one.buffer.requires_grad or other.buffer.requires_grad)
    by_heads = one.rank == 4 and one.lies_plainly and other.lies_plainly and one.common(1) is not None
    if by_heads and one.common(1) == other.common(1) and not follows:
        return _product_by_heads(one, other)
    sizes = [(*a[:-1], b[-1]) for a, b in zip(one.sizes, other.sizes, strict=True)]
    padded, padded_other = to_padded(plain, 0.0), to_padded(plain_other, 0.0)
    product = torch.matmul(padded, padded_other)
    return from_padded(product, sizes)


def _product_by_heads(one: NestedOnDevice, other: NestedOnDevice) -> NestedOnDevice:
    """(`matmul_with_bmm_nested`: each head's matrices are a tensor of their own.)"""
    product = _bmm(_heads_apart(one), _heads_apart(other))
    heads = len(product.sizes) // len(one.sizes)
    return NestedOnDevice(product.buffer, [(heads, *size) for size in product.sizes[::heads]])


def _heads_apart(nested: NestedOnDevice) -> NestedOnDevice:
    found = [
        (size[1:], strides[1:], offset + head * strides[0])
        for size, strides, offset in zip(nested.sizes, nested.strides, nested.offsets, strict=True)
        for head in range(size[0])
    ]
    sizes, strides, offsets = zip(*found, strict=True)
    return NestedOnDevice(nested.buffer, sizes, strides, offsets)
