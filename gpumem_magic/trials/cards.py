"""The card of a trial: the one that is on, another one under the same tensors, or one like this computer's GPU."""

from __future__ import annotations

from gpumem_magic.devices import machines
from gpumem_magic.devices.base import DeviceError
from gpumem_magic.session import device as choosing
from gpumem_magic.units import MIB
from gpumem_magic.virtual.card import catalog

# Options of a device that say how a program is run, and not what the card is.
_OF_THE_SESSION = ("values", "torch", "loading")


def names_of(text: str) -> list[str]:
    """The cards of ``T4,A100-40GB`` or ``T4,context=400MiB,H100``: an option is the card's before it. What was chosen for the
    virtual device that is on, and is no property of a card, holds for all that say nothing else. Raises DeviceError."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if "=" in part and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    if not found:
        raise DeviceError("name the cards, as T4,A100-40GB,H100")
    return [_as_the_session(_checked(name)) for name in found]


def _checked(name: str) -> str:
    if isinstance(catalog.parse(name), catalog.RealDevice):
        raise DeviceError(
            f"{name} is a real device, and trials run on virtual ones: without a name, one like it is taken"
        )
    return name


def _as_the_session(name: str) -> str:
    machine = choosing.virtual()
    chosen = [] if machine is None else machine.spec.text.split(",")[1:]
    named = {option.partition("=")[0].strip() for option in name.split(",")}
    keys = [(option.partition("=")[0].strip(), option) for option in chosen]
    return ",".join([name, *(option for key, option in keys if key in _OF_THE_SESSION and key not in named)])


def usual() -> str:
    """The card where nobody named one: the virtual one that is on, one like this computer's GPU with what is free there now, or
    the default."""
    import torch

    machine = choosing.virtual()
    if machine is not None:
        return machine.spec.text
    gpus = machines.gpus(torch)
    if gpus is None or not gpus.devices:
        return choosing.DEFAULT_DEVICE
    chosen = choosing.chosen_gpu()
    gpu = gpus.devices[gpus.current_device() if chosen is None else chosen]
    facts, counters = gpu.facts, gpu.counters()
    if not facts.total_bytes:
        return choosing.DEFAULT_DEVICE
    like = next((key for key, model in catalog.CATALOG.items() if model.name == facts.name), None)
    others = counters.other_processes if counters.other_processes is not None else counters.context_or_others
    total = _size(facts.total_bytes)
    if like is None:
        name = f"virtual:{total}"
    else:
        name = like if catalog.CATALOG[like].total_bytes == facts.total_bytes else f"{like},total={total}"
    # (Rounded up: who asks what fits is not told of memory that somebody has.)
    return name if others is None else f"{name},idle={_size(-(-others // MIB) * MIB)}"


def _size(size: int) -> str:
    """As the device's name has it, and as short as it is exact."""
    return f"{size}B" if size % MIB else f"{size // MIB}MiB"
