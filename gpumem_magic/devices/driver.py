"""NVIDIA's driver through NVML (`nvidia-ml-py`): what nvidia-smi would say about a device and the processes on it.

"Not available" is a value: None. A GPU that answers half of the questions still gives that half, and nothing in here raises.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from gpumem_magic.devices.base import GpuProcess
from gpumem_magic.failures import swallowed, swallows

# NVML's "not available" is the largest number of 64 bits; Windows and WSL put it, or nearly, where bytes belong.
ABSURD = 1 << 60


@dataclass(frozen=True)
class DriverMemory:
    """Bytes. used: as nvidia-smi shows it (without what the driver keeps for itself, where it tells that apart). reserved: what
    the driver keeps for itself, 0 where it does not tell; no process can have it."""

    total: int
    used: int
    reserved: int = 0


class Driver:
    """NVML, opened once. `open` never raises: `reason` says why there is none."""

    def __init__(self, nvml: Any, reason: str | None = None) -> None:
        self._nvml = nvml
        self.reason = reason
        self.refusals: dict[str, str] = {}

    @classmethod
    def open(cls) -> Driver:
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return cls(None, "the package nvidia-ml-py is not installed")
        try:
            nvml.nvmlInit()
        except Exception as error:
            swallowed(error)
            return cls(None, words_of(error))
        return cls(nvml)

    @property
    def available(self) -> bool:
        return self._nvml is not None

    def ask(self, question: str, *arguments: Any, **options: Any) -> Any:
        """The answer of an NVML function (without its ``nvml``), or None; `refusals` keeps the words of the last refusal."""
        if self._nvml is None:
            return None
        try:
            answer = getattr(self._nvml, f"nvml{question}")(*arguments, **options)
        except Exception as error:
            if not swallows(error):
                raise
            self.refusals[question] = words_of(error)
            return None
        self.refusals.pop(question, None)
        return answer

    def constant(self, name: str) -> Any:
        return getattr(self._nvml, name, None)

    def count(self) -> int:
        return int(self.ask("DeviceGetCount") or 0)

    def by_index(self, index: int) -> DriverDevice | None:
        """The device with nvidia-smi's index."""
        handle = self.ask("DeviceGetHandleByIndex", index)
        return None if handle is None else DriverDevice(self, handle)

    def by_uuid(self, uuid: str) -> DriverDevice | None:
        """By the full ``GPU-...`` or ``MIG-...`` name."""
        handle = self.ask("DeviceGetHandleByUUID", uuid)
        if handle is None:
            # Older versions of the binding want bytes.
            handle = self.ask("DeviceGetHandleByUUID", uuid.encode())
        return None if handle is None else DriverDevice(self, handle)

    def devices(self) -> Iterator[DriverDevice]:
        """All that can be asked, in nvidia-smi's order."""
        for index in range(self.count()):
            device = self.by_index(index)
            if device is not None:
                yield device


class DriverDevice:
    """One GPU, or one MIG instance of a GPU."""

    def __init__(self, driver: Driver, handle: Any) -> None:
        self._driver = driver
        self._handle = handle
        self._knows_v2: bool | None = None

    @property
    def uuid(self) -> str | None:
        return _text(self._driver.ask("DeviceGetUUID", self._handle))

    @property
    def name(self) -> str | None:
        return _text(self._driver.ask("DeviceGetName", self._handle))

    def memory(self) -> DriverMemory | None:
        """Figures of now. Drivers before 510 know only the older question, whose `used` has the driver's own share in it."""
        answer = None
        version = self._driver.constant("nvmlMemory_v2")
        if version is not None and self._knows_v2 is not False:
            answer = self._driver.ask("DeviceGetMemoryInfo", self._handle, version=version)
            if self._knows_v2 is None:
                self._knows_v2 = answer is not None
        if answer is None:
            answer = self._driver.ask("DeviceGetMemoryInfo", self._handle)
        total, used = _bytes(getattr(answer, "total", None)), _bytes(getattr(answer, "used", None))
        if not total or used is None:
            return None
        return DriverMemory(total, used, _bytes(getattr(answer, "reserved", None)) or 0)

    def usage(self) -> dict[int, int | None] | None:
        """Process id -> bytes. None where the driver does not list processes."""
        found: dict[int, int | None] = {}
        answered = False
        for kind in ("Compute", "Graphics"):
            processes = self._driver.ask(f"DeviceGet{kind}RunningProcesses", self._handle)
            if processes is None:
                continue
            answered = True
            for process in processes:
                size = _bytes(process.usedGpuMemory)
                # One that does both is in both lists, with all its memory.
                found[int(process.pid)] = size if size is not None else found.get(int(process.pid))
        return found if answered else None

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """The processes on the device, those with most memory first."""
        usage = self.usage()
        if usage is None:
            return None
        ordered = sorted(usage.items(), key=lambda pair: (-(pair[1] or 0), pair[0]))
        return tuple(GpuProcess(pid, size, _user(pid), _command(pid)) for pid, size in ordered)

    def instances(self) -> Iterator[DriverDevice]:
        """The MIG instances of a GPU that is cut up; none of one that is not."""
        for index in range(int(self._driver.ask("DeviceGetMaxMigDeviceCount", self._handle) or 0)):
            handle = self._driver.ask("DeviceGetMigDeviceHandleByIndex", self._handle, index)
            if handle is not None:
                yield DriverDevice(self._driver, handle)


def _bytes(value: Any) -> int | None:
    """None for what NVML calls not available, under whichever guise."""
    if value is None:
        return None
    size = int(value)
    return size if 0 <= size < ABSURD else None


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def words_of(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _user(pid: int) -> str | None:
    """The owner of a process, on systems with /proc; a number where the user has no name here."""
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    try:
        return str(import_module("pwd").getpwuid(owner).pw_name)
    except (ImportError, KeyError):
        return str(owner)


def _command(pid: int) -> str | None:
    """The program's name without its folder or arguments, which may hold secrets."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            first = file.read(4096).partition(b"\0")[0]
    except OSError:
        return None
    return os.path.basename(first.decode(errors="replace")) or None
