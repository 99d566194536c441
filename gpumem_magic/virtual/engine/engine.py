"""The engine: what happens when an operator meets a virtual tensor.

Shapes come from PyTorch's own fake tensors, memory from the emulated allocators, and host tensors stay real: an operator
without a virtual tensor, and without a device argument that means one, runs as it always does.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NoReturn

import torch
from torch._C._autograd import _get_sequence_nr
from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves, tree_map

from gpumem_magic.devices.reads import Reads
from gpumem_magic.failures import is_own_failure, swallowed
from gpumem_magic.looks import tensors
from gpumem_magic.looks.objects import attribute, is_a
from gpumem_magic.looks.tensors import no_functions
from gpumem_magic.private import aten, overloads
from gpumem_magic.uninterrupted import Uninterrupted
from gpumem_magic.virtual.engine import (
    contractions,
    copied,
    deterministic,
    filled,
    indexing,
    kernel_rules,
    older_functions,
    padded,
    running_ends,
    supplied,
    views_anew,
    waiting,
)
from gpumem_magic.virtual.engine.alike import AlikeCalls, Answer, Kernels
from gpumem_magic.virtual.engine.arguments import ARGUMENT_CHECKS
from gpumem_magic.virtual.engine.away import Away
from gpumem_magic.virtual.engine.births import Births, Call
from gpumem_magic.virtual.engine.calls import (
    device_among,
    inference_of,
    is_made_of_others,
    node_now,
    run_in_parts,
    sparse_layout,
    users_line,
    with_constants,
)
from gpumem_magic.virtual.engine.functions import Heard
from gpumem_magic.virtual.engine.host_calls import FactoryCall
from gpumem_magic.virtual.engine.host_checks import refused_by_host
from gpumem_magic.virtual.engine.kernel_types import refuse_types
from gpumem_magic.virtual.engine.layouts import as_kernels_lay, layout_of, layout_of_written
from gpumem_magic.virtual.engine.memory import Memory
from gpumem_magic.virtual.engine.mismatch import (
    IN_FULL_PRECISION,
    in_cudas_words,
    is_device_mismatch,
    refuse_half_precision,
    refuse_mixed_devices,
    refuse_mixed_types,
    refuse_to_grow,
    refuse_without_kernel,
)
from gpumem_magic.virtual.engine.modes import (
    DEVICE_QUERY,
    META,
    STATE,
    HostlessFakeMode,
    OperatorMode,
    answer_device,
    cuda,
    made_plainly,
    pushed,
    unseen,
)
from gpumem_magic.virtual.engine.out_of_bounds import refuse_out_of_bounds
from gpumem_magic.virtual.engine.overlaps import (
    refuse_itself,
    refuse_overlaps,
    refuse_written,
)
from gpumem_magic.virtual.engine.refusals import (
    DeviceGone,
    cannot_run,
    is_foreign,
    no_rule_for_sparse,
    refuse_device,
    refuse_to_hold,
)
from gpumem_magic.virtual.engine.rules import COMPRESSED, SPARSE, TRACED, Met, meet, writing_each
from gpumem_magic.virtual.engine.shape_rules import ASKED_INSTEAD
from gpumem_magic.virtual.engine.storage import Placement, StorageTable
from gpumem_magic.virtual.engine.tensors import ENGINES, OTHERWISE, VirtualTensor, is_ordinary, plain_meta, plainly

_DETACH, _AS_STRIDED = aten.detach.default, aten.as_strided.default
_LIKE_ANOTHER = frozenset(
    overloads(
        "empty_like zeros_like ones_like full_like rand_like randn_like randint_like "
        "new_empty new_empty_strided new_zeros new_ones new_full"
    )
)
# What the body of an operator that the program wrote may raise on a card, too.
_PROGRAMS_OWN = torch.OutOfMemoryError, ValueError, AssertionError


class Engine:
    """Runs operators on virtual tensors. One lock: the allocators and the fake mode's caches have one user at a time."""

    # Whether tensors have real values, on the host (`real.RealEngine`).
    computes = False
    seen: Collection[Any] = OTHERWISE

    def __init__(self, memory: Memory, device_count: int) -> None:
        self.lock = threading.RLock()
        self.uninterrupted = Uninterrupted("gpumem_magic.virtual.", stays=True)
        self.memory = memory
        self.device_count = device_count
        self.process = os.getpid()
        self.closed_because = ""
        self.fake = HostlessFakeMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.fake.engine = self  # type: ignore[attr-defined]
        self.alike = AlikeCalls(self.fake)
        self.mode = OperatorMode(self.handle, VirtualTensor)
        self.table = StorageTable(memory.malloc, memory.free)
        # The outermost modules that compiled code found by a name, under that name.
        self.compiled_roots: dict[str, weakref.ref[torch.nn.Module]] = {}
        self.births = Births()
        # The operator that runs while a log does; those that it is made of come inside it.
        self._under_way: Call | None = None
        # What it gives for all arguments like its own, once that is known.
        self._answer: Answer | None = None
        self.reads = Reads()
        self.away = Away()
        self.largest_sizes: Counter[str] = Counter()
        # Those sizes: what has one may have another on a card.
        self.assumed: set[int] = set()
        # Those for which a share of the largest was taken (`shares`).
        self.likely_sizes: Counter[str] = Counter()
        # Sizes that have no upper bound: what was assumed.
        self.other_sizes: Counter[str] = Counter()
        self.kernels_not_run = 0
        # How often a card may have packed padded sequences into a nested tensor where this did not.
        self.padded_encoders = 0
        self.unknown: set[str] = set()
        # What `torch.cuda.set_sync_debug_mode` was given.
        self.told_of_waiting = waiting.NOTHING
        self.holds_sparse = False
        self.attend: Callable[..., Any] = _no_attention
        # By the operator's `id`: PyTorch's own hash of it is Python's, and takes longer than looking it up.
        self._met: dict[int, Met] = {}
        self._writing_each = writing_each()
        ENGINES.add(self)

    # ---- tensors

    def wrap(self, meta: torch.Tensor, device: int, maker: str = "") -> VirtualTensor:
        """A virtual tensor around a plain meta tensor, given memory. Raises out of memory as the device would.

        maker: the name of the factory that made it."""
        with torch._C.DisableTorchFunction():
            tensor = self.alike.around(meta, cuda(device))
            self.table.drain()
            self._adopt(tensor.untyped_storage(), device, tensor, maker)
        return tensor

    def borrowed(self, nbytes: int, device: int, twin: Any, address: int = 0) -> Any:
        """A storage on the device whose memory another has: a process, or (at an address) a graph. twin: its bytes on the host,
        if both compute."""
        meta = made_plainly(torch.empty, (nbytes,), dtype=torch.uint8, device=META)
        with self.lock, torch._C.DisableTorchFunction():
            storage = self.alike.around(meta, cuda(device)).untyped_storage()
            self.table.borrow(storage, device, twin, address)
            return storage

    def on_memory_of(self, tensor: VirtualTensor, size: Any, stride: Any, further: int) -> VirtualTensor:
        """A tensor on another's memory, `further` elements behind its start, of which neither autograd nor operators know."""
        with self.uninterrupted, self.lock, torch._C.DisableTorchFunction():
            meta = made_plainly(torch.empty, 0, dtype=tensor.dtype, device=META)
            made_plainly(meta.set_, tensor.untyped_storage(), tensor.storage_offset() + further, size, stride)
            return self.alike.around(meta, tensor.fake_device)

    def address_of(self, tensor: VirtualTensor) -> int:
        with self.lock, torch._C.DisableTorchFunction():
            placement = self.table.find(tensor.untyped_storage())
            if placement is None or not placement.address:
                return 0
            return placement.address + int(tensor.storage_offset()) * tensor.element_size()

    def made_by(self, tensor: VirtualTensor, module: int) -> None:
        """Compiled code made it for a module (see `Placement`), unless it did so before."""
        with self.lock, tensors.no_functions(), tensors.no_dispatch():
            placement = self.table.find(tensors.storage(tensor))
        if placement is not None and not placement.module:
            placement.module = module

    def locate(self, tensor: Any) -> tuple[int, int] | None:
        """(device index, address) of the tensor's storage (of a sparse tensor's values). None for host tensors, for empty ones,
        and for those that `torch.func` wraps around others."""
        if is_a(tensor, VirtualTensor):
            if attribute(tensor, "fake_mode") is not self.fake:
                return None
        elif type(tensor) is not torch.Tensor or not tensors.is_meta(tensor):
            # (A part of a sparse tensor, as `sparse_parts` gives it, is a meta tensor.)
            return None
        with self.lock, tensors.no_functions(), tensors.no_dispatch():
            if tensors.is_sparse(tensor):
                tensor = tensors.sparse_parts(tensor)[-1]
            try:
                placement = self.table.find(tensors.storage(tensor))
            except RuntimeError:
                return None
        return (placement.device, placement.address) if placement is not None and placement.nbytes else None

    def record_stream(self, tensor: VirtualTensor, stream: Any) -> None:
        with self.lock:
            found = self.locate(tensor)
            if found is not None:
                self.memory.record_stream(*found, int(getattr(stream, "cuda_stream", 0)))

    # ---- operators

    def at_once(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function gives where that is found out at once; NotImplemented where it is to go the ordinary way."""
        return NotImplemented

    def sent(self, host: torch.Tensor, device: int) -> Any:
        """A copy of a host tensor on a device, where nothing else is to be done; NotImplemented where it is to go the ordinary
        way."""
        return NotImplemented

    def otherwise(self, func: Any, args: Any) -> Any:
        """What one of `OTHERWISE` gives where the device runs it in another way; else None (False after an assignment)."""
        if func is torch.Tensor.__setitem__:
            return indexing.assigned_from_host(*args)
        if func is running_ends.KEEPING:
            return running_ends.make_room(args)
        gets = func is torch.Tensor.__getitem__
        if gets and not _is_tracked(args[0]):
            return None
        device = device_among(args, None)
        if device is None or device >= self.device_count:
            return None
        version = self.memory.torch_version(device)
        if func is torch.functional.einsum:
            return None if version >= contractions.SWAPPED_FROM else contractions.in_given_order(args[0], args[1:])
        return indexing.with_full_slices(*args) if gets and version < indexing.LEFT_OUT_FROM else None

    def of_device(self, func: Any, args: Any) -> Any:
        """One of `OTHERWISE` as the device's PyTorch has it."""
        since = older_functions.LETTING_GO_FROM.get(func)
        device = None if since is None else device_among(args, None)
        if since is None or device is None or device >= self.device_count:
            return func
        return func if self.memory.torch_version(device) >= since else older_functions.holding(func)

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is DEVICE_QUERY:
            return answer_device(args[0]) if isinstance(args[0], VirtualTensor) else func(*args, **kwargs)
        heard = STATE.heard
        if heard is None:
            return self._handled(func, args, kwargs)
        # (What a rule runs is not heard. A second operator ends it: the first one's tensors would live longer than on a device.)
        STATE.heard = None
        if heard and not (func is _DETACH and args[0] is heard[0].out):
            heard.clear()
            return self._handled(func, args, kwargs)
        out = self._handled(func, args, kwargs)
        if heard:
            # The way out of what C++ makes like another tensor (``zeros_like``).
            heard[0] = heard[0]._replace(out=out)
            return out
        result: Any = out if isinstance(out, VirtualTensor) else None
        if isinstance(out, (tuple, list)) and all(isinstance(one, VirtualTensor) for one in out):
            result = [weakref.ref(one) for one in out]
        heard.append(Heard(func, args, kwargs, result))
        STATE.heard = heard
        return out

    def handle_by(self, way: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
        """Handles each operator by what `way` makes of `handle`, and none without C++, until the answer is called."""
        plain = self.handle
        handle = self.mode.handle = way(plain)
        self.__dict__.update(handle=handle, at_once=_not_at_once, sent=_not_at_once)

        def end() -> None:
            for name in ("handle", "at_once", "sent"):
                del self.__dict__[name]
            self.mode.handle = plain

        return end

    def _handled(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = device_among(args, kwargs)
        if device is None:
            try:
                # (A call from Python comes here with the functions of subclasses off, one of a backward does not.)
                with torch._C.DisableTorchFunction():
                    return func(*args, **kwargs)
            except RuntimeError:
                given = with_constants(func, args)
                if given is args:
                    raise
                return func(*given, **kwargs)
        if kwargs and func in _LIKE_ANOTHER and (place := kwargs.get("device")) is not None and place.type == "cpu":
            # An ordinary tensor like one of ours, of which only the looks matter (``zeros_like(x, device="cpu")``).
            with torch._C.DisableTorchFunction():
                return func(*(plain_meta(arg) if isinstance(arg, VirtualTensor) else arg for arg in args), **kwargs)
        if self.closed_because:
            raise DeviceGone(self.closed_because)
        if device >= self.device_count:
            refuse_device(device, self.device_count)
        if get_eval_frame_callback() is not None:
            return self._unseen(func, args, kwargs, device)
        if tensors.is_tracing():
            if func in TRACED:
                return TRACED[func](self, func, args, kwargs, device)
            with tensors.untraced():
                return self._handle(func, args, kwargs, device)
        return self._handle(func, args, kwargs, device)

    def _unseen(self, func: Any, args: Any, kwargs: Any, device: int) -> Any:
        """Within code that Dynamo runs, and which compiles what it meets: a device is none of the program's code."""
        before = set_eval_frame(None)
        try:
            return self._handle(func, args, kwargs, device)
        finally:
            set_eval_frame(before)

    def _handle(self, func: Any, args: Any, kwargs: Any, device: int, answer: Answer | None = None) -> Any:
        """answer: what it gives for arguments that look so, where that is known by now."""
        if self.reads.counts:
            self.reads.note_caught()
        # (What a program puts over functions sees its own calls alone. Functions of subclasses are off in a call from Python, and
        # not in one of a backward.)
        with self.uninterrupted, self.lock, torch._C.DisableTorchFunction():
            self.table.drain()
            if self.table.holds_overwritten:
                self.refuse_overwritten(args, kwargs)
            if self.told_of_waiting and waiting.waits(func, args, kwargs):
                waiting.tell(self.told_of_waiting)
            if waiting.CAPTURING.graphs:
                waiting.refuse_in_capture(func, args, kwargs)
            STATE.last_device = device
            if deterministic.are_asked_for():
                deterministic.refuse_other_orders(func, args, kwargs, self.memory.torch_version(device))
            if id(func) in self._writing_each:
                increment_version([tensor for tensor in args[0] if not tensor.is_inference()])
            if self._under_way is not None or not self.memory.is_recorded(device):
                return self.perform(func, args, kwargs, device, answer)
            way = None
            if (number := _get_sequence_nr()) != STATE.sequence and not STATE.backward:
                STATE.sequence = number
                way = self.births.forward(func, number - 1)
            self._under_way = func, args, kwargs, way
            try:
                return self.perform(func, args, kwargs, device, answer)
            finally:
                self._under_way = self._answer = None

    @property
    def is_under_way(self) -> bool:
        """Whether an operator that is recorded is being performed."""
        return self._under_way is not None

    def refuse_overwritten(self, *arguments: Any) -> None:
        """Raises what PyTorch says of a CUDA graph's result whose memory a later run has taken."""
        __tracebackhide__ = True
        for tensor in tree_leaves(arguments) if self.table.holds_overwritten else ():
            if isinstance(tensor, VirtualTensor) and tensor.layout is torch.strided:
                placement = self.table.find(tensor.untyped_storage())
                if placement is not None and placement.overwritten:
                    raise RuntimeError(placement.overwritten)

    def perform(self, func: Any, args: Any, kwargs: Any, device: int, answer: Answer | None = None) -> Any:
        """An operator's results and its memory. To be called under the lock."""
        layout = sparse_layout(args) if self.holds_sparse else None
        if layout is not None:
            table = SPARSE if layout is torch.sparse_coo else COMPRESSED
            sparse_handler: Callable[..., Any] | None = table.get(func)
            if sparse_handler is None and is_made_of_others(func):
                with pushed(self.mode):
                    return run_in_parts(func, args, kwargs)
            return (sparse_handler or _no_sparse)(self, func, args, kwargs, device)
        met = self._met.get(id(func)) or self._meet(func)
        if met.writes and self.table.holds_copies:
            copied.note_written(self.table.find, args[0])
        if met.writes and is_ordinary(args[0]):
            if met.once:
                refuse_itself(func, args)
            if met.stays_apart and len(args) > 1:
                refuse_overlaps(args[0], args[1:])
            views_anew.note(args[0])
            if met.assigns:
                filled.note(self.table.find, self.known, func, args)
        elif met.apart:
            refuse_written(func, args, kwargs, met.apart)
        elif func is _AS_STRIDED:
            refuse_out_of_bounds(*args, **kwargs)
        found = self.again(met, func, args, kwargs, device, answer) if met.again else None
        if found is not None:
            return found[0]
        if met.has_types:
            refuse_types(func, args, kwargs)
        if met.handler is not None:
            return met.handler(self, func, args, kwargs, device)
        rule = kernel_rules.for_operator(func)
        if rule is not None:
            with pushed(self.mode):
                return rule(*args, **kwargs)
        if met.body is not None:
            try:
                with pushed(self.mode):
                    return met.body(*args, **kwargs)
            except _PROGRAMS_OWN:
                raise
            except Exception as error:  # it calls what only runs on a card: its shape rule is left
                swallowed(error)
                met = self._met[id(func)] = met._replace(body=None)
        if met.parts is not None:
            # Below autograd (in inference mode, in distributed tensors' code) they come whole; each part may allocate.
            with pushed(self.mode):
                return met.parts(func, args, kwargs)
        return self.run(func, args, kwargs, device)

    def _meet(self, func: Any) -> Met:
        met = self._met[id(func)] = meet(func, self.memory.takes_after(func))
        return met

    def again(
        self, met: Met, func: Any, args: Any, kwargs: Any, device: int, answer: Answer | None
    ) -> tuple[Any, Answer] | None:
        """What `run` gives and takes, without asking for it, where arguments that look so were met; else None."""
        if met.plain is not None and not met.plain(self, args, kwargs):
            return None
        if kernel_rules.for_operator(func) is not None:
            return None
        with no_functions(), unseen():
            answer = answer or self.alike.found(self.alike.looks(func, args, kwargs))
            if answer is None:
                return None
            out = self.alike.given(answer, args, kwargs)
        if self._under_way is not None:
            self._note(answer, func, args, kwargs)
        if met.allocates:
            if met.grows:
                self.settle_grown(out, device)
            elif type(out) is not VirtualTensor or self._under_way is not None:
                self.settle(out)
            else:
                # (No log runs that would be told.)
                self.table.adopt(out.untyped_storage(), out.fake_device.index, node_now() if STATE.backward else 0)
        self._beside(met, func, args, kwargs, out, device, answer)
        return out, answer

    def _note(self, answer: Answer, func: Any, args: Any, kwargs: Any) -> None:
        """What the operator that is under way gives, if it is this one."""
        call = self._under_way
        if call is not None and call[1] is args and call[0] is func and call[2] is kwargs:
            self._answer = answer

    def run(self, func: Any, args: Any, kwargs: Any, device: int, order: Sequence[int] | None = None) -> Any:
        """The ordinary way: shape by the fake mode, memory for every storage that is new in the result, and then what the
        kernel takes besides. order: of several results that were given, in which they become larger."""
        met = self._met.get(id(func)) or self._meet(func)
        shapes = [one.shape for one in _written(func, kwargs)] if met.resizes else ()
        out = self.fake_call(func, args, kwargs) if met.like is None else self._into(met, args, kwargs)
        if shapes:
            self._lay_out_written(func, args, kwargs, shapes)
        if met.on_host is not None:
            out = met.on_host(self, func, args, kwargs, out, device)
        if met.grows:
            self.settle_grown(out, device)
        else:
            self.settle(out, met.allocates)
        if met.resizes:
            self._follow_resized(out if order is None else tuple(out[place] for place in order))
        self._beside(met, func, args, kwargs, out, device)
        return out

    def _lay_out_written(self, func: Any, args: Any, kwargs: Any, before: Sequence[Any]) -> None:
        """What was given another size lies as the kernel makes it."""
        for one, shape, lies in zip(_written(func, kwargs), before, layout_of_written(func), strict=False):
            if lies is not None and one.shape != shape and one.layout is torch.strided:
                lying = lies(args, one).stride()
                if lying != one.stride():
                    self.fake_call(aten.as_strided_.default, (one, one.shape, lying), {})

    def _into(self, met: Met, args: Any, kwargs: Any) -> Any:
        """Gives what ``out=`` names the sizes of the results that the other operator returns."""
        written = [argument.name for argument in met.func._schema.arguments if argument.is_out]
        others = {name: value for name, value in kwargs.items() if name not in written}
        made = self.fake_call(met.like, args, others)
        given = tuple(kwargs[name] for name in written)
        for one, like in zip(given, made if isinstance(made, (tuple, list)) else (made,), strict=True):
            if one.shape != like.shape:
                self.fake_call(aten.resize_.default, (one, like.shape), {})
        return given if len(given) > 1 else given[0]

    def _beside(
        self, met: Met, func: Any, args: Any, kwargs: Any, out: Any, device: int, answer: Answer | None = None
    ) -> None:
        """What the kernel takes beside its results, and libraries after it."""
        sizes: Any = None if answer is None else answer.kernels
        if sizes is None:
            sizes = () if met.beside is None else met.beside(self, func, args, kwargs, out, device)
            if type(sizes) is Kernels and answer is not None:
                answer.kernels = sizes
        if type(sizes) is Kernels:
            self.run_kernels(sizes, device)
        elif sizes:
            with self.scratch(device, *sizes):
                self.memory.after_operator(func, args, device)
                return
        if met.takes_after:
            self.memory.after_operator(func, args, device)
            if not self.memory.takes_after(func):
                # It was the first of its kind on the last device.
                self._met[id(func)] = met._replace(takes_after=False)

    def run_kernels(self, kernels: Kernels, device: int) -> None:
        """Takes what they take, and gives it back."""
        if not kernels.held and self._under_way is None:
            # (No log runs that would be told.)
            for one in kernels.each:
                self.memory.pass_through(device, one)
            return
        with self.scratch(device, *kernels.held):
            for one in kernels.each:
                with self.scratch(device, *one):
                    pass

    def fake_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs the operator under the fake mode; host tensors among the arguments become fake host tensors."""
        # (`made_plainly` written out: each operator passes here.)
        STATE.depth += 1
        try:
            with no_functions(), unseen():
                looks = self.alike.looks(func, args, kwargs)
                answer = self.alike.found(looks)
                if answer is not None:
                    self._note(answer, func, args, kwargs)
                    return self.alike.given(answer, args, kwargs)
        finally:
            STATE.depth -= 1
        args, hosts = self._fake_hosts(args)
        if kwargs:
            names = list(kwargs)
            named, more = self._fake_hosts(tuple(kwargs.values()))
            kwargs = dict(zip(names, named, strict=True))
            hosts = hosts or more
        if hosts:
            if func.namespace == "prims" and any(map(_is_meta, tree_leaves((args, kwargs)))):
                # A shape rule of PyTorch's, which C++ asks with what it has copied to the meta device, and with what lies there
                # as it was told.
                return self._as_meta(func, args, kwargs)
            refuse_mixed_devices(func, args, kwargs)
        refuse_without_kernel(func)
        refuse_mixed_types(func, args)
        refuse_to_grow(func, args, kwargs)
        if func in IN_FULL_PRECISION:
            refuse_half_precision(func, args, kwargs)
        if func in ARGUMENT_CHECKS:
            ARGUMENT_CHECKS[func](*args, **kwargs)
        remembers = self.fake.cache_enabled
        if looks is None and self.alike.zeros:
            # (It takes known zeros for other tensors that look so.)
            self.fake.cache_enabled = False
        refusal: Exception | None = None
        STATE.depth += 1
        try:
            with plainly(args, tuple(kwargs.values())), inference_of(func, args):
                asked = func, args, kwargs
                if func in ASKED_INSTEAD:
                    asked = ASKED_INSTEAD[func](func, args, kwargs)
                out = self.fake.dispatch(asked[0], (), *asked[1:])
            layout = layout_of(func)
            if layout:
                with tensors.no_functions(), tensors.no_dispatch():
                    out = as_kernels_lay(layout, args, kwargs, out, self.alike.around)
            if looks is not None:
                with tensors.no_functions(), tensors.no_dispatch():
                    # (Where the host computes, it says so itself.)
                    refusal = None if self.computes else refused_by_host(func, args, kwargs, out)
                    if refusal is None:
                        self.alike.learn(looks, func, args, kwargs, out)
            if refusal is None:
                return out
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise cannot_run(func, type(error).__name__) from None
        except Exception as error:
            if not is_own_failure(error):
                raise
            if is_device_mismatch(error):
                refuse_mixed_devices(func, args, kwargs, sure=True)
            if is_foreign(func):
                raise cannot_run(func, str(error)) from None
            words = in_cudas_words(error, func, args, kwargs)
            if isinstance(words, (AssertionError, AttributeError)):
                # A shape rule that stumbled, not one that refused.
                words = cannot_run(func, f"{type(error).__name__}: {error}")
            raise words from None
        finally:
            STATE.depth -= 1
            self.fake.cache_enabled = remembers
        raise refusal

    def _as_meta(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator gives on the meta device, for tensors that look so."""

        def plain(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return made_plainly(torch.empty_strided, leaf.size(), leaf.stride(), dtype=leaf.dtype, device=META)

        with tensors.no_functions(), tensors.no_dispatch():
            args, kwargs = tree_map(plain, (args, kwargs))
            return made_plainly(func, *args, **kwargs)

    def settle(self, out: Any, allocates: bool = True) -> None:
        """Makes virtual tensors of what the fake mode returned, and gives new storages memory."""
        if isinstance(out, FakeTensor):
            self._settle_one(out, allocates)
        elif isinstance(out, (tuple, list)):
            for leaf in out:
                if isinstance(leaf, FakeTensor):
                    self._settle_one(leaf, allocates)
                elif isinstance(leaf, (tuple, list)):
                    self.settle(leaf, allocates)

    def settle_grown(self, out: Any, device: int) -> None:
        """Gives memory to results that a kernel begins with no element, one after the other."""
        fills = deterministic.fills_what_grows(self.memory.torch_version(device))
        for one in (out,) if isinstance(out, torch.Tensor) else out:
            self.settle(one)
            if fills and one.numel():
                self._fill(device, one.element_size())

    def _fill(self, device: int, element: int) -> None:
        """What PyTorch fills memory by: a tensor of one element that comes and goes."""
        with self.scratch(device, element):
            pass

    def _follow_resized(self, out: Any) -> None:
        """Gives memory to tensors that were given to be written to, and have become larger."""
        for leaf in (out,) if isinstance(out, torch.Tensor) else out or ():
            if isinstance(leaf, VirtualTensor) and leaf.layout is torch.strided:
                self._resize(leaf.untyped_storage(), leaf.element_size())

    def _resize(self, storage: Any, element: int) -> None:
        """After a storage's size changed; element: bytes of one of the tensor's that asked for it, or 0."""
        if self.table.resized(storage) and element:
            placement = self.table.find(storage)
            if placement is not None and deterministic.fills_what_grows(self.memory.torch_version(placement.device)):
                self._fill(placement.device, element)

    def _settle_one(self, tensor: FakeTensor, allocates: bool) -> None:
        device = tensor.fake_device
        if device.type != "cuda":
            return
        if type(tensor) is FakeTensor:
            tensor.__class__ = VirtualTensor
        if allocates:
            for part in self._strided_parts(tensor):
                self._adopt(part.untyped_storage(), device.index, part)

    def _adopt(self, storage: Any, device: int, tensor: torch.Tensor, maker: str = "") -> None:
        """Gives a new storage memory, and tells the device's logs of a large one."""
        failed = True
        try:
            is_new = self.table.adopt(storage, device, node_now())
            failed = False
        finally:
            if (failed or is_new) and self.memory.is_large(device, storage.nbytes()):
                self.memory.born(device, self.births.of(self._under_way, self._answer, tensor, maker))
            if not failed and is_new and self._under_way is not None:
                source = copied.source_of(self.table.find, self._under_way)
                if source is not None:
                    self._is_copy(self.table.find(storage), source)
                if padded.may_be_padded(self._under_way):
                    self._note_padding(self.table.find(storage), self._under_way)

    def _is_copy(self, made: Placement | None, source: Placement) -> None:
        """The logs are told (of one device alone: an address is another's on the next)."""
        if made is not None and made.device == source.device and self.memory.is_recorded(made.device):
            self.table.is_copy(made)
            self.memory.copied(made.device, made.address, source.address)

    def _note_padding(self, made: Placement | None, call: Call) -> None:
        if made is not None and self.memory.is_recorded(made.device):
            known = padded.padded(call)
            if known is not None:
                self.memory.padded(made.device, made.address, known)

    def copied(self, made: Any, source: Any) -> None:
        """A storage that was just made has another's bytes now."""
        with self.lock:
            its = self.table.find(source)
            if its is not None:
                self._is_copy(self.table.find(made), its)

    def resized(self, storage: Any, element: int = 0) -> None:
        """After a storage's size changed, of whatever device it is; the device's logs are told of a large one that was empty.
        element: bytes of one of the tensor's whose size was changed, where it was a tensor's."""
        self.table.drain()
        placement = self.table.find(storage)
        was_empty = placement is not None and not placement.nbytes
        self._resize(storage, element)
        if placement is not None and was_empty and self.memory.is_large(placement.device, placement.nbytes):
            self.memory.born(placement.device, self.births.of(self._under_way, self._answer, None, "resize_"))

    def _strided_parts(self, tensor: FakeTensor) -> tuple[Any, ...]:
        """The tensors that hold the memory: the tensor itself, or a sparse tensor's indices and values."""
        if tensor.layout is torch.strided:
            return (tensor,)
        if tensor.layout not in tensors.SPARSE_PARTS:
            refuse_to_hold(f"a tensor with layout {tensor.layout}")
        self.holds_sparse = True
        return tuple(self.fake_call(part, (tensor,), {}) for part in tensors.SPARSE_PARTS[tensor.layout])

    def _fake_hosts(self, args: Any) -> tuple[Any, bool]:
        """The arguments with plain host tensors made fake, and whether there were any."""
        found = False
        converted = []
        for arg in args:
            if isinstance(arg, torch._C.Generator):
                # Nothing is drawn on a virtual device, and the host's generator must not move.
                found, arg = True, None
            elif isinstance(arg, torch.Tensor):
                if not isinstance(arg, FakeTensor):
                    found = True
                    arg = self._fake_host(arg)
                elif arg.fake_mode is not self.fake:
                    _refuse_foreign(arg)
            elif isinstance(arg, (list, tuple)) and arg:
                inner, more = self._fake_hosts(arg)
                if more:
                    found = True
                    arg = inner if isinstance(arg, tuple) else list(inner)
            converted.append(arg)
        return (tuple(converted), True) if found else (args, False)

    def _fake_host(self, tensor: torch.Tensor) -> FakeTensor:
        try:
            return self.fake.from_tensor(tensor, static_shapes=True)
        except AssertionError as error:
            # Nested tensors, whose sizes would have to be symbols.
            raise NotImplementedError(
                f"the virtual GPU cannot work with a {type(tensor).__name__} ({error}). Use padded tensors, or a real GPU."
            ) from None

    @contextmanager
    def scratch(self, device: int, *sizes: int, first_out: bool = False) -> Iterator[None]:
        """Blocks that a kernel holds while it runs, taken in this order, given back in the other or (first_out) in this one."""
        taken = []
        try:
            for nbytes in filter(None, sizes):
                taken.append(self.memory.malloc(device, nbytes))
                if self.memory.is_large(device, nbytes):
                    self.memory.born(device, self.births.of(self._under_way, self._answer, None))
            yield
        finally:
            if first_out:
                taken.reverse()
            while taken:
                self.memory.free(device, taken.pop())

    # ---- values

    def host_of(self, tensor: VirtualTensor) -> torch.Tensor | None:
        """The tensor's values, as a host tensor that is not to be kept; None where they are not known for sure."""
        return None

    def known(self, tensor: VirtualTensor) -> Any:
        """What is known of its values (`values.Known`), or None."""
        return None

    def learn(self, tensor: VirtualTensor, host: torch.Tensor) -> None:
        """A new tensor has these values."""

    def guess(self, tensor: VirtualTensor, host: torch.Tensor, sure: bool = False) -> None:
        """A tensor that was written is taken to have these values. sure: nothing is to be said of it."""

    def supply(self, tensor: VirtualTensor, host: torch.Tensor) -> None:
        """The user says what its values are."""

    def fill(self, tensor: VirtualTensor, call: FactoryCall, device: int) -> None:
        """A new tensor has the values of one that is made on the host."""

    def blank(self, tensor: VirtualTensor) -> None:
        """A new tensor has no values yet."""

    def guessed(self, tensor: VirtualTensor, host: torch.Tensor) -> torch.Tensor:
        """Writes what a tensor's unknown values are taken to be into a host tensor."""
        return host.zero_()

    def forget(self, tensor: VirtualTensor) -> None:
        """A tensor's values are not known any more."""

    def mark(self, tensor: VirtualTensor) -> None:
        """A tensor was put on another storage."""

    # ---- values that do not exist

    def count_stand_in(
        self, by_user: bool = False, dtype: torch.dtype | None = None, sized: bool = False, several: bool = False
    ) -> tuple[str, int]:
        """Notes the line of the user's program that reads a value now, and gives it. by_user: one that the user supplied. sized:
        as a size. several: more than one."""
        line = users_line()
        self.reads.note(line, by_user, dtype, sized, several)
        return line

    def note_back(self, source: torch.Tensor) -> None:
        """A tensor was copied to a device: of a host tensor of stand-ins, nothing is known of it there, either."""
        line = self.away.came_back(source)
        if line is not None:
            self.reads.returned[line] += 1

    def at_most(self, tensor: Any) -> int | None:
        """How many elements of a tensor are not zero, at most; None where nothing is known of it."""
        return None

    def tell(self, mask: Any, count: int) -> None:
        """A program shows how many elements of a mask are true, which is so until something is written there."""

    def among(self, tensor: Any) -> int | None:
        """Among how many each element was chosen (`shares`), where that is known; 0 where it was drawn between zero and one."""
        return None

    def bound(self, tensor: Any) -> float | None:
        """The number nearest to zero that elements may be (`shares`), where that is not zero; None where nothing says so."""
        return None

    def share(self, tensor: Any) -> Fraction | None:
        """Which share of a mask's elements is taken to be true (`shares`); None where nothing says so."""
        return None

    def selected(
        self, operator: str, largest: int, likely: int | None = None, inside: bool = False, shape: Sequence[int] = ()
    ) -> int:
        """How many elements an operator selects whose result depends on values: as many as the user said, or as are likely, or
        the most. inside: of another operator, whose results have their sizes whatever is selected. shape: of the mask, if it is
        selected by one."""
        said = supplied.count_for(largest, users_line)
        line = None if inside else self.count_stand_in(by_user=said is not None, sized=True)
        if said is not None:
            return said
        count = largest if likely is None else likely
        (self.largest_sizes if likely is None else self.likely_sizes)[operator] += 1
        self.assumed.add(count)
        if line is not None and likely is None and count > max(shape, default=count):
            self.reads.widest[line] = max(count, self.reads.widest.get(line, 0))
        return count


def _written(func: Any, kwargs: Any) -> list[torch.Tensor]:
    """What is named by ``out=``, lists aside."""
    named = (kwargs.get(argument.name) for argument in func._schema.arguments if argument.is_out)
    return [one for one in named if isinstance(one, torch.Tensor)]


def _is_tracked(tensor: Any) -> bool:
    """Whether autograd follows what is done with a virtual tensor."""
    with tensors.no_functions():
        return isinstance(tensor, VirtualTensor) and tensor.requires_grad and torch.is_grad_enabled()


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_meta


def _not_at_once(*args: Any) -> Any:
    return NotImplemented


def _no_attention(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("this engine has no devices that could choose an attention kernel")


def _no_sparse(engine: Engine, func: Any, args: Any, kwargs: Any, device: int) -> NoReturn:
    refuse_without_kernel(func)
    raise cannot_run(func, "of a sparse tensor") if is_foreign(func) else no_rule_for_sparse(func)


def _refuse_foreign(tensor: FakeTensor) -> NoReturn:
    """For a tensor of another fake mode: most often one of a virtual device that has been turned off."""
    engine = getattr(tensor.fake_mode, "engine", None)
    if isinstance(engine, Engine) and engine.closed_because:
        raise DeviceGone(engine.closed_because)
    raise RuntimeError("a tensor of another FakeTensorMode can't be used together with tensors on the virtual GPU")


def version_of(tensor: VirtualTensor) -> tuple[int, int]:
    """The PyTorch of a tensor's device."""
    engine: Engine = tensor.fake_mode.engine  # type: ignore[attr-defined]
    return engine.memory.torch_version(tensor.get_device())


def quiet(record: logging.LogRecord) -> bool:
    """A filter for the fake mode's log: an operator that a program calls wrongly is its own error, and is raised."""
    return not STATE.depth
