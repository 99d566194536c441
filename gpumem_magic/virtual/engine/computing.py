"""What engines that know values share: operators run on the host's twins of tensors, beside the emulated memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpumem_magic.looks.tensors import no_functions
from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine import kernel_rules
from gpumem_magic.virtual.engine.calls import is_made_of_others
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.host_calls import EQUIVALENT, OF_SPARSE, HostCall, host_keys, refuse_to_compute
from gpumem_magic.virtual.engine.memory import Memory
from gpumem_magic.virtual.engine.mismatch import written_arguments
from gpumem_magic.virtual.engine.random import DeviceRandom
from gpumem_magic.virtual.engine.refusals import refuse_to_hold
from gpumem_magic.virtual.engine.rules import COMPRESSED, SPARSE, SPECIAL
from gpumem_magic.virtual.engine.storage import Placement, StorageTable
from gpumem_magic.virtual.engine.tensors import VirtualTensor, is_ordinary
from gpumem_magic.virtual.engine.twins import Twins, leaves, on_host

# Operators whose rule here is made of others, which are computed one by one.
_COMPOSED = {_aten._cudnn_rnn_flatten_weight.default}
# Operators that the host has to do first, since the size of the result depends on values.
FIRST = set(
    overloads(
        "_unique2 _unique unique_dim unique_consecutive _to_sparse _to_sparse.sparse_dim repeat_interleave.Tensor"
        " _to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc"
    )
)
# The same of libraries.
_FIRST_OF_LIBRARIES = {"torchvision::nms"}
# Checks, which return nothing.
_CHECKS = set(overloads("_assert_async _assert_async.msg _linalg_check_errors"))


def written_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that the operator writes to."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    return list(leaves(list(written_arguments(schema, args, kwargs))))


class ComputingEngine(Engine):
    """Runs operators on virtual tensors, and on those of their twins that it keeps."""

    def __init__(self, memory: Memory, device_count: int, table: StorageTable) -> None:
        super().__init__(memory, device_count)
        self.table = table
        self.twins = Twins(
            self.table, self._strided_parts, lambda tensor: self.fake_call(_aten.is_coalesced.default, (tensor,), {})
        )
        self.random = DeviceRandom(device_count)
        # How many operators the host has run.
        self.computed = 0
        # The host's results of the operator that runs now, where they are known before the device's; which dimension of them has
        # a size that depends on values.
        self._ahead: tuple[HostCall, Any, Any] | None = None
        self._along = 0
        # While a CUDA graph is captured: what its replays do to values.
        self.tape: list[Any] | None = None
        self._nested = False
        # By the operator's `id`, with the operator.
        self._ways: dict[int, Any] = {}

    def otherwise(self, func: Any, args: Any) -> Any:
        """``tensor[index]`` and ``tensor[index] = value`` where lists of numbers are in the index: C++ makes tensors of them on
        the device (`sequenceToVariable` in python_variable_indexing.cpp), and sees one here that has no values. None where it
        goes on; False after an assignment."""
        assigns = func is torch.Tensor.__setitem__
        if not assigns and func is not torch.Tensor.__getitem__:
            return super().otherwise(func, args)
        index = args[1]
        if not _is_without_lists(index):
            index = with_tensors(index, args[0].device)
        elif assigns and self.assigned(*args):
            return False
        if index is args[1]:
            return super().otherwise(func, args)
        if not assigns:
            return args[0][index]
        args[0][index] = args[2]
        return False

    def assigned(self, tensor: Any, index: Any, value: Any) -> bool:
        """Whether ``tensor[index] = value`` is done by now, for an index without lists."""
        return False

    def selected(
        self, operator: str, largest: int, likely: int | None = None, inside: bool = False, shape: Sequence[int] = ()
    ) -> int:
        if self._ahead is None:
            return super().selected(operator, largest, likely, inside, shape)
        first = next(leaf for leaf in leaves(self._ahead[1]) if isinstance(leaf, torch.Tensor))
        if first.layout is not torch.strided:
            return int(first._nnz())
        if operator == "coalesce":
            # (On the way to a dense result, which does not tell.)
            return largest
        return int(first.shape[self._along]) if first.dim() else 1

    def twin_of(self, storage: Any) -> Any:
        """The host's bytes of a storage on a device; None where they are not known."""
        raise NotImplementedError

    def replay(self, tape: list[Any]) -> None:
        """Does to values what was captured."""
        raise NotImplementedError

    def _call(self, func: Any, args: Any, kwargs: Any, device: int) -> HostCall:
        found = EQUIVALENT.get(func)
        taken = None if found is None or found.takes is None else self.twins.placement(args[found.takes])
        hosts, named = self._hosts(args, kwargs)
        if self.holds_sparse and func in OF_SPARSE and all(getattr(arg, "is_sparse", False) for arg in hosts[:2]):
            func = OF_SPARSE[func]
        return HostCall(func, hosts, named, device, taken)

    def _hosts(self, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        """The arguments on the host. To be called inside `host_keys`."""
        twins = self.twins
        if kwargs:
            kwargs = {name: on_host(twins, arg) for name, arg in kwargs.items()}
        return [on_host(twins, arg) for arg in args], kwargs

    def _computed(self, func: Any, args: Any, kwargs: Any, device: int) -> tuple[HostCall, Any, Any]:
        with no_functions(), host_keys():
            return self._run(func, args, kwargs, device)

    def _run(self, func: Any, args: Any, kwargs: Any, device: int) -> tuple[HostCall, Any, Any]:
        """The same, inside `host_keys`."""
        self.computed += 1
        self.table.gone.clear()
        call = self._call(func, args, kwargs, device)
        return (call, *call.run(self.random))

    def _keep(self, out: Any, call: HostCall, result: Any, kept: Any) -> None:
        """Has the device's results be those of the host."""
        with no_functions(), host_keys():
            self._put(out, call, result, kept)

    def _put(self, out: Any, call: HostCall, result: Any, kept: Any) -> None:
        """The same, inside `host_keys`."""
        if out is None:
            return
        given = (*call.args, *call.kwargs.values()) if call.kwargs else call.args
        if type(out) is VirtualTensor and type(result) is torch.Tensor:
            same = self.twins.keep(out, result, given)
        else:
            outs, results = leaves(out), leaves(result)
            same = len(outs) == len(results)
            for mine, its in zip(outs, results, strict=False):
                # (A trace may have fake tensors among real ones, and reads no values: `flex_attention`'s of its score function.)
                if isinstance(mine, VirtualTensor) and its is not None and not isinstance(its, FakeTensor):
                    same = self.twins.keep(mine, its, given) and same
        if not same:
            refuse_to_compute(call.func, "its results have other sizes on the host")
        keeper = None if kept is None else self._keeper(call.func, out)
        if keeper is not None:
            keeper.kept = kept

    def _keeper(self, func: Any, out: Any) -> Placement | None:
        """Where an operator leaves what its gradient needs."""
        found = EQUIVALENT.get(func)
        return None if found is None or found.gives is None else self.twins.placement(leaves(out)[found.gives])

    def _out_of(self, func: Any, args: Any, kwargs: Any, result: Any, device: int) -> Any:
        """The results on the device of an operator without a shape rule, in the shapes of the host's."""
        if func._schema.is_mutable:
            written = written_by(func, args, kwargs)
            for one in written:
                # (Another tensor takes the place of a sparse one's parts, of which its rule would know.)
                if isinstance(one, torch.Tensor) and one.layout is not torch.strided:
                    refuse_to_hold(
                        f"what `{func}` writes to a tensor with layout {one.layout}", "dense (padded) tensors"
                    )
            count = len(func._schema.returns)
            return None if not count else written[0] if count == 1 else tuple(written)
        if isinstance(result, (list, tuple)):
            return type(result)([self._out_of(func, args, kwargs, item, device) for item in result])
        if not isinstance(result, torch.Tensor):
            return result
        if result.layout is not torch.strided:
            refuse_to_hold(f"what `{func}` makes, a tensor with layout {result.layout}", "dense (padded) tensors")
        with no_functions(), host_keys():
            meta = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device="meta")
        return self.wrap(meta, device)


def touches_values(func: Any) -> bool:
    """Whether an operator makes or changes values, rather than only ways of looking at them."""
    schema = getattr(func, "_schema", None)
    if schema is None or func in _COMPOSED or torch.Tag.inplace_view in func.tags:
        return False
    views = bool(schema.returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in schema.returns
    )
    return schema.is_mutable or not views


def runs_in_parts(func: Any, sparse: bool = False) -> bool:
    """Whether an operator, which inference mode hands over whole, is run as those that it is made of. sparse: on such tensors."""
    if sparse and (func in SPARSE or func in COMPRESSED):
        return False
    rule = func in SPECIAL or kernel_rules.for_operator(func) is not None
    return not rule and is_made_of_others(func)


def gives_one_tensor(func: Any) -> bool:
    returns = func._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def gives_tensors(func: Any) -> bool:
    """Nothing else, and at least one."""
    returns = func._schema.returns
    return bool(returns) and all(str(one.type) in ("Tensor", "Tensor[]", "List[Tensor]") for one in returns)


def comes_first(func: Any) -> bool:
    """Whether the host runs an operator before the device does, for the size of its result."""
    return func in FIRST or func._schema.name in _FIRST_OF_LIBRARIES


def dim_of_size(func: Any, args: Any, kwargs: Any) -> int:
    place = {_aten.unique_dim.default: 1, _aten.unique_consecutive.default: 3}.get(func)
    if place is None:
        return 0
    dim = args[place] if len(args) > place else kwargs.get("dim")
    return int(dim or 0)


def has_values(func: Any, args: Any, out: Any) -> bool:
    """Whether there are values to be computed, beside what was read or written on the host."""
    if func._schema.is_mutable:
        return not (func is _aten.copy_.default and not isinstance(args[0], VirtualTensor))
    return (
        isinstance(out, VirtualTensor)
        or func in _CHECKS
        # (What processes send each other writes into tensors, which its schema does not say.)
        or func.namespace == "c10d"
        or any(isinstance(leaf, VirtualTensor) for leaf in leaves(out))
    )


# An index that holds no list of numbers.
_NO_LISTS = frozenset((int, slice, type(None), type(Ellipsis)))
# A list with one of these is an index for several dimensions, if it is short enough.
_MORE_THAN_NUMBERS = (torch.Tensor, list, tuple, range, slice, type(None), type(Ellipsis))
_MOST_DIMS = 32


def _is_without_lists(index: Any) -> bool:
    """Whether that is to be seen at once."""
    kind = type(index)
    if kind in _NO_LISTS or is_ordinary(index):
        return True
    return kind is tuple and all(type(one) in _NO_LISTS or is_ordinary(one) for one in index)


def with_tensors(index: Any, device: torch.device) -> Any:
    """An index with tensors in place of lists of numbers, and of tuples of them where it is a tuple itself."""
    if type(index) is list and len(index) < _MOST_DIMS and any(isinstance(one, _MORE_THAN_NUMBERS) for one in index):
        # As `treatSequenceAsTuple` in PyTorch's python_variable_indexing.cpp has it (tried with 2.13).
        return tuple(_as_tensor(item, device) for item in index)
    if type(index) is not tuple:
        return _as_tensor(index, device)
    items = tuple(_as_tensor(item, device) for item in index)
    return items if any(map(operator.is_not, items, index)) else index


def is_one_place(index: Any) -> bool:
    """Whether an index is for one piece of a tensor, which is a view of it."""
    kind = type(index)
    return kind in _NO_LISTS or (kind is tuple and all(type(one) in _NO_LISTS for one in index))


def _as_tensor(index: Any, device: torch.device) -> Any:
    if isinstance(index, (list, tuple, range)) or type(index).__name__ == "ndarray":
        numbers = list(index) if isinstance(index, range) else index
        return torch.as_tensor(numbers, dtype=None if len(index) else torch.int64, device=device)
    return index
