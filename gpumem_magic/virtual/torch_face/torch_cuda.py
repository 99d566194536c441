"""The face of `torch.cuda` (and `torch.accelerator`) while a virtual GPU is on: every question is answered from the emulated
devices."""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.accelerator
import torch.accelerator.memory
import torch.cuda
import torch.cuda.memory
import torch.cuda.random
import torch.cuda.streams

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine import waiting
from gpumem_magic.virtual.engine.refusals import refuse_device, refuse_fork
from gpumem_magic.virtual.torch_face import device_type, streams
from gpumem_magic.virtual.torch_face.cuda_memory import CudaMemory
from gpumem_magic.virtual.torch_face.streams import CURRENT, device_index

if TYPE_CHECKING:
    from gpumem_magic.virtual.engine.device import MachineForTorch, VirtualDevice


class DeviceProperties(SimpleNamespace):
    """Stands for `torch._C._CudaDeviceProperties`."""

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 2**20}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, L2_cache_size={self.L2_cache_size // 2**20}MB)"
        )


class CudaFace:
    """The functions that take the place of `torch.cuda`'s. Public methods without a leading underscore have torch's names."""

    def __init__(self, machine: MachineForTorch) -> None:
        self._machine = machine
        self._initialised = False
        self._generators: tuple[torch.Generator, ...] = tuple(streams.Generator(gpu.index) for gpu in machine.devices)
        self.memory = CudaMemory(machine, self._gpu)

    def install(self, patches: Patches) -> None:
        CURRENT.device = 0
        CURRENT.streams.clear()
        CURRENT.changes.clear()
        for name, method in inspect.getmembers(self, inspect.ismethod):
            if name not in ("install", "stream_of") and not name.startswith("__"):
                _replace(patches, (torch.cuda, torch.cuda.random, torch.cuda.memory), name, method)
        for name, member in self.memory.functions().items():
            _replace(patches, (torch.cuda, torch.cuda.memory), name, member)
        for name, member in self.memory.host_functions().items():
            patches.set(torch._C, name, member)
        for name, kind in {
            "Stream": streams.Stream, "ExternalStream": streams.ExternalStream, "Event": streams.Event,
            "StreamContext": streams.StreamContext, "device": streams.DeviceContext, "device_of": streams.DeviceOf,
            "_DeviceGuard": streams.DeviceContext, "stream": streams.StreamContext, "set_stream": streams.set_stream,
            "current_stream": self._current_stream, "default_stream": streams.default_stream,
            "get_stream_from_external": streams.ExternalStream,
        }.items():  # fmt: skip
            _replace(patches, (torch.cuda, torch.cuda.streams), name, kind)
        patches.set(torch.cuda, "default_generators", self._generators)
        patches.set(torch, "Generator", streams.Generator)
        device_type.install(patches)
        patches.set(torch, "Stream", streams.AnyStream)
        patches.set(streams, "begin_pool", self._machine.begin_streams)
        patches.set(torch, "Event", streams.AnyEvent)
        self._install_accelerator(patches)

    def _install_accelerator(self, patches: Patches) -> None:
        for name, member in {
            "is_available": self.is_available,
            "device_count": self.device_count,
            "current_accelerator": self._current_accelerator,
            "current_device_index": self.current_device,
            "current_device_idx": self.current_device,
            "set_device_index": self.set_device,
            "set_device_idx": self.set_device,
            "synchronize": self.synchronize,
            "current_stream": streams.current_stream,
            "set_stream": streams.set_stream,
            "device_index": streams.DeviceContext,
            "get_device_capability": self._accelerator_capability,
        }.items():
            _replace(patches, (torch.accelerator,), name, member)
        # What PyTorch's own Python asks (FSDP's device mesh, pinning).
        _replace(patches, (torch._C,), "_get_accelerator", lambda *args: torch.device("cuda"))
        # (Inductor asks for it, too: draws that backward repeats.)
        _replace(
            patches,
            (torch._C,),
            "_accelerator_getDefaultGenerator",
            lambda device: torch.cuda.default_generators[device],
        )
        for name, member in self.memory.accelerator_functions().items():
            _replace(patches, (torch.accelerator, torch.accelerator.memory), name, member)

    # ---- is there a device

    def is_available(self) -> bool:
        return os.getpid() == self._machine.process

    def _is_in_bad_fork(self) -> bool:
        return os.getpid() != self._machine.process

    def _is_compiled(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        """As PyTorch has it: after the first tensor, pinned ones too, and after what asks the driver about a device."""
        used = self._initialised or any(gpu.in_use for gpu in self._machine.devices) or self._machine.pinned.used
        return used and not self._is_in_bad_fork()

    def _lazy_init(self) -> None:
        if self._is_in_bad_fork():
            refuse_fork()
        self._initialised = True

    init = _lazy_init

    def device_count(self) -> int:
        return len(self._machine.devices) if self.is_available() else 0

    def _current_accelerator(self, check_available: bool = False) -> torch.device | None:
        return torch.device("cuda") if self.is_available() or not check_available else None

    def _accelerator_capability(self, device: Any = None) -> dict[str, Any]:
        return {
            "supported_dtypes": {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool}
        }

    # ---- which device

    def _gpu(self, device: Any = None) -> VirtualDevice:
        index = device_index(device)
        if not 0 <= index < len(self._machine.devices):
            raise AssertionError("Invalid device id")
        return self._machine.devices[index]

    def current_device(self) -> int:
        self._lazy_init()
        return CURRENT.device

    def _current_stream(self, device: Any = None) -> streams.Stream:
        self._lazy_init()
        return streams.current_stream(device)

    def set_device(self, device: Any) -> None:
        self._lazy_init()
        index = device_index(device)
        if not 0 <= index < len(self._machine.devices):
            refuse_device(index, len(self._machine.devices))
        CURRENT.device = index

    def _exchange_device(self, device: int) -> int:
        before = CURRENT.device
        if device >= 0:
            CURRENT.device = device
        return before

    _maybe_exchange_device = _exchange_device

    def stream_of(self, device: int) -> int:
        """The handle of this thread's current stream on a device; 0 is the default stream."""
        stream = CURRENT.stream(device)
        return 0 if stream is None else int(stream.cuda_stream)

    # ---- what kind of device

    def get_device_name(self, device: Any = None) -> str:
        self._lazy_init()
        return self._gpu(device).model.name

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        self._lazy_init()
        return self._gpu(device).model.capability

    def get_device_properties(self, device: Any = None) -> DeviceProperties:
        self._lazy_init()
        gpu = self._gpu(device)
        model = gpu.model
        return DeviceProperties(
            name=model.name,
            major=model.capability[0],
            minor=model.capability[1],
            total_memory=model.total_bytes,
            multi_processor_count=model.multi_processor_count,
            uuid=gpu.uuid.removeprefix("GPU-"),
            L2_cache_size=model.l2_cache_bytes,
            is_integrated=0,
            is_multi_gpu_board=0,
            max_threads_per_multi_processor=model.max_threads_per_multiprocessor,
            max_threads_per_block=model.max_threads_per_block,
            regs_per_multiprocessor=model.registers_per_multiprocessor,
            shared_memory_per_block=model.shared_memory_per_block,
            shared_memory_per_block_optin=model.shared_memory_per_block_optin,
            shared_memory_per_multiprocessor=model.shared_memory_per_multiprocessor,
            warp_size=model.warp_size,
            gcnArchName="",
            pci_bus_id=gpu.index,
            pci_device_id=0,
            pci_domain_id=0,
        )

    def get_arch_list(self) -> list[str]:
        return sorted(
            {f"sm_{major}{minor}" for major, minor in (gpu.model.capability for gpu in self._machine.devices)}
        )

    def can_device_access_peer(self, device: Any, peer_device: Any) -> bool:
        return self._gpu(device) is not self._gpu(peer_device)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return self.get_device_capability()[0] >= 8 or including_emulation

    def is_tf32_supported(self) -> bool:
        return self.get_device_capability()[0] >= 8

    # ---- work that is not done

    def synchronize(self, device: Any = None) -> None:
        if waiting.CAPTURING.graphs:
            waiting.refuse_waiting()
        self._gpu(device).use()
        self._machine.settle()

    def ipc_collect(self) -> None:
        self._machine.settle()

    def get_sync_debug_mode(self) -> int:
        return self._machine.engine.told_of_waiting

    def set_sync_debug_mode(self, debug_mode: int | str) -> None:
        names = {"default": waiting.NOTHING, "warn": waiting.WARN, "error": waiting.ERROR}
        if isinstance(debug_mode, str) and debug_mode not in names:
            raise RuntimeError("invalid value of debug_mode, expected one of `default`, `warn`, `error`")
        self._machine.engine.told_of_waiting = names[debug_mode] if isinstance(debug_mode, str) else debug_mode

    def _sleep(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing to wait for."""

    def utilization(self, device: Any = None) -> int:
        """Nothing runs on it."""
        return 0

    memory_usage = utilization

    def _no_reading(self, device: Any = None) -> int:
        raise RuntimeError(
            "a virtual GPU has no temperature, power or clock: leave this line out here, or run it on a real GPU"
        )

    temperature = power_draw = clock_rate = _no_reading

    # ---- random numbers

    def manual_seed(self, seed: int) -> None:
        self._generators[CURRENT.device].manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(int(seed))

    def seed(self) -> None:
        self.manual_seed(int.from_bytes(os.urandom(6), "little"))

    def seed_all(self) -> None:
        self.manual_seed_all(int.from_bytes(os.urandom(6), "little"))

    def initial_seed(self) -> int:
        return self._generators[CURRENT.device].initial_seed()

    def get_rng_state(self, device: Any = "cuda") -> torch.Tensor:
        self._lazy_init()
        return self._generators[self._gpu(device).index].get_state()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state(index) for index in range(len(self._generators))]

    def set_rng_state(self, new_state: torch.Tensor, device: Any = "cuda") -> None:
        self._generators[self._gpu(device).index].set_state(new_state)

    def set_rng_state_all(self, new_states: Any) -> None:
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)


def _replace(patches: Patches, owners: tuple[Any, ...], name: str, value: Any) -> None:
    """Replaces a function under every module that has it under this name; one that no module has is not added."""
    for owner in owners:
        if name in vars(owner):
            patches.set(owner, name, value)
