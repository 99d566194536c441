"""Copies between several virtual devices in one process, which `torch.nn.DataParallel` is made of, and groups of processes.

The names are those of `torch._C` in CUDA builds; CPU builds do not have them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine import exchanged
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.operators import collectives
from gpumem_magic.virtual.torch_face import data_parallel, futures, nccl_calls
from gpumem_magic.virtual.torch_face.nccl_names import AskedForNccl

# What a program is told that asks for the version (PyTorch's own checkpoints do): that of PyTorch 2.9's CUDA builds.
_NCCL = (2, 27, 5)


def install(patches: Patches, engine: Engine) -> None:
    if torch.distributed.is_available():
        patches.attempt(data_parallel.install, engine)
        patches.attempt(_process_groups, engine)
        patches.attempt(_handles, engine)
    nccl_calls.install(patches)
    for name, function in {
        "_broadcast": _broadcast,
        "_broadcast_coalesced": _broadcast_coalesced,
        "_broadcast_out": _broadcast_out,
        "_scatter": _scatter,
        "_scatter_out": _scatter_out,
        "_gather": _gather,
        "_gather_out": _gather_out,
        "_nccl_version": lambda: _NCCL[0] << 32 | _NCCL[1] << 16 | _NCCL[2],
        "_nccl_version_suffix": lambda: b"",
    }.items():
        patches.set(torch._C, name, function)


def _on(tensor: torch.Tensor, index: int) -> torch.Tensor:
    return tensor.to(torch.device("cuda", index))


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    nccl_calls.connect([tensor], devices)
    return [_on(tensor, index) for index in devices]


def _broadcast_out(tensor: torch.Tensor, outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Into tensors that are there (``comm.cpp``, also for the two below, and what they refuse)."""
    for place, out in enumerate(outs):
        if not out.is_cuda:
            raise RuntimeError(
                f"Expected all output tensors to be CUDA tensors, but output tensor at index {place} has device {out.device}"
            )
        if out.shape != tensor.shape:
            raise RuntimeError(
                f"Expected all output tensors to have same shape as the source {list(tensor.shape)}, but output tensor at index "
                f"{place} has shape {list(out.shape)}"
            )
    nccl_calls.connect([tensor], [out.get_device() for out in outs])
    return [out.copy_(tensor) for out in outs]


def _broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    """One list for each device. They go together in buffers, of which the copies are views (``comm.cpp`` in torch/csrc/cuda)."""
    nccl_calls.connect(tensors, devices)
    copies: list[list[torch.Tensor]] = [[] for _ in devices[1:]]
    for group in _groups(tensors, buffer_size):
        flat = torch._utils._flatten_dense_tensors(group)
        sent = [_on(flat, index) for index in devices[1:]]
        for mine, buffer in zip(copies, sent, strict=True):
            mine += torch._utils._unflatten_dense_tensors(buffer, group)
    return [list(tensors), *(list(torch._utils._reorder_tensors_as(mine, tensors)) for mine in copies)]


def _groups(tensors: Sequence[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """The tensors of each type, in groups of at least `size` bytes (``tensor_flatten.cpp`` in torch/csrc/utils)."""
    begun: dict[torch.dtype, list[torch.Tensor]] = {}
    filled: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        kind = tensor.dtype
        begun.setdefault(kind, []).append(tensor)
        filled[kind] += tensor.nbytes
        if filled[kind] >= size:
            del filled[kind]
            yield begun.pop(kind)
    yield from begun.values()


def _scatter(
    tensor: torch.Tensor, devices: Sequence[int], chunk_sizes: Sequence[int] | None, dim: int, streams: Any
) -> list[torch.Tensor]:
    chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    return [_on(chunk, index).contiguous() for chunk, index in zip(chunks, devices, strict=False)]


def _scatter_out(tensor: torch.Tensor, outs: Sequence[torch.Tensor], dim: int, streams: Any) -> list[torch.Tensor]:
    if not outs:
        raise RuntimeError("Expected at least one output tensor to scatter to")
    sizes = [out.shape[dim] for out in outs]
    if sum(sizes) != tensor.shape[dim]:
        raise RuntimeError(
            f"Total size for output tensors along scatter dim {dim} does not match the source tensor size at dim {dim}: "
            f"{sum(sizes)} instead of {tensor.shape[dim]}"
        )
    return [out.copy_(chunk) for out, chunk in zip(outs, tensor.split(sizes, dim), strict=True)]


def _gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None) -> torch.Tensor:
    if destination == -1:
        return torch.cat([tensor.cpu() for tensor in tensors], dim)
    index = tensors[0].get_device() if destination is None else destination
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return _gather_out(tensors, torch.empty(shape, dtype=tensors[0].dtype, device=torch.device("cuda", index)), dim)


def _gather_out(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    for part, tensor in zip(out.split([tensor.shape[dim] for tensor in tensors], dim), tensors, strict=True):
        part.copy_(tensor)
    return out


# ---- groups


def _handles(patches: Patches, engine: Engine) -> None:
    """What collectives return, each or several together, which gloo cannot send so: those of a device are done at once."""
    module: Any = importlib.import_module("torch._C._distributed_c10d")
    work, group = module.FakeWork, module.ProcessGroup
    start, end = group._start_coalescing, group._end_coalescing

    def _start_coalescing(self: Any, device: torch.device) -> None:
        if device.type != "cuda":
            start(self, device)
        else:
            engine.memory.communication.together = True

    def _end_coalescing(self: Any, device: torch.device) -> Any:
        if device.type != "cuda":
            return end(self, device)
        engine.memory.communication.together = False
        return collectives.finished()

    patches.set(work, "get_future", collectives.with_results(work.get_future, futures.finished))
    patches.set(work, "wait", collectives.waiting(work.wait, engine.memory.communication.waited))
    patches.set(group, "_start_coalescing", _start_coalescing)
    patches.set(group, "_end_coalescing", _end_coalescing)


def _process_groups(patches: Patches, engine: Engine) -> None:
    """Where a program asks for NCCL, which needs GPUs, gloo stands for it."""
    module = importlib.import_module("torch.distributed.distributed_c10d")
    nccl = AskedForNccl()
    makers: dict[str, Callable[[Any], Any]] = {
        "init_process_group": nccl.with_gloo,
        "new_group": nccl.with_gloo,
        "batch_isend_irecv": functools.partial(_together, engine),
        "destroy_process_group": functools.partial(_giving_back, engine),
        "monitored_barrier": nccl.refusing,
        "barrier": nccl.meeting,
        "broadcast_object_list": _on_host,
        "send_object_list": _on_host,
        "recv_object_list": _on_host,
    }
    everywhere(patches, module, makers)
    # Not in the module itself, which asks what it can send.
    everywhere(patches, module, {"get_backend": nccl.as_asked}, inside=False)
    group: Any = module.ProcessGroup
    patches.set(group, "_get_backend_name", nccl.named(group._get_backend_name))
    for name in exchanged.REDUCING:
        if hasattr(group, name):
            patches.set(group, name, exchanged.telling(getattr(group, name)))
    # That, too, would look there for NCCL's types.
    patches.set(torch.distributed, "is_nccl_available", lambda: True)


def _on_host(original: Any) -> Any:
    """Objects are sent as the host's bytes: those of a virtual device hold nothing."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def instead(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.arguments.pop("device", None)
        return original(*given.args, **given.kwargs)

    return instead


def _giving_back(engine: Engine, original: Any) -> Any:
    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        original(group)
        world = group is None or not torch.distributed.is_initialized()
        engine.memory.communication.end(None if world else group)

    return destroy_process_group


def _together(engine: Engine, original: Any) -> Any:
    """NCCL sends these as one, through the group's communicator; gloo, which cannot, is given one after the other."""

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        communication = engine.memory.communication
        communication.together = True
        try:
            return original(p2p_op_list)
        finally:
            communication.together = False

    return batch_isend_irecv


def everywhere(patches: Patches, module: Any, makers: Mapping[str, Callable[[Any], Any]], inside: bool = True) -> None:
    """Replaces functions of PyTorch's `module`, for which its other modules have names of their own (device meshes do).

    inside: in the module itself, too."""
    originals = {name: getattr(module, name) for name in makers}
    replacements = {name: make(originals[name]) for name, make in makers.items()}
    others = [sys.modules.get(place) for place in list(sys.modules) if place.startswith("torch.distributed")]
    for other in others if inside else (other for other in others if other is not module):
        names = getattr(other, "__dict__", {})
        for name, original in originals.items():
            if names.get(name) is original:
                patches.set(other, name, replacements[name])
