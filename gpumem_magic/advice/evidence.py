"""What one run of a program shows that changes depend on: its modules and optimizers, its batch, and where its memory is."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from gpumem_magic.advice.written_functions import WrittenFunction
from gpumem_magic.attribution.view import DeviceView
from gpumem_magic.looks.objects import attribute, inherits, is_a, name_of_class
from gpumem_magic.looks.tensors import (
    MODULES,
    PARAMETERS,
    is_module,
    is_optimizer,
    is_parameter,
    is_tensor,
    modules_in,
    nbytes,
    pieces,
    shape,
    states_of,
    storage,
    table,
    tensors_of,
    unheard,
)
from gpumem_magic.recording.model import BACKWARD
from gpumem_magic.virtual.engine.tensors import VirtualTensor

# Of transformers, and of those that follow it.
_SWITCH = "gradient_checkpointing_enable"


@dataclass(frozen=True)
class ModuleClass:
    """The modules of a class inside a named one. activations: what they and their parts hold at the peak, in bytes. around:
    the classes of which several stand side by side inside, where they do not themselves."""

    root: str
    name: str
    count: int
    activations: int
    normalizes_batches: bool
    around: frozenset[str] = frozenset()


@dataclass(frozen=True)
class NamedModule:
    """A module that has a name in the program. recomputes: the call of it, or of the model that it wraps, after which it
    recomputes its activations by itself; "" where there is none."""

    name: str
    linears: tuple[str, ...]
    recomputes: str
    normalizes_batches: bool
    kind: str
    has_parameters: bool = True


@dataclass(frozen=True)
class _PlacesOfClass:
    """Where a model has the modules of a class. roots: how the model's own place may begin. Others: of `ModuleClass`."""

    name: str
    roots: tuple[str, ...]
    paths: tuple[str, ...]
    normalizes_batches: bool
    around: frozenset[str]


@dataclass(frozen=True)
class Variables:
    """What the variables of a cell, or of a function, are.

    batches: names of tensors on the device whose first sizes are alike, and that size. state: what its optimizers' states take on
    the device, in bytes. tensors: names of those on the device; lists: names, and what tensors on the device in them keep;
    of_parts: those of which most is kept for a part of a tensor, as `logits[-1]`.
    """

    names: frozenset[str] = frozenset()
    modules: tuple[NamedModule, ...] = ()
    optimizers: tuple[str, ...] = ()
    batches: tuple[str, ...] = ()
    batch_size: int = 0
    state: int = 0
    tensors: tuple[str, ...] = ()
    lists: Mapping[str, int] = field(default_factory=dict)
    of_parts: frozenset[str] = frozenset()


@dataclass(frozen=True)
class NamedThings(Variables):
    """places: of the classes of modules, by their roots. ids: of modules and optimizers, by their names."""

    places: Mapping[str, tuple[_PlacesOfClass, ...]] = field(default_factory=dict)
    ids: Mapping[str, int] = field(default_factory=dict)

    def without(self, known: frozenset[int]) -> NamedThings:
        """Without the modules and optimizers that have a name elsewhere."""
        own = {name for name, number in self.ids.items() if number not in known}
        return replace(
            self,
            modules=tuple(one for one in self.modules if one.name in own),
            places={name: places for name, places in self.places.items() if name in own},
            optimizers=tuple(name for name in self.optimizers if name in own),
        )


@dataclass(frozen=True, kw_only=True)
class Evidence(Variables):
    """allocated, cached: at the peak, in bytes. bfloat16: whether the card computes in it by itself. host: free memory there, in
    bytes. grown: by how much more was held after the last iteration than after the first. inside: the same for functions that
    ran, by what their own variables were."""

    categories: Mapping[str, int]
    allocated: int
    cached: int
    ran_backward: bool
    classes: tuple[ModuleClass, ...] = ()
    bfloat16: bool = False
    host: int = 0
    grown: int = 0
    inside: Mapping[WrittenFunction, Evidence] = field(default_factory=dict)

    def share(self, category: str) -> float:
        """Of what is allocated at the peak."""
        return self.categories.get(category, 0) / max(1, self.allocated)

    @property
    def normalizes_batches(self) -> bool:
        return any(one.normalizes_batches for one in self.modules)


def evidence_of(
    view: DeviceView,
    names: frozenset[str],
    namespace: Mapping[str, Any],
    grown: int,
    inside: Mapping[WrittenFunction, NamedThings],
) -> Evidence:
    """To be asked in the process in which the program ran. inside: what functions' own variables were."""
    return unheard(_evidence_of, view, names, namespace, grown, inside)


def _evidence_of(
    view: DeviceView,
    names: frozenset[str],
    namespace: Mapping[str, Any],
    grown: int,
    inside: Mapping[WrittenFunction, NamedThings],
) -> Evidence:
    _, position = view.timeline.peak(0, len(view.timeline))
    live = view.timeline.live_at(position)
    categories: Counter[str] = Counter()
    by_module: Counter[str] = Counter()
    for one in live:
        facts = view.tensors.facts(one)
        categories[facts.category] += one.size
        if facts.category == "activations":
            by_module[facts.module] += one.size
    named = _named_things({name: namespace[name] for name in sorted(names) if name in namespace})
    of_cell = Evidence(
        categories=dict(categories),
        allocated=sum(one.size for one in live),
        cached=view.timeline.reserved_at(position) - sum(one.size for one in live),
        ran_backward=any(span.kind == BACKWARD for span in view.recording.spans),
        bfloat16=torch.cuda.is_bf16_supported(including_emulation=False),
        host=_free_on_the_host(),
        grown=grown,
        **_told(named, by_module),
    )
    known = frozenset(named.ids.values())
    functions = {one: replace(of_cell, **_told(its.without(known), by_module)) for one, its in inside.items()}
    return replace(of_cell, inside=functions)


def _told(named: NamedThings, by_module: Counter[str]) -> dict[str, Any]:
    """The part of `Evidence` that variables are."""
    heavy = (one for root, places in named.places.items() for one in _with_activations(root, places, by_module))
    return {**{one.name: getattr(named, one.name) for one in fields(Variables)}, "classes": tuple(heavy)}


def names_inside(variables: Mapping[str, Any]) -> NamedThings:
    """What a function's variables are as it is left."""
    return unheard(_named_things, {name: variables[name] for name in sorted(variables)})


def _named_things(found: Mapping[str, Any]) -> NamedThings:
    modules = _distinct({name: thing for name, thing in found.items() if is_module(thing)})
    optimizers = _distinct({name: thing for name, thing in found.items() if is_optimizer(thing)})
    batches, size = _batches(found)
    lists = {name: list(filter(_on_device, thing)) for name, thing in found.items() if type(thing) is list}
    kept = {name: _kept(tensors) for name, tensors in lists.items()}
    state = sum(
        tensor.untyped_storage().nbytes()
        for optimizer in optimizers.values()
        for _, states in states_of(optimizer)
        for tensor in (dict.values(states) if is_a(states, dict) else ())
        if _on_device(tensor) and shape(tensor)
    )
    return NamedThings(
        names=frozenset(found),
        modules=tuple(_named(name, module) for name, module in modules.items()),
        places={name: _places_of_classes(name, module) for name, module in modules.items()},
        optimizers=tuple(optimizers),
        batches=batches,
        batch_size=size,
        state=state,
        tensors=tuple(name for name, thing in found.items() if _on_device(thing)),
        lists=kept,
        of_parts=frozenset(name for name, tensors in lists.items() if 2 * sum(map(nbytes, tensors)) < kept[name]),
        ids={name: id(thing) for name, thing in (*modules.items(), *optimizers.items())},
    )


def _kept(tensors: Iterable[torch.Tensor]) -> int:
    """What their storages take, those of views counted once."""
    storages = [storage(part) for one in tensors for part in pieces(one)]
    return sum({one._cdata: one.nbytes() for one in storages}.values())


def _distinct(found: dict[str, Any]) -> dict[str, Any]:
    """One name for each object, the first."""
    seen: set[int] = set()
    return {name: thing for name, thing in found.items() if not (id(thing) in seen or seen.add(id(thing)))}  # type: ignore[func-returns-value]


def _named(name: str, module: torch.nn.Module) -> NamedModule:
    inner = list(modules_in(module))
    linears = [path for path, one in inner if path and type(one) is torch.nn.Linear]
    normalizes = any(_normalizes(one) for _, one in inner)
    has_parameters = any(table(one, PARAMETERS) for _, one in inner)
    return NamedModule(name, tuple(linears), _switch(inner), normalizes, name_of_class(type(module)), has_parameters)


def _switch(inner: Sequence[tuple[str, torch.nn.Module]]) -> str:
    """Of a module and all in it: the call of the outermost that can recompute. Wrappers are passed by, as they may not give what
    is asked of them to what they wrap."""
    for path, module in inner:
        kind = type(module)
        switch = next((vars(one)[_SWITCH] for one in kind.__mro__ if _SWITCH in vars(one)), None)
        if not inspect.isfunction(switch) or not getattr(kind, "supports_gradient_checkpointing", False):
            continue
        # The reentrant kind needs inputs that require gradients, which those of frozen weights do not.
        kwargs = "gradient_checkpointing_kwargs"
        is_frozen = any(not one.requires_grad for _, one in tensors_of(module, PARAMETERS))
        is_told = is_frozen and kwargs in inspect.signature(switch).parameters
        words = f'{kwargs}={{"use_reentrant": False}}' if is_told else ""
        return f"{path}.{_SWITCH}({words})".lstrip(".")
    return ""


def _places_of_classes(name: str, root: torch.nn.Module) -> tuple[_PlacesOfClass, ...]:
    """The classes of its parts that have parts themselves, none inside another of its class."""
    places: dict[str, list[str]] = {}
    norms: set[str] = set()
    for path, module in modules_in(root):
        kind = name_of_class(type(module))
        if not path or not table(module, MODULES) or is_a(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            continue
        places.setdefault(kind, []).append(path)
        if any(_normalizes(one) for _, one in modules_in(module)):
            norms.add(kind)
    side_by_side = [
        kind for kind, paths in places.items() if len({f".{path}".rpartition(".")[0] for path in paths}) < len(paths)
    ]
    found = []
    for kind, paths in places.items():
        if any(one != other and one.startswith(f"{other}.") for one in paths for other in paths):
            continue
        begins = () if kind in side_by_side else tuple(f"{path}." for path in paths)
        around = frozenset(one for one in side_by_side if any(each.startswith(begins) for each in places[one]))
        # (A model that has no name in the notebook goes by its class.)
        roots = name, name_of_class(type(root))
        found.append(_PlacesOfClass(kind, roots, tuple(paths), kind in norms, around))
    return tuple(found)


def _with_activations(root: str, places: Iterable[_PlacesOfClass], by_module: Counter[str]) -> list[ModuleClass]:
    """The heaviest first."""
    found = []
    for one in places:
        paths = [f"{begin}.{path}" for begin in one.roots for path in one.paths]
        held = sum(size for place, size in by_module.items() if any(_is_in(place, path) for path in paths))
        found.append(ModuleClass(root, one.name, len(one.paths), held, one.normalizes_batches, one.around))
    return sorted(found, key=lambda one: -one.activations)


def _is_in(place: str, path: str) -> bool:
    """Whether a place such as ``model.layers.*.mlp`` is that of a module, or inside it."""
    parts, wanted = place.split("."), path.split(".")
    return len(parts) >= len(wanted) and all(part in ("*", name) for part, name in zip(parts, wanted, strict=False))


def _normalizes(module: torch.nn.Module) -> bool:
    kinds = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
    return any(inherits(type(module), kind) for kind in kinds) and attribute(module, "training") is True


def _batches(found: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """The names of tensors on the device that look like parts of one batch: as many rows, and nobody's parameters."""
    sizes = {
        name: shape(thing)[0]
        for name, thing in found.items()
        if _on_device(thing)
        and not is_parameter(thing)
        and not thing.requires_grad
        and shape(thing)
        and shape(thing)[0] > 1
    }
    if not sizes:
        return (), 0
    size, _ = Counter(sizes.values()).most_common(1)[0]
    return tuple(name for name, rows in sizes.items() if rows == size), size


def _on_device(thing: Any) -> bool:
    return is_tensor(thing) and is_a(thing, VirtualTensor)


def _free_on_the_host() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0
