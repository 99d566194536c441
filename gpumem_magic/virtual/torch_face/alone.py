"""One rank of many, alone in its process: groups have the size that the program expects, and no other processes.

PyTorch's `fake` backend lets host tensors' collectives return at once; those of a virtual GPU send nothing anyhow.
"""

from __future__ import annotations

import importlib
import os
import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from gpumem_magic.patching import Patches
from gpumem_magic.virtual.engine import exchanged
from gpumem_magic.virtual.engine.calls import users_line
from gpumem_magic.virtual.torch_face import stores
from gpumem_magic.virtual.torch_face.communication import everywhere
from gpumem_magic.virtual.torch_face.letters import PATIENCE, Letters

# What PyTorch's launcher says to a process, beside its rank.
_LAUNCHER = {
    "GROUP_WORLD_SIZE": "{hosts}", "GROUP_RANK": "{host}", "ROLE_NAME": "default", "ROLE_RANK": "{rank}",
    "ROLE_WORLD_SIZE": "{world}", "RANK": "{rank}", "WORLD_SIZE": "{world}", "LOCAL_RANK": "{local_rank}",
    "LOCAL_WORLD_SIZE": "{local_world}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
}  # fmt: skip


@dataclass
class Alone:
    """Which rank a process is, and what its program asked of the others.

    groups: what the program calls them and their ranks, in the order in which they were made.

    unknown: where an object of another rank's was asked for -> how often. backends: what the program asked for, by group.
    """

    rank: int
    world: int
    groups: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    unknown: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    backends: dict[str, str] = field(default_factory=dict)
    letters: Letters = field(default_factory=lambda: Letters(0, None))

    def hear(self, name: str, source: int, to: str) -> Any:
        """What another rank sent; None, noted as unknown, where that cannot be had."""
        try:
            return self.letters.receive(source, to)
        except LookupError:
            file, line = users_line()
            self.unknown[name, file, line] += 1
            return None

    def notes(self) -> list[str]:
        """What could not be known, a sentence each."""
        return [
            f"{name} at {os.path.basename(file)}:{line} waits for another rank's objects, which did not come: what was there "
            "stayed as it was."
            for name, file, line in self.unknown
        ]


def environment(rank: int, world: int, local_world: int) -> dict[str, str]:
    """What a launcher's process finds in its environment."""
    words = {
        "rank": rank,
        "world": world,
        "local_rank": rank % local_world,
        "local_world": min(local_world, world),
        "host": rank // local_world,
        "hosts": -(-world // local_world),
    }
    return {name: text.format(**words) for name, text in _LAUNCHER.items()}


@contextmanager
def one_of_many(rank: int, world: int, folder: Path | None = None, patience: float = PATIENCE) -> Iterator[Alone]:
    """Inside, process groups need no other process. To be entered while a virtual GPU is on. folder, patience: for letters."""
    alone = Alone(rank, world, letters=Letters(rank, folder, patience))
    patches = Patches()
    try:
        _install(patches, alone)
        yield alone
    finally:
        patches.undo()


def _install(patches: Patches, alone: Alone) -> None:
    from torch.distributed import distributed_c10d as module

    store, connecting = stores.classes(alone.world, alone.rank, alone.letters)
    everywhere(patches, module, {"init_process_group": partial(_first_group, alone, store)})
    makers = {"new_group": _further_group} | _OBJECTS
    everywhere(patches, module, {name: partial(make, alone) for name, make in makers.items()})
    # Nobody else is there who may not come.
    group: Any = module.ProcessGroup
    patches.set(group, "monitored_barrier", lambda *args, **kwargs: None)
    for name in ("allreduce", "allreduce_coalesced", "reduce"):
        patches.set(group, name, _summing_up_on_host(getattr(group, name)))
    # Outside of the module it is another function already (`communication`).
    for home in (module, torch.distributed):
        everywhere(patches, home, {"get_backend": partial(_as_asked, alone)})
    everywhere(patches, torch.distributed, {name: partial(_instead, kind) for name, kind in connecting.items()})
    patches.attempt(_checkpoints)
    processes: Any = torch.multiprocessing
    patches.set(processes, "spawn", _in_this_process(alone, processes.spawn))


# ---- groups


def _instead(kind: type[Any], original: Any) -> type[Any]:
    return kind


def _first_group(alone: Alone, store: Callable[[str], Any], original: Any) -> Any:
    # Its import is what makes PyTorch know the backend.
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    parameters = signature(original)

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        given = parameters.bind(*args, **kwargs).arguments
        size, rank = given.get("world_size", -1), given.get("rank", -1)
        size, rank = (alone.world if size < 0 else size), (alone.rank if rank < 0 else rank)
        named = {name: given[name] for name in ("timeout", "group_name") if name in given}
        original(backend="fake", store=given.get("store") or store("of the group"), rank=rank, world_size=size, **named)
        alone.backends.clear()
        alone.backends[_name_of(None)] = _asked_for(given.get("backend"))
        alone.groups.append(("", tuple(range(size))))

    return init_process_group


def _further_group(alone: Alone, original: Any) -> Any:
    parameters = signature(original)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        given = dict(parameters.bind(*args, **kwargs).arguments)
        backend = given.pop("backend", None)
        for name in ("pg_options", "device_id"):
            given.pop(name, None)
        ranks = given.get("ranks")
        members = range(torch.distributed.get_world_size()) if ranks is None else sorted(ranks)
        alone.groups.append((str(given.get("group_desc") or ""), tuple(members)))
        made = original(**given)
        world = alone.backends.get(_name_of(None))
        alone.backends[_name_of(made)] = _asked_for(backend) if backend is not None or world is None else world
        return made

    return new_group


def _name_of(group: Any) -> str:
    one = torch.distributed.group.WORLD if group is None else group
    return str(getattr(one, "group_name", ""))


def _asked_for(backend: Any) -> str:
    """The name of what sends a device's tensors: ``cuda:nccl,cpu:gloo`` asks for NCCL there, and so does no name."""
    name = "" if backend is None else str(backend).lower()
    return torch.distributed.Backend.NCCL if not name or "nccl" in name else name


def _as_asked(alone: Alone, original: Any) -> Any:
    """A program takes its way by the backend's name, and PyTorch does."""

    def get_backend(group: Any = None) -> Any:
        found = original(group)
        return alone.backends.get(_name_of(group), torch.distributed.Backend.NCCL) if found == "fake" else found

    return get_backend


# ---- objects: every rank is taken to have what this one has


def _all_gather_object(alone: Alone, original: Any) -> Any:
    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        sent = pickle.dumps(obj)
        object_list[:] = [pickle.loads(sent) for _ in object_list]

    return all_gather_object


def _gather_object(alone: Alone, original: Any) -> Any:
    parameters = signature(original)

    def gather_object(*args: Any, **kwargs: Any) -> None:
        given = parameters.bind(*args, **kwargs).arguments
        into = given.get("object_gather_list")
        if into is not None and _is_meant(given, "dst"):
            sent = pickle.dumps(given["obj"])
            into[:] = [pickle.loads(sent) for _ in into]

    return gather_object


def _scatter_object_list(alone: Alone, original: Any) -> Any:
    parameters = signature(original)

    def scatter_object_list(*args: Any, **kwargs: Any) -> None:
        given = parameters.bind(*args, **kwargs).arguments
        group = given.get("group")
        parts = given.get("scatter_object_input_list")
        if _is_meant(given, "src"):
            alone.letters.send(alone.rank, _all_of(group), parts)
        else:
            parts = alone.hear("scatter_object_list", _source(given), _all_of(group))
        if parts is not None:
            given["scatter_object_output_list"][0] = parts[torch.distributed.get_rank(group)]

    return scatter_object_list


def _broadcast_object_list(alone: Alone, original: Any) -> Any:
    parameters = signature(original)

    def broadcast_object_list(*args: Any, **kwargs: Any) -> None:
        given = parameters.bind(*args, **kwargs).arguments
        to = _all_of(given.get("group"))
        if _is_meant(given, "src"):
            alone.letters.send(alone.rank, to, given["object_list"])
            return
        objects = alone.hear("broadcast_object_list", _source(given), to)
        if objects is not None:
            given["object_list"][:] = objects

    return broadcast_object_list


def _send_object_list(alone: Alone, original: Any) -> Any:
    parameters = signature(original)

    def send_object_list(*args: Any, **kwargs: Any) -> None:
        given = parameters.bind(*args, **kwargs).arguments
        alone.letters.send(alone.rank, str(_other(given, "dst")), given["object_list"])

    return send_object_list


def _recv_object_list(alone: Alone, original: Any) -> Any:
    parameters = signature(original)

    def recv_object_list(*args: Any, **kwargs: Any) -> int:
        given = parameters.bind(*args, **kwargs).arguments
        source = _other(given, "src")
        objects = alone.hear("recv_object_list", source, str(alone.rank))
        if objects is not None:
            given["object_list"][:] = objects
        return source

    return recv_object_list


_OBJECTS: dict[str, Callable[[Alone, Any], Any]] = {
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "scatter_object_list": _scatter_object_list,
    "broadcast_object_list": _broadcast_object_list,
    "send_object_list": _send_object_list,
    "recv_object_list": _recv_object_list,
}


# ---- values: so has it all others'


def _summing_up_on_host(original: Any) -> Any:
    """Tensors of the host, too, which C++ leaves as they are; a device's see to it themselves."""

    @wraps(original)
    def reduce(group: Any, tensors: Any, *others: Any, **kwargs: Any) -> Any:
        handle = original(group, tensors, *others, **kwargs)
        roots = [one.rootRank for one in (*others, *kwargs.values()) if hasattr(one, "rootRank")]
        if group.rank() in (roots or [group.rank()]):
            given = tensors if isinstance(tensors, list) else [tensors]
            on_host = [tensor for tensor in given if type(tensor) is torch.Tensor and tensor.device.type == "cpu"]
            exchanged.reduce(on_host, group.size())
        return handle

    return exchanged.telling(reduce)


def _other(given: Mapping[str, Any], name: str) -> int:
    """The call's source or destination, counted over all ranks: ``src`` is so, ``group_src`` counts within the group."""
    inside, place = given.get(f"group_{name}"), given.get(name)
    if inside is not None:
        group: Any = given.get("group") or torch.distributed.group.WORLD
        return int(torch.distributed.get_global_rank(group, inside))
    return 0 if place is None else int(place)


def _source(given: Mapping[str, Any]) -> int:
    return _other(given, "src")


def _is_meant(given: Mapping[str, Any], name: str) -> bool:
    return bool(torch.distributed.get_rank() == _other(given, name))


def _all_of(group: Any) -> str:
    """A group's name for letters to all of it, which is the same on each of its ranks."""
    ranks = torch.distributed.get_process_group_ranks(group)
    return f"all{zlib.crc32(repr(ranks).encode()):08x}"


def _checkpoints(patches: Patches) -> None:
    """A rank saves and loads its own pieces; that a plan lacks the others' is no mistake of the program's."""
    planner = importlib.import_module("torch.distributed.checkpoint.default_planner")
    wrapper = importlib.import_module("torch.distributed.checkpoint.utils")._DistWrapper
    validate, make = planner._validate_global_plan, wrapper.__init__

    def init(self: Any, group: Any, use_dist: bool, coordinator_rank: int) -> None:
        make(self, group, False, coordinator_rank)

    def validate_global_plan(*args: Any) -> Any:
        # True where nothing is wrong; since 2.13 a list of what is.
        return [] if isinstance(validate(*args), list) else True

    # (Every rank is taken to have the shards that this one has.)
    names = ("validate_non_overlapping_shards_metadata", "check_tensor")
    for home in ("sharded_tensor.utils", "sharding_spec.api"):
        shards = importlib.import_module(f"torch.distributed._shard.{home}")
        for name in names:
            if hasattr(shards, name):
                patches.set(shards, name, lambda *args, **kwargs: None)
    patches.set(wrapper, "__init__", init)
    patches.set(planner, "_validate_global_plan", validate_global_plan)


# ---- a program that starts its ranks itself


def _in_this_process(alone: Alone, original: Any) -> Any:
    parameters = signature(original)

    def spawn(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["nprocs"] not in (alone.world, int(os.environ["LOCAL_WORLD_SIZE"])):
            return original(*args, **kwargs)
        local_rank = int(os.environ["LOCAL_RANK"])
        given.arguments["fn"](local_rank, *given.arguments["args"])
        return None

    return spawn
