"""Freeing memory on demand: the last error's traceback, the results in Out, reference cycles, the allocator's cache.

Only what IPython and Python keep by themselves is let go; a variable of the user's never is.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpumem_magic.devices.base import Machine
from gpumem_magic.owners.holders import Holder, holders
from gpumem_magic.owners.model import FREEABLE, size_of
from gpumem_magic.owners.roots import RECENT, results
from gpumem_magic.owners.search import find_owners
from gpumem_magic.snapshot.model import ACTIVE

DEFAULT = ("traceback", "cycles", "cache")
_ERRORS = ("last_exc", "last_type", "last_value", "last_traceback")


@dataclass(frozen=True)
class Freed:
    """What came back, or would: bytes of tensors, and of reserved memory given to the device. holders: who keeps the rest.
    nameless: bytes of it that nobody was found for."""

    words: tuple[str, ...]
    allocated: int
    reserved: int
    left_allocated: int
    left_reserved: int
    holders: tuple[Holder, ...]
    nameless: int


def free(machine: Machine, shell: Any, namespace: dict[str, Any], words: Collection[str]) -> Freed:
    """Lets go of what the words say, in the order of `FREEABLE`, and says what came back."""
    before = _now(machine)
    if "traceback" in words:
        forget_traceback(shell)
    if "out" in words:
        forget_results(shell, namespace)
    if "cycles" in words:
        gc.collect()
    machine.settle()
    if "cache" in words:
        torch.cuda.empty_cache()
    after = _now(machine)
    found = find_owners(machine, namespace, shell)
    nameless = sum(one.size for one in found.lost)
    return Freed(_ordered(words), before[0] - after[0], before[1] - after[1], *after, tuple(holders(found)), nameless)


def would_free(machine: Machine, shell: Any, namespace: Mapping[str, Any], words: Collection[str]) -> Freed:
    """The same as a forecast: nothing is changed."""
    found = find_owners(machine, namespace, shell, cycles="cycles" in words)
    kinds = {"traceback": "traceback", "out": "out", "cycles": "cycle"}
    numbers = [number for word, kind in kinds.items() if word in words for number in found.of_kind(kind)]
    gone = [one for one in found.freed(numbers) if "cycles" in words or not one.cyclic]
    allocated, reserved = _now(machine)
    given = _whole_segments(machine, {(one.device, one.address) for one in gone}) if "cache" in words else 0
    held = {(one.device, one.address) for one in gone}
    nameless = [one for one in found.freed(numbers) if (one.device, one.address) not in held]
    waiting = size_of(nameless) + sum(one.size for one in found.lost)
    left = tuple(one for one in holders(found) if one.name not in {found.roots[number].name for number in numbers})
    return Freed(_ordered(words), size_of(gone), given, allocated - size_of(gone), reserved - given, left, waiting)


def forget_traceback(shell: Any) -> None:
    """Python's and IPython's references to the last error. A variable that holds the error keeps it."""
    for name in _ERRORS:
        if hasattr(sys, name):
            delattr(sys, name)
    if shell is None:
        return
    result = getattr(shell, "last_execution_result", None)
    for name in ("error_in_exec", "error_before_exec"):
        if getattr(result, name, None) is not None:
            setattr(result, name, None)
    printer = getattr(shell, "InteractiveTB", None)
    if printer is not None and getattr(printer, "tb", None) is not None:
        printer.tb = None


def forget_results(shell: Any, namespace: dict[str, Any]) -> None:
    """``Out``, ``_7``, ``_``, ``__`` and ``___``, where they are IPython's own: a variable that the user gave such a name stays.

    IPython's `DisplayHook.flush` deletes by name and collects garbage; this does neither.
    """
    for number, value in results(namespace).items():
        name = f"_{number}"
        if namespace.get(name) is value:
            del namespace[name]
        shell.user_ns_hidden.pop(name, None)
    table = namespace.get("_oh")
    if isinstance(table, dict):
        table.clear()
    hook, hidden = shell.displayhook, shell.user_ns_hidden
    for name in RECENT:
        for result in (getattr(hook, name, None), hidden.get(name)):
            if result is not None and namespace.get(name) is result:
                namespace[name] = ""
        setattr(hook, name, "")
        # IPython compares this one with the variable, to know whether the user has given the name to something else.
        if name in hidden:
            hidden[name] = ""
    last = getattr(shell, "last_execution_result", None)
    if last is not None:
        last.result = None


def _ordered(words: Collection[str]) -> tuple[str, ...]:
    return tuple(word for word in FREEABLE if word in words)


def _now(machine: Machine) -> tuple[int, int]:
    """Allocated and reserved bytes of all devices."""
    machine.settle()
    counters = [device.counters() for device in machine.devices]
    return sum(one.allocated for one in counters), sum(one.reserved for one in counters)


def _whole_segments(machine: Machine, gone: set[tuple[int, int]]) -> int:
    """Bytes of the segments that hold nothing once these blocks are gone: what emptying the cache gives back."""
    return sum(
        segment.total_size
        for device in machine.devices
        for segment in device.segments()
        if all(block.state != ACTIVE or (device.facts.index, block.address) in gone for block in segment.blocks)
    )
