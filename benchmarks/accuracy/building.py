"""Making models for a virtual device cheaply: their values are never read, so they are never written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

_FILLERS = (
    "uniform_", "normal_", "trunc_normal_", "zeros_", "ones_", "constant_", "xavier_uniform_", "xavier_normal_",
    "kaiming_uniform_", "kaiming_normal_", "orthogonal_",
)  # fmt: skip


@contextmanager
def unfilled() -> Iterator[None]:
    """Inside, `torch.nn.init` leaves tensors as they are: pages that nobody writes cost no host memory."""

    def leave(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    with ExitStack() as stack:
        for name in _FILLERS:
            stack.enter_context(mock.patch.object(torch.nn.init, name, leave))
        try:
            from transformers.initialization import no_init_weights
        except ImportError:  # plain torch models need no transformers
            pass
        else:
            stack.enter_context(no_init_weights())
        yield
