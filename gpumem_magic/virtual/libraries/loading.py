"""Puts rules in force in libraries that are loaded already, and in those that the program imports while the device is on."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from torch.utils._pytree import tree_leaves

from gpumem_magic.failures import swallowed
from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.tensors import VirtualTensor, engine_of

Prepare = Callable[[ModuleType, Patches], None]
Around = Callable[[], AbstractContextManager[None]]


def has_virtual(*arguments: Any) -> bool:
    """Whether a tensor of a virtual device is among the arguments, however deep."""
    return any(isinstance(leaf, VirtualTensor) for leaf in tree_leaves(arguments))


def replace_function(patches: Patches, module: ModuleType, name: str, rule: Callable[..., Any]) -> None:
    """Gives calls with virtual tensors to the rule, under every name that a loaded module has for the function."""
    original = getattr(module, name, None)
    if original is None:
        return

    def instead(*args: Any, **kwargs: Any) -> Any:
        first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, VirtualTensor)), None)
        if first is None:
            return original(*args, **kwargs)
        if engine_of(first).computes:
            engine_of(first).unknown.add(name)
        return values.unknown(rule(*args, **kwargs), args, kwargs)

    for other in list(sys.modules.values()):
        names = getattr(other, "__dict__", None)
        if type(names) is dict:
            for alias in [alias for alias, value in names.items() if value is original]:
                patches.set(other, alias, instead)


class Libraries:
    """The libraries by their module's name, each with the functions that prepare it. A finder of `sys.meta_path`.

    around: by a module's name, in what it is imported.
    """

    def __init__(self, prepare: dict[str, list[Prepare]], around: dict[str, Around]) -> None:
        self._prepare = {**{name: [] for name in around}, **prepare}
        self._around = around
        self._patches: Patches | None = None

    def install(self, patches: Patches) -> None:
        self._patches = patches
        for name in self._prepare:
            module = sys.modules.get(name)
            if module is not None:
                self._loaded(module, name)
        patches.insert(sys, "meta_path", self, 0)
        patches.also_undo(self._forget)

    def _forget(self) -> None:
        self._patches = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Finds what the other finders find; its loader tells us when the module is there."""
        if self._patches is None or name not in self._prepare:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                self._watch(self._patches, spec.loader, name)
                return spec
        return None

    def _watch(self, patches: Patches, loader: Any, name: str) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None or not hasattr(loader, "__dict__"):
            return

        def exec_module(module: ModuleType) -> None:
            with self._around.get(name, nullcontext)():
                execute(module)
            self._loaded(module, name)

        patches.set(loader, "exec_module", exec_module)

    def _loaded(self, module: ModuleType, name: str) -> None:
        if self._patches is None:
            return
        try:
            for prepare in self._prepare[name]:
                prepare(module, self._patches)
        except Exception as error:  # a version that we do not know must not stop the program
            swallowed(error)
            warnings.warn(f"gpumem_magic has no rules for this version of {name}: {error}", stacklevel=2)
