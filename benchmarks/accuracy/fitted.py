"""The constants of the virtual GPU that stand on published rows, each with the rows used; nothing else was fitted."""

from __future__ import annotations

FITTED = (
    "V100-16GB, torch 1.10: context 1341 MiB, from row 2 (nvidia-smi 1343 MiB with one tensor in a 2 MiB segment). Judge "
    "it by the other sources with nvidia-smi's figures.",
    "A10G: context 300 MiB; of the two figures that PyTorch's developers name for lazily loaded kernels (300 and 400 MiB) "
    "the one nearer to rows 53 and 56.",
    "not fitted: TITAN-RTX, torch 1.4: context 877 MiB, as measured by others on an RTX 2080 Ti with torch 1.6.",
)

NOT_KNOWN = (
    "TITAN RTX with torch 1.4: nobody published its context; the predictions are 27 to 98 MiB more than nvidia-smi showed.",
    "Before torch 2.0 cuBLAS took its workspaces outside of PyTorch; they are not in the context here, and the one-GPU guide's "
    "runs are about 20 MiB low.",
    "fp16 autocast at batch 4 without checkpointing (row 7) is 3 % low: what torch 1.10's autocast kept beyond today's is not "
    "known.",
    "An LSTM's packed weights: cuDNN's buffer is about 100 KiB larger than the weights; its layout is cuDNN's own.",
    "cuDNN's workspaces for convolutions are not modelled: no row of the table has one.",
    "AMD's runtime outside PyTorch's allocator; compiled code; several GPUs.",
)
