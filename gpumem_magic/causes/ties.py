"""Weights that were one and are two: a layer's that was given another's, until something replaced the two one by one.

That they were one is said by the program's own text, where it gives one the other's in its constructor or in the cell, or by a
library's table of them. Nothing of the program's runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from gpumem_magic.causes.model import Scene, Untied
from gpumem_magic.causes.program import ProgramText
from gpumem_magic.causes.tie_statements import Tie, ties_in
from gpumem_magic.looks import tensors
from gpumem_magic.looks.objects import attribute, entries_of_class, is_a, items, mro, name_of_class, text
from gpumem_magic.owners.model import size_of
from gpumem_magic.report.model import Cause
from gpumem_magic.units import human

Locate = Callable[[Any], tuple[int, int] | None]
# The table of a class of transformers' (a list of names before 5.0, which says not whose they are), and what turns it on.
_TABLE, _TURNS_ON = "_tied_weights_keys", "tie_word_embeddings"


def find_untied(program: ProgramText, modules: Mapping[str, torch.nn.Module], locate: Locate) -> tuple[Untied, ...]:
    """Of the notebook's modules, the pairs of weights that were tied and lie at two places now. Inside `no_dispatch`."""
    found: dict[frozenset[tuple[int, int]], Untied] = {}
    for first, second, words, pair in _tied(program, modules):
        places = [locate(one) for one in pair]
        if tensors.shape(pair[0]) == tensors.shape(pair[1]) and None not in places and places[0] != places[1]:
            known = frozenset(place for place in places if place is not None)
            found.setdefault(known, Untied(first, second, words, tuple(known)))
    return tuple(found.values())


def _tied(
    program: ProgramText, modules: Mapping[str, torch.nn.Module]
) -> Iterator[tuple[str, str, str, tuple[torch.Tensor, torch.Tensor]]]:
    """What was given another's, what it was given, what says so, and the two as they are now."""
    said = ties_in(program)
    for name, root in modules.items():
        for path, module in tensors.modules_in(root):
            whole = f"{name}.{path}" if path else name
            kinds = {name_of_class(kind) for kind in mro(type(module))}
            pairs = [
                (one.given, one.to, one.place.words)
                for one in said
                if one.of in kinds and _ties(one, module, one.to, one.given)
            ]
            for given, to, words in [*pairs, *((*pair, f"`config.{_TURNS_ON}`") for pair in _of_library(module))]:
                first, second = _weight(module, to), _weight(module, given)
                if first is not None and second is not None:
                    yield ".".join((whole, *to)), ".".join((whole, *given)), words, (first, second)
        for one in said:
            if not one.of and one.to[0] == one.given[0] == name and _ties(one, root, one.to[1:], one.given[1:]):
                first, second = _weight(root, one.to[1:]), _weight(root, one.given[1:])
                if first is not None and second is not None:
                    yield ".".join(one.to), ".".join(one.given), one.place.words, (first, second)


def _of_library(module: torch.nn.Module) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    if attribute(attribute(module, "config"), _TURNS_ON) is not True:
        return
    tables = (entries_of_class(kind).get(_TABLE) for kind in mro(type(module)))
    for to, given in items(next((table for table in tables if is_a(table, dict)), None)):
        yield tuple(text(given).split(".")), tuple(text(to).split("."))


def _ties(said: Tie, module: torch.nn.Module, to: tuple[str, ...], given: tuple[str, ...]) -> bool:
    """Whether a statement ties two layers. Numbers that a layer of the same class is given may be where it begins (a target, an
    average); an embedding's in a linear layer are a tie."""
    return not said.is_of_data or type(_layer(module, to)) is not type(_layer(module, given))


def _layer(module: torch.nn.Module, path: Sequence[str]) -> torch.nn.Module | None:
    found: Any = module
    for word in path[:-1]:
        found = dict(tensors.table(found, tensors.MODULES)).get(word)
        if not tensors.is_module(found):
            return None
    return found  # type: ignore[no-any-return]


def _weight(module: torch.nn.Module, path: Sequence[str]) -> torch.Tensor | None:
    layer = _layer(module, path)
    weight = dict(tensors.table(layer, tensors.PARAMETERS)).get(path[-1]) if layer is not None and path else None
    return weight if tensors.is_tensor(weight) else None


def broken_ties(scene: Scene) -> Iterator[Cause]:
    """Two weights that the program made one, each with memory of its own (and its gradient, and an optimizer's states)."""
    for one in scene.untied:
        if any(device != scene.device for device, _ in one.places):
            continue
        addresses = {address for _, address in one.places}
        weights = [held for held in scene.held if held.address in addresses and held.kind == "parameter"]
        second = max((held.place for held in weights), key=lambda place: place == one.to, default="")
        its = [held for held in weights if held.place == second]
        its += [held for held in scene.held if held.place == f"{second}.grad"]
        its += [held for held in scene.held if held.kind == "optimizer_state" and f"[{second}]" in held.place]
        kinds = {held.kind for held in its}
        beside = [words for kind, words in (("gradient", "gradient"), ("optimizer_state", "states")) if kind in kinds]
        if not its:
            continue
        also = f", {human(size_of(its))} with its {' and '.join(beside)}" if beside else ""
        yield Cause(
            "broken_tie",
            f"`{one.to}` was tied to `{one.given}` ({one.words}), but each has memory of its own now: "
            f"{human(size_of(its[:1]))} more{also}.",
            f"`{one.to} = {one.given}` makes them one again, once the model has its weights on the device"
            f"{' and before its optimizer is made' if scene.holdings.optimizers else ''}.",
            size_of(its),
        )
        return
