"""The samples of PyTorch's own tests (OpInfo), on the host and on a virtual GPU: does each operator give the same?

    python benchmarks/samples_of_pytorch.py [--card A100] [--values real] [--ways calls inference transforms] [--only TEXT ...]

Every operator of PyTorch's list runs on its samples in seven types, from the same seeds. *calls* are the call, its gradient and
the call in place; *inference* the call in inference mode; *transforms* tangents, `vmap`, gradients for each sample and second
derivatives (float64). Compared are numbers (with --values real), shapes, types, whether a gradient is wanted, and the class of an
error. What differs is printed, and the last line counts. Some of it always will: memory that nobody wrote, what CUDA refuses or
gives in another size, samples that name the host as their device. PyTorch's tests need `expecttest`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import func
from torch.utils import _pytree

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent / "stand_in_runtime")]

import samples  # noqa: E402

from gpumem_magic.virtual import gpu  # noqa: E402

_TYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint8, torch.int32)
# Of float32, and of each other type.
_MANY, _FEW = 25, 8
_SECONDS = 60
# Where kernels add up in another order.
_CLOSE = {torch.float32: (1e-4, 1e-5), torch.complex64: (1e-4, 1e-5)}
_Way = tuple[str, Callable[[], Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--card", default="A100")
    parser.add_argument("--values", default="real", choices=("real", "auto", "stand-in"))
    parser.add_argument("--ways", nargs="+", default=["calls"], choices=("calls", "inference", "transforms"))
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="operators with a TEXT in their name")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _ring)
    operators = samples.database("operators")
    gpu.turn_on(f"{given.card},values={given.values}")
    began, calls, others = time.monotonic(), 0, 0
    for name, operator in operators.items():
        if given.only and not any(text in name for text in given.only):
            continue
        for kind in given.ways:
            for what, difference in _compared(operator, kind, given.values == "real"):
                calls += 1
                if difference:
                    others += 1
                    print(f"{name} {what}: {difference}", flush=True)
    print(f"{calls:,} calls in {time.monotonic() - began:.0f} s: {others:,} differ")


def _ring(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def _compared(operator: Any, kind: str, by_number: bool) -> Iterator[tuple[str, str]]:
    """What was run of an operator, and how the device's result differs from the host's; nothing where it does not."""
    for dtype in (torch.float64,) if kind == "transforms" else _TYPES:
        if not {dtype} <= set(operator.supported_dtypes("cuda")) & set(operator.supported_dtypes("cpu")):
            continue
        tracked = kind == "calls" and operator.supports_autograd and dtype in operator.supported_backward_dtypes("cuda")
        for number, sample in enumerate(_samples(operator, dtype, tracked)):
            both = [_moved((sample.input, sample.args, sample.kwargs), device) for device in ("cpu", "cuda")]
            for (way, on_host), (_, on_card) in zip(
                *(_WAYS[kind](operator, values, tracked) for values in both), strict=False
            ):
                its, ours = _run(on_host), _run(on_card)
                if not isinstance(its, TimeoutError):
                    yield f"{way} {str(dtype).removeprefix('torch.')} {number}", _difference(its, ours, by_number)


def _samples(operator: Any, dtype: torch.dtype, tracked: bool) -> list[Any]:
    """The first that can be made here."""
    torch.manual_seed(0)
    random.seed(0)
    found: list[Any] = []
    with contextlib.suppress(Exception):
        most = _MANY if dtype is torch.float32 else _FEW
        found.extend(itertools.islice(operator.sample_inputs("cpu", dtype, requires_grad=tracked), most))
    return found


def _moved(values: Any, device: str) -> Any:
    """A copy of a sample on a device, whose tensors lie as they did."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return device if isinstance(value, (str, torch.device)) and str(value) == "cpu" else value
        plain = value.detach()
        if plain.layout is not torch.strided or plain.is_nested or plain.is_conj() or plain.is_neg():
            return plain.clone().to(device).requires_grad_(value.requires_grad)
        room = plain.untyped_storage().nbytes() // plain.element_size()
        whole = torch.as_strided(plain, (room,), (1,), 0).clone().to(device)
        return whole.as_strided(plain.size(), plain.stride(), plain.storage_offset()).requires_grad_(
            value.requires_grad
        )

    return _pytree.tree_map(moved, values)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [one for one in _pytree.tree_leaves(values) if isinstance(one, torch.Tensor)]


def _floating(values: Any) -> list[torch.Tensor]:
    return [one for one in _tensors(values) if one.is_floating_point()]


def _calls(operator: Any, values: Any, tracked: bool) -> Iterator[_Way]:
    first, args, kwargs = values
    result: list[Any] = []

    def forward() -> Any:
        result[:] = [operator.op(first, *args, **kwargs)]
        return result[0]

    def backward() -> Any:
        outs = [one for one in _tensors(result) if one.requires_grad]
        leaves = [one for one in _tensors(values) if one.requires_grad and one.is_leaf]
        if not outs or not leaves:
            return None
        return torch.autograd.grad(outs, leaves, [torch.ones_like(one) * 0.5 for one in outs], allow_unused=True)

    yield "call", forward
    if tracked:
        yield "gradient", backward
    if operator.inplace_variant:
        copies = _pytree.tree_map(lambda one: one.detach().clone() if isinstance(one, torch.Tensor) else one, values)
        yield "in place", lambda: operator.inplace_variant(copies[0], *copies[1], **copies[2])


def _inference(operator: Any, values: Any, tracked: bool) -> Iterator[_Way]:
    def forward() -> Any:
        with torch.inference_mode():
            return operator.op(values[0], *values[1], **values[2])

    yield "inference", forward


def _transforms(operator: Any, values: Any, tracked: bool) -> Iterator[_Way]:
    given, args, kwargs = values
    if not isinstance(given, torch.Tensor) or given.layout is not torch.strided or not given.is_floating_point():
        return

    def call(tensor: torch.Tensor) -> Any:
        return operator.op(tensor, *args, **kwargs)

    def total(tensor: torch.Tensor) -> Any:
        return sum((one * one).sum() for one in _floating(call(tensor)))

    two = torch.stack([given, given * 0.5])
    yield "tangent", lambda: func.jvp(lambda one: _floating(call(one)), (given,), (torch.ones_like(given) * 0.5,))
    yield "vmap", lambda: func.vmap(call, randomness="same")(two)
    yield "gradients of samples", lambda: func.vmap(func.grad(total), randomness="same")(two)
    yield "second derivative", lambda: func.grad(lambda one: func.grad(total)(one).sum())(given)


_WAYS = {"calls": _calls, "inference": _inference, "transforms": _transforms}


def _run(call: Callable[[], Any]) -> Any:
    """What it gives, or the error that it raises."""
    torch.manual_seed(0)
    random.seed(0)
    signal.alarm(_SECONDS)
    try:
        return call()
    except Exception as error:
        return error
    finally:
        signal.alarm(0)


def _difference(its: Any, ours: Any, by_number: bool) -> str:
    if isinstance(its, Exception) or isinstance(ours, Exception):
        return "" if type(its) is type(ours) else f"host {_said(its)}, here {_said(ours)}"
    first, second = _pytree.tree_leaves(its), _pytree.tree_leaves(ours)
    if len(first) != len(second):
        return f"{len(first)} results on the host, {len(second)} here"
    return next(filter(None, (_of_one(*pair, by_number) for pair in zip(first, second, strict=True))), "")


def _said(value: Any) -> str:
    return f"{type(value).__name__}: {str(value)[:200]}" if isinstance(value, Exception) else "a result"


def _of_one(mine: Any, its: Any, by_number: bool) -> str:
    if isinstance(mine, torch.Tensor) is not isinstance(its, torch.Tensor):
        return f"{type(mine).__name__} on the host, {type(its).__name__} here"
    if not isinstance(mine, torch.Tensor):
        return ""
    looks = [(tuple(one.shape), one.dtype, one.layout, one.requires_grad) for one in (mine, its)]
    if looks[0] != looks[1]:
        return f"{looks[0]} on the host, {looks[1]} here"
    if its.device.type == "cpu":
        return "it is on the host"
    if by_number:
        relative, absolute = _CLOSE.get(mine.dtype, (None, None))
        # (PyTorch takes compressed tensors of inference mode for written to, outside of it.)
        with torch.inference_mode():
            dense = [one.detach().to("cpu").to_dense() for one in (its, mine)]
        try:
            torch.testing.assert_close(*dense, equal_nan=True, rtol=relative, atol=absolute)
        except AssertionError as error:
            return " ".join(str(error).split())[:200]
    return ""


if __name__ == "__main__":
    main()
