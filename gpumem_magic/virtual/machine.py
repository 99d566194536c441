"""The virtual machine: all emulated GPUs, the engine that runs operators on them, and what they replace in PyTorch."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._device

import gpumem_magic.virtual.operators.attention_gradients
import gpumem_magic.virtual.operators.compressed
import gpumem_magic.virtual.operators.compressing
import gpumem_magic.virtual.operators.convolutions
import gpumem_magic.virtual.operators.copies
import gpumem_magic.virtual.operators.cudnn_attention
import gpumem_magic.virtual.operators.data_dependent
import gpumem_magic.virtual.operators.distances
import gpumem_magic.virtual.operators.draws
import gpumem_magic.virtual.operators.eigenvalues
import gpumem_magic.virtual.operators.equivalents
import gpumem_magic.virtual.operators.fake_quantisation
import gpumem_magic.virtual.operators.fourier
import gpumem_magic.virtual.operators.integer_division
import gpumem_magic.virtual.operators.layouts
import gpumem_magic.virtual.operators.losses
import gpumem_magic.virtual.operators.made_of_others
import gpumem_magic.virtual.operators.many_at_once
import gpumem_magic.virtual.operators.matrices_as_they_lie
import gpumem_magic.virtual.operators.matrix_exponential
import gpumem_magic.virtual.operators.nested_attention
import gpumem_magic.virtual.operators.norms
import gpumem_magic.virtual.operators.products_of_types
import gpumem_magic.virtual.operators.reductions
import gpumem_magic.virtual.operators.scans
import gpumem_magic.virtual.operators.scattering
import gpumem_magic.virtual.operators.searches
import gpumem_magic.virtual.operators.semi_structured
import gpumem_magic.virtual.operators.shapes
import gpumem_magic.virtual.operators.solving_by_cholesky
import gpumem_magic.virtual.operators.solving_by_lu
import gpumem_magic.virtual.operators.solving_by_reflections
import gpumem_magic.virtual.operators.sorting
import gpumem_magic.virtual.operators.sparse
import gpumem_magic.virtual.operators.sparse_softmax
import gpumem_magic.virtual.operators.temporaries  # noqa: F401 - all register their handlers with the engine
from gpumem_magic import private
from gpumem_magic.allocator.failure import DeviceOutOfMemory, oom_text
from gpumem_magic.allocator.settings import EnvironmentSettings, changed, settings_from_environment
from gpumem_magic.devices.base import Birth, CompiledResults, Device, DeviceError, FilledPart, Label, Padded
from gpumem_magic.devices.reads import Reads
from gpumem_magic.patching import Patches
from gpumem_magic.snapshot.model import Segment
from gpumem_magic.units import counted
from gpumem_magic.virtual.card import catalog, generations
from gpumem_magic.virtual.card.nvml import VirtualNvml
from gpumem_magic.virtual.card.smi import VirtualSmi
from gpumem_magic.virtual.compiler.stages import Compiler
from gpumem_magic.virtual.engine import kernel_rules, older_functions, values
from gpumem_magic.virtual.engine.device import VirtualDevice
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.filled import parts_of
from gpumem_magic.virtual.engine.function_modes import asked_first
from gpumem_magic.virtual.engine.known import KnownEngine
from gpumem_magic.virtual.engine.memory import Convolution
from gpumem_magic.virtual.engine.pinned import Pinned
from gpumem_magic.virtual.engine.real import RealEngine
from gpumem_magic.virtual.libraries.extensions import Extensions
from gpumem_magic.virtual.libraries.table import libraries
from gpumem_magic.virtual.operators import (
    cells,
    composites,
    cudnn,
    encoder_layers,
    gradients_that_meet,
    jagged,
    kept_inputs,
    known_zeros,
    nested_operators,
    own_formulas,
    recurrent,
    workspaces,
)
from gpumem_magic.virtual.operators.attention import Attention
from gpumem_magic.virtual.operators.autocast import AutocastKernels
from gpumem_magic.virtual.operators.communicators import Communicators
from gpumem_magic.virtual.operators.factories import Factories
from gpumem_magic.virtual.torch_face import (
    beneath,
    collector,
    communication,
    graphs,
    known_functions,
    legacy,
    parameters,
    profiling,
    random_numbers,
    saving,
    scripts,
    sharing,
    storages,
    surroundings,
    wheel,
    wrappers,
)
from gpumem_magic.virtual.torch_face.bindings import Bindings
from gpumem_magic.virtual.torch_face.captured import Captured
from gpumem_magic.virtual.torch_face.hooks import install_engine_hooks
from gpumem_magic.virtual.torch_face.streams import CURRENT
from gpumem_magic.virtual.torch_face.torch_cuda import CudaFace


class VirtualMachine:
    """All virtual devices that are on, and the engine that runs operators on them."""

    def __init__(self, spec: catalog.DeviceSpec, settings: EnvironmentSettings) -> None:
        self.spec = spec
        self.process = os.getpid()
        self._devices = [VirtualDevice(index, model, settings) for index, model in enumerate(spec.models)]
        self._settings: EnvironmentSettings | None = settings
        self.engine: Engine
        if spec.computes:
            self.engine = RealEngine(self, len(self._devices))
        else:
            bounds = values.AUTO if spec.values == "auto" else values.FEW
            self.engine = KnownEngine(self, len(self._devices), bounds)
        self.pinned = Pinned()
        self.face = CudaFace(self)
        self.workspaces = workspaces.Workspaces(
            self._devices, self.malloc, self.face.stream_of, self.free, self.take_beside
        )
        self._bindings = Bindings(self.engine, self.workspaces, lambda index: self._devices[index].model.l2_cache_bytes)
        self.convolutions = cudnn.Scratch(self._devices, self.malloc, self.face.stream_of, self.free)
        self.communication = Communicators(self.take_beside, lambda index: self._devices[index].model)
        self.attention = Attention(self.capability, self.torch_version)
        self.engine.attend = self.attention.attend
        self.smi = VirtualSmi(self._devices)
        self.nvml = VirtualNvml(self._devices)
        self._patches = Patches(asked_first)
        self._autocast = AutocastKernels(self.torch_version)
        self._factories = Factories(self.engine, self.face.current_device, self.pinned)
        self._captured = Captured(self._factories)
        self.compiler = Compiler(self, self._factories, self.face.current_device)
        self._extensions = Extensions()
        self._libraries = libraries({**self.compiler.tracers, "torch.utils.cpp_extension": self._extensions.prepare})

    # ---- what a machine can be asked

    @property
    def devices(self) -> Sequence[VirtualDevice]:
        return self._devices

    def in_use(self) -> Sequence[VirtualDevice]:
        return self._devices

    def current_device(self) -> int:
        # (What a program asks for itself, brings CUDA into use.)
        return CURRENT.device

    def look(self, device: Device) -> tuple[tuple[Segment, ...], Mapping[int, Label]]:
        with self.engine.lock:
            return device.segments(), dict(device.labels)

    def live_storages(self) -> int:
        """How many storages of the program's are on the devices now."""
        self.settle()
        return len(self.engine.table)

    def locate(self, tensor: Any) -> tuple[int, int] | None:
        return self.engine.locate(tensor)

    def plain_place(self, tensor: Any) -> tuple[int, int] | None:
        """Of none: a stand-in's place is in a table."""
        return None

    def compiled_results(self) -> CompiledResults:
        self.settle()
        with self.engine.lock:
            roots = {
                name: module for name, known in self.engine.compiled_roots.items() if (module := known()) is not None
            }
            return CompiledResults(self.engine.table.by_module(), roots)

    def filled_parts(self) -> Mapping[tuple[int, int], tuple[FilledPart, ...]]:
        with self.engine.lock:
            return {place: parts_of(one) for place, one in self.engine.table.filled().items()}

    def rewritten(self) -> Mapping[tuple[int, int], int]:
        with self.engine.lock:
            return self.engine.table.rewritten()

    @property
    def reads(self) -> Reads:
        return self.engine.reads

    def settle(self) -> None:
        with self.engine.uninterrupted, self.engine.lock:
            self.engine.table.drain()

    def notes(self) -> list[str]:
        engine = self.engine
        found = []
        if isinstance(engine, RealEngine):
            if engine.computed:
                found.append(
                    f"Values are real: {counted(engine.computed, 'operator')} computed on the host since it was turned on."
                )
            if engine.unknown:
                found.append(
                    f"The host has no kernel for {', '.join(sorted(engine.unknown))}: zeros stand for what is returned."
                )
        sizes = [f"{name} ({count})" for name, count in sorted(engine.largest_sizes.items())]
        if sizes:
            found.append(
                f"Sizes that depend on values are unknown on a virtual GPU; the largest possible was assumed: {', '.join(sizes)}."
            )
        sizes = [f"{name} ({count})" for name, count in sorted(engine.likely_sizes.items())]
        if sizes:
            found.append(
                "What is chosen or drawn is unknown on a virtual GPU; where sizes depend on it, choices were taken to be spread "
                f"evenly and draws to be as is likely: {', '.join(sizes)}."
            )
        sizes = [f"{name} ({counted(count, 'time')})" for name, count in sorted(engine.other_sizes.items())]
        if sizes:
            found.append(
                "Sizes that depend on values are unknown on a virtual GPU, and these have no largest one and may be larger "
                f"on a GPU: {'; '.join(sizes)}."
            )
        if self._extensions.refused:
            found.append(
                f"CUDA kernels were not built ({', '.join(sorted(self._extensions.refused))}): a program that goes on without "
                "them takes another way than on a card, often one with more memory."
            )
        if engine.padded_encoders:
            found.append(
                f"nn.TransformerEncoder ran on padded sequences ({counted(engine.padded_encoders, 'time')}), since where they "
                "end is unknown on a virtual GPU: where it has no other mask, a card packs them, which takes less memory and "
                "gives zeros where there is padding."
            )
        found += self.compiler.notes() + self.communication.notes()
        if engine.kernels_not_run:
            found.append(
                f"Kernels written in Triton were not run ({counted(engine.kernels_not_run, 'launch', 'launches')}): "
                "they only write into existing tensors."
                + " What those hold is not what it would be on a device."
                * engine.computes
            )
        return found

    # ---- memory (asked by the engine, under its lock)

    def malloc(self, device: int, nbytes: int) -> int:
        gpu = self._devices[device]
        if self._settings is not None:
            self._settle_settings()
        try:
            return gpu.malloc(nbytes, self.face.stream_of(device))
        except DeviceOutOfMemory as caught:
            # Its frames hold the operator's tensors.
            failure = caught.with_traceback(None)
        raise self._out_of_memory(gpu, failure)

    def _out_of_memory(self, gpu: VirtualDevice, failure: DeviceOutOfMemory) -> torch.OutOfMemoryError:
        """What the program gets."""
        # What it was dealing with is not its business.
        failure.__context__ = None
        self.face.memory.tell_observers(failure)
        text = oom_text(
            failure,
            gpu.model.oom_text_version or torch.__version__,
            process_id=self.process,
            process_bytes=gpu.process_bytes(),
        )
        error = torch.OutOfMemoryError(text)
        error.gpumem_failure = failure  # type: ignore[attr-defined]
        return error

    def _settle_settings(self) -> None:
        """PyTorch reads PYTORCH_CUDA_ALLOC_CONF when memory is first asked for (``CUDAAllocatorConfig::instance``): a program
        that sets it before that is heard."""
        known, self._settings = self._settings, None
        try:
            found = settings_from_environment()
        except ValueError as error:
            raise RuntimeError(str(error)) from None
        if known is not None and found.text != known.text:
            self._apply_settings(found)

    def _apply_settings(self, found: EnvironmentSettings) -> None:
        for note in found.notes:
            warnings.warn(note, stacklevel=2)
        for gpu in self._devices:
            gpu.allocator.settings, gpu.allocator.settings_text = found.settings, found.text

    def set_allocator_settings(self, text: str) -> None:
        """Settings of a running program, as `torch.cuda.memory._set_allocator_settings` takes them."""
        with self.engine.lock:
            if self._settings is not None:
                self._settle_settings()
            try:
                settings, notes = changed(self._devices[0].allocator.settings, text)
            except ValueError as error:
                raise RuntimeError(str(error)) from None
            self._apply_settings(EnvironmentSettings(settings, text, tuple(notes)))

    def free(self, device: int, address: int) -> None:
        self._devices[device].free(address)

    def pass_through(self, device: int, sizes: Sequence[int]) -> None:
        gpu = self._devices[device]
        allocator, stream = gpu.allocator, self.face.stream_of(device)
        taken: list[int] = []
        failure: DeviceOutOfMemory | None = None
        try:
            # (What was taken before an error is given back.)
            taken.extend(allocator.malloc(nbytes, stream) for nbytes in sizes)
        except DeviceOutOfMemory as caught:
            failure = caught.with_traceback(None)
        error = None if failure is None else self._out_of_memory(gpu, failure)
        while taken:
            allocator.free(taken.pop())
        if error is not None:
            raise error

    def is_recorded(self, device: int) -> bool:
        return self._devices[device].is_recorded

    def is_large(self, device: int, nbytes: int) -> bool:
        return self._devices[device].is_large(nbytes)

    def born(self, device: int, birth: Birth) -> None:
        self._devices[device].born(birth)

    def copied(self, device: int, address: int, source: int) -> None:
        self._devices[device].copied(address, source)

    def padded(self, device: int, address: int, known: Padded) -> None:
        self._devices[device].padded(address, known)

    def take_beside(self, device: int, nbytes: int) -> None:
        gpu = self._devices[device]
        gpu.take_beside(nbytes)
        self.smi.update(device, gpu.used_bytes())

    def record_stream(self, device: int, address: int, stream: int) -> None:
        self._devices[device].allocator.record_stream(address, stream)

    def takes_after(self, func: Any) -> bool:
        return workspaces.takes_after(func) or (
            workspaces.works_by_element(func) and any(gpu.begins_with_less for gpu in self._devices)
        )

    def after_operator(self, func: Any, args: Sequence[Any], device: int) -> None:
        gpu = self._devices[device]
        if gpu.begins_with_less and workspaces.works_by_element(func) and not workspaces.has_nothing_to_do(args):
            gpu.load()
            self.smi.update(device, gpu.used_bytes())
        self.workspaces.after(func, args, device)

    def begin_streams(self, device: int) -> None:
        self.workspaces.streams(device)

    def uses_cudnn(self, device: int) -> None:
        self.workspaces.cudnn(device)

    def drops_out_in_cudnn(self, device: int) -> None:
        self.workspaces.dropout_states(device)

    def convolve(self, device: int, call: Convolution) -> None:
        self.workspaces.cudnn(device)
        self.convolutions.take(device, call)

    def torch_version(self, device: int) -> tuple[int, int]:
        return generations.parse_version(workspaces.version_text(self._devices[device]))

    def processors(self, device: int) -> tuple[int, int]:
        model = self._devices[device].model
        return model.multi_processor_count, model.max_threads_per_multiprocessor

    def capability(self, device: int) -> tuple[int, int]:
        return self._devices[device].model.capability

    # ---- on and off

    def install(self) -> None:
        """Replaces what has to be replaced. Undone completely if any of it fails."""
        try:
            for gpu in self._devices:
                gpu.allocator.on_reserved = functools.partial(self._tell_smi, gpu)
            attempt = self._patches.attempt
            attempt(self._factories.install)
            attempt(parameters.install)
            attempt(storages.install, self.engine)
            attempt(wrappers.install)
            attempt(saving.install, self.engine.computes)
            sharing.install(self._patches)
            surroundings.install(self._patches, self.engine, self.pinned)
            attempt(profiling.install, self, self._factories)
            collector.install(self._patches)
            wheel.install(self._patches)
            attempt(legacy.install)
            attempt(self._libraries.install)
            self._extensions.install(self._patches)
            attempt(kernel_rules.install)
            communication.install(self._patches, self.engine)
            install_engine_hooks(self._patches, self.engine)
            attempt(scripts.install, self.engine)
            attempt(self.face.install)
            attempt(encoder_layers.install, self.engine)  # The compiler, which looks at it, comes after.
            attempt(self.compiler.install)
            if isinstance(self.engine, RealEngine):
                attempt(random_numbers.install, self.engine.random, len(self._devices))
            attempt(graphs.install, self, self.face.stream_of)
            attempt(beneath.install, self.face.stream_of)
            versions = [self.torch_version(gpu.index) for gpu in self._devices]
            attempt(self._autocast.install, versions)
            attempt(older_functions.keep_norms, versions)
            attempt(self.attention.install)
            attempt(jagged.install, self.attention.gpu)
            attempt(nested_operators.install, self._factories.index_of, self.attention.gpu)
            attempt(composites.install)
            attempt(own_formulas.install)
            attempt(known_zeros.install)
            attempt(kept_inputs.install, versions)
            rocm = any(generations.is_rocm(workspaces.version_text(device)) for device in self._devices)
            attempt(recurrent.install, not rocm, min(versions))
            attempt(cells.install)
            attempt(self._bindings.install)
            # What `torch.cuda.memory._set_allocator_settings` calls, until 2.9 and since.
            for name in ("_cuda_cudaCachingAllocator_set_allocator_settings", "_accelerator_setAllocatorSettings"):
                self._patches.set(torch._C, name, self.set_allocator_settings)
            # The way to a snapshot at the moment when memory runs out.
            self._patches.set(torch._C, "_cuda_attach_out_of_memory_observer", self.face.memory.attach_observer)
            attempt(self._captured.install)
            attempt(known_functions.install)
            self._patches.also_undo(self.smi.remove)
            self.smi.install()
            self._patches.also_undo(self.nvml.remove)
            self.nvml.install()
            for gpu in self._devices:
                self.smi.update(gpu.index, gpu.used_bytes())
            gradients_that_meet.learn(self.engine)
        except BaseException:
            self.remove("the virtual GPU could not be turned on")
            raise

    def remove(self, because: str) -> None:
        """Puts everything back. Tensors that are left say `because` when they are used."""
        self.engine.closed_because = because
        self._patches.undo()
        self.engine.uninterrupted.give_back()

    @property
    def half_off(self) -> bool:
        """Whether an interrupt ended `remove`, which is to be called again."""
        return bool(self.engine.closed_because)

    def forked(self) -> None:
        """In a forked process, which is to go on with the devices for itself: an `nvidia-smi` of its own, and its own number."""
        self.process = self.engine.process = os.getpid()
        self.smi = VirtualSmi(self._devices)
        self._patches.also_undo(self.smi.remove)
        self.smi.install()

    def become(self, spec: catalog.DeviceSpec) -> None:
        """Puts other cards under the tensors that are there. Raises DeviceError where there are fewer of them."""
        if len(spec.models) < len(self._devices) or spec.computes != self.spec.computes:
            raise DeviceError(
                f"the tensors that are on {self.spec.text} cannot go on with {spec.text}: name as many cards, of the same kind"
            )
        self.spec = spec
        for gpu, model in zip(self._devices, spec.models, strict=False):
            gpu.become(model)
        self.engine.alike.forget()
        for gpu in self._devices:
            self.smi.update(gpu.index, gpu.used_bytes())

    def lacking(self) -> list[str]:
        """What does not work because this PyTorch lacks private names, in sentences."""
        operators = private.lacking("virtual.operators")
        return self._patches.lacking + [operators] * bool(operators)

    def replaced(self) -> list[tuple[Any, str]]:
        """The (owner, name) pairs that are replaced while the machine is on."""
        return self._patches.names()

    def _tell_smi(self, gpu: VirtualDevice, reserved: int) -> None:
        self.smi.update(gpu.index, gpu.used_bytes())
