"""What a collective gives where every process is taken to hold what this one has: where nothing is sent, and in a rank that runs
alone.

On the host's tensors. What only others hold (`recv`, `scatter` from another) is not known, and reads as zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

# The methods of a group that reduce, some of which older versions lack. (Functions of `torch.distributed` stay as they are:
# Dynamo knows them by their identity.)
REDUCING = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
)  # fmt: skip
# How the call under way reduces: C++ hands on an object that does not say it.
_REDUCTION: ContextVar[Any] = ContextVar("reduction", default=None)


class Company(NamedTuple):
    """A group's processes, which all hold the same: how many they are, and which of them this one is.

    alone: whether it is the only one that runs."""

    rank: int
    size: int
    alone: bool


def company_of(args: Sequence[Any]) -> Company | None:
    """Of the group that a collective goes to; None where it says none, or where this process is none of it.

    `FakeProcessGroup` and `_resolve_process_group` are private to PyTorch; used with 2.13.
    """
    given = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
    name = next((arg for arg in reversed(args) if isinstance(arg, str)), None)
    home: Any = torch.distributed.distributed_c10d
    try:
        group: Any = home._resolve_process_group(name) if given is None else torch.distributed.ProcessGroup.unbox(given)
        alone = type(group._get_backend(torch.device("cpu"))).__name__ == "FakeProcessGroup"
    except (AttributeError, RuntimeError, TypeError, ValueError):
        # (A group of the program's own kind, or one that is no more.)
        return None
    return Company(group.rank(), group.size(), alone) if group.rank() >= 0 else None


def telling(original: Any) -> Any:
    """In place of a group's method that reduces: while it runs, collectives reduce as its options say."""

    @functools.wraps(original)
    def reduce(*args: Any, **kwargs: Any) -> Any:
        given = [getattr(one, "reduceOp", one) for one in (*args[2:], *kwargs.values())]
        before = _REDUCTION.set(next((one for one in given if type(one).__name__ in ("ReduceOp", "RedOpType")), None))
        try:
            return original(*args, **kwargs)
        finally:
            _REDUCTION.reset(before)

    return reduce


def _reduction() -> str:
    """How the call under way reduces, by the name that functional collectives have for it."""
    operation = _REDUCTION.get()
    return "sum" if operation is None else str(getattr(operation, "op", operation)).rpartition(".")[2].lower()


def _reduced(tensor: torch.Tensor, size: int, name: str) -> torch.Tensor:
    """What as many equal tensors reduce to. name: as functional collectives call the operation."""
    if name in ("sum", "premul_sum"):
        return tensor * size
    if name == "product":
        return tensor**size
    if name == "bxor":
        return tensor if size % 2 else torch.zeros_like(tensor)
    return tensor


def reduce(tensors: Sequence[torch.Tensor], size: int) -> None:
    """Has tensors be what as many equal ones reduce to, as the call under way does it."""
    for tensor in tensors:
        tensor.copy_(_reduced(tensor, size, _reduction()))


def _rows(given: torch.Tensor, into: torch.Tensor, splits: Sequence[Sequence[int]], company: Company) -> torch.Tensor:
    """What all others send to this one: the part that it would send to itself. splits: of the result, and of what is sent."""
    to_me, sent = (
        list(sizes) or [len(whole) // company.size] * company.size
        for sizes, whole in zip(splits, (into, given), strict=True)
    )
    first = sum(sent[: company.rank])
    part = given[first : first + sent[company.rank]]
    if not len(part):
        return torch.zeros_like(into)
    # (Who gets more than this one would send has the same rows again.)
    return torch.cat([part[torch.arange(count) % len(part)] for count in to_me])


def _reduce_in_place(company: Company, tensors: Any, *others: Any) -> None:
    reduce([tensors] if isinstance(tensors, torch.Tensor) else tensors, company.size)


def _reduce_at_root(company: Company, tensors: Any, group: Any, operation: Any, root: int, *others: Any) -> None:
    if root == company.rank:
        _reduce_in_place(company, tensors)


def _gather_into(company: Company, into: Any, given: Any, *others: Any) -> None:
    into.copy_(torch.cat([given.reshape(-1)] * company.size).reshape(into.shape))


def _gather_lists(company: Company, into: Any, given: Any, *others: Any) -> None:
    for several, one in zip(into, given, strict=False):
        for each in several:
            each.copy_(one)


def _scatter_reduced(company: Company, into: Any, given: Any, *others: Any) -> None:
    mine = given.reshape(company.size, -1)[company.rank]
    into.copy_(_reduced(mine, company.size, _reduction()).reshape(into.shape))


def _scatter_reduced_lists(company: Company, into: Any, given: Any, *others: Any) -> None:
    for one, several in zip(into, given, strict=True):
        one.copy_(_reduced(several[company.rank], company.size, _reduction()))


def _of_each(function: Callable[..., None]) -> Callable[..., None]:
    def exchange(company: Company, into: Any, given: Any, *others: Any) -> None:
        for one, other in zip(into, given, strict=True):
            function(company, one, other)

    return exchange


def _scatter(company: Company, into: Any, given: Any, *others: Any) -> None:
    for place, one in enumerate(into):
        if given:
            one.copy_(given[place][company.rank])
        else:
            one.zero_()


def _all_to_all(company: Company, into: Any, given: Any, *others: Any) -> None:
    mine = given[company.rank]
    for one in into:
        if one.numel() == mine.numel():
            one.copy_(mine.reshape(one.shape))
        else:
            one.zero_()


def _all_to_all_base(company: Company, into: Any, given: Any, group: Any, to_me: Any, sent: Any, *others: Any) -> None:
    into.copy_(_rows(given, into, (to_me, sent), company))


def _receive(company: Company, into: Any, *others: Any) -> None:
    for one in into:
        one.zero_()


# By the operator's name in `torch.ops.c10d`: writes into its arguments.
INTO: dict[str, Callable[..., None]] = {
    "allreduce_": _reduce_in_place,
    "allreduce_coalesced_": _reduce_in_place,
    "reduce_": _reduce_at_root,
    "allgather_": _gather_lists,
    "allgather_coalesced_": _gather_lists,
    "gather_": _gather_lists,
    "_allgather_base_": _gather_into,
    "allgather_into_tensor_coalesced_": _of_each(_gather_into),
    "reduce_scatter_": _scatter_reduced_lists,
    "_reduce_scatter_base_": _scatter_reduced,
    "reduce_scatter_tensor_coalesced_": _of_each(_scatter_reduced),
    "scatter_": _scatter,
    "alltoall_": _all_to_all,
    "alltoall_base_": _all_to_all_base,
    "recv_": _receive,
    "recv_any_source_": _receive,
}


def _gathered(company: Company, given: torch.Tensor) -> torch.Tensor:
    return torch.cat([given] * company.size)


def _scattered(company: Company, given: torch.Tensor, name: str) -> torch.Tensor:
    return _reduced(given.chunk(company.size)[company.rank], company.size, name)


def _exchanged(company: Company, given: torch.Tensor, to_me: Any, sent: Any, *others: Any) -> torch.Tensor:
    into = given.new_empty((sum(to_me) if len(to_me) else len(given), *given.shape[1:]))
    return _rows(given, into, (to_me, sent), company)


# By the operator's name in `torch.ops._c10d_functional`: gives new tensors.
NEW: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda company, given, name, *others: _reduced(given, company.size, name).clone(),
    "all_reduce_coalesced": lambda company, given, name, *others: [
        _reduced(one, company.size, name).clone() for one in given
    ],
    "all_gather_into_tensor": lambda company, given, *others: _gathered(company, given),
    "all_gather_into_tensor_coalesced": lambda company, given, *others: [_gathered(company, one) for one in given],
    "reduce_scatter_tensor": lambda company, given, name, *others: _scattered(company, given, name).clone(),
    "reduce_scatter_tensor_coalesced": lambda company, given, name, *others: [
        _scattered(company, one, name).clone() for one in given
    ],
    "all_to_all_single": _exchanged,
    "broadcast": lambda company, given, *others: given.clone(),
}
