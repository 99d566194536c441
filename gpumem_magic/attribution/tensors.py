"""What an allocation holds, which line made it and of what, and what keeps it at a moment: all that is known of each.

On a virtual device an operator tells when it asks for memory. On a real one, and in a file, the stack says what it can. Names are
those that a look at the program's variables found, at the moment nearest; a graph's are those that the first backward saved.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from operator import itemgetter

from gpumem_magic.attribution.copied import copied_from
from gpumem_magic.attribution.owners import tenants
from gpumem_magic.attribution.phase_map import PhaseMap, phases_on
from gpumem_magic.attribution.sites import GATHERERS, TRIALS, is_library, is_python
from gpumem_magic.devices.base import Birth, CodePlace, DeviceLog, Label
from gpumem_magic.looks.code import PASSED_OVER, TORCH, cell_of, is_compiler_file, line_at, whose
from gpumem_magic.looks.fresh import only_deleted
from gpumem_magic.recording.model import (
    BACKWARD,
    FORWARD,
    KEPT_BY_GRAPH,
    KEPT_BY_LIST,
    KEPT_BY_NAME,
    NOT_KEPT,
    NOT_KNOWN,
    OF_A_CYCLE,
    Checkpoint,
    Hold,
    Recording,
)
from gpumem_magic.snapshot.model import Frame
from gpumem_magic.snapshot.timeline import Allocation

FROM = ", from "
"""Between a place inside and the program's own line from which it was reached."""
_OF_A_MODULE = frozenset({"parameters", "gradients"})
_BYTES = "uint8"
_FIRST_NAME = re.compile(r"[.\[]")


@dataclass(frozen=True)
class TensorFacts:
    """What stays the same over an allocation's life; "" (0, None, ()) for what is not known. See `report.model.TensorGroup`.

    backward: whether a backward made it; operator, statement and line are then those of its forward.
    """

    category: str
    dtype: str
    shape: tuple[int, ...] | None
    operator: str
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    backward: bool
    statement: str
    line: int
    expression: str
    inner: str
    module: str


class Tensors:
    """One device's allocations, described. What costs time is done when it is first asked for, and kept."""

    def __init__(
        self,
        recording: Recording,
        log: DeviceLog,
        allocations: Sequence[Allocation],
        labels: Sequence[Label],
        frames_of: Callable[[Allocation], tuple[Frame, ...]],
    ) -> None:
        self._recording = recording
        self._log = log
        self._device = log.facts.index
        self._allocations = allocations
        self._labels = labels
        self._frames_of = frames_of
        self._facts: dict[int, TensorFacts] = {}
        self._births: dict[int, Birth | None] = {}

    def facts(self, one: Allocation) -> TensorFacts:
        """What is known of an allocation at any moment."""
        found = self._facts.get(one.index)
        if found is None:
            found = self._facts[one.index] = self._found(one)
        return found

    def birth_of(self, one: Allocation) -> Birth | None:
        """How it came to be, as an operator told or as its stack says."""
        if one.index not in self._births:
            told = self._log.births.get(one.born) if one.born >= 0 else None
            # (Whichever line came first, a workspace is no line's own.)
            if told is None and self._labels[one.index].category != "workspace":
                told = _of_stack(self._frames_of(one))
            self._births[one.index] = told
        return self._births[one.index]

    def statement_at(self, event: int) -> Checkpoint | None:
        """The statement in which an event happened, where statements were seen, and the row of this one was kept."""
        ends, points = self._statements
        rank = bisect_right(ends, event)
        if event < 0 or rank == len(points) or points[rank].kind not in ("statement", "error"):
            return None
        begin = points[rank].begin
        return points[rank] if begin is None or begin.positions.get(self._device, 0) <= event else None

    def keeper(self, one: Allocation, position: int) -> tuple[str, str]:
        """What keeps it at a position: one of the words of `recording.model`, and the place."""
        names = self._names.get(one.index, ())
        earlier = bisect_right(names, position, key=itemgetter(0))
        name = names[earlier - 1][1] if earlier else names[0][1] if names else ""
        let_go = ""
        has = self._has_still if earlier else self._has_next
        if name and not has(name, one, position):
            # By then it was another's, or yet another's.
            name, let_go = "", name
        elif earlier and self._went_over_several(name, position):
            others = (other for _, other in reversed(names[:earlier]) if other != name)
            name = next((other for other in others if self._has_still(other, one, position)), name)
        holds = self._holds.get(one.index, ())
        at_end = next((hold for hold in holds if hold.position == len(self._log.events)), None)
        if at_end is not None and at_end.place.startswith(OF_A_CYCLE) and self.is_newest(one, position):
            # What kept it then was let go of later.
            at_end = None
        label = self._labels[one.index]
        # A loop's variable names each parameter in turn: what keeps them is their model.
        if at_end is not None and (not name or at_end.place.startswith(name) or label.category in _OF_A_MODULE):
            return at_end.keeper, at_end.place
        if name:
            return (KEPT_BY_LIST if "[" in name else KEPT_BY_NAME), name
        if label.name and label.evidence == "identity" and label.name != let_go:
            # A gradient that is gone by the end is called as its parameter is within the model, which has no name of its own.
            place = self._place_of_gradient(one, label.name) if label.category == "gradients" else label.name
            # ``0.weight`` is a name within a model that nobody names.
            return KEPT_BY_NAME, place if _FIRST_NAME.split(place, maxsplit=1)[0].isidentifier() else ""
        if label.name and label.evidence == "stack" and (label.category == "gradients" or label.name in GATHERERS):
            return KEPT_BY_NAME, label.name
        saved = next((hold for hold in holds if hold.keeper == KEPT_BY_GRAPH), None)
        if saved is None and label.category == "activations":
            birth = self.birth_of(one)
            words = self._saved_by.get(birth) if birth is not None else None
            if words is not None:
                return KEPT_BY_GRAPH, words
        if saved is not None:
            return KEPT_BY_GRAPH, saved.place
        if one.freed is not None:
            ends_in = self._phases.at_event(one.freed)
            if label.category == "activations" and ends_in is not None and ends_in.kind == BACKWARD:
                return KEPT_BY_GRAPH, ""
            if label.category in ("activations", "kv_cache") and self._outlived_its_forward(one, position):
                return KEPT_BY_GRAPH, ""
            if label.category in ("temporaries", "activation_gradients") or self._is_passing(one):
                return NOT_KEPT, ""
        return NOT_KNOWN, ""

    def waits_for(self, one: Allocation, position: int) -> str:
        """The plain name that it gets later, where another has that name first, as what waits for a loop's variable; "" else."""
        seen, name = next(iter(self._names.get(one.index, ())), (0, ""))
        return name if seen > position and not self._has_next(name, one, position) else ""

    def is_saved(self, one: Allocation) -> bool:
        """Whether a graph keeps it, as far as the first backward's tells: later iterations are taken to do the same."""
        birth = self.birth_of(one)
        holds = self._holds.get(one.index, ())
        return any(hold.keeper == KEPT_BY_GRAPH for hold in holds) or (birth is not None and birth in self._saved_by)

    @cached_property
    def variables(self) -> Mapping[int, tuple[str, ...]]:
        """Index of an allocation -> the cell's variables that were seen to lead to it, by their own names."""
        return {
            index: tuple(sorted({_FIRST_NAME.split(name, maxsplit=1)[0] for _, name in names}))
            for index, names in self._names.items()
        }

    def is_newest(self, one: Allocation, position: int) -> bool:
        """Whether it holds a model's parameter, and none of the same name was seen after it up to a position: programs work with
        their newest model."""
        name = self._labels[one.index].name
        seen = self._parameters_seen.get(name or "", ())
        last = bisect_right(seen, position, key=itemgetter(0)) - 1
        return last >= 0 and seen[last][1] == one.index

    def _has_still(self, name: str, one: Allocation, position: int) -> bool:
        """Whether an allocation is among those that a name was last seen to hold, up to a position."""
        seen = self._named[name]
        last = seen[bisect_right(seen, position, key=itemgetter(0)) - 1][0]
        if any(last <= end <= position for end in self._deletions.get(name, ())):
            return False
        return _has_pair(seen, (last, one.index))

    def _went_over_several(self, name: str, position: int) -> bool:
        """Whether a name was last seen to hold one after the other while nothing was asked for, as a loop's variable: they are
        there by another name, if they have one."""
        seen = self._named[name]
        last = bisect_right(seen, position, key=itemgetter(0)) - 1
        return name.isidentifier() and last > 0 and seen[last - 1][0] == seen[last][0]

    def _has_next(self, name: str, one: Allocation, position: int) -> bool:
        """Whether an allocation is among those that a name is seen to hold next, behind a position: of what waits for a loop's
        variable, one at a time has its name. (A list holds what is put into it later as well.)"""
        if not name.isidentifier():
            return True
        seen = self._named[name]
        first = bisect_right(seen, position, key=itemgetter(0))
        return first == len(seen) or _has_pair(seen, (seen[first][0], one.index))

    def is_former(self, one: Allocation, name: str, position: int) -> bool:
        """Whether the statement under way has made what a name is seen to hold next, and the name is still another's, as in
        ``y = y * 2``. (What an earlier one made is a tensor of its own until then.)"""
        seen = self._named.get(name, ())
        first = bisect_right(seen, position, key=itemgetter(0))
        if not 0 < first < len(seen) or not self._has_still(name, one, position):
            return False
        last = bisect_right(seen, seen[first][0], key=itemgetter(0))
        following = [index for _, index in seen[first:last]]
        if one.index in following:
            return False
        point, births = self.statement_at(position), [self._allocations[index].born for index in following]
        return all(born < position and self.statement_at(born) is point for born in births)

    def _is_passing(self, one: Allocation) -> bool:
        """Whether it came and went within one statement."""
        point = self.statement_at(one.born)
        return one.freed is not None and point is not None and self.statement_at(one.freed) is point

    def _outlived_its_forward(self, one: Allocation, position: int) -> bool:
        """Whether a forward that autograd recorded made it, and had ended by then."""
        begins, ends = self._recorded_forwards
        number = bisect_right(begins, one.born) - 1
        return number >= 0 and one.born < ends[number] <= position

    def _place_of_gradient(self, one: Allocation, name: str) -> str:
        """Where the program has its parameter; `name` is the parameter's within its model."""
        parameter = self._parameter_of.get(one.index)
        holds = self._holds.get(parameter, ()) if parameter is not None else ()
        place = next((hold.place for hold in holds if hold.keeper in (KEPT_BY_NAME, KEPT_BY_LIST)), "")
        return place if place.endswith(name) else self._place_of_parameter(name)

    def _place_of_parameter(self, name: str) -> str:
        """Where the program has a parameter of this name within its model; "" where that is not known."""
        module, _, own = name.rpartition(".")
        place = self._parameters.get(name, "")
        # Of parameters that share their memory, as an LSTM's weights do, one gives it its name.
        models = self._models.get(module, set())
        return place if place.endswith(own) or len(models) != 1 else f"{next(iter(models))}{name}"

    # What is looked up

    @cached_property
    def _parameter_of(self) -> Mapping[int, int]:
        """Index of a gradient's allocation -> its parameter's. (Two models may have parameters of one name.)"""
        looks = [one for one in self._recording.sightings if one.device == self._device and one.of]
        gradients = self._tenants((one.address, one.position) for one in looks)
        parameters = self._tenants((one.of, one.position) for one in looks)
        pairs = zip(gradients, parameters, strict=True)
        return {one.index: its.index for one, its in pairs if one is not None and its is not None}

    @cached_property
    def _models(self) -> Mapping[str, set[str]]:
        """A module's path within its model -> how the program's places begin where it has the model: ``net.``."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for name, place in self._parameters.items():
            module = name.rpartition(".")[0]
            around = place.rpartition(".")[0]
            if around.endswith(module):
                found[module].add(around.removesuffix(module) if module else f"{around}.")
        return found

    @cached_property
    def _parameters(self) -> dict[str, str]:
        """A parameter's name within its model -> where the program has it."""
        return {
            str(label.name): hold.place
            for index, holds in self._holds.items()
            if (label := self._labels[index]).category == "parameters" and label.name
            for hold in holds
            if hold.keeper in (KEPT_BY_NAME, KEPT_BY_LIST)
        }

    @cached_property
    def _statements(self) -> tuple[list[int], list[Checkpoint]]:
        points = [one for one in self._recording.checkpoints if self._device in one.moment.positions]
        return [one.moment.positions[self._device] for one in points], points

    @cached_property
    def _statements_on(self) -> Mapping[int, Sequence[str]]:
        """Line -> the first lines of the statements that begin there, which a semicolon may part."""
        found: dict[int, dict[str, None]] = defaultdict(dict)
        for one in self._recording.checkpoints:
            if one.kind == "statement":
                found[one.line][_first_line(one)] = None
        return {line: tuple(its) for line, its in found.items()}

    def _statement_at(self, place: CodePlace, under_way: str) -> str:
        """The statement of a place in the cell: of those on its line the one in which its expression stands, else the one that
        was under way, where that is one of them."""
        here = self._statements_on.get(place.own_line, ())
        fitting = [one for one in here if place.expression and place.expression in one] or here
        if under_way in fitting:
            return under_way
        return fitting[0] if fitting else place.text

    @cached_property
    def _recorded_forwards(self) -> tuple[list[int], list[int]]:
        """Where the forwards began, and ended, of which autograd recorded what they gave."""
        pairs = sorted(
            (one.start.positions[self._device], one.end.positions[self._device])
            for one in self._recording.spans
            if one.kind == FORWARD
            and one.graph
            and {self._device} <= one.start.positions.keys() & one.end.positions.keys()
        )
        return [begin for begin, _ in pairs], [end for _, end in pairs]

    @cached_property
    def _phases(self) -> PhaseMap:
        return PhaseMap(phases_on(self._device, self._recording.spans, self._recording.checkpoints))

    @cached_property
    def _names(self) -> Mapping[int, Sequence[tuple[int, str]]]:
        """Index of an allocation -> the positions at which a variable was seen to hold it, each with the name."""
        looks = [
            one
            for one in self._recording.sightings
            if one.device == self._device and one.role in ("named", "output") and one.name
        ]
        found: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for look, allocation in zip(looks, self._tenants((one.address, one.position) for one in looks), strict=True):
            if allocation is not None:
                found[allocation.index].append((look.position, look.name or ""))
        return found

    @cached_property
    def _parameters_seen(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """A parameter's name within its model -> the positions at which one of that name was seen, each with its allocation."""
        looks = [one for one in self._recording.sightings if one.device == self._device and one.role == "parameter"]
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for look, allocation in zip(looks, self._tenants((one.address, one.position) for one in looks), strict=True):
            if allocation is not None:
                found[look.name or ""].append((look.position, allocation.index))
        return found

    @cached_property
    def _named(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """Name -> the positions at which it was seen to hold something, each with the index of the allocation."""
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for index, names in self._names.items():
            for position, name in names:
                found[name].append((position, index))
        return {name: sorted(seen) for name, seen in found.items()}

    @cached_property
    def _deletions(self) -> Mapping[str, Sequence[int]]:
        """Name -> where the statements ended that deleted it."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for end, point in zip(*self._statements, strict=True):
            if point.kind == "statement" and point.statement.lstrip().startswith("del "):
                for name in only_deleted(point.statement):
                    found[name].append(end)
        return found

    @cached_property
    def _holds(self) -> Mapping[int, Sequence[Hold]]:
        holds = [one for one in self._recording.holds if one.device == self._device]
        found: dict[int, list[Hold]] = defaultdict(list)
        for hold, allocation in zip(holds, self._tenants((one.address, one.position) for one in holds), strict=True):
            if allocation is not None:
                found[allocation.index].append(hold)
        return found

    @cached_property
    def _saved_by(self) -> Mapping[Birth, str]:
        """How it came to be -> what saved it in the first backward's graph: later iterations are taken to do the same."""
        found = {}
        for index, holds in self._holds.items():
            birth = self.birth_of(self._allocations[index])
            words = next((one.place for one in holds if one.keeper == KEPT_BY_GRAPH), None)
            if birth is not None and words is not None:
                found[birth] = words
        return found

    @cached_property
    def _kinds(self) -> Mapping[tuple[Birth, int], tuple[tuple[int, ...] | None, str]]:
        """How it came to be, and its size -> shape and dtype of those that were seen, where these are alike: one place asks for
        one kind of tensor, whichever iteration it is."""
        found: defaultdict[tuple[Birth, int], set[tuple[tuple[int, ...] | None, str]]] = defaultdict(set)
        for index, holds in self._holds.items():
            one = self._allocations[index]
            birth = self.birth_of(one)
            for hold in holds:
                if birth is not None and hold.dtype:
                    found[birth, one.requested].add((hold.shape, hold.dtype))
        return {key: next(iter(kinds)) for key, kinds in found.items() if len(kinds) == 1}

    def _tenants(self, looks: Iterable[tuple[int, int]]) -> list[Allocation | None]:
        return tenants(self._allocations, looks)

    @cached_property
    def sources(self) -> Mapping[int, int]:
        """Index of an allocation -> that of what it was made as a copy of."""
        return copied_from(self._log, self._allocations)

    @cached_property
    def _modules(self) -> Mapping[CodePlace, frozenset[int]]:
        """A place in the program -> the numbers of the modules that were at work there, as far as that was followed."""
        found: dict[CodePlace, set[int]] = defaultdict(set)
        trace = self._recording.modules
        for event, birth in self._log.births.items():
            number = trace.at(self._device, event) if birth.place is not None and not birth.node else None
            if number is not None and birth.place is not None:
                found[birth.place].add(number)
        return {place: frozenset(numbers) for place, numbers in found.items()}

    # The facts

    def _found(self, one: Allocation) -> TensorFacts:
        label, birth = self._labels[one.index], self.birth_of(one)
        seen = next((hold for hold in self._holds.get(one.index, ()) if hold.dtype), None)
        point = self.statement_at(one.born) if self._recording.was_watched else None
        statement, line = ("", 0) if point is None else (_first_line(point), point.line)
        expression = inner = ""
        if birth is not None and birth.place is not None:
            statement, line, expression, inner = self._told(birth.place, statement, line)
        shape, dtype = (birth.shape, birth.dtype) if birth is not None else (None, "")
        if seen is None and shape is None and birth is not None:
            shape, dtype = self._kinds.get((birth, one.requested), (None, ""))
        if dtype == _BYTES:
            # A storage is copied (`copy.deepcopy`) and read from a file as bytes, whatever looks at it.
            source = self.sources.get(one.index)
            if source is not None and self._allocations[source].requested == one.requested:
                copied = self.facts(self._allocations[source])
                shape, dtype = copied.shape, copied.dtype
            elif seen is not None and seen.dtype != _BYTES and len(shape or ()) == 1:
                shape, dtype = seen.shape, seen.dtype
        if label.name == TRIALS:
            return TensorFacts(
                label.category,
                "",
                None,
                TRIALS,
                (),
                False,
                statement,
                line,
                expression,
                inner,
                self._module_of(one, birth),
            )
        return TensorFacts(
            label.category,
            dtype or ("" if seen is None else seen.dtype),
            shape if shape is not None or seen is None else seen.shape,
            "" if birth is None else birth.operator,
            () if birth is None else birth.inputs,
            birth is not None and bool(birth.node),
            statement,
            line,
            expression,
            inner,
            self._module_of(one, birth),
        )

    def request_facts(self, birth: Birth, line: int) -> TensorFacts | None:
        """What a request is told by that got no memory: of its tensor the looks, and where in the program it was made; None where
        that is not known. line: of the cell, at which it failed."""
        if birth.place is None:
            return None
        told = self._told(birth.place, next(iter(self._statements_on.get(line, ())), ""), line)
        return TensorFacts("", birth.dtype, birth.shape, birth.operator, birth.inputs, bool(birth.node), *told, "")

    def _told(self, place: CodePlace, statement: str, line: int) -> tuple[str, int, str, str]:
        """Statement, line, expression and the place inside. statement, line: of the cell, where the place is elsewhere."""
        own = words_of_place(place.own_file, place.own_line, place.own_function) if place.own_file else ""
        inner = words_of_place(place.file, place.line, place.function)
        if place.own_file and place.own_file == self._recording.own_file:
            line = place.own_line
            statement = self._statement_at(place, statement)
            inner = "" if inner == own else inner
        elif own and own != inner:
            inner = f"{inner}{FROM}{own}"
        return statement, line, place.expression, inner

    def _module_of(self, one: Allocation, birth: Birth | None) -> str:
        trace = self._recording.modules
        number = trace.at(self._device, one.born) if one.born >= 0 and (birth is None or not birth.node) else None
        if number is not None:
            return trace.names[number].path
        known = self._modules.get(birth.place, ()) if birth is not None and birth.place is not None else ()
        return common_path(trace.names[each].path for each in known)


def common_path(paths: Iterable[str]) -> str:
    """``model.layers.*.mlp`` for the mlps of several layers; what they share of their beginning where they lie elsewhere."""
    split = [path.split(".") for path in paths]
    if not split:
        return ""
    if len({len(parts) for parts in split}) > 1:
        shared = takewhile(lambda column: len(set(column)) == 1, zip(*split, strict=False))
        return ".".join(column[0] for column in shared)
    return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*split, strict=True))


def words_of_place(file: str, line: int, function: str) -> str:
    """``modeling_llama.py:244 forward``; of what has no name of its own (a comprehension, a lambda), file and line."""
    name = cell_of(file) or os.path.basename(file.replace("\\", "/"))
    return f"{name}:{line}" if function.startswith("<") else f"{name}:{line} {function}"


def _has_pair(pairs: Sequence[tuple[int, int]], wanted: tuple[int, int]) -> bool:
    """Whether one of these is among them, which are sorted."""
    place = bisect_left(pairs, wanted)
    return place < len(pairs) and pairs[place] == wanted


def _first_line(point: Checkpoint) -> str:
    # An error that no statement is known of has a label that is no text of the program.
    label = "" if point.kind == "error" else point.label
    return (point.statement or label).strip().partition("\n")[0]


def _of_stack(frames: tuple[Frame, ...]) -> Birth | None:
    """What a stack says, innermost frame first: where in the program it was, and which function of PyTorch's was called."""
    python = [frame for frame in frames if is_python(frame)]
    inner = own = None
    function, compiled = "", False
    for frame in python:
        if not is_library(frame):
            inner, own = inner or frame, frame
            break
        compiled = compiled or is_compiler_file(frame.filename)
        if inner is None and not compiled:
            kind = whose(frame.filename)
            if kind is TORCH or "/torch/" in frame.filename.replace("\\", "/"):
                if os.path.basename(frame.filename) == "functional.py":
                    function = frame.name
            elif kind is not PASSED_OVER:
                inner = frame
    if inner is None:
        return None
    place = CodePlace(
        inner.filename,
        inner.line,
        inner.name,
        *(
            ("", 0, "", "", "")
            if own is None
            else (own.filename, own.line, own.name, line_at(own.filename, own.line), "")
        ),
    )
    return Birth(function, function, None, "", (), place)
