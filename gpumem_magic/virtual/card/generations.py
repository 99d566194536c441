"""What depends on the generation of PyTorch and CUDA: the workspaces of cuBLAS, and the size of a CUDA context.

Imports neither torch nor anything of NVIDIA's, so that device names can be read without them.

cuBLAS's workspaces come from PyTorch's allocator since 2.0 (pull requests 83461, 89027 and 91564 of pytorch/pytorch; before,
the library took its own: `cublas_outside`). cuBLASLt's, for a product with a bias: 1 MiB for the call (73439), kept for each
handle and stream since 2.9 (156495), one with cuBLAS's since 2.12 (168175, which the wheels of 2.11 do not have: their host code
takes both, and so they did on an H100). Blackwell got Hopper's 32 MiB with 2.12 (175344).
From 2.15 nothing is kept (194311), and cuBLASLt has 1 MiB of its own again, for the call (the build of 2.15.0). AMD builds have
them since 2.6 (138791).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gpumem_magic.units import KIB, MIB

Version = tuple[int, int]

WORKSPACE = 8_519_680
"""Two buffers of 4096 KiB and eight of 16 KiB."""
LARGE_WORKSPACE = 32 * MIB
"""On Hopper, and on Blackwell since 2.12."""
LT_WORKSPACE = 1 * MIB
FIRST_USES_FROM = (2, 11)
"""The first PyTorch with CUDA 13, with which it was measured what libraries take from the driver (`models.FirstUses`)."""
ADDRESSES_MAY_RISE_FROM = (2, 1)
"""The first PyTorch of which recordings have addresses from below (0x3... to 0xc...) that rise, which the driver decides: about
half of those with 2.1 to 2.11. Those of the others are 0x7..., and fall."""
_PAIR = re.compile(r":(\d+):(\d+)")


@functools.cache
def parse_version(text: str) -> Version:
    """(2, 6) of ``2.6.0+cu124``. Raises ValueError for what is no version."""
    match = re.match(r"(\d{1,3})\.(\d{1,3})(?![\d])", text.strip())
    if match is None:
        raise ValueError(f"{text.strip()!r} is not a PyTorch version: write it as 2.6 or 1.10")
    return int(match[1]), int(match[2])


def is_rocm(text: str) -> bool:
    """Whether the version is that of a build for AMD, as in ``2.2.2+rocm5.7``."""
    return "rocm" in text.casefold()


def cublas_workspace_bytes(version: Version, capability: tuple[int, int], rocm: bool = False) -> int:
    """One workspace of cuBLAS in PyTorch's allocator, in bytes; 0 where the library takes its own outside."""
    if rocm:
        return LARGE_WORKSPACE if version >= (2, 6) else 0
    if version < (2, 0):
        return 0
    large = capability[0] == 9 or (capability[0] in (10, 12) and version >= (2, 12))
    return LARGE_WORKSPACE if large else WORKSPACE


def cublas_outside(version_text: str) -> tuple[int, int]:
    """What the library takes from the driver for each handle, and once, where its workspaces are not PyTorch's.

    By default (CUBLAS_WORKSPACE_CONFIG, since CUDA 10.2, with which PyTorch 1.5 came) two buffers of 4 MiB, and eight of 16 KiB;
    the driver has small requests share 2 MiB. So nine published figures of nvidia-smi come out, each with two handles.
    """
    if is_rocm(version_text) or not (1, 5) <= parse_version(version_text) < (2, 0):
        return 0, 0
    return 8 * MIB, 2 * MIB


class Wheels(NamedTuple):
    """What PyTorch's wheels for Linux come with, as their metadata on PyPI say: ``13.0``, and cuDNN 9.20.0 as 92000, 8.9.2 as
    8902."""

    cuda: str
    cudnn: int


def wheels(version: Version) -> Wheels | None:
    """None where it is not known."""
    return {
        (2, 1): Wheels("12.1", 8902),
        (2, 2): Wheels("12.1", 8902),
        (2, 3): Wheels("12.1", 8902),
        (2, 4): Wheels("12.1", 90100),
        (2, 5): Wheels("12.4", 90100),
        (2, 6): Wheels("12.4", 90100),
        (2, 7): Wheels("12.6", 90501),
        (2, 8): Wheels("12.8", 91002),
        (2, 9): Wheels("12.8", 91002),
        (2, 10): Wheels("12.8", 91002),
        (2, 11): Wheels("13.0", 91900),
        (2, 12): Wheels("13.0", 92000),
        (2, 13): Wheels("13.0", 92000),
    }.get(version)


@dataclass(frozen=True)
class BlasPolicy:
    """How products get their workspaces. Sizes in bytes; kept: one for each handle and stream, else for one call."""

    cublas_bytes: int
    cublas_persistent: bool
    lt_bytes: int
    """cuBLASLt's own, for products with a bias; 0 where it shares cuBLAS's or has none here."""
    lt_persistent: bool
    lt_alone: bool = False
    """Whether a product of cuBLASLt's takes only its own: the wheels of 2.12 and 2.13 ask for no handle of cuBLAS's then."""


def blas_policy(version: Version, cublas_bytes: int, environment: Mapping[str, str]) -> BlasPolicy:
    """The policy of a PyTorch version on a device whose workspace is `cublas_bytes` (0: none at all).

    The variables CUBLAS_WORKSPACE_CONFIG, CUBLASLT_WORKSPACE_SIZE (KiB), TORCH_CUBLASLT_UNIFIED_WORKSPACE and
    TORCH_CUBLAS_WORKSPACE_CACHE count as they do there; what can't be read is ignored, as there.
    """
    if not cublas_bytes:
        return BlasPolicy(0, True, 0, True)
    pairs = _PAIR.findall(environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        cublas_bytes = sum(int(size) * int(count) for size, count in pairs) * KIB
    persistent = version < (2, 15) or environment.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
    unified = environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1" if version >= (2, 12) else "0") == "1"
    lt_bytes = 0
    # (What is there for one call only is each library's own.)
    if not (unified and persistent and version >= (2, 8)):
        text = environment.get("CUBLASLT_WORKSPACE_SIZE", "")
        lt_bytes = int(text) * KIB if text.isdecimal() else LT_WORKSPACE
    alone = bool(lt_bytes) and version >= (2, 12)
    return BlasPolicy(cublas_bytes, persistent, lt_bytes, version >= (2, 9) and persistent, alone)


# ---- contexts


@dataclass(frozen=True)
class Context:
    """This process's memory outside PyTorch's allocator on one kind of device."""

    nbytes: int
    is_estimate: bool


@dataclass(frozen=True)
class _Measured:
    card: str
    capability: tuple[int, int]
    version: Version
    lazy: bool
    mib: int


def _measured() -> Iterator[_Measured]:
    """The rows of ``contexts.txt``: nvidia-smi's figures without PyTorch's segments. Kernels were loaded all at once before 1.13,
    and since then on first use. Without a card, the figure is for others of its kind."""
    for line in Path(__file__).with_name("contexts.txt").read_text("utf-8").splitlines()[1:]:
        card, capability, version, kernels, mib, _ = line.split(None, 5)
        yield _Measured(card, parse_version(capability), parse_version(version), kernels == "lazy", int(mib))


_MEASURED = tuple(_measured())


def loads_lazily(version: Version) -> bool:
    """Whether kernels are loaded on first use where nobody has said otherwise."""
    return version >= (1, 13)


def context(key: str, capability: tuple[int, int], version: Version, lazy: bool) -> Context:
    """The measured context of that GPU nearest to the version, else of the most similar GPU (an estimate)."""
    if version < (1, 13):
        lazy = False

    def distance(entry: _Measured) -> tuple[bool, int, int]:
        generation = abs(_generation(entry.version) - _generation(version))
        chips = abs(10 * (entry.capability[0] - capability[0]) + entry.capability[1] - capability[1])
        return key != entry.card, 100 * generation + chips, abs(_rank(entry.version) - _rank(version))

    best = min((entry for entry in _MEASURED if entry.lazy == lazy), key=distance)
    near = key == best.card and _generation(best.version) == _generation(version)
    return Context(best.mib * MIB, not near)


def _generation(version: Version) -> int:
    """CUDA 10, CUDA 11 with all kernels loaded at once, and what came with lazy loading."""
    return 0 if version < (1, 7) else 1 if version < (1, 13) else 2


def _rank(version: Version) -> int:
    return 14 * version[0] + version[1]
