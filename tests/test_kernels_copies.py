"""What enlarging and looking up rows take beside their results, worked out by hand from the source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import made, steps
from torch_versions import TORCH

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    # (The figures are those of this version, whichever is installed.)
    gpu.turn_on("RTX3090,torch=2.13")
    yield
    gpu.turn_off()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_enlarging_takes_its_result_alone(dims: int, mode: str, inference: bool) -> None:
    x = torch.zeros(2, 8, *[16] * dims, device="cuda")
    with torch.inference_mode(inference):
        assert made(lambda: F.interpolate(x, scale_factor=2, mode=mode)) == [x.nbytes * 2**dims]


def test_three_dimensions_with_channels_last_are_enlarged_plainly() -> None:
    x = torch.zeros(2, 4, 4, 4, 16, device="cuda").permute(0, 4, 1, 2, 3)
    result = F.interpolate(x, scale_factor=2)
    assert not result.is_contiguous()
    assert made(lambda: F.interpolate(x, scale_factor=2)) == [x.nbytes * 8, x.nbytes * 8, x.nbytes]


def test_gradients_of_volumes_with_channels_last_are_worked_out_plainly() -> None:
    x = torch.zeros(1, 3, 4, 4, 4, device="cuda").to(memory_format=torch.channels_last_3d).requires_grad_()
    small, large = x.nbytes, 8 * x.nbytes
    smooth = F.interpolate(x, scale_factor=2, mode="trilinear")
    assert smooth.is_contiguous(memory_format=torch.channels_last_3d)
    assert made(lambda: torch.autograd.grad(smooth, x, torch.ones_like(smooth)))[1:] == [small, large, small]
    nearest = F.interpolate(x, scale_factor=2, mode="nearest")
    assert made(lambda: torch.autograd.grad(nearest, x, torch.ones_like(nearest)))[1:] == [small, large]


@pytest.mark.parametrize("channels", [3, 4])
def test_two_dimensions_have_a_kernel_for_four_channels_last(channels: int) -> None:
    x = torch.zeros(2, channels, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    beside = [] if channels == 4 else [x.nbytes * 4, x.nbytes]
    assert made(lambda: F.interpolate(x, scale_factor=2)) == [x.nbytes * 4, *beside]


def test_a_gradient_with_channels_last_is_made_by_their_kernel() -> None:
    x = torch.zeros(2, 8, 16, 16, device="cuda", requires_grad=True)
    gradient = torch.zeros(2, 8, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    call = torch.ops.aten.upsample_nearest2d_backward
    plain = made(lambda: call(gradient.contiguous(), [32, 32], x.shape, 2.0, 2.0))
    assert plain == [gradient.nbytes, x.nbytes]
    assert made(lambda: call(gradient, [32, 32], x.shape, 2.0, 2.0)) == [x.nbytes]


def test_indices_that_do_not_lie_in_a_row_are_copied_before_they_are_looked_up() -> None:
    rows = torch.zeros(100, 64, device="cuda")
    one = torch.zeros(1, 512, dtype=torch.int64, device="cuda")
    assert made(lambda: F.embedding(one, rows)) == [512 * 256]
    assert made(lambda: F.embedding(one.expand(8, 512), rows)) == [8 * 512 * 8, 8 * 512 * 256]
    assert made(lambda: F.embedding(one.view(16, 32).t(), rows)) == [512 * 8, 512 * 256]
    # Every second of a list can be looked up as it lies.
    assert made(lambda: F.embedding(one[0, ::2].view(2, 128), rows)) == [256 * 256]


def test_where_algorithms_are_deterministic_an_element_fills_the_rows() -> None:
    rows = torch.zeros(100, 64, device="cuda", dtype=torch.float16)
    indices = torch.zeros(512, dtype=torch.int64, device="cuda")
    settings: Any = torch.utils.deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert made(lambda: rows.index_select(0, indices)) == [512 * 128, 2]
        settings.fill_uninitialized_memory = False
        assert made(lambda: rows.index_select(0, indices)) == [512 * 128]
    finally:
        settings.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_results_that_begin_with_no_element_are_filled_where_algorithms_are_deterministic(deterministic: None) -> None:
    x = torch.zeros(10, 10, device="cuda")
    assert made(lambda: torch.arange(100, device="cuda")) == [800, 8]
    assert made(lambda: torch.arange(0, 10, 0.5, device="cuda")) == [80, 4]
    assert made(lambda: torch.eye(30, device="cuda")) == [3600, 4]
    assert made(lambda: torch.where(x > 0, x, x)) == [100, 400, 4]
    image, places = torch.zeros(2, 3, 16, 16, device="cuda"), torch.zeros(10, dtype=torch.int64, device="cuda")
    assert made(lambda: F.pad(image, (1, 1, 1, 1), mode="reflect")) == [7776, 4]
    assert made(lambda: F.pad(image[0], (1, 1), mode="reflect")) == [3456]
    assert made(lambda: F.adaptive_avg_pool2d(image, 2)) == [96, 4]
    assert made(lambda: F.multi_margin_loss(x, places)) == [4, 4, 40]
    # Others are made in their size, and nothing grows from nothing to nothing.
    assert made(lambda: torch.full((10, 10), 2.0, device="cuda")) == [400]
    assert made(lambda: torch.arange(0, device="cuda")) == []


def test_what_grows_is_filled_where_algorithms_are_deterministic(deterministic: None) -> None:
    x, wanted = torch.zeros(30, 40, device="cuda"), torch.zeros(0, device="cuda")
    places = torch.zeros(0, dtype=torch.int64, device="cuda")
    assert made(lambda: torch.zeros(3, 4, device="cuda").resize_(50, 60)) == [48, 12000, 4]
    assert made(lambda: torch.zeros(3, 4, device="cuda").resize_(2, 2)) == [48]
    assert made(lambda: torch.add(x, 1, out=wanted)) == [4800, 4]
    # It has that size by now.
    assert made(lambda: torch.add(x, 1, out=wanted)) == []
    assert made(lambda: torch.max(x, 0, out=(torch.zeros(0, device="cuda"), places))) == [160, 4, 320, 8]
    # A storage has no type that could fill it.
    assert made(lambda: torch.zeros(3, 4, device="cuda").untyped_storage().resize_(400)) == [48, 400]


def test_results_of_which_each_begins_with_no_element_are_filled_one_by_one(deterministic: None) -> None:
    x, image = torch.zeros(30, 40, device="cuda"), torch.zeros(2, 3, 8, 8, device="cuda", requires_grad=True)
    places = torch.zeros(20, device="cuda")
    for _ in range(2):  # (The second is made by what the first gave.)
        assert made(lambda: x.kthvalue(3, 0)) == [160, 4, 320, 8]
        assert made(lambda: x.std(0)) == made(lambda: x.var(0)) == [160, 4]
        assert made(lambda: torch.var_mean(x, 0)) == [160, 4, 160, 4]
        assert made(x.abs) == [4800, 4]
        assert made(lambda: torch.logical_or(x, x)) == [1200, 1]
        assert made(lambda: torch.bucketize(places, places)) == [160, 8]
    classes = torch.zeros(2, 8, 8, dtype=torch.int64, device="cuda")
    assert made(lambda: F.nll_loss(image, classes, reduction="none")) == [4, 4, 512, 4]
    assert made(lambda: torch.autograd.grad(F.glu(x.requires_grad_()).sum(), x))[-2:] == [4800, 4]


def test_sorts_number_a_row_s_places_by_a_range_that_is_filled(deterministic: None) -> None:
    x, long = torch.zeros(30, 40, device="cuda"), torch.zeros(5000, device="cuda")
    assert made(lambda: x.sort(-1)) == [4800, 9600, 320, 8]
    assert 8 not in made(lambda: long.sort(-1))
    table = torch.zeros(500, 16, device="cuda", requires_grad=True)
    looked_up = F.embedding(torch.zeros(80, 60, dtype=torch.int64, device="cuda"), table)
    listed = 80 * 60 * 8
    asked = made(lambda: looked_up.sum().backward())
    first = asked.index(listed)
    assert asked[first : first + 4] == [listed, listed, listed, 8]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("name", ["hann_window", "hamming_window", "bartlett_window"])
def test_a_periodic_window_is_all_but_the_last_element_of_a_longer_one(name: str, times: int) -> None:
    # (The second is made by what the first gave.)
    for _ in range(times):
        assert made(lambda: getattr(torch, name)(401, device="cuda")) == [1608]
        assert made(lambda: getattr(torch, name)(401, periodic=False, device="cuda")) == [1604]
    assert made(lambda: getattr(torch, name)(1, device="cuda")) == [4]


def test_windows_that_are_sums_hold_their_terms() -> None:
    for length, given in ((402, {}), (401, {"periodic": False})):
        blackman = steps(lambda given=given: torch.blackman_window(401, device="cuda", **given))
        assert blackman == [("alloc", 4 * length)] * 5 + [("free_requested", 4 * length)] * 4
        kaiser = steps(lambda given=given: torch.kaiser_window(401, device="cuda", **given))
        assert kaiser == [("alloc", 4 * length)] * 2 + [("free_requested", 4 * length)]
    window = torch.kaiser_window(401, device="cuda")
    assert window.shape == (401,)
    assert torch.equal(window.cpu(), torch.kaiser_window(401))
    assert made(lambda: torch.kaiser_window(1, device="cuda")) == [4]


def test_windows_begin_with_a_range_that_is_filled(deterministic: None) -> None:
    assert made(lambda: torch.hann_window(401, device="cuda")) == [1608, 4]
    assert made(lambda: torch.blackman_window(401, device="cuda")) == [1608, 4, *[1608] * 4]


def test_a_shuffle_is_filled_at_its_numbers(deterministic: None) -> None:
    filled = made(lambda: torch.randperm(50, device="cuda"))
    torch.use_deterministic_algorithms(False)
    plain = made(lambda: torch.randperm(50, device="cuda"))
    numbers = plain.index(400, 1)
    # (A number of the result's type says first whether it can hold them all.)
    assert [
        made(lambda kind=kind: torch.randperm(50, device="cuda", dtype=kind))[1] for kind in (None, torch.half)
    ] == [8, 2]
    assert filled == [*plain[: numbers + 1], 8, *plain[numbers + 1 :]]


def test_a_pytorch_without_that_setting_fills_nothing() -> None:
    gpu.turn_off()
    gpu.turn_on("RTX3090,torch=2.0")
    torch.use_deterministic_algorithms(True)
    try:
        assert made(lambda: torch.arange(100, device="cuda")) == [800]
    finally:
        torch.use_deterministic_algorithms(False)


def test_integers_between_floating_numbers_are_made_floating_first() -> None:
    x = torch.zeros(1000, dtype=torch.int64, device="cuda")
    assert made(lambda: torch.clamp(x, min=1.0)) == [4000, 4000]
    assert made(lambda: x.clamp_max(2.0)) == [4000, 4000]
    assert made(lambda: torch.clamp(x, min=1, max=2)) == [8000]
    assert made(lambda: torch.clamp(x.float(), min=1.0)) == [4000, 4000]


def test_scans_into_a_given_tensor_take_what_scans_take() -> None:
    x = torch.zeros(500, device="cuda")
    (result, scanning) = made(lambda: x.cumsum(0))
    assert result == 2000
    given = torch.zeros(500, 2, device="cuda")
    assert made(lambda: torch.cumsum(x, 0, out=given.view(2, 500)[0])) == [scanning]
    # Where the given tensor has gaps, the sums are made side by side first.
    assert made(lambda: torch.cumsum(x, 0, out=given[:, 0])) == [2000, scanning]
    wide = torch.zeros(500, dtype=torch.float64, device="cuda")
    assert made(lambda: torch.cumsum(x, 0, out=wide))[0] == 4000


# ---- gradients that do not lie plainly

IMAGE = 4 * 8 * 16 * 16 * 4
QUARTER = IMAGE // 4


def image(layout: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    return torch.zeros(4, 8, 16, 16, device="cuda").to(memory_format=layout).requires_grad_()


def of_spread(out: torch.Tensor, x: torch.Tensor) -> list[int]:
    """The gradient for a gradient that is one number for all."""
    gradient = torch.ones((), device="cuda").expand(out.shape)
    return made(lambda: torch.autograd.grad(out, x, gradient))


def test_pools_and_enlargements_lay_out_the_gradient_once_theirs_is_there() -> None:
    for pool in (F.max_pool2d, F.avg_pool2d):
        x = image()
        assert of_spread(pool(x, 2), x) == [IMAGE, QUARTER]
        x = image(torch.channels_last)
        assert of_spread(pool(x, 2), x) == [IMAGE, QUARTER]
        # In the order of the channels that the image has.
        out = pool(x, 2)
        plain, last = torch.zeros(out.shape, device="cuda"), torch.zeros_like(out)
        assert made(lambda out=out, x=x, plain=plain: torch.autograd.grad(out, x, plain)) == [IMAGE, QUARTER]  # type: ignore[misc]
        out = pool(x, 2)
        assert made(lambda out=out, x=x, last=last: torch.autograd.grad(out, x, last)) == [IMAGE]  # type: ignore[misc]
    x = image()
    assert of_spread(F.adaptive_avg_pool2d(x, 8), x) == [IMAGE, QUARTER]
    assert of_spread(F.adaptive_max_pool2d(x, 8), x) == [IMAGE, QUARTER]
    for mode in ("bilinear", "bicubic"):
        assert of_spread(F.interpolate(x, scale_factor=2, mode=mode), x) == [IMAGE, 4 * IMAGE]
    # What averages to a size of its own leaves channels where they lie.
    x = image(torch.channels_last)
    assert of_spread(F.adaptive_avg_pool2d(x, 8), x) == [IMAGE]


def test_pools_of_what_lies_across_lay_it_out() -> None:
    x = image().detach().transpose(2, 3)
    assert made(lambda: F.max_pool2d(x, 2)) == [QUARTER, 2 * QUARTER, IMAGE]
    assert made(lambda: F.avg_pool2d(x, 2)) == [QUARTER, IMAGE]
    # Before the result, in this one.
    assert made(lambda: F.adaptive_avg_pool2d(x, 8)) == [IMAGE, QUARTER]
    assert made(lambda: F.adaptive_avg_pool2d(image(torch.channels_last).detach(), 8))[-1] == QUARTER
    assert made(lambda: x.roll(1, 0)) == [IMAGE, IMAGE]


def test_normalisations_lay_out_the_gradient_last() -> None:
    x = torch.zeros(64, 128, device="cuda", requires_grad=True)
    weight = torch.ones(128, device="cuda", requires_grad=True)
    out = F.layer_norm(x, (128,), weight, weight)
    gradient = torch.ones((), device="cuda").expand(64, 128)
    assert made(lambda: torch.autograd.grad(out, (x, weight), gradient)) == [32768, 512, 512, 32768]
    assert of_spread(x.softmax(1), x) == of_spread(x.log_softmax(1), x) == [32768, 32768]


def test_normalisations_keep_the_laid_out_input_to_the_end() -> None:
    x = torch.zeros(64, 128, 2, device="cuda")[..., 0].requires_grad_()
    out, gradient = F.layer_norm(x, (128,)), torch.ones(64, 128, 2, device="cuda")[..., 0]
    found = [action == "alloc" for action, _ in steps(lambda: torch.autograd.grad(out, x, gradient))]
    # The input, its gradient, the one that came: then the last and the first go.
    assert found[:5] == [True, True, True, False, False]


def test_a_batch_norm_of_what_has_gaps_takes_numbers_for_a_weight_and_a_bias() -> None:
    x = torch.zeros(16, 24, 32, 2, device="cuda")[..., 0]
    weight = torch.ones(24, device="cuda")
    assert made(lambda: F.batch_norm(x, None, None, training=True)) == [x.numel() * 4, 96, 96, 4, 4]
    assert made(lambda: F.batch_norm(x.contiguous(), None, None, training=True))[1:] == [x.numel() * 4, 96, 96]
    assert made(lambda: F.batch_norm(x, weight, weight))[-2:] == [4, 4]
    # Statistics of bfloat16 are those of a copy in float32, of float16 they are not.
    for dtype, wide in ((torch.float16, []), (torch.bfloat16, [x.numel() * 4])):
        half = torch.zeros(16, 24, 32, 2, device="cuda", dtype=dtype)[..., 0]
        assert made(lambda half=half: F.batch_norm(half, None, None, training=True))[3:] == [*wide, 4, 4]


def test_leaks_by_chance_lay_out_all_three() -> None:
    x = torch.zeros(16, 24, 2, device="cuda")[..., 0]
    each = 16 * 24 * 4
    assert made(lambda: F.rrelu(x, training=True)) == [each, each, each]
    assert made(lambda: F.rrelu_(x, training=True)) == [each, each, each]
    assert made(lambda: F.rrelu(x.contiguous(), training=True)) == [each, each, each]
    assert F.rrelu(torch.zeros(24, 16, device="cuda").t(), training=True).is_contiguous()
    # (The noise, and the result.)
    assert made(lambda: F.rrelu(x, training=False)) == [each, each]


def test_distances_are_between_points_that_are_laid_out() -> None:
    x = torch.zeros(4, 16, 8, 2, device="cuda")[..., 0].requires_grad_()
    y, points, far = torch.zeros(16, 8, device="cuda"), 4 * 16 * 8 * 4, 4 * 16 * 16 * 4
    # One set of points for four has a copy for each.
    assert made(lambda: torch.cdist(x, y)) == [points, points, far]
    out, gradient = torch.cdist(x, y), torch.zeros(4, 16, 16, device="cuda")
    assert made(lambda: torch.autograd.grad(out, x, gradient)) == [points, points, points, far * 8]


def test_columns_of_an_image_are_made_by_resizing() -> None:
    x = image().detach()
    columns = 4 * 72 * 196 * 4
    # As large as the image first.
    assert made(lambda: F.unfold(x, 3)) == [IMAGE, columns]
    # What is no larger stays where it is: patches side by side, and some of them.
    assert made(lambda: F.unfold(x, 2, stride=2)) == made(lambda: F.unfold(x, 1, stride=2)) == [IMAGE]
    wide = torch.zeros(4, 72, 196, device="cuda")
    # What becomes smaller keeps its memory.
    assert made(lambda: F.fold(wide, 16, 3)) == [columns]


def test_a_number_stands_for_a_batch_norms_weight_where_the_gradient_does_not_lie_as_its_input() -> None:
    x = torch.zeros(64, 64, device="cuda", requires_grad=True)
    out = torch.nn.BatchNorm1d(64, affine=False, device="cuda")(x)
    # Two sums for each channel, and the gradient (``Normalization.cu``).
    plain, spread = torch.zeros(64, 64, device="cuda"), torch.zeros((), device="cuda").expand(64, 64)
    assert made(lambda: torch.autograd.grad(out, x, plain, retain_graph=True)) == [256, 256, 64 * 64 * 4]
    assert made(lambda: torch.autograd.grad(out, x, spread)) == [256, 256, 4, 64 * 64 * 4]


def test_a_batch_norm_over_samples_has_sums_for_the_gradient() -> None:
    norm = torch.nn.BatchNorm1d(256, device="cuda")
    x = torch.zeros(4096, 256, device="cuda", requires_grad=True)
    gradient = torch.zeros_like(x)
    # 16 blocks of 16 x 16 rows and 32 columns: four sums for each, and a semaphore for each of eight columns of blocks.
    out = norm(x)
    assert made(lambda: norm(x))[-5:] == [4096 * 1024, 1024, 1024, 4 * 256 * 16 * 4, 32]
    parameters = (x, *norm.parameters())
    assert made(lambda: torch.autograd.grad(out, parameters, gradient)) == [
        1024, 1024, 1024, 1024, 2 * 256 * 16 * 4, 32, 4096 * 1024
    ]  # fmt: skip
    # Too few rows for several blocks.
    few = torch.zeros(64, 256, device="cuda", requires_grad=True)
    assert made(lambda: norm(few))[-3:] == [64 * 1024, 1024, 1024]


def test_cudnns_ctc_loss_makes_the_gradient_with_the_loss() -> None:
    """What an H100 was asked for, with 2.11: of lengths that are tensors room for the longest targets that cuDNN takes."""
    gpu.turn_off()
    gpu.turn_on("H100,torch=2.11")
    scores = torch.zeros(50, 4, 20, device="cuda").log_softmax(2).requires_grad_()
    targets = torch.ones(40, dtype=torch.int32)
    lengths = torch.full((4,), 50, dtype=torch.int32), torch.full((4,), 10, dtype=torch.int32)
    assert made(lambda: F.ctc_loss(scores, targets, *lengths, reduction="none")) == [160, 16, 16, 16000, 841808, 16]
    # Numbers stay on the host, and so do the targets.
    numbers = [50] * 4, [10] * 4
    room = 4 * (2 * 50 * 21 + 50 * 20 + 23) * 4 + 4 * (40 + 8)
    assert made(lambda: F.ctc_loss(scores, targets, *numbers, reduction="none")) == [16000, room, 16]
    # The loss's table is not there, so the gradient is a product.
    losses = F.ctc_loss(scores, targets, *numbers, reduction="sum")
    assert made(lambda: losses.backward()) == [4, 16000]


def test_the_gradient_of_a_long_ctc_loss_sums_both_tables() -> None:
    scores = torch.zeros(400, 4, 80, device="cuda").log_softmax(2).requires_grad_()
    targets = torch.ones(4, 40, dtype=torch.int64, device="cuda")
    lengths = torch.full((4,), 400), torch.full((4,), 40)
    losses = F.ctc_loss(scores, targets, *lengths, reduction="none")
    seed = torch.ones_like(losses)
    both, blanks = 4 * 400 * 41 * 4, 4 * 400 * 4
    back = made(lambda: torch.autograd.grad(losses, scores, seed, retain_graph=True))
    assert back == [32, 32, 32, 4 * 400 * 81 * 4, 400 * 4 * 80 * 4, both, blanks, blanks, blanks // 4, both, blanks]


@pytest.mark.parametrize(
    ("dtype", "shape", "room", "of_gradient"),
    [
        (torch.float32, (8, 64, 28, 28), 51644, 34852),
        (torch.float16, (8, 64, 28, 28), 21716, 34852),
        (torch.float16, (32, 256, 56, 56), 1297280, 2143280),
        (torch.float32, (17, 38, 1, 17), 3064, 2604),
        (torch.float32, (2, 3, 16, 16), 1148, 1124),
    ],
)
def test_a_batch_norm_whose_channels_lie_last_has_cudnns_room(
    dtype: torch.dtype, shape: tuple[int, ...], room: int, of_gradient: int
) -> None:
    """What an H100 was asked for, with 2.11 (cuDNN 9.19)."""
    gpu.turn_off()
    gpu.turn_on("H100,torch=2.11")
    norm = torch.nn.BatchNorm2d(shape[1], device="cuda")
    x = torch.zeros(shape, device="cuda", dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
    gradient = torch.zeros_like(x)
    out = norm(x)
    each = shape[1] * 4
    assert made(lambda: norm(x))[-3:] == [each, each, room]
    assert made(lambda: torch.autograd.grad(out, (x, *norm.parameters()), gradient))[-3:] == [each, each, of_gradient]
    norm.eval()
    frozen = norm(x)
    # In evaluation the input's gradient lies plainly.
    (found,) = torch.autograd.grad(frozen, x, gradient)
    assert found.is_contiguous()


def test_images_of_one_point_lie_as_their_strides_say() -> None:
    """What an H100 was asked for, with 2.11, of a batch norm behind a pool with the channels last (`bn_last_few`, `sweeps_4`)."""
    gpu.turn_off()
    gpu.turn_on("H100,torch=2.11")
    norm = torch.nn.BatchNorm2d(256, device="cuda")
    plain = torch.zeros(16, 256, 1, 1, device="cuda")
    assert made(lambda: norm(plain)) == [16384, 1024, 1024]
    x = torch.zeros(16, 1, 1, 256, device="cuda").permute(0, 3, 1, 2).requires_grad_()
    assert made(lambda: norm(x)) == [16384, 1024, 1024, 3152]
    out, gradient = norm(x), torch.zeros_like(x)
    assert made(lambda: torch.autograd.grad(out, (x, *norm.parameters()), gradient)) == [16384, 1024, 1024, 3120]


def test_an_adaptive_pool_works_on_plain_tensors_and_gives_them_the_images_order() -> None:
    """What an H100 was asked for, with 2.11 (`apool`, `sweeps_4`)."""
    x = torch.zeros(1, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
    assert made(lambda: F.adaptive_max_pool2d(x, 8)) == [768, 1536, 768, 1536, 768]
    out = F.adaptive_max_pool2d(x, 8)
    gradient = torch.zeros_like(out)
    assert made(lambda: torch.autograd.grad(out, x, gradient)) == [768, 768, 1536, 768]


def test_the_largest_of_volumes_are_found_with_the_channels_last() -> None:
    """What an H100 was asked for, with 2.11 (`pool3`, `sweeps_4`); the mean is of a plain copy."""
    x = torch.zeros(4, 16, 8, 8, 8, device="cuda").to(memory_format=torch.channels_last_3d).requires_grad_()
    assert made(lambda: F.max_pool3d(x, 3, 2)) == [6912, 13824]
    assert made(lambda: F.avg_pool3d(x, 3, 1)) == [55296, 131072]
    out = F.max_pool3d(x, 3, 2)
    gradient = torch.zeros_like(out)
    assert made(lambda: torch.autograd.grad(out, x, gradient, retain_graph=True)) == [131072]
    assert made(lambda: torch.autograd.grad(out, x, gradient.contiguous())) == [6912, 131072, 6912]


def test_a_group_norm_of_single_values_adds_up_by_channel_too() -> None:
    x = torch.zeros(4, 32, device="cuda", requires_grad=True)
    weight = torch.ones(32, device="cuda", requires_grad=True)
    out = F.group_norm(x, 8, weight, weight)
    seed = torch.zeros_like(out)
    assert made(lambda: torch.autograd.grad(out, (x, weight), seed))[:7] == [512, 128, 128, 512, 512, 128, 128]


def test_the_gradient_of_a_cross_entropy_with_logits_is_worked_out_in_one_tensor() -> None:
    x = torch.zeros(100, 10, device="cuda", requires_grad=True)
    target = torch.zeros(100, 10, device="cuda")
    weight = torch.ones(10, device="cuda")
    loss = F.binary_cross_entropy_with_logits(x, target)
    assert made(lambda: torch.autograd.grad(loss, x, torch.ones((), device="cuda"))) == [4, 4000]
    weighted = F.binary_cross_entropy_with_logits(x, target, weight, pos_weight=weight)
    # The target times its weight; one more than that; the scores' sigmoid.
    assert made(lambda: torch.autograd.grad(weighted, x, torch.ones((), device="cuda"))) == [4, 4000, 4000, 4000]
    given = target.clone().requires_grad_()
    loss = F.binary_cross_entropy_with_logits(x.detach(), given, weight)
    # The target's: the scores' negatives, and what these are times the gradient; the weight and the mean go into that.
    assert made(lambda: torch.autograd.grad(loss, given, torch.ones((), device="cuda"))) == [4, 4000, 4000]
    loss = F.binary_cross_entropy_with_logits(x.detach(), given, pos_weight=weight)
    # The negatives, and the logarithms of both sigmoids, of which one takes the rest.
    assert made(lambda: torch.autograd.grad(loss, given, torch.ones((), device="cuda"))) == [4, 4000, 4000, 4000]
    again = F.binary_cross_entropy_with_logits(x, target)
    (gradient,) = torch.autograd.grad(again, x, create_graph=True)
    gradient.sum().backward()
    assert x.grad is not None


def test_classes_become_ones_in_zeros() -> None:
    classes = torch.zeros(100, dtype=torch.int64, device="cuda")
    assert made(lambda: F.one_hot(classes, 10)) == [8000]
    # The highest is looked for.
    assert made(lambda: F.one_hot(classes)) == [8, 800]
    assert F.one_hot(classes.view(10, 10), 3).shape == (10, 10, 3)
    with pytest.raises(RuntimeError, match="empty tensor"):
        F.one_hot(classes[:0])


def test_means_of_what_is_scattered_are_counted() -> None:
    x = torch.zeros(100, 16, device="cuda")
    places = torch.zeros(50, 16, dtype=torch.int64, device="cuda")
    values = torch.zeros(50, 16, device="cuda")
    # A one for each value, how many come to each place, and which have none.
    assert made(lambda: x.scatter_reduce(0, places, values, "mean")) == [6400, 3200, 6400, 1600]
    assert made(lambda: x.scatter_reduce(0, places, values, "amax")) == [6400]


def test_few_elements_are_compared_with_each() -> None:
    x = torch.zeros(100, dtype=torch.int64, device="cuda")
    assert made(lambda: torch.isin(x, x[:3])) == [100, 300, 100]


def test_repetitions_have_their_ends_summed_up() -> None:
    x = torch.zeros(100, 16, device="cuda")
    often = torch.ones(100, dtype=torch.int64, device="cuda")
    # One tile of 896 sums of eight bytes; the rows; they themselves.
    assert made(lambda: x.repeat_interleave(often, 0, output_size=200)) == [800, 768 + 256 + 255, 1600, 200 * 64]


def test_alignments_have_lengths_and_beginnings_on_the_device() -> None:
    scores = torch.zeros(50, 4, 20, device="cuda", requires_grad=True)
    targets = torch.zeros(4, 10, dtype=torch.int64, device="cuda")
    lengths = (torch.full((4,), 50), torch.full((4,), 10))
    out = F.ctc_loss(scores, targets, *lengths, reduction="none")
    table = 4 * 50 * 21 * 4
    assert made(lambda: F.ctc_loss(scores, targets, *lengths, reduction="none"))[:5] == [32, 32, 32, table, 16]
    seed = torch.zeros(4, device="cuda")
    assert made(lambda: torch.autograd.grad(out, scores, seed))[-5:] == [32, 32, 32, table, 16_000]


def test_the_gradient_of_a_masked_scatters_source_is_chosen_by_the_mask() -> None:
    words = torch.zeros(4, 100, device="cuda")
    images = torch.zeros(400, device="cuda", requires_grad=True)
    mask = torch.empty(4, 100, dtype=torch.bool, device="cuda")
    out = words.masked_scatter(mask, images)
    sizes = made(lambda: torch.autograd.grad(out, images, torch.zeros_like(words)))
    # The seed; the count, its storage, the positions in two dimensions, their tiles, and what is there.
    assert sizes == [1600, 4, 1, 6400, 512 + 256 + 255, 1600]


def test_the_sum_in_a_logarithm_of_a_sum_is_shared_by_blocks() -> None:
    x = torch.zeros(1_000_000, device="cuda")
    shared = made(x.sum)[1:]
    assert len(shared) == 2
    # The highest, and what its blocks share; the exponentials; then their sum is written where it belongs.
    assert made(lambda: x.logsumexp(0))[-2:] == shared


def test_chances_of_half_precision_are_widened_and_normal_numbers_come_in_a_tensor_of_their_own() -> None:
    half, wide = torch.zeros(100, dtype=torch.half, device="cuda"), torch.zeros(100, device="cuda")
    assert made(lambda: torch.bernoulli(half)) == [200, 400]
    assert made(lambda: wide.bernoulli_(half)) == [400]
    assert made(lambda: torch.bernoulli(wide)) == [400]
    assert made(lambda: torch.normal(wide, 1.0)) == [400, 400]


def test_chunks_of_several_tensors_have_lists_about_each() -> None:
    large, small = torch.zeros(1000, 400, device="cuda"), torch.zeros(3, 4, device="cuda")
    chunked = made(lambda: torch._chunk_cat([large, small] * 3, 0, 2))
    # A chunk of the large one is 500 rows of 1600 bytes, which is 391 blocks of 2048; one of the small is one.
    assert chunked == [3 * (1000 * 400 + 4 * 4) * 4, 8 * (6 * 6 + 2 + 3 * (391 + 1))]


@pytest.mark.parametrize(
    ("columns", "lists"),
    [
        # Four rows of 4000 and 8000 bytes: two blocks and four. 82 multiprocessors would run 1968 at once.
        ((4, 1000, 2000), 8 * (4 * 2 + 1 + 2 + 4)),
        # 489 and 1465 blocks, eight times: eight rounds, which is three rows for a block, and three rounds of 2048 bytes.
        ((8, 250_000, 750_000), 8 * (4 * 2 + 1 + 163 + 489)),
    ],
)
def test_pieces_copied_at_once_have_lists_about_each(columns: tuple[int, ...], lists: int) -> None:
    rows, *sizes = columns
    source = torch.zeros(rows, sum(sizes), device="cuda")
    parts = [torch.zeros(rows, size, device="cuda") for size in sizes]
    assert made(lambda: torch.split_with_sizes_copy(source, sizes, dim=1, out=parts)) == [lists]
    apart = [torch.zeros(rows, 2 * size, device="cuda")[:, ::2] for size in sizes]
    assert made(lambda: torch.split_with_sizes_copy(source, sizes, dim=1, out=apart)) == []


def test_gradients_of_atan2_and_aminmax_are_worked_out_in_place() -> None:
    x, y = (torch.zeros(100, 10, device="cuda", requires_grad=True) for _ in range(2))
    size = 100 * 10 * 4
    angle, gradient = torch.atan2(x, y), torch.zeros(100, 10, device="cuda")
    # Two squares, their sum, its reciprocal and where that is infinite (`atan2_backward` in ``FunctionsManual.cpp``: 2.9 does not
    # look); each gradient is two products, the second with a sign.
    infinite = [size // 4] if TORCH >= (2, 11) else []
    assert made(lambda: torch.autograd.grad(angle, (x, y), gradient)) == [
        size,
        size,
        size,
        size,
        *infinite,
        *[size] * 5,
    ]
    if TORCH < (2, 11):
        return  # 2.9 has no gradient of aminmax.
    lowest, highest = x.aminmax(dim=0)
    asked = made(lambda: torch.autograd.grad((lowest, highest), x, (torch.zeros_like(lowest),) * 2))
    # For each end one tensor of all elements; the second is added to the first.
    assert asked.count(size) == 2


def test_a_group_norm_in_half_precision_has_its_statistics_in_float32_first() -> None:
    x, weight = (
        torch.zeros(4, 32, 64, dtype=torch.half, device="cuda"),
        torch.zeros(32, dtype=torch.half, device="cuda"),
    )
    # The result, mean and deviation of 4 x 8 groups, both in float32, and factors for 4 x 32 channels.
    assert made(lambda: F.group_norm(x, 8, weight, weight)) == [4 * 32 * 64 * 2, 64, 64, 128, 128, 512, 512]
    assert made(lambda: F.group_norm(x.float(), 8))[-2:] == [128, 128]
    for version in ("2.11", "2.12"):
        gpu.turn_off()
        gpu.turn_on(f"A100-40GB,torch={version}")
        x = torch.zeros(4, 32, 64, dtype=torch.half, device="cuda")
        assert made(lambda x=x: F.group_norm(x, 8)) == [4 * 32 * 64 * 2, 64, 64]


@pytest.mark.parametrize(("size", "step", "held"), [(3, 1, 10), (3, 2, 9), (2, 4, 0)])
def test_the_gradient_of_windows_numbers_the_places_that_lie_in_one(size: int, step: int, held: int) -> None:
    x = torch.zeros(10, device="cuda", requires_grad=True)
    out = x.unfold(0, size, step)
    ones = torch.ones_like(out)
    # Four windows of three by twos end at the ninth place; windows that do not meet need no numbers.
    assert made(lambda: out.backward(ones)) == [10 * 4, *([held * 8] if held else [])]
    x = torch.zeros(3, 10, device="cuda", requires_grad=True)
    out = x.unfold(-1, size, step)
    ones = torch.ones_like(out)
    assert made(lambda: out.backward(ones)) == [3 * 10 * 4, *([held * 8] if held else [])]


def test_a_gradient_with_a_graph_of_its_own_is_written_into_zeros() -> None:
    x = torch.zeros(10, device="cuda", requires_grad=True)
    index = torch.zeros(4, device="cuda", dtype=torch.int64)
    out = x.gather(0, index)
    ones = torch.ones_like(out, requires_grad=True)
    kept: list[Any] = []
    assert made(lambda: kept.append(torch.autograd.grad(out, x, ones, create_graph=True)[0])) == [10 * 4]
    (again,) = torch.autograd.grad(kept[0].sum(), ones)
    assert again.shape == (4,)


def test_the_gradient_of_a_cross_entropy_s_target_is_worked_out_in_one_tensor() -> None:
    x, target = (torch.zeros(8, 8, device="cuda", requires_grad=True) for _ in range(2))
    out = F.binary_cross_entropy(x, target)
    one = torch.ones_like(out)
    size = 8 * 8 * 4
    # The input's gradient, and the target's, which is multiplied where it lies.
    assert made(lambda: out.backward(one)) == [size, size]


@pytest.mark.parametrize("values", ["stand-in", "auto", "real"])
def test_repetitions_are_added_up_also_where_their_number_is_known(values: str) -> None:
    """As an H100 was asked for it: where each one's end, CUB's room for that, the places, and the result. Without a size it is
    looked whether each count is positive, and whether all are (``Repeat.h``)."""
    gpu.turn_off()
    gpu.turn_on(f"H100,torch=2.11,values={values}")
    repeats, x = torch.tensor([2] * 100).to("cuda"), torch.zeros(100, 16, device="cuda")
    places = [200 * 8, 200 * 16 * 4]
    assert made(lambda: x.repeat_interleave(repeats, dim=0)) == [800, 1279, 100, 1, *places]
    assert made(lambda: x.repeat_interleave(repeats, dim=0, output_size=200)) == [800, 1279, *places]
    gpu.turn_off()


@pytest.mark.parametrize(("spec", "processors"), [("H100,torch=2.11", 132), ("A100,torch=2.11", 0)])
def test_a_product_by_groups_works_in_cutlass_memory_on_hopper(spec: str, processors: int) -> None:
    """As an H100 was asked for it: 240 and 67,584 bytes for four groups."""
    gpu.turn_off()
    gpu.turn_on(spec)
    left, right = (torch.zeros(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((64, 32), (4, 32, 16)))
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32, device="cuda")
    held = [4 * 3 * 8 + 4 * (3 * 8 + 3 * 4), 4 * 128 * processors] if processors else []
    assert made(lambda: torch._grouped_mm(left, right, offs=ends)) == [64 * 16 * 2, *held]
    odd = [4 * 3 * 8 + 3 * (3 * 8 + 3 * 4), 4 * 128 * processors] if processors else []
    assert made(lambda: torch._grouped_mm(left, right[:3], offs=ends[:3])) == [64 * 16 * 2, *odd]


def test_a_conjugated_matrix_is_copied_unless_it_is_transposed() -> None:
    x, y = (torch.zeros(*shape, dtype=torch.complex64, device="cuda") for shape in ((30, 40), (40, 20)))
    out = 30 * 20 * 8
    # cuBLAS conjugates what it transposes; the second matrix is the first that it is asked for, as results lie in rows.
    assert made(lambda: x.conj() @ y)[:2] == [out, x.nbytes]
    assert made(lambda: x.conj() @ y.conj()) == [out, y.nbytes, x.nbytes]
    assert made(lambda: x @ y.t().contiguous().mH) == [y.nbytes, out]
    batch = torch.zeros(3, 30, 40, dtype=torch.complex64, device="cuda")
    assert made(lambda: batch.conj() @ y.expand(3, 40, 20).contiguous().conj())[-2:] == [3 * y.nbytes, batch.nbytes]
    assert made(lambda: batch.mH @ batch) == [3 * 40 * 40 * 8]
    # A result without elements asks for nothing (`linear` of no samples on an H100).
    assert made(lambda: x[:0] @ y.conj()) == []
    # Of one number each, of which the batch's is not asked whether it is transposed (the samples of an H100).
    one = torch.zeros(3, 1, 1, dtype=torch.complex64, device="cuda")
    assert made(lambda: one @ one.conj()) == [24, 24]


def test_parts_are_written_by_one_kernel() -> None:
    x = torch.zeros(7, 5000, device="cuda")
    parts = [torch.zeros(7, size, device="cuda") for size in (1000, 4000)]
    # Four lists about two parts, one of three, and whose each block of 2048 bytes is: two and eight.
    assert made(lambda: torch.split_with_sizes_copy(x, [1000, 4000], 1, out=parts)) == [8 * (3 * 2 + 3 + 2 + 8)]
    halves = [part.half() for part in parts]
    assert made(lambda: torch._chunk_cat(halves, 1, 2))[1:] == [8 * (6 * 2 + 2 + 1 + 2)]
    assert made(lambda: torch._chunk_cat([part.t()[::2] for part in halves], 0, 2))[1:] == []


def test_a_sort_into_tensors_holds_what_it_holds_without() -> None:
    x = torch.zeros(5, 5000, device="cuda")
    out = torch.zeros_like(x), torch.zeros(5, 5000, dtype=torch.int64, device="cuda")
    assert made(lambda: torch.sort(x, out=out)) == made(lambda: x.sort())[2:]
    assert made(lambda: torch.sort(x[:, :50], out=(out[0][:, :50], out[1][:, :50]))) == [50 * 8]


def test_deviations_are_looked_at_before_and_after_the_draw() -> None:
    """As an H100 was asked for it (PyTorch 2.11)."""
    mean, deviation = torch.zeros(2, 3, device="cuda"), torch.ones(5, 2, 3, device="cuda")
    assert made(lambda: torch.normal(mean, deviation)) == [4, 1, 120, 4, 1]
    assert made(lambda: torch.normal(mean, deviation, out=torch.empty_like(deviation)))[1:] == [4, 1]
    # A mean that is a number is a tensor of its own in the end.
    assert made(lambda: torch.normal(0.0, deviation)) == [4, 1, 120, 4, 1, 4]
    assert made(lambda: torch.normal(0.0, deviation, out=torch.empty_like(deviation)))[1:] == [4, 1, 4]


def test_shares_are_divided_by_their_sums() -> None:
    """As an H100 was asked for it (PyTorch 2.11): a draw of a Beta distribution."""
    concentration = torch.ones(5, 2, device="cuda")
    assert steps(lambda: torch._sample_dirichlet(concentration)) == [
        ("alloc", 40),
        ("alloc", 20),
        ("free_requested", 20),
    ]


def test_the_place_of_the_largest_of_all_wants_them_in_one_row() -> None:
    x = torch.zeros(30, 20, 10, device="cuda")
    for place in (torch.argmax, torch.argmin):
        assert made(lambda place=place: place(x)) == [8]
        # Every second one lies at equal distances; what is turned, or a part of each row, does not.
        assert made(lambda place=place: place(x[..., ::2])) == [8]
        assert made(lambda place=place: place(x.mT)) == [8, x.nbytes]
        assert made(lambda place=place: place(x[:, :7])) == [8, 30 * 7 * 10 * 4]
        assert made(lambda place=place: place(x.mT, 1)) == [30 * 20 * 8]


@pytest.mark.parametrize(("work", "results"), [(torch.max, [4]), (torch.min, [4]), (torch.aminmax, [4, 4])])
def test_the_largest_of_all_is_looked_for_in_a_plain_copy(work: Any, results: list[int]) -> None:
    x = torch.zeros(100, 20, device="cuda")
    assert made(lambda: work(x)) == results
    # (``ReduceAllOps.cpp``, also where all lies close together.)
    assert made(lambda: work(x.t())) == [*results, 8000]
    assert made(lambda: work(x[:, ::2])) == [*results, 4000]
    assert made(lambda: x[:, ::2].amax()) == [4]


def test_values_that_are_scattered_are_copied_after_their_places_are_counted() -> None:
    x, mask = torch.zeros(100, 20, device="cuda"), torch.zeros(100, 20, dtype=torch.bool, device="cuda")
    values = torch.zeros(20, 200, device="cuda").t()
    # Eight bytes for each place; what the sums work in, which goes; the values.
    places, scan, copied = 16000, 1279, 16000
    expected = [("alloc", places), ("alloc", scan), ("free_requested", scan), ("alloc", copied)]
    assert steps(lambda: x.masked_scatter_(mask, values))[:4] == expected
    # Into a row that the mask repeats a hundred times: the result, then as for that.
    assert made(lambda: x[0].masked_scatter(mask, values)) == [8000, places, scan, copied]


def test_a_dense_matrix_with_a_side_of_one_is_multiplied_as_it_lies() -> None:
    """As an H100 was asked for it (PyTorch 2.11), in the backward of a layer with one output for several heads."""
    column, row = torch.zeros(8, device="cuda").as_strided((8, 1), (1, 4)), torch.zeros(1, 32, device="cuda")
    row.t() @ row  # takes the workspace
    assert made(lambda: column @ row) == [1024]
    # Of several matrices the strides decide.
    assert made(lambda: column.expand(3, 8, 1) @ row.expand(3, 1, 32))[1:] == [3 * 32]


def apart(*shape: int) -> torch.Tensor:
    """A tensor of every second number."""
    return torch.zeros(*shape, 2, device="cuda")[..., 0]


def in_backward(result: torch.Tensor, source: torch.Tensor) -> list[int]:
    gradient = apart(*result.shape)
    return made(lambda: torch.autograd.grad(result, source, gradient))


@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d])
def test_a_pools_gradient_copies_what_was_pooled_as_well(pool: Any) -> None:
    """(``DilatedMaxPool2d.cu``, ``AveragePool2d.cu``; the CUDA build of 2.13.)"""
    x = apart(2, 4, 8, 10).requires_grad_()
    assert in_backward(pool(x, 2), x) == [2560, 2560, 640]
    plain = torch.zeros(2, 4, 8, 10, device="cuda", requires_grad=True)
    assert in_backward(pool(plain, 2), plain) == [2560, 640]


def test_what_an_adaptive_pool_averages_in_the_order_of_channels_is_not_copied() -> None:
    """By its strides alone (`suggest_memory_format`): lines that are turned are images one high with their channels last."""
    lines = apart(2, 4, 9).transpose(1, 2).requires_grad_()
    results: list[torch.Tensor] = []
    assert made(lambda: results.append(F.adaptive_avg_pool1d(lines, 8))) == [576]
    assert in_backward(results[0], lines) == [288]


@pytest.mark.parametrize(("sides", "padding"), [((8, 9), (1, 2, 3, 1)), ((7, 8, 9), (1, 2, 2, 1, 1, 2))])
def test_edges_are_repeated_as_they_lie(sides: tuple[int, ...], padding: tuple[int, ...]) -> None:
    """(``ReplicationPadding.cu``, and the gradient of three dimensions that are mirrored: ``ReflectionPad.cu``.)"""
    x = apart(2, 4, *sides).requires_grad_()
    result = F.pad(x, padding, mode="replicate")
    assert made(lambda: F.pad(x, padding, mode="replicate")) == [result.nbytes]
    assert in_backward(result, x) == [4 * x.numel()]
    mirrored = F.pad(x, padding, mode="reflect")
    assert in_backward(mirrored, x) == [4 * x.numel(), *([] if len(sides) == 3 else [mirrored.nbytes])]


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_the_gradient_of_enlarged_lines_is_copied(mode: str) -> None:
    x = torch.zeros(2, 4, 9, device="cuda", requires_grad=True)
    assert in_backward(F.interpolate(x, scale_factor=2, mode=mode), x) == [288, 576]


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_the_gradient_of_smoothed_images_is_copied(mode: str) -> None:
    x = torch.zeros(2, 4, 9, 8, device="cuda", requires_grad=True)
    assert in_backward(F.interpolate(x, scale_factor=2, mode=mode, antialias=True), x) == [2304, 9216]


def test_losses_of_margins_copy_what_does_not_lie_in_one_piece() -> None:
    """(``MultiMarginLoss.cu``, ``MultiLabelMarginCriterion.cu``.)"""
    x, weights = apart(64, 10).requires_grad_(), apart(10)
    target = torch.zeros(64, 2, dtype=torch.long, device="cuda")[:, 0]
    losses: list[torch.Tensor] = []
    run = lambda: losses.append(F.multi_margin_loss(x, target, weight=weights, reduction="none"))  # noqa: E731
    assert made(run) == [256, 2560, 512, 40]
    assert in_backward(losses[0], x) == [2560, 2560, 256, 512, 40]
    labels = torch.zeros(64, 10, 2, dtype=torch.long, device="cuda")[..., 0]
    assert made(lambda: losses.append(F.multilabel_margin_loss(x, labels, reduction="none"))) == [2560, 5120, 2560, 256]
    assert in_backward(losses[1], x) == [2560, 2560, 5120, 256]


def test_a_product_with_a_vector_copies_a_matrix_with_gaps() -> None:
    """`addmv_out_cuda`: cuBLAS reads rows or columns that lie side by side. Recorded with 2.13's CUDA build."""
    gaps = torch.zeros(24, 32, 2, device="cuda")[..., 0]
    rows, columns = torch.zeros(24, device="cuda"), torch.zeros(32, device="cuda")
    rows @ rows  # (Now the library has its workspace.)
    copy = 24 * 32 * 4
    assert made(lambda: torch.addmv(rows, gaps, columns)) == [96, copy]
    assert made(lambda: gaps @ columns) == [96, copy]
    assert made(lambda: gaps.mT @ rows) == [128, copy]
    assert made(lambda: rows.clone().addmv_(gaps, columns)) == [96, copy]
    # Rows and columns that lie apart are read as they are.
    whole = torch.zeros(24, 40, device="cuda")
    assert made(lambda: whole[:, :32] @ columns) == [96]
    assert made(lambda: whole.mT @ rows) == [160]


def test_a_vector_that_is_one_number_is_written_out_first() -> None:
    gaps = torch.zeros(24, 32, 2, device="cuda")[..., 0]
    number = torch.zeros(1, device="cuda").expand(32)
    number @ number  # (Now the library has its workspace.)
    assert steps(lambda: torch.mv(gaps, number)) == [
        ("alloc", 96),
        ("alloc", 128),
        ("alloc", 3072),
        ("free_requested", 3072),
        ("free_requested", 128),
    ]


def test_gradients_of_an_outer_product_copy_one_with_gaps() -> None:
    first, second = torch.zeros(24, device="cuda").requires_grad_(), torch.zeros(32, device="cuda").requires_grad_()
    outer = torch.addr(torch.zeros(24, 32, device="cuda"), first, second)
    gradient = torch.zeros(24, 32, 2, device="cuda")[..., 0]
    back = lambda: torch.autograd.grad(outer, (first, second), gradient, retain_graph=True)  # noqa: E731
    back()  # (Now the library has its workspace.)
    assert made(back) == [96, 3072, 128, 3072]
