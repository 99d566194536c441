"""The samples of PyTorch's own tests (OpInfo, ModuleInfo, OptimizerInfo): does the virtual GPU give what the host gives?

    python benchmarks/samples_of_pytorch.py [--card A100] [--values real] [--types bfloat16 ...] [--only TEXT ...]
        [--ways calls inference transforms layers optimizers]

Every operator of PyTorch's list runs on its samples in seven types, from the same seeds. *calls* are the call, its gradient and
the call in place; *inference* the call in inference mode; *transforms* tangents, `vmap`, gradients for each sample and second
derivatives (float64). *layers* are PyTorch's modules, in training and not: moved, called, their gradients, what they keep, and in
inference mode. *optimizers* make four steps in each of their ways, with each option. Compared are numbers (with --values
real), shapes, types, whether a gradient is wanted, and the class of an error. What differs is printed, and the last line counts.
Some of it always will: memory that nobody wrote, what CUDA refuses or gives in another size, samples that name the host as their
device. PyTorch's tests need `expecttest`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
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
# Where kernels add up in another order, or round more often.
_CLOSE = {
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (5e-2, 5e-2),
}
_Way = tuple[str, Callable[[], Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--card", default="A100")
    parser.add_argument("--values", default="real", choices=("real", "auto", "stand-in"))
    parser.add_argument("--ways", nargs="+", default=["calls"], choices=sorted(_ALL))
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="of torch, like bfloat16; transforms have their own")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="those with a TEXT in their name")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _ring)
    types = [getattr(torch, name) for name in given.types or ()] or _TYPES
    gpu.turn_on(f"{given.card},values={given.values}")
    began, calls, others = time.monotonic(), 0, 0
    for kind in given.ways:
        of, compared = _ALL[kind]
        for name, entry in samples.database(of).items():
            if given.only and not any(text in name for text in given.only):
                continue
            for what, difference in compared(entry, kind, types, given.values == "real"):
                calls += 1
                if difference:
                    others += 1
                    print(f"{name} {what}: {difference}", flush=True)
    print(f"{calls:,} calls in {time.monotonic() - began:.0f} s: {others:,} differ")


def _ring(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def _compared(operator: Any, kind: str, types: Iterable[torch.dtype], by_number: bool) -> Iterator[tuple[str, str]]:
    """What was run of an operator, and how the device's result differs from the host's; nothing where it does not."""
    for dtype in (torch.float64,) if kind == "transforms" else types:
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
        return _derived(result, _tensors(values))

    yield "call", forward
    if tracked:
        yield "gradient", backward
    if operator.inplace_variant:
        copies = _pytree.tree_map(lambda one: one.detach().clone() if isinstance(one, torch.Tensor) else one, values)
        yield "in place", lambda: operator.inplace_variant(copies[0], *copies[1], **copies[2])


def _derived(result: Any, given: list[torch.Tensor]) -> Any:
    outs = [one for one in _tensors(result) if one.requires_grad]
    leaves = [one for one in given if one.requires_grad and one.is_leaf]
    if not outs or not leaves:
        return None
    return torch.autograd.grad(outs, leaves, [torch.ones_like(one) * 0.5 for one in outs], allow_unused=True)


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


def _layers(module: Any, kind: str, types: Iterable[torch.dtype], by_number: bool) -> Iterator[tuple[str, str]]:
    for dtype, training in itertools.product(types, (True, False)):
        if not dtype.is_floating_point:
            continue
        torch.manual_seed(0)
        random.seed(0)
        drawn: list[Any] = []
        with contextlib.suppress(Exception):
            given = module.module_inputs_func(module, device="cpu", dtype=dtype, requires_grad=True, training=training)
            drawn.extend(itertools.islice(given, _MANY))
        for number, sample in enumerate(drawn):
            if sample.forward_input is None:
                continue
            made = sample.constructor_input
            try:
                on_host = module.module_cls(*made.args, **made.kwargs).to(dtype).train(training)
            except RuntimeError:
                continue
            on_card = copy.deepcopy(on_host).to("cuda")
            values = (sample.forward_input.args, sample.forward_input.kwargs)
            both = [_of_layer(on_host, _moved(values, "cpu")), _of_layer(on_card, _moved(values, "cuda"))]
            for (way, its_call), (_, our_call) in zip(*both, strict=True):
                its, ours = _run(its_call), _run(our_call)
                if not isinstance(its, TimeoutError):
                    word = f"{str(dtype).removeprefix('torch.')} {'training' if training else 'evaluation'} {number}"
                    yield f"{way} {word}", _difference(its, ours, by_number)
                if isinstance(its, Exception) or isinstance(ours, Exception):
                    break


def _of_layer(layer: torch.nn.Module, values: Any) -> Iterator[_Way]:
    result: list[Any] = []

    def forward() -> Any:
        result[:] = [layer(*values[0], **values[1])]
        return result[0]

    def inference() -> Any:
        with torch.inference_mode():
            return layer(*values[0], **values[1])

    yield "call", forward
    yield "gradient", lambda: _derived(result, [*layer.parameters(), *_tensors(values)])
    yield "state", lambda: list(layer.state_dict().values())
    yield "inference", inference


_SIZES = ((10, 10), (10,), (3, 7), (1,))
_STEPS = 4


def _optimizers(optimizer: Any, kind: str, types: Iterable[torch.dtype], by_number: bool) -> Iterator[tuple[str, str]]:
    kinds = {"foreach", "fused"}.intersection(optimizer.supported_impls)
    # (Options that only a device has, as `capturable`, do not change what comes out.)
    for number, sample in enumerate(optimizer.optim_inputs_func("cuda")):
        for dtype, way in itertools.product(types, ("", *sorted(kinds))):
            if not (dtype.is_floating_point or dtype.is_complex):
                continue
            options = {**sample.kwargs, **dict.fromkeys(kinds, False), **({way: True} if way else {})}
            its, ours = (_run(partial(_stepped, optimizer, options, dtype, device)) for device in ("cpu", "cuda"))
            word = f"{way or 'loop'} {str(dtype).removeprefix('torch.')} {number}"
            yield word, _difference(its, ours, by_number)


def _stepped(optimizer: Any, options: dict[str, Any], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """The parameters after steps with gradients that are drawn on the host."""
    parameters = [torch.nn.Parameter(torch.randn(*size, dtype=dtype).to(device)) for size in _SIZES]
    own = _moved(options, device)
    if device == "cpu" and own.pop("capturable", False):
        own = _pytree.tree_map(lambda value: value.item() if isinstance(value, torch.Tensor) else value, own)
    steps = optimizer.optim_cls(parameters, **own)

    def loss() -> torch.Tensor:
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, dtype=dtype).to(device)
        return torch.ones((), device=device)

    for _ in range(_STEPS):
        loss()
        steps.step(*[loss][: optimizer.step_requires_closure])
    return [parameter.detach() for parameter in parameters]


_ALL: dict[str, tuple[str, Callable[..., Iterator[tuple[str, str]]]]] = {
    **dict.fromkeys(_WAYS, ("operators", _compared)),
    "layers": ("modules", _layers),
    "optimizers": ("optimizers", _optimizers),
}


if __name__ == "__main__":
    main()
