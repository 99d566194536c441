"""Replacing other people's things and undoing it: in any order, and around what they have put in our place meanwhile."""

from __future__ import annotations

import gc
import os
import sys
import traceback
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from gpumem_magic.patching import Patches


def module() -> Any:
    """A module with a function, as somebody else's."""
    made = types.ModuleType("made")
    made.answer = lambda: "original"  # type: ignore[attr-defined]
    made.answer.__name__ = "answer"
    return made


def ours(owner: Any, word: str = "ours") -> Patches:
    """Replaces `answer` by one that says a word before what was there."""
    patches = Patches()
    before = owner.answer
    patches.set(owner, "answer", lambda: f"{word} {before()}")
    return patches


def theirs(owner: Any, word: str = "theirs") -> Callable[[], str]:
    """Wraps `answer` as a library does that knows nothing of us."""
    inner = owner.answer

    def wrapper() -> str:
        return f"{word} {inner()}"

    owner.answer = wrapper
    return wrapper


def test_what_is_still_ours_is_put_back_itself() -> None:
    owner = module()
    original = owner.answer
    patches = ours(owner)
    assert owner.answer() == "ours original"
    patches.undo()
    patches.undo()
    assert owner.answer is original


def test_a_wrapper_of_theirs_stays_and_finds_the_original() -> None:
    owner = module()
    patches = ours(owner)
    wrapper = theirs(owner)
    assert owner.answer() == "theirs ours original"
    patches.undo()
    assert owner.answer is wrapper
    assert owner.answer() == "theirs original"


def test_wrappers_below_between_and_above() -> None:
    owner = module()
    theirs(owner, "below")
    first = ours(owner, "first")
    theirs(owner, "between")
    second = ours(owner, "second")
    above = theirs(owner, "above")
    assert owner.answer() == "above second between first below original"
    first.undo()
    assert owner.answer() == "above second between below original"
    second.undo()
    assert owner.answer is above
    assert owner.answer() == "above between below original"


def test_two_of_ours_are_undone_in_either_order() -> None:
    for order in ((0, 1), (1, 0)):
        owner = module()
        original = owner.answer
        both = [ours(owner, "first"), ours(owner, "second")]
        both[order[0]].undo()
        assert owner.answer() == f"{['second', 'first'][order[0]]} original"
        both[order[1]].undo()
        assert owner.answer is original


def test_a_wrapper_of_theirs_that_goes_later_leaves_nothing_of_ours_behind() -> None:
    owner = module()
    original = owner.answer
    patches = ours(owner)
    put_there = owner.answer
    theirs(owner)
    patches.undo()
    owner.answer = put_there  # they put back what they found
    assert owner.answer() == "original"
    again = ours(owner)
    assert owner.answer() == "ours original"
    again.undo()
    assert owner.answer is original


def test_on_and_off_many_times_below_a_wrapper_of_theirs() -> None:
    owner = module()
    wrapper = None
    for turn in range(20):
        patches = ours(owner)
        if turn == 3:
            wrapper = theirs(owner)
        assert owner.answer().count("ours") == 1
        patches.undo()
        assert "ours" not in owner.answer()
    assert owner.answer is wrapper


def test_what_was_not_there_is_gone_again_also_for_a_wrapper_of_theirs() -> None:
    owner = module()
    patches = Patches()
    assert patches.set(owner, "added", lambda: "ours") is None
    patches.undo()
    assert not hasattr(owner, "added")
    patches.set(owner, "added", lambda: "ours")
    inner = owner.added
    owner.added = lambda: f"theirs {inner()}"
    assert owner.added() == "theirs ours"
    patches.undo()
    with pytest.raises(AttributeError, match="'made' has no attribute 'added'"):
        owner.added()


class Base:
    """A class whose attributes are inherited, as a tensor's are from C++."""

    @property
    def place(self) -> str:
        return str(self.__dict__.get("at", "original"))

    @place.setter
    def place(self, value: str) -> None:
        self.__dict__["at"] = value

    @staticmethod
    def make(word: str) -> str:
        return f"original {word}"

    def method(self) -> str:
        return "original"


class Kind(Base):
    pass


def test_properties_static_methods_and_methods_of_a_class() -> None:
    patches = Patches()
    before: Any = Base.place
    patches.set(Kind, "place", property(lambda self: f"ours {before.__get__(self)}", lambda self, value: None))
    patches.set(Kind, "make", staticmethod(lambda word: f"ours {word}"))
    patches.set(Kind, "method", lambda self: f"ours {Base.method(self)}")
    one = Kind()
    assert (one.place, Kind.make("x"), one.make("x"), one.method()) == (
        "ours original",
        "ours x",
        "ours x",
        "ours original",
    )
    one.place = "elsewhere"
    held: dict[str, Any] = dict(vars(Kind))
    # They take what we put there, and wrap it.
    Kind.place = property(lambda self: f"theirs {held['place'].__get__(self)}", held["place"].__set__)  # type: ignore[assignment]
    Kind.make = staticmethod(lambda word: f"theirs {held['make'](word)}")  # type: ignore[method-assign]
    Kind.method = lambda self: f"theirs {held['method'](self)}"  # type: ignore[method-assign]
    patches.undo()
    assert (one.place, Kind.make("x"), one.method()) == ("theirs original", "theirs original x", "theirs original")
    one.place = "elsewhere"
    assert one.place == "theirs elsewhere"
    for name in ("place", "make", "method"):
        delattr(Kind, name)


def test_an_attribute_of_one_object() -> None:
    one = Kind()
    patches = Patches()
    patches.set(one, "method", lambda: "ours")
    inner = one.method
    assert one.method() == "ours"
    patches.undo()
    assert "method" not in vars(one)
    assert inner() == "original"


def test_data_is_put_back_where_it_is_still_ours() -> None:
    owner = module()
    owner.kept, owner.changed, owner.counted = ("a",), ("b",), 0
    patches = Patches()
    patches.set(owner, "kept", ("ours",))
    patches.set(owner, "changed", ("ours",))
    patches.set(owner, "counted", 0, always=True)
    owner.changed, owner.counted = ("theirs",), 5
    patches.undo()
    assert (owner.kept, owner.changed, owner.counted) == (("a",), ("theirs",), 0)


def test_an_entry_of_a_list_goes_alone() -> None:
    owner = module()
    owner.entries = ["a"]
    kept = owner.entries
    patches = Patches()
    patches.insert(owner, "entries", "first", 0)
    patches.insert(owner, "entries", "last")
    owner.entries.append("theirs")
    assert owner.entries == ["first", "a", "last", "theirs"]
    patches.undo()
    assert owner.entries == ["a", "theirs"]
    assert owner.entries is kept
    patches.insert(owner, "entries", "ours")
    owner.entries = ["a list of their own", "ours"]
    patches.undo()
    assert owner.entries == ["a list of their own"]


def test_the_environment_and_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"a{os.pathsep}b")
    monkeypatch.delenv("GPUMEM_TRIED", raising=False)
    with Patches() as patches:
        patches.search_first("ours")
        patches.environment("GPUMEM_TRIED", "1")
        assert os.environ["PATH"].split(os.pathsep) == ["ours", "a", "b"]
        os.environ["PATH"] += f"{os.pathsep}theirs"
    assert os.environ["PATH"].split(os.pathsep) == ["a", "b", "theirs"]
    assert "GPUMEM_TRIED" not in os.environ
    with Patches() as patches:
        patches.environment("GPUMEM_TRIED", "1")
        os.environ["GPUMEM_TRIED"] = "theirs"
    assert os.environ["GPUMEM_TRIED"] == "theirs"


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_one_step_that_fails_does_not_keep_the_others(error: BaseException) -> None:
    owner = module()
    original = owner.answer
    patches = ours(owner)

    def fails() -> None:
        raise error

    patches.also_undo(fails)
    with pytest.raises(type(error)):
        patches.undo()
    assert owner.answer is original
    assert patches.names() == []


def test_what_is_replaced_while_a_step_is_undone_is_undone_too() -> None:
    """A step may import a module, for which more is replaced then."""
    owner = types.SimpleNamespace(first=1, second=2, third=3)
    patches = Patches()
    calls = []

    def one_more() -> None:
        calls.append(1)
        patches.set(owner, "second", 20)
        patches.set(owner, "third", 30)

    patches.set(owner, "first", 10)
    patches.also_undo(one_more)
    patches.undo()
    assert (owner, calls) == (types.SimpleNamespace(first=1, second=2, third=3), [1])


def test_what_ours_held_is_let_go_of_although_a_wrapper_of_theirs_lives() -> None:
    class Machine:
        def answer(self) -> str:
            return "ours"

    owner = module()
    machine = Machine()
    gone = weakref.ref(machine)
    patches = Patches()
    patches.set(owner, "answer", machine.answer)
    theirs(owner)
    patches.undo()
    del machine
    gc.collect()
    assert gone() is None
    assert owner.answer() == "theirs original"


def test_an_error_shows_one_frame_of_ours_and_keeps_no_arguments() -> None:
    owner = module()

    class Argument:
        pass

    def original(value: object) -> None:
        raise ValueError("the program's own")

    owner.answer = original
    patches = Patches()
    for _ in range(3):
        before = owner.answer
        patches.set(owner, "answer", lambda value, before=before: before(value))
    argument = Argument()
    lives = weakref.ref(argument)
    with pytest.raises(ValueError, match="the program's own") as caught:
        owner.answer(argument)
    frames = [frame for frame in traceback.extract_tb(caught.value.__traceback__) if "gpumem_magic" in frame.filename]
    assert len(frames) == 1
    original_frames = [
        entry for entry in traceback.walk_tb(caught.value.__traceback__) if entry[0].f_code.co_name == "relayed"
    ]
    assert original_frames[0][0].f_locals["args"] == ()
    patches.undo()
    del argument
    assert lives() is not None, "the program's own frame keeps it"
    assert owner.answer is original


def test_the_name_and_the_signature_are_those_of_the_original() -> None:
    import inspect

    patches = Patches()
    before = os.path.basename
    patches.set(os.path, "basename", lambda *args, **kwargs: before(*args, **kwargs))
    try:
        assert os.path.basename.__name__ == "basename"
        assert inspect.signature(os.path.basename) == inspect.signature(before)
        assert inspect.unwrap(os.path.basename) is before
    finally:
        patches.undo()
    assert sys.modules["os.path"].basename is before


def test_two_names_for_one_function_stay_two_names_for_one() -> None:
    first, second = module(), module()
    second.answer = first.answer
    patches = Patches()

    def replacement() -> str:
        return "ours"

    for owner in (first, second):
        patches.set(owner, "answer", replacement)
    assert first.answer is second.answer
    patches.undo()
    assert first.answer is second.answer
    assert first.answer() == "original"
