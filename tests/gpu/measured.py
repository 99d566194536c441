"""One training run, measured row by row, with what PyTorch and the driver said beside each row."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from programs import Training

from gpumem_magic.devices.cuda import CudaMachine
from gpumem_magic.recording.model import Recording
from gpumem_magic.recording.recorder import Recorder
from gpumem_magic.report.build import build
from gpumem_magic.report.model import Report


@dataclass(frozen=True)
class Told:
    """Bytes. used: nvidia-smi's figure, or the runtime's where NVML is not there; own: this process's by NVML, or None."""

    allocated: int
    reserved: int
    highest: int
    used: int
    own: int | None


@dataclass
class Measured:
    recording: Recording
    report: Report
    told: list[Told] = field(default_factory=list)


def ask(index: int = 0) -> Told:
    """PyTorch's own functions and NVML's, not ours."""
    used, own = _driver(index)
    return Told(
        torch.cuda.memory_allocated(index),
        torch.cuda.memory_reserved(index),
        torch.cuda.max_memory_allocated(index),
        used,
        own,
    )


def _driver(index: int) -> tuple[int, int | None]:
    free, total = torch.cuda.mem_get_info(index)
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        used = int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except Exception:
        return total - free, None
    own = next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)
    return used, own


def measure(name: str, iterations: int, *, ring: int | None = None, device: int = 0) -> Measured:
    """Runs a program of `programs` with a row after each statement."""
    machine = CudaMachine(torch) if ring is None else CudaMachine(torch, ring=ring)
    training = Training(name, f"cuda:{device}")
    recorder = Recorder(machine, primary=device, names=("model", "optimizer"))
    told: list[Told] = []
    recorder.start({})
    error: BaseException | None = None
    try:
        for words, line, iteration, call in training.statements(iterations):
            call()
            recorder.checkpoint("statement", words, words, line, iteration, (3,) if iteration else ())
            told.append(ask(device))
    except BaseException as raised:
        error = raised
        raise
    finally:
        namespace: dict[str, Any] = {key: vars(training).get(key) for key in ("model", "optimizer")}
        recording = recorder.finish(error, None, namespace)
        del error
    return Measured(recording, build(recording), told)
