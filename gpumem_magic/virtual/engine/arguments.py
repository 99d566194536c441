"""What PyTorch checks of an operator's arguments before it runs a kernel, where its shape rules do not: numbers out of range, and
types that do not go together. A program that a card would stop is stopped here, too, with the same words."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine.mismatch import refuse_other_types, scalar_name

ARGUMENT_CHECKS: dict[Any, Callable[..., None]] = {}
"""By operator, what is called with its arguments, and raises PyTorch's error."""

# The largest number up to which float32 has every integer (``Distributions.cpp``).
_MOST_CATEGORIES = 1 << 24


def _of(names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(check: Callable[..., None]) -> Callable[..., None]:
        ARGUMENT_CHECKS.update(dict.fromkeys(overloads(names), check))
        return check

    return register


@_of("uniform_ uniform")
def _uniform(tensor: Any, lowest: float = 0.0, highest: float = 1.0, **_: Any) -> None:
    """`uniform_impl_` in ``DistributionTemplates.h``."""
    if lowest > highest:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but found from={lowest:g} > to={highest:g}")


@_of("random_.from")
def _random(tensor: Any, lowest: int, highest: int | None = None, **_: Any) -> None:
    """`random_from_to_impl` there."""
    if highest is not None and lowest >= highest:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={lowest} >= to={highest}")


@_of("bernoulli.p bernoulli_.float")
def _bernoulli(tensor: Any, p: float = 0.5, **_: Any) -> None:
    """`bernoulli_impl_` there."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p:g}")


@_of("multinomial multinomial.out")
def _multinomial(weights: Any, count: int, replacement: bool = False, **_: Any) -> None:
    """`multinomial_out` in ``Distributions.cpp``."""
    if weights.dim() not in (1, 2):
        raise RuntimeError("prob_dist must be 1 or 2 dim")
    if not weights.is_floating_point():
        name = scalar_name(weights.dtype)
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {name}")
    if count <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not replacement and count > weights.shape[-1]:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    if weights.shape[-1] > _MOST_CATEGORIES:
        raise RuntimeError("number of categories cannot exceed 2^24")


@_of("complex polar")
def _complex(first: Any, second: Any) -> None:
    """`complex_check_dtype` in ``TensorFactories.cpp``."""
    if first.dtype != second.dtype:
        names = scalar_name(first.dtype), scalar_name(second.dtype)
        raise RuntimeError(
            f"Expected object of scalar type {names[0]} but got scalar type {names[1]} for second argument"
        )


@_of("mse_loss_backward huber_loss_backward")
def _gradient_of_loss(gradient: Any, tensor: Any, target: Any, *_: Any) -> None:
    """``BinaryOps.cpp`` and ``PointwiseOps.cpp``."""
    refuse_other_types(tensor, target)


@_of("histc histc.out")
def _histc(tensor: Any, bins: int = 100, min: float = 0, max: float = 0, **_: Any) -> None:
    """`histc_select_outer_bin_edges` in ``Histogram.cpp``, `_histc_cuda_template` in ``SummaryOps.cu``."""
    if bins <= 0:
        raise RuntimeError(f"torch.histogram(): bins must be > 0, but got {bins} for dimension 0")
    error = refused_range(min, max)
    if error is not None:
        raise error


def refused_range(lowest: float, highest: float) -> Exception | None:
    """What is said of the ends of a histogram. (Where they are equal, the values have others.)"""
    if not (isfinite(lowest) and isfinite(highest)):
        return RuntimeError(f"torch.histc: range of [{lowest:g}, {highest:g}] is not finite")
    return RuntimeError("torch.histc: max must be larger than min") if lowest > highest else None


@_of("bucketize.Tensor")
def _bucketize(tensor: Any, boundaries: Any, **_: Any) -> None:
    """``Bucketization.cpp``."""
    if boundaries.dim() != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({boundaries.dim()})")


def refuse_lengths_of_ctc(log_probs: Any, targets: Any, given: Any, wanted: Any, blank: int) -> None:
    """What CUDA's own kernel looks at before it runs (`ctc_loss_gpu_template` in ``LossCTC.cu``).

    given, wanted: the lengths of the inputs and of the targets; None where they are not known.
    """
    if log_probs.dim() != 3:
        return
    checked = "(while checking arguments for ctc_loss_gpu)"
    named = "argument #2 'targets'"
    if targets.dim() not in (1, 2):
        raise RuntimeError(
            f"Expected 1 to 2 dimensions, but got {targets.dim()}-dimensional tensor for {named} {checked}"
        )
    steps, batch, symbols = log_probs.shape
    if not 0 <= blank < symbols:
        raise RuntimeError("blank must be in label range")
    for name, lengths in (("input_lengths", given), ("target_lengths", wanted)):
        if lengths is not None and len(lengths) != batch:
            raise RuntimeError(f"{name} must be of size batch_size")
    longest = total = 0
    for length in map(int, wanted if wanted is not None else ()):
        if length < 0:
            raise RuntimeError(f"Expected target_lengths to have value at least 0, but got value {length} {checked}")
        longest, total = max(longest, length), total + length
    size = batch if targets.dim() == 2 else total
    if targets.shape[0] != size and (wanted is not None or targets.dim() == 2):
        raise RuntimeError(
            f"Expected tensor to have size {size} at dimension 0, but got size {targets.shape[0]} for {named} {checked}"
        )
    if targets.dim() == 2 and targets.shape[1] < longest:
        raise RuntimeError(
            f"Expected tensor to have size at least {longest} at dimension 1, but got size {targets.shape[1]} for {named} "
            f"{checked}"
        )
    for length in map(int, given if given is not None else ()):
        if length < 0:
            raise RuntimeError(f"Expected input_lengths to have value at least 0, but got value {length} {checked}")
        if length > steps:
            raise RuntimeError(
                f"Expected input_lengths to have value at most {steps}, but got value {length} {checked}"
            )
