"""What the virtual GPU refuses, in the words and with the errors that a program or its author can act on."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from gpumem_magic.units import counted


class CannotRun(NotImplementedError):
    """An operator that cannot be emulated."""


class DeviceGone(RuntimeError):
    """A tensor of a virtual device was used after the device had been turned off."""


def cannot_run(func: Any, reason: str) -> CannotRun:
    """The error for an operator that cannot be emulated: which, why, and what to do."""
    if is_foreign(func):
        return CannotRun(
            f"the virtual GPU cannot run {func}, a library's own kernel ({reason}). Say what it returns with "
            f'gpumem_magic.register_kernel("{func._schema.name}", rule), or run this line on a real GPU.'
        )
    return CannotRun(
        f"the virtual GPU cannot run {func}: its result depends on values, or it has no shape rule ({reason}). Run this line on "
        "the host, or on a real GPU."
    )


def no_rule_for_sparse(func: Any) -> CannotRun:
    """The same where only its sparse arguments are in the way."""
    return CannotRun(
        f"the virtual GPU cannot run `{func}` on a sparse tensor: it has no rule for its memory. Give it a dense one "
        "(`.to_dense()`), or run this line on the host, or on a real GPU."
    )


def is_foreign(func: Any) -> bool:
    return getattr(func, "namespace", "aten") not in ("aten", "prims", "prim", "c10d", "_c10d_functional")


def refuse_device(index: int, count: int) -> NoReturn:
    """The error that CUDA raises for a number that no device has, and how to have that device. count: how many there are."""
    more = f"; turn on as many as it takes, as with `{index + 1}xT4`" if index >= 0 else ""
    raise torch.AcceleratorError(  # what 2.8 and newer raise
        f"CUDA error: invalid device ordinal (the virtual machine has {counted(count, 'device')} and no cuda:{index}{more})"
    )


def refuse_fork() -> NoReturn:
    """The error that CUDA raises in a child process which was forked after its first use."""
    raise RuntimeError(
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method"
    )


def refuse_to_hold(kind: str, instead: str = "dense (padded) or sparse_coo tensors") -> NoReturn:
    raise NotImplementedError(
        f"the virtual GPU cannot hold {kind}. Use {instead} there, or run this line on a real GPU."
    )
