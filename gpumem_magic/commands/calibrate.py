"""``gpumem calibrate``: measures on a real GPU what the virtual one takes from its catalogue, and saves it for that one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from gpumem_magic.commands.common import FAILED, guarded
from gpumem_magic.devices import machines
from gpumem_magic.snapshot.whole_file import check_target, replace_file
from gpumem_magic.units import MIB, human
from gpumem_magic.virtual.card import calibration, measuring
from gpumem_magic.virtual.card.calibration import Calibration
from gpumem_magic.virtual.card.measuring import NoGpu, measure

Measuring = Callable[[int, str], Calibration]
"""(the GPU's number, "lazy" or "eager") -> its constants with kernels loaded that way. Raises NoGpu."""


def device_text(found: Calibration) -> str:
    """What to write behind ``%gpumem_device`` on another computer."""
    from gpumem_magic.virtual.card.catalog import CATALOG

    key = next((model.key for model in CATALOG.values() if model.name == found.name), None)
    context = f"context={-(-found.context_with_libraries_bytes // MIB)}MiB"
    if key is not None:
        return f"{key},{context},total={found.total_bytes}B"
    return f"virtual:{found.total_bytes}B,{context},name={found.name.replace(',', ' ')}"


@guarded
def run(options: argparse.Namespace) -> int:
    """Prints the constants. 0; 1 with one line where there is no GPU; 2 where a file can't be read or written."""
    if options.show:
        return _show()
    if options.forget:
        path = calibration.forget()
        print("gpumem: nothing was saved" if path is None else f"Removed {path}: the catalogue's figures apply again.")
        return 0
    return _calibrate(options)


def _show() -> int:
    calibrations = calibration.load()
    if not calibrations:
        print("Nothing is saved: virtual GPUs use the catalogue's figures. `gpumem calibrate` measures a real GPU.")
        return 0
    print(f"{calibration.file_path()}\n")
    print("\n\n".join(f"{words(found)}\nmeasured {found.source}" for found in calibrations.values()))
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    check_target("--json", options.json, ())
    import torch

    is_virtual = machines.virtual() is not None
    try:
        measuring.check(torch, options.device)
        found = measure(torch, options.device) if is_virtual else both_ways(options.device, measuring.measure_apart)
    except NoGpu as nothing:
        print(f"gpumem: {nothing}", file=sys.stderr)
        return FAILED
    print(words(found))
    if options.json is not None:
        text = json.dumps(asdict(found), indent=1) + "\n"
        replace_file(Path(options.json), lambda file: file.write(text.encode("ascii")))
    if is_virtual:
        print("This is a virtual GPU, so nothing is saved.")
    else:
        print(f"Saved in {calibration.save(found)}: virtual GPUs of this name use these figures from now on.")
    return 0


def both_ways(index: int, measured: Measuring) -> Calibration:
    """The constants with kernels loaded when first used, and the context with all loaded at once where that can be had."""
    lazy = measured(index, "lazy")
    try:
        eager = measured(index, "eager")
    except NoGpu:
        # CUDA before 11.7, or too little memory for all kernels: the rest is worth keeping.
        return lazy
    return replace(lazy, context_eager_bytes=eager.context_with_libraries_bytes)


def words(found: Calibration) -> str:
    """The constants as lines of text."""
    source = "this process, as the driver tells it" if found.measured == "process" else "the device, before and after"
    libraries = ", ".join(f"{name} {human(size)}" for name, size in found.library_bytes.items())
    lines = [
        f"{found.name}, torch {found.torch}" + (f", driver {found.driver}" if found.driver else ""),
        f"memory: {human(found.total_bytes)} (torch)"
        + (f", {found.smi_total_bytes // MIB} MiB (nvidia-smi)" if found.smi_total_bytes else ""),
        f"context: {human(found.context_bytes)} after the first tensor, {human(found.context_with_libraries_bytes)} with the "
        f"libraries loaded ({source})",
    ]
    if libraries:
        lines.append(f"growth at first use: {libraries}")
    if found.context_eager_bytes is not None:
        lines.append(
            f"context with all kernels loaded at once (CUDA_MODULE_LOADING=EAGER): {human(found.context_eager_bytes)}"
        )
    lines += [
        f"cuBLAS workspace: {human(found.cublas_workspace_bytes)}",
        f"as a virtual GPU elsewhere: %gpumem_device {device_text(found)}",
    ]
    return "\n".join(lines)
