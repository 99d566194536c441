"""When the compiler is made ready for the device: at the first `torch.compile`, and what runs where it can't be."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from gpumem_magic import private
from gpumem_magic.looks.warned import warnings_remembered
from gpumem_magic.patching import Patches
from gpumem_magic.units import counted, human
from gpumem_magic.virtual.compiler import dynamo, graph_trees, inductor, padding, source_lines, tracing, tuning, whose
from gpumem_magic.virtual.engine.device import MachineForTorch
from gpumem_magic.virtual.operators.factories import Factories

# What traces without `torch.compile`: `torch.export`, and `functorch.compile`.
_TRACERS = "torch.export._trace", "torch._functorch.aot_autograd"
# And `make_fx`, which other parts of PyTorch import.
_MAKE_FX = "torch.fx.experimental.proxy_tensor"
_INDUCTOR = "torch._inductor.compile_fx"
# What PyTorch itself compiles as a whole in a `flex_attention` that nobody compiled: `libraries.flex` has a rule for it.
_OWN_STEP = "_flex_attention_hop_wrapper"


class Compiler:
    """`torch.compile` while the device is on."""

    def __init__(self, machine: MachineForTorch, factories: Factories, current_device: Callable[[], int]) -> None:
        self._machine = machine
        self._engine = machine.engine
        self._factories = factories
        self._current_device = current_device
        self._ready: set[str] = set()
        self._is_installed = False
        self._eager_calls = 0
        # A line about each kind of thing that went another way than on a card, and how often.
        self._otherwise: Counter[str] = Counter()
        self._trials = inductor.Trials()
        self._tuning = tuning.Tuning(machine)
        self._padding = padding.Padding(self._tuning.buffer_of)
        self._whose = whose.Whose(self._engine)
        self._lines = source_lines.SourceLines()

    def install(self, patches: Patches) -> None:
        """The parts of PyTorch's compiler are imported when the program first asks for them: they are large."""
        original = torch.compile

        def compile_(*args: Any, **kwargs: Any) -> Any:
            if args and getattr(args[0], "__qualname__", "").endswith(_OWN_STEP):
                return args[0]
            self._prepare(patches)
            return original(*args, **kwargs)

        patches.set(torch, "compile", compile_)
        call = torch._TorchCompileInductorWrapper.__call__

        def compile_with_inductor(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            self._ready_to_compile(patches)
            noting = self._otherwise, self._whose, self._lines
            return inductor.compile_with(call, *noting, wrapper, *args, **kwargs)

        patches.set(torch._TorchCompileInductorWrapper, "__call__", compile_with_inductor)
        self._is_installed = True
        if "torch._dynamo.eval_frame" in sys.modules:
            self._prepare(patches)
        for name in _TRACERS:
            if (module := sys.modules.get(name)) is not None:
                self._ready_for_tracer(module, patches)

    @property
    def tracers(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        """Modules, and what makes the compiler ready for them when they are loaded."""
        tracers = dict.fromkeys(_TRACERS, self._ready_for_tracer)
        return {**tracers, _MAKE_FX: self._ready_for_make_fx, _INDUCTOR: self._ready_for_inductor}

    def _prepare(self, patches: Patches) -> None:
        if "dynamo" in self._ready:
            return
        self._ready.add("dynamo")
        if self._engine.computes or any(private.lacking(private.place_of(step.install)) for step in (tracing, dynamo)):
            traced = self._ready_to_trace if self._engine.computes else None
            patches.attempt(run_eagerly, self._count, traced and functools.partial(traced, patches))
            return
        self._trace(patches)
        patches.attempt(dynamo.name_loops_that_break, self._otherwise)
        patches.attempt(dynamo.run_compiled_backwards_as_forwards)
        patches.attempt(graph_trees.install, self._machine)

    def _trace(self, patches: Patches) -> None:
        self._ready.add("trace")
        with warnings_remembered(), warnings.catch_warnings():
            # What PyTorch says of its own parts while they are imported.
            warnings.simplefilter("ignore", DeprecationWarning)
            tracing.install(patches)
            dynamo.install(patches, self._factories)

    def _ready_to_compile(self, patches: Patches) -> None:
        if "inductor" not in self._ready:
            self._ready.add("inductor")
            parts = self._otherwise, self._trials, self._padding, self._tuning, self._whose, self._lines
            patches.attempt(inductor.install, self._machine, self._current_device, *parts)
            patches.attempt(graph_trees.name_what_is_skipped, self._otherwise)

    def _ready_for_inductor(self, module: ModuleType, patches: Patches) -> None:
        def instead_of_compiling(model: Any) -> Any:
            if self._engine.computes:
                self._count()
                return model.forward
            self._ready_to_compile(patches)
            return None

        ask_before_inductor(module, patches, instead_of_compiling)

    def _ready_for_tracer(self, module: ModuleType, patches: Patches) -> None:
        """These trace as `torch.compile` does, and what they make runs operator by operator: also where values are computed."""
        self._ready_to_trace(patches)

    def _ready_to_trace(self, patches: Patches) -> None:
        if not self._is_installed:
            # It was imported before the device was turned on, and what the compiler looks at is not all in its place yet.
            return
        self._prepare(patches)
        if self._engine.computes and "trace" not in self._ready:
            self._trace(patches)

    def _ready_for_make_fx(self, module: ModuleType, patches: Patches) -> None:
        say_before_make_fx(module, patches, functools.partial(self._ready_to_trace, patches))

    def _count(self) -> None:
        self._eager_calls += 1

    def notes(self) -> list[str]:
        """What a report says of it."""
        found = []
        if self._eager_calls:
            found.append(
                f"Code from torch.compile ran eagerly ({counted(self._eager_calls, 'call')}): compiled, it would "
                "fuse operators and need less memory between them."
                + " It is compiled where the device is taken without values=real."
                * self._engine.computes
            )
        for what, count in self._otherwise.items():
            found.append(f"Of what torch.compile makes, {counted(count, 'graph')} ran {what}.")
        if self._trials.most:
            found.append(
                f"While it compiled, max-autotune's trials took {human(self._trials.most)} at most: copies of one product's "
                "tensors, and as much as the card's cache."
            )
        if self._tuning.kernels and self._tuning.left_out:
            found.append(
                "What torch.compile tries in a first run is left out here: on a card "
                f"{counted(self._tuning.kernels, 'kernel')} in several ways, each beside "
                f"{human(self._tuning.buffer)} to empty the card's cache with."
            )
        elif self._tuning.kernels:
            found.append(
                f"{counted(self._tuning.kernels, 'kernel')} of compiled code {'was' if self._tuning.kernels == 1 else 'were'} "
                f"tried in several ways at the first launch, as on a card that has not run it before: each trial takes "
                f"{human(self._tuning.buffer)} meanwhile, to empty the card's cache with."
            )
        if self._padding.untimed:
            found.append(
                "Sizes of products in compiled code are no multiples of 16 bytes "
                f"({counted(len(self._padding.untimed), 'kind')} of products): a card times those padded, too, and takes the "
                "faster way. Here they are padded."
            )
        return found


def ask_before_inductor(module: Any, patches: Patches, instead: Callable[[Any], Any]) -> None:
    """Backends of the program's own call Inductor's function themselves. `instead` is asked first for what runs in place of a
    model with inputs on the device; None where Inductor is to compile it."""
    compile_ = module.compile_fx

    def compile_fx(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, torch.Tensor) and one.device.type == "cuda" for one in inputs):
            found = instead(model)
            if found is not None:
                return found
        return compile_(model, inputs, *args, **kwargs)

    patches.set(module, "compile_fx", compile_fx)


def say_before_make_fx(module: Any, patches: Patches, make_ready: Callable[[], None]) -> None:
    """Has `make_ready` called before each trace of `make_fx`."""
    trace = module._MakefxTracer.trace

    def trace_when_ready(tracer: Any, *args: Any) -> Any:
        make_ready()
        return trace(tracer, *args)

    patches.set(module._MakefxTracer, "trace", trace_when_ready)


def run_eagerly(patches: Patches, count: Callable[[], None], make_ready: Callable[[], None] | None) -> None:
    """The state that `torch.compiler.set_stance("force_eager")` sets, until the patches are undone; and `count` is called
    before each call that it concerns, where `_callback_from_stance` is asked. That is asked for `torch.export` with strict=True,
    too, before 2.10: it traces and compiles nothing. Nor does a backend of the program's own, which gets its graphs after
    `make_ready`, where that is given."""
    frames = importlib.import_module("torch._dynamo.eval_frame")
    patches.set(frames, "_stance", dataclasses.replace(frames._stance, stance="force_eager"))
    original = getattr(frames, "_callback_from_stance", None)
    if original is None:
        return

    def callback_from_stance(callback: Any) -> Any:
        # (`ConvertFrameAssert` in ``torch/_dynamo/convert_frame.py`` notes what it is for, and what wraps it has that, too.)
        if getattr(callback, "_export", False):
            return callback
        if callback not in (None, False):
            if make_ready is not None and not _is_pytorchs(callback):
                make_ready()
                return callback
            count()
        return original(callback)

    patches.set(frames, "_callback_from_stance", callback_from_stance)


def _is_pytorchs(callback: Any) -> bool:
    """Whether what makes something of Dynamo's graphs is one of PyTorch's backends, such as Inductor, and not a function that
    wants to see them (`torch._dynamo.explain`, ``torch.compile(backend=mine)``)."""
    backend: Any = callback
    while inner := getattr(backend, "_torchdynamo_orig_backend", None) or getattr(
        backend, "_torchdynamo_orig_callable", None
    ):
        backend = inner
    if isinstance(backend, torch._TorchCompileWrapper):
        backend = backend.compiler_fn
    known = importlib.import_module("torch._dynamo.backends.registry")._COMPILER_FNS.values()
    return isinstance(backend, torch._TorchCompileInductorWrapper) or any(
        backend is one and one.__module__.startswith("torch.") for one in known
    )
