"""What cuDNN itself says that it takes for a convolution on a card that is not there: no GPU and no driver is needed.

Since 9.8 cuDNN makes plans for a card that is only described, by the heuristics that it asks on a device (NVIDIA: "Deviceless
ahead-of-time compilation"). It is asked as ``Conv_v8.cpp`` of ATen asks it, through its public functions, and nothing is run:
heuristics of the instant mode, then the fallback ones, without what lowers precision. Of a described card only the compute
capability made a difference in 105 calls on an A100 and 60 each on three others, but for two on an H100 (its clocks).

The description is JSON. NVIDIA does not document its fields: their names are what cuDNN complains of where one is missing. 9.8,
9.10 and 9.20 were asked; 9.28 answers only where a driver's library is. Where cuDNN refuses anything, there is no answer, and
`cudnn` estimates.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gpumem_magic.virtual.card.models import GpuModel
from gpumem_magic.virtual.engine.memory import Convolution
from gpumem_magic.virtual.operators import cudnn_answers

VARIABLE = "GPUMEM_CUDNN"
"""Names another library; set and empty, none is asked."""
_FILES = ("libcudnn.so.9", "cudnn64_9.dll")


class AskedLibrary:
    """A process that asks cuDNN of the files. version: 92000 for 9.20.0; 0 where none of them can be asked, or no more."""

    def __init__(self, *names: str) -> None:
        self.version = 0
        self._names = names
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.close)
        self._start()

    def _start(self) -> None:
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-I", cudnn_answers.__file__, *self._names],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # It sees no device: a real one is not its business. Nor is Ctrl-C.
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,
                text=True,
            )
            self.version = int(self._line() or 0)

    def close(self) -> None:
        if self._process is not None and os.getpid() == self._owner:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def workspaces(self, call: Convolution, model: GpuModel, tf32: bool, deterministic: bool) -> Iterator[int]:
        """Bytes of each plan, in the order in which PyTorch tries them. None at all where cuDNN has no answer."""
        request = {**written(call), "tf32": tf32, "deterministic": deterministic}
        first = self._ask(model, request, every=False)
        yield from first
        if first:
            yield from self._ask(model, request, every=True)[1:]

    def _ask(self, model: GpuModel, request: dict[str, Any], every: bool) -> list[int]:
        # A forked process would answer into its parent's pipe.
        if not self.version or os.getpid() != self._owner:
            return []
        with self._lock:
            if self._process is None:
                self._start()
            try:
                line = self._answer(json.dumps([described(model), request, every]))
            except BaseException:
                # Interrupted: its answer would be taken for that to the next question. It is started again then.
                self.close()
                raise
            if not line:
                self.version = 0
            return [int(size) for size in json.loads(line or "[]")]

    def _answer(self, question: str) -> str:
        """One line; empty where the process has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(question + "\n")
            self._process.stdin.flush()
            return self._line()
        return ""

    def _line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def written(call: Convolution) -> dict[str, Any]:
    """As JSON has it. PyTorch gives cuDNN a convolution over one dimension as one over two (`view1d_as_2d`)."""
    shapes, stride, padding, dilation = [call.fine, call.weight, call.coarse], call.stride, call.padding, call.dilation
    if len(stride) == 1:
        shapes = [(*shape[:2], 1, *shape[2:]) for shape in shapes]
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    return {
        "way": call.way, "fine": shapes[0], "weight": shapes[1], "coarse": shapes[2], "stride": stride, "padding": padding,
        "dilation": dilation, "dtype": str(call.dtype).removeprefix("torch."), "last": call.last,
    }  # fmt: skip


def described(model: GpuModel) -> dict[str, Any]:
    """The card as cuDNN's description has it. What the catalogue does not say is that of an A100, as are the clocks: nothing is
    timed."""
    major, minor = model.capability
    return {
        "deviceName": model.name, "deviceVer": major * 100 + minor * 10, "driverVer": 13000, "cudaDeviceId": 0, "pciDeviceId": 0,
        "multiProcessorCount": model.multi_processor_count, "totalGlobalMem": model.total_bytes, "warpSize": model.warp_size,
        "maxSharedMemoryPerBlock": model.shared_memory_per_block,
        "maxSharedMemoryPerBlockOptin": model.shared_memory_per_block_optin, "reservedSharedMemoryPerBlock": 1024,
        "regsPerBlock": 65536, "maxRegistersPerSM": model.registers_per_multiprocessor, "maxCtasPerSM": 32,
        "maxThreadsPerBlock": model.max_threads_per_block, "maxThreadsPerSM": model.max_threads_per_multiprocessor,
        "l2CacheSize": model.l2_cache_bytes, "smClockRateKHz": 1_410_000, "memClockRateKHz": 1_593_000,
        "maxGridSize": [2**31 - 1, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "isTccDriver": 0, "supportCoopLaunch": 1,
    }  # fmt: skip


@functools.cache
def installed() -> AskedLibrary | None:
    """cuDNN that PyTorch's CUDA build came with, or NVIDIA's package of it beside another build; None where there is none that
    can be asked."""
    told = os.environ.get(VARIABLE)
    names = [*_in_folders()] if told is None else [told] if told else []
    # Conda and system packages have it where the loader looks.
    if told is None and torch.backends.cuda.is_built() and not torch.version.hip:
        names += _FILES
    if not names:
        return None
    library = AskedLibrary(*names)
    if library.version:
        return library
    library.close()
    return None


def _in_folders() -> Iterator[str]:
    folders = [Path(torch.__file__).parent / "lib"]
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec("nvidia.cudnn")
        places = (found.submodule_search_locations or ()) if found else ()
        folders += [Path(place) / name for place in places for name in ("lib", "bin")]
    for folder in folders:
        yield from (str(folder / name) for name in _FILES if (folder / name).exists())
