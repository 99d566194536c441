"""CUDA graphs of compiled code (`mode="reduce-overhead"`, `backend="cudagraphs"`): PyTorch's own trees of recordings, over the
emulated allocator's pools.

A function runs once to warm up, once while it is recorded, and is replayed from then on: inputs that move are copied into the
pool, results lie where the recording put them. What is here are the places where PyTorch asks C++ for the pool's state, for
storages without a block of their own, and to give a storage's block back.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

import torch
from torch.torch_version import TorchVersion

from gpumem_magic.allocator.blocks import PoolId
from gpumem_magic.allocator.pool_checkpoints import PoolCheckpoint
from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.device import MachineForTorch
from gpumem_magic.virtual.engine.modes import META, made_plainly

_BEFORE_2_10 = TorchVersion(torch.__version__) < "2.10"


def install(patches: Patches, machine: MachineForTorch) -> None:
    """Until the patches are undone, the trees record and replay on the devices of this machine. They are not imported for it:
    Inductor does so, or `backend="cudagraphs"`."""
    engine = machine.engine

    def allocator(device: int) -> Any:
        return machine.devices[device].allocator

    def check_state(device: int, pool_id: PoolId) -> PoolCheckpoint:
        with engine.lock:
            engine.table.drain()
            found: PoolCheckpoint = allocator(device).checkpoint(pool_id)
            return found

    def set_state(device: int, state: PoolCheckpoint, stale: list[int], owners: list[int]) -> None:
        with engine.lock:
            engine.table.drain()
            freed = allocator(device).live_in(state.pool_id)
            allocator(device).restore(state)
            live = allocator(device).live_in(state.pool_id)
            engine.table.restored(set(owners), live, freed - live)

    def live_as_told(device: int, pool_id: PoolId, told: set[int]) -> bool:
        with engine.lock:
            engine.table.drain()
            live = allocator(device).live_in(pool_id)
            return bool(live == told)

    def delete(address: int) -> None:
        with engine.lock:
            for device in machine.devices:
                with suppress(ValueError):
                    device.free(address)

    def free_storage(storage: int) -> None:
        with engine.lock:
            engine.table.give_back(storage)

    def storage_at(address: int, device: torch.device, nbytes: int) -> Any:
        return engine.borrowed(nbytes, device.index or 0, None, address)

    def tensor_on(metadata: dict[str, Any], storage: Any) -> torch.Tensor:
        meta = made_plainly(torch.empty, 0, dtype=metadata["dtype"], device=META)
        made_plainly(meta.set_, storage, metadata["storage_offset"], metadata["size"], metadata["stride"])
        with engine.uninterrupted, engine.lock:
            return engine.wrap(meta, metadata["device"].index or 0, "torch.compile")

    def same_addresses(tensors: Any, addresses: Any, places: Any) -> bool:
        return all(addresses[place] is None or tensors[place].data_ptr() == addresses[place] for place in places)

    def overwrite(storage: Any, said: str) -> None:
        with engine.lock:
            engine.table.overwrite(storage, said)

    def overwrite_of(tensor: torch.Tensor, said: str) -> None:
        overwrite(tensor.untyped_storage(), said)

    def nothing(*args: Any) -> None:
        """Of cuDNN's trials, which are not run."""

    for name, function in {
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_getCheckpointState": check_state,
        "_cuda_setCheckpointPoolState": set_state,
        "_cuda_checkPoolLiveAllocations": live_as_told,
        "_cuda_cudaCachingAllocator_raw_delete": delete,
        "_free_And_Remove_DeleterFn": free_storage,
        "_has_Standard_Deleter": engine.table.owns,
        "_construct_storage_from_data_pointer": storage_at,
        "_construct_CUDA_Tensor_From_Storage_And_Metadata": tensor_on,
        "_tensors_data_ptrs_at_indices_equal": same_addresses,
        "_set_storage_access_error_msg": overwrite_of,
        "_set_storage_data_ptr_access_error_msg": overwrite,
        "_cuda_get_conv_benchmark_empty_cache": lambda: True,
        "_cudnn_set_conv_benchmark_empty_cache": nothing,
    }.items():
        patches.set(torch._C, name, function)
    if _BEFORE_2_10:
        _watch_weak_references(patches, engine)
    patches.also_undo(_reset)


def _watch_weak_references(patches: Patches, engine: Any) -> None:
    """Until 2.9 a storage that C++ has owned keeps its Python object until it is destroyed, which weak references delay
    (`c10/core/impl/PyObjectSlot.h`); its memory is given back with the last strong one (`StorageImpl::release_resources`). The
    trees hold weak ones to all results."""
    weakly = torch.UntypedStorage._weak_ref
    kind = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef

    def weak_ref(storage: Any, *args: Any, **kwargs: Any) -> Any:
        with engine.lock:
            engine.table.held_weakly(kind.from_weakref(weakly(storage)))
        return weakly(storage, *args, **kwargs)

    patches.set(torch.UntypedStorage, "_weak_ref", weak_ref)


def _reset() -> None:
    if (trees := sys.modules.get("torch._inductor.cudagraph_trees")) is not None:
        trees.reset_cudagraph_trees()


def name_what_is_skipped(patches: Patches, otherwise: Counter[str]) -> None:
    """Until the patches are undone, graphs of Inductor's that are not recorded are counted with the reason."""
    output = importlib.import_module("torch._inductor.output_code")
    skip = output.log_cudagraph_skip_and_bump_counter

    def skipped(why: str) -> None:
        otherwise[f"without CUDA graphs, as on a card ({(why.splitlines() or [''])[0]})"] += 1
        skip(why)

    patches.set(output, "log_cudagraph_skip_and_bump_counter", skipped)
