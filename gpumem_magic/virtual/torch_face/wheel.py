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
        patches.entry(torch.backends.cudnn.set_flags.__globals__, "is_available", lambda: True)
        _how_many_plans(patches)
        major, minor = parse_version(its.cuda)
        patches.set(torch._C, "_cuda_getCompiledVersion", lambda: 1000 * major + 10 * minor)
        # (Which of them it is changes no count.)
        preferred = preferring(torch.backends.cuda.preferred_linalg_library, ("Magma", "Cusolver"))
        patches.set(torch.backends.cuda, "preferred_linalg_library", preferred)


def _how_many_plans(patches: Patches) -> None:
    """`torch.backends.cudnn.benchmark_limit`, of which a build for the host has not even the name. Which plans are tried, and
    what they take, is no matter of how many (see `operators.cudnn`)."""
    limit = [_PLANS_TRIED]

    def set_limit(value: int) -> None:
        limit[0] = int(value)

    patches.set(torch._C, "_cuda_get_cudnn_benchmark_limit", lambda: limit[0])
    patches.set(torch._C, "_cuda_set_cudnn_benchmark_limit", set_limit)
    shown = torch.backends.ContextProp(lambda: limit[0], set_limit)
    patches.set(type(torch.backends.cudnn), "benchmark_limit", shown)


_PLANS_TRIED = 10
"""``Context.h``: ``benchmark_limit_cudnn``."""


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
