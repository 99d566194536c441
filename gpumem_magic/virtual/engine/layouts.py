"""How results lie on a device where PyTorch's shape rules have them lie otherwise.

A shape rule may be the operator's formula in Python, whose result lies as its arguments do; a kernel often makes its result in
one piece, whatever lies in them. What is done with such a result later is copied, or is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpumem_magic.virtual.engine import strides
from gpumem_magic.virtual.engine.calls import giving
from gpumem_magic.virtual.engine.modes import META, made_plainly

# A plain meta tensor that lies as a result does, of the operator's arguments and that result.
Lies = Callable[[Any, torch.Tensor], torch.Tensor]
# An operator -> how so many of its results lie, from the first on; None: as the rule says.
LAYOUTS: dict[Any, Sequence[Lies | None]] = {}
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# Names of numbers that go through a kernel as operands of no dimension (`wrapped_scalar_tensor`); others only tell it what to do.
_OPERANDS = {"self", "other", "x", "n"}
_BY_NUMBER: dict[Any, Sequence[Lies | None]] = {}
_WRITTEN: dict[Any, Sequence[Lies | None]] = {}


def in_one_piece(args: Any, result: torch.Tensor) -> torch.Tensor:
    """Dimension after dimension."""
    return made_plainly(torch.empty, result.shape, dtype=result.dtype, device=META)


def as_an_image(place: int) -> Lies:
    """With channels last where that argument's lie so, else in one piece (`suggest_memory_format`)."""

    def lies(args: Any, result: torch.Tensor) -> torch.Tensor:
        last, source = _LAST.get(result.dim()), args[place]
        if last is None or not strides.like_channels_last(source.shape, source.stride()):
            return in_one_piece(args, result)
        return made_plainly(torch.empty, result.shape, dtype=result.dtype, device=META, memory_format=last)

    return lies


def as_another(place: int) -> Lies:
    """As that argument (`empty_like`)."""

    def lies(args: Any, result: torch.Tensor) -> torch.Tensor:
        source = args[place]
        if source.layout is not torch.strided or result.layout is not torch.strided:
            return result
        return with_strides(strides.of_one_like(source.shape, source.stride()), result)

    return lies


def number_by_number(*places: int) -> Lies:
    """As these arguments, which go through a kernel together (`TensorIterator`)."""

    def lies(args: Any, result: torch.Tensor) -> torch.Tensor:
        given = [args[place] for place in places if place < len(args) and args[place] is not None]
        if any(isinstance(one, torch.Tensor) and one.layout is not torch.strided for one in (result, *given)):
            return result
        looks = [(one.shape, one.stride()) if isinstance(one, torch.Tensor) else ((), ()) for one in given]
        return with_strides(strides.of_operands(result.shape, looks), result)

    return lies


def with_strides(its_strides: Sequence[int], result: torch.Tensor) -> torch.Tensor:
    """A result's meta tensor that lies so."""
    return made_plainly(torch.empty_strided, result.shape, its_strides, dtype=result.dtype, device=META)


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
    if result.is_conj():
        torch._C._set_conj(meta, True)
    if result.is_neg():
        torch._C._set_neg(meta, True)
    return meta


def layout_of(func: Any) -> Sequence[Lies | None]:
    """How its results lie where PyTorch's rule may say otherwise; none where it is right."""
    if func in LAYOUTS:
        return LAYOUTS[func]
    if func not in _BY_NUMBER:
        schema: Any = getattr(func, "_schema", None)
        by_number = schema is not None and torch.Tag.pointwise in func.tags and not schema.is_mutable
        places = [place for place, one in enumerate(schema.arguments) if _is_operand(one)] if by_number else ()
        _BY_NUMBER[func] = (number_by_number(*places),) if places else ()
    return _BY_NUMBER[func]


def layout_of_written(func: Any) -> Sequence[Lies | None]:
    """How what is named by ``out=`` lies once the kernel gave it another size: as the result of the operator that returns it
    would. (PyTorch's shape rules have it in one piece; `set_output_raw_strided` of C++ gives it the strides.)"""
    if func not in _WRITTEN:
        result = giving(func)
        by_number = result is not None and torch.Tag.pointwise in result.tags and result not in LAYOUTS
        _WRITTEN[func] = layout_of(result) if by_number else ()
    return _WRITTEN[func]


def _is_operand(argument: Any) -> bool:
    kind = argument.real_type
    if isinstance(kind, torch.OptionalType):
        kind = kind.getElementType()
    return isinstance(kind, torch.TensorType) or (isinstance(kind, torch.NumberType) and argument.name in _OPERANDS)


def as_kernels_lay(
    layout: Sequence[Lies | None], args: Any, kwargs: Any, out: Any, around: Callable[[torch.Tensor, torch.device], Any]
) -> Any:
    """An operator's results as `layout_of` says. around: makes a virtual tensor of a plain meta tensor."""
    if kwargs.get("memory_format") not in (None, torch.preserve_format):
        return out
    several = isinstance(out, (tuple, list))
    results: list[Any] = list(out) if several else [out]
    for place, lies in enumerate(layout):
        result = results[place]
        if lies is None or result is None or any(result is arg for arg in args):
            continue
        plain = lies(args, result)
        if plain is not result and plain.stride() != result.stride():
            results[place] = around(plain, result.fake_device)
    return tuple(results) if several else results[0]
