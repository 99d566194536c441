"""The constants of the virtual GPU that were fitted to published rows, each with the rows used."""

from __future__ import annotations

FITTED = (
    "V100-16GB, torch 1.10: context 1341 MiB, from row 2 (nvidia-smi 1343 MiB with one tensor in a 2 MiB segment)",
)
