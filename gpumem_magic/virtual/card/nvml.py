"""Makes `pynvml` (NVIDIA's own Python binding, package nvidia-ml-py) answer for the virtual GPUs while they are on.

Every public function of pynvml stays the real one. They all reach the C library through two private functions of the
module, and only those are replaced: the one that loads the library, and the one that looks a C function up, which here
returns a Python function that fills the same C structures. So `from pynvml import *` works, written before or after.

pynvml is imported when this is installed: torch imports it anyway, so it costs nothing more where a virtual GPU is on.
The C signatures are NVML's public interface. Functions that a virtual GPU has no answer for say "Not Supported".
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from functools import partialmethod
from importlib import import_module
from typing import Any

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.card.catalog import MAX_DEVICES, DeviceState, bus_id
from gpumem_magic.virtual.card.smi_script import CUDA_VERSION, DRIVER_VERSION

SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7

_LOOK_UP, _LOAD, _COUNT = "_nvmlGetFunctionPointer", "_LoadNvmlLibrary", "_nvmlLib_refcount"
# A handle is an address in here, so that one kept past `remove` points at memory that can be read. Made once: never freed.
_HANDLES = (ctypes.c_ubyte * (4096 * MAX_DEVICES))()


def _structure(name: str, **fields: type[Any]) -> type[Any]:
    return type(name, (ctypes.Structure,), {"_fields_": tuple(fields.items())})


# NVML's structures by their fields, in order.
_INT, _LONG = ctypes.c_uint, ctypes.c_ulonglong
_Utilization = _structure("Utilization", gpu=_INT, memory=_INT)
_MemoryInfo = _structure("MemoryInfo", total=_LONG, free=_LONG, used=_LONG)
_MemoryV2 = _structure("MemoryV2", version=_INT, total=_LONG, reserved=_LONG, free=_LONG, used=_LONG)
_PROCESS: dict[str, Any] = {"pid": _INT, "used": _LONG}
_Process = _structure("Process", **_PROCESS)
_ProcessV2 = _structure("ProcessV2", **_PROCESS, gpu_instance=_INT, compute_instance=_INT)
_PCI: dict[str, Any] = {
    "bus_id": ctypes.c_char * 16,
    **dict.fromkeys(("domain", "bus", "device", "device_id", "subsystem_id"), _INT),
}
_PciV2 = _structure("PciV2", **_PCI)
_PciV3 = _structure("PciV3", **_PCI, long_bus_id=ctypes.c_char * 32)


class _Refused(Exception):
    """What a function returns where it has no answer: NVML's status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def _put(pointer: Any, kind: type[Any], value: int) -> int:
    """Writes a number where a C function would: through a pointer or what `byref` gives."""
    ctypes.cast(pointer, ctypes.POINTER(kind))[0] = value
    return SUCCESS


def _struct(pointer: Any, kind: type[Any]) -> Any:
    return ctypes.cast(pointer, ctypes.POINTER(kind)).contents


def _text(buffer: Any, length: Any, text: str) -> int:
    data = text.encode() + b"\0"
    if len(data) > int(getattr(length, "value", length)):
        return INSUFFICIENT_SIZE
    ctypes.memmove(buffer, data, len(data))
    return SUCCESS


def _address(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def _string(argument: Any) -> str:
    value = getattr(argument, "value", argument)
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


class _Library:
    """NVML's C functions, for these devices. Each method is one function without its `nvml`, and returns a status."""

    def __init__(self, devices: Sequence[DeviceState], initialised: int, texts: dict[int, str]) -> None:
        self._devices = devices
        self._initialised = initialised
        self._texts = texts

    def look_up(self, name: str) -> Callable[..., Any]:
        """What pynvml calls to find a C function. A new function each time: pynvml sets attributes on what it gets."""
        method = getattr(self, name.removeprefix("nvml"), None) if name.startswith("nvml") else None
        always = name in ("nvmlErrorString", "nvmlInit", "nvmlInit_v2", "nvmlInitWithFlags")

        def function(*arguments: Any) -> Any:
            if not always and self._initialised <= 0:
                return UNINITIALIZED
            try:
                return NOT_SUPPORTED if method is None else method(*arguments)
            except _Refused as refused:
                return refused.status

        function.__name__ = name
        return function

    # --- the library ---

    def InitWithFlags(self, flags: Any = 0) -> int:
        self._initialised += 1
        return SUCCESS

    Init = Init_v2 = InitWithFlags

    def Shutdown(self) -> int:
        self._initialised -= 1
        return SUCCESS

    def ErrorString(self, status: Any) -> bytes:
        number = int(getattr(status, "value", status))
        return self._texts.get(number, "Success" if number == SUCCESS else "Unknown Error").encode()

    def SystemGetDriverVersion(self, buffer: Any, length: Any) -> int:
        return _text(buffer, length, DRIVER_VERSION)

    def SystemGetNVMLVersion(self, buffer: Any, length: Any) -> int:
        return _text(buffer, length, f"{CUDA_VERSION.partition('.')[0]}.{DRIVER_VERSION}")

    def SystemGetCudaDriverVersion(self, version: Any) -> int:
        major, _, minor = CUDA_VERSION.partition(".")
        return _put(version, ctypes.c_int, int(major) * 1000 + int(minor) * 10)

    SystemGetCudaDriverVersion_v2 = SystemGetCudaDriverVersion

    # --- finding a device ---

    def DeviceGetCount(self, count: Any) -> int:
        return _put(count, ctypes.c_uint, len(self._devices))

    DeviceGetCount_v2 = DeviceGetCount

    def DeviceGetHandleByIndex(self, index: Any, handle: Any) -> int:
        number = int(getattr(index, "value", index))
        if number >= len(self._devices):
            return INVALID_ARGUMENT
        return _put(handle, ctypes.c_void_p, ctypes.addressof(_HANDLES) + 4096 * number)

    DeviceGetHandleByIndex_v2 = DeviceGetHandleByIndex

    def DeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:
        return self._handle_of([_string(uuid) == device.uuid for device in self._devices], handle)

    def DeviceGetHandleByPciBusId(self, bus: Any, handle: Any) -> int:
        # The domain may be written with four digits or eight.
        wanted, own = _string(bus).upper(), [bus_id(device.index) for device in self._devices]
        return self._handle_of([wanted in (one, one[4:]) for one in own], handle)

    def _handle_of(self, fits: list[bool], handle: Any) -> int:
        return self.DeviceGetHandleByIndex(fits.index(True), handle) if True in fits else NOT_FOUND

    DeviceGetHandleByPciBusId_v2 = DeviceGetHandleByPciBusId

    def _device(self, handle: Any) -> DeviceState:
        """Refuses a handle that is not one of these: a real library's, made before the virtual GPU was on."""
        place, rest = divmod(_address(handle) - ctypes.addressof(_HANDLES), 4096)
        if rest or not 0 <= place < len(self._devices):
            raise _Refused(INVALID_ARGUMENT)
        return self._devices[place]

    # --- one device ---

    def DeviceGetIndex(self, handle: Any, index: Any) -> int:
        return _put(index, ctypes.c_uint, self._device(handle).index)

    DeviceGetMinorNumber = DeviceGetIndex

    def DeviceGetName(self, handle: Any, buffer: Any, length: Any) -> int:
        return _text(buffer, length, self._device(handle).model.name)

    def DeviceGetUUID(self, handle: Any, buffer: Any, length: Any) -> int:
        return _text(buffer, length, self._device(handle).uuid)

    def DeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        device = self._device(handle)
        _put(major, ctypes.c_int, device.model.capability[0])
        return _put(minor, ctypes.c_int, device.model.capability[1])

    def _pci(self, handle: Any, pointer: Any, kind: type[Any]) -> int:
        device = self._device(handle)
        info, own = _struct(pointer, kind), bus_id(device.index)
        domain, bus, slot = own.partition(".")[0].split(":")
        info.domain, info.bus, info.device = int(domain, 16), int(bus, 16), int(slot, 16)
        info.device_id = info.subsystem_id = 0
        info.bus_id = own[4:].encode()
        if kind is _PciV3:
            info.long_bus_id = own.encode()
        return SUCCESS

    DeviceGetPciInfo = DeviceGetPciInfo_v2 = partialmethod(_pci, kind=_PciV2)
    DeviceGetPciInfo_v3 = partialmethod(_pci, kind=_PciV3)

    def DeviceGetMemoryInfo(self, handle: Any, info: Any) -> int:
        """The first version has no field for what the driver keeps, and counts it as used; nvidia-smi does not."""
        device = self._device(handle)
        memory, total = _struct(info, _MemoryInfo), device.model.smi_total_bytes
        used = min(total, device.used_bytes() + device.model.driver_reserved_bytes)
        memory.total, memory.used, memory.free = total, used, total - used
        return SUCCESS

    def DeviceGetMemoryInfo_v2(self, handle: Any, info: Any) -> int:
        device = self._device(handle)
        memory, model = _struct(info, _MemoryV2), device.model
        used = min(device.used_bytes(), model.smi_total_bytes - model.driver_reserved_bytes)
        memory.total, memory.reserved, memory.used = model.smi_total_bytes, model.driver_reserved_bytes, used
        memory.free = model.smi_total_bytes - model.driver_reserved_bytes - used
        return SUCCESS

    def DeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:
        """Nothing runs on it."""
        self._device(handle)
        found = _struct(rates, _Utilization)
        found.gpu = found.memory = 0
        return SUCCESS

    def _processes(self, handle: Any, count: Any, array: Any, kind: type[Any]) -> int:
        device = self._device(handle)
        used = device.process_bytes()
        capacity = _struct(count, ctypes.c_uint).value
        _put(count, ctypes.c_uint, 1 if used else 0)
        if not used:
            return SUCCESS
        if capacity < 1 or array is None:
            return INSUFFICIENT_SIZE
        process = _struct(array, kind)
        process.pid, process.used = os.getpid(), used
        if kind is _ProcessV2:
            # What NVML writes where a GPU is not partitioned.
            process.gpu_instance = process.compute_instance = 0xFFFFFFFF
        return SUCCESS

    DeviceGetComputeRunningProcesses = partialmethod(_processes, kind=_Process)
    DeviceGetComputeRunningProcesses_v2 = DeviceGetComputeRunningProcesses_v3 = partialmethod(
        _processes, kind=_ProcessV2
    )

    def DeviceGetGraphicsRunningProcesses(self, handle: Any, count: Any, array: Any) -> int:
        self._device(handle)
        return _put(count, ctypes.c_uint, 0)

    DeviceGetGraphicsRunningProcesses_v2 = DeviceGetGraphicsRunningProcesses_v3 = DeviceGetGraphicsRunningProcesses


class VirtualNvml:
    """pynvml for `devices` (whose indices are 0, 1, ...), from `install` to `remove`. Both may be called twice."""

    def __init__(self, devices: Sequence[DeviceState]) -> None:
        self._devices = devices
        self._patches = Patches()

    def install(self) -> bool:
        """False, and nothing done, where nvidia-ml-py is not installed.

        Raises RuntimeError where the module called pynvml is not the one that this was made for.
        """
        if self._patches.names():
            return True
        module = _binding()
        if module is None:
            return False
        texts: dict[int, str] = module.NVMLError._errcode_to_string
        before = dict(texts)
        # pynvml keeps texts of errors that it has met; ours are not a real library's.
        self._patches.also_undo(lambda: texts.update(before))
        self._patches.also_undo(texts.clear)
        # Who called nvmlInit before stays initialised.
        library = _Library(self._devices, getattr(module, _COUNT), before)
        self._patches.set(module, _LOOK_UP, library.look_up)
        self._patches.set(module, _LOAD, lambda: None)
        self._patches.set(module, _COUNT, getattr(module, _COUNT), always=True)
        return True

    def remove(self) -> None:
        """Puts every name back, a real NVML library that was loaded before included."""
        self._patches.undo()


def _binding() -> Any:
    """The module that holds pynvml's way into the C library, None where there is no pynvml.

    The retired PyPI package called pynvml keeps them in a submodule.
    """
    try:
        public = import_module("pynvml")
    except ImportError:
        return None
    module = sys.modules.get(getattr(getattr(public, "nvmlInit", None), "__module__", "pynvml"), public)
    missing = [name for name in (_LOOK_UP, _LOAD, _COUNT, "NVMLError") if not hasattr(module, name)]
    if missing:
        version = getattr(public, "__version__", "unknown")
        raise RuntimeError(
            f"this pynvml (version {version}) has no {', '.join(missing)}; nvidia-ml-py 11.450 or later is needed"
        )
    return module
