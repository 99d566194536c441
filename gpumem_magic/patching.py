"""The one place that temporarily replaces parts of other packages, and puts them back.

Attributes, entries of lists (import hooks, log filters), kernels of PyTorch's dispatcher and the PATH are replaced here, and put
back by `Patches.undo` where they are still ours. Where somebody has wrapped a function of ours meanwhile, their wrapper stays in
its place and goes on working: every function is put there as a relay, which calls ours while it is in force, and the original
afterwards. So nothing of theirs is lost, in whatever order the two of us come and go.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from operator import is_
from types import FunctionType, MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from gpumem_magic import private
from gpumem_magic.failures import is_own_failure
from gpumem_magic.looks.warned import warnings_remembered
from gpumem_magic.tracebacks import cut
from gpumem_magic.uninterrupted import whole

_Answer = TypeVar("_Answer")
_MISSING: Any = object()

# Of a function that is replaced: whether somebody is there to be asked first, and how (the name's function, the one in its
# place, what it was called with); None where nobody ever is.
First = Callable[[Any], "tuple[Callable[[], bool], Callable[..., Any]] | None"]


def _nobody(original: Any) -> None:
    """Of no function is anybody asked first."""


class Patches:
    """What one part of this package has replaced. `undo` goes backwards through it, and may be called twice."""

    def __init__(self, first: First = _nobody) -> None:
        """first: who has a word in calls of a function that is replaced, before what is there in its place."""
        self._first = first
        # A step is known before it is done, and forgotten after it is undone: an interrupt in between loses nothing.
        self._undo: list[Callable[[], object]] = []
        # What could not be replaced, in sentences.
        self.lacking: list[str] = []
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._placed: dict[tuple[int, int], tuple[Any, Callable[[], None], Any, Any]] = {}

    def set(self, owner: Any, name: str, value: Any, *, always: bool = False) -> Any:
        """Sets ``owner.name = value`` and returns what was there (None where nothing was).

        Only the owner's own dictionary is looked at and restored: an inherited attribute is hidden, and shows again after
        `undo`. always: restored also where it is not ours any more, because PyTorch itself keeps something there.
        """
        before = _in_force(vars(owner).get(name, _MISSING))
        # Two names for one function of theirs stay two names for one function.
        key = (id(value), id(owner if before is _MISSING else before))
        if key not in self._placed:
            self._placed[key] = (*_relayed(owner, name, value, before, self._first), value, before)
        placed, retire = self._placed[key][:2]

        def put_back() -> None:
            retire()
            now = vars(owner).get(name, _MISSING)
            if now is not placed and (not always or now is before):
                return
            restored = _in_force(before)
            if restored is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, restored)

        self._undo.append(put_back)
        setattr(owner, name, placed)
        self._replaced.append((owner, name, before, placed))
        return None if before is _MISSING else before

    def insert(self, owner: Any, name: str, item: object, at: int = sys.maxsize) -> None:
        """Puts `item` into the list ``owner.name``, at its end or before position `at`."""

        def take_out() -> None:
            entries = getattr(owner, name)
            for position in [position for position, entry in enumerate(entries) if entry is item][:1]:
                del entries[position]

        self._undo.append(take_out)
        getattr(owner, name).insert(at, item)

    def kernels(self, key: str, kernels: Iterable[tuple[Any, Callable[..., Any]]], with_keys: bool = False) -> None:
        """Gives PyTorch's operators other kernels for a dispatch key. Kernels that others register later go first, and stay.

        with_keys: a call's keys come as the first argument.
        """
        from torch.library import Library

        library = Library("aten", "IMPL")
        self._undo.append(library._destroy)
        with warnings_remembered(), warnings.catch_warnings():
            # PyTorch warns of what is meant here: that a kernel is replaced.
            warnings.simplefilter("ignore")
            for operator, kernel in kernels:
                library.impl(operator, kernel, key, with_keyset=with_keys, allow_override=True)

    def entry(self, owner: dict[Any, Any], key: Any, value: Any) -> None:
        """Puts an entry into a dictionary, in the place of what is there."""
        before = owner.get(key, _MISSING)

        def put_back() -> None:
            if owner.get(key) is value:
                if before is _MISSING:
                    del owner[key]
                else:
                    owner[key] = before

        self._undo.append(put_back)
        owner[key] = value

    def environment(self, name: str, value: str) -> None:
        """Sets an environment variable."""
        before = os.environ.get(name)

        def put_back() -> None:
            if os.environ.get(name) == value:
                if before is None:
                    del os.environ[name]
                else:
                    os.environ[name] = before

        self._undo.append(put_back)
        os.environ[name] = value

    def search_first(self, directory: str) -> None:
        """Puts a directory at the head of the PATH; where others change the PATH later, only this entry goes."""

        def take_out() -> None:
            entries = os.environ.get("PATH", "").split(os.pathsep)
            if directory in entries:
                os.environ["PATH"] = os.pathsep.join(entry for entry in entries if entry != directory)

        self._undo.append(take_out)
        # Without a PATH the shell looks in its own default places; they must stay reachable.
        self.environment("PATH", f"{directory}{os.pathsep}{os.environ.get('PATH', os.defpath)}")

    def attempt(self, step: Callable[..., object], *arguments: Any) -> None:
        """Has a step replace what it replaces; one whose private names are not all there is left out (`lacking`)."""
        line = private.lacking(private.place_of(step))
        if line:
            self.lacking.append(line)
        else:
            step(self, *arguments)

    def also_undo(self, function: Callable[[], object]) -> None:
        """Has `function` called by `undo`, before what was replaced earlier is put back."""
        self._undo.append(function)

    def names(self) -> list[tuple[Any, str]]:
        """The (owner, name) pairs that are replaced now, oldest first."""
        return [(owner, name) for owner, name, _, _ in self._replaced]

    def exchanged(self) -> list[tuple[Any, str, Any, Any]]:
        """The same with what was there before, where there was something, and what is there in its place."""
        return [entry for entry in self._replaced if entry[2] is not _MISSING]

    def undo(self) -> None:
        """Goes through all of it, also where a step fails; the error is raised at the end. To be called again where it was
        interrupted."""
        failure: BaseException | None = None
        with whole:
            while self._undo:
                step = self._undo[-1]
                try:
                    step()
                except BaseException as error:
                    was_interrupted = failure is None and not is_own_failure(error)
                    failure = failure or error
                    if was_interrupted:
                        continue
                if self._undo[-1] is step:
                    self._undo.pop()
                else:
                    # It has imported something for which more was replaced.
                    self._undo.remove(step)
            self._replaced.clear()
            self._placed.clear()
            if failure is not None:
                raise failure

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


_BUILTINS = vars(builtins)
_all, _map = all, map


class OwnBuiltins:
    """Python's builtins as they are when this is made: what a program puts in their place later sees no call from here."""

    def __init__(self) -> None:
        self._own = dict(_BUILTINS)
        self._values = tuple(self._own.values())

    def run(self, work: Callable[..., _Answer], *given: Any) -> _Answer:
        __tracebackhide__ = True
        # Only builtins from before are called up to here, and none of the program's objects is asked anything.
        if _all(_map(is_, _BUILTINS.values(), self._values)):
            return work(*given)
        theirs = {name: _BUILTINS[name] for name, own in self._own.items() if _BUILTINS.get(name, own) is not own}
        if not theirs:
            return work(*given)
        try:
            _BUILTINS.update({name: self._own[name] for name in theirs})
            return work(*given)
        finally:
            _BUILTINS.update(theirs)


class _Relay:
    """Where a function that we put somewhere hands its calls on to: ours, or from `retire` on what was there before."""

    def __init__(self, ours: Callable[..., Any], before: Any) -> None:
        self.target = ours
        self.before = before
        self.retired = False

    def retire(self) -> None:
        self.target, self.retired = self.before, True


# The relays by the functions that use them, and what each replaced as the owner kept it.
_relays: WeakKeyDictionary[Any, tuple[_Relay, Any]] = WeakKeyDictionary()


def _in_force(value: Any) -> Any:
    """What stands behind relays of ours that are out of force: they need not be put back, or wrapped again."""
    while True:
        # Nothing is asked of what may be the user's.
        kind = type(value)
        function = value.fget if kind is property else value.__func__ if kind is staticmethod else value
        relay, original = _relays.get(function, (None, None)) if type(function) is FunctionType else (None, None)
        if relay is None or not relay.retired:
            return value
        value = original


def behind_relays(function: Any) -> Any:
    """What stood where a function of ours was put to hand calls on; any other function itself."""
    while type(function) is FunctionType and (found := _relays.get(function)) is not None:
        function = found[0].before
    return function


def _relayed(owner: Any, name: str, value: Any, own: Any, first: First) -> tuple[Any, Callable[[], None]]:
    """What to put there for `value`, and what takes it out of force. Classes and data are put there as they are."""
    relays: list[_Relay] = []
    # (What an owner has of its own needs no search, which takes longer than all the rest.)
    found = vars(owner)[name] if name in vars(owner) else inspect.getattr_static(owner, name, None)
    asked, ask = first(found) or (None, None)

    def gone(*args: Any, **kwargs: Any) -> Any:
        raise AttributeError(f"{getattr(owner, '__name__', owner)!r} has no attribute {name!r}")

    def relay(ours: Any, before: Any, accessor: str = "") -> Any:
        one = _Relay(ours, before)
        relays.append(one)

        def relayed(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            try:
                if asked is not None and ask is not None and asked() and not one.retired:
                    return ask(getattr(placed, accessor) if accessor else placed, one.target, args, kwargs)
                return one.target(*args, **kwargs)
            except Exception as error:
                # An error that is kept must keep no tensors that the program itself does not keep.
                args, kwargs = (), {}
                raise cut(error)  # noqa: B904

        _relays[relayed] = one, own
        return functools.update_wrapper(relayed, ours if before is gone else before)

    placed = value
    if isinstance(value, property):
        getter, setter = (getattr(type(found), method, None) for method in ("__get__", "__set__"))
        placed = property(
            relay(value.fget, gone if getter is None else functools.partial(getter, found), "__get__"),
            value.fset and relay(value.fset, gone if setter is None else functools.partial(setter, found), "__set__"),
        )
    elif isinstance(value, (FunctionType, MethodType)):
        placed = relay(value, _in_force(getattr(owner, name, gone)))
    elif isinstance(value, staticmethod):
        placed = staticmethod(relay(value.__func__, _in_force(getattr(owner, name, gone))))

    def retire() -> None:
        for one in relays:
            one.retire()

    return placed, retire
