"""Process groups for which a program asked for NCCL, which needs GPUs: gloo stands for it, and the program does not notice."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

import torch


class AskedForNccl:
    """The groups, by name, and what takes the place of the functions that make them and ask about them."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._last_barrier: torch.Tensor | None = None

    def has(self, group: Any) -> bool:
        """group: None is the program's first."""
        one = torch.distributed.group.WORLD if group is None else group
        return getattr(one, "group_name", "") in self._names

    def with_gloo(self, original: Any) -> Any:
        signature = inspect.signature(original)
        first = original.__name__ == "init_process_group"

        @functools.wraps(original)
        def instead(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            backend = given.arguments.get("backend")
            if first:
                self._names.clear()
            ours = backend is None or "nccl" in str(backend).lower()
            if not ours:
                return original(*args, **kwargs)
            if backend is not None:
                warnings.warn("a virtual GPU has no NCCL: gloo is used instead", stacklevel=3)
            if backend is not None or first:
                given.arguments["backend"] = "gloo"
            # Gloo has no device to connect before it is used, and no options of NCCL's.
            given.arguments.pop("device_id", None)
            given.arguments.pop("pg_options", None)
            made = original(*given.args, **given.kwargs)
            group = torch.distributed.group.WORLD if first else made
            inherits = backend is None and not first
            if isinstance(group, torch.distributed.ProcessGroup) and (not inherits or self.has(None)):
                self._names.add(group.group_name)
            return made

        return instead

    def as_asked(self, original: Any) -> Any:
        """A program takes its way by the backend's name (and so does PyTorch, outside of its module for groups): that of a
        card."""

        @functools.wraps(original)
        def get_backend(group: Any = None) -> Any:
            found = original(group)
            return torch.distributed.Backend.NCCL if self.has(group) else found

        return get_backend

    def named(self, original: Any) -> Any:
        return lambda group: "nccl" if group.group_name in self._names else original(group)

    def refusing(self, original: Any) -> Any:
        """NCCL has none, which PyTorch says where gloo does not stand for it."""

        @functools.wraps(original)
        def monitored_barrier(group: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self.has(group):
                raise ValueError("monitored_barrier is only implemented for GLOO backend.")
            return original(group, *args, **kwargs)

        return monitored_barrier

    def meeting(self, original: Any) -> Any:
        """A barrier of NCCL's is a sum of one number, which is made for it; which device is meant says another tensor, kept until
        the next barrier (`ProcessGroup.hpp`, `ProcessGroupNCCL.cpp`; as an H100 was asked for with 2.11)."""

        @functools.wraps(original)
        def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
            if self.has(group):
                device = torch.device("cuda", device_ids[0] if device_ids else torch.cuda.current_device())
                self._last_barrier = torch.empty(1, dtype=torch.uint8, device=device)
                torch.zeros(1, device=device)
            return original(group, async_op, device_ids)

        return barrier
