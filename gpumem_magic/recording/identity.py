"""Looks at live objects: which parameter, gradient, optimizer state, input or variable holds which address, and when.

A look keeps numbers and strings. Of the objects themselves only weak references to modules and optimizers are kept, until
`forget`. A look runs nothing of the user's: no property, no ``__getitem__``, only dictionaries, lists and tuples.
"""

from __future__ import annotations

import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from gpumem_magic.devices.base import Machine
from gpumem_magic.recording.model import Sighting

ROW_LIMIT = 64
"""Tensors looked at in one variable after a statement; more only at the end of the cell."""
END_LIMIT = 10_000
_DEPTH = 3

Named = tuple[str, torch.Tensor]


class Witness:
    """Collects sightings. `position` gives the number of events in a device's log so far.

    names: the variables of the cell; namespace: where their values are. The caller locks: these methods are not thread-safe.
    """

    def __init__(
        self,
        machine: Machine,
        position: Callable[[int], int],
        names: Iterable[str] = (),
        namespace: Mapping[str, Any] | None = None,
    ) -> None:
        self.sightings: list[Sighting] = []
        self._machine = machine
        self._position = position
        self._names = sorted(names)
        self._namespace = namespace if namespace is not None else {}
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._where: dict[int, tuple[int, int] | None] = {}
        self._states: dict[int, tuple[int, int]] = {}
        self._parameter_names: dict[int, str] = {}
        self._last_look: dict[str, tuple[int, int, int]] = {}
        self._last_gradients: set[tuple[int, str]] = set()
        # Positions of the look under way. A look allocates nothing, and a real device takes its time to answer.
        self._now: dict[int, int] = {}

    def forget(self) -> None:
        """Drops every reference to the user's objects."""
        self._namespace = {}
        for kept in (self._modules, self._optimizers, self._where, self._states, self._parameter_names):
            kept.clear()
        self._last_look.clear()
        self._last_gradients.clear()

    # What the hooks report

    def forward_begins(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """An outermost forward: its module's parameters and buffers, once, and its arguments, each time."""
        self._now.clear()
        self.see_module(module)
        for _, tensor in tensors_in(args, "", ROW_LIMIT):
            self._see_argument(tensor, None)

    def forward_ended(self, kwargs: Mapping[str, Any]) -> None:
        """Keyword arguments: PyTorch shows them to a global hook only at the end of the forward."""
        self._now.clear()
        for name, tensor in tensors_in(kwargs, "", ROW_LIMIT):
            self._see_argument(tensor, name)

    def backward_ended(self) -> None:
        """The gradients of every parameter known so far."""
        self._now.clear()
        self._last_gradients.clear()
        for name, parameter in self._known_parameters():
            self._see_gradient(name, parameter)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self._now.clear()
        self._see_groups(optimizer)

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        self._now.clear()
        self._see_states(optimizer)
        self._last_gradients.clear()

    def statement_ended(self) -> None:
        """The variables of the cell. A batch or a loss lives for an iteration only: this is when it can be seen."""
        self._now.clear()
        for name in self._names:
            value = self._namespace.get(name)
            if isinstance(value, torch.nn.Module):
                self.see_module(value)
            elif isinstance(value, torch.optim.Optimizer):
                self._optimizers[id(value)] = weakref.ref(value)
            else:
                self._see_variable(name, value, ROW_LIMIT)

    def cell_ended(self, namespace: Mapping[str, Any] | None) -> None:
        """All modules and optimizers of the notebook, used or not, and the cell's variables."""
        self._now.clear()
        values = dict(namespace) if namespace is not None else dict(self._namespace)
        for value in values.values():
            if isinstance(value, torch.nn.Module):
                self._modules[id(value)] = weakref.ref(value)
            elif isinstance(value, torch.optim.Optimizer):
                self._optimizers[id(value)] = weakref.ref(value)
        self._where.clear()
        self._states.clear()
        self._last_gradients.clear()
        for module in _alive(self._modules):
            self.see_module(module)
        for optimizer in _alive(self._optimizers):
            self._see_groups(optimizer)
            self._see_states(optimizer)
        for name, parameter in self._known_parameters():
            self._see_gradient(name, parameter)
        for name in self._names:
            self._see_variable(name, values.get(name), END_LIMIT)

    def modules(self) -> list[torch.nn.Module]:
        """Those that were seen and are still there. For a look, not to be kept."""
        return _alive(self._modules)

    def variable_of(self, thing: object) -> str | None:
        """The cell's name for an object, if it has one."""
        return next((name for name in self._names if self._namespace.get(name) is thing), None)

    # Looking

    def see_module(self, module: torch.nn.Module) -> None:
        """Parameters and buffers by name. Again only where the first of them has moved (``.to``, ``.half``)."""
        first = next(_tensors_of(module), None)
        where = None if first is None else self._machine.locate(first[1])
        known = self._modules.get(id(module))
        if known is not None and known() is module and self._where.get(id(module), _NEVER) == where:
            return
        self._modules[id(module)] = weakref.ref(module)
        self._where[id(module)] = where
        for name, parameter in module.named_parameters():
            self._parameter_names[id(parameter)] = name
            self._see(parameter, "parameter", name)
        for name, buffer in module.named_buffers():
            self._see(buffer, "buffer", name)

    def _see_groups(self, optimizer: torch.optim.Optimizer) -> None:
        is_new = self._remember(optimizer)
        for name, parameter in self._parameters_of(optimizer):
            if is_new:
                self._see(parameter, "parameter", name)
            self._see_gradient(name, parameter)

    def _see_states(self, optimizer: torch.optim.Optimizer) -> None:
        """States by name. They stay where they are from the second step on, so a step that adds none is not looked at."""
        self._remember(optimizer)
        size = sum(len(state) for state in optimizer.state.values() if isinstance(state, dict))
        steps, before = self._states.get(id(optimizer), (0, -1))
        self._states[id(optimizer)] = (steps + 1, size)
        if steps >= 2 and size == before:
            return
        kind = type(optimizer).__name__
        names = {id(parameter): name for name, parameter in self._parameters_of(optimizer)}
        for owner, state in list(optimizer.state.items()):
            of = f"[{names[id(owner)]}]" if id(owner) in names else ""
            for name, tensor in tensors_in(state, "", END_LIMIT):
                self._see(tensor, "optimizer_state", f"{kind}.{name}{of}")

    def _remember(self, optimizer: torch.optim.Optimizer) -> bool:
        known = self._optimizers.get(id(optimizer))
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        is_new = id(optimizer) not in self._where or known is None or known() is not optimizer
        self._where[id(optimizer)] = None
        return is_new

    def _parameters_of(self, optimizer: torch.optim.Optimizer) -> Iterator[Named]:
        number = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield self._parameter_names.get(id(parameter), f"parameter {number}"), parameter
                number += 1

    def _known_parameters(self) -> Iterator[Named]:
        seen: set[int] = set()
        for module in _alive(self._modules):
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter
        for optimizer in _alive(self._optimizers):
            for name, parameter in self._parameters_of(optimizer):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def _see_gradient(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad if parameter.is_leaf else None
        if gradient is None:
            return
        # A step looks at what the end of the backward has just seen; the same object under the same name is the same memory.
        key = id(gradient), name
        if key not in self._last_gradients:
            self._last_gradients.add(key)
            self._see(gradient, "gradient", name)

    def _see_variable(self, name: str, value: Any, limit: int) -> None:
        for place, tensor in tensors_in(value, name, limit):
            if isinstance(tensor, torch.nn.Parameter):
                self._see(tensor, "parameter", place)
            if tensor.requires_grad and tensor.is_leaf:
                self._see_gradient(place, tensor)
            where = self._machine.locate(tensor)
            if where is None:
                continue
            device, address = where
            look = device, address, self._at(device)
            # No event since the last look under this name: the same tenant.
            if self._last_look.get(place) != look:
                self._last_look[place] = look
                self._add(look, "named" if tensor.grad_fn is None else "output", place)

    def _see_argument(self, tensor: torch.Tensor, name: str | None) -> None:
        if tensor.grad_fn is None:
            self._see(tensor, "input", name)

    def _see(self, tensor: torch.Tensor, role: str, name: str | None) -> None:
        if tensor.layout is torch.sparse_coo:
            # Two tensors hold its memory; the second is the tensor's place.
            self._see(tensor.detach()._indices(), role, name)
        where = self._machine.locate(tensor)
        if where is not None:
            self._add((*where, self._at(where[0])), role, name)

    def _at(self, device: int) -> int:
        position = self._now.get(device)
        if position is None:
            position = self._now[device] = self._position(device)
        return position

    def _add(self, look: tuple[int, int, int], role: str, name: str | None) -> None:
        device, address, position = look
        self.sightings.append(Sighting(device, position, address, role, name))


_NEVER = (-1, -1)


def tensors_in(value: Any, name: str, limit: int) -> list[Named]:
    """The tensors of a value that is one, or a list, tuple or dictionary of them, three levels deep.

    At most `limit` of them, among the first `limit` items of each container: a long history of numbers costs no more.
    """
    found: list[Named] = []
    _collect(value, name, limit, _DEPTH, found)
    return found


def _collect(value: Any, name: str, limit: int, depth: int, found: list[Named]) -> None:
    if len(found) >= limit:
        return
    if isinstance(value, torch.Tensor):
        found.append((name, value))
        return
    if depth == 0:
        return
    if isinstance(value, UserDict):
        value = value.data
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        items = dict.items(value)
    elif isinstance(value, list):
        items = enumerate(list.__iter__(value))
    elif isinstance(value, tuple):
        items = enumerate(tuple.__iter__(value))
    else:
        return
    for key, item in islice(items, limit):
        place = repr(key)[:40] if isinstance(key, (str, int)) else type(key).__name__
        _collect(item, f"{name}[{place}]" if name else place.strip("'"), limit, depth - 1, found)


def _alive(references: Mapping[int, weakref.ref[Any]]) -> list[Any]:
    return [thing for thing in (reference() for reference in list(references.values())) if thing is not None]


def _tensors_of(module: torch.nn.Module) -> Iterator[Named]:
    yield from module.named_parameters()
    yield from module.named_buffers()
