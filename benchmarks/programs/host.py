"""Runs a script on the host: what it asks ``cuda`` for, the CPU does.

    python host.py SCRIPT ARGUMENTS

A program that asks whether there is a GPU hears that there is none; one that says ``.cuda()`` regardless runs all the same.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class OnHost(TorchFunctionMode):
    """A tensor's way to a device leads nowhere, and devices that calls name are the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        # (A size stays one: `tensor.new` takes a tuple of numbers for elements.)
        args, kwargs = tree_map(_on_host, (tuple(args), dict(kwargs or {})), is_leaf=_is_size)
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int):
            args = (args[0], torch.device("cpu"), *args[2:])
        return func(*args, **kwargs)


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    return value


def main() -> None:
    for name in (
        "synchronize",
        "set_device",
        "empty_cache",
        "manual_seed",
        "manual_seed_all",
        "reset_peak_memory_stats",
    ):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "current_device",
    ):
        setattr(torch.cuda, name, lambda *args, **kwargs: 0)
    for name in ("Float", "Long", "Int", "Byte", "Bool", "Half", "Double"):
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    # (The compiler would look for this module's names in the program, which is `__main__` then.)
    torch.compiler.set_stance("force_eager")
    del sys.argv[0]
    sys.path[0] = sys.argv[0].rpartition("/")[0]
    with OnHost():
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
