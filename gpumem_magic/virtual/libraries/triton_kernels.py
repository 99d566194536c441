"""Kernels written in Triton on a virtual device: a launch writes into existing tensors, and allocates nothing.

So a launch with virtual tensors does nothing. `JITFunction.run` and `Autotuner.run` are what ``kernel[grid](...)`` ends in; the
tuner would run the kernel to time it. What programs and the compiler ask Triton's driver is answered for the virtual card.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine.modes import HostlessFakeMode
from gpumem_magic.virtual.engine.tensors import VirtualTensor, engine_of
from gpumem_magic.virtual.libraries.loading import Prepare, has_virtual

# Bytes that Triton's own timing writes before each run (`get_empty_cache_for_benchmark` in `triton/backends/nvidia/driver.py`).
_EMPTIES_THE_CACHE = 256 << 20


def quiet(kind: str) -> Prepare:
    """Has the `run` of a class launch nothing."""

    def prepare(module: ModuleType, patches: Patches) -> None:
        original = getattr(module, kind).run

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not has_virtual(args, kwargs):
                return original(self, *args, **kwargs)
            found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, VirtualTensor)]
            engine_of(found[0]).kernels_not_run += 1
            for tensor in found:
                engine_of(tensor).forget(tensor)
            return None

        patches.set(getattr(module, kind), "run", run)

    return prepare


class _DriverOfTriton:
    """Triton's driver for the virtual card: the names are those of `triton.backends.driver.GPUDriver` and of NVIDIA's."""

    def __init__(self) -> None:
        self.utils = SimpleNamespace(get_device_properties=_properties)

    def get_current_target(self) -> Any:
        major, minor = torch.cuda.get_device_capability()
        target = importlib.import_module("triton.backends.compiler").GPUTarget
        return target("cuda", 10 * major + minor, torch.cuda.get_device_properties().warp_size)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def get_current_device(self) -> int:
        return torch.cuda.current_device()

    def set_current_device(self, device: int) -> None:
        torch.cuda.set_device(device)

    def get_current_stream(self, device: int | None = None) -> int:
        return torch.cuda.current_stream(device).cuda_stream

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return torch.cuda.get_device_capability(device)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Any:
        return importlib.import_module("triton.testing").do_bench

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(_EMPTIES_THE_CACHE, dtype=torch.int8, device="cuda")

    def clear_cache(self, cache: torch.Tensor) -> None:
        cache.zero_()


def _properties(device: int) -> dict[str, int]:
    """As `load_binary`'s neighbour in `triton/backends/nvidia/driver.c` names them, but for clock rates."""
    found: Any = torch.cuda.get_device_properties(device)
    return {
        "max_shared_mem": found.shared_memory_per_block_optin,
        "max_num_regs": found.regs_per_multiprocessor,
        "multiprocessor_count": found.multi_processor_count,
        "warpSize": found.warp_size,
    }


def prepare_driver(module: ModuleType, patches: Patches) -> None:
    driver = module.driver
    # (Until 3.3 it is a plain attribute.)
    patches.set(driver, "_active" if hasattr(driver, "_active") else "active", _DriverOfTriton())


def prepare_operators(module: ModuleType, patches: Patches) -> None:
    """Kernels in an operator of the program's (`torch.library.triton_op`) go, under our fake mode, as under PyTorch's."""
    for operator in (module.triton_kernel_wrapper_mutation, module.triton_kernel_wrapper_functional):
        rules = operator.python_key_table
        if FakeTensorMode in rules:
            rules[HostlessFakeMode] = rules[FakeTensorMode]
            patches.also_undo(functools.partial(rules.pop, HostlessFakeMode, None))
