"""Operators that C++ puts together differently for CUDA: the CUDA way, for virtual tensors.

Inside PyTorch these ask ``is_cuda`` and would take the host's way here, since C++ sees meta tensors. It matters for memory: the
host's dropout keeps a mask in the input's type where CUDA keeps one byte for each element, and the host's softmax with
``dtype=float32`` of float16 scores makes a float32 copy first. As in `Dropout.cpp` and `SoftMax.cpp`.

The gradients of SiLU and Mish are one kernel on CUDA (`native_functions.yaml`); a build for the host knows them for CUDA as seven
and eight smaller operators only, which would hold up to five tensors more for a moment. Likewise `rms_norm` since 2.9: it keeps
a number for each row beside its input (``layer_norm_kernel.cu``), and not the normalised input as well. Eigenvalues and singular
values come without vectors where no gradient needs these; C++ takes subclasses of tensors for such as may have one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from gpumem_magic.patching import Patches
from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.engine import Engine, version_of
from gpumem_magic.virtual.engine.half_precision import HALF, accumulator
from gpumem_magic.virtual.engine.modes import ThreadFlag, has_others, pushed
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.engine.tensors import VirtualTensor, engine_of
from gpumem_magic.virtual.operators import matrix_ranks, quantiles
from gpumem_magic.virtual.operators.copies import GROUPS_AS_THEY_LIE_FROM, laid_out
from gpumem_magic.virtual.operators.norms import by_cudnn, whole_batch_norm


def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Training: one kernel, which keeps a mask of one byte for each element."""
    if not train or p == 0 or not input.numel():
        return input
    if p == 1:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    return _aten.native_dropout.default(input, p, train)[0]  # type: ignore[no-any-return]


def dropout_of_a_batch(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Likewise under `vmap`, which has a rule for that kernel (`native_dropout_batching_rule` in ``BatchRulesRandomness.cpp``).
    For the host's tensors the operator is taken apart."""
    if isinstance(_inside(input), VirtualTensor):
        return dropout(input, p, train)
    usual = torch._C.DispatchKey.CompositeImplicitAutograd
    return _aten.dropout.default._op_dk(usual, input, p, train)  # type: ignore[no-any-return]


def _inside(tensor: torch.Tensor) -> torch.Tensor:
    """What is in the wrappers of `torch.func`. (2.9 to 2.13)"""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """float16 scores with a float32 result: converted by the kernel itself."""
    return _normalised(_aten._softmax.default, input, dim, dtype)


def log_softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Likewise."""
    return _normalised(_aten._log_softmax.default, input, dim, dtype)


def _normalised(kernel: Any, input: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    if input.dtype == torch.float16 and dtype == torch.float32:
        return kernel(input, dim, True)  # type: ignore[no-any-return]
    return kernel(input if dtype is None else input.to(dtype), dim, False)  # type: ignore[no-any-return]


def silu_backward(grad_output: torch.Tensor, self: torch.Tensor) -> torch.Tensor:
    """One kernel. Where its own gradient is wanted, the smaller operators."""
    if torch.is_grad_enabled() and (grad_output.requires_grad or self.requires_grad):
        gate = torch.sigmoid(self)
        return grad_output * (gate * (1 + self * (1 - gate)))
    return _one_kernel(_aten.silu_backward.default, grad_output, self)


def mish_backward(grad_output: torch.Tensor, self: torch.Tensor) -> torch.Tensor:
    """Likewise."""
    if torch.is_grad_enabled() and (grad_output.requires_grad or self.requires_grad):
        inner = torch.tanh(F.softplus(self))
        return grad_output * (inner + self * torch.sigmoid(self) * (1 - inner * inner))
    return _one_kernel(_aten.mish_backward.default, grad_output, self)


def call_node(function: Any, name: str) -> None:
    """Has a function's nodes in the graph be called as C++'s is: what a program that prints `grad_fn` reads."""
    kind = function._backward_cls
    kind.__name__, kind.__qualname__, kind.__module__ = name, name, "builtins"


class _RmsNorm(torch.autograd.Function):
    """The kernel with its gradient's kernel. For a gradient's own gradient the smaller operators are differentiated."""

    @staticmethod
    def forward(ctx: Any, input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            out, rstd = _aten._fused_rms_norm.default(input, normalized_shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.normalized_shape = normalized_shape
        # No zeros are made for the gradient of a result that has none.
        ctx.set_materialize_grads(False)
        return out, rstd

    @staticmethod
    def backward(ctx: Any, gradient: Any, of_rows: Any) -> Any:
        if gradient is None and of_rows is None:
            return None, None, None, None
        input, weight, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        if torch.is_grad_enabled() or of_rows is not None:
            rows = rstd.view(*rstd.shape, *[1] * (input.dim() - rstd.dim()))
            found = _rms_norm_backward(gradient, of_rows, input, len(ctx.normalized_shape), rows, weight, wanted)
        else:
            kernel = _aten._fused_rms_norm_backward.default
            found = kernel(gradient, input, ctx.normalized_shape, rstd, weight, wanted)
        return found[0], None, found[1], None


def _rms_norm_backward(
    gradient: Any, of_rows: Any, input: Any, count: int, rows: Any, weight: Any, wanted: list[bool]
) -> tuple[Any, Any]:
    """What can be differentiated once more (`infinitely_differentiable_native_rms_norm_backward` in ``FunctionsManual.cpp``, as
    the builds of 2.12 and 2.14 have it). count: of dimensions that are normalised; rows: one over the root of each row's mean."""
    own = input.dim() - count
    size = input.shape[own:].numel()
    cubes = rows.pow(3)
    weighed = gradient if gradient is None or weight is None else gradient * weight
    of_input = of_weight = None
    if wanted[0]:
        if gradient is not None:
            product = input * weighed
            sums = product.sum(list(range(own, input.dim())), keepdim=True)
            del product
            # (One expression, from right to left.)
            scaled = input * cubes
            shared = scaled / size
            taken = shared * sums
            first = rows * weighed
            of_input = first - taken
            del first, taken, shared, scaled, sums
        if of_rows is not None:
            scaled = input * cubes
            shared = scaled / size
            opposite = -shared
            by_rows = opposite * of_rows.view(rows.shape)
            del opposite, shared, scaled
            of_input = by_rows if of_input is None else of_input + by_rows
    if wanted[1] and weight is not None and gradient is not None:
        normalised = input * rows
        of_weight = gradient * normalised
        if own:
            of_weight = of_weight.sum(list(range(own)))
        del normalised
    del weighed, cubes
    return of_input, of_weight


call_node(_RmsNorm, "FusedRmsNormBackward0")


# Whether a `rms_norm` is under way whose parts autocast casts.
parts_are_cast = ThreadFlag()

# Since when half precision is added up in float32. (The build of 2.6 does so, those of 2.4 and 2.5 do not.)
_ADDED_WIDE_FROM = (2, 6)
# Since when the weight is multiplied before the result has its type again (``layer_norm.cpp``, pull request 147203).
_WEIGHED_WIDE_FROM = (2, 7)


def _by_smaller_operators(
    input: Any, normalized_shape: Any, weight: Any, eps: Any, version: tuple[int, int] = _WEIGHED_WIDE_FROM
) -> tuple[Any, Any]:
    """As `rms_norm_symint` in ``layer_norm.cpp`` does it before 2.9, and later where the weight has another type."""
    dims = list(range(-len(normalized_shape), 0))
    wide = input.float() if input.dtype in HALF and version >= _ADDED_WIDE_FROM else input
    # (The product has the type of the wider one then.)
    is_cast = parts_are_cast.is_up and input.dtype in HALF
    squares = (input.float() if is_cast else wide).pow(2)
    means = squares.mean(dims, keepdim=True).add_(torch.finfo(wide.dtype).eps if eps is None else eps)
    rstd = torch.rsqrt(means)
    # (In this order, and before 2.6 after the product, which was one expression.)
    out = wide * rstd if version < _ADDED_WIDE_FROM else None
    del means
    del squares
    out = wide * rstd if out is None else out
    if version < _WEIGHED_WIDE_FROM and not is_cast:
        out = out.to(input.dtype)
    if weight is not None:
        out = out * weight
    if version < _WEIGHED_WIDE_FROM:
        return out, rstd
    if version < _ONE_KERNEL_FROM:
        # (No result: it goes with what it was worked out in, as the build of 2.7 has it.)
        rstd = rstd.new_empty(0)
    del wide
    return out.to(input.dtype), rstd


# Since when `rms_norm` is one kernel.
_ONE_KERNEL_FROM = (2, 9)


def rms_norm(input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None, eps: float | None) -> Any:
    """One kernel, which keeps a number for each row."""
    # How `vmap` and forward derivatives go through a kernel is known for the smaller operators; compilers take those, too.
    if torch._C._are_functorch_transforms_active() or not isinstance(input, VirtualTensor):
        return _by_smaller_operators(input, normalized_shape, weight, eps)
    if version_of(input) < _ONE_KERNEL_FROM:
        return _by_smaller_operators(input, normalized_shape, weight, eps, version_of(input))
    return _RmsNorm.apply(input, normalized_shape, weight, eps)  # type: ignore[no-untyped-call]


def rms_norm_of_two_types(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """C++ takes the smaller operators itself where the weight has another type, as its own version does: before 2.7 the result
    has the wider type."""
    by_type = weight is not None and weight.dtype != input.dtype and isinstance(input, VirtualTensor)
    # (What does not fit C++ refuses.)
    by_type = by_type and list(input.shape[-len(normalized_shape) :]) == list(weight.shape) == list(normalized_shape)
    if by_type and version_of(input) < _ONE_KERNEL_FROM and not torch._C._are_functorch_transforms_active():
        return _by_smaller_operators(input, normalized_shape, weight, eps, version_of(input))[0]
    usual = torch._C.DispatchKey.CompositeImplicitAutograd
    return _aten.rms_norm.default._op_dk(usual, input, normalized_shape, weight, eps)


def _one_kernel(kernel: Any, grad_output: torch.Tensor, self: torch.Tensor) -> torch.Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return kernel(grad_output, self)  # type: ignore[no-any-return]


def batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: float,
    eps: float,
    enabled: bool,
) -> torch.Tensor:
    """cuDNN takes a plain input, or one with its channels last, and keeps that for the gradient."""
    if not input.numel():
        return _batch_norm_of_nothing(input, weight, bias)
    # (`_batch_norm_impl_index` in ``Normalization.cpp``.)
    for name, one in (("running_mean", mean), ("running_var", variance), ("weight", weight), ("bias", bias)):
        if one is not None and input.dim() > 1 and one.numel() != input.shape[1]:
            raise RuntimeError(f"{name} should contain {input.shape[1]} elements not {one.numel()}")
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim(), torch.contiguous_format)
    if enabled and by_cudnn(input, weight, bias, mean, training) and not input.is_contiguous(memory_format=last):
        input = input.contiguous()
    kernel = _aten.native_batch_norm.default
    with whole_batch_norm.raised():
        out, used_mean, used_deviation = kernel(input, weight, bias, mean, variance, training, momentum, eps)
    # (A tuple of C++ lets go of its first first.)
    del used_mean
    del used_deviation
    return out  # type: ignore[no-any-return]


def _batch_norm_of_nothing(input: Any, weight: Any, bias: Any) -> torch.Tensor:
    """No kernel runs, and statistics stay as they are (`_batch_norm_impl_index` in ``Normalization.cpp``)."""
    kept = [input.new_empty(input.shape[1:2] or (0,), dtype=accumulator(input.dtype)) for _ in range(2)]
    out: torch.Tensor = input.clone()
    if weight is not None:
        out = out * weight[0]
    if bias is not None:
        out = out + bias[0]
    del kept
    return out


# Since when one call multiplies an input of three dimensions and adds the bias. (The builds for the host of 1.9 to 1.11 have two
# nodes for it, that of 1.12 has one.)
_BIAS_IN_ONE_CALL_FROM = (1, 12)


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Where one call can't do both, a product, to which the bias is added in place (``Linear.cpp``). For subclasses of tensors,
    which virtual ones are, C++ makes another tensor, and so it does on a card under a dispatch mode of the program's
    (`isTensorSubclassLike`), as selective checkpoints have one.

    A weight that may have a gradient is multiplied with the input's rows in one matrix (`should_fold` in ``LinearAlgebra.cpp``),
    in inference mode, too. Here the operator comes below autograd then, where no transposed weight has one.
    """
    folds = weight.requires_grad and torch.is_inference_mode_enabled()
    if (
        (bias is None and not folds)
        or input.dim() == 2
        or (input.dim() < 2 and weight.dim() > 1)
        or not isinstance(input, VirtualTensor)
        or (weight.dim() > 1 and input.is_contiguous() and version_of(input) >= _BIAS_IN_ONE_CALL_FROM)
        or torch._C._are_functorch_transforms_active()
    ):
        usual = torch._C.DispatchKey.CompositeImplicitAutograd
        return _aten.linear.default._op_dk(usual, input, weight, bias)  # type: ignore[no-any-return]
    if folds:
        rows = input.reshape(-1, input.shape[-1])
        product = torch.mm(rows, weight.t()).view(*input.shape[:-1], weight.shape[0])
        del rows
    else:
        product = torch.matmul(input, weight.t())
    if bias is None:
        return product
    return product + bias if has_others(engine_of(input).mode) else product.add_(bias)


_MEAN = 1


def cross_entropy_loss(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """A mean with smoothed labels is divided by the weights of the classes that count, which are selected (``LossNLL.cpp``). For
    subclasses of tensors C++ looks up a weight for every label, and puts zeros in."""
    usual = torch._C.DispatchKey.CompositeImplicitAutograd
    if (
        weight is None
        or not label_smoothing
        or reduction != _MEAN
        or self.shape == target.shape
        or not isinstance(self, VirtualTensor)
        or has_others(engine_of(self).mode)
    ):
        return _aten.cross_entropy_loss.default._op_dk(  # type: ignore[no-any-return]
            usual, self, target, weight, reduction, ignore_index, label_smoothing
        )
    classes = 0 if self.dim() == 1 else 1
    # (With its type said autocast leaves it in that.)
    logarithms = torch.log_softmax(self, classes, self.dtype)
    loss = F.nll_loss(logarithms, target, weight, ignore_index=ignore_index)
    spread = weight.view([-1 if place == classes else 1 for place in range(self.dim())])
    weighted = logarithms * spread
    sums = weighted.sum(classes)
    smooth = -sums
    # C++ lets go of the last first.
    del sums, weighted
    ignored = target == ignore_index
    smooth.masked_fill_(ignored, 0.0)
    counted = ~ignored
    labels = target.masked_select(counted).flatten()
    weights = weight.gather(0, labels)
    divisor = weights.sum()
    total = smooth.sum()
    mean = total / divisor
    del total, divisor, weights, labels, counted
    # (What is made in one expression is made from right to left.)
    of_all = mean * (label_smoothing / self.shape[classes])
    of_labels = (1 - label_smoothing) * loss
    result = of_labels + of_all
    del of_labels, of_all, mean, smooth, loss
    return result


def cumprod_backward(grad: torch.Tensor, input: torch.Tensor, dim: int, output: torch.Tensor) -> torch.Tensor:
    """The short way that there is without zeros (``FunctionsManual.cpp``), which values that are not known count as, or what is
    before, at and behind the first zero; with a graph the products that leave out one after another. C++ takes other ways for
    subclasses of tensors."""
    host = values.exact(input) if isinstance(input, VirtualTensor) else None
    has_zeros = host is not None and bool((host == 0).any())
    if not isinstance(input, VirtualTensor):
        usual = torch._C.DispatchKey.CompositeImplicitAutograd
        return _aten.cumprod_backward.default._op_dk(usual, grad, input, dim, output)  # type: ignore[no-any-return]
    if input.numel() <= 1 or input.shape[dim] == 1:
        return grad
    weighted = output.conj() * grad
    zeros = input == 0
    zeros.any()
    if not has_zeros:
        found = _turned_sums(weighted, dim, input, False)
    elif torch.is_grad_enabled():
        found = _by_omitted_products(grad, input, dim % input.dim())
    else:
        found = _around_zeros(grad, input, dim, output, weighted, zeros)
    del zeros
    return found


def _by_omitted_products(grad: torch.Tensor, input: torch.Tensor, dim: int) -> torch.Tensor:
    """Of each place, what comes from itself and from those behind it."""
    numbers, size = input.conj(), input.shape[dim]
    found = grad.new_zeros(input.shape)
    ones = grad.new_ones(1).expand([1 if place == dim else length for place, length in enumerate(input.shape)])
    omitted: Any = None
    behind: Any = None
    for place in range(size):
        before = numbers.narrow(dim, 0, place).prod(dim, keepdim=True) if place else None
        if place < size - 1:
            # (C++ lets go of what a variable had when it has the next.)
            behind = numbers.narrow(dim, place + 1, size - place - 1).cumprod(dim)
        if before is None:
            omitted = torch.cat([ones, behind], dim)
            behind = None
        elif place == size - 1:
            omitted = before
        else:
            omitted = before.expand_as(behind) * behind
            omitted = torch.cat([before, omitted], dim)
        del before
        share = (grad.narrow(dim, place, size - place) * omitted).sum(dim)
        found.select(dim, place).copy_(share)
        del share
    # C++ lets go of the last first.
    del omitted, behind, ones
    return found


def _turned_sums(weighted: torch.Tensor, dim: int, input: torch.Tensor, in_place: bool) -> torch.Tensor:
    turned = weighted.flip(dim)
    sums = turned.cumsum(dim)
    turned_back = sums.flip(dim)
    # C++ lets go of the last first.
    del sums
    del turned
    return turned_back.div_(input.conj()) if in_place else turned_back.div(input.conj())


def _around_zeros(
    grad: torch.Tensor, input: torch.Tensor, dim: int, output: torch.Tensor, weighted: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    found = grad.new_zeros(input.shape)
    count = zeros.cumsum(dim)
    mask = count == 0
    others = ~mask
    kept = weighted.masked_fill(others, 0.0)
    before = _turned_sums(kept, dim, input, True)
    chosen = before.masked_select(mask)
    found.masked_scatter_(mask, chosen)
    del chosen, before, kept, others
    mask = count == 1
    first = mask.max(dim, keepdim=True)[1]
    at_first = torch.zeros_like(mask, memory_format=torch.contiguous_format).scatter_(dim, first, 1).logical_and_(mask)
    others = ~at_first
    mask &= others
    del others
    others = ~mask
    numbers = input.conj().masked_fill(others, 1.0)
    products = numbers.cumprod(dim)
    apart = count != 1
    gradients = grad.masked_fill(apart, 0.0)
    sums = products.mul_(gradients).sum(dim, keepdim=True)
    ahead = first - 1
    reached = torch.gather(output.conj(), dim, ahead.relu_())
    at_begin = first == 0
    chosen = sums.mul_(reached.masked_fill_(at_begin, 1.0)).masked_select(at_first)
    found.masked_scatter_(at_first, chosen)
    del (
        chosen,
        at_begin,
        reached,
        ahead,
        sums,
        gradients,
        apart,
        products,
        numbers,
        others,
        at_first,
        first,
        mask,
        count,
    )
    return found


def one_hot(self: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Ones written into zeros (``Onehot.cpp``); elsewhere every class is compared with every number."""
    if self.dtype != torch.int64:
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if not self.numel() and num_classes <= 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    if num_classes == -1:
        num_classes = int(self.max().item()) + 1
    out = self.new_zeros((*self.shape, num_classes))
    return out.scatter_(-1, self.unsqueeze(-1), 1) if self.numel() else out


def singular_values(A: torch.Tensor, *, driver: str | None = None) -> torch.Tensor:
    return _aten._linalg_svd.default(A, False, _may_have_gradient(A), driver=driver)[1]  # type: ignore[no-any-return]


def eigenvalues(self: torch.Tensor, UPLO: str = "L") -> torch.Tensor:
    """Of symmetric matrices."""
    return _aten._linalg_eigh.default(self, UPLO, _may_have_gradient(self))[0]  # type: ignore[no-any-return]


def eigenvalues_of_any(self: torch.Tensor) -> torch.Tensor:
    if _may_have_gradient(self):
        return _aten.linalg_eig.default(self)[0]  # type: ignore[no-any-return]
    return _aten._linalg_eigvals.default(self)  # type: ignore[no-any-return]


def _may_have_gradient(tensor: torch.Tensor) -> bool:
    if torch.is_grad_enabled() and tensor.requires_grad:
        return True
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


# Since when the least norm is a number on the device. (The builds of 2.11 and 2.13 have it there; those of 2.6, 2.9 and 2.10, and
# a recording with 2.8, do not.)
_LEAST_ON_DEVICE_FROM = (2, 11)


def cosine_similarity(x1: torch.Tensor, x2: torch.Tensor, dim: int = 1, eps: float = 1e-8) -> torch.Tensor:
    """Each norm is at least so large (``Distance.cpp``); with an older PyTorch by a number of the host's."""
    kind = torch.result_type(x1, x2)
    if not isinstance(x1, VirtualTensor) or not kind.is_floating_point:  # (which C++ refuses)
        usual = torch._C.DispatchKey.CompositeImplicitAutograd
        return _aten.cosine_similarity.default._op_dk(usual, x1, x2, dim, eps)  # type: ignore[no-any-return]
    pair = [x1.to(kind), x2.to(kind)]
    if x1.shape != x2.shape:
        # (`expand_outplace` in ``ExpandUtils.h``: the arguments of what it gives are made from right to left.)
        shape = torch.broadcast_shapes(x1.shape, x2.shape)
        pair = [one.expand(shape) for one in pair[::-1]][::-1]
    norms = [torch.linalg.vector_norm(one, 2, dim, keepdim=True).clone() for one in pair]
    with torch.no_grad():
        on_device = version_of(x1) >= _LEAST_ON_DEVICE_FROM
        least: Any = torch.scalar_tensor(eps, dtype=accumulator(kind), device=x1.device) if on_device else eps
        for norm in norms:
            norm.clamp_min_(least)
    # What C++ makes in one expression it makes from right to left, and it goes at its end, the last first.
    second = pair[1] / norms[1]
    first = pair[0] / norms[0]
    product = first * second
    result: torch.Tensor = product.sum(dim)
    del product, first, second, least, norm
    return result


# Since when indices are brought into the dimension by a remainder, for negative ones. (An H100 with 2.11 asked for it; 2.6 and
# 2.9 have none, and 2.10 was not looked at.)
_WRAPPED_FROM = (2, 11)


def take_along_dim(self: Any, indices: Any, dim: int | None = None, **out: torch.Tensor) -> torch.Tensor:
    """As the device's PyTorch does it (`_take_along_dim_helper` in ``TensorAdvancedIndexing.cpp``)."""
    ours = isinstance(self, VirtualTensor) and isinstance(indices, VirtualTensor)
    if ours and dim is not None and self.dim() and -self.dim() <= dim < self.dim() == indices.dim():
        dim %= self.dim()
        pairs = [*zip(self.shape, indices.shape, strict=True)]
        del pairs[dim]
        # (What does not fit C++ refuses.)
        if indices.dtype == torch.long and all(size == other or 1 in (size, other) for size, other in pairs):
            whole = [other if size == 1 else size for size, other in pairs]
            wide, places = (one.expand(*whole[:dim], one.shape[dim], *whole[dim:]) for one in (self, indices))
            if version_of(self) >= _WRAPPED_FROM:
                places = places.remainder(wide.shape[dim])
            return torch.gather(wide, dim, places, **out)  # type: ignore[arg-type]
    usual = torch._C.DispatchKey.CompositeImplicitAutograd
    by = _aten.take_along_dim.out if out else _aten.take_along_dim.default
    return by._op_dk(usual, self, indices, dim, **out)  # type: ignore[no-any-return]


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-05,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """(``group_norm.cpp``)"""
    if isinstance(input, VirtualTensor) and not input.is_contiguous() and input.numel():
        if version_of(input) < GROUPS_AS_THEY_LIE_FROM:
            input = input.contiguous()
        # (What does not fit C++ refuses.)
        elif input.shape[1] % num_groups == 0 and not torch._C._are_functorch_transforms_active():
            samples, channels = input.shape[:2]
            inner = input.shape[2:].numel()
            return _aten.native_group_norm.default(input, weight, bias, samples, channels, inner, num_groups, eps)[0]  # type: ignore[no-any-return]
    usual = torch._C.DispatchKey.CompositeImplicitAutograd
    return _aten.group_norm.default._op_dk(usual, input, num_groups, weight, bias, eps, cudnn_enabled)  # type: ignore[no-any-return]


_WAYS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.cosine_similarity.default: cosine_similarity,
    _aten.cross_entropy_loss.default: cross_entropy_loss,
    _aten.linalg_svdvals.default: singular_values,
    _aten.linalg_eigvalsh.default: eigenvalues,
    _aten.linalg_eigvals.default: eigenvalues_of_any,
    _aten.batch_norm.default: batch_norm,
    _aten.group_norm.default: group_norm,
    _aten.linear.default: linear,
    _aten.cumprod_backward.default: cumprod_backward,
    _aten.dropout.default: dropout,
    _aten.softmax.int: softmax,
    _aten.log_softmax.int: log_softmax,
    _aten.one_hot.default: one_hot,
    _aten.take_along_dim.default: take_along_dim,
    _aten.take_along_dim.out: take_along_dim,
    **matrix_ranks.WAYS,
    **quantiles.WAYS,
}
# Kernels of CUDA's own, which below autograd are the operator itself.
_KERNELS: dict[Any, Callable[..., Any]] = {
    _aten.silu_backward.default: silu_backward,
    _aten.mish_backward.default: mish_backward,
}
if hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
    _KERNELS[_aten._fused_rms_norm.default] = rms_norm
    _WAYS[_aten.rms_norm.default] = rms_norm_of_two_types


def install(patches: Patches) -> None:
    """Replaces the operators for tensors of the virtual devices."""
    patches.kernels("AutogradCUDA", (_WAYS | _KERNELS).items())
    patches.kernels("FuncTorchDynamicLayerFrontMode", [(_aten.dropout.default, dropout_of_a_batch)])
    # For traces of compilers, which take an operator without a kernel of CUDA's apart.
    patches.kernels("CUDA", _KERNELS.items())


# Since when dropout makes its mask before the result (``Dropout.cu``; 1.10 has it the other way round, 2.1 so).
_MASK_FIRST_FROM = (1, 11)


@special(_aten.native_dropout.default)
def _mask_first(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    out = engine.fake_call(func, args, kwargs)
    engine.settle(out[::-1] if engine.memory.torch_version(device) >= _MASK_FIRST_FROM else out)
    return out


@special(_aten.cosine_similarity.default)
def _alike(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    with pushed(engine.mode):
        return cosine_similarity(*args, **kwargs)


# (The number of classes is a value, which a device that computes knows for the operator's parts.)
@special(*(func for func in _WAYS if func not in (_aten.one_hot.default, _aten.cosine_similarity.default)))
def _without_autograd(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """In inference mode the operators come whole, below the key that they are registered for."""
    return _WAYS[func](*args, **kwargs)


@special(*_KERNELS)
def _whole(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    is_norm = _KERNELS[func] is rms_norm
    version = engine.memory.torch_version(device)
    if is_norm and version < _ONE_KERNEL_FROM:
        with pushed(engine.mode):
            input, normalized_shape, weight, eps = args
            return _by_smaller_operators(input, normalized_shape, weight, eps, version)
    return laid_out(engine, func, args, kwargs, device, (0,) if is_norm else ())
