"""Convolutions that other people measured, beside the table: what cuDNN takes for them is an estimate, and is judged here.

Each figure is predicted twice, with the estimate and without (``cudnn=none``). The estimate is a fit to what newer versions of
cuDNN answer (`gpumem_magic.virtual.operators.cudnn`), and the context is another source's figure. Two of its rules were chosen
with a look at rows: copies for half precision on issue 123533, and how many blocks share a weight's gradient on GPUMemNet's
VGG-16. Judge them by the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from accuracy.nets import NETS
from accuracy.plans import Plan, Readings, carry_out, readings
from accuracy.scores import Result
from accuracy.table import Row
from gpumem_magic.units import GIB, MIB

# An A100-80GB with kernels loaded at once (the ml-engineering book); the study says neither its version nor its context. Its logs
# are of 6 February 2025 at the latest, when 2.6 was the newest.
_A100 = "A100-40GB,context=1823MiB,torch=2.6"


@dataclass(frozen=True)
class Published:
    """A measured figure, in MiB, and the program that gives it."""

    source: str
    what: str
    device: str
    key: Hashable
    run: Callable[[], Readings]
    reading: str
    value_mib: float
    resolution_mib: float


def rows() -> list[Published]:
    return [*_three_dimensions(), *_two_dimensions(), *_networks()]


def _three_dimensions() -> list[Published]:
    """pytorch issue 95024: a layer of 64 to 32 channels in float16 on an A100; the figures are printed to the byte."""

    def run() -> Readings:
        x = torch.empty(1, 64, 361, 370, 251, dtype=torch.half, device="cuda")
        layer = nn.Conv3d(64, 32, 3, padding=1).half().to("cuda")
        with torch.no_grad():
            layer(x)
        return readings()

    return [
        Published(
            "pytorch issue 95024",
            "Conv3d(64, 32, 3), fp16",
            "A100-80GB,torch=1.13",
            "3d",
            run,
            reading,
            size / MIB,
            1 / MIB,
        )
        for reading, size in (("max_memory_allocated", 12_874_233_344), ("max_memory_reserved", 12_880_707_584))
    ]


def _two_dimensions() -> list[Published]:
    """pytorch issue 123533: wider and wider inputs, each made while the one before is there; GiB to two digits."""
    published = (4.02, 5.52, 6.15, 6.77, 7.40, 8.02, 8.65, 9.27, 9.90, 10.52)
    widths = [1024 + 128 * number for number in range(len(published))]

    def run() -> Readings:
        layer = nn.Conv2d(256, 256, 3, padding=1).half().to("cuda")
        found = {}
        for width in widths:
            x = torch.empty((1, 256, 2048, width), dtype=torch.half, device="cuda")
            layer(x)
            found[f"width {width}"] = torch.cuda.memory_reserved()
            torch.cuda.empty_cache()
        del x
        return found

    step = 0.01 * GIB / MIB
    return [
        Published(
            "pytorch issue 123533", f"Conv2d(256, 256, 3), fp16, width {width}", "A100-80GB,torch=2.2", "2d", run,
            f"width {width}", value * GIB / MIB, step,
        )
        for width, value in zip(widths, published, strict=True)
    ]  # fmt: skip


def _networks() -> list[Published]:
    """The GPUMemNet study (arXiv 2602.17817; itu-rad/GPUMemNet): torchvision's networks, Adam, float32, nvidia-smi."""
    published = (
        ("VGG-16", 32, 8222), ("VGG-16", 128, 24408), ("ResNet-50", 32, 5262), ("ResNet-50", 128, 15120),
        ("MobileNetV2", 32, 4544), ("MobileNetV2", 128, 12578),
    )  # fmt: skip
    return [
        Published(
            "GPUMemNet", f"{name}, batch {batch}", _A100, (name, batch), _training(name, batch), "nvidia-smi", mib, 2.0
        )
        for name, batch, mib in published
    ]


def _training(name: str, batch: int) -> Callable[[], Readings]:
    def run() -> Readings:
        with torch.device("meta"):
            model = NETS[name]()
        # Nobody needs the weights' values.
        model = model.to_empty(device="cpu").cuda()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(2):
            x, y = torch.empty(batch, 3, 224, 224).cuda(), torch.zeros(batch, dtype=torch.long).cuda()
            optimizer.zero_grad()
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
        return readings()

    return run


def results(published: Sequence[Published], estimated: bool) -> list[Result]:
    """The prediction of each row, with the estimate or without."""
    done: dict[Hashable, Mapping[str, int]] = {}
    found = []
    for number, one in enumerate(published):
        device = one.device if estimated else f"{one.device},cudnn=none"
        predicted = carry_out(Plan(one.key, device, one.run, one.reading), done)
        empty = dict.fromkeys(
            ("gpu", "torch_version", "how_to_build", "dtype", "batch", "seq_or_image", "optimizer", "extras"), ""
        )
        row = Row(
            number=number, source=one.source, model=one.what, metric=one.reading, value_mib=one.value_mib,
            resolution_mib=one.resolution_mib, **empty,
        )  # fmt: skip
        found.append(Result(row, predicted))
    return found


def show() -> None:
    """Prints the rows and, for each source, the median and the worst error."""
    published = rows()
    pairs = list(zip(results(published, True), results(published, False), strict=True))
    source = ""
    for with_it, without in pairs:
        row = with_it.row
        if row.source != source:
            source = row.source
            print(
                f"\nconvolutions: {source}\n{'':>5} {'predicted':>12} {'published':>12} {'error':>9}  without the estimate   MiB"
            )
        mark = "=" if with_it.to_the_digit else " "
        print(
            f"{'':>5} {with_it.predicted_mib:>12,.2f} {row.value_mib:>12,.2f} {with_it.error:>+8.2%} {mark} "
            f"{without.error:>+19.2%}   {row.metric}; {row.model}",
            flush=True,
        )
    print()
    for source in dict.fromkeys(one.source for one in published):
        for words, side in (("with the estimate", 0), ("without", 1)):
            errors = [pair[side].error for pair in pairs if pair[side].row.source == source]
            worst = max(errors, key=abs)
            print(
                f"convolutions, {source}, {words}: {len(errors)} figures, median {statistics.median(map(abs, errors)):.2%}, "
                f"worst {worst:+.2%}"
            )
