"""Convolutions: copies into the kernel's layout, the estimate of cuDNN's scratch memory, and columns where cuDNN is not used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from asked_for import made
from hypothesis import given, settings
from hypothesis import strategies as st
from scratch_memory import scratch
from torch import nn

import gpumem_magic
from gpumem_magic.snapshot.rules import round_size
from gpumem_magic.units import GIB, MIB
from gpumem_magic.user_report import Report
from gpumem_magic.virtual import gpu
from gpumem_magic.virtual.card import catalog
from gpumem_magic.virtual.engine.memory import Convolution
from gpumem_magic.virtual.operators.cudnn import by_another_way, estimate, largest_tried

A100 = (8, 0)
BEFORE, TODAY = (2, 6), (2, 13)


@pytest.fixture(autouse=True)
def benchmark_is_off() -> Iterator[None]:
    yield
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.enabled = True


@pytest.fixture
def on() -> Iterator[Callable[[str], gpu.VirtualMachine]]:
    yield gpu.turn_on
    gpu.turn_off()


def blocks(*sizes: int) -> int:
    return sum(-(-size // 512) * 512 for size in sizes)


# ---- what is published


def test_a_three_dimensional_layer_in_half_precision_is_met_to_the_byte(on: Any) -> None:
    """pytorch issue 95024, an A100 with 79.21 GiB: 12.874233344 GB allocated at most, 12.880707584 GB reserved."""
    on("A100-80GB,torch=1.13")
    x = torch.empty(1, 64, 361, 370, 251, dtype=torch.half, device="cuda")
    layer = nn.Conv3d(64, 32, 3, padding=1).half().to("cuda")
    with torch.no_grad():
        y = layer(x)
    assert y.shape[1] == 32
    assert torch.cuda.max_memory_allocated() == 12_874_233_344
    assert torch.cuda.max_memory_reserved() == 12_880_707_584


def test_a_sample_too_large_for_cudnn_asks_for_columns(on: Any) -> None:
    """The same with one more row: "Tried to allocate 108.21 GiB"."""
    on("A100-80GB,torch=1.13")
    x = torch.empty(1, 64, 362, 370, 251, dtype=torch.half, device="cuda")
    layer = nn.Conv3d(64, 32, 3, padding=1).half().to("cuda")
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 108\.21 GiB"):
        layer(x)


@pytest.mark.parametrize(("torch_version", "of_columns"), [("2.5", True), ("2.6", False), ("2.13", False)])
def test_newer_versions_of_cudnn_take_large_samples(on: Any, torch_version: str, of_columns: bool) -> None:
    on(f"virtual:700GiB,torch={torch_version}")
    x = torch.empty(1, 8, 1024, 1024, 257, dtype=torch.half, device="cuda")
    layer = nn.Conv3d(8, 8, 3, padding=1, bias=False, device="cuda", dtype=torch.half)
    with torch.no_grad():
        layer(x)
    columns = 8 * 27 * 1024 * 1024 * 257 * 2
    assert (torch.cuda.max_memory_allocated() > columns) is of_columns


def test_a_two_dimensional_layer_in_half_precision_is_met_to_the_digit(on: Any) -> None:
    """pytorch issue 123533: reserved after each layer, with the input before still there while the next is made."""
    on("A100-80GB,torch=2.2")
    layer = nn.Conv2d(256, 256, 3, padding=1).half().to("cuda")
    published = {1024: 4.02, 1152: 5.52, 1280: 6.15, 1408: 6.77, 1536: 7.40, 1664: 8.02, 1792: 8.65, 1920: 9.27}
    read = {}
    for width in published:
        x = torch.empty((1, 256, 2048, width), dtype=torch.half, device="cuda")
        layer(x)
        read[width] = round(torch.cuda.memory_reserved() / GIB, 2)
        torch.cuda.empty_cache()
    assert read == published


# ---- the estimate, by hand


def convolution(way: str = "forward", **changes: Any) -> Convolution:
    plain: dict[str, Any] = {
        "fine": (4, 16, 32, 30), "weight": (24, 16, 3, 3), "coarse": (4, 24, 32, 30), "stride": (1, 1), "padding": (1, 1),
        "dilation": (1, 1), "groups": 1, "dtype": torch.float32, "last": False,
    }  # fmt: skip
    return Convolution(way, **{**plain, **changes})


# What recordings of ResNet-50's training show: one sample, on an A100 with 2.2 and on an A10G with 2.5.
ROOT = {"fine": (1, 64, 56, 56), "weight": (256, 64, 1, 1), "coarse": (1, 256, 56, 56), "padding": (0, 0)}
LAST = {"fine": (1, 512, 7, 7), "weight": (2048, 512, 1, 1), "coarse": (1, 2048, 7, 7), "padding": (0, 0)}
MIDDLE = {"fine": (1, 128, 56, 56), "weight": (128, 128, 3, 3), "coarse": (1, 128, 28, 28), "stride": (2, 2)}
FIRST = {
    "fine": (1, 3, 224, 224),
    "weight": (64, 3, 7, 7),
    "coarse": (1, 64, 112, 112),
    "stride": (2, 2),
    "padding": (3, 3),
}
THIRD = {"fine": (1, 256, 14, 14), "weight": (256, 256, 3, 3), "coarse": (1, 256, 14, 14)}
THIRDS_FIRST = {**THIRD, "fine": (1, 256, 28, 28), "stride": (2, 2)}
OLD, LESS_OLD = (2, 2), (2, 5)


@pytest.mark.parametrize(
    ("call", "version", "capability", "recorded"),
    [
        (convolution(**ROOT), OLD, A100, 128 * MIB),
        (convolution("weight", **ROOT), OLD, A100, 134_283_264),
        (convolution("weight", **LAST), OLD, A100, 501_776),
        (convolution("weight", **LAST), LESS_OLD, (8, 6), 501_776),
        (convolution(**ROOT), LESS_OLD, (8, 6), 0),
        (convolution("input", **{**ROOT, "weight": (64, 256, 1, 1)}), LESS_OLD, (8, 6), 0),
        (convolution(**MIDDLE), OLD, A100, 2_195_472),
        (convolution("input", **MIDDLE), OLD, A100, 2_596_880),
        (convolution("weight", **MIDDLE), OLD, A100, 2_596_880),
        # `resnet50-momentum-page`, whose first layer 9.1 reads as it lies.
        (convolution(**FIRST), OLD, A100, 3_851_024),
        (convolution(**FIRST), LESS_OLD, (8, 6), 75_280),
        # Few tiles of 2,304 summands are gathered from several blocks; on an A100 an input's gradient is so, too.
        (convolution(**THIRD), OLD, A100, 2_822_575),
        (convolution(**THIRD), LESS_OLD, (8, 6), 2_822_575),
        (convolution(**THIRDS_FIRST), OLD, A100, 3_424_687),
        (convolution("input", **THIRD), OLD, A100, 3_023_279),
        # `octree-nca-slide-inference-2.3`, on an RTX 3090.
        (convolution(fine=(1, 32, 604, 604), weight=(64, 32, 1, 1), coarse=(1, 64, 604, 604)), (2, 3), (8, 6), 128 * MIB),
        (convolution(fine=(1, 64, 604, 604), weight=(13, 64, 1, 1), coarse=(1, 13, 604, 604)), (2, 3), (8, 6), 0),
        # `octree-nca-training-forward`, likewise: sums of patches.
        (convolution(fine=(2, 1, 40, 40, 20), weight=(1, 1, 12, 12, 5), coarse=(2, 1, 29, 29, 16), stride=(1, 1, 1),
                     padding=(0, 0, 0), dilation=(1, 1, 1)), (2, 3), (8, 6), 0),
        # `particle-transformer-batches-of-128-trace`, on an A100.
        (convolution(fine=(128, 64, 8256), weight=(64, 64, 1), coarse=(128, 64, 8256), stride=(1,), padding=(0,),
                     dilation=(1,), dtype=torch.half), LESS_OLD, A100, 0),
    ],
)  # fmt: skip
def test_before_it_is_what_recordings_show(
    call: Convolution, version: tuple[int, int], capability: tuple[int, int], recorded: int
) -> None:
    assert estimate(call, capability, version) == recorded


def images(edge: int, given: int, made: int, points: int = 1, stride: int = 1, many: int = 128) -> dict[str, Any]:
    return {
        "fine": (many, given, edge, edge), "weight": (made, given, points, points), "stride": (stride, stride),
        "coarse": (many, made, edge // stride, edge // stride), "padding": (points // 2, points // 2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("way", "layer", "block"),
    [
        ("forward", images(56, 64, 256), 0),
        ("input", images(28, 512, 128), 0),
        ("forward", images(7, 512, 2048), 17_039_872),
        ("forward", images(7, 2048, 512), 55_575_040),
        ("input", images(7, 512, 2048), 68_420_096),
        ("weight", images(7, 2048, 512), 64_225_792),
        ("weight", images(56, 64, 64), 2_097_152),
        ("weight", images(28, 512, 256), 67_108_864),
        ("forward", images(224, 3, 64, points=7, stride=2), 75_776),
        ("forward", images(56, 64, 64, points=3), 102_908_416),
    ],
)
def test_before_it_is_what_a_recording_of_many_images_shows(way: str, layer: dict[str, Any], block: int) -> None:
    """`resnet50-imagenet-timeline`, on an A100 with 2.3, which has blocks."""
    asked = estimate(convolution(way, **layer), A100, (2, 3))
    assert (round_size(asked) if asked else 0) == block


@pytest.mark.parametrize(
    ("layer", "block"),
    [
        (images(224, 3, 64, points=7, stride=2, many=256), 113_152),
        (images(56, 64, 128, points=3, stride=2, many=244), 300_032),
        (images(28, 128, 256, stride=2, many=256), 132_608),
        (images(14, 256, 512, points=3, stride=2, many=244), 4_719_104),
        (images(56, 64, 64, points=3, many=256), 410_112),
        (images(28, 128, 128, points=3, many=256), 356_515_840),
        (images(28, 128, 128, points=3, many=244), 343_146_496),
        (images(14, 256, 256, points=3, many=256), 304_349_184),
        (images(14, 256, 256, points=3, many=244), 297_271_296),
        (images(7, 512, 512, points=3, many=256), 188_743_680),
        (images(7, 512, 512, points=3, many=244), 188_743_680),
    ],
)
def test_a_forward_on_volta_takes_what_a_recording_shows(layer: dict[str, Any], block: int) -> None:
    """`memes-evaluation-v100-trace` of `benchmarks/recordings`: ResNet-18 on a V100, before PyTorch 2.1."""
    assert round_size(estimate(convolution(**layer), (7, 0), (2, 0))) == block


def test_few_images_other_ways_and_layouts_on_volta_are_as_on_turing() -> None:
    for layer in (images(28, 128, 128, points=3, many=8), images(56, 128, 128, points=3), images(28, 64, 64, points=3)):
        call = convolution(**layer)
        assert estimate(call, (7, 0), (2, 0)) == estimate(call, (7, 5), (2, 0)) > 0
    layer = images(28, 128, 128, points=3)
    for call in (convolution("input", **layer), convolution("weight", **layer), convolution(last=True, **layer)):
        assert estimate(call, (7, 0), (2, 0)) == estimate(call, (7, 5), (2, 0))
    assert estimate(convolution(**layer), (7, 0), TODAY) == estimate(convolution(**layer), (7, 5), TODAY)
    wide = {**images(28, 128, 128, points=3, stride=2), "dilation": (2, 2)}
    assert estimate(convolution(**wide), (7, 0), (2, 0)) == 0


def test_kernels_of_one_point_that_are_no_plain_product() -> None:
    """With the channels last or a stride there are copies; without TF32 nothing was seen."""
    fine, weight = 64 * 56 * 56 * 4, 64 * 256 * 4
    assert estimate(convolution("input", last=True, **ROOT), A100, OLD) == weight + 4 * fine + 16
    strided = {**ROOT, "stride": (2, 2), "coarse": (1, 256, 28, 28)}
    assert estimate(convolution("input", **strided), A100, TODAY) == 2 * fine + weight + 16
    assert estimate(convolution(**ROOT), A100, OLD, tf32=False) == 0
    assert estimate(convolution(**ROOT), (7, 5), OLD) == 0
    assert estimate(convolution(groups=2, **{**ROOT, "weight": (256, 32, 1, 1)}), A100, OLD) == 0


@pytest.mark.parametrize(("given", "made", "sums"), [(16, 32, 0), (8, 8, 0), (32, 17, 1)])
def test_a_small_weight_of_one_point_is_summed_up_in_its_place(given: int, made: int, sums: int) -> None:
    """As 36 gradients of up to 512 values showed on an H100 (SASRec's layers; a UNet's with a ControlNet)."""
    shapes: dict[str, Any] = {
        "fine": (16, given, 4, 5),
        "weight": (made, given, 1, 1),
        "coarse": (16, made, 4, 5),
        "padding": (0, 0),
    }
    assert estimate(convolution("weight", **shapes), (9, 0), (2, 11)) == sums * 16 * given * made * 4


@pytest.mark.parametrize(
    ("way", "dtype", "channels", "points", "last", "copies"),
    [
        ("forward", torch.float16, 4, 9, False, "both sides and weight"),
        ("input", torch.bfloat16, 16, 1, False, "both sides"),
        ("weight", torch.float16, 64, 9, False, "both sides and weight"),
        ("weight", torch.float16, 32, 9, False, "both sides and weight"),
        ("weight", torch.float16, 16, 9, False, "nothing"),
        ("weight", torch.float32, 8, 9, False, "both sides and weight"),
        ("weight", torch.float32, 8, 9, True, "both sides"),
        ("weight", torch.float16, 8, 1, True, "both sides"),
        ("weight", torch.float16, 64, 9, True, "nothing"),
        ("input", torch.float16, 8, 1, True, "both sides"),
        ("input", torch.float32, 16, 1, True, "both sides"),
        ("input", torch.float32, 32, 9, True, "nothing"),
        ("forward", torch.float16, 2, 9, False, "nothing"),
        ("forward", torch.float16, 1, 9, False, "nothing"),
        ("forward", torch.float16, 16, 9, True, "both sides"),
        ("forward", torch.float32, 8, 9, False, "both sides and weight"),
        ("input", torch.float32, 8, 9, False, "nothing"),
    ],
)
def test_an_h100_copies_groups_of_enough_channels(
    way: str, dtype: torch.dtype, channels: int, points: int, last: bool, copies: str
) -> None:
    kernel = (3, 3) if points == 9 else (1, 1)
    weight = (8 * channels, channels, *kernel)
    sides = (2, 8 * channels, 28, 28)
    layer = {"fine": sides, "weight": weight, "coarse": sides, "padding": (points // 9,) * 2}
    call = convolution(way=way, dtype=dtype, last=last, groups=8, **layer)
    both = 2 * 2 * 8 * channels * 28 * 28
    numbers = {"nothing": 0, "both sides": both, "both sides and weight": both + 8 * channels**2 * points}[copies]
    # (Each group's copy begins at a multiple, but for partial sums of a weight's.)
    parts = 8 if last and way != "weight" else 1
    assert estimate(call, (9, 0), (2, 11)) == (numbers * dtype.itemsize + parts * 16 if numbers else 0)
    assert estimate(call, (8, 0), (2, 11)) == 0


@pytest.mark.parametrize(
    ("given", "made", "points", "length", "is_copied"),
    [(64, 16, 16, 1000, False), (256, 64, 16, 1000, True), (16, 256, 4, 1000, False), (256, 256, 4, 4000, True)],
)
def test_an_h100_turns_short_lines_into_longer_ones_without_copies(
    given: int, made: int, points: int, length: int, is_copied: bool
) -> None:
    """Transposed convolutions along a line in TF32, as in vocoders; the longer ones are copied."""
    stride = 8 if length > 1000 else 2
    longer = (length - 1) * stride + points - 2 * (points // 4)
    call = convolution(
        way="input", fine=(1, made, 1, longer), weight=(given, made, 1, points), coarse=(1, given, 1, length),
        stride=(1, stride), padding=(0, points // 4),
    )  # fmt: skip
    assert (estimate(call, (9, 0), (2, 11)) > 0) == is_copied


@pytest.mark.parametrize(("width", "made", "is_copied"), [(2, 16, False), (3, 16, True), (2, 32, True)])
def test_an_h100_copies_no_small_volume_for_a_small_transposed_kernel(width: int, made: int, is_copied: bool) -> None:
    """Twice as large by kernels of 2 x 2 x 2, as in volumes' U-Nets, in TF32."""
    edge = 15 * 2 + width
    call = convolution(
        way="input", fine=(2, made, edge, edge, edge), weight=(64, made, *[width] * 3), coarse=(2, 64, 16, 16, 16),
        stride=(2, 2, 2), padding=(0, 0, 0), dilation=(1, 1, 1),
    )  # fmt: skip
    assert (estimate(call, (9, 0), (2, 11)) > 0) == is_copied


@pytest.mark.parametrize(
    ("way", "dtype", "images", "edge", "channels", "groups", "width", "taken"),
    [
        # As an H100 took for strides of two, with the channels last.
        ("input", torch.float32, 32, 28, 32, 4, 3, 812_048),
        ("input", torch.float32, 32, 56, 256, 4, 3, 129_040_448),
        ("input", torch.float32, 1, 56, 256, 2, 1, 4_145_184),
        ("input", torch.float16, 32, 14, 64, 4, 5, 1_003_584),
        ("input", torch.float16, 4, 28, 64, 4, 3, 0),
        ("input", torch.float16, 32, 28, 128, 2, 1, 0),
        ("weight", torch.float32, 1, 56, 128, 8, 3, 2_007_056),
    ],
)
def test_an_h100s_gradients_of_strided_groups_that_lie_last(
    way: str, dtype: torch.dtype, images: int, edge: int, channels: int, groups: int, width: int, taken: int
) -> None:
    call = convolution(
        way=way, dtype=dtype, last=True, groups=groups, fine=(images, channels, edge, edge),
        weight=(channels, channels // groups, width, width), coarse=(images, channels, edge // 2, edge // 2),
        stride=(2, 2), padding=(width // 2,) * 2,
    )  # fmt: skip
    assert estimate(call, (9, 0), (2, 11)) == taken


@pytest.mark.parametrize(
    ("images", "edge", "channels", "width", "sums"),
    [
        (4, 14, 512, 7, 8 * 4 * 512 * 49),
        (4, 56, 100, 3, 8 * 4 * 128 * 9),  # channels in 32s
        (1, 112, 32, 3, 8 * 32 * 9),
        (1, 28, 512, 7, 0),  # one small image
        (3, 14, 64, 3, 0),  # few results
    ],
)
def test_an_h100_sums_up_weights_of_single_channels_that_lie_last(
    images: int, edge: int, channels: int, width: int, sums: int
) -> None:
    """As it took for 64 of 70 gradients in half precision; a library that is asked for a card that is not there says more."""
    sides = (images, channels, edge, edge)
    layer = {"fine": sides, "weight": (channels, 1, width, width), "coarse": sides, "padding": (width // 2,) * 2}
    call = convolution("weight", dtype=torch.half, last=True, groups=channels, **layer)
    assert estimate(call, (9, 0), (2, 11)) == by_another_way(call, (9, 0), (2, 11)) == 4 * sums
    assert by_another_way(convolution("weight", groups=channels, **layer), (9, 0), (2, 11)) is None
    assert estimate(call, (8, 0), (2, 11)) == 0


@pytest.mark.parametrize(
    ("dtype", "images", "made", "width", "is_read"),
    [
        (torch.bfloat16, 64, 192, 16, True),
        (torch.float16, 8, 384, 8, True),
        (torch.float16, 8, 768, 16, False),
        (torch.float16, 8, 192, 7, False),
        (torch.float32, 32, 768, 16, True),
        (torch.float32, 64, 768, 16, False),
        (torch.float32, 8, 192, 8, False),
    ],
)
def test_an_h100_reads_patches_as_they_lie(
    dtype: torch.dtype, images: int, made: int, width: int, is_read: bool
) -> None:
    """The first layers of vision transformers: cuDNN 9.19 for an H100."""
    layer = {
        "fine": (images, 3, 14 * width, 14 * width), "weight": (made, 3, width, width), "coarse": (images, made, 14, 14),
        "stride": (width, width), "padding": (0, 0), "dtype": dtype,
    }  # fmt: skip
    assert (estimate(convolution(**layer), (9, 0), (2, 11)) == 0) is is_read
    assert estimate(convolution(**layer), A100, TODAY) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": (24, 16, 1, 1)},
        {"groups": 2},
        {"dtype": torch.float64},
        {"dtype": torch.half, "last": True},
        {"dtype": torch.half, "groups": 2},
        {"dtype": torch.half, "weight": (24, 16, 1, 1)},
    ],
)
def test_what_is_not_known_is_not_estimated(changes: dict[str, Any]) -> None:
    assert estimate(convolution(**changes), A100, BEFORE) == 0


@pytest.mark.parametrize(
    ("dtype", "capability", "copies"),
    [
        (torch.half, (6, 0), False),
        (torch.half, (7, 0), True),
        (torch.half, (9, 0), True),
        (torch.bfloat16, (7, 5), False),
        (torch.bfloat16, (8, 0), True),
    ],
)
def test_tensor_cores_want_channels_last(dtype: torch.dtype, capability: tuple[int, int], copies: bool) -> None:
    found = estimate(convolution(dtype=dtype, weight=(24, 16, 1, 1), stride=(2, 2)), capability, BEFORE)
    assert found == (2 * (4 * 16 * 32 * 30 + 24 * 16 + 4 * 24 * 32 * 30) + 16 if copies else 0)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.integers(1, 40), st.integers(1, 40),
    st.sampled_from([torch.float32, torch.half]),
)  # fmt: skip
def test_the_estimate_is_bounded_and_grows_with_the_batch(
    batch: int, inside: int, outside: int, height: int, width: int, dtype: torch.dtype
) -> None:
    def of(count: int) -> int:
        shapes = {"fine": (count, inside, height, width), "coarse": (count, outside, height, width)}
        return estimate(convolution(weight=(outside, inside, 3, 3), dtype=dtype, **shapes), A100, BEFORE)

    assert of(batch) <= of(batch + 1)
    # No more than copies of all three, with channels in fours, which begin at multiples of 16 bytes.
    given, made = inside + -inside % 4, outside + -outside % 4
    assert of(batch) <= dtype.itemsize * (batch * height * width * (given + made) + 9 * given * made) + 16


@pytest.mark.parametrize("version", [BEFORE, TODAY])
@pytest.mark.parametrize(
    ("given", "made", "forward", "back"),
    [(30, 16, 82_880, 50_168), (16, 32, 51_328, 84_032), (32, 64, 205_056, 204_928)],
)
def test_fused_winograd_takes_what_a_recording_on_turing_shows(
    version: tuple[int, int], given: int, made: int, forward: int, back: int
) -> None:
    """counterfactuals-convolutions-batch-1 of `benchmarks/recordings`: three layers on a TITAN RTX, with PyTorch 2.2."""
    shapes = {"fine": (1, given, 64, 64), "weight": (made, given, 3, 3), "coarse": (1, made, 64, 64)}
    assert estimate(convolution(**shapes), (7, 5), version) == forward
    assert estimate(convolution("input", **shapes), (7, 5), version) == back
    assert estimate(convolution("weight", **shapes), (7, 5), version) == 0


def volume(channels: int) -> dict[str, Any]:
    """A layer over three dimensions that keeps its shape."""
    side = (2, channels, 8, 8, 8)
    even = {"stride": (1, 1, 1), "padding": (1, 1, 1), "dilation": (1, 1, 1)}
    return {"fine": side, "weight": (channels, channels, 3, 3, 3), "coarse": side, **even}


# What cuDNN 9.20 answers (`benchmarks/convolution_plans.py`), to its own hundred or so bytes.
RESNET = {"fine": (32, 64, 56, 56), "weight": (64, 64, 3, 3), "coarse": (32, 64, 56, 56)}
PRODUCT = {"fine": (32, 64, 56, 56), "weight": (256, 64, 1, 1), "coarse": (32, 256, 56, 56), "padding": (0, 0)}
DILATED = {**RESNET, "padding": (2, 2), "dilation": (2, 2)}
FINE, NARROW, WIDE = 32 * 64 * 56 * 56, 64 * 64 * 9, 64 * 256
DEEP = {"fine": (4, 512, 16, 16), "weight": (512, 512, 3, 3), "coarse": (4, 512, 16, 16)}
# Of Stable Diffusion's U-Net, and of VGG-16 with 32 images.
DEEP_AND_WIDE = {"fine": (8, 1280, 32, 32), "weight": (1280, 1280, 3, 3), "coarse": (8, 1280, 32, 32)}
DEEP_AND_MANY = {**DEEP, "fine": (32, 512, 28, 28), "coarse": (32, 512, 28, 28)}
DEEP_SIDE, DEEP_WEIGHT = 4 * 512 * 16 * 16, 512 * 512 * 9


@pytest.mark.parametrize(
    ("call", "capability", "tf32", "elements"),
    [
        # In TF32 the input and the weight are rounded, and for the gradients the result's side is copied, too.
        (convolution(**RESNET), A100, True, (FINE + NARROW, 16)),
        (convolution("input", **RESNET), A100, True, (2 * FINE + NARROW, 16)),
        # An A100 is kept busy by 80 blocks of 128 x 128: five make the weight, so sixteen sums of each are added up.
        (convolution("weight", **RESNET), A100, True, (2 * FINE + 17 * NARROW, 16)),
        (convolution("weight", **RESNET), (8, 6), True, (2 * FINE + NARROW, 16)),
        # A single channel is not worth copies, whatever its kernel: `octree-nca-training-forward` has none.
        (convolution(fine=(6, 1, 20, 20, 6), weight=(1, 1, 12, 12, 5), coarse=(6, 1, 9, 9, 2), stride=(1, 1, 1),
                     padding=(0, 0, 0), dilation=(1, 1, 1)), (8, 6), True, 0),
        # No sum is of fewer than 1,024 of the 2 x 56 x 56 results.
        (convolution("weight", **{**RESNET, "fine": (2, 64, 56, 56), "coarse": (2, 64, 56, 56)}), A100, True,
         (FINE // 8 + 7 * NARROW, 16)),
        # A plain product, of which the weight's gradient has one sum for each image.
        (convolution("weight", **PRODUCT), A100, True, 32 * WIDE),
        (convolution("weight", **PRODUCT), (9, 0), True, 32 * WIDE),
        (convolution("input", **PRODUCT), (9, 0), True, 0),
        # 64 images of 2 x 2: copies take less than a third of 64 sums. Of a single point there is nothing to add up.
        (convolution("weight", fine=(64, 64, 2, 2), weight=(256, 64, 1, 1), coarse=(64, 256, 2, 2), padding=(0, 0)), A100,
         True, 64 * 4 * (64 + 256)),
        (convolution("weight", fine=(64, 64, 1, 1), weight=(256, 64, 1, 1), coarse=(64, 256, 1, 1), padding=(0, 0)), A100,
         True, 0),
        # Of many summands an A100's blocks gather more tiles (128 of them, and the numbers that they wait on); elsewhere the
        # result is copied. Of many results neither is done.
        (convolution(**DEEP), A100, True, (DEEP_SIDE + DEEP_WEIGHT + DEEP_SIDE + 64, 175)),
        (convolution(**DEEP), (8, 6), True, (DEEP_SIDE + DEEP_WEIGHT + DEEP_SIDE, 16)),
        (convolution("input", **DEEP), A100, True, (DEEP_SIDE + DEEP_WEIGHT + 2 * DEEP_SIDE + 64, 175)),
        (convolution("input", **DEEP), (8, 6), True, (DEEP_SIDE + DEEP_WEIGHT + DEEP_SIDE, 16)),
        (convolution(**DEEP_AND_WIDE), A100, True, (2 * 8 * 1280 * 1024 + 1280 * 1280 * 9, 16)),
        (convolution(**DEEP_AND_MANY), A100, True, (32 * 512 * 784 + DEEP_WEIGHT, 16)),
        (convolution(last=True, **RESNET), A100, True, (FINE + NARROW, 16)),
        (convolution("input", last=True, **RESNET), (8, 6), True, (FINE + NARROW, 16)),
        (convolution("weight", last=True, **RESNET), A100, True, (2 * FINE + 16 * NARROW, 16)),
        # (Hopper: 392 tiles of 256 x 128 results are more than 132 multiprocessors work at, and their order takes 131 bytes.)
        (convolution(last=True, **RESNET), (9, 0), True, (0, 131)),
        (convolution(**RESNET), (9, 0), True, (2 * FINE + NARROW, 16 + 131)),
        # Twice as many results as were given, each of few summands, are not copied.
        (convolution(**{**RESNET, "weight": (128, 64, 3, 3), "coarse": (32, 128, 56, 56)}), (9, 0), True,
         (FINE + 2 * NARROW, 16 + 131)),
        # Without TF32 Winograd is fused: 16 and 9 numbers for each pair of channels, and one for each result.
        (convolution(**RESNET), A100, False, 64 * 64 * 25 + 64),
        (convolution("input", **RESNET), (7, 5), True, 64 * 64 * 25 + 64),
        (convolution("weight", **RESNET), (7, 5), True, 0),
        (convolution(**RESNET), (9, 0), False, 0),
        (convolution(last=True, **RESNET), (9, 0), False, (2 * FINE + NARROW, 16)),
        (convolution("input", last=True, **PRODUCT), (9, 0), False, (5 * FINE, 16)),
        (convolution("weight", last=True, **DILATED), (9, 0), False, 0),
        (convolution("weight", **DILATED), (9, 0), False, (2 * FINE + NARROW, 16)),
        (convolution("weight", fine=(2, 32, 8, 8), weight=(8, 32, 3, 3), coarse=(2, 8, 8, 8)), (9, 0), False, 0),
        (convolution("weight", fine=(2, 128, 8, 8), weight=(8, 128, 3, 3), coarse=(2, 8, 8, 8)), (9, 0), False,
         (2 * 128 * 64 + 9 * 1024 + 2 * 8 * 64, 16)),
        # A weight's gradient of volumes has both sides copied where they have few channels.
        (convolution("weight", last=True, **volume(32)), (9, 0), True, (2 * 2 * 32 * 512, 16)),
        (convolution("weight", last=True, **volume(64)), (9, 0), True, 0),
        # A few tiles; and channels that are no multiple of eight, which copies are filled up to, but not an image's in forward.
        (convolution(dtype=torch.half, last=True, **{**RESNET, "fine": (4, 64, 56, 56), "coarse": (4, 64, 56, 56)}), (9, 0),
         True, 0),
        (convolution(dtype=torch.half, last=True, fine=(4, 26, 8, 8), weight=(64, 26, 3, 3), coarse=(4, 64, 8, 8)), (9, 0),
         True, (4 * 32 * 64 + 64 * 32 * 9, 16)),
        (convolution(dtype=torch.half, last=True, fine=(4, 3, 8, 8), weight=(64, 3, 3, 3), coarse=(4, 64, 8, 8)), (9, 0),
         True, 0),
        (convolution("input", dtype=torch.half, last=True, fine=(4, 3, 8, 8), weight=(64, 3, 3, 3), coarse=(4, 64, 8, 8)),
         (9, 0), True, (4 * 8 * 64 + 64 * 8 * 9, 16)),
        (convolution(last=True, **RESNET), (7, 0), True, (2 * FINE + NARROW, 16)),
        (convolution("weight", last=True, **RESNET), (7, 0), True, 0),
        (convolution(**PRODUCT), (7, 5), True, 0),
        (convolution(**{**RESNET, "stride": (2, 2), "coarse": (32, 64, 28, 28)}), (7, 5), True, 0),
        # In the plain layout half precision is copied; a weight of one point has both layouts.
        (convolution(dtype=torch.half, **RESNET), A100, True, (2 * FINE + NARROW, 16)),
        (convolution(dtype=torch.bfloat16, **{**PRODUCT, "stride": (2, 2)}), A100, True, (5 * FINE, 16)),
        # The sums of a product are float32.
        (convolution("weight", dtype=torch.half, **PRODUCT), (7, 5), False, 2 * 32 * WIDE),
        (convolution(dtype=torch.half, last=True, **RESNET), A100, True, 0),
        (convolution(dtype=torch.bfloat16, **RESNET), (7, 5), True, 0),
        # Three channels are padded to eight, but few summands are not worth the copies.
        (convolution("weight", dtype=torch.half, fine=(2, 3, 8, 8), weight=(8, 3, 3, 3), coarse=(2, 8, 8, 8)), A100, True,
         (2 * 8 * 64 * 2 + 8 * 8 * 9, 16)),
        (convolution(dtype=torch.half, fine=(2, 3, 8, 8), weight=(8, 3, 3, 3), coarse=(2, 8, 8, 8)), A100, True, 0),
        (convolution(fine=(2, 3, 8, 8), weight=(8, 3, 3, 3), coarse=(2, 8, 8, 8)), A100, True, 0),
        # In a kernel of 7 x 7 they are many again.
        (convolution(dtype=torch.half, fine=(2, 3, 8, 8), weight=(8, 3, 7, 7), coarse=(2, 8, 8, 8)), A100, True,
         (2 * 8 * 64 * 2 + 8 * 8 * 49, 16)),
        (convolution("weight", fine=(2, 3, 8, 8), weight=(8, 3, 3, 3), coarse=(2, 8, 8, 8)), A100, True, 0),
        (convolution("weight", fine=(2, 3, 8, 8), weight=(8, 3, 7, 7), coarse=(2, 8, 8, 8)), A100, True,
         (2 * 64 * (4 + 8) + 4 * 8 * 49, 16)),
        (convolution(groups=64, **{**RESNET, "weight": (64, 1, 3, 3)}), A100, True, 0),
    ],
)  # fmt: skip
def test_today_it_is_copies_for_tensor_cores(
    call: Convolution, capability: tuple[int, int], tf32: bool, elements: int | tuple[int, int]
) -> None:
    """elements: of the copies, with the bytes that are beside them."""
    copied, beside = elements if isinstance(elements, tuple) else (elements, 0)
    assert estimate(call, capability, TODAY, tf32) == copied * call.dtype.itemsize + beside


# ---- on a device


def test_a_call_holds_the_estimate_and_gives_it_back(on: Any) -> None:
    on("A100-40GB,torch=2.13")
    layer = nn.Conv2d(32, 24, 3, padding=1, bias=False, device="cuda")
    x = torch.zeros(4, 32, 32, 30, device="cuda", requires_grad=True)
    fine, narrow, coarse = 4 * 32 * 32 * 30 * 4, 32 * 24 * 9 * 4, 4 * 24 * 32 * 30 * 4
    assert scratch(lambda: layer(x)) == blocks(fine + narrow + 16)
    y = layer(x)
    seed = torch.zeros_like(y)
    # The weight's gradient comes last, when both gradients are there: three sums of 1,280 of the 4 x 32 x 30 results.
    expected = blocks(fine + 4 * narrow + coarse + 16)
    assert scratch(lambda: torch.autograd.grad(y, (x, layer.weight), seed, retain_graph=True)) == expected
    assert scratch(lambda: torch.autograd.grad(y, x, seed, retain_graph=True)) == blocks(fine + narrow + coarse + 16)
    torch.backends.cudnn.allow_tf32 = False
    try:
        assert scratch(lambda: torch.autograd.grad(y, layer.weight, seed)) == 0
        # 24 results are padded to 32.
        assert scratch(lambda: layer(x)) == blocks(4 * (16 * 32 * 32 + 9 * 32 * 24 + 24))
    finally:
        torch.backends.cudnn.allow_tf32 = True


def test_a_transposed_convolution_is_the_gradient_of_one(on: Any) -> None:
    on("A100-40GB")
    layer = nn.ConvTranspose2d(24, 16, 4, stride=2, padding=1, bias=False, device="cuda", dtype=torch.half)
    x = torch.zeros(4, 24, 16, 16, device="cuda", dtype=torch.half)
    expected = x.nbytes + layer.weight.nbytes + 4 * 16 * 32 * 32 * 2 + 16
    assert scratch(lambda: layer(x)) == blocks(expected)


def test_one_dimension_too(on: Any) -> None:
    on("A100-40GB")
    layer = nn.Conv1d(48, 32, 5, padding=2, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.zeros(4, 48, 1000, device="cuda", dtype=torch.bfloat16)
    assert scratch(lambda: layer(x)) == blocks(x.nbytes + layer.weight.nbytes + 4 * 32 * 1000 * 2 + 16)


@pytest.mark.parametrize("option", ["colab-2021", "T4,cudnn=none", "T4,cudnn=0", "virtual:16GiB,torch=2.4+rocm6.0"])
def test_where_there_is_none(on: Any, option: str) -> None:
    on(option)
    layer = nn.Conv2d(16, 24, 3, padding=1, bias=False, device="cuda")
    x = torch.zeros(4, 16, 32, 32, device="cuda")
    assert scratch(lambda: layer(x)) == 0


def test_a_size_of_the_users(on: Any) -> None:
    on("T4,cudnn=48MiB")
    layer = nn.Conv2d(16, 24, 1, bias=False, device="cuda")
    x = torch.zeros(4, 16, 32, 32, device="cuda")
    assert scratch(lambda: layer(x)) == 48 * MIB


def test_no_room_is_no_error_and_leaves_the_cache_alone(on: Any) -> None:
    machine = on("virtual:256MiB,context=0,torch=2.6")
    allocator = machine.devices[0].allocator
    layer = nn.Conv2d(64, 8, 3, padding=1, bias=False, device="cuda")
    # Of 96 MiB, as its copy would be.
    x = torch.zeros(4, 64, 384, 256, device="cuda")
    torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    with torch.no_grad():
        assert scratch(lambda: layer(x)) == 0
    assert torch.cuda.memory_reserved() >= 64 * MIB
    assert allocator.num_alloc_retries == 0
    assert torch.cuda.memory_stats()["num_ooms"] == 0


def test_a_limit_of_the_process_counts_as_no_room(on: Any) -> None:
    on("virtual:1GiB,context=0,torch=2.6")
    layer = nn.Conv2d(64, 64, 3, padding=1, bias=False, device="cuda")
    x = torch.zeros(4, 64, 128, 128, device="cuda")
    torch.cuda.set_per_process_memory_fraction(0.04)
    with torch.no_grad():
        assert scratch(lambda: layer(x)) == 0
    torch.cuda.set_per_process_memory_fraction(1.0)
    with torch.no_grad():
        assert scratch(lambda: layer(x)) > 0


def test_a_real_lack_of_memory_is_still_an_error(on: Any) -> None:
    on("virtual:256MiB,context=0")
    layer = nn.Conv2d(64, 1024, 3, padding=1, bias=False, device="cuda")
    x = torch.zeros(4, 64, 128, 128, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 256\.00 MiB"):
        layer(x)


def test_trials_of_the_benchmark_empty_the_cache_once_for_each_kind(on: Any) -> None:
    on("T4")
    torch.backends.cudnn.benchmark = True
    layer = nn.Conv2d(16, 24, 3, padding=1, bias=False, device="cuda")
    x = torch.zeros(4, 16, 32, 32, device="cuda")

    def cached_after(batch: torch.Tensor) -> bool:
        torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
        with torch.no_grad():
            layer(batch)
        return torch.cuda.memory_reserved() >= 64 * MIB

    assert not cached_after(x)
    assert cached_after(x)
    assert not cached_after(x[:2])


BATCH_OF_DENSENET = ((8, 768, 7, 7), (128, 768, 1, 1), (8, 128, 7, 7), (1, 1), (0, 0), (1, 1), 1)


def test_the_largest_plan_that_trials_try_is_an_h100s() -> None:
    """Recorded there: Fourier transforms of 16 x 18 numbers of 8 bytes, of 128 x 768 weights and, forwards, 8 x 768 inputs; with
    the weights laid out anew, or the results. In half precision all is copied."""
    sizes = [
        largest_tried(Convolution(way, *BATCH_OF_DENSENET, dtype, last), (9, 0), (2, 11))
        for way, dtype, last in (
            ("forward", torch.float32, False),
            ("weight", torch.float32, False),
            ("forward", torch.half, True),
        )
    ]
    assert sizes[:2] == [241_041_408, 226_693_120]
    assert sizes[2] == 2 * (8 * 768 * 49 + 128 * 768 + 8 * 128 * 49) + 16
    # A transform of 32 is the next.
    larger = ((8, 512, 32, 32), (256, 512, 1, 1), (8, 256, 32, 32), *BATCH_OF_DENSENET[3:])
    assert largest_tried(Convolution("weight", *larger, torch.float32, False), (9, 0), (2, 11)) == 1_149_239_296
    # For other cards nothing was recorded, and strides have no such plan.
    forward = Convolution("forward", *BATCH_OF_DENSENET, torch.float32, False)
    assert largest_tried(forward, A100, (2, 11)) == 0
    strided = ((8, 768, 8, 8), (128, 768, 2, 2), (8, 128, 4, 4), (2, 2), *BATCH_OF_DENSENET[4:])
    assert largest_tried(Convolution("forward", *strided, torch.float32, False), (9, 0), (2, 11), tf32=False) == 0


SQUARE_KERNEL = ((1, 1), (1, 1), (1, 1), 1, torch.float32)
MIDDLE_OF_RESNET = ((8, 256, 14, 14), (256, 256, 3, 3), (8, 256, 14, 14), *SQUARE_KERNEL)
OF_A_GENERATOR = ((64, 128, 32, 32), (64, 128, 3, 3), (64, 64, 32, 32), *SQUARE_KERNEL)
OF_MANY_CHANNELS = ((8, 512, 32, 32), (512, 512, 3, 3), (8, 512, 32, 32), *SQUARE_KERNEL)


@pytest.mark.parametrize(
    ("way", "layer", "last", "tf32", "nbytes"),
    [
        # Winograd: 6 x 6 values of 8 x 4 x 4 tiles of 256 and 256 channels, and of 256 x 256 weights.
        ("weight", MIDDLE_OF_RESNET, False, True, 36 * (128 * 512 + 256 * 256) * 4),
        ("weight", MIDDLE_OF_RESNET, False, False, 36 * (128 * 512 + 256 * 256) * 4),
        # With the channels last it works on copies.
        (
            "weight",
            MIDDLE_OF_RESNET,
            True,
            False,
            36 * (128 * 512 + 256 * 256) * 4 + (2 * 8 * 256 * 196 + 256 * 2304) * 4 + 16,
        ),
        # Fourier: twice 64 x 33 complex numbers of 64 x (128 + 64) images, and the results' gradient.
        ("weight", OF_A_GENERATOR, False, True, 2 * 64 * 33 * 8 * 64 * 192 + 64 * 64 * 32 * 32 * 4),
        # In tiles of 32: 32 x 17 complex numbers of the weights, and of two tiles of each image.
        ("input", OF_MANY_CHANNELS, False, False, 32 * 17 * 8 * (512 * 512 + 2 * 8 * 1024)),
    ],
)
def test_an_h100_takes_gradients_of_square_kernels_by_transforms(
    way: str, layer: Any, last: bool, tf32: bool, nbytes: int
) -> None:
    """As recorded (cuDNN 9.19), to the byte."""
    call = Convolution(way, *layer, last)
    assert estimate(call, (9, 0), (2, 11), tf32) == nbytes
    assert estimate(call, (8, 0), (2, 11), tf32) < nbytes


def test_tensor_cores_need_no_transform_where_there_are_many_results() -> None:
    call = Convolution("weight", (512, 256, 14, 14), (256, 256, 3, 3), (512, 256, 14, 14), *SQUARE_KERNEL, False)
    assert estimate(call, (9, 0), (2, 11)) == 2 * 4 * 512 * 256 * 196 + 4 * 9 * 256 * 256 + 16


def test_trials_of_an_input_gradient_transform_tiles_and_with_a_stride_each_phase() -> None:
    """As recorded: DCGAN's layer of 4 x 4 points is four convolutions of 3 x 3 between images of 4 x 4."""
    tile = 32 * 17 * 8
    plain = Convolution("input", *MIDDLE_OF_RESNET, False)
    assert largest_tried(plain, (9, 0), (2, 11)) == tile * (256 * 256 + 8 * 512)
    strided = Convolution(
        "input", (8, 256, 8, 8), (512, 256, 4, 4), (8, 512, 4, 4), (2, 2), (1, 1), (1, 1), 1, torch.float32, False
    )
    weights = 4 * 256 * 512
    copies = 8 * 256 * 64 + 8 * 512 * 16 + weights * 9
    assert largest_tried(strided, (9, 0), (2, 11)) == tile * (weights + 8 * (1024 + 512)) + 4 * copies + 16


def test_the_benchmarks_trials_share_that_block_and_halve_it_where_there_is_no_room(on: Any) -> None:
    on("H100,torch=2.11")
    torch.backends.cudnn.benchmark = True
    layer = nn.Conv2d(768, 128, 1, bias=False, device="cuda")
    x = torch.zeros(8, 768, 7, 7, device="cuda")
    # (What is left of a block below 1 MiB is not split off.)
    assert [scratch(lambda: layer(x)) // MIB for _ in range(2)] == [241_172_480 // MIB, 0]
    torch.cuda.set_per_process_memory_fraction(200 * MIB / torch.cuda.get_device_properties(0).total_memory)
    assert scratch(lambda: layer(x[:7])) // MIB == (241_041_408 - 768 * 2304) // 2 // MIB


# ---- layouts


def test_a_plain_weight_is_copied_for_an_input_with_channels_last(on: Any) -> None:
    on("A100-40GB")
    layer = nn.Conv2d(64, 64, 3, padding=1, bias=False, device="cuda", dtype=torch.half)
    x = torch.zeros(4, 64, 16, 16, device="cuda", dtype=torch.half).to(memory_format=torch.channels_last)
    assert scratch(lambda: layer(x)) == layer.weight.nbytes
    layer.to(memory_format=torch.channels_last)
    assert scratch(lambda: layer(x)) == 0


def test_an_input_in_another_layout_is_copied(on: Any) -> None:
    on("A100-40GB,cudnn=none")
    layer = nn.Conv2d(64, 64, 1, bias=False, device="cuda")
    x = torch.zeros(4, 64, 16, 32, device="cuda").transpose(2, 3)
    assert scratch(lambda: layer(x)) == x.nbytes


@pytest.mark.parametrize(
    ("transposed", "lies", "copies"),
    [
        (False, "turned", (0, 1, 1)),
        (False, "last", (1, 0, 0)),
        (False, "plain", (0, 0, 0)),
        (True, "turned", (1, 0, 0)),
    ],
)
def test_a_gradient_like_no_layout_is_copied_for_each_of_both(
    on: Any, transposed: bool, lies: str, copies: tuple[int, ...]
) -> None:
    """`to` in `cudnn_convolution_backward` copies what is like another layout, and `contiguous` behind it what lies otherwise."""
    on("A100-40GB,torch=2.11,cudnn=none")
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(64, 32, 1, bias=False, device="cuda")
    x = torch.zeros(4, 64, 16, 16, device="cuda", requires_grad=True)
    seed = torch.zeros(4, 32, 16, 16, device="cuda")
    seed = {"turned": seed.transpose(2, 3), "last": seed.to(memory_format=torch.channels_last), "plain": seed}[lies]
    y = layer(x)
    first, second, third = ([seed.nbytes] * so_many for so_many in copies)
    expected = [*first, x.nbytes, *second, *third, layer.weight.nbytes]
    assert made(lambda: torch.autograd.grad(y, (x, layer.weight), seed)) == expected


def test_the_gradient_of_a_bias_is_a_sum_that_blocks_share(on: Any) -> None:
    """With the channels last each of 4 rows of 32 threads with 4 channels adds up 16 of 32 x 56 x 56 results: 1,568 blocks, whose
    buffer has a place for every thread's 4 sums times every channel (`global_memory_size` in ``Reduce.cuh``). An H100's highest
    memory was these 98 MiB in `benchmarks/truth`. In the plain layout, to which it is copied without cuDNN, each of 512 threads
    has fewer than 256 of a channel's results to add up, and no other block helps."""
    on("H100,torch=2.11")
    layer = nn.Conv2d(64, 128, 3, padding=1, device="cuda", dtype=torch.half)
    x, seed = (torch.zeros(32, size, 56, 56, device="cuda", dtype=torch.half) for size in (64, 128))
    last, its_seed = (one.to(memory_format=torch.channels_last) for one in (x, seed))

    def taken(given: torch.Tensor, gradient: torch.Tensor) -> int:
        y = layer(given)
        return scratch(lambda: torch.autograd.grad(y, layer.bias, gradient))

    assert taken(last, its_seed) == blocks(1568 * 128 * 128 * 4, 4)
    assert taken(x, seed) == 0
    torch.backends.cudnn.enabled = False
    assert taken(last, its_seed) == seed.nbytes


def test_without_cudnn_there_are_columns(on: Any) -> None:
    # A version that keeps cuBLAS's workspace.
    on("A100-40GB,torch=2.13")
    torch.backends.cudnn.enabled = False
    torch.zeros(8, 8, device="cuda") @ torch.zeros(8, 8, device="cuda")
    layer = nn.Conv2d(8, 16, 3, padding=1, device="cuda")
    of_one_point = nn.Conv2d(8, 16, 1, device="cuda")
    x = torch.zeros(4, 8, 32, 32, device="cuda")
    with torch.no_grad():
        assert scratch(lambda: layer(x)) == 8 * 9 * 32 * 32 * 4
        assert scratch(lambda: of_one_point(x)) == 0


def test_a_channel_at_a_time_is_a_kernel_of_pytorchs_own(on: Any) -> None:
    on("A100-40GB")
    layer = nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False, device="cuda")
    x = torch.zeros(4, 64, 32, 32, device="cuda")
    assert scratch(lambda: layer(x)) == 0
    torch.backends.cudnn.enabled = False
    assert scratch(lambda: layer(x)) == 0


# ---- the option and the report


@pytest.mark.parametrize(
    ("option", "expected"),
    [("estimate", None), ("None", 0), ("256MiB", 256 * MIB), ("0", 0), ("1.5 GiB", 3 * GIB // 2)],
)
def test_the_option(option: str, expected: int | None) -> None:
    spec = catalog.parse(f"T4,cudnn={option}")
    assert isinstance(spec, catalog.DeviceSpec)
    assert spec.models[0].convolution_bytes == expected


@pytest.mark.parametrize(
    "option", ["cudnn=some", "cudnn=", "cudnn", "cudnn=1GB", "cudnn=-1MiB", "cudnn=1MiB,cudnn=2MiB"]
)
def test_the_options_errors_are_one_line(option: str) -> None:
    with pytest.raises(catalog.UnknownDevice) as caught:
        catalog.parse(f"T4,{option}")
    assert "\n" not in str(caught.value)
    assert "cudnn=" in str(caught.value)


def report_of(device: str, dtype: torch.dtype = torch.float32) -> Report:
    gpu.turn_on(device)
    try:
        layer = nn.Conv2d(32, 32, 3, padding=1, device="cuda", dtype=dtype)
        x = torch.zeros(8, 32, 64, 64, device="cuda", dtype=dtype)
        with gpumem_magic.measure() as measured:
            layer(x).sum().backward()
        assert measured.report is not None
        return measured.report
    finally:
        gpu.turn_off()


def notes_about_it(report: Report) -> list[str]:
    return [note for note in report.notes if "cuDNN" in note]


def test_the_report_says_what_is_an_estimate() -> None:
    report = report_of("A100-40GB,torch=2.6")
    (note,) = notes_about_it(report)
    # The weight's gradient: copies of both sides, and 26 sums of three blocks, as 78 of them are busy at once.
    of_the_call = 2 * 8 * 32 * 64 * 64 * 4 + (1 + 26) * 32 * 32 * 9 * 4 + 16
    assert report.peak.categories["workspace"] == of_the_call
    assert f"{of_the_call / MIB:.1f} MiB of the peak" in note
    assert "cudnn=none" in note
    assert report.evidence["inferred"] >= of_the_call


@pytest.mark.parametrize("device", ["T4,cudnn=none", "T4,cudnn=8MiB", "colab-2021"])
def test_what_the_user_says_is_no_estimate(device: str) -> None:
    report = report_of(device)
    assert notes_about_it(report) == []
    assert report.peak.categories["workspace"] == (8 * MIB if "8MiB" in device else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.half])
def test_categories_add_up_with_the_estimate(dtype: torch.dtype) -> None:
    peak = report_of("A100-40GB", dtype).peak
    names = ("parameters", "buffers", "gradients", "optimizer_state", "inputs", "activations", "activation_gradients")
    names += ("temporaries", "workspace", "unknown", "rounding")
    assert sum(peak.categories[name] or 0 for name in names) == peak.allocated
    assert (peak.categories["workspace"] or 0) > 0
    assert peak.categories["unknown"] == 0


def test_a_depthwise_convolution_has_its_weight_laid_out_before_its_result(
    on: Callable[[str], gpu.VirtualMachine],
) -> None:
    """One filter for all channels (``kernel.expand(3, 1, 3, 3)``: blurs), which ``DepthwiseConv2d.cu`` wants plain."""
    on("T4")
    pictures = torch.zeros(2, 3, 10, 10, device="cuda")
    kernel = torch.zeros(3, 3, device="cuda").expand(3, 1, 3, 3)
    torch.cuda.memory._record_memory_history()
    nn.functional.conv2d(pictures, kernel, groups=3)
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    assert [event["size"] for event in events if event["action"] == "alloc"] == [3 * 9 * 4, 2 * 3 * 64 * 4]
