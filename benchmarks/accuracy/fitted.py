"""What was chosen while looking at published figures, and what was assumed where a source does not say.

Figures that such a choice was made on prove nothing about it: judge the choice by the others. Rows are those of the published
table. What PyTorch's source or NVIDIA's tables say is not listed, except where a figure decided between readings of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """what: the constant or rule; where: its file; chosen_on: the figures; judge_by: figures that it was not chosen on."""

    what: str
    where: str
    chosen_on: str
    judge_by: str


FITTED = (
    Choice(
        "V100-16GB with torch 1.9: a context of 1341 MiB",
        "contexts.txt",
        "row 2 (nvidia-smi: 1343 MiB with one tensor in a 2 MiB segment)",
        "the other sources with nvidia-smi's figures",
    ),
    Choice(
        "A10G: a context of 300 MiB, not the 400 MiB that PyTorch's developers also name for lazily loaded kernels",
        "models.py",
        "rows 53 and 56, to which 300 is nearer",
        "nothing: no other source has an A10G with nvidia-smi's figures",
    ),
    Choice(
        "two cuBLAS workspaces after the first backward pass: one for each handle and stream, where the autograd "
        "thread has a handle of "
        "its own",
        "workspaces.py",
        "the attention sweep (rows 64 to 111), whose every start is 2 x 8.125 MiB above its tensors",
        "recordings of real GPUs, which hold two such blocks after training steps and one after a forward pass",
    ),
    Choice(
        "before torch 2.0 cuBLAS's workspaces take 8 MiB of the driver's memory for each handle and 2 MiB once",
        "generations.py",
        "rows 4 to 12, of which each is 18 MiB more than its context and segments; the sizes are those of "
        "CUBLAS_WORKSPACE_CONFIG's default",
        "nothing: no other source has nvidia-smi's figures of such a version with two handles",
    ),
    Choice(
        "colab-2021: a context of 1372 MiB, 2 MiB in use before the first program, the card of a V100-SXM2-16GB "
        "although its author says P100",
        "models.py",
        "the question's own readings: 16160 MiB in all, 2 MiB at first, and 15.78 GiB less 182.75 MiB less 14.26 GiB "
        "at the error",
        "nothing: it stands for that one machine",
    ),
    Choice(
        "colab-2021: nothing for cuBLAS and cuDNN",
        "models.py",
        "the question's readings, which come out without them; its PyTorch (1.8 or 1.9) had cuBLAS's workspaces "
        "outside its allocator",
        "nothing: it stands for that one machine",
    ),
    Choice(
        "recurrent layers before PyTorch 2.8: the reserve keeps 5 numbers for each step, layer and unit of an LSTM, 6 of a GRU, "
        "and 1 between layers; the workspace is the weights again and 2 numbers for each gate and 3 (LSTM) or 2 (GRU) states",
        "recurrent.py",
        "the two sizes printed in PyTorch's issue 2895 (reserve 736000000 and 864000000 bytes, workspace 17730560 and 13169920)",
        "nothing published; from 2.8 on it is what an H100 showed (`tests/data/recurrent_on_an_h100.csv`)",
    ),
    Choice(
        "the layers' widths of the model in the Colab investigation",
        "colab_model.py",
        "all readings of the question; the model itself was never published",
        "nothing: it shows that the explanation is possible, not that the author's layers looked like this",
    ),
    Choice(
        "convolutions in half precision: cuDNN copies input, weight and result into its own layout",
        "cudnn.py",
        "pytorch issue 123533; the sizes follow from the algorithm",
        "pytorch issue 95024",
    ),
    Choice(
        "convolutions in float32: what cuDNN 9.20 answers, in short, and before PyTorch 2.8 kernels of one point as recorded",
        "cudnn.py",
        "cuDNN's answers for the layers of eight networks (`benchmarks/convolution_plans.py`), recordings of ResNet-50; "
        "that 80 blocks share a weight's gradient on an A100, of 64, 80, 108 and 216, also on GPUMemNet's VGG-16",
        "its answers for those of six others, 9.10's, a recording of three layers on a Turing card, and GPUMemNet's ResNet-50 "
        "and MobileNetV2",
    ),
    Choice(
        "lazily loaded kernels: 300 MiB counts for compute capability 8.6 and 400 MiB for 7.5, though neither source "
        "names its GPU",
        "contexts.txt",
        "the A10G's rows 53 and 56 (see above); 400 MiB is left for the others",
        "nothing was published for T4, P100, L4, H100, H200 or RTX 4090; `gpumem calibrate` measures it",
    ),
    Choice(
        "the margin of 2 % with which a prediction is tried as a memory limit",
        "scores.py",
        "the errors of all rows, which were known when it was set",
        "nothing: it is no prediction",
    ),
)

ASSUMED = {
    "HF efficient-training-on-single-GPU": "torch 1.9: the source gives January 2022 and no version. The guide's program ran "
    "with the CUDA builds of 1.9.1 and 1.10.2 over the stand-in runtime, adapted to CUDA 10.2: 1.9.1's figure is 18 MiB below "
    "each of the nine rows, 1.10.2's 466 MiB below row 7. Optimizers, attention, clipping and the clearing of gradients are "
    "those of that time",
    "CS336 A2 attention sweep": "torch 2.6: the source gives a course of 2026 and no version; any from 2.0 to 2.14 "
    "keeps the same "
    "workspaces. A device of 46 GiB: it gives none, only less than 50 GB",
    "Raschka LLMs-from-scratch training speed": "A100-80GB: the source says A100; reserved memory does not depend on it",
    "PyTorch tutorial optimizer-in-backward": "the installed PyTorch on an A100-40GB: the source says at least 2.1, and no GPU",
    "pytorch_memlab README": "torch 1.12: the source gives no version, and its figures hold no cuBLAS workspace. 16 "
    "GiB: it names no GPU",
    "PyTorch forum 178671": "torch 2.0: the source says later than 1.13. 16 GiB: it names no GPU",
    "pytorch issue 95668": "torch 2.0: the source ran a nightly build of it",
    "optimum-benchmark CI (NVIDIA)": "A10G with torch 2.3: the source gives 2024 and no version, and no GPU. NVML's "
    "first version, "
    "which counts as used what the driver keeps for itself",
    "optimum-benchmark CI (ROCm)": "64 GiB: the source names no model of the MI200 series. torch 2.2 is given",
    "GPUMemNet": "an A100-80GB's context with kernels loaded at once (1823 MiB) on the A100-40GB: the study gives "
    "neither version nor context",
    "pytorch issue 95024": "A100-80GB with torch 1.13: by the 79.21 GiB of its error and its date, February 2023",
    "pytorch issue 123533": "A100-80GB with torch 2.2: by its date, April 2024; its GPU was not looked up",
    "HF PyTorchBenchmark doc": "torch 1.4 is given; a context of 877 MiB as measured on an RTX 2080 Ti with torch "
    "1.6, the nearest "
    "published",
}
"""By source: what the comparison assumes where the source gives no version, GPU or context, or gives a range."""

NOT_KNOWN = (
    "TITAN RTX with torch 1.4: nobody published its context; the predictions are 27 to 98 MiB more than nvidia-smi showed.",
    "An LSTM's packed weights: cuDNN's buffer is about 100 KiB larger than the weights; its layout is cuDNN's own.",
    "cuDNN's scratch memory for convolutions is an estimate where cuDNN is not installed. What its trials take with "
    "torch.backends.cudnn.benchmark is only known where it is.",
    "CUB's radix sort: how many keys it sorts without a second copy is not known, nor the size of its counters; both "
    "are left out.",
    "Compiled products whose rows do not begin at multiples of 16 bytes: a card pads them where trials say that it is quicker, "
    "here where copies take less time than the product. The ladder's rung with 50,257 words (row 37) is padded so, and an H100 "
    "chose so for 17 of 19 products (docs/compiled.md).",
    "AMD's runtime outside PyTorch's allocator; several GPUs.",
)
