"""Which module was running when memory was requested, from the start of a recording to its first backward.

Modules and tensors are looked at and not kept: what stays is their names, their classes, and positions in the devices' logs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping

import torch

from gpumem_magic.devices.base import CompiledResults
from gpumem_magic.looks.objects import name_of_class
from gpumem_magic.looks.tensors import (
    BUFFERS,
    COMPILED,
    PARAMETERS,
    is_tensor,
    modules_in,
    no_dispatch,
    no_functions,
    pieces,
    table,
)
from gpumem_magic.recording.model import NOBODY, ModuleName, ModuleTrace

Place = tuple[int, int]

# A program that never runs backward is not followed for ever.
MOST_SWITCHES = 20_000


class ModuleWatch:
    """Told of every module's forward, in the thread of the first one; others are left out.

    positions: where each device's log stands now, asked for each module; None where that costs too much.
    locate: where a tensor's memory lies, None for one on the host. compiled: where results of compiled code lie, and whose they
    are.
    """

    def __init__(
        self,
        positions: Callable[[], Mapping[int, int]] | None,
        locate: Callable[[torch.Tensor], Place | None],
        compiled: Callable[[], CompiledResults],
    ) -> None:
        self._positions = positions
        self._locate = locate
        self._compiled = compiled
        self._results: dict[Place, int] = {}
        self._modules: dict[int, int] = {}
        self._names: list[ModuleName] = []
        self._numbers: dict[ModuleName, int] = {}
        self._switches: dict[int, list[tuple[int, int]]] = {}
        self._parameters: dict[Place, int] = {}
        self._paths: dict[int, str] = {}
        self._root: weakref.ref[torch.nn.Module] | None = None
        self._root_path = ""
        self._stack: list[int] = []
        self._thread: int | None = None
        self._count = 0
        self.running = True

    def begins(self, module: torch.nn.Module, depth: int, label: Callable[[], str]) -> None:
        """depth: how many modules are at work, this one included. label: what an outermost module is called."""
        if not self._is_ours():
            return
        if depth == 1:
            self._enter(module, label())
        path = self._paths.get(id(module))
        if path is None:
            around = self._names[self._stack[-1]].path if self._stack else self._root_path
            path = f"{around}.{name_of_class(type(module))}"
        self._stack.append(self._number(path, module))
        self._note_switch()

    def ended(self, depth: int) -> None:
        """depth: how many modules are still at work."""
        if self._is_ours():
            del self._stack[depth:]
            self._note_switch()

    def stop(self) -> None:
        """At the first backward, or at the recording's end."""
        if self.running:
            self.running = False
            self._stack.clear()
            self._write()
            results, roots = self._compiled()
            # (Modules whose forward ran inside a compiled function called no hook.)
            unnamed = set(results.values()) - self._modules.keys()
            for name, root in roots.items():
                if unnamed and not unnamed.isdisjoint(id(module) for _, module in modules_in(root)):
                    self._enter(root, name)
            self._results = {place: self._modules[one] for place, one in results.items() if one in self._modules}
            self._paths.clear()
            self._modules.clear()
            self._root = None

    def trace(self) -> ModuleTrace:
        return ModuleTrace(
            tuple(self._names),
            {device: tuple(switches) for device, switches in self._switches.items()},
            dict(self._parameters),
            self._results,
        )

    def _is_ours(self) -> bool:
        if self._thread is None:
            self._thread = threading.get_ident()
        return self.running and self._thread == threading.get_ident()

    def _enter(self, root: torch.nn.Module, label: str) -> None:
        """The names of what is in an outermost module, and where its parameters lie; once while it stays the same one."""
        self._stack.clear()
        if self._root is not None and self._root() is root and self._root_path == label:
            return
        self._root, self._root_path = weakref.ref(root), label
        self._paths.clear()
        with no_functions(), no_dispatch():
            for name, module in modules_in(root):
                # (A compiled module holds the program's own, whose names are known to its reader.)
                path = ".".join([label, *(part for part in name.split(".") if part not in ("", COMPILED))])
                self._paths[id(module)] = path
                number = self._modules[id(module)] = self._number(path, module)
                for _, tensor in (*table(module, PARAMETERS), *table(module, BUFFERS)):
                    for piece in pieces(tensor) if is_tensor(tensor) else ():
                        place = self._locate(piece)
                        if place is not None:
                            self._parameters.setdefault(place, number)

    def _number(self, path: str, module: torch.nn.Module) -> int:
        name = ModuleName(path, name_of_class(type(module)))
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
        return number

    def _note_switch(self) -> None:
        if self._positions is None:
            return
        self._count += 1
        if self._count > MOST_SWITCHES:
            self.stop()
        else:
            self._write()

    def _write(self) -> None:
        if self._positions is None:
            return
        number = self._stack[-1] if self._stack else NOBODY
        for device, position in self._positions().items():
            switches = self._switches.setdefault(device, [])
            # Where nothing was asked for since, the earlier module has done nothing.
            if switches and switches[-1][0] == position:
                switches.pop()
            switches.append((position, number))
