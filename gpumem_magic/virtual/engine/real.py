"""A virtual GPU that computes (``values=real``): every operator runs on the host too, after its memory was decided as ever.

The memory, and the sizes of all that does not depend on values, are those of the virtual GPU without values; sizes that depend on
values are exact. Operators that only CUDA has run by an equivalent (`equivalent`), or as PyTorch's own decomposition says.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from gpumem_magic.failures import is_own_failure
from gpumem_magic.private import aten as _aten
from gpumem_magic.private import overloads
from gpumem_magic.virtual.engine import kernel_rules
from gpumem_magic.virtual.engine.engine import CannotRun, Engine, any_sparse
from gpumem_magic.virtual.engine.host_calls import EQUIVALENT, HostCall, host_only, refuse_to_compute
from gpumem_magic.virtual.engine.host_memory import HostMemory
from gpumem_magic.virtual.engine.memory import Memory
from gpumem_magic.virtual.engine.random import DeviceRandom
from gpumem_magic.virtual.engine.storage import Placement, StorageTable
from gpumem_magic.virtual.engine.tensors import OTHERWISE, VirtualTensor
from gpumem_magic.virtual.engine.twins import Twins, leaves, on_host

# Operators whose rule here is made of others, which are computed one by one.
_COMPOSED = {_aten._cudnn_rnn_flatten_weight.default}
# Operators that the host has to do first, since the size of the result depends on values.
_FIRST = set(
    overloads(
        "_unique2 _unique unique_dim unique_consecutive _to_sparse _to_sparse.sparse_dim repeat_interleave.Tensor"
    )
)
# Checks, which return nothing.
_CHECKS = set(overloads("_assert_async _assert_async.msg"))


# Calls in their order, each with the host's views of its results, and where it leaves what its gradient needs.
Tape = list[tuple[HostCall, Any, Placement | None]]


class RealTable(StorageTable):
    """The storages of a device that computes: what is taken there has to fit into the host's memory, too."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory.malloc, memory.free)
        self._host = HostMemory()

    def find(self, storage: Any) -> Placement | None:
        found = super().find(storage)
        return None if found is None or found.watch() is None else found

    def adopt(self, storage: Any, device: int, node: int = 0) -> bool:
        if self.find(storage) is None:
            self._host.ask(storage.nbytes())
        return super().adopt(storage, device, node)


class RealEngine(Engine):
    """Runs operators on virtual tensors and on their twins."""

    computes = True
    seen = OTHERWISE | {torch.Tensor.__setitem__}

    def __init__(self, memory: Memory, device_count: int) -> None:
        super().__init__(memory, device_count)
        self.table = RealTable(memory)
        self.twins = Twins(
            self.table, self._strided_parts, lambda tensor: self.fake_call(_aten.is_coalesced.default, (tensor,), {})
        )
        self.random = DeviceRandom(device_count)
        # How many operators the host has run.
        self.computed = 0
        # While a CUDA graph is captured: what is to be computed when it is replayed, and where it goes.
        self.tape: Tape | None = None
        # The host's results of the operator that runs now, where they are known before the device's; which dimension of them has
        # a size that depends on values.
        self._ahead: tuple[HostCall, Any, Any] | None = None
        self._along = 0
        self._nested = False
        self._ways: dict[Any, bool] = {}
        self._follow = _nothing_to_follow

    # ---- operators

    def otherwise(self, func: Any, args: Any) -> Any:
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = _with_tensors(args[1])
            if index is not args[1]:
                # C++ would make tensors of lists on the device that it sees, where there are no values.
                if func is not torch.Tensor.__setitem__:
                    return args[0][index]
                args[0][index] = args[2]
                return False
        return None if func is torch.Tensor.__setitem__ else super().otherwise(func, args)

    def perform(self, func: Any, args: Any, kwargs: Any, device: int) -> Any:
        computed = self._ways.get(func)
        if computed is None:
            computed = self._ways[func] = _touches_values(func)
        # (What only looks at a dense tensor is made anew of a sparse one.)
        sparse = self.holds_sparse and any_sparse(args)
        if self._nested or not (computed or sparse):
            return super().perform(func, args, kwargs, device)
        self._nested = True
        try:
            if func in _FIRST or sparse:
                self._ahead = self._computed(func, args, kwargs, device)
                self._along = _dim_of_size(func, args, kwargs)
            try:
                if func is _aten.repeat_interleave.Tensor:
                    raise CannotRun
                out = super().perform(func, args, kwargs, device)
            except CannotRun:
                # What has no shape rule has a shape where it is computed.
                self._ahead = self._ahead or self._computed(func, args, kwargs, device)
                out = self._out_of(func, args, self._ahead[1], device)
            if self._ahead is not None:
                self._keep(out, *self._ahead)
            elif _has_values(func, args, out):
                self._compute(func, args, kwargs, out, device)
            return out
        finally:
            self._nested = False
            self._ahead = None

    def selected(self, operator: str, largest: int) -> int:
        if self._ahead is None:
            return super().selected(operator, largest)
        first = next(leaf for leaf in leaves(self._ahead[1]) if isinstance(leaf, torch.Tensor))
        if first.layout is not torch.strided:
            return int(first._nnz())
        return int(first.shape[self._along]) if first.dim() else 1

    # ---- values

    def host_of(self, tensor: VirtualTensor) -> torch.Tensor:
        with self.lock, host_only():
            return self.twins.view(tensor)

    def twin_of(self, storage: Any) -> Any:
        """The host's bytes of a storage on a device."""
        with self.lock, host_only():
            placement = self.table.find(storage)
            if placement is None:
                raise RuntimeError("the storage is on no device")
            return self.twins.of(placement, storage.nbytes())

    def fill(self, tensor: VirtualTensor, make: Callable[[], torch.Tensor], device: int) -> None:
        """Gives a new tensor the values of one that is made on the host."""
        with self.lock, host_only():
            call = HostCall(_Making(make), [], {}, device, None)
            if self.tape is not None:
                self.tape.append((call, self.twins.view(tensor), None))
            else:
                self.twins.keep(tensor, call.run(self.random)[0], set())

    def replay(self, tape: Tape) -> None:
        """Computes what was captured."""
        with self.lock, host_only():
            for call, written, keeper in tape:
                result, kept = call.run(self.random)
                for mine, its in zip(leaves(written), leaves(result), strict=False):
                    if isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor):
                        mine.copy_(its)
                if keeper is not None:
                    keeper.kept = kept

    def _call(self, func: Any, args: Any, kwargs: Any, device: int) -> HostCall:
        found = EQUIVALENT.get(func)
        taken = None if found is None or found.takes is None else self.twins.placement(args[found.takes])
        host_kwargs = {name: on_host(self.twins, arg) for name, arg in kwargs.items()}
        return HostCall(func, [on_host(self.twins, arg) for arg in args], host_kwargs, device, taken)

    def _computed(self, func: Any, args: Any, kwargs: Any, device: int) -> tuple[HostCall, Any, Any]:
        self.computed += 1
        with host_only():
            call = self._call(func, args, kwargs, device)
            return (call, *call.run(self.random))

    def _compute(self, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> None:
        if self.tape is not None:
            with host_only():
                call = self._call(func, args, kwargs, device)
                self.tape.append((call, on_host(self.twins, out), self._keeper(func, out)))
            return
        if kernel_rules.for_operator(func) is None:
            self._keep(out, *self._computed(func, args, kwargs, device))
            return
        try:
            self._keep(out, *self._computed(func, args, kwargs, device))
        except Exception as error:  # a library's kernel for CUDA alone
            if not is_own_failure(error):
                raise
            self.unknown.add(func._schema.name)
            with host_only():
                for leaf in leaves(out):
                    if isinstance(leaf, VirtualTensor):
                        self.twins.view(leaf).zero_()

    def _keep(self, out: Any, call: HostCall, result: Any, kept: Any) -> None:
        """Has the device's results be those of the host."""
        if not call.func._schema.returns:
            return
        outs, results = list(leaves(out)), list(leaves(result))
        given = call.storages()
        with host_only():
            same = len(outs) == len(results)
            for mine, its in zip(outs, results, strict=False):
                if isinstance(mine, VirtualTensor) and its is not None:
                    same = self.twins.keep(mine, its, given) and same
            if not same:
                refuse_to_compute(call.func, "its results have other sizes on the host")
        keeper = self._keeper(call.func, out)
        if keeper is not None:
            keeper.kept = kept

    def _keeper(self, func: Any, out: Any) -> Placement | None:
        """Where an operator leaves what its gradient needs."""
        found = EQUIVALENT.get(func)
        return None if found is None or found.gives is None else self.twins.placement(list(leaves(out))[found.gives])

    def _out_of(self, func: Any, args: Any, result: Any, device: int) -> Any:
        """The results on the device of an operator without a shape rule, in the shapes of the host's."""
        if func._schema.is_mutable:
            arguments = func._schema.arguments
            written = [arg for arg, argument in zip(args, arguments, strict=False) if argument.is_write]
            count = len(func._schema.returns)
            return None if not count else written[0] if count == 1 else tuple(written)
        if isinstance(result, (list, tuple)):
            return type(result)([self._out_of(func, args, item, device) for item in result])
        if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
            return result
        with host_only():
            meta = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device="meta")
        return self.wrap(meta, device)


class _Making:
    """What makes a new tensor, as an operator that may draw random numbers."""

    tags = (torch.Tag.nondeterministic_seeded,)

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make

    def __call__(self) -> torch.Tensor:
        return self._make()


def _with_tensors(index: Any) -> Any:
    """An index with host tensors in place of lists of numbers."""
    if type(index) is tuple:
        items = tuple(_with_tensors(item) for item in index)
        return items if any(map(operator.is_not, items, index)) else index
    if isinstance(index, (list, range)) or type(index).__name__ == "ndarray":
        numbers = list(index) if isinstance(index, range) else index
        return torch.as_tensor(numbers, dtype=None if len(index) else torch.int64)
    return index


def _nothing_to_follow(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """All values are known."""


def _touches_values(func: Any) -> bool:
    """Whether an operator makes or changes values, rather than only ways of looking at them."""
    schema = getattr(func, "_schema", None)
    if schema is None or func in _COMPOSED or torch.Tag.inplace_view in func.tags:
        return False
    views = bool(schema.returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in schema.returns
    )
    return schema.is_mutable or not views


def _dim_of_size(func: Any, args: Any, kwargs: Any) -> int:
    place = {_aten.unique_dim.default: 1, _aten.unique_consecutive.default: 3}.get(func)
    if place is None:
        return 0
    dim = args[place] if len(args) > place else kwargs.get("dim")
    return int(dim or 0)


def _has_values(func: Any, args: Any, out: Any) -> bool:
    """Whether there are values to be computed, beside what was read or written on the host."""
    if func._schema.is_mutable:
        return not (func is _aten.copy_.default and not isinstance(args[0], VirtualTensor))
    return func in _CHECKS or any(isinstance(leaf, VirtualTensor) for leaf in leaves(out))
