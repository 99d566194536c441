"""What a build for the host does not know of the libraries that the card's build comes with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
        # (Which of them it is changes no count.)
        preferred = preferring(torch.backends.cuda.preferred_linalg_library, ("Magma", "Cusolver"))
        patches.set(torch.backends.cuda, "preferred_linalg_library", preferred)


def preferring(ask: Callable[..., Any], lacking: Sequence[str], tell: Callable[[Any], None] | None = None) -> Any:
    """A function that says and sets which library is preferred, where a build for the host refuses those that it lacks.

    tell: called with what is preferred from now on.
    """
    chosen: list[Any] = []

    @functools.wraps(ask)
    def preferred(backend: Any = None) -> Any:
        if backend is None:
            return chosen[0] if chosen else ask()
        kinds = type(ask())
        wanted = getattr(kinds, backend.capitalize(), None) if isinstance(backend, str) else backend
        is_lacking = wanted in [getattr(kinds, name) for name in lacking]
        answer = wanted if is_lacking else ask(backend)
        chosen[:] = [wanted] if is_lacking else []
        if tell is not None:
            tell(answer)
        return answer

    return preferred
