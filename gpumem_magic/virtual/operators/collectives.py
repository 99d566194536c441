"""What processes exchange: `torch.distributed`'s operators on tensors of a virtual GPU, which sends nothing.

Other processes, if there are any, are taken to hold the same values; where the device computes, the host's tensors are sent, if
there is anybody to send them to.
PyTorch's own shape rules for these operators came after 2.9, and draw from Python's random numbers, which are the program's.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from gpumem_magic.looks.tensors import no_functions
from gpumem_magic.virtual.engine import exchanged, values
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.host_calls import equivalent, host_keys
from gpumem_magic.virtual.engine.rules import special
from gpumem_magic.virtual.engine.tensors import VirtualTensor
from gpumem_magic.virtual.engine.twins import leaves, mapped

# Those after which the tensors are taken to hold what they held: exactly so where there is one process.
_IN_PLACE = ("broadcast_", "allreduce_", "allreduce_coalesced_", "reduce_", "send", "barrier", "monitored_barrier_")
# Those that write what others sent into their first argument.
_RECEIVING = (
    "allgather_", "allgather_coalesced_", "_allgather_base_", "allgather_into_tensor_coalesced_", "reduce_scatter_",
    "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "recv_",
    "recv_any_source_",
)  # fmt: skip


def _operators(names: tuple[str, ...], home: Any = torch.ops.c10d) -> Iterator[Any]:
    """The operators of that name in this PyTorch: a build without `torch.distributed` has none."""
    for name in names:
        packet = getattr(home, name, None)
        if packet is not None:
            yield packet.default


def _base_name(func: Any) -> str:
    name: str = func._schema.name
    return name.partition("::")[2]


_RECEIVED = {*_operators(_RECEIVING)}

# What goes on by itself: `DistributedDataParallel` never waits for the handles of its all-reduces. Until a later call of the
# group their tensors are kept (`TensorShelf` in ``ProcessGroupNCCL.cpp``, since 2.8): the buckets of the first iteration, which
# are made anew before the second, until that one's first bucket is sent. What C++ sends otherwise it waits for.
_ALONE = {*_operators(("allreduce_",))}
_KEPT_FROM = (2, 8)
# The place of `async_op` among their arguments.
_ASYNC = 4
_numbers = itertools.count(1)
# By a handle's number the tensors that it is about, of the latest handles: who asks for a future does so at once.
_RESULTS: dict[int, list[weakref.ref[torch.Tensor]]] = {}
_ASKED_FOR = 64


def _exchange(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    _take(engine, _known_after(engine, func, args))
    return _communicated(engine, func, args, kwargs, device)


def _communicated(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    engine.memory.communication.communicate(func, args, kwargs, device)
    returns = len(func._schema.returns)
    if not returns:
        return None
    work = _finished_work(args[0])
    if func in _ALONE and all(args[_ASYNC:][:1]) and engine.memory.torch_version(device) >= _KEPT_FROM:
        engine.memory.communication.keep(func, args, kwargs, work.seq_id, args[0])
    return (args[0], work.boxed()) if returns == 2 else work.boxed()


def _receive(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    received = _known_after(engine, func, args)
    _forget(args[0])
    _take(engine, received)
    with engine.scratch(device, _in_one(func, args)):
        return _communicated(engine, func, args, kwargs, device)


def _known_after(engine: Engine, func: Any, args: Any) -> list[tuple[Any, torch.Tensor, bool]]:
    """What is in the tensors that a collective writes to, where all that is sent is known and small: each with its values on the
    host, and whether they are sure. What others sent never is."""
    exchange = exchanged.INTO.get(_base_name(func))
    receives = func in _RECEIVED
    sent = None if exchange is None else _sent(engine, args, args[1:] if receives else args)
    written = [leaf for leaf in leaves(args[0]) if isinstance(leaf, VirtualTensor)]
    if exchange is None or sent is None or any(leaf.numel() > values.MOST_GUESSED for leaf in written):
        return []
    with no_functions(), host_keys():
        hosts = {id(leaf): torch.zeros(leaf.size(), dtype=leaf.dtype) for leaf in written} | sent.hosts
        exchange(sent.company, *_with(hosts, args))
    sure = sent.sure and (not receives or sent.company.size < 2)
    return [(leaf, hosts[id(leaf)], sure) for leaf in written]


class _Sent(NamedTuple):
    """Values on the host of what is sent, by the tensor's `id`. sure: whether none of them was guessed."""

    company: exchanged.Company
    hosts: dict[int, torch.Tensor]
    sure: bool


def _sent(engine: Engine, args: Any, tensors: Any) -> _Sent | None:
    """None where not all is known and small."""
    given = [leaf for leaf in leaves(tensors) if isinstance(leaf, VirtualTensor)]
    if engine.computes or not given or any(leaf.numel() > values.MOST_GUESSED for leaf in given):
        return None
    known = {id(leaf): found for leaf in given if (found := values.known(leaf)) is not None}
    company = exchanged.company_of(args) if all(id(leaf) in known for leaf in given) else None
    if company is None:
        return None
    with no_functions(), host_keys():
        hosts = {name: found.host.clone() for name, found in known.items()}
    return _Sent(company, hosts, all(found.exact for found in known.values()))


def _with(hosts: dict[int, torch.Tensor], args: Any) -> list[Any]:
    """A call's arguments with the host's tensors in place of the device's."""
    return [mapped(lambda leaf: hosts.get(id(leaf), leaf), arg) for arg in args]


def _take(engine: Engine, received: list[tuple[Any, torch.Tensor, bool]]) -> None:
    for tensor, host, sure in received:
        engine.guess(tensor, host, sure)


# By operator which argument is a list of lists of tensors, which NCCL sends as one tensor.
_LISTS = {"allgather_": 0, "reduce_scatter_": 1}


def _in_one(func: Any, args: Any) -> int:
    """Bytes of the tensor in which lists of tensors lie for NCCL, where all are of one size (`newLikeFlat` in
    ``ProcessGroupNCCL.cpp``); others are sent one by one."""
    place = _LISTS.get(_base_name(func))
    tensors = [tensor for tensors in args[place] for tensor in tensors] if place is not None else []
    alike = len({tensor.shape for tensor in tensors}) == 1
    return sum(tensor.nbytes for tensor in tensors) if alike and isinstance(tensors[0], VirtualTensor) else 0


def _waited(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """The tensor itself (``Functional.cpp``). PyTorch's shape rule makes another one, which would take memory."""
    return args[0]


def _written(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    """What was given to be written to; that, too, PyTorch's shape rules make anew."""
    engine.memory.communication.communicate(func, args, kwargs, device)
    _forget(kwargs["out"])
    return kwargs["out"]


def _new(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> Any:
    engine.memory.communication.communicate(func, args, kwargs, device)
    made = engine.run(func, args, kwargs, device)
    exchange = exchanged.NEW.get(_base_name(func))
    sent = None if exchange is None else _sent(engine, args, args)
    if exchange is not None and sent is not None:
        with no_functions(), host_keys():
            received = exchange(sent.company, *_with(sent.hosts, args))
        sure = sent.sure and sent.company.size < 2
        _take(engine, [(leaf, host, sure) for leaf, host in zip(leaves(made), leaves(received), strict=True)])
    return made


def finished() -> Any:
    """A handle to wait for that has nothing to wait for.

    `FakeWork` is a private class of PyTorch's, which its own shape rules use.
    """
    work = torch._C._distributed_c10d.FakeWork()
    work.seq_id = next(_numbers)
    return work


def _finished_work(written: Any) -> Any:
    """Such a handle. written: the tensors that its future has (`with_results`)."""
    work = finished()
    tensors = [written] if isinstance(written, torch.Tensor) else [*written]
    if all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        _RESULTS[work.seq_id] = [weakref.ref(tensor) for tensor in tensors]
        _RESULTS.pop(work.seq_id - _ASKED_FOR, None)
    return work


def waiting(original: Any, waited: Callable[[int], None]) -> Any:
    """In place of the method that waits for a handle. waited: is told its number."""

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        waited(work.seq_id)
        return original(work, *args, **kwargs)

    return wait


def with_results(original: Any, future: Callable[[int, Any], Any]) -> Any:
    """In place of the method that makes a handle's future: as NCCL's, it has the tensors that were written. future: makes one of
    a device's number and a result."""

    def get_future(work: Any) -> Any:
        held = [reference() for reference in _RESULTS.get(work.seq_id, ())]
        found = [tensor for tensor in held if tensor is not None]
        if not found or len(found) < len(held):
            return original(work)
        return future(found[0].get_device(), found)

    return get_future


def _forget(written: Any) -> None:
    if isinstance(written, VirtualTensor):
        values.forget(written)
    elif isinstance(written, (list, tuple)):
        for part in written:
            _forget(part)


def _done_on_host(func: Any) -> Any:
    """Where a device computes, the host's tensors are sent, and waited for."""
    alone = exchanged.INTO.get(_base_name(func))

    def exchange(*args: Any, **kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        company = exchanged.company_of(args)
        if alone is not None and company is not None and company.alone:
            alone(company, *args)
        work = out[-1] if isinstance(out, tuple) else out
        if isinstance(work, torch.ScriptObject):
            torch._C._distributed_c10d.Work.unbox(work).wait()
        return out

    return exchange


def _waited_for(func: Any) -> Any:
    """The same for functional collectives, some of which write into an argument."""
    alone = exchanged.NEW.get(_PLAIN.get(_base_name(func), _base_name(func)))

    def exchange(*args: Any, **kwargs: Any) -> Any:
        given = mapped(torch.ops._c10d_functional.wait_tensor.default, func(*args, **kwargs))
        company = exchanged.company_of(args)
        if alone is not None and company is not None and company.alone:
            for into, made in zip(leaves(given), leaves(alone(company, *args)), strict=True):
                into.copy_(made)
        return given

    return exchange


_FUNCTIONAL = (
    "all_reduce", "all_reduce_coalesced", "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced", "all_to_all_single", "broadcast",
)  # fmt: skip

_IN_PLACE_FUNCTIONAL = ("all_reduce_", "all_reduce_coalesced_", "broadcast_")
_WRITING = ("all_gather_into_tensor_out", "reduce_scatter_tensor_out")
# Of those that write into an argument, the one that makes new tensors.
_PLAIN = {name: name[:-1] for name in _IN_PLACE_FUNCTIONAL} | {name: name[:-4] for name in _WRITING}

if torch.distributed.is_available():
    special(*_operators(("wait_tensor",), torch.ops._c10d_functional))(_waited)
    special(*_operators(_WRITING, torch.ops._c10d_functional))(_written)
    special(*_operators(_FUNCTIONAL + _IN_PLACE_FUNCTIONAL, torch.ops._c10d_functional))(_new)
    special(*_operators(_IN_PLACE))(_exchange)
    special(*_operators(_RECEIVING))(_receive)
    for _operator in _operators(_IN_PLACE + _RECEIVING):
        equivalent(_operator)(_done_on_host(_operator))
    for _name in _FUNCTIONAL + _IN_PLACE_FUNCTIONAL + _WRITING:
        if hasattr(torch.ops._c10d_functional, _name):
            _operator = getattr(torch.ops._c10d_functional, _name).default
            equivalent(_operator)(_waited_for(_operator))
