"""Which of the driver's devices is `cuda:0`: by UUID where PyTorch reports it, else by CUDA_VISIBLE_DEVICES.

PyTorch's numbers and nvidia-smi's differ as soon as that variable is set, or the GPUs are of different kinds. A wrong device
would show somebody else's memory, so where it is not certain there is none.
"""

from __future__ import annotations

import os

from gpumem_magic.devices.driver import Driver, DriverDevice

MIG = "MIG-"
GPU = "GPU-"


def visible(text: str | None) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES that count; None where all devices are visible.

    As CUDA reads it: the list ends at the first entry that is no device (``-1``, an empty one, a word).
    """
    if text is None:
        return None
    entries: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if not (entry.isdigit() or entry.startswith((GPU, MIG))) or entry in entries:
            break
        entries.append(entry)
    return entries


def find(driver: Driver, ordinal: int, uuid: str | None, total: int | None) -> DriverDevice | None:
    """The driver's device for PyTorch's number `ordinal`, or None.

    uuid and total: PyTorch's, None while CUDA is not in use. A device with quite another total (a whole GPU instead of its MIG
    instance) is not taken.
    """
    if not driver.available:
        return None
    entries = visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    entry = None if entries is None or ordinal >= len(entries) else entries[ordinal]
    if entry is not None and entry.startswith(MIG):
        return _checked(_by_name(driver, entry), total)
    if uuid is not None:
        return _by_torch(driver, uuid, total)
    if entries is not None and entry is None:
        return None
    if entry is not None and entry.startswith(GPU):
        return _checked(_by_name(driver, entry), total)
    index = ordinal if entry is None else int(entry)
    return _checked(driver.by_index(index), total) if _numbers_agree(driver) else None


def _numbers_agree(driver: Driver) -> bool:
    """Whether CUDA's numbers are nvidia-smi's. CUDA puts the fastest first; equal GPUs are in the order of their bus."""
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return True
    return len({device.name for device in driver.devices()}) <= 1


def _by_torch(driver: Driver, uuid: str, total: int | None) -> DriverDevice | None:
    bare = uuid.removeprefix(GPU).removeprefix(MIG)
    whole = driver.by_uuid(GPU + bare)
    found = _checked(whole, total)
    if found is not None:
        return found
    instance = _checked(driver.by_uuid(MIG + bare), total)
    if instance is not None or whole is None:
        return instance
    # PyTorch may name the GPU although it sees one instance: certain only where there is just one of that size.
    fitting = [device for device in whole.instances() if _checked(device, total) is not None]
    return fitting[0] if len(fitting) == 1 else None


def _by_name(driver: Driver, name: str) -> DriverDevice | None:
    """By a UUID that may be cut short, as CUDA allows where that is enough to tell."""
    found = driver.by_uuid(name)
    if found is not None:
        return found
    candidates = [device for device in driver.devices() if (device.uuid or "").startswith(name)]
    if name.startswith(MIG):
        candidates = [
            instance
            for device in driver.devices()
            for instance in device.instances()
            if (instance.uuid or "").startswith(name)
        ]
    return candidates[0] if len(candidates) == 1 else None


def _checked(device: DriverDevice | None, total: int | None) -> DriverDevice | None:
    """The device, unless its size is not that of PyTorch's: the two differ by a few percent at most."""
    if device is None or not total:
        return device
    memory = device.memory()
    if memory is None:
        return device
    return device if 0.85 * total <= memory.total <= 1.2 * total + (1 << 29) else None
