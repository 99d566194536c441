"""The GPUs that can be emulated, and how a person names one: `T4`, `2xT4`, `virtual:24GiB`, `T4,context=400MiB`.

Where the constants come from, model by model, is said in `note`. In general:

* Total memory drifts with the driver (a T4 was 15079 MiB in 2020 and 15095 in 2026), so each is the newest figure that
  was found in public `_CudaDeviceProperties(...)` lines; P100 and V100 keep those of their own time (2021), when torch
  and nvidia-smi still showed the same number. The difference of the two totals is what newer drivers keep for themselves.
* The CUDA context is what nvidia-smi shows above PyTorch's reserved memory after the first use. It depends on GPU, driver
  and build. Kernels are loaded when they are first used since CUDA 11.7, which took it from about 1.3 GiB to about
  0.4 GiB. Where nobody published a figure, `context_is_estimate` says so; `,context=...` sets your own.
* cuBLAS workspaces: PyTorch takes one of 8,519,680 bytes for each handle and stream from its own allocator, and of
  32 MiB on compute capability 9; before PyTorch 2.0 cuBLAS took its own, outside.
* Multiprocessors, caches and limits are those of NVIDIA's public architecture tables. There are no clocks: nothing is timed.

Imports neither torch nor anything of NVIDIA's.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Protocol

from gpumem_magic.units import GIB, KIB, MIB, human

MAX_DEVICES = 64
MAX_BYTES = 1 << 50

_CUBLAS_WORKSPACE = 8_519_680
_CUBLAS_WORKSPACE_CC9 = 32 * MIB
_LAZY_CONTEXT = 400 * MIB
_LAZY_CONTEXT_NOTE = "context: an estimate, the 300 to 400 MiB that PyTorch's developers name for lazily loaded kernels"


class UnknownDevice(ValueError):
    """A device name or option that is not understood. The text is one line and says what to write instead."""


@dataclass(frozen=True)
class GpuModel:
    """What one kind of GPU is. All sizes in bytes.

    total_bytes: `torch.cuda.get_device_properties(...).total_memory`. smi_total_bytes: nvidia-smi's total.
    idle_bytes: shown by nvidia-smi before anything runs. context_bytes: this process's memory outside PyTorch's allocator
    once the device is in use. cublas_workspace_bytes: one workspace in PyTorch's allocator, 0 for none.
    oom_text_version: the PyTorch version whose out-of-memory text is used; None for the installed one.
    """

    key: str
    name: str
    capability: tuple[int, int]
    multi_processor_count: int
    total_bytes: int
    smi_total_bytes: int
    context_bytes: int
    context_is_estimate: bool
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    l2_cache_bytes: int
    max_threads_per_multiprocessor: int
    note: str
    idle_bytes: int = 0
    cublas_workspace_bytes: int = _CUBLAS_WORKSPACE
    shared_memory_per_block: int = 48 * KIB
    registers_per_multiprocessor: int = 65536
    max_threads_per_block: int = 1024
    warp_size: int = 32
    oom_text_version: str | None = None

    @property
    def driver_reserved_bytes(self) -> int:
        """What the driver keeps for itself: no program can have it, and nvidia-smi counts it as neither used nor free."""
        return max(0, self.smi_total_bytes - self.total_bytes)


@dataclass(frozen=True)
class DeviceSpec:
    """The virtual devices that a text asks for, options applied; device i is ``models[i]``."""

    text: str
    models: tuple[GpuModel, ...]


@dataclass(frozen=True)
class RealDevice:
    """A GPU of this computer; index None means the current one (`cuda` without a number)."""

    text: str
    index: int | None


class DeviceState(Protocol):
    """What a virtual device tells the drivers' faces (nvidia-smi, NVML)."""

    @property
    def model(self) -> GpuModel: ...

    @property
    def index(self) -> int: ...

    @property
    def uuid(self) -> str:
        """As nvidia-smi writes it: ``GPU-`` and a UUID (see `device_uuid`)."""

    def used_bytes(self) -> int:
        """All memory in use now: idle, context and reserved."""

    def process_bytes(self) -> int:
        """This process's part (context and reserved); 0 before it uses the device."""


_V100 = GpuModel(
    key="V100-16GB",
    name="Tesla V100-SXM2-16GB",
    capability=(7, 0),
    multi_processor_count=80,
    total_bytes=16_945_512_448,
    smi_total_bytes=16_945_512_448,
    context_bytes=1341 * MIB,
    context_is_estimate=False,
    shared_memory_per_block_optin=96 * KIB,
    shared_memory_per_multiprocessor=96 * KIB,
    l2_cache_bytes=6 * MIB,
    max_threads_per_multiprocessor=2048,
    note="context: measured with driver 460 and kernels loaded at once (1343 MiB with a 2 MiB segment in it, Hugging Face's "
    "one-GPU guide); newer drivers show 16384 MiB in nvidia-smi",
)

_MODELS = (
    GpuModel(
        key="T4",
        name="Tesla T4",
        capability=(7, 5),
        multi_processor_count=40,
        total_bytes=15_828_320_256,
        smi_total_bytes=15360 * MIB,
        context_bytes=_LAZY_CONTEXT,
        context_is_estimate=True,
        shared_memory_per_block_optin=64 * KIB,
        shared_memory_per_multiprocessor=64 * KIB,
        l2_cache_bytes=4 * MIB,
        max_threads_per_multiprocessor=1024,
        note=f"totals: Colab 2025-26; {_LAZY_CONTEXT_NOTE}",
    ),
    GpuModel(
        key="P100",
        name="Tesla P100-PCIE-16GB",
        capability=(6, 0),
        multi_processor_count=56,
        total_bytes=17_071_734_784,
        smi_total_bytes=17_071_734_784,
        context_bytes=_LAZY_CONTEXT,
        context_is_estimate=True,
        shared_memory_per_block_optin=48 * KIB,
        shared_memory_per_multiprocessor=64 * KIB,
        l2_cache_bytes=4 * MIB,
        max_threads_per_multiprocessor=2048,
        note=f"totals: Colab and Kaggle 2020-21 (newer drivers show 16384 MiB in nvidia-smi); {_LAZY_CONTEXT_NOTE}",
    ),
    _V100,
    GpuModel(
        key="L4",
        name="NVIDIA L4",
        capability=(8, 9),
        multi_processor_count=58,
        total_bytes=22563 * MIB,
        smi_total_bytes=23034 * MIB,
        context_bytes=_LAZY_CONTEXT,
        context_is_estimate=True,
        shared_memory_per_block_optin=99 * KIB,
        shared_memory_per_multiprocessor=100 * KIB,
        l2_cache_bytes=48 * MIB,
        max_threads_per_multiprocessor=1536,
        note=f"totals: 2026 (22693 MiB with drivers of 2024-25); {_LAZY_CONTEXT_NOTE}",
    ),
    GpuModel(
        key="A100-40GB",
        name="NVIDIA A100-SXM4-40GB",
        capability=(8, 0),
        multi_processor_count=108,
        total_bytes=40441 * MIB,
        smi_total_bytes=40960 * MIB,
        context_bytes=481 * MIB,
        context_is_estimate=True,
        shared_memory_per_block_optin=163 * KIB,
        shared_memory_per_multiprocessor=164 * KIB,
        l2_cache_bytes=40 * MIB,
        max_threads_per_multiprocessor=2048,
        note="torch's total: 2026; nvidia-smi's: from memory, not looked up; context: an estimate, that of the A100-80GB",
    ),
    GpuModel(
        key="A100-80GB",
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        multi_processor_count=108,
        total_bytes=81038 * MIB,
        smi_total_bytes=81920 * MIB,
        context_bytes=481 * MIB,
        context_is_estimate=False,
        shared_memory_per_block_optin=163 * KIB,
        shared_memory_per_multiprocessor=164 * KIB,
        l2_cache_bytes=40 * MIB,
        max_threads_per_multiprocessor=2048,
        note="totals: 2026; context: 0.47 GiB measured with torch 2.1.1+cu121 and lazy loading (the ml-engineering book)",
    ),
    GpuModel(
        key="H100",
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        multi_processor_count=132,
        total_bytes=85_028_896_768,
        smi_total_bytes=81559 * MIB,
        context_bytes=481 * MIB,
        context_is_estimate=True,
        cublas_workspace_bytes=_CUBLAS_WORKSPACE_CC9,
        shared_memory_per_block_optin=227 * KIB,
        shared_memory_per_multiprocessor=228 * KIB,
        l2_cache_bytes=50 * MIB,
        max_threads_per_multiprocessor=2048,
        note="totals: SXM boards, CUDA 12.8 drivers; context: an estimate, that of the A100-80GB",
    ),
    GpuModel(
        key="H200",
        name="NVIDIA H200",
        capability=(9, 0),
        multi_processor_count=132,
        total_bytes=143156 * MIB,
        smi_total_bytes=143771 * MIB,
        context_bytes=481 * MIB,
        context_is_estimate=True,
        cublas_workspace_bytes=_CUBLAS_WORKSPACE_CC9,
        shared_memory_per_block_optin=227 * KIB,
        shared_memory_per_multiprocessor=228 * KIB,
        l2_cache_bytes=60 * MIB,
        max_threads_per_multiprocessor=2048,
        note="context: an estimate, that of the A100-80GB",
    ),
    GpuModel(
        key="RTX3090",
        name="NVIDIA GeForce RTX 3090",
        capability=(8, 6),
        multi_processor_count=82,
        total_bytes=24124 * MIB,
        smi_total_bytes=24576 * MIB,
        context_bytes=_LAZY_CONTEXT,
        context_is_estimate=True,
        shared_memory_per_block_optin=99 * KIB,
        shared_memory_per_multiprocessor=100 * KIB,
        l2_cache_bytes=6 * MIB,
        max_threads_per_multiprocessor=1536,
        note="nvidia-smi's total: from memory, not looked up; context: an estimate for lazily loaded kernels "
        "(1687 MiB was measured with torch 1.8.2, which loaded all at once)",
    ),
    GpuModel(
        key="RTX4090",
        name="NVIDIA GeForce RTX 4090",
        capability=(8, 9),
        multi_processor_count=128,
        total_bytes=24081 * MIB,
        smi_total_bytes=24564 * MIB,
        context_bytes=_LAZY_CONTEXT,
        context_is_estimate=True,
        shared_memory_per_block_optin=99 * KIB,
        shared_memory_per_multiprocessor=100 * KIB,
        l2_cache_bytes=72 * MIB,
        max_threads_per_multiprocessor=1536,
        note=f"totals: Linux, newest drivers; {_LAZY_CONTEXT_NOTE}",
    ),
    replace(
        _V100,
        key="colab-2021",
        idle_bytes=2 * MIB,
        context_bytes=1372 * MIB,
        cublas_workspace_bytes=0,
        oom_text_version="1.8",
        note="the device of the Colab investigation, with the out-of-memory text of torch 1.8 and cuBLAS outside PyTorch's "
        "allocator; its author said P100, but 16160 MiB and 15.78 GiB are a V100-SXM2-16GB's (a P100 shows 16280 MiB); "
        "context: worked out from the published readings",
    ),
)

CATALOG: Mapping[str, GpuModel] = MappingProxyType({model.key: model for model in _MODELS})
"""Every named model, by its key."""


def _bare(name: str) -> str:
    """A name without what people write differently: case, spaces, hyphens, underscores."""
    return re.sub(r"[\s_-]+", "", name).casefold()


_BY_BARE_NAME = {_bare(key): model for key, model in CATALOG.items()}
_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024 * GIB}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)")
_COUNT = re.compile(r"(\d+)\s*[xX]\s*(.*)", re.DOTALL)
_REAL = re.compile(r"cuda(?::(\d{1,3}))?", re.IGNORECASE)
_OPTIONS = ("context", "total", "idle", "name")


def parse_size(text: str) -> int:
    """Bytes of ``400MiB``, ``14.7 GiB``, ``0``. Raises UnknownDevice for anything else, decimal units included."""
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].casefold() if match else ""
    if unit in ("kb", "mb", "gb", "tb", "k", "m", "g", "t"):
        binary = f"{unit[0].upper()}iB"
        raise UnknownDevice(f"{text.strip()!r}: sizes are binary here, so write {binary} (1 GiB = 2^30 bytes)")
    if match is None or unit not in _UNITS or (not unit and float(match[1]) != 0):
        raise UnknownDevice(f"{text.strip()!r} is not a size: write a number and B, KiB, MiB, GiB or TiB, as in 400MiB")
    size = round(float(match[1]) * _UNITS[unit])
    if size > MAX_BYTES:
        raise UnknownDevice(
            f"{text.strip()!r} is more than {MAX_BYTES // _UNITS['tib']} TiB, the most that is emulated"
        )
    return size


def parse(text: str) -> DeviceSpec | RealDevice:
    """What `text` asks for: virtual devices with their options applied, or a GPU of this computer.

    Raises UnknownDevice, with a one-line text that says what can be written.
    """
    head, *options = (part.strip() for part in text.strip().split(","))
    real = _REAL.fullmatch(head)
    if real:
        if options:
            raise UnknownDevice(f"{text!r}: options are for virtual devices; a real GPU is what it is")
        return RealDevice(text.strip(), None if real[1] is None else int(real[1]))
    counted = _COUNT.fullmatch(head)
    count, name = (int(counted[1][:9]), counted[2]) if counted else (1, head)
    if not 1 <= count <= MAX_DEVICES:
        raise UnknownDevice(f"{text!r}: 1 to {MAX_DEVICES} devices can be emulated")
    model = _with_options(_model(name), options)
    return DeviceSpec(text.strip(), (model,) * count)


def _model(name: str) -> GpuModel:
    kind, colon, size = name.partition(":")
    if colon and _bare(kind) == "virtual":
        return generic(parse_size(size))
    model = _BY_BARE_NAME.get(_bare(name))
    if model is not None:
        return model
    wanted = _bare(name)
    near = [key for key in CATALOG if wanted and _bare(key).startswith(wanted)]
    near = near or [_BY_BARE_NAME[bare].key for bare in get_close_matches(wanted, _BY_BARE_NAME, n=2, cutoff=0.7)]
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    raise UnknownDevice(
        f"unknown device {name!r}{hint} Known: {', '.join(CATALOG)}, virtual:24GiB, several as 2xT4, options as "
        "T4,context=400MiB; cuda or cuda:1 for a real GPU"
    )


def generic(total_bytes: int) -> GpuModel:
    """`virtual:SIZE`: a GPU that does not exist, like an A100 (compute capability 8.0) in all but its memory."""
    size = f"{total_bytes / GIB:g} GiB" if total_bytes >= GIB else f"{total_bytes / MIB:g} MiB"
    return replace(
        CATALOG["A100-40GB"],
        key=f"virtual:{size.replace(' ', '')}",
        name=f"Virtual GPU {size}",
        total_bytes=_checked_total(total_bytes),
        smi_total_bytes=total_bytes,
        context_bytes=min(_LAZY_CONTEXT, total_bytes // 4),
        note=f"no such GPU exists: the limits of an A100 (compute capability 8.0); {_LAZY_CONTEXT_NOTE}",
    )


def _checked_total(size: int) -> int:
    if size < 64 * MIB:
        raise UnknownDevice(f"a device of {human(size)} is too small to emulate: give it at least 64 MiB")
    return size


def _with_options(model: GpuModel, options: list[str]) -> GpuModel:
    seen = set()
    for option in options:
        name, equals, value = (part.strip() for part in option.partition("="))
        name = name.casefold()
        if name not in _OPTIONS or not equals or not value:
            raise UnknownDevice(f"unknown option {option!r}: write context=, total=, idle= (sizes) or name=")
        if name in seen:
            raise UnknownDevice(f"option {name}= is given twice")
        seen.add(name)
        if name == "name":
            model = replace(model, name=_checked_name(value))
        elif name == "context":
            model = replace(model, context_bytes=parse_size(value), context_is_estimate=False)
        elif name == "idle":
            model = replace(model, idle_bytes=parse_size(value))
        else:
            # The total is torch's; nvidia-smi's stays above it by what the driver keeps.
            total = _checked_total(parse_size(value))
            model = replace(model, total_bytes=total, smi_total_bytes=total + model.driver_reserved_bytes)
    if model.context_bytes + model.idle_bytes >= model.total_bytes:
        raise UnknownDevice(
            f"context ({human(model.context_bytes)}) and idle memory ({human(model.idle_bytes)}) leave nothing of "
            f"{human(model.total_bytes)}: give a larger total= or a smaller context="
        )
    return model


def _checked_name(value: str) -> str:
    # NVML's buffer for names holds 95 characters.
    if len(value) > 95 or not value.isascii() or not value.isprintable():
        raise UnknownDevice("name= takes at most 95 printable ASCII characters")
    return value


def device_uuid(name: str, index: int) -> str:
    """The same for the same name and index, in every process: ``GPU-`` and a UUID."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{index}.{name}.gpumem-magic.invalid')}"


def bus_id(index: int) -> str:
    """The PCI address of virtual device `index` as nvidia-smi writes it: ``00000000:00:04.0`` for 0."""
    bus, slot = divmod(index, 28)
    return f"00000000:{bus:02X}:{4 + slot:02X}.0"


def describe() -> str:
    """The names that can be written, one a line: name, GPU, memory, context."""
    lines = [f"{'name':<12}{'GPU':<26}{'torch':>10}{'nvidia-smi':>12}{'context':>12}"]
    for model in CATALOG.values():
        context = f"{'about ' if model.context_is_estimate else ''}{model.context_bytes // MIB} MiB"
        total, smi = f"{model.total_bytes / GIB:.2f} GiB", f"{model.smi_total_bytes // MIB} MiB"
        lines.append(f"{model.key:<12}{model.name:<26}{total:>10}{smi:>12}{context:>15}")
    lines += [
        f"{'virtual:24GiB':<14}any size; otherwise like an A100",
        "",
        "colab-2021: the author of the question said P100, but its totals are those of a V100-SXM2-16GB.",
        "Several: 2xT4. Options: T4,context=400MiB,total=14.7GiB,idle=2MiB. A real GPU: cuda, cuda:1.",
        '"about": nobody published the context of that GPU with lazily loaded kernels; measure yours and set context=.',
    ]
    return "\n".join(lines)
