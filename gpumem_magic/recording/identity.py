"""Looks at live objects: which parameter, gradient, optimizer state, input or variable holds which address, and when.

A look keeps numbers and strings. Of the objects themselves only weak references to modules and optimizers are kept, until
`forget`. A look runs nothing of the user's: see `gpumem_magic.looks`.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import CO_NEWLOCALS
from itertools import chain, islice
from types import FrameType, FunctionType
from typing import Any

import torch

from gpumem_magic.devices.base import Machine
from gpumem_magic.looks import arrays, objects, tensors
from gpumem_magic.looks.code import OWN, whose
from gpumem_magic.looks.sharding import waiting_gradients
from gpumem_magic.looks.tensors import Named, no_dispatch, no_functions, unheard
from gpumem_magic.recording import caches
from gpumem_magic.recording.datasets import tensors_of_data
from gpumem_magic.recording.model import Moment, Sighting
from gpumem_magic.tracebacks import entries

ROW_LIMIT = 64
"""Tensors looked at in one variable after a statement; more only at the end of the cell."""
END_LIMIT = 10_000
_DEPTH = 3
# Whether a class was made by a ``class`` statement (Py_TPFLAGS_HEAPTYPE, Include/object.h).
_FLAGS: Any = vars(type)["__flags__"]
_OF_PYTHON = 1 << 9
# But these: all that they hold would be listed after every line that names them, of a replay buffer a million. (From 3.12 on a
# deque's class has the flag, too.)
_NOT_OPENED = (type, set, frozenset, deque)
_WORD = re.compile(r"[^\W\d]\w*")

_Parameters = tuple[list[str], list[torch.Tensor]]
"""Names, and what has them, in the same order."""


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
        self._known_names = frozenset(self._names)
        self._in_statement: dict[str, frozenset[str]] = {}
        self._namespace = namespace if namespace is not None else {}
        # Whether a module was seen whose weights autocast copies.
        self.has_wide_weights = False
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        # The module that was given a parameter last. (No parameter: a weak reference to one forbids `torch.utils.swap_tensors`.)
        self._given: weakref.ref[torch.nn.Module] | None = None
        self._where: dict[int, tuple[int, int] | None] = {}
        self._states: dict[int, tuple[int, int]] = {}
        self._parameter_names: dict[int, str] = {}
        self._buffer_names: set[str] = set()
        # By the names of parameters and buffers within their models, the shapes that they have.
        self._shapes: dict[str, set[tuple[int, ...]]] = {}
        # The shapes of a model's weights in their order, of all and of those that are trained.
        self._rows: set[tuple[tuple[int, ...], ...]] = set()
        # By a module's id, the ids of its parameters at the last look at all of them, and their names.
        self._names_in: dict[int, tuple[list[int], list[str]]] = {}
        self._last_look: dict[str, tuple[int, int, int]] = {}
        self._last_gradients: set[tuple[int, str]] = set()
        # Positions of the look under way. A look allocates nothing, and a real device takes its time to answer.
        self._now: dict[int, int] = {}

    def _begin(self, moment: Moment | None = None) -> None:
        """moment: of the look, where it was read just now, and nothing of the program's has run since."""
        self._now = {} if moment is None else dict(moment.positions)

    def forget(self) -> None:
        """Drops every reference to the user's objects."""
        self._namespace = {}
        self._given = None
        for table in (
            self._modules,
            self._optimizers,
            self._where,
            self._states,
            self._parameter_names,
            self._buffer_names,
            self._shapes,
            self._rows,
            self._names_in,
            self._in_statement,
        ):
            table.clear()
        self._last_look.clear()
        self._last_gradients.clear()

    # What the hooks report

    def forward_begins(self, module: torch.nn.Module, args: tuple[Any, ...], moment: Moment | None = None) -> None:
        """An outermost forward: its module's parameters and buffers, once, and its arguments, each time."""
        self._begin(moment)
        with no_functions(), no_dispatch():
            self.see_module(module)
            for _, tensor in tensors_in(args, "", ROW_LIMIT):
                self._see_argument(tensor, None)
            self._see_caches(_arguments(module, args))

    def forward_ended(
        self,
        kwargs: Mapping[str, Any],
        module: torch.nn.Module,
        args: tuple[Any, ...],
        out: Any,
        moment: Moment | None = None,
    ) -> None:
        """Keyword arguments: PyTorch shows them to a global hook only at the end of the forward. Then a cache is filled, too."""
        self._begin(moment)
        with no_functions(), no_dispatch():
            for name, tensor in tensors_in(kwargs, "", ROW_LIMIT):
                self._see_argument(tensor, name)
            self._see_caches({**_arguments(module, args), **kwargs})
            self._see_caches(out)

    def parameter_registered(self, module: torch.nn.Module) -> None:
        """A module gets a parameter. Its parameters are looked at when the next module gets one: until then, a constructor may
        cast or move them, and behind that, an error may leave no trace of the module."""
        if self._given is None or self._given() is not module:
            self._begin()
            self._see_given()
            self._given = weakref.ref(module)

    def _see_given(self) -> None:
        module = None if self._given is None else self._given()
        if module is not None:
            with no_functions(), no_dispatch():
                for _, parameter in tensors.table(module, tensors.PARAMETERS):
                    if tensors.is_tensor(parameter) and tensors.is_leaf(parameter):
                        self._see(parameter, "parameter", None)

    def has_graph(self, out: Any) -> bool:
        """Whether autograd recorded what a forward gave."""
        with no_functions(), no_dispatch():
            return any(tensors.grad_fn(tensor) is not None for _, tensor in tensors_in(out, "", ROW_LIMIT))

    def backward_ended(self, moment: Moment | None = None) -> None:
        """The gradients of every parameter known so far."""
        self._begin(moment)
        self._last_gradients.clear()
        with no_functions(), no_dispatch():
            self._see_gradients()

    def step_begins(self, optimizer: torch.optim.Optimizer, moment: Moment | None = None) -> None:
        self._begin(moment)
        with no_functions(), no_dispatch():
            self._see_groups(optimizer)

    def step_ended(self, optimizer: torch.optim.Optimizer, moment: Moment | None = None) -> None:
        self._begin(moment)
        with no_functions(), no_dispatch():
            self._see_states(optimizer)
        self._last_gradients.clear()

    def cell_begins(self, moment: Moment | None = None) -> None:
        """What the notebook's optimizers and modules have besides weights, which may go before anybody else looks: gradients of
        an earlier cell, states that a checkpoint's replace. First the cell's variables, by whose names these go."""
        self.statement_ended(None, moment)
        self._know_all(self._namespace)
        with no_functions(), no_dispatch():
            self._see_what_trains()
        # (It was no step.)
        self._states.clear()

    def _see_what_trains(self) -> None:
        """What the known optimizers step and keep, and all gradients."""
        for optimizer in _alive(self._optimizers):
            self._see_groups(optimizer)
            self._see_states(optimizer)
        self._see_gradients()

    def _know_all(self, namespace: Mapping[str, Any]) -> None:
        for value in chain.from_iterable(_with_members(value) for _, value in objects.items(namespace)):
            if tensors.is_module(value):
                self._modules[id(value)] = weakref.ref(value)
            elif tensors.is_optimizer(value):
                self._knows(value)

    def statement_ended(self, statement: str | None = None, moment: Moment | None = None) -> None:
        """The variables of the cell that a statement mentions (None: all). A batch or a loss lives for an iteration only: this is
        when it can be seen."""
        self._begin(moment)
        with no_functions(), no_dispatch():
            others = []
            for name in self._names if statement is None else self._mentioned_in(statement):
                value = objects.entry(self._namespace, name)
                if tensors.is_module(value):
                    self.see_module(value, name)
                elif tensors.is_optimizer(value):
                    self._knows(value)
                else:
                    others.append((name, value))
                    for one in filter(tensors.is_module, islice(_with_members(value), 1, None)):
                        self.see_module(one)
            # (A module's names tell what a copy of its weights holds.)
            for name, value in others:
                self._see_variable(name, value, ROW_LIMIT)

    def cell_ended(self, namespace: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        """All modules and optimizers of the notebook, used or not, the cell's variables, and those of the program's functions
        that an error left: the cell's own, or one that a variable keeps."""
        self._begin()
        self._see_given()
        everything = self._namespace if namespace is None else namespace
        self._know_all(everything)
        self._where.clear()
        self._states.clear()
        self._last_gradients.clear()
        unheard(self._see_all, everything, error)

    def _see_all(self, everything: Mapping[str, Any], error: BaseException | None) -> None:
        for module in _alive(self._modules):
            self.see_module(module)
        self._see_what_trains()
        errors = [] if error is None else [error]
        for name in self._names:
            value = objects.entry(everything, name)
            self._see_variable(name, value, END_LIMIT)
            errors += [one for one in _with_members(value) if objects.is_a(one, BaseException)]
        for frame in chain.from_iterable(map(_left_by, errors)):
            self._see_variables_of(frame)

    def modules(self) -> list[torch.nn.Module]:
        """Those that were seen and are still there. For a look, not to be kept."""
        return _alive(self._modules)

    def variable_of(self, thing: object) -> str | None:
        """The cell's name for an object, if it has one, or the notebook's, which a function of it may use."""
        found = next((name for name in self._names if objects.entry(self._namespace, name) is thing), None)
        if found is not None:
            return found
        others = (objects.text(name) for name, value in objects.items(self._namespace) if value is thing)
        return next((name for name in others if not name.startswith("_")), None)

    def _mentioned_in(self, statement: str) -> list[str]:
        """The cell's names in a statement's text, and those that the functions use that it names: they may have set them."""
        names = self._in_statement.get(statement)
        if names is None:
            names = self._in_statement[statement] = self._known_names.intersection(_WORD.findall(statement))
        for name in names:
            value = objects.entry(self._namespace, name)
            if type(value) is FunctionType:
                names = names.union(self._known_names.intersection(value.__code__.co_names))
        return sorted(names)

    # Looking

    def see_module(self, module: torch.nn.Module, variable: str = "") -> None:
        """Parameters and buffers by name, inside `no_dispatch`: again only where the first has moved (``.to``, ``.half``).
        variable: the cell's name for the module, which may be gone when owners are searched for."""
        first = next(tensors.nameless_parameters(module), None)
        if first is None:
            first = next((buffer for _, buffer in tensors.tensors_of(module, tensors.BUFFERS)), None)
        where = None if first is None else next(iter(self._places(first)), None)
        known = self._modules.get(id(module))
        if known is not None and known() is module and self._where.get(id(module), _NEVER) == where:
            return
        self._modules[id(module)] = weakref.ref(module)
        self._where[id(module)] = where
        weights = list(tensors.tensors_of(module, tensors.PARAMETERS))
        if len(weights) > 1:
            self._rows.add(tuple(tensors.shape(one) for _, one in weights))
            self._rows.add(tuple(tensors.shape(one) for _, one in weights if tensors.requires_grad(one)))
        for name, parameter in weights:
            if not tensors.is_leaf(parameter) and not tensors.is_view(parameter):
                # Weights that a program computed and put in a parameter's place (`torch.func.functional_call`).
                continue
            self._parameter_names[id(parameter)] = name
            self.has_wide_weights = self.has_wide_weights or tensors.dtype_name(parameter) == "float32"
            self._knows_shape(name, parameter)
            self._see(parameter, "parameter", name)
            if variable:
                self._see(parameter, "named", f"{variable}.{name}")
        for name, buffer in tensors.tensors_of(module, tensors.BUFFERS):
            self._buffer_names.add(name)
            self._knows_shape(name, buffer)
            self._see(buffer, "kv_cache" if caches.is_named(name) else "buffer", name)
        for name, tensor in caches.in_module(module, END_LIMIT):
            self._see(tensor, "kv_cache", name)

    def _see_groups(self, optimizer: torch.optim.Optimizer) -> None:
        is_new = self._remember(optimizer)
        names, parameters = self._parameters_of(optimizer)
        if is_new:
            for name, parameter in zip(names, parameters, strict=True):
                self._see(parameter, "parameter", name)
        self._see_gradients_of(names, parameters)

    def _see_states(self, optimizer: torch.optim.Optimizer) -> None:
        """States by name. They stay where they are from the second step on, so a step that adds none is not looked at."""
        self._remember(optimizer)
        table = tensors.states_of(optimizer)
        size = sum(dict.__len__(state) for _, state in table if objects.is_a(state, dict))
        steps, before = self._states.get(id(optimizer), (0, -1))
        self._states[id(optimizer)] = (steps + 1, size)
        if steps >= 2 and size == before:
            return
        kind = objects.name_of_class(type(optimizer))
        names = {id(parameter): name for name, parameter in zip(*self._parameters_of(optimizer), strict=True)}
        for owner, state in table:
            of = f"[{names[id(owner)]}]" if id(owner) in names else ""
            for name, tensor in tensors_in(state, "", END_LIMIT):
                self._see(tensor, "optimizer_state", f"{kind}.{name}{of}")

    def _knows(self, optimizer: torch.optim.Optimizer) -> None:
        working = tensors.working_optimizer(optimizer)
        self._optimizers[id(working)] = weakref.ref(working)

    def _remember(self, optimizer: torch.optim.Optimizer) -> bool:
        known = self._optimizers.get(id(optimizer))
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        is_new = id(optimizer) not in self._where or known is None or known() is not optimizer
        self._where[id(optimizer)] = None
        return is_new

    def _parameters_of(self, optimizer: torch.optim.Optimizer) -> _Parameters:
        parameters = tensors.parameters_of(optimizer)
        names = [*map(self._parameter_names.get, map(id, parameters))]
        return [f"parameter {number}" if name is None else name for number, name in enumerate(names)], parameters

    def _parameters_in(self, module: torch.nn.Module) -> _Parameters:
        """As `tensors_of` gives them. Names are put together only where others are there than at the last look."""
        parameters = list(tensors.nameless_parameters(module))
        ids = [*map(id, parameters)]
        known = self._names_in.get(id(module))
        if known is None or known[0] != ids:
            named = list(tensors.tensors_of(module, tensors.PARAMETERS))
            parameters = [one for _, one in named]
            known = self._names_in[id(module)] = [*map(id, parameters)], [name for name, _ in named]
        return known[1], parameters

    def _known_parameters(self) -> _Parameters:
        """Each once, under the first of its names."""
        found: dict[int, Named] = {}
        for module in _alive(self._modules):
            _add_new(found, *self._parameters_in(module))
        for optimizer in _alive(self._optimizers):
            # (Most often it has those of the modules, and their names need not be put together.)
            if not found.keys() >= set(map(id, tensors.parameters_of(optimizer))):
                _add_new(found, *self._parameters_of(optimizer))
        return [name for name, _ in found.values()], [parameter for _, parameter in found.values()]

    def _see_gradients(self) -> None:
        self._see_gradients_of(*self._known_parameters())
        for module in _alive(self._modules):
            for name, gradient in waiting_gradients(module):
                self._see(gradient, "gradient", name)

    def _see_gradients_of(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        """(There may be thousands of them, at each step.)"""
        place_of, last, add = self._machine.plain_place, self._last_gradients, self.sightings.append
        gradients = tensors.grads_of_leaves(parameters)
        for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
            if gradient is None:
                continue
            # A step looks at what the end of the backward has just seen; the same object under the same name is the same memory.
            key = id(gradient), name
            if key in last:
                continue
            last.add(key)
            where, of = place_of(gradient), place_of(parameter)
            if where is not None and of is not None and where[0] == of[0]:
                device, address = where
                add(Sighting(device, self._at(device), address, "gradient", name, of[1]))
            else:
                self._see(gradient, "gradient", name, dict(self._places(parameter)))

    def _see_variable(self, name: str, value: Any, limit: int) -> None:
        for place, tensor in tensors_in(value, name, limit):
            if tensors.is_parameter(tensor):
                self._see(tensor, "parameter", place)
            if tensors.requires_grad(tensor) and tensors.is_leaf(tensor):
                self._see_gradients_of([place], [tensor])
            for device, address in self._places(tensor):
                look = device, address, self._at(device)
                self._add_once(place, look, "named" if tensors.is_leaf(tensor) else "output", place)
        for place, tensor in _in_states(value, name, limit, _DEPTH):
            for device, address in self._places(tensor):
                self._add_once(f"{place} of states", (device, address, self._at(device)), "states", place)
        for place, key, tensor, is_certain in self._in_state_dicts(value, name, limit, _DEPTH):
            for device, address in self._places(tensor):
                look = device, address, self._at(device)
                role = "buffer" if key in self._buffer_names else "parameter" if is_certain else "weights"
                # (Of a large one, the first alone were looked at above.)
                for known_as, seen_as in ((place, "named"), (f"{place} of weights", role)):
                    self._add_once(known_as, look, seen_as, place)
        self._see_weights_of_an_object(name, value, limit)
        for row in _rows_in(value, max(map(len, self._rows))) if self._rows else ():
            self._see_row(row)
        self._see_caches(value, name)
        for place, tensor in tensors_of_data(value, name, limit):
            for device, address in self._places(tensor):
                role = "named" if tensors.is_leaf(tensor) else "output"
                self._add_once(place, (device, address, self._at(device)), role, place)

    def _see_weights_of_an_object(self, name: str, value: Any, limit: int) -> None:
        """A copy of a model's weights that an object keeps under their names: an average of them. Who searches for owners has the
        attribute."""
        for one in _dictionaries_of(value) if self._shapes else ():
            for place, key, tensor, _ in self._in_state_dicts(one, name, limit, 1):
                for device, address in self._places(tensor):
                    look = device, address, self._at(device)
                    role = "buffer" if key in self._buffer_names else "weights"
                    self._add_once(f"{place} of an object", look, role, None)

    def _see_row(self, row: list[Any]) -> None:
        """A list with a tensor for each of a model's weights, which are not these: copies of them, or what an optimizer that
        was written by hand keeps. While there are gradients it may be copies of those."""
        if not all(tensors.is_tensor(one) and tensors.is_leaf(one) and not tensors.requires_grad(one) for one in row):
            return
        if tuple(map(tensors.shape, row)) in self._rows:
            role = "beside_gradients" if self._has_gradients() else "beside"
            for tensor in row:
                for device, address in self._places(tensor):
                    self._add_once(f"{role} {id(tensor)}", (device, address, self._at(device)), role, None)

    def _has_gradients(self) -> bool:
        return any(
            tensors.grad(one) is not None
            for module in _alive(self._modules)
            for one in islice(tensors.nameless_parameters(module), ROW_LIMIT)
        )

    def _add_once(self, known_as: str, look: tuple[int, int, int], role: str, place: str | None) -> None:
        """No event since the last look under this name: the same tenant, and nothing to add."""
        if self._last_look.get(known_as) != look:
            self._last_look[known_as] = look
            self._add(look, role, place)

    def _in_state_dicts(
        self, value: Any, name: str, limit: int, depth: int
    ) -> Iterator[tuple[str, str, torch.Tensor, bool]]:
        """(place, key, tensor, whether PyTorch says so) of what `state_dict()` gave, or a copy of that, or a dictionary with the
        names and shapes of a model's weights: weights, though no module's."""
        if objects.is_a(value, (list, tuple)) and depth:
            for number, one in enumerate(islice(objects.members(value), limit)):
                yield from self._in_state_dicts(one, f"{name}[{number}]", limit, depth - 1)
        if not objects.is_a(value, dict) or depth == 0:
            return
        is_certain = objects.attribute(value, "_metadata") is not None
        is_one = is_certain or self._is_of_weights(value)
        # (A model's weights are one thing: where some were told, and others not, the others would count as something else.)
        for key, item in islice(dict.items(value), END_LIMIT if is_one else limit):
            place = f"{name}[{objects.shown(key)[:40]}]" if objects.is_a(key, str) else ""
            if is_one and place and tensors.is_tensor(item):
                yield place, str(key), item, is_certain
            elif place:
                yield from self._in_state_dicts(item, place, limit, depth - 1)

    def _is_of_weights(self, value: dict[Any, Any]) -> bool:
        """Whether all in a dictionary have names and shapes of weights that were seen: ``{name: p.clone() for name, p in …}``."""
        if not dict.__len__(value) or not self._shapes:
            return False
        return all(
            objects.is_a(key, str)
            and tensors.is_tensor(item)
            and tensors.is_leaf(item)
            and tensors.shape(item) in self._shapes.get(_without_wrappers(key), ())
            for key, item in islice(dict.items(value), END_LIMIT)
        )

    def _knows_shape(self, name: str, tensor: torch.Tensor) -> None:
        self._shapes.setdefault(_without_wrappers(name), set()).add(tensors.shape(tensor))

    def _see_variables_of(self, frame: FrameType) -> None:
        """What a function that failed still held by a variable of its own. (Who searches for owners has the name.)"""
        for value in objects.locals_of(frame).values():
            if tensors.is_module(value):
                self.see_module(value)
                continue
            for _, tensor in tensors_in(value, "", END_LIMIT):
                self._see(tensor, "named" if tensors.is_leaf(tensor) else "output", None)

    def _see_caches(self, value: Any, name: str = "") -> None:
        if tensors.is_tensor(value) and not caches.is_named(name):
            return
        for place, tensor in caches.keys_and_values(value, name, END_LIMIT):
            self._see(tensor, "kv_cache", place)

    def _see_argument(self, tensor: torch.Tensor, name: str | None) -> None:
        if tensors.is_leaf(tensor):
            self._see(tensor, "input", name)

    def _see(self, tensor: torch.Tensor, role: str, name: str | None, of: Mapping[int, int] | None = None) -> None:
        """of: device -> the address of the parameter whose gradient it is."""
        if tensors.is_sparse(tensor):
            # Several tensors hold its memory; the last is the tensor's place.
            for indices in tensors.sparse_parts(tensor)[:-1]:
                self._see(indices, role, name, of)
        for device, address in self._places(tensor):
            self._add((device, address, self._at(device)), role, name, of.get(device, 0) if of else 0)

    def _places(self, tensor: torch.Tensor) -> list[tuple[int, int]]:
        """Where its memory is, by device and address."""
        if (plain := self._machine.plain_place(tensor)) is not None:
            return [plain]
        if not tensors.has_python_key(tensor):
            where = self._machine.locate(tensor)
            return [] if where is None else [where]
        found = map(self._machine.locate, tensors.pieces(tensor))
        return [where for where in found if where is not None]

    def _at(self, device: int) -> int:
        position = self._now.get(device)
        if position is None:
            position = self._now[device] = self._position(device)
        return position

    def _add(self, look: tuple[int, int, int], role: str, name: str | None, of: int = 0) -> None:
        device, address, position = look
        self.sightings.append(Sighting(device, position, address, role, name, of))


_NEVER = (-1, -1)


def _add_new(found: dict[int, Named], names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
    """By their ids, those that are not there yet."""
    ids = [*map(id, parameters)]
    named = zip(names, parameters, strict=True)
    if not found and len(set(ids)) == len(ids):
        found.update(zip(ids, named, strict=True))
        return
    for one, both in zip(ids, named, strict=True):
        found.setdefault(one, both)


def _left_by(error: BaseException) -> Iterator[FrameType]:
    """The frames of the program's own functions on an error's way. What stands outside of functions has the cell's variables."""
    for one in entries(objects.traceback_of(error)):
        code = one.tb_frame.f_code
        if code.co_flags & CO_NEWLOCALS and whose(code.co_filename) == OWN:
            yield one.tb_frame


def _arguments(module: torch.nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """A forward's arguments by position, under their names as far as its class tells them."""
    forward = objects.from_class(type(module), "forward")
    names = forward.__code__.co_varnames[1:] if type(forward) is FunctionType else ()
    return {names[number] if number < len(names) else str(number): one for number, one in enumerate(args)}


def tensors_in(value: Any, name: str, limit: int) -> list[Named]:
    """The tensors of a value that is one, or a list, tuple or dictionary of them, three levels deep.

    At most `limit` of them, among the first `limit` items of each container: a long history of numbers costs no more.
    """
    return list(islice(_tensors_in(value, name, limit, _DEPTH), limit))


def _with_members(value: Any) -> Iterator[Any]:
    """A value, and the first ones in it where it is a list, a tuple or a dictionary, the models of an ensemble, or an object of
    the program's own, which keeps an average of the weights, say."""
    yield value
    if objects.is_a(value, (list, tuple)):
        yield from islice(objects.members(value), ROW_LIMIT)
    elif objects.is_a(value, dict):
        yield from islice(dict.values(value), ROW_LIMIT)
    elif _is_programs_own(value):
        # (Whoever asks for its `__dict__` makes one: CPython keeps attributes without, from 3.11 on.)
        for one in islice(gc.get_referents(value), ROW_LIMIT):
            yield from islice(dict.values(one), ROW_LIMIT) if type(one) is dict else (one,)


def _rows_in(value: Any, longest: int) -> Iterator[list[Any]]:
    """What may have a tensor for each weight: a value, or one in it."""
    for number, one in enumerate(_with_members(value)):
        row: Iterable[Any] = ()
        if objects.is_a(one, (list, tuple)):
            row = objects.members(one)
        elif objects.is_a(one, dict) and not (number and _is_programs_own(value)):
            row = dict.values(one)
        found = list(islice(row, longest + 1))
        if 1 < len(found) <= longest:
            yield found


def _is_programs_own(value: Any) -> bool:
    """Whether it is an object of a class that was written in Python, and is worth a look inside."""
    return bool(_FLAGS.__get__(type(value)) & _OF_PYTHON) and not (
        tensors.is_module(value) or objects.is_a(value, _NOT_OPENED)
    )


def _dictionaries_of(value: Any) -> Iterator[dict[Any, Any]]:
    """The dictionaries among an object's attributes. (One that it refers to may be an attribute, or have them all.)"""
    if _is_programs_own(value) and not objects.is_a(value, (list, tuple, dict)):
        for one in islice(gc.get_referents(value), ROW_LIMIT):
            if type(one) is dict:
                yield one
                yield from (inner for inner in islice(dict.values(one), ROW_LIMIT) if type(inner) is dict)


def _tensors_in(value: Any, name: str, limit: int, depth: int) -> Iterator[Named]:
    if tensors.is_tensor(value):
        yield name, value
        return
    if depth == 0:
        return
    pairs: Iterable[tuple[Any, Any]]
    if objects.is_a(value, (list, tuple)):
        pairs = enumerate(objects.members(value))
    elif arrays.is_of_objects(value):
        for place, item in islice(zip(arrays.places(value), arrays.members(value), strict=True), limit):
            yield from _tensors_in(item, f"{name}{place}", limit, depth - 1)
        return
    elif arrays.is_of_pandas(value):
        for column in arrays.columns(value):
            yield from (
                one for item in islice(arrays.members(column), limit) for one in _tensors_in(item, name, limit, 0)
            )
        return
    else:
        wraps = not objects.is_a(value, dict) and objects.inherits(value, UserDict)
        inner = objects.attribute(value, "data") if wraps else value
        if not objects.is_a(inner, dict):
            return
        pairs = dict.items(inner)
    for key, item in islice(pairs, limit):
        place = objects.shown(key)[:40] if objects.is_a(key, (str, int)) else objects.name_of_class(type(key))
        yield from _tensors_in(item, f"{name}[{place}]" if name else place.strip("'"), limit, depth - 1)


def _in_states(value: Any, name: str, limit: int, depth: int) -> Iterator[Named]:
    """The states in what an optimizer's `state_dict()` gave, or a copy of that, or a file with it."""
    if not objects.is_a(value, dict) or depth == 0:
        return
    # (Keys are the program's own, of which nothing may be asked.)
    items = [(key, item) for key, item in islice(dict.items(value), limit) if type(key) is str]
    known = {key: item for key, item in items if key in ("state", "param_groups")}
    if objects.is_a(known.get("state"), dict) and objects.is_a(known.get("param_groups"), list):
        yield from islice(_tensors_in(known["state"], f"{name}['state']", END_LIMIT, _DEPTH), END_LIMIT)
        return
    for key, item in items:
        yield from _in_states(item, f"{name}[{objects.shown(key)[:40]}]", limit, depth - 1)


def _without_wrappers(name: str) -> str:
    """A weight's name within the model that DistributedDataParallel, or the compiler, has wrapped."""
    # (Of a string's own class: the program may have keys with a `replace` of theirs.)
    return str.replace(str.replace(name, "module.", ""), f"{tensors.COMPILED}.", "")


def _alive(references: Mapping[int, weakref.ref[Any]]) -> list[Any]:
    return [thing for thing in (reference() for reference in list(references.values())) if thing is not None]
