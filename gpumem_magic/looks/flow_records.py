"""What flows and tests of a program are: an expression, what it sets, where it decides; and the keys by which names are known."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpumem_magic.looks.raises import NO_RAISES, Raises
from gpumem_magic.looks.wording import Own

# A name in a scope (its first line, 0 of a module) of a file; an attribute (``.best``), a function's result (``best()``) and its
# arguments (``best(0``, ``best(limit``, ``best(*`` for any of them, and ``best(limit,of|0`` in a call with such keywords), which
# have no scope; ``::best()`` is that of a function which is no method, as in ``torch.load()``. ``seen[]`` is what is in ``seen``,
# ``seen[=best]`` what is there under that text and ``seen[*]`` what may be under any, ``seen#`` its length, ``seen?`` how many it
# selects as a mask, ``seen!`` whether it is None, which a tensor's value alone does not make it. ``seen[]@1`` is what is at
# place 1 of the tuples in ``seen``, ``seen[]^`` what is in it and was not put there as a tuple's part.
Key = tuple[int, str]
Place = tuple[int, int]  # a line, and a column in bytes, as Python counts them


class Uses(NamedTuple):
    """An expression: its lines, what it uses, and whether it makes a number of a tensor.

    once: the scope in which it is evaluated in the order of lines; -1 within a loop. statement: where its statement begins.
    """

    first: int
    last: int
    keys: frozenset[Key]
    reads: bool
    once: int = -1
    statement: Place = (0, 0)

    def comes_before(self, key: Key, line: int) -> bool:
        """Whether it is evaluated before a line that gives the key's name a value."""
        return self.once == key[0] and self.first < line and not is_shared(key)

    def covers(self, line: int, statements: Container[Place] | None = None) -> bool:
        """statements: those of the line that are meant, where that is known: an ``if`` and what it does may share one."""
        return self.first <= line <= self.last and (statements is None or self.statement in statements)


class Through(NamedTuple):
    """A method's name, and at which position (without ``self``) it is handed what it gives back."""

    name: str
    position: int


class Flow(NamedTuple):
    """kind: what is set holds the "value" (an "argument" does), a "whole" number made of it, a "count" or a "way" follows from a
    test, it is "altered" with the length that it has, an object is "told". through: it flows only if such methods let it. takes:
    the parameters' names of the function that it goes into, where that can be given no others."""

    source: Uses
    sets: tuple[Key, ...]
    kind: str
    through: Through | None = None
    takes: frozenset[str] | None = None


class Test(NamedTuple):
    """decides: "loop" (its end), "each" (how often it runs, by a length), "branch", "check" (the same, for numbers that are none)
    or "size" ("sized": by any value; "rounded": what whole numbers are made of), or a "wait" with the line of a ``while``: its
    test, or all that end it where it has none ("leave": what else ends it). "if" is each ``if`` and ``match``, whatever stands
    in it. A value may have chosen the object that is "called", or "asked" to do something. As much is taken of something else
    (but: what that is) as is "held", or "selected" by a comparison. It is "printed", or something is "looked up" by it; "prints"
    is an ``if`` that does nothing but show lines. A "divisor" is what something is divided by, with the lines of both.
    By a "switch" gradients are kept, or not; something is "removed" by its key; it says where a tensor is "placed", or in
    which type. "raised" is a "branch" where an error that a
    function raises by it is caught around a call of that.
    unless: it decides that only where one of these methods is another in a subclass. made: the class that is made with it, as
    far as it has a name (a tuple and a table take no sizes). raises: the function, and the error's name.
    """

    source: Uses
    decides: str
    but: frozenset[Key]
    unless: frozenset[Own] = frozenset()
    made: str = ""
    raises: tuple[str, str] = ("", "")


class StatementUses(NamedTuple):
    """Its lines, and what it uses. is_around: an ``if`` or ``while``, with its test."""

    first: int
    last: int
    source: Uses
    is_around: bool


@dataclass(frozen=True, eq=False)
class FileFlows:
    """by_key: the flows that a key flows into. spans: of all statements, where they begin and end. raises: the lines of each
    ``raise``, and of what stands in each ``try`` whose handlers catch what an operator raises."""

    flows: tuple[Flow, ...]
    tests: tuple[Test, ...]
    statements: tuple[StatementUses, ...]
    by_key: Mapping[Key, Sequence[Flow]]
    spans: tuple[tuple[Place, Place], ...] = ()
    raises: tuple[tuple[int, int], ...] = ()
    tries: tuple[tuple[int, int], ...] = ()
    caught: Raises = NO_RAISES
    functions: tuple[tuple[int, int, str], ...] = ()

    def function_at(self, line: int) -> str:
        """The name of the innermost function around a line; "" outside of all."""
        return max(((first, name) for first, last, name in self.functions if first <= line <= last), default=(0, ""))[1]

    def statement_at(self, place: Place) -> Place | None:
        """Where the innermost statement around a place begins."""
        return max((first for first, last in self.spans if first <= place < last), default=None)


def is_shared(key: Key) -> bool:
    """Whether a key means the same in every file."""
    return key[1].startswith(".") or "(" in key[1]


def as_declared(key: Key) -> tuple[Key, frozenset[str]]:
    """An argument's key as definitions know it, and the keywords of the call."""
    before, given, place = key[1].partition("|")
    name, _, keywords = before.rpartition("(")
    return ((key[0], f"{name}({place}"), frozenset(keywords.split(","))) if given else (key, frozenset())


def length(key: Key) -> Key:
    """The key of how much it holds."""
    return key[0], f"{key[1].removesuffix('[]')}#"


def tuple_of(key: Key) -> Key | None:
    """Of what is at a place of a tuple, the tuple's own key."""
    before, place, _ = key[1].rpartition("@")
    return (key[0], before) if place else None


def no_tuple(key: Key) -> Key:
    """Under which it is asked for where a tuple's places have keys of their own."""
    return key[0], f"{key[1]}^"
