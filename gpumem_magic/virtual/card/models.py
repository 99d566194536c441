"""The GPUs of ``cards.json``: what PyTorch, nvidia-smi and NVML say of each, with the source of every figure.

To add one, add it there: the fields of `GpuModel`, or "like" another card and what differs. Where its figures come from is said
in `note`; one whose context is an estimate says "estimate" there. In general:

* Total memory drifts with the driver (a T4 was 15079 MiB in 2020 and 15095 in 2026), so each is the newest figure that
  was found in public `_CudaDeviceProperties(...)` lines; P100 and V100 keep those of their own time (2021), when torch
  and nvidia-smi still showed the same number. The difference of the two totals is what newer drivers keep for themselves.
* The CUDA context is what nvidia-smi shows above PyTorch's reserved memory after the first use. It depends on GPU, driver
  and build. Kernels are loaded when they are first used since CUDA 11.7, which took it from about 1.3 GiB to about
  0.4 GiB. Where nobody published a figure, `context_is_estimate` says so.
* cuBLAS workspaces are those of PyTorch 2.0 to 2.14 (see `generations`), for Hopper as "32 MiB"; the device option
  `torch=1.10` gives another version's, with its context.
* Multiprocessors, caches and limits are those of NVIDIA's public architecture tables. There are no clocks: nothing is timed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from gpumem_magic.units import GIB, KIB, MIB
from gpumem_magic.virtual.card.generations import WORKSPACE

_LAZY_CONTEXT = 400 * MIB
_LAZY_CONTEXT_NOTE = "context: an estimate, the 300 to 400 MiB that PyTorch's developers name for lazily loaded kernels"


class FirstUses(NamedTuple):
    """What a process takes from the driver with what it uses first, beside the context but for the last one, in bytes.

    cublas, cudnn: for each handle, and PyTorch has one for each host thread and for the autograd engine's. code: once, with the
    first of these libraries. streams: with the first stream of the program's own, when PyTorch makes all of its pool.
    elementwise: what of the context comes only with the first kernel that works element by element.
    """

    cublas: int = 0
    cudnn: int = 0
    code: int = 0
    streams: int = 0
    elementwise: int = 0


NO_FIRST_USES = FirstUses()


@dataclass(frozen=True)
class GpuModel:
    """What one kind of GPU is. All sizes in bytes.

    total_bytes: `torch.cuda.get_device_properties(...).total_memory`. smi_total_bytes: nvidia-smi's total. idle_bytes: shown by
    nvidia-smi before anything runs. context_bytes: this process's memory outside PyTorch's allocator once the device is in use.
    first_uses: what comes on top, where it was measured apart. cublas_workspace_bytes: one workspace in PyTorch's allocator, 0
    for none. oom_text_version: the PyTorch version whose out-of-memory text is used; None for the installed one. torch_version:
    the version whose library workspaces are used; None likewise. convolution_bytes: what cuDNN takes for each convolution while
    it runs; None for its own answer or the estimate (see `cudnn`). asks_cudnn: whether that is looked for. calibrated: when and
    with what `gpumem calibrate` measured these figures on this computer; empty for the catalogue's own. nvlinks: how many links
    to other cards there are. addresses_fall: whether the driver gives out addresses downwards (see
    `generations.ADDRESSES_MAY_RISE_FROM`).
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
    cublas_workspace_bytes: int = WORKSPACE
    shared_memory_per_block: int = 48 * KIB
    registers_per_multiprocessor: int = 65536
    max_threads_per_block: int = 1024
    warp_size: int = 32
    oom_text_version: str | None = None
    torch_version: str | None = None
    convolution_bytes: int | None = None
    asks_cudnn: bool = True
    calibrated: str = ""
    nvlinks: int = 0
    addresses_fall: bool = False
    first_uses: FirstUses = NO_FIRST_USES

    @property
    def driver_reserved_bytes(self) -> int:
        """What the driver keeps for itself: no program can have it, and nvidia-smi counts it as neither used nor free."""
        return max(0, self.smi_total_bytes - self.total_bytes)


_SIZES = {"KiB": KIB, "MiB": MIB}


def _read() -> Mapping[str, GpuModel]:
    """The cards of ``cards.json``: a `GpuModel`'s fields by name, sizes in bytes or as "15360 MiB". like: the card that one is
    but for what it says itself."""
    models: dict[str, GpuModel] = {}
    for key, card in json.loads(Path(__file__).with_name("cards.json").read_text(encoding="utf-8")).items():
        fields: dict[str, Any] = {name: _value(value) for name, value in card.items() if name != "like"}
        if "first_uses" in fields:
            fields["first_uses"] = FirstUses(**{name: _value(value) for name, value in fields["first_uses"].items()})
        like = models.get(card.get("like"))
        models[key] = GpuModel(key=key, **fields) if like is None else replace(like, key=key, **fields)
    return MappingProxyType(models)


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    number, _, unit = value.partition(" ") if isinstance(value, str) else ("", "", "")
    return int(number) * _SIZES[unit] if unit in _SIZES and number.isdecimal() else value


CATALOG = _read()
"""Every named model, by its key."""


def generic(total_bytes: int) -> GpuModel:
    """`virtual:SIZE`: a GPU that does not exist, like an A100 (compute capability 8.0) in all but its memory."""
    size = f"{total_bytes / GIB:g} GiB" if total_bytes >= GIB else f"{total_bytes / MIB:g} MiB"
    return replace(
        CATALOG["A100-40GB"],
        key=f"virtual:{size.replace(' ', '')}",
        name=f"Virtual GPU {size}",
        total_bytes=total_bytes,
        smi_total_bytes=total_bytes,
        context_bytes=min(_LAZY_CONTEXT, total_bytes // 4),
        nvlinks=0,
        note=f"no such GPU exists: the limits of an A100 (compute capability 8.0); {_LAZY_CONTEXT_NOTE}",
    )
