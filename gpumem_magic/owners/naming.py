"""Names for what a walk found: the best path from a root, written as a user would write it."""

from __future__ import annotations

import heapq
import threading
import types
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from gpumem_magic.looks import arrays, tensors
from gpumem_magic.looks.code import OWN, is_generated_file, whose
from gpumem_magic.looks.objects import (
    arguments_of,
    attribute,
    attributes,
    entries_of_class,
    from_class,
    is_a,
    is_plain,
    is_sequence,
    locals_of,
    members,
    mro,
    name_of_class,
    shown,
    text,
    traceback_of,
)
from gpumem_magic.owners import autograd
from gpumem_magic.owners.model import (
    A_LEAF,
    CLOSURE_VARIABLE,
    COMPILED_CODE,
    DEFAULT_ARGUMENT,
    OF_FUNCTION,
    ON_CTX,
    Root,
)
from gpumem_magic.owners.traversal import Traversal
from gpumem_magic.recording.model import OF_A_GRAPH

# What a step costs: a name through a module is better than one through an optimizer, and a graph is the last resort.
_COSTS = {"grad": 3, "graph": 1000, "saved": 5, "next": 1, "variable": 1000}
_ROOT_COSTS = {"variable": 0, "module": 100, "out": 400, "traceback": 800, "thread": 600, "cycle": 900}
_OPTIMIZER = 300
# A parameter that only an optimizer knows is one of its param_groups, rather than a key of its states.
_STATE = 20
# Memory is rather a parameter's, or a whole tensor's, than that of a view of it, or of a detached one (as in `state_dict()`).
_SECOND = 50
# An object is rather reached by its own name than by that of one of its methods.
_METHOD = 20
# What the program calls its own is rather reached by that than by what a library's running function does.
_NOT_OURS = 60
# One of several alike is rather the model's than the variable's of a loop that went over them.
_TURN = 60
_TABLES = ("_parameters", "_buffers", "_modules")
_LONGEST = 60
_ID = 1 << 40
_TRACEBACK = "traceback"


def _holds(cell: types.CellType, wanted: Any) -> bool:
    try:
        return wanted is not None and cell.cell_contents is wanted
    except ValueError:
        # It is empty as yet.
        return False


class Namer:
    """Names for the numbers of a walk. numbers: those that lead to device memory; children: the links among them."""

    def __init__(self, walk: Traversal, roots: Sequence[int], children: Mapping[int, Sequence[int]]) -> None:
        self._walk = walk
        self._parent, self._root = _best_paths(walk, roots, children)
        self._places: dict[int, str] = {}
        self._inside: dict[int, dict[int, str]] = {}

    def root_of(self, number: int) -> int:
        """The root of the best path."""
        return self._root[number]

    def path(self, number: int) -> list[int]:
        """From the root to the number, both included."""
        path = [number]
        while (parent := self._parent.get(path[-1], -1)) >= 0:
            path.append(parent)
        return path[::-1]

    def is_in_graph(self, number: int) -> bool:
        """Whether the best path goes through autograd's graph."""
        return self.place(number).startswith(OF_A_GRAPH)

    def place(self, number: int) -> str:
        """The name of what has this number."""
        if number not in self._places:
            # From the nearest holder that has a name, so that long chains do not recurse.
            unnamed = [number]
            while (parent := self._parent.get(unnamed[-1], -1)) >= 0 and parent not in self._places:
                unnamed.append(parent)
            for node in reversed(unnamed):
                if node not in self._places:
                    self._places[node] = self._place(node)
        return self._places[number]

    def _place(self, number: int) -> str:
        parent = self._parent.get(number, -1)
        thing = self._walk.objects[number]
        if parent < 0:
            return thing.name if type(thing) is Root else name_of_class(type(thing))
        start = self._places[parent]
        holder = self._walk.objects[parent]
        if type(holder) is Root:
            return start
        kind = self._walk.kinds.get((parent, number))
        if kind is not None:
            return self._graph_place(start, kind, parent, number)
        if tensors.is_tensor(holder):
            return start
        if parent not in self._inside:
            self._inside[parent] = self._read_labels(parent, holder)
        label = self._inside[parent].get(id(thing), "")
        if label.startswith(" "):
            return f"{label[1:]}{self._within(parent)}"
        if (
            label
            and start.startswith(OF_A_GRAPH)
            and ": " not in start
            and (node := self._node_around(parent)) is not None
        ):
            return f"{start}{ON_CTX}{label} of {autograd.operation_of(node)}"
        return _joined(start, label)

    def _node_around(self, number: int) -> Any:
        """The node of a graph that this is, or whose dictionary of attributes it is; else None."""
        for one in (number, self._parent.get(number, -1)):
            thing = self._walk.objects[one] if one >= 0 else None
            if thing is not None and autograd.is_node_type(type(thing)):
                return thing
        return None

    def _within(self, number: int) -> str:
        """Where a function is, or its frame: `` of hook``, ``, in the traceback of error``."""
        if not is_a(self._walk.objects[number], types.FrameType):
            return f" of {self._places[number]}"
        first = number
        while is_a(self._walk.objects[above := self._parent[first]], types.TracebackType):
            first = above
        start = self._places[first]
        if first == number or start.endswith(_TRACEBACK):
            return f", in {start}"
        if is_a(self._walk.objects[above], BaseException):
            return f", in the {_TRACEBACK} of {self._places[above]}"
        return f", in the {_TRACEBACK} {start}"

    def _graph_place(self, start: str, kind: str, parent: int, number: int) -> str:
        if kind == "grad":
            return _joined(start, ".grad")
        if kind == "graph":
            return start if start.startswith(OF_A_GRAPH) else f"{OF_A_GRAPH}{start}"
        base = start.partition(": ")[0]
        if kind == "saved":
            operation = autograd.operation_of(self._walk.objects[parent])
            return f"{base}: {self._walk.arguments.get((parent, number), 'a tensor')} saved by {operation}"
        return f"{base}{A_LEAF}" if kind == "variable" else base

    def _read_labels(self, parent: int, holder: Any) -> dict[int, str]:
        """id of what a holder holds -> how a user reaches it from the holder; " word" stands for "word of ..."."""
        if of_arguments := self._default_arguments(parent, holder):
            return of_arguments
        if self._is_in_pandas(parent, holder):
            return {}
        if is_a(holder, dict):
            return self._dict_labels(parent, holder)
        if arrays.is_of_objects(holder):
            return arrays.labels(holder)
        if is_sequence(holder):
            fields = from_class(type(holder), "_fields") if is_a(holder, tuple) else None
            if type(fields) is tuple and len(fields) == tuple.__len__(holder):
                return {id(one): f".{text(field)}" for field, one in zip(fields, members(holder), strict=True)}
            return {id(one): f"[{place}]" for place, one in enumerate(members(holder))}
        if is_a(holder, types.FrameType):
            called, inside = holder.f_code.co_name, locals_of(holder)
            if is_generated_file(holder.f_code.co_filename):
                # (What the compiler calls its buffers says nothing to the program's author.)
                return {id(one): f" {COMPILED_CODE}" for one in inside.values()}
            return {id(one): f" local `{name}` of {called}()" for name, one in inside.items()}
        if is_a(holder, types.FunctionType):
            cells = zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=False)
            # (What a decorator has put around a function goes by that one's name.)
            inner = dict.get(holder.__dict__, "__wrapped__")
            return {
                id(cell): "" if _holds(cell, inner) else f" {CLOSURE_VARIABLE} `{name}`" for name, cell in cells
            } | {
                id(holder.__defaults__): "",
                id(holder.__kwdefaults__): "",
                id(holder.__dict__): "",
            }
        if is_a(holder, types.GeneratorType):
            frame = holder.gi_frame
            inside = {} if frame is None else locals_of(frame)
            return {
                id(one): f" local `{name}` of the generator {text(holder.__name__)}()" for name, one in inside.items()
            }
        if is_a(holder, BaseException):
            return {id(traceback_of(holder)): "", id(arguments_of(holder)): ".args"} | attribute_labels(holder)
        if is_a(holder, type):
            return {id(value): f".{text(name)}" for name, value in entries_of_class(holder).items()}
        if is_a(holder, types.MethodType):
            return {id(holder.__self__): ".__self__"}
        return attribute_labels(holder)

    def _is_in_pandas(self, parent: int, holder: Any) -> bool:
        """Whether it is pandas' own, or one of the containers in which that keeps its columns (by whichever way it was found)."""
        if arrays.is_of_pandas(holder):
            return True
        if not (is_a(holder, (tuple, dict)) or arrays.is_of_objects(holder)):
            return False
        above = self._parent.get(parent, -1)
        while above >= 0 and is_a(self._walk.objects[above], (tuple, dict)):
            above = self._parent.get(above, -1)
        return above >= 0 and arrays.is_of_pandas(self._walk.objects[above])

    def _default_arguments(self, parent: int, holder: Any) -> dict[int, str]:
        """Of the tuple or dictionary that a function has its default arguments in."""
        above = self._parent.get(parent, -1)
        function: Any = self._walk.objects[above] if above >= 0 else None
        if not is_a(function, types.FunctionType):
            return {}
        code, defaults = function.__code__, function.__defaults__ or ()
        named = list(zip(reversed(code.co_varnames[: code.co_argcount]), reversed(defaults), strict=False))
        if holder is function.__kwdefaults__:
            named = list(dict.items(holder))
        elif holder is not function.__defaults__:
            return {}
        return {id(value): f" {DEFAULT_ARGUMENT} `{name}`" for name, value in named}

    def _dict_labels(self, parent: int, holder: dict[Any, Any]) -> dict[int, str]:
        above = self._parent.get(parent, -1)
        owner = self._walk.objects[above] if above >= 0 else None
        if owner is not None and type(owner) is not Root and attributes(owner) is holder:
            return {id(value): _attribute(owner, name) for name, value in dict.items(holder)}
        if owner is not None and self._is_table_of_module(above, holder):
            return {id(value): f".{text(name)}" for name, value in dict.items(holder)}
        if is_a(owner, threading.local):
            # Of each thread's attributes, in a dictionary by threads (`local_traverse` of Modules/_threadmodule.c).
            return {id(value): "" for value in dict.values(holder)}
        if is_a(owner, dict) and self._is_a_threads(above):
            return {id(value): f".{text(name)}" for name, value in dict.items(holder)}
        labels = {}
        for key, value in dict.items(holder):
            labels[id(value)] = f"[{self._key(parent, key)}]"
            labels.setdefault(id(key), " a key")
        return labels

    def _is_a_threads(self, above: int) -> bool:
        """Whether a dictionary is that in which a `threading.local` has the attributes of each thread."""
        return (over := self._parent.get(above, -1)) >= 0 and is_a(self._walk.objects[over], threading.local)

    def _is_table_of_module(self, above: int, holder: Any) -> bool:
        """Whether a dictionary is a module's `_parameters`, `_buffers` or `_modules`: its entries read as attributes."""
        while above >= 0:
            thing = self._walk.objects[above]
            if tensors.is_module(thing):
                return any(attribute(thing, table) is holder for table in _TABLES)
            if not is_a(thing, dict):
                return False
            above = self._parent.get(above, -1)
        return False

    def _key(self, parent: int, key: Any) -> str:
        if is_id(key):
            return "id"
        if is_a(key, (str, int, float)):
            return _cut(shown(key))
        if is_plain(key):
            # Also a tuple of names and numbers.
            return _cut(repr(key))
        number = self._walk.number_of(key)
        # A parameter that only the optimizer knows is named through this very dictionary.
        if tensors.is_tensor(key) and number in self._parent and parent not in self.path(number):
            place = self.place(number)
            # Of a function's own variable its name is enough: whose it is, the whole place says.
            return place if (of_function := OF_FUNCTION.fullmatch(place)) is None else of_function["variable"]
        return name_of_class(type(key))


def _joined(start: str, label: str) -> str:
    # An element of what a function calls its own is written beside the variable.
    found = OF_FUNCTION.fullmatch(start)
    end = len(start) if found is None else found.end("variable")
    return f"{start[:end]}{label}{start[end:]}"


def _cut(words: str) -> str:
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."


def _attribute(owner: Any, name: Any) -> str:
    words = text(name)
    if tensors.is_module(owner) and words in _TABLES:
        return ""
    return f".{words}" if words else "[?]"


def is_id(key: Any) -> bool:
    """Whether a key is an object's `id`, another number each time."""
    return is_a(key, int) and int.__int__(key) >= _ID


def attribute_labels(holder: Any) -> dict[int, str]:
    """Attributes kept in the object itself: Python's compact instances, and slots."""
    labels: dict[int, str] = {}
    own = attributes(holder)
    if own:
        labels[id(own)] = ""
    labels.update((id(value), _attribute(holder, name)) for name, value in dict.items(own))
    for kind in mro(type(holder)):
        for name, slot in entries_of_class(kind).items():
            if type(slot) is types.MemberDescriptorType:
                try:
                    labels.setdefault(id(slot.__get__(holder)), f".{text(name)}")
                except AttributeError:
                    continue
    return labels


def _states_of_optimizers(walk: Traversal, numbers: Iterable[int]) -> set[int]:
    """The numbers of the optimizers' dictionaries of states."""
    optimizers = (thing for thing in map(walk.objects.__getitem__, numbers) if tensors.is_optimizer(thing))
    found = (walk.number_of(attribute(one, "state")) for one in optimizers)
    return {number for number in found if number is not None}


def _seconds(walk: Traversal) -> set[int]:
    """The numbers of tensors on memory that is a parameter's, or a whole tensor's, without being that one."""
    found: set[int] = set()
    for numbers in walk.tensors.values():
        its = {number: walk.objects[number] for number in numbers}
        first = {number for number, tensor in its.items() if tensors.is_parameter(tensor)} if len(its) > 1 else set()
        first = first or {number for number, tensor in its.items() if not tensors.is_view(tensor)}
        found.update(its.keys() - first if first else ())
    return found


def _of_loops(walk: Traversal, roots: Iterable[int], children: Mapping[int, Sequence[int]]) -> set[tuple[int, int]]:
    """(root, module or optimizer) of variables that hold one of a row of its kind, where no other of the row has a variable."""
    holding = {
        module: root
        for root in roots
        if walk.objects[root].kind == "variable"
        for module in children[root]
        if _is_of_a_row(walk.objects[module])
    }
    found = set()
    for thing in map(walk.objects.__getitem__, children) if holding else ():
        row = _row_in(thing)
        kinds = Counter(map(type, row))
        named = {one for one in map(walk.number_of, row) if one in holding}
        alone = Counter(type(walk.objects[one]) for one in named)
        found |= {(holding[one], one) for one in named if kinds[kind := type(walk.objects[one])] > alone[kind] == 1}
    return found


def _of_modules(walk: Traversal, roots: Iterable[int], children: Mapping[int, Sequence[int]]) -> set[tuple[int, int]]:
    """(root, parameter) of variables that hold a parameter of a module, as a loop over a model's parameters leaves one."""
    named = {
        (root, one)
        for root in roots
        if walk.objects[root].kind == "variable"
        for one in children[root]
        if tensors.is_parameter(walk.objects[one])
    }
    modules = (thing for thing in map(walk.objects.__getitem__, children) if tensors.is_module(thing)) if named else ()
    owned = {walk.number_of(one) for thing in modules for _, one in tensors.table(thing, tensors.PARAMETERS)}
    return {pair for pair in named if pair[1] in owned}


def _row_in(thing: Any) -> list[Any]:
    """The modules, or the optimizers, of a list of them."""
    if is_a(thing, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)):
        row: Iterable[Any] = [one for _, one in tensors.table(thing, tensors.MODULES)]
    else:
        row = members(thing) if is_a(thing, (list, tuple)) else ()
    return [one for one in row if _is_of_a_row(one)]


def _is_of_a_row(thing: Any) -> bool:
    return tensors.is_module(thing) or tensors.is_optimizer(thing)


def _best_paths(
    walk: Traversal, roots: Sequence[int], children: Mapping[int, Sequence[int]]
) -> tuple[dict[int, int], dict[int, int]]:
    """Number -> its parent on the cheapest path from a root (-1 for roots), and number -> that root."""
    parent: dict[int, int] = {}
    top: dict[int, int] = {}
    todo: list[tuple[int, int, int]] = []
    for number in roots:
        root = walk.objects[number]
        cost = _ROOT_COSTS.get(root.kind, 0) + (5 if root.name.startswith("_") else 0)
        todo.append((cost, number, -1))
    heapq.heapify(todo)
    states = _states_of_optimizers(walk, children)
    second = _seconds(walk)
    turns = _of_loops(walk, roots, children) | _of_modules(walk, roots, children)
    while todo:
        cost, number, holder = heapq.heappop(todo)
        if number in parent:
            continue
        parent[number] = holder
        top[number] = number if holder < 0 else top[holder]
        thing = walk.objects[number]
        more = _OPTIMIZER if tensors.is_optimizer(thing) else _STATE if number in states else 0
        more += _METHOD if is_a(thing, types.MethodType) else 0
        more += _NOT_OURS if is_a(thing, types.FrameType) and whose(thing.f_code.co_filename) != OWN else 0
        more += _SECOND if number in second else 0
        for child in children.get(number, ()):
            if child not in parent:
                step = _COSTS.get(walk.kinds.get((number, child), ""), 1) + (_TURN if (number, child) in turns else 0)
                heapq.heappush(todo, (cost + more + step, child, number))
    return parent, top
