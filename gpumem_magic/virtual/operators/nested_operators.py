"""What operators do with nested tensors in the strided layout, on the device, as ATen's do (``aten/src/ATen/native/nested``).

Element by element they run on the whole buffer; products of matrices and softmax tensor by tensor, into one buffer for all;
attention hands the buffers to the kernels that take sequences of any length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from gpumem_magic.patching import Patches
from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.half_precision import HALF
from gpumem_magic.virtual.engine.refusals import refuse_to_hold
from gpumem_magic.virtual.engine.tensors import VirtualTensor
from gpumem_magic.virtual.operators import nested_tensors
from gpumem_magic.virtual.operators.attention import CUDNN, EFFICIENT, FLASH, MATH, Chooser, first_of, fitting, unmet
from gpumem_magic.virtual.operators.encoder_layers import put_together
from gpumem_magic.virtual.operators.nested_tensors import Laid, NestedOnDevice, contiguous

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
    patches.set(_DEVICES, "gpu_of", gpu_of)

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
    buffer = _unpadded(padded, found)
    del widths, ends, padding
    return NestedOnDevice(buffer, found)


# While devices are on: by a device's number, how it chooses attention's kernel.
_DEVICES: Any = SimpleNamespace(gpu_of=None)


def _rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(rule: Callable[..., Any]) -> Callable[..., Any]:
        nested_tensors.RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def _is_nested(value: Any) -> bool:
    return isinstance(value, NestedOnDevice)


# ---- element by element


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
        first: NestedOnDevice = one if _is_nested(one) else other
        if not all(_is_nested(each) for each in (one, other)):
            dense = other if first is one else one
            if isinstance(dense, torch.Tensor) and dense.dim():
                return _with_a_dense(name, first, dense, first is one)
            buffers = [each.buffer if _is_nested(each) else each for each in (one, other)]
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
            if not _is_nested(other):
                other = nested_tensors.from_host(other, nested.device)
            _check_alike(nested, other, name)
            other = other.buffer
        getattr(nested.buffer, name)(other, *args, **kwargs)
        return nested

    return rule


for _name in _BY_ELEMENT.split():
    _rule(_name)(_on_buffers(_name))
for _name in _IN_PLACE.split():
    _rule(_name)(_in_place(_name))
for _name in ("add", "sub", "mul", "div", "masked_fill"):
    _rule(_name)(_with_another(_name))
for _name in ("eq", "ge", "gt"):
    _rule(_name)(_compared(_name))
for _name in ("add_", "mul_", "copy_"):
    _rule(_name)(_writing(_name))


@_rule("where")
def _where(condition: Any, one: Any, other: Any) -> NestedOnDevice:
    """A number in the place of some (`NestedTensor_where`, ``NestedTensorUnaryOps.cpp``)."""
    for name, each, wanted in (("condition", condition, True), ("self", one, False), ("other", other, True)):
        if _is_nested(each) is not wanted:
            raise RuntimeError(f"{name} must {'' if wanted else 'not '}be nested")
    _check_alike(condition, other, "where")
    found: NestedOnDevice = other.alike(torch.where(condition.buffer, one, other.buffer))
    return found


@_rule("dropout")
def _dropout(nested: NestedOnDevice, p: float = 0.5, training: bool = True, inplace: bool = False) -> NestedOnDevice:
    return nested.alike(F.dropout(nested.buffer, p, training, inplace)) if training and p else nested


# ---- copies, types and devices


@_rule("clone")
def _clone(nested: NestedOnDevice, *, memory_format: Any = torch.preserve_format) -> NestedOnDevice:
    if memory_format is torch.preserve_format or nested.lies_plainly:
        return nested.alike(nested.buffer.clone())
    return nested.plainly(_made_by(_Copying(nested), nested.buffer))


@_rule("contiguous")
def _contiguous(nested: NestedOnDevice, memory_format: Any = torch.contiguous_format) -> NestedOnDevice:
    return contiguous(nested)


@_rule("detach", "alias", "detach_")
def _detach(nested: NestedOnDevice) -> NestedOnDevice:
    return nested.alike(nested.buffer.detach())


@_rule("to")
def _to(nested: NestedOnDevice, *args: Any, **kwargs: Any) -> Any:
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


@_rule("cpu")
def _cpu(nested: NestedOnDevice, *_: Any, **__: Any) -> torch.Tensor:
    return nested_tensors.to_host(nested)


@_rule("cuda")
def _cuda(nested: NestedOnDevice, *_: Any, **__: Any) -> NestedOnDevice:
    return nested


for _name, _dtype in {
    "half": torch.half, "float": torch.float, "double": torch.double, "bfloat16": torch.bfloat16, "bool": torch.bool,
    "int": torch.int, "long": torch.long,
}.items():  # fmt: skip
    _rule(_name)(lambda nested, _dtype=_dtype: _to(nested, _dtype))


@_rule("type_as")
def _type_as(nested: NestedOnDevice, other: Any) -> Any:
    return _to(nested, other.device, other.dtype)


# ---- the tensors in it, and all of it


@_rule("unbind")
def _unbind(nested: NestedOnDevice, dim: int = 0) -> tuple[torch.Tensor, ...]:
    if dim:
        raise RuntimeError(f"NestedTensor can only be unbound along dimension 0 got dimension {dim} instead.")
    return tuple(nested.parts())


@_rule("select")
def _select(nested: NestedOnDevice, dim: int, index: int) -> torch.Tensor:
    if dim % nested.rank == 0:
        return nested.parts()[index]
    found: torch.Tensor = nested_tensors.look(
        nested, torch.select(nested.on_host(), dim, index)
    )  # (its errors are PyTorch's)
    return found


@_rule("select_of")
def _item(nested: NestedOnDevice, asked: Any) -> torch.Tensor:
    first, *rest = asked if isinstance(asked, tuple) else (asked,)
    if not isinstance(first, int):
        nested.on_host()[asked]  # raises
    part = nested.parts()[first]
    return part[tuple(rest)] if rest else part


@_rule("values")
def _values(nested: NestedOnDevice) -> torch.Tensor:
    return nested.buffer


def _of_the_buffer(name: str) -> Callable[..., Any]:
    def rule(nested: NestedOnDevice, *args: Any, **kwargs: Any) -> Any:
        named = {key: one.buffer if _is_nested(one) else one for key, one in kwargs.items()}
        return getattr(nested.buffer, name)(*(one.buffer if _is_nested(one) else one for one in args), **named)

    return rule


for _name in _OF_THE_BUFFER.split():
    _rule(_name)(_of_the_buffer(_name))


@_rule("cat")
def _cat(tensors: Sequence[Any], dim: int = 0) -> NestedOnDevice:
    held = [contiguous(one) for one in tensors]
    if dim % held[0].rank == 0:
        sizes = [size for one in held for size in one.sizes]
        return NestedOnDevice(torch.cat([one.buffer for one in held]), sizes)
    parts = [
        torch.cat(parts, dim - 1 if dim > 0 else dim) for parts in zip(*(one.parts() for one in held), strict=True)
    ]
    return NestedOnDevice(torch.cat([part.reshape(-1) for part in parts]), [tuple(part.shape) for part in parts])


@_rule("to_padded_tensor")
def _to_padded(nested: NestedOnDevice, padding: float, output_size: Any = None, out: Any = None) -> torch.Tensor:
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
        found: torch.Tensor = _made_by(_PaddingOut(nested, padding, tuple(size), output_size is None), nested.buffer)
        return found
    parts = [_padded(part, largest[1:], padding) for part in nested.parts()]
    stacked = torch.stack(parts)
    return stacked if output_size is None else _padded(stacked, size, padding)


def _padded(tensor: torch.Tensor, size: Sequence[int], padding: Any) -> torch.Tensor:
    behind = [
        number
        for wanted, is_ in zip(reversed(size), reversed(tensor.shape), strict=True)
        for number in (0, wanted - is_)
    ]
    return torch.constant_pad_nd(tensor, behind, padding).reshape(size)


def _from_padded(padded: torch.Tensor, sizes: Any) -> NestedOnDevice:
    """(`nested_from_padded_generic`: what is no padding is picked by a mask.)"""
    largest = [max(is_, *found) for is_, found in zip(padded.shape[1:], zip(*sizes, strict=True), strict=True)]
    masks = [_padded(padded.new_full(size, True, dtype=torch.bool), largest, False) for size in sizes]
    mask = torch.stack(masks)
    del masks
    buffer = torch.masked_select(padded, mask)
    return NestedOnDevice(buffer, sizes)


def _unpadded(padded: torch.Tensor, sizes: Any) -> torch.Tensor:
    """(`nested_from_padded_cuda`: the buffer, and a list of sizes and places of 32 bits each, copied in 64 bits.)"""
    if padded.dtype not in (torch.float, torch.half):
        return _from_padded(padded, sizes).buffer
    if padded.dim() != 3:
        raise RuntimeError("padded tensor size error")
    out = NestedOnDevice(padded.new_empty(sum(map(prod, sizes))), sizes)
    listed = torch.zeros(len(sizes) * 3 + 4, dtype=torch.int64, device="cpu")
    about = listed.to(padded.device, torch.int32, non_blocking=True, copy=True)
    for part, row in zip(out.parts(), padded, strict=False):
        part.copy_(row[tuple(slice(length) for length in part.shape)])
    del about
    return out.buffer


# ---- layers


@_rule("linear")
def _linear(nested: NestedOnDevice, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NestedOnDevice:
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


@_rule("layer_norm")
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


@_rule("_transformer_encoder_layer_fwd")
def _encoder_layer(*args: Any) -> Any:
    """(`transformer_encoder_layer_forward`, ``transformer.cpp``, and `native_multi_head_attention_cuda`, ``attention.cu``; met by
    two recordings of an H100 with 2.11, event by event.)"""
    source, size, heads, qkv_weight, qkv_bias, proj_weight, proj_bias = args[:7]
    if any(one is not None for one in args[18:19]) or not _is_attended_at_once(source, heads):
        return _encoder_layer_of_padded(*args[:18])

    def attend(y: NestedOnDevice) -> Any:
        parts = _linear(y, qkv_weight, qkv_bias).chunk(3, -1)
        by_head = [one.view(len(y.sizes), -1, heads, size // heads).transpose(1, 2) for one in parts]
        context: Any = _attention(*by_head).transpose(1, 2)
        projected = _linear(context.reshape(len(y.sizes), -1, size), proj_weight, proj_bias)
        del context
        return projected

    return put_together(attend, *args[:18])


def _is_attended_at_once(sequences: NestedOnDevice, heads: int) -> bool:
    """Whether a fused kernel takes them (`check_for_seq_len_1_nested_tensor`: none of one token or less)."""
    if any(length < 2 for length, _ in sequences.sizes):
        return False
    gpu: Chooser = _DEVICES.gpu_of(sequences.device.index)
    by_head: Any = sequences.view(len(sequences.sizes), -1, heads, sequences.sizes[0][1] // heads).transpose(1, 2)
    fits = _fitting([by_head] * 3, None, False, 0.0, False)
    return bool(fits - {MATH}) and first_of(fits, gpu) != MATH


def _encoder_layer_of_padded(source: NestedOnDevice, size: int, heads: int, *weights: Any) -> NestedOnDevice:
    """Where attention goes by products: on padded sequences, as an estimate (CUDA pads scores and context alone)."""
    padded = _to_padded(source, 0.0)
    mask = torch.tensor([[at >= len_ for at in range(padded.shape[1])] for len_, _ in source.sizes])
    found = _aten._transformer_encoder_layer_fwd.default(padded, size, heads, *weights, mask.to(source.device), 1)
    del padded
    return NestedOnDevice(_unpadded(found, source.sizes), source.sizes)


@_rule("embedding")
def _embedding(
    indices: Any, weight: torch.Tensor, padding_idx: Any = None, *args: Any, **kwargs: Any
) -> NestedOnDevice:
    if _is_nested(weight):  # (`torch.embedding` has them the other way round.)
        indices, weight = weight, indices
        padding_idx = None if padding_idx == -1 else padding_idx
    found = F.embedding(indices.buffer, weight, padding_idx)
    return NestedOnDevice(found.reshape(-1), [(*size, weight.shape[1]) for size in indices.sizes])


@_rule("softmax")
def _softmax(nested: NestedOnDevice, dim: int, *_: Any, dtype: Any = None, **__: Any) -> NestedOnDevice:
    place = dim % nested.rank
    if not place:
        raise RuntimeError("Cannot apply softmax across nested dimension 0")
    if dtype is not None:
        nested = _to(nested, dtype)
    return nested.plainly(_made_by(_Softmax(nested, place - 1), nested.buffer))


# ---- products


@_rule("bmm")
def _bmm(one: Any, other: Any) -> NestedOnDevice:
    """(`bmm_nested_cuda`: into one buffer, each by itself.)"""
    first, second = (each if _is_nested(each) else _apart(each) for each in (one, other))
    kernel = _Product(first, second)
    return NestedOnDevice(_made_by(kernel, first.buffer, second.buffer), kernel.sizes)


def _apart(dense: torch.Tensor) -> NestedOnDevice:
    """The matrices of a dense batch, where they lie."""
    count, *size = dense.shape
    offsets = [place * dense.stride(0) for place in range(count)]
    return NestedOnDevice(dense, [size] * count, [dense.stride()[1:]] * count, offsets)


@_rule("matmul")
def _matmul(one: Any, other: Any) -> NestedOnDevice:
    if not (_is_nested(one) and _is_nested(other)):
        broadcast = _is_nested(one) and one.lies_plainly and one.rank == 4 and other.dim() == 2
        if broadcast and one.common(2) is not None and one.common(3) == other.shape[0]:
            found = torch.matmul(one.buffer.view(-1, one.common(2), one.common(3)), other)
            plain: NestedOnDevice = one.plainly(found.view(-1), other.shape[1])
            return plain
        which = "nested self and non-nested" if _is_nested(one) else "non-nested self and nested"
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
    padded, padded_other = _to_padded(plain, 0.0), _to_padded(plain_other, 0.0)
    product = torch.matmul(padded, padded_other)
    return _from_padded(product, sizes)


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


# ---- attention


@_rule("scaled_dot_product_attention")
def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> NestedOnDevice:  # fmt: skip
    """As the device's PyTorch chooses its kernel for nested tensors (``sdp_utils.cpp``), and what that takes."""
    nested: tuple[NestedOnDevice, ...] = (query, key, value)
    if not all(map(_is_nested, nested)) or enable_gqa or len({(one.common(0), one.common(1)) for one in nested}) > 1:
        nested_tensors.refuse("scaled_dot_product_attention with tensors of several batches or heads")
    follows = torch.is_grad_enabled() and any(one.buffer.requires_grad for one in nested)
    fits = _fitting(nested, attn_mask, is_causal, dropout_p, follows)
    kernel = first_of(fits, _DEVICES.gpu_of(query.device.index))
    if kernel == MATH:
        return _attention_by_products(query, key, value, attn_mask, dropout_p, is_causal, scale)
    queries, keys, values = (_transposed(one, 1, 2) for one in nested)
    ends, ends_of_keys = _ends(queries), _ends(keys)
    longest, longest_key = (max(size[0] for size in one.sizes) for one in (queries, keys))
    flat = [_as_dense(one) for one in (queries, keys, values)]
    if kernel == FLASH:
        found, log_sum, *seeds = _aten._flash_attention_forward(
            *flat, ends, ends_of_keys, longest, longest_key, dropout_p, is_causal, False, scale=scale
        )
        # (One tuple of C++'s, whose parts go in this order.)
        del log_sum, ends, ends_of_keys
        while seeds:
            del seeds[0]
    else:
        found = _aten._efficient_attention_forward(
            *(one.unsqueeze(0) for one in flat), None, ends, ends_of_keys, longest, longest_key, dropout_p, int(is_causal),
            follows, scale=scale,
        )[0].squeeze(0)  # fmt: skip
    return _transposed(queries.plainly(found.reshape(-1), flat[2].shape[-1]), 1, 2)


def _transposed(nested: NestedOnDevice, one: int, other: int) -> NestedOnDevice:
    found: Any = nested.transpose(one, other)
    return found  # type: ignore[no-any-return]


def _fitting(nested: Sequence[NestedOnDevice], mask: Any, is_causal: bool, dropout: float, follows: bool) -> set[str]:
    """The kernels that nested tensors may have: cuDNN's has none for them, the memory-efficient one no gradients."""
    heads = nested[0].common(1)
    widths = [one.common(3) for one in nested]
    if nested[0].rank != 4 or heads is None or None in widths or any(0 in size for one in nested for size in one.sizes):
        return {MATH} if torch.backends.cuda.math_sdp_enabled() else set()
    query, key, value = (
        torch.empty(len(one.sizes), heads, 1, width or 0, dtype=one.dtype, device="meta")
        for one, width in zip(nested, widths, strict=True)
    )
    gpu: Chooser = _DEVICES.gpu_of(nested[0].device.index)
    fits = fitting(unmet(gpu, query, key, value, mask, is_causal, False, dropout)) - {CUDNN}
    if widths[0] is not None and widths[0] % 8:
        fits.discard(FLASH)
    return fits - {EFFICIENT} if follows or mask is not None else fits


def _ends(sequences: NestedOnDevice) -> torch.Tensor:
    """Where each sequence ends among all (`cumulative_and_max_seq_len_nnz`)."""
    ends = list(accumulate((size[0] for size in sequences.sizes), initial=0))
    return torch.tensor(ends, dtype=torch.int32).to(sequences.device)


def _as_dense(sequences: NestedOnDevice) -> torch.Tensor:
    """All sequences behind each other, [all, heads, width]: the buffer itself where they lie so (`view_as_dense`)."""
    if not sequences.lies_plainly and not _lies_in_order(sequences):
        sequences = contiguous(sequences)
    size = (sum(each[0] for each in sequences.sizes), *sequences.sizes[0][1:])
    return sequences.buffer.as_strided(size, sequences.strides[0], sequences.offsets[0])


def _lies_in_order(nested: NestedOnDevice) -> bool:
    """(`is_safe_to_get_storage_as_tensor`)"""
    if len(nested.sizes) < 2:
        return True
    first, heads = nested.strides[0], nested.common(2)
    if heads == 1:
        if first[0] <= first[2]:
            return False
    elif not first[0] > first[1] > first[2] or set(nested.strides) != {first}:
        return False
    gaps = [after - before for before, after in zip(nested.offsets, nested.offsets[1:], strict=False)]
    steps = [
        gap // (size[0] * strides[0]) for gap, size, strides in zip(gaps, nested.sizes, nested.strides, strict=False)
    ]
    return len(set(steps)) == 1


def _attention_by_products(
    query: NestedOnDevice,
    key: NestedOnDevice,
    value: NestedOnDevice,
    mask: Any,
    dropout: float,
    is_causal: bool,
    scale: Any,
) -> NestedOnDevice:
    """(`_scaled_dot_product_attention_math`, ``attention.cpp``)"""
    if not all(one.lies_plainly for one in (query, key, value)):
        raise RuntimeError("scaled_dot_product_attention: If inputs are nested tensors they must be contiguous")
    if is_causal or mask is not None:
        query.size(-2)  # raises where the lengths differ
        nested_tensors.refuse("scaled_dot_product_attention with a mask, by products")
    kind = query.dtype
    if kind in HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = (_to(one, torch.float) for one in (query, key, value))
    factor = (query.size(-1) ** -0.5 if scale is None else scale) ** 0.5
    weights = torch.matmul(query * factor, key.transpose(-2, -1) * factor)
    shares = torch.softmax(weights, -1)
    if dropout:
        shares = F.dropout(shares, dropout)
    attended: Any = torch.matmul(shares, value).to(kind)
    return attended  # type: ignore[no-any-return]


# ---- kernels that work tensor by tensor, and what autograd asks of them


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


def _made_by(kernel: _TensorByTensor, *buffers: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _ByTensor.apply(kernel, *buffers)  # type: ignore[no-untyped-call]
    return made


class _Copying(_TensorByTensor):
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


class _PaddingOut(_TensorByTensor):
    """``add_padding_kernelLauncher``: the result, then where everything begins and its sizes, of 32 bits each."""

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
        return (_unpadded(grad, self.sizes),)


class _Softmax(_TensorByTensor):
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


class _Product(_TensorByTensor):
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
