"""Samples of PyTorch's own tests (its OpInfos), made once on the host: python samples.py FILE < JSON.

JSON: {"only": [TEXT, ...] or null, "most": so many samples of an operator and a type}. Both sides then run the same samples. It
needs `expecttest`, as PyTorch's tests do, in both environments.
"""

from __future__ import annotations

import importlib
import json
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree

TYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
# How many elements come back is in the values, which no kernel makes; the samples of the last take minutes.
LEFT_OUT = {"nonzero", "argwhere", "unique", "masked_select", "unique_consecutive", "combinations", "grid_sampler_3d"}


def database() -> list[Any]:
    """PyTorch's list of operators. CUDA is not begun by importing it: each case's process begins it."""
    asked = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    finally:
        torch.cuda.is_available = asked
    return list(op_db)


def main(out: str) -> None:
    asked = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    groups = []
    for operator in database():
        name = operator.formatted_name
        if operator.name in LEFT_OUT or (asked["only"] and not any(text in name for text in asked["only"])):
            continue
        for dtype in TYPES:
            if dtype in operator.supported_dtypes("cuda"):
                found = list(drawn(operator, dtype, asked["most"]))
                if found:
                    groups.append((name, str(dtype).removeprefix("torch."), found))
    with open(out, "wb") as file:
        pickle.dump(groups, file)


def drawn(operator: Any, dtype: torch.dtype, most: int) -> Iterable[tuple[bytes, bool]]:
    """Pickled arguments of a sample, and whether its gradients are asked for. What cannot be pickled or made here is left out."""
    gradients = dtype in operator.supported_backward_dtypes("cuda") and operator.supports_autograd
    torch.manual_seed(0)
    random.seed(0)
    try:
        samples = iter(operator.sample_inputs("cpu", dtype, requires_grad=gradients))
        for _, sample in zip(range(most), samples, strict=False):
            yield pickle.dumps(_pytree.tree_map(packed, (sample.input, sample.args, sample.kwargs))), gradients
    except Exception:
        return


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


def call(operator: Callable[..., Any], sample: bytes) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """The call of a sample whose tensors are on the device, and the gradients of its result."""
    given, args, kwargs = _pytree.tree_map(on_the_device, pickle.loads(sample))
    leaves = [x for x in _pytree.tree_leaves((given, args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]

    def gradients(result: Any) -> Any:
        made = [x for x in _pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
        return made and torch.autograd.grad(made, leaves, [torch.ones_like(x) for x in made], allow_unused=True)

    return lambda: operator(given, *args, **kwargs), gradients


if __name__ == "__main__":
    # (Under its own name, by which what it pickles is read.)
    importlib.import_module("samples").main(*sys.argv[1:])
