"""The constants of the virtual GPU that stand on published rows, each with the rows used; nothing else was fitted."""

from __future__ import annotations

FITTED = (
    "V100-16GB, torch 1.10: context 1341 MiB, from row 2 (nvidia-smi 1343 MiB with one tensor in a 2 MiB segment). Judge "
    "it by the other sources with nvidia-smi's figures.",
    "A10G: context 300 MiB; of the two figures that PyTorch's developers name for lazily loaded kernels (300 and 400 MiB) "
    "the one nearer to rows 53 and 56.",
    "Convolutions: which way cuDNN goes was chosen, copies for half precision on pytorch issue 123533, Winograd for float32 on "
    "GPUMemNet's VGG-16; their sizes follow from the algorithms. Judge them by issue 95024 and by the other networks.",
    "not fitted: the context of GPUMemNet's A100-40GB (1823 MiB, as measured by others on an A100-80GB).",
    "not fitted: TITAN-RTX, torch 1.4: context 877 MiB, as measured by others on an RTX 2080 Ti with torch 1.6.",
)

NOT_KNOWN = (
    "TITAN RTX with torch 1.4: nobody published its context; the predictions are 27 to 98 MiB more than nvidia-smi showed.",
    "Before torch 2.0 cuBLAS took its workspaces outside of PyTorch; they are not in the context here, and the one-GPU guide's "
    "runs are about 20 MiB low.",
    "fp16 autocast at batch 4 without checkpointing (row 7) is 3 % low: what torch 1.10's autocast kept beyond today's is not "
    "known.",
    "An LSTM's packed weights: cuDNN's buffer is about 100 KiB larger than the weights; its layout is cuDNN's own.",
    "cuDNN's scratch memory for convolutions is an estimate for two of its ways, and nothing for the others; what its trials "
    "take with torch.backends.cudnn.benchmark is not estimated.",
    "AMD's runtime outside PyTorch's allocator; compiled code; several GPUs.",
)
