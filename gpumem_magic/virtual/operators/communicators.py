"""What process groups take beside PyTorch's allocator, where the program asked for NCCL: an estimate (`card.nccl`).

As with `ProcessGroupNCCL`, a group's communicator begins with the first collective, and two ranks that send to each other, each
call for itself, have one of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gpumem_magic.units import counted, human, spans
from gpumem_magic.virtual.card import nccl
from gpumem_magic.virtual.card.models import GpuModel

# Those that NCCL does by sending to single ranks, and the place of that rank among the arguments; without one, to all of them.
_TO_ONE = {"send": 2, "recv_": 2}
_TO_ALL = {"alltoall_", "alltoall_base_", "all_to_all_single"}
_ROOT = {"gather_": 3, "scatter_": 3}
_SUMS = {"allreduce_", "allreduce_coalesced_", "barrier", "all_reduce", "all_reduce_", "all_reduce_coalesced"}
# (All over gloo, whatever the group.)
_NEVER = {"monitored_barrier_"}


# What PyTorch raises where NCCL gets no memory (`NCCLUtils.hpp`).
_OUT_OF_MEMORY = (
    "NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc {size} bytes"
)


class _Group(NamedTuple):
    """ranks: the members' numbers among all ranks. mine: this process's place in it."""

    name: str
    ranks: tuple[int, ...]
    mine: int
    is_nccl: bool


class _Unwaited(NamedTuple):
    """backward: PyTorch's number for the backward pass in which it was called; -1 outside of one."""

    tensors: Sequence[torch.Tensor]
    backward: int


class _Total(NamedTuple):
    taken: int
    least: int
    most: int
    number: int


class Communicators:
    """All of a machine's.

    take(device, nbytes): from the driver, and raises where there is not so much. model(device): the card.
    """

    def __init__(self, take: Callable[[int, int], None], model: Callable[[int], GpuModel]) -> None:
        self._take, self._model = take, model
        self._groups: dict[str, _Group] = {}
        self._found: dict[tuple[int, object], nccl.Communicator] = {}
        # For each device, what there was when it was most.
        self._highest: dict[int, _Total] = {}
        # Whether calls are sent together just now.
        self.together = False
        # By group the calls that nobody has waited for, by the numbers of their handles.
        self._unwaited: dict[str, dict[int, _Unwaited]] = {}

    def communicate(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: int) -> None:
        """To be called before a collective of `torch.distributed`'s on tensors of that device."""
        name = func._schema.name.partition("::")[2]
        group = self._group_of(func, args, kwargs)
        if group is None or not group.is_nccl or name in _NEVER:
            return
        if name in _SUMS:
            self._let_go(group.name)
        if name in _TO_ONE:
            self._send(group, int(args[_TO_ONE[name]]), device, sends=name == "send")
        elif name in _TO_ALL:
            self._with_others(group, range(len(group.ranks)), device)
        elif name in _ROOT:
            root = int(args[_ROOT[name]])
            others = range(len(group.ranks)) if root == group.mine else [root]
            sends = (name == "scatter_") == (root == group.mine)
            self._with_others(group, others, device, sends=sends, receives=not sends)
        else:
            one = self._one(group.name, group.ranks, group.ranks[group.mine], device)
            size = _bytes_of(args[0]) if name in _SUMS else 0
            self._taken(device, one, lambda: one.collective(is_sum=name in _SUMS, nbytes=size))

    def keep(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], number: int, tensors: Sequence[torch.Tensor]
    ) -> None:
        """NCCL's groups have the tensors of a call live until somebody waits for the handle of that number. Where nobody does,
        they are let go of in a later call, once a thread has seen that they are done: it looks ten times a second, so that this
        is taken to be the first sum of another backward pass."""
        group = self._group_of(func, args, kwargs)
        if group is not None and group.is_nccl:
            kept = self._unwaited.setdefault(group.name, {})
            kept[number] = _Unwaited(tensors, torch._C._current_graph_task_id())

    def _let_go(self, group: str) -> None:
        """Of what was kept before this backward pass; outside of one, of all."""
        kept, now = self._unwaited.get(group, {}), torch._C._current_graph_task_id()
        for number in [number for number, one in kept.items() if one.backward != now or now < 0]:
            del kept[number]

    def waited(self, number: int) -> None:
        for kept in self._unwaited.values():
            kept.pop(number, None)

    def in_one_process(self, devices: Sequence[int]) -> None:
        """`torch.nn.DataParallel`'s: this process has all ranks."""
        for number, device in enumerate(devices):
            key = device, tuple(devices)
            if key not in self._found:
                self._found[key] = self._begun(device, nccl.Seat(len(devices), number, 1))
            self._taken(device, self._found[key], self._found[key].collective)

    def end(self, group: Any = None) -> None:
        """After a group is no more; without one, after all are."""
        name = getattr(group, "group_name", None)
        self._unwaited = {other: kept for other, kept in self._unwaited.items() if name not in (None, other)}
        for device, key in [*self._found]:
            if name is None or key == name or (isinstance(key, tuple) and key[0] == name):
                self._take(device, -self._found.pop((device, key)).taken)
        self._groups = {} if name is None else {other: one for other, one in self._groups.items() if other != name}

    def notes(self) -> list[str]:
        alike: dict[_Total, list[int]] = {}
        for device, total in sorted(self._highest.items()):
            alike.setdefault(total, []).append(device)
        return [
            f"NCCL's own memory is an estimate: {human(total.taken)} on {'each of ' * (len(devices) > 1)}"
            f"cuda:{', '.join(spans(devices))} beside PyTorch's allocator, counted with the CUDA context "
            f"({_between(total)}{counted(total.number, 'communicator')})."
            for total, devices in alike.items()
        ]

    # ---- which communicator

    def _group_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Group | None:
        given: Any = kwargs.get("group_name")
        if given is None:
            given = next((arg for arg in reversed(args) if isinstance(arg, (str, torch.ScriptObject))), None)
        if isinstance(given, torch.ScriptObject):
            groups = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
            given = torch.distributed.ProcessGroup.unbox(groups[0])
        name = given if isinstance(given, str) else getattr(given, "group_name", None)
        if name is None:
            return None
        if name not in self._groups:
            self._groups[name] = _look_at(name)
        return self._groups[name]

    def _one(self, name: object, ranks: Sequence[int], mine: int, device: int) -> nccl.Communicator:
        key = device, name
        if key not in self._found:
            here = [rank for rank in ranks if _computer(rank) == _computer(mine)]
            computers = len({_computer(rank) for rank in ranks})
            self._found[key] = self._begun(device, nccl.Seat(len(here), here.index(mine), computers))
        return self._found[key]

    def _begun(self, device: int, place: nccl.Seat) -> nccl.Communicator:
        model = self._model(device)
        major, minor = model.capability
        card = nccl.Card(10 * major + minor, model.nvlinks)
        return nccl.Communicator(card, place, nccl.Settings.of(os.environ))

    # ---- what it takes

    def _send(self, group: _Group, peer: int, device: int, *, sends: bool) -> None:
        if self.together or peer == group.mine:
            self._with_others(group, [peer], device, sends=sends, receives=not sends)
            return
        two = tuple(sorted((group.mine, peer)))
        ranks = [group.ranks[place] for place in two]
        one = self._one((group.name, two), ranks, group.ranks[group.mine], device)
        near = _computer(ranks[0]) == _computer(ranks[1])
        self._taken(device, one, lambda: one.between_two([(peer, near)], sends=sends, receives=not sends))

    def _with_others(
        self, group: _Group, peers: Sequence[int], device: int, *, sends: bool = True, receives: bool = True
    ) -> None:
        mine = group.ranks[group.mine]
        one = self._one(group.name, group.ranks, mine, device)
        others = [(peer, _computer(group.ranks[peer]) == _computer(mine)) for peer in peers if 0 <= peer != group.mine]
        self._taken(device, one, lambda: one.between_two(others, sends=sends, receives=receives))

    def _taken(self, device: int, one: nccl.Communicator, taking: Callable[[], int]) -> None:
        nbytes = taking()
        if not nbytes:
            return
        try:
            self._take(device, nbytes)
        except RuntimeError:
            one.taken -= nbytes
            raise torch.distributed.DistBackendError(_OUT_OF_MEMORY.format(size=nbytes)) from None
        ones = [other for (where, _), other in self._found.items() if where == device]
        total = _Total(
            sum(other.taken for other in ones),
            sum(other.least for other in ones),
            sum(other.most for other in ones),
            len(ones),
        )
        self._highest[device] = max(total, self._highest.get(device, total))


def _between(total: _Total) -> str:
    least, most = human(total.least), human(total.most)
    return f"{least} to {most} as NCCL chooses its ways; " if least != most else ""


def _computer(rank: int) -> int:
    """The number of a rank's computer, as launchers number them; without one, all are on this one."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or torch.distributed.get_world_size()
    return rank // size


def _look_at(name: str) -> _Group:
    groups: Any = torch.distributed.distributed_c10d
    group = groups._resolve_process_group(name)
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    is_nccl = torch.distributed.get_backend(group) == torch.distributed.Backend.NCCL
    return _Group(name, ranks, ranks.index(torch.distributed.get_rank()), is_nccl)


def _bytes_of(tensors: Any) -> int:
    found = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return sum(tensor.numel() * tensor.element_size() for tensor in found)
