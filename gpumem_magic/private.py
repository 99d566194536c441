"""The register of private names: every name of another package that is used here although that package does not guarantee it.

The rows are in ``private.txt``, below the versions on which the names were seen and tests ran (docs/no_gpu.md says which tests).
`tests/test_private.py` walks the register on the installed versions, and finds what the source uses and no row has. A step that
replaces things of PyTorch's is left out where a name of its rows is missing (`Patches.attempt`): the rest of the device works,
and a line says what does not. What is said elsewhere of CUDA's kernels was read in the sources of PyTorch 2.9 to 2.13.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TEXT = Path(__file__).with_suffix(".txt").read_text("utf-8").strip().split("\n\n")
# Package -> the versions on which it was run, oldest first.
RUN = {
    package: versions for package, _, versions in (line.strip().partition(": ") for line in _TEXT[0].splitlines()[1:])
}


class Missing(RuntimeError):
    """A private name is not there. The text is one line: what this version lacks, and what is lost by it."""


@dataclass(frozen=True)
class Dependence:
    """Names that are used for one thing. where: the modules, or functions of one (``module:function``).

    names: (dotted name, its mark). A question mark: some version or build lacks the name, and the code that uses it asks. An
    asterisk: it is only there on live objects, such as a shell.
    """

    where: tuple[str, ...]
    use: str
    lost: str
    names: tuple[tuple[str, str], ...]

    @functools.cached_property
    def needed(self) -> tuple[str, ...]:
        """Those of PyTorch's that every version has on which it was run."""
        return tuple(name for name, mark in self.names if not mark and name.startswith("torch."))

    def is_for(self, place: str) -> bool:
        """Whether it is about a module, or a function of one."""
        return not _homes(place).isdisjoint(self.where)


@functools.cache
def _homes(place: str) -> frozenset[str]:
    """A place, its module, and the packages in which that is."""
    return frozenset({place, *itertools.accumulate(place.partition(":")[0].split("."), "{}.{}".format)})


@functools.cache
def _about(place: str) -> tuple[Dependence, ...]:
    return tuple(row for row in REGISTER if row.is_for(place))


def _rows() -> Iterator[Dependence]:
    # Where, what for, what is lost, and the names by their homes, of which one may be made to look at (``torch.nn.Module()``).
    for block in _TEXT[1:]:
        where, use, lost, *homes = block.replace("\n    ", " ").splitlines()
        names = [
            (f"{home.strip()}.{word.rstrip('?*')}", word[len(word.rstrip("?*")) :])
            for home, _, words in (line.rpartition(": ") for line in homes)
            for word in words.split()
        ]
        yield Dependence(tuple(where.split()), use.strip(), lost.removeprefix("  lost: "), tuple(names))


REGISTER = tuple(_rows())


# By names, the modules in which they were found, and the way from there: all are looked for each time that a device is turned on.
_found: dict[str, tuple[str, list[str]]] = {}


def resolve(name: str) -> Any:
    """What a dotted name stands for. Raises AttributeError where it is not there."""
    if name in _found:
        home, rest = _found[name]
        with suppress(KeyError, AttributeError):
            return functools.reduce(getattr, rest, sys.modules[home])
    parts = name.split(".")
    if "(" in name:
        # An object is made to look at; the register's own text, and nobody else's.
        head, _, last = name.rpartition(".")
        module, torch = importlib.import_module(parts[0]), importlib.import_module("torch")
        # (Whatever the program has set: without gradients no tensor has a node.)
        with torch.inference_mode(False), torch.enable_grad():
            return getattr(eval(head, {parts[0]: module}), last)
    loaded = name
    while loaded not in sys.modules and "." in loaded:
        loaded = loaded.rpartition(".")[0]
    # What is loaded first; then by import, because a module may hide behind a function of its name.
    for home in itertools.chain([loaded], (".".join(parts[:count]) for count in range(len(parts), 0, -1))):
        with suppress(AttributeError, ImportError):
            module = sys.modules.get(home) or importlib.import_module(home)
            rest = parts[home.count(".") + 1 :]
            found = functools.reduce(getattr, rest, module)
            _found[name] = home, rest
            return found
    raise AttributeError(name)


def lacking(place: str) -> str:
    """One line on what is missing for a module or a function of one, and what is lost by it; "" where nothing is."""
    for row in _about(place):
        # Operators cost their own rules only (`aten`).
        kept = "torch.ops." if ":" in place else "("
        gone = [name for name in row.needed if not name.startswith(kept) and not _there(name)]
        if gone:
            return f"{_version(gone[0])} has no {', '.join(gone)} ({_experience(gone[0])}): {row.lost}."
    return ""


def require(place: str) -> None:
    """Raises Missing where something is lacking for a module or a function of one."""
    line = lacking(place)
    if line:
        raise Missing(line)


def place_of(function: Callable[..., Any]) -> str:
    """What `lacking` knows a function or method of this package by."""
    return f"{function.__module__.partition('.')[2]}:{function.__qualname__}"


def _there(name: str) -> bool:
    try:
        resolve(name)
    except AttributeError:
        return False
    return True


def _version(name: str) -> str:
    package = name.partition(".")[0]
    return f"{package} {getattr(sys.modules.get(package), '__version__', 'of unknown version')}"


def _experience(name: str) -> str:
    return f"run on {', '.join(RUN[name.partition('.')[0]].split())}"


class _NoOperator:
    """Stands for an operator that this PyTorch lacks, and its overloads: it is never met, and says so where it is called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, overload: str) -> _NoOperator:
        if overload.startswith("__"):
            raise AttributeError(overload)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Missing(f"{_version('torch')} has no operator aten::{self._name} ({_experience('torch')})")


class _Operators:
    def __getattr__(self, name: str) -> Any:
        import torch

        found = getattr(torch.ops.aten, name, None) or _NoOperator(name)
        setattr(self, name, found)
        return found


# `torch.ops.aten`, in which an operator that this PyTorch lacks costs its own rule and not the module that has it.
aten: Any = _Operators()


def overloads(names: str) -> tuple[Any, ...]:
    """Operators of `aten` by their names in a text: ``"mm add.Tensor"``. Without an overload's name, the default one is meant."""
    pairs = (name.partition(".") for name in names.split())
    return tuple(getattr(getattr(aten, packet), overload or "default") for packet, _, overload in pairs)
