"""What our own work takes of the host at each step, on the road of a real GPU, without one: in time of the thread.

    python benchmarks/overhead_on_the_host.py [--layers 4 34] [--steps 100]

PyTorch's tensors on the host stand for a GPU's, and its counters stand still: what is left is the cell of `overhead.py` and what
`%%gpumem` does beside it. Of a device's own answers nothing is in it (on an H100 the counters take 25 microseconds, NVML's figure
20), so these are no figures of a GPU: they show whether a change makes measuring cheaper. The least of five runs counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import overhead  # noqa: E402

from gpumem_magic.devices import cuda  # noqa: E402
from gpumem_magic.devices.driver import Driver, DriverDevice, DriverMemory  # noqa: E402
from gpumem_magic.session import device, recording  # noqa: E402
from gpumem_magic.units import GIB, MIB  # noqa: E402

RUNS = 5
WIDTH, BATCH = 16, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 34], help="linear layers of the model")
    parser.add_argument("--steps", type=int, default=100, help="steps of a run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = HostAsDevice()
    cuda.find = lambda *_: AnyDriver()  # type: ignore[assignment]
    recording.for_recording = lambda _: device.Chosen(machine, 0)  # type: ignore[assignment]
    shell = overhead.open_shell()
    if shell is None:
        parser.error("IPython is not installed")
    sides = {"plain": overhead.plain, "%%gpumem": overhead.sides(shell)["%%gpumem"]}
    for layers in options.layers:
        variables = of_the_host(layers)
        found = {name: least(side, variables, options.steps) for name, side in sides.items()}
        ours = found["%%gpumem"] - found["plain"]
        print(f"{layers} layers: {found['plain']:.2f} ms a step plain, {ours:.2f} ms more with %%gpumem", flush=True)


def least(side: Callable[[dict[str, Any]], None], variables: dict[str, Any], steps: int) -> float:
    """Milliseconds of a step."""
    variables["steps"] = steps
    bench = overhead.Bench(0, variables, 0)
    return min(1000 * bench.run(side)[0] / steps for _ in range(RUNS))


def of_the_host(layers: int) -> dict[str, Any]:
    model = nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters()),
        "x": torch.randn(BATCH, WIDTH),
        "synchronize": lambda: None,
        "clock": time.thread_time,
        "began": [],
        "ended": [],
    }


class AnyDriver(DriverDevice):
    uuid, name = "GPU-0", "the host"

    def __init__(self) -> None:
        pass

    def memory(self) -> DriverMemory:
        return DriverMemory(80 * GIB, 3 * GIB)

    def usage(self) -> dict[int, int | None]:
        return {os.getpid(): 2 * GIB}


class HostAsDevice(cuda.CudaMachine):
    """A tensor's address on the host is its place."""

    def __init__(self) -> None:
        super().__init__(still_torch(), Driver(None, "there is none"))

    def plain_place(self, tensor: Any) -> tuple[int, int] | None:
        address = int(tensor.untyped_storage().data_ptr())
        return (0, address) if address else None

    def locate(self, tensor: Any) -> tuple[int, int] | None:
        tensors = self._tensors
        with tensors.no_functions(), tensors.no_dispatch():
            return self.plain_place(tensor)


def still_torch() -> Any:
    """A `torch` whose one GPU has 2 MiB reserved, 1 KiB of them allocated, whatever happens."""
    every = {"current": KIB_ALLOCATED, "peak": KIB_ALLOCATED, "allocated": 2, "freed": 0}
    reserved = {"current": 2 * MIB, "peak": 2 * MIB, "allocated": 0, "freed": 0}
    counters = {name: {"all": every} for name in ("allocation", "active", "allocated_bytes")}
    stats = {**counters, "reserved_bytes": {"all": reserved}, **dict.fromkeys(COUNTED, 0)}
    snapshot = {"segments": [], "device_traces": [[]], "allocator_settings": {}}
    nothing = lambda *_, **__: None  # noqa: E731
    below = ("_cuda_record_memory_history", "_cuda_resetAccumulatedMemoryStats")
    return SimpleNamespace(
        __version__=torch.__version__,
        version=SimpleNamespace(hip=None),
        _C=SimpleNamespace(
            **dict.fromkeys(below, nothing),
            _cuda_isHistoryEnabled=lambda: False,
            _cuda_hasPrimaryContext=lambda _: True,
        ),
        cuda=SimpleNamespace(
            is_initialized=lambda: True,
            device_count=lambda: 1,
            current_device=lambda: 0,
            get_device_properties=lambda _: SimpleNamespace(name="the host", total_memory=80 * GIB, uuid="0"),
            get_per_process_memory_fraction=lambda _: 1.0,
            get_allocator_backend=lambda: "native",
            memory_stats_as_nested_dict=lambda _: stats,
            memory_snapshot=lambda include_traces=True: [],
            memory=SimpleNamespace(_snapshot=lambda: snapshot, _record_memory_history=record),
            _queued_calls=[],
        ),
    )


KIB_ALLOCATED = 1024
COUNTED = ("num_device_alloc", "num_device_free", "num_ooms", "num_alloc_retries")


def record(enabled: Any = "all", context: Any = "all", stacks: Any = "all", max_entries: int = 0) -> None:
    """What `check_history` asks for: the names are those of PyTorch's."""


if __name__ == "__main__":
    main()
