"""pynvml while virtual GPUs are on: the real module's own functions, answered by the virtual devices."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_magic.units import MIB
from gpumem_magic.virtual.card import smi_script
from gpumem_magic.virtual.card.catalog import DeviceSpec, GpuModel, device_uuid, parse
from gpumem_magic.virtual.card.nvml import VirtualNvml

pynvml = pytest.importorskip("pynvml")

# What a notebook that was open before has already: every public name, from before any virtual device.
EARLIER: dict[str, Any] = {}
exec("from pynvml import *", EARLIER)


class FakeDevice:
    def __init__(self, model: GpuModel, index: int) -> None:
        self.model, self.index, self.uuid = model, index, device_uuid(model.name, index)
        self.process = 0

    def used_bytes(self) -> int:
        return self.model.idle_bytes + self.process

    def process_bytes(self) -> int:
        return self.process


def devices(text: str) -> list[FakeDevice]:
    spec = parse(text)
    assert isinstance(spec, DeviceSpec)
    return [FakeDevice(model, index) for index, model in enumerate(spec.models)]


def state() -> dict[str, Any]:
    """Everything that the module holds, and the tables inside it that change."""
    return {**vars(pynvml), "texts": dict(pynvml.NVMLError._errcode_to_string)}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = state()
    yield
    after = state()
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] is not before[name] and name != "texts"] == []
    assert after["texts"] == before["texts"]


@pytest.fixture
def two() -> Iterator[list[FakeDevice]]:
    pair = devices("2xT4")
    nvml = VirtualNvml(pair)
    assert nvml.install()
    pynvml.nvmlInit()
    yield pair
    nvml.remove()


def test_the_guides_helper_works_with_names_imported_before() -> None:
    # The helper of the Hugging Face guide, on the device that its figures come from.
    names = dict(EARLIER)
    exec(
        "def print_gpu_utilization():\n"
        "    nvmlInit()\n"
        "    handle = nvmlDeviceGetHandleByIndex(0)\n"
        "    info = nvmlDeviceGetMemoryInfo(handle)\n"
        "    return f'GPU memory occupied: {info.used//1024**2} MB.'\n",
        names,
    )
    (device,) = devices("V100-16GB")
    nvml = VirtualNvml([device])
    nvml.install()
    try:
        assert names["print_gpu_utilization"]() == "GPU memory occupied: 0 MB."
        device.process = device.model.context_bytes + 2 * MIB
        assert names["print_gpu_utilization"]() == "GPU memory occupied: 1343 MB."
    finally:
        nvml.remove()


def test_both_forms_of_memory(two: list[FakeDevice]) -> None:
    two[1].process = 1000 * MIB
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    model = two[1].model
    second = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    assert (second.total, second.reserved, second.used) == (15360 * MIB, model.driver_reserved_bytes, 1000 * MIB)
    assert second.free == second.total - second.reserved - second.used == model.total_bytes - 1000 * MIB
    # The first form counts the driver's own part as used.
    first = pynvml.nvmlDeviceGetMemoryInfo(handle)
    assert (first.total, first.free) == (second.total, second.free)
    assert first.used == second.used + second.reserved
    assert first.used + first.free == first.total


def test_facts_of_a_device(two: list[FakeDevice]) -> None:
    assert pynvml.nvmlDeviceGetCount() == 2
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    assert pynvml.nvmlDeviceGetIndex(handle) == 1
    assert pynvml.nvmlDeviceGetName(handle) == "Tesla T4"
    assert pynvml.nvmlDeviceGetUUID(handle) == two[1].uuid
    assert pynvml.nvmlDeviceGetCudaComputeCapability(handle) == (7, 5)
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    assert (rates.gpu, rates.memory) == (0, 0)
    pci = pynvml.nvmlDeviceGetPciInfo(handle)
    assert (pci.busId, pci.busIdLegacy) == ("00000000:00:05.0", "0000:00:05.0")
    assert (pci.domain, pci.bus, pci.device) == (0, 0, 5)
    assert pynvml.nvmlSystemGetDriverVersion() == smi_script.DRIVER_VERSION
    assert smi_script.CUDA_VERSION == "13.0"
    assert pynvml.nvmlSystemGetCudaDriverVersion() == pynvml.nvmlSystemGetCudaDriverVersion_v2() == 13000
    assert pynvml.nvmlSystemGetNVMLVersion() == f"13.{smi_script.DRIVER_VERSION}"


def test_a_device_is_found_by_uuid_and_bus(two: list[FakeDevice]) -> None:
    found = [
        pynvml.nvmlDeviceGetHandleByUUID(two[1].uuid),
        pynvml.nvmlDeviceGetHandleByPciBusId("00000000:00:05.0"),
        pynvml.nvmlDeviceGetHandleByPciBusId("0000:00:05.0"),
    ]
    assert [pynvml.nvmlDeviceGetIndex(handle) for handle in found] == [1, 1, 1]
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByUUID("GPU-00000000-0000-0000-0000-000000000000")
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByPciBusId("0000:00:1F.0")


def test_this_process_is_listed_once_it_uses_the_device(two: list[FakeDevice]) -> None:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    queries = [
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetComputeRunningProcesses_v2,
        pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
    ]
    assert [query(handle) for query in queries] == [[], [], []]
    two[0].process = 400 * MIB
    for query in queries:
        (process,) = query(handle)
        assert (process.pid, process.usedGpuMemory) == (os.getpid(), 400 * MIB)
    assert pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle) == []


def test_the_first_form_of_the_process_list(two: list[FakeDevice]) -> None:
    # Old bindings (nvidia-ml-py before 11.510) ask the function without a suffix, with the shorter structure.
    class Process(ctypes.Structure):
        _fields_ = (("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong))

    two[0].process = 7
    function = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetComputeRunningProcesses")
    handle, count, array = pynvml.nvmlDeviceGetHandleByIndex(0), ctypes.c_uint(0), (Process * 2)()
    assert function(handle, ctypes.byref(count), None) == pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    assert count.value == 1
    count.value = 2
    assert function(handle, ctypes.byref(count), array) == pynvml.NVML_SUCCESS
    assert (count.value, array[0].pid, array[0].used, array[1].pid) == (1, os.getpid(), 7, 0)


def test_what_a_virtual_gpu_has_no_answer_for(two: list[FakeDevice]) -> None:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    for ask in (
        lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        lambda: pynvml.nvmlDeviceGetPowerUsage(handle),
        lambda: pynvml.nvmlDeviceGetMigMode(handle),
        lambda: pynvml.nvmlUnitGetCount(),
    ):
        with pytest.raises(pynvml.NVMLError_NotSupported, match="Not Supported"):
            ask()


@pytest.mark.parametrize("index", [2, 63, -1])
def test_a_bad_index(two: list[FakeDevice], index: int) -> None:
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetHandleByIndex(index)


def test_a_handle_from_elsewhere(two: list[FakeDevice]) -> None:
    memory = (ctypes.c_char * 64)()
    foreign = ctypes.cast(memory, pynvml.c_nvmlDevice_t)
    for ask in (
        pynvml.nvmlDeviceGetName,
        pynvml.nvmlDeviceGetUUID,
        pynvml.nvmlDeviceGetIndex,
        pynvml.nvmlDeviceGetMemoryInfo,
        lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2),
        pynvml.nvmlDeviceGetUtilizationRates,
        pynvml.nvmlDeviceGetPciInfo,
        pynvml.nvmlDeviceGetCudaComputeCapability,
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        for handle in (foreign, pynvml.c_nvmlDevice_t()):
            with pytest.raises(pynvml.NVMLError_InvalidArgument):
                ask(handle)


def test_a_short_buffer_is_not_overrun(two: list[FakeDevice]) -> None:
    buffer = ctypes.create_string_buffer(b"....", 4)
    function = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetName")
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert function(handle, buffer, ctypes.c_uint(4)) == pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    assert buffer.raw == b"...."


def test_init_and_shutdown_count() -> None:
    nvml = VirtualNvml(devices("T4"))
    nvml.install()
    try:
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            pynvml.nvmlDeviceGetCount()
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            pynvml.nvmlShutdown()
        pynvml.nvmlInit()
        pynvml.nvmlInitWithFlags(0)
        pynvml.nvmlShutdown()
        assert pynvml.nvmlDeviceGetCount() == 1
        pynvml.nvmlShutdown()
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            pynvml.nvmlDeviceGetCount()
        assert pynvml.nvmlErrorString(pynvml.NVML_ERROR_NOT_SUPPORTED) == "Not Supported"
        assert pynvml.nvmlErrorString(0) == "Success"
        assert str(pynvml.NVMLError(pynvml.NVML_ERROR_GPU_NOT_FOUND)) == "Unknown Error"
    finally:
        nvml.remove()


def test_a_real_library_that_was_loaded_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(pointer: Any) -> int:
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint))[0] = 7
        return 0

    real = SimpleNamespace(nvmlDeviceGetCount_v2=count, nvmlInitWithFlags=lambda flags: 0, nvmlShutdown=lambda: 0)
    monkeypatch.setattr(pynvml, "nvmlLib", real)
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 7
    before = {name: vars(pynvml)[name] for name in vars(pynvml)}
    nvml = VirtualNvml(devices("2xT4"))
    nvml.install()
    # Whoever had initialised the library stays initialised.
    assert pynvml.nvmlDeviceGetCount() == 2
    pynvml.nvmlShutdown()
    nvml.install()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()
    nvml.remove()
    nvml.remove()
    assert [name for name in before if vars(pynvml)[name] is not before[name]] == []
    assert pynvml.nvmlLib is real
    assert pynvml.nvmlDeviceGetCount() == 7


def test_after_remove_the_binding_looks_for_a_driver_again() -> None:
    program = f"""
import sys
sys.path.insert(0, {os.fspath(Path(__file__).parents[1])!r})
sys.path.insert(0, {os.fspath(Path(__file__).parent)!r})
import ctypes
def no_driver(*args, **kwargs):
    raise OSError("no such library")
ctypes.CDLL = no_driver
from test_nvml import VirtualNvml, devices
import pynvml
nvml = VirtualNvml(devices("T4"))
nvml.install()
pynvml.nvmlInit()
kept = pynvml.nvmlDeviceGetHandleByIndex(0)
nvml.remove()
for ask in (pynvml.nvmlInit, pynvml.nvmlDeviceGetCount, lambda: pynvml.nvmlDeviceGetName(kept)):
    try:
        ask()
    except pynvml.NVMLError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["NVML Shared Library Not Found", "Uninitialized", "Uninitialized"]


def test_without_pynvml_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml = VirtualNvml(devices("T4"))
    assert not nvml.install()
    nvml.remove()


def test_another_module_called_pynvml_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(__version__="0.1"))
    with pytest.raises(RuntimeError, match=r"version 0\.1.*_nvmlGetFunctionPointer.*nvidia-ml-py"):
        VirtualNvml(devices("T4")).install()


def test_the_retired_package_keeps_its_functions_in_a_submodule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "pynvml"
    package.mkdir()
    (package / "nvml.py").write_bytes(Path(pynvml.__file__).read_bytes())
    (package / "__init__.py").write_text("from .nvml import *\n")
    for name in ("pynvml", "pynvml.nvml"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    nvml = VirtualNvml(devices("2xT4"))
    try:
        assert nvml.install()
        retired = sys.modules["pynvml"]
        assert retired is not pynvml
        assert not hasattr(retired, "_nvmlGetFunctionPointer")
        retired.nvmlInit()
        assert retired.nvmlDeviceGetCount() == 2
    finally:
        nvml.remove()
        sys.modules.pop("pynvml.nvml", None)
