"""Which devices are measured: virtual ones that are on, the GPUs of this computer, or, with neither, a virtual one of our own.

What changes answers in a sentence for a reader, or raises `DeviceError` with one line that says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from gpumem_magic import private
from gpumem_magic.devices import machines
from gpumem_magic.devices.base import Device, DeviceError, Label, Machine
from gpumem_magic.recording import under_way
from gpumem_magic.recording.quiet import no_automatic_collection
from gpumem_magic.units import human

if TYPE_CHECKING:
    from gpumem_magic.devices.cuda import CudaMachine
    from gpumem_magic.virtual.card.catalog import RealDevice
    from gpumem_magic.virtual.machine import VirtualMachine

DEFAULT_DEVICE = "T4"

# The number of the real GPU that `%gpumem_device cuda:1` asked for; None: whichever is current.
_chosen_gpu: int | None = None


@dataclass(frozen=True)
class Chosen:
    """What a recording is about. primary: the number of its device; named: whether a person asked for that very one.

    turned_on: whether a virtual device came on for this recording, without being asked for. notes: for the reader.
    """

    machine: Machine
    primary: int
    named: bool = False
    turned_on: bool = False
    notes: tuple[str, ...] = ()

    def remember(self, labels: Mapping[int, Mapping[int, Label]]) -> None:
        """labels: per device, what is known of the blocks that are live now, by address; for the next recording."""
        for device in self.machine.devices:
            device.remember(labels.get(device.facts.index, {}))

    def end_logs(self) -> None:
        """Ends logs that an interrupt has lost."""
        for device in self.machine.devices:
            device.end_logs()


def virtual() -> VirtualMachine | None:
    """The virtual machine that is on, or None."""
    return cast("VirtualMachine | None", machines.virtual())


def choose(name: str) -> str:
    """Turns a virtual device on, or chooses a real one, and returns a sentence about it. Raises DeviceError."""
    global _chosen_gpu
    from gpumem_magic.virtual.card import catalog

    if under_way.is_any():
        raise DeviceError("a recording is under way: choose the device in a cell that is not measured")
    before = virtual()
    spec = catalog.parse(name)
    if isinstance(spec, catalog.RealDevice):
        return _choose_gpu(spec)
    left = before.live_storages() if before is not None else 0
    machine = _turn_on(name)
    _chosen_gpu = None
    tensors = "1 tensor" if left == 1 else f"{left} tensors"
    lost = f" {tensors} of {before.spec.text} can't be used any more." if before is not None and left else ""
    without = "" if machine.spec.computes else ", and without computing"
    note = f" {spec.note}" if spec.note else ""
    return f"{machine_words(machine)} on: code on cuda runs without a GPU{without}.{note}{calibrated(machine)}{lost}"


def put_on(name: str | None) -> VirtualMachine:
    """In a process of its own: the card of that name under the tensors that are there. Raises DeviceError."""
    from gpumem_magic.virtual.card import catalog

    machine = virtual()
    if machine is None:
        choose(name or DEFAULT_DEVICE)
    elif name is not None and name != machine.spec.text:
        spec = catalog.parse(name)
        if not machine.live_storages():
            choose(name)
        elif isinstance(spec, catalog.DeviceSpec):
            machine.become(spec)
    found = virtual()
    assert found is not None
    return found


def for_ranks(name: str | None, count: int) -> str | None:
    """``H100`` as ``8xH100``; a real device, or several that are named, as they are."""
    import torch

    from gpumem_magic.virtual.card import catalog

    if name is None:
        return None if torch.cuda.is_available() else f"{count}x{DEFAULT_DEVICE}"
    try:
        spec = catalog.parse(name)
    except DeviceError:
        return name  # said where the device is turned on
    if isinstance(spec, catalog.RealDevice) or catalog.says_how_many(name):
        return name
    return f"{count}x{name}"


def chosen_gpu() -> int | None:
    """The number of the GPU that was chosen; None: whichever is current."""
    return _chosen_gpu


def is_any() -> bool:
    """Whether a virtual device is on, or a GPU was chosen."""
    return machines.virtual() is not None or _chosen_gpu is not None


def off() -> str:
    """Turns the virtual device off, or forgets which GPU was chosen, and returns a sentence. Raises DeviceError."""
    global _chosen_gpu
    if under_way.is_any():
        raise DeviceError("a recording is under way: turn the device off in a cell that is not measured")
    machine = virtual()
    if machine is None:
        if _chosen_gpu is None:
            return "No virtual device was on."
        forgotten, _chosen_gpu = _chosen_gpu, None
        return f"cuda:{forgotten} is no longer chosen: the current GPU is measured."
    from gpumem_magic.virtual import gpu

    left = gpu.turn_off()
    name = machine.spec.text
    sized = name.removeprefix("virtual:")
    words = f"The virtual {name if sized == name else f'GPU of {sized}'} is off, and PyTorch is as before."
    if left:
        were = "1 tensor was still on it: it" if left == 1 else f"{left} tensors were still on it: they"
        words += f" {were} can't be used any more."
    return words


def for_recording(name: str | None) -> Chosen:
    """What to record: the device of that name, else the one that is on or chosen, else a virtual one, which is turned on."""
    import torch

    from gpumem_magic.devices import unsupported
    from gpumem_magic.virtual.card import catalog

    machine = virtual()
    if machine is not None and machine.half_off:
        off()
        machine = None
    spec = catalog.parse(name) if name is not None else None
    if isinstance(spec, catalog.RealDevice):
        # While a virtual device is on, `cuda:1` in the program is a virtual one, and so it is here.
        found = machine if machine is not None else _gpus_for(spec)
        index = found.current_device() if spec.index is None else spec.index
        return Chosen(found, _checked_index(spec.text, index, len(found.devices)), named=spec.index is not None)
    if name is not None and spec is not None and (machine is None or machine.spec.models != spec.models):
        choose(name)
        machine = virtual()
    if machine is not None:
        notes = (spec.note,) if spec is not None and spec.note else ()
        return Chosen(machine, machine.current_device(), notes=notes)
    real_gpus = machines.gpus(torch)
    if real_gpus is not None and real_gpus.devices:
        if _chosen_gpu is not None and _chosen_gpu < len(real_gpus.devices):
            return Chosen(real_gpus, _chosen_gpu, named=True)
        return Chosen(real_gpus, real_gpus.current_device())
    machine = _turn_on(DEFAULT_DEVICE)
    instead = unsupported.why_not(torch) or "There is no GPU here, and no device was chosen."
    note = (
        f"{instead} A virtual {DEFAULT_DEVICE} was turned on, and stays on: `%gpumem_device NAME` chooses another, "
        "`%gpumem_device off` turns it off."
    )
    return Chosen(machine, machine.current_device(), turned_on=True, notes=(note,))


def _turn_on(name: str) -> VirtualMachine:
    """Raises DeviceError also where this PyTorch lacks what a virtual GPU is made of: real ones do not need it."""
    try:
        private.require("virtual.gpu")
    except private.Missing as error:
        raise DeviceError(str(error)) from None
    # Parts of PyTorch are imported by it, and stay: looking for garbage in them only takes time.
    with no_automatic_collection():
        from gpumem_magic.virtual import gpu

        return gpu.turn_on(name)


def _choose_gpu(spec: RealDevice) -> str:
    global _chosen_gpu
    import torch

    from gpumem_magic.devices import torch_memory

    words = ""
    if machines.virtual() is not None:
        if not torch_memory.count_below(torch):
            # What is on stays on: there is nothing to go to.
            raise DeviceError(_no_gpu(spec.text))
        words = f"{off()} "
    try:
        found = _gpus_for(spec)
    except DeviceError as error:
        raise DeviceError(f"{words}{error}") from None
    _chosen_gpu = spec.index
    device = found.devices[found.current_device() if spec.index is None else spec.index]
    return f"{words}{gpu_words(device)} is measured from now on: a real GPU."


def _gpus_for(spec: RealDevice) -> CudaMachine:
    import torch

    machine = machines.gpus(torch)
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


def _no_gpu(text: str) -> str:
    import torch

    from gpumem_magic.devices import unsupported

    why = unsupported.why_not(torch)
    if why is None:
        why = "this computer has no CUDA GPU that PyTorch can use"
        # (A virtual one leaves this as it is.)
        if not torch.backends.cuda.is_built():
            why += f" (torch {torch.__version__} is built without CUDA)"
        why += "; `%gpumem_device` lists the virtual ones"
    return f"{text}: {why}"


def gpu_words(device: Device) -> str:
    """``cuda:1 (NVIDIA H200, 139.8 GiB)``."""
    facts = device.facts
    size = f", {human(facts.total_bytes)}" if facts.total_bytes else ""
    return f"cuda:{facts.index} ({facts.name}{size})"


def machine_words(machine: VirtualMachine) -> str:
    """``A virtual T4 (T4) is``, ``2 virtual T4s (2xT4) are``."""
    names = [device.model.name for device in machine.devices]
    name = names[0] if names[0].startswith("Virtual") else f"virtual {names[0]}"
    if len(names) > 1:
        return f"{len(names)} {name}s ({machine.spec.text}) are"
    return f"A {name} ({machine.spec.text}) is"


def calibrated(machine: VirtualMachine) -> str:
    """A sentence where the virtual device's figures were measured on this computer, and one where it computes; else ""."""
    source = machine.devices[0].model.calibrated
    measured = (
        f" Its context, workspace and total are those measured on this computer {source} (`gpumem calibrate`)."
        * bool(source)
    )
    if not machine.spec.computes:
        return measured
    from gpumem_magic.virtual.engine.host_memory import available

    left = available()
    room = "" if left is None else f", of which {human(left)} are available"
    return f"{measured} Values are computed on the host, and its tensors take the host's memory as well{room}."
