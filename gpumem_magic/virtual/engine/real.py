"""A virtual GPU that computes (``values=real``): every operator runs on the host too, after its memory was decided as ever.

The memory, and the sizes of all that does not depend on values, are those of the virtual GPU without values; sizes that depend on
values are exact. Operators that only CUDA has run by an equivalent (`equivalent`), or as PyTorch's own decomposition says.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

from gpumem_magic.failures import is_own_failure
from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine import kernel_rules
from gpumem_magic.virtual.engine.alike import Answer
from gpumem_magic.virtual.engine.calls import any_sparse
from gpumem_magic.virtual.engine.computing import (
    ComputingEngine,
    comes_first,
    dim_of_size,
    gives_one_tensor,
    has_values,
    runs_in_parts,
    touches_values,
)
from gpumem_magic.virtual.engine.host_calls import (
    FactoryCall,
    HostCall,
    computed,
    host_only,
    plain_function,
    refuse_to_compute,
)
from gpumem_magic.virtual.engine.host_memory import HostMemory
from gpumem_magic.virtual.engine.memory import Memory
from gpumem_magic.virtual.engine.refusals import CannotRun
from gpumem_magic.virtual.engine.storage import Placement, StorageTable
from gpumem_magic.virtual.engine.tensors import VirtualTensor
from gpumem_magic.virtual.engine.twins import leaves, on_host
from gpumem_magic.virtual.engine.values import Known

# Calls in their order, each with the host's views of its results, and where it leaves what its gradient needs.
Tape = list[tuple[HostCall, Any, Placement | None]]


class RealTable(StorageTable):
    """The storages of a device that computes: what is taken there has to fit into the host's memory, too."""

    def __init__(self, memory: Memory) -> None:
        host = HostMemory()

        def malloc(device: int, nbytes: int) -> int:
            host.ask(nbytes)
            return memory.malloc(device, nbytes)

        super().__init__(malloc, memory.free)

    def find(self, storage: Any) -> Placement | None:
        found = self._placements.get(storage._cdata)
        return None if found is None or found.watch() is None else found


class RealEngine(ComputingEngine):
    """Runs operators on virtual tensors and on their twins."""

    computes = True

    def __init__(self, memory: Memory, device_count: int) -> None:
        super().__init__(memory, device_count, RealTable(memory))
        # What is to be computed when a captured graph is replayed, and where it goes.
        self.tape: Tape | None = None

    # ---- operators

    def perform(self, func: Any, args: Any, kwargs: Any, device: int, answer: Answer | None = None) -> Any:
        way = self._ways.get(id(func))
        if way is None:
            way = self._ways[id(func)] = self._way_of(func)
        touches, first, function, met = way
        if function is not None and not self._nested and self.tape is None:
            found = self.again(met, func, args, kwargs, device, answer)
            if found is not None:
                with host_only():
                    self._compute_again(function, args, kwargs, *found)
                return found[0]
        # (What only looks at a dense tensor is made anew of a sparse one.)
        sparse = self.holds_sparse and any_sparse(args)
        in_parts = touches and torch.is_inference_mode_enabled() and runs_in_parts(func)
        if self._nested or in_parts or not (touches or sparse):
            return super().perform(func, args, kwargs, device)
        self._nested = True
        try:
            if sparse or first:
                self._ahead = self._computed(func, args, kwargs, device)
                self._along = dim_of_size(func, args, kwargs)
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
            elif has_values(func, args, out):
                self._compute(func, args, kwargs, out, device)
            return out
        finally:
            self._nested = False
            self._ahead = None

    def _way_of(self, func: Any) -> tuple[Any, ...]:
        """Whether an operator touches values; whether the host runs it first; what the host calls for it where all else follows
        from how the arguments look; and what was met of it."""
        touches, first = touches_values(func), comes_first(func)
        met = self._met.get(id(func)) or self._meet(func)
        again = met.again and touches and not first and gives_one_tensor(func)
        return touches, first, plain_function(func) if again else None, met

    # ---- values

    def host_of(self, tensor: VirtualTensor) -> torch.Tensor:
        with self.lock, host_only():
            return self.twins.view(tensor)

    def known(self, tensor: Any) -> Known:
        return Known(self.host_of(tensor), True)

    def twin_of(self, storage: Any) -> Any:
        """The host's bytes of a storage on a device."""
        with self.lock, host_only():
            placement = self.table.find(storage)
            if placement is None:
                raise RuntimeError("the storage is on no device")
            return self.twins.of(placement, storage.nbytes())

    def fill(self, tensor: VirtualTensor, call: FactoryCall, device: int) -> None:
        """Gives a new tensor the values of one that is made on the host."""
        with self.lock, host_only():
            made = HostCall(call, [], {}, device, None)
            if self.tape is not None:
                self.tape.append((made, self.twins.view(tensor), None))
            else:
                self.twins.keep(tensor, made.run(self.random)[0], ())

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

    def _compute(self, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> None:
        if self.tape is not None:
            with host_only():
                call = self._call(func, args, kwargs, device)
                self.tape.append((call, on_host(self.twins, out), self._keeper(func, out)))
            return
        if kernel_rules.for_operator(func) is None:
            with host_only():
                found = self._run(func, args, kwargs, device)
                # What was written in place lies in the twin.
                if not (args and out is args[0] and found[1] is found[0].args[0] and out.layout is torch.strided):
                    self._put(out, *found)
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

    def _compute_again(self, func: Any, args: Any, kwargs: Any, out: VirtualTensor, answer: Answer) -> None:
        """Most operators: one result, of what the host's function gives. Inside `host_only`."""
        self.computed += 1
        twins, named = self.twins, {}
        # (Tensors that were met are dense, and neither negated nor conjugated.)
        hosts = [twins.plainly(arg) if type(arg) is VirtualTensor else on_host(twins, arg) for arg in args]
        if kwargs:
            named = {name: on_host(twins, arg) for name, arg in kwargs.items()}
        result = func(*hosts, **named) if isinstance(func, FunctionType) else computed(func, hosts, named)
        if hosts and result is hosts[0] and out is args[0]:
            # What was written in place lies in the twin.
            return
        if answer.lies_as(result):
            self.twins.take(out, result)
            return
        given = (*hosts, *named.values()) if named else hosts
        if type(result) is not torch.Tensor or not self.twins.keep(out, result, given):
            refuse_to_compute(func, "its results have other sizes on the host")
        answer.as_on_host = self.twins.has_taken(out, result)
