"""Samples of PyTorch's own tests, made once on the host: python samples.py FILE < JSON.

JSON: {"of": "operators", "modules" or "optimizers", "only": [TEXT, ...] or null, "most": so many samples of one of them and a
type, "seed": which samples, and their values, "types": [NAME, ...] of operators or null for those below}. Both sides then run
the same samples. It needs `expecttest`, as PyTorch's tests do, in both environments.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree

TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
# How many elements come back is in the values, which no kernel makes; the samples of the last take minutes.
LEFT_OUT = {"nonzero", "argwhere", "unique", "masked_select", "unique_consecutive", "combinations", "grid_sampler_3d"}
# Some operators have hundreds, and making them takes longer than running some.
FIRST = 12
# A name, a type, and samples of it: pickled, each with a word whether gradients are asked for.
Group = tuple[str, str, list[tuple[bytes, bool]]]
# What is run one after the other, by the way it is run; what it gave is sent back.
Ways = Generator[tuple[str, Callable[[], Any]], Any, None]


def database(of: str) -> dict[str, Any]:
    """PyTorch's list of operators, modules or optimizers, by name, as where there is no GPU."""
    asked = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        if of == "operators":
            from torch.testing._internal.common_methods_invocations import op_db

            return {operator.formatted_name: operator for operator in op_db}
        if of == "modules":
            from torch.testing._internal.common_modules import module_db

            return {module.formatted_name: module for module in module_db}
        try:
            from torch.testing._internal.common_optimizers import optim_db
        except ModuleNotFoundError:
            return _optimizers_before_they_were_listed()
        return {optimizer.optim_cls.__name__: optimizer for optimizer in optim_db}
    finally:
        torch.cuda.is_available = asked


def _optimizers_before_they_were_listed() -> dict[str, Any]:
    """Up to 2.2: what running samples needs to know of each, which another version has drawn."""
    kinds = (kind for kind in vars(torch.optim).values() if isinstance(kind, type))
    return {
        kind.__name__: SimpleNamespace(optim_cls=kind, step_requires_closure=kind is torch.optim.LBFGS)
        for kind in kinds
        if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }


def main(out: str) -> None:
    asked = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    groups = []
    types = [getattr(torch, name) for name in asked.get("types") or ()] or TYPES
    draw = {**DRAWN, "operators": partial(of_operator, types=types)}[asked["of"]]
    for name, entry in database(asked["of"]).items():
        if asked["only"] and not any(text in name for text in asked["only"]):
            continue
        torch.manual_seed(asked["seed"])
        random.seed(asked["seed"])
        for group, dtype, found in draw(name, entry):
            few = found if len(found) <= asked["most"] else random.sample(found, asked["most"])
            if few:
                groups.append((group, str(dtype).removeprefix("torch."), few))
    with open(out, "wb") as file:
        pickle.dump(groups, file)


def of_operator(
    name: str, operator: Any, types: Sequence[torch.dtype] = TYPES
) -> Iterator[tuple[str, torch.dtype, list[tuple[bytes, bool]]]]:
    for dtype in types if operator.name not in LEFT_OUT else ():
        if dtype in operator.supported_dtypes("cuda"):
            gradients = dtype in operator.supported_backward_dtypes("cuda") and operator.supports_autograd
            samples = made(partial(operator.sample_inputs, "cpu", dtype, requires_grad=gradients))
            yield name, dtype, pickled(((one.input, one.args, one.kwargs), gradients) for one in samples)


def of_module(name: str, module: Any) -> Iterator[tuple[str, torch.dtype, list[tuple[bytes, bool]]]]:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for training in (True, False):
            draw = partial(module.module_inputs_func, module, device="cpu", dtype=dtype, requires_grad=True)
            samples = made(partial(draw, training=training))
            calls = [(one.constructor_input, one.forward_input) for one in samples if one.forward_input is not None]
            given = (((*(part for one in both for part in (one.args, one.kwargs)),), True) for both in calls)
            yield f"{name}.{'train' if training else 'eval'}", dtype, pickled(given)


def of_optimizer(name: str, optimizer: Any) -> Iterator[tuple[str, torch.dtype, list[tuple[bytes, bool]]]]:
    samples = made(partial(optimizer.optim_inputs_func, "cuda"))
    kinds = {"foreach", "fused"}.intersection(optimizer.supported_impls)
    for kind in ("", *sorted(kinds)):
        given = [{**one.kwargs, **dict.fromkeys(kinds, False), **({kind: True} if kind else {})} for one in samples]
        for dtype in (torch.float32, torch.bfloat16):
            yield f"{name}.{kind or 'loop'}", dtype, pickled((one, False) for one in given)


DRAWN = {"operators": of_operator, "modules": of_module, "optimizers": of_optimizer}


def made(draw: Callable[[], Any]) -> list[Any]:
    """The first samples that can be made here."""
    found: list[Any] = []
    with contextlib.suppress(Exception):
        found.extend(itertools.islice(draw(), FIRST))
    return found


def pickled(samples: Any) -> list[tuple[bytes, bool]]:
    """Without those that cannot be pickled."""
    found = []
    for values, gradients in samples:
        try:
            found.append((pickle.dumps(_pytree.tree_map(packed, values)), gradients))
        except Exception:
            continue
    return found


class Packed:
    """A tensor as bytes that another version of PyTorch reads: its storage, and how it lies there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        plain = tensor.detach()
        self.dtype = str(plain.dtype).removeprefix("torch.")
        self.lies = (tuple(plain.size()), tuple(plain.stride()), plain.storage_offset())
        self.requires_grad = tensor.requires_grad
        self.storage = bytes(plain.untyped_storage())
        if plain.is_conj() or plain.is_neg():
            raise TypeError("a view that is conjugated or negated")

    def unpacked(self) -> torch.Tensor:
        dtype = getattr(torch, self.dtype)
        filled = torch.frombuffer(bytearray(self.storage), dtype=torch.uint8) if self.storage else torch.empty(0)
        host = filled.view(dtype) if self.storage else filled.to(dtype)
        return host.to("cuda").as_strided(*self.lies).requires_grad_(self.requires_grad)


def packed(value: Any) -> Any:
    return Packed(value) if isinstance(value, torch.Tensor) else value


def on_the_device(value: Any) -> Any:
    if isinstance(value, Packed):
        return value.unpacked()
    return "cuda" if value == "cpu" or value == torch.device("cpu") else value


def ways(of: str, entry: Any, name: str, dtype: str, sample: bytes, gradients: bool) -> Ways:
    """What is run of a sample whose tensors are on the device, one after the other."""
    return {"operators": of_call, "modules": of_layer, "optimizers": of_steps}[of](
        entry, name, dtype, sample, gradients
    )


def of_call(operator: Any, name: str, dtype: str, sample: bytes, gradients: bool) -> Ways:
    def given() -> tuple[Any, Any, Any]:
        return _pytree.tree_map(on_the_device, pickle.loads(sample))

    first, args, kwargs = given()
    result = yield "forward", lambda: operator.op(first, *args, **kwargs)
    if gradients:
        leaves = tensors_with_gradients((first, args, kwargs))
        yield "backward", lambda: derived(result, leaves)
        if operator.supports_gradgrad:
            result = None
            result = operator.op(first, *args, **kwargs)
            yield "twice", lambda: twice(result, leaves)
    with torch.no_grad():
        if operator.inplace_variant:
            first, args, kwargs = given()
            yield "in-place", lambda: operator.inplace_variant(first, *args, **kwargs)
        if operator.supports_out:
            first, args, kwargs = given()
            out = _pytree.tree_map(torch.empty_like, operator.op(first, *args, **kwargs))
            yield "out", lambda: operator.op(first, *args, **kwargs, out=out)


def of_layer(module: Any, name: str, dtype: str, sample: bytes, gradients: bool) -> Ways:
    args, kwargs, given, named = _pytree.tree_map(on_the_device, pickle.loads(sample))
    layer = module.module_cls(*args, **kwargs).to("cuda", getattr(torch, dtype))
    layer.train(name.endswith(".train"))
    result = yield "forward", lambda: layer(*given, **named)
    leaves = [*layer.parameters(), *tensors_with_gradients((given, named))]
    yield "backward", lambda: derived(result, leaves)
    result = None
    with torch.inference_mode():
        yield "inference", lambda: layer(*given, **named)
    with torch.autocast("cuda"):
        result = yield "autocast", lambda: layer(*given, **named)
    yield "autocast-backward", lambda: derived(result, leaves)


def of_steps(optimizer: Any, name: str, dtype: str, sample: bytes, gradients: bool) -> Ways:
    options = _pytree.tree_map(on_the_device, pickle.loads(sample))
    parameters = [
        torch.nn.Parameter(torch.zeros(*size, dtype=getattr(torch, dtype), device="cuda"))
        for size in ((100, 100), (100,), (3, 7), (1,))
    ]
    made = optimizer.optim_cls(parameters, **options)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for step in ("first", "second", "third"):
        yield step, lambda: made.step(*[lambda: 0.0][: optimizer.step_requires_closure])


def tensors_with_gradients(values: Any) -> list[torch.Tensor]:
    return [one for one in _pytree.tree_leaves(values) if isinstance(one, torch.Tensor) and one.requires_grad]


def derived(result: Any, leaves: list[torch.Tensor]) -> Any:
    made = tensors_with_gradients(result)
    return made and torch.autograd.grad(made, leaves, [torch.ones_like(one) for one in made], allow_unused=True)


def twice(result: Any, leaves: list[torch.Tensor]) -> Any:
    made = tensors_with_gradients(result)
    ones = [torch.ones_like(one) for one in made]
    first = torch.autograd.grad(made, leaves, ones, allow_unused=True, create_graph=True) if made else ()
    return first, derived(first, leaves)


if __name__ == "__main__":
    # (Under its own name, by which what it pickles is read.)
    importlib.import_module("samples").main(*sys.argv[1:])
