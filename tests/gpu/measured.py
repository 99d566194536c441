"""One training run, measured row by row, with what PyTorch and the driver said beside each row."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from programs import Training

from gpumem_magic.devices.cuda import RING, CudaMachine
from gpumem_magic.recording.model import Recording
from gpumem_magic.recording.recorder import Recorder
from gpumem_magic.report.build import build
from gpumem_magic.report.model import ReportData

stand_in: Any = None
"""The virtual GPU that answers as a real one in a dry run (`virtual_as_real`), or None."""


def machine(ring: int = RING) -> CudaMachine:
    """The GPUs that are measured."""
    if stand_in is None:
        return CudaMachine(torch, ring=ring)
    from virtual_as_real import Machine

    return Machine(stand_in, ring)


@dataclass(frozen=True)
class Held:
    """What objects hold on the device, found by looking at them: bytes of different storages. None: not there yet.

    graph: what the loss keeps for backward and is neither a parameter, a buffer nor the batch.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    graph: int | None


def held(training: Training) -> Held:
    """By identity, with nothing of ours: the program's own model, optimizer and graph."""
    model, optimizer = training.model, training.optimizer
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    known = {**_storages(parameters), **_storages(model.buffers())}
    known.update(
        _storages([value for value in (vars(training).get("x"), vars(training).get("y")) if value is not None])
    )
    loss = vars(training).get("loss")
    graph = None
    if loss is not None and loss.grad_fn is not None:
        graph = sum(size for key, size in _storages(_saved(loss.grad_fn)).items() if key not in known)
    return Held(
        sum(_storages(parameters).values()),
        sum(_storages(model.buffers()).values()),
        sum(_storages(one.grad for one in parameters if one.grad is not None).values()),
        sum(_storages(states).values()),
        graph,
    )


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes of those on the device."""
    found = {}
    for tensor in tensors:
        if tensor.device.type == "cuda":
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """The tensors that an autograd graph keeps."""
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_"):
                try:
                    value = getattr(node, name)
                except RuntimeError:
                    # Backward has freed it.
                    continue
                yield from (
                    one for one in (value if isinstance(value, tuple | list) else (value,)) if torch.is_tensor(one)
                )


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
    report: ReportData
    told: list[Told] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)


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
    training = Training(name, f"cuda:{device}")
    recorder = Recorder(machine(RING if ring is None else ring), primary=device, names=("model", "optimizer"))
    told: list[Told] = []
    seen: list[Held] = []
    recorder.start({})
    error: BaseException | None = None
    try:
        for words, line, iteration, call in training.statements(iterations):
            call()
            recorder.checkpoint("statement", words, words, line, iteration, (3,) if iteration else ())
            told.append(ask(device))
            seen.append(held(training))
    except BaseException as raised:
        error = raised
        raise
    finally:
        namespace: dict[str, Any] = {key: vars(training).get(key) for key in ("model", "optimizer")}
        recording = recorder.finish(error, None, namespace)
        del error
    return Measured(recording, build(recording), told, seen)
