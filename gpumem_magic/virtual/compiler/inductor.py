"""Inductor for a card that is not there: what it asks of the device, and the function that it generates.

The generated Python function runs: it asks for each buffer, gives it back or uses it again, and calls products, convolutions and
attention as eager code does. Triton's kernels in between (`kernels`) write into buffers that exist, so they take no memory.
"""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpumem_magic.failures import swallowed
from gpumem_magic.patching import Patches
from gpumem_magic.virtual.compiler import kernels
from gpumem_magic.virtual.compiler.padding import Padding
from gpumem_magic.virtual.compiler.settings import configure
from gpumem_magic.virtual.compiler.source_lines import SourceLines
from gpumem_magic.virtual.compiler.tracing import of_the_trace
from gpumem_magic.virtual.compiler.tuning import Tuning
from gpumem_magic.virtual.compiler.whose import Whose
from gpumem_magic.virtual.engine.device import MachineForTorch
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import META, TRIAL, made_plainly, origin
from gpumem_magic.virtual.engine.tensors import VirtualTensor

# What the interface of a device to Inductor took from `torch.cuda` when it was imported: the name there, and here.
_FACE = (
    "current_device", "set_device", "device_count", "stream", "current_stream", "set_stream", "synchronize",
    "get_device_properties", "_exchange_device", "_maybe_exchange_device", "memory_allocated", "is_bf16_supported",
)  # fmt: skip
# Where results about the device are kept from call to call.
_KEPT_IN = ("torch._inductor.utils", "torch._inductor.kernel.mm")
_CACHED = type(functools.lru_cache(len))
# No process waits to compile kernels.
_SETTINGS = {"compile_threads": 1}
# The versions, from one to before another, that leave gradients as they lie when they reach a compiled graph's backward. The
# others lay them as the graph's results lay (`torch._functorch.config`; read in 2.9 to 2.13).
_AS_THEY_LIE = (2, 9), (2, 12)
# Whatever the program set: nothing is timed, and the generated function is Python's.
_TRIALS = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise")
# Whether what a fusion gains is timed, too. Without it all are made.
_FUSIONS = ("benchmark_fusion", "benchmark_combo_kernel")
_UNTIMED = {**dict.fromkeys((*_TRIALS, *_FUSIONS), False), "coordinate_descent_tuning": False}
_PYTHON = {"cpp_wrapper": False}
_UNKEPT = {"fx_graph_cache": False}
_TAG = "cache_key_tag"
# The functions of C++'s that generated code calls for an input that may begin anywhere: that of 2.13, and of 2.12. Older versions
# do it in Python (`torch/_inductor/utils.py`, `copy_misaligned_inputs`).
_ALIGNED_BY = ("copy_if_misaligned", "copy_misaligned")
_ALIGNMENT = 16


class Trials:
    """What the trials of max-autotune take: `most` bytes at once. They are not run; their tensors are made and let go."""

    def __init__(self) -> None:
        self.most = 0
        self._wanted = False

    def install(self, patches: Patches) -> None:
        selection = importlib.import_module("torch._inductor.select_algorithm").AlgorithmSelectorCache
        select = selection.__call__

        def call(cache: Any, name: str, choices: Any, input_nodes: Any, layout: Any, *args: Any, **kwargs: Any) -> Any:
            if self._wanted and not Tuning.left_out:
                self._take([*{node.get_name(): node for node in input_nodes}.values(), layout], selection)
            return select(cache, name, choices, input_nodes, layout, *args, **kwargs)

        patches.set(selection, "__call__", call)

    def _take(self, nodes: list[Any], selection: Any) -> None:
        """The inputs and the result of one product or convolution, and what empties the card's cache before each run."""
        cache = torch.cuda.get_device_properties().L2_cache_size
        with origin(TRIAL):
            taken = [selection.benchmark_example_value(node) for node in nodes]
            taken.append(torch.empty(cache, dtype=torch.uint8, device="cuda"))
        self.most = max(self.most, sum(tensor.untyped_storage().nbytes() for tensor in taken))

    @contextmanager
    def during(self, wanted: bool) -> Iterator[None]:
        before, self._wanted = self._wanted, wanted
        try:
            yield
        finally:
            self._wanted = before


def install(
    patches: Patches,
    machine: MachineForTorch,
    current_device: Callable[[], int],
    otherwise: Counter[str],
    trials: Trials,
    padding: Padding,
    tuning: Tuning,
    whose: Whose,
    lines: SourceLines,
) -> None:
    """Until the patches are undone, Inductor compiles for the virtual card."""
    engine = machine.engine
    _device(patches, str([device.model for device in machine.devices]))
    versions = [engine.memory.torch_version(device.index) for device in machine.devices]
    older = any(_AS_THEY_LIE[0] <= version < _AS_THEY_LIE[1] for version in versions)
    configure(
        patches, importlib.import_module("torch._functorch.config"), "guess_tangent_strides_as_outputs", not older
    )
    kernels.install(patches, engine, tuning)
    _buffers(patches, engine, current_device)
    _lowering(patches, otherwise, trials, padding, lines)
    trials.install(patches)
    compiled = importlib.import_module("torch._inductor.output_code").CompiledFxGraph
    padding.install(patches, compiled)
    whose.install(patches, compiled)
    lines.install(patches, compiled)


def _device(patches: Patches, cards: str) -> None:
    interface = importlib.import_module("torch._dynamo.device_interface")
    for name in _FACE:
        if hasattr(torch.cuda, name):
            patches.set(interface.CudaInterface, name.lstrip("_"), staticmethod(getattr(torch.cuda, name)))
    patches.set(interface.CudaInterface, "get_raw_stream", staticmethod(torch._C._cuda_getCurrentRawStream))

    def forget() -> None:
        interface.caching_worker_device_properties.clear()
        interface.caching_worker_current_devices.clear()
        importlib.import_module("torch._inductor.runtime.hints").DeviceProperties.create.cache_clear()
        for module in _KEPT_IN:
            for function in vars(importlib.import_module(module)).values():
                if type(function) is _CACHED and function.__module__ == module:
                    function.cache_clear()

    patches.also_undo(forget)
    forget()
    config = importlib.import_module("torch._inductor.config")
    for name, value in _SETTINGS.items():
        configure(patches, config, name, value)
    # What the compiler keeps on disk is never taken for a card that is there, or for another one.
    package = importlib.import_module("gpumem_magic")
    ours = f"{torch.compiler.config.cache_key_tag} gpumem_magic {package.__version__} {cards}"
    configure(patches, torch.compiler.config, _TAG, ours)


def _buffers(patches: Patches, engine: Engine, current_device: Callable[[], int]) -> None:
    guards = torch._C._dynamo.guards
    view = guards._reinterpret_tensor  # type: ignore[attr-defined]

    def empty_strided_cuda(size: Any, stride: Any, dtype: Any) -> torch.Tensor:
        meta = made_plainly(torch.empty_strided, size, stride, dtype=dtype, device=META)
        with engine.uninterrupted, engine.lock:
            return engine.wrap(meta, current_device(), "torch.compile")

    def reinterpret_tensor(tensor: Any, size: Any, stride: Any, offset_increment: int = 0) -> torch.Tensor:
        if not isinstance(tensor, VirtualTensor):
            return view(tensor, size, stride, offset_increment)  # type: ignore[no-any-return]
        if engine.known(tensor) is None and not torch.is_inference_mode_enabled():
            return engine.on_memory_of(tensor, size, stride, offset_increment)
        with torch.no_grad():
            return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset_increment)

    patches.set(guards, "_empty_strided_cuda", empty_strided_cuda)
    patches.set(guards, "_reinterpret_tensor", reinterpret_tensor)
    if hasattr(guards, "_empty_strided_cpu_pinned"):
        # Of 2.12 and newer; pinning needs a driver.
        patches.set(guards, "_empty_strided_cpu_pinned", guards._empty_strided_cpu)  # type: ignore[attr-defined]
    for name in _ALIGNED_BY:
        if hasattr(guards, name):
            patches.set(guards, name, _aligned(getattr(guards, name)))
    if hasattr(guards, "assert_alignment"):
        check = guards.assert_alignment

        def assert_alignment(tensor: Any, *args: Any) -> None:
            if not isinstance(tensor, VirtualTensor):
                check(tensor, *args)

        patches.set(guards, "assert_alignment", assert_alignment)


def _aligned(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An input for kernels that were made for one that begins at a multiple of 16 bytes: a copy, where it does not."""
    copy = importlib.import_module("torch._inductor.utils").clone_preserve_strides

    def aligned(tensor: Any) -> Any:
        if not isinstance(tensor, VirtualTensor):
            return plain(tensor)
        return copy(tensor) if tensor.data_ptr() % _ALIGNMENT else tensor

    return aligned


def _is_for_a_card(graph: Any) -> bool:
    """Whether any of its tensors is on one: a program may compile for the host, too."""
    devices = (getattr(node.meta.get("val"), "device", None) for node in graph.graph.nodes)
    return any(device is not None and device.type == "cuda" for device in devices)


def _lowering(patches: Patches, otherwise: Counter[str], trials: Trials, padding: Padding, lines: SourceLines) -> None:
    config = importlib.import_module("torch._inductor.config")
    compiler = importlib.import_module("torch._inductor.compile_fx")
    output = importlib.import_module("torch._inductor.output_code")
    compile_ = compiler.fx_codegen_and_compile
    skipped = importlib.import_module("torch._dynamo.exc").SkipFrame

    def fx_codegen_and_compile(graph: Any, *args: Any, **kwargs: Any) -> Any:
        wanted, fuses = (any(getattr(config, name) for name in names) for names in (_TRIALS, _FUSIONS))
        for_a_card = (wanted or fuses) and _is_for_a_card(graph)
        wanted = wanted and for_a_card
        if wanted:
            otherwise["with the kernels of the default mode: a faster one that max-autotune finds may fuse more"] += 1
        if fuses and for_a_card:
            otherwise["with all fusions: a card that times them leaves out those that gain nothing"] += 1
        try:
            with config.patch(_UNTIMED), trials.during(wanted):
                compiled = compile_(graph, *args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except skipped as reason:
            # (Bfloat16 on a card that has none.)
            otherwise[f"eagerly, as on a card ({_first_line(str(reason))})"] += 1
            raise
        except Exception as error:
            why = swallowed(error)
            otherwise[f"operator by operator, since Inductor could not compile them here ({_first_line(why)})"] += 1
            return output.MockFXGraphCacheOutput(gm=lambda inputs: torch.fx.Interpreter(graph).run(*inputs))
        if isinstance(compiled, output.CompiledFxGraph):
            Whose.note(graph, compiled)
            padding.note(compiled)
            lines.note(compiled)
        return compiled

    patches.set(compiler, "fx_codegen_and_compile", fx_codegen_and_compile)
    cache = importlib.import_module("torch._inductor.codecache").FxGraphCache
    save = cache._save_graph

    def save_graph(key: str, compiled: Any, *args: Any) -> None:
        if isinstance(compiled, output.CompiledFxGraph):
            save(key, compiled, *args)

    patches.set(cache, "_save_graph", staticmethod(save_graph))


def compile_with(
    call: Callable[..., Any],
    otherwise: Counter[str],
    whose: Whose,
    lines: SourceLines,
    wrapper: Any,
    model: Any,
    inputs: Any,
    **kwargs: Any,
) -> Any:
    """What `torch.compile` does with one of Dynamo's graphs, and eagerly where PyTorch's compiler fails."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame

    config = importlib.import_module("torch._inductor.config")
    settings = wrapper.config
    # Graphs with trials are not kept: a report names those trials.
    tried = any(settings.get(name, getattr(config, name)) for name in _TRIALS)
    wrapper.config = {**settings, **_PYTHON, **(_UNKEPT if tried else {})}
    tag = f"{torch.compiler.config.cache_key_tag} {whose.begins(model)} {lines.begins(model)}"
    try:
        with importlib.import_module("torch.compiler.config").patch({_TAG: tag}):
            return call(wrapper, model, of_the_trace(inputs), **kwargs)
    except (torch.OutOfMemoryError, RestartAnalysis, SkipFrame):
        # (The last two are no failures: Dynamo makes the graph anew, with what it has learnt, or leaves the function be.)
        raise
    except Exception as error:
        why = swallowed(error)
        otherwise[f"eagerly, since PyTorch's compiler could not trace them here ({_first_line(why)})"] += 1
        return model.forward
    finally:
        wrapper.config = settings


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0]
