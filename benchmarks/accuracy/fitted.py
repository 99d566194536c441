"""The constants of the virtual GPU that stand on published rows, each with the rows used; nothing else was fitted."""

from __future__ import annotations

FITTED = (
    "V100-16GB, torch 1.10: context 1341 MiB, from row 2 (nvidia-smi 1343 MiB with one tensor in a 2 MiB segment). Judge "
    "it by the other sources with nvidia-smi's figures.",
    "A10G: context 300 MiB; of the two figures that PyTorch's developers name for lazily loaded kernels (300 and 400 MiB) "
    "the one nearer to rows 53 and 56.",
    "not fitted: TITAN-RTX, torch 1.4: context 877 MiB, as measured by others on an RTX 2080 Ti with torch 1.6.",
)
