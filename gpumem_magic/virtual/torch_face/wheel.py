"""What a build for the host does not know of the libraries that the card's build comes with."""

from __future__ import annotations

import torch
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
