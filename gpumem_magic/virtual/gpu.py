"""Turning virtual GPUs on and off for the process.

`turn_on("T4")` makes unmodified code on ``cuda`` run without a device; `turn_off()` puts every replaced name back. There is
at most one virtual machine in a process.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
from types import FrameType
from typing import Any, cast

import torch
import torch.utils._device
from torch._C import _get_dispatch_stack_at, _len_torch_dispatch_stack  # the active dispatch modes

from gpumem_magic.allocator.settings import settings_from_environment
from gpumem_magic.devices import machines
from gpumem_magic.devices.base import DeviceError
from gpumem_magic.uninterrupted import whole
from gpumem_magic.virtual.card import catalog
from gpumem_magic.virtual.engine import node_numbers
from gpumem_magic.virtual.machine import VirtualMachine

_turning = threading.Lock()
# The lock that the fork under way holds.
_held: list[Any] = []


def current() -> VirtualMachine | None:
    """The virtual machine that is on, or None."""
    return cast("VirtualMachine | None", machines.virtual())


def turn_on(text: str) -> VirtualMachine:
    """Turns on the devices that `text` names (a catalogue name, `2xT4`, `virtual:24GiB`, options after a comma).

    Another virtual machine that is on is turned off first. The allocators take their settings from PYTORCH_CUDA_ALLOC_CONF or
    PYTORCH_ALLOC_CONF as they are now, and as they are when memory is first asked for; an option that is not emulated is a
    warning. Raises DeviceError with one line, and changes nothing: an unknown name, a setting that PyTorch would refuse, CUDA in
    use already, or a mode that is active.
    """
    with _turning, whole:
        spec = catalog.parse(text)
        try:
            settings = settings_from_environment()
        except ValueError as error:
            raise DeviceError(str(error)) from None
        if isinstance(spec, catalog.RealDevice):
            raise DeviceError(f"{text} is a real device; to go back to it, turn the virtual one off")
        _refuse_inside_modes("on")
        if current() is None and torch.cuda.is_initialized():
            raise DeviceError(
                "CUDA is in use in this process, and its tensors would be out of reach behind a virtual GPU: "
                "restart the kernel, then choose the virtual device first"
            )
        if current() is not None:
            _off()
        for note in settings.notes:
            warnings.warn(note, stacklevel=2)
        machine = VirtualMachine(spec, settings)
        machines.put_in_front(machine)
        try:
            node_numbers.begin()
            with node_numbers.none_of_the_programs():
                machine.install()
        except BaseException:
            _remove(machine, "the virtual GPU could not be turned on")
            raise
        if machine.lacking():
            warnings.warn(" ".join(machine.lacking()), stacklevel=2)
        return machine


def turn_off() -> int:
    """Puts everything back and returns how many tensors' storages were still on the device (they can't be used any more).

    Raises DeviceError where a mode is active. 0 where nothing was on.
    """
    with _turning, whole:
        if current() is None:
            return 0
        _refuse_inside_modes("off")
        return _off()


def _off() -> int:
    machine = current()
    assert machine is not None
    left = machine.live_storages()
    _remove(
        machine,
        f"this tensor was on the virtual GPU ({machine.spec.text}), which has been turned off: create it again, or on "
        "the host (its values were stand-ins)",
    )
    return left


def _remove(machine: VirtualMachine, because: str) -> None:
    """Where an interrupt ends this, the machine is still the one that is on, and known as `half_off`."""
    machine.remove(because)
    machines.put_in_front(None)


def _refuse_inside_modes(state: str) -> None:
    _pop_own_mode()
    functions = [torch._C._get_function_stack_at(position) for position in range(torch._C._len_torch_function_stack())]
    held = [mode for mode in functions if not isinstance(mode, torch.utils._device.DeviceContext)]
    if _len_torch_dispatch_stack() or held:
        raise DeviceError(
            f"the virtual GPU can't be turned {state} inside a `with` that holds a torch mode: do it before or after"
        )


def _pop_own_mode() -> None:
    """An interrupt between two of our lines may have left the mode that carries operators on this thread's stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("gpumem_magic.virtual.") and name != __name__:
            return
        frame = frame.f_back
    machine = current()
    while machine is not None and _len_torch_dispatch_stack():
        if _get_dispatch_stack_at(_len_torch_dispatch_stack() - 1) is not machine.engine.mode:
            return
        torch._C._pop_torch_dispatch_stack(None)


@atexit.register
def _at_exit() -> None:
    """PATH's entry is a folder of ours: it goes with the process."""
    machine = current()
    if machine is not None and machine.process == os.getpid():
        machine.smi.remove()


def _before_fork() -> None:
    """No other thread (the watch's) is at work on the device: in the child it would never end."""
    machine = current()
    if machine is not None:
        machine.engine.lock.acquire()
        _held.append(machine.engine.lock)


def _after_fork() -> None:
    if _held:
        _held.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
