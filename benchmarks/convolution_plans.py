"""What cuDNN itself answers for convolutions, beside what was recorded on real GPUs and beside the estimate. No GPU is needed.

    python benchmarks/convolution_plans.py --cudnn FILE [--card A100-40GB ...] [--torch 2.13]

FILE is the `libcudnn.so.9` of a CUDA build of PyTorch, or of NVIDIA's package (`pip install nvidia-cudnn-cu13`), 9.8 or newer
and with cuBLAS beside it. It is asked as `gpumem_magic` asks it (`virtual/operators/cudnn_library.py`), for the layers of
`convolution_layers.txt` at usual batches, forward and both gradients. The estimate for PyTorch 2.8 and newer was chosen on the
networks that are called fitted there; the others judge it. "Alike" is within 2 % or 4 KiB; the error is the sum of all
differences, of the bytes that cuDNN takes.

`convolutions_on_an_h100.csv` has what cuDNN 9.19 took on a real H100 (driver 580.159, torch 2.11.0+cu130, November 2026): 576 of
58,000 calls, twelve of each kind, drawn by chance. There kernels of one point are plain products in the plain layout, which no
library answers that is asked for a card that is not there: they are left out where the two are compared.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from gpumem_magic.virtual.card.generations import Version, parse_version
from gpumem_magic.virtual.card.models import CATALOG, GpuModel
from gpumem_magic.virtual.engine.memory import Convolution
from gpumem_magic.virtual.operators.cudnn import by_another_way, estimate, is_plain_product
from gpumem_magic.virtual.operators.cudnn_library import AskedLibrary

LAYERS = Path(__file__).with_name("convolution_layers.txt")
ON_AN_H100 = Path(__file__).with_name("convolutions_on_an_h100.csv")
ITS_VERSION = (2, 11)
CARDS = ("T4", "A100-40GB", "RTX3090", "H100")
WAYS = ("forward", "input", "weight")


class Kind(NamedTuple):
    name: str
    dtype: torch.dtype
    last: bool
    tf32: bool


KINDS = (
    Kind("float32, TF32", torch.float32, False, True),
    Kind("float32, no TF32", torch.float32, False, False),
    Kind("float32, TF32, channels last", torch.float32, True, True),
    Kind("half", torch.half, False, True),
    Kind("half, channels last", torch.half, True, True),
)


class Layer(NamedTuple):
    """Shapes without batch; weight as PyTorch has it."""

    network: str
    fitted: bool
    batches: tuple[int, ...]
    given: tuple[int, ...]
    made: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool

    def call(self, way: str, batch: int, kind: Kind) -> Convolution:
        fine, coarse = (self.made, self.given) if self.transposed else (self.given, self.made)
        shapes = ((batch, *fine), self.weight, (batch, *coarse))
        return Convolution(way, *shapes, self.stride, self.padding, self.dilation, self.groups, kind.dtype, kind.last)


class Recorded(NamedTuple):
    """A size that a recording of a real GPU shows, by its name in `benchmarks/recordings`, and the layer."""

    recording: str
    card: str
    call: Convolution
    nbytes: int


def recorded() -> list[Recorded]:
    trace = "particle-transformer-forward-trace"
    first = Convolution(
        "forward", (512, 4, 8256), (64, 4, 1), (512, 64, 8256), (1,), (0,), (1,), 1, torch.half, last=False
    )
    found = [Recorded(trace, "A100-40GB", first, 49_664)]
    one, channels = "counterfactuals-convolutions-batch-1", (30, 16, 32, 64)
    sizes = ((82_880, 50_168), (51_328, 84_032), (205_056, 204_928))
    for number, pair in enumerate(sizes):
        given, made, edge = channels[number], channels[number + 1], 256 >> number
        for way, nbytes in zip(WAYS, pair, strict=False):
            shapes = ((1, given, edge, edge), (made, given, 3, 3), (1, made, edge, edge))
            call = Convolution(way, *shapes, (1, 1), (1, 1), (1, 1), 1, torch.float32, last=False)
            found.append(Recorded(one, "TITAN-RTX", call, nbytes))
    return found


class Taken(NamedTuple):
    """What one call took on a real card; fitted: whether the estimate was chosen by its network."""

    fitted: bool
    call: Convolution
    tf32: bool
    nbytes: int


def on_an_h100() -> Iterator[Taken]:
    with ON_AN_H100.open(encoding="ascii", newline="") as file:
        for row in csv.DictReader(file):
            shapes = [sizes(row[name]) for name in ("fine", "weight", "coarse", "stride", "padding", "dilation")]
            dtype = getattr(torch, row["dtype"])
            call = Convolution(row["way"], *shapes, int(row["groups"]), dtype, row["last"] == "1")  # type: ignore[arg-type]
            yield Taken(row["fitted"] == "1", call, row["tf32"] == "1", int(row["bytes"]))


def read(text: str) -> Iterator[Layer]:
    network, fitted, batches = "", False, (1,)
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        if ": " in line:
            network, _, rest = line.partition(": ")
            numbers, _, role = rest.partition(" ")
            fitted, batches = role == "fitted", tuple(map(int, numbers.split(",")))
            continue
        given, made, kernel, *others = line.split()
        said = dict(word.split("=") for word in others if word != "t")
        points, transposed = sizes(kernel), "t" in others
        groups = int(said.get("groups", "1"))
        into, out = sizes(given), sizes(made)
        weight = (into[0], out[0] // groups) if transposed else (out[0], into[0] // groups)

        def spread(name: str, otherwise: int, of: dict[str, str] = said, much: int = len(points)) -> tuple[int, ...]:
            return sizes(of[name]) if name in of else (otherwise,) * much

        yield Layer(
            network, fitted, batches, into, out, (*weight, *points), spread("stride", 1), spread("padding", 0),
            spread("dilation", 1), groups, transposed,
        )  # fmt: skip


def sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


class Tally:
    def __init__(self) -> None:
        self.count = self.alike = self.taken = self.off = 0

    def add(self, answer: int, guess: int) -> None:
        difference = abs(answer - guess)
        self.count += 1
        self.alike += difference <= max(4096, answer // 50)
        self.taken += answer
        self.off += difference

    def __str__(self) -> str:
        share, off = self.alike / self.count, self.off / max(1, self.taken)
        return f"{share:6.0%} alike, off by {off:4.0%} of {self.taken / 2**30:5.1f} GiB"


def compare(
    library: AskedLibrary, model: GpuModel, kind: Kind, layers: Sequence[Layer], version: Version
) -> tuple[Tally, Tally]:
    """Of the fitted networks, and of the others. What PyTorch's own kernel does channel by channel is left out, and so are plain
    products."""
    fitted, others = Tally(), Tally()
    for layer in layers:
        by_depth = layer.groups > 1 and layer.groups == layer.given[0]
        if (by_depth and not kind.last) or (kind.last and len(layer.given) == 2):
            continue
        for batch in layer.batches:
            for way in WAYS:
                call = layer.call(way, batch, kind)
                if is_plain_product(call, model.capability, kind.tf32):
                    continue
                answer = next(library.workspaces(call, model, kind.tf32, False), None)
                if answer is not None:
                    guess = estimate(call, model.capability, version, kind.tf32)
                    (fitted if layer.fitted else others).add(answer, guess)
    return fitted, others


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/convolution_plans.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cudnn", metavar="FILE", required=True, help="libcudnn.so.9, or its name on another system")
    parser.add_argument(
        "--card", nargs="+", default=CARDS, choices=sorted(CATALOG), metavar="CARD", help="cards of the catalogue"
    )
    parser.add_argument(
        "--torch", default="2.13", metavar="VERSION", help="whose estimate is judged (default: %(default)s)"
    )
    options = parser.parse_args()
    version = parse_version(options.torch)
    library = AskedLibrary(options.cudnn)
    if not library.version:
        print(f"{options.cudnn} can't be asked: it is not there, or older than 9.8.", file=sys.stderr)
        return 1
    major, minor = divmod(library.version // 100, 100)
    print(f"cuDNN {major}.{minor}.{library.version % 100}, the estimate of PyTorch {options.torch}")
    print("\nRecorded on real GPUs, and answered:")
    for one in recorded():
        answer = next(library.workspaces(one.call, CATALOG[one.card], True, False), None)
        points = "x".join(map(str, one.call.kernel))
        layer = f"{one.call.fine[1]} -> {one.call.coarse[1]}, {points}, {one.call.way}"
        print(f"  {one.recording:38s} {layer:24s} {one.nbytes:9,} {'nothing' if answer is None else f'{answer:,}':>9s}")
    for fitted, who in ((True, "fitted"), (False, "other")):
        guessed, asked = Tally(), Tally()
        for took in on_an_h100():
            if took.fitted == fitted:
                guess = estimate(took.call, CATALOG["H100"].capability, ITS_VERSION, took.tf32)
                guessed.add(took.nbytes, guess)
                answer = next(library.workspaces(took.call, CATALOG["H100"], took.tf32, False), 0)
                other = by_another_way(took.call, CATALOG["H100"].capability, ITS_VERSION, took.tf32)
                asked.add(took.nbytes, answer if other is None else other)
        print(f"Taken on a real H100, {who} networks: answers {asked}; the estimate {guessed}")
    layers = list(read(LAYERS.read_text(encoding="utf-8")))
    networks = len({layer.network for layer in layers}), len({layer.network for layer in layers if layer.fitted})
    print(
        f"\n{len(layers)} layers of {networks[0]} networks; left those of the {networks[1]} fitted ones, right the others"
    )
    for key in options.card:
        for kind in KINDS:
            fitted, others = compare(library, CATALOG[key], kind, layers, version)
            if fitted.count and others.count:
                print(f"  {key:10s} {kind.name:30s} {fitted}   |{others}")
    library.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
