"""Parts of PyTorch that look at values or at the driver on their own account, and must not while a virtual GPU is on; and what of
Python's shows that one is."""

from __future__ import annotations

import re
import signal
import threading
import warnings
from typing import Any

import torch
import torch.autograd.profiler
import torch.backends.cudnn
import torch.cuda.nvtx
import torch.distributions
from torch._lobpcg import LOBPCG
from torch.utils.viz import _cycles as cycles

from gpumem_magic.devices.reads import Reads
from gpumem_magic.looks.code import is_our_file
from gpumem_magic.patching import Patches
from gpumem_magic.uninterrupted import usual
from gpumem_magic.virtual.engine import values
from gpumem_magic.virtual.engine.calls import line_below_ours
from gpumem_magic.virtual.engine.engine import Engine
from gpumem_magic.virtual.engine.modes import is_ours
from gpumem_magic.virtual.engine.pinned import Pinned
from gpumem_magic.virtual.engine.tensors import VirtualTensor
from gpumem_magic.virtual.operators import checks, ctc
from gpumem_magic.virtual.operators.convolution_layouts import layout_of

# NumPy's words: ``numpy/_core/src/umath/extobj.c`` and ``numpy/_core/_methods.py``, the same from 1.26 to 2.4.
_OF_NUMBERS = re.compile(r"(?:invalid value|divide by zero|overflow) encountered in |Mean of empty slice")
# Those of `torch.lobpcg` that are run.
_STEPS = 3
_MAY_BE_ZEROS = (
    "the program has read values that the virtual GPU does not know, and this may come of them: values=real behind the card's "
    "name computes them"
)


def install(patches: Patches, engine: Engine, pinned: Pinned) -> None:
    """Where the engine computes, tensors on the devices have values, which may be looked at."""
    patches.attempt(_tools_of_nvidia, pinned)
    steps = (
        _ctc_loss,
        _devices_of_modules,
        _devices_in_transforms,
        _convolution_formats,
        _signals,
        _places_of_warnings,
        _finder_of_cycles,
    )
    for step in steps:
        patches.attempt(step)
    if not engine.computes:
        for step in (_distributions, _checks_of_values, checks.install):
            patches.attempt(step)
        patches.attempt(_warnings_of_numbers, engine.reads)


def _places_of_warnings(patches: Patches) -> None:
    """What C++ warns of is said at the innermost line of Python, as without a virtual GPU, not at ours that runs operators."""
    module: Any = warnings
    original = module._showwarnmsg

    def show(said: warnings.WarningMessage) -> None:
        if is_our_file(said.filename):
            said.filename, said.lineno = line_below_ours()
            said.line = None
        original(said)

    # (`warnings.catch_warnings(record=True)` passes `showwarning` by, and has the C function behind it call this one, too.)
    patches.set(module, "_showwarnmsg", show)


def _finder_of_cycles(patches: Patches) -> None:
    """PyTorch's finder of reference cycles looks for CUDA tensors that are not fake: those of a virtual device are meant."""
    original: Any = cycles.is_cuda_tensor

    def is_cuda_tensor(thing: Any) -> bool:
        return isinstance(thing, VirtualTensor) or bool(original(thing))

    patches.set(cycles, "is_cuda_tensor", is_cuda_tensor)


def _warnings_of_numbers(patches: Patches, reads: Reads) -> None:
    """What NumPy warns of on the host, behind values that nobody knows, may come of those, and a library's compiled code may end
    the process by them a moment later: so it is said at once, the first time."""
    original = warnings.showwarning
    told: list[int] = []

    def show(
        message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        original(message, category, filename, lineno, file, line)
        if category is RuntimeWarning and not told and reads.counts and _OF_NUMBERS.match(str(message)):
            told.append(lineno)
            original(UserWarning(_MAY_BE_ZEROS), UserWarning, filename, lineno, file, line)

    patches.set(warnings, "showwarning", show)


def _distributions(patches: Patches) -> None:
    """Parameters and samples of distributions are checked by their values: what nobody knows is as it has to be."""
    kind = torch.distributions.Distribution
    init, validate = kind.__init__, kind._validate_sample

    def checked_init(self: Any, batch_shape: Any = (), event_shape: Any = (), validate_args: Any = None) -> None:
        with checks.HOLDING.raised():
            init(self, torch.Size(batch_shape), torch.Size(event_shape), validate_args)

    def checked_sample(self: Any, value: torch.Tensor) -> None:
        with checks.HOLDING.raised():
            validate(self, value)

    patches.set(kind, "__init__", checked_init)
    patches.set(kind, "_validate_sample", checked_sample)


def _checks_of_values(patches: Patches) -> None:
    """What stops where weights add up to zero (`cov` in ``Correlation.cpp``), or divides by a norm (``torch/_lobpcg.py``)."""

    def within(guesses: bool, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with values.guessing(guesses):
                return original(*args, **kwargs)

        return call

    for owner, name, guesses in ((torch, "cov", False), (torch.Tensor, "cov", False), (torch, "lobpcg", True)):
        patches.set(owner, name, within(guesses, getattr(owner, name)))

    count: Any = LOBPCG.update_converged_count

    def update_converged_count(self: Any) -> Any:
        """How many steps it takes nobody knows: from its third on each takes what the one before took."""
        found = count(self)
        if isinstance(self.X, VirtualTensor) and self.ivars["istep"] >= _STEPS:
            found = self.ivars["converged_count"] = self.iparams["k"]
        return found

    patches.set(LOBPCG, "update_converged_count", update_converged_count)


def _devices_in_transforms(patches: Patches) -> None:
    """What a transform of `torch.func` wraps around a virtual tensor is one of PyTorch's own, and names the device that C++ was
    told of: here it is on the device. (Where a compiler traces, PyTorch asks on its own account.)"""
    device_of, is_cuda_of, is_meta_of = (
        getattr(torch.Tensor, name).__get__ for name in ("device", "is_cuda", "is_meta")
    )

    def is_wrapped(self: torch.Tensor, told: torch.device) -> bool:
        return is_ours(told) and not torch._is_functional_tensor(self)

    def device(self: torch.Tensor) -> torch.device:
        told: torch.device = device_of(self)
        return torch.device("cuda", told.index) if told.type == "meta" and is_wrapped(self, told) else told

    def is_cuda(self: torch.Tensor) -> bool:
        return is_cuda_of(self) or is_wrapped(self, device_of(self))

    def is_meta(self: torch.Tensor) -> bool:
        return is_meta_of(self) and not is_wrapped(self, device_of(self))

    for ours in (device, is_cuda, is_meta):
        patches.set(torch.Tensor, ours.__name__, property(ours))


def _signals(patches: Patches) -> None:
    """Who asks for the handler of Ctrl-C sees Python's own where the engine's is in its place (asyncio goes by that)."""
    original_get, original_set = signal.getsignal, signal.signal

    def getsignal(signalnum: Any) -> Any:
        return usual(original_get(signalnum))

    def set_signal(signalnum: Any, handler: Any) -> Any:
        return usual(original_set(signalnum, handler))

    patches.set(signal, "getsignal", getsignal)
    patches.set(signal, "signal", set_signal)


def _tools_of_nvidia(patches: Patches, pinned: Pinned) -> None:
    """Ranges for NVIDIA's profilers, and CUDA's runtime, which look for a driver."""
    emit: Any = torch.autograd.profiler.emit_nvtx
    original_emit = emit.__init__

    def emit_init(self: Any, enabled: bool = True, *args: Any, **kwargs: Any) -> None:
        original_emit(self, False, *args, **kwargs)

    patches.set(emit, "__init__", emit_init)
    patches.set(torch.cuda.nvtx, "_nvtx", _Ranges())
    # The module under the name of CUDA's runtime, None in builds for the host.
    patches.set(torch.cuda, "_cudart", _Runtime(pinned))


class _Ranges:
    """Stands for `torch._C._nvtx`: ranges that no profiler of NVIDIA's will show."""

    def __init__(self) -> None:
        self._depth = threading.local()

    def rangePushA(self, message: str) -> int:
        """The depth of the new range, from 0."""
        depth = int(getattr(self._depth, "value", 0))
        self._depth.value = depth + 1
        return depth

    def rangePop(self) -> int:
        """The depth of the range that ends; -2 where there is none, as NVTX says."""
        depth = int(getattr(self._depth, "value", 0))
        self._depth.value = max(depth - 1, 0)
        return depth - 1 if depth else -2

    def rangeStartA(self, message: str) -> int:
        return 0

    def deviceRangeStart(self, message: str, stream: int) -> object:
        return object()

    def _nothing(self, *args: Any) -> None:
        """There is nobody to tell."""

    rangeEnd = deviceRangeEnd = markA = _nothing


class _Runtime:
    """Stands for `torch.cuda.cudart()`: starting a profiler of NVIDIA's and the like succeed, and do nothing; host memory that is
    registered counts as pinned."""

    class cudaError(int):
        success = 0

    def __init__(self, pinned: Pinned) -> None:
        self.cudaHostRegister, self.cudaHostUnregister = pinned.register, pinned.unregister

    def _succeeds(self, *args: Any) -> int:
        return 0

    cudaProfilerStart = cudaProfilerStop = cudaStreamCreate = cudaStreamDestroy = _succeeds

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        """Free and all bytes of the device."""
        return torch.cuda.mem_get_info(device)

    def cudaGetErrorString(self, error: int) -> str:
        return "no error"


_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def _ctc_loss(patches: Patches) -> None:
    """CUDA's CTC loss takes its lengths to the host; for tensor subclasses PyTorch leaves them where they are."""
    original = torch.ctc_loss

    def ctc_loss(
        log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(log_probs, VirtualTensor):
            names = ("blank", "reduction", "zero_infinity")
            blank, reduction, zero = (
                args[place] if len(args) > place else kwargs.get(name, usual)
                for place, (name, usual) in enumerate(zip(names, (0, 1, False), strict=True))
            )
            for name, lengths in (("input_lengths", input_lengths), ("target_lengths", target_lengths)):
                if isinstance(lengths, torch.Tensor) and lengths.dtype not in _INTEGERS:
                    raise RuntimeError(f"{name} must be integral")
            if ctc.is_cudnns(log_probs, targets, input_lengths, target_lengths, blank):
                deterministic = torch.backends.cudnn.deterministic
                return ctc.loss(log_probs, targets, input_lengths, target_lengths, reduction, deterministic, zero)
            input_lengths, target_lengths = (
                lengths.flatten().tolist() if isinstance(lengths, torch.Tensor) else lengths
                for lengths in (input_lengths, target_lengths)
            )
        return original(log_probs, targets, input_lengths, target_lengths, *args, **kwargs)

    patches.set(torch, "ctc_loss", ctc_loss)


def _devices_of_modules(patches: Patches) -> None:
    """``model.to(0)``: C++ would ask for an accelerator that it does not have. ``model.to(tensor)``: C++ would give the device
    that it was told of the tensor."""
    original: Any = torch._C._nn._parse_to

    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        elif type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        found = original(*args, **kwargs)
        like = args[0] if args else kwargs.get("tensor")
        return (like.device, *found[1:]) if isinstance(like, VirtualTensor) else found

    patches.set(torch._C._nn, "_parse_to", parse_to)


def _convolution_formats(patches: Patches) -> None:
    """C++ is told that tensors are on meta, and would choose a kernel that knows one memory format; cuDNN knows two.

    `_conv_determine_backend_memory_format` is what FakeTensor asks for a convolution's result.
    """
    original = getattr(torch._C, "_conv_determine_backend_memory_format", None)
    if original is None:
        return

    def determine(tensor: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(getattr(tensor, "fake_device", None), "type", "") != "cuda" or not torch.backends.cudnn.enabled:
            return original(tensor, weight, *args, **kwargs)
        return layout_of(tensor, weight)

    patches.set(torch._C, "_conv_determine_backend_memory_format", determine)
