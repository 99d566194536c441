"""Measures the constants of a real GPU in a process that has not used CUDA yet: the context, libraries, a workspace.

The context is what the driver shows for this process beyond PyTorch's reserved memory, after the first tensor and again after
each library's first use. How kernels are loaded is decided before CUDA begins, so each way has a process of its own
(`measure_apart`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from typing import Any

from gpumem_magic.devices.driver import Driver, DriverDevice
from gpumem_magic.units import counted
from gpumem_magic.virtual.card.calibration import Calibration

_PATIENCE = 300.0
# They change what is measured: the constants are those of PyTorch's defaults.
_NOT_HANDED_ON = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "TORCH_CUBLAS_WORKSPACE_CACHE",
)


class NoGpu(Exception):
    """There is nothing to calibrate. The text is one line."""


def check(torch: Any, index: int) -> None:
    """Raises NoGpu where there is no GPU of this number."""
    if not torch.cuda.is_available():
        raise NoGpu(
            "calibrate measures a real NVIDIA GPU, but torch.cuda finds none here; a virtual GPU takes its constants "
            "from the catalogue (gpumem devices), and context= sets another"
        )
    if not 0 <= index < torch.cuda.device_count():
        raise NoGpu(f"there is no cuda:{index}; this process sees {counted(torch.cuda.device_count(), 'GPU')}")


def measure(torch: Any, index: int) -> Calibration:
    """Measures GPU `index` of this process. Raises NoGpu where there is none, or its driver and runtime say nothing of memory.

    The tensors are small and gone at the end; the context stays until the process ends.
    """
    check(torch, index)
    properties = torch.cuda.get_device_properties(index)
    opened = Driver.open()
    driver = opened.by_uuid(f"GPU-{str(properties.uuid).removeprefix('GPU-')}")
    used, how = _used(torch, driver, index), "difference"
    idle = used()
    alive = [torch.ones(1, device=f"cuda:{index}")]
    torch.cuda.synchronize(index)
    by_process = driver is not None and (driver.usage() or {}).get(os.getpid()) is not None
    if by_process and driver is not None:
        used, how, idle = _of_process(driver), "process", 0

    def context() -> int:
        torch.cuda.synchronize(index)
        return int(max(0, used() - idle - torch.cuda.memory_reserved(index)))

    first = now = context()
    libraries: dict[str, int] = {}

    def grown(library: str) -> None:
        nonlocal now
        before, now = now, context()
        libraries[library] = max(0, now - before)

    square = torch.ones(256, 256, device=f"cuda:{index}")
    grown("PyTorch's kernels")
    before = torch.cuda.memory_allocated(index)
    # From 2.15 on, a workspace is there only during the product. Nothing else runs in this process, so the peak is ours.
    torch.cuda.reset_peak_memory_stats(index)
    product = square @ square
    workspace = torch.cuda.max_memory_allocated(index) - before - product.untyped_storage().nbytes()
    alive.append(product.half() @ product.half())
    grown("cuBLAS")
    alive.append(torch.nn.functional.linear(square, square, square[0]))
    grown("cuBLASLt")
    alive.append(torch.nn.functional.conv2d(square.view(1, 4, 128, 128), square.view(-1)[:144].view(4, 4, 3, 3)))
    grown("cuDNN")
    memory = None if driver is None else driver.memory()
    version = opened.ask("SystemGetDriverVersion")
    return Calibration(
        name=str(properties.name),
        torch=str(torch.__version__),
        total_bytes=int(properties.total_memory),
        smi_total_bytes=None if memory is None else memory.total,
        context_bytes=first,
        context_with_libraries_bytes=now,
        cublas_workspace_bytes=max(0, workspace),
        measured=how,
        library_bytes=libraries,
        driver=version.decode(errors="replace") if isinstance(version, bytes) else version,
        date=date.today().isoformat(),
    )


def _used(torch: Any, driver: DriverDevice | None, index: int) -> Callable[[], int]:
    """What is used of the whole device: as the driver says, else as the CUDA runtime does."""

    def used() -> int:
        memory = None if driver is None else driver.memory()
        if memory is not None:
            return memory.used
        free, total = torch.cuda.mem_get_info(index)
        return int(total) - int(free)

    return used


def _of_process(driver: DriverDevice) -> Callable[[], int]:
    def used() -> int:
        return (driver.usage() or {}).get(os.getpid()) or 0

    return used


def measure_apart(index: int, loading: str) -> Calibration:
    """As `measure`, in a process of its own. loading: "eager" or "lazy". Raises NoGpu where that process failed."""
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_HANDED_ON}
    environment["CUDA_MODULE_LOADING"] = loading.upper()
    command = [sys.executable, "-m", "gpumem_magic.virtual.card.measuring", str(index)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise NoGpu(f"measuring took more than {_PATIENCE:.0f} seconds and was stopped") from None
    except OSError as error:
        raise NoGpu(f"a process to measure in could not be started: {error.strerror or error}") from None
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if done.returncode:
        raise NoGpu(f"the measuring process ended with status {done.returncode}: {last}")
    try:
        return Calibration.from_dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (ValueError, IndexError, RecursionError) as error:
        raise NoGpu(f"the measuring process gave no usable answer: {' '.join(str(error).split())}") from None


def _main() -> int:
    import torch

    try:
        found = measure(torch, int(sys.argv[1]))
    except NoGpu as nothing:
        print(nothing, file=sys.stderr)
        return 1
    print(json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
