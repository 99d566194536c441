"""Accelerators that PyTorch supports but that are not measured, with one line about each; and what ROCm does differently."""

from __future__ import annotations

from typing import Any


def why_not(torch: Any) -> str | None:
    """A sentence about an accelerator of this computer whose memory can't be shown, or None."""
    mps = getattr(torch.backends, "mps", None)
    if mps is not None and mps.is_available():
        return (
            "This computer's GPU is Apple's (MPS): PyTorch tells only its total there, so nothing on `mps` is measured; "
            "code on `cuda` runs on a virtual GPU."
        )
    xpu = getattr(torch, "xpu", None)
    if xpu is not None and xpu.is_available():
        return (
            "This computer's GPU is Intel's (XPU): PyTorch keeps no readable history there, so nothing on `xpu` is measured; "
            "code on `cuda` runs on a virtual GPU."
        )
    return None


def is_rocm(torch: Any) -> bool:
    """Whether `torch.cuda` is AMD's: the same calls, but no NVML, so the device's figures are the runtime's."""
    return getattr(torch.version, "hip", None) is not None
