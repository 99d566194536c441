"""A virtual GPU that computes (``values=real``): every operator runs on the host too, after its memory was decided as ever.

The memory, and the sizes of all that does not depend on values, are those of the virtual GPU without values; sizes that depend on
values are exact. Operators that only CUDA has run by an equivalent (`equivalent`), or as PyTorch's own decomposition says.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch._C import _len_torch_dispatch_stack as _modes
from torch.autograd.graph import increment_version

from gpumem_magic.failures import is_own_failure
from gpumem_magic.looks.tensors import no_functions
from gpumem_magic.private import aten as _aten
from gpumem_magic.virtual.engine import deterministic, kernel_rules, views_anew
from gpumem_magic.virtual.engine.alike import Answer
from gpumem_magic.virtual.engine.calls import node_now, sparse_layout, with_size
from gpumem_magic.virtual.engine.computing import (
    ComputingEngine,
    comes_first,
    dim_of_size,
    gives_one_tensor,
    gives_tensors,
    has_values,
    is_one_place,
    runs_in_parts,
    touches_values,
)
from gpumem_magic.virtual.engine.functions import FunctionCalls, Heard, HostCopy, Shortcut, ViewCall, may_write, spread
from gpumem_magic.virtual.engine.host_calls import (
    FactoryCall,
    HostCall,
    computed,
    host_keys,
    lacks_kernel,
    plain_function,
    refuse_to_compute,
)
from gpumem_magic.virtual.engine.host_memory import HostMemory, HostMemoryFull
from gpumem_magic.virtual.engine.memory import Memory
from gpumem_magic.virtual.engine.mismatch import refuse_without_kernel
from gpumem_magic.virtual.engine.modes import DEVICE_QUERY, META, STATE, cuda, pushed, seen_by_others, undisturbed
from gpumem_magic.virtual.engine.refusals import CannotRun
from gpumem_magic.virtual.engine.rules import OUTSIDE_BACKWARD, Met
from gpumem_magic.virtual.engine.sequences import Handed, Made, OperatorSequence, OperatorStep, SequenceListener
from gpumem_magic.virtual.engine.storage import Placement, StorageTable
from gpumem_magic.virtual.engine.tensors import VirtualTensor, is_ordinary
from gpumem_magic.virtual.engine.twins import leaves, on_host
from gpumem_magic.virtual.engine.values import Known

_TO_COPY = _aten._to_copy.default
_NUMBERS = frozenset((int, float, bool))
_FILL, _COPY = _aten.fill_.Tensor, _aten.copy_.default
_READ = _aten._local_scalar_dense.default
_CPU = torch.device("cpu")
# C++'s own, past what is put in its place while a device is on.
_empty_strided = torch._C._VariableFunctions.empty_strided
_push, _pop = torch._C._push_on_torch_dispatch_stack, torch._C._pop_torch_dispatch_stack


class _Handling(NamedTuple):
    """Whether an operator touches values; whether the host runs it first; what the host calls for it where all else follows from
    how the arguments look, and whether that gives one tensor; what was met of it; and whether all that it does is the same for
    arguments that look alike, so that it may pass by what asks for it."""

    touches: bool
    first: bool
    function: Any
    gives_one: bool
    met: Met
    quick: bool


# Calls in their order, each with the host's views of its results, and where it leaves what its gradient needs.
Tape = list[tuple[HostCall, Any, Placement | None]]


class RealTable(StorageTable):
    """The storages of a device that computes: what is taken there has to fit into the host's memory, too."""

    def __init__(self, memory: Memory) -> None:
        host = HostMemory()
        take = memory.malloc

        def malloc(device: int, nbytes: int) -> int:
            host.asked += nbytes
            if host.asked >= host.enough:
                try:
                    host.look(nbytes)
                except HostMemoryFull:
                    # What the card has no room for either ends as on a card: programs look for the size that it has room for.
                    memory.free(device, take(device, nbytes))
                    raise
            return take(device, nbytes)

        super().__init__(malloc, memory.free)

    def find(self, storage: Any) -> Placement | None:
        found = self._placements.get(storage._cdata)
        return None if found is None or found.watch() is None else found


class RealEngine(ComputingEngine):
    """Runs operators on virtual tensors and on their twins."""

    computes = True

    def __init__(self, memory: Memory, device_count: int) -> None:
        super().__init__(memory, device_count, RealTable(memory))
        self.functions = FunctionCalls(self.alike)
        # What is to be computed when a captured graph is replayed, and where it goes.
        self.tape: Tape | None = None

    # ---- operators

    def at_once(self, func: Any, args: Any, kwargs: Any) -> Any:
        functions = self.functions
        if id(func) in functions.reading and len(args) == 1 and not kwargs:
            found = self._read_at_once(func, args[0])
            if found is not NotImplemented:
                return found
        with no_functions():
            looks = functions.looks(func, args, kwargs)
            if looks is None:
                return NotImplemented
            shortcut = functions.found(looks, args)
            if shortcut is NotImplemented:
                return NotImplemented
            if shortcut is not None:
                with self.uninterrupted, self.lock:
                    if isinstance(shortcut, Shortcut):
                        return self._shortly(shortcut, func, args, kwargs)
                    if isinstance(shortcut, ViewCall):
                        return self._viewed(shortcut, func, args, kwargs)
                    if isinstance(shortcut, OperatorSequence):
                        return self._one_by_one(shortcut, args, kwargs)
                    return self._copied(shortcut, args)
        with self.uninterrupted:
            return self._listened(looks, func, args, kwargs or {})

    def sent(self, host: torch.Tensor, device: int) -> Any:
        """As `_to_copy` has it of a tensor that lies plainly."""
        if STATE.depth or STATE.heard is not None or not undisturbed() or seen_by_others():
            return NotImplemented
        with self.uninterrupted, self.lock, no_functions():
            if not self._is_free() or self._under_way is not None or self.table.holds_overwritten:
                return NotImplemented
            if type(host) is not torch.Tensor or host.is_quantized or not self.alike.is_plain_host(host):
                return NotImplemented
            if not host.is_contiguous():
                return NotImplemented
            if self.memory.is_recorded(device) or kernel_rules.for_operator(_TO_COPY) is not None:
                return NotImplemented
            self._begin(device)
            meta = _empty_strided(host.size(), host.stride(), dtype=host.dtype, device=META)
            made = self.alike.around(meta, cuda(device))
            self.table.place(made.untyped_storage(), device, node_now())
            self.computed += 1
            self.twins.keep(made, host.clone(), ())
            return made

    def _read_at_once(self, function: Any, tensor: Any) -> Any:
        """The number that a function reads from the device; NotImplemented where more than that may count."""
        if STATE.depth or not undisturbed() or seen_by_others():
            return NotImplemented
        with self.uninterrupted, self.lock, no_functions():
            if not self._is_free() or self.table.holds_overwritten:
                return NotImplemented
            if tensor.fake_mode is not self.fake or tensor.layout is not torch.strided:
                return NotImplemented
            self._begin(tensor.fake_device.index)
            host = self.twins.view(tensor)
            # (PyTorch warns of numbers that autograd would not follow.)
            return function(host.detach().requires_grad_() if tensor.requires_grad else host)

    def _copied(self, copy: HostCopy, args: Any) -> Any:
        """What a function copies to the host; NotImplemented as for `_shortly`."""
        if not self._is_free() or self.table.holds_overwritten or self.memory.is_recorded(copy.device):
            return NotImplemented
        if kernel_rules.rules_of_users and kernel_rules.for_operator(copy.func) is not None:
            return NotImplemented
        self._begin(copy.device)
        host = _empty_strided(copy.size, copy.stride, dtype=copy.dtype, device=_CPU)
        return host.copy_(self.twins.plainly(args[copy.source]))

    def _viewed(self, view: ViewCall, function: Any, args: Any, kwargs: Any) -> Any:
        """A view, which C++ is given when it asks; NotImplemented as for `_shortly`."""
        if not self._is_free() or self.table.holds_overwritten or self.memory.is_recorded(view.device):
            return NotImplemented
        if kernel_rules.rules_of_users and kernel_rules.for_operator(view.func) is not None:
            return NotImplemented
        self._begin(view.device)
        STATE.given = view.func, self.alike.looking_at(view.made, args, kwargs)
        # (`pushed` written out: no other mode is on, and functions of subclasses are off.)
        _push(self.mode)
        try:
            return function(*args, **(kwargs or {}))
        finally:
            _pop(None)
            STATE.given = None

    def assigned(self, tensor: Any, index: Any, value: Any) -> bool:
        """A number, or a tensor of the same type on the same device, that is written to one piece of a tensor takes nothing: what
        runs are views, and `fill_` or `copy_`. Looks are not learned, since the places are others at each call."""
        if STATE.depth or STATE.heard is not None or not (is_ordinary(tensor) and is_one_place(index)):
            return False
        number = type(value) in _NUMBERS
        if not (number or is_ordinary(value)) or not undisturbed() or seen_by_others():
            return False
        operator = _FILL if number else _COPY
        with self.uninterrupted, self.lock, no_functions():
            looks: list[Any] = []
            if not self.alike.describe(looks, (tensor, value), False, torch.is_grad_enabled()):
                return False
            device = tensor.fake_device
            if not number and (value.dtype is not tensor.dtype or value.fake_device != device):
                return False
            if not self._is_free() or self._under_way is not None or self.table.holds_overwritten:
                return False
            if kernel_rules.rules_of_users or STATE.backward or not may_write(tensor):
                return False
            if self.memory.is_recorded(device.index) or self.memory.takes_after(operator):
                return False
            twins = self.twins
            self._begin(device.index)
            self.computed += 1
            twins.plainly(tensor)[index] = value if number else twins.plainly(value)
            self._written(tensor, True)
            return True

    def _is_free(self) -> bool:
        """Whether what runs now is the program's own call, and is done when it is called."""
        if deterministic.are_asked_for():
            # Some is refused.
            return False
        return not (self.closed_because or self._nested or self.tape is not None or self.told_of_waiting)

    def _begin(self, device: int) -> None:
        """What is done before each operator."""
        if self.reads.counts:
            self.reads.note_caught()
        self.table.drain()
        STATE.last_device = device

    def _shortly(self, shortcut: Shortcut, function: Any, args: Any, kwargs: Any) -> Any:
        """What a function gives by what is known of it; NotImplemented where that is of no use now. Inside `no_functions`."""
        answer, func, writes = shortcut.answer, shortcut.func, shortcut.writes
        met = self._met[id(func)]
        if not self._is_free():
            return NotImplemented
        if kernel_rules.rules_of_users and kernel_rules.for_operator(func) is not None:
            return NotImplemented
        if writes and not may_write(args[0]):
            return NotImplemented
        if self._under_way is not None or self.table.holds_overwritten or self.memory.is_recorded(answer.device):
            out: Any = self._handle(*shortcut.operator(args, kwargs), answer.device, answer)
            if shortcut.kind is not None:
                return shortcut.kind(out)
            return self._written(out, shortcut.silently) if writes else out
        call: Any = None
        if met.asks or met.takes_after or (met.beside is not None and answer.kernels is None):
            call = shortcut.operator(args, kwargs)
            if met.asks and met.plain is not None and not met.plain(self, call[1], call[2]):
                return NotImplemented
        out, placement = self._anew(met, answer, args, kwargs, call)
        if shortcut.kind is not None:
            operator = partial(shortcut.operator, args, kwargs)
            self._compute_several(
                function if shortcut.on_host else None, args, kwargs, out, answer, placement, operator
            )
            return shortcut.kind(out)
        if not shortcut.on_host or not self._compute_again(function, args, kwargs, out, answer, placement):
            func, args, kwargs = call or shortcut.operator(args, kwargs)
            self._operate_again(func, args, kwargs, out, answer)
        return self._written(out, shortcut.silently) if writes else out

    def _anew(self, met: Met, answer: Answer, args: Any, kwargs: Any, call: Any) -> tuple[Any, Any]:
        """What an operator gives for arguments that look so, and where that was placed if it is new. What it takes was taken.

        args, kwargs: the operator's, or those of a function whose results are new or its first argument. call: (operator, its
        arguments, its named ones), where a rule or a library asks for them."""
        device, table, kernels = answer.device, self.table, answer.kernels
        self._begin(device)
        out = self.alike.given(answer, args, kwargs)
        placement: Any = None
        if answer.is_new and met.allocates:
            node = node_now() if STATE.backward else 0
            if answer.kind is None:
                placement = table.place(out.untyped_storage(), device, node)
            else:
                placement = [table.place(one.untyped_storage(), device, node) for one in out]
        if met.takes_after or (met.beside is not None and kernels is None):
            func, given, named = call
            self._beside(met, func, given, named, out, device, answer)
        elif kernels is not None and (kernels.held or kernels.each):
            self.run_kernels(kernels, device)
        return out, placement

    def _written(self, tensor: VirtualTensor, silently: bool) -> VirtualTensor | None:
        """Autograd has to know of it. silently: nothing is returned."""
        if not tensor.is_inference():
            increment_version(tensor)
        return None if silently else tensor

    def _listened(self, looks: tuple[Any, ...], func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function, and keeps what it came down to."""
        before = STATE.heard, STATE.listener
        heard = STATE.heard = []
        given = (*args, *kwargs.values())
        # (With another number a function is met anew, as an optimizer's are in each step.)
        listener = None if self.functions.is_single(func) else SequenceListener(self, spread(given))
        STATE.listener = listener
        try:
            with pushed(self.mode):
                out = func(*args, **kwargs)
        finally:
            STATE.heard, STATE.listener = before
        if len(heard) == 1:
            heard[0] = heard[0].over()
        way = self._ways.get(id(heard[0].func)) if len(heard) == 1 else None
        with no_functions():
            if len(heard) == 1 and heard[0].func is _READ and not isinstance(out, torch.Tensor):
                self.functions.reading[id(func)] = func
            plain, views = way is not None and self._is_plain(way, heard[0]), way is not None and _only_looks(way)
            several = None
            if listener is not None and not views:
                several = listener.operators(given[0] if given else None, out)
            self.functions.learn(looks, func, args, kwargs, heard, plain, views, out, several)
        return out

    def _one_by_one(self, operators: OperatorSequence, args: Any, kwargs: Any) -> Any:
        """What a function gives whose operators are known; NotImplemented as for `_shortly`. Inside `no_functions`."""
        device, table, twins = operators.device, self.table, self.twins
        if not self._is_free() or STATE.backward or kernel_rules.rules_of_users:
            return NotImplemented
        if self._under_way is not None or table.holds_overwritten or self.memory.is_recorded(device):
            return NotImplemented
        given = spread((*args, *kwargs.values()) if kwargs else args)
        if operators.writes and not may_write(given[0]):
            return NotImplemented
        if any(step.answer.kernels is None and self._met[id(step.func)].beside is not None for step in operators.steps):
            return NotImplemented
        self._begin(device)
        hosts = [on_host(twins, one) if isinstance(one, torch.Tensor) else None for one in given]
        made: list[Any] = [None] * operators.made
        taken: dict[int, int] = {}
        out: Any = None
        try:
            for step in operators.steps:
                for number in step.gone:
                    made[number] = None
                    address = taken.pop(number)
                    if address:
                        table.free(device, address)
                for number, nbytes in step.new:
                    if number == operators.memory:
                        out = self.alike.given_one(step.answer, step.results.index(number))
                        table.place(out.untyped_storage(), device, 0)
                    else:
                        taken[number] = table.take(device, nbytes) if nbytes else 0
                self._run_step(step, hosts, made, device)
        finally:
            for number in operators.left:
                if taken.get(number):
                    table.free(device, taken[number])
        if out is None:
            for _ in range(operators.writes):
                self._written(given[0], True)
            return None if operators.silently else given[0]
        result = made[operators.out or 0]
        if operators.like is not None:
            out = self.alike.on_memory_of(out, *operators.like)
        if not twins.keep(out, result, hosts):
            refuse_to_compute(operators.steps[-1].func, "its results have other sizes on the host")
        return out

    def _run_step(self, step: OperatorStep, hosts: Sequence[Any], made: list[Any], device: int) -> None:
        """An operator of several: what its kernels take, and its values."""

        def there(arg: Any) -> Any:
            kind = type(arg)
            if kind is Made:
                return made[arg.number]
            if kind is Handed:
                return hosts[arg.number]
            return kind([there(one) for one in arg]) if kind is list or kind is tuple else arg

        args = [there(arg) for arg in step.args]
        kwargs = {name: there(arg) for name, arg in step.kwargs.items()}
        kernels = step.answer.kernels
        if kernels is not None and (kernels.held or kernels.each):
            self.run_kernels(kernels, device)
        if self._met[id(step.func)].takes_after:
            self.memory.after_operator(step.func, args, device)
        self.computed += 1
        try:
            result = step.function(*args, **kwargs)
        except RuntimeError as error:
            if not lacks_kernel(error):
                raise
            result = computed(step.func, args, kwargs)
        results = (result,) if step.answer.kind is None else result
        for place, number in enumerate(step.results):
            if number is not None:
                made[number] = _laid_as(results[place], step.answer.made[place])

    def again_on_host(self, func: Any, args: Any, kwargs: Any, answer: Answer) -> Any:
        """What the host calls for an operator whose memory follows from how its arguments look; None for others."""
        way = self._ways.get(id(func))
        if way is None or not way.met.again or way.first or id(func) in self._writing_each:
            return None
        met = way.met
        if met.plain is not None and not met.plain(self, args, kwargs):
            return None
        if (met.asks and func not in OUTSIDE_BACKWARD) or (met.beside is not None and answer.kernels is None):
            return None
        function = way.function if way.touches else func if _only_looks(way) else None
        return function if function is None or isinstance(function, FunctionType) else function._op

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        listener = STATE.listener
        if listener is not None and func is not DEVICE_QUERY:
            # (What a rule runs is not heard.)
            STATE.listener = None
            try:
                out = super().handle(func, types, args, kwargs)
            finally:
                STATE.listener = listener
            with no_functions():
                listener.heard(func, args, kwargs, out)
            return out
        way = self._ways.get(id(func))
        if way is not None and way.quick and STATE.heard is None:
            out = self._met_again(way, func, args, kwargs)
            if out is not NotImplemented:
                return out
        return super().handle(func, types, args, kwargs)

    def _met_again(self, way: _Handling, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator gives for arguments that look like others before them; NotImplemented as for `_shortly`."""
        if STATE.depth or _modes() or seen_by_others():
            return NotImplemented
        with self.uninterrupted, self.lock, no_functions():
            if not self._is_free() or self._under_way is not None or self.table.holds_overwritten:
                return NotImplemented
            met = self._met[id(func)]
            if kernel_rules.for_operator(func) is not None:
                return NotImplemented
            if met.plain is not None and not met.plain(self, args, kwargs):
                return NotImplemented
            answer = self.alike.found(self.alike.looks(func, args, kwargs))
            if answer is None or self.memory.is_recorded(answer.device):
                return NotImplemented
            if answer.kind is not None and way.touches and not answer.is_new:
                return NotImplemented
            if met.writes and is_ordinary(args[0]):
                views_anew.note(args[0])
            out, placement = self._anew(met, answer, args, kwargs, (func, args, kwargs))
            if not way.touches:
                return out
            if undisturbed():
                self._operate_again(func, args, kwargs, out, answer, placement)
                return out
        # (Autocast is on, which would see it.)
        with self.uninterrupted, self.lock, no_functions(), host_keys():
            self._operate_again(func, args, kwargs, out, answer, placement)
        return out

    def _is_plain(self, way: _Handling, heard: Heard) -> bool:
        """Whether what was heard may be run anew past C++ and its rule."""
        if way.function is None or way.met.plain is None:
            return way.function is not None
        return way.met.plain(self, heard.args, heard.kwargs)

    def perform(self, func: Any, args: Any, kwargs: Any, device: int, answer: Answer | None = None) -> Any:
        way = self._ways.get(id(func)) or self._way_of(func)
        touches, first, function, gives_one, met, _ = way
        if function is not None and gives_one and not self._nested and self.tape is None:
            found = self.again(met, func, args, kwargs, device, answer)
            if found is not None:
                if met.writes and is_ordinary(args[0]):
                    views_anew.note(args[0])
                with no_functions(), no_functions() if undisturbed() else host_keys():
                    self._operate_again(func, args, kwargs, found[0], found[1])
                return found[0]
        # (What only looks at a dense tensor is made anew of a sparse one.)
        sparse = self.holds_sparse and sparse_layout(args) is not None
        in_parts = (touches or sparse) and torch.is_inference_mode_enabled() and runs_in_parts(func, sparse)
        if self._nested or in_parts or not (touches or sparse):
            return super().perform(func, args, kwargs, device)
        if met.body is not None and self._met[id(func)].body is not None:
            # What a program wrote in Python is computed step by step, unless it turns out to need the card.
            out = super().perform(func, args, kwargs, device)
            if self._met[id(func)].body is None and has_values(func, args, out):
                self._compute(func, args, kwargs, out, device)
            return out
        self._nested = True
        try:
            if sparse or first:
                refuse_without_kernel(func)
                self._ahead = self._computed(func, args, kwargs, device)
                self._along = dim_of_size(func, args, kwargs)
            try:
                if func is _aten.repeat_interleave.Tensor:
                    self._ahead = self._ahead or self._computed(func, args, kwargs, device)
                    kwargs = with_size(kwargs, self._ahead[1].shape[0])
                out = super().perform(func, args, kwargs, device)
            except CannotRun:
                # What has no shape rule has a shape where it is computed.
                self._ahead = self._ahead or self._computed(func, args, kwargs, device)
                out = self._out_of(func, args, kwargs, self._ahead[1], device)
            if self._ahead is not None:
                self._keep(out, *self._ahead)
            elif has_values(func, args, out):
                self._compute(func, args, kwargs, out, device)
            return out
        finally:
            self._nested = False
            self._ahead = None

    def _way_of(self, func: Any) -> _Handling:
        touches, first = touches_values(func), comes_first(func)
        met = self._met.get(id(func)) or self._meet(func)
        again = met.again and touches and not first and gives_tensors(func)
        function = plain_function(func) if again else None
        gives_one = gives_one_tensor(func)
        known = function is not None if touches else gives_tensors(func)
        quick = met.again and known and id(func) not in self._writing_each
        way = self._ways[id(func)] = _Handling(touches, first, function, gives_one, met, quick)
        return way

    # ---- values

    def host_of(self, tensor: VirtualTensor) -> torch.Tensor:
        with self.lock, no_functions(), host_keys():
            return self.twins.view(tensor)

    def known(self, tensor: Any) -> Known:
        return Known(self.host_of(tensor), True)

    def twin_of(self, storage: Any) -> Any:
        """The host's bytes of a storage on a device."""
        with self.lock, no_functions(), host_keys():
            placement = self.table.find(storage)
            if placement is None:
                raise RuntimeError("the storage is on no device")
            return self.twins.of(placement, storage.nbytes())

    def fill(self, tensor: VirtualTensor, call: FactoryCall, device: int) -> None:
        """Gives a new tensor the values of one that is made on the host."""
        with self.lock, no_functions(), host_keys():
            made = HostCall(call, [], {}, device, None)
            if self.tape is not None:
                self.tape.append((made, self.twins.view(tensor), None))
            else:
                self.table.gone.clear()
                self.twins.keep(tensor, made.run(self.random)[0], ())

    def replay(self, tape: Tape) -> None:
        """Computes what was captured."""
        with self.lock, no_functions(), host_keys():
            for call, written, keeper in tape:
                result, kept = call.run(self.random)
                for mine, its in zip(leaves(written), leaves(result), strict=False):
                    if isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor):
                        if its.numel():
                            mine.copy_(its)
                        else:
                            # As in `Twins.keep`: a result that nobody asked for.
                            mine.zero_()
                if keeper is not None:
                    keeper.kept = kept

    def _compute(self, func: Any, args: Any, kwargs: Any, out: Any, device: int) -> None:
        if self.tape is not None:
            with no_functions(), host_keys():
                call = self._call(func, args, kwargs, device)
                self.tape.append((call, on_host(self.twins, out), self._keeper(func, out)))
            return
        if kernel_rules.for_operator(func) is None:
            with no_functions(), no_functions() if undisturbed() else host_keys():
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
            with no_functions(), host_keys():
                for leaf in leaves(out):
                    if isinstance(leaf, VirtualTensor):
                        self.twins.view(leaf).zero_()

    def _operate_again(
        self, func: Any, args: Any, kwargs: Any, out: Any, answer: Answer, placement: Any = None
    ) -> None:
        """Most operators: new results, or one, of what the host's function gives. On the host's tensors nobody's modes may be
        on."""
        function = self._ways[id(func)].function
        # (Past the overload, which does no more.)
        in_c = not isinstance(function, FunctionType)
        first = function._op if in_c else function
        if answer.kind is not None:
            self._compute_several(first, args, kwargs, out, answer, placement, lambda: (func, args, kwargs))
        elif not self._compute_again(first, args, kwargs, out, answer, placement):
            self._compute_again(partial(_computed, func) if in_c else function, args, kwargs, out, answer, sure=True)

    def _compute_several(
        self, function: Any, args: Any, kwargs: Any, outs: Any, answer: Answer, placements: Any, operator: Any
    ) -> None:
        """The same of several new tensors, by a function of the host's; None where it is for the device alone. operator() ->
        (operator, its arguments, its named ones), where the function lacks a kernel."""
        twins = self.twins
        results: Any = None
        hosts: list[Any] = []
        self.table.gone.clear()
        if function is not None:
            hosts = [on_host(twins, arg) for arg in args]
            named = {name: on_host(twins, arg) for name, arg in kwargs.items()} if kwargs else {}
            try:
                results = function(*hosts, **named)
            except RuntimeError as error:
                if not lacks_kernel(error):
                    raise
            hosts += named.values()
        if results is None:
            func, given, named = operator()
            self._put(outs, *self._run(func, given, named, answer.device))
            return
        self.computed += 1
        for number, (placement, result) in enumerate(zip(placements, results, strict=True)):
            if answer.lies_as(result, number):
                placement.twin, placement.host = result.untyped_storage(), result
            elif not twins.keep(outs[number], result, hosts):
                refuse_to_compute(getattr(function, "__name__", function), "its results have other sizes on the host")
        if not answer.as_on_host:
            answer.as_on_host = all(twins.has_taken(mine, its) for mine, its in zip(outs, results, strict=True))

    def _compute_again(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        out: VirtualTensor,
        answer: Answer,
        placement: Placement | None = None,
        sure: bool = False,
    ) -> bool:
        """The same by a function. False where that may lack a kernel for a type, which is raised if there is no other (sure).

        placement: that of the result, where it is new and known by now."""
        twins = self.twins
        # (Tensors that were met are dense, and neither negated nor conjugated.)
        hosts = [twins.plainly(arg) if is_ordinary(arg) else on_host(twins, arg) for arg in args]
        named: dict[str, Any] = {}
        self.table.gone.clear()
        try:
            if kwargs:
                named = {name: on_host(twins, arg) for name, arg in kwargs.items()}
                result = function(*hosts, **named)
            else:
                result = function(*hosts)
        except RuntimeError as error:
            if sure or not lacks_kernel(error):
                raise
            return False
        self.computed += 1
        if hosts and (result is None or result is hosts[0]) and out is args[0]:
            # What was written in place lies in the twin.
            return True
        if answer.lies_as(result) and not (hosts and result is hosts[0]):
            # (A new tensor's twin is the host's result.)
            placement = placement or twins.placement(out)
            placement.twin, placement.host = result.untyped_storage(), result
            return True
        given = (*hosts, *named.values()) if named else hosts
        if type(result) is not torch.Tensor or not twins.keep(out, result, given):
            refuse_to_compute(getattr(function, "__name__", function), "its results have other sizes on the host")
        answer.as_on_host = twins.has_taken(out, result)
        return True


def _laid_as(host: Any, made: Any) -> Any:
    """A host's result, lying as the device's does."""
    if host.stride() == made[1] and host.size() == made[0]:
        return host
    return _empty_strided(made[0], made[1], dtype=host.dtype, device=_CPU).copy_(host)


def _only_looks(way: _Handling) -> bool:
    return not way.touches and way.met.again and way.met.plain is None and way.met.beside is None


def _computed(func: Any, *args: Any, **kwargs: Any) -> Any:
    return computed(func, args, kwargs)
