"""Operators with a gradient that C++ works out in another way for meta tensors and subclasses, as virtual tensors are: they get a
node of their own here, whose formula is the one for CUDA (``FunctionsManual.cpp``).

`isTensorSubclassLike` has C++ take a way without sizes that depend on values: the gradient of `prod` the one for zeros, even
where there are none, and that of `masked_fill`'s value a whole tensor where a device selects. `toAccumulateType` has `renorm`
find its norms in double precision, as the host does. CUDA builds of PyTorch 2.1, 2.6, 2.11 and 2.13 ask for what these formulas
do, of `prod` those of 2.1 and 2.6.

Others get one where the device's PyTorch has another formula than the one that runs.

The formulas are differentiated in their turn, so a gradient's gradient is that of the device's way, too. What C++ makes in one
expression it makes from right to left, and lets go of at its end; its variables go in the opposite order in which they came.
"""

from __future__ import annotations

import operator as compared
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.torch_version import TorchVersion

from gpumem_magic.patching import Patches
from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.engine import Engine, version_of
from gpumem_magic.virtual.engine.half_precision import accumulator
from gpumem_magic.virtual.engine.modes import made_plainly
from gpumem_magic.virtual.engine.tensors import VirtualTensor, engine_of
from gpumem_magic.virtual.operators import reflections
from gpumem_magic.virtual.operators.composites import call_node
from gpumem_magic.virtual.operators.data_dependent import found_among
from gpumem_magic.virtual.operators.kept_inputs import replaced
from gpumem_magic.virtual.operators.written_gradients import WITHOUT_FIRST_FROM

# Of a call: the context, the gradient, what was kept; gives the gradients of the operator's arguments.
_Formula = Callable[[Any, torch.Tensor], tuple[Any, ...]]
_Version = tuple[int, int]


def _with_node(
    operator: Any,
    name: str,
    keeps: tuple[int, ...],
    with_result: bool,
    formula: _Formula,
    changed: _Version | None = None,
) -> Any:
    """A kernel for tensors with a gradient. keeps: the arguments that the node keeps; name: C++'s for it; changed: the first
    PyTorch with another formula, where C++'s node does for devices on the same side of it as the PyTorch that runs."""

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, kwargs: Any, *args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                out = operator(*args, **kwargs)
            results = out if isinstance(out, tuple) else (out,)
            ctx.save_for_backward(*(args[place] for place in keeps), *(results if with_result else []))
            # (Of several results the first has a gradient.)
            ctx.mark_non_differentiable(*results[1:])
            ctx.set_materialize_grads(len(results) == 1)
            ctx.args = [None if isinstance(one, torch.Tensor) else one for one in args]
            ctx.shape = args[0].shape
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
            return (None, *formula(ctx, gradient))

    call_node(Node, name)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        # How `vmap` and forward derivatives go through it is known for C++'s node.
        if (
            not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
            or not isinstance(args[0], VirtualTensor)
            or (changed is not None and (version_of(args[0]) >= changed) == _runs_since(changed))
            or torch._C._are_functorch_transforms_active()
            or any(torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
        ):
            return replaced(operator, keys)(*args, **kwargs)
        whole = [*args, *(one.default_value for one in operator._schema.arguments[len(args) :] if not one.kwarg_only)]
        return Node.apply(kwargs, *whole)  # type: ignore[no-untyped-call]

    return kernel


def _runs_since(version: _Version) -> bool:
    """Whether the PyTorch that runs is that one or a newer one."""
    return TorchVersion(torch.__version__) >= ".".join(map(str, version))


# ---- prod


def _prod_backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    """Of all elements."""
    source, result = ctx.saved_tensors
    source = source.to(gradient.dtype)
    if not source.dim():
        return (gradient,)
    places = _zeros_of(source)
    if not places.shape[0]:
        found = _times(gradient, result, source)
    elif not torch.is_grad_enabled() and places.shape[0] > 1:
        found = torch.zeros_like(source, memory_format=torch.contiguous_format)
    else:
        found = _prod_with_zeros(gradient, source.contiguous().view(-1), 0).view_as(source)
    del places
    return (found,)


def _prod_along_backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    source, result = ctx.saved_tensors
    dim, keeps_dim = ctx.args[1:3]
    source = source.to(gradient.dtype)
    if not source.dim():
        return gradient, None, None
    if not keeps_dim:
        gradient, result = gradient.unsqueeze(dim), result.unsqueeze(dim)
    zeros = source == 0
    counts = zeros.sum(dim, True)
    counts.sum()
    found = _prod_with_zeros(gradient, source, dim) if _has_zeros(source) else _times(gradient, result, source)
    del counts, zeros
    return found, None, None


def _times(gradient: Any, result: Any, source: Any) -> Any:
    return gradient * (result / source).conj()


def _prod_with_zeros(gradient: Any, source: Any, dim: int) -> Any:
    """The product of those before each and of those behind it."""
    if not source.numel():
        return gradient.expand_as(source)
    size = source.shape[dim]
    if size == 1:
        return gradient
    shape = list(source.shape)
    shape[dim] = 1
    ones = gradient.new_ones(shape)
    before = torch.cat([ones, source.narrow(dim, 0, size - 1)], dim)
    before_each = before.cumprod(dim)
    turned = _turned(source, source.narrow(dim, 1, size - 1), dim)
    behind = torch.cat([ones, turned], dim)
    del turned, ones
    behind_each = _turned(source, behind.cumprod(dim), dim)
    found = gradient * (before_each * behind_each).conj()
    del behind_each, behind, before_each, before
    return found


# Since when what is turned is flipped. (2.6 does, 2.1 picks it out by a list of places; between them it is not known.)
_FLIPPED_FROM = (2, 2)


def _turned(source: Any, numbers: Any, dim: int) -> Any:
    if not isinstance(source, VirtualTensor) or version_of(source) >= _FLIPPED_FROM:
        return numbers.flip(dim)
    return numbers.index_select(dim, torch.arange(numbers.shape[dim] - 1, -1, -1, device=numbers.device))


def _has_zeros(source: Any) -> bool:
    """Values that are not known count as though none of them were zero."""
    host = values.exact(source)
    return host is not None and bool((host == 0).any())


def _zeros_of(source: Any) -> Any:
    return _places_of(source == 0)


def _places_of(flags: Any) -> Any:
    """Where they are up: nowhere, if that isn't known."""
    if values.exact(flags) is not None:
        return flags.nonzero()
    # (Backward runs it outside of an operator.)
    return made_plainly(found_among, cast(Engine, engine_of(flags)), flags.get_device(), flags, 0)


# ---- masked_fill, by a tensor


def _masked_fill_backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    (mask,) = ctx.saved_tensors
    of_source = gradient.masked_fill(mask, 0) if ctx.needs_input_grad[1] else None
    return of_source, None, gradient.masked_select(mask).sum() if ctx.needs_input_grad[3] else None


# ---- renorm


def _renorm_backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    (source,) = ctx.saved_tensors
    p, dim, most = ctx.args[1:4]
    others = [place for place in range(source.dim()) if place != dim % source.dim()]
    kind = accumulator(source.dtype)
    norm = torch.linalg.vector_norm(source, p, others, keepdim=True, dtype=kind)
    product = source.conj() * gradient
    if kind.is_complex:
        product = torch.real(product)
    summed = product.sum(others, keepdim=True, dtype=norm.dtype)
    del product
    of_norm = norm_backward(summed, source, float(p), norm, others)
    del summed
    inverse = (norm + 1e-7).reciprocal()
    scaled = inverse * of_norm
    less = gradient - scaled
    largest = most * inverse
    shrunk = largest * less
    del largest, less, scaled
    shrunk_too = shrunk.to(gradient.dtype)
    found = torch.where(norm > most, shrunk_too, gradient)
    del shrunk_too, shrunk, inverse, of_norm, norm
    return found, None, None, None


def norm_backward(gradient: Any, source: Any, p: float, norm: Any, dims: list[int]) -> Any:
    """Where the dimensions are kept. (`renorm` refuses a `p` that isn't positive.)"""
    if p == 1:
        return source.sgn() * gradient
    if p == 2:
        scaled, zeros = source / norm, norm == 0
        found = gradient * scaled.masked_fill_(zeros, 0)
        del zeros, scaled
        return found
    if p == float("inf"):
        sizes = source.abs()
        equal, unknown = sizes.eq(norm), sizes.isnan()
        mask = equal.logical_or(unknown)
        del unknown, equal
        counts = mask.sum(dims, True)
        shares = gradient / counts
        spread = shares * mask
        signs = source.sgn()
        found = signs * spread
        del signs, spread, shares, counts, mask, sizes
        return found
    if p >= 2:
        scaled = source * source.abs().pow_(p - 2)
    else:
        powers = source.abs().pow_(p - 1)
        zeros = source == 0 if p < 1 else None
        if zeros is not None:
            powers.masked_fill_(zeros, 0)
        signs = source.sgn()
        scaled = signs * powers
        del signs, zeros, powers
    if p < 1:
        factors = norm.pow(1 - p)
        product = scaled * gradient
        found = product * factors
        del product, factors, scaled
        return found
    by_norm = gradient / norm.pow(p - 1)
    by_norm.masked_fill_(norm == 0, 0)
    found = scaled * by_norm
    del by_norm, scaled
    return found


# ---- matrix_exp


def _matrix_exp_backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    """A part of the exponential of a matrix of twice as many rows (`differential_analytic_matrix_function`)."""
    (source,) = ctx.saved_tensors
    size = source.shape[-1]
    blocks = gradient.new_zeros(*source.shape[:-2], 2 * size, 2 * size)
    for first in (slice(None, size), slice(size, None)):
        blocks[..., first, first].copy_(source.mH)
    blocks[..., :size, size:].copy_(gradient)
    whole = torch.linalg.matrix_exp(blocks)
    del blocks
    return (whole[..., :size, size:],)


# ---- reflections


def _reflections_backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    vectors, factors, result = ctx.saved_tensors
    return reflections.gradients(gradient, result, vectors, factors)


# ---- trace

# Since when no more than the diagonal is written to (2.13; 2.9.1 and 2.11, on an H100, also write below it where there are more
# rows than columns; of 2.12 it is not known).
_DIAGONAL_ALONE_FROM = (2, 12)


def _trace_backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    """Every place of the diagonal, and those that are as far from each other behind it (`trace_backward_symint`)."""
    rows, columns = ctx.shape
    found = gradient.new_zeros(rows * columns)
    places = torch.arange(0, rows * columns, columns + 1, device=gradient.device)
    filled = found.index_fill(0, places, gradient)
    del places
    return (filled.view(rows, columns),)


# ---- maximum and minimum


def _maximum_backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    source, other = ctx.saved_tensors
    return _shares(ctx, gradient, lambda: source < other, lambda: source > other)


def _minimum_backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    source, other = ctx.saved_tensors
    return _shares(ctx, gradient, lambda: source > other, lambda: source < other)


def _shares(
    ctx: Any, gradient: Any, others_alone: Callable[[], torch.Tensor], sources_alone: Callable[[], torch.Tensor]
) -> tuple[Any, ...]:
    """Both arguments' gradients, each without where the other argument's alone is; where they are equal, each has a half."""
    source, other = ctx.saved_tensors
    of_other = _share(gradient, source, other, sources_alone) if ctx.needs_input_grad[2] else None
    return _share(gradient, source, other, others_alone) if ctx.needs_input_grad[1] else None, of_other


def _share(gradient: Any, source: Any, other: Any, without: Callable[[], torch.Tensor]) -> torch.Tensor:
    first = without() if version_of(source) >= WITHOUT_FIRST_FROM else None
    half = gradient / 2
    equal = source == other
    shared = torch.where(equal, half, gradient)
    shared.masked_fill_(without() if first is None else first, 0)
    del equal, half, first
    return shared


def _by_version(newer: _Formula, older: _Formula) -> _Formula:
    def formula(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        return (newer if version_of(ctx.saved_tensors[0]) >= WITHOUT_FIRST_FROM else older)(ctx, gradient)

    return formula


def _one_or_the_other(takes_source: Callable[[Any, Any], torch.Tensor]) -> _Formula:
    """Of `fmax` and `fmin`, where one of two that are equal has all."""

    def formula(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        source, other = ctx.saved_tensors
        found: list[Any] = [None, None]
        for place in (1, 0):
            if ctx.needs_input_grad[place + 1]:
                its = takes_source(source, other)
                unknown = other.isnan()
                its.logical_or_(unknown)
                found[place] = gradient.masked_fill(its if place else its.logical_not_(), 0)
                del unknown, its
        return tuple(found)

    return formula


def _within_a_bound(
    is_inside: Callable[[Any, Any], torch.Tensor], is_outside: Callable[[Any, Any], torch.Tensor]
) -> _Formula:
    """Of a number that is held at a bound, and of the bound."""

    def formula(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        source, bound = ctx.saved_tensors
        found: list[Any] = [None, None]
        for place, mask in ((1, is_outside), (0, is_inside)):
            if ctx.needs_input_grad[place + 1]:
                zero = torch.scalar_tensor(0.0, dtype=gradient.dtype, device=gradient.device)
                found[place] = torch.where(mask(source, bound), gradient, zero)
                del zero
        return tuple(found)

    return formula


_OF_FMAX = _by_version(_maximum_backward, _one_or_the_other(compared.ge))
_OF_FMIN = _by_version(_minimum_backward, _one_or_the_other(compared.le))
_OF_A_LEAST = _by_version(_maximum_backward, _within_a_bound(compared.ge, compared.lt))
_OF_A_MOST = _by_version(_minimum_backward, _within_a_bound(compared.le, compared.gt))


def _between_bounds(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    """Of a number between two bounds, and of the bounds. (The operators that the build of 2.14 runs.)"""
    source, least, most = ctx.saved_tensors
    of_least = of_most = None
    if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
        in_order, one_bound = least < most, least == most
        if ctx.needs_input_grad[2]:
            of_least = _of_least(gradient, source, least, in_order, one_bound)
        if ctx.needs_input_grad[3]:
            of_most = _of_most(gradient, source, most, in_order, one_bound, most < least)
        del one_bound, in_order
    if not ctx.needs_input_grad[1]:
        return None, of_least, of_most
    in_order = least < most
    at_most, at_least = source == most, source == least
    at_either = at_least.logical_or(at_most)
    halved = at_either.logical_and(in_order)
    del at_either, at_least, at_most
    below, above = source < least, source > most
    outside = below.logical_or(above)
    del above, below
    half = gradient / 2
    of_source = torch.where(halved, half, gradient)
    of_source.masked_fill_(outside, 0)
    del half, outside, halved, in_order
    return of_source, of_least, of_most


def _of_least(gradient: Any, source: Any, least: Any, in_order: Any, one_bound: Any) -> torch.Tensor:
    up_to = source <= least
    held = up_to.logical_and(in_order)
    below = source < least
    held_by_one = below.logical_and(one_bound)
    own = held.logical_or(held_by_one)
    del held_by_one, below, held, up_to
    others = own.logical_not()
    half = gradient / 2
    equal = source == least
    found = torch.where(equal, half, gradient)
    found.masked_fill_(others, 0)
    del equal, half, others, own
    return found


def _of_most(gradient: Any, source: Any, most: Any, in_order: Any, one_bound: Any, crossed: Any) -> torch.Tensor:
    from_it = source >= most
    held = from_it.logical_and(in_order)
    held_or_crossed = held.logical_or(crossed)
    above = source > most
    held_by_one = above.logical_and(one_bound)
    own = held_or_crossed.logical_or(held_by_one)
    del held_by_one, above, held_or_crossed, held, from_it
    others = own.logical_not()
    half = gradient / 2
    equal = source == most
    tied = equal.logical_and(in_order)
    found = torch.where(tied, half, gradient)
    found.masked_fill_(others, 0)
    del tied, equal, half, others, own, crossed
    return found


# ---- atan2

# Since when places where both are zero are looked for. (The build of 2.10 does so, that of 2.9 does not.)
_ZEROS_APART_FROM = (2, 10)


def _atan2_backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    source, other = ctx.saved_tensors
    others = other * other
    squares = source * source
    sums = squares + others
    shares = sums.reciprocal()
    del sums, squares, others
    first = gradient * other if ctx.needs_input_grad[1] else None
    of_source = None if first is None else first * shares
    if not ctx.needs_input_grad[2]:
        del first
        return of_source, None
    negative = -source
    second = gradient * negative
    of_other = second * shares
    del second, negative, first
    return of_source, of_other


# ---- determinants

# Since when a matrix of one number hands the gradient on as it is (2.13 does; 2.11 works it out as that of others, on an H100; of
# 2.12 it is not known).
_ONE_NUMBER_HANDED_ON_FROM = (2, 12)


def _determinant_backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    matrices, result, factors, pivots = ctx.saved_tensors
    if not matrices.numel():
        return (None,)
    if matrices.shape[-1] == 1 and version_of(matrices) >= _ONE_NUMBER_HANDED_ON_FROM:
        return (gradient.unsqueeze(-1).unsqueeze(-1).expand_as(matrices),)
    by_number = gradient * result.conj()
    scaled = torch.diag_embed(by_number.unsqueeze(-1).expand_as(pivots)).mT
    smallest = torch.finfo(matrices.dtype).eps
    if torch.is_grad_enabled():
        sizes = result.abs()
        found = _of_determinants(sizes < 100 * smallest, matrices, scaled, gradient)
        del sizes
    else:
        zeros = factors.diagonal(0, -2, -1) == 0
        moved = torch.where(zeros, smallest, 0.0)
        steps = torch.diag_embed(moved)
        regular = factors + steps
        del steps, moved, zeros
        as_it_lies = matrices.is_contiguous() and not matrices.is_complex()
        found = torch.linalg.lu_solve(regular, pivots, scaled, left=True, adjoint=not as_it_lies)
        del regular
    del scaled, by_number
    return (found,)


def _of_determinants(singular: Any, matrices: Any, scaled: Any, gradient: Any) -> Any:
    """What can be differentiated once more (`masked_fmap`). Numbers that are not known count as though none was small."""
    if values.exact(singular) is not None:
        chosen = matrices[singular]
    else:
        # (One flag is read as it is: `TensorIndexing.h`.)
        found = _places_of(singular) if singular.dim() else None
        chosen = matrices[:0]
        del found
    if not chosen.numel():
        return torch.linalg.solve(matrices.mH, scaled)
    if chosen.numel() == matrices.numel():
        return _by_singular_values(matrices, gradient)
    others = singular.logical_not()
    whole = torch.empty_like(matrices)
    whole.index_put_((singular,), _by_singular_values(chosen, gradient[singular]))
    return whole.index_put_((others,), torch.linalg.solve(matrices[others].mH, scaled[others]))


def _by_singular_values(matrices: Any, gradient: Any) -> Any:
    left, sizes, right = torch.linalg.svd(matrices)
    turned = torch.linalg.det(right)
    turned = torch.linalg.det(left) * turned
    shares = _prod_with_zeros((turned.conj() * gradient).unsqueeze(-1), sizes, -1)
    return (left * shares.unsqueeze(-2)) @ right


_NODES = {
    operator: _with_node(operator, name, keeps, with_result, formula, *changed)
    for operator, name, keeps, with_result, formula, *changed in (
        (_aten.prod.default, "ProdBackward0", (0,), True, _prod_backward),
        (_aten.prod.dim_int, "ProdBackward1", (0,), True, _prod_along_backward),
        (_aten.masked_fill.Tensor, "MaskedFillBackward1", (1,), False, _masked_fill_backward),
        (_aten.renorm.default, "RenormBackward0", (0,), False, _renorm_backward),
        (_aten.linalg_matrix_exp.default, "LinalgMatrixExpBackward0", (0,), False, _matrix_exp_backward),
        (
            _aten.linalg_householder_product.default,
            "LinalgHouseholderProductBackward0",
            (0, 1),
            True,
            _reflections_backward,
        ),
        (
            _aten._linalg_det.default,
            "LinalgDetBackward0",
            (0,),
            True,
            _determinant_backward,
        ),
        (_aten.trace.default, "TraceBackward0", (), False, _trace_backward, _DIAGONAL_ALONE_FROM),
        (_aten.atan2.default, "Atan2Backward0", (0, 1), False, _atan2_backward, _ZEROS_APART_FROM),
        (_aten.maximum.default, "MaximumBackward0", (0, 1), False, _maximum_backward, WITHOUT_FIRST_FROM),
        (_aten.minimum.default, "MinimumBackward0", (0, 1), False, _minimum_backward, WITHOUT_FIRST_FROM),
        (_aten.fmax.default, "FmaxBackward0", (0, 1), False, _OF_FMAX, WITHOUT_FIRST_FROM),
        (_aten.fmin.default, "FminBackward0", (0, 1), False, _OF_FMIN, WITHOUT_FIRST_FROM),
        (_aten.clamp_min.Tensor, "ClampMinBackward1", (0, 1), False, _OF_A_LEAST, WITHOUT_FIRST_FROM),
        (_aten.clamp_max.Tensor, "ClampMaxBackward1", (0, 1), False, _OF_A_MOST, WITHOUT_FIRST_FROM),
    )
}


_held_between = _with_node(_aten.clamp.Tensor, "ClampBackward0", (0, 1, 2), False, _between_bounds, WITHOUT_FIRST_FROM)


def _held_at_a_bound(keys: Any, self: Any, min: Any = None, max: Any = None) -> Any:
    """`clamp` by one tensor has the gradient of `clamp_min` or `clamp_max`, by two one of its own."""
    one = (min is None) != (max is None) and isinstance(self, VirtualTensor)
    if one and not _runs_since(WITHOUT_FIRST_FROM) and version_of(self) >= WITHOUT_FIRST_FROM:
        return _aten.clamp_max.Tensor(self, max) if min is None else _aten.clamp_min.Tensor(self, min)
    if min is None or max is None:
        return replaced(_aten.clamp.Tensor, keys)(self, min, max)
    return _held_between(keys, self, min, max)


def install(patches: Patches) -> None:
    """Gives the operators these nodes, for tensors of the virtual devices."""
    patches.kernels("AutogradCUDA", [*_NODES.items(), (_aten.clamp.Tensor, _held_at_a_bound)], with_keys=True)
