"""What comparing, counting, losses and some gradients take, worked out from ATen and seen in PyTorch's CUDA builds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_for import events, made, steps

from gpumem_magic.virtual import gpu


@pytest.fixture(autouse=True)
def _a_card() -> Iterator[None]:
    gpu.turn_on("A100-40GB,torch=2.13")
    yield
    gpu.turn_off()


def zeros(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda", requires_grad=grad)


def sequence(run: Callable[[], Any]) -> str:
    """``+SIZE -NUMBER ...``: what is made, and the number of what is let go of."""
    found, live = [], {}
    for event in events(run):
        if event["action"] == "alloc":
            live[event["addr"]] = len(found) - sum(step[0] == "-" for step in found)
            found.append(f"+{event['size']}")
        elif event["addr"] in live:
            found.append(f"-{live.pop(event['addr'])}")
    return " ".join(found)


def test_equal_tensors_are_compared_element_by_element() -> None:
    x, y = zeros(1000), zeros(1000)
    assert sequence(lambda: torch.equal(x, y)) == "+1000 +1 -1 -0"
    # The same memory needs no look, and neither do other shapes.
    assert made(lambda: torch.equal(x, x)) == made(lambda: torch.equal(x, y[:10])) == []


def test_close_ones_need_the_differences() -> None:
    x, y = zeros(1000), zeros(1000)
    sizes = made(lambda: torch.allclose(x, y))
    assert (sizes.count(4000), sizes.count(1000), sizes[-1]) == (6, 5, 1)


def test_one_number_is_converted_to_a_truth_value() -> None:
    number = zeros(1)
    assert sequence(lambda: number.any()) == "+1 +1 -1"
    flag = zeros(1, dtype=torch.bool)
    assert made(lambda: flag.all()) == [1]


def test_what_is_not_zero_is_summed_as_integers() -> None:
    x = zeros(1000)
    assert sequence(lambda: x.count_nonzero()) == "+1000 +8 +8000 -2 -0"
    rows = zeros(1000, 10, dtype=torch.bool)
    assert sequence(lambda: rows.count_nonzero(1)) == "+8000 +80000 -1"


def test_softmaxs_gradient_makes_the_product_first() -> None:
    x, gradient = zeros(8, 10, grad=True), zeros(8, 10)
    out = x.softmax(1)
    assert made(lambda: torch.autograd.grad(out, x, gradient, retain_graph=True)) == [320, 320]
    # A product that lies as the gradient does is laid out anew.
    turned = zeros(10, 8).t()
    assert made(lambda: torch.autograd.grad(out, x, turned)) == [320, 320, 320]


def test_the_largest_elements_share_the_gradient_by_one_mask() -> None:
    x, gradient = zeros(100, 10, grad=True), zeros()
    out = x.max()
    # No numbers: of the input, of the result; equal ones; how many, for which they are converted; shares; the gradient.
    assert made(lambda: torch.autograd.grad(out, x, gradient)) == [1000, 1, 1000, 8, 8000, 4, 4000]


def test_cumprods_gradient_takes_the_short_way() -> None:
    x, gradient = torch.ones(100, 10, device="cuda", requires_grad=True), zeros(100, 10)
    out = x.cumprod(1)
    found = sequence(lambda: torch.autograd.grad(out, x, gradient))
    assert found == "+4000 +1000 +1 -2 +4000 +4000 +4000 -4 -3 +4000 -5 -1 -0"


def test_distances_gradients_are_worked_out_coordinate_by_coordinate() -> None:
    x, y, gradient = zeros(10, 10, grad=True), zeros(5, 10), zeros(10, 5)
    out = torch.cdist(x, y, p=1.0)
    assert made(lambda: torch.autograd.grad(out, x, gradient)) == [400, 10 * 5 * 10 * 4]
    counted = torch.cdist(x, y, p=0.0)
    assert made(lambda: torch.autograd.grad(counted, x, gradient)) == [400]
    pairs = F.pdist(x)
    gradient = zeros(45)
    assert made(lambda: torch.autograd.grad(pairs, x, gradient)) == [400, 9 * 10 * 10 * 4]


def test_a_mean_by_index_counts_in_the_sources_type() -> None:
    x, index, source = zeros(100, 16), zeros(50, dtype=torch.int64), zeros(50, 16)
    found = sequence(lambda: x.index_reduce(0, index, source, "mean"))
    assert found == "+6400 +6400 +3200 -2 +1600 -3 -1"


def test_labels_of_margins_come_before_the_loss() -> None:
    x, labels = zeros(100, 10), zeros(100, 10, dtype=torch.int64)
    assert sequence(lambda: F.multilabel_margin_loss(x, labels)) == "+4000 +400 +4 -1 -0"


def test_a_loss_of_images_makes_the_sum_of_weights_first() -> None:
    scores, classes = zeros(4, 10, 8, 8), zeros(4, 8, 8, dtype=torch.int64)
    assert sequence(lambda: F.nll_loss(scores, classes, reduction="none")) == "+4 +1024 -0"


def test_a_loss_lays_out_scores_and_labels_that_do_not_lie_plainly() -> None:
    scores, labels = zeros(10, 8).t(), zeros(8, 5, dtype=torch.int64)[:, 1]
    assert sequence(lambda: F.nll_loss(scores, labels)) == "+4 +4 +320 +64 -3 -2 -1"
    images, classes = zeros(4, 8, 8, 10).permute(0, 3, 1, 2), zeros(4, 8, 8, 2, dtype=torch.int64)[..., 1]
    assert sequence(lambda: F.nll_loss(images, classes)) == "+4 +4 +10240 +2048 -3 -2 -0"
    assert sequence(lambda: F.nll_loss(images, classes, reduction="none")) == "+4 +1024 -0"


def test_the_gradient_of_a_loss_lays_out_labels_scores_and_the_gradient() -> None:
    scores, labels = zeros(10, 8, grad=True), zeros(8, 5, dtype=torch.int64)[:, 1]
    loss = F.nll_loss(scores.t(), labels)
    assert made(lambda: torch.autograd.grad(loss, scores, torch.ones_like(loss))) == [4, 320, 64, 320]
    images, classes = zeros(4, 10, 8, 8, grad=True), zeros(4, 8, 8, 2, dtype=torch.int64)[..., 1]
    for reduction, held in (("mean", [2048]), ("none", [])):
        loss = F.nll_loss(images, classes, reduction=reduction)
        one = torch.ones_like(loss)
        assert made(lambda loss=loss, one=one: torch.autograd.grad(loss, images, one)) == [10240, *held]


def test_two_dimensions_are_rolled_one_after_the_other() -> None:
    x = zeros(10, 9)
    assert sequence(lambda: torch.fft.fftshift(x)) == "+360 +360 -0"


def test_windows_gradient_numbers_the_places() -> None:
    x, gradient = zeros(100, grad=True), zeros(11, 20)
    out = x.unfold(0, 20, 8)
    assert made(lambda: torch.autograd.grad(out, x, gradient)) == [400, 800]


def test_group_norms_factors_outlive_the_sums_by_group() -> None:
    x, weight = zeros(4, 32, 8, 8, grad=True), zeros(32, grad=True)
    out = F.group_norm(x, 8, weight, weight)
    gradient = zeros(4, 32, 8, 8)
    found = sequence(lambda: torch.autograd.grad(out, (x, weight), gradient))
    # 128 samples' channels and 32 groups: sums by channel (3, 4), by group (5, 6), factors (7).
    assert "+512 +512 +128 +128 +512 -6 -5 -7 -4 -3" in found


def test_places_of_an_index_go_in_order() -> None:
    x, index, values = zeros(100, 16, 4), zeros(50, dtype=torch.int64), zeros(50, 4)
    found = steps(lambda: x.index_put((index, index), values, accumulate=True))
    assert found[1:9] == [
        ("alloc", 8), ("alloc", 8), ("alloc", 1), ("free_requested", 1), ("alloc", 1), ("free_requested", 1),
        ("free_requested", 8), ("free_requested", 8),
    ]  # fmt: skip


def test_norms_and_maxima_of_lists_have_a_place_for_each_piece() -> None:
    several, with_none = [zeros(3), zeros(70000)], [zeros(0), zeros(3)]
    assert sequence(lambda: torch._foreach_max(several)) == "+4 +4 +16 -2"
    assert sequence(lambda: torch._foreach_norm(with_none)) == "+8 +4 +4 +4 -2 -0"
    gpu.turn_off()
    gpu.turn_on("A100-40GB,torch=2.9")
    several = [zeros(3), zeros(70000)]
    # The room for the pieces came first, and before 2.3 one list of all norms.
    assert sequence(lambda: torch._foreach_max(several)) == "+16 +4 +4 -0"
    gpu.turn_off()
    gpu.turn_on("A100-40GB,torch=2.2")
    several = [zeros(3), zeros(70000)]
    assert sequence(lambda: torch._foreach_norm(several)) == "+16 +8 -0"
    gpu.turn_off()
    gpu.turn_on("A100-40GB,torch=2.3")
    several = [zeros(3), zeros(70000)]
    assert sequence(lambda: torch._foreach_norm(several)) == "+16 +4 +4 -0"


@pytest.mark.parametrize("name", ["addcdiv", "addcmul"])
def test_numbers_of_a_list_may_come_in_a_host_tensor(name: str) -> None:
    several = [zeros(3), zeros(700)]
    numbers = torch.tensor([1.0, 2.0])
    assert made(lambda: getattr(torch, f"_foreach_{name}")(several, several, several, numbers)) == [12, 2800]
    assert made(lambda: getattr(torch, f"_foreach_{name}_")(several, several, several, numbers)) == []
    with pytest.raises(RuntimeError, match="Expected scalars to be on CPU"):
        getattr(torch, f"_foreach_{name}")(several, several, several, numbers.cuda())


def test_what_autocast_casts_goes_from_the_first_on() -> None:
    a, b = zeros(8, 8), zeros(8, 16)
    with torch.autocast("cuda", torch.float16):
        torch.mm(a, b)  # cuBLAS's workspace
        # The second is cast first.
        assert sequence(lambda: torch.mm(a, b)) == "+256 +128 +256 -1 -0"


def test_a_matrix_solvers_codes_are_looked_at() -> None:
    x = torch.rand(5, 5, device="cuda")
    assert made(lambda: torch.linalg.cholesky(x)).count(1) == 2


def test_a_search_wants_plain_tensors_of_one_type() -> None:
    row, wanted = zeros(100), zeros(5, dtype=torch.float64)
    assert sequence(lambda: torch.searchsorted(row, wanted)) == "+40 +800 -1"
    columns, others = zeros(100, 2).t(), zeros(2, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert sequence(lambda: torch.searchsorted(columns, others)) == "+80 +800 -1"
        assert sequence(lambda: torch.bucketize(columns, row)) == "+1600 +800 -1"


def test_a_number_that_is_searched_for_comes_in_a_tensor_of_its_own() -> None:
    row, halves = zeros(100, dtype=torch.float64), zeros(100, dtype=torch.float16)
    assert sequence(lambda: torch.searchsorted(row, 0.5)) == "+8 +8 -0"
    # It is converted to the others' type.
    assert sequence(lambda: torch.searchsorted(halves, 0.5)) == "+8 +8 +2 -2 -0"
    # Of an order the ends are looked at.
    order, wanted = torch.arange(100, device="cuda"), zeros(5, dtype=torch.float64)
    assert sequence(lambda: torch.searchsorted(row, wanted, sorter=order)) == "+8 +8 -0 -1 +40"


def test_a_number_is_filled_in_where_the_mask_is_on_the_device_and_the_number_is_not() -> None:
    x, mask = zeros(1000, 16), torch.ones(1000, dtype=torch.bool)

    def filled(mask: Any, value: Any) -> str:
        return sequence(lambda: x.__setitem__(mask, value))

    on_device = mask.cuda()
    assert filled(on_device, 1.0) == ""
    # The number, and the places that the host finds.
    assert filled(mask, 1.0) == "+4 +8000 -1 -0"
    assert "+8000" in filled(on_device, torch.ones((), device="cuda"))
