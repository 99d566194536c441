"""The virtual machine: devices that are not there, and turning them on and off for the process.

`turn_on("T4")` makes unmodified code on ``cuda`` run without a device; `turn_off()` puts every replaced name back. There is
at most one virtual machine in a process.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._device
from torch._C import _len_torch_dispatch_stack  # the number of active dispatch modes; torch 2.9 to 2.15

import gpumem_magic.virtual.convolutions
import gpumem_magic.virtual.copies
import gpumem_magic.virtual.operators
import gpumem_magic.virtual.shapes
import gpumem_magic.virtual.sorting
import gpumem_magic.virtual.sparse
import gpumem_magic.virtual.temporaries  # noqa: F401 - all register their handlers with the engine
from gpumem_magic.allocator.caching import CachingAllocator
from gpumem_magic.allocator.failure import DeviceOutOfMemory, oom_text
from gpumem_magic.allocator.memory import BASE_ADDRESS, DeviceMemory, FirstFitAddresses
from gpumem_magic.allocator.settings import EnvironmentSettings, settings_from_environment
from gpumem_magic.devices.base import Counters, DeviceFacts, DeviceLog, Label
from gpumem_magic.patching import Patches
from gpumem_magic.snapshot.model import Segment, TraceEvent
from gpumem_magic.virtual import (
    catalog,
    communication,
    cudnn,
    generations,
    graphs,
    kernels,
    legacy,
    parameters,
    rules,
    saving,
    storages,
    surroundings,
    wrappers,
)
from gpumem_magic.virtual.attention import Attention
from gpumem_magic.virtual.autocast import AutocastKernels
from gpumem_magic.virtual.captured import Captured
from gpumem_magic.virtual.composites import Composites
from gpumem_magic.virtual.engine import Engine
from gpumem_magic.virtual.factories import Factories
from gpumem_magic.virtual.hooks import install_engine_hooks
from gpumem_magic.virtual.libraries.table import libraries
from gpumem_magic.virtual.modes import STATE
from gpumem_magic.virtual.nvml import VirtualNvml
from gpumem_magic.virtual.smi import VirtualSmi
from gpumem_magic.virtual.torch_cuda import CudaFace

# Devices' addresses must not overlap; a terabyte each is more than any has.
_ADDRESS_STEP = 1 << 40


class DeviceError(Exception):
    """A device cannot be turned on or off. The text is one line and says what to do."""


class _Log:
    """One recording's view of a device: the events since it began."""

    def __init__(self, start: tuple[Segment, ...], carried: dict[int, Label]) -> None:
        self.start = start
        self.carried = carried
        self.events: list[TraceEvent] = []
        self.origins: dict[int, str] = {}


class VirtualDevice:
    """One emulated GPU: the caching allocator over a memory of the model's size."""

    def __init__(self, index: int, model: catalog.GpuModel, settings: EnvironmentSettings) -> None:
        self.index = index
        self.model = model
        self.uuid = catalog.device_uuid(model.name, index)
        self.in_use = False
        addresses = FirstFitAddresses(BASE_ADDRESS + index * _ADDRESS_STEP)
        self.memory = DeviceMemory(model.total_bytes, model.idle_bytes, addresses)
        self.allocator = CachingAllocator(index, self.memory, settings.settings)
        self.allocator.settings_text = settings.text
        self._logs: list[_Log] = []
        self._labels: dict[int, Label] = {}

    # ---- what the allocator and the driver say

    @property
    def facts(self) -> DeviceFacts:
        model = self.model
        return DeviceFacts(model.name, "virtual", self.index, self.uuid, model.total_bytes, model.smi_total_bytes)

    def context_bytes(self) -> int:
        return self.model.context_bytes if self.in_use else 0

    def process_bytes(self) -> int:
        return self.context_bytes() + self.allocator.reserved

    def used_bytes(self) -> int:
        return self.model.idle_bytes + self.process_bytes()

    def use(self) -> None:
        """The CUDA context is there from the first use of the device."""
        if not self.in_use:
            self.in_use = True
            self.memory.outside = self.model.idle_bytes + self.model.context_bytes

    def counters(self) -> Counters:
        allocator = self.allocator
        return Counters(
            allocated=allocator.allocated,
            reserved=allocator.reserved,
            device_used=self.used_bytes(),
            context=self.context_bytes(),
            other_processes=self.model.idle_bytes,
            context_or_others=None,
            peak_allocated=allocator.peak_allocated,
            peak_reserved=allocator.peak_reserved,
            retries=allocator.num_alloc_retries,
        )

    def segments(self) -> tuple[Segment, ...]:
        return self.allocator.segments()

    # ---- memory

    def malloc(self, nbytes: int, stream: int) -> int:
        self.use()
        address = self.allocator.malloc(nbytes, stream)
        if STATE.origin != "compute":
            for log in self._logs:
                log.origins[len(log.events) - 1] = STATE.origin
            if STATE.origin == "workspace":
                # A recording that begins later is told of it as well.
                self._labels[address] = Label("workspace", "stack")
        return address

    def free(self, address: int) -> None:
        self._labels.pop(address, None)
        self.allocator.free(address)

    # ---- logs

    def start_log(self) -> _Log:
        log = _Log(self.allocator.segments(), dict(self._labels))
        self._logs.append(log)
        self.allocator.sinks.append(log.events)
        return log

    def position(self, log: Any) -> int:
        return len(log.events)

    def stop_log(self, log: Any) -> DeviceLog:
        self._logs = [other for other in self._logs if other is not log]
        self.allocator.sinks[:] = [sink for sink in self.allocator.sinks if sink is not log.events]
        return DeviceLog(self.facts, log.start, log.events, log.origins, log.carried, self.allocator.settings_in_force)

    @property
    def recorded(self) -> bool:
        return bool(self._logs)

    def remember(self, labels: Mapping[int, Label]) -> None:
        self._labels.update(labels)

    def is_workspace(self, address: int) -> bool:
        """Whether a live block is what a library keeps; False for one that it took and gives back."""
        label = self._labels.get(address)
        return label is not None and label.category == "workspace"


class VirtualMachine:
    """All virtual devices that are on, and the engine that runs operators on them."""

    def __init__(self, spec: catalog.DeviceSpec, settings: EnvironmentSettings) -> None:
        self.spec = spec
        self.process = os.getpid()
        self._devices = [VirtualDevice(index, model, settings) for index, model in enumerate(spec.models)]
        self.engine = Engine(self, len(self._devices))
        self.face = CudaFace(self)
        self.workspaces = kernels.Workspaces(self._devices, self.malloc, self.face.stream_of, self.free)
        self.convolutions = cudnn.Scratch(self._devices, self.malloc, self.face.stream_of, self.free)
        self.attention = Attention(lambda index: self._devices[index].model.capability)
        self.engine.attend = self.attention.attend
        self.smi = VirtualSmi(self._devices)
        self.nvml = VirtualNvml(self._devices)
        self._patches = Patches()
        self._autocast = AutocastKernels()
        self._composites = Composites()
        self._factories = Factories(self.engine, self.face.current_device)
        self._captured = Captured(self._factories)
        self._libraries = libraries()

    # ---- what a machine can be asked

    @property
    def devices(self) -> Sequence[VirtualDevice]:
        return self._devices

    def locate(self, tensor: Any) -> tuple[int, int] | None:
        return self.engine.locate(tensor)

    @property
    def stand_ins(self) -> Counter[tuple[str, int]]:
        return self.engine.stand_ins

    @property
    def supplied(self) -> Counter[tuple[str, int]]:
        """The same for reads of values that the user supplied; they are among the `stand_ins`."""
        return self.engine.supplied

    def settle(self) -> None:
        """Does the frees that wait, so that counters and logs are those of now."""
        with self.engine.lock:
            self.engine.table.drain()

    def notes(self) -> list[str]:
        """What a reader of figures must know about how they came to be."""
        engine = self.engine
        found = []
        if engine.largest_sizes:
            words = ", ".join(f"{name} ({count})" for name, count in sorted(engine.largest_sizes.items()))
            found.append(f"Sizes that depend on values are not known here; the largest possible was taken: {words}.")
        if engine.compiled_calls:
            found.append(
                f"What torch.compile made ran eagerly ({engine.compiled_calls} calls): compiled code fuses operators, and "
                "needs less memory between them."
            )
        if engine.captures:
            found.append(
                f"CUDA graphs ran eagerly while they were captured ({engine.captures}), and not again in replays."
            )
        if engine.kernels_not_run:
            found.append(
                f"Kernels written in Triton were not run ({engine.kernels_not_run} launches): they write into tensors that "
                "are there."
            )
        return found

    # ---- memory (asked by the engine, under its lock)

    def malloc(self, device: int, nbytes: int) -> int:
        gpu = self._devices[device]
        try:
            return gpu.malloc(nbytes, self.face.stream_of(device))
        except DeviceOutOfMemory as caught:
            # Its frames hold the operator's tensors, and what the program was dealing with is not its business.
            failure = caught.with_traceback(None)
            failure.__context__ = None
        text = oom_text(
            failure,
            gpu.model.oom_text_version or torch.__version__,
            process_id=self.process,
            process_bytes=gpu.process_bytes(),
        )
        error = torch.OutOfMemoryError(text)
        error.gpumem_failure = failure  # type: ignore[attr-defined]
        raise error

    def free(self, device: int, address: int) -> None:
        self._devices[device].free(address)

    def record_stream(self, device: int, address: int, stream: int) -> None:
        self._devices[device].allocator.record_stream(address, stream)

    def after_operator(self, func: Any, device: int) -> None:
        self.workspaces.after(func, device)

    def convolve(self, device: int, call: cudnn.Convolution) -> None:
        self.convolutions.take(device, call)

    def torch_version(self, device: int) -> tuple[int, int]:
        return generations.parse_version(kernels.version_text(self._devices[device]))

    def _clear_workspaces(self) -> None:
        with self.engine.lock:
            self.workspaces.clear()

    # ---- on and off

    def install(self) -> None:
        """Replaces what has to be replaced. Undone completely if any of it fails."""
        try:
            for gpu in self._devices:
                gpu.allocator.on_reserved = self._tell_smi(gpu)
            self._factories.install(self._patches)
            parameters.install(self._patches)
            storages.install(self._patches, self.engine)
            wrappers.install(self._patches)
            saving.install(self._patches, self.engine)
            surroundings.install(self._patches)
            legacy.install(self._patches)
            self._libraries.install(self._patches)
            rules.install(self._patches)
            communication.install(self._patches, self.engine)
            install_engine_hooks(self._patches, self.engine)
            self.face.install(self._patches)
            graphs.install(self._patches, self)
            self._autocast.install(self._patches)
            self.attention.install()
            self._composites.install()
            # What Triton and libraries ask for the stream to launch on; builds for the host lack it (torch 2.9 to 2.15).
            self._patches.set(torch._C, "_cuda_getCurrentRawStream", self.face.stream_of)
            # The public way to get cuBLAS's workspaces back; builds for the host lack it (torch 2.9 to 2.15).
            self._patches.set(torch._C, "_cuda_clearCublasWorkspaces", self._clear_workspaces)
            self._captured.install(self._patches)
            self.smi.install()
            self.nvml.install()
            for gpu in self._devices:
                self.smi.update(gpu.index, gpu.used_bytes())
        except BaseException:
            self.remove("the virtual GPU could not be turned on")
            raise

    def remove(self, because: str) -> None:
        """Puts everything back. Tensors that are left say `because` when they are used."""
        self.engine.closed_because = because
        self.nvml.remove()
        self.smi.remove()
        self._captured.remove()
        self._composites.remove()
        self.attention.remove()
        self._autocast.remove()
        self._libraries.remove()
        self._patches.undo()

    def replaced(self) -> list[tuple[Any, str]]:
        """The (owner, name) pairs that are replaced while the machine is on."""
        return self._patches.names()

    def _tell_smi(self, gpu: VirtualDevice) -> Any:
        def tell(reserved: int) -> None:
            self.smi.update(gpu.index, gpu.used_bytes())

        return tell


_current: VirtualMachine | None = None
_turning = threading.Lock()


def current() -> VirtualMachine | None:
    """The virtual machine that is on, or None."""
    return _current


def turn_on(text: str) -> VirtualMachine:
    """Turns on the devices that `text` names (a catalogue name, `2xT4`, `virtual:24GiB`, options after a comma).

    Another virtual machine that is on is turned off first. The allocators take their settings from PYTORCH_CUDA_ALLOC_CONF or
    PYTORCH_ALLOC_CONF as they are now; an option that is not emulated is a warning. Raises DeviceError with one line, and
    changes nothing: an unknown name, a setting that PyTorch would refuse, CUDA in use already, or a mode that is active.
    """
    global _current
    with _turning:
        try:
            spec = catalog.parse(text)
            settings = settings_from_environment()
        except (catalog.UnknownDevice, ValueError) as error:
            raise DeviceError(str(error)) from None
        if isinstance(spec, catalog.RealDevice):
            raise DeviceError(f"{text} is a real device; to go back to it, turn the virtual one off")
        _refuse_inside_modes("on")
        if _current is None and torch.cuda.is_initialized():
            raise DeviceError(
                "CUDA is in use in this process, and its tensors would be out of reach behind a virtual GPU: "
                "restart the kernel, then choose the virtual device first"
            )
        if _current is not None:
            _off()
        for note in settings.notes:
            warnings.warn(note, stacklevel=2)
        machine = VirtualMachine(spec, settings)
        machine.install()
        _current = machine
        return machine


def turn_off() -> int:
    """Puts everything back and returns how many tensors' storages were still on the device (they can't be used any more).

    Raises DeviceError where a recording runs on the device or a mode is active. 0 where nothing was on.
    """
    with _turning:
        if _current is None:
            return 0
        _refuse_inside_modes("off")
        return _off()


def _off() -> int:
    global _current
    machine = _current
    assert machine is not None
    if any(gpu.recorded for gpu in machine.devices):
        raise DeviceError("a recording runs on the virtual device: turn it off in a cell that is not measured")
    machine.settle()
    left = len(machine.engine.table)
    machine.remove(
        f"this tensor was on the virtual GPU ({machine.spec.text}), which has been turned off: make it anew, "
        "or on the host (its values were stand-ins)"
    )
    _current = None
    return left


def _refuse_inside_modes(state: str) -> None:
    functions = [torch._C._get_function_stack_at(position) for position in range(torch._C._len_torch_function_stack())]
    held = [mode for mode in functions if not isinstance(mode, torch.utils._device.DeviceContext)]
    if _len_torch_dispatch_stack() or held:
        raise DeviceError(
            f"the virtual GPU can't be turned {state} inside a `with` that holds a torch mode: do it before or after"
        )


@atexit.register
def _at_exit() -> None:
    """PATH's entry is a folder of ours: it goes with the process."""
    if _current is not None and _current.process == os.getpid():
        _current.smi.remove()
