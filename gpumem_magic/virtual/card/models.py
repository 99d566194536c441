"""The GPUs that can be emulated: what PyTorch, nvidia-smi and NVML say of each, with the source of every figure.

Where the constants come from, model by model, is said in `note`. In general:

* Total memory drifts with the driver (a T4 was 15079 MiB in 2020 and 15095 in 2026), so each is the newest figure that
  was found in public `_CudaDeviceProperties(...)` lines; P100 and V100 keep those of their own time (2021), when torch
  and nvidia-smi still showed the same number. The difference of the two totals is what newer drivers keep for themselves.
* The CUDA context is what nvidia-smi shows above PyTorch's reserved memory after the first use. It depends on GPU, driver
  and build. Kernels are loaded when they are first used since CUDA 11.7, which took it from about 1.3 GiB to about
  0.4 GiB. Where nobody published a figure, `context_is_estimate` says so.
* cuBLAS workspaces are those of PyTorch 2.0 to 2.14 (see `generations`); the device option `torch=1.10` gives another
  version's, with its context.
* Multiprocessors, caches and limits are those of NVIDIA's public architecture tables. There are no clocks: nothing is timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from gpumem_magic.units import GIB, KIB, MIB
from gpumem_magic.virtual.card.generations import LARGE_WORKSPACE, WORKSPACE

_LAZY_CONTEXT = 400 * MIB
_LAZY_CONTEXT_NOTE = "context: an estimate, the 300 to 400 MiB that PyTorch's developers name for lazily loaded kernels"


@dataclass(frozen=True)
class GpuModel:
    """What one kind of GPU is. All sizes in bytes.

    total_bytes: `torch.cuda.get_device_properties(...).total_memory`. smi_total_bytes: nvidia-smi's total.
    idle_bytes: shown by nvidia-smi before anything runs. context_bytes: this process's memory outside PyTorch's allocator
    once the device is in use. cublas_workspace_bytes: one workspace in PyTorch's allocator, 0 for none.
    oom_text_version: the PyTorch version whose out-of-memory text is used; None for the installed one. torch_version: the version
    whose library workspaces are used; None likewise. convolution_bytes: what cuDNN takes for each convolution while it runs; None
    for the estimate (see `cudnn`). calibrated: when and with what `gpumem calibrate` measured these figures on
    this computer; empty for the catalogue's own.
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
    calibrated: str = ""

    @property
    def driver_reserved_bytes(self) -> int:
        """What the driver keeps for itself: no program can have it, and nvidia-smi counts it as neither used nor free."""
        return max(0, self.smi_total_bytes - self.total_bytes)


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
        note="totals: 2026, nvidia-smi's with driver 550 (40536 MiB with older ones); context: an estimate, that of "
        "the A100-80GB",
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
        cublas_workspace_bytes=LARGE_WORKSPACE,
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
        cublas_workspace_bytes=LARGE_WORKSPACE,
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
        note="torch's total: newest drivers; nvidia-smi's: 2023, driver 535; context: an estimate for lazily loaded kernels "
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
    GpuModel(
        key="A10G",
        name="NVIDIA A10G",
        capability=(8, 6),
        multi_processor_count=80,
        total_bytes=22731 * MIB,
        smi_total_bytes=23028 * MIB,
        context_bytes=300 * MIB,
        context_is_estimate=True,
        shared_memory_per_block_optin=99 * KIB,
        shared_memory_per_multiprocessor=100 * KIB,
        l2_cache_bytes=6 * MIB,
        max_threads_per_multiprocessor=1536,
        note="torch's total: within the 22.20 GiB of 2023 (22587 MiB was seen in 2026); nvidia-smi's: 2024, driver "
        "550; context: an "
        "estimate, the 300 MiB that PyTorch's developers name for lazily loaded kernels",
    ),
    GpuModel(
        key="TITAN-RTX",
        name="NVIDIA TITAN RTX",
        capability=(7, 5),
        multi_processor_count=72,
        total_bytes=24217 * MIB,
        smi_total_bytes=24217 * MIB,
        context_bytes=_LAZY_CONTEXT,
        context_is_estimate=True,
        shared_memory_per_block_optin=64 * KIB,
        shared_memory_per_multiprocessor=64 * KIB,
        l2_cache_bytes=6 * MIB,
        max_threads_per_multiprocessor=1024,
        note=f"totals: as Hugging Face's PyTorchBenchmark printed them in 2020; {_LAZY_CONTEXT_NOTE}",
    ),
    replace(
        _V100,
        key="colab-2021",
        idle_bytes=2 * MIB,
        context_bytes=1372 * MIB,
        cublas_workspace_bytes=0,
        oom_text_version="1.8",
        convolution_bytes=0,
        note="the device of the Colab investigation, with the out-of-memory text of torch 1.8 and cuBLAS outside PyTorch's "
        "allocator; its author said P100, but 16160 MiB and 15.78 GiB are a V100-SXM2-16GB's (a P100 shows 16280 MiB); "
        "context: worked out from the published readings",
    ),
)

CATALOG: Mapping[str, GpuModel] = MappingProxyType({model.key: model for model in _MODELS})
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
        note=f"no such GPU exists: the limits of an A100 (compute capability 8.0); {_LAZY_CONTEXT_NOTE}",
    )
