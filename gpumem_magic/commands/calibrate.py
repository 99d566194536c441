"""``gpumem calibrate``: measures on a real GPU what the virtual one takes from its catalogue, and says how to use it.

It needs a process that has not used CUDA yet, which a command is: the context is what the driver shows for this process beyond
PyTorch's reserved memory, after the first tensor and again after products and a convolution, whose kernels and libraries are
loaded on first use.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpumem_magic.commands.common import FAILED, guarded
from gpumem_magic.devices.driver import Driver, DriverDevice
from gpumem_magic.units import MIB, human


class NoGpu(Exception):
    """There is nothing to calibrate. The text is one line."""


@dataclass(frozen=True)
class Calibration:
    """The constants of one GPU with one build of PyTorch. Sizes in bytes; None where the driver does not say.

    context_bytes: after the first tensor. context_with_libraries_bytes: after products and a convolution. cublas_workspace_bytes:
    what PyTorch's allocator keeps after the first product. measured: "process" (the driver tells this process's memory) or
    "difference" (the device's memory before and after, which others may have changed).
    """

    name: str
    torch: str
    total_bytes: int
    smi_total_bytes: int | None
    context_bytes: int
    context_with_libraries_bytes: int
    cublas_workspace_bytes: int
    measured: str

    @property
    def device_text(self) -> str:
        """What to write behind ``%gpumem_device``."""
        from gpumem_magic.virtual.catalog import CATALOG

        key = next((model.key for model in CATALOG.values() if model.name == self.name), None)
        context = f"context={-(-self.context_with_libraries_bytes // MIB)}MiB"
        if key is not None:
            return f"{key},{context},total={self.total_bytes}B"
        return f"virtual:{self.total_bytes}B,{context},name={self.name.replace(',', ' ')}"


def measure(torch: Any, index: int) -> Calibration:
    """Measures GPU `index` of this process. Raises NoGpu where there is none, or its driver and runtime say nothing of memory.

    The tensors are small and gone at the end; the context stays until the process ends.
    """
    if not torch.cuda.is_available():
        raise NoGpu(
            "calibrate measures a real NVIDIA GPU, and torch.cuda finds none here; a virtual GPU takes its constants from the "
            "catalogue (gpumem devices), and context= sets another"
        )
    if not 0 <= index < torch.cuda.device_count():
        raise NoGpu(f"there is no cuda:{index}; this process sees {torch.cuda.device_count()} GPU(s)")
    properties = torch.cuda.get_device_properties(index)
    driver = Driver.open().by_uuid(f"GPU-{str(properties.uuid).removeprefix('GPU-')}")
    used, how = _used(torch, driver, index)
    idle = used()
    kept = [torch.ones(1, device=f"cuda:{index}")]
    torch.cuda.synchronize(index)
    by_process = driver is not None and (driver.usage() or {}).get(os.getpid()) is not None
    if by_process and driver is not None:
        used, how, idle = _of_process(driver), "process", 0
    context = used() - idle - torch.cuda.memory_reserved(index)
    square = torch.ones(256, 256, device=f"cuda:{index}")
    before = torch.cuda.memory_allocated(index)
    product = square @ square
    workspace = torch.cuda.memory_allocated(index) - before - product.untyped_storage().nbytes()
    kept += [torch.nn.functional.linear(square, square, square[0]), product.half() @ product.half()]
    kept.append(torch.nn.functional.conv2d(square.view(1, 4, 128, 128), square.view(-1)[:144].view(4, 4, 3, 3)))
    torch.cuda.synchronize(index)
    with_libraries = used() - idle - torch.cuda.memory_reserved(index)
    memory = None if driver is None else driver.memory()
    return Calibration(
        name=str(properties.name),
        torch=str(torch.__version__),
        total_bytes=int(properties.total_memory),
        smi_total_bytes=None if memory is None else memory.total,
        context_bytes=max(0, context),
        context_with_libraries_bytes=max(0, with_libraries),
        cublas_workspace_bytes=max(0, workspace),
        measured=how,
    )


def _used(torch: Any, driver: DriverDevice | None, index: int) -> tuple[Callable[[], int], str]:
    """What is used of the whole device: as the driver says, else as the CUDA runtime does."""

    def used() -> int:
        memory = None if driver is None else driver.memory()
        if memory is not None:
            return memory.used
        free, total = torch.cuda.mem_get_info(index)
        return int(total) - int(free)

    return used, "difference"


def _of_process(driver: DriverDevice) -> Callable[[], int]:
    def used() -> int:
        return (driver.usage() or {}).get(os.getpid()) or 0

    return used


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the subcommand; its options have the attribute `run`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "calibrate",
        help="measure this computer's GPU for the virtual one",
        description="Measures the CUDA context and cuBLAS's workspace of a real GPU, and prints the device to write behind "
        "%%gpumem_device for a virtual GPU that is like it.",
    )
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the GPU (default 0)")
    parser.add_argument("--json", metavar="PATH", help="also write the constants to PATH, as JSON")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> int:
    """Prints the constants. 0; 1 with one line where there is no GPU; 2 where PATH can't be written."""
    return guarded(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    import torch

    try:
        found = measure(torch, options.device)
    except NoGpu as nothing:
        print(f"gpumem: {nothing}", file=sys.stderr)
        return FAILED
    print(words(found))
    if options.json is not None:
        Path(options.json).write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    return 0


def words(found: Calibration) -> str:
    """The constants as lines of text."""
    source = "this process, as the driver tells it" if found.measured == "process" else "the device, before and after"
    return "\n".join(
        [
            f"{found.name}, torch {found.torch}",
            f"memory: {human(found.total_bytes)} (torch)"
            + (f", {found.smi_total_bytes // MIB} MiB (nvidia-smi)" if found.smi_total_bytes else ""),
            f"context: {human(found.context_bytes)} after the first tensor, {human(found.context_with_libraries_bytes)} with the "
            f"libraries loaded ({source})",
            f"cuBLAS workspace: {human(found.cublas_workspace_bytes)}",
            f"as a virtual GPU: %gpumem_device {found.device_text}",
        ]
    )
