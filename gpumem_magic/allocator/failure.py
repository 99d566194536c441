"""Out of memory: the facts of a failed request, and the words that each PyTorch puts them in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpumem_magic.units import allocator_text

# PyTorch refuses this much at once, before it looks at any device.
ONE_EXABYTE = 1 << 60

_MANAGEMENT = "See documentation for Memory Management"
_OLD_PAGE = "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
_NEW_PAGE = (
    "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)


@dataclass(eq=False, kw_only=True)
class DeviceOutOfMemory(Exception):
    """The allocator found no memory for a request. All figures are bytes, taken when it gave up.

    requested: what the program asked for; rounded: that as a block; segment_size: what the driver was asked for.
    total, free: the whole device's; limit: what the memory fraction allows, None without one; largest_free: the largest
    cached free block on the request's stream (in either pool); outside: in use beside the allocator. private_free: free
    blocks of private pools, which the request could not use.
    """

    requested: int
    rounded: int
    segment_size: int
    device: int
    total: int
    free: int
    allocated: int
    reserved: int
    limit: int | None
    largest_free: int
    outside: int
    private_free: int = 0

    def __str__(self) -> str:
        return self.message("2.13")

    def message(self, version: str) -> str:
        """The error's text in PyTorch `version`, without the driver's lines about processes. Raises as `oom_text` does."""
        return oom_text(self, version)


def oom_text(
    failure: DeviceOutOfMemory,
    torch_version: str,
    *,
    process_id: int | None = None,
    process_bytes: int | None = None,
    others: Mapping[int, int] | None = None,
) -> str:
    """What PyTorch `torch_version` ("1.8" to "2.13.0+cpu" and later) writes for a failure.

    process_bytes: this process's bytes on the device as the driver sees them, None where it can't tell; others: process id
    -> bytes. From 2.1 on these have a sentence each, in the order of process ids. Raises ValueError for a text that names
    no version, or one older than 1.8.
    """
    if failure.requested >= ONE_EXABYTE:
        return "CUDA out of memory. Tried to allocate more than 1EB memory."
    version = _version(torch_version)
    if version < (2, 1):
        return _old_text(failure, hint=version >= (1, 10))
    return _new_text(failure, version, _process_text(process_id, process_bytes, others or {}))


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"not a PyTorch version: {text!r}")
    version = int(match[1]), int(match[2])
    if version < (1, 8):
        raise ValueError(f"the text of PyTorch {text} is not known; the oldest that is known is 1.8")
    return version


def _old_text(failure: DeviceOutOfMemory, *, hint: bool) -> str:
    allowed = "" if failure.limit is None else f"{allocator_text(failure.limit)} allowed; "
    text = (
        f"CUDA out of memory. Tried to allocate {allocator_text(failure.segment_size)} (GPU {failure.device}; "
        f"{allocator_text(failure.total)} total capacity; {allocator_text(failure.allocated)} already allocated; "
        f"{allocator_text(failure.free)} free; {allowed}{allocator_text(failure.reserved)} reserved in total by PyTorch)"
    )
    if hint:
        text += (
            " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.  "
            f"{_MANAGEMENT} and PYTORCH_CUDA_ALLOC_CONF"
        )
    return text


def _new_text(failure: DeviceOutOfMemory, version: tuple[int, int], processes: str) -> str:
    # 2.1's misspelling is kept: people search for it.
    capacity = "capacty" if version == (2, 1) else "capacity"
    allowed = ""
    if failure.limit is not None and version >= (2, 9):
        allowed = f"{allocator_text(failure.limit)} allowed; "
    private = failure.private_free
    # PyTorch adds the free bytes of private pools to what it calls allocated.
    pools = f"with {allocator_text(private)} allocated in private pools (e.g., CUDA Graphs), " if private else ""
    return (
        f"CUDA out of memory. Tried to allocate {allocator_text(failure.segment_size)}. GPU {failure.device} has a total "
        f"{capacity} of {allocator_text(failure.total)} of which {allocator_text(failure.free)} is free. {processes}{allowed}"
        f"Of the allocated memory {allocator_text(failure.allocated + private)} is allocated by PyTorch, {pools}and "
        f"{allocator_text(failure.reserved - failure.allocated - private)} is reserved by PyTorch but unallocated. "
        f"If reserved but unallocated memory is large try setting {_advice(version)}"
    )


def _advice(version: tuple[int, int]) -> str:
    if version == (2, 1):
        return f"max_split_size_mb to avoid fragmentation.  {_MANAGEMENT} and PYTORCH_CUDA_ALLOC_CONF"
    # The variable's name and the page changed twice: 2.9 and 2.10 name the short variable, later ones the long one again.
    variable = "PYTORCH_ALLOC_CONF" if (2, 9) <= version < (2, 11) else "PYTORCH_CUDA_ALLOC_CONF"
    page = _OLD_PAGE if version < (2, 11) else _NEW_PAGE
    return f"{variable}=expandable_segments:True to avoid fragmentation.  {_MANAGEMENT}  {page}"


def _process_text(process_id: int | None, process_bytes: int | None, others: Mapping[int, int]) -> str:
    lines = [
        (number, f"Process {number} has {allocator_text(size)} memory in use. ")
        for number, size in sorted(others.items())
    ]
    if process_bytes is not None:
        own = f"Including non-PyTorch memory, this process has {allocator_text(process_bytes)} memory in use. "
        place = sum(process_id is None or number < process_id for number, _ in lines)
        lines.insert(place, (-1, own))
    return "".join(line for _, line in lines)
