"""What a program makes of a value that a line reads: asked of the source text alone.

A loop ends by it, where it stands in the test of a ``while``, in a ``range``, or in the test of an ``if`` that leaves a loop; a
size is made of it, where it stands among the arguments of what makes tensors and modules; a way is chosen by it, where it stands
in the test of any other ``if`` with work in it or behind it; an object, where that is called; a selection, where a list is as
long as values say; and it may be printed. So does all that it flows into (`flows`).

callers: the lines that called each other up to this one, innermost first, itself among them. In their files functions and
attributes of these names are looked for; and what a function gives that the line of its caller does not name (an object's
``__call__``, one of a table) is there as it was read. sized: the line makes a tensor whose length nobody knows. places: where in
the line it was read, if that is known; a line may have several statements.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache

from gpumem_magic.looks import flow_records, flows, observers
from gpumem_magic.looks.flow_records import FileFlows, Flow, Key, Place, Test, Uses
from gpumem_magic.looks.raises import are_caught
from gpumem_magic.looks.wording import Own

# Errors that a wrong value brings about, as a wrong name does not.
_OF_VALUES = (
    "AssertionError", "ValueError", "ZeroDivisionError", "OverflowError", "FloatingPointError", "IndexError", "KeyError",
    "RuntimeError", "StopIteration", "LinAlgError",
)  # fmt: skip
# Those that tell of None.
_OF_NOTHING = ("TypeError", "AttributeError")
# What is so whatever the values are: what autograd says of a graph, what operators say of devices, types and strides (ATen's
# `common_device_check_failure`, `Convolution.cpp`, `LinearAlgebra.cpp`, `AT_DISPATCH_...`, every `data_ptr<T>()`, and `view`),
# what `Module.load_state_dict`, `Tensor.numpy`, `Tensor.__deepcopy__` and a missing process group say, and torchvision of a
# build that does not fit (`torchvision/extension.py`).
_WHATEVER_THE_VALUES = (
    "backward through the graph a second time",
    "does not require grad",
    "modified by an inplace operation",
    "leaf Variable",
    "Expected all tensors to be on the same device",
    "and weight type (",
    "to have the same dtype",
    "expected scalar type",
    "is not compatible with input tensor's size and stride",
    "not implemented for '",
    "in loading state_dict",
    "Can't call numpy() on",
    "support the deepcopy protocol",
    "Default process group has not been initialized",
    "Couldn't load custom C++ ops",
)
# What a value flows into is as far from it as the farthest step on the way.
_VALUE, _WHOLE, _COUNT, _ALTERED, _WAY, _TOLD = range(6)
_Places = Sequence[Place]
_Lines = Sequence[tuple[str, int]]
# Whose result is a module's, and no number that somebody read; and so many calls are followed back.
_OF_MODULES = "forward"
_CALLS = 8
_STEPS = {
    "value": _VALUE, "argument": _VALUE, "whole": _WHOLE, "count": _COUNT, "altered": _ALTERED, "way": _WAY, "told": _TOLD,
}  # fmt: skip


def forget() -> None:
    """What was found out of classes that were alive: the program may have others since."""
    if observers.forget():
        _reached_in.cache_clear()


def may_be_of_a_value(kinds: AbstractSet[str], message: str) -> bool:
    """Whether an error may come of a wrong value. kinds: the names of its class and of those that this inherits from."""
    return not kinds.isdisjoint(_OF_VALUES) and not any(words in message for words in _WHATEVER_THE_VALUES)


def may_be_of_a_way(kinds: AbstractSet[str], message: str) -> str:
    """Whether an error may come of the way that values led to: "name", where nothing has given it a value yet, or "nothing", as a
    search gives it that finds nothing; else ""."""
    if "NameError" in kinds:
        return "name"
    return "nothing" if "NoneType" in message and not kinds.isdisjoint(_OF_NOTHING) else ""


def is_raised_there(file: str, line: int) -> bool:
    """Whether a ``raise`` of the program's or a library's own is at the line."""
    return any(first <= line <= last for first, last in flows.of_file(file).raises)


def is_tried(file: str, line: int) -> bool:
    """Whether an error that an operator raises in the line would be caught around it."""
    return any(first <= line <= last for first, last in flows.of_file(file).tries)


def ends_a_loop(file: str, line: int, callers: _Lines = (), sized: bool = False, places: _Places = ()) -> bool:
    """Whether a loop may go on or end by what this line reads. False where the source is not to be had."""
    reached = _reached(file, line, callers, sized, places=places)
    return any(reached.stands_in(test) or reached.has(test, _VALUE, _TOLD) for test in reached.tests("loop")) or any(
        (sized and reached.stands_in(test)) or reached.has(test, _VALUE if sized else _COUNT, _COUNT)
        for test in reached.tests("each")
    )


def makes_a_size(file: str, line: int, callers: _Lines = (), whole: bool = True, places: _Places = ()) -> bool:
    """Whether a size may be made of the number that this line reads. whole: one that may be a size itself."""
    reached = _reached(file, line, callers, places=places)
    if any(
        reached.has(test, _VALUE if whole else _WHOLE, _COUNT) or (whole and test[1].reads and reached.stands_in(test))
        for test in reached.tests("size")
    ):
        return True
    rounded = reached.tests("rounded")
    return any(reached.has(test, _VALUE, _COUNT) or reached.stands_in(test) for test in rounded) or (
        whole and any(map(reached.stands_in, reached.tests("sized")))
    )


def chooses_a_way(file: str, line: int, callers: _Lines = (), places: _Places = ()) -> bool:
    """Whether an ``if`` that does some work, or leaves it, may go by what this line reads."""
    reached = _reached(file, line, callers, places=places)
    return reached.goes_by("branch")


def chooses_an_object(file: str, line: int, callers: _Lines = (), places: _Places = ()) -> bool:
    """Whether a function or a module is called, or asked to do something, that was chosen by what this line reads."""
    reached = _reached(file, line, callers, places=places)
    return any(
        (test[1].reads and reached.stands_in(test)) or reached.has(test, _VALUE, _WAY)
        for test in (*reached.tests("called"), *reached.tests("removed"), *reached.tests("placed"))
    ) or any(reached.has(test, _WAY, _WAY) for test in reached.tests("asked"))


def keeps_gradients(file: str, line: int, callers: _Lines = (), places: _Places = ()) -> bool:
    """Whether gradients are kept, or not, by what this line reads."""
    reached = _reached(file, line, callers, places=places)
    return any(
        (test[1].reads and reached.stands_in(test)) or reached.has(test, _VALUE, _WAY)
        for test in reached.tests("switch")
    )


def goes_by_an_if(file: str, line: int, callers: _Lines = (), places: _Places = ()) -> bool:
    """Whether any ``if`` or ``match`` goes by what this line reads, whatever stands in it."""
    reached = _reached(file, line, callers, places=places)
    return reached.goes_by("if")


def selects(file: str, line: int, callers: _Lines = (), places: _Places = ()) -> bool:
    """Whether tensors may be made, or parts taken of them, of which what this line reads decides how many there are."""
    reached = _reached(file, line, callers, places=places)
    return reached.holds()


def checks_for_none(file: str, line: int, callers: _Lines = (), places: _Places = ()) -> bool:
    """Whether an ``if`` goes by a check of what this line reads for numbers that are none."""
    reached = _reached(file, line, callers, places=places)
    return reached.goes_by("check")


def is_printed(file: str, line: int, callers: _Lines = ()) -> bool:
    """Whether what this line reads is printed or written, or what is made of it."""
    reached = _reached(file, line, callers)
    return reached.goes_by("printed")


def chooses_what_is_printed(file: str, line: int, callers: _Lines = (), places: _Places = ()) -> bool:
    """Whether an ``if`` in which nothing but printing is done may go by what this line reads."""
    reached = _reached(file, line, callers, places=places)
    return reached.goes_by("prints")


def looks_up(file: str, line: int, places: _Places = ()) -> bool:
    """Whether something is looked up by what this line reads, as a name in a list of names."""
    reached = _reached(file, line, (), places=places)
    return reached.goes_by("looked up")


def leads_to(
    file: str, read: int, raised: int, raised_in: str = "", made_of_it: bool = False, around: bool = False
) -> bool:
    """Whether the statement at the line `raised`, or an ``if`` around it, goes by what the line `read` reads.

    raised_in: that line's file, where it is another. made_of_it: or by what was made of that, or chosen by it. around: whether
    only what is around it counts, and not what it tells itself."""
    raised_in = raised_in or file
    number, most = int(raised_in != file), _WAY if made_of_it else _VALUE
    reached = _reached(file, read, (), others=(raised_in,))
    return ((number, read) == (0, raised) and not around) or any(
        one.first <= raised <= one.last
        and (one.is_around or not around)
        and (
            reached.has((number, one.source), _VALUE, most)
            or (one.is_around and reached.stands_in((number, one.source)))
        )
        for one in flows.of_file(raised_in).statements
    )


def divides(file: str, read: int, raised: int, raised_in: str = "") -> bool:
    """Whether the line `raised`, of the same file or of `raised_in`, divides by what the line `read` reads, or what was made of
    it."""
    raised_in = raised_in or file
    reached = _reached(file, read, (), others=(raised_in,))
    return any(
        test[0] == int(raised_in != file)
        and test[1].covers(raised)
        and ((test[1].reads and reached.stands_in(test)) or reached.has(test, _VALUE, _WAY))
        for test in reached.tests("divisor")
    )


def waits(file: str, line: int) -> bool:
    """Whether what the line reads ends a ``while``, as its test or, where it has none, in each ``if`` that leaves it."""
    reached = _reached(file, line, ())
    return any(reached.decides_all(loop) for loop in reached.loops())


def only_waits(file: str, line: int) -> bool:
    """Whether the line is a ``while``, or what leaves one without a test, that nothing else ends (but an error)."""
    reached = _reached(file, line, ())
    return any(
        any(map(reached.stands_in, reached.tests(loop)))
        and reached.decides_all(loop)
        and reached.decides_all(loop.replace("wait", "leave"), _VALUE)
        for loop in reached.loops()
    )


def _reached(
    file: str, line: int, callers: _Lines, sized: bool = False, places: _Places = (), others: Sequence[str] = ()
) -> _Reached:
    """others: further files, in which names are looked for."""
    files = list(dict.fromkeys((file, *(one for one, _ in callers), *others)))
    calling = tuple((files.index(one), number) for one, number in callers[:_CALLS] if (one, number) != (file, line))
    return _reached_in(tuple(map(flows.of_file, files)), line, sized, tuple(places), calling)


class _Reached:
    """What the value flows into that a line reads: by the file's number, the key, and how far it is from the value."""

    def __init__(
        self,
        files: tuple[FileFlows, ...],
        line: int,
        sized: bool,
        places: tuple[Place, ...],
        calling: tuple[tuple[int, int], ...],
    ) -> None:
        found = {files[0].statement_at(place) for place in places}
        statements = None if None in found or not found else frozenset(one for one in found if one is not None)
        # The lines that have the value as it was read: by the file's number, with the statements that are meant.
        self._lines: list[tuple[int, int, frozenset[Place] | None]] = [(0, line, statements)]
        self._sized = sized
        self._files = files
        # The first line that gives each its value.
        self._found: dict[tuple[int, Key, int], int] = {}
        # The same of what has it at a place of a tuple, and is no more than that.
        self._partly: dict[tuple[int, Key, int], int] = {}
        self._follow(*self._lines[0])
        inner = 0, line
        for outer in calling:
            name = files[inner[0]].function_at(inner[1])
            if name in ("", _OF_MODULES) or not self._gives(inner[0], name):
                return
            if not _names(files[outer[0]], outer[1], name):
                self._lines.append((*outer, None))
                self._follow(*self._lines[-1])
            inner = outer

    def _gives(self, number: int, name: str) -> bool:
        """Whether a function gives back what is reached."""
        return any(place == number and key[1] == f"{name}()" for place, key, _ in self._found)

    def _follow(self, number: int, line: int, statements: frozenset[Place] | None) -> None:
        left = [
            (number, flow, _VALUE)
            for flow in self._files[number].flows
            if flow.source.covers(line, statements)
            and (flow.source.reads or (flow.kind != "argument" and flow.source.keys))
            and _is_let(flow)
        ]
        while left:
            number, flow, before = left.pop()
            level = _level(before, _STEPS[flow.kind])
            for key in flow.sets:
                for place in range(len(self._files)) if flow_records.is_shared(key) else (number,):
                    if self._found.get((place, key, level), sys.maxsize) > flow.source.first:
                        self._found[place, key, level] = flow.source.first
                        if whole := flow_records.tuple_of(key):
                            known = self._partly.get((place, whole, level), sys.maxsize)
                            self._partly[place, whole, level] = min(known, flow.source.first)
                        declared, given = flow_records.as_declared(key)
                        for asked in self._keys_of(declared, level):
                            flowing = self._files[place].by_key.get(asked, ())
                            left += [
                                (place, one, level)
                                for one in flowing
                                if self._follows(one.source, place, key, level) and _is_let(one, given)
                            ]

    def _keys_of(self, key: Key, level: int) -> Sequence[Key]:
        """Under which keys it is asked for: what is only a value is none of a length, and a tuple has no length that it sets."""
        if whole := flow_records.tuple_of(key):
            return key, whole
        own = (key, flow_records.no_tuple(key))
        return (*own, (key[0], f"{key[1]}#")) if _sets_lengths(level) or self._sized else own

    def _follows(self, source: Uses, place: int, key: Key, level: int) -> bool:
        lines = [found[place, key, level] for found in (self._found, self._partly) if (place, key, level) in found]
        return bool(lines) and not source.comes_before(key, min(lines))

    def of_file(self) -> FileFlows:
        """Of the file that reads."""
        return self._files[0]

    def loops(self) -> set[str]:
        """The loops that have no other count than a test, as their tests are named."""
        return {test.decides for test in self.of_file().tests if test.decides.startswith("wait ")}

    def decides_all(self, decides: str, most: int = _TOLD) -> bool:
        """Whether it decides each test of a kind, and is no farther from it."""
        return all(self.stands_in(test) or self.has(test, _VALUE, most) for test in self.tests(decides))

    def tests(self, decides: str) -> Iterator[tuple[int, Uses]]:
        return (
            (number, test.source)
            for number, one in enumerate(self._files)
            for test in one.tests
            if (test.decides == decides or (decides == "branch" and test.decides == "raised" and self._is_caught(test)))
            and not (test.unless and all(map(_is_as_written, test.unless)))
            and not (test.made and observers.only_hold(test.made))
        )

    def _is_caught(self, test: Test) -> bool:
        return are_caught(*test.raises, (one.caught for one in self._files))

    def goes_by(self, decides: str) -> bool:
        """Whether a test of that kind has the value, or a way that follows from it."""
        return any(self.stands_in(test) or self.has(test, _VALUE, _WAY) for test in self.tests(decides))

    def has(self, used: tuple[int, Uses], least: int, most: int) -> bool:
        number, source = used
        for level in range(least, most + 1):
            for asked in source.keys:
                key = asked[0], asked[1].removesuffix("#")
                if asked in self._keys_of(key, level) and self._follows(source, number, key, level):
                    return True
                if asked != key and self._follows(source, number, asked, level):
                    return True
        return False

    def holds(self) -> bool:
        """Whether as much is taken of something else as a list holds, whose length is reached, or as a mask selects."""
        reached = {key for found in (self._found, self._partly) for _, key, _ in found}
        return any(
            test.decides == "selected"
            and test.but.isdisjoint(reached)
            and self.has((number, test.source), _VALUE, _TOLD)
            for number, one in enumerate(self._files)
            for test in one.tests
        ) or any(
            self._follows(test.source, number, flow_records.length(key), level)
            for number, one in enumerate(self._files)
            for test in one.tests
            if test.decides == "held" and test.but.isdisjoint(reached)
            for key in test.source.keys - test.but
            for level in range(_TOLD + 1)
        )

    def stands_in(self, used: tuple[int, Uses]) -> bool:
        number, source = used
        # (A constant reads nothing: `range(4)` may share its line with what does.)
        return bool(source.keys or source.reads) and any(
            number == place and source.covers(line, statements) for place, line, statements in self._lines
        )


def _names(file: FileFlows, line: int, function: str) -> bool:
    """Whether a line asks for what a function of that name gives."""
    given = f"{function}()", f"::{function}()"
    sources = [*(one.source for one in file.flows), *(one.source for one in file.tests)]
    return any(key[1].startswith(given) for one in sources if one.covers(line) for key in one.keys)


# Each of the questions above is asked of a line.
_reached_in = lru_cache(maxsize=16)(_Reached)


def _sets_lengths(level: int) -> bool:
    return level >= _COUNT and level != _ALTERED


def _level(before: int, step: int) -> int:
    """How far it is, after one more step: what was altered by a test has its length, until a count is made of it."""
    return _WAY if (before, step) in ((_ALTERED, _COUNT), (_COUNT, _ALTERED)) else max(before, step)


def _is_as_written(one: Own) -> bool:
    return observers.is_nowhere_another(*one)


def _is_let(flow: Flow, given: frozenset[str] = frozenset()) -> bool:
    """given: the keywords of the call that it is an argument of. A function that does not take them is not the one called."""
    if flow.takes is not None and not given <= flow.takes:
        return False
    return flow.through is None or not observers.give_back_unchanged(*flow.through)
