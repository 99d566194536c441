"""Which devices are measured: virtual ones that are on, the GPUs of this computer, or, with neither, a virtual one of our own.

Everything here answers in sentences for a reader, or raises `DeviceError` with one line that says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpumem_magic.devices.base import Label
    from gpumem_magic.devices.cuda import CudaMachine
    from gpumem_magic.virtual.card.catalog import RealDevice
    from gpumem_magic.virtual.engine.device import VirtualDevice
    from gpumem_magic.virtual.machine import VirtualMachine

DEFAULT_DEVICE = "T4"

# The number of the real GPU that `%gpumem_device cuda:1` asked for; None: whichever is current.
_chosen_gpu: int | None = None


class DeviceError(Exception):
    """A device cannot be used. The text is one line and says what to do."""


@dataclass(frozen=True)
class Chosen:
    """What a recording is about. primary: the number of its device; named: whether a person asked for that very one.

    turned_on: whether a virtual device came on for this recording, without being asked for. notes: for the reader.
    """

    machine: VirtualMachine | CudaMachine
    primary: int
    named: bool = False
    turned_on: bool = False
    notes: tuple[str, ...] = ()

    def remember(self, labels: Mapping[int, Mapping[int, Label]]) -> None:
        """labels: per device, what is known of the blocks that are live now, by address; for the next recording."""
        for device in self.machine.devices:
            device.remember(labels.get(device.facts.index, {}))


# ---- choosing


def choose(name: str) -> str:
    """Turns a virtual device on, or chooses a real one, and returns a sentence about it. Raises DeviceError."""
    global _chosen_gpu
    from gpumem_magic.virtual import gpu
    from gpumem_magic.virtual.card import catalog

    before = gpu.current()
    try:
        spec = catalog.parse(name)
        if isinstance(spec, catalog.RealDevice):
            return _choose_real(spec)
        left = _live_storages(before)
        machine = gpu.turn_on(name)
    except (gpu.DeviceError, catalog.UnknownDevice) as error:
        raise DeviceError(str(error)) from None
    _chosen_gpu = None
    tensors = "1 tensor" if left == 1 else f"{left} tensors"
    lost = f" {tensors} of {before.spec.text} can't be used any more." if before is not None and left else ""
    return f"{_machine_words(machine)} is on: code on cuda runs without a GPU, and without computing.{_calibrated(machine)}{lost}"


def is_any() -> bool:
    """Whether a virtual device is on, or a GPU was chosen."""
    from gpumem_magic.virtual import gpu

    return gpu.current() is not None or _chosen_gpu is not None


def off() -> str:
    """Turns the virtual device off, or forgets which GPU was chosen, and returns a sentence. Raises DeviceError."""
    global _chosen_gpu
    from gpumem_magic.virtual import gpu

    machine = gpu.current()
    if machine is None:
        if _chosen_gpu is None:
            return "No virtual device was on."
        forgotten, _chosen_gpu = _chosen_gpu, None
        return f"cuda:{forgotten} is no longer chosen: the current GPU is measured."
    try:
        left = gpu.turn_off()
    except gpu.DeviceError as error:
        raise DeviceError(str(error)) from None
    words = f"The virtual {machine.spec.text} is off, and PyTorch is as it was."
    if left:
        were = "1 tensor was still on it: it" if left == 1 else f"{left} tensors were still on it: they"
        words += f" {were} can't be used any more."
    return words


def for_recording(name: str | None) -> Chosen:
    """What to record: the device of that name, else the one that is on or chosen, else a virtual one, which is turned on."""
    import torch

    from gpumem_magic.devices import unsupported
    from gpumem_magic.virtual import gpu
    from gpumem_magic.virtual.card import catalog

    machine = gpu.current()
    spec = _parsed(name) if name is not None else None
    if machine is not None and isinstance(spec, catalog.RealDevice):
        # While a virtual device is on, `cuda:1` in the program is a virtual one, and so it is here.
        index = machine.face.current_device() if spec.index is None else spec.index
        return Chosen(machine, _checked_index(spec.text, index, len(machine.devices)), named=spec.index is not None)
    if isinstance(spec, catalog.RealDevice):
        real = _real_machine_for(spec)
        return Chosen(real, real.current_device() if spec.index is None else spec.index, spec.index is not None)
    if name is not None and spec is not None and (machine is None or machine.spec.models != spec.models):
        choose(name)
        machine = gpu.current()
    if machine is not None:
        return Chosen(machine, machine.face.current_device())
    here = _real_machine()
    if here is not None and here.devices:
        if _chosen_gpu is not None and _chosen_gpu < len(here.devices):
            return Chosen(here, _chosen_gpu, named=True)
        return Chosen(here, here.current_device())
    try:
        machine = gpu.turn_on(DEFAULT_DEVICE)
    except (gpu.DeviceError, catalog.UnknownDevice) as error:
        raise DeviceError(str(error)) from None
    instead = unsupported.why_not(torch) or "No GPU is here and no device was chosen."
    note = (
        f"{instead} This ran on a virtual {DEFAULT_DEVICE}, which stays on. `%gpumem_device NAME` chooses another, "
        "`%gpumem_device off` ends it."
    )
    return Chosen(machine, machine.face.current_device(), turned_on=True, notes=(note,))


def _parsed(name: str) -> Any:
    from gpumem_magic.virtual.card import catalog

    try:
        return catalog.parse(name)
    except catalog.UnknownDevice as error:
        raise DeviceError(str(error)) from None


def _choose_real(spec: RealDevice) -> str:
    global _chosen_gpu
    import torch

    from gpumem_magic.devices import here, torch_memory
    from gpumem_magic.virtual import gpu

    words = ""
    if gpu.current() is not None:
        if not torch_memory.count_below(torch):
            # What is on stays on: there is nothing to go to.
            raise DeviceError(_no_gpu(spec.text))
        words = f"{off()} "
    try:
        machine = _real_machine_for(spec)
    except DeviceError as error:
        raise DeviceError(f"{words}{error}") from None
    _chosen_gpu = spec.index
    device = machine.devices[machine.current_device() if spec.index is None else spec.index]
    return f"{words}{here.words(device)} is measured from now on: a real GPU."


def _real_machine_for(spec: RealDevice) -> CudaMachine:
    machine = _real_machine()
    if machine is None or not machine.devices:
        raise DeviceError(_no_gpu(spec.text))
    if spec.index is not None:
        _checked_index(spec.text, spec.index, len(machine.devices))
    return machine


def _checked_index(text: str, index: int, count: int) -> int:
    if index >= count:
        there = "there is one device here, cuda:0" if count == 1 else f"there are {count} devices here, from cuda:0"
        raise DeviceError(f"{text}: {there}")
    return index


def _real_machine() -> CudaMachine | None:
    """This computer's GPUs; None where there are none, or a virtual one stands in their place."""
    import torch

    from gpumem_magic.devices import here
    from gpumem_magic.virtual import gpu

    return None if gpu.current() is not None else here.machine(torch)


def _has_cuda_build() -> bool:
    """Whether this PyTorch could use a GPU at all. A virtual one leaves these as they are."""
    import torch

    return torch.version.cuda is not None or torch.version.hip is not None


def _no_gpu(text: str) -> str:
    import torch

    from gpumem_magic.devices import unsupported

    why = unsupported.why_not(torch)
    if why is None:
        why = "this computer has no CUDA GPU that PyTorch can use"
        if not _has_cuda_build():
            why += f" (torch {torch.__version__} is built without CUDA)"
        why += "; `%gpumem_device` lists the virtual ones"
    return f"{text}: {why}"


# ---- saying


def state() -> str:
    """What is on, and the names that there are, for a bare ``%gpumem_device``."""
    from gpumem_magic.devices import here
    from gpumem_magic.virtual import gpu
    from gpumem_magic.virtual.card import catalog

    machine = gpu.current()
    if machine is not None:
        words = [f"{_machine_words(machine)} is on.{_calibrated(machine)}"]
    else:
        real = _real_machine()
        words = ["No virtual device is on."] if real is None else []
        for device in real.devices if real is not None else ():
            mark = "  (chosen)" if device.index == _chosen_gpu else ""
            words.append(f"{here.words(device)}{mark}")
    return "\n".join([*words, "", catalog.describe()])


def memory_text() -> str:
    """The memory of every device now, one line each and its processes below, for a bare ``%gpumem``."""
    import torch

    from gpumem_magic.devices import here, unsupported
    from gpumem_magic.units import human
    from gpumem_magic.virtual import gpu

    machine = gpu.current()
    if machine is None:
        real = _real_machine()
        if real is not None and real.devices:
            return "\n".join(
                line for device in real.devices for line in (here.state_line(device), *here.process_lines(device))
            )
        why = unsupported.why_not(torch)
        return (
            f"{why + ' ' if why is not None else ''}No device is on. `%%gpumem` turns a virtual {DEFAULT_DEVICE} on "
            "where there is no GPU; `%gpumem_device NAME` chooses another."
        )
    machine.settle()
    lines = []
    for device in machine.devices:
        now = device.counters()
        lines.append(
            f"cuda:{device.index}  virtual {device.model.name}  allocated {human(now.allocated)}  "
            f"reserved {human(now.reserved)}  nvidia-smi {_smi_line(device)}"
        )
    return "\n".join(lines)


def smi_lines() -> list[str]:
    """``3769MiB / 16160MiB`` for every device. Raises DeviceError where there is none."""
    from gpumem_magic.devices import here
    from gpumem_magic.virtual import gpu

    machine = gpu.current()
    if machine is not None:
        machine.settle()
        return [_smi_line(device) for device in machine.devices]
    real = _real_machine()
    if real is not None and real.devices:
        return [here.smi_line(device) for device in real.devices]
    raise DeviceError("no device is on: `%gpumem_device NAME` turns a virtual one on")


def _smi_line(device: VirtualDevice) -> str:
    from gpumem_magic.virtual.card import smi

    return smi.line(device.used_bytes(), device.model.smi_total_bytes)


def _machine_words(machine: VirtualMachine) -> str:
    names = [device.model.name for device in machine.devices]
    count = f"{len(names)} x " if len(names) > 1 else ""
    name = names[0] if names[0].startswith("Virtual") else f"virtual {names[0]}"
    return f"A {count}{name} ({machine.spec.text})"


def _calibrated(machine: VirtualMachine) -> str:
    source = machine.devices[0].model.calibrated
    return (
        f" Its context, workspace and total are those measured on this computer {source} (`gpumem calibrate`)."
        * bool(source)
    )


def _live_storages(machine: VirtualMachine | None) -> int:
    if machine is None:
        return 0
    machine.settle()
    return len(machine.engine.table)
