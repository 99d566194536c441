"""`torch.save` and `torch.load` (and those of `torch.jit` and `torch.export`) with tensors of a virtual device.

There are no values to save: what would be written is zeros. A new file is written, with a warning; a file that exists is not
overwritten, because it may hold a training run's only good copy, unless this process wrote it itself or the environment variable
``GPUMEM_SAVE_STAND_INS=1`` says so.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import importlib
import importlib.util
import io
import itertools
import json
import os
import pickle
import pkgutil
import threading
import warnings
import weakref
from collections.abc import Callable, Container
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpumem_magic.patching import Patches
from gpumem_magic.private import aten
from gpumem_magic.virtual.engine.tensors import (
    ParameterKind,
    VirtualKind,
    VirtualTensor,
    all_attributes,
    engine_of,
    own_class,
    place_of,
    saved_storages,
)

SWITCH = "GPUMEM_SAVE_STAND_INS"


class StandInsNotSaved(RuntimeError):
    """A file that exists would have been overwritten by values that were never computed."""


def install(patches: Patches, computes: bool) -> None:
    """computes: whether tensors on the devices have values; these are saved as from any device."""
    written: set[str] = set()
    in_memory: weakref.WeakSet[io.BytesIO] = weakref.WeakSet()
    patches.set(torch, "save", _save_values(torch.save) if computes else _save(torch.save, written, in_memory))
    patches.set(torch, "load", _load(torch.load, lambda f: _has_stand_ins(f, written, in_memory)))
    if not computes:
        patches.set(torch.export, "save", _save_exported(torch.export.save, written))
    patches.set(torch.serialization, "location_tag", _location_tag(torch.serialization.location_tag))
    patches.set(torch.jit, "load", _load_script(torch.jit.load))
    # (What is traced has the methods of what is scripted, copied to its own class.)
    scripted: Any = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined]
    for name in ("save", "save_to_buffer") if computes else ("save",):
        original = getattr(scripted, name)
        ours = _save_script_of_values(original) if computes else _save_script(original, written)
        for owner in (scripted, torch.jit.ScriptModule):
            patches.set(owner, name, ours)
    for kind in (VirtualKind, ParameterKind, type(torch.Tensor), type(torch.nn.Parameter)):
        patches.entry(copyreg.dispatch_table, kind, _reduced_class)
    if importlib.util.find_spec("safetensors") is not None and not computes:
        _safetensors(patches, written)


def _reduced_class(kind: type) -> Any:
    """How pickles name a tensor class: of one on a virtual device, that which it has on the host."""
    if not issubclass(kind, VirtualTensor):
        return kind.__qualname__
    own = own_class(kind)
    return pkgutil.resolve_name, (f"{own.__module__}:{own.__qualname__}",)


def _has_stand_ins(f: Any, written: Container[str], in_memory: Container[io.BytesIO]) -> bool:
    """Whether stand-ins were saved there."""
    if type(f) is io.BytesIO:
        return f in in_memory
    return isinstance(f, (str, os.PathLike)) and os.path.abspath(os.fspath(f)) in written


def _save(
    original: Callable[..., Any], written: set[str], in_memory: weakref.WeakSet[io.BytesIO]
) -> Callable[..., Any]:
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        pickler = kwargs.get("pickle_module", args[0] if args else None) or pickle
        holds, unknown_because = _holds_stand_ins(obj, pickler)
        if not holds:
            return original(obj, f, *args, **kwargs)
        named = isinstance(f, (str, os.PathLike))
        if named:
            _check(f, written, unknown_because)
        with saved_storages():
            original(obj, f, *args, **kwargs)
        if named:
            _warn(f, "contains" if unknown_because is None else "may contain")
        elif type(f) is io.BytesIO:
            in_memory.add(f)
        return None

    return save


def _save_values(original: Callable[..., Any]) -> Callable[..., Any]:
    def save(*args: Any, **kwargs: Any) -> Any:
        with saved_storages():
            return original(*args, **kwargs)

    return save


def _save_exported(original: Callable[..., Any], written: set[str]) -> Callable[..., Any]:
    def save(ep: Any, f: Any, **kwargs: Any) -> None:
        named = isinstance(f, (str, os.PathLike)) and any(
            isinstance(held, VirtualTensor) for held in (*ep.state_dict.values(), *ep.constants.values())
        )
        if named:
            _check(f, written)
        original(ep, f, **kwargs)
        if named:
            _warn(f)

    return save


def _check(f: str | os.PathLike[str], written: set[str], unknown_because: Exception | None = None) -> None:
    """Raises StandInsNotSaved for a file that must not be overwritten.

    unknown_because: what kept us from finding out whether there are stand-ins; None where there are.
    """
    path = os.path.abspath(os.fspath(f))
    if os.path.exists(path) and path not in written and os.environ.get(SWITCH) != "1":
        why = "tensors on a virtual GPU have no values"
        if unknown_because is not None:
            why = f"what is to be saved may hold tensors on a virtual GPU, which have no values ({unknown_because!r})"
        raise StandInsNotSaved(
            f"{os.fspath(f)} exists, and {why}: it was left as it is. Save under a "
            f"new name, or set the environment variable {SWITCH}=1 to overwrite files with zeros"
        ) from unknown_because
    written.add(path)


def _warn(f: str | os.PathLike[str], verb: str = "contains") -> None:
    warnings.warn(f"{os.fspath(f)} {verb} zeros in place of the values of tensors on a virtual GPU", stacklevel=4)


def _location_tag(original: Callable[..., Any]) -> Callable[..., Any]:
    """A file says of every storage where it was: of stand-ins, on which virtual device."""

    def location_tag(storage: Any) -> Any:
        place = place_of(storage._cdata)
        return original(storage) if place is None else place

    return location_tag


def _safetensors(patches: Patches, written: set[str]) -> None:
    """The same care for `safetensors.torch.save_file` (0.4 to 0.8), whose two steps other libraries have imported already."""
    module = importlib.import_module("safetensors.torch")
    flatten = next((name for name in ("_flatten_as_ptr", "_flatten") if hasattr(module, name)), None)
    if flatten is None or not hasattr(module, "serialize_file"):
        return
    original_flatten = getattr(module, flatten)
    original_write = module.serialize_file
    seen = threading.local()

    def flatten_(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        seen.virtual = isinstance(tensors, dict) and any(isinstance(item, VirtualTensor) for item in tensors.values())
        return original_flatten(tensors, *args, **kwargs)

    def serialize_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(seen, "virtual", False):
            seen.virtual = False
            _check(filename, written)
            _warn(filename)
        return original_write(tensors, filename, *args, **kwargs)

    patches.set(module, flatten, flatten_)
    patches.set(module, "serialize_file", serialize_file)


def _save_script(original: Callable[..., Any], written: set[str]) -> Callable[..., Any]:
    """C++ writes the module, and of its virtual tensors the shapes alone."""

    def save(self: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        virtual = any(
            isinstance(tensor, VirtualTensor) for tensor in itertools.chain(self.parameters(), self.buffers())
        )
        if virtual:
            _check(f, written)
        result = original(self, f, *args, **kwargs)
        if virtual:
            warnings.warn(
                f"{f} has no values for tensors on a virtual GPU: PyTorch loads them as meta tensors", stacklevel=3
            )
        return result

    return save


# The part of a module's file that says of its tensors, by their names, on which device they were.
_PLACES = "gpumem_magic.json"
# The argument for further parts of it.
_MORE = "_extra_files"


def _save_script_of_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """C++ writes the host's copy of the module."""

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = itertools.chain(self.named_parameters(), self.named_buffers())
        places = {name: str(tensor.device) for name, tensor in held if isinstance(tensor, VirtualTensor)}
        if not places:
            return original(self, *args, **kwargs)
        kwargs[_MORE] = {**(kwargs.get(_MORE) or {}), _PLACES: json.dumps(places)}
        # (A clone that autograd knows would keep the parameter.)
        with torch.no_grad(), _ClonedToTheHost():  # type: ignore[no-untyped-call]
            on_host = copy.deepcopy(self)
        for mine, its in zip(on_host.parameters(), self.parameters(), strict=True):
            mine.requires_grad_(its.requires_grad)
        return original(on_host, *args, **kwargs)

    return save


class _ClonedToTheHost(TorchDispatchMode):
    """What clones a tensor of a device makes one of the host, and takes nothing on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.clone.default and isinstance(args[0], VirtualTensor):
            return args[0].cpu()
        return func(*args, **(kwargs or {}))


def _load_script(original: Callable[..., Any]) -> Callable[..., Any]:
    """C++ reads a module straight to its device: ours are reached by way of the host.

    A tensor that was saved from a virtual device comes back as a meta tensor, or is named in `_PLACES`; it belongs to that device
    if no other is named.
    """

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        to_device = map_location is not None and torch.device(map_location).type == "cuda"
        wanted = args[0] if args else kwargs.pop(_MORE, None)
        args, extra = args[1:], {**(wanted or {}), _PLACES: ""}
        module = original(f, "cpu" if to_device else map_location, extra, *args, **kwargs)
        said = extra.pop(_PLACES)
        places = json.loads(said) if said and map_location is None else {}
        if wanted is not None:
            wanted.update(extra)
        place = "cuda" if map_location is None else map_location
        for name, part in module.named_modules():
            for tensors in (part._parameters, part._buffers):
                for key, tensor in list(tensors.items()):
                    found = places.get(f"{name}.{key}".lstrip("."))
                    if tensor.is_meta or found:
                        moved = torch.zeros_like(tensor, device=place) if tensor.is_meta else tensor.detach().to(found)
                        tensors[key] = moved.requires_grad_(tensor.requires_grad)
        return module.to(map_location) if to_device else module

    return load


def _holds_stand_ins(obj: Any, pickle_module: Any) -> tuple[bool, Exception | None]:
    """Whether pickling `obj` would meet a virtual tensor; True with the error where that can't be found out.

    Nothing is written, and no zeros are made.
    """
    try:
        _finder(pickle_module.Pickler)(io.BytesIO()).dump(obj)
    except _Found:
        return True, None
    except Exception as error:
        return True, error
    return False, None


class _Found(Exception):
    """A virtual tensor was met."""


@functools.cache
def _finder(pickler: Any) -> Any:
    class Finder(pickler):  # type: ignore[misc]
        def persistent_id(self, obj: Any) -> Any:
            storage = obj._untyped_storage if isinstance(obj, torch.TypedStorage) else obj
            is_storage = isinstance(storage, torch.UntypedStorage)
            if isinstance(obj, VirtualTensor) or (is_storage and storage.device.type == "cuda"):
                raise _Found
            # Those of the host are not looked into: their values would be copied for nothing. (A storage with a type is pickled
            # by `torch.save`, which would ask here again.)
            return "host" if is_storage or isinstance(obj, torch.Tensor) else None

    return Finder


def _load(original: Callable[..., Any], has_stand_ins: Callable[[Any], bool]) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        placed: dict[int, torch.device] = {}

        def on_host(storage: Any, location: str) -> Any:
            target = _target(map_location, storage, location)
            if isinstance(target, (torch.UntypedStorage, torch.TypedStorage)) and target.device.type == "cuda":
                target = target.device  # `lambda storage, location: storage.cuda()`
            if isinstance(target, torch.device) and target.type == "cuda":
                if (target.index or 0) >= (count := torch.cuda.device_count()):
                    raise RuntimeError(
                        f"Attempting to deserialize object on CUDA device {target.index} but torch.cuda.device_count() is "
                        f"{count}. Please use torch.load with map_location to map your storages to an existing device."
                    )
                placed[storage._cdata] = target
                return storage
            return target if isinstance(target, (torch.UntypedStorage, torch.TypedStorage)) else storage

        loaded = original(f, on_host, *args, **kwargs)
        return _Mover(placed, has_stand_ins(f)).move(loaded) if placed else loaded

    return load


def _target(map_location: Any, storage: Any, location: str) -> Any:
    """Where a storage goes: a device, or a storage that the user's own function gave."""
    if isinstance(map_location, dict):
        location = map_location.get(location, location)
    elif callable(map_location):
        result = map_location(storage, location)
        if result is not None:
            return result
    elif map_location is not None:
        return torch.device("cuda", map_location) if isinstance(map_location, int) else torch.device(map_location)
    if not isinstance(location, str):
        return location
    return torch.device(location)


class _Mover:
    """Puts loaded host tensors on the device, keeping what shared a storage together."""

    def __init__(self, placed: dict[int, torch.device], has_stand_ins: bool) -> None:
        """has_stand_ins: whether zeros may stand for what nobody knows."""
        self._placed = placed
        self._has_stand_ins = has_stand_ins
        self._moved: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.Tensor] = {}

    def move(self, obj: Any) -> Any:
        if isinstance(obj, torch.nn.Module):
            return obj._apply(self._tensor)
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj)
        if isinstance(obj, dict):
            for key in obj:
                obj[key] = self.move(obj[key])
            return obj
        if isinstance(obj, list):
            obj[:] = [self.move(value) for value in obj]
            return obj
        if type(obj) is tuple:
            return tuple(self.move(value) for value in obj)
        return obj

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, VirtualTensor):
            return tensor
        storage = tensor.untyped_storage()
        device = self._placed.get(storage._cdata)
        if device is None:
            return tensor
        known = self._moved.get(id(tensor))
        if known is not None:
            return known
        whole = self._storages.get(storage._cdata)
        if whole is None:
            # The storage goes over as a whole, once, so that views of it stay views of one memory.
            flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            whole = self._storages[storage._cdata] = flat.to(device)
        with torch.no_grad():
            typed = torch.empty(0, dtype=tensor.dtype, device=device)
            typed.set_(whole.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if self._has_stand_ins and not tensor.any():
            engine_of(typed).forget(typed)  # type: ignore[arg-type]
        elif tensor.untyped_storage().nbytes() == tensor.nbytes:
            # An optimizer's count of its steps, which it divides by.
            engine_of(typed).learn(typed, tensor)  # type: ignore[arg-type]
        with torch._C.DisableTorchFunctionSubclass():
            moved: torch.Tensor
            if type(tensor) is torch.nn.Parameter:
                moved = torch.nn.Parameter(typed, requires_grad=tensor.requires_grad)
            elif type(tensor) is torch.Tensor:
                moved = typed.requires_grad_(tensor.requires_grad)
            else:
                moved = typed.as_subclass(type(tensor)).requires_grad_(tensor.requires_grad)
        all_attributes(moved).update(all_attributes(tensor))
        self._moved[id(tensor)] = moved
        return moved
