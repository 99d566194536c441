"""What a build for the host does not know of the libraries that the card's build comes with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.backends.cuda
import torch.backends.cudnn

# (It warns while it is imported where a build for a card lacks Triton; a build for the host needs none.)
import torch.utils.flop_counter
import torch.version

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.card.generations import parse_version, wheels


def install(patches: Patches) -> None:
    """CUDA's and cuDNN's versions are those of PyTorch's wheel of the installed version. A build for a card says its own.

    `torch.backends.cuda.is_built` stays as it is: PyTorch's Python imports by it what only a build for a card has.
    """
    its = None if torch.version.hip or torch.version.cuda else wheels(parse_version(torch.__version__))
    if its is not None:
        patches.set(torch.version, "cuda", its.cuda)
        patches.set(torch.backends.cudnn, "version", lambda: its.cudnn)
        patches.set(torch.backends.cudnn, "is_available", lambda: True)
        ask = torch.backends.cuda.preferred_linalg_library
        patches.set(torch.backends.cuda, "preferred_linalg_library", _preferred(ask))


def _preferred(ask: Callable[..., Any]) -> Callable[..., Any]:
    """A build for the host has neither MAGMA nor cuSOLVER, and refuses to prefer one. Which it is changes no count."""
    chosen: list[Any] = []

    @functools.wraps(ask)
    def preferred_linalg_library(backend: Any = None) -> Any:
        kinds = type(ask())
        wanted = getattr(kinds, backend.capitalize(), None) if isinstance(backend, str) else backend
        if backend is None or wanted in (kinds.Magma, kinds.Cusolver):
            chosen[:] = [wanted] if wanted is not None else chosen
            return chosen[0] if chosen else ask()
        chosen.clear()
        return ask(backend)

    return preferred_linalg_library
