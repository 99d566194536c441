"""``torch.device(0)`` is ``cuda:0`` while the virtual GPU is on, and `torch.device` stays the type that it is.

PyTorch's C++ asks for an accelerator when it is given a bare number, and a build for the CPU has none. Another class under that
name would do, but ``type(d) is torch.device`` would not hold then, and who took the name earlier (``from torch import device``)
would have the old one. So the type itself is called by us: what a class does when it is called is up to its own type, and
`torch.device` gets one that looks at the arguments first. Types made in C cannot be assigned another; the word in which every
object keeps its type (the last of those that all begin with, in CPython 3.10 to 3.14) is written instead.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

from gpumem_magic.looks.tensors import no_functions
from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine import function_modes

_DEVICE = torch.device
# (A type has no further words of its own in front of it: `object` has those that all have.)
_WORD = ctypes.c_void_p.from_address(id(_DEVICE) + object.__basicsize__ - ctypes.sizeof(ctypes.c_void_p))


class _CalledWithNumbers(type):
    """What `torch.device` is an object of, in the place of `type`."""

    # A type's module is asked of its own type first, and would be that of this one.
    __module__ = type.__dict__["__module__"]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) is int:
            args = "cuda", args[0]
        if function_modes.are_on() and sys._getframe(1).f_globals.get("__name__", "").startswith("gpumem_magic."):
            # (C++ asks the program's modes, which have no business with what is made in here.)
            with no_functions():
                return type.__call__(cls, *args, **kwargs)
        return type.__call__(cls, *args, **kwargs)


def install(patches: Patches) -> None:
    before = type(_DEVICE)
    if _WORD.value != id(before):
        return  # another Python than those above; a bare number has PyTorch's own error then

    def put_back() -> None:
        if type(_DEVICE) is _CalledWithNumbers:
            _WORD.value = id(before)

    patches.also_undo(put_back)
    _WORD.value = id(_CalledWithNumbers)
