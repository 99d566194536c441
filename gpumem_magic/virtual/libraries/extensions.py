"""Kernels in CUDA that a program has built while it runs (`load` and `load_inline` of `torch.utils.cpp_extension`,
`torch.cuda._compile_kernel`).

A build of PyTorch for the host has none of the libraries that they are linked with: a compiler would work for minutes first,
and its error says nothing of a virtual GPU. Extensions in C++ are built as ever.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.backends.cuda

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.refusals import CannotRun

# PyTorch 2.9 and newer have the first, by a private name.
_TAKING_TEXT = ("_compile_kernel", "compile_kernel")


class Extensions:
    """refused: the names of those that were not built, which a program may do without."""

    def __init__(self) -> None:
        self.refused: set[str] = set()

    def prepare(self, module: ModuleType, patches: Patches) -> None:
        build: Any = getattr(module, "_jit_compile", None)
        is_cuda_file: Any = getattr(module, "_is_cuda_file", None)
        if build is None or is_cuda_file is None or torch.backends.cuda.is_built():
            return
        signature = inspect.signature(build)

        def instead(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            in_cuda = given.get("with_cuda")
            if in_cuda is None:
                in_cuda = any(map(is_cuda_file, given["sources"]))
            if in_cuda:
                self._refuse(given["name"], "kernels of ")
            return build(*args, **kwargs)

        patches.set(module, "_jit_compile", instead)

    def install(self, patches: Patches) -> None:
        """What takes a kernel's text would ask for the compiler, and then for the driver, of a card."""
        for name in _TAKING_TEXT:
            if (build := getattr(torch.cuda, name, None)) is not None:
                patches.set(torch.cuda, name, self._instead_of(build))

    def _instead_of(self, build: Any) -> Any:
        signature = inspect.signature(build)

        def instead(*args: Any, **kwargs: Any) -> NoReturn:
            self._refuse(signature.bind(*args, **kwargs).arguments["kernel_name"], "kernel ")

        return instead

    def _refuse(self, name: str, what: str) -> NoReturn:
        self.refused.add(name)
        raise CannotRun(
            f"the virtual GPU cannot run the CUDA {what}`{name}`, which is not built: take the program's way without it (in "
            "plain PyTorch), if it has one, or run it on a real GPU"
        )
